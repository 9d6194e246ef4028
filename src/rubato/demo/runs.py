"""The parts of `rubato demo`: measure the machine, find the rate that vllm sustains, serve a load under a policy."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median

from rubato.core import event_log
from rubato.core.plan import Limits, Sample, Shape
from rubato.core.request import SLO
from rubato.core.timeline import steps
from rubato.demo.progress import BURST_S, CHECK_S, LOAD_S, PhaseProgress, say
from rubato.fleet.cluster_options import PolicyChoice
from rubato.latency import affine
from rubato.latency.fit import FitReport, coefficients, error_report
from rubato.measure import load_generator, results
from rubato.measure.http_client import BenchError, Endpoint, TierField
from rubato.measure.records import BenchResult
from rubato.measure.server_process import served
from rubato.measure.tables import milliseconds
from rubato.planning.capacity import narrowed
from rubato.simulation.run_spec import Hardware, RunSpec
from rubato.simulation.simulate import simulate
from rubato.workloads import Arrival, Workload
from rubato.workloads.generate import make
from rubato.workloads.prompts import Count
from rubato.workloads.request_kinds import Kind

OVERLOAD = 1.3  # times the rate that vllm sustains
HOLDING_ATTAINMENT = 0.9  # attainment at which a rate is sustained
MAX_LOAD_S = 60.0  # of load for each policy, where even short requests are served slowly
MIN_REQUESTS = 40  # for each policy
SCALES = (1.0, 0.7, 0.5, 0.35, 0.25)  # of all lengths; the first that gives MIN_REQUESTS in LOAD_S is used
LIMITS = Limits(max_num_seqs=64, max_num_batched_tokens=2048, max_model_len=2048, kv_blocks=2048, block_size=16)
# Token budgets of Sarathi to try in simulation; 0 = by the tightest TPOT, taken only if it beats the others.
SARATHI_BUDGETS = (256, 512, 128, 64, 32, 0)
MAX_P50_ERROR, MAX_P95_ERROR = 0.15, 0.6  # relative errors of the latency model; beyond them its rates are rough
UNLOADED_PROMPT_TOKENS = 256


@dataclass(frozen=True)
class DemoTier:
    """A tier of the demo.

    Args:
        share: of requests.
        prompt: tokens, least and most.
        output: tokens, least and most.
        ttft: SLO in unloaded TTFTs of a prompt of UNLOADED_PROMPT_TOKENS.
        tpot: SLO in unloaded decode steps.
    """

    share: float
    prompt: tuple[int, int]
    output: tuple[int, int]
    ttft: float
    tpot: float


TIERS: Mapping[str, DemoTier] = {  # mostly chat that is read along, and a few long documents
    "chat": DemoTier(0.6, (30, 200), (60, 180), ttft=7, tpot=4),
    "code": DemoTier(0.3, (100, 400), (40, 120), ttft=8, tpot=4.5),
    "summary": DemoTier(0.1, (400, 900), (80, 160), ttft=9, tpot=5),
}
MEAN_PROMPT_TOKENS = sum(tier.share * sum(tier.prompt) / 2 for tier in TIERS.values())
MEAN_OUTPUT_TOKENS = sum(tier.share * sum(tier.output) / 2 for tier in TIERS.values())


@dataclass(frozen=True)
class Unloaded:
    """Median seconds without load: TTFT of UNLOADED_PROMPT_TOKENS, and one decode step alone."""

    ttft: float
    step: float

    def slos(self) -> dict[str, SLO]:
        return {name: SLO(tier.ttft * self.ttft, tier.tpot * self.step) for name, tier in TIERS.items()}

    def scaled(self, scale: float, model: affine.Model) -> Unloaded:
        """The same for prompts `scale` times as long, by the latency model."""
        whole, part = (model.step_time(Shape.prefill(max(1, round(UNLOADED_PROMPT_TOKENS * s)))) for s in (1.0, scale))
        return dataclasses.replace(self, ttft=self.ttft * part / whole)


def kinds(slos: Mapping[str, SLO], scale: float = 1.0, outputs: float = 1.0) -> list[Kind]:
    """Returns the demo's mix.

    Args:
        scale: factor on all lengths.
        outputs: a further factor on output lengths.
    """

    def tokens(span: tuple[int, int], by: float) -> tuple[int, int]:
        return max(8, round(span[0] * by)), max(16, round(span[1] * by))

    return [
        Kind(name, slos[name], tokens(tier.prompt, scale), tokens(tier.output, scale * outputs), share=tier.share)
        for name, tier in TIERS.items()
    ]


def check_rate(attained_at: Callable[[float], float], rate: float) -> tuple[float, str]:
    """The rate at which vllm attains 90 %, from two tries on the real server around the simulated `rate`; and a warning
    if the tries do not enclose it."""
    first = attained_at(rate)
    second = rate * (1.4 if first >= HOLDING_ATTAINMENT else 0.75)
    tries = sorted([(rate, first), (second, attained_at(second))])
    (low, at_low), (high, at_high) = tries
    if max(at_low, at_high) < HOLDING_ATTAINMENT:
        guess = 0.8 * low
        return guess, f"vllm held neither rate that was tried; {guess:.2f}/s, four fifths of the lower, is a guess"
    doubt = (
        f"vllm held both rates that were tried; it may hold more than {high:.2f}/s"
        if at_high >= HOLDING_ATTAINMENT
        else ""
    )
    return sustained_rate(tries), doubt


def sustained_rate(tries: Sequence[tuple[float, float]], policy: str = "vllm") -> float:
    """Returns the rate at which 90 % is attained, interpolated between the highest rate that held and the next one
    tried.

    Args:
        tries: pairs of a rate, requests/s, and its attainment.

    Raises:
        BenchError: no rate held.
    """
    holding = [(rate, attained_share) for rate, attained_share in tries if attained_share >= HOLDING_ATTAINMENT]
    if not holding:
        lowest = min(rate for rate, _ in tries)
        raise BenchError(
            f"{policy} held none of {len(tries)} rates down to {lowest:.2f}/s: is something else using this machine?"
        )
    low, at_low = max(holding)
    beyond = [(rate, attained_share) for rate, attained_share in tries if rate > low]
    if not beyond:
        return low
    high, at_high = min(beyond)
    return low + (high - low) * (at_low - HOLDING_ATTAINMENT) / (at_low - at_high)


@dataclass(frozen=True)
class WarmUp:
    """The result of the warm-up.

    Args:
        model: fitted on the steps of the warm-up.
        scale: factor on all lengths.
        slos: by tier, for these lengths.
        rate: requests/s that vllm sustains.
        seconds: of load for each policy.
        doubt: warning about the rate, or "".
        poor_fit: warning about the model, or "".
    """

    model: affine.Model
    scale: float
    slos: Mapping[str, SLO]
    rate: float
    seconds: float
    doubt: str
    poor_fit: str


@dataclass(frozen=True)
class DemoStage:
    """The model, the machine and the folder that all parts of one demo share."""

    out: Path
    model: str
    seed: int
    progress: PhaseProgress

    def kinds(self, slos: Mapping[str, SLO], scale: float) -> list[Kind]:
        return kinds(slos, scale)

    def load(
        self, rate: float, seconds: float, slos: Mapping[str, SLO], scale: float, name: str = "demo", texts: bool = True
    ) -> Workload:
        """A workload with Poisson arrivals of a fixed number: a plain draw of thirty seconds is off its rate by a tenth
        or more, so that 1.3 times a rate would mean anything between 1.1 and 1.5. A draw in which a tier has under half
        of its share is replaced by the next seed's."""
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
        """Measure two servers: one that chunks prompts finely, for steps of every kind; then vllm's, for its rate."""
        measured, tried = (self.out / f"{name}.events.jsonl" for name in ("measure", "hold"))
        self.progress.begin()
        with self._serve_policy("measure", {"name": "sarathi", "budget": UNLOADED_PROMPT_TOKENS}, measured) as url:
            unloaded = self._measure_unloaded(url)
            ttft, step = milliseconds(unloaded.ttft), milliseconds(unloaded.step)
            say(f"      TTFT of {UNLOADED_PROMPT_TOKENS} prompt tokens {ttft}, one decode step {step}")
            self.progress.begin()
            most = burst_size(unloaded)
            for requests in (most, max(2, most // 6), max(3, most // 3)):
                self._burst(url, requests)
        samples = steps(event_log.read(measured))
        model, _ = self._fit(samples)
        self.progress.begin()
        scale, simulated = self._find_scale(unloaded, model)
        slos = unloaded.scaled(scale, model).slos()
        shorter = "" if scale == 1.0 else f"; this machine is slow, so all lengths are {scale:g} times the usual"
        say(f"      {simulated:.2f} requests/s{shorter}")
        for tier, slo in slos.items():
            say(f"      {tier:8} SLO: TTFT {milliseconds(slo.ttft)}, TPOT {milliseconds(slo.tpot)}")
        self.progress.begin()
        with self._serve_policy("hold", {"name": "vllm"}, tried) as url:
            # the simulated server has its cores to itself, the real one shares them with its clients
            rate, doubt = check_rate(lambda r: self._measure_attainment(url, r, slos, scale), 0.9 * simulated)
        model, report = self._fit(samples + steps(event_log.read(tried)))
        if seconds is None:
            seconds = min(MAX_LOAD_S, max(LOAD_S, MIN_REQUESTS / (OVERLOAD * rate)))
        self.progress.seconds = seconds
        return WarmUp(model, scale, slos, rate, seconds, doubt, poor_fit_warning(report))

    def _measure_unloaded(self, url: str) -> Unloaded:
        """Measure six requests, one at a time, and take medians; the first does not count."""
        kind = Kind("code", SLO(), prompt=(UNLOADED_PROMPT_TOKENS, UNLOADED_PROMPT_TOKENS), output=(16, 16))
        alone = make("unloaded", [kind], 1.0, count=6, seed=self.seed, count_tokens=self._count())
        records = [self._bench(url, at_once(alone, [one]), "unloaded").records[0] for one in alone.arrivals]
        ttft, tpot = ([v for r in records[1:] if (v := getattr(r.verdict, name))] for name in ("ttft", "tpot"))
        if len(ttft) + len(tpot) < 10:
            reasons = [r.reason for r in records if r.reason]
            raise BenchError(f"the unloaded measurement failed: {reasons}")
        return Unloaded(median(ttft), median(tpot))

    def _burst(self, url: str, requests: int) -> None:
        """Send `requests` at once and wait for the last, for steps to fit the latency model on."""
        mix = kinds(dict.fromkeys(TIERS, SLO()), outputs=0.5)
        load = make("burst", mix, 1.0, count=requests, seed=requests, count_tokens=self._count())
        self._bench(url, at_once(load, load.arrivals), f"burst of {requests}")

    def _fit(self, samples: Sequence[Sample]) -> tuple[affine.Model, FitReport]:
        model = affine.Model()
        model.fit(samples)
        return model, error_report(model, samples)

    def _find_scale(self, unloaded: Unloaded, model: affine.Model) -> tuple[float, float]:
        """The scale of all lengths at which MIN_REQUESTS come in LOAD_S (or the smallest), and the rate at which vllm
        attains 90 %, both by simulation."""
        for scale in SCALES:
            pattern = self.load(1.0, 120.0, unloaded.scaled(scale, model).slos(), scale, "hold", texts=False)
            rate, _ = narrowed(partial(self._is_held, pattern, model), 0.02, 50.0, 0.03)
            if OVERLOAD * rate * LOAD_S >= MIN_REQUESTS:
                break
        return scale, rate

    def _is_held(self, pattern: Workload, model: affine.Model, rate: float) -> bool:
        return attained_share(self._simulate(pattern.rescaled(rate), PolicyChoice("vllm"), model)) >= HOLDING_ATTAINMENT

    def _measure_attainment(self, url: str, rate: float, slos: Mapping[str, SLO], scale: float) -> float:
        run = self._bench(url, self.load(rate, CHECK_S, slos, scale, "hold"), f"{rate:.2f}/s")
        say(f"      {rate:.2f} requests/s: {100 * attained_share(run):.0f} % of {len(run.records)} attained")
        return attained_share(run)

    # ----------------------------------------------------------------- the contest

    def tune_budget(self, warm: WarmUp, load: Workload) -> int:
        """The token budget with which Sarathi attains the most on this workload, by simulation."""
        runs = {
            budget: self._simulate(load, PolicyChoice("sarathi", {"budget": budget}), warm.model)
            for budget in SARATHI_BUDGETS
        }
        best = max(SARATHI_BUDGETS, key=lambda budget: count_met(runs[budget]))
        say(f"      sarathi's budget, tuned in simulation: {best or 'by the tightest TPOT'}")
        return best

    def contest(self, policy: str, settings: Mapping[str, object], warm: WarmUp, load: Workload) -> BenchResult:
        latency = {"kind": "affine", **coefficients(warm.model)}
        tiers = tier_settings(load.tiers)
        with self._serve_policy(policy, {"name": policy, **settings}, tiers=tiers, latency=latency) as url:
            run = self._bench(url, load, policy, "slo", warmup=6)
        results.write_records(self.out / f"{policy}.records.jsonl", run)
        say(f"      met the SLO of {count_met(run)} of {len(run.records)}")
        for problem in run.problems:
            say(f"      {policy}: {problem}")
        return run

    # ----------------------------------------------------------------- parts

    def _simulate(self, load: Workload, choice: PolicyChoice, model: affine.Model) -> BenchResult:
        return simulate(load, RunSpec(Hardware("this machine", model, LIMITS), choice, noise=0.05), self.seed)

    @contextmanager
    def _serve_policy(
        self, name: str, policy: Mapping[str, object], log: Path | None = None, **options: object
    ) -> Iterator[str]:
        """Runs a server with this policy and yields its URL.

        Args:
            log: file that its events are written to.
            options: further settings of the server.
        """
        config = {
            "model": self.model,
            "served_model_name": "demo",
            "engine": {
                "kind": "torch",
                "kv_gib": 1.0,
                "max_num_seqs": LIMITS.max_num_seqs,
                "max_num_batched_tokens": LIMITS.max_num_batched_tokens,
            },
            "policy": policy,
            "max_in_flight": 1024,
            "prefix_cache": False,  # a repeated prompt must not be cheaper for the policy measured last
            "event_log": None if log is None else str(log),
            **options,
        }
        with served(config, self.out / f"{name}.log") as (url, pid), self.progress.watch_cores(pid):
            yield url

    def _bench(self, url: str, load: Workload, label: str, slo: TierField = "body", warmup: int = 0) -> BenchResult:
        target = Endpoint(url, "demo", tier_field=slo)
        return asyncio.run(load_generator.run(load, target, label=label, warmup=warmup, progress=False))

    def _count(self) -> Count:
        from rubato_torch.tokenizer import Text

        text = Text(Path(self.model))
        return lambda content: len(text.encode(content))


def at_once(load: Workload, arrivals: Sequence[Arrival]) -> Workload:
    """Some requests of a workload, all at time 0."""
    arrivals = tuple(dataclasses.replace(a, at=0.0) for a in arrivals)
    return dataclasses.replace(load, arrivals=arrivals, duration=1.0)


def tier_settings(tiers: Mapping[str, SLO]) -> dict[str, dict[str, float]]:
    """SLOs as the `tiers` of a server's configuration."""
    return {tier: {f"{name}_ms": 1e3 * value for name, value in slo.bounds.items()} for tier, slo in tiers.items()}


def burst_size(unloaded: Unloaded) -> int:
    """How many requests at once take about BURST_S: prefills run one after another, decodes batched, which makes them
    some five times as cheap."""
    each = MEAN_PROMPT_TOKENS * unloaded.ttft / UNLOADED_PROMPT_TOKENS + MEAN_OUTPUT_TOKENS / 2 * unloaded.step / 5
    return min(36, max(8, round(BURST_S / each)))


def poor_fit_warning(report: FitReport) -> str:
    """A warning where the latency model fits the steps poorly; "" where it fits."""
    if report.p50 <= MAX_P50_ERROR and report.p95 <= MAX_P95_ERROR:
        return ""
    return (
        f"step times vary more than batches explain (half of them by over {report.p50:.0%}, one in twenty by over "
        f"{report.p95:.0%}), so rates from the simulator are rough, and a second run may differ by more than the "
        "intervals say"
    )


def count_met(run: BenchResult) -> int:
    """Requests that met their SLO."""
    return sum(record.verdict.met for record in run.records)


def attained_share(run: BenchResult) -> float:
    """Attainment: the share of the offered requests that met their SLO."""
    return count_met(run) / len(run.records)
