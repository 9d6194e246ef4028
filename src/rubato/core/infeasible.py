"""Infeasible SLOs: those that a request misses even when its replica serves nothing else, by its latency model."""

from __future__ import annotations

from collections.abc import Iterable
from math import inf
from typing import NamedTuple

from rubato.core.interfaces import LatencyModel
from rubato.core.plan import Shape
from rubato.core.request import SLO
from rubato.core.slo import TOLERANCE, WINDOW, deadlines


class StageLengths(NamedTuple):
    """A stage with the tokens of its prompt and of its output: at least, and at most; the same where it is known. An
    e2e is judged by the fewest, a TPOT by the most."""

    prompt: int
    slo: SLO
    min_output: int
    max_output: int


def prefill_time(latency: LatencyModel, tokens: int, cached: int, chunk: int) -> float:
    """Seconds that a prompt's `tokens` take on an idle engine, in chunks of `chunk`, after `cached` tokens in KV."""
    seconds, end = 0.0, cached + tokens
    while cached < end:
        now = min(chunk, end - cached)
        seconds += latency.step_time(Shape().plus(now, cached))
        cached += now
    return seconds


def find_infeasible(
    stages: Iterable[StageLengths], latency: LatencyModel, chunk: int, slo_rule: str = "deadline", *,
    cached: int = 0, tokens_per_step: float = 1.0,
) -> str | None:  # fmt: skip
    """Why a request of these stages misses its SLO even alone, with the numbers; None if it can meet it.

    Each prompt runs in the largest batches that the engine takes, then one step a token. Step times are taken as linear
    in the context between a stage's first decode and its last (exact for a model that is); they grow, so lateness under
    the deadline rule is convex over tokens and greatest at the first or the last. Where the length of an output is not
    known, every token takes as long as the first.

    Args:
        chunk: tokens of the engine's largest batch.
        cached: tokens of the first prompt that a prefix cache has, fewer than all.
        tokens_per_step: of a decode, above 1 with drafts that turn out right.
    """
    in_kv, start = cached, 0.0
    continues: float | None = None
    for at, (prompt, slo, fewest, most) in enumerate(stages):
        pending = prompt + 1 if at else prompt - cached  # later: the token before it is not in KV yet
        first = prefill_time(latency, pending, in_kv, chunk)
        in_kv += pending
        begin = latency.step_time(Shape().plus(1, in_kv))
        end = latency.step_time(Shape().plus(1, in_kv + max(0, most - 2))) if fewest == most else begin
        step = (begin + end) / (2 * tokens_per_step)
        came = start + first
        soonest, last = came + (fewest - 1) * step, came + (most - 1) * step
        due = deadlines(slo, 0.0, start, came, None if prompt else continues)
        if slo.ttft is not None and first > slo.ttft + TOLERANCE:
            return f"the prompt of {pending} tokens takes {_ms(first)} here alone; asked {_ms(slo.ttft)}"
        if slo.e2e is not None and soonest > due.end + TOLERANCE:
            output = f" and {fewest} of output" if fewest > 1 else ""
            return f"{pending} tokens of prompt{output} take {_ms(soonest)} here alone; asked {_ms(slo.e2e)}"
        if slo.tpot is not None:
            pace = step if most > 1 else first
            by_token = due._replace(end=inf)
            late = came > by_token.token(0) + TOLERANCE or last > by_token.token(most - 1) + TOLERANCE
            if slo_rule != "deadline":
                pace, late = _paced(most - 1, begin / tokens_per_step, end / tokens_per_step, slo.tpot, slo_rule)
            if late:
                return f"a token takes {_ms(pace)} here alone; asked {_ms(slo.tpot)}"
            longest = end / tokens_per_step
            if slo_rule == "deadline" and most > 1 and longest > due.max_pause + TOLERANCE:
                return f"a token takes {_ms(longest)} here alone; the longest pause is {_ms(due.max_pause)}"
        in_kv += most - 1
        continues = last if due.token(most - 1) == inf else due.token(most - 1)
        start = last
    return None


def _paced(steps: int, begin: float, end: float, tpot: float, slo_rule: str) -> tuple[float, bool]:
    """Seconds per token after the first, as the rule counts them, and whether they exceed the TPOT."""
    if not steps:
        return 0.0, False
    counted = steps
    pace = (begin + end) / 2
    if slo_rule == "windowed":  # the last window's steps are the longest
        counted = (steps - 1) % WINDOW + 1
        pace = end - (end - begin) * (counted - 1) / 2 / max(1, steps - 1)
    return pace, counted * pace > counted * tpot + TOLERANCE


def _ms(seconds: float) -> str:
    ms = 1e3 * seconds
    return f"{ms:.0f} ms" if ms >= 1000.0 else f"{ms:.4g} ms"
