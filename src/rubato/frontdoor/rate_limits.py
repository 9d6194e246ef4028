"""Limits of a tenant: requests and tokens a minute, and requests in flight.

A request beyond a limit is refused, with the seconds after which it would pass. It still counts as offered in metrics,
logs and the event log, so that offered = finished + in flight.

An API request is charged one request as soon as its key is known, before its body is read, which costs time, too.
Choices beyond the first, each a request for an engine, and tokens are charged once they are known.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import ceil, inf

from rubato.frontdoor.tenants import Quota

RATE_LIMITED = "rejected-rate-limit"
TENANT_SATURATED = "rejected-tenant-saturated"


@dataclass(slots=True)
class Bucket:
    """Holds up to `per_minute` tokens and refills at that rate; inf: no limit. A larger cost passes when the bucket is
    full, and leaves it in debt."""

    per_minute: float
    level: float = field(init=False)
    at: float = 0.0

    def __post_init__(self) -> None:
        self.level = self.per_minute

    def wait_seconds(self, cost: float, now: float) -> float:
        """Returns the seconds until `cost` may be taken; 0 = now."""
        self._refill(now)
        missing = min(cost, self.per_minute) - self.level
        return missing * 60.0 / self.per_minute if missing > 1e-9 else 0.0

    def take(self, cost: float, now: float) -> None:
        """Takes `cost`; a negative cost is given back."""
        self._refill(now)
        self.level = min(self.per_minute, self.level - cost)

    def _refill(self, now: float) -> None:
        if now > self.at and self.per_minute < inf:
            self.level = min(self.per_minute, self.level + (now - self.at) * self.per_minute / 60.0)
        self.at = max(self.at, now)


class TenantUsage:
    """Charges one tenant's usage to its quota. Times are seconds of the clock."""

    def __init__(self, quota: Quota) -> None:
        self.requests = Bucket(quota.requests_per_minute or inf)
        self.tokens = Bucket(quota.tokens_per_minute or inf)
        self.max_in_flight = quota.max_in_flight or inf
        self.in_flight = 0

    def enter(self, now: float) -> float:
        """Charges one API request. Returns 0, or the seconds until it may pass; then nothing is charged."""
        wait = self.requests.wait_seconds(1, now)
        if not wait:
            self.requests.take(1, now)
        return wait

    def charge(self, choices: int, tokens: int, now: float) -> tuple[str, float] | None:
        """Charges the choices of an API request that has entered: all of them, or none beyond the first.

        Args:
            choices: all of them.
            tokens: that it may use; the caller charges them when it passes.
            now: seconds of the clock.

        Returns:
            None, or why it may not pass now and the seconds until it might (0: unknown).
        """
        wait = self.tokens.wait_seconds(tokens, now)
        is_saturated = self.in_flight + choices > self.max_in_flight
        is_short = False
        if choices > 1:
            self.requests.take(-1, now)  # the first is paid: all together may cost more than the bucket holds
            is_short = self.requests.wait_seconds(choices, now) > 0.0
            self.requests.take(1 if is_short or wait or is_saturated else choices, now)
        if is_short or wait:
            wait = max(wait, self.requests.wait_seconds(choices, now))
        if wait > 0:
            return RATE_LIMITED, wait
        return (TENANT_SATURATED, 0.0) if is_saturated else None

    def headers(self, now: float) -> list[tuple[bytes, bytes]]:
        """Returns OpenAI's x-ratelimit-* headers of the limits; reset: until the bucket is full."""
        headers: list[tuple[bytes, bytes]] = []
        for name, bucket in ((b"requests", self.requests), (b"tokens", self.tokens)):
            if bucket.per_minute == inf:
                continue
            wait = bucket.wait_seconds(inf, now)
            headers += [
                (b"x-ratelimit-limit-" + name, b"%d" % bucket.per_minute),
                (b"x-ratelimit-remaining-" + name, b"%d" % max(0, int(bucket.level))),
                (b"x-ratelimit-reset-" + name, b"%dms" % ceil(wait * 1e3) if wait < 1 else b"%ds" % ceil(wait)),
            ]
        return headers
