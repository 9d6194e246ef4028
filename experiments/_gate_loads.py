"""The loads of the gate: what a policy that is left on as the default meets, each at a rate near or beyond capacity.

The demo's tiers on the torch engine of a two-core machine at 1.0, 1.3 and 1.6 times what `vllm` holds; SLOs-Serve's
scenarios at what `rubato` holds; agents' sessions; SA's burst; three of PolyServe's data sets on one replica and on
four; long prompts on four replicas of a 70B model; and a mix whose code has a deadline for the whole answer alone, with
output lengths told by `max_tokens` and learnt.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from typing import Any

from experiments import _polyserve_runs as polyserve
from experiments._rubato_runs import MOST_TOKENS, USUALLY
from experiments._rubato_runs import hardware as of_scenario
from experiments.polyserve_goodput import HOST
from rubato.core.request import SLO
from rubato.demo import runs as demo
from rubato.engines.simulated import KVLink
from rubato.latency import affine
from rubato.planning.request_source import ScenarioSource
from rubato.simulation.run_spec import Hardware, RunSpec, conditional_mean, packaged_hardware
from rubato.workloads import Workload, scenarios
from rubato.workloads.generate import BEST_EFFORT, make
from rubato.workloads.request_kinds import Kind

# What `rubato demo` found of two cores with AVX-512: the latency model of the torch engine, and SLOs; and the rate at
# which vllm attains 90 % with them in simulation.
DEMO_MODEL = affine.Model(
    k=(1.3107e-4, 2.4766e-4), b=(0.010423, 0.0094505), host_per_seq=3.3085e-4, a=5.1937e-7, d=6.0007e-8, e=4.0817e-8
)
DEMO_SLOS = {"chat": SLO(0.714, 0.0436), "code": SLO(0.816, 0.0490), "summary": SLO(0.918, 0.0545)}
DEMO_HOLDS, DEMO_SECONDS = 5.2, 60.0
# requests/s that attain 90 % under `rubato`, about
SCENARIOS = {"chatbot": 4.6, "coder": 1.95, "summarizer": 3.3, "mixed": 5.2, "toolllm": 0.235}
COUNT, FEW = 400, 200
SETS = {"mooncake-conversation": (1.3, 1.6), "sharegpt": (9.0, 11.0), "uniform-4096-1024": (1.6, 2.0)}  # alone, of four
STAYS = {1: 2.0, 4: 1.0}  # mean times that a request is there, that are counted at least,
COUNTED = 330  # and requests: a tenth of them is dropped where no replica could keep its TTFT
LONGEST_PROMPT, TTFT_TIMES, LEAST_TTFT = 30_000, 3.0, 1.0  # of long prompts, tokens and seconds
TPOTS = {0.02: 0.05, 0.03: 0.075, 0.05: 0.1, 0.1: 0.15}  # theirs for PolyServe's, seconds
LONG_LINK = KVLink(kv_bytes=327_680, bandwidth=50e9)  # 80 layers, 8 KV heads of 128, 2 bytes
MIX = (
    Kind("chat", SLO(1.0, 0.06), prompt=(100, 1200), output=(60, 300), share=0.5),
    Kind("code", SLO(e2e=1.5), prompt=(200, 2000), output=(16, 80), share=0.3),
    Kind("agent", SLO(3.0, 0.03), prompt=(1000, 6000), output=(50, 300), share=0.2),
)
MIX_PROFILE = "llama-3.1-8b-h100"


@dataclass(frozen=True)
class Load:
    """make: its requests, of a seed. options: of `RunSpec`, but for the policy and the noise. counted: of the requests,
    from which to which they count; None: all. sessions: whether whole sessions are what is attained."""

    make: Callable[[int], Workload]
    hardware: Callable[[], Hardware]
    replicas: int = 1
    options: Mapping[str, Any] = field(default_factory=dict)
    counted: tuple[int, int] | None = None
    sessions: bool = False

    def spec(self, **options: Any) -> RunSpec:
        return RunSpec(self.hardware(), replicas=self.replicas, **{**self.options, **options})


def demo_load(times: float, seed: int) -> Workload:
    mix, rate = demo.kinds(DEMO_SLOS), times * DEMO_HOLDS
    return make("demo", mix, rate, count=round(rate * DEMO_SECONDS), seed=seed, texts=False)


def demo_hardware() -> Hardware:
    return Hardware("the torch engine on two cores", DEMO_MODEL, demo.LIMITS)


def scenario_load(scenario: str, seed: int) -> Workload:
    count = FEW if scenario == "toolllm" else COUNT
    made = ScenarioSource(f"slos-serve-{scenario}", of_scenario(scenario), count=count).make(seed)
    return made.rescaled(SCENARIOS[scenario])


def session_load(turns_a_second: float, seed: int) -> Workload:
    return scenarios.make("agent-sessions", turns_a_second, count=300, seed=seed)


def session_hardware() -> Hardware:
    return packaged_hardware(scenarios.get("agent-sessions").profile)


def burst_load(seed: int) -> Workload:
    return scenarios.make("sa-mixed", 1.0, count=200, seed=seed)


def burst_hardware() -> Hardware:
    return packaged_hardware("qwen2.5-7b-2xv100")


def stays(data: str, replicas: int) -> float:
    return max(STAYS[replicas], COUNTED / polyserve.coming_in(data, HOST, replicas, 1.0))


def set_load(data: str, replicas: int, seed: int) -> Workload:
    tried = polyserve.Tried(data, HOST, seed, stays(data, replicas), replicas, STAYS[replicas] / 2)
    return tried.load(SETS[data][replicas > 1] * replicas)


def of_set(data: str, replicas: int) -> Load:
    first = polyserve.coming_in(data, HOST, replicas, STAYS[replicas] / 2)
    counted = (first, first + polyserve.coming_in(data, HOST, replicas, stays(data, replicas)))
    lengths = partial(polyserve.taught_lengths, data, HOST)
    options = {"lengths": lengths, "stated_max_tokens": polyserve.LONGEST, "link": polyserve.LINK}
    return Load(
        partial(set_load, data, replicas), partial(polyserve.hardware, HOST), replicas, options, counted=counted
    )


def long_load(seed: int) -> Workload:
    """Mooncake's conversations, with a TTFT of three times the prompt's time alone."""
    prefill = long_hardware().prefill
    made = scenarios.make("polyserve-mooncake-conversation", 1.0, count=2 * COUNT, seed=seed)
    kept = [a for a in made.arrivals if a.tier != BEST_EFFORT and a.prompt_tokens <= LONGEST_PROMPT][:COUNT]
    arrivals = []
    for one in kept:
        slo = made.slo(one)
        ttft = max(LEAST_TTFT, TTFT_TIMES * prefill(one.prompt_tokens))
        arrivals.append(replace(one, slo=replace(slo, ttft=ttft, tpot=TPOTS[slo.tpot or 0.1])))
    seconds = arrivals[-1].at
    return replace(made, arrivals=tuple(arrivals), duration=seconds, rate=len(arrivals) / seconds).rescaled(1.2)


@lru_cache
def long_hardware() -> Hardware:
    return packaged_hardware("llama-3.1-70b-4xa100@vllm-2024", max_model_len=LONGEST_PROMPT + 2048)


def mix_load(rate: float, seed: int) -> Workload:
    return make("mix", MIX, rate, count=600, seed=seed, texts=False)


def mix_hardware() -> Hardware:
    return packaged_hardware(MIX_PROFILE)


@lru_cache
def loads() -> dict[str, Load]:
    learnt = {"lengths": conditional_mean, "learns": True}
    named = {
        f"demo {times:g}": Load(partial(demo_load, times), demo_hardware, 1, {"learns": True})
        for times in (1.0, 1.3, 1.6)
    }
    for scenario in SCENARIOS:
        options = {**learnt, "stated_max_tokens": MOST_TOKENS.get(scenario, USUALLY)}
        named[scenario] = Load(partial(scenario_load, scenario), partial(of_scenario, scenario), 1, options)
    for rate in (3.0, 4.5, 6.0):
        options = {**learnt, "stated_max_tokens": USUALLY, "prefix_cache": True}
        named[f"sessions {rate:g}"] = Load(partial(session_load, rate), session_hardware, 1, options, sessions=True)
    named["burst"] = Load(burst_load, burst_hardware, 1, {**learnt, "stated_max_tokens": USUALLY})
    for replicas in STAYS:
        for data in SETS:
            named[f"{data} x{replicas}"] = of_set(data, replicas)
    options = {**learnt, "link": LONG_LINK, "stated_max_tokens": USUALLY}
    named["70B long x4"] = Load(long_load, long_hardware, 4, options)
    for rate in (6.0, 12.0, 18.0, 24.0):
        named[f"mix {rate:g}"] = Load(partial(mix_load, rate), mix_hardware, 1, {"learns": True})
    for rate in (12.0, 24.0):
        options = {**learnt, "stated_max_tokens": USUALLY}
        named[f"mix {rate:g}, learnt"] = Load(partial(mix_load, rate), mix_hardware, 1, options)
    return named
