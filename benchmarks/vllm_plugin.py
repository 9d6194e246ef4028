"""vLLM with its own scheduler against the same vLLM with the plug-in, over HTTP: how much more load keeps its promises?

    python benchmarks/vllm_plugin.py [--trace FILE] [--requests 150] [--seeds 3] [--out DIR] [--json FILE]

Three tiers, their SLOs fixed multiples of what stock vLLM needs unloaded (the demo's). The rate that stock vLLM holds
(90 % attained) is searched first, or given; then each contender gets the same requests at the same times, at factors of
that rate, several seeds. Contenders: stock; stock with each token budget of `--budgets`, and with its own admission
control at each of `--queued-requests` and `--queued-tokens` (with the first seed; the best of each kind goes on); stock
with its priority scheduling by tier; and the plug-in with each `--policy`. Each is a server of its own on all cores,
its prefix cache on and emptied before each cell; while one is asked the others sleep; they take turns, in another order
each cell.

Before each factor and seed stock is measured unloaded again: the SLOs are multiples of that, and the rates follow it,
for machines whose speed changes from one quarter of an hour to the next.

A cell (contender, factor, seed) is written to `--out` as it ends; started again, the script goes on where it was. After
each cell the summary is written anew: attainment, latency, each contender's capacity at 90 % by interpolation and its
ratio to the best stock's, and below factor 1 the medians of TTFT and TPOT over stock's, paired by seed (as many as
`--paired-seeds`, without the tuned stocks). Capacity is of the first seeds of which all cells are there.

`--trace` takes what `rubato bench --trace` takes, its lengths cut (`--longest-prompt`, `--longest-output`) and its own
texts where it has some; each seed gets another part of it. Tiers are the trace's where they are ours; by the promise
where it says one (AdaServe's: code is a multiple, chat is read along, the rest summaries); else by their shares.

With 150 requests a cell and six contenders the cells take about 4 hours where stock holds 1.5 requests/s, 6 at 1/s and
8 at 0.7/s, the search up to 40 minutes more (two cores without AVX-512, float32: some 0.7 to 1/s is expected). An
estimate is printed once servers are up.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from _capacity_estimate import CLOSE, next_rate
from _load_clients import LoadClients
from _vllm_plugin_summary import STOCK, Baseline, cost, going_on, shown, summary
from _vllm_servers import CONTEXT, MODEL, Contender, Server, contenders, forget, group_cpu, machine_cpu, plans, serving
from vllm_env import ROOT, ensure_env, interpreter

from rubato import policies
from rubato.core.request import SLO
from rubato.demo.runs import UNLOADED_PROMPT_TOKENS, Unloaded, kinds
from rubato.fleet.cluster_options import PolicyChoice
from rubato.measure import results
from rubato.measure.http_client import Endpoint
from rubato.measure.records import BenchResult
from rubato.workloads import Workload, arrivals, traces
from rubato.workloads.generate import make
from rubato.workloads.request_kinds import code

TEMPLATE = 64  # tokens of the model's chat template, at most
READ_ALONG = 0.1  # seconds a token; of a trace's promises those above are no chat's
DRAIN, BEYOND = 15.0, 1.2  # for the estimate: seconds to finish a cell; the most that is served, in rates held


@dataclass(frozen=True)
class Cell:
    contender: Contender
    factor: float
    seed: int

    @property
    def file(self) -> str:
        return f"{self.contender.slug}@{self.factor:g}-seed{self.seed}.json"


def planned(contending: Sequence[Contender], factors: Sequence[float], seeds: int, paired: int) -> list[Cell]:
    """All cells, contenders next to each other, in another order each time. Seeds beyond `seeds` are for the pairs
    below capacity."""
    cells: list[Cell] = []
    for seed in range(1, max(seeds, paired) + 1):
        for turn, factor in enumerate(factors):
            here = list(contending)
            if seed > seeds:
                here = [c for c in here if factor < 1.0 and (c.plugin or c.label == STOCK)]
            for index in range(len(here)):
                cells.append(Cell(here[(index + turn + seed) % len(here)], factor, seed))
    return cells


# --------------------------------------------------------------------------- what is asked


class Load:
    """The requests: made from a seed, so that every contender gets the same."""

    def __init__(self, model: Path, args: argparse.Namespace) -> None:
        from rubato_torch.tokenizer import Text

        self._text = Text(model)
        self.slos: dict[str, SLO] = {}
        self._process = None if args.arrivals == "trace" else arrivals.parse(args.arrivals)
        self._longest = (args.longest_prompt, args.longest_output)
        self._trace = traces.read(args.trace) if args.trace else None

    def _count(self, content: str) -> int:
        return len(self._text.encode(content))

    def mix(self, name: str, rate: float, count: int, seed: int) -> Workload:
        if self._trace is None:
            mixed = kinds(self.slos)
            return make(
                name, mixed, rate, count=count, seed=seed, count_tokens=self._count, arrivals=self._process
            )  # fmt: skip
        offers = self._trace.offers
        if len(offers) < count:
            raise SystemExit(f"the trace has {len(offers)} requests, a cell {count}: give fewer --requests")
        first = seed * count % (len(offers) - count + 1)
        part = [self._fitted(offer, offers[first].at) for offer in offers[first : first + count]]
        return traces.make(
            name, replace(self._trace, offers=tuple(part)), kinds(self.slos), rate=rate, arrivals=self._process,
            seed=seed, count_tokens=self._count,
        )  # fmt: skip

    def _fitted(self, offer: traces.TraceRequest, begin: float) -> traces.TraceRequest:
        """In one of our tiers, cut to the longest prompt and output."""
        tier = offer.tier if offer.tier in self.slos else ""
        if not tier and (offer.tpot is not None or offer.tpot_slowdown is not None):
            tier = "code" if offer.tpot is None else "chat" if offer.tpot < READ_ALONG else "summary"
        most, output = self._longest
        prompt, text = offer.prompt, offer.text
        if text:
            ids = self._text.encode(text)
            prompt = len(ids)
            text = self._text.decode(ids[:most]) if prompt > most else text
        return traces.TraceRequest(
            offer.at - begin, min(prompt, most), min(offer.output, output), tier=tier, text=text
        )  # fmt: skip

    def alone(self) -> Iterator[Workload]:
        """Seven requests, one at a time."""
        kind = code(SLO(), prompt=(UNLOADED_PROMPT_TOKENS, UNLOADED_PROMPT_TOKENS), output=(16, 16))
        made = make("unloaded", [kind], 1.0, count=7, seed=0, count_tokens=self._count)
        for arrival in made.arrivals:
            yield replace(made, arrivals=(replace(arrival, at=0.0),), duration=1.0)

    def burst(self) -> Workload:
        """Sixteen at once: every server has run batches of all sizes before it is measured."""
        made = make("warm-up", kinds(self.slos), 1.0, count=16, seed=0, count_tokens=self._count)
        return replace(made, arrivals=tuple(replace(a, at=0.0) for a in made.arrivals), duration=1.0)


def ask(clients: LoadClients, server: Server, load: Workload) -> BenchResult:
    """Raises SystemExit when the server has ended: what was measured so far is kept, and can be gone on from."""
    target = Endpoint(server.url, MODEL, tier_field=server.contender.slos, order=server.order)
    run = clients.offer(load, target, server.contender.label)
    if server.process.poll() is not None or all(record.status is None for record in run.records):
        raise SystemExit(f"{server.contender.label}: its server has ended, see its log; start again to go on")
    return run


def unloaded(clients: LoadClients, server: Server, load: Load) -> Unloaded:
    forget(server)
    records = [ask(clients, server, one).records[0] for one in load.alone()]
    ttft, tpot = ([v for r in records if (v := getattr(r.verdict, name))] for name in ("ttft", "tpot"))
    if len(ttft) + len(tpot) < 14:
        raise SystemExit(f"the unloaded measurement failed: {[r.reason for r in records if r.reason]}")
    return Unloaded(statistics.median(ttft), statistics.median(tpot))


def search(
    clients: LoadClients, server: Server, load: Load, base: Baseline, args: argparse.Namespace, path: Path
) -> None:
    """Rates are tried on stock until the one that it holds lies between two that are close."""
    while (rate := next_rate(base.tries, base.start)) is not None:
        forget(server)
        run = ask(clients, server, load.mix("hold", rate, count_of(args, rate, args.search_requests), 0))
        base.tries[rate] = sum(r.verdict.met for r in run.records) / len(run.records)
        base.write(path)
        say(f"  stock at {rate:.2f}/s: attainment {base.tries[rate]:.0%} of {len(run.records)}")


def measured(clients: LoadClients, server: Server, cell: Cell, load: Workload, about: dict[str, Any]) -> dict[str, Any]:
    """One contender at one rate with one seed, as its file keeps it; CPU that others used as a share of one core."""
    forget(server)
    group, before = server.process.pid, plans(server)
    begin, busy = time.monotonic(), machine_cpu() - group_cpu(group)
    run = ask(clients, server, load)
    end = time.monotonic()
    rest = machine_cpu() - group_cpu(group) - busy - (run.client.cpu if run.client else 0.0)
    lines = server.steps.read_text().splitlines() if server.steps.exists() else []
    timed = [[float(v) for v in line.split()] for line in lines]
    for problem in run.problems:
        say(f"  {server.contender.label}: {problem}")
    return {
        "contender": cell.contender.label,
        "plugin": cell.contender.plugin,
        "tuned": cell.contender.tuned,
        "factor": cell.factor,
        "seed": cell.seed,
        "vllm": server.version,
        "ended": datetime.now(UTC).isoformat(timespec="seconds"),
        **about,
        "seconds": end - begin,
        "others": max(0.0, rest) / (end - begin),
        "plans": {name: count - before.get(name, 0.0) for name, count in plans(server).items()},
        "steps": [line for line in timed if begin <= line[0] <= end],
        "run": results.run_json(run),
    }


def commit() -> dict[str, Any]:
    """Of the working tree, and whether files of it differ."""
    head, changes = (
        subprocess.run(["git", *words.split()], cwd=ROOT, capture_output=True, text=True).stdout.strip()
        for words in ("rev-parse HEAD", "status --porcelain --untracked-files=no -- src benchmarks")
    )
    return {"commit": head, "changed": bool(changes)}


# --------------------------------------------------------------------------- the whole


def count_of(args: argparse.Namespace, rate: float, requests: int) -> int:
    """Requests of a cell at this rate."""
    return max(1, round(rate * args.seconds)) if args.seconds else requests


def duration(cells: Sequence[Cell], args: argparse.Namespace, rate: float) -> float:
    """Seconds that these cells take, roughly."""
    offered = [count_of(args, cell.factor * rate, args.requests) / cell.factor for cell in cells]
    return sum(n * max(1.0, cell.factor / BEYOND) / rate + DRAIN for n, cell in zip(offered, cells, strict=True))


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--python", type=interpreter, help="vLLM's interpreter (default: .venv-vllm's, built if need be)"
    )
    parser.add_argument("--model", help="folder of a checkpoint with its tokenizer (default: the bundled model)")
    parser.add_argument("--flags", default="", help="further flags of every server, in one text")
    parser.add_argument("--gpu", action="store_true", help="servers share a GPU's memory, with vLLM's own defaults")
    parser.add_argument("--clients", type=int, default=2, help="processes that offer the load (default 2)")
    parser.add_argument("--requests", type=int, default=150, help="in each cell (default 150)")
    parser.add_argument("--seconds", type=float, help="of load in each cell and at each rate tried, in place of these")
    parser.add_argument("--rate", type=float, help="requests/s that stock vLLM holds (default: searched)")
    parser.add_argument("--search-requests", type=int, default=200, help="for each rate tried (default 200)")
    parser.add_argument("--factors", default="0.5,0.8,1,1.3,1.6", help="times that rate (default 0.5,0.8,1,1.3,1.6)")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--paired-seeds", type=int, default=5, help="below factor 1, of stock and the plug-in (5)")
    parser.add_argument("--budgets", default="128,256", help="token budgets tried of stock vLLM (128,256)")
    parser.add_argument("--queued-requests", default="16,32", help="--max-num-queued-reqs tried of stock (16,32)")
    parser.add_argument("--queued-tokens", default="1000,2000", help="--max-num-queued-tokens tried (1000,2000)")
    parser.add_argument("--priority", action=argparse.BooleanOptionalAction, default=True, help="stock, by tier")
    parser.add_argument(
        "--policy", action="append", help="NAME or NAME:SETTING=VALUE; again; '': none (edf, slos_serve)"
    )
    parser.add_argument("--trace", type=Path, help="lengths, texts and times (default: the bundled kinds)")
    parser.add_argument("--arrivals", default="poisson", help="poisson (default), trace, or as `rubato bench` has it")
    parser.add_argument("--longest-prompt", type=int, default=1024, help="tokens of a trace's prompts (1024)")
    parser.add_argument("--longest-output", type=int, default=64, help="tokens of a trace's outputs (64)")
    parser.add_argument("--dtype", default="float32", help="without --gpu; bfloat16 is faster on CPUs with AMX")
    parser.add_argument("--step-times", action=argparse.BooleanOptionalAction, default=False, help="CPU of schedulers")
    parser.add_argument("--out", type=Path, default=ROOT / "results" / "vllm_plugin", help="where cells are kept")
    parser.add_argument("--json", type=Path, help="the summary's file (default: summary.json in --out)")
    args = parser.parse_args()
    check(args, parser)
    if args.longest_prompt + args.longest_output > CONTEXT - TEMPLATE:
        parser.error(f"--longest-prompt and --longest-output: together at most {CONTEXT - TEMPLATE}")
    if args.arrivals == "trace" and not args.trace:
        parser.error("--arrivals trace needs --trace")
    return args


def check(args: argparse.Namespace, parser: argparse.ArgumentParser) -> None:
    """Ends with what is wrong, before a server starts. Factors are numbers from then on."""
    for name in ("requests", "seeds", "clients", "search_requests", "seconds", "rate"):
        if (value := getattr(args, name)) is not None and not 0 < value < math.inf:
            parser.error(f"--{name.replace('_', '-')} {value}: give a number above 0")
    for given, what in ((args.trace, "trace"), (args.model, "model")):
        if given is not None and not Path(given).exists():
            parser.error(f"--{what} {given}: no such file")
    try:
        args.factors = [float(f) for f in args.factors.split(",")]
        if not all(0 < f < math.inf for f in args.factors):
            raise ValueError("a factor is not above 0")
        for tried in (args.budgets, args.queued_requests, args.queued_tokens):
            list(map(int, filter(None, tried.split(","))))
        if args.arrivals != "trace":
            arrivals.parse(args.arrivals)
        for choice in map(PolicyChoice.parse, filter(None, args.policy or ())):
            policies.load(choice.policy, choice.settings)
    except ValueError as error:  # of policies, too
        parser.error(f"{error}; numbers are given as 1,1.3 and policies as NAME:SETTING=VALUE")


def bundled() -> str:
    from rubato_torch import bundled_model

    return str(bundled_model.ensure())


def main() -> None:
    args = options()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the servers end too
    began, code_of = time.monotonic(), commit()
    args.out.mkdir(parents=True, exist_ok=True)
    model, python = args.model or bundled(), args.python or ensure_env()
    load, path = Load(Path(model), args), args.out / "baseline.json"
    names = (
        "requests",
        "seconds",
        "rate",
        "flags",
        "gpu",
        "clients",
        "search_requests",
        "arrivals",
        "longest_prompt",
        "longest_output",
        "dtype",
        "step_times",
    )
    asked = {name: getattr(args, name) for name in names} | {"trace": args.trace.name if args.trace else None}
    asked["model"] = Path(args.model).name if args.model else None
    base = Baseline.read(path, asked)
    factors = args.factors
    contending = contenders(args)
    cells = planned(contending, factors, args.seeds, args.paired_seeds)
    missing = [cell for cell in wanted(cells, args.out) if not (args.out / cell.file).exists()]
    needed = [c for c in contending if c.label == STOCK or any(cell.contender == c for cell in missing)]
    say(f"{len(cells)} cells, {len(missing)} of them to measure; {len(needed)} servers")
    with contextlib.ExitStack() as stack:
        clients = stack.enter_context(LoadClients(args.clients))
        servers = {}
        for contender in needed if missing else ():
            servers[contender] = stack.enter_context(serving(contender, python, model, args, len(contending)))
        say(f"servers are ready after {time.monotonic() - began:.0f} s")
        if base.alone is None:
            base.alone = unloaded(clients, servers[contending[0]], load)
            base.write(path)
        load.slos = base.alone.slos()
        say(f"stock unloaded: TTFT of {UNLOADED_PROMPT_TOKENS} tokens {base.alone.ttft:.3f} s, "
            f"a decode step {base.alone.step:.4f} s; "
            + ", ".join(f"{t} {s.ttft:.2f} and {s.tpot:.3f} s" for t, s in load.slos.items()))  # fmt: skip
        for server in servers.values():
            server.order = tuple(sorted(load.slos, key=lambda t: (load.slos[t].ttft or 0.0, load.slos[t].tpot or 0.0)))
            ask(clients, server, load.burst())
        if args.rate is None and missing:
            guess = duration(missing, args, base.start) / 3600
            say(f"some {guess:.1f} h after the search, if stock holds {base.start:.2f}/s; within a factor of {CLOSE}:")
            search(clients, servers[contending[0]], load, base, args, path)
        rate = args.rate or base.rate()
        say(f"stock holds {rate:.2f}/s; some {duration(missing, args, rate) / 3600:.1f} h from here")
        group, speed = (0.0, 0), 1.0
        for cell in missing:
            if cell not in wanted(cells, args.out):
                continue
            if (cell.factor, cell.seed) != group:
                group, now = (cell.factor, cell.seed), unloaded(clients, servers[contending[0]], load)
                load.slos, speed = now.slos(), base.speed(now)
                say(f"  the machine is {speed:.2f} times as fast as at the search")
            offered = cell.factor * rate * speed
            part = load.mix("cell", offered, count_of(args, cell.factor * rate, args.requests), cell.seed)
            row = measured(clients, servers[cell.contender], cell, part, {**code_of, "speed": speed})
            scratch = args.out / "writing"
            scratch.write_bytes(results.as_json(row))
            scratch.replace(args.out / cell.file)  # whole or not at all
            met = row["run"]["requests"]["met"]
            what = f"{cell.factor:g} × {rate * speed:.2f}/s, seed {cell.seed}, {cell.contender.label}"
            noise = f"others used {row['others']:.0%} of a core; {row['seconds']:.0f} s"
            say(f"  {what}: met {sum(met)} of {len(met)}; {noise}")
            report(args, cells, base, rate, factors)
    print(shown(report(args, cells, base, rate, factors)))
    if args.step_times:
        print(f"\nCPU of the engine core's thread, per step that ran something:\n\n{cost(rows_of(args.out, cells))}")
    say(f"{time.monotonic() - began:.0f} s in all")


def wanted(cells: Sequence[Cell], folder: Path) -> Sequence[Cell]:
    """Once all cells of the first seed are there, of values of one setting only the best is wanted with others."""
    if not all((folder / cell.file).exists() for cell in cells if cell.seed == 1):
        return cells
    best = going_on(rows_of(folder, cells), list(dict.fromkeys(cell.contender.label for cell in cells)))
    return [cell for cell in cells if cell.seed == 1 or cell.contender.label in best]


def rows_of(folder: Path, cells: Sequence[Cell]) -> list[dict[str, Any]]:
    return [json.loads(file.read_bytes()) for cell in cells if (file := folder / cell.file).exists()]


def report(
    args: argparse.Namespace, cells: Sequence[Cell], base: Baseline, rate: float, factors: Sequence[float]
) -> dict[str, Any]:
    """Write the summary of the cells that are there."""
    told = summary(rows_of(args.out, cells), base, rate, args.seeds, factors)
    target = args.json or args.out / "summary.json"
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_bytes(results.as_json(told))
    return told


if __name__ == "__main__":
    main()
