"""What runs: the fit run, and each cell twice live on a server of its own and in simulation.

The engine is any that `serve` knows by its configuration: the embedded one with the bundled model (`torch_rig`), or one
whose step times are known beforehand (`LiveRig.given`): then nothing is fitted.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from itertools import pairwise
from math import inf
from pathlib import Path
from typing import Any, Literal

from experiments.fidelity.fit_run import LearnedModel, delivered, learn, lengthened, pace, promises, say, scaled
from experiments.fidelity.table import Cell, Rule, figures
from rubato.core import event_log
from rubato.core.events import Event, Offered
from rubato.core.plan import Limits
from rubato.core.request import SLO
from rubato.fleet.cluster_options import PolicyChoice
from rubato.latency import affine
from rubato.latency.fit import coefficients
from rubato.measure import load_generator, results
from rubato.measure.http_client import BenchError, Endpoint
from rubato.measure.records import BenchResult
from rubato.measure.server_process import served
from rubato.planning.capacity import narrowed
from rubato.simulation.run_spec import Hardware, RunSpec
from rubato.simulation.simulate import simulate
from rubato.workloads import Workload
from rubato.workloads.generate import make
from rubato.workloads.prompts import Count
from rubato.workloads.request_kinds import Kind, chat, code, summary

ENGINE: dict[str, Any] = {"kv_gib": 1.0, "max_num_seqs": 64, "max_num_batched_tokens": 2048}
HOLDS = 0.9  # attainment at which vllm holds a rate
IN_FLIGHT = 1024
CELLS_SEED, FIT_SEED = 1, 101
LENIENT = Rule()


@dataclass(frozen=True)
class Scale:
    """How long a run is. per_tier: requests at least; poisson: seconds of the fit run's open-loop part; seeds: of the
    noise, for each live run; pooled: all tiers are one row; warmup: requests before each live run that do not count;
    search: seconds of the workload, at 1/s, on which the rate that vllm holds is found; fresh: a server of its own for
    each live run of a cell, else one for both."""

    policies: tuple[str, ...]
    loads: tuple[float, ...]
    per_tier: int
    poisson: float
    seeds: int
    rule: Rule = LENIENT
    pooled: bool = False
    warmup: int = 6
    search: float = 60.0
    fresh: bool = True


FULL = Scale(("vllm", "edf", "sarathi"), (0.7, 1.0), 200, 60.0, 5)
LOADS = Scale(("vllm", "edf"), (0.6, 0.9, 1.2), 150, 60.0, 5, Rule(0.03, 0.07, 0.15), pooled=True)
QUICK = Scale(("vllm", "edf"), (1.0,), 25, 12.0, 2)


@dataclass(frozen=True)
class LoadLevel:
    """What all cells stand on. rate: requests/s that vllm holds in simulation; load: the cells' requests, at 1/s."""

    what: LearnedModel
    slos: Mapping[str, SLO]
    rate: float
    load: Workload


@dataclass(frozen=True)
class Outcome:
    """A cell: its rows, and its three runs. simulated: over all seeds, those at the second live run's speed first."""

    rows: tuple[Cell, ...]
    live: tuple[BenchResult, BenchResult]
    simulated: tuple[BenchResult, ...]


@dataclass(frozen=True)
class LiveRig:
    """The engine, the machine and the folder that all runs share. engine: as in the server's YAML; count: tokens of a
    prompt's text; given: the step times of an engine that needs no fit run."""

    out: Path
    model: str | None
    engine: Mapping[str, Any]
    limits: Limits
    count: Count
    given: affine.Model | None = None

    def server(
        self, policy: str, settings: Mapping[str, object], name: str, model: affine.Model | None
    ) -> AbstractContextManager[tuple[str, int]]:
        """model: what its scheduler believes, and a simulated engine does."""
        config: dict[str, object] = {
            "model": self.model,
            "served_model_name": "fidelity",
            "engine": dict(self.engine),
            "policy": {"name": policy, **settings},
            "max_in_flight": IN_FLIGHT,
            "tiers": {tier: {} for tier in ("chat", "code", "summary")},  # requests state their SLOs themselves
            "event_log": str(self.out / f"{name}.events.jsonl"),
            "prefix_cache": False,  # texts share a chat template, and the simulator knows no texts
        }
        if model is not None:
            config["latency"] = {"kind": "affine", **coefficients(model)}
        return served(config, self.out / f"{name}.log")

    def offer(self, url: str, load: Workload, label: str, warmup: int = 0) -> BenchResult:
        """Raises BenchError when a request fails."""
        run = asyncio.run(
            load_generator.run(
                load, Endpoint(url, "fidelity"), label=label, warmup=warmup, progress=sys.stderr.isatty()
            )
        )
        failed = [r for r in run.records if r.outcome == "failed"]
        if failed:
            raise BenchError(f"{label}: {len(failed)} of {len(run.records)} requests failed: {failed[0].reason}")
        for problem in run.problems:
            say(f"  {label}: {problem}")
        return run

    def events(self, name: str) -> list[Event]:
        return list(event_log.read(self.out / f"{name}.events.jsonl"))

    # ----------------------------------------------------------------- the fit run

    def ground(self, scale: Scale) -> LoadLevel:
        """The fit run, the promises and rates that follow from it, and the cells' requests."""
        what = LearnedModel(self.given, replace(self.given)) if self.given else self.learn(scale)
        slos = promises(what.truth)
        load = at_least(lambda count: self.load("cell", slos, CELLS_SEED, count=count), scale.per_tier)
        rate = self.held(self.load("fit-load", slos, FIT_SEED, duration=scale.search), what)
        return LoadLevel(what, slos, rate, load)

    def load(self, name: str, slos: Mapping[str, SLO], seed: int, rate: float = 1.0, **length: Any) -> Workload:
        return make(name, kinds(slos), rate, seed=seed, count_tokens=self.count, **length)

    def learn(self, scale: Scale) -> LearnedModel:
        free = {"chat": SLO(), "code": SLO()}
        first: list[Event] = []
        for budget in (256, 80, 40):  # a policy's chunks may be whole prompts or a few tokens
            name = f"fit-steps-{budget}"
            with self.server("sarathi", {"budget": budget}, name, None) as (url, _):
                for requests in (36, 6, 12) if budget == 256 else (18, 5):  # many sequences at once, few, in between
                    mix = [*kinds(free), summary(SLO(), share=0.5, tier="summary")]
                    load = make("fit-burst", mix, 1.0, count=requests, seed=requests, count_tokens=self.count)
                    at_once = tuple(replace(a, at=0.0) for a in load.arrivals)
                    self.offer(url, replace(load, arrivals=at_once, duration=1.0), f"burst of {requests}")
            first += self.events(name)
        rough = affine.Model()
        rough.fit(lengthened(first)[0])
        slos = promises(rough)
        tried = self.load("fit-load", slos, FIT_SEED, duration=scale.search)
        rate = 0.85 * self.held(tried, LearnedModel(rough, rough, noise=0.05))
        load = self.load("fit-load", slos, FIT_SEED, rate, count=max(20, round(rate * scale.poisson)))
        with self.server("vllm", {}, "fit-load", rough) as (url, _):
            run = self.offer(url, load, f"{rate:.2f}/s")
        what = learn(first, self.events("fit-load"), run)
        assert what.inside is not None
        say(
            f"steps: {what.inside.format()}; noise {what.noise:.3f}, gap {1e3 * what.gap:.2f} ms, outside "
            f"{1e3 * what.first:.1f} and {1e3 * what.last:.1f} ms; {what.truth.to_dict()}"
        )
        return what

    def held(self, load: Workload, what: LearnedModel) -> float:
        """The rate at which simulated vllm attains HOLDS of this workload."""

        def holds(rate: float) -> bool:
            run = simulate(load.rescaled(rate), self.spec("vllm", what))
            records = delivered(run, what).records
            return sum(r.verdict.met for r in records) >= HOLDS * len(records)

        return narrowed(holds, 0.05, 100.0, 0.02)[0]

    def spec(self, policy: str, what: LearnedModel) -> RunSpec:
        return RunSpec(
            Hardware("as learned", what.truth, self.limits),
            PolicyChoice(policy),
            noise=what.noise,
            believed=what.believed,
            learns=True,
            max_in_flight=IN_FLIGHT,
        )

    # ----------------------------------------------------------------- a cell

    def cell(self, policy: str, share: float, ground: LoadLevel, scale: Scale) -> Outcome:
        what, load = ground.what, ground.load.rescaled(share * ground.rate)
        name = f"{policy}-{share:g}"
        live: list[BenchResult] = []
        logs: list[list[Event]] = []
        for numbers in ((1,), (2,)) if scale.fresh else ((1, 2),):
            log = f"{name}-{numbers[0]}"
            with self.server(policy, {}, log, what.believed) as (url, _):
                live += [self.offer(url, load, f"{name}-{n}", warmup=scale.warmup) for n in numbers]
            logs += apart(self.events(log), scale.warmup + len(load.arrivals))
        for number, run in enumerate(live, start=1):
            results.write_records(self.out / f"{name}-{number}.records.jsonl", run)
        paces = [pace(what.truth, lengthened(events)[0]) for events in logs]
        seeds: list[list[BenchResult]] = [[] for _ in range(scale.seeds)]
        for other in reversed(paces):  # each live run is simulated at the speed of the other
            now = replace(what, truth=scaled(what.truth, other))
            for seed, runs in enumerate(seeds):
                runs.append(delivered(simulate(load, self.spec(policy, now), seed), now))
        every = [run for runs in seeds for run in runs]
        late = any(run.problems for run in live)
        rows = []
        for tier in ("all",) if scale.pooled else load.tiers:
            one, two, all_, *each = (figures(runs, tier) for runs in ([live[0]], [live[1]], every, *seeds))
            rows.append(
                Cell(
                    policy, share, load.rate, tier, one, two, all_, scale.rule, (paces[0], paces[1]), late, tuple(each)
                )
            )
            say("  " + "  ".join(rows[-1].texts()))
        return Outcome(tuple(rows), (live[0], live[1]), tuple(every))


def apart(events: Sequence[Event], count: int) -> list[list[Event]]:
    """The log of several runs, one after another on one server, each of `count` requests: that of each run."""
    starts = [e.at for e in events if isinstance(e, Offered)][::count]
    return [[e for e in events if start <= e.at < end] for start, end in pairwise([*starts, inf])]


def torch_rig(out: Path, threads: int | Literal["auto"] = "auto") -> LiveRig:
    """The embedded engine with the bundled model. threads: of the engine. Raises ImportError without
    the torch extra."""
    from rubato_torch import Engine, bundled_model
    from rubato_torch.tokenizer import Text

    model = str(bundled_model.ensure())
    text = Text(Path(model))
    engine = {**ENGINE, "threads": threads}

    def count(content: str) -> int:
        return len(text.chat([{"role": "user", "content": content}]))

    return LiveRig(out, model, {"kind": "torch", **engine}, Engine(model, **engine).limits, count)


def kinds(slos: Mapping[str, SLO]) -> list[Kind]:
    return [
        chat(slos["chat"], prompt=(30, 200), output=(50, 110)),
        code(slos["code"], prompt=(100, 400), output=(40, 90)),
    ]


def at_least(making: Callable[[int], Workload], per_tier: int) -> Workload:
    """The shortest beginning of a long workload with so many requests of each tier."""
    load = making(8 * per_tier)
    seen = dict.fromkeys(load.tiers, 0)
    for index, arrival in enumerate(load.arrivals, start=1):
        seen[arrival.tier] += 1
        if min(seen.values()) >= per_tier:
            return making(index)
    raise ValueError(f"{len(load.arrivals)} requests hold fewer than {per_tier} of some tier")
