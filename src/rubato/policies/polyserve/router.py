"""PolyServe's router: assigns replicas to tiers, and requests to replicas."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import inf

from rubato.core.interfaces import Dispatch, SeqView, View
from rubato.policies.polyserve.groups import PREFILL_IDLE_S, GroupingRouter
from rubato.policies.polyserve.replica_model import HeldRequest, TierReplica, is_source
from rubato.policies.polyserve.scheduler import by_deadline, prompt_due
from rubato.policy_kit.batch_builder import remaining_output
from rubato.policy_kit.tier_fleet import PREFILL_GROUP, DecodeSlot, RoutingRound, tier_and_due

PATIENCE_S = 10.0  # seconds from arrival after which best effort need not wait for the pool

Slot = tuple[TierReplica, int, str]  # a replica to decode on, the tier that it serves or will serve, and the reason


@dataclass
class PlacementRound(RoutingRound):
    """The decisions of one dispatch, and what failed in it: a request that asks for as much or more is not tried.

    Args:
        no_slot: (tier, length, output tokens) of requests that found no place to decode
        no_prefill: (due, tokens) of prompts that no replica prefills in time
    """

    no_slot: list[tuple[int, int, float]] = field(default_factory=list)
    no_prefill: list[tuple[float, int]] = field(default_factory=list)


@dataclass
class Router(GroupingRouter):
    """Gives tiers replicas of their own, and each request the fullest that keeps its SLO.

    Args:
        mode (co, pd): chunked prefill beside decodes; prefill and decode replicas, two or more
        tiers (ascending, above 0): TPOTs in seconds; a request belongs to the loosest that is no looser than its own
    """

    mode: str = "co"
    _added: list[TierReplica] = field(init=False, repr=False, default_factory=list)  # by the last dispatch
    _held_until: dict[str, float] = field(init=False, repr=False, default_factory=dict)  # could be in time until then
    _lacks: dict[str, str] = field(init=False, repr=False, default_factory=dict)  # what a held prompt lacks
    _for_pool: set[str] = field(init=False, repr=False, default_factory=set)  # best effort that waits for the pool
    _guest: str | None = field(init=False, repr=False, default=None)  # best effort that a tier's replica serves

    def __post_init__(self) -> None:
        if self.mode not in ("co", "pd"):
            raise ValueError(f"mode is {self.mode!r}: give co or pd")
        if self.mode == "pd":
            self.needs = self.needs | {"kv_transfer"}  # type: ignore[misc]  # of this one alone
        super().__post_init__()

    # ----------------------------------------------------------------- what happens

    def _record_placement(self, id: str, replica: TierReplica | None) -> None:
        if replica is None:
            return
        if (before := self._prefills.get(id)) is not None:
            if before is not replica:
                prompt = before.prompts[id]
                self._leave_prefill(id)
                replica.queue(prompt)
                self._prefills[id] = replica
                self._unsorted.add(PREFILL_GROUP)
            return
        slot = self._slots.get(id)
        if slot is not None and slot.replica is replica:
            return
        if slot is not None:
            slot.replica.drop(id, slot.tier)
            self._changed(slot.replica)
        tier = slot.tier if slot is not None else None
        replica.add_unknown(id, tier)
        self._slots[id] = DecodeSlot(replica, tier)
        if replica.group is not None:
            self._unsorted.add(replica.group)

    def _leave(self, id: str) -> None:
        self._held_until.pop(id, None)
        self._lacks.pop(id, None)
        self._for_pool.discard(id)
        self._guest = None if self._guest == id else self._guest
        super()._leave(id)

    # ----------------------------------------------------------------- what goes where

    def place(self, held: Sequence[SeqView], fleet: Sequence[View], now: float) -> Dispatch:
        self._update_replicas(fleet)
        for replica in self._added:
            replica.added_tokens = 0
        self._added.clear()
        routing = PlacementRound(now)
        held_until, for_pool = self._held_until, self._for_pool
        waiting = [seq for seq in held if seq.id in held_until]
        fresh = [seq for seq in held if seq.id not in held_until and seq.id not in for_pool]
        for seq in fresh:
            if seq.id in self._slots and not seq.cached:  # it came back, or was not taken
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
        # To be given back later; idle prefill replicas are looked at when they have been idle for long enough.
        self._changed_replicas = {
            r.id: r for r in changed_replicas if r.empty and r.group is not None and r.idle_since == inf
        }
        # An idle replica that is not given back by then waits for KV on its way there.
        give_back_times = [t for r in self._groups[PREFILL_GROUP] if (t := r.idle_since + PREFILL_IDLE_S) > now]
        until = min([*held_until.values(), *give_back_times], default=inf)
        if for_pool:
            self._send_too_long([seq for seq in fresh if seq.id in for_pool], routing)
            parked = [seq for seq in held if seq.id in for_pool]
            has_pool = any(replica.group is None for replica in self._replicas.values())
            if has_pool:
                self._fill_pool(parked, routing)
            until = min(until, self._admit_guests([s for s in parked if s.id in for_pool], routing, has_pool))
        return self._dispatch(routing, until)

    def _try(self, seq: SeqView, routing: PlacementRound, among: Sequence[TierReplica] | None) -> None:
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
            elif not request.moves or until == -inf:  # late even on an idle replica
                routing.demote.append(id)
                self._leave(id)
                self._for_pool.add(id)
            else:  # too late, and it holds KV somewhere: it goes wherever there is room
                request.due = inf
                if not self._try_placing(request, routing, None):
                    self._held_until[id] = inf

    def _request(self, seq: SeqView, now: float) -> HeldRequest | None:
        """Returns what a request asks for; None for best effort, and for a TPOT that no tier keeps."""
        remaining, moves = remaining_output(seq), seq.cached > 0 and self.mode == "pd"
        if seq.best_effort:  # a place to decode was reserved for a guest, or for one that was demoted since
            slot = self._slots.get(seq.id)
            return self._best_effort(seq) if moves and slot is not None and slot.tier is not None else None
        least = self._least_seconds(seq, moves)
        tier, due = tier_and_due(seq, self.tiers, remaining, least, now)
        if tier < 0:
            return None
        transfer_seconds = seq.length * self._token_moves
        if self.mode == "pd" and not moves:  # the second token waits for the KV and the end of a step
            lead = due - min(due, prompt_due(seq)) + transfer_seconds
            due -= max(0.0, min(lead, 0.5 * (due - now - least)))
        return HeldRequest(seq, tier, due, seq.pending, seq.length, remaining, moves, transfer_seconds)

    def _least_seconds(self, seq: SeqView, moves: bool) -> float:
        """Returns the seconds until its next token on an idle replica."""
        steps = next(iter(self._replicas.values())).steps
        return steps.decodes(1, seq.length) if moves else steps.isolated_seconds(seq.pending)

    def _until(self, request: HeldRequest) -> float:
        """Returns the latest time at which an idle replica could still have its next token in time; -inf if its TPOT or
        KV is too much for every replica."""
        tpot, length = self.tiers[request.tier], request.final_length
        if not any(length <= r.capacity and r.steps.decodes(1, length) <= tpot for r in self._replicas.values()):
            return -inf
        return request.due - self._least_seconds(request.seq, request.moves)

    def _try_placing(self, request: HeldRequest, routing: PlacementRound, among: Sequence[TierReplica] | None) -> bool:
        """Tries to place a request; returns whether it did. In mode pd a prompt is prefilled once a slot to decode in
        is reserved; it moves there if its next token is in time."""
        id = request.seq.id
        if self.mode == "co":
            slot = self._find_slot(request, routing, among)
            if slot is not None:
                self._reserve_slot(request, slot, routing)
                routing.put(id, slot[0], slot[2])
            return slot is not None
        if request.moves:
            reserved = self._slots.get(id)
            if reserved is not None and (reserved.tier is None or is_source(reserved.replica, request.seq)):
                self._leave(id)  # no slot was reserved for it
            if id in self._slots:
                self._recheck_slot(request, routing)
            else:
                slot = self._find_slot(request, routing, None)
                if slot is None and request.due == inf:
                    slot = self._find_room(request)
                if slot is None:
                    return False
                self._reserve_slot(request, slot, routing)
            replica = self._slots[id].replica
            if replica.view.limits.blocks(request.length) > replica.view.kv_free:
                return False
            self._moving[id] = routing.now
            routing.put(id, replica, "decodes")
            return True
        return self._start_prefill(request, routing, among)

    def _recheck_slot(self, request: HeldRequest, routing: PlacementRound) -> None:
        """Chooses another slot for a request with KV if its next token would be late at the reserved one. No replica
        leaves the pool for one token, except for a late request without room. If steps there have become too long, it
        goes to another replica of its tier, not of a tighter one, which would fill up, too."""
        id, slot, now = request.seq.id, None, routing.now
        reserved = self._slots[id]
        reserved_replica = reserved.replica
        group = reserved_replica.group
        if group is not None and group != PREFILL_GROUP and reserved_replica.can_keep(request, self.tiers[group], now):
            return
        del self._slots[id]
        reserved_replica.drop(id, reserved.tier)
        if group is None or group == PREFILL_GROUP or reserved_replica.joins_at(request, now) > request.due:
            slot = (self._find_slot if request.due == inf else self._find_slot_in_groups)(request, routing, None)
        elif reserved_replica.next_token_at(request, self.tiers[group], now) is None:
            slot = self._find_slot_in_groups(request, routing, None, tightest=request.tier)
        if slot is None:
            reserved_replica.add(id, request.tier, request.length, request.remaining)
            self._slots[id] = DecodeSlot(reserved_replica, request.tier)
        else:
            self._changed(reserved_replica)
            self._reserve_slot(request, slot, routing)

    def _start_prefill(
        self, request: HeldRequest, routing: PlacementRound, among: Sequence[TierReplica] | None
    ) -> bool:
        """Tries to place a prompt where it is prefilled in time, with a slot to decode in; returns whether it did."""
        id, lacks_prefill = request.seq.id, self._lacks.get(request.seq.id) == "prefill"
        if among is not None and not any(r.group is None or (r.group == PREFILL_GROUP) == lacks_prefill for r in among):
            return False  # what changed is not what it lacks
        tier, length, output, slot, replica = request.tier, request.length, request.remaining, None, None
        if not any(t >= tier and least <= length and out <= output for t, least, out in routing.no_slot):
            slot = self._find_slot(request, routing, None)
        if slot is None:
            self._lacks[id] = "slot"
            routing.no_slot.append((tier, length, output))
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
        routing.put(id, replica, f"prefill, then {slot[0].id}: {slot[2]}")
        return True

    def _find_prefill_replica(
        self, request: HeldRequest, routing: PlacementRound, slot: TierReplica
    ) -> TierReplica | None:
        """Returns the most loaded prefill replica that has its prompt done in time, else one of the pool."""
        for replica in self._loaded(PREFILL_GROUP, None):
            if replica.prefills_in_time(request, routing.now):
                return replica
        pooled = self._idlest(request.seq, besides=slot)
        return pooled if pooled is not None and pooled.prefills_in_time(request, routing.now) else None

    def _find_slot(
        self, request: HeldRequest, routing: PlacementRound, among: Sequence[TierReplica] | None
    ) -> Slot | None:
        """Returns a slot to decode in, if there is one: in the own tier, else in a tighter one, else on a draining
        replica, else in the pool."""
        if (slot := self._find_slot_in_groups(request, routing, among)) is not None:
            return slot
        own, later = request.tier, self.mode == "pd" and not request.moves
        for replica in self._claimable(request):
            is_pooled = replica.group is None
            if replica.next_token_at(request, self.tiers[own], routing.now, is_pooled, later) is not None:
                return replica, own, "scaled up" if is_pooled else "claimed"
        return None

    def _find_slot_in_groups(
        self, request: HeldRequest, routing: PlacementRound, among: Sequence[TierReplica] | None, tightest: int = 0
    ) -> Slot | None:
        """Returns a slot on a replica of the request's tier, or of a tighter one, down to `tightest`."""
        own, later = request.tier, self.mode == "pd" and not request.moves
        for group in range(own, tightest - 1, -1):
            for replica in self._loaded(group, among):
                if replica.next_token_at(request, self.tiers[group], routing.now, later=later) is not None:
                    return replica, group, "own tier" if group == own else f"promoted from {1e3 * self.tiers[own]:g} ms"
        return None

    def _find_room(self, request: HeldRequest) -> Slot | None:
        """Returns a slot for a late request, whose KV blocks prompts where it is: in the loosest tier with room now."""
        for group in range(len(self.tiers) - 1, -1, -1):
            for replica in self._groups[group]:
                view, limits = replica.view, replica.view.limits
                has_seat = view.count + len(view.moving) < limits.max_num_seqs
                has_room = has_seat and limits.blocks(request.length) <= view.kv_free
                if has_room and not is_source(replica, request.seq):
                    return replica, group, "has room"
        return None

    def _reserve_slot(self, request: HeldRequest, slot: Slot, routing: PlacementRound) -> None:
        """Reserves a slot for a request, and gives the replica to the tier if it is not there yet."""
        replica, group, rule = slot
        if rule in ("scaled up", "claimed"):
            self._enlist(replica, group, routing)
        replica.add(request.seq.id, request.tier, request.length, request.remaining)
        if self.mode == "co":
            replica.added_tokens += request.pending
            self._added.append(replica)
        self._slots[request.seq.id] = DecodeSlot(replica, request.tier)
        self._unsorted.add(group)

    def _claimable(self, request: HeldRequest) -> Sequence[TierReplica]:
        """Returns the replicas that a tier may claim: draining ones whose tightest requests are of this tier (tiers
        ascend by TPOT), then the idlest replica of the pool. Where no replica prefills, the last of the pool stays."""
        group = request.tier
        draining = [r for r in self._replicas.values() if r.draining]
        claimable = [r for r in draining if r.residents[group] and not any(r.residents[:group])]
        kept = int(self.mode == "pd" and not self._groups[PREFILL_GROUP])  # of the pool, for prefill
        has_more = sum(r.group is None for r in self._replicas.values()) > kept
        if has_more and (pooled := self._idlest(request.seq)) is not None:
            claimable.append(pooled)
        return claimable

    def _send_too_long(self, parked: Sequence[SeqView], routing: PlacementRound) -> None:
        """Places requests that seem longer than every replica's KV: the replica refuses them, or knows the length of a
        text prompt better."""
        largest = max([replica.capacity for replica in self._replicas.values()], default=inf)
        for seq in parked:
            if not seq.cached and self._best_effort(seq).final_length > largest:
                replica = min(self._replicas.values(), key=lambda r: (r.group is not None, len(r.forecast), r.index))
                self._for_pool.discard(seq.id)
                routing.put(seq.id, replica, "best effort: longer than the KV of every replica")

    def _fill_pool(self, parked: Sequence[SeqView], routing: PlacementRound) -> None:
        """Places best effort on the pool as far as its KV goes."""
        for seq in parked:
            replica = self._idlest(seq, enlist=False)
            if replica is None:
                continue
            step, remaining = replica.renew(routing.now), remaining_output(seq)
            limits, count = replica.view.limits, len(replica.forecast)
            too_much = count and replica.forecast.peak_with(seq.length, remaining, step) > replica.capacity
            if count >= limits.max_num_seqs or too_much or limits.blocks(seq.cached) > replica.view.kv_free:
                return
            replica.add(seq.id, None, seq.length, remaining)
            self._slots[seq.id] = DecodeSlot(replica, None)
            self._for_pool.discard(seq.id)
            if seq.cached:
                self._moving[seq.id] = routing.now
            routing.put(seq.id, replica, "best effort: in the pool")

    def _admit_guests(self, parked: Sequence[SeqView], routing: PlacementRound, has_pool: bool) -> float:
        """Lets tiers serve best effort that the pool does not take: requests whose KV is where prompts are computed,
        and, one at a time while no replica is in the pool, one that has waited for `PATIENCE_S`.

        Args:
            parked: the best effort
            routing: the decisions of this dispatch
            has_pool: whether a replica is in the pool

        Returns:
            the time at which to ask again
        """
        again = inf
        for seq in parked:
            waits = seq.request.arrival + PATIENCE_S - routing.now
            is_next_guest = waits <= 0.0 and self._guest is None and not has_pool
            if seq.cached or is_next_guest:
                request = self._best_effort(seq)
                if self._try_placing(request, routing, None):
                    self._for_pool.discard(seq.id)
                    self._guest = self._guest if request.moves else seq.id
                    continue
                waits = PATIENCE_S
            if self._guest is None and not has_pool:
                again = min(again, routing.now + waits)
        return again

    def _best_effort(self, seq: SeqView) -> HeldRequest:
        moves = seq.cached > 0 and self.mode == "pd"
        return HeldRequest(seq, len(self.tiers) - 1, inf, seq.pending, seq.length, remaining_output(seq), moves)
