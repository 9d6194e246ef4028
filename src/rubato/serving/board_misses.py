"""Misses for the board, grouped by tier and cause, each group with its latest miss as an example."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Any

from rubato.core.events import Finished
from rubato.core.request import Request
from rubato.frontdoor.verdict import ms, slo_in_ms

MAX_GROUPS = 64  # of one tenant; the group that missed least recently makes room


@dataclass(slots=True)
class _Group:
    """Misses of one tier by one cause. latest: the last of them. ring: [slice, misses] of the last minutes."""

    latest: tuple[Request, Finished]
    count: int = 0
    ring: deque[list[int]] = field(default_factory=deque)


class BoardMisses:
    """Groups of misses by tenant, tier and cause. slices: how far back recent counts look."""

    def __init__(self, slices: int) -> None:
        self._slices = slices
        self._groups: dict[str, dict[tuple[str, str], _Group]] = {}  # by tenant

    def add(self, request: Request, end: Finished, number: int) -> None:
        groups = self._groups.setdefault(request.tenant, {})
        key = (request.tier, end.verdict.cause or "unknown")
        latest = (request, end)
        group = groups[key] = groups.pop(key) if key in groups else _Group(latest)  # the most recent is the last
        group.latest = latest
        group.count += 1
        if not group.ring or group.ring[-1][0] != number:
            group.ring.append([number, 0])
        group.ring[-1][1] += 1
        if len(group.ring) > self._slices:
            group.ring.popleft()
        if len(groups) > MAX_GROUPS:
            del groups[next(iter(groups))]

    def to_json(self, tenant: str | None, now: float, number: int) -> list[dict[str, Any]]:
        """The groups of one tenant, or of all (None), as JSON, the most frequent recent ones first."""
        merged: dict[tuple[str, str], _Row] = {}
        for name, groups in self._groups.items():
            if tenant in (None, name):
                for key, group in groups.items():
                    recent = sum(misses for at, misses in group.ring if at > number - self._slices)
                    merged.setdefault(key, _Row()).add(group, recent)
        rows = sorted(merged.items(), key=lambda item: (-item[1].recent, -item[1].count, item[0]))
        return [{"tier": tier, "cause": cause, **row.to_json(now)} for (tier, cause), row in rows[:MAX_GROUPS]]


@dataclass(slots=True)
class _Row:
    """One group summed over tenants."""

    recent: int = 0
    count: int = 0
    latest: tuple[Request, Finished] | None = None

    def add(self, group: _Group, recent: int) -> None:
        self.recent += recent
        self.count += group.count
        if self.latest is None or group.latest[1].at > self.latest[1].at:
            self.latest = group.latest

    def to_json(self, now: float) -> dict[str, Any]:
        assert self.latest is not None
        return {"recent": self.recent, "count": self.count, "latest": _miss(*self.latest, now)}


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
