"""PolyServe's router: assigns replicas to tiers, and requests to replicas."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from math import inf
from operator import is_
from typing import ClassVar

from rubato.core.events import Event, Finished, HandedOff, Lost, Placed, Transferred
from rubato.core.interfaces import Dispatch, SeqView, View
from rubato.core.plan import Recall, Role
from rubato.policies.polyserve.replica_model import PREFILL_GROUP, HeldRequest, TierReplica, is_source
from rubato.policies.polyserve.scheduler import by_deadline, prompt_due
from rubato.policy_kit.batch_builder import remaining_output
from rubato.policy_kit.kv_forecast import KVForecast
from rubato.policy_kit.step_table import StepTable

POOL_ROLE = Role(kind="best_effort")
PREFILL_ROLE = Role("prefill", kind="prefill")
MIN_WAKE_S = 1e-5  # seconds from now at which the router is asked again at the earliest
PATIENCE_S = 10.0  # seconds from arrival after which best effort need not wait for the pool
# Seconds after which a prefill replica without a prompt goes back to the pool (paper, §4.3: periodically).
PREFILL_IDLE_S = 0.3


@dataclass(slots=True)
class _RoutingRound:
    """The decisions of one dispatch. no_slot, no_prefill: (tier, length, output) of those that found no place to
    decode, (due, tokens) of prompts that none can prefill in time: one that asks for more is not tried."""

    now: float
    place: dict[str, str] = field(default_factory=dict)
    demote: list[str] = field(default_factory=list)
    recall: dict[str, Recall] = field(default_factory=dict)
    roles: dict[str, Role] = field(default_factory=dict)
    why: dict[str, str] = field(default_factory=dict)
    no_slot: list[tuple[int, int, float]] = field(default_factory=list)
    no_prefill: list[tuple[float, int]] = field(default_factory=list)


@dataclass
class Router:
    """Gives tiers replicas of their own, and each request the fullest that keeps its SLO.

    Args:
        mode (co, pd): chunked prefill beside decodes; prefill and decode replicas, two or more
        tiers (ascending, above 0): TPOTs in seconds; a request belongs to the loosest that is no looser than its own
    """

    needs: ClassVar[frozenset[str]] = frozenset({"recall", "step_times"})
    default_lengths: ClassVar[str] = "conditional_mean"
    mode: str = "co"
    tiers: Sequence[float] = (0.02, 0.03, 0.05, 0.1)
    _replicas: dict[str, TierReplica] = field(init=False, repr=False, default_factory=dict)
    _tables: dict[tuple[int, int], StepTable] = field(init=False, repr=False, default_factory=dict)
    _fleet: Sequence[View] = field(init=False, repr=False, default=())
    _added: list[TierReplica] = field(
        init=False, repr=False, default_factory=list
    )  # where the last dispatch placed tokens
    _groups: list[list[TierReplica]] = field(init=False, repr=False, default_factory=list)  # the most loaded first
    _unsorted: set[int] = field(init=False, repr=False, default_factory=set)
    _where: dict[str, tuple[TierReplica, int | None]] = field(
        init=False, repr=False, default_factory=dict
    )  # and its tier
    _prefills: dict[str, TierReplica] = field(init=False, repr=False, default_factory=dict)  # where prompts are
    _held_until: dict[str, float] = field(init=False, repr=False, default_factory=dict)  # when it may be in time last
    _lacks: dict[str, str] = field(init=False, repr=False, default_factory=dict)  # what a held prompt lacks
    _for_pool: set[str] = field(init=False, repr=False, default_factory=set)  # best effort, waits for the pool
    _guest: str | None = field(init=False, repr=False, default=None)  # best effort that is in no pool
    _changed_replicas: dict[str, TierReplica] = field(
        init=False, repr=False, default_factory=dict
    )  # a request has left it
    _moving: dict[str, float] = field(init=False, repr=False, default_factory=dict)  # KV on its way: since
    _token_moves: float = field(init=False, repr=False, default=0.0)  # seconds of a token's KV on its way

    def __post_init__(self) -> None:
        if self.mode not in ("co", "pd"):
            raise ValueError(f"mode is {self.mode!r}: give co or pd")
        if self.mode == "pd":
            self.needs = self.needs | {"kv_transfer"}  # type: ignore[misc]  # of this one alone
        self.tiers = tuple(self.tiers)
        if not self.tiers or not all(a < b for a, b in pairwise((0.0, *self.tiers, inf))):
            raise ValueError(f"tiers are {self.tiers!r}: give TPOTs in seconds, above 0 and ascending")
        self._groups = [[] for _ in range(len(self.tiers) + 1)]  # the last one, `PREFILL_GROUP`, prefills

    def roles(self, replicas: Sequence[str]) -> Mapping[str, Role]:
        """All are in the pool at first."""
        if self.mode == "pd" and len(replicas) < 2:
            raise ValueError("polyserve in mode pd needs at least 2 replicas, to prefill and to decode: there is 1")
        return dict.fromkeys(replicas, POOL_ROLE)

    # ----------------------------------------------------------------- what happens

    def observe(self, events: Sequence[Event]) -> None:
        for event in events:
            if isinstance(event, HandedOff) and event.request.handoff and event.request.handoff.reason == "prefilled":
                self._leave_prefill(event.id)
            elif isinstance(event, Finished | HandedOff | Lost):
                self._leave(event.id)
            elif isinstance(event, Transferred):
                if (since := self._moving.pop(event.id, None)) is not None:
                    self._token_moves += 0.1 * ((event.at - since) / event.tokens - self._token_moves)
            elif isinstance(event, Placed) and event.replica in self._replicas:
                self._record_placement(event.id, self._replicas[event.replica])

    def _record_placement(self, id: str, replica: TierReplica) -> None:
        """Records a placement elsewhere than decided here: with the rest of its group, or where its prefix is
        cached."""
        if (before := self._prefills.get(id)) is not None:
            if before is not replica:
                prompt = before.prompts[id]
                self._leave_prefill(id)
                replica.queue(prompt)
                self._prefills[id] = replica
                self._unsorted.add(PREFILL_GROUP)
            return
        slot, tier = self._where.get(id, (None, None))
        if slot is replica:
            return
        if slot is not None:
            slot.drop(id, tier)
            self._changed(slot)
        replica.add_unknown(id, tier)
        self._where[id] = (replica, tier)
        if replica.group is not None:
            self._unsorted.add(replica.group)

    def _leave(self, id: str) -> None:
        self._held_until.pop(id, None)
        self._lacks.pop(id, None)
        self._moving.pop(id, None)
        self._for_pool.discard(id)
        self._guest = None if self._guest == id else self._guest
        self._leave_prefill(id)
        if (placement := self._where.pop(id, None)) is not None:
            replica, tier = placement
            replica.drop(id, tier)
            self._changed(replica)

    def _leave_prefill(self, id: str) -> None:
        if (replica := self._prefills.pop(id, None)) is not None:
            replica.unqueue(id)
            self._changed(replica)

    def _changed(self, replica: TierReplica) -> None:
        self._changed_replicas[replica.id] = replica
        if replica.group is not None:
            self._unsorted.add(replica.group)

    # ----------------------------------------------------------------- what goes where

    def place(self, held: Sequence[SeqView], fleet: Sequence[View], now: float) -> Dispatch:
        self._update_replicas(fleet)
        for replica in self._added:
            replica.added = 0
        self._added.clear()
        routing = _RoutingRound(now)
        held_until, for_pool = self._held_until, self._for_pool
        waiting = [seq for seq in held if seq.id in held_until]
        fresh = [seq for seq in held if seq.id not in held_until and seq.id not in for_pool]
        for seq in fresh:
            if seq.id in self._where and not seq.cached:  # it came back, or was not taken
                self._leave(seq.id)
        idle = [r for r in self._groups[PREFILL_GROUP] if r.empty and now >= r.idle_since + PREFILL_IDLE_S]
        changed_replicas = tuple({**self._changed_replicas, **{r.id: r for r in idle}}.values())
        for replica in changed_replicas:
            self._give_back(replica, routing)
        if changed_replicas:
            for seq in sorted(waiting, key=lambda s: by_deadline(s, now)):
                self._try(seq, routing, changed_replicas)
        else:
            for seq in waiting:
                if held_until[seq.id] <= now:
                    self._try(seq, routing, ())
        for seq in sorted(fresh, key=lambda s: by_deadline(s, now)):
            self._try(seq, routing, None)
        # to be given back yet; those that are idle are looked at when it has been long enough
        self._changed_replicas = {
            r.id: r for r in changed_replicas if r.empty and r.group is not None and r.idle_since == inf
        }
        back = [
            t for r in self._groups[PREFILL_GROUP] if (t := r.idle_since + PREFILL_IDLE_S) > now
        ]  # else KV is on its way there
        until = min([*held_until.values(), *back], default=inf)
        if for_pool:
            self._send_too_long([seq for seq in fresh if seq.id in for_pool], routing)
            parked = [seq for seq in held if seq.id in for_pool]
            pooled = any(replica.group is None for replica in self._replicas.values())
            if pooled:
                self._fill_pool(parked, routing)
            until = min(until, self._admit_guests([s for s in parked if s.id in for_pool], routing, pooled))
        return Dispatch(
            place=routing.place,
            demote=routing.demote,
            recall=routing.recall,
            wake_at=max(until, now + MIN_WAKE_S) if until < inf else None,
            assign={id: role for id, role in routing.roles.items() if self._replicas[id].view.role != role},
            why=routing.why,
        )

    def _update_replicas(self, fleet: Sequence[View]) -> None:
        """Updates the replicas of the fleet and their views."""
        replicas = self._replicas
        if len(fleet) == len(self._fleet) and all(map(is_, fleet, self._fleet)):  # these change by themselves
            return
        self._fleet = list(fleet)
        for index, view in enumerate(fleet):
            if (replica := replicas.get(view.id)) is None:
                # one table for all with the same latency model: it takes a thousand questions to fill
                most = view.limits.max_num_batched_tokens
                table = self._tables.setdefault((id(view.latency), most), StepTable(view.latency, most))
                replica = replicas[view.id] = self._changed_replicas[view.id] = TierReplica(
                    view, index, len(self.tiers), table
                )
            replica.view = view
        if len(replicas) > len(fleet):
            here = {view.id for view in fleet}
            for lost_replica in [replica for replica in replicas.values() if replica.id not in here]:
                self._move(lost_replica, None)
                self._changed_replicas.pop(lost_replica.id, None)
                self._forget_residents(lost_replica)
                del replicas[lost_replica.id]

    def _try(self, seq: SeqView, routing: _RoutingRound, among: Sequence[TierReplica] | None) -> None:
        """Places a request, holds it while it could be in time, or leaves it to the pool. `among` are the replicas that
        changed since it was last tried; None for the first try."""
        id = seq.id
        self._held_until.pop(id, None)
        request = self._request(seq, routing.now)
        if request is None:
            if not seq.best_effort:  # its TPOT is tighter than every tier
                routing.demote.append(id)
            self._leave(id)
            self._for_pool.add(id)
        elif not self._try_placing(request, routing, among):
            until = self._until(request)
            if until > routing.now:
                self._held_until[id] = until
            elif not request.moves or until == -inf:
                routing.demote.append(id)
                self._leave(id)
                self._for_pool.add(id)
            else:  # too late, and it holds KV somewhere: it goes wherever there is room
                request.due = inf
                if not self._try_placing(request, routing, None):
                    self._held_until[id] = inf

    def _request(self, seq: SeqView, now: float) -> HeldRequest | None:
        """Returns what a request asks for; None for best effort, and for a TPOT that no tier keeps. With an e2e it
        belongs to the loosest tier that ends in time, and its next token is due such that the rest follow at that
        tier's pace."""
        slo, due = seq.request.stages[seq.stage].slo, seq.due
        left, moves = remaining_output(seq), seq.cached > 0 and self.mode == "pd"
        if seq.best_effort:  # a place to decode was reserved for a guest, or for one that was demoted since
            return self._best_effort(seq) if moves and self._where.get(seq.id, (None, None))[1] is not None else None
        tier = len(self.tiers) - 1
        if slo.tpot is not None:
            tier = bisect_right(self.tiers, slo.tpot * (1.0 + 1e-9)) - 1
            if tier < 0:
                return None
        if slo.e2e is not None:
            end, least = seq.request.arrival + slo.e2e + seq.tool_seconds, self._least_seconds(seq, moves)
            while tier and min(due, end - left * self.tiers[tier]) - least < now:
                tier -= 1
            due = min(due, end - left * self.tiers[tier])
        way = seq.length * self._token_moves
        if self.mode == "pd" and not moves:  # the second token waits for the KV and the end of a step
            lead = due - min(due, prompt_due(seq)) + way
            due -= max(0.0, min(lead, 0.5 * (due - now - self._least_seconds(seq, moves))))
        return HeldRequest(seq, tier, due, seq.pending, seq.length, left, moves, way)

    def _least_seconds(self, seq: SeqView, moves: bool) -> float:
        """Returns the seconds until its next token on an idle replica."""
        steps = next(iter(self._replicas.values())).steps
        return steps.decodes(1, seq.length) if moves else steps.isolated_seconds(seq.pending)

    def _until(self, request: HeldRequest) -> float:
        """Returns the latest time at which an idle replica could still have its next token in time; -inf if its TPOT or
        KV is too much for every replica."""
        tpot, most = self.tiers[request.tier], request.most
        if not any(most <= r.capacity and r.steps.decodes(1, most) <= tpot for r in self._replicas.values()):
            return -inf
        return request.due - self._least_seconds(request.seq, request.moves)

    def _try_placing(self, request: HeldRequest, routing: _RoutingRound, among: Sequence[TierReplica] | None) -> bool:
        """Tries to place a request; returns whether it did. In mode pd a prompt is prefilled once a slot to decode in
        is reserved; it moves there if its next token is in time."""
        id = request.seq.id
        if self.mode == "co":
            slot = self._find_slot(request, routing, among)
            if slot is not None:
                self._reserve_slot(request, slot, routing)
                routing.place[id], routing.why[id] = slot[0].id, slot[2]
            return slot is not None
        if request.moves:
            if id in self._where and (self._where[id][1] is None or is_source(self._where[id][0], request.seq)):
                self._leave(id)  # no slot was reserved for it
            if id in self._where:
                self._recheck_slot(request, routing)
            else:
                slot = self._find_slot(request, routing, None)
                if slot is None and request.due == inf:
                    slot = self._room(request)
                if slot is None:
                    return False
                self._reserve_slot(request, slot, routing)
            replica = self._where[id][0]
            if replica.view.limits.blocks(request.length) > replica.view.kv_free:
                return False
            self._moving[id] = routing.now
            routing.place[id], routing.why[id] = replica.id, "decodes"
            return True
        return self._starts(request, routing, among)

    def _recheck_slot(self, request: HeldRequest, routing: _RoutingRound) -> None:
        """Chooses another slot for a request with KV if its next token would be late at the reserved one. No replica
        leaves the pool for one token, except for a late request without room. If steps there have become too long, it
        goes to another replica of its tier, not of a tighter one, which would fill up, too."""
        id, slot, now = request.seq.id, None, routing.now
        reserved_replica, tier = self._where[id]
        group = reserved_replica.group
        if group is not None and group != PREFILL_GROUP and reserved_replica.can_keep(request, self.tiers[group], now):
            return
        del self._where[id]
        reserved_replica.drop(id, tier)
        if group is None or group == PREFILL_GROUP or reserved_replica.joins_at(request, now) > request.due:
            slot = (self._find_slot if request.due == inf else self._find_slot_in_groups)(request, routing, None)
        elif reserved_replica.next_token_at(request, self.tiers[group], now) is None:
            slot = self._find_slot_in_groups(request, routing, None, tightest=request.tier)
        if slot is None:
            reserved_replica.add(request)
            self._where[id] = reserved_replica, request.tier
        else:
            self._changed(reserved_replica)
            self._reserve_slot(request, slot, routing)

    def _starts(self, request: HeldRequest, routing: _RoutingRound, among: Sequence[TierReplica] | None) -> bool:
        id, short = request.seq.id, self._lacks.get(request.seq.id) == "prefill"
        if among is not None and not any(r.group is None or (r.group == PREFILL_GROUP) == short for r in among):
            return False
        ask, slot, replica = (request.tier, request.length, request.remaining), None, None
        if not any(a[0] >= ask[0] and a[1] <= ask[1] and a[2] <= ask[2] for a in routing.no_slot):
            slot = self._find_slot(request, routing, None)
        if slot is None:
            self._lacks[id] = "slot"
            routing.no_slot.append(ask)
            return False
        if not any(due >= request.due and tokens <= request.pending for due, tokens in routing.no_prefill):
            replica = self._find_prefill_replica(request, routing, slot[0])
        if replica is None:
            self._lacks[id] = "prefill"
            routing.no_prefill.append((request.due, request.pending))
            return False
        self._lacks.pop(id, None)
        self._reserve_slot(request, slot, routing)
        if replica.group is None:
            self._enlist(replica, PREFILL_GROUP, routing)
        replica.queue(request)
        self._unsorted.add(PREFILL_GROUP)
        self._prefills[id] = replica
        routing.place[id], routing.why[id] = replica.id, f"prefill, then {slot[0].id}: {slot[2]}"
        return True

    def _find_prefill_replica(
        self, request: HeldRequest, routing: _RoutingRound, slot: TierReplica
    ) -> TierReplica | None:
        """Returns the most loaded prefill replica that has its prompt done in time, else one of the pool."""
        for replica in self._loaded(PREFILL_GROUP, None):
            if replica.prefills_in_time(request, routing.now):
                return replica
        pooled = self._idlest(request.seq, besides=slot)
        return pooled if pooled is not None and pooled.prefills_in_time(request, routing.now) else None

    def _find_slot(
        self, request: HeldRequest, routing: _RoutingRound, among: Sequence[TierReplica] | None
    ) -> tuple[TierReplica, int, str] | None:
        """Returns a replica to decode on, the tier that it serves or will serve, and the reason. It tries the own tier,
        tighter ones, draining replicas, then the pool."""
        if (slot := self._find_slot_in_groups(request, routing, among)) is not None:
            return slot
        own, later = request.tier, self.mode == "pd" and not request.moves
        for replica in self._claimable(request):
            pooled = replica.group is None
            if replica.next_token_at(request, self.tiers[own], routing.now, is_alone=pooled, later=later) is not None:
                return replica, own, "scaled up" if pooled else "claimed"
        return None

    def _find_slot_in_groups(
        self, request: HeldRequest, routing: _RoutingRound, among: Sequence[TierReplica] | None, tightest: int = 0
    ) -> tuple[TierReplica, int, str] | None:
        """Returns the same among replicas of its tier or a tighter one, down to `tightest`."""
        own, later = request.tier, self.mode == "pd" and not request.moves
        for group in range(own, tightest - 1, -1):
            for replica in self._loaded(group, among):
                if replica.next_token_at(request, self.tiers[group], routing.now, later=later) is not None:
                    return replica, group, "own tier" if group == own else f"promoted from {1e3 * self.tiers[own]:g} ms"
        return None

    def _room(self, request: HeldRequest) -> tuple[TierReplica, int, str] | None:
        """Returns a replica for KV without a slot, which blocks prompts where it is: one of the loosest tier with room
        now."""
        for group in range(len(self.tiers) - 1, -1, -1):
            for replica in self._groups[group]:
                view, limits = replica.view, replica.view.limits
                full = (
                    view.count + len(view.moving) >= limits.max_num_seqs or limits.blocks(request.length) > view.kv_free
                )
                if not full and not is_source(replica, request.seq):
                    return replica, group, "has room"
        return None

    def _reserve_slot(self, request: HeldRequest, slot: tuple[TierReplica, int, str], routing: _RoutingRound) -> None:
        """Reserves the slot for a request."""
        replica, group, rule = slot
        if rule in ("scaled up", "claimed"):
            self._enlist(replica, group, routing)
        replica.add(request)
        if self.mode == "co":
            replica.added += request.pending
            self._added.append(replica)
        self._where[request.seq.id] = (replica, request.tier)
        self._unsorted.add(group)

    def _loaded(self, group: int, among: Sequence[TierReplica] | None) -> Sequence[TierReplica]:
        """Returns the admitting replicas of a group (within `among`, if given), the most loaded first; ties by
        index."""
        if among is not None and all(replica.group != group for replica in among):
            return ()
        replicas = self._groups[group]
        if group in self._unsorted:
            replicas.sort(key=lambda r: (-r.weigh(), r.index))
            self._unsorted.discard(group)
        return [r for r in replicas if not r.draining and (among is None or r in among)]

    def _claimable(self, request: HeldRequest) -> Sequence[TierReplica]:
        """Returns draining replicas whose tightest requests are of this tier, then the idlest of the pool, unless it is
        the last one and none prefills."""
        group = request.tier
        draining = [r for r in self._replicas.values() if r.draining]
        claimable = [r for r in draining if r.residents[group] and not any(r.residents[:group])]
        reserve = self.mode == "pd" and not self._groups[PREFILL_GROUP]
        if (
            sum(r.group is None for r in self._replicas.values()) > reserve
            and (pooled := self._idlest(request.seq)) is not None
        ):
            claimable.append(pooled)
        return claimable

    def _idlest(self, seq: SeqView, besides: TierReplica | None = None, enlist: bool = True) -> TierReplica | None:
        """Returns the idlest replica of the pool that can take this request's KV; ties by lowest index. `enlist`: to
        change its group, which is impossible while KV is on its way there."""
        pool = [r for r in self._replicas.values() if r.group is None and r is not besides and not is_source(r, seq)]
        if enlist:
            pool = [r for r in pool if not r.receives_kv()]
        return min(pool, key=lambda r: (len(r.forecast), r.index), default=None)

    def _send_too_long(self, parked: Sequence[SeqView], routing: _RoutingRound) -> None:
        """Places requests that are longer than every replica's KV: the replica refuses them, or knows the length of a
        text prompt better."""
        most = max([replica.capacity for replica in self._replicas.values()], default=inf)
        for seq in parked:
            if not seq.cached and self._best_effort(seq).most > most:
                replica = min(self._replicas.values(), key=lambda r: (r.group is not None, len(r.forecast), r.index))
                self._for_pool.discard(seq.id)
                routing.place[seq.id], routing.why[seq.id] = (
                    replica.id,
                    "best effort: longer than the KV of every replica",
                )

    def _fill_pool(self, parked: Sequence[SeqView], routing: _RoutingRound) -> None:
        """Places best effort on the pool as far as its KV goes."""
        for seq in parked:
            replica = self._idlest(seq, enlist=False)
            if replica is None:
                continue
            step, left = replica.renew(routing.now), remaining_output(seq)
            limits, count = replica.view.limits, len(replica.forecast)
            too_much = count and replica.forecast.peak_with(seq.length, left, step) > replica.capacity
            if count >= limits.max_num_seqs or too_much or limits.blocks(seq.cached) > replica.view.kv_free:
                return
            replica.forecast.add(seq.id, seq.length, left, step)
            self._where[seq.id] = (replica, None)
            self._for_pool.discard(seq.id)
            if seq.cached:
                self._moving[seq.id] = routing.now
            routing.place[seq.id], routing.why[seq.id] = replica.id, "best effort: in the pool"

    def _admit_guests(self, parked: Sequence[SeqView], routing: _RoutingRound, pooled: bool) -> float:
        """Best effort that the pool does not take decodes as a guest of the tiers if it holds KV where prompts are
        computed; so is, one at a time, what has waited for `PATIENCE_S` while no replica is in the pool (pooled: one
        is). Returns when to ask again."""
        again = inf
        for seq in parked:
            waits = seq.request.arrival + PATIENCE_S - routing.now
            waited = waits <= 0.0 and self._guest is None and not pooled
            if seq.cached or waited:
                request = self._best_effort(seq)
                if self._try_placing(request, routing, None):
                    self._for_pool.discard(seq.id)
                    self._guest = self._guest if request.moves else seq.id
                    continue
                waits = PATIENCE_S
            if self._guest is None and not pooled:
                again = min(again, routing.now + waits)
        return again

    def _best_effort(self, seq: SeqView) -> HeldRequest:
        moves = seq.cached > 0 and self.mode == "pd"
        return HeldRequest(seq, len(self.tiers) - 1, inf, seq.pending, seq.length, remaining_output(seq), moves)

    # ----------------------------------------------------------------- roles

    def _enlist(self, replica: TierReplica, group: int, routing: _RoutingRound) -> None:
        """Moves a replica to a group, and recalls best effort from it."""
        if replica.group is None and not replica.empty:
            routing.recall[replica.id] = "best_effort"
            replica.forecast = KVForecast()
            self._forget_residents(replica)
        self._move(replica, group)
        routing.roles[replica.id] = self._role(group)

    def _give_back(self, replica: TierReplica, routing: _RoutingRound) -> None:
        """To the pool when it is empty, if it prefills when it has been for `PREFILL_IDLE_S`: a tier would take it at
        once, and prompts would have to wait until one that decodes is empty. To the draining ones when only requests of
        looser tiers are left."""
        group = replica.group
        if group is None:
            return
        if replica.empty:
            if group == PREFILL_GROUP:
                replica.idle_since = min(replica.idle_since, routing.now)
                if routing.now < replica.idle_since + PREFILL_IDLE_S:
                    return
            if not replica.receives_kv():
                self._move(replica, None)
                routing.roles[replica.id] = POOL_ROLE
        elif group != PREFILL_GROUP and not replica.residents[group] and not replica.draining:
            replica.draining = True
            routing.roles[replica.id] = replace(self._role(group), kind="pending")

    def _forget_residents(self, replica: TierReplica) -> None:
        """Forgets the placements on a replica."""
        self._where = {id: at for id, at in self._where.items() if at[0] is not replica}
        self._prefills = {id: at for id, at in self._prefills.items() if at is not replica}

    def _role(self, group: int) -> Role:
        if group == PREFILL_GROUP:
            return PREFILL_ROLE
        return Role("decode" if self.mode == "pd" else "both", f"{self.tiers[group]:g}", kind="tier")

    def _move(self, replica: TierReplica, group: int | None) -> None:
        if replica.group is not None:
            self._groups[replica.group].remove(replica)
        replica.group, replica.draining, replica.idle_since = group, False, inf
        if group is not None:
            self._groups[group].append(replica)
            self._unsorted.add(group)
