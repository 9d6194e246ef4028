"""Counts what each tier loses, so that none falls far behind the others."""

from __future__ import annotations

LOSS_MEMORY_REQUESTS = 256  # requests of all tiers, over which losses are counted: one clock, however rare a tier is
# A tier offered less than this, after fading, is dropped: its last request was 767 requests ago.
MIN_OFFERED_REQUESTS = 0.05


class RecentLosses:
    """Counts, by tier, the requests that were offered and those that were lost: set aside now, or ended late. Both fade
    with each request that is offered. `tiers` has the tier of each request that has not ended here."""

    def __init__(self) -> None:
        self.tiers: dict[str, str] = {}
        self.set_aside: set[str] = set()  # ids that count as lost now
        self._offered: dict[str, float] = {}
        self._lost: dict[str, float] = {}

    def offer(self, id: str, tier: str) -> None:
        """Counts a request as offered."""
        self.tiers[id] = tier
        for counts in (self._offered, self._lost):
            for name in counts:
                counts[name] *= 1.0 - 1.0 / LOSS_MEMORY_REQUESTS
        self._offered[tier] = self._offered.get(tier, 0.0) + 1.0
        self._lost.setdefault(tier, 0.0)
        # A tier may be a client's free text (inside vLLM), so the names kept must be bounded.
        for name in [name for name, count in self._offered.items() if count < MIN_OFFERED_REQUESTS]:
            del self._offered[name], self._lost[name]

    def count(self, id: str, *, lost: bool) -> None:
        """Counts an offered request as lost, or no longer so: once, however often it is set aside and comes back."""
        if lost == (id in self.set_aside):
            return
        self.set_aside ^= {id}
        tier = self.tiers[id]
        if tier in self._lost:  # it may have been dropped while this request was in flight
            self._lost[tier] = max(0.0, self._lost[tier] + (1.0 if lost else -1.0))  # what was counted fades

    def end(self, id: str, *, lost: bool | None) -> None:
        """Forgets a request that has ended, and whether it was lost; None: it goes on elsewhere, and counts for what it
        did here."""
        if id in self.tiers and lost is not None:
            self.count(id, lost=lost)
        self.tiers.pop(id, None)
        self.set_aside.discard(id)

    def behind(self, fairness: float) -> set[str]:
        """Returns the tiers that one more loss would put further behind the average than `fairness`, a share of their
        requests. A lone tier is never behind."""
        offered, lost = self._offered, self._lost
        if len(offered) < 2:
            return set()
        most = (sum(lost.values()) + 1.0) / sum(offered.values()) + fairness
        return {tier for tier, count in offered.items() if (lost[tier] + 1.0) / count > most}
