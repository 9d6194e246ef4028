"""Computes deadlines and verdicts: when the next token is due, and whether a finished request was attained.

The rules differ in how TPOT is judged; TTFT and e2e are the same in all:

- ``deadline`` (our default, PolyServe's DSLO): output token i (from 0) is out by ``start + ttft + i * tpot``, and, with
  a `max_pause` (ours), each after the first within `max_pause` of the one before it, even if it is ahead.
- ``mean`` (AdaServe, Ascendra, SA): ``(last - first) / (n - 1) <= tpot``.
- ``windowed`` (SLOs-Serve): consecutive disjoint windows of 10 output tokens after the first, timed from the token
  before, each within ``10 * tpot``; a tail of k tokens within ``k * tpot``.

A decode-only stage has no TTFT: its deadlines go on from the previous stage's last deadline.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import pairwise
from math import inf
from typing import Literal, NamedTuple, get_args

import numpy as np
from numpy.typing import NDArray

from rubato.core.events import Verdict
from rubato.core.request import INFEASIBLE, SLO, Cause, Outcome, Request

Rule = Literal["deadline", "mean", "windowed"]
SLO_RULES: tuple[Rule, ...] = get_args(Rule)
MIN_NUMPY_TOKENS = 24  # from this length on NumPy is faster
WINDOW_TOKENS = 10  # of SLOs-Serve's windowed TPOT
TOLERANCE_S = 1e-9  # float rounding in sums of deadlines is no miss


class Deadlines(NamedTuple):
    """When each token of one stage is due, in seconds of the clock.

    Token i (from 0) is due at ``first + i * tpot``, never after `end`, and each after the first within `max_pause` of
    the token before it.
    """

    first: float = inf
    tpot: float = inf
    end: float = inf
    max_pause: float = inf

    def token(self, i: int, before: float = inf) -> float:
        """Returns when output token `i` (from 0) of the stage is due; inf = no SLO.

        Args:
            i: index of the token.
            before: when the token before it came out.
        """
        if i == 0:
            return min(self.first, self.end)
        return min(self.first + i * self.tpot, before + self.max_pause, self.end)

    def are_late(self, times: Sequence[float]) -> NDArray[np.bool_]:
        """Returns which of the stage's first tokens, 1 or more, were late at these times."""
        n = len(times)
        due: NDArray[np.float64] = np.full(n, self.first)
        due[1:] += np.arange(1, n) * self.tpot
        np.minimum(due, self.end, out=due)
        came = np.array(times)
        np.minimum(due[1:], came[:-1] + self.max_pause, out=due[1:])
        return came > due + TOLERANCE_S


def deadlines(
    slo: SLO, arrival: float, start: float, first_token_at: float | None, continues: float | None
) -> Deadlines:
    """Returns the deadlines of a stage. With a TPOT and no TTFT they run from the first token, once it is out.

    Args:
        slo: of the stage.
        arrival: of the request, plus the seconds that its tools took.
        start: of the stage.
        first_token_at: when the stage's first token came out; None before.
        continues: for a decode-only stage, the previous stage's last deadline (without one: its last token's time).
    """
    end = inf if slo.e2e is None else arrival + slo.e2e
    tpot = inf if slo.tpot is None else slo.tpot
    if continues is not None and slo.ttft is None:
        first = continues + tpot
    elif slo.ttft is not None:
        first = start + slo.ttft
    elif slo.tpot is not None and first_token_at is not None:
        first = first_token_at
    else:
        first = inf
    return Deadlines(first, tpot, end, inf if slo.max_pause is None or slo.tpot is None else slo.max_pause)


class StageTimes(NamedTuple):
    """When one stage started, and when each of its output tokens came out, ascending."""

    start: float
    tokens: Sequence[float] | NDArray[np.float64]


def judge(
    request: Request,
    stages: Sequence[StageTimes],
    outcome: Outcome = "completed",
    slo_rule: str = "deadline",
    delays: Mapping[Cause, float] | None = None,
    reason: str = "",
) -> Verdict:
    """Judges whether a request attained its SLOs.

    Args:
        request: that ended.
        stages: fewer than the request's when it ended early.
        outcome: of the request.
        slo_rule: one of `SLO_RULES`.
        delays: seconds lost to each cause until the first miss, by the replica; the largest is the cause of a miss.
        reason: of its end; the cause of a request refused as `INFEASIBLE` is "infeasible".

    Raises:
        ValueError: for an unknown rule.
    """
    if slo_rule not in SLO_RULES:
        raise ValueError(f"unknown judging rule {slo_rule!r}: choose one of {', '.join(SLO_RULES)}")
    completed = outcome == "completed"
    outputs = [_for_sums(stage.tokens) for stage in stages if len(stage.tokens)]
    can_meet = completed and (bool(outputs) or request.best_effort)
    pauses = [longest_pause(tokens) for tokens in outputs]
    margins = _margins(request, stages, outputs, pauses, slo_rule == "mean")
    margin = margins[slo_rule] if margins[slo_rule] < inf else None
    met = can_meet and margins[slo_rule] >= -TOLERANCE_S
    by_rule = can_meet and margins["deadline"] >= -TOLERANCE_S, can_meet and margins["windowed"] >= -TOLERANCE_S
    pause = max(pauses, default=0.0)
    cause: Cause | None = None
    if outcome == "refused" and reason.startswith(INFEASIBLE):
        cause = "infeasible"
    elif outcome == "refused" or outcome == "failed":
        cause = outcome
    elif outcome == "cancelled":
        cause = "client"
    elif not met and delays:
        cause = max(delays.items(), key=lambda item: item[1])[0]
    if not outputs:
        return Verdict(met, slo_rule, cause, None, None, None, margin, None, *by_rule)
    first, last = float(outputs[0][0]), float(outputs[-1][-1])
    e2e = last - request.arrival - tool_seconds(stages) if completed else None
    tpot = _mean_tpot(request, stages)
    ttft, pause_or_none = first - request.arrival, pause if max(map(len, outputs)) > 1 else None
    return Verdict(met, slo_rule, cause, ttft, tpot, e2e, margin, pause_or_none, *by_rule)


def judge_untimed(request: Request, ended: float, slo_rule: str) -> Verdict:
    """Judges a completed request of one stage by its e2e alone, where only the time of its end is known."""
    slo, e2e = request.stages[0].slo, ended - request.arrival
    margin = None if slo.e2e is None else slo.e2e - e2e
    in_time = margin is None or margin >= -TOLERANCE_S
    unjudged = in_time and (slo.ttft is not None or slo.tpot is not None)
    return Verdict(in_time and not unjudged, slo_rule, e2e=e2e, margin=margin, unjudged=unjudged)


def as_passed_on(request: Request, verdict: Verdict, tokens: int, first: float | None, last: float) -> Verdict:
    """Adjusts an engine's verdict on a completed request to the times at which a gateway sent its tokens to the client.

    Args:
        request: that completed.
        verdict: the engine's.
        tokens: output tokens.
        first: when the first token was sent; None where unknown.
        last: when the last token was sent.
    """
    if verdict.ttft is None or verdict.e2e is None or len(request.stages) > 1:
        return verdict
    slo, arrival = request.stages[0].slo, request.arrival
    ttft = verdict.ttft if first is None else max(verdict.ttft, first - arrival)
    e2e = max(verdict.e2e, last - arrival, ttft)
    tpot = verdict.tpot if tokens < 2 else (e2e - ttft) / (tokens - 1)
    margin = verdict.margin
    if margin is not None:
        due = deadlines(slo, arrival, arrival, arrival + ttft, None)
        margin = min(margin, due.end - arrival - e2e)
        if slo.ttft is not None:
            margin = min(margin, slo.ttft - ttft)
        if verdict.slo_rule == "deadline":
            margin = min(margin, due.token(max(0, tokens - 1)) - arrival - e2e)
        elif verdict.slo_rule == "mean" and slo.tpot is not None and tokens > 1:
            margin = min(margin, (tokens - 1) * slo.tpot - (e2e - ttft))
    is_late = verdict.met and margin is not None and margin < -TOLERANCE_S
    return replace(
        verdict, met=verdict.met and not is_late, cause="gateway" if is_late else verdict.cause, ttft=ttft, tpot=tpot,
        e2e=e2e, margin=margin,
    )  # fmt: skip


def _for_sums(tokens: Sequence[float] | NDArray[np.float64]) -> Sequence[float] | NDArray[np.float64]:
    """Returns the times of tokens as an array where NumPy is faster: converted once, for all that follows."""
    return tokens if len(tokens) < MIN_NUMPY_TOKENS else np.asarray(tokens)


def longest_pause(tokens: Sequence[float] | NDArray[np.float64]) -> float:
    """Returns the longest time between two consecutive tokens of one stage; 0 for a single token."""
    if len(tokens) < MIN_NUMPY_TOKENS:
        return float(max([b - a for a, b in pairwise(tokens)], default=0.0))
    times = np.asarray(tokens)
    gaps = times[1:] - times[:-1]
    return float(gaps.item(gaps.argmax()))  # in a third of the time that the maximum takes


def tool_seconds(stages: Sequence[StageTimes]) -> float:
    """Returns the seconds that tools took, from a stage's last token to the next stage's start; no SLO counts them."""
    if len(stages) == 1:
        return 0.0
    gaps = [b.start - float(a.tokens[-1]) for a, b in pairwise(stages) if len(a.tokens)]
    return sum([gap for gap in gaps if gap > 0.0])


def _mean_tpot(request: Request, stages: Sequence[StageTimes]) -> float | None:
    """Returns seconds per token after the first of each prompt; a stage without a prompt continues the one before."""
    seconds, tokens, last = 0.0, 0, 0.0
    for stage, times in zip(request.stages, stages, strict=False):
        n = len(times.tokens)
        if not n:
            break
        continues = tokens and not stage.prompt
        seconds += float(times.tokens[-1]) - (last if continues else float(times.tokens[0]))
        tokens += n if continues else n - 1
        last = float(times.tokens[-1])
    return seconds / tokens if tokens else None


def _margins(
    request: Request, stages: Sequence[StageTimes], outputs: Sequence[Sequence[float] | NDArray[np.float64]],
    pauses: Sequence[float], with_mean: bool,
) -> dict[str, float]:  # fmt: skip
    """Returns, by rule, the seconds to spare at the tightest point of all SLOs; inf without SLO or output.

    Args:
        request: to judge.
        stages: its times.
        outputs: the tokens' times of each stage with tokens, for sums (`_for_sums`).
        pauses: the longest pause of each of these.
        with_mean: include the mean rule.
    """
    spare: dict[str, float] = dict.fromkeys(SLO_RULES if with_mean else ("deadline", "windowed"), inf)
    continues: float | None = None
    for at, (stage, times, output, pause) in enumerate(zip(request.stages, stages, outputs, pauses, strict=False)):
        tokens, slo = times.tokens, stage.slo
        n = len(tokens)
        if not n:
            break
        first, last = float(tokens[0]), float(tokens[-1])
        arrival = request.arrival if at == 0 else request.arrival + tool_seconds(stages[: at + 1])
        due = deadlines(slo, arrival, times.start, first, continues if stage.prompt == 0 else None)
        at_end = due.end - last
        by_deadline = min(at_end, _deadline_margin(output, first, due), due.max_pause - pause)
        spare["deadline"] = min(spare["deadline"], by_deadline)
        if slo.ttft is not None:
            at_end = min(at_end, due.first - first)
        tpot = slo.tpot
        spare["windowed"] = min(spare["windowed"], at_end, inf if tpot is None else _windows_margin(output, tpot))
        if with_mean:
            by_mean = inf if tpot is None or n < 2 else (n - 1) * tpot - float(tokens[-1] - tokens[0])
            spare["mean"] = min(spare["mean"], at_end, by_mean)
        if len(request.stages) > 1:
            last_due = due.token(n - 1)
            continues = last_due if last_due < inf else last
    return spare


def _deadline_margin(tokens: Sequence[float] | NDArray[np.float64], first_at: float, due: Deadlines) -> float:
    """Returns the margin of ascending tokens, the first at `first_at`, by `due.first` and `due.tpot` alone."""
    first, tpot, n = due.first, due.tpot, len(tokens)
    if n < 2 or tpot == inf:
        return first - first_at
    if n < MIN_NUMPY_TOKENS:
        return first + min([i * tpot - float(t) for i, t in enumerate(tokens)])
    spare = _due_after_first(tpot, 1 << n.bit_length())[:n] - tokens
    return first + float(spare.item(spare.argmin()))  # in a third of the time that the minimum takes


@lru_cache(16)
def _due_after_first(tpot: float, n: int) -> NDArray[np.float64]:
    """Returns when each of n tokens is due, in seconds after the first."""
    return np.arange(0.0, n) * tpot


def _windows_margin(tokens: Sequence[float] | NDArray[np.float64], tpot: float) -> float:
    """Returns the seconds to spare in the tightest window of `WINDOW_TOKENS` tokens."""
    n = len(tokens)
    spare = inf
    if n < MIN_NUMPY_TOKENS:
        for begin in range(0, n - 1, WINDOW_TOKENS):
            end = min(begin + WINDOW_TOKENS, n - 1)
            spare = min(spare, (end - begin) * tpot - float(tokens[end] - tokens[begin]))
        return spare
    times = np.asarray(tokens)  # a window ends where the next begins; the tail is shorter
    spans = times[WINDOW_TOKENS::WINDOW_TOKENS] - times[:-WINDOW_TOKENS:WINDOW_TOKENS]
    spare = WINDOW_TOKENS * tpot - float(spans.item(spans.argmax()))
    tail = (n - 1) % WINDOW_TOKENS
    return min(spare, tail * tpot - float(times[-1] - times[-1 - tail])) if tail else spare
