"""`rubato demo`: one model, this machine, three tiers of requests, policy against policy, in some three minutes.

What it does, in order: measure the unloaded TTFT and step time and set each tier's SLO as a fixed multiple of them; fit
the latency model on steps of every kind; ask the simulator which rate `vllm` holds, and try that rate twice; offer 1.3
times the rate, the same requests at the same times, to `vllm`, `sarathi` (its budget tuned on this workload) and one of
ours, each in a server of its own. A slow machine gets shorter requests, and only then more seconds, LONGEST at most.
"""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median

from rubato.core import event_log
from rubato.core.clock import WallClock, process_cpu_time
from rubato.core.cpu_usage import TakenCores, cpu_seconds_of, usable
from rubato.core.plan import Limits, Sample, Shape
from rubato.core.request import SLO
from rubato.core.timeline import steps
from rubato.latency import affine
from rubato.latency.fit import coefficients
from rubato.latency.fit_error import Report, error_report
from rubato.measure import load_generator, plot, results
from rubato.measure.server_process import ServerProcess
from rubato.planning.capacity import narrowed
from rubato.policies import PolicyError, router_for
from rubato.policies import load as load_policy
from rubato.simulation.simulate import SimulationSetup, simulated_run
from rubato.workloads import Arrival, Workload, write
from rubato.workloads.generate import make
from rubato.workloads.prompts import Count
from rubato.workloads.request_kinds import Kind

OVERLOAD = 1.3  # times the rate that vllm holds
HOLDS = 0.9  # attainment at which a rate is held (SYSTEMS: capacity)
SECONDS = 24.0  # of load for each policy,
LONGEST = 60.0  # at most, where even short requests are served slowly
LEAST = 40  # requests for each policy
SCALES = (1.0, 0.7, 0.5, 0.35, 0.25)  # of all lengths: the first at which LEAST requests come in SECONDS
CHECK_SECONDS = 14.0  # of each rate tried on the real server
BURST_SECONDS = 7.0  # what the largest burst of the measurement should take
LIMITS = Limits(max_seqs=64, max_tokens=2048, max_length=2048, kv_blocks=2048, block=16)
# Sarathi's, tried in simulation; 0 = by the tightest TPOT, which is as good as the model: last of equally good ones
BUDGETS = (256, 512, 128, 64, 32, 0)

DISTURBED = 0.25  # cores that other programs used: beyond it the result is to be read with care
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
        raise load_generator.BenchError(
            f"{policy} held none of {len(tries)} rates down to {lowest:.2f}/s: is something else using this machine?"
        )
    low, at_low = max(holding)
    beyond = [(rate, attained) for rate, attained in tries if rate > low]
    if not beyond:
        return low
    high, at_high = min(beyond)
    return low + (high - low) * (at_low - HOLDS) / (at_low - at_high)


def demo(out: Path, *, policy: str = "edf", seconds: float | None = None, seed: int = 0) -> int:
    """Run the demo and write everything into `out`. seconds: of load for each policy, instead of what the machine's
    speed calls for. Returns 0 when it ran to its end, whatever the verdict; 1 when a run could not be trusted (the load
    generator was late). Raises ServerError, BenchError, PolicyError, ImportError."""
    from rubato.engines.torch import bundled_model

    _check_able(policy)
    if seconds is not None and not 1.0 <= seconds <= 3600.0:
        raise load_generator.BenchError(f"--seconds is {seconds:g}: give 1 to 3600 seconds of load for each policy")
    began = time.monotonic()
    out.mkdir(parents=True, exist_ok=True)
    stage = Stage(out, str(bundled_model.ensure()), seed, Progress(policy))
    warm = stage.warm_up(seconds)
    load = stage.load(OVERLOAD * warm.rate, warm.seconds, warm.slos, warm.scale)
    write(load, out / "workload.jsonl")
    budget = stage.tuned_budget(warm, load)
    contestants: list[tuple[str, dict[str, object]]] = [("vllm", {}), ("sarathi", {"budget": budget}), (policy, {})]
    say(f"      {len(load.arrivals)} requests in {load.duration:.0f} s ({load.rate:.2f}/s), the same for each policy")
    runs = []
    for name, settings in contestants:
        stage.progress.begin()
        runs.append(stage.contest(name, settings, warm, load))
    comparisons = [results.compare([runs[-1]], [run]) for run in runs[:-1]]
    results.write_json(out / "demo.json", runs, comparisons)
    plot.plot(out / "demo.png", runs, title=f"{OVERLOAD} x the rate that vllm holds: {load.rate:.2f} requests/s")
    plot.plot_attainment(out / "attainment-light.svg", runs, plot.CLEAR)
    plot.plot_attainment(out / "attainment-dark.svg", runs, plot.DARK)
    print("\n" + results.table(runs) + "\n")
    print(sentence(runs, bool(warm.doubt)) + "\n")
    for comparison in comparisons:
        print(interval(comparison))
    for warning in filter(None, [warm.doubt, warm.poor_fit, held_after_all(runs), stage.progress.disturbance()]):
        print(f"READ WITH CARE: {warning}.")
    print(f"\nPicture: {out}/demo.png. Every request: {out}/*.records.jsonl. {time.monotonic() - began:.0f} s in all.")
    print("\nTry next:\n" + "\n".join(f"    {line}" for line in next_commands(out)))
    return 0 if all(run.valid for run in runs) else 1


def _check_able(policy: str) -> None:
    """Raises PolicyError for one that is not there, or that one replica of the embedded engine cannot run."""
    from rubato.engines.torch import Engine  # needs the torch extra, as `bundled` does

    if lacking := load_policy(policy).needs - Engine.supports:
        raise PolicyError(f"policy {policy!r} needs an engine that can {', '.join(sorted(lacking))}; the demo's cannot")
    if hasattr(router_for(policy, "auto", {}, {}), "roles"):
        raise PolicyError(f"policy {policy!r} runs on several replicas; the demo has one: try `rubato simulate`")


def sentence(runs: Sequence[results.Run], doubtful: bool = False) -> str:
    """What came out, for anyone. doubtful: the rate that vllm holds was not enclosed by those tried."""
    *baselines, ours = runs
    met = {run.label: kept(run) for run in runs}
    others = " and ".join(f"{run.label} of {met[run.label]}" for run in baselines)
    holds = "may hold (see below)" if doubtful else "holds"
    return (
        f"Under {OVERLOAD} x the load that vLLM's scheduling {holds}, {ours.label} met the SLO of "
        f"{met[ours.label]} of {len(ours.records)} requests, {others}."
    )


def held_after_all(runs: Sequence[results.Run]) -> str:
    """What to say where the load was no overload; "" where it was."""
    vllm = runs[0]
    if attained(vllm) < HOLDS:
        return ""
    return (
        f"{vllm.label} attained {attained(vllm):.0%} of a load that was to be {OVERLOAD} x what it holds, so this "
        "machine is faster now than when that rate was tried: run the demo again"
    )


def interval(comparison: results.Comparison) -> str:
    """The difference to one baseline, of all requests, in points."""
    d = comparison.differences["all"]
    value, low, high = (100 * v for v in (d.difference, d.difference_low, d.difference_high))
    told = "" if low > 0 or high < 0 else ": too few requests to tell which is better"
    return (
        f"{comparison.a} against {comparison.b}: {value:+.0f} points of attainment, "
        f"95 % interval {low:+.0f} to {high:+.0f}{told}"
    )


def next_commands(out: Path) -> list[str]:
    """What to do after it, as typed from here."""
    program = os.path.relpath(sys.argv[0]) if Path(sys.argv[0]).name == "rubato" else "rubato"
    return [
        f"{program} serve bundled --port 8000        # any OpenAI client; state SLOs as README.md shows",
        f"{program} simulate --workload {out}/workload.jsonl --steps {out}/measure.events.jsonl --policy slos_serve"
        "  # simulated, which is optimistic about a real machine",
        f"{program} demo --policy slos_serve --out {out}-slos_serve  # others: `{program} policies`",
    ]


def kept(run: results.Run) -> int:
    """Requests that met their SLO."""
    return sum(record.verdict.met for record in run.records)


def attained(run: results.Run) -> float:
    """Attainment: the share of the offered requests that met their SLO."""
    return kept(run) / len(run.records)


def say(text: str) -> None:
    print(text, flush=True)


# --------------------------------------------------------------------------- telling


SERVING = "serving under"
START = 6.0  # seconds that a server takes to load
TAIL = 10.0  # that a policy takes to warm up, and to serve what is left when the last request has come


@dataclass
class Progress:
    """One line for each phase, with the time left; and what other programs did meanwhile."""

    policy: str
    left: list[tuple[str, float]] = field(init=False)  # phases to come, with about how many seconds each takes
    disturbances: list[str] = field(default_factory=list)
    phases: int = field(init=False)

    def __post_init__(self) -> None:
        self.left = [
            ("measuring TTFT and decode step, unloaded", START + 6.0),
            ("measuring steps of every kind, for the latency model", 2 * BURST_SECONDS),
            ("simulating which rate vllm holds", 5.0),
            ("trying that rate on the real server", START + 2 * (CHECK_SECONDS + 4.0)),
            *((f"{SERVING} {policy}", 0.0) for policy in ("vllm", "sarathi", self.policy)),
        ]
        self.phases = len(self.left)
        self.contest_takes(SECONDS)

    def contest_takes(self, seconds: float) -> None:
        each = START + seconds + TAIL
        self.left = [(name, each if name.startswith(SERVING) else old) for name, old in self.left]

    def begin(self) -> None:
        """The next phase begins."""
        minutes, seconds = divmod(round(sum(seconds for _, seconds in self.left)), 60)
        number = self.phases - len(self.left) + 1
        name, _ = self.left.pop(0)
        say(f"[{number}/{self.phases}] {name} ...".ljust(66) + f"about {minutes}:{seconds:02} left")

    @contextmanager
    def watched(self, what: str, pid: int) -> Iterator[None]:
        """Note it when programs other than this one and the server `pid` use the cores."""
        others = TakenCores(WallClock(), own=lambda: process_cpu_time() + cpu_seconds_of(pid), window=0.0)
        yield
        if (taken := others.now()) > DISTURBED:
            self.disturbances.append(f"{taken:.1f} while {what}")

    def disturbance(self) -> str:
        """How to read a result that other programs had a part in; "" where they had none."""
        if not self.disturbances:
            return ""
        return (
            f"other programs used some of this machine's {len(usable())} cores ({', '.join(self.disturbances)}), "
            "and a policy that had more of that beside it than another looks worse than it is"
        )


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
            raise load_generator.BenchError(
                f"the unloaded measurement failed: {[r.reason for r in records if r.reason]}"
            )
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

    def contest(self, policy: str, settings: Mapping[str, object], warm: WarmUp, load: Workload) -> results.Run:
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
            config["event_log"] = str(log)
        return ServerProcess(config, self.out / f"{name}.log")

    def _bench(
        self, url: str, load: Workload, label: str, slo: load_generator.TierField = "body", warmup: int = 0
    ) -> results.Run:
        how = load_generator.run(load, url, "demo", label=label, tier_field=slo, warmup=warmup, progress=False)
        return asyncio.run(how)

    def _one(self, load: Workload, arrival: Arrival) -> Workload:
        alone = dataclasses.replace(arrival, at=0.0)
        return dataclasses.replace(load, arrivals=(alone,), duration=1.0)

    def _count(self) -> Count:
        from rubato.engines.torch.tokenizer import Text

        text = Text(Path(self.model))
        return lambda content: len(text.encode(content))


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


def ms(seconds: float | None) -> str:
    return "-" if seconds is None else f"{1e3 * seconds:.0f} ms"
