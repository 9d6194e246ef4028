"""PolyServe: replicas binned by TPOT, each request to the fullest one that still keeps its promise.

Each TPOT tier has replicas of its own, taken from a pool that serves best effort, and given back when empty. A request
goes to the most loaded replica of its tier that can keep its SLO; if there is none, to one of a tighter tier, the
nearest first (lazy promotion); then its tier gets a replica from the pool; else it is held. Never a looser tier's.
A replica that only guests of looser tiers are left on admits none: their tier may claim it, else it goes back to the
pool when empty. All queues are the router's.

Two modes. co: a replica runs its tier's prompts in chunks beside decodes, so that a step keeps within the TPOT. pd:
prompts go to prefill replicas shared by all tiers, nearest deadline first, and their KV to a decode replica.

Ours where the paper is silent: the order among tighter tiers, that a pending replica admits none, that a request which
could not be in time even alone is served as best effort, and that a replica without decodes takes a prompt whole.
"""

from __future__ import annotations

from bisect import bisect_right, insort
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from math import ceil, inf
from typing import ClassVar, NamedTuple

from rubato.core.events import Event, Finished, HandedOff, Lost, Placed
from rubato.core.interfaces import Dispatch, LatencyModel, SeqView, View
from rubato.core.plan import Plan, Recall, Role, Shape
from rubato.core.request import HandoffReason
from rubato.policy_kit.batch_builder import BatchBuilder, decode_first, decodes_only, remaining
from rubato.policy_kit.kv_forecast import KVForecast

SOURCE = "PolyServe, §4"

POOL = Role(kind="best_effort")
PREFILL = Role("prefill", kind="prefill")
SOON = 1e-5  # seconds from now at which the router is asked again at the earliest
KV_GRAIN, PROMPT_GRAIN = 4096, 256  # tokens up to which step times are remembered alike
PROBE = Shape(32, 32, 32_000)


def _tpot_of(role: Role) -> float:
    """Of the tier it serves, in seconds; inf for none."""
    return float(role.tier) if role.tier else inf


@dataclass
class Scheduler:
    """budget: tokens of a prefill batch, and of a co-located one that serves best effort (§4.7)."""

    needs: ClassVar[frozenset[str]] = frozenset({"chunked", "preempt", "mixed"})
    uses: ClassVar[frozenset[str]] = frozenset({"handoff", "kv_transfer"})
    budget: int = 2048

    def __post_init__(self) -> None:
        _check_budget(self.budget)

    def observe(self, events: Sequence[Event]) -> None:
        pass

    def plan(self, view: View) -> Plan:
        if view.role.phase == "prefill":
            return self._prefill(view)
        if view.role.phase == "decode":
            return decodes_only(view)
        return self._mixed(view)

    def _prefill(self, view: View) -> Plan:
        """Nearest deadline first. Dynamic chunking: a prompt with less than two budgets left gets all of it; others
        only what is left of one."""
        builder = BatchBuilder(view)
        ready: dict[str, HandoffReason] = {s.id: "prefilled" for s in view.running if s.pending == 1}
        left = self.budget
        begun = view.prefilling
        for seq in (*begun, *sorted(view.waiting, key=_nearest)):
            most = min(seq.pending, left) if builder.work else _dynamic(seq.pending, self.budget)
            tokens = min(most, builder.room(seq))
            if tokens < 1 or (seq.id not in builder.running and builder.lacks(seq, seq.pending)):
                break
            builder.add(seq, tokens)
            left -= tokens
        return builder.plan(handoff=ready)

    def _mixed(self, view: View) -> Plan:
        """Every decode, and a chunk that keeps the step within the TPOT until the prompt is through, as it is then
        (continuous chunked-prefill prediction): so the chunk stays the same for all of it."""
        tpot = _tpot_of(view.role)
        decodes = view.decodes
        first = next(iter(view.prefilling), None) or next(iter(view.waiting), None)
        budget = self.budget if tpot == inf else view.limits.max_num_batched_tokens
        if first is not None and decodes.seqs and tpot < inf:
            budget = decodes.seqs + _chunk(view.latency, tpot, decodes, first, budget - decodes.seqs)
        builder = decode_first(view, budget)
        return builder.plan(steady=builder.steady())


def _dynamic(left: int, budget: int) -> int:
    """Tokens of a prompt's next chunk: all of them, where less than two budgets are left."""
    return left if left < 2 * budget else budget


def _nearest(seq: SeqView) -> tuple[float, float]:
    """Best effort last; ties in order of arrival."""
    return (inf if seq.best_effort else seq.due, seq.request.arrival)


def _chunk(latency: LatencyModel, tpot: float, decodes: Shape, seq: SeqView, most: int) -> int:
    """Tokens of prompts that each step can take until this one is through, while each decode grows by a token a step;
    at least 1, or it would never end."""
    chunk = max(1, latency.largest_chunk(tpot, decodes, seq.cached, most))
    rounds = ceil(seq.pending / chunk)
    if rounds == 1:
        return chunk
    grown = decodes._replace(kv=decodes.kv + decodes.seqs * rounds)
    return max(1, latency.largest_chunk(tpot, grown, seq.length - chunk, most))


# --------------------------------------------------------------------------- what the router knows


class _StepTable:
    """Step times by (batch size, KV) as the paper profiles them: asked of the latency model once each, and again when
    it has changed its mind."""

    def __init__(self, latency: LatencyModel, most: int, budget: int) -> None:
        self.latency = latency
        self._most = most
        self._budget = budget
        self._decodes: dict[tuple[int, int], float] = {}
        self._chunks: dict[tuple[float, int, int, int], tuple[int, float]] = {}
        self._alone: dict[int, float] = {}
        self._probed = (-inf, 0.0)  # when, and what a step of some size took

    def renew(self, now: float) -> None:
        """Forget all that the model says otherwise by now; looked at once a second."""
        when, before = self._probed
        if now - when < 1.0:
            return
        probe = self.latency.step_time(PROBE)
        if abs(probe - before) > 0.02 * before:
            for table in (self._decodes, self._chunks, self._alone):
                table.clear()
        else:
            probe = before
        self._probed = (now, probe)

    def decodes(self, seqs: int, kv: int) -> float:
        """Seconds of so many decodes with `kv` tokens together."""
        grains = -(-kv // KV_GRAIN)
        seconds = self._decodes.get((seqs, grains))
        if seconds is None:
            seconds = self.latency.step_time(Shape(seqs, seqs, grains * KV_GRAIN))
            self._decodes[seqs, grains] = seconds
        return seconds

    def chunk(self, tpot: float, seqs: int, kv: int, prompt: int) -> tuple[int, float]:
        """The tokens of a prompt that a step of `tpot` has room for beside so many decodes, up to its end; and the
        seconds of that step. (0, 0.0) for none."""
        key = (tpot, seqs, -(-kv // KV_GRAIN), -(-prompt // PROMPT_GRAIN))
        found = self._chunks.get(key)
        if found is None:
            base, length = Shape(seqs, seqs, key[2] * KV_GRAIN), key[3] * PROMPT_GRAIN
            tokens = self.latency.largest_chunk(tpot, base, length, self._most - seqs)
            if tokens < length:  # the last of them has this much before it
                tokens = self.latency.largest_chunk(tpot, base, length - tokens, self._most - seqs)
            found = (tokens, self.latency.step_time(base.plus(tokens, max(0, length - tokens)))) if tokens else (0, 0.0)
            self._chunks[key] = found
        return found

    def alone(self, prompt: int) -> float:
        """Seconds of a prompt with nothing beside it, in dynamic chunks."""
        grains = -(-prompt // PROMPT_GRAIN)
        seconds = self._alone.get(grains)
        if seconds is None:
            seconds, done, end = 0.0, 0, grains * PROMPT_GRAIN
            while done < end:
                chunk = min(_dynamic(end - done, self._budget), self._most)
                seconds += self.latency.step_time(Shape().plus(chunk, done))
                done += chunk
            self._alone[grains] = seconds
        return seconds


class _Job(NamedTuple):
    """A prompt at a prefill replica."""

    due: float
    id: str
    tokens: int
    seconds: float


class _Replica:
    """group: the tier it serves, `len(tiers)` if it prefills, None in the pool. draining: it has guests of looser tiers
    only, and admits none. guests: its residents by tier. jobs: prompts, nearest deadline first."""

    def __init__(self, view: View, index: int, tiers: int, steps: _StepTable) -> None:
        self.id = view.id
        self.index = index
        self.view = view
        self.group: int | None = None
        self.draining = False
        self.guests = [0] * tiers
        self.forecast = KVForecast()
        self.jobs: list[_Job] = []
        self.queued = 0.0  # seconds of `jobs`
        self.uncounted: list[str] = []  # placed here by others
        self.added = 0  # tokens that this dispatch places here
        self.capacity = view.kv_total * view.limits.block_size
        self.steps = steps
        self.load = 0.0

    @property
    def empty(self) -> bool:
        return not (len(self.forecast) or self.jobs or self.uncounted)

    def look(self, now: float) -> int:
        """The replica's step by now. Residents that have outlived what was predicted are predicted again."""
        self.steps.renew(now)
        step = self.view.steps
        late = self.forecast.overdue(step)
        if late or self.uncounted:
            known = self.view.known
            for id in (*late, *self.uncounted):
                seq = known.get(id)
                self.forecast.add(id, seq.length if seq else 1, remaining(seq) if seq else 1.0, step)
            self.uncounted.clear()
        return step

    def weigh(self) -> None:
        """Its predicted iteration time, at its fullest; for one that prefills, what is queued."""
        count = len(self.forecast)
        self.load = self.steps.decodes(count, self.forecast.peak(self.view.steps)) if count else self.queued

    def wait(self, now: float) -> float:
        """Seconds until the step in flight ends."""
        return max(0.0, self.view.busy_until - now)

    def backlog(self) -> int:
        """Tokens of prompts that no step has taken up, those placed just now included."""
        view = self.view
        flight = view.in_flight
        return max(0, view.pending - view.decodes.seqs - (flight.tokens - flight.seqs + flight.chunks)) + self.added


@dataclass(slots=True)
class _Want:
    """What a held request asks for. tier: its own. due: of its next token. moves: it brings its KV. late: it cannot be
    in time any more, and is served as if its next token had no deadline."""

    seq: SeqView
    tier: int
    due: float
    pending: int
    length: int
    remaining: float
    moves: bool
    late: bool = False

    @property
    def most(self) -> int:
        """Tokens of it at its predicted end."""
        return int(self.length + self.remaining)


@dataclass(slots=True)
class _Turn:
    """One dispatch in the making."""

    now: float
    place: dict[str, str] = field(default_factory=dict)
    demote: list[str] = field(default_factory=list)
    recall: dict[str, Recall] = field(default_factory=dict)
    roles: dict[str, Role] = field(default_factory=dict)
    why: dict[str, str] = field(default_factory=dict)


# --------------------------------------------------------------------------- the router


@dataclass
class Router:
    """mode: "co" for chunked prefill beside decodes, "pd" for prefill and decode replicas. tiers: TPOTs in seconds,
    ascending; a request belongs to the loosest that is no looser than its own. budget: as of the Scheduler."""

    needs: ClassVar[frozenset[str]] = frozenset({"recall"})
    mode: str = "co"
    tiers: Sequence[float] = (0.02, 0.03, 0.05, 0.1)
    budget: int = 2048
    _replicas: dict[str, _Replica] = field(init=False, repr=False, default_factory=dict)
    _tables: dict[tuple[int, int], _StepTable] = field(init=False, repr=False, default_factory=dict)
    _groups: list[list[_Replica]] = field(init=False, repr=False, default_factory=list)  # the most loaded first
    _unsorted: set[int] = field(init=False, repr=False, default_factory=set)
    _where: dict[str, tuple[_Replica, int | None]] = field(init=False, repr=False, default_factory=dict)  # and its tier
    _pending: dict[str, float] = field(init=False, repr=False, default_factory=dict)  # until when it may be in time
    _parked: set[str] = field(init=False, repr=False, default_factory=set)  # best effort, waits for the pool
    _eased: dict[str, _Replica] = field(init=False, repr=False, default_factory=dict)  # a request has left it

    def __post_init__(self) -> None:
        if self.mode not in ("co", "pd"):
            raise ValueError(f"mode is {self.mode!r}: give co or pd")
        self.tiers = tuple(self.tiers)
        if not self.tiers or not all(a < b for a, b in pairwise((0.0, *self.tiers, inf))):
            raise ValueError(f"tiers are {self.tiers!r}: give TPOTs in seconds, above 0 and ascending")
        _check_budget(self.budget)
        self._groups = [[] for _ in range(len(self.tiers) + 1)]

    def roles(self, replicas: Sequence[str]) -> Mapping[str, Role]:
        """All are in the pool at first."""
        if self.mode == "pd" and len(replicas) < 2:
            raise ValueError("polyserve in mode pd needs at least 2 replicas, to prefill and to decode: there is 1")
        return dict.fromkeys(replicas, POOL)

    # ----------------------------------------------------------------- what happens

    def observe(self, events: Sequence[Event]) -> None:
        for event in events:
            if isinstance(event, Finished | HandedOff | Lost):
                self._leave(event.id)
            elif isinstance(event, Placed) and event.id not in self._where and event.replica in self._replicas:
                replica = self._replicas[event.replica]  # where the rest of its group is
                replica.uncounted.append(event.id)
                self._where[event.id] = (replica, None)

    def _leave(self, id: str) -> None:
        self._pending.pop(id, None)
        self._parked.discard(id)
        found = self._where.pop(id, None)
        if found is None:
            return
        replica, tier = found
        replica.forecast.drop(id)
        if id in replica.uncounted:
            replica.uncounted.remove(id)
        if tier is not None:
            replica.guests[tier] -= 1
        if replica.jobs:
            replica.jobs = [job for job in replica.jobs if job.id != id]
            replica.queued = sum(job.seconds for job in replica.jobs)
        self._eased[replica.id] = replica
        if replica.group is not None:
            self._unsorted.add(replica.group)

    # ----------------------------------------------------------------- what goes where

    def place(self, held: Sequence[SeqView], fleet: Sequence[View], now: float) -> Dispatch:
        self._meet(fleet)
        turn = _Turn(now)
        pending, parked, eased = self._pending, self._parked, self._eased
        fresh, waiting = [], []
        for seq in held:
            if seq.id in pending:
                waiting.append(seq)
            elif seq.id not in parked:
                fresh.append(seq)
        for seq in fresh:
            if seq.id in self._where:  # it came back, or was not taken
                self._leave(seq.id)
        changed = tuple(eased.values())
        for replica in changed:
            self._give_back(replica, turn)
        if changed:
            for seq in sorted(waiting, key=_nearest):
                self._try(seq, turn, changed)
        else:
            for seq in waiting:
                if pending[seq.id] <= now:
                    self._try(seq, turn, ())
        for seq in sorted(fresh, key=_nearest):
            self._try(seq, turn, None)
        eased.clear()
        if parked and any(r.group is None for r in self._replicas.values()):
            self._fill_pool([s for s in held if s.id in parked], turn)
        until = min(pending.values(), default=inf)
        roles = {id: role for id, role in turn.roles.items() if self._replicas[id].view.role != role}
        return Dispatch(turn.place, {}, turn.demote, turn.recall, max(until, now + SOON) if until < inf else None,
                        roles, turn.why)  # fmt: skip

    def _meet(self, fleet: Sequence[View]) -> None:
        """The replicas in the fleet, and what they show now."""
        replicas = self._replicas
        if len(fleet) != len(replicas) or any(view.id not in replicas for view in fleet):
            here = {view.id for view in fleet}
            for id in [id for id in replicas if id not in here]:
                gone = replicas.pop(id)
                self._move(gone, None)
                self._eased.pop(id, None)
                self._forget_guests(gone)
            for index, view in enumerate(fleet):
                if self.mode == "pd" and "kv_transfer" not in view.supports:
                    raise ValueError(f"polyserve in mode pd moves KV, and replica {view.id!r} cannot: use mode co")
                if view.id not in replicas:
                    replicas[view.id] = self._eased[view.id] = _Replica(view, index, len(self.tiers), self._table(view))
        for view in fleet:
            replica = replicas[view.id]
            replica.view = view
            replica.added = 0

    def _table(self, view: View) -> _StepTable:
        """One for all replicas with the same latency model: a table takes a thousand questions to fill."""
        most = view.limits.max_num_batched_tokens
        table = _StepTable(view.latency, most, self.budget if self.mode == "pd" else most)
        return self._tables.setdefault((id(view.latency), most), table)

    def _try(self, seq: SeqView, turn: _Turn, among: Sequence[_Replica] | None) -> None:
        """Place it, hold it while it could be in time, or leave it to the pool. among: the replicas that have changed
        since it was tried before; None: it was not."""
        self._pending.pop(seq.id, None)
        want = self._want(seq)
        if want is None:
            self._parked.add(seq.id)
        elif not self._placed(want, turn, among):
            until = self._until(want)
            if until > turn.now:
                self._pending[seq.id] = until
            elif not want.moves or until == -inf:
                turn.demote.append(seq.id)
                self._parked.add(seq.id)
            else:  # too late, and it holds KV somewhere: it goes wherever there is room
                want.late = True
                if not self._placed(want, turn, None):
                    self._pending[seq.id] = inf

    def _want(self, seq: SeqView) -> _Want | None:
        """None for best effort."""
        tpot = seq.request.stages[seq.stage].slo.tpot
        due = seq.due
        if seq.best_effort or (due == inf and tpot is None):
            return None
        tier = len(self.tiers) - 1 if tpot is None else max(0, bisect_right(self.tiers, tpot * (1.0 + 1e-9)) - 1)
        moves = seq.cached > 0 and self.mode == "pd"
        return _Want(seq, tier, due, seq.pending, seq.length, remaining(seq), moves)

    def _until(self, want: _Want) -> float:
        """Until when a replica with nothing else to do could have its next token in time; -inf if its TPOT, or its KV,
        is too much for one."""
        replica = next(iter(self._replicas.values()))
        if want.most > replica.capacity or replica.steps.decodes(1, want.most) > self.tiers[want.tier]:
            return -inf
        return want.due - (replica.steps.decodes(1, want.length) if want.moves else replica.steps.alone(want.pending))

    def _placed(self, want: _Want, turn: _Turn, among: Sequence[_Replica] | None) -> bool:
        """The order of attempts: own tier, tighter ones, a draining replica, the pool."""
        prefill = self.mode == "pd" and not want.moves
        own = len(self.tiers) if prefill else want.tier
        passed: list[str] = []
        changed = None if among is None else {replica.group for replica in among}
        for group in (own,) if prefill else range(own, -1, -1):
            for replica in self._loaded(group) if changed is None or group in changed else ():
                if among is None or replica in among:
                    when = self._fits(replica, group, want, turn.now)
                    if when is not None:
                        rule = "own tier" if group == own else f"promoted from {_name(self.tiers[own])}"
                        self._take(replica, want, turn, "prefill" if prefill else rule, when, passed)
                        return True
                    passed.append(replica.id)
        for replica in self._claimable(want, own, prefill):
            when = self._fits(replica, own, want, turn.now, alone=replica.group is None)
            if when is not None:
                rule = "scaled up" if replica.group is None else "claimed"
                self._enlist(replica, own, turn)
                self._take(replica, want, turn, rule, when, passed)
                return True
            passed.append(replica.id)
        return False

    def _loaded(self, group: int) -> Sequence[_Replica]:
        """The replicas of a group that admit, the most loaded first; ties by lowest index."""
        replicas = self._groups[group]
        if group in self._unsorted:
            for replica in replicas:
                replica.weigh()
            replicas.sort(key=lambda r: (-r.load, r.index))
            self._unsorted.discard(group)
        return [r for r in replicas if not r.draining]

    def _claimable(self, want: _Want, group: int, prefill: bool) -> Sequence[_Replica]:
        """Draining replicas whose tightest guests are of this tier, then the one of the pool with the least to do."""
        replicas = self._replicas.values()
        found = [] if prefill else [r for r in replicas if r.draining and r.guests[group] and not any(r.guests[:group])]
        if (idlest := self._idlest(want.seq)) is not None:
            found.append(idlest)
        return found

    def _idlest(self, seq: SeqView) -> _Replica | None:
        """The replica of the pool with the least to do that can take what this one brings; ties by lowest index."""
        pool = [r for r in self._replicas.values() if r.group is None and not _is_source(r, seq)]
        return min(pool, key=lambda r: (len(r.forecast), r.index), default=None)

    # ----------------------------------------------------------------- whether it fits

    def _fits(self, replica: _Replica, group: int, want: _Want, now: float, alone: bool = False) -> float | None:
        """When its next token would be out; None if that is too late, or a step or the KV would come to be too much.
        alone: all that are there leave."""
        if group == len(self.tiers):
            return _fits_prefill(replica, want, now)
        step = replica.look(now)
        limits = replica.view.limits
        count = 1 if alone else len(replica.forecast) + 1
        if count > limits.max_num_seqs:
            return None
        if count > 1:
            peak = replica.forecast.peak_with(want.length, want.remaining, step)
        else:
            peak = want.most
        tpot, seconds = self.tiers[group], replica.steps.decodes(count, peak)
        if peak > replica.capacity or seconds > tpot:
            return None
        if want.moves:
            if _is_source(replica, want.seq) or limits.blocks(want.length) > replica.view.kv_free:
                return None
        elif count == 1:
            seconds = replica.steps.alone(want.pending + replica.added)
        else:
            tokens, each = replica.steps.chunk(tpot, count - 1, peak, want.pending)
            if tokens < 1:
                return None
            seconds = ceil((replica.backlog() + want.pending) / tokens) * each
        when = now + seconds
        if when <= want.due:
            when += replica.wait(now)  # the dearest to ask
        return when if when <= want.due or want.late else None

    # ----------------------------------------------------------------- roles

    def _enlist(self, replica: _Replica, group: int, turn: _Turn) -> None:
        """It serves a group from now on; what it did for the pool comes back."""
        if replica.group is None and not replica.empty:
            turn.recall[replica.id] = "best_effort"
            replica.forecast = KVForecast()
            self._forget_guests(replica)
        self._move(replica, group)
        turn.roles[replica.id] = self._role(group)

    def _forget_guests(self, replica: _Replica) -> None:
        """Requests that were there are placed nowhere."""
        self._where = {id: at for id, at in self._where.items() if at[0] is not replica}

    def _role(self, group: int) -> Role:
        if group == len(self.tiers):
            return PREFILL
        return Role("decode" if self.mode == "pd" else "both", f"{self.tiers[group]:g}", kind="tier")

    def _move(self, replica: _Replica, group: int | None) -> None:
        if replica.group is not None:
            self._groups[replica.group].remove(replica)
        replica.group, replica.draining = group, False
        if group is not None:
            self._groups[group].append(replica)
            self._unsorted.add(group)

    def _give_back(self, replica: _Replica, turn: _Turn) -> None:
        """To the pool when it is empty; to the draining ones when only guests are left."""
        if replica.group is None:
            return
        if replica.empty:
            self._move(replica, None)
            turn.roles[replica.id] = POOL
        elif replica.group < len(self.tiers) and not replica.guests[replica.group] and not replica.draining:
            replica.draining = True
            turn.roles[replica.id] = replace(self._role(replica.group), kind="pending")

    def _take(self, replica: _Replica, want: _Want, turn: _Turn, rule: str, when: float, passed: Sequence[str]) -> None:
        seq = want.seq
        turn.place[seq.id] = replica.id
        group = replica.group
        assert group is not None
        if group == len(self.tiers):
            seconds = replica.steps.alone(want.pending)
            insort(replica.jobs, _Job(want.due, seq.id, want.pending, seconds), lo=min(1, len(replica.jobs)))
            replica.queued += seconds
            self._where[seq.id] = (replica, None)
        else:
            replica.forecast.add(seq.id, want.length, want.remaining, replica.view.steps)
            replica.guests[want.tier] += 1
            self._where[seq.id] = (replica, want.tier)
        replica.added += 0 if want.moves else want.pending
        self._unsorted.add(group)
        late = ", though late" if want.late else ""
        name = _name(self.tiers[group]) if group < len(self.tiers) else "prefill"
        turn.why[seq.id] = (
            f"{rule}: {replica.id} ({name}), next token in "
            f"{1e3 * (when - turn.now):.0f} of {1e3 * (want.due - turn.now):.0f} ms{late}; passed over: "
            f"{', '.join(passed) or 'none'}"
        )

    def _fill_pool(self, parked: Sequence[SeqView], turn: _Turn) -> None:
        """Best effort goes to the pool, as far as its KV goes."""
        for seq in parked:
            replica = self._idlest(seq)
            if replica is None:
                continue
            step, left = replica.look(turn.now), remaining(seq)
            limits, count = replica.view.limits, len(replica.forecast)
            too_much = count and replica.forecast.peak_with(seq.length, left, step) > replica.capacity
            if count >= limits.max_num_seqs or too_much or limits.blocks(seq.cached) > replica.view.kv_free:
                return
            replica.forecast.add(seq.id, seq.length, left, step)
            self._where[seq.id] = (replica, None)
            self._parked.discard(seq.id)
            turn.place[seq.id] = replica.id
            turn.why[seq.id] = f"best effort: {replica.id} of the pool"


def _is_source(replica: _Replica, seq: SeqView) -> bool:
    """Whether the KV that it would bring is there, from before that replica served another group."""
    handoff = seq.request.handoff
    return handoff is not None and seq.cached > 0 and handoff.source == replica.id


def _fits_prefill(replica: _Replica, want: _Want, now: float) -> float | None:
    """When its first token would be out at a prefill replica, nearest deadline first behind the prompt that is begun;
    None if that, or another's, is late."""
    replica.steps.renew(now)
    view, jobs = replica.view, replica.jobs
    queued = sum(job.tokens for job in jobs)
    if queued + want.pending > view.kv_free * view.limits.block_size:
        return None
    at = now + replica.wait(now)
    if jobs:  # less what steps have taken up
        at -= replica.queued * max(0, queued - replica.backlog()) / queued
    own = replica.steps.alone(want.pending)
    place = bisect_right(jobs, (want.due, want.seq.id), lo=min(1, len(jobs)), key=lambda job: job[:2])
    at += sum(job.seconds for job in jobs[:place]) + own
    if at > want.due and not want.late:
        return None
    when = at
    for job in jobs[place:]:
        at += job.seconds
        if at - own <= job.due < at:
            return None
    return when


def _name(tpot: float) -> str:
    return f"{1e3 * tpot:g} ms"


def _check_budget(budget: int) -> None:
    if budget < 1:
        raise ValueError(f"budget is {budget}: give the tokens of a prefill batch, at least 1")
