"""What PolyServe's figures have in common: Llama-3.1-8B on H200, the paper's tiers, its baselines, and runs of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from typing import Any

from experiments._guest import held
from rubato.core.events import Event
from rubato.fleet.cluster_options import PolicyChoice
from rubato.latency.components import Model
from rubato.measure.records import BenchResult, Record
from rubato.planning.capacity import crossing
from rubato.planning.optimum import Mode, optimum
from rubato.simulation.run_spec import Hardware, RunSpec, conditional_mean, packaged_hardware
from rubato.simulation.simulate import simulate
from rubato.workloads import Workload, scenarios
from rubato.workloads.generate import BEST_EFFORT

REPLICAS, TARGET = 20, 0.9
MODES: tuple[Mode, ...] = ("co", "pd")
OURS = {"co": "polyserve@polyserve:mode=co", "pd": "polyserve@polyserve:mode=pd"}
# Seconds of a step outside the device, constant and for each sequence. The first gives the paper's 15 ms a token at
# batch 1 (§5.1), the second its B of 50 at 20 ms and 150 at 40 ms (§3.6); both at once is not possible.
HOSTS: Mapping[str, tuple[float, float]] = {"constant": (0.0102, 0.0), "per sequence": (0.0044, 0.000107)}
LIMITS = {"max_model_len": 131072, "max_num_seqs": 1024}
LONGEST = 2048  # tokens that every request asks for: no policy is told the true output
# Mean times that a request is there, were each token to take its TPOT, in which requests come that are not counted:
# first, while the fleet fills, and last, so that those counted do not end in a fleet that empties.
BEFORE, AFTER = 2.0, 0.5
BRACKET = 0.2  # rates on either side of the 90 % point are no further apart than this

CHUNKS = (
    *(f"co_chunk:budget={budget}@least_loaded" for budget in (2048, 1024, 512)),
    *(f"co_chunk:budget=2048@{router}" for router in ("minimal", "random")),
)
SPLITS = tuple(f"distserve@minimal:prefill={n},decode={REPLICAS - n}" for n in (6, 4, 2, 8, 10, 12, 14))
BASELINES: Mapping[str, Sequence[str]] = {"co": CHUNKS, "pd": SPLITS}


@lru_cache
def hardware(host: str = "constant") -> Hardware:
    made = packaged_hardware(scenarios.H200, **LIMITS)
    model = made.model
    assert isinstance(model, Model)
    constant, each = HOSTS[host]
    return replace(made, name=f"{made.name}, host {host}", model=replace(model, host=constant, host_per_seq=each))


@lru_cache
def sample(data: str, host: str) -> Workload:
    return promised(data, host, 5000, 0)


def promised(data: str, host: str, count: int, seed: int) -> Workload:
    """At 1 request/s; without those (one in twelve of Mooncake) whose TTFT not even an idle replica could meet."""
    load = scenarios.make(f"polyserve-{data}", 1.0, count=count, seed=seed, prefill=hardware(host).prefill)
    kept = tuple(a for a in load.arrivals if a.tier != BEST_EFFORT)
    return replace(load, arrivals=kept, rate=load.rate * len(kept) / len(load.arrivals))


@lru_cache
def best_rate(data: str, host: str, mode: Mode) -> float:
    """The optimum, in requests/s of one replica."""
    made = hardware(host)
    return optimum(sample(data, host), made.model, made.limits, mode).rate


@lru_cache
def stay(data: str, host: str) -> float:
    """Mean seconds that a request is there, were each token to take its TPOT."""
    load = sample(data, host)
    return sum(a.output_tokens * (load.slo(a).tpot or 0.0) for a in load.arrivals) / len(load.arrivals)


def before(data: str, host: str, replicas: int, fill: float) -> int:
    """Requests that come before those counted, in `fill` times that."""
    return round(fill * stay(data, host) * replicas * best_rate(data, host, "co"))


@lru_cache(maxsize=2)
def offered(data: str, host: str, count: int, seed: int, replicas: int, fill: float) -> Workload:
    """`count` that are counted, or a few less, and those before and after them; at some rate."""
    total = count + before(data, host, replicas, fill) + before(data, host, replicas, AFTER * fill / BEFORE)
    return promised(data, host, total, seed)


def served(
    load: Workload, host: str, choice: str, replicas: int = REPLICAS, listen: Callable[[Event], None] | None = None
) -> BenchResult:
    choices = PolicyChoice.parse(choice)
    spec = RunSpec(hardware(host), choices, replicas, lengths=conditional_mean, stated_max_tokens=LONGEST)
    return simulate(load, spec, times=False, causes=False, listen=listen)


def share(records: Sequence[Record]) -> float:
    """Of the requests offered, those that met their SLO, and were not demoted."""
    return sum(r.verdict.met and not r.best_effort for r in records) / len(records)


def by_tier(records: Sequence[Record]) -> dict[str, float]:
    """Share of each TPOT tier, the tightest first."""
    tiers = sorted({r.tier for r in records}, key=lambda tier: float(tier.removeprefix("tpot-").removesuffix("ms")))
    return {tier: share([r for r in records if r.tier == tier]) for tier in tiers}


class Tried:
    """Runs of one workload at several rates, each done once. known: (policy, rate) -> the share that attained, in all
    and by tier."""

    def __init__(
        self, data: str, host: str, count: int, seed: int, replicas: int = REPLICAS, fill: float = BEFORE
    ) -> None:
        self.data, self.host, self.count, self.seed = data, host, count, seed
        self.replicas, self.fill = replicas, fill
        self.known: dict[tuple[str, float], dict[str, float]] = {}

    def load(self, rate: float) -> Workload:
        return offered(self.data, self.host, self.count, self.seed, self.replicas, self.fill).rescaled(rate)

    def shares(self, choice: str, rate: float) -> Mapping[str, float]:
        if (choice, rate) not in self.known:
            first = before(self.data, self.host, self.replicas, self.fill)
            records = served(self.load(rate), self.host, choice, self.replicas).records[first : first + self.count]
            self.known[choice, rate] = {"all": share(records), **by_tier(records)}
        return self.known[choice, rate]

    def attained(self, choice: str) -> Callable[[float], float]:
        return lambda rate: self.shares(choice, rate)["all"]

    def best(self, choices: Sequence[str], start: float, step: float = 1.4) -> tuple[float, str]:
        """The largest rate at which 90 % attain of these settings, and which one's it is; one is searched only if it
        attains at the rate of the best before it. (0, the first) where none does at an eighth of `start`."""
        best, found = choices[0], 0.0
        for choice in choices:
            if len(choices) == 1 or self.attained(choice)(found or start / 8.0) >= TARGET:
                rate = held(partial(self.goodput, choice, found or start, step))
                found, best = max((found, best), (rate, choice))
        return found, best

    def goodput(self, choice: str, start: float, step: float = 1.08) -> float:
        """The rate at which 90 % attain: on the line (share over log rate) between the ends of a bracket."""
        attained = self.attained(choice)
        middle = crossing(attained, TARGET, start, BRACKET, step)
        rates = sorted(rate for known, rate in self.known if known == choice)
        high = min(rate for rate in rates if rate > middle and attained(rate) < TARGET)
        low = max(rate for rate in rates if rate < high and attained(rate) >= TARGET)
        part = (attained(low) - TARGET) / (attained(low) - attained(high))
        return float(low * (high / low) ** part)

    def near(self, choice: str, rate: float) -> Mapping[str, float]:
        """Shares at the rate tried that is next to this one."""
        return self.known[choice, min((r for c, r in self.known if c == choice), key=lambda r: abs(r - rate))]

    def listed(self) -> list[Any]:
        return sorted([choice, rate, shares["all"]] for (choice, rate), shares in self.known.items())
