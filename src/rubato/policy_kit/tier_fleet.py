"""Keeps the book of a router that gives tiers of TPOTs replicas of their own: who decodes, prefills and moves where."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from math import inf
from typing import Any, ClassVar, Generic, TypeVar

from rubato.core.events import Event, Finished, HandedOff, Left, Lost, Placed, Transferred
from rubato.core.interfaces import Dispatch, SeqView, View
from rubato.core.plan import Recall, Role
from rubato.policy_kit.batch_builder import remaining_output
from rubato.policy_kit.kv_forecast import KVForecast
from rubato.policy_kit.step_table import StepTable

PREFILL_GROUP = -1  # the group of the prefill replicas; tiers are counted from 0
POOL_ROLE = Role(kind="best_effort")
PREFILL_ROLE = Role("prefill", kind="prefill")
MIN_WAKE_S = 1e-5  # from a dispatch to the next, at least
TRANSFER_MEMORY = 0.1  # weight of the latest transfer in the mean


class BookedReplica:
    """A replica in the book.

    Args:
        view: its view
        index: its place in the fleet, by which ties go
        tiers: how many there are
        steps: its step times

    `group` is the tier it serves, `PREFILL_GROUP`, or None in the pool. `residents` counts each tier's requests that
    decode here, those whose prompt is under way elsewhere included. `prompts` are those to be prefilled here, by id.
    """

    def __init__(self, view: View, index: int, tiers: int, steps: StepTable) -> None:
        self.id, self.index, self.steps = view.id, index, steps
        self.group: int | None = None
        self.residents = [0] * tiers
        self.forecast = KVForecast()
        self.prompts: dict[str, Any] = {}
        self._rank: tuple[float, int] | None = None  # None when it is to be worked out again, as `_line`
        self._line: list[Any] | None = None  # the prompts in order
        self.show(view)

    def show(self, view: View) -> None:
        """Takes the current view."""
        self.view = view
        self.capacity = view.kv_total * view.limits.block_size  # tokens of KV
        self.seats = view.limits.max_num_seqs

    @property
    def empty(self) -> bool:
        return not (len(self.forecast) or self.prompts)

    @property
    def load(self) -> float:
        """Returns what replicas of a group are sorted by."""
        return -self.rank()[0]

    def rank(self) -> tuple[float, int]:
        """Returns the sort key: the most loaded first; ties by index."""
        if self._rank is None:
            self._rank = -self._find_load(), self.index
        return self._rank

    def _find_load(self) -> float:
        """Returns the seconds of a step of its decodes, at their fullest."""
        count = len(self.forecast)
        return self.steps.decodes(count, self.forecast.peak(self.view.steps)) if count else 0.0

    def add(self, id: str, tier: int | None, length: int, left: float) -> None:
        """Adds a request that is to decode here. `tier` is None if it is not among `residents`."""
        self.forecast.add(id, length, left, self.view.steps)
        if tier is not None:
            self.residents[tier] += 1
        self._rank = None

    def drop(self, id: str, tier: int | None) -> None:
        """Removes a request that was to decode here."""
        self.forecast.drop(id)
        if tier is not None:
            self.residents[tier] -= 1
        self._rank = None

    def queue(self, prompt: Any) -> None:
        """Queues a prompt to be prefilled here."""
        self.prompts[prompt.seq.id] = prompt
        self._line = None

    def unqueue(self, id: str) -> Any:
        """Removes a prompt that is done, or goes elsewhere; returns it, None if it is not here."""
        self._line = None
        return self.prompts.pop(id, None)

    def predict_overdue(self, step: int) -> bool:
        """Predicts residents again that outlived their predicted length; returns whether there were any."""
        late = self.forecast.overdue(step)
        known = self.view.known if late else {}
        for id in late:
            seq = known.get(id)
            self.forecast.add(id, seq.length if seq else 1, remaining_output(seq) if seq else 1.0, step)
        return bool(late)


Replica = TypeVar("Replica", bound=BookedReplica)


@dataclass(slots=True)
class DecodeSlot(Generic[Replica]):
    """A place to decode, in use or reserved.

    Args:
        replica: where it is.
        tier: the request's; None for best effort in the pool.
        share: of a replica of its tier.
    """

    replica: Replica
    tier: int | None
    share: float = 0.0


@dataclass
class RoutingRound:
    """The decisions of one dispatch, collected while it is made."""

    now: float
    place: dict[str, str] = field(default_factory=dict)
    reject: dict[str, str] = field(default_factory=dict)
    demote: list[str] = field(default_factory=list)
    recall: dict[str, Recall] = field(default_factory=dict)
    roles: dict[str, Role] = field(default_factory=dict)
    why: dict[str, str] = field(default_factory=dict)

    def put(self, id: str, replica: BookedReplica, why: str) -> None:
        self.place[id], self.why[id] = replica.id, why


@dataclass
class TierRouter(Generic[Replica]):
    """A router that keeps the book. A subclass defines `place` and `_record_placement`, and names what it books in
    (`replica_type`).

    Args:
        tiers: TPOTs in seconds, ascending; a request belongs to the loosest that is no looser than its own
    """

    needs: ClassVar[frozenset[str]] = frozenset({"recall", "step_times"})
    default_lengths: ClassVar[str] = "conditional_mean"
    policy: ClassVar[str]
    replica_type: ClassVar[type[Any]]
    tiers: Sequence[float] = (0.02, 0.03, 0.05, 0.1)
    _replicas: dict[str, Replica] = field(init=False, repr=False, default_factory=dict)
    _tables: dict[tuple[int, int], StepTable] = field(init=False, repr=False, default_factory=dict)
    _prefills: dict[str, Replica] = field(init=False, repr=False, default_factory=dict)  # where prompts are
    _slots: dict[str, DecodeSlot[Replica]] = field(init=False, repr=False, default_factory=dict)
    _moving: dict[str, float] = field(init=False, repr=False, default_factory=dict)  # KV on its way: since
    _token_moves: float = field(init=False, repr=False, default=0.0)  # seconds of a token's KV on its way

    def __post_init__(self) -> None:
        self.tiers = tuple(self.tiers)
        if not self.tiers or not all(a < b for a, b in pairwise((0.0, *self.tiers, inf))):
            raise ValueError(f"tiers are {self.tiers!r}: give TPOTs in seconds, above 0 and ascending")

    def roles(self, replicas: Sequence[str]) -> Mapping[str, Role]:
        """Puts all replicas into the pool at first."""
        if "kv_transfer" in self.needs and len(replicas) < 2:
            raise ValueError(
                f"{self.policy} in mode pd needs at least 2 replicas, to prefill and to decode: there is 1"
            )
        return dict.fromkeys(replicas, POOL_ROLE)

    def observe(self, events: Sequence[Event]) -> None:
        for event in events:
            if isinstance(event, HandedOff) and event.request.handoff and event.request.handoff.reason == "prefilled":
                self._leave_prefill(event.id)
            elif isinstance(event, Finished | HandedOff | Lost):
                self._leave(event.id)
            elif isinstance(event, Transferred):
                if (since := self._moving.pop(event.id, None)) is not None:
                    self._token_moves += TRANSFER_MEMORY * ((event.at - since) / event.tokens - self._token_moves)
            elif isinstance(event, Placed):
                self._record_placement(event.id, self._replicas.get(event.replica))
            elif isinstance(event, Left):
                self._forget_replica(event.id)

    def _record_placement(self, id: str, replica: Replica | None) -> None:
        """Records a placement elsewhere than decided here: with the rest of its group, or where its prefix is
        cached."""
        raise NotImplementedError

    def _forget_replica(self, id: str) -> None:
        """Forgets a replica that has left."""

    def _leave(self, id: str) -> None:
        """Forgets a request that ended, or is to be placed anew."""
        self._moving.pop(id, None)
        self._leave_prefill(id)
        if (slot := self._slots.pop(id, None)) is not None:
            slot.replica.drop(id, slot.tier)
            self._changed(slot.replica)

    def _leave_prefill(self, id: str) -> None:
        """Forgets the prompt of a request that is not prefilled any more where it was placed."""
        if (replica := self._prefills.pop(id, None)) is not None:
            replica.unqueue(id)
            self._changed(replica)

    def _changed(self, replica: Replica) -> None:
        """Notes that a request has left a replica."""

    def _book(self, view: View, index: int) -> Replica:
        """Books a new replica. Those with one latency model share a table: it takes a thousand questions to fill."""
        most = view.limits.max_num_batched_tokens
        table = self._tables.setdefault((id(view.latency), most), StepTable(view.latency, most))
        replica: Replica = self.replica_type(view, index, len(self.tiers), table)
        self._replicas[view.id] = replica
        return replica

    def _recall_best_effort(self, replica: Replica, routing: RoutingRound) -> None:
        """Recalls best effort from a replica of the pool, and forgets it."""
        routing.recall[replica.id] = "best_effort"
        replica.forecast = KVForecast()
        self._forget_placements(replica)

    def _forget_placements(self, replica: Replica) -> None:
        """Forgets the requests of a replica."""
        self._slots = {id: slot for id, slot in self._slots.items() if slot.replica is not replica}
        self._prefills = {id: at for id, at in self._prefills.items() if at is not replica}

    def _role(self, group: int | None) -> Role:
        """Returns the role of replicas of a group."""
        if group is None or group == PREFILL_GROUP:
            return POOL_ROLE if group is None else PREFILL_ROLE
        return Role("decode" if "kv_transfer" in self.needs else "both", f"{self.tiers[group]:g}", kind="tier")

    def _dispatch(self, routing: RoutingRound, until: float) -> Dispatch:
        """Returns the decisions; the router is asked again at `until`, unless that is inf."""
        assign = {id: role for id, role in routing.roles.items() if self._replicas[id].view.role != role}
        wake_at = max(until, routing.now + MIN_WAKE_S) if until < inf else None
        return Dispatch(routing.place, routing.reject, routing.demote, routing.recall, wake_at, assign, routing.why)


def tier_and_due(seq: SeqView, tiers: Sequence[float], left: float, least: float, now: float) -> tuple[int, float]:
    """Returns the tier of a request, -1 if none keeps its TPOT, and when its next token is due. With an e2e it belongs
    to the loosest tier that ends in time, and the rest of its tokens follow at that tier's pace.

    Args:
        seq: the request
        tiers: TPOTs in seconds, ascending
        left: output tokens to come
        least: seconds until its next token on an idle replica
        now: seconds
    """
    slo, due, tier = seq.slo, seq.due, len(tiers) - 1
    if slo.tpot is not None:
        tier = bisect_right(tiers, slo.tpot * (1.0 + 1e-9)) - 1
    if slo.e2e is not None:
        end = seq.request.arrival + slo.e2e + seq.tool_seconds
        while tier > 0 and min(due, end - left * tiers[tier]) - least < now:
            tier -= 1
        due = min(due, end - left * tiers[tier])
    return tier, due
