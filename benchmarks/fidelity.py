"""Does simulation say what would happen live? The same workload on both, with a latency model of another run.

1. The fit run: the bundled model on this machine, another workload and seed. It gives the latency model, the spread of
   step times, and what the simulated engine lacks: the seconds between one step's end and the next one's beginning
   (the event loop reads requests and writes streams there), and those a request spends in HTTP and in the client.
2. Each cell, a policy at a load: the same workload twice live, each time on a fresh server, and in simulation over
   several seeds of step-time noise. Loads are shares of the rate at which `vllm` attains 90 % in simulation. A shared
   machine is up to a fifth faster or slower from one minute to the next: each live run is simulated with the model at
   the speed that the *other* run of its cell had, never with a number of its own.
3. A cell holds, per tier, if simulated attainment is within 5 points of the mean of both live runs and mean e2e within
   10 %, or within 1.5 times what the two live runs differ by.

    python benchmarks/fidelity.py --table docs/fidelity.md --json results/fidelity.json [--loads | --quick]

About 30 minutes on two cores, which must be free; --loads: 0.6, 0.9 and 1.2 of that rate, all tiers together, within 3
points, 7 % of mean e2e and 15 % of the P99 of TTFT; --quick: three minutes, too few requests to judge by.
"""

from __future__ import annotations

import argparse
import asyncio
import signal
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from pathlib import Path
from statistics import mean, median
from typing import Any

import numpy as np
from _fidelity_table import Cell, Figures, Rule, table

from rubato import bench, results, trace
from rubato.config import Config
from rubato.engines.torch import Engine, bundled
from rubato.engines.torch.text import Text
from rubato.fit import coefficients, fit
from rubato.latency import affine
from rubato.latency.report import Report, error_report
from rubato.metrics import Timeline, steps, timelines
from rubato.records import Record, Run, summarise, verdict
from rubato.serverprocess import ServerProcess
from rubato.simulate import Setup, simulated_run
from rubato.types import SLO, Event, Finished, Limits, Offered, Sample, Shape, Stepped
from rubato.workloads import Workload
from rubato.workloads.kinds import Kind, chat, code, summary
from rubato.workloads.making import make
from rubato.workloads.texts import Count

ENGINE: dict[str, Any] = {"kv_gib": 1.0, "max_seqs": 64, "max_tokens": 2048}
HOLDS = 0.9  # attainment at which vllm holds a rate
IN_FLIGHT = 1024
DISTURBED = 1.1  # seconds in steps for each that the median step would say: beyond, the machine had other work
CELLS_SEED, FIT_SEED = 1, 101
WARMUP = 6  # requests before each live run that do not count


LENIENT = Rule()


@dataclass(frozen=True)
class Scale:
    """How long a run is. per_tier: requests at least; poisson: seconds of the fit run's open-loop part; pooled: all
    tiers are one row."""

    policies: tuple[str, ...]
    loads: tuple[float, ...]
    per_tier: int
    poisson: float
    seeds: int
    rule: Rule = LENIENT
    pooled: bool = False


FULL = Scale(("vllm", "edf", "sarathi"), (0.7, 1.0), 200, 60.0, 5)
LOADS = Scale(("vllm", "edf"), (0.6, 0.9, 1.2), 150, 60.0, 5, Rule(0.03, 0.07, 0.15), pooled=True)
QUICK = Scale(("vllm", "edf"), (1.0,), 25, 12.0, 2)


@dataclass(frozen=True)
class Learned:
    """What the fit run gave. truth: seconds from one step's end to the next one's, for the simulated engine; believed:
    the steps' own seconds, for schedulers; noise: spread of steps around truth; gap: median seconds between steps;
    first, last: mean seconds that a client sees a request's first and last token later than the server timed them."""

    truth: affine.Model
    believed: affine.Model
    inside: Report
    held_out: Report
    noise: float
    gap: float
    first: float
    last: float


def kinds(slos: Mapping[str, SLO]) -> list[Kind]:
    return [
        chat(slos["chat"], prompt=(30, 200), output=(50, 110)),
        code(slos["code"], prompt=(100, 400), output=(40, 90)),
    ]


def say(text: str) -> None:
    print(text, flush=True)


@dataclass(frozen=True)
class Bench:
    """The model, the machine and the folder that all runs share."""

    out: Path
    model: str
    engine: Mapping[str, Any]
    limits: Limits
    count: Count

    def server(
        self, policy: str, settings: Mapping[str, object], name: str, model: affine.Model | None
    ) -> ServerProcess:
        config: dict[str, object] = {
            "model": self.model,
            "served_name": "fidelity",
            "engine": {"kind": "torch", **self.engine},
            "policy": {"name": policy, **settings},
            "max_in_flight": IN_FLIGHT,
            "tiers": {tier: {} for tier in ("chat", "code", "summary")},  # requests state their SLOs themselves
            "trace": str(self.out / f"{name}.trace.jsonl"),
        }
        if "prefix_cache" in Config.model_fields:
            config["prefix_cache"] = False  # texts share a chat template, and the simulator knows no texts
        if model is not None:
            config["latency"] = {"kind": "affine", **coefficients(model)}
        return ServerProcess(config, self.out / f"{name}.log")

    def offer(self, url: str, load: Workload, label: str, warmup: int = 0) -> Run:
        run = asyncio.run(
            bench.run(load, url, "fidelity", label=label, tier_field="slo", warmup=warmup, progress=sys.stderr.isatty())
        )
        failed = [r for r in run.records if r.outcome == "failed"]
        if failed:
            raise bench.BenchError(f"{label}: {len(failed)} of {len(run.records)} requests failed: {failed[0].reason}")
        for problem in run.problems:
            say(f"  {label}: {problem}")
        return run

    def events(self, name: str) -> list[Event]:
        return list(trace.read(self.out / f"{name}.trace.jsonl"))

    # ----------------------------------------------------------------- the fit run

    def learn(self, scale: Scale) -> Learned:
        free = {"chat": SLO(), "code": SLO()}
        first: list[Event] = []
        for budget in (256, 80, 40):  # a policy's chunks may be whole prompts or a few tokens
            name = f"fit-steps-{budget}"
            with self.server("sarathi", {"budget": budget}, name, None) as server:
                for requests in (36, 6, 12) if budget == 256 else (18, 5):  # many sequences at once, few, in between
                    mix = [*kinds(free), summary(SLO(), share=0.5, tier="summary")]
                    load = make("fit-burst", mix, 1.0, count=requests, seed=requests, count_tokens=self.count)
                    at_once = tuple(replace(a, at=0.0) for a in load.arrivals)
                    self.offer(server.url, replace(load, arrivals=at_once, duration=1.0), f"burst of {requests}")
            first += self.events(name)
        rough = affine.Model()
        rough.fit(lengthened(first)[0])
        tried = make("fit-load", kinds(promises(rough)), 1.0, duration=60.0, seed=FIT_SEED, count_tokens=self.count)
        report = error_report(rough, steps(first))
        rate = 0.85 * self.held(tried, Learned(rough, rough, report, report, noise=0.05, gap=0.0, first=0.0, last=0.0))
        count = max(20, round(rate * scale.poisson))
        load = make("fit-load", kinds(promises(rough)), rate, count=count, seed=FIT_SEED, count_tokens=self.count)
        with self.server("vllm", {}, "fit-load", rough) as server:
            run = self.offer(server.url, load, f"{rate:.2f}/s")
        return learned(first, self.events("fit-load"), run)

    def held(self, load: Workload, what: Learned) -> float:
        """The rate at which simulated vllm attains HOLDS of this workload."""
        low, high = 0.05, 100.0
        while high / low > 1.02:
            rate = (low * high) ** 0.5
            run = simulated_run(load.rescaled(rate), self.setup("vllm", what, 0))
            records = delivered(run, what).records
            good = sum(r.verdict.met for r in records) >= HOLDS * len(records)
            low, high = (rate, high) if good else (low, rate)
        return low

    def setup(self, policy: str, what: Learned, seed: int) -> Setup:
        return Setup(
            latency=lambda: replace(what.truth),
            limits=self.limits,
            policy=policy,
            believed=lambda: replace(what.believed),
            noise=what.noise,
            seed=seed,
            max_in_flight=IN_FLIGHT,
        )

    # ----------------------------------------------------------------- a cell

    def cell(self, policy: str, share: float, load: Workload, what: Learned, scale: Scale) -> list[Cell]:
        live: list[Run] = []
        paces: list[float] = []
        for number in (1, 2):
            name = f"{policy}-{share:g}-{number}"
            with self.server(policy, {}, name, what.believed) as server:
                live.append(self.offer(server.url, load, name, warmup=WARMUP))
            results.write_records(self.out / f"{name}.records.jsonl", live[-1])
            paces.append(pace(what.truth, lengthened(self.events(name))[0]))
        simulated: list[Run] = []
        for other in reversed(paces):  # each live run is simulated at the speed of the other
            now = replace(what, truth=scaled(what.truth, other))
            simulated += [
                delivered(simulated_run(load, self.setup(policy, now, seed)), now) for seed in range(scale.seeds)
            ]
        late = any(run.problems for run in live)
        cells = []
        for tier in ("all",) if scale.pooled else load.tiers:
            one, two, three = (tier_figures(runs, tier) for runs in ([live[0]], [live[1]], simulated))
            found = Cell(policy, share, load.rate, tier, one, two, three, scale.rule, (paces[0], paces[1]), late)
            cells.append(found)
            say("  " + "  ".join(cells[-1].texts()))
        return cells


# --------------------------------------------------------------------------- what the fit run says


def lengthened(events: Sequence[Event]) -> tuple[list[Sample], float]:
    """The steps, each with the seconds since the previous one's end where the server was busy all the time (else with
    the median of those); and that median."""
    stepped = [e for e in events if isinstance(e, Stepped)]
    offered = np.sort([e.at for e in events if isinstance(e, Offered)])
    finished = np.sort([e.at for e in events if isinstance(e, Finished)])
    gaps: list[float | None] = [None]
    for before, step in pairwise(stepped):
        end = before.at
        here = np.searchsorted(offered, end, side="left") - np.searchsorted(finished, end, side="right")
        gaps.append(max(0.0, step.at - step.seconds - end) if here > 0 else None)
    known = [gap for gap in gaps if gap is not None]
    if not known:
        raise ValueError("the log holds no two steps in a row: was the server under load?")
    usual = median(known)
    samples = [
        Sample(e.shape, e.seconds + (usual if gap is None else gap)) for e, gap in zip(stepped, gaps, strict=True)
    ]
    return samples, usual


def learned(bursts: Sequence[Event], load: Sequence[Event], run: Run) -> Learned:
    """Fits on both logs; scale and spread of step times, and what requests spend outside, from the open-loop part."""
    under_load, gap = lengthened(load)
    truth = fit([*lengthened(bursts)[0], *under_load])
    assert isinstance(truth.model, affine.Model)
    believed = affine.Model()
    believed.fit([*steps(bursts), *steps(load)])
    # The fit is in relative error, outliers left out; what adds up to a request's e2e is the mean, with most of them.
    logs = np.log([s.seconds / truth.model.step_time(s.shape) for s in under_load])
    low, high = np.quantile(logs, [0.01, 0.99])
    usual = np.clip(logs, low, high)
    noise = float(usual.std())
    if pace(truth.model, under_load) > DISTURBED * float(np.exp(np.median(logs))):
        say("  WARNING: spells of slow steps in the fit run, something else used the machine: results will not hold")
    first, last = outside(run.records, list(timelines(load)))
    model = scaled(truth.model, float(np.exp(usual).mean()))
    return Learned(model, believed, truth.inside, truth.held_out, min(noise, 0.9), gap, first, last)


def scaled(model: affine.Model, factor: float) -> affine.Model:
    """Every step takes `factor` times as long."""
    return affine.Model(
        k=(factor * model.k[0], factor * model.k[1]), b=(factor * model.b[0], factor * model.b[1]),
        **{name: factor * getattr(model, name) for name in affine.NUMBERS},
    )  # fmt: skip


def pace(model: affine.Model, samples: Sequence[Sample]) -> float:
    """Seconds that the steps took, for each second that the model says: 1.1 = the machine was a tenth slower."""
    return sum(s.seconds for s in samples) / sum(model.step_time(s.shape) for s in samples)


def outside(records: Sequence[Record], lines: Sequence[Timeline]) -> tuple[float, float]:
    """Mean seconds by which the client's TTFT and e2e (from scheduled arrivals) exceed the server's (from the offer).

    Requests are matched by order of arrival. Raises ValueError when their prompts say that this was wrong.
    """
    ordered = sorted(lines, key=lambda line: line.request.arrival)
    first: list[float] = []
    last: list[float] = []
    for record, line in zip(records, ordered, strict=True):
        if record.prompt_tokens not in (None, line.request.stages[0].prompt):
            continue  # two that arrived within a millisecond may have changed places
        if record.outcome == "completed" and record.verdict.ttft is not None and record.verdict.e2e is not None:
            first.append(record.verdict.ttft - (line.times[0] - line.request.arrival))
            last.append(record.verdict.e2e - (line.times[-1] - line.request.arrival))
    if len(first) < 0.9 * len(records):
        raise ValueError(f"only {len(first)} of {len(records)} requests of the fit run could be matched with its log")
    return mean(first), mean(last)


def delivered(run: Run, what: Learned) -> Run:
    """The simulated run as a client would have seen it: every token later by what requests spend outside."""
    requests = {request.id: request for request in run.workload.requests()}
    records = []
    for r in run.records:
        times = tuple(t + (what.first if i == 0 else what.last) for i, t in enumerate(r.times))
        records.append(replace(r, times=times, verdict=verdict(requests[r.id], times, r.tokens, r.outcome, run.rule)))
    return replace(run, records=tuple(records))


def promises(model: affine.Model) -> dict[str, SLO]:
    """Multiples of the unloaded TTFT of 256 prompt tokens and of a lone decode step, as the demo has them."""
    ttft = model.step_time(Shape().plus(256, 0))
    step = model.step_time(Shape().plus(1, 255))
    return {"chat": SLO(ttft=7 * ttft, tpot=4 * step), "code": SLO(ttft=8 * ttft, tpot=4.5 * step)}


# --------------------------------------------------------------------------- telling


def tier_figures(runs: Sequence[Run], tier: str) -> Figures:
    """Offered requests of one run, attainment, mean e2e of what completed and P99 of TTFT of what began, in seconds;
    over all runs given. tier: "all" of them together."""
    row = next(row for row in summarise(runs) if row.tier == tier)
    verdicts = [r.verdict for run in runs for r in run.records if tier in (r.tier, "all")]
    e2e = [v.e2e for v in verdicts if v.e2e is not None]
    ttft = [v.ttft for v in verdicts if v.ttft is not None]
    p99 = float(np.quantile(ttft, 0.99)) if ttft else float("nan")
    return Figures(row.offered // len(runs), row.attainment, mean(e2e) if e2e else float("nan"), p99)


def told(what: Learned, rate: float, scale: Scale, threads: int | None) -> str:
    """What stands above the table."""
    return (
        f"`benchmarks/fidelity.py`. Load 1 is {rate:.2f} requests/s, at which `vllm` attains {100 * HOLDS:.0f} % in "
        f"simulation. Engine threads: {threads or 'one a core'}. Each workload ran twice live, each time on a fresh "
        f"server, and "
        f"{scale.seeds} times in simulation for each live run (seeds of the noise, pooled), with the fitted model at "
        "the speed of the machine in the other of the two.\n\n"
        f"From the fit run, another workload and seed: step times with R² {what.inside.r2:.3f}, relative error p50 "
        f"{what.inside.p50:.1%} p95 {what.inside.p95:.1%}; held out {what.held_out.p50:.1%} and "
        f"{what.held_out.p95:.1%} ({what.inside.n + what.held_out.n} steps). Spread of step times {what.noise:.1%}; "
        f"between steps {1e3 * what.gap:.2f} ms (within the model); in HTTP and client {1e3 * what.first:.1f} ms until "
        f"the first token, {1e3 * what.last:.1f} ms at the last (added to the simulated times)."
    )


def at_least(making: Callable[[int], Workload], per_tier: int) -> Workload:
    """The shortest beginning of a long workload with so many requests of each tier."""
    load = making(8 * per_tier)
    seen = dict.fromkeys(load.tiers, 0)
    for index, arrival in enumerate(load.arrivals, start=1):
        seen[arrival.tier] += 1
        if min(seen.values()) >= per_tier:
            return making(index)
    raise ValueError(f"{len(load.arrivals)} requests hold fewer than {per_tier} of some tier")


def main() -> int:
    parser = argparse.ArgumentParser(description="Simulated against live, with a latency model of another run.")
    parser.add_argument("--table", type=Path, help="Markdown file to write")
    parser.add_argument("--json", type=Path, help="everything measured, as JSON")
    parser.add_argument("--out", type=Path, help="folder for logs and records (default: a temporary one)")
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--quick", action="store_true", help="a few requests: does it run?")
    which.add_argument("--loads", action="store_true", help="60, 90 and 120 %% of what vllm holds, stricter")
    parser.add_argument("--threads", type=int, help="of the engine (default: all cores)")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # the server is stopped on the way out
    scale = QUICK if options.quick else LOADS if options.loads else FULL
    engine = {**ENGINE, "threads": options.threads}
    with tempfile.TemporaryDirectory() as scratch:
        out = options.out or Path(scratch)
        out.mkdir(parents=True, exist_ok=True)
        model = str(bundled.ensure())
        text = Text(Path(model))
        rig = Bench(
            out, model, engine, Engine(model, **engine).limits,
            lambda content: len(text.chat([{"role": "user", "content": content}])),
        )  # fmt: skip
        what = rig.learn(scale)
        say(
            f"steps: {what.inside.format()}; noise {what.noise:.3f}, gap {1e3 * what.gap:.2f} ms, outside "
            f"{1e3 * what.first:.1f} and {1e3 * what.last:.1f} ms; {what.truth.to_dict()}"
        )
        slos = promises(what.truth)

        def cells(count: int) -> Workload:
            return make("cell", kinds(slos), 1.0, count=count, seed=CELLS_SEED, count_tokens=rig.count)

        load = at_least(cells, scale.per_tier)
        rate = rig.held(make("fit-load", kinds(slos), 1.0, duration=60.0, seed=FIT_SEED, count_tokens=rig.count), what)
        say(f"{len(load.arrivals)} requests; vllm holds {rate:.2f}/s in simulation; SLOs {slos}")
        rows = [
            row
            for policy in scale.policies
            for share in scale.loads
            for row in rig.cell(policy, share, load.rescaled(share * rate), what, scale)
        ]
    written = table(rows, told(what, rate, scale, options.threads))
    print(written)
    if options.table:
        options.table.write_text(written)
    if options.json:
        found = {
            "truth": what.truth.to_dict(), "believed": what.believed.to_dict(), "in_sample": what.inside,
            "held_out": what.held_out, "noise": what.noise, "gap": what.gap, "first": what.first, "last": what.last,
        }  # fmt: skip
        slo = {tier: asdict(s) for tier, s in slos.items()}
        options.json.write_bytes(
            results.as_json({"learned": found, "rate": rate, "slos": slo, "cells": [c.to_json() for c in rows]})
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
