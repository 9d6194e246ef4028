"""Misses for the board, grouped by tier and cause, each group with its latest miss as an example."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass, field
from typing import Any

from rubato.core.events import Finished
from rubato.core.request import Request
from rubato.frontdoor.verdict import ms, slo_in_ms

MAX_GROUPS = 64  # of one tenant; the group that missed least recently makes room


@dataclass(slots=True)
class _Group:
    """Counts one tier's misses by one cause, all and the recent ones by slice of time; `latest` is the last one."""

    latest: tuple[Request, Finished]
    count: int = 0
    recent: Counter[int] = field(default_factory=Counter)


class BoardMisses:
    """Groups misses by tenant, tier and cause; recent counts look back by this many slices."""

    def __init__(self, slices: int) -> None:
        self._slices = slices
        self._groups: dict[str, dict[tuple[str, str], _Group]] = {}  # by tenant

    def add(self, request: Request, end: Finished, number: int) -> None:
        """Counts a miss.

        Args:
            request: without its texts.
            end: of the request.
            number: of the current slice.
        """
        groups = self._groups.setdefault(request.tenant, {})
        key = (request.tier, end.verdict.cause or "unknown")
        group = groups[key] = (
            groups.pop(key) if key in groups else _Group((request, end))
        )  # the most recent is the last
        group.latest = (request, end)
        group.count += 1
        group.recent[number] += 1
        if len(group.recent) > self._slices:
            del group.recent[min(group.recent)]
        if len(groups) > MAX_GROUPS:
            del groups[next(iter(groups))]

    def to_json(self, tenant: str | None, now: float, number: int) -> list[dict[str, Any]]:
        """Returns the groups of one tenant, or of all (None), as JSON, the most frequent recent ones first."""
        by_key: defaultdict[tuple[str, str], list[_Group]] = defaultdict(list)
        for name, groups in self._groups.items():
            for key, group in groups.items() if tenant in (None, name) else ():
                by_key[key].append(group)
        rows: list[dict[str, Any]] = [
            {
                "tier": tier,
                "cause": cause,
                "recent": sum(n for group in groups for at, n in group.recent.items() if at > number - self._slices),
                "count": sum(group.count for group in groups),
                "latest": _miss(*max((group.latest for group in groups), key=lambda latest: latest[1].at), now),
            }
            for (tier, cause), groups in by_key.items()
        ]
        return sorted(rows, key=lambda row: (-row["recent"], -row["count"], row["tier"], row["cause"]))[:MAX_GROUPS]


def _miss(request: Request, end: Finished, now: float) -> dict[str, Any]:
    return {
        "id": request.id,
        "tenant": request.tenant,
        "age_ms": ms(max(0.0, now - end.at)),
        "outcome": end.outcome,
        "reason": "" if end.outcome == "completed" else end.reason[:200],
        "slo": slo_in_ms(request.stages[0].slo),
        **{name: ms(getattr(end.verdict, name[:-3])) for name in ("ttft_ms", "tpot_ms", "e2e_ms", "margin_ms")},
    }
