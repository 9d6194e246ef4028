"""PolyServe's router: which replica serves which tier, and which replica each held request goes to."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from math import inf
from typing import ClassVar

from rubato.core.events import Event, Finished, HandedOff, Lost, Placed
from rubato.core.interfaces import Dispatch, SeqView, View
from rubato.core.plan import Recall, Role
from rubato.policies.polyserve.kv_forecast import KVForecast
from rubato.policies.polyserve.replica_model import PREFILL, HeldRequest, Replica, StepTable, is_source
from rubato.policies.polyserve.scheduler import by_deadline, check_budget
from rubato.policy_kit.batch_builder import remaining_output

POOL_ROLE = Role(kind="best_effort")
PREFILL_ROLE = Role("prefill", kind="prefill")
SOON = 1e-5  # seconds from now at which the router is asked again at the earliest


@dataclass(slots=True)
class _Turn:
    """One dispatch in the making."""

    now: float
    place: dict[str, str] = field(default_factory=dict)
    demote: list[str] = field(default_factory=list)
    recall: dict[str, Recall] = field(default_factory=dict)
    roles: dict[str, Role] = field(default_factory=dict)
    why: dict[str, str] = field(default_factory=dict)


@dataclass
class Router:
    """mode: "co" for chunked prefill beside decodes, "pd" for prefill and decode replicas. tiers: TPOTs in seconds,
    ascending; a request belongs to the loosest that is no looser than its own. budget: as of the Scheduler."""

    needs: ClassVar[frozenset[str]] = frozenset({"recall"})
    mode: str = "co"
    tiers: Sequence[float] = (0.02, 0.03, 0.05, 0.1)
    budget: int = 2048
    _replicas: dict[str, Replica] = field(init=False, repr=False, default_factory=dict)
    _tables: dict[tuple[int, int], StepTable] = field(init=False, repr=False, default_factory=dict)
    _groups: list[list[Replica]] = field(init=False, repr=False, default_factory=list)  # the most loaded first
    _unsorted: set[int] = field(init=False, repr=False, default_factory=set)
    _where: dict[str, tuple[Replica, int | None]] = field(init=False, repr=False, default_factory=dict)  # and its tier
    _held_until: dict[str, float] = field(init=False, repr=False, default_factory=dict)  # when it may be in time last
    _for_pool: set[str] = field(init=False, repr=False, default_factory=set)  # best effort, waits for the pool
    _freed: dict[str, Replica] = field(init=False, repr=False, default_factory=dict)  # a request has left it

    def __post_init__(self) -> None:
        if self.mode not in ("co", "pd"):
            raise ValueError(f"mode is {self.mode!r}: give co or pd")
        self.tiers = tuple(self.tiers)
        if not self.tiers or not all(a < b for a, b in pairwise((0.0, *self.tiers, inf))):
            raise ValueError(f"tiers are {self.tiers!r}: give TPOTs in seconds, above 0 and ascending")
        check_budget(self.budget)
        self._groups = [[] for _ in range(len(self.tiers) + 1)]  # the last one, `PREFILL`, prefills

    def roles(self, replicas: Sequence[str]) -> Mapping[str, Role]:
        """All are in the pool at first."""
        if self.mode == "pd" and len(replicas) < 2:
            raise ValueError("polyserve in mode pd needs at least 2 replicas, to prefill and to decode: there is 1")
        return dict.fromkeys(replicas, POOL_ROLE)

    # ----------------------------------------------------------------- what happens

    def observe(self, events: Sequence[Event]) -> None:
        for event in events:
            if isinstance(event, Finished | HandedOff | Lost):
                self._leave(event.id)
            elif isinstance(event, Placed) and event.id not in self._where and event.replica in self._replicas:
                replica = self._replicas[event.replica]  # where the rest of its group is
                replica.add_unknown(event.id)
                self._where[event.id] = (replica, None)

    def _leave(self, id: str) -> None:
        self._held_until.pop(id, None)
        self._for_pool.discard(id)
        found = self._where.pop(id, None)
        if found is None:
            return
        replica, tier = found
        replica.drop(id, tier)
        self._freed[replica.id] = replica
        if replica.group is not None:
            self._unsorted.add(replica.group)

    # ----------------------------------------------------------------- what goes where

    def place(self, held: Sequence[SeqView], fleet: Sequence[View], now: float) -> Dispatch:
        self._update_replicas(fleet)
        turn = _Turn(now)
        held_until, for_pool = self._held_until, self._for_pool
        waiting = [seq for seq in held if seq.id in held_until]
        fresh = [seq for seq in held if seq.id not in held_until and seq.id not in for_pool]
        for seq in fresh:
            if seq.id in self._where:  # it came back, or was not taken
                self._leave(seq.id)
        freed = tuple(self._freed.values())
        for replica in freed:
            self._give_back(replica, turn)
        if freed:
            for seq in sorted(waiting, key=by_deadline):
                self._try(seq, turn, freed)
        else:
            for seq in waiting:
                if held_until[seq.id] <= now:
                    self._try(seq, turn, ())
        for seq in sorted(fresh, key=by_deadline):
            self._try(seq, turn, None)
        self._freed.clear()
        if for_pool and any(replica.group is None for replica in self._replicas.values()):
            self._fill_pool([s for s in held if s.id in for_pool], turn)
        until = min(held_until.values(), default=inf)
        return Dispatch(
            place=turn.place,
            demote=turn.demote,
            recall=turn.recall,
            wake_at=max(until, now + SOON) if until < inf else None,
            assign={id: role for id, role in turn.roles.items() if self._replicas[id].view.role != role},
            why=turn.why,
        )

    def _update_replicas(self, fleet: Sequence[View]) -> None:
        """The replicas in the fleet, and what they show now."""
        replicas = self._replicas
        if len(fleet) != len(replicas) or any(view.id not in replicas for view in fleet):
            here = {view.id for view in fleet}
            for id in [id for id in replicas if id not in here]:
                gone = replicas.pop(id)
                self._move(gone, None)
                self._freed.pop(id, None)
                self._forget_residents(gone)
            for index, view in enumerate(fleet):
                if self.mode == "pd" and "kv_transfer" not in view.supports:
                    raise ValueError(f"polyserve in mode pd moves KV, and replica {view.id!r} cannot: use mode co")
                if view.id not in replicas:
                    replicas[view.id] = self._freed[view.id] = Replica(view, index, len(self.tiers), self._table(view))
        for view in fleet:
            replica = replicas[view.id]
            replica.view = view
            replica.added = 0

    def _table(self, view: View) -> StepTable:
        """One for all replicas with the same latency model: a table takes a thousand questions to fill."""
        most = view.limits.max_num_batched_tokens
        table = StepTable(view.latency, most, self.budget if self.mode == "pd" else most)
        return self._tables.setdefault((id(view.latency), most), table)

    def _try(self, seq: SeqView, turn: _Turn, among: Sequence[Replica] | None) -> None:
        """Place it, hold it while it could be in time, or leave it to the pool. among: the replicas that have changed
        since it was tried before; None: it was not."""
        self._held_until.pop(seq.id, None)
        request = self._request(seq)
        if request is None:
            self._for_pool.add(seq.id)
        elif not self._placed(request, turn, among):
            until = self._until(request)
            if until > turn.now:
                self._held_until[seq.id] = until
            elif not request.moves or until == -inf:
                turn.demote.append(seq.id)
                self._for_pool.add(seq.id)
            else:  # too late, and it holds KV somewhere: it goes wherever there is room
                request.late = True
                if not self._placed(request, turn, None):
                    self._held_until[seq.id] = inf

    def _request(self, seq: SeqView) -> HeldRequest | None:
        """None for best effort."""
        tpot = seq.request.stages[seq.stage].slo.tpot
        due = seq.due
        if seq.best_effort or (due == inf and tpot is None):
            return None
        tier = len(self.tiers) - 1 if tpot is None else max(0, bisect_right(self.tiers, tpot * (1.0 + 1e-9)) - 1)
        moves = seq.cached > 0 and self.mode == "pd"
        return HeldRequest(seq, tier, due, seq.pending, seq.length, remaining_output(seq), moves)

    def _until(self, request: HeldRequest) -> float:
        """Until when a replica with nothing else to do could have its next token in time; -inf if its TPOT, or its KV,
        is too much for one."""
        replica = next(iter(self._replicas.values()))
        steps = replica.steps
        if request.most > replica.capacity or steps.decodes(1, request.most) > self.tiers[request.tier]:
            return -inf
        return request.due - (steps.decodes(1, request.length) if request.moves else steps.alone(request.pending))

    def _placed(self, request: HeldRequest, turn: _Turn, among: Sequence[Replica] | None) -> bool:
        """The order of attempts: own tier, tighter ones, a draining replica, the pool."""
        prefill = self.mode == "pd" and not request.moves
        own = PREFILL if prefill else request.tier
        for group in (PREFILL,) if prefill else range(own, -1, -1):
            for replica in self._loaded(group, among):
                if (when := self._fits(replica, group, request, turn.now)) is not None:
                    rule = "own tier" if group == own else f"promoted from {_ms(self.tiers[own])}"
                    self._take(replica, request, turn, "prefill" if prefill else rule, when)
                    return True
        for replica in self._claimable(request.seq, own):
            pooled = replica.group is None
            if (when := self._fits(replica, own, request, turn.now, alone=pooled)) is not None:
                self._enlist(replica, own, turn)
                self._take(replica, request, turn, "scaled up" if pooled else "claimed", when)
                return True
        return False

    def _fits(
        self, replica: Replica, group: int, request: HeldRequest, now: float, alone: bool = False
    ) -> float | None:
        """When its next token would be out there; None if it does not fit. alone: all that are there leave."""
        if group == PREFILL:
            return replica.first_token_at(request, now)
        return replica.next_token_at(request, self.tiers[group], now, alone)

    def _loaded(self, group: int, among: Sequence[Replica] | None) -> Sequence[Replica]:
        """The replicas of a group (of these, if given) that admit, the most loaded first; ties by lowest index."""
        if among is not None and all(replica.group != group for replica in among):
            return ()
        replicas = self._groups[group]
        if group in self._unsorted:
            for replica in replicas:
                replica.weigh()
            replicas.sort(key=lambda r: (-r.load, r.index))
            self._unsorted.discard(group)
        return [r for r in replicas if not r.draining and (among is None or r in among)]

    def _claimable(self, seq: SeqView, group: int) -> Sequence[Replica]:
        """Draining replicas whose tightest requests are of this tier, then the one of the pool with the least to do."""
        draining = [r for r in self._replicas.values() if r.draining] if group != PREFILL else []
        found = [r for r in draining if r.residents[group] and not any(r.residents[:group])]
        if (pooled := self._idlest(seq)) is not None:
            found.append(pooled)
        return found

    def _idlest(self, seq: SeqView) -> Replica | None:
        """The replica of the pool with the least to do that can take what this one brings; ties by lowest index."""
        pool = [r for r in self._replicas.values() if r.group is None and not is_source(r, seq)]
        return min(pool, key=lambda r: (len(r.forecast), r.index), default=None)

    def _take(self, replica: Replica, request: HeldRequest, turn: _Turn, rule: str, when: float) -> None:
        id, group = request.seq.id, replica.group
        assert group is not None
        replica.add(request)
        self._where[id] = (replica, None if group == PREFILL else request.tier)
        self._unsorted.add(group)
        turn.place[id] = replica.id
        late = ", though late" if request.late else ""
        name = "prefill" if group == PREFILL else _ms(self.tiers[group])
        turn.why[id] = (
            f"{rule}: {replica.id} ({name}), next token in "
            f"{1e3 * (when - turn.now):.0f} of {1e3 * (request.due - turn.now):.0f} ms{late}"
        )

    def _fill_pool(self, parked: Sequence[SeqView], turn: _Turn) -> None:
        """Best effort goes to the pool, as far as its KV goes."""
        for seq in parked:
            replica = self._idlest(seq)
            if replica is None:
                continue
            step, left = replica.renew(turn.now), remaining_output(seq)
            limits, count = replica.view.limits, len(replica.forecast)
            too_much = count and replica.forecast.peak_with(seq.length, left, step) > replica.capacity
            if count >= limits.max_num_seqs or too_much or limits.blocks(seq.cached) > replica.view.kv_free:
                return
            replica.forecast.add(seq.id, seq.length, left, step)
            self._where[seq.id] = (replica, None)
            self._for_pool.discard(seq.id)
            turn.place[seq.id] = replica.id
            turn.why[seq.id] = f"best effort: {replica.id} of the pool"

    # ----------------------------------------------------------------- roles

    def _enlist(self, replica: Replica, group: int, turn: _Turn) -> None:
        """It serves a group from now on; what it did for the pool comes back."""
        if replica.group is None and not replica.empty:
            turn.recall[replica.id] = "best_effort"
            replica.forecast = KVForecast()
            self._forget_residents(replica)
        self._move(replica, group)
        turn.roles[replica.id] = self._role(group)

    def _give_back(self, replica: Replica, turn: _Turn) -> None:
        """To the pool when it is empty; to the draining ones when only requests of looser tiers are left."""
        group = replica.group
        if group is None:
            return
        if replica.empty:
            self._move(replica, None)
            turn.roles[replica.id] = POOL_ROLE
        elif group != PREFILL and not replica.residents[group] and not replica.draining:
            replica.draining = True
            turn.roles[replica.id] = replace(self._role(group), kind="pending")

    def _forget_residents(self, replica: Replica) -> None:
        """Requests that were there are placed nowhere."""
        self._where = {id: at for id, at in self._where.items() if at[0] is not replica}

    def _role(self, group: int) -> Role:
        if group == PREFILL:
            return PREFILL_ROLE
        return Role("decode" if self.mode == "pd" else "both", f"{self.tiers[group]:g}", kind="tier")

    def _move(self, replica: Replica, group: int | None) -> None:
        if replica.group is not None:
            self._groups[replica.group].remove(replica)
        replica.group, replica.draining = group, False
        if group is not None:
            self._groups[group].append(replica)
            self._unsorted.add(group)


def _ms(tpot: float) -> str:
    return f"{1e3 * tpot:g} ms"
