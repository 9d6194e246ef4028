"""Step time of Rubato's torch engine beside vLLM's CPU engine: same model folder, same token ids, same cores.

    python benchmarks/engine_vs_vllm.py [--rounds 12] [--cases decode1,decode8,decode32,prefill1400] [--json FILE]

A step is plan + execute + commit on both sides. Each engine is one long-lived process; in each round each runs one
block of steps while the others sleep, in random order, so that a neighbour's load falls on all alike. Reported are
medians over all steps, the ratio of medians (ours / vLLM's), and its 95 % interval by a bootstrap over rounds.
The first run builds `.venv-vllm` (about 3.5 GB on disk). Method and figures: docs/measurements/results-without-data.md
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal

import numpy as np
from _vllm_side import BEST, CLOCK, TUNINGS, Step, serve, vllm_settings, vllm_variables
from vllm_env import REQUIREMENTS, ensure_env

ROOT = Path(__file__).resolve().parents[1]
FIRST_ID, LAST_ID = 100, 49_000  # prompt ids are drawn from these: ordinary tokens of the bundled model
CONTEXT = 192, 320  # a decode case's context grows through this window, then its sequences are replaced
OURS = "rubato"  # the name of our side
POLICY = "vllm"  # ours, the same rule as vLLM's scheduler
MAX_TOKENS = 2048  # of one batch
MAX_SEQS = 64
MAX_LENGTH = 4096
KV_GIB = 1  # of KV memory

NOISE = 0.15  # a round during which other programs used more than this much of a core is repeated
PATIENCE = 3  # up to this many times the rounds asked for


@dataclass(frozen=True, slots=True)
class Case:
    """seqs sequences of which one step runs `tokens` tokens each; a block times `steps` steps after `warm` others."""

    name: str
    seqs: int
    tokens: int
    steps: int
    warm: int


CASES = {
    c.name: c
    for c in (
        Case("decode1", 1, 1, 60, 3),
        Case("decode8", 8, 1, 40, 3),
        Case("decode32", 32, 1, 20, 3),
        Case("prefill1400", 1, 1400, 2, 0),
    )
}


# --------------------------------------------------------------------------- Rubato's side (its own process)


def rubato_engine(model: str, threads: int | Literal["auto"], dtype: str = "auto", form: str = "") -> Any:
    """The torch engine as it serves, with the limits that vLLM gets. form: of the weights (a class of `products`)."""
    from rubato_torch import Engine, weights
    from rubato_torch.cpu import matmul_backends

    if form:
        forced = matmul_backends.Choice(getattr(matmul_backends, form), f"{form}, by the benchmark")
        weights.choose = lambda weight: forced  # type: ignore[attr-defined]
    limits: dict[str, Any] = {
        "max_num_seqs": MAX_SEQS,
        "max_num_batched_tokens": MAX_TOKENS,
        "max_model_len": MAX_LENGTH,
    }
    return Engine(model, dtype=dtype, threads=threads, kv_gib=KV_GIB, **limits)


class RubatoSide:
    """What `rubato.fleet.local_host` does in a step, one step at a time: plan, execute, commit, tell the policy and the
    model."""

    def __init__(self, settings: dict[str, Any]) -> None:
        from rubato.latency import affine
        from rubato.policies import load
        from rubato.replica.replica import Replica

        self.engine = rubato_engine(**settings)
        self.latency = affine.Model()
        self.loop = asyncio.new_event_loop()
        self.loop.run_until_complete(self.engine.start())
        self.replica = Replica("bench", self.engine.limits, self.latency, supports=self.engine.supports)
        self.policy = load(POLICY, {"budget": MAX_TOKENS})
        self.seen = 0
        self.prefilling: set[str] = set()
        self.live: set[str] = set()

    def describe(self) -> dict[str, Any]:
        import torch

        return {
            "engine": f"rubato {version('rubato-llm')}",
            "torch": torch.__version__,
            "threads": torch.get_num_threads(),
            "products": self.engine._model.weights.products.why,
            "memory_mib": _own_memory(),
            "affinity": sorted(os.sched_getaffinity(0)),
            "policy": POLICY,
            "latency": type(self.latency).__module__,
            "limits": asdict(self.engine.limits),
        }

    def add(self, prompts: list[list[int]], max_tokens: int) -> None:
        from rubato.core.request import Request, Sampling, Stage

        for ids in prompts:
            name = f"r{self.seen}"
            self.seen += 1
            now = CLOCK()
            sampling = Sampling(max_tokens=max_tokens, ignore_eos=True)
            request = Request(name, (Stage(len(ids), token_ids=tuple(ids)),), now, sampling=sampling)
            refused = self.replica.submit(request, now)
            if refused:
                raise RuntimeError(f"the replica refused a prompt of {len(ids)} tokens: {refused}")
            self.engine.add(request)
            self.prefilling.add(name)
            self.live.add(name)

    def step(self) -> Step:
        return self.loop.run_until_complete(self._step())

    async def _step(self) -> Step:
        from rubato.core.events import Finished, Tokens
        from rubato.core.plan import Sample

        begin = CLOCK()
        plan = self.policy.plan(self.replica.view(begin))
        batch, events = self.replica.apply(plan, begin, POLICY)
        planned = CLOCK()
        result = await self.engine.execute(batch)
        executed = CLOCK()
        events += self.replica.commit(batch, result, executed)
        self.latency.update(Sample(batch.shape, result.seconds))
        self.policy.observe(events)
        self.engine.forget(self.replica.take_gone_ids())
        end = CLOCK()
        self.prefilling -= {e.id for e in events if isinstance(e, Tokens)}
        self.live -= {e.id for e in events if isinstance(e, Finished)}
        sampled = sum(e.tokens for e in events if isinstance(e, Tokens))
        return Step(end - begin, planned - begin, end - executed, batch.shape.tokens, batch.shape.seqs, sampled)

    def waiting(self) -> int:
        return len(self.prefilling)

    def clear(self) -> None:
        for name in self.live:
            self.replica.cancel(name, CLOCK(), "benchmark")
        self.engine.forget(self.replica.take_gone_ids())
        self.live.clear()
        self.prefilling.clear()


def _own_memory() -> int:
    """MiB of memory that belong to this process alone: no file's pages, which the system may drop and read again."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) // 1024
    return 0


# --------------------------------------------------------------------------- the parent's view of a side


class Child:
    """One side's process. Its log is kept in a file and shown when it dies."""

    def __init__(self, name: str, command: list[str], variables: dict[str, str], log: Path) -> None:
        self.name = name
        self.log = log
        self.description: dict[str, Any] = {}
        self._err = log.open("w")
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._err,
            text=True,
            env={**os.environ, **variables},
        )

    def ask(self, do: str, **arguments: Any) -> Any:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        try:
            self.process.stdin.write(json.dumps({"do": do, **arguments}) + "\n")
            self.process.stdin.flush()
            line = self.process.stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            raise SystemExit(f"side {self.name!r} died; the end of its log:\n{self.log.read_text()[-3000:]}")
        return json.loads(line)

    def cpu(self) -> float:
        """CPU seconds used so far, all threads."""
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rsplit(")", 1)[1].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        try:
            self.process.wait(timeout=20)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self._err.close()


@dataclass(frozen=True, slots=True)
class Start:
    """How to start a side: its program, the environment's variables it gets, and what it is told first."""

    command: list[str]
    variables: dict[str, str]
    settings: dict[str, Any]


def ours(cores: list[int], variables: dict[str, str] | None = None, **settings: Any) -> Start:
    """The torch engine on so many threads, unless `settings` say how many."""
    given = {"OMP_NUM_THREADS": str(len(cores)), **(variables or {})}
    return Start([sys.executable, str(Path(__file__)), "--as-side"], given, {"threads": len(cores), **settings})


def vllm(tuning: str, cores: list[int], variables: dict[str, str] | None = None) -> Start:
    settings = {**vllm_settings(MAX_TOKENS, MAX_SEQS, MAX_LENGTH), **TUNINGS[tuning]}
    given = {**vllm_variables(settings.pop("omp"), cores, KV_GIB), **(variables or {})}
    return Start([str(ensure_env()), str(Path(__file__).with_name("_vllm_side.py"))], given, settings)


@contextmanager
def children(starts: dict[str, Start], model: str, logs: Path) -> Iterator[dict[str, Child]]:
    """The sides of these names, loaded one after the other, and asleep."""
    logs.mkdir(parents=True, exist_ok=True)
    sides: dict[str, Child] = {}
    try:
        for name, start in starts.items():
            sides[name] = Child(name, start.command, start.variables, logs / f"{name}.log")
            sides[name].description = sides[name].ask("start", model=model, **start.settings)
            print(f"{name} is ready:", json.dumps(sides[name].description), file=sys.stderr)
        yield sides
    finally:
        for child in sides.values():
            child.close()


# --------------------------------------------------------------------------- measuring


@dataclass(slots=True)
class Block:
    """The timed steps of one side in one round, and what else used the machine meanwhile (as a share of one core)."""

    round: int
    side: str
    steps: list[dict[str, Any]]
    idle_sides: float
    others: float


@dataclass(slots=True)
class Measured:
    """One case. Every block is kept; `rounds` are those that count."""

    case: Case
    wanted: int
    blocks: list[Block] = field(default_factory=list)

    @property
    def quiet(self) -> list[int]:
        """Rounds in which other programs left the machine alone."""
        noisy = {b.round for b in self.blocks if b.others > NOISE}
        return sorted({b.round for b in self.blocks} - noisy)

    @property
    def rounds(self) -> list[int]:
        """The quiet ones, or all when too few were: chosen by what others did, never by what was measured."""
        return self.quiet if len(self.quiet) >= self.wanted else sorted({b.round for b in self.blocks})

    def values(self, side: str, what: str = "seconds", rounds: list[int] | None = None) -> list[float]:
        chosen = set(self.rounds if rounds is None else rounds)
        mine = (b for b in self.blocks if b.side == side and b.round in chosen)
        return [float(step[what]) for block in mine for step in block.steps]

    def median(self, side: str, what: str = "seconds") -> float:
        return statistics.median(self.values(side, what))


def measure(case: Case, sides: dict[str, Child], rounds: int, seed: int) -> Measured:
    """Alternate blocks of `case` between the sides. Every side gets the same prompts in the same places."""
    rng = random.Random(f"{seed} {case.name}")
    measured = Measured(case, rounds)
    context = CONTEXT[1]
    for number in range(rounds * PATIENCE):
        order = list(sides)
        rng.shuffle(order)
        prompts: list[list[list[int]]] = []
        if case.tokens > 1:
            prompts = [_prompts(rng, case.seqs, case.tokens) for _ in range(case.steps)]
        elif context + case.warm + case.steps > CONTEXT[1]:
            context = CONTEXT[0]
            fresh = _prompts(rng, case.seqs, context)
            for side in order:
                sides[side].ask("fresh", prompts=fresh, max_tokens=2 * CONTEXT[1], prefill=True)
        context += case.warm + case.steps
        for side in order:
            time.sleep(0.1)  # the side that ran before goes to sleep: OpenMP threads spin for some milliseconds
            measured.blocks.append(_block(case, number, side, sides, prompts))
        if len(measured.quiet) >= rounds:
            break
    return measured


def _block(case: Case, number: int, side: str, sides: dict[str, Child], prompts: list[list[list[int]]]) -> Block:
    child = sides[side]
    begin, busy, used = CLOCK(), _machine_cpu(), {name: s.cpu() for name, s in sides.items()}
    steps: list[dict[str, Any]] = []
    for fresh in prompts:
        child.ask("fresh", prompts=fresh, max_tokens=1, prefill=False)
        steps += child.ask("steps", count=1)
    if not prompts:
        steps = child.ask("steps", count=case.warm + case.steps)[case.warm :]
    wall = CLOCK() - begin
    delta = {name: s.cpu() - used[name] for name, s in sides.items()}
    others = max(0.0, _machine_cpu() - busy - sum(delta.values())) / wall
    for step in steps:
        ran = (step["seqs"], step["tokens"], step["sampled"])
        if ran != (case.seqs, case.seqs * case.tokens, case.seqs):
            raise SystemExit(
                f"case {case.name}: {side} ran a batch of {ran[0]} sequences and {ran[1]} tokens that gave {ran[2]} "
                f"new ones; it should be {case.seqs} sequences of {case.tokens}: the comparison would not be of equals"
            )
    return Block(number, side, steps, sum(d for name, d in delta.items() if name != side) / wall, others)


def _prompts(rng: random.Random, count: int, length: int) -> list[list[int]]:
    return [[rng.randrange(FIRST_ID, LAST_ID) for _ in range(length)] for _ in range(count)]


def _machine_cpu() -> float:
    """CPU seconds that all processes of this machine have used (user, nice, system, irq, softirq, stolen)."""
    user, nice, system, _idle, _wait, irq, soft, steal = map(
        int, Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]
    )
    return (user + nice + system + irq + soft + steal) / os.sysconf("SC_CLK_TCK")


# --------------------------------------------------------------------------- what came out


@dataclass(frozen=True, slots=True)
class Comparison:
    """One case, one side (ours, unless said otherwise) against another. Seconds; ratio = ours / theirs with its 95 %
    interval."""

    case: str
    side: str
    ours: float
    theirs: float
    ratio: float
    low: float
    high: float


def compare(measured: Measured, side: str, own: str = OURS, resamples: int = 4000, seed: int = 0) -> Comparison:
    """Ratio of medians over all steps; percentile bootstrap over rounds, a round being a pair of blocks."""
    rounds = measured.rounds
    mine = [np.array(measured.values(own, rounds=[r])) for r in rounds]
    theirs = [np.array(measured.values(side, rounds=[r])) for r in rounds]
    rng = np.random.default_rng(seed)
    ratios = []
    for _ in range(resamples):
        drawn = rng.integers(0, len(rounds), len(rounds))
        ratios.append(
            float(np.median(np.concatenate([mine[i] for i in drawn])))
            / float(np.median(np.concatenate([theirs[i] for i in drawn])))
        )
    a, b = float(np.median(np.concatenate(mine))), float(np.median(np.concatenate(theirs)))
    low, high = np.percentile(ratios, (2.5, 97.5))
    return Comparison(measured.case.name, side, a, b, a / b, float(low), float(high))


def fastest(measured: Measured, tunings: list[str]) -> str:
    return min(tunings, key=measured.median)


def table(results: list[Measured], tunings: list[str]) -> str:
    lines = [
        "| case | batch: seqs × tokens | steps each | Rubato ms | vLLM ms | ours / vLLM's (95 %) | vLLM's setting |",
        "|---|---|---|---|---|---|---|",
    ]
    for measured in results:
        case, c = measured.case, compare(measured, fastest(measured, tunings))
        lines.append(
            f"| {case.name} | {case.seqs} × {case.tokens} | {len(measured.values(OURS))} | {c.ours * 1e3:.2f} "
            f"| {c.theirs * 1e3:.2f} | {c.ratio:.3f} ({c.low:.3f}–{c.high:.3f}) | {c.side} |"
        )
    return "\n".join(lines)


def tuning_table(results: list[Measured], tunings: list[str]) -> str:
    lines = [f"| median step, ms | {' | '.join(tunings)} |", "|---" * (len(tunings) + 1) + "|"]
    for measured in results:
        medians = (f"{measured.median(side) * 1e3:.2f}" for side in tunings)
        lines.append(f"| {measured.case.name} | {' | '.join(medians)} |")
    return "\n".join(lines)


def control_plane_table(results: list[Measured], sides: list[str]) -> str:
    lines = ["| case | side | plan µs | commit µs | of the step |", "|---|---|---|---|---|"]
    for measured in results:
        for side in sides:
            plan, commit, step = (measured.median(side, what) for what in ("plan", "commit", "seconds"))
            lines.append(
                f"| {measured.case.name} | {side} | {plan * 1e6:.0f} | {commit * 1e6:.0f} "
                f"| {(plan + commit) / step:.2%} |"
            )
    return "\n".join(lines)


def settled(measured: Measured) -> str:
    """What the machine did besides, as medians over the blocks that count: shares of one core."""
    counted = [b for b in measured.blocks if b.round in set(measured.rounds)]
    idle, others = (statistics.median(getattr(b, what) for b in counted) for what in ("idle_sides", "others"))
    tried, quiet = len({b.round for b in measured.blocks}), len(measured.quiet)
    text = f"{measured.case.name}: {quiet} of {tried} rounds were quiet (others under {NOISE:.0%} of a core); "
    if quiet < measured.wanted:
        text += f"too few, so all {tried} COUNT, AND THE FIGURES ARE DISTURBED; "
    return text + f"waiting sides used {idle:.1%} of a core, other programs {others:.1%}"


def report(results: list[Measured], sides: list[str], described: dict[str, Any], model: str) -> dict[str, Any]:
    """Everything measured, for `--json`."""
    tunings = [s for s in sides if s != OURS]
    return {
        "taken": time.strftime("%Y-%m-%d %H:%M:%SZ", time.gmtime()),
        "machine": {"cpu": _cpu_model(), "cores": sorted(os.sched_getaffinity(0)), "system": platform.platform()},
        "python": platform.python_version(),
        "requirements": REQUIREMENTS,
        "model": Path(model).name,
        "sides": described,
        "comparisons": [asdict(compare(m, s)) for m in results for s in tunings if OURS in sides],
        "cases": [asdict(m) for m in results],
    }


def _bundled_model() -> str:
    from rubato_torch import bundled_model

    return str(bundled_model.ensure())


def _cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=12, help="blocks of steps per side and case (default 12)")
    parser.add_argument("--cases", default=",".join(CASES), help=f"of {', '.join(CASES)} (default all)")
    parser.add_argument("--vllm", default=BEST, help=f"vLLM's settings, one or more of {', '.join(TUNINGS)} ({BEST})")
    parser.add_argument("--tune", action="store_true", help="only compare vLLM's settings with each other")
    parser.add_argument("--model", help="a Hugging Face folder (default: the bundled model)")
    parser.add_argument("--control-plane", action="store_true", help="also print what planning and committing take")
    parser.add_argument("--json", type=Path, help="write versions, settings and every sample to this file")
    parser.add_argument("--seed", type=int, default=0, help="of prompts and of the order within a round")
    parser.add_argument("--as-side", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.as_side:
        serve(RubatoSide)
        return
    cases = [_known("--cases", name, CASES) for name in options.cases.split(",")]
    tunings = list(TUNINGS) if options.tune else options.vllm.split(",")
    for name in tunings:
        _known("--vllm", name, TUNINGS)
    if options.rounds < 2:
        parser.error(f"--rounds is {options.rounds}: give at least 2, an interval over rounds needs them")
    model = options.model or _bundled_model()
    cores = sorted(os.sched_getaffinity(0))
    starts = {} if options.tune else {OURS: ours(cores)}
    starts |= {name: vllm(name, cores) for name in tunings}
    names = list(starts)
    with children(starts, model, ROOT / "results" / "engine_vs_vllm") as sides:
        described = {name: child.description for name, child in sides.items()}
        results = []
        for case in cases:
            results.append(measure(case, sides, options.rounds, options.seed))
            print(settled(results[-1]), file=sys.stderr)
    print(tuning_table(results, tunings) if options.tune else table(results, tunings))
    if options.control_plane:
        print("\n" + control_plane_table(results, names))
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(report(results, names, described, model), indent=1))


def _known(option: str, name: str, known: dict[str, Any]) -> Any:
    if name not in known:
        raise SystemExit(f"{option} names {name!r}; known are {', '.join(known)}")
    return known[name]


if __name__ == "__main__":
    main()
