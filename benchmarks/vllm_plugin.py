"""vLLM with its own scheduler against the same vLLM with the plug-in, over HTTP: which keeps more promises?

    python benchmarks/vllm_plugin.py [--requests 150] [--rate R] [--factors 1,1.3,1.6] [--budgets 128] [--json FILE]

Three tiers, their SLOs fixed multiples of what stock vLLM needs unloaded (the demo's). The rate that stock vLLM holds
(90 % attained) is found first, or given; then each contender gets the same requests at the same times, at that rate and
beyond. Contenders: stock with its default token budget, stock with each budget of `--budgets`, and the plug-in. Each
is a server of its own on all cores; while one is asked the others sleep; they take turns, in another order each rate.
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
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from vllm_env import ROOT, ensure_env

from rubato.core.request import SLO
from rubato.demo.runs import HOLDS, PROMPT, Unloaded, kinds, sustained_rate
from rubato.measure import load_generator, results
from rubato.measure.http_client import Endpoint, TierField
from rubato.measure.records import BenchResult, summarise
from rubato.workloads import Workload
from rubato.workloads.generate import make
from rubato.workloads.request_kinds import code

HERE = Path(__file__).resolve().parent
OUT = ROOT / "results" / "vllm_plugin"
MODEL = "smollm2"  # the name it is served under
READY = 240.0  # seconds a server may take to load
TRIES = 4  # rates tried on stock vLLM
FLAGS = (
    "--dtype=bfloat16",
    "--enforce-eager",
    "--no-enable-prefix-caching",
    "--max-model-len=2048",
    "--max-num-seqs=64",
    f"--served-model-name={MODEL}",
    "--host=127.0.0.1",
)


@dataclass(frozen=True)
class Contender:
    """flags: of its server, beside those of all. slos: how requests state theirs."""

    label: str
    scheduler: str
    flags: tuple[str, ...] = ()
    slos: TierField = "none"


@dataclass
class Server:
    """A contender's server, running. steps: lines of `_vllm_timed`."""

    contender: Contender
    url: str
    steps: Path
    group: int  # of its processes
    others: list[float] = field(default_factory=list)  # each cell: CPU that other programs used, as a share of one core
    runs: list[BenchResult] = field(default_factory=list)
    costs: list[list[float]] = field(default_factory=list)  # lines of `steps` written during the cells that count


def contenders(budgets: Sequence[int], policy: str, settings: Mapping[str, Any]) -> list[Contender]:
    plugin = ("--additional-config", json.dumps({"rubato": {"policy": policy, "settings": dict(settings)}}))
    return [
        Contender("stock", "_vllm_timed.Timed"),
        *(Contender(f"stock, {b} tokens", "_vllm_timed.Timed", (f"--max-num-batched-tokens={b}",)) for b in budgets),
        Contender(f"plug-in, {policy}", "_vllm_timed.TimedRubato", plugin, "vllm-xargs"),
    ]


@contextlib.contextmanager
def serving(contender: Contender, python: Path, model: Path) -> Iterator[Server]:
    """Its server from start to end, all cores."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    name = contender.label.replace(", ", "-").replace(" ", "-")
    steps, log = OUT / f"{name}.steps", OUT / f"{name}.log"
    module = [str(python), "-m", "vllm.entrypoints.openai.api_server"]
    own = ["--model", str(model), "--port", str(port), "--scheduler-cls", contender.scheduler, *contender.flags]
    variables = {
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, sorted(os.sched_getaffinity(0)))),
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        "PYTHONPATH": str(HERE),
        "STEPS_FILE": str(steps),
    }
    with log.open("w") as out:
        process = subprocess.Popen(
            [*module, *FLAGS, *own],
            stdout=out,
            stderr=subprocess.STDOUT,
            env={**os.environ, **variables},
            start_new_session=True,
        )
    try:
        server = Server(contender, f"http://127.0.0.1:{port}", steps, process.pid)
        _wait(server.url, process, log)
        yield server
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(30)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # the group that it was started as
        process.wait()


def _wait(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    begin = time.monotonic()
    while True:
        with contextlib.suppress(urllib.error.URLError, ConnectionError), urllib.request.urlopen(f"{url}/health"):
            return
        if process.poll() is not None or time.monotonic() - begin > READY:
            raise SystemExit(f"vLLM did not start:\n{log.read_text(errors='replace')[-3000:]}")
        time.sleep(0.5)


# --------------------------------------------------------------------------- what is asked


class Load:
    """The requests: made once, so that every contender gets the same."""

    def __init__(self, model: Path, seed: int) -> None:
        from rubato_torch.tokenizer import Text

        text = Text(model)
        self.seed = seed
        self.slos: dict[str, SLO] = {}
        self._count = lambda content: len(text.encode(content))

    def mix(self, name: str, rate: float, count: int) -> Workload:
        return make(name, kinds(self.slos), rate, count=count, seed=self.seed, count_tokens=self._count)

    def alone(self) -> Iterator[Workload]:
        """Seven requests, one at a time."""
        kind = code(SLO(), prompt=(PROMPT, PROMPT), output=(16, 16))
        made = make("unloaded", [kind], 1.0, count=7, seed=self.seed, count_tokens=self._count)
        for arrival in made.arrivals:
            yield replace(made, arrivals=(replace(arrival, at=0.0),), duration=1.0)

    def burst(self) -> Workload:
        """Sixteen at once: every server has run batches of all sizes before it is measured."""
        made = self.mix("warm-up", 1.0, 16)
        return replace(made, arrivals=tuple(replace(a, at=0.0) for a in made.arrivals), duration=1.0)


def ask(server: Server, load: Workload) -> BenchResult:
    return asyncio.run(
        load_generator.run(
            load, Endpoint(server.url, MODEL, tier_field=server.contender.slos), label=server.contender.label,
            warmup=0, progress=False,
        )
    )  # fmt: skip


def unloaded(server: Server, load: Load) -> Unloaded:
    records = [ask(server, one).records[0] for one in load.alone()]
    ttft, tpot = ([v for r in records if (v := getattr(r.verdict, name))] for name in ("ttft", "tpot"))
    if len(ttft) + len(tpot) < 14:
        raise SystemExit(f"the unloaded measurement failed: {[r.reason for r in records if r.reason]}")
    return Unloaded(statistics.median(ttft), statistics.median(tpot))


def rate_held(server: Server, load: Load, rate: float, count: int) -> float:
    tries: list[tuple[float, float]] = []
    for _ in range(TRIES):
        run = ask(server, load.mix("hold", rate, count))
        tries.append((rate, sum(r.verdict.met for r in run.records) / len(run.records)))
        say(f"  stock at {rate:.2f}/s: attainment {tries[-1][1]:.0%} of {len(run.records)}")
        if min(a for _, a in tries) < HOLDS <= max(a for _, a in tries):
            break
        rate *= 1.25 if tries[-1][1] >= HOLDS else 0.8
    return sustained_rate(tries)


def cell(server: Server, load: Workload) -> BenchResult:
    """One contender at one rate; what its scheduler spent meanwhile is kept."""
    begin, busy = time.monotonic(), _machine_cpu() - _group_cpu(server.group) - sum(os.times()[:2])
    run = ask(server, load)
    end = time.monotonic()
    rest = _machine_cpu() - _group_cpu(server.group) - sum(os.times()[:2]) - busy
    server.others.append(max(0.0, rest) / (end - begin))
    lines = [[float(v) for v in line.split()] for line in server.steps.read_text().splitlines()]
    server.costs += [line for line in lines if begin <= line[0] <= end]
    server.runs.append(run)
    for problem in run.problems:
        say(f"  {server.contender.label}: {problem}")
    return run


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


# --------------------------------------------------------------------------- what came out


def attainment(servers: Sequence[Server], rate: float) -> str:
    tiers = list(servers[0].runs[0].workload.tiers)
    lines = [
        f"| rate | scheduler | all, met of offered (95 %) | {' | '.join(tiers)} "
        "| TTFT p50 ms | TPOT p50 ms | failed | others |",
        "|---" * (7 + len(tiers)) + "|",
    ]
    for index in range(len(servers[0].runs)):
        for server in servers:
            run = server.runs[index]
            rows = {row.tier: row for row in summarise(run)}
            total = rows["all"]
            of_tiers = (f"{rows[t].met} of {rows[t].offered}" if t in rows else "-" for t in tiers)
            lines.append(
                f"| {run.workload.rate:.2f} ({run.workload.rate / rate:.1f} ×) | {server.contender.label} "
                f"| {total.met} of {total.offered}: {total.attainment:.0%} "
                f"({total.attainment_low:.0%}–{total.attainment_high:.0%}) | {' | '.join(of_tiers)} "
                f"| {_ms(total.ttft_p50)} | {_ms(total.tpot_p50)} | {total.failed + total.refused} "
                f"| {server.others[index]:.0%} |"
            )
    return "\n".join(lines)


def cost(servers: Sequence[Server]) -> str:
    lines = [
        "| scheduler | steps | schedule µs | update µs | both, mean | both, p99 | tokens a step | not as planned |"
    ]
    lines.append("|---" * 8 + "|")
    for server in servers:
        rows = server.costs
        both = sorted(1e6 * (r[1] + r[2]) for r in rows)
        plan, update, tokens = (statistics.mean(r[i] for r in rows) for i in (1, 2, 3))
        lines.append(
            f"| {server.contender.label} | {len(rows)} | {1e6 * plan:.0f} | {1e6 * update:.0f} "
            f"| {statistics.mean(both):.0f} | {both[int(0.99 * len(both))]:.0f} | {tokens:.1f} | {rows[-1][5]:.0f} |"
        )
    return "\n".join(lines)


def _ms(seconds: float | None) -> str:
    return "-" if seconds is None else f"{1e3 * seconds:.0f}"


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=150, help="in each cell (default 150)")
    parser.add_argument("--rate", type=float, help="requests/s that stock vLLM holds (default: found)")
    parser.add_argument("--factors", default="1,1.3,1.6", help="times that rate (default 1,1.3,1.6)")
    parser.add_argument("--budgets", default="128", help="token budgets of tuned stock vLLM, comma-separated (128)")
    parser.add_argument("--policy", default="edf", help="the plug-in's (default edf)")
    parser.add_argument("--settings", type=json.loads, default={}, help="the policy's, as JSON")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="write every run to this file")
    options = parser.parse_args()
    from rubato_torch import bundled_model

    began = time.monotonic()
    OUT.mkdir(parents=True, exist_ok=True)
    model, python = Path(bundled_model.ensure()), ensure_env()
    load = Load(model, options.seed)
    wanted = contenders([int(b) for b in options.budgets.split(",") if b], options.policy, options.settings)
    with contextlib.ExitStack() as stack:
        servers = [stack.enter_context(serving(c, python, model)) for c in wanted]
        say(f"{len(servers)} servers are ready after {time.monotonic() - began:.0f} s")
        alone = unloaded(servers[0], load)
        load.slos = alone.slos()
        say(f"stock unloaded: TTFT of {PROMPT} tokens {_ms(alone.ttft)} ms, a decode step {_ms(alone.step)} ms; SLOs "
            + ", ".join(f"{t} {_ms(s.ttft)} and {_ms(s.tpot)} ms" for t, s in load.slos.items()))  # fmt: skip
        for server in servers:
            ask(server, load.burst())
        rate = options.rate or rate_held(servers[0], load, 4.0, 45)
        for turn, factor in enumerate(float(f) for f in options.factors.split(",")):
            requests = load.mix("cell", factor * rate, options.requests)
            for index in range(len(servers)):
                server = servers[(index + turn) % len(servers)]
                run = cell(server, requests)
                met = sum(r.verdict.met for r in run.records)
                noise = f"others used {server.others[-1]:.0%} of a core"
                say(f"  {factor} × {rate:.2f}/s, {server.contender.label}: met {met} of {len(run.records)}; {noise}")
    print(attainment(servers, rate))
    print("others: CPU used by other programs meanwhile, of one core; above some 15 % the row is disturbed.")
    print(f"\nCPU of the engine core's thread, per step that ran something:\n\n{cost(servers)}")
    say(f"{time.monotonic() - began:.0f} s in all")
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        results.write_json(options.json, [run for server in servers for run in server.runs])


if __name__ == "__main__":
    main()
