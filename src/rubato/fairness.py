"""Weighted fair shares between tenants: whose request goes to a replica next, and whose waits.

A gate before the router. While less work (prompt and expected output tokens) is placed than the replicas sustain
(`window`), everything passes. Beyond that a tenant passes while it has less work placed than its share of the window
among the tenants that are active; the rest waits here, where it delays nobody, and goes on in the order of
start-time fair queueing (Goyal, Vin and Cheng 1996): served tokens, divided by weight, are kept equal between tenants
that have something waiting.

The window is what keeps the tightest TPOT promised lately, in a steady state where each step decodes a token of every
request and prefills as much as replaces those that end: with more at once every tenant would miss.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf

from rubato.interfaces import View
from rubato.types import Request, Shape

LINGER = 10.0  # seconds that a tenant without requests still counts as active: its next one finds its share free
RECENT = 64  # requests that the tightest TPOT and the mean length are taken over
PROBE = 256  # tokens of prefill by which the fastest replica is known
HEADROOM = 0.8  # of the tightest TPOT that a step of the steady state may take: real prefill comes in bunches
GUESS = 64.0  # output tokens of a tenant's request before one has finished


@dataclass(slots=True)
class _Account:
    """One tenant in one tier. finish: the virtual time at which all it was given so far is paid for."""

    weight: float
    finish: float = 0.0
    placed: int = 0  # requests at replicas
    work: float = 0.0  # of these, tokens
    waiting: int = 0
    seen: float = -inf
    output: float = GUESS  # running mean of what its requests emit


@dataclass(slots=True)
class _Entry:
    request: Request
    account: _Account
    tag: float
    expected: float  # output tokens it was charged for
    placed: bool = False

    @property
    def work(self) -> float:
        return self.request.prompt + self.expected


@dataclass
class FairShare:
    """weights: tenant -> its share relative to the others', 1 where not named.

    window: requests of mean size that one replica sustains; None = as many as keep the tightest TPOT promised lately,
    by the replica's latency model, at most the engine's `max_seqs`.
    """

    weights: Mapping[str, float] = field(default_factory=dict)
    window: int | None = None
    _accounts: dict[tuple[str, str], _Account] = field(default_factory=dict, init=False)
    _entries: dict[str, _Entry] = field(default_factory=dict, init=False)
    _virtual: dict[str, float] = field(default_factory=dict, init=False)
    _recent: deque[tuple[float, int, float]] = field(default_factory=lambda: deque(maxlen=RECENT), init=False)

    def __post_init__(self) -> None:
        for tenant, weight in self.weights.items():
            if not 0.0 < weight < inf:
                raise ValueError(f"tenant {tenant!r} has weight {weight}: give a number above 0")
        if self.window is not None and self.window < 1:
            raise ValueError(f"window is {self.window}: give the requests one replica sustains, 1 or more, or none")

    # ----------------------------------------------------------------- what happens to requests

    def enter(self, request: Request, now: float) -> None:
        """A request was offered."""
        account = self._account(request)
        account.seen = now
        account.waiting += 1
        virtual = self._virtual.setdefault(request.tier, 0.0)
        expected = min(account.output, float(request.sampling.max_tokens))
        tag = max(virtual, account.finish)
        entry = self._entries[request.id] = _Entry(request, account, tag, expected)
        account.finish = tag + entry.work / account.weight
        tpots = [stage.slo.tpot for stage in request.stages if stage.slo.tpot is not None]
        self._recent.append((min(tpots, default=inf), request.prompt, expected))

    def placed(self, id: str) -> None:
        """It went to a replica."""
        entry = self._entries[id]
        entry.placed = True
        entry.account.placed += 1
        entry.account.work += entry.work
        entry.account.waiting -= 1
        tier = entry.request.tier
        self._virtual[tier] = max(self._virtual[tier], entry.tag)

    def returned(self, id: str) -> None:
        """Its replica is gone; it is held again, with the place in the order that it had."""
        entry = self._entries[id]
        entry.placed = False
        entry.account.placed -= 1
        entry.account.work -= entry.work
        entry.account.waiting += 1

    def finished(self, id: str, output: int, now: float) -> None:
        """It ended, with `output` tokens, here or at a replica. What it was charged too much or too little is made
        good; one that never was placed costs nothing."""
        entry = self._entries.pop(id)
        account = entry.account
        account.seen = now
        if entry.placed:
            account.placed -= 1
            account.work -= entry.work
            account.finish += (output - entry.expected) / account.weight
            account.output += 0.1 * (output - account.output)
        else:
            account.waiting -= 1
            account.finish -= entry.work / account.weight

    # ----------------------------------------------------------------- who passes

    def open(self, held: Iterable[Request], fleet: Sequence[View], now: float) -> list[Request]:
        """Those of `held` that may go to a replica now, in this order."""
        window = sum(map(self._sustained, fleet)) * self._mean_work()
        total = sum(account.work for account in self._accounts.values())
        # A share is of all that the replicas can do; the headroom is taken from what goes beyond the shares.
        caps = self._caps(window if self.window is not None else window / HEADROOM, now)
        spent: dict[str, float] = {}
        for (_, tenant), account in self._accounts.items():
            spent[tenant] = spent.get(tenant, 0.0) + account.work
        through = []
        step = min(
            (view.latency.step_time for view in fleet), key=lambda f: f(Shape(PROBE, 1, PROBE, 0, PROBE * PROBE))
        )
        for request in sorted(held, key=lambda r: self._order(r, now, step)):
            entry = self._entries[request.id]
            if total < window or spent[request.tenant] < caps[request.tenant]:
                through.append(request)
                spent[request.tenant] += entry.work
                total += entry.work
        return through

    def beyond_share(self, request: Request, places: int, now: float) -> bool:
        """Whether this tenant has its share of `places` in flight already, waiting ones included."""
        self._account(request).seen = now
        mine = sum(a.placed + a.waiting for (_, tenant), a in self._accounts.items() if tenant == request.tenant)
        return mine >= self._caps(places, now)[request.tenant]

    # ----------------------------------------------------------------- parts

    def _account(self, request: Request) -> _Account:
        key = (request.tier, request.tenant)
        if key not in self._accounts:
            self._accounts[key] = _Account(float(self.weights.get(request.tenant, 1.0)))
        return self._accounts[key]

    def _order(self, request: Request, now: float, step: Callable[[Shape], float]) -> tuple[bool, float, float]:
        """By start tag; what would be too late even alone comes after what can still be in time."""
        slo, prompt = request.stages[0].slo, request.stages[0].prompt
        late = False
        if slo.ttft is not None and request.progress is None:
            late = now + step(Shape(prompt, 1, prompt, 0, prompt * prompt)) > request.arrival + slo.ttft
        return (late, self._entries[request.id].tag, request.arrival)

    def _caps(self, places: float, now: float) -> dict[str, float]:
        """Each active tenant's share of `places`, by weight, all its tiers together: the engine is one."""
        active = {
            tenant: account.weight
            for (_, tenant), account in self._accounts.items()
            if account.placed or account.waiting or now - account.seen < LINGER
        }
        total = sum(active.values())
        return {tenant: max(1.0, places * weight / total) for tenant, weight in active.items()}

    def _mean_work(self) -> float:
        return sum(prompt + output for _, prompt, output in self._recent) / max(1, len(self._recent))

    def _sustained(self, view: View) -> int:
        if self.window is not None:
            return self.window
        tpots, prompts, outputs = zip(*self._recent, strict=True) if self._recent else ((inf,), (0,), (1.0,))
        tpot, prompt, output = min(tpots), sum(prompts) / len(prompts), sum(outputs) / len(outputs)
        if tpot == inf:
            return view.limits.max_seqs
        low, high = 1, view.limits.max_seqs
        while low < high:
            n = (low + high + 1) // 2
            tokens = n + round(n * prompt / output)
            shape = Shape(tokens, n + 1, round(n * (prompt + output / 2)))
            if view.latency.step_time(shape) <= HEADROOM * tpot:
                low = n
            else:
                high = n - 1
        return low
