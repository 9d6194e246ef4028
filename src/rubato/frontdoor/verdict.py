"""The fields of a response besides its text: usage, the tier served and the verdict on the SLO."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from typing import Any

from rubato.core.events import Finished
from rubato.core.request import SLO, Request
from rubato.frontdoor.slo_fields import BEST_EFFORT_TIER


def usage(prompt: int, output: int, cached: int) -> dict[str, Any]:
    """Returns OpenAI's `usage`, in tokens, of which `cached` were found in the prefix cache."""
    return {
        "prompt_tokens": prompt,
        "completion_tokens": output,
        "total_tokens": prompt + output,
        "prompt_tokens_details": {"cached_tokens": cached},
    }


def served_tier(request: Request, ends: Sequence[Finished]) -> str:
    """Returns the tier actually served: the granted one, or `flex` if a choice with an SLO ended as best effort."""
    return BEST_EFFORT_TIER if any(end.best_effort for end in ends) and not request.best_effort else request.tier


def verdict_fields(requests: Sequence[Request], ends: Sequence[Finished]) -> dict[str, Any]:
    """Returns the fields added to another server's response: tier served and report; none where no end is known."""
    if not ends:
        return {}
    return {"service_tier": served_tier(requests[0], ends), "rubato": report(requests[0], ends)}


def report(request: Request, ends: Sequence[Finished]) -> dict[str, Any]:
    """Returns the `rubato` field: the granted SLO (`targets`), the measured times, and whether the SLO was met.

    Times are milliseconds. margin_ms: to spare at the tightest token, negative when late, null without an SLO;
    max_pause_ms: the longest time between two tokens, null with fewer than two. With several choices it is the worst
    one's report, with each choice's own under `choices`. `met` is null where nothing was missed but a time of the SLO
    was not measured.
    """
    reports = [_report(request, end) for end in ends]
    if len(reports) == 1:
        return reports[0]
    worst = min(reports, key=lambda r: (_RANK[r["met"]], inf if r["margin_ms"] is None else r["margin_ms"]))
    of_all = "best_effort" if any(r["served"] == "best_effort" for r in reports) else "slo"
    return {**worst, "served": of_all, "choices": [{"index": i, **r} for i, r in enumerate(reports)]}


_RANK = {False: 0, None: 1, True: 2}  # of `met`


def _report(request: Request, end: Finished) -> dict[str, Any]:
    targets: dict[str, Any] = slo_in_ms(request.stages[0].slo)
    if len(request.stages) > 1:
        targets["stages"] = [{"until": stage.ends, **slo_in_ms(stage.slo)} for stage in request.stages]
    return {"tier": request.tier, "served": served_as(request, end), "targets": targets, **verdict(end)}


def served_as(request: Request, end: Finished) -> str:
    """Returns `slo` or `best_effort`: how the request was served in the end."""
    return "best_effort" if end.best_effort or request.best_effort else "slo"


def verdict(end: Finished) -> dict[str, Any]:
    """Returns a verdict in milliseconds."""
    judged = end.verdict
    return {
        "met": None if judged.unjudged else judged.met,
        "cause": judged.cause,
        "ttft_ms": ms(judged.ttft),
        "tpot_ms": ms(judged.tpot),
        "e2e_ms": ms(judged.e2e),
        "max_pause_ms": ms(judged.pause),
        "margin_ms": ms(judged.margin),
        "slo_rule": judged.slo_rule,
    }


def slo_in_ms(slo: SLO) -> dict[str, float | None]:
    bounded = {"max_pause_ms": ms(slo.max_pause)} if slo.max_pause is not None else {}
    return {"ttft_ms": ms(slo.ttft), "tpot_ms": ms(slo.tpot), "e2e_ms": ms(slo.e2e), **bounded}


def ms(seconds: float | None) -> float | None:
    """Returns milliseconds; None for None and inf, which mean no bound."""
    return None if seconds is None or seconds == inf else round(seconds * 1e3, 3)
