"""Feasibility: requests whose SLO an idle replica, serving nothing else, would miss. No fleet can attain them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from rubato.core.infeasible import StageLengths, find_infeasible
from rubato.simulation.run_spec import Hardware
from rubato.workloads import Arrival, OfferedStage, Workload


@dataclass(frozen=True)
class Feasibility:
    """The infeasible requests of a workload: those that no idle replica attains.

    Args:
        infeasible: number by tier.
        example: one of them, with what it lacks; the longest, where requests are too long.
    """

    offered: int
    infeasible: Mapping[str, int]
    example: str = ""

    @property
    def count(self) -> int:
        return sum(self.infeasible.values())

    @property
    def share(self) -> float:
        return self.count / self.offered

    @property
    def text(self) -> str:
        tiers = ", ".join(f"{count} of {tier}" for tier, count in self.infeasible.items())
        return f"{self.count} of {self.offered} requests ({tiers}) cannot be attained even alone: {self.example}"

    def check(self, target: float) -> None:
        """Raises ValueError when no fleet of any size can attain `target`, a share."""
        if 1.0 - self.share < target:
            raise ValueError(
                f"no number of replicas attains {100 * target:g} %: {self.text}. Loosen these SLOs, take faster "
                "hardware, or leave such requests out (`rubato plan --exclude-infeasible`)"
            )


def assess(load: Workload, hardware: Hardware, slo_rule: str = "deadline") -> Feasibility:
    """Judge each request of a workload as if it had an idle replica to itself."""
    infeasible: Counter[str] = Counter()
    example, excess = "", 0  # tokens by which the example is too long
    for one, why in _judged(load, hardware, slo_rule):
        infeasible[one.tier] += bool(why)
        beyond = max(0, sum(part.prompt + part.output for part in load.parts(one)) - fitting(hardware))
        if why and (not example or 0 < excess < beyond):
            example, excess = f"{one.id} (tier {one.tier}): {why}", beyond
    return Feasibility(len(load.arrivals), {tier: count for tier, count in infeasible.items() if count}, example)


def feasible_only(load: Workload, hardware: Hardware, slo_rule: str = "deadline") -> Workload:
    """The workload without its infeasible requests, at a rate lowered alike. Raises ValueError when none is left,
    or when others go on from one."""
    if load.follows:
        raise ValueError(f"workload {load.name!r} has requests that go on from others: none of them can be left out")
    kept = tuple(one for one, why in _judged(load, hardware, slo_rule) if not why)
    if not kept:
        raise ValueError(f"workload {load.name!r}: {assess(load, hardware, slo_rule).text}")
    return replace(load, arrivals=kept, rate=load.rate * len(kept) / len(load.arrivals))


def _judged(load: Workload, hardware: Hardware, slo_rule: str) -> Iterator[tuple[Arrival, str]]:
    """Each request with what it lacks, "" if nothing; requests of equal lengths and SLO are judged once."""
    reasons: dict[tuple[object, ...], str] = {}
    for one in load.arrivals:
        like = one.parts or (one.prompt_tokens, one.output_tokens, one.tier, one.slo)
        if like not in reasons:
            reasons[like] = unmet_slo(load.parts(one), hardware, slo_rule)
        yield one, reasons[like]


def fitting(hardware: Hardware) -> int:
    """Tokens of the longest request that a replica can hold."""
    limits = hardware.limits
    return min(limits.max_model_len, limits.kv_blocks * limits.block_size)


def unmet_slo(parts: Sequence[OfferedStage], hardware: Hardware, slo_rule: str) -> str:
    """Why a request of these stages misses its SLO on an idle replica, in words; "" if it does not."""
    limits = hardware.limits
    fits = fitting(hardware)
    length = sum(part.prompt + part.output for part in parts)
    if length > fits:
        lifts = [f"--set engine.max_model_len={length}"] if length > limits.max_model_len else []
        if length > limits.kv_blocks * limits.block_size:
            lifts.append(f"--kv-tokens {limits.blocks(length) * limits.block_size}")
        return f"it is {length} tokens long and {fits} fit (lifted by {' and '.join(lifts)})"
    stages = [StageLengths(part.prompt, part.slo, part.output, part.output) for part in parts]
    return find_infeasible(stages, hardware.model, limits.max_num_batched_tokens, slo_rule) or ""
