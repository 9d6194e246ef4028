"""vLLM with its own scheduler against the same vLLM with the plug-in, over HTTP: how much more load keeps its promises?

    python benchmarks/vllm_plugin.py [--trace FILE] [--requests 150] [--seeds 3] [--out DIR] [--json FILE]

Three tiers, their SLOs fixed multiples of what stock vLLM needs unloaded (the demo's). The rate that stock vLLM holds
(90 % attained) is searched first, or given; then each contender gets the same requests at the same times, at factors of
that rate, several seeds. Contenders: stock, stock with each token budget of `--budgets` (with the first seed; the best
of them goes on), stock with its priority scheduling by tier, and the plug-in with each `--policy`. Each is a server of
its own on all cores, its prefix cache on and emptied before each cell; while one is asked the others sleep; they take
turns, in another order each cell.

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
import asyncio
import contextlib
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from _capacity_estimate import CLOSE, next_rate
from _vllm_plugin_summary import STOCK, TUNED, Baseline, cost, going_on, shown, summary
from vllm_env import ROOT, ensure_env

from rubato.core.request import SLO
from rubato.demo.runs import PROMPT, Unloaded, kinds
from rubato.fleet.cluster_options import PolicyChoice
from rubato.measure import load_generator, results
from rubato.measure.http_client import Endpoint, TierField
from rubato.measure.records import BenchResult
from rubato.workloads import Workload, arrivals, traces
from rubato.workloads.generate import make
from rubato.workloads.request_kinds import code

HERE = Path(__file__).resolve().parent
MODEL = "smollm2"  # the name it is served under
READY = 240.0  # seconds a server may take to load
CONTEXT, TEMPLATE = 2048, 64  # tokens of the model's context, and of its chat template at most
READ_ALONG = 0.1  # seconds a token; of a trace's promises those above are no chat's
DRAIN, BEYOND = 15.0, 1.2  # for the estimate: seconds to finish a cell; the most that is served, in rates held
FLAGS = (
    "--enforce-eager",
    f"--max-model-len={CONTEXT}",
    "--max-num-seqs=64",
    f"--served-model-name={MODEL}",
    "--host=127.0.0.1",
)


@dataclass(frozen=True)
class Contender:
    """flags: of its server, beside those of all. slos: how requests state theirs. plugin: stock vLLM otherwise."""

    label: str
    flags: tuple[str, ...] = ()
    slos: TierField = "none"
    plugin: bool = False

    def scheduler(self, timed: bool) -> tuple[str, ...]:
        if not timed and not self.plugin:
            return ()
        name = ("_vllm_timed.Timed" + "Rubato" * self.plugin) if timed else "rubato.vllm.Scheduler"
        return ("--scheduler-cls", name)

    @property
    def slug(self) -> str:
        return self.label.replace(", ", "-").replace(" ", "-").replace(":", "-")


@dataclass(frozen=True)
class Cell:
    contender: Contender
    factor: float
    seed: int

    @property
    def file(self) -> str:
        return f"{self.contender.slug}@{self.factor:g}-seed{self.seed}.json"


@dataclass
class Server:
    """A contender's server, running. steps: lines of `_vllm_timed`, if it is timed."""

    contender: Contender
    url: str
    steps: Path
    process: subprocess.Popen[bytes]
    order: tuple[str, ...] = ()  # tiers, the most urgent first


def contenders(budgets: Sequence[int], priority: bool, policies: Sequence[PolicyChoice]) -> list[Contender]:
    made = [Contender(STOCK)]
    made += [Contender(f"{STOCK}, {b}{TUNED}", (f"--max-num-batched-tokens={b}",)) for b in budgets]
    if priority:
        made.append(Contender(f"{STOCK}, priority", ("--scheduling-policy=priority",), "priority"))
    for choice in policies:
        said = {"rubato": {"policy": choice.policy, "settings": dict(choice.settings)}}
        made.append(Contender(choice.label, ("--additional-config", json.dumps(said)), "vllm-xargs", plugin=True))
    return made


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


@contextlib.contextmanager
def serving(contender: Contender, python: Path, model: Path, args: argparse.Namespace) -> Iterator[Server]:
    """Its server from start to end, all cores."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    steps, logfile = args.out / f"{contender.slug}.steps", args.out / f"{contender.slug}.log"
    module = [str(python), "-m", "vllm.entrypoints.openai.api_server"]
    own = ["--model", str(model), "--port", str(port), f"--dtype={args.dtype}", *contender.scheduler(args.step_times)]
    variables = {
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, sorted(os.sched_getaffinity(0)))),
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_SERVER_DEV_MODE": "1",  # for /reset_prefix_cache
        "HF_HUB_OFFLINE": "1",
        "PYTHONPATH": os.pathsep.join(map(str, (HERE, ROOT / "src"))),  # the code of this tree
        "STEPS_FILE": str(steps),
    }
    if not contender.plugin:
        variables["VLLM_PLUGINS"] = ""  # Rubato's, installed beside it, would make vLLM keep more statistics
    with logfile.open("w") as out:
        process = subprocess.Popen(
            [*module, *FLAGS, *own, *contender.flags],
            stdout=out,
            stderr=subprocess.STDOUT,
            env={**os.environ, **variables},
            start_new_session=True,
        )
    try:
        server = Server(contender, f"http://127.0.0.1:{port}", steps, process)
        _wait(server.url, process, logfile)
        yield server
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(30)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # the group that it was started as
        process.wait()


def _wait(url: str, process: subprocess.Popen[bytes], logfile: Path) -> None:
    begin = time.monotonic()
    while True:
        with contextlib.suppress(urllib.error.URLError, ConnectionError), urllib.request.urlopen(f"{url}/health"):
            return
        if process.poll() is not None or time.monotonic() - begin > READY:
            raise SystemExit(f"vLLM did not start:\n{logfile.read_text(errors='replace')[-3000:]}")
        time.sleep(0.5)


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
        kind = code(SLO(), prompt=(PROMPT, PROMPT), output=(16, 16))
        made = make("unloaded", [kind], 1.0, count=7, seed=0, count_tokens=self._count)
        for arrival in made.arrivals:
            yield replace(made, arrivals=(replace(arrival, at=0.0),), duration=1.0)

    def burst(self) -> Workload:
        """Sixteen at once: every server has run batches of all sizes before it is measured."""
        made = make("warm-up", kinds(self.slos), 1.0, count=16, seed=0, count_tokens=self._count)
        return replace(made, arrivals=tuple(replace(a, at=0.0) for a in made.arrivals), duration=1.0)


def ask(server: Server, load: Workload) -> BenchResult:
    """Raises SystemExit when the server has ended: what was measured so far is kept, and can be gone on from."""
    target = Endpoint(server.url, MODEL, tier_field=server.contender.slos, order=server.order)
    run = asyncio.run(load_generator.run(load, target, label=server.contender.label, warmup=0, progress=False))
    if server.process.poll() is not None or all(record.status is None for record in run.records):
        raise SystemExit(f"{server.contender.label}: its server has ended, see its log; start again to go on")
    return run


def forget(server: Server) -> None:
    """Empty its prefix cache: it has seen these prompts at another rate."""
    asked = urllib.request.Request(f"{server.url}/reset_prefix_cache", method="POST")
    with urllib.request.urlopen(asked) as answer:
        answer.read()


def unloaded(server: Server, load: Load) -> Unloaded:
    forget(server)
    records = [ask(server, one).records[0] for one in load.alone()]
    ttft, tpot = ([v for r in records if (v := getattr(r.verdict, name))] for name in ("ttft", "tpot"))
    if len(ttft) + len(tpot) < 14:
        raise SystemExit(f"the unloaded measurement failed: {[r.reason for r in records if r.reason]}")
    return Unloaded(statistics.median(ttft), statistics.median(tpot))


def search(server: Server, load: Load, base: Baseline, count: int, path: Path) -> None:
    """Rates are tried on stock until the one that it holds lies between two that are close."""
    while (rate := next_rate(base.tries, base.start)) is not None:
        forget(server)
        run = ask(server, load.mix("hold", rate, count, 0))
        base.tries[rate] = sum(r.verdict.met for r in run.records) / len(run.records)
        base.write(path)
        say(f"  stock at {rate:.2f}/s: attainment {base.tries[rate]:.0%} of {len(run.records)}")


def measured(server: Server, cell: Cell, load: Workload, about: dict[str, Any]) -> dict[str, Any]:
    """One contender at one rate with one seed, as its file keeps it; CPU that others used as a share of one core."""
    forget(server)
    group, before = server.process.pid, plans(server)
    begin, busy = time.monotonic(), _machine_cpu() - _group_cpu(group) - sum(os.times()[:2])
    run = ask(server, load)
    end = time.monotonic()
    rest = _machine_cpu() - _group_cpu(group) - sum(os.times()[:2]) - busy
    lines = server.steps.read_text().splitlines() if server.steps.exists() else []
    timed = [[float(v) for v in line.split()] for line in lines]
    for problem in run.problems:
        say(f"  {server.contender.label}: {problem}")
    return {
        "contender": cell.contender.label,
        "plugin": cell.contender.plugin,
        "factor": cell.factor,
        "seed": cell.seed,
        "ended": datetime.now(UTC).isoformat(timespec="seconds"),
        **about,
        "seconds": end - begin,
        "others": max(0.0, rest) / (end - begin),
        "plans": {name: count - before.get(name, 0.0) for name, count in plans(server).items()},
        "steps": [line for line in timed if begin <= line[0] <= end],
        "run": results.run_json(run),
    }


def plans(server: Server) -> dict[str, float]:
    """The plug-in's counts of steps not planned, or not carried out as planned."""
    counts: dict[str, float] = {}
    with urllib.request.urlopen(f"{server.url}/metrics") as page:
        for line in page.read().decode().splitlines():
            name = line.partition("{")[0]
            if name.startswith("rubato_plan_") and name.endswith("_total"):
                counts[name] = counts.get(name, 0.0) + float(line.rpartition(" ")[2])
    return counts


def _machine_cpu() -> float:
    """CPU seconds that all processes of this machine have used (user, nice, system, irq, softirq, stolen)."""
    fields = Path("/proc/stat").read_text().split("\n", 1)[0].split()
    return sum(int(fields[i]) for i in (1, 2, 3, 6, 7, 8)) / os.sysconf("SC_CLK_TCK")


def _group_cpu(group: int) -> float:
    """CPU seconds that the processes of this group have used."""
    used = 0
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            fields = stat.read_text().rsplit(")", 1)[1].split()
            if int(fields[2]) == group:
                used += int(fields[11]) + int(fields[12])
    return used / os.sysconf("SC_CLK_TCK")


def commit() -> dict[str, Any]:
    """Of the working tree, and whether files of it differ."""
    head, changes = (
        subprocess.run(["git", *words.split()], cwd=ROOT, capture_output=True, text=True).stdout.strip()
        for words in ("rev-parse HEAD", "status --porcelain --untracked-files=no -- src benchmarks")
    )
    return {"commit": head, "changed": bool(changes)}


# --------------------------------------------------------------------------- the whole


def duration(cells: Sequence[Cell], requests: int, rate: float) -> float:
    """Seconds that these cells take, roughly."""
    return sum(requests / (rate * min(cell.factor, BEYOND)) + DRAIN for cell in cells)


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=150, help="in each cell (default 150)")
    parser.add_argument("--rate", type=float, help="requests/s that stock vLLM holds (default: searched)")
    parser.add_argument("--search-requests", type=int, default=200, help="for each rate tried (default 200)")
    parser.add_argument("--factors", default="0.5,0.8,1,1.3,1.6", help="times that rate (default 0.5,0.8,1,1.3,1.6)")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--paired-seeds", type=int, default=5, help="below factor 1, of stock and the plug-in (5)")
    parser.add_argument("--budgets", default="128,256", help="token budgets tried of stock vLLM (128,256)")
    parser.add_argument("--priority", action=argparse.BooleanOptionalAction, default=True, help="stock, by tier")
    parser.add_argument("--policy", action="append", help="NAME or NAME:SETTING=VALUE; again (edf, slos_serve)")
    parser.add_argument("--trace", type=Path, help="lengths, texts and times (default: the bundled kinds)")
    parser.add_argument("--arrivals", default="poisson", help="poisson (default), trace, or as `rubato bench` has it")
    parser.add_argument("--longest-prompt", type=int, default=1024, help="tokens of a trace's prompts (1024)")
    parser.add_argument("--longest-output", type=int, default=64, help="tokens of a trace's outputs (64)")
    parser.add_argument("--dtype", default="float32", help="bfloat16 is faster on CPUs with AVX-512 BF16 or AMX")
    parser.add_argument("--step-times", action=argparse.BooleanOptionalAction, default=False, help="CPU of schedulers")
    parser.add_argument("--out", type=Path, default=ROOT / "results" / "vllm_plugin", help="where cells are kept")
    parser.add_argument("--json", type=Path, help="the summary's file (default: summary.json in --out)")
    args = parser.parse_args()
    if args.longest_prompt + args.longest_output > CONTEXT - TEMPLATE:
        parser.error(f"--longest-prompt and --longest-output: together at most {CONTEXT - TEMPLATE}")
    if args.arrivals == "trace" and not args.trace:
        parser.error("--arrivals trace needs --trace")
    return args


def main() -> None:
    args = options()
    from rubato_torch import bundled_model

    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the servers end too
    began, code_of = time.monotonic(), commit()
    args.out.mkdir(parents=True, exist_ok=True)
    model, python = Path(bundled_model.ensure()), ensure_env()
    load, path = Load(model, args), args.out / "baseline.json"
    names = (
        "requests",
        "rate",
        "search_requests",
        "arrivals",
        "longest_prompt",
        "longest_output",
        "dtype",
        "step_times",
    )
    asked = {name: getattr(args, name) for name in names} | {"trace": args.trace.name if args.trace else None}
    base = Baseline.read(path, asked)
    factors = [float(f) for f in args.factors.split(",")]
    policies = [PolicyChoice.parse(text) for text in args.policy or ("edf", "slos_serve")]
    contending = contenders([int(b) for b in args.budgets.split(",") if b], args.priority, policies)
    cells = planned(contending, factors, args.seeds, args.paired_seeds)
    missing = [cell for cell in wanted(cells, args.out) if not (args.out / cell.file).exists()]
    needed = [c for c in contending if c.label == STOCK or any(cell.contender == c for cell in missing)]
    say(f"{len(cells)} cells, {len(missing)} of them to measure; {len(needed)} servers")
    with contextlib.ExitStack() as stack:
        servers = {c: stack.enter_context(serving(c, python, model, args)) for c in needed} if missing else {}
        say(f"servers are ready after {time.monotonic() - began:.0f} s")
        if base.alone is None:
            base.alone = unloaded(servers[contending[0]], load)
            base.write(path)
        load.slos = base.alone.slos()
        say(f"stock unloaded: TTFT of {PROMPT} tokens {base.alone.ttft:.3f} s, a decode step {base.alone.step:.4f} s; "
            + ", ".join(f"{t} {s.ttft:.2f} and {s.tpot:.3f} s" for t, s in load.slos.items()))  # fmt: skip
        for server in servers.values():
            server.order = tuple(sorted(load.slos, key=lambda t: (load.slos[t].ttft or 0.0, load.slos[t].tpot or 0.0)))
            ask(server, load.burst())
        if args.rate is None and missing:
            guess = duration(missing, args.requests, base.start) / 3600
            say(f"some {guess:.1f} h after the search, if stock holds {base.start:.2f}/s; within a factor of {CLOSE}:")
            search(servers[contending[0]], load, base, args.search_requests, path)
        rate = args.rate or base.rate()
        say(f"stock holds {rate:.2f}/s; some {duration(missing, args.requests, rate) / 3600:.1f} h from here")
        group, speed = (0.0, 0), 1.0
        for cell in missing:
            if cell not in wanted(cells, args.out):
                continue
            if (cell.factor, cell.seed) != group:
                group, now = (cell.factor, cell.seed), unloaded(servers[contending[0]], load)
                load.slos, speed = now.slos(), base.speed(now)
                say(f"  the machine is {speed:.2f} times as fast as at the search")
            part = load.mix("cell", cell.factor * rate * speed, args.requests, cell.seed)
            row = measured(servers[cell.contender], cell, part, {**code_of, "speed": speed})
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
    """Once all cells of the first seed are there, only the best token budget is wanted with others."""
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
