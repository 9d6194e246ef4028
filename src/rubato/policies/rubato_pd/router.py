"""Assigns replicas to prefill and to tiers of decodes, and places requests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import ceil, inf

from rubato.core.interfaces import Dispatch, SeqView, View
from rubato.core.request import Handoff
from rubato.policies.rubato_pd.prefill_step import PATIENCE_S, PREFILL_STEP_TOKENS, seconds_in_turns
from rubato.policies.rubato_pd.prompt import PromptPlan, plan_best_effort_prompt, plan_prompt
from rubato.policies.rubato_pd.replica_model import FleetReplica
from rubato.policy_kit.batch_builder import remaining_output
from rubato.policy_kit.refusals import fleet_refusal
from rubato.policy_kit.tier_fleet import PREFILL_GROUP, DecodeSlot, RoutingRound, TierRouter

# The order of the queue is by deadline, but a tier that loses all its requests is put forward by so many seconds, and a
# prompt back by so many times its work where all requests are lost: so each tier loses as much, and long prompts first.
# On mooncake-conversation at 45/s the worst tier loses 2.5 points without the first, 7 with a third of the second.
MAX_TIER_ADVANCE_S, MAX_DELAY_PER_WORK = 20.0, 30.0
# Requests over which the share of lost ones is a mean, of a tier and of all: some seconds.
TIER_MEMORY_REQUESTS, MEMORY_REQUESTS = 200.0, 500.0
MAX_FAILED_PROMPTS = 3  # that find no replica in one dispatch; the remaining ones are not tried
# Part of a replica that guests leave free for their host tier, which would otherwise claim another replica. 0.3 leaves
# too few guests (splitwise at 464/s: 0.88 instead of 0.92 in time), 0 too many (0.89).
TIER_HEADROOM = 0.1
# Share of the fleet that stays idle before best effort gets the pool, since a claim waits for the step there.
IDLE_SHARE = 0.1
MAX_POOL_TOKENS = 4096  # of best effort waiting at a pool replica: recalled requests have lost their work
BEST_EFFORT_BURST_S = 2.0  # best effort's share is saved up for at most this time
RETRY_S = 0.5  # an unplaced request is tried again after this time
KV_ORPHAN_TIMEOUT_S = 30.0  # KV without a decode replica is dropped after this time


class GroupedRound(RoutingRound):
    """The decisions of one dispatch, and the replicas by group (`fleet` are all that requests may go to)."""

    def __init__(self, held: Sequence[SeqView], fleet: Sequence[FleetReplica], now: float) -> None:
        super().__init__(now)
        self.held_ids = {seq.id for seq in held}
        self.fleet = fleet
        self._groups: dict[int | None, list[FleetReplica]] = {}

    def group(self, group: int | None) -> list[FleetReplica]:
        """Returns the replicas of a group, the most loaded first; of the pool (None) the idlest first. Ties go by
        lowest index."""
        if (replicas := self._groups.get(group)) is None:
            replicas = self._groups[group] = [r for r in self.fleet if r.group == group]
            replicas.sort(key=(lambda r: (len(r.forecast), r.index)) if group is None else FleetReplica.rank)
        return replicas

    def invalidate_groups(self, *groups: int | None) -> None:
        for group in groups:
            self._groups.pop(group, None)


@dataclass
class Router(TierRouter[FleetReplica]):
    """Gives replicas to prefill and to tiers of decodes, and places each request once both have room for it.

    Args:
        tiers: TPOTs in seconds, ascending; a request belongs to the loosest that is no looser than its own
        best_effort: share of the fleet's time that best effort, and requests that are too late, get where no replica is
            free
    """

    needs = TierRouter.needs | {"kv_transfer"}
    policy = "rubato"
    replica_type = FleetReplica
    best_effort: float = 0.02
    _queue: dict[str, PromptPlan] = field(init=False, repr=False, default_factory=dict)
    _parked: dict[str, SeqView] = field(init=False, repr=False, default_factory=dict)  # best effort, oldest first
    _lost_share: float = field(init=False, repr=False, default=0.0)  # of recent requests
    _tier_lost_share: list[float] = field(init=False, repr=False, default_factory=list)
    _replicas_needed: list[float] = field(init=False, repr=False, default_factory=list)  # by the residents, by tier
    _credit: float = field(init=False, repr=False, default=0.0)  # replica-seconds that best effort may take
    _credit_since: float = field(init=False, repr=False, default=0.0)

    def __post_init__(self) -> None:
        if not 0.0 < self.best_effort <= 1.0:
            raise ValueError(f"best_effort is {self.best_effort!r}: give a share of the fleet, above 0 and up to 1")
        super().__post_init__()
        self._tier_lost_share = [0.0] * len(self.tiers)
        self._replicas_needed = [0.0] * len(self.tiers)

    # ----------------------------------------------------------------- what happens

    def _record_placement(self, id: str, replica: FleetReplica | None) -> None:
        self._queue.pop(id, None)
        self._parked.pop(id, None)
        before, slot = self._prefills.get(id), self._slots.get(id)
        if replica is None or replica is (before or (slot and slot.replica)):
            return
        if before is not None and replica.group == PREFILL_GROUP:
            prompt = before.unqueue(id)
            if prompt is not None:
                replica.queue(prompt)
            self._prefills[id] = replica
            return
        self._leave(id)
        self._slots[id] = DecodeSlot(replica, None)
        replica.add(id, None, 1, 1.0)  # its length is looked up when that has passed

    def _leave(self, id: str) -> None:
        self._queue.pop(id, None)
        self._parked.pop(id, None)
        if (slot := self._slots.get(id)) is not None and slot.tier is not None:
            self._replicas_needed[slot.tier] -= slot.share
        super()._leave(id)

    def _forget_replica(self, id: str) -> None:
        """Forgets a lost replica and all requests there."""
        replica = self._replicas.pop(id, None)
        for id in [id for id, slot in self._slots.items() if slot.replica is replica]:
            prefills = self._prefills.pop(id, None)
            self._leave(id)
            if prefills is not None and prefills is not replica:
                self._prefills[id] = prefills
        for id in [id for id, at in self._prefills.items() if at is replica]:
            self._leave(id)

    # ----------------------------------------------------------------- what goes where

    def place(self, held: Sequence[SeqView], fleet: Sequence[View], now: float) -> Dispatch:
        replicas = self._update_replicas(fleet, now)
        routing = GroupedRound(held, replicas, now)
        self._reassign_replicas(routing)
        if len(replicas) == 1 and replicas[0].role.phase == "both":
            return self._place_on_last(held, routing)
        queue, parked = self._queue, self._parked
        for seq in held:
            if seq.cached > 0:
                self._move(seq, routing)
            elif seq.id in queue:
                queue[seq.id].seq = seq
            elif seq.id not in parked:
                self._enqueue(seq, routing)
        self._admit_best_effort(routing)
        if queue:
            self._place_prompts(routing)
        if parked:
            self._fill_pool(routing)
        until = min([prompt.until for prompt in queue.values()], default=inf)
        if parked or any(seq.id not in routing.place and seq.id not in queue for seq in held):
            until = min(until, now + RETRY_S)
        elif queue:
            until = min(until, now + PATIENCE_S)
        return self._dispatch(routing, until)

    def _place_on_last(self, held: Sequence[SeqView], routing: GroupedRound) -> Dispatch:
        """Places all requests without KV on the only replica left."""
        for seq in held:
            if seq.cached > 0:
                self._move(seq, routing)
            else:
                self._leave(seq.id)
                routing.place[seq.id] = routing.fleet[0].id
        routing.recall.clear()  # it has no other place to go
        unplaced = len(held) - len(routing.place) - len(routing.reject)
        return self._dispatch(routing, routing.now + RETRY_S if unplaced else inf)

    def _update_replicas(self, fleet: Sequence[View], now: float) -> Sequence[FleetReplica]:
        """Returns the replicas of the fleet, with current views."""
        replicas: list[FleetReplica] = []
        joined = False
        for index, view in enumerate(fleet):
            replica = self._replicas.get(view.id)
            if replica is None:
                replica, joined = self._book(view, index), True
            replica.show(view)
            replicas.append(replica)
        if joined:
            seconds = {
                replica: seconds_in_turns(replica.view.latency, PREFILL_STEP_TOKENS)
                for replica in self._replicas.values()
            }
            for replica, each in seconds.items():
                replica.pace = each / min(seconds.values())
        self._credit += self.best_effort * len(replicas) * (now - self._credit_since)
        self._credit = min(self._credit, self.best_effort * len(replicas) * BEST_EFFORT_BURST_S)
        self._credit_since = now
        return replicas

    def _enqueue(self, seq: SeqView, routing: GroupedRound) -> None:
        """Adds a request without KV to the queue, or to best effort."""
        if seq.id in self._slots or seq.id in self._prefills:  # it came back, or was not taken
            self._leave(seq.id)
        if seq.best_effort:
            self._parked[seq.id] = seq
            return
        prompt = self._prompt(seq, routing)
        if prompt is None or prompt.until < routing.now:
            self._decline(seq, routing)
            if prompt is not None:
                self._count_loss(prompt.tier, 1.0)
            return
        self._queue[seq.id] = prompt

    def _prompt(self, seq: SeqView, routing: GroupedRound) -> PromptPlan | None:
        return plan_prompt(seq, self.tiers, [r.view for r in routing.fleet], routing.now, self._token_moves)

    def _decline(self, seq: SeqView, routing: GroupedRound) -> None:
        """Refuses or demotes a request that cannot be in time any more."""
        if seq.request.on_decline == "refuse" and seq.request.progress is None:
            routing.reject[seq.id] = fleet_refusal(seq, [r.view for r in routing.fleet])
            return
        routing.demote.append(seq.id)
        self._parked[seq.id] = seq

    def _count_loss(self, tier: int, lost: float) -> None:
        """Counts a request that is lost (1) or placed in time (0)."""
        self._tier_lost_share[tier] += (lost - self._tier_lost_share[tier]) / TIER_MEMORY_REQUESTS
        self._lost_share += (lost - self._lost_share) / MEMORY_REQUESTS

    # ----------------------------------------------------------------- prompts

    def _place_prompts(self, routing: GroupedRound) -> None:
        """Places prompts on replicas that have time for them, each with a slot to decode in, until none has."""
        full_tiers: set[int] = set()
        failed = 0
        for prompt in self._prompts_in_order(routing):
            if prompt.tier in full_tiers:
                continue
            lacks = self._place_or_name_lack(prompt, routing)
            if lacks == "slot" and prompt.until < inf:  # a best-effort prompt without a slot stops no others
                full_tiers.add(prompt.tier)
            elif lacks and (failed := failed + 1) >= MAX_FAILED_PROMPTS:
                return

    def _place_or_name_lack(self, prompt: PromptPlan, routing: GroupedRound) -> str:
        """Places a prompt. Returns what it lacks ("prefill" or "slot"), "" if it was placed."""
        id = prompt.seq.id
        if (to := self._find_prefill_replica(prompt, routing)) is None:
            return "prefill"
        if (slot := self._find_slot(prompt, routing, besides=to)) is None:
            return "slot"
        del self._queue[id]
        if to.group is None:
            self._enlist(to, PREFILL_GROUP, routing)
        self._reserve_slot(prompt, slot, routing)
        to.queue(prompt)
        self._prefills[id] = to
        routing.put(id, to, f"prefill, then {slot[0].id}")
        if prompt.until < inf:
            self._count_loss(prompt.tier, 0.0)
        return ""

    def _prompts_in_order(self, routing: GroupedRound) -> Sequence[PromptPlan]:
        """Returns the queued prompts in the order to try them; late ones leave the queue."""
        ready: list[tuple[float, str, PromptPlan]] = []
        for id, prompt in list(self._queue.items()):
            if id not in routing.held_ids:
                continue
            if prompt.until < routing.now:
                del self._queue[id]
                self._decline(prompt.seq, routing)
                self._count_loss(prompt.tier, 1.0)
                continue
            delay = MAX_DELAY_PER_WORK * self._lost_share * prompt.work
            advance = MAX_TIER_ADVANCE_S * self._tier_lost_share[prompt.tier]
            ready.append((prompt.due + (delay - advance), id, prompt))
        ready.sort()
        return [prompt for _, _, prompt in ready]

    def _find_prefill_replica(self, prompt: PromptPlan, routing: GroupedRound) -> FleetReplica | None:
        """Returns a replica where the prompt can begin soon and nothing becomes late: for a short prompt the one with
        the most queued work, to share steps, for a long one the one with the least. If there is none, or if a long one
        would wait there, it returns a replica of the pool instead."""
        is_short = prompt.tokens < PREFILL_STEP_TOKENS
        best, queued = None, 0.0
        for replica in routing.group(PREFILL_GROUP):
            seconds = replica.seconds_before(prompt)
            if seconds is not None and (best is None or (seconds > queued if is_short else seconds < queued)):
                best, queued = replica, seconds
        if best is not None and (queued == 0.0 or is_short):
            return best
        for replica in routing.group(None):
            through = routing.now + replica.wait() + prompt.isolated_seconds * replica.pace
            if through <= prompt.due or prompt.until == inf:
                return replica
        return best

    # ----------------------------------------------------------------- slots to decode in

    def _find_slot(
        self, prompt: PromptPlan, routing: GroupedRound, besides: FleetReplica | None
    ) -> tuple[FleetReplica, int] | None:
        """Returns a replica to decode on and its tier: the fullest of its own tier, a tighter tier's as a guest, or one
        of the pool. Guests go where the host tier needs replicas anyway, so that other replicas can empty."""
        tier = prompt.tier
        if (replica := _fullest(routing.group(tier), prompt, self.tiers[tier], besides)) is not None:
            return replica, tier
        # One replica is kept that prefills, or could.
        can_spare_one = len(routing.group(PREFILL_GROUP)) + len(routing.group(None)) > 1
        pool = [replica for replica in routing.group(None) if replica is not besides] if can_spare_one else []
        for group in range(tier - 1, -1, -1):
            hosts, tpot = routing.group(group), self.tiers[group]
            room = ceil(self._replicas_needed[group]) - TIER_HEADROOM - sum([host.fullness(tpot) for host in hosts])
            if not hosts or hosts[0].share(prompt.seq.length, prompt.output_left, tpot) > room:
                continue
            if (replica := _fullest(hosts, prompt, tpot, besides)) is not None:
                return replica, group
        return (pool[0], tier) if pool else None

    def _reserve_slot(self, prompt: PromptPlan, slot: tuple[FleetReplica, int], routing: GroupedRound) -> None:
        replica, group = slot
        if replica.group is None:
            self._enlist(replica, group, routing)
        length, tier = prompt.seq.length, prompt.tier
        share = replica.share(length, prompt.output_left, self.tiers[tier])
        replica.add(prompt.seq.id, tier, length, prompt.output_left)
        self._slots[prompt.seq.id] = DecodeSlot(replica, tier, share)
        self._replicas_needed[tier] += share
        routing.invalidate_groups(group)

    def _move(self, seq: SeqView, routing: GroupedRound) -> None:
        """Moves a request with KV to its slot; without one, to the decode replica with the most free KV."""
        id, handoff = seq.id, seq.request.handoff or Handoff("", "failed", routing.now)
        slot = self._slots.get(id)
        if slot is not None and (
            slot.tier is None or slot.replica.id == handoff.source or slot.replica not in routing.fleet
        ):
            self._leave(id)
            slot = None
        if slot is None:
            source = self._replicas.get(handoff.source)
            prompt = None if seq.best_effort else self._prompt(seq, routing)
            prompt = prompt or plan_best_effort_prompt(seq, self.tiers, routing.fleet[0].view)
            new_slot = self._find_slot(prompt, routing, besides=source)
            if new_slot is None:
                others = [r for r in routing.fleet if r is not source]
                slots = [(r, r.group) for r in others if r.group is not None and r.group >= 0]
                slots += [(r, prompt.tier) for r in routing.group(None) if r is not source]
                new_slot = max(slots, key=lambda at: (at[0].group is not None, at[0].view.kv_free), default=None)
            if new_slot is None:
                if routing.now > handoff.at + KV_ORPHAN_TIMEOUT_S:
                    routing.reject[id] = "rejected-no-replica: none is left to decode"
                return
            self._reserve_slot(prompt, new_slot, routing)
            slot = self._slots[id]
        view = slot.replica.view
        if view.limits.blocks(seq.length) <= view.kv_free:
            self._moving[id] = routing.now
            routing.put(id, slot.replica, "decodes")

    # ----------------------------------------------------------------- best effort

    def _admit_best_effort(self, routing: GroupedRound) -> None:
        """Puts the oldest best effort at the head of the queue once best effort's share of the fleet's time has made up
        for the earlier ones."""
        if self._credit < 0.0 or any(p.seq.best_effort for p in self._queue.values()):
            return
        for id, seq in self._parked.items():
            if id in routing.held_ids:
                if routing.now >= seq.request.arrival + PATIENCE_S:
                    self._queue[id] = prompt = plan_best_effort_prompt(seq, self.tiers, routing.fleet[0].view)
                    self._credit -= prompt.work + prompt.output_left * self.tiers[-1] * routing.fleet[0].share(
                        prompt.tokens, prompt.output_left, self.tiers[-1]
                    )
                    del self._parked[id]
                return

    def _fill_pool(self, routing: GroupedRound) -> None:
        """Places best effort on the pool as far as KV goes; a part of the pool stays idle for requests with SLOs."""
        pool = routing.group(None)
        busy = bool(self._queue or self._prefills or any(slot.tier is not None for slot in self._slots.values()))
        idle = [replica for replica in pool if not replica.best_effort_count]
        for replica in idle[: ceil(IDLE_SHARE * len(routing.fleet)) if busy else 0]:
            pool = [other for other in pool if other is not replica]
        if not pool:
            return
        for id, seq in list(self._parked.items()):
            if id not in routing.held_ids:
                continue
            output_left = remaining_output(seq)
            fits = [r for r in pool if r.view.pending + r.best_effort_tokens <= MAX_POOL_TOKENS + len(r.forecast)]
            fits = [r for r in fits if not len(r.forecast) or r.has_slot(seq.length, output_left)]
            if not fits:
                return
            replica = min(fits, key=lambda r: (len(r.forecast), r.index))
            replica.add(id, None, seq.length, output_left)
            replica.best_effort_tokens += seq.pending
            self._slots[id] = DecodeSlot(replica, None)
            del self._parked[id]
            routing.put(id, replica, "best effort: in the pool")
        routing.invalidate_groups(None)

    # ----------------------------------------------------------------- roles

    def _enlist(self, replica: FleetReplica, group: int, routing: GroupedRound) -> None:
        """Moves a replica from the pool to a group, and recalls best effort from it."""
        if len(replica.forecast):
            self._recall_best_effort(replica, routing)
        self._assign(replica, group, routing)

    def _reassign_replicas(self, routing: GroupedRound) -> None:
        """Returns empty replicas to the pool, and moves a replica whose residents are all of looser tiers to the
        tightest of these. The only replica left prefills and decodes, once no KV is on its way to it."""
        for replica in routing.fleet:
            group = replica.group
            tightest = next((tier for tier, count in enumerate(replica.residents) if count), None)
            if group is not None and replica.empty:
                self._assign(replica, None, routing)
            elif group is not None and group != PREFILL_GROUP and tightest is not None and tightest > group:
                self._assign(replica, tightest, routing)
        only, receivers = routing.fleet[0], [self._slots[id].replica for id in self._moving if id in self._slots]
        if len(routing.fleet) == 1 and only.role.phase != "both" and only not in receivers:
            self._assign(only, None, routing)

    def _assign(self, replica: FleetReplica, group: int | None, routing: GroupedRound) -> None:
        routing.invalidate_groups(replica.group, group)
        replica.group = group
        replica.role = routing.roles[replica.id] = self._role(group)


def _fullest(
    replicas: Sequence[FleetReplica], prompt: PromptPlan, tpot: float, besides: FleetReplica | None
) -> FleetReplica | None:
    for replica in replicas:
        if replica is not besides and replica.has_slot(prompt.seq.length, prompt.output_left, tpot):
            return replica
    return None
