"""PolyServe's optimum (§3.4, §3.5): what a request costs at the largest batch that its SLO and the KV memory allow.

A yardstick, no schedule: each request is served in a batch of its own kind, as large as its TPOT permits, with no
waiting and no gap. PolyServe's formulas, read as follows. GEMM is the part of a step that depends on its tokens
(collectives and the host's share, too); attention is what KV reads add. The printed form of a co-located step has
PF(d/(p+d)·B); the share of prompts is p/(p+d)·B. A TTFT does not bound the batch, since T_iter/B falls with B: a
request whose prompt takes longer than its TTFT at the batch that its TPOT allows is counted at that batch, and as late.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from math import inf
from typing import Any, Literal, NamedTuple

from rubato.core.interfaces import LatencyModel
from rubato.core.plan import Limits
from rubato.measure.confidence import Estimate
from rubato.measure.pictures import COLOURS, WIDTH, Ink, Picture, bars_with_intervals
from rubato.measure.result import Result
from rubato.measure.tables import Table
from rubato.simulation.run_spec import Hardware
from rubato.workloads import Workload

Mode = Literal["pd", "co"]
PREFILL_BATCH_TOKENS = 2048  # tokens of a prefill replica's batch; from there on GEMM takes time in proportion (§3.4)


class BatchLimit(NamedTuple):
    """The largest batch for one kind of request.

    Args:
        batch: its tokens; with PD, where a batch is decodes alone, its sequences.
        seconds: how long its step takes.
        reason: what limits it: "tpot", "kv", "batch" (the engine's) or, if one token is too slow, "none".
    """

    batch: int
    seconds: float
    reason: str


class ModeCost(NamedTuple):
    """The seconds of a replica that one request takes.

    Args:
        limit: the largest batch of its decodes with PD, else the largest batch.
        late: whether its prompt takes longer than its TTFT at this batch.
    """

    seconds: float
    limit: BatchLimit
    late: bool


@dataclass(frozen=True)
class Optimum:
    """The highest rate that one replica serves of a workload, if every batch is as large as its SLOs permit.

    Args:
        cost: mean replica-seconds of a request.
        rate: requests/s that one replica serves at most.
        late: requests whose TTFT does not fit in the batch that was counted.
        slow: requests whose TPOT even a batch of one token exceeds, counted one by one.
    """

    mode: Mode
    requests: int
    cost: float
    late: int
    slow: int

    @property
    def rate(self) -> float:
        return 1.0 / self.cost


@dataclass(frozen=True)
class StepParts:
    """A latency model, taken apart as the paper's formulas want it. Seconds."""

    model: LatencyModel
    limits: Limits

    def gemm(self, tokens: int, seqs: int) -> float:
        """Of a batch of so many tokens, `seqs` of which are sampled from; without attention."""
        return self.model.seconds_of(tokens, seqs, 0, 0, 0, seqs, 0)

    def decode_attention(self, seqs: int, kv: float) -> float:
        """Of so many decodes that read `kv` tokens together."""
        return self.model.seconds_of(seqs, seqs, round(kv), 0, 0, 0, 0) - self.gemm(seqs, seqs)

    def prefill_attention(self, tokens: int) -> float:
        """Of a whole prompt, in chunks of `PREFILL_BATCH_TOKENS`."""
        seconds, seconds_of = 0.0, self.model.seconds_of
        for done in range(0, tokens, PREFILL_BATCH_TOKENS):
            chunk = min(PREFILL_BATCH_TOKENS, tokens - done)
            if chunk > 1:
                whole = seconds_of(chunk, 1, done + chunk, chunk * done, chunk * chunk, 1, done + chunk)
                seconds += whole - self.gemm(chunk, 1)
        return seconds


def decode_limit(parts: StepParts, prompt: int, output: int, tpot: float) -> BatchLimit:
    """PD: the largest B with GEMM(B) + DcAttn(B(p + d/2)) < TPOT and B(p + d/2) < C."""
    each = prompt + output / 2

    def seconds(batch: int) -> float:
        return parts.gemm(batch, batch) + parts.decode_attention(batch, batch * each)

    return _largest(parts, seconds, lambda batch: batch * each, tpot, parts.limits.max_num_seqs)


def mixed_limit(parts: StepParts, prompt: int, output: int, tpot: float) -> BatchLimit:
    """Co-located: the largest B tokens, d : p of decodes and prompts, whose step is below the TPOT and whose KV,
    d/(p+d)·B·(p + d/2) + p, fits."""
    share = output / (prompt + output)

    def kv(batch: int) -> float:
        return share * batch * (prompt + output / 2) + prompt

    def seconds(batch: int) -> float:
        seqs = _decoding(batch, prompt, output)
        return parts.gemm(batch, seqs) + parts.decode_attention(seqs, kv(batch))

    most = min(parts.limits.max_num_batched_tokens, int(parts.limits.max_num_seqs / share))
    return _largest(parts, seconds, kv, tpot, most)


def disaggregated(parts: StepParts, prompt: int, output: int, ttft: float, tpot: float) -> ModeCost:
    """p·GEMM(Bp)/Bp + PF(p) + d·GEMM(Bd)/Bd + DcAttn(d(p + d/2)); the last two are d/Bd steps."""
    limit = decode_limit(parts, prompt, output, tpot)
    prefill = prompt * parts.gemm(PREFILL_BATCH_TOKENS, 1) / PREFILL_BATCH_TOKENS + parts.prefill_attention(prompt)
    return ModeCost(prefill + output * limit.seconds / limit.batch, limit, prefill >= ttft)


def co_located(parts: StepParts, prompt: int, output: int, ttft: float, tpot: float) -> ModeCost:
    """(p + d)·GEMM(B)/B + PF(p) + DcAttn(d(p + d/2))."""
    limit = mixed_limit(parts, prompt, output, tpot)
    seqs = _decoding(limit.batch, prompt, output)
    read = seqs * (prompt + output / 2)
    attention = parts.decode_attention(seqs, read) / read * output * (prompt + output / 2)
    gemm = (prompt + output) * parts.gemm(limit.batch, seqs) / limit.batch
    steps = (prompt + output) / limit.batch
    return ModeCost(gemm + parts.prefill_attention(prompt) + attention, limit, steps * limit.seconds >= ttft)


COSTS: dict[Mode, Callable[[StepParts, int, int, float, float], ModeCost]] = {"pd": disaggregated, "co": co_located}


def optimum(load: Workload, model: LatencyModel, limits: Limits, mode: Mode) -> Optimum:
    """Of all requests of a workload, each in a batch of its own kind. A request without TTFT or TPOT is bounded by the
    rest. Raises ValueError for an empty workload, or stages, which the paper has not."""
    parts = StepParts(model, limits)
    costs: list[ModeCost] = []
    for arrival in load.arrivals:
        (stage, *more) = load.parts(arrival)
        if more:
            raise ValueError(f"request {arrival.id!r} has several stages: the optimum knows requests of one prompt")
        slo = stage.slo
        ttft = inf if slo.ttft is None else slo.ttft
        tpot = inf if slo.tpot is None else slo.tpot
        costs.append(COSTS[mode](parts, stage.prompt, stage.output, ttft, tpot))
    if not costs:
        raise ValueError("the workload is empty: give requests")
    return Optimum(
        mode,
        len(costs),
        sum(c.seconds for c in costs) / len(costs),
        sum(c.late for c in costs),
        sum(c.limit.reason == "none" for c in costs),
    )


def _decoding(batch: int, prompt: int, output: int) -> int:
    """How many of a co-located batch's tokens are decodes, d of p + d; at least one."""
    return max(1, round(output / (prompt + output) * batch))


def _largest(
    parts: StepParts, seconds: Callable[[int], float], kv: Callable[[int], float], tpot: float, most: int
) -> BatchLimit:
    """The largest batch of 1 to `most` whose step is below `tpot` and whose KV fits; 1 if none is."""
    capacity = parts.limits.kv_blocks * parts.limits.block_size

    def fits(batch: int) -> bool:
        return kv(batch) < capacity and seconds(batch) < tpot

    if not fits(1):
        return BatchLimit(1, seconds(1), "none")
    low, high = 1, most + 1
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    reason = "batch" if low == most else "kv" if kv(low + 1) >= capacity else "tpot"
    return BatchLimit(low, seconds(low), reason)


NAMES = {"pd": "prefill and decode apart", "co": "co-located"}


@dataclass(frozen=True, repr=False)
class Optima(Result):
    """Of one replica, in each mode."""

    title = "Optimum"
    hardware: Hardware
    optima: tuple[Optimum, ...]

    @property
    def answer(self) -> str:
        best = max(self.optima, key=lambda o: o.rate)
        return f"A replica of {self.hardware.name} serves {best.rate:.4g} requests/s at most ({NAMES[best.mode]})."

    @property
    def settings(self) -> Mapping[str, Any]:
        return {"hardware": self.hardware.describe()}

    @property
    def findings(self) -> tuple[str, ...]:
        return (
            "A reference, no bound: every request served, each in a batch of its like, without gaps. A policy that "
            "refuses the dearest requests serves more of the others.",
        )

    def tables(self) -> list[Table]:
        head = ("mode", "requests/s a replica", "replica-seconds a request", "TTFT too short for it", "TPOT too short")
        rows = [
            (NAMES[o.mode], f"{o.rate:.4g}", f"{o.cost:.4g}", f"{o.late} of {o.requests}", f"{o.slow} of {o.requests}")
            for o in self.optima
        ]
        return [Table(head, tuple(rows))]

    def rows(self) -> list[dict[str, Any]]:
        return [asdict(o) | {"rate": o.rate} for o in self.optima]

    def picture(self) -> Picture:
        def draw(figure: Any, ink: Ink) -> None:
            axes = figure.add_subplot()
            rows = [(NAMES[o.mode], Estimate.exact(o.rate), f"{o.rate:.3g}", COLOURS[0]) for o in self.optima]
            bars_with_intervals(axes, rows, ink)
            axes.set_xlabel("requests/s a replica")

        return Picture("PolyServe's optimum", draw, (WIDTH, 2.2))

    def to_json(self) -> dict[str, Any]:
        return {"hardware": self.hardware.describe(), "optimum": self.rows()}
