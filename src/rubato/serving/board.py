"""The data of the board: the page is at `/`, its data at `/board.json`.

The page is the same for everyone and contains no data. Where tenants are configured the JSON needs a key: a tenant sees
its own requests and the tiers' totals, an admin everything. The state is computed at most once in `REFRESH_S` seconds,
however many browsers ask. `board_pages` serves both in an app, `vllm_board` inside vLLM's API server.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from typing import Any

import orjson

import rubato
from rubato.core.clock import PLAN, Clock
from rubato.core.interfaces import SeqView, View
from rubato.core.server_url import bare_host
from rubato.frontdoor.history import RequestHistory
from rubato.frontdoor.tenants import Tenant, Tenants
from rubato.frontdoor.verdict import slo_in_ms
from rubato.serving.board_counts import OBJECTIVE, RING_S, SLICE_S, SLICES, WINDOWS_S, BoardCounts, TierCounts
from rubato.serving.board_snapshot import RequestsInFlight, TierInFlight, replica_json

REFRESH_S = 0.5


@dataclass(frozen=True)
class BoardSource:
    """Provides the state that the board shows.

    Args:
        model: its name.
        policy: its name.
        router: its name; "" where there is none.
        clock: of the requests' events.
        paths: of a request's page and of chat completions, relative to the board's.
        tenants: who may see what.
        has_fair_share: whether a request may be held for its tenant's share.
        requests: their records.
        held_requests: those at no replica.
        views: of the replicas.
        state: serving, draining or dead.
        faulty_replicas: ids of replicas that schedule without the policy after its faults; "" stands for the router.
        draining_replicas: ids of replicas that take no new requests, and leave.
        counted_replicas: ids of replicas that do not report their state: it is counted from the requests sent there.
        urls: by replica id, for replicas that are servers.
    """

    model: str
    policy: str
    router: str
    clock: Clock
    paths: Mapping[str, str]
    tenants: Tenants
    has_fair_share: bool
    requests: RequestHistory
    held_requests: Callable[[], Sequence[SeqView]]
    views: Callable[[], Sequence[View]]
    state: Callable[[], str]
    faulty_replicas: Callable[[], Collection[str]]
    draining_replicas: Callable[[], Collection[str]] = tuple
    counted_replicas: Callable[[], Collection[str]] = tuple
    urls: Callable[[], Mapping[str, str]] = dict


class Board:
    """Serves the state at most `REFRESH_S` seconds ago, as JSON for each tenant. `counts` must get every event."""

    def __init__(self, source: BoardSource) -> None:
        self.counts = BoardCounts(source.requests, self._sample_later)
        self._source = source
        self._since = source.clock.now()
        self._refreshed_at = -inf
        self._number = 0  # of the current slice
        self._faulty_replicas: set[str] = set()
        self._common: dict[str, Any] = {}
        self._last_rows: dict[str, dict[str, Any]] = {}  # by replica
        self._replicas: list[dict[str, Any]] = []
        self._requests = RequestsInFlight({}, [], [], 0.0, has_fair_share=False)
        self._answers: dict[tuple[str, int], bytes] = {}  # by tenant and first slice

    def json(self, tenant: Tenant, since: int = 0) -> bytes:
        """Returns the JSON for this tenant, with its history from slice `since` on."""
        now = self._source.clock.now()
        if now >= self._refreshed_at + REFRESH_S:
            self._refresh(now)
        first = min(max(since, self._number - SLICES + 1, 0), self._number)
        if (tenant.name, first) not in self._answers:
            self._answers[tenant.name, first] = orjson.dumps(self._tenant_json(tenant, first))
        return self._answers[tenant.name, first]

    def _sample_later(self, at: float) -> None:
        """Samples the replicas once all listeners have handled the current event."""
        clock = self._source.clock

        def sample() -> None:
            self._sample(clock.now())

        clock.call_at(clock.now(), PLAN, sample)

    def _sample(self, now: float) -> Sequence[View]:
        source, counts = self._source, self.counts
        views, urls = source.views(), source.urls()
        counted, draining = source.counted_replicas(), source.draining_replicas()
        self._number = counts.advance(now)
        counts.replicas.sample(views, self._number, counted)
        for id in source.faulty_replicas():
            if id not in self._faulty_replicas:
                self._faulty_replicas.add(id)
                counts.replicas.flag(now, self._number, "gave up", id)
        rows = [
            replica_json(view, counts.replicas.step_seconds(view.id), draining, counted, urls.get(view.id, ""))
            for view in views
        ]
        back = {row["url"]: row["id"] for row in rows if row["url"]}
        for id, at in list(counts.replicas.lost_at.items()):
            row = self._last_rows.get(id, {"id": id, "url": "", "role": ""})
            if row["url"] in back:
                counts.replicas.succeed(id, back[row["url"]])
            elif at < now - RING_S:
                counts.replicas.forget(id)
            else:
                rows.append({**row, **_LOST_COLUMNS, "age_ms": round((now - at) * 1e3)})
        rows.sort(key=lambda row: (row["url"], len(row["id"]), row["id"]))  # a lost replica stays in its place
        self._last_rows = {row["id"]: row for row in rows}
        self._replicas = rows
        return views

    def _refresh(self, now: float) -> None:
        source = self._source
        views = self._sample(now)
        self._refreshed_at, self._answers = now, {}
        self._requests = RequestsInFlight(
            source.requests.in_flight,
            source.held_requests(),
            views,
            now,
            has_fair_share=source.has_fair_share,
            counted_replicas=source.counted_replicas(),
            is_routed=bool(source.router),
        )
        self._common = {
            "model": source.model,
            "policy": source.policy,
            "router": source.router,
            "version": rubato.__version__,
            "state": source.state(),
            "serving_seconds": round(now - self._since, 1),
            "objective": OBJECTIVE,
            "windows_seconds": WINDOWS_S,
            "keys": source.tenants.configured,
            "paths": source.paths,
            "total": _total(self.counts.tiers.values()),
            "tiers": self._tiers(),
        }

    def _tiers(self) -> list[dict[str, Any]]:
        """Returns each tier as JSON, the most urgent first, best effort last."""
        slos = {tier.name: tier.slo for tier in self._source.tenants.all_tiers.usable}
        counts, in_flight = self.counts.tiers, self._requests.by_tier()
        names = {*counts, *(name for name, slo in slos.items() if not slo.best_effort)}

        def urgency(name: str) -> tuple[float, str]:
            slo = slos.get(name)
            bounds = [] if slo is None else [time for time in (slo.ttft, slo.e2e, slo.tpot) if time is not None]
            return (bounds[0] if bounds else inf), name

        present = {name: in_flight.get(name, TierInFlight()) for name in sorted(names, key=urgency)}
        return [
            {
                "name": name,
                "slo": slo_in_ms(slos[name]) if name in slos else None,
                **(counts.get(name) or TierCounts()).to_json(self._number, now.late),
                "now": now.to_json(),
            }
            for name, now in present.items()
        ]

    def _tenant_json(self, tenant: Tenant, first: int) -> dict[str, Any]:
        whose = None if tenant.admin else tenant.name
        counts, number, replicas = self.counts, self._number, self._replicas
        names = {row["id"]: row["url"] or row["id"] for row in replicas} if tenant.admin else {}
        hosts = {id: bare_host(name) for id, name in names.items() if id != name}
        return {
            **self._common,
            "tenant": tenant.name,
            "admin": tenant.admin,
            "may_ask_for": [
                {"name": tier.name, "slo": slo_in_ms(tier.slo)} for tier in self._source.tenants.tiers(tenant).usable
            ],
            "replicas": replicas if tenant.admin else None,
            "flags": counts.replicas.flags_json(self._refreshed_at, number) if tenant.admin else [],
            "history": {
                "first": first,
                "slice_seconds": SLICE_S,
                "slices": SLICES,
                "tiers": {name: tier.history(first, number) for name, tier in counts.tiers.items()},
                "replicas": counts.replicas.history(names, first, number),
            },
            **self._requests.to_json(whose, hosts),
            "misses": counts.misses.to_json(whose, self._refreshed_at, number),
        }


_LOST_COLUMNS = {
    "state": "lost", "running": 0, "waiting": 0, "moving": 0, "kv_used_tokens": None, "steps": None,
    "step_ms": None,
}  # fmt: skip


def _total(tiers: Collection[TierCounts]) -> dict[str, int]:
    """Returns the counts of all tiers together since the start."""
    names = ("offered", "met", "missed", "unjudged")
    counts = {name: sum(getattr(tier.since_start, name) for tier in tiers) for name in names}
    return {**counts, "in_flight": sum(tier.in_flight for tier in tiers)}
