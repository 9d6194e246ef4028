"""Bounds on any policy without drafts, and the share of them that each policy reaches, by scenario.

The linear programme of `rubato bound`: the largest rate at which 90 % can be attained, whatever is known of the future,
if anybody may be dropped, and if every decile of cost is to attain 90 %. On SLOs-Serve's four scenarios with one
prompt, one replica of each scenario's profile; and on two of PolyServe's mixes, ten replicas, where policies may move
KV. Requests of a stream repeat end to end, three times for policies, which are judged on the middle one; `drains` says
how far deadlines are against a period, since a stream of three copies ends and the bound's does not. Output lengths are
known, step times exact.

Beside them two checks of what the bounds stand on: random batches take at least what the straight lines say, and no
window of a run holds more than the rows allow.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

import numpy as np

from experiments import Found
from experiments import _polyserve_runs as polyserve
from experiments import _slos_serve_runs as slos_serve
from experiments._guest import beside
from experiments._rate_search import RateSearch, on_grid
from rubato.core.plan import Shape
from rubato.fleet.cluster_options import PolicyChoice
from rubato.measure.confidence import Estimate, over_seeds
from rubato.measure.tables import markdown
from rubato.planning.bound import NAMES, OfferedWork
from rubato.planning.bound.minorant import minorants
from rubato.planning.bound.programme import Alike
from rubato.planning.bound.rows import Windows
from rubato.planning.bound.work import work_of
from rubato.planning.capacity import rate_or_zero
from rubato.planning.jobs import Job
from rubato.simulation.run_spec import Hardware, RunSpec, oracle_lengths
from rubato.simulation.simulate import simulate
from rubato.workloads import Workload

SOURCE = "ours; SLOs-Serve's and PolyServe's scenarios"
SECONDS = 4070.0
BEHAVIOURS = ("latency",)

TARGET, TOLERANCE = 0.9, 0.01
ASKED: tuple[Alike, ...] = ("anybody", "deciles")
COPIES = 3
SCENARIOS = slos_serve.OPT
BURSTS = "coder"
MIXES = ("mooncake-conversation", "mooncake-toolagent")  # of which a period is longer than requests stay
REPLICAS, HOST = 10, "constant"  # of PolyServe's fleet
FLEET_SEEDS = 2  # of the three: its runs take longest
POLICIES = {  # name -> setting, that which `slos_serve_capacity` most often finds best
    "prefill_first": "prefill_first:reserve_kv=true",
    "vllm": "vllm",
    "sarathi": "sarathi:budget=0,reserve_kv=true",
    "edf": "edf:max_ttft_share=1,safety_margin=0",
    "slos_serve": "slos_serve:max_batch_seconds=0.1",
    "rubato": "rubato",
    "scorpio": "scorpio",
    "qoserve": "qoserve",
    "jitserve": "jitserve:max_num_seqs=128,budget=1024",
    "vllm-limited": "vllm:max_num_queued_reqs=48",
}
ON_FLEET = {"polyserve": "polyserve", "rubato": "rubato", "edf": "edf@least_loaded"}
RUN = ("edf", "slos_serve")  # whose runs are held against the rows
LOADS = (0.8, 1.2)  # of the bound, at which they run
BATCHES = 25_000  # of a job
GRID = 1.04  # rates tried are powers of it, with a line between the last two
CHUNKS = (1, 2, 8, 40, 200, 700, 1900)


@dataclass(frozen=True)
class Scale:
    """count, fleet: requests of a period, on one replica and on PolyServe's; bursts: of Coder's, whose bursts are
    long: of fewer no policy holds any rate under some seeds. batches: jobs of random batches."""

    seeds: tuple[int, ...] = (1, 2, 3)
    count: int = 300
    bursts: int = 400
    fleet: int = 700
    batches: int = 8
    slos: slos_serve.Scale = slos_serve.FULL
    scenarios: tuple[str, ...] = SCENARIOS
    mixes: tuple[str, ...] = MIXES
    replicas: int = REPLICAS
    grid: float = GRID
    tolerance: float = TOLERANCE
    loads: tuple[float, ...] = LOADS


FULL = Scale()
SMALL = Scale(
    (1,), 12, 12, 12, 1, replace(slos_serve.SMALL_SEARCH, count=12), ("chatbot",), MIXES[:1], 2, 1.6, 0.5, LOADS[-1:]
)


def _scale(small: bool) -> Scale:
    return SMALL if small else FULL


# --------------------------------------------------------------------------- what is run


def jobs(small: bool, policy: str | None = None) -> list[Job]:
    scale = _scale(small)
    alone = [
        Job(f"{name} {system} seed={seed}", reached, (name, system, POLICIES.get(system, system), seed, small))
        for name in scale.scenarios for system in beside(tuple(POLICIES), policy) for seed in scale.seeds
    ]  # fmt: skip
    fleet = [
        Job(f"{name} {system} seed={seed}", reached, (name, system, setting, seed, small))
        for name in scale.mixes for system, setting in ON_FLEET.items() for seed in _seeds(name, scale)
    ]  # fmt: skip
    bounds = [
        Job(f"{name} bound seed={seed}", bound, (name, seed, small))
        for name in (*scale.scenarios, *scale.mixes)
        for seed in _seeds(name, scale)
    ]
    checks = [Job(f"batches {part}", slack, (part, small)) for part in range(scale.batches)]
    rows = [
        Job(f"{name} rows {system}", fullest_window, (name, system, small))
        for name in scale.scenarios
        for system in RUN
    ]
    return [*fleet, *alone, *bounds, *rows, *checks]


def _seeds(name: str, scale: Scale) -> tuple[int, ...]:
    return scale.seeds[:FLEET_SEEDS] if name in MIXES else scale.seeds


@cache
def offered(name: str, seed: int, small: bool) -> OfferedWork:
    """A scenario's requests, or a mix's."""
    scale = _scale(small)
    if name in SCENARIOS:
        machine = slos_serve.hardware(name, scale.slos)
        count = scale.bursts if name == BURSTS else scale.count
        return OfferedWork(slos_serve.load(name, seed, scale.slos, count=count), machine)
    load, machine = polyserve.promised(name, HOST, scale.fleet, seed), polyserve.hardware(HOST)
    if small:  # so few requests that some rate is too high for them
        load = slos_serve.with_outputs(load, lambda output: max(2, output // scale.slos.shorter))
        machine = replace(machine, limits=replace(machine.limits, max_num_seqs=1))
    return OfferedWork(load, machine, scale.replicas)


def stream(load: Workload) -> Workload:
    """Its requests `COPIES` times, end to end."""
    period = (load.arrivals[-1].at - load.arrivals[0].at) * len(load.arrivals) / (len(load.arrivals) - 1)
    arrivals = [replace(a, id=f"{a.id}-{n}", at=a.at + n * period) for n in range(COPIES) for a in load.arrivals]
    return replace(load, duration=COPIES * period, arrivals=tuple(arrivals))


def bound(name: str, seed: int, small: bool) -> dict[str, Any]:
    """Rates (requests/s) that are out of reach, and what binds there."""
    own, start = offered(name, seed, small), None
    rates: dict[str, float] = {}
    binds: dict[str, Any] = {}
    for alike in ASKED:
        start = rates[alike] = own.rate(TARGET, alike, _scale(small).tolerance, start)
        binds[alike] = dict(own.share(start, alike).binds)
    drains = own.drains(rates["anybody"])
    return {"what": "bound", "name": name, "seed": seed, "rates": rates, "binds": binds, "drains": drains}


class StreamSearch(RateSearch):
    """Rates (requests/s) of a stream that policies hold, judged on its middle copy."""

    measures: Mapping[str, tuple[str, float]] = {"held": ("all", TARGET)}

    def __init__(self, own: OfferedWork, seed: int, grid: float) -> None:
        super().__init__(grid, grid - 1.0 + 1e-6)
        self.own, self.seed = own, seed
        self.met: dict[tuple[str, float], list[bool]] = {}

    def run(self, choice: str, rate: float) -> dict[str, float]:
        own = self.own
        spec = RunSpec(
            own.machine, PolicyChoice.parse(choice), own.replicas, lengths=oracle_lengths,
            link=polyserve.LINK if own.replicas > 1 else RunSpec.link,
        )  # fmt: skip
        run = simulate(stream(own.at(rate)), spec, self.seed, times=False, causes=False)
        met = [r.verdict.met for r in run.records]
        period = len(met) // COPIES
        self.met[choice, rate] = met[period : 2 * period]
        return {"all": float(np.mean(self.met[choice, rate])), "stream": float(np.mean(met))}


def reached(name: str, policy: str, setting: str, seed: int, small: bool) -> dict[str, Any]:
    """The rate that a policy holds (0: none), and what it attains there of each decile of cost."""
    own, scale = offered(name, seed, small), _scale(small)
    search = StreamSearch(own, seed, scale.grid)
    start = 0.75 / float(own.work(1.0).cost.mean()) * own.replicas
    rate = rate_or_zero(partial(search.goodput, setting, start, "held", scale.grid**4))
    by_cost = np.array_split(np.argsort(own.work(rate or start).cost, kind="stable"), min(10, len(own.load.arrivals)))
    at = on_grid(rate or start, scale.grid)
    search.shares(setting, at)
    met = np.array(search.met[setting, at])
    return {
        "what": "reached", "name": name, "policy": policy, "seed": seed, "rate": rate,
        "deciles": [float(met[own].mean()) for own in by_cost],
        "tried": sorted((tried, shares["all"], shares["stream"]) for (_, tried), shares in search.known.items()),
    }  # fmt: skip


# --------------------------------------------------------------------------- checks


def fullest_window(name: str, policy: str, small: bool) -> dict[str, Any]:
    """Of requests that come once, at several loads and under each seed: the part of its seconds that the attained take
    in the fullest window of all."""
    scale, fullest = _scale(small), []
    for seed in scale.seeds:
        own = offered(name, seed, small)
        at_most = own.rate(TARGET, "anybody", 0.1)
        for load in scale.loads:
            offer = own.at(load * at_most)
            spec = RunSpec(own.machine, PolicyChoice.parse(POLICIES[policy]), lengths=oracle_lengths)
            run = simulate(offer, spec, seed, times=False, causes=False)
            met = np.array([float(r.verdict.met) for r in run.records])
            fullest.append(Windows(work_of(offer, own.machine, endless=False), 1).fullest(met))
    return {"what": "rows", "name": name, "policy": policy, "fullest": fullest}


def slack(part: int, small: bool) -> dict[str, Any]:
    """The least part of a step's time that is above its lines, of random batches: decodes of any lengths and up to four
    chunks, on the machines of both fleets."""
    machines = (slos_serve.hardware("chatbot", slos_serve.FULL), polyserve.hardware(HOST))
    return {"what": "slack", "least": [least_slack(m, part, 500 if small else BATCHES // 2) for m in machines]}


def least_slack(machine: Hardware, seed: int, batches: int) -> float:
    """Relative to the step's time."""
    limits, rng, least = machine.limits, np.random.default_rng(seed), np.inf
    memory = limits.kv_blocks * limits.block_size
    lines = minorants(machine.model, limits, limits.max_num_seqs / 4, memory)
    for _ in range(batches):
        chunks = int(rng.integers(0, 5))
        decodes = int(rng.integers(not chunks, limits.max_num_seqs - chunks + 1))
        kv = int(rng.integers(decodes, memory)) if decodes else 0
        shape = Shape(decodes, decodes, kv)
        for size, context in zip(rng.choice(CHUNKS, chunks), rng.choice([0, 100, 1000], chunks), strict=True):
            shape = shape.plus(int(size), int(context))
        if shape.kv <= memory and shape.tokens <= limits.max_num_batched_tokens:
            seconds = machine.model.step_time(shape)
            least = min(least, 1.0 - max(line.seconds(shape) for line in lines) / seconds)
    return float(least)


# --------------------------------------------------------------------------- what was found


def found(values: Sequence[Any], small: bool) -> Found:
    scale = _scale(small)
    shares = [(v, alike, share) for v in _of(values, "reached") for alike, share in _shares(values, v).items()]
    estimates = {
        "slack": Estimate.exact(min(least for v in _of(values, "slack") for least in v["least"])),
        "rows": Estimate.exact(max(part for v in _of(values, "rows") for part in v["fullest"])),
        "above": Estimate.exact(max(share for _, alike, share in shares if alike == "anybody")),
    }
    for prefix, names, policies in (("", scale.scenarios, POLICIES), ("fleet-", scale.mixes, ON_FLEET)):
        for policy in policies:
            for alike in ASKED:
                asked = [(policy, alike, seed) for seed in _seeds(names[0], scale)]
                own = [
                    [s for v, a, s in shares if (v["policy"], a, v["seed"]) == key and v["name"] in names]
                    for key in asked
                ]
                logs = [float(np.mean(np.log(np.maximum(of_seed, 1e-3)))) for of_seed in own]
                estimates[f"{prefix}{policy}-{alike}"] = over_seeds(logs).exp()
    settings = {
        "policies": POLICIES, "fleet": ON_FLEET, "replicas": scale.replicas,
        "requests": [scale.count, scale.bursts, scale.fleet],
        "copies": COPIES, "target": TARGET, "tolerance": scale.tolerance, "grid": scale.grid, "lengths": "oracle",
    }  # fmt: skip
    return Found(estimates, list(values), scale.seeds, "deadline", settings)


def _of(values: Sequence[Any], what: str) -> list[Any]:
    return [v for v in values if v["what"] == what]


def _shares(values: Sequence[Any], reached: Mapping[str, Any]) -> dict[str, float]:
    """Of the bounds of the same requests."""
    (bound,) = [v for v in _of(values, "bound") if (v["name"], v["seed"]) == (reached["name"], reached["seed"])]
    return {alike: reached["rate"] / rate for alike, rate in bound["rates"].items()}


def _means(data: Sequence[Any], name: str, policy: str) -> tuple[float, dict[str, float]]:
    """Over seeds, geometric: the rate, and the shares of the bounds."""
    own = [v for v in _of(data, "reached") if (v["name"], v["policy"]) == (name, policy)]
    shares = [_shares(data, v) for v in own]
    return _mean([v["rate"] for v in own]), {alike: _mean([share[alike] for share in shares]) for alike in ASKED}


def _mean(values: Sequence[float]) -> float:
    return float(np.exp(np.mean(np.log(np.maximum(values, 1e-3)))))


def _names(data: Sequence[Any], of: str) -> list[str]:
    return list(dict.fromkeys(v["name"] for v in _of(data, of)))


def tables(data: Sequence[Any]) -> str:
    """Bounds and policies by scenario, the smallest share first; and who attains."""
    rows = [["requests", "policy", "req/s", *(f"of the bound, {NAMES[alike]}" for alike in ASKED)]]
    costs = [["requests", "policy", "least decile", "cheapest", "costliest"]]
    for name in _names(data, "bound"):
        bounds = [v["rates"] for v in _of(data, "bound") if v["name"] == name]
        rates = ", ".join(f"{_mean([b[alike] for b in bounds]):.2f} ({NAMES[alike]})" for alike in ASKED)
        policies = list(dict.fromkeys(v["policy"] for v in _of(data, "reached") if v["name"] == name))
        reached = sorted((_means(data, name, policy)[1]["anybody"], policy) for policy in policies)
        rows.append([name, "bound", rates, "1", "1"])
        for _, policy in reached:
            rate, shares = _means(data, name, policy)
            rows.append([name, policy, f"{rate:.2f}", *(f"{shares[alike]:.2f}" for alike in ASKED)])
            own = [v["deciles"] for v in _of(data, "reached") if (v["name"], v["policy"]) == (name, policy)]
            deciles = np.mean(own, axis=0)
            costs.append([name, policy, *(f"{part:.2f}" for part in (deciles.min(), deciles[0], deciles[-1]))])
    binding = [["requests", *(NAMES[alike] for alike in ASKED)]]
    for name in _names(data, "bound"):
        own = [v["binds"] for v in _of(data, "bound") if v["name"] == name]
        binding.append([name, *(_parts([v[alike] for v in own]) for alike in ASKED)])
    return (
        f"Rates, geometric means of seeds:\n\n{markdown(rows)}\n\nAttained by decile of cost, at the rate "
        f"tried just below what the policy holds:\n\n{markdown(costs)}\n\nRows that bind:\n\n{markdown(binding)}"
    )


def _parts(binds: Sequence[Mapping[str, float]]) -> str:
    kinds = sorted({kind for own in binds for kind in own})
    return ", ".join(f"{kind} {100 * np.mean([own.get(kind, 0.0) for own in binds]):.0f} %" for kind in kinds)


def draw(data: Sequence[Any], axes: Any) -> None:
    """Shares of the bound of all, a group of bars a scenario; ticks: of that of the worst decile."""
    names = _names(data, "bound")
    policies = list(dict.fromkeys(v["policy"] for v in _of(data, "reached")))
    width = 0.8 / len(policies)
    for k, policy in enumerate(policies):
        at = [
            i
            for i, name in enumerate(names)
            if any(v["name"] == name and v["policy"] == policy for v in _of(data, "reached"))
        ]
        shares = [_means(data, names[i], policy)[1] for i in at]
        x = [i + (k - (len(policies) - 1) / 2) * width for i in at]
        axes.bar(x, [share["anybody"] for share in shares], width, label=policy)
        axes.plot(x, [share["deciles"] for share in shares], "k_", markersize=6)
    axes.axhline(1.0, color="black", linewidth=1)
    axes.set_xticks(range(len(names)), [name.replace("-", "\n") for name in names])
    axes.set_ylabel("rate / bound (bars: of all,\nticks: of the worst decile of cost)")
    axes.legend(fontsize=7, ncols=2)
