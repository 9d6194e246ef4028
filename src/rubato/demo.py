"""`rubato demo`: one model, this machine, three classes of requests, policy against policy, in under five minutes.

What it does, in order: measure the unloaded TTFT and step time and set each tier's SLO as a fixed multiple of them; fit
the latency model on steps of every kind; find the rate that `vllm` holds; offer 1.3 times that rate, the same requests
at the same times, to `vllm`, `sarathi` (its budget tuned on this workload) and one of ours, each in a server of its
own.
"""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

from rubato import bench, plot, results, trace
from rubato.capacity import narrowed
from rubato.fit import coefficients
from rubato.latency import affine
from rubato.latency.report import error_report
from rubato.metrics import steps
from rubato.serverprocess import ServerProcess
from rubato.simulate import Setup, simulated_run
from rubato.types import SLO, Limits, Sample
from rubato.workloads import Arrival, Workload, write
from rubato.workloads.kinds import Kind, chat, code, summary
from rubato.workloads.making import make
from rubato.workloads.texts import Count

OVERLOAD = 1.3  # times the rate that vllm holds
TRIES = 6  # rates tried on the real server, at most
HOLD_SECONDS = 20.0  # each of them
HOLDS = 0.9  # attainment at which a rate is held (SYSTEMS: capacity)
HALF = 0.5  # below it a rate is far too high: the machine has become slower since it was measured
LIMITS = Limits(max_seqs=64, max_tokens=2048, max_length=2048, kv_blocks=2048, block=16)
# Sarathi's, tried in simulation; 0 = by the tightest TPOT, which is as good as the model: last of equally good ones
BUDGETS = (256, 512, 128, 64, 32, 0)


@dataclass(frozen=True)
class Multiples:
    """A tier's SLO: TTFT in unloaded TTFTs (of a prompt of PROMPT tokens), TPOT in unloaded steps."""

    ttft: float
    tpot: float


PROMPT = 256
TIERS: Mapping[str, Multiples] = {"chat": Multiples(7, 4), "code": Multiples(8, 4.5), "summary": Multiples(9, 5)}


@dataclass(frozen=True)
class Unloaded:
    """Seconds, medians: TTFT of a prompt of PROMPT tokens, and one decode step alone."""

    ttft: float
    step: float

    def slos(self) -> dict[str, SLO]:
        return {tier: SLO(times.ttft * self.ttft, times.tpot * self.step) for tier, times in TIERS.items()}


def found_live(attained_at: Callable[[float], float], rate: float, policy: str = "vllm") -> float:
    """The rate at which 90 % is attained, from `rate` on, by what a server attains at some. Raises as `held`."""
    tries: list[tuple[float, float]] = []
    for _ in range(TRIES):
        attained = attained_at(rate)
        tries.append((rate, attained))
        if min(a for _, a in tries) < HOLDS <= max(a for _, a in tries):
            break
        rate *= 1.15 if attained >= HOLDS else 0.85 if attained >= HALF else 0.7
    return held(tries, policy)


def held(tries: Sequence[tuple[float, float]], policy: str = "vllm") -> float:
    """The rate at which 90 % is attained, from (rate, attainment) tried: on the line between the highest that held and
    the lowest above it that did not. Raises BenchError when none held."""
    holding = [(rate, attained) for rate, attained in tries if attained >= HOLDS]
    if not holding:
        lowest = min(rate for rate, _ in tries)
        raise bench.BenchError(
            f"{policy} held none of {len(tries)} rates down to {lowest:.2f}/s: is something else using this machine?"
        )
    low, at_low = max(holding)
    beyond = [(rate, attained) for rate, attained in tries if rate > low]
    if not beyond:
        return low
    high, at_high = min(beyond)
    return low + (high - low) * (at_low - HOLDS) / (at_low - at_high)


def kinds(slos: Mapping[str, SLO]) -> list[Kind]:
    """The demo's mix: mostly chat that is read along, code completions, and a few long documents to summarise."""
    return [
        chat(slos["chat"], share=0.6, output=(60, 180)),
        code(slos["code"], share=0.3),
        summary(slos["summary"], share=0.1, output=(80, 160)),
    ]


def demo(out: Path, *, policy: str = "edf", seconds: float | None = None, seed: int = 0, progress: bool = True) -> int:
    """Run the demo and write everything into `out`. Returns 0 when it ran to its end, whatever the verdict; 1 when a
    run could not be trusted (the load generator was late). Raises ServerError, BenchError, ImportError."""
    from rubato.engines.torch import bundled  # the only part that needs the torch extra in this process

    began = time.monotonic()
    out.mkdir(parents=True, exist_ok=True)
    stage = Stage(out, str(bundled.ensure()), seed, progress)
    warm = stage.warm_up()
    load = stage.load(OVERLOAD * warm.rate, 32.0 if seconds is None else seconds, warm.unloaded.slos())
    write(load, out / "workload.jsonl")
    budget = stage.tuned_budget(warm, load)
    contestants: list[tuple[str, dict[str, object]]] = [("vllm", {}), ("sarathi", {"budget": budget}), (policy, {})]
    say(f"\n{len(load.arrivals)} requests in {load.duration:.0f} s at {load.rate:.2f}/s, the same for each policy")
    runs = [stage.contest(name, settings, warm, load) for name, settings in contestants]
    ours = runs[-1]
    comparisons = [results.compare([ours], [run]) for run in runs[:-1]]
    print("\n" + results.table(runs))
    for comparison in comparisons:
        print("\n" + results.comparison_text(comparison))
    print("\n" + verdict(runs, comparisons))
    results.write_json(out / "demo.json", runs, comparisons)
    plot.plot(out / "demo.png", runs, title=f"{OVERLOAD} x the rate that vllm holds: {load.rate:.2f} requests/s")
    print(f"\n{out}/demo.json, {out}/demo.png   ({time.monotonic() - began:.0f} s)")
    return 0 if all(run.valid for run in runs) else 1


def verdict(runs: Sequence[results.Run], comparisons: Sequence[results.Comparison]) -> str:
    """One line against the better of the two baselines."""
    ours, baselines = runs[-1], runs[:-1]
    met = [sum(r.verdict.met for r in run.records) for run in baselines]
    best = max(range(len(met)), key=lambda i: met[i])
    against = comparisons[best].differences["all"]
    mine, offered = sum(r.verdict.met for r in ours.records), len(ours.records)
    times = "all of them" if against.ratio is None else f"{against.ratio:.2f} times as many"
    low, high = 100 * against.difference_low, 100 * against.difference_high
    return (
        f"VERDICT: {ours.label} met {mine} of {offered}, {baselines[best].label} (the better baseline) {met[best]}: "
        f"{times}, {100 * against.difference:+.0f} points of attainment [{low:+.0f}, {high:+.0f}]"
    )


def say(text: str) -> None:
    print(text, flush=True)


@dataclass(frozen=True)
class WarmUp:
    """What the warm-up found. rate: requests/s that vllm holds; model: fitted on the warm-up's steps."""

    unloaded: Unloaded
    model: affine.Model
    rate: float


@dataclass(frozen=True)
class Stage:
    """The model, the machine and the folder that all parts of one demo share."""

    out: Path
    model: str
    seed: int
    progress: bool

    def load(self, rate: float, seconds: float, slos: Mapping[str, SLO], name: str = "demo") -> Workload:
        """Poisson arrivals given their number: in some thirty seconds a plain draw is off its rate by a tenth or more,
        and 1.3 times a rate would mean anything between 1.1 and 1.5."""
        count = max(1, round(rate * seconds))
        made = make(name, self.kinds(slos), rate, count=count, seed=self.seed, count_tokens=self._count())
        factor = seconds * count / (count + 1) / made.arrivals[-1].at
        arrivals = tuple(dataclasses.replace(a, at=a.at * factor) for a in made.arrivals)
        return dataclasses.replace(made, rate=count / seconds, duration=seconds, arrivals=arrivals)

    def kinds(self, slos: Mapping[str, SLO]) -> list[Kind]:
        return kinds(slos)

    # ----------------------------------------------------------------- warm-up

    def warm_up(self) -> WarmUp:
        """Two servers: one that chunks prompts finely, for steps of every kind; then vllm's, for the rate it holds."""
        say("measuring this machine, unloaded ...")
        logs = [self.out / f"{name}.trace.jsonl" for name in ("measure", "hold")]
        with self._server("sarathi", {"budget": 256}, {}, None, "measure", logs[0]) as server:
            for requests in (36, 6, 12):  # many sequences at once, few, and in between
                self._burst(server.url, requests)
        samples = steps(trace.read(logs[0]))
        with self._server("vllm", {}, {}, None, "hold", logs[1]) as server:
            unloaded = self._unloaded(server.url)
            slos = unloaded.slos()
            say(f"  TTFT of {PROMPT} prompt tokens {ms(unloaded.ttft)}, one decode step {ms(unloaded.step)}")
            for tier, slo in slos.items():
                say(f"  {tier:8} SLO: TTFT {ms(slo.ttft)}, TPOT {ms(slo.tpot)}")
            rate = self._rate(server.url, self._fit(samples), slos)
        return WarmUp(unloaded, self._fit(samples + steps(trace.read(logs[1]))), rate)

    def _unloaded(self, url: str) -> Unloaded:
        """One request at a time, seven of them, and medians."""
        kind = code(SLO(), prompt=(PROMPT, PROMPT), output=(16, 16))
        alone = make("unloaded", [kind], 1.0, count=7, seed=self.seed, count_tokens=self._count())
        records = [self._bench(url, self._one(alone, arrival), "unloaded").records[0] for arrival in alone.arrivals]
        ttft, tpot = ([v for r in records if (v := getattr(r.verdict, name))] for name in ("ttft", "tpot"))
        if len(ttft) + len(tpot) < 14:
            raise bench.BenchError(f"the unloaded measurement failed: {[r.reason for r in records if r.reason]}")
        return Unloaded(median(ttft), median(tpot))

    def _burst(self, url: str, requests: int) -> None:
        """Steps for the latency model: so many requests at once, until the last has ended."""
        slos = {tier: SLO() for tier in TIERS}
        load = make("burst", kinds(slos), 1.0, count=requests, seed=requests, count_tokens=self._count())
        at_once = tuple(dataclasses.replace(a, at=0.0, output_tokens=a.output_tokens // 2) for a in load.arrivals)
        self._bench(url, dataclasses.replace(load, arrivals=at_once, duration=1.0), f"burst of {requests}")

    def _fit(self, samples: Sequence[Sample]) -> affine.Model:
        model = affine.Model()
        model.fit(samples)
        say(f"  latency model on {len(samples)} steps: {error_report(model, samples).format()}")
        return model

    def _rate(self, url: str, model: affine.Model, slos: Mapping[str, SLO]) -> float:
        """The rate at which vllm attains 90 %: bracketed in simulation, then tried on the real server."""
        pattern = self.load(1.0, 60.0, slos, "hold")
        low, _ = narrowed(lambda r: self._attained_in_simulation(pattern.rescaled(r), model), 0.05, 50.0, 0.02)
        say(f"finding the rate that vllm holds (simulated: {low:.2f}/s) ...")

        def attained_at(rate: float) -> float:
            run = self._bench(url, self.load(rate, HOLD_SECONDS, slos, "hold"), f"{rate:.2f}/s")
            attained = sum(r.verdict.met for r in run.records) / len(run.records)
            say(f"  {rate:.2f}/s: attainment {100 * attained:.0f} % of {len(run.records)}")
            return attained

        # the simulated server has its cores to itself, the real one shares them with its clients
        return found_live(attained_at, 0.9 * low)

    def _attained_in_simulation(self, load: Workload, model: affine.Model) -> bool:
        records = simulated_run(load, self._setup("vllm", {}, model)).records
        return sum(r.verdict.met for r in records) >= HOLDS * len(records)

    # ----------------------------------------------------------------- the contest

    def tuned_budget(self, warm: WarmUp, load: Workload) -> int:
        """Sarathi's token budget that attains the most on this workload, in simulation."""
        met = {
            budget: sum(
                r.verdict.met
                for r in simulated_run(load, self._setup("sarathi", {"budget": budget}, warm.model)).records
            )
            for budget in BUDGETS
        }
        best = max(met, key=lambda budget: met[budget])
        say(f"sarathi's budget, tuned in simulation: {best or 'by the tightest TPOT'} (met by budget: {met})")
        return best

    def contest(self, policy: str, settings: Mapping[str, object], warm: WarmUp, load: Workload) -> results.Run:
        with self._server(policy, settings, load.tiers, warm.model, policy) as server:
            run = self._bench(server.url, load, policy, "slo", warmup=6)
        results.write_records(self.out / f"{policy}.records.jsonl", run)
        for problem in run.problems:
            say(f"  {policy}: {problem}")
        return run

    # ----------------------------------------------------------------- parts

    def _setup(self, policy: str, settings: Mapping[str, object], model: affine.Model) -> Setup:
        return Setup(lambda: dataclasses.replace(model), LIMITS, policy, settings=settings, noise=0.05, seed=self.seed)

    def _server(
        self,
        policy: str,
        settings: Mapping[str, object],
        tiers: Mapping[str, SLO],
        model: affine.Model | None,
        name: str,
        log: Path | None = None,
    ) -> ServerProcess:
        config: dict[str, object] = {
            "model": self.model,
            "served_name": "demo",
            "engine": {"kind": "torch", "kv_gib": 1.0, "max_seqs": LIMITS.max_seqs, "max_tokens": LIMITS.max_tokens},
            "policy": {"name": policy, **settings},
            "max_in_flight": 1024,
            "prefix_cache": False,  # a repeated prompt must not be cheaper under who is measured last
            "tiers": {
                tier: {f"{name}_ms": 1e3 * value for name, value in asdict(slo).items() if value is not None}
                for tier, slo in tiers.items()
            },
        }
        if model is not None:
            config["latency"] = {"kind": "affine", **coefficients(model)}
        if log is not None:
            config["trace"] = str(log)
        return ServerProcess(config, self.out / f"{name}.log")

    def _bench(
        self, url: str, load: Workload, label: str, slo: bench.TierField = "body", warmup: int = 0
    ) -> results.Run:
        return asyncio.run(
            bench.run(load, url, "demo", label=label, tier_field=slo, warmup=warmup, progress=self.progress)
        )

    def _one(self, load: Workload, arrival: Arrival) -> Workload:
        alone = dataclasses.replace(arrival, at=0.0)
        return dataclasses.replace(load, arrivals=(alone,), duration=1.0)

    def _count(self) -> Count:
        from rubato.engines.torch.text import Text

        text = Text(Path(self.model))
        return lambda content: len(text.encode(content))


def ms(seconds: float | None) -> str:
    return "-" if seconds is None else f"{1e3 * seconds:.0f} ms"
