"""Which replica prefills, which tier another decodes for, and where each held request goes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from math import ceil, inf
from typing import ClassVar

from rubato.core.events import Event, Finished, HandedOff, Left, Lost, Placed, Transferred
from rubato.core.interfaces import Dispatch, SeqView, View
from rubato.core.plan import Role
from rubato.core.request import Handoff
from rubato.policies.rubato_pd.prefill_step import BUDGET, PATIENCE, seconds_in_turns
from rubato.policies.rubato_pd.prompt import Prompt, promised, unpromised
from rubato.policies.rubato_pd.replica_model import PREFILL, Replica, Seat
from rubato.policies.rubato_pd.turn import Turn
from rubato.policy_kit.batch_builder import remaining_output
from rubato.policy_kit.kv_forecast import KVForecast
from rubato.policy_kit.refusals import fleet_refusal
from rubato.policy_kit.step_table import StepTable

POOL_ROLE = Role(kind="best_effort")
PREFILL_ROLE = Role("prefill", kind="prefill")

# The order of the queue is by deadline, but a tier that loses all its requests is put forward by so many seconds, and a
# prompt back by so many times its work where all requests are lost: so each tier loses as much, and long prompts first.
# On mooncake-conversation at 45/s the worst tier loses 2.5 points without the first, 7 with a third of the second.
FAIRNESS, PRICE = 20.0, 30.0
TIER_MEMORY, MEMORY = 200.0, 500.0  # requests over which the share lost is a mean, of a tier and of all: some seconds
TRIES = 3  # prompts in a row without a prefill replica, after which the others are not asked about: it saves CPU time
# Part of a replica that guests leave, of as many as their hosts need: else hosts find those full and claim others. 0.3
# leaves too few guests (splitwise at 464/s: 0.88 instead of 0.92 in time), none too many (0.89).
HOST_ROOM = 0.1
# Part of the fleet that stays idle before best effort gets the pool: a claim waits for the step there.
SPARE_SHARE = 0.1
POOL_TOKENS = 4096  # of best effort that may wait at a replica of the pool: what is recalled has begun in vain
CREDIT = 2.0  # seconds for which best effort's share may be saved up: more would come at once
AGAIN_SECONDS = 0.5  # seconds after which a request that found nothing is looked at again, whatever happens
FORLORN = 30.0  # seconds that KV waits for a replica to decode, where only the one that holds it is left
SOON = 1e-5  # seconds from now at which the router is asked again at the earliest


@dataclass
class Router:
    """tiers: TPOTs in seconds, ascending; a request belongs to the loosest that is no looser than its own. best_effort:
    the share of the fleet's time that goes to best effort, and to what was too late, where no replica is free.
    """

    needs: ClassVar[frozenset[str]] = frozenset({"recall", "step_times", "kv_transfer"})
    default_lengths: ClassVar[str] = "conditional_mean"
    tiers: Sequence[float] = (0.02, 0.03, 0.05, 0.1)
    best_effort: float = 0.02
    _replicas: dict[str, Replica] = field(init=False, repr=False, default_factory=dict)
    _tables: dict[tuple[int, int], StepTable] = field(init=False, repr=False, default_factory=dict)
    _queue: dict[str, Prompt] = field(init=False, repr=False, default_factory=dict)
    _prefills: dict[str, Replica] = field(init=False, repr=False, default_factory=dict)  # where prompts are
    _seats: dict[str, Seat] = field(init=False, repr=False, default_factory=dict)
    _parked: dict[str, SeqView] = field(init=False, repr=False, default_factory=dict)  # best effort, oldest first
    _moving: dict[str, float] = field(init=False, repr=False, default_factory=dict)  # KV on its way: since
    _token_moves: float = field(init=False, repr=False, default=0.0)  # seconds of a token's KV on its way
    _loss: float = field(init=False, repr=False, default=0.0)
    _tier_loss: list[float] = field(init=False, repr=False, default_factory=list)
    _need: list[float] = field(init=False, repr=False, default_factory=list)  # replicas that each tier's residents take
    _credit: float = field(init=False, repr=False, default=0.0)  # replica-seconds that best effort may take
    _credit_at: float = field(init=False, repr=False, default=0.0)

    def __post_init__(self) -> None:
        if not 0.0 < self.best_effort <= 1.0:
            raise ValueError(f"best_effort is {self.best_effort!r}: give a share of the fleet, above 0 and up to 1")
        self.tiers = tuple(self.tiers)
        if not self.tiers or not all(a < b for a, b in pairwise((0.0, *self.tiers, inf))):
            raise ValueError(f"tiers are {self.tiers!r}: give TPOTs in seconds, above 0 and ascending")
        self._tier_loss = [0.0] * len(self.tiers)
        self._need = [0.0] * len(self.tiers)

    def roles(self, replicas: Sequence[str]) -> Mapping[str, Role]:
        """All are in the pool at first."""
        if len(replicas) < 2:
            raise ValueError("rubato in mode pd needs at least 2 replicas, to prefill and to decode: there is 1")
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
            elif isinstance(event, Placed):
                self._placed(event.id, self._replicas.get(event.replica))
            elif isinstance(event, Left):
                self._forget(self._replicas.pop(event.id, None))

    def _placed(self, id: str, replica: Replica | None) -> None:
        """It is there, if that is not where it was sent: with the rest of its group, or where its prefix is cached."""
        self._queue.pop(id, None)
        self._parked.pop(id, None)
        before, seat = self._prefills.get(id), self._seats.get(id)
        if replica is None or replica is (before or (seat and seat.replica)):
            return
        if before is not None and replica.group == PREFILL:
            prompt = before.unqueue(id)
            if prompt is not None:
                replica.queue(prompt)
            self._prefills[id] = replica
            return
        self._leave(id)
        self._seats[id] = Seat(replica, None, 0.0)
        replica.add(id, None, 1, 1.0)  # its length is looked up when that has passed

    def _leave(self, id: str) -> None:
        """It ends, or is to be placed anew."""
        self._queue.pop(id, None)
        self._parked.pop(id, None)
        self._moving.pop(id, None)
        self._leave_prefill(id)
        if (seat := self._seats.pop(id, None)) is not None:
            seat.replica.drop(id, seat.tier)
            if seat.tier is not None:
                self._need[seat.tier] -= seat.share

    def _leave_prefill(self, id: str) -> None:
        if (replica := self._prefills.pop(id, None)) is not None:
            replica.unqueue(id)

    def _forget(self, replica: Replica | None) -> None:
        """It is gone, with all that was there."""
        for id in [id for id, seat in self._seats.items() if seat.replica is replica]:
            prefills = self._prefills.pop(id, None)
            self._leave(id)
            if prefills is not None and prefills is not replica:
                self._prefills[id] = prefills
        for id in [id for id, at in self._prefills.items() if at is replica]:
            self._leave(id)

    # ----------------------------------------------------------------- what goes where

    def place(self, held: Sequence[SeqView], fleet: Sequence[View], now: float) -> Dispatch:
        replicas = self._look(fleet, now)
        turn = Turn(held, replicas, now)
        self._settle(turn)
        if len(replicas) == 1 and replicas[0].role.phase == "both":
            return self._to_the_last(held, turn)
        queue, parked = self._queue, self._parked
        for seq in held:
            if seq.cached > 0:
                self._move(seq, turn)
            elif seq.id in queue:
                queue[seq.id].seq = seq
            elif seq.id not in parked:
                self._enter(seq, turn)
        self._admit_best_effort(turn)
        if queue:
            self._start(turn)
        if parked:
            self._fill_pool(turn)
        until = min([prompt.until for prompt in queue.values()], default=inf)
        if parked or any(seq.id not in turn.place and seq.id not in queue for seq in held):
            until = min(until, now + AGAIN_SECONDS)
        elif queue:
            until = min(until, now + PATIENCE)
        return Dispatch(
            place=turn.place,
            reject=turn.reject,
            demote=turn.demote,
            recall=turn.recall,
            wake_at=max(until, now + SOON) if until < inf else None,
            assign=self._assigned(turn),
            why=turn.why,
        )

    def _to_the_last(self, held: Sequence[SeqView], turn: Turn) -> Dispatch:
        """One replica is left: it takes all but KV, which only it may hold."""
        for seq in held:
            if seq.cached > 0:
                self._move(seq, turn)
            else:
                self._leave(seq.id)
                turn.place[seq.id] = turn.fleet[0].id
        wake_at = turn.now + AGAIN_SECONDS if len(turn.place) + len(turn.reject) < len(held) else None
        return Dispatch(turn.place, turn.reject, wake_at=wake_at, assign=self._assigned(turn), why=turn.why)

    def _assigned(self, turn: Turn) -> Mapping[str, Role]:
        return {id: role for id, role in turn.roles.items() if self._replicas[id].view.role != role}

    def _look(self, fleet: Sequence[View], now: float) -> Sequence[Replica]:
        """The replicas of the fleet, as they are now."""
        found: list[Replica] = []
        joined = False
        for index, view in enumerate(fleet):
            replica = self._replicas.get(view.id)
            if replica is None:
                most = view.limits.max_num_batched_tokens
                # one table for all with the same latency model: it takes a thousand questions to fill
                table = self._tables.setdefault((id(view.latency), most), StepTable(view.latency, most))
                replica = self._replicas[view.id] = Replica(view, index, len(self.tiers), table)
                joined = True
            replica.look(view)
            found.append(replica)
        if joined:
            seconds = {replica: seconds_in_turns(replica.view.latency, BUDGET) for replica in self._replicas.values()}
            for replica, each in seconds.items():
                replica.pace = each / min(seconds.values())
        self._credit += self.best_effort * len(found) * (now - self._credit_at)
        self._credit = min(self._credit, self.best_effort * len(found) * CREDIT)
        self._credit_at = now
        return found

    def _enter(self, seq: SeqView, turn: Turn) -> None:
        """A request without KV: to the queue, or to best effort."""
        if seq.id in self._seats or seq.id in self._prefills:  # it came back, or was not taken
            self._leave(seq.id)
        if seq.best_effort:
            self._parked[seq.id] = seq
            return
        prompt = self._prompt(seq, turn)
        if prompt is None or prompt.until < turn.now:
            self._give_up(seq, turn)
            if prompt is not None:
                self._count(prompt.tier, 1.0)
            return
        self._queue[seq.id] = prompt

    def _prompt(self, seq: SeqView, turn: Turn) -> Prompt | None:
        return promised(seq, self.tiers, [r.view for r in turn.fleet], turn.now, self._token_moves)

    def _give_up(self, seq: SeqView, turn: Turn) -> None:
        """It cannot be in time any more."""
        if seq.request.on_decline == "refuse" and seq.request.progress is None:
            turn.reject[seq.id] = fleet_refusal(seq, [r.view for r in turn.fleet])
            return
        turn.demote.append(seq.id)
        self._parked[seq.id] = seq

    def _count(self, tier: int, lost: float) -> None:
        self._tier_loss[tier] += (lost - self._tier_loss[tier]) / TIER_MEMORY
        self._loss += (lost - self._loss) / MEMORY

    # ----------------------------------------------------------------- prompts

    def _start(self, turn: Turn) -> None:
        """Prompts go to replicas that have time for them, each with a seat to decode in, until none has."""
        full: set[int] = set()
        failed = 0
        for prompt in self._ready(turn):
            if prompt.tier in full:
                continue
            lacks = self._found_lacking(prompt, turn)
            if lacks == "seat" and prompt.until < inf:  # what is promised nothing waits alone
                full.add(prompt.tier)
            elif lacks and (failed := failed + 1) >= TRIES:
                return

    def _found_lacking(self, prompt: Prompt, turn: Turn) -> str:
        """Place it; or say what it lacks."""
        id = prompt.seq.id
        if (to := self._prefiller(prompt, turn)) is None:
            return "prefill"
        if (seat := self._find_seat(prompt, turn, besides=to)) is None:
            return "seat"
        del self._queue[id]
        if to.group is None:
            self._enlist(to, PREFILL, turn)
        self._sit(prompt, seat, turn)
        turn.why[id] = f"prefill, then {seat[0].id}"
        to.queue(prompt)
        self._prefills[id] = to
        turn.place[id] = to.id
        if prompt.until < inf:
            self._count(prompt.tier, 0.0)
        return ""

    def _ready(self, turn: Turn) -> Sequence[Prompt]:
        """Those of the queue in the order in which they are tried; those that are too late leave it."""
        ready: list[tuple[float, str, Prompt]] = []
        for id, prompt in list(self._queue.items()):
            if id not in turn.held:
                continue
            if prompt.until < turn.now:
                del self._queue[id]
                self._give_up(prompt.seq, turn)
                self._count(prompt.tier, 1.0)
                continue
            back = PRICE * self._loss * prompt.work - FAIRNESS * self._tier_loss[prompt.tier]
            ready.append((prompt.due + back, id, prompt))
        ready.sort()
        return [prompt for _, _, prompt in ready]

    def _prefiller(self, prompt: Prompt, turn: Turn) -> Replica | None:
        """Where it can begin soon and nothing would be late: short ones where most is queued, which share steps, long
        ones where least is; one of the pool if there is none, or for a long one that would wait."""
        short = prompt.tokens < BUDGET
        best, queued = None, 0.0
        for replica in turn.group(PREFILL):
            seconds = replica.takes(prompt)
            if seconds is not None and (best is None or (seconds > queued if short else seconds < queued)):
                best, queued = replica, seconds
        if best is not None and (queued == 0.0 or short):
            return best
        for replica in turn.group(None):
            if turn.now + replica.wait() + prompt.alone * replica.pace <= prompt.due or prompt.until == inf:
                return replica
        return best

    # ----------------------------------------------------------------- seats to decode in

    def _find_seat(self, prompt: Prompt, turn: Turn, besides: Replica | None) -> tuple[Replica, int] | None:
        """Where it can decode, and in which tier's group that replica is or is to be: the fullest of its own; as a
        guest of a tighter tier; one of the pool. Guests go where their hosts would be anyway, so that the other
        replicas can empty."""
        tier = prompt.tier
        if (replica := _fullest(turn.group(tier), prompt, self.tiers[tier], besides)) is not None:
            return replica, tier
        rest = len(turn.group(PREFILL)) + len(turn.group(None)) - 1  # that prefill, or could
        pool = [replica for replica in turn.group(None) if replica is not besides] if rest > 0 else []
        for group in range(tier - 1, -1, -1):
            hosts, tpot = turn.group(group), self.tiers[group]
            room = ceil(self._need[group]) - HOST_ROOM - sum([host.fullness(tpot) for host in hosts])
            if not hosts or hosts[0].share(prompt.seq.length, prompt.left, tpot) > room:
                continue
            if (replica := _fullest(hosts, prompt, tpot, besides)) is not None:
                return replica, group
        return (pool[0], tier) if pool else None

    def _sit(self, prompt: Prompt, seat: tuple[Replica, int], turn: Turn) -> None:
        replica, group = seat
        if replica.group is None:
            self._enlist(replica, group, turn)
        length, tier = prompt.seq.length, prompt.tier
        share = replica.share(length, prompt.left, self.tiers[tier])
        replica.add(prompt.seq.id, tier, length, prompt.left)
        self._seats[prompt.seq.id] = Seat(replica, tier, share)
        self._need[tier] += share
        turn.changed(group)

    def _move(self, seq: SeqView, turn: Turn) -> None:
        """It brings KV: to its seat; without one to the decode replica with most KV free, whatever it misses."""
        id, handoff = seq.id, seq.request.handoff or Handoff("", "failed", turn.now)
        seat = self._seats.get(id)
        if seat is not None and (
            seat.tier is None or seat.replica.id == handoff.source or seat.replica not in turn.fleet
        ):
            self._leave(id)
            seat = None
        if seat is None:
            source = self._replicas.get(handoff.source)
            prompt = None if seq.best_effort else self._prompt(seq, turn)
            prompt = prompt or unpromised(seq, self.tiers, turn.fleet[0].view)
            found = self._find_seat(prompt, turn, besides=source)
            if found is None:
                groups = [(r, r.group) for r in turn.fleet if r is not source and r.group is not None and r.group >= 0]
                groups += [(r, prompt.tier) for r in turn.group(None) if r is not source]
                found = max(groups, key=lambda at: (at[0].group is not None, at[0].view.kv_free), default=None)
            if found is None:
                if turn.now > handoff.at + FORLORN:
                    turn.reject[id] = "rejected-no-replica: none is left to decode"
                return
            self._sit(prompt, found, turn)
            seat = self._seats[id]
        view = seat.replica.view
        if view.limits.blocks(seq.length) <= view.kv_free:
            self._moving[id] = turn.now
            turn.place[id], turn.why[id] = seat.replica.id, "decodes"

    # ----------------------------------------------------------------- best effort

    def _admit_best_effort(self, turn: Turn) -> None:
        """The one that waits longest joins the queue, at its head, once the share of the fleet that is best effort's
        has paid for those before it."""
        if self._credit < 0.0 or any(p.seq.best_effort for p in self._queue.values()):
            return
        for id, seq in self._parked.items():
            if id in turn.held:
                if turn.now >= seq.request.arrival + PATIENCE:
                    self._queue[id] = prompt = unpromised(seq, self.tiers, turn.fleet[0].view)
                    self._credit -= prompt.work + prompt.left * self.tiers[-1] * turn.fleet[0].share(
                        prompt.tokens, prompt.left, self.tiers[-1]
                    )
                    del self._parked[id]
                return

    def _fill_pool(self, turn: Turn) -> None:
        """Best effort goes to the pool, as far as KV goes, but for some of it that stays idle for what has an SLO."""
        pool = turn.group(None)
        busy = bool(self._queue or self._prefills or any(seat.tier is not None for seat in self._seats.values()))
        idle = [replica for replica in pool if not replica.others]
        for replica in idle[: ceil(SPARE_SHARE * len(turn.fleet)) if busy else 0]:
            pool = [other for other in pool if other is not replica]
        if not pool:
            return
        for id, seq in list(self._parked.items()):
            if id not in turn.held:
                continue
            left = remaining_output(seq)
            fits = [r for r in pool if r.view.pending + r.given <= POOL_TOKENS + len(r.forecast)]
            fits = [r for r in fits if not len(r.forecast) or r.has_seat(seq.length, left)]
            if not fits:
                return
            replica = min(fits, key=lambda r: (len(r.forecast), r.index))
            replica.add(id, None, seq.length, left)
            replica.given += seq.pending
            self._seats[id] = Seat(replica, None, 0.0)
            del self._parked[id]
            turn.place[id], turn.why[id] = replica.id, "best effort: in the pool"
        turn.changed(None)

    # ----------------------------------------------------------------- roles

    def _enlist(self, replica: Replica, group: int, turn: Turn) -> None:
        """It leaves the pool for a group; best effort that is there comes back."""
        if len(replica.forecast):
            turn.recall[replica.id] = "best_effort"
            replica.forecast = KVForecast()
            self._seats = {id: seat for id, seat in self._seats.items() if seat.replica is not replica}
        self._assign(replica, group, turn)

    def _settle(self, turn: Turn) -> None:
        """Replicas that are empty go to the pool; where no resident of its tier or a tighter one is left, a replica
        serves its tightest ones' tier; and the only one that is left does both, once no KV is on its way to it."""
        for replica in turn.fleet:
            group = replica.group
            tightest = next((tier for tier, count in enumerate(replica.residents) if count), None)
            if group is not None and replica.empty:
                self._assign(replica, None, turn)
            elif group is not None and group != PREFILL and tightest is not None and tightest > group:
                self._assign(replica, tightest, turn)
        only, coming = turn.fleet[0], [self._seats[id].replica for id in self._moving if id in self._seats]
        if len(turn.fleet) == 1 and only.role.phase != "both" and only not in coming:
            self._assign(only, None, turn)

    def _assign(self, replica: Replica, group: int | None, turn: Turn) -> None:
        turn.changed(replica.group, group)
        replica.group = group
        replica.role = POOL_ROLE
        if group == PREFILL:
            replica.role = PREFILL_ROLE
        elif group is not None:
            replica.role = Role("decode", f"{self.tiers[group]:g}", kind="tier")
        turn.roles[replica.id] = replica.role


def _fullest(replicas: Sequence[Replica], prompt: Prompt, tpot: float, besides: Replica | None) -> Replica | None:
    for replica in replicas:
        if replica is not besides and replica.has_seat(prompt.seq.length, prompt.left, tpot):
            return replica
    return None
