"""Finds infeasible SLOs: by the latency model, the request would miss them even on a replica that is otherwise idle."""

from __future__ import annotations

from collections.abc import Iterable
from math import inf
from typing import NamedTuple

from rubato.core.interfaces import LatencyModel
from rubato.core.plan import Shape
from rubato.core.request import SLO
from rubato.core.slo import TOLERANCE_S, WINDOW_TOKENS, deadlines


class StageLengths(NamedTuple):
    """The lengths of one stage, in tokens.

    Where the output length is known, min_output and max_output are equal. The minimum is judged by the e2e, the maximum
    by the TPOT.
    """

    prompt: int
    slo: SLO
    min_output: int
    max_output: int


def prefill_time(latency: LatencyModel, tokens: int, cached: int, chunk: int) -> float:
    """Returns the seconds to prefill `tokens` tokens on an idle engine, in chunks of `chunk`, after `cached` in KV."""
    seconds, end = 0.0, cached + tokens
    while cached < end:
        count = min(chunk, end - cached)
        seconds += latency.step_time(Shape.prefill(count, cached))
        cached += count
    return seconds


def find_infeasible(
    stages: Iterable[StageLengths], latency: LatencyModel, chunk: int, slo_rule: str = "deadline", *,
    cached: int = 0, tokens_per_step: float = 1.0,
) -> str | None:  # fmt: skip
    """Says, with numbers, why a request of these stages misses its SLO even alone; None if it can meet it.

    Each prompt runs in the largest batches that the engine takes, then one step a token. Step times are assumed linear
    in the context from a stage's first decode to its last (exact for a linear model); they grow, so lateness under the
    deadline rule is convex over tokens and greatest at the first or the last. Where the length of an output is not
    known, every token takes as long as the first.

    Args:
        stages: of the request.
        latency: predicts the steps.
        chunk: tokens of the engine's largest batch.
        slo_rule: one of `SLO_RULES`.
        cached: tokens of the first prompt in the prefix cache, fewer than all.
        tokens_per_step: of a decode, above 1 with accepted drafts.
    """
    in_kv, start = cached, 0.0
    continues: float | None = None
    for at, (prompt, slo, min_output, max_output) in enumerate(stages):
        pending = prompt + 1 if at else prompt - cached  # later: the token before it is not in KV yet
        first = prefill_time(latency, pending, in_kv, chunk)
        in_kv += pending
        is_known = min_output == max_output
        begin = latency.step_time(Shape.decodes(1, in_kv + 1))
        end = latency.step_time(Shape.decodes(1, in_kv + 1 + max(0, max_output - 2))) if is_known else begin
        step = (begin + end) / (2 * tokens_per_step)
        first_at = start + first
        soonest, last = first_at + (min_output - 1) * step, first_at + (max_output - 1) * step
        due = deadlines(slo, 0.0, start, first_at, None if prompt else continues)
        if slo.ttft is not None and first > slo.ttft + TOLERANCE_S:
            return f"the prompt of {pending} tokens takes {_ms(first)} here alone; asked {_ms(slo.ttft)}"
        if slo.e2e is not None and soonest > due.end + TOLERANCE_S:
            output = f" and {min_output} of output" if min_output > 1 else ""
            return f"{pending} tokens of prompt{output} take {_ms(soonest)} here alone; asked {_ms(slo.e2e)}"
        if slo.tpot is not None:
            pace = step if max_output > 1 else first
            by_token = due._replace(end=inf)
            is_late = first_at > by_token.token(0) + TOLERANCE_S or last > by_token.token(max_output - 1) + TOLERANCE_S
            if slo_rule != "deadline":
                pace, is_late = _paced(
                    max_output - 1, begin / tokens_per_step, end / tokens_per_step, slo.tpot, slo_rule
                )
            if is_late:
                return f"a token takes {_ms(pace)} here alone; asked {_ms(slo.tpot)}"
            longest = end / tokens_per_step
            if slo_rule == "deadline" and max_output > 1 and longest > due.max_pause + TOLERANCE_S:
                return f"a token takes {_ms(longest)} here alone; the longest pause is {_ms(due.max_pause)}"
        in_kv += max_output - 1
        last_due = due.token(max_output - 1)
        continues = last if last_due == inf else last_due
        start = last
    return None


def _paced(steps: int, begin: float, end: float, tpot: float, slo_rule: str) -> tuple[float, bool]:
    """Returns seconds per token after the first, averaged as the rule does, and whether they exceed the TPOT."""
    if not steps:
        return 0.0, False
    window = steps
    pace = (begin + end) / 2
    if slo_rule == "windowed":  # the last window's steps are the longest
        window = (steps - 1) % WINDOW_TOKENS + 1
        pace = end - (end - begin) * (window - 1) / 2 / max(1, steps - 1)
    return pace, window * pace > window * tpot + TOLERANCE_S


def _ms(seconds: float) -> str:
    ms = 1e3 * seconds
    return f"{ms:.0f} ms" if ms >= 1000.0 else f"{ms:.4g} ms"
