"""How often a verified tree changes a greedy token of the bundled model: in float32 never, in bfloat16 as often as any
other batch shape does.

    python benchmarks/draft_losslessness.py [--dtypes float32,bfloat16] [--prompts 50] [--tokens 64] [--json FILE]

The reference is each request by itself, without drafts. Then the same requests run together, with KV so scarce that
they are preempted: in mixed batches without drafts, and with random parts of drafted trees verified beside prefill
chunks and decodes. There each position is given the reference's token, whatever the model makes of it (teacher
forcing): one flip brings no other, and where a sequence's first one is, its free output would leave the reference's.

A flip: the likeliest token is another than in the reference. gap: how much less likely that token was in the reference,
in logits and in bfloat16 units of the larger logit (its last place). shift: how the difference of the reference's two
likeliest logits changes from run to run, the noise that a gap is to be compared with; a flip is a tie where the gap is
at most four times its root mean square.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import rubato_torch as torch_engine
from rubato.core.request import Request, Sampling
from rubato_torch import Engine, bundled_model, trees
from rubato_torch.drafters import Drafter
from rubato_torch.drafters.suffix import SuffixDrafter
from rubato_torch.model import bytes_per_token
from rubato_torch.model_config import load_config
from rubato_torch.sequence import Sequence as Running

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from tests.engines.driver import Driver, started_behind_replica
from tests.engines.torch.harness import Harness, Toy, mixed_requests

BLOCK, BLOCKS = 16, 64
CHUNKS = (1, 8, 30, 120)
TOP = 8
TIE = 4.0  # times the root mean square of the shifts
Tokens = Mapping[str, Sequence[int]]


@dataclass(frozen=True)
class Row:
    """The model's opinion of one position: the likeliest token, its `TOP` highest logits, and how deep in a verified
    tree the row was (0: no candidate's)."""

    likeliest: int
    logits: dict[int, float]
    depth: int


Rows = Mapping[tuple[str, int], Row]  # by sequence and position


@dataclass
class Recorder:
    """Stands in for the engine's `accept`. truth: all tokens of each sequence, to be given out whatever the logits say;
    None: the model's own."""

    truth: Tokens | None = None
    rows: dict[tuple[str, int], Row] = field(default_factory=dict)

    def accept(
        self, logits: Tensor, seqs: Sequence[Running], candidates: Mapping[str, trees.Candidates]
    ) -> list[trees.Walk]:
        keys: list[tuple[str, int]] = []
        at: list[int] = []
        depths: list[int] = []
        row = 0
        for seq in seqs:
            id, tree = seq.request.id, candidates.get(seq.request.id)
            for depth, node in enumerate(self._path(seq, tree)):
                keys.append((id, len(seq.tokens) + depth))
                at.append(row + node + 1)
                depths.append(depth)
            row += 1 if tree is None else 1 + len(tree.nodes)
        some = logits[at].float()
        values, ids = some.topk(TOP, -1)
        found = zip(keys, some.argmax(-1).tolist(), ids.tolist(), values.tolist(), depths, strict=True)
        for key, likeliest, top, logit, depth in found:
            assert key not in self.rows, "each position is sampled once"
            self.rows[key] = Row(likeliest, dict(zip(top, logit, strict=True)), depth)
        if self.truth is not None:
            logits = logits.clone()
            logits[at, [self.truth[id][position] for id, position in keys]] = math.inf
        return trees.accept(logits, seqs, candidates)

    def _path(self, seq: Running, tree: trees.Candidates | None) -> list[int]:
        """The last token (-1) and the candidates behind it that hold the truth."""
        path = [-1]
        truth = () if self.truth is None else self.truth[seq.request.id]
        while tree is not None and (position := len(seq.tokens) + len(path) - 1) < len(truth):
            offered = zip(tree.parents, tree.tokens, strict=True)
            wanted = (path[-1], truth[position])
            hit = next((i for i, node in enumerate(offered) if node == wanted), None)
            if hit is None:
                break
            path.append(hit)
        return path


@dataclass(frozen=True)
class Flip:
    """gap: how far the token that won was behind in the reference (at least, where it was not among the `TOP`); ahead:
    how far it was ahead here. Both in logits; ulps: the gap in bfloat16 units."""

    sequence: str
    position: int
    depth: int
    gap: float
    ahead: float
    ulps: float


@dataclass(frozen=True)
class Result:
    """One way to run the requests, against the reference. first: per sequence that flipped, output tokens before it
    did. not_as_mixed: positions whose likeliest token is another than in mixed batches without drafts."""

    dtype: str
    run: str
    sequences: int
    positions: int
    flips: list[Flip]
    first: list[int]
    shift: float
    largest_shift: float
    node_positions: int
    node_shift: float
    preemptions: int
    branched: int
    accepted: int
    not_as_mixed: int

    @property
    def beyond_ties(self) -> list[Flip]:
        return [flip for flip in self.flips if flip.gap > TIE * self.shift]


def compared(
    dtype: str, name: str, reference: Rows, rows: Rows, mixed: Rows, run: Harness, prompts: Mapping[str, int]
) -> Result:
    """rows: of this run; mixed: of mixed batches without drafts; prompts: tokens of each."""
    assert reference.keys() == rows.keys(), "not the same positions were sampled"
    flips: list[Flip] = []
    shifts: list[tuple[int, float]] = []
    for (id, position), row in sorted(rows.items()):
        base = reference[id, position]
        (one, high), (two, low) = list(base.logits.items())[:2]
        if one in row.logits and two in row.logits:
            shifts.append((row.depth, row.logits[one] - row.logits[two] - (high - low)))
        if row.likeliest != base.likeliest:
            gap = high - base.logits.get(row.likeliest, min(base.logits.values()))
            ahead = row.logits[row.likeliest] - row.logits.get(base.likeliest, min(row.logits.values()))
            unit = 2.0 ** (math.floor(math.log2(abs(high))) - 7)
            flips.append(Flip(id, position - prompts[id], row.depth, gap, ahead, gap / unit))
    first: dict[str, int] = {}
    for flip in flips:
        first.setdefault(flip.sequence, flip.position)
    nodes = [shift for depth, shift in shifts if depth]
    return Result(
        dtype,
        name,
        len(prompts),
        len(reference),
        flips,
        list(first.values()),
        _rms([shift for _, shift in shifts]),
        max(abs(shift) for _, shift in shifts),
        sum(row.depth > 0 for row in rows.values()),
        _rms(nodes),
        run.preempted,
        run.branched,
        run.accepted,
        sum(row.likeliest != mixed[key].likeliest for key, row in rows.items()),
    )


def _rms(values: Sequence[float]) -> float:
    return math.sqrt(statistics.fmean(x * x for x in values)) if values else 0.0


def engine(folder: Path, dtype: str, recorder: Recorder, drafter: Drafter | None = None) -> Engine:
    torch_engine.accept = recorder.accept  # type: ignore[attr-defined]
    gib = BLOCKS * BLOCK * bytes_per_token(load_config(folder), getattr(torch, dtype)) / 2**30
    return Engine(folder, dtype=dtype, device="cpu", kv_gib=gib, block_size=BLOCK, threads=1, drafter=drafter)


def measured(folder: Path, dtype: str, prompts: int, tokens: int, seed: int) -> list[Result]:
    recorder = Recorder()
    truth: dict[str, list[int]] = {}
    with Driver(engine(folder, dtype, recorder)) as drive:
        sampling = Sampling(max_tokens=tokens, ignore_eos=True)
        requests = mixed_requests(drive.engine.text, prompts, sampling, seed)  # type: ignore[attr-defined]
        for request in requests:
            drive.add_request(request)
            drive.run()
            truth[request.id] = [*request.stages[0].token_ids, *drive.ids[request.id]]
    reference = recorder.rows
    print(f"{dtype}: {len(reference)} positions one at a time", file=sys.stderr)
    runs: dict[str, Callable[[], Drafter | None]] = {
        "mixed batches": lambda: None,
        "suffix trees": SuffixDrafter,
        "trees mostly right": lambda: Toy(random.Random(seed), 0.9, truth),
    }
    found: list[Result] = []
    mixed: Rows = {}
    for name, drafter in runs.items():
        recorder = Recorder(truth)
        run = together(engine(folder, dtype, recorder, drafter()), requests, seed)
        mixed = mixed or recorder.rows  # of the first run
        found.append(compared(dtype, name, reference, recorder.rows, mixed, run, {r.id: r.prompt for r in requests}))
        print(f"{dtype}: {name}, {len(found[-1].flips)} flips", file=sys.stderr)
    return found


def together(run: Engine, requests: Sequence[Request], seed: int) -> Harness:
    replica, loop = started_behind_replica(run, False)
    try:
        harness = Harness(run, replica, loop, random.Random(seed), CHUNKS)
        harness.run(requests)
    finally:
        loop.run_until_complete(run.close())
        loop.close()
    return harness


HEAD = (
    "dtype", "run", "positions", "flips", "not as in mixed batches",
    "sequences with one", "first after (median)", "gap: median, most",
    "bfloat16 units: median, most", "shift: rms, most", "no tie", "of rows in trees: share, flips, shift",
    "preemptions", "branched trees", "accepted",
)  # fmt: skip


def line(r: Result) -> str:
    gaps, ulps = sorted(flip.gap for flip in r.flips), sorted(flip.ulps for flip in r.flips)
    nodes = [flip for flip in r.flips if flip.depth]
    cells = (
        r.dtype,
        r.run,
        f"{r.positions}",
        f"{len(r.flips)} ({len(r.flips) / r.positions:.2%})",
        f"{r.not_as_mixed}",
        f"{len(r.first)} of {r.sequences}",
        f"{statistics.median(r.first):.0f}" if r.first else "",
        f"{statistics.median(gaps):.3f}, {gaps[-1]:.3f}" if gaps else "",
        f"{statistics.median(ulps):.1f}, {ulps[-1]:.1f}" if ulps else "",
        f"{r.shift:.2g}, {r.largest_shift:.2g}",
        f"{len(r.beyond_ties)}",
        f"{r.node_positions / r.positions:.0%}, {len(nodes) / r.node_positions:.2%}, {r.node_shift:.2g}"
        if r.node_positions
        else "",
        f"{r.preemptions}",
        f"{r.branched}",
        f"{r.accepted}",
    )
    return "| " + " | ".join(cells) + " |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtypes", default="float32,bfloat16", help="default float32,bfloat16")
    parser.add_argument("--prompts", type=int, default=50, help="chats, code and summaries in turn (default 50)")
    parser.add_argument("--tokens", type=int, default=64, help="output tokens of each (default 64)")
    parser.add_argument("--seed", type=int, default=1, help="of prompts, plans and drafts (default 1)")
    parser.add_argument("--json", type=Path, help="write the results, every flip among them, to this file")
    options = parser.parse_args()
    folder = bundled_model.ensure()
    results: list[Result] = []
    for dtype in options.dtypes.split(","):
        results += measured(folder, dtype, options.prompts, options.tokens, options.seed)
    print("\n".join(["| " + " | ".join(HEAD) + " |", "|---" * len(HEAD) + "|", *map(line, results)]))
    for r in results:
        for flip in r.beyond_ties:
            print(f"no tie: {r.dtype}, {r.run}: {flip}")
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        report: list[dict[str, Any]] = [asdict(r) for r in results]
        options.json.write_text(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
