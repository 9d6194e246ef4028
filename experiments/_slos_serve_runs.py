"""What SLOs-Serve's figures share: its scenarios on a replica, its drafter, and the search for a system's capacity."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np

from experiments._host import AS_STATED, at_host
from experiments._rate_search import RateSearch
from rubato.core.plan import Shape
from rubato.engines import simulated
from rubato.engines.simulated import Drafter
from rubato.fleet.cluster_options import PolicyChoice
from rubato.measure.promises import promises
from rubato.measure.records import rejudged
from rubato.planning import capacity
from rubato.planning.capacity import rate_or_zero
from rubato.simulation.run_spec import Hardware, RunSpec, oracle_lengths, packaged_hardware
from rubato.simulation.simulate import simulate
from rubato.workloads import Arrival, Workload, scenarios, traces
from rubato.workloads.arrivals import ArrivalProcess
from rubato.workloads.scenarios import CODE_STAND_IN

ALPHA = 0.7  # how often a drafted token is right: the paper does not print it (ours)
OPT = ("chatbot", "coder", "summarizer", "mixed")  # scenarios whose model has a drafter
# requests of a run that serves a scenario once, at one rate
COUNTS = {"chatbot": 200, "coder": 400, "summarizer": 200, "mixed": 200, "toolllm": 400, "reasoning": 400}
CONTEXT = {"toolllm": 8192}  # tokens; one request in twenty is longer than the model's 4,096, all rounds together


@dataclass(frozen=True)
class Scale:
    """count: requests of a run (0: as the figure has them). shorter: outputs are cut to this part. limits: of the
    engine, where not the profile's. host: how many times as long a step takes outside the device; term: whose host
    term that is (`_host`)."""

    seeds: tuple[int, ...] = (1, 2, 3)
    count: int = 0
    shorter: int = 1
    limits: tuple[tuple[str, int], ...] = ()
    host: float = 1.0
    term: str = AS_STATED


FULL = Scale()
SMALL = Scale((1,), 8, 16, (("max_num_seqs", 2), ("max_num_batched_tokens", 2048)))
SMALL_SEARCH = Scale((1,), 24, 64, (("max_num_seqs", 1),))  # so few that at some rate 90 % do not attain


def drafter() -> Drafter:
    """What drafts beside OPT."""
    return simulated.drafter("opt-125m-a100-40g", alpha=ALPHA)


@cache
def hardware(scenario: str, scale: Scale, profile: str = "") -> Hardware:
    """profile: where it is not the scenario's."""
    limits = dict(scale.limits)
    if scenario in CONTEXT:
        limits["max_model_len"] = CONTEXT[scenario]
    name = profile or scenarios.get(f"slos-serve-{scenario}").profile
    return packaged_hardware(at_host(name, scale.term), host_scale=scale.host, **limits)


def load(
    scenario: str, seed: int, scale: Scale, profile: str = "", count: int = 0, arrivals: ArrivalProcess | None = None,
    server: float = 0.0,
) -> Workload:  # fmt: skip
    """count: requests, where not the scale's or those of `COUNTS`. arrivals: instead of the scenario's. server: the
    share of a zero-load TTFT, of which SLOs are multiples, that is no step but the server's."""
    alone = hardware(scenario, scale, profile).prefill
    made = scenarios.make(
        f"slos-serve-{scenario}", 1.0, count=scale.count or count or COUNTS[scenario], seed=seed, arrivals=arrivals,
        prefill=lambda prompt: alone(prompt) / (1.0 - server),
    )  # fmt: skip
    if scale.shorter == 1:
        return made
    return with_outputs(made, lambda output: max(2, output // scale.shorter))


def with_outputs(load: Workload, change: Callable[[int], int]) -> Workload:
    """The same requests with other output tokens of each stage."""
    arrivals = []
    for a in load.arrivals:
        parts = tuple(replace(part, output=change(part.output)) for part in a.parts)
        arrivals.append(replace(a, parts=parts, output_tokens=sum(map(change, a.outputs))))
    return replace(load, arrivals=tuple(arrivals))


# --------------------------------------------------------------------------- Azure's arrivals

PATTERNS = {  # Table 2; Mixed's is ours
    "chatbot": "conv", "summarizer": "conv", "reasoning": "conv", "mixed": "conv", "coder": "code", "toolllm": "code",
}  # fmt: skip


def stand_in(scenario: str) -> ArrivalProcess | None:
    """Arrivals as uneven as Azure's; None where the scenario's own are."""
    return CODE_STAND_IN if PATTERNS[scenario] == "code" else None


def trace_files(path: str | Path) -> dict[str, Path]:
    """Azure's LLM inference traces of 2023, `conv` and `code`, by what files' names contain: in a folder, or the one
    file. Raises ValueError where there is none, or several of a pattern."""
    given = Path(path)
    files = sorted(f for f in given.iterdir() if f.is_file()) if given.is_dir() else [given]
    found: dict[str, Path] = {}
    for pattern in dict.fromkeys(PATTERNS.values()):
        own = [file for file in files if pattern in file.name.lower() and "azure" in file.name.lower()]
        if len(own) > 1:
            raise ValueError(f"{path} holds several Azure traces of {pattern!r}: {', '.join(f.name for f in own)}")
        if own:
            found[pattern] = own[0]
    if not found:
        raise ValueError(
            f"{path} is no Azure trace and holds none: give AzureLLMInferenceTrace_conv.csv, _code.csv, or their folder"
        )
    return found


@cache
def replayed(path: str, seed: int) -> ArrivalProcess:
    """A trace's arrivals, stretched to the rate asked for. Each seed begins elsewhere in it, a tenth of it further."""
    times = traces.read(path).times
    return times.beginning_at(seed * len(times.seconds) // 10 % len(times.seconds))


# --------------------------------------------------------------------------- capacity

JUDGES = ("windowed", "deadline")  # the paper's, TTFT and the TPOT of every ten tokens; and ours
TARGETS = {f"{judge} {100 * share:g} %": (judge, share) for judge in JUDGES for share in (0.9, 0.98)}
PAPERS, OURS = "windowed 90 %", "deadline 90 %"
GRID = 1.08  # rates tried are powers of it; between the last two the share is taken as a line
# steps of the grid from one rate tried to the next, by what is known: nothing; another setting's rate; another seed's
FAR, COARSE, NEAR = 9, 4, 2


class CapacitySearch(RateSearch):
    """Rates (requests/s a replica) of one workload that systems hold, output lengths known to all. Policies are told
    that windows are judged, the deadline rule is asked of the same runs."""

    measures = TARGETS

    def __init__(self, load: Workload, machine: Hardware, seed: int, replicas: int = 1, drafts: bool = False) -> None:
        """load: at the rate that its requests really come at, whatever was asked for, so that seeds differ less."""
        super().__init__(GRID, GRID - 1.0 + 1e-6)
        self._load = replace(load, rate=len(load.arrivals) / load.duration)
        self._spec = RunSpec(
            machine, PolicyChoice("vllm"), replicas, lengths=oracle_lengths, drafter=drafter() if drafts else None,
            slo_rule="windowed",
        )  # fmt: skip
        self._seed = seed
        self.unfinished = 0  # requests that had not all their tokens in the end
        self.differ = 0  # verdicts that are not what the simulator's own judge said
        self.begun = dict.fromkeys(JUDGES, (0, 0))  # promises of SLOs-Serve that began, and broken ones
        self._lasted: dict[tuple[str, float], tuple[float, float]] = {}

    def run(self, choice: str, rate: float) -> dict[str, float]:
        chosen = PolicyChoice.parse(choice)
        pools = (chosen.router_settings.get(role, 0) for role in ("prefill", "decode"))
        replicas = sum(int(str(own)) for own in pools) or self._spec.replicas
        spec = replace(self._spec, choice=chosen, replicas=replicas)
        run = simulate(self._load.rescaled(rate * replicas), spec, self._seed, causes=False)
        judged = {judge: rejudged(run, judge) for judge in JUDGES}
        met = {judge: [r.verdict.met for r in own.records] for judge, own in judged.items()}
        if chosen.policy == "slos_serve":
            for judge, own in judged.items():
                kept, (made, broken) = promises(own), self.begun[judge]
                self.begun[judge] = made + kept.made, broken + kept.broken
        self._lasted[choice, rate] = run.workload.duration, capacity.e2e_p99(run)
        self.unfinished += sum(r.outcome != "completed" or r.output != r.asked for r in run.records)
        self.differ += sum(a != r.verdict.met for a, r in zip(met[run.slo_rule], run.records, strict=True))
        return {judge: sum(own) / len(own) for judge, own in met.items()}

    def lasted(self, choice: str, rate: float) -> tuple[float, float]:
        """Seconds of arrivals, and the p99 of e2e, of the run whose rate was nearest."""
        return self._lasted[min((k for k in self._lasted if k[0] == choice), key=lambda k: abs(k[1] - rate))]

    def tuned(self, choices: Sequence[str], target: str, start: float) -> tuple[str, float]:
        """The setting that holds the largest rate, and that rate (0: none holds any). Each is tried at what the best
        before it does not hold, and only if it attains the target there its own capacity is searched. start: a guess,
        by orders of magnitude."""
        best, found = choices[0], 0.0
        for choice in choices:
            if found and self.attained(choice, target)(found * self.grid) < 1.0:
                continue
            factor = COARSE if found else FAR
            rate = rate_or_zero(partial(self.goodput, choice, found or start, target, self.grid**factor))
            found, best = max((found, best), (rate, choice))
        return best, found

    def capacity(self, choice: str, target: str, start: float, factor: int = NEAR) -> float:
        """start: a guess; factor: steps of the grid from one rate tried to the next. 0 where the target is attained at
        no rate tried."""
        return rate_or_zero(partial(self.goodput, choice, start, target, self.grid**factor))

    def shares_tried(self) -> list[Any]:
        return sorted([choice, round(rate, 4), *shares.values()] for (choice, rate), shares in self.known.items())


def fluid_rate(load: Workload, machine: Hardware) -> float:
    """Requests/s a replica that step times would allow, were there no bursts: prompts in full batches, and as many
    decodes at once as KV holds and a step of the tightest TPOT."""
    prompt, output = (float(np.mean([own(a) for a in load.arrivals])) for own in (_prompt, _output))
    limits = machine.limits
    batch = limits.max_num_batched_tokens
    prefill = prompt / batch * machine.model.step_time(Shape().plus(batch, 0))
    return 1.0 / (prefill + output / decode_rate(load, machine))


def decode_rate(load: Workload, machine: Hardware) -> float:
    """Tokens/s that requests of this workload decode at most, each at its mean KV, in steps of the tightest TPOT."""
    kv = float(np.mean([_prompt(a) + _output(a) / 2 for a in load.arrivals]))
    slos = [slo for a in load.arrivals for slo in (load.slo(a), *(part.slo for part in a.parts)) if slo is not None]
    tightest = min((slo.tpot for slo in slos if slo.tpot is not None), default=np.inf)
    limits = machine.limits
    places = max(1, min(limits.max_num_seqs, int(limits.kv_blocks * limits.block_size / kv)))
    steps = [(n, machine.model.step_time(Shape(n, n, int(n * kv)))) for n in range(1, places + 1)]
    return max(n / seconds for n, seconds in steps if seconds <= tightest or n == 1)


def _prompt(arrival: Arrival) -> int:
    return arrival.prompt_tokens


def _output(arrival: Arrival) -> int:
    return arrival.output_tokens
