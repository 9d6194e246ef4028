"""The parts of `rubato demo`: measure the machine, find the rate that vllm holds, serve one load under one policy."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

from rubato.core import event_log
from rubato.core.plan import Limits, Sample, Shape
from rubato.core.request import SLO
from rubato.core.timeline import steps
from rubato.demo.progress import BURST_SECONDS, CHECK_SECONDS, SECONDS, Progress, ms, say
from rubato.latency import affine
from rubato.latency.fit import coefficients
from rubato.latency.fit_error import Report, error_report
from rubato.measure import load_generator, results
from rubato.measure.http_client import BenchError, Endpoint, TierField
from rubato.measure.records import Run
from rubato.measure.server_process import ServerProcess
from rubato.planning.capacity import narrowed
from rubato.simulation.simulate import SimulationSetup, simulated_run
from rubato.workloads import Arrival, Workload
from rubato.workloads.generate import make
from rubato.workloads.prompts import Count
from rubato.workloads.request_kinds import Kind

OVERLOAD = 1.3  # times the rate that vllm holds
HOLDS = 0.9  # attainment at which a rate is held
LONGEST = 60.0  # seconds of load for each policy at most, where even short requests are served slowly
LEAST = 40  # requests for each policy
SCALES = (1.0, 0.7, 0.5, 0.35, 0.25)  # of all lengths: the first at which LEAST requests come in SECONDS
LIMITS = Limits(max_num_seqs=64, max_num_batched_tokens=2048, max_model_len=2048, kv_blocks=2048, block_size=16)
# Sarathi's, tried in simulation; 0 = by the tightest TPOT, which is as good as the model: last of equally good ones
BUDGETS = (256, 512, 128, 64, 32, 0)
POOR_P50, POOR_P95 = 0.15, 0.6  # relative errors of the latency model, beyond which the simulator's rate is rough


@dataclass(frozen=True)
class Multiples:
    """A tier's SLO: TTFT in unloaded TTFTs (of a prompt of PROMPT tokens), TPOT in unloaded steps."""

    ttft: float
    tpot: float


PROMPT = 256
TIERS: Mapping[str, Multiples] = {"chat": Multiples(7, 4), "code": Multiples(8, 4.5), "summary": Multiples(9, 5)}
SHARES = {"chat": 0.6, "code": 0.3, "summary": 0.1}  # mostly chat that is read along, and a few long documents
# tokens, the least and the most, of a prompt and of an answer
LENGTHS = {
    "chat": ((30, 200), (60, 180)),
    "code": ((100, 400), (40, 120)),
    "summary": ((400, 900), (80, 160)),
}
MEAN_PROMPT = sum(share * sum(LENGTHS[tier][0]) / 2 for tier, share in SHARES.items())
MEAN_OUTPUT = sum(share * sum(LENGTHS[tier][1]) / 2 for tier, share in SHARES.items())


@dataclass(frozen=True)
class Unloaded:
    """Seconds, medians: TTFT of a prompt of PROMPT tokens, and one decode step alone."""

    ttft: float
    step: float

    def slos(self) -> dict[str, SLO]:
        return {tier: SLO(times.ttft * self.ttft, times.tpot * self.step) for tier, times in TIERS.items()}

    def scaled(self, scale: float, model: affine.Model) -> Unloaded:
        """With prompts `scale` times as long, by the model."""
        whole, part = (model.step_time(Shape().plus(max(1, round(PROMPT * s)), 0)) for s in (1.0, scale))
        return dataclasses.replace(self, ttft=self.ttft * part / whole)


def kinds(slos: Mapping[str, SLO], scale: float = 1.0, outputs: float = 1.0) -> list[Kind]:
    """The demo's mix. scale: of all lengths; outputs: of the answers' besides."""

    def tokens(span: tuple[int, int], by: float) -> tuple[int, int]:
        return max(8, round(span[0] * by)), max(16, round(span[1] * by))

    return [
        Kind(tier, slos[tier], tokens(prompt, scale), tokens(output, scale * outputs), share=SHARES[tier])
        for tier, (prompt, output) in LENGTHS.items()
    ]


def checked_rate(attained_at: Callable[[float], float], rate: float) -> tuple[float, str]:
    """The rate at which 90 % is attained, from the simulator's and two tries on the real server; and what to say where
    these do not enclose it."""
    tries = [(rate, attained_at(rate))]
    second = rate * (1.4 if tries[0][1] >= HOLDS else 0.75)
    tries = sorted([*tries, (second, attained_at(second))])
    (low, at_low), (high, at_high) = tries
    if at_high >= HOLDS:
        return high, f"vllm held both rates that were tried; it may hold more than {high:.2f}/s"
    if at_low < HOLDS:
        guess = 0.8 * low
        return guess, f"vllm held neither rate that was tried; {guess:.2f}/s, four fifths of the lower, is a guess"
    return held(tries), ""


def held(tries: Sequence[tuple[float, float]], policy: str = "vllm") -> float:
    """The rate at which 90 % is attained, from (rate, attainment) tried: on the line between the highest that held and
    the lowest above it that did not. Raises BenchError when none held."""
    holding = [(rate, attained) for rate, attained in tries if attained >= HOLDS]
    if not holding:
        lowest = min(rate for rate, _ in tries)
        raise BenchError(
            f"{policy} held none of {len(tries)} rates down to {lowest:.2f}/s: is something else using this machine?"
        )
    low, at_low = max(holding)
    beyond = [(rate, attained) for rate, attained in tries if rate > low]
    if not beyond:
        return low
    high, at_high = min(beyond)
    return low + (high - low) * (at_low - HOLDS) / (at_low - at_high)


@dataclass(frozen=True)
class WarmUp:
    """What the warm-up found. model: fitted on its steps. scale: of all lengths. slos: of these lengths. rate:
    requests/s that vllm holds. seconds: of load for each policy. doubt, poor_fit: how to read the
    result, or ""."""

    model: affine.Model
    scale: float
    slos: Mapping[str, SLO]
    rate: float
    seconds: float
    doubt: str
    poor_fit: str


@dataclass(frozen=True)
class Stage:
    """The model, the machine and the folder that all parts of one demo share."""

    out: Path
    model: str
    seed: int
    progress: Progress

    def kinds(self, slos: Mapping[str, SLO], scale: float) -> list[Kind]:
        return kinds(slos, scale)

    def load(
        self, rate: float, seconds: float, slos: Mapping[str, SLO], scale: float, name: str = "demo", texts: bool = True
    ) -> Workload:
        """Poisson arrivals given their number: in some thirty seconds a plain draw is off its rate by a tenth or more,
        and 1.3 times a rate would mean anything between 1.1 and 1.5. Every class is there: of draws that lack one, or
        have less than half of its share, the next is taken."""
        mix, count = self.kinds(slos, scale), max(1, round(rate * seconds))
        least = {kind.tier: max(1.0, 0.5 * kind.share * count) for kind in mix} if count >= 10 else {}
        for seed in itertools.count(self.seed):
            drawn = Counter(a.tier for a in make(name, mix, rate, count=count, seed=seed, texts=False).arrivals)
            if all(drawn[tier] >= few for tier, few in least.items()):
                break
        counting = self._count() if texts else None
        made = make(name, mix, rate, count=count, seed=seed, count_tokens=counting, texts=texts)
        factor = seconds * count / (count + 1) / made.arrivals[-1].at
        arrivals = tuple(dataclasses.replace(a, at=a.at * factor) for a in made.arrivals)
        return dataclasses.replace(made, rate=count / seconds, duration=seconds, arrivals=arrivals)

    # ----------------------------------------------------------------- warm-up

    def warm_up(self, seconds: float | None = None) -> WarmUp:
        """Two servers: one that chunks prompts finely, for steps of every kind; then vllm's, for the rate it holds."""
        logs = [self.out / f"{name}.events.jsonl" for name in ("measure", "hold")]
        self.progress.begin()
        with (
            self._server("sarathi", {"budget": PROMPT}, {}, None, "measure", logs[0]) as server,
            self.progress.watched("this machine was measured", server.pid),
        ):
            unloaded = self._unloaded(server.url)
            say(f"      TTFT of {PROMPT} prompt tokens {ms(unloaded.ttft)}, one decode step {ms(unloaded.step)}")
            self.progress.begin()
            most = burst_of(unloaded)
            for requests in (most, max(2, most // 6), max(3, most // 3)):
                self._burst(server.url, requests)
        samples = steps(event_log.read(logs[0]))
        model, _ = self._fit(samples)
        self.progress.begin()
        scale, simulated = self._sized(unloaded, model)
        slos = unloaded.scaled(scale, model).slos()
        shorter = "" if scale == 1.0 else f"; this machine is slow, so all lengths are {scale:g} times the usual"
        say(f"      {simulated:.2f} requests/s{shorter}")
        for tier, slo in slos.items():
            say(f"      {tier:8} SLO: TTFT {ms(slo.ttft)}, TPOT {ms(slo.tpot)}")
        self.progress.begin()
        with (
            self._server("vllm", {}, {}, None, "hold", logs[1]) as server,
            self.progress.watched("vllm's rate was tried", server.pid),
        ):
            # the simulated server has its cores to itself, the real one shares them with its clients
            rate, doubt = checked_rate(lambda r: self._attained(server.url, r, slos, scale), 0.9 * simulated)
        model, report = self._fit(samples + steps(event_log.read(logs[1])))
        if seconds is None:
            seconds = min(LONGEST, max(SECONDS, LEAST / (OVERLOAD * rate)))
        self.progress.contest_takes(seconds)
        return WarmUp(model, scale, slos, rate, seconds, doubt, poor_fit(report))

    def _unloaded(self, url: str) -> Unloaded:
        """One request at a time, six of them of which the first does not count, and medians."""
        kind = Kind("code", SLO(), prompt=(PROMPT, PROMPT), output=(16, 16))
        alone = make("unloaded", [kind], 1.0, count=6, seed=self.seed, count_tokens=self._count())
        records = [self._bench(url, self._one(alone, arrival), "unloaded").records[0] for arrival in alone.arrivals]
        ttft, tpot = ([v for r in records[1:] if (v := getattr(r.verdict, name))] for name in ("ttft", "tpot"))
        if len(ttft) + len(tpot) < 10:
            raise BenchError(f"the unloaded measurement failed: {[r.reason for r in records if r.reason]}")
        return Unloaded(median(ttft), median(tpot))

    def _burst(self, url: str, requests: int) -> None:
        """Steps for the latency model: so many requests at once, until the last has ended."""
        mix = kinds(dict.fromkeys(TIERS, SLO()), outputs=0.5)
        load = make("burst", mix, 1.0, count=requests, seed=requests, count_tokens=self._count())
        at_once = tuple(dataclasses.replace(a, at=0.0) for a in load.arrivals)
        self._bench(url, dataclasses.replace(load, arrivals=at_once, duration=1.0), f"burst of {requests}")

    def _fit(self, samples: Sequence[Sample]) -> tuple[affine.Model, Report]:
        model = affine.Model()
        model.fit(samples)
        return model, error_report(model, samples)

    def _sized(self, unloaded: Unloaded, model: affine.Model) -> tuple[float, float]:
        """The scale of all lengths at which LEAST requests come in SECONDS (or the smallest), and the rate at which
        vllm attains 90 % of these, simulated."""
        for scale in SCALES:
            pattern = self.load(1.0, 120.0, unloaded.scaled(scale, model).slos(), scale, "hold", texts=False)
            rate, _ = narrowed(lambda r, p=pattern: self._holds(p.rescaled(r), model), 0.02, 50.0, 0.03)  # type: ignore[misc]
            if OVERLOAD * rate * SECONDS >= LEAST:
                break
        return scale, rate

    def _holds(self, load: Workload, model: affine.Model) -> bool:
        return attained(simulated_run(load, self._setup("vllm", {}, model))) >= HOLDS

    def _attained(self, url: str, rate: float, slos: Mapping[str, SLO], scale: float) -> float:
        run = self._bench(url, self.load(rate, CHECK_SECONDS, slos, scale, "hold"), f"{rate:.2f}/s")
        say(f"      {rate:.2f} requests/s: {100 * attained(run):.0f} % of {len(run.records)} attained")
        return attained(run)

    # ----------------------------------------------------------------- the contest

    def tuned_budget(self, warm: WarmUp, load: Workload) -> int:
        """Sarathi's token budget that attains the most on this workload, in simulation."""
        met = {
            budget: kept(simulated_run(load, self._setup("sarathi", {"budget": budget}, warm.model)))
            for budget in BUDGETS
        }
        best = max(met, key=lambda budget: met[budget])
        say(f"      sarathi's budget, tuned in simulation: {best or 'by the tightest TPOT'}")
        return best

    def contest(self, policy: str, settings: Mapping[str, object], warm: WarmUp, load: Workload) -> Run:
        with (
            self._server(policy, settings, load.tiers, warm.model, policy) as server,
            self.progress.watched(f"{policy} served", server.pid),
        ):
            run = self._bench(server.url, load, policy, "slo", warmup=6)
        results.write_records(self.out / f"{policy}.records.jsonl", run)
        say(f"      met the SLO of {kept(run)} of {len(run.records)}")
        for problem in run.problems:
            say(f"      {policy}: {problem}")
        return run

    # ----------------------------------------------------------------- parts

    def _setup(self, policy: str, settings: Mapping[str, object], model: affine.Model) -> SimulationSetup:
        return SimulationSetup(
            lambda: dataclasses.replace(model), LIMITS, policy, settings=settings, noise=0.05, seed=self.seed,
            learns=False,
        )  # fmt: skip

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
            "engine": {
                "kind": "torch",
                "kv_gib": 1.0,
                "max_num_seqs": LIMITS.max_num_seqs,
                "max_num_batched_tokens": LIMITS.max_num_batched_tokens,
            },
            "policy": {"name": policy, **settings},
            "max_in_flight": 1024,
            "prefix_cache": False,  # a repeated prompt must not be cheaper for the policy measured last
            "tiers": tier_settings(tiers),
        }
        if model is not None:
            config["latency"] = {"kind": "affine", **coefficients(model)}
        if log is not None:
            config["event_log"] = str(log)
        return ServerProcess(config, self.out / f"{name}.log")

    def _bench(self, url: str, load: Workload, label: str, slo: TierField = "body", warmup: int = 0) -> Run:
        target = Endpoint(url, "demo", tier_field=slo)
        return asyncio.run(load_generator.run(load, target, label=label, warmup=warmup, progress=False))

    def _one(self, load: Workload, arrival: Arrival) -> Workload:
        alone = dataclasses.replace(arrival, at=0.0)
        return dataclasses.replace(load, arrivals=(alone,), duration=1.0)

    def _count(self) -> Count:
        from rubato_torch.tokenizer import Text

        text = Text(Path(self.model))
        return lambda content: len(text.encode(content))


def tier_settings(tiers: Mapping[str, SLO]) -> dict[str, dict[str, float]]:
    """As a server's configuration takes them."""
    return {
        tier: {f"{name}_ms": 1e3 * value for name, value in asdict(slo).items() if value is not None}
        for tier, slo in tiers.items()
    }


def burst_of(unloaded: Unloaded) -> int:
    """Requests at once that take about BURST_SECONDS: prefills one after the other, decodes of many together, which are
    some five times as cheap as alone."""
    each = MEAN_PROMPT * unloaded.ttft / PROMPT + MEAN_OUTPUT / 2 * unloaded.step / 5
    return min(36, max(8, round(BURST_SECONDS / each)))


def poor_fit(report: Report) -> str:
    """How to read a result whose rates come from a model with such errors; "" where it fits."""
    if report.p50 <= POOR_P50 and report.p95 <= POOR_P95:
        return ""
    return (
        f"step times vary more than batches explain (half of them by over {report.p50:.0%}, one in twenty by over "
        f"{report.p95:.0%}), so rates from the simulator are rough, and a second run may differ by more than the "
        "intervals say"
    )


def kept(run: Run) -> int:
    """Requests that met their SLO."""
    return sum(record.verdict.met for record in run.records)


def attained(run: Run) -> float:
    """Attainment: the share of the offered requests that met their SLO."""
    return kept(run) / len(run.records)
