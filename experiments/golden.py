"""The behaviour digest: what each policy and router does with small loads, a hash a run.

    python -m experiments --behaviour check    # `make check` does; 1 and the names of those that differ
    python -m experiments --behaviour write    # after a change that is meant, in a commit of its own

A load is offered on the virtual clock; hashed are each request's outcome, whether it was served as best effort, and
when each token came, to 10 microseconds. A move or a rename keeps every hash; a figure is older than its policies only
where theirs is another now (`provenance`). Loads use plain random numbers and step times of no profile, so
that a change of those is not one of every policy.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import cache
from hashlib import blake2b
from pathlib import Path
from typing import Any, cast

from rubato.core.plan import Limits, Shape
from rubato.core.request import SLO
from rubato.engines.simulated import Drafter, KVLink
from rubato.engines.simulated.acceptance import Acceptance
from rubato.fleet.cluster_options import PolicyChoice
from rubato.latency import affine, profiles
from rubato.measure.records import BenchResult
from rubato.simulation.run_spec import Hardware, RunSpec, conditional_mean
from rubato.simulation.simulate import simulate
from rubato.workloads import Arrival, Workload

RECORDED = Path(__file__).with_suffix(".json")
TIERS = {"chat": SLO(ttft=1.0, tpot=0.05), "code": SLO(ttft=0.5, tpot=0.1), "agent": SLO(e2e=6.0), "batch": SLO()}
NEAR = {"chat": SLO(ttft=0.4, tpot=0.03), "code": SLO(ttft=1.0, tpot=0.05), "agent": SLO(tpot=0.1), "batch": SLO()}
STEPS = affine.Model(
    host=0.0044, host_per_seq=5.8e-05, k=(1.0e-06, 6.6e-05), b=(0.0116, 0.0022), a=9.0e-08, d=3.0e-10, e=1.5e-10
)  # of no profile: what is known of a GPU may change
LIMITS = Limits(max_num_seqs=48, max_num_batched_tokens=512, max_model_len=8192, kv_blocks=27775, block_size=16)
HARDWARE = Hardware("an A100", STEPS, LIMITS)
DRAFTER = Drafter(Acceptance(alpha=0.7), affine.Model(b=(0.0007, 0.0)))
SCARCE = replace(HARDWARE, limits=replace(LIMITS, kv_blocks=900))
LINK = KVLink(kv_bytes=131_072, bandwidth=50e9, latency=0.001)
SCHEDULERS = (
    "edf", "edf:max_ttft_share=1,safety_margin=0,decode_lead=1", "vllm", "vllm:budget=256,reserve_kv=true", "sarathi",
    "sarathi:budget=0,reserve_kv=true", "prefill_first", "prefill_first:reserve_kv=true", "priority",
    "priority:budget=256", "sarathi:budget=512", "sarathi:budget=256", "slos_serve", "slos_serve:max_batch_seconds=0.1",
    "slos_serve:promise=arrival", "rubato", "rubato:fairness=2", "polyserve", "scorpio",
    "scorpio:mixed=true,budget=512,ttft_reserve=0,reserve_kv=true", "qoserve", "qoserve:alpha=0.001,reserve_kv=true",
    "jitserve",
)  # fmt: skip
DRAFTING = ("adaserve", "adaserve:prefill_chunk=256", "vllm_spec", "vllm_spec:n=2,budget=256", "smart_spec",
            "slos_serve", "rubato")  # fmt: skip
ROUTERS = ("least_loaded", "lmetric", "minimal", "power_of_two", "random", "round_robin", "sa")
FLEETS = (
    "polyserve", "polyserve@polyserve:mode=pd", "rubato", "rubato@rubato:mode=pd", "rubato@rubato:mode=co", "distserve",
    "ascendra", "ascendra@ascendra:groups=1L1H", "slos_serve", "slos_serve:max_hops=-1@round_robin",
)  # fmt: skip
NAMES = {"rubato@rubato:mode=pd": "rubato_pd"}  # of the policy or router that a run counts for, where it is no other


def load(count: int, rate: float, tiers: dict[str, SLO], seed: int, *, turns: bool = False) -> Workload:
    """Requests of four tiers; with turns every second one goes on from another, with its prompt."""
    draw = random.Random(seed)
    at, arrivals = 0.0, list[Arrival]()
    for number in range(count):
        at += draw.expovariate(rate)
        tier = draw.choice(("chat", "chat", "code", "agent", "batch"))
        prompt, output = int(draw.lognormvariate(6.3, 0.9)) + 1, int(draw.lognormvariate(4.0, 0.8)) + 1
        one = Arrival(f"q{number}", at, tier, tier, min(prompt, 6000), min(output, 600))
        if turns:
            session = number // 4
            blocks = range(9 * session, 9 * session + 1 + one.prompt_tokens // 512)
            one = replace(one, tier="chat", session=f"s{session}", blocks=tuple(blocks))
            one = replace(one, after=f"q{number - 1}", gap=0.05) if number % 4 else one
        arrivals.append(one)
    return Workload("golden", seed, rate, at, tiers, tuple(arrivals))


def hashed(result: BenchResult) -> str:
    """Of what became of each request."""
    told = blake2b(digest_size=8)
    for one in result.records:
        times = [round(1e5 * time) for time in one.times]  # another machine's last bit is no other behaviour
        told.update(repr((one.id, one.outcome, one.best_effort, one.output, list(one.tokens), times)).encode())
    return told.hexdigest()


def cases() -> Iterator[tuple[str, str, Callable[[], BenchResult]]]:
    """What a run counts for, its own name, and the run."""

    def case(
        choice: str, kind: str, made: Workload, replicas: int = 1, router: str = "", **more: Any
    ) -> tuple[str, str, Callable[[], BenchResult]]:
        def run() -> BenchResult:
            chosen = PolicyChoice.parse(choice)
            spec = RunSpec(HARDWARE, chosen, replicas, stated_max_tokens=1024, link=LINK)
            spec = replace(spec, **more)
            spec = replace(spec, lengths=conditional_mean) if spec.predictor({}) is None else spec
            return simulate(made, spec, made.seed, causes=False)

        name = router or NAMES.get(choice) or choice.partition("@")[0].partition(":")[0]
        return name, f"{kind}, {choice}", run

    one, near, scarce = load(150, 30.0, TIERS, 1), load(120, 20.0, NEAR, 2), load(80, 8.0, TIERS, 3)
    three, ten, turns = load(300, 90.0, TIERS, 4), load(600, 260.0, NEAR, 5), load(160, 60.0, NEAR, 6, turns=True)
    for choice in SCHEDULERS:
        yield case(choice, "one", one)
        yield case(choice, "near", near)
        yield case(choice, "scarce", scarce, hardware=SCARCE)
        yield case(choice, "turns", turns, prefix_cache=True)
    for choice in DRAFTING:
        yield case(choice, "drafts", near, drafter=DRAFTER)
    for choice in ("edf", "rubato", "slos_serve"):
        yield case(choice, "windows", near, slo_rule="windowed")
    for router in ROUTERS:
        yield case(f"vllm@{router}", "three", three, 3, router)
        yield case(f"vllm@{router}", "three, turns", turns, 3, router, prefix_cache=True)
    for choice in FLEETS:
        yield case(choice, "three", three, 3)
        yield case(choice, "ten", ten, 10)


Digests = dict[str, dict[str, str]]  # by policy or router, by run


def step_times() -> str:
    """Of the packaged profiles' step times, to a nanosecond."""
    few, many = Shape.decodes(33, 16_133), Shape.decodes(65, 112_165)
    shapes = [many, Shape.prefill(512), few.plus(256, 500), many.plus(256, 3000)]
    models = {name: profiles.load(name).model() for name in profiles.names()}
    times = [(name, round(1e9 * model.step_time(shape))) for name, model in models.items() for shape in shapes]
    return blake2b(repr(times).encode(), digest_size=8).hexdigest()


def digests() -> Digests:
    """Of every run."""
    found: Digests = {"latency": {"profiles": step_times()}}
    for name, about, run in cases():
        found.setdefault(name, {})[about] = hashed(run())
    return dict(sorted(found.items()))


@cache
def recorded() -> Digests:
    """As they are meant to be."""
    return cast(Digests, json.loads(RECORDED.read_bytes()))


def differing(before: Mapping[str, Mapping[str, str]], now: Mapping[str, Mapping[str, str]]) -> list[str]:
    """Those with another hash for a run that both have, or with no run that both have."""
    return [
        name for name, runs in before.items()
        if not now.get(name, {}).keys() & runs.keys()
        or any(now[name].get(about, own) != own for about, own in runs.items())
    ]  # fmt: skip


def check() -> int:
    """An exit status: 1 where some policy does otherwise than is recorded."""
    now = digests()
    if now == recorded():
        return 0
    other = {name: [r for r in runs if recorded().get(name, {}).get(r) != runs[r]] for name, runs in now.items()}
    runs = [f"{name} ({'; '.join(runs)})" for name, runs in other.items() if runs] or ["runs that are no more"]
    print(f"golden.json has other digests of {', '.join(runs)}.")
    print("If that is meant, in a commit of its own: python -m experiments --behaviour write")
    return 1


def write() -> int:
    """Record what is done now."""
    RECORDED.write_text(json.dumps(digests(), indent=1) + "\n", encoding="utf-8")
    return 0
