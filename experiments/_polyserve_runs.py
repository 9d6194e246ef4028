"""What PolyServe's figures have in common: Llama-3.1-8B on H200, the paper's tiers, its baselines, and runs of them.

Step times are off by 5 % (noise), KV moves at 50 GB/s, and lengths are learnt, by default from 1,000 requests that came
before: those of the tuning's seed, which is no other run's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import lru_cache, partial
from itertools import islice

from experiments._host import TODAY, at_host
from experiments._rate_search import RateSearch, shares_of
from rubato.core.events import Event
from rubato.core.interfaces import LengthPredictor
from rubato.core.length_prediction import ConditionalMean
from rubato.engines.simulated import KVLink
from rubato.fleet.cluster_options import PolicyChoice
from rubato.latency.components import Model
from rubato.measure.records import BenchResult
from rubato.planning.optimum import Mode, optimum
from rubato.simulation.run_spec import Hardware, RunSpec, Truth, conditional_mean, packaged_hardware
from rubato.simulation.simulate import simulate
from rubato.workloads import Workload, scenarios
from rubato.workloads.generate import BEST_EFFORT

REPLICAS = 20
MODES: tuple[Mode, ...] = ("co", "pd")
OURS = {"co": "polyserve@polyserve:mode=co", "pd": "polyserve@polyserve:mode=pd"}
# Seconds of a step outside the device, constant and for each sequence. The first gives the paper's 15 ms a token at
# batch 1 (§5.1), the second its B of 50 at 20 ms and 150 at 40 ms (§3.6); both at once is not possible.
HOSTS: Mapping[str, tuple[float, float]] = {"constant": (0.0102, 0.0), "per sequence": (0.0044, 0.000107)}
LIMITS = {"max_model_len": 131072, "max_num_seqs": 1024}
LONGEST = 2048  # tokens that every request asks for: no policy is told the true output
# Mean times that a request is there, were each token to take its TPOT, in which requests come: those counted, and
# before and after them some that are not, first while the fleet fills, and last so that those counted do not end in a
# fleet that empties.
BEFORE, COUNTED, AFTER = 1.0, 3.0, 0.25
NOISE, LINK = 0.05, KVLink(kv_bytes=131_072, bandwidth=50e9)  # of Llama-3.1-8B: 32 layers, 8 KV heads of 128, 2 bytes
TAUGHT = 1000  # requests
BRACKET = 0.2  # rates on either side of the 90 % point are no further apart than this
STEP = 1.08  # rates tried are powers of it, so that measures share runs

CHUNKS = (
    *(f"sarathi:budget={budget}@least_loaded" for budget in (2048, 1024, 512)),
    *(f"sarathi:budget=2048@{router}" for router in ("minimal", "random")),
)


def splits(replicas: int) -> tuple[str, ...]:
    """Prefill and decode apart, by the share of the fleet that prefills."""
    return tuple(
        f"distserve@{router}:prefill={n},decode={replicas - n}"
        for router, shares in (("minimal", (0.3, 0.2, 0.1, 0.4, 0.5, 0.6, 0.7)), ("random", (0.3, 0.5)))
        for n in (round(share * replicas) for share in shares)
    )


@lru_cache
def hardware(host: str = "constant") -> Hardware:
    """host: of `HOSTS`, or today's vLLM's."""
    if host == TODAY:
        return packaged_hardware(at_host(scenarios.H200, host), **LIMITS)
    made = packaged_hardware(scenarios.H200, **LIMITS)
    model = made.model
    assert isinstance(model, Model)
    constant, each = HOSTS[host]
    return replace(made, name=f"{made.name}, host {host}", model=replace(model, host=constant, host_per_seq=each))


@lru_cache
def sample(data: str, host: str) -> Workload:
    return promised(data, host, 5000, 0)


def promised(data: str, host: str, count: int, seed: int) -> Workload:
    """So many at 1 request/s, from a stream without those (one in twelve of Mooncake) whose TTFT not even an idle
    replica could meet."""
    made = count
    while True:
        load = scenarios.make(f"polyserve-{data}", 1.0, count=made, seed=seed, prefill=hardware(host).prefill)
        kept = tuple(a for a in load.arrivals if a.tier != BEST_EFFORT)
        if len(kept) >= count:
            return replace(load, arrivals=kept[:count], rate=load.rate * len(kept) / made)
        made += 2 * (count - len(kept))


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


def coming_in(data: str, host: str, replicas: int, stays: float) -> int:
    """Requests that come in `stays` times that, at the optimum."""
    return round(stays * stay(data, host) * replicas * best_rate(data, host, "co"))


@lru_cache(maxsize=2)
def offered(data: str, host: str, count: int, seed: int, replicas: int, fill: float) -> Workload:
    """`count` that are counted, or a few less, and those before and after them; at some rate."""
    around = coming_in(data, host, replicas, fill) + coming_in(data, host, replicas, AFTER * fill / BEFORE)
    return promised(data, host, count + around, seed)


def taught_lengths(data: str, host: str, truth: Truth) -> LengthPredictor:
    predictor, load = ConditionalMean(), sample(data, host)
    for request, arrival in zip(islice(load.requests(LONGEST), TAUGHT), load.arrivals, strict=False):
        predictor.learn(request, arrival.output_tokens)
    return predictor


def served(
    load: Workload, data: str, host: str, choice: str, replicas: int = REPLICAS,
    listen: Callable[[Event], None] | None = None, taught: bool = True,
) -> BenchResult:  # fmt: skip
    lengths = partial(taught_lengths, data, host) if taught else conditional_mean
    spec = RunSpec(
        hardware(host), PolicyChoice.parse(choice), replicas, lengths=lengths, stated_max_tokens=LONGEST, noise=NOISE,
        link=LINK,
    )  # fmt: skip
    return simulate(load, spec, times=False, causes=False, listen=listen)


class Tried(RateSearch):
    """Runs of one workload at several rates, each done once. stays, fill: see `BEFORE`."""

    def __init__(
        self, data: str, host: str, seed: int, stays: float = COUNTED, replicas: int = REPLICAS, fill: float = BEFORE,
        taught: bool = True,
    ) -> None:  # fmt: skip
        super().__init__(STEP, BRACKET)
        self.data, self.host, self.seed, self.replicas, self.fill, self.taught = (
            data, host, seed, replicas, fill, taught
        )  # fmt: skip
        self.first = coming_in(data, host, replicas, fill)
        self.count = coming_in(data, host, replicas, stays)

    def load(self, rate: float) -> Workload:
        return offered(self.data, self.host, self.count, self.seed, self.replicas, self.fill).rescaled(rate)

    def run(self, choice: str, rate: float) -> dict[str, float]:
        ran = served(self.load(rate), self.data, self.host, choice, self.replicas, taught=self.taught)
        return shares_of(ran.records[self.first : self.first + self.count])
