"""Weighted fair shares between tenants: decides whose request may be placed on a replica next, and whose waits.

This is a gate before the router. Each request is a load: one over the number of its like that would fill the replicas,
which is what keeps the tightest TPOT promised lately in a steady state where each step decodes a token of every request
and prefills as much as replaces those that end. While placed requests leave the replicas some room
(`MAX_UNSHARED_LOAD`), all pass. Beyond that a tenant passes while its own load stays within its share among the tenants
that are active; the rest waits here, where it delays no other tenant, and goes on in the order of start-time fair
queueing (Goyal, Vin and Cheng 1996): served tokens, divided by weight, are kept equal between tenants that have
something waiting.

A request that alone is more than its tenant's share passes at times: the replica time that it takes is paid back, at
the rate of the share, before the tenant's next one passes. So does one whose prompt stalls a step for more than the
share of the tightest TTFT.

Promises are what clients state, and some lie. So the tightest TTFT and TPOT count as no less than `MIN_PROMISE_STEPS`
of the shortest step, where the replicas still do 0.6 of all they can do, feasible or not; and a prompt that stalls
costs its tenant the seconds that it adds to a step, not its place: a tenant has its share of the replicas' time for
prefill whatever the others promise. What a false SLO still gains its tenant: the others are held to their shares
sooner, as beside one that states true SLOs. Where the others' load fits beside it, that costs them little. On a replica
that one tenant fills, with prompts of 400 or 1000 tokens, it has half of what it has beside a neighbour with looser
promises, which is still about what it would have on a machine of its share of the speed; where one request is more than
a share, half of that (`PAUSE_FACTOR`). A promise tighter than `MIN_PROMISE_STEPS` counts as `MIN_PROMISE_STEPS`."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from math import inf

from rubato.core.interfaces import View
from rubato.core.plan import Shape
from rubato.core.request import Outcome, Request

LINGER_S = 10.0  # seconds that a tenant without requests still counts as active: its next one finds its share free
RECENT_REQUESTS = 64  # requests that the tightest promises and the mean work are taken over
MIN_PROMISE_STEPS = 2.5  # of the shortest: a tighter promise counts as this, so that none can stop the others
# Of the replicas' load, beyond which a tenant is held to its share: real prefill comes in bunches.
MAX_UNSHARED_LOAD = 0.6
UNKNOWN_OUTPUT_TOKENS = 64.0  # output tokens of a tenant's request before one has finished
MIN_SUSTAINED = 1e-3  # of a request, that a replica sustains at least: what a request can be charged is bounded
# Times as long as its share would have it, a tenant waits after a request that is more than its share.
PAUSE_FACTOR = 2.0


@dataclass(slots=True)
class _Account:
    """One tenant with all its tiers.

    Args:
        weight: of its share.
        finish: the virtual time at which its service so far is paid for.
        placed_count: its requests at replicas.
        load: of these.
        waiting: its requests at no replica.
        last_seen_at: when it last had a request, in seconds.
        output: running mean of the output tokens of its completed requests.
        debt: replica-seconds used beyond its share, as of `since`.
        since: time of `debt`, in seconds.
    """

    weight: float
    finish: float = 0.0
    placed_count: int = 0  # requests at replicas
    load: float = 0.0  # of these
    waiting: int = 0
    last_seen_at: float = -inf
    output: float = UNKNOWN_OUTPUT_TOKENS  # running mean of what its completed requests emit
    debt: float = 0.0
    since: float = 0.0


@dataclass(slots=True)
class _Entry:
    """One request of a tenant.

    Args:
        request: as offered.
        account: of its tenant.
        tag: its start tag, in virtual time.
        expected: output tokens it was charged for.
        load: the share of the replicas that it takes; 0: not worked out yet.
        stall: seconds that its prefill adds to a step.
        owes: replica-seconds that it is to pay back once it is placed.
        is_placed: it is at a replica.
    """

    request: Request
    account: _Account
    tag: float
    expected: float  # output tokens it was charged for
    load: float = 0.0  # 0 = not worked out yet
    stall: float = 0.0  # seconds that its prefill adds to a step
    owes: float = 0.0  # replica-seconds that it is to pay back once it is placed
    is_placed: bool = False

    @property
    def work(self) -> float:
        return self.request.prompt + self.expected


@dataclass
class FairShare:
    """Holds back requests of tenants beyond their share.

    Args:
        weights: share of each tenant relative to others, 1 for tenants that are not named
        window: requests of mean work that one replica sustains; None: computed from its latency model and recent SLOs

    After `release`, `wake_at` is the time at which a held request may pass without a further event, None for never.
    """

    weights: Mapping[str, float] = field(default_factory=dict)
    window: int | None = None
    wake_at: float | None = field(default=None, init=False)
    _accounts: dict[str, _Account] = field(default_factory=dict, init=False)
    _entries: dict[str, _Entry] = field(default_factory=dict, init=False)
    _virtual: float = field(default=0.0, init=False)
    _recent: deque[tuple[float, float, float]] = field(
        default_factory=lambda: deque(maxlen=RECENT_REQUESTS), init=False
    )

    def __post_init__(self) -> None:
        for tenant, weight in self.weights.items():
            if not 0.0 < weight < inf:
                raise ValueError(f"tenant {tenant!r} has weight {weight}: give a number above 0")
        if self.window is not None and self.window < 1:
            raise ValueError(f"window is {self.window}: give the requests one replica sustains, 1 or more, or none")

    # ----------------------------------------------------------------- what happens to requests

    def add_request(self, request: Request, now: float) -> None:
        """Adds an offered request with its start tag, in tokens of service over weight: the later of the virtual time
        and of when its tenant's requests before it will have been served (start-time fair queueing)."""
        account = self._account(request.tenant)
        account.last_seen_at = now
        account.waiting += 1
        expected = max(1.0, min(account.output, request.sampling.max_tokens))
        tag = max(self._virtual, account.finish)
        entry = self._entries[request.id] = _Entry(request, account, tag, expected)
        account.finish = tag + entry.work / account.weight
        tpots = [stage.slo.tpot for stage in request.stages if stage.slo.tpot is not None]
        ttft = request.stages[0].slo.ttft
        self._recent.append((inf if ttft is None else ttft, min(tpots, default=inf), entry.work))

    def record_placement(self, id: str) -> None:
        """Records that a request went to a replica."""
        entry = self._entries[id]
        entry.is_placed = True
        entry.account.placed_count += 1
        entry.account.load += entry.load
        entry.account.waiting -= 1
        if entry.owes:
            entry.account.debt = entry.owes
        self._virtual = max(self._virtual, entry.tag)

    def record_return(self, id: str) -> None:
        """Records that a request lost its replica: it waits again, at its former place in the order."""
        entry = self._entries[id]
        entry.is_placed = False
        entry.account.waiting += 1
        self._free_place(entry)

    def record_end(self, id: str, outcome: Outcome, output: int, now: float) -> None:
        """Records that a request ended with `output` tokens, and corrects its charge to its prompt and output; a
        request that was never placed costs nothing. Only completed requests count for the tenant's mean output."""
        entry = self._entries.pop(id)
        account = entry.account
        account.last_seen_at = now
        if entry.is_placed:
            self._free_place(entry)
            account.finish += (output - entry.expected) / account.weight
            if outcome == "completed":
                account.output += 0.1 * (output - account.output)
        else:
            account.waiting -= 1
            account.finish -= entry.work / account.weight

    # ----------------------------------------------------------------- what passes

    def release(self, held: Iterable[Request], fleet: Sequence[View], now: float) -> list[Request]:
        """Returns the requests of `held` that may go to a replica now, in order."""
        self.wake_at = None
        if not fleet:
            return list(held)
        shares, step = self._shares(now), _step(fleet)
        spent = {tenant: account.load for tenant, account in self._accounts.items()}
        total = sum(spent.values())
        ttft, tpot = (max(self._tightest(which), MIN_PROMISE_STEPS * step) for which in (0, 1))
        paid = {tenant: self._repaid_at(self._accounts[tenant], share, now) for tenant, share in shares.items()}
        released = []
        isolated_seconds = cache(partial(_isolated_seconds, fleet))  # many of thousands are as long
        for group in _group_choices(sorted(held, key=lambda r: self._order(r, isolated_seconds, now))):
            tenant, entries = group[0].tenant, [self._entries[one.id] for one in group]
            share, entry = shares[tenant], entries[0]
            for one, own in zip(group, entries, strict=True):
                if not own.load:
                    own.load = self._load(one, own, fleet)
                    own.stall = max(0.0, isolated_seconds(one.stages[0].prompt) - step)
            load = sum([own.load for own in entries])
            is_idle = total == 0.0  # whatever passes now delays nobody who is here
            fits = total + load <= MAX_UNSHARED_LOAD or spent[tenant] + load <= share or (is_idle and len(shares) == 1)
            # it takes more of the tightest TTFT than its share, and another tenant is active
            stalls = len(shares) > 1 and entry.stall > share * ttft
            entry.owes = 0.0
            if not fits and spent[tenant] > 0.0:
                continue
            if stalls or not fits:  # it may pass now and pay afterwards, by a pause, if nothing is left to pay
                if paid[tenant] > now and not is_idle:
                    self.wake_at = min(paid[tenant], self._next_inactive(entry.account, now), self.wake_at or inf)
                    continue
                entry.owes = entry.stall if fits else PAUSE_FACTOR * self._busy_seconds(entry, load, tpot, step)
                paid[tenant] = now + entry.owes / share
            released += group
            spent[tenant] += load
            total += load
        return released

    def beyond_share(self, request: Request, places: int, now: float) -> bool:
        """Returns whether this tenant already has its share of `places` in flight, waiting requests included."""
        account = self._account(request.tenant)
        account.last_seen_at = now
        return account.placed_count + account.waiting >= max(1.0, places * self._shares(now)[request.tenant])

    # ----------------------------------------------------------------- parts

    def _account(self, tenant: str) -> _Account:
        if tenant not in self._accounts:
            self._accounts[tenant] = _Account(float(self.weights.get(tenant, 1.0)))
        return self._accounts[tenant]

    def _free_place(self, entry: _Entry) -> None:
        """Takes a request off its replica."""
        account = entry.account
        account.placed_count -= 1
        account.load = max(0.0, account.load - entry.load) if account.placed_count else 0.0  # no rest of rounding stays

    def _order(self, request: Request, alone: Callable[[int], float], now: float) -> tuple[bool, float, float]:
        """Returns the sort key: start tag, but requests that would be late even alone come last."""
        ttft, late = request.stages[0].slo.ttft, False
        if ttft is not None and request.progress is None:
            late = now + alone(request.stages[0].prompt) > request.arrival + ttft
        return (late, self._entries[request.id].tag, request.arrival)

    def _repaid_at(self, account: _Account, share: float, now: float) -> float:
        """Returns when its debt is paid back at this share, a past time without debt."""
        account.debt = max(0.0, account.debt - share * (now - account.since))
        account.since = now
        return now + account.debt / share

    def _shares(self, now: float) -> dict[str, float]:
        """Returns the share of each active tenant, by weight."""
        active = {
            tenant: account.weight
            for tenant, account in self._accounts.items()
            if account.placed_count or account.waiting or now < account.last_seen_at + LINGER_S
        }
        total = sum(active.values())
        return {tenant: weight / total for tenant, weight in active.items()}

    def _next_inactive(self, account: _Account, now: float) -> float:
        """Returns when the next other tenant becomes inactive if nothing happens: shares grow then."""
        ends = [
            other.last_seen_at + LINGER_S
            for other in self._accounts.values()
            if other is not account and not other.placed_count and not other.waiting
        ]
        return min((end for end in ends if end > now), default=inf)

    def _tightest(self, which: int) -> float:
        """Returns the tightest TTFT (0) or TPOT (1) of recent requests."""
        return min((promised[which] for promised in self._recent), default=inf)

    def _busy_seconds(self, entry: _Entry, load: float, tpot: float, step: float) -> float:
        """Returns the seconds that a request keeps the replicas busy: its part of its decode time, or its prefill.

        It is at most its time alone, since the load is meaningless if no step is as short as the tightest TPOT. `load`
        is that of all its choices.
        """
        decode = load * entry.expected * min(tpot, 1.0)
        return min(max(decode, entry.stall), entry.stall + entry.expected * step)

    def _load(self, request: Request, entry: _Entry, fleet: Sequence[View]) -> float:
        """Returns the share of the replicas that this request takes while it is served."""
        if self.window is None:
            return 1.0 / sum(self._sustained(view, request.prompt, entry.expected) for view in fleet)
        mean = sum(work for _, _, work in self._recent) / len(self._recent)
        return entry.work / (mean * self.window * len(fleet))

    def _sustained(self, view: View, prompt: int, output: float) -> float:
        """Returns how many requests of this size one replica sustains within the tightest TPOT.

        It is less than 1 if the prefill of one, spread over its steps, is too much.
        """
        tpot, most = max(self._tightest(1), MIN_PROMISE_STEPS * _step([view])), view.limits.max_num_seqs
        if tpot == inf:
            return most

        def seconds(n: int) -> float:
            tokens = n + round(n * prompt / output)
            return view.latency.step_time(Shape(tokens, n, round(n * (prompt + output / 2))))

        low, high = 0, most
        while low < high:
            n = (low + high + 1) // 2
            low, high = (n, high) if seconds(n) <= tpot else (low, n - 1)
        if low:
            return low
        idle = view.latency.step_time(Shape.decodes(1, 1))
        return max(MIN_SUSTAINED, (tpot - idle) / (seconds(1) - idle)) if seconds(1) > idle else MIN_SUSTAINED


def _group_choices(requests: Iterable[Request]) -> Iterable[list[Request]]:
    """Groups the choices of one prompt: they go to one replica, behind a gateway with one body."""
    groups: dict[str, list[Request]] = {}
    for request in requests:
        groups.setdefault(request.group or request.id, []).append(request)
    return groups.values()


def _step(fleet: Sequence[View]) -> float:
    """Returns the seconds of the shortest step on the fastest replica."""
    return min(view.latency.step_time(Shape.decodes(1, 1)) for view in fleet)


def _isolated_seconds(fleet: Sequence[View], prompt: int) -> float:
    """Returns the seconds of a batch with one prompt of `prompt` tokens on the fastest replica."""
    shape = Shape.prefill(prompt)
    return min(view.latency.step_time(shape) for view in fleet)
