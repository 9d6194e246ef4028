"""Ascendra: low-priority replicas fill their batches, high-priority ones take prompts that would be late there.

For two replicas or more, prompts of unlike lengths with a TTFT, and a TPOT that a step with a whole prompt keeps.
docs/policies/ascendra.md has the rest.

Reproduced: replicas are low-priority (LP) or high-priority (HP) and form groups. An LP runs all decodes and fills the
batch with whole prompts, the one of the highest value first (Algorithm 1), and hands on to its group's HP what has not
begun and would be late after that batch (§5.3). An HP runs prompts before decodes, first come first served, and issues
a ticket when none waits, which brings it the next request that comes (§6.1). Its batch grows with the free KV (§6.2).

The paper leaves open, and ours is:
- when to offload (`_prompts_to_offload`), and Algorithm 1's compute budget (`_until_late`);
- that the controller gives an offloaded prompt to an HP only where it can still be in time
  (`Router._find_high_priority`), and one by ticket only while the HP can stall its decodes (`_can_stall`);
- that hopeless prompts go last (§8.3 says what that gains, not how);
- that a prompt longer than a batch goes in chunks, with no other prompt beside it, and that where nothing runs the
  first prompt starts whatever it lacks;
- that of equal values the later arrival goes first, as its Fig. 1 needs; how many tokens an HP step has.

The latency model, which the paper fits while it serves, is the replica's.
"""

from __future__ import annotations

import pkgutil
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from numbers import Real
from typing import Any, ClassVar, TypeVar, cast

from rubato.core.did_you_mean import nearest
from rubato.core.events import Event, Finished, HandedOff, Lost, Placed, Started
from rubato.core.infeasible import prefill_time
from rubato.core.interfaces import Dispatch, SeqView, View, nothing_sent
from rubato.core.plan import Plan, Role, Shape
from rubato.core.request import SATURATED, HandoffReason
from rubato.policy_kit.batch_builder import (
    BatchBuilder,
    blocks_at_end,
    decodes_or_prefills,
    resume_prefills,
    run_all,
    unreserved_blocks,
)
from rubato.policy_kit.stateless import Stateless

SOURCE = "Ascendra (2025): dynamic request prioritization on low- and high-priority instances"

LP, HP = "lp", "hp"
SPARE_KV_SHARE = 0.1  # share of all KV: an elastic HP starts prompts while more than that is free and not reserved

Value = Callable[[SeqView, View], float]
T = TypeVar("T")


# --------------------------------------------------------------------------- values: the highest goes first


def deadline(seq: SeqView) -> float:
    """Returns when the first token of its stage is due, inf without a TTFT."""
    ttft = seq.slo.ttft
    return inf if ttft is None else seq.stage_start + ttft


def edf(seq: SeqView, view: View) -> float:
    """Prefers the request whose first token is due first."""
    return -deadline(seq)


def sjf(seq: SeqView, view: View) -> float:
    """Prefers the shortest prompt."""
    return -float(seq.pending)


def ljf(seq: SeqView, view: View) -> float:
    """Prefers the longest prompt."""
    return float(seq.pending)


def fcfs(seq: SeqView, view: View) -> float:
    """Serves first come, first served; of those that came together, the first in the queue."""
    return -seq.request.arrival


VALUES: Mapping[str, Value] = {f.__name__: f for f in (edf, sjf, ljf, fcfs)}


def value_function(name: str) -> Value:
    """Returns one of `VALUES`, or your own function by `package.module:function`. Raises ValueError."""
    if name in VALUES:
        return VALUES[name]
    if "." not in name and ":" not in name:
        raise ValueError(
            f"value {name!r} is no value function{nearest(name, VALUES)}; for one of your own give "
            "package.module:function"
        )
    try:
        function = pkgutil.resolve_name(name)
    except Exception as error:  # whatever its module may raise
        raise ValueError(f"value {name!r} cannot be loaded: {type(error).__name__}: {error}") from error
    if not callable(function):
        raise ValueError(f"value {name!r} is no function")
    return cast(Value, function)


# --------------------------------------------------------------------------- one replica


@dataclass
class Scheduler(Stateless):
    """Plans the steps of an LP or an HP.

    Args:
        value (edf, sjf, ljf, fcfs): which prompt an LP starts first: the nearest deadline, the shortest, the longest,
            the first to arrive; or your own `package.module:function` of a sequence and the view, the highest number
            first
        theta ([0, 1]): share of a full step that an offloaded prompt is expected to wait at the HP; the larger, the
            sooner it is offloaded
        hp_tokens ([1, inf)): tokens of an HP's prefill step; with longer steps the next arrival waits longer
        batch_size ([1, inf)): requests that an LP runs at once, and an HP that is not elastic (§5.4, §6.2)
        elastic (true, false): an HP starts prompts while more than 10 % of its KV is free beyond what running requests
            will need; false is while it runs fewer than `batch_size`
        drop (true, false): refuse (429) a request that waits beyond its TTFT and has had nothing
    """

    needs = frozenset({"chunked", "preempt", "mixed", "handoff"})
    value: str = "edf"
    theta: float = 0.5
    hp_tokens: int = 2048
    batch_size: int = 128
    elastic: bool = True
    drop: bool = False
    _value: Value = field(init=False, repr=False)

    def __post_init__(self) -> None:
        if not 0.0 <= self.theta <= 1.0:
            raise ValueError(f"theta {self.theta}: give a share in [0, 1]")
        if self.hp_tokens < 1 or self.batch_size < 1:
            raise ValueError(f"hp_tokens {self.hp_tokens}, batch_size {self.batch_size}: give 1 or more of each")
        self._value = value_function(self.value)

    def plan(self, view: View) -> Plan:
        """Plans a step; a replica without a role, as under another router, is an LP that offloads nothing."""
        drop = {s.id: SATURATED for s in view.waiting if self.drop and _too_late(s, view.now)}
        waiting = [s for s in view.waiting if s.id not in drop]
        if view.role.kind == HP:
            return self._high_priority(view, waiting).plan(drop=drop)
        builder = self._low_priority(view, waiting)
        not_begun = [s for s in waiting if s.id not in builder.work] if view.role.kind == LP else []
        return builder.plan(drop=drop, handoff=self._prompts_to_offload(view, not_begun, builder.shape))

    # ----------------------------------------------------------------- low priority

    def _low_priority(self, view: View, waiting: Sequence[SeqView]) -> BatchBuilder:
        """Runs Algorithm 1: all decodes, then whole prompts by falling value, strictly within what is left of the
        batch, its seconds and KV; it stops at the first prompt that does not fit."""
        builder = run_all(view)
        if builder.preempted:  # one that starts now would take the KV just freed
            return builder
        is_only_prompt = not any(s.id in builder.work for s in view.prefilling)
        is_idle = not view.running
        places = _places(view, self.batch_size)
        seconds = _until_late(view) if waiting else 0.0
        for seq in self._by_value(view, waiting):
            tokens = min(seq.pending, builder.tokens_left)
            # With what the step has already: a step of its own would count the fixed part twice.
            step = view.latency.step_time(builder.shape.plus(tokens, seq.cached)) if tokens else inf
            step += _seconds_alone(seq, view, tokens) if tokens < seq.pending else 0.0
            has_room = seconds > step and builder.kv_left > view.limits.blocks(seq.length) - seq.blocks
            fits = has_room and builder.tokens_left > seq.pending
            if not fits and is_only_prompt and tokens:  # may be longer than the batch; if nothing runs, than anything
                fits = is_idle or has_room
            if not fits or not _can_start(builder, seq, places):
                break
            builder.add(seq, tokens)
            places -= 1
            if tokens < seq.pending:
                break
            if seq.first_token_at is None and not _hopeless(seq, view):  # what joins it must not make it late
                seconds = min(seconds, deadline(seq) - view.now)
            is_only_prompt = is_idle = False
        return builder

    def _by_value(self, view: View, waiting: Sequence[SeqView]) -> list[SeqView]:
        """Sorts prompts by falling value; the hopeless come after all others, as a step spent on them makes others late
        (§8.3), and best effort last. Of equal values the later arrival goes first; requests without a deadline, and all
        under `fcfs`, go in order of the queue."""
        is_fcfs = self._value is fcfs
        keyed: list[tuple[tuple[bool, bool, Real, int], SeqView]] = []
        for at, seq in enumerate(waiting):
            value = self._value(seq, view)
            if not isinstance(value, Real) or value != value:
                said = f"value {self.value!r} of request {seq.id!r} is {value!r}"
                raise ValueError(f"{said}: return a number, the highest first")
            turn = at if is_fcfs or value == -inf or seq.best_effort else -at
            keyed.append(((seq.best_effort, _hopeless(seq, view), -value, turn), seq))
        keyed.sort(key=lambda one: one[0])
        return [seq for _, seq in keyed]

    def _prompts_to_offload(self, view: View, not_begun: Sequence[SeqView], batch: Shape) -> dict[str, HandoffReason]:
        """Returns the prompts to hand to an HP: those that would be late if they waited for this batch and then, at an
        HP, for the share theta of one of the largest batches there. A prompt that cannot be in time anywhere, or was
        offloaded before, stays."""
        if "handoff" not in view.supports:
            return {}
        latency, chunk = view.latency, min(self.hp_tokens, view.limits.max_num_batched_tokens)
        end = view.now + (latency.step_time(batch) if batch.seqs else 0.0)
        queue = self.theta * latency.step_time(Shape.prefill(chunk))
        offloaded: dict[str, HandoffReason] = {}
        for seq in not_begun:
            due = deadline(seq)
            before = seq.request.handoff
            if due == inf or due <= view.now or seq.best_effort or seq.first_token_at is not None:
                continue
            if before is not None and before.reason == "offloaded":
                continue
            own = prefill_time(latency, seq.pending, seq.cached, chunk)
            if due - end < own + queue and view.now + own <= due:
                offloaded[seq.id] = "offloaded"
        return offloaded

    # ----------------------------------------------------------------- high priority

    def _high_priority(self, view: View, waiting: Sequence[SeqView]) -> BatchBuilder:
        """Plans prompts alone while any can run, else decodes."""
        builder = BatchBuilder(view, self.hp_tokens)
        begun = resume_prefills(builder)
        if all(s.id in builder.work and builder.work[s.id].tokens == s.pending for s in begun):
            self._start_prompts(builder, view, sorted(waiting, key=lambda s: s.best_effort))
        return builder if builder.work else decodes_or_prefills(view)

    def _start_prompts(self, builder: BatchBuilder, view: View, waiting: Sequence[SeqView]) -> None:
        """Starts whole prompts in queue order; one longer than a step runs alone, in chunks."""
        places = _places(view, view.limits.max_num_seqs if self.elastic else self.batch_size)
        free = unreserved_blocks(view) if self.elastic and waiting else 0
        is_idle = not view.running
        for seq in waiting:
            is_short_of_kv = self.elastic and free <= SPARE_KV_SHARE * view.kv_total
            is_whole = seq.pending <= builder.tokens_left
            may_start = (is_idle or not is_short_of_kv) and (is_whole or not builder.work)
            if not may_start or not _can_start(builder, seq, places):
                return
            tokens = min(seq.pending, builder.tokens_left)
            builder.add(seq, tokens)
            if not is_whole:
                return
            free -= blocks_at_end(seq, view.limits.block_size)
            places -= 1
            is_idle = False


def _seconds_alone(seq: SeqView, view: View, begun: int = 0) -> float:
    """Returns the seconds of its prompt on an idle replica, after the `begun` tokens that a step runs already."""
    cached = seq.cached + begun
    return prefill_time(view.latency, seq.pending - begun, cached, view.limits.max_num_batched_tokens)


def _can_stall(hp: View, seconds: float, max_running: int) -> bool:
    """Returns whether an HP may take a prompt of `seconds` that need not go there, while its decodes stand still: only
    if it runs no more requests than the idlest LP, and none of its decodes is late by its mean TBT after that."""
    return len(hp.running) <= max_running and min(map(_due_by_mean, hp.running), default=inf) - hp.now > seconds


def _lacks_kv(hp: View) -> bool:
    """Returns whether an elastic HP lacks the KV to start a prompt now (§6.2)."""
    return bool(hp.running) and unreserved_blocks(hp) <= SPARE_KV_SHARE * hp.kv_total


def _hopeless(seq: SeqView, view: View) -> bool:
    """Returns whether its first token would be late even if its prompt started alone now."""
    if seq.first_token_at is not None:
        return False
    due = deadline(seq)
    return due != inf and (due <= view.now or view.now + _seconds_alone(seq, view) > due)


def _until_late(view: View) -> float:
    """Returns Algorithm 1's compute budget C: the seconds that the step may take before a running request's token is
    late, by its deadline or by the mean TBT since its first token, by which the paper judges. Requests that are late
    already do not count: with a TPOT shorter than any step no prompt would start."""
    dues = view.dues
    soonest = float(dues[dues >= view.now].min(initial=inf))
    return min([soonest, *[due for due in map(_due_by_mean, view.running) if due >= view.now]]) - view.now


def _due_by_mean(seq: SeqView) -> float:
    """Returns when its next token is due for a mean TBT within its TPOT; inf before its first token or without a
    TPOT."""
    tpot = seq.slo.tpot
    return inf if tpot is None or seq.first_token_at is None else seq.first_token_at + tpot * seq.output


def _places(view: View, most: int) -> int:
    """Returns how many more requests may run."""
    return min(most, view.limits.max_num_seqs) - len(view.running)


def _can_start(builder: BatchBuilder, seq: SeqView, places: int) -> bool:
    """Returns whether the batch has a place for it, and the replica the KV for its whole prompt."""
    return min(builder.tokens_left, builder.seqs_left, places) > 0 and not builder.lacks(seq, seq.pending)


def _too_late(seq: SeqView, now: float) -> bool:
    """Returns whether it waits beyond its TTFT and nothing of it has been sent."""
    return now > deadline(seq) and nothing_sent(seq) and not seq.best_effort


# --------------------------------------------------------------------------- the fleet


@dataclass
class Router:
    """Places requests in groups of LPs and HPs, and offloaded ones at an HP.

    Args:
        groups (one LP and one HP or more, as 1L1H): LPs and HPs of a group; of replicas left over, two or more form a
            smaller group, a single one joins the last as an LP
    """

    needs: ClassVar[frozenset[str]] = frozenset({"step_times"})
    groups: str = "2L1H"
    _sizes: tuple[int, int] = field(init=False, repr=False)  # LPs and HPs of a group
    _home: dict[str, str] = field(default_factory=dict, init=False, repr=False)  # replica -> group, also of lost ones
    _groups_begun: set[str] = field(default_factory=set, init=False, repr=False)  # an LP of it has had a request
    # request -> the HP where it is placed, but not seen yet, and the seconds of the prompt
    _on_way: dict[str, tuple[str, float]] = field(default_factory=dict, init=False, repr=False)
    _turns: Counter[Any] = field(default_factory=Counter, init=False, repr=False)  # how often each kind was chosen

    def __post_init__(self) -> None:
        self._sizes = _parse_groups(self.groups)

    def roles(self, replicas: Sequence[str]) -> Mapping[str, Role]:
        """Gives the roles of LPs and HPs, LPs first in each group."""
        low, high = self._sizes
        if len(replicas) < 2:
            raise ValueError(f"ascendra needs at least 2 replicas, one LP and one HP: there is {len(replicas)}")
        size = low + high
        whole, rest = divmod(len(replicas), size)
        groups = [(low, high)] * whole
        if rest == 1:
            groups[-1] = (low + 1, high)
        elif rest:
            hps_left = min(max(1, round(rest * high / size)), rest - 1)
            groups.append((rest - hps_left, hps_left))
        kinds = [
            Role(kind=kind, group=f"g{i}") for i, (lps, hps) in enumerate(groups) for kind in [LP] * lps + [HP] * hps
        ]
        roles = dict(zip(replicas, kinds, strict=True))
        self._home.update({id: role.group for id, role in roles.items()})
        return roles

    def observe(self, events: Sequence[Event]) -> None:
        for event in events if self._on_way else ():
            if isinstance(event, Started | Finished | HandedOff | Lost):
                self._on_way.pop(event.id, None)
            elif isinstance(event, Placed) and event.id in self._on_way:  # maybe where its prefix is cached
                self._on_way[event.id] = event.replica, self._on_way[event.id][1]

    def place(self, held: Sequence[SeqView], fleet: Sequence[View], now: float) -> Dispatch:
        low: dict[str, list[View]] = {}
        high: dict[str, list[View]] = {}
        for view in fleet:
            (high if view.role.kind == HP else low).setdefault(view.role.group, []).append(view)
        place = {}
        for seq in held:
            self._on_way.pop(seq.id, None)
            handoff, home = seq.request.handoff, None
            if handoff is not None and handoff.reason == "offloaded":
                home = self._home.get(handoff.source, "")
            if home is not None and home in high:
                chosen = self._find_high_priority(seq, high[home], home, now)
                chosen = chosen or self._place_late(seq, low.get(home, ()), high[home], home)
            else:
                chosen = self._place_new(seq, low, high)
            if chosen.role.kind == HP:
                self._on_way[seq.id] = chosen.id, _seconds_alone(seq, chosen)
            place[seq.id] = chosen.id
        return Dispatch(place)

    def _find_high_priority(self, seq: SeqView, hps: Sequence[View], home: str, now: float) -> View | None:
        """Returns the next HP in turn where its prompt can be in time after the running step and the waiting prompts,
        else None. An HP serves first come, first served, so a late prompt there makes others late."""
        due = deadline(seq)
        in_time = [hp for hp in hps if not _lacks_kv(hp) and now + self._wait(hp, now) + _seconds_alone(seq, hp) <= due]
        return self._next(in_time, (home, HP)) if in_time else None

    def _place_late(self, seq: SeqView, lps: Sequence[View], hps: Sequence[View], home: str) -> View:
        """Returns the replica for a prompt that is late at every HP: the LP that it comes from, or the next one."""
        handoff = seq.request.handoff
        for lp in lps:
            if handoff is not None and lp.id == handoff.source:
                return lp
        return self._next(lps, (home, LP)) if lps else self._next(hps, (home, HP))

    def _wait(self, hp: View, now: float) -> float:
        """Returns the seconds of prompts on an HP before one placed there now, plus the rest of the running step."""
        self._forget_arrived(hp)
        here = [s for s in hp.waiting if not s.best_effort] + [s for s in hp.prefilling if s.pending > s.in_flight]
        seconds = sum(_seconds_alone(s, hp, s.in_flight) for s in here)
        seconds += sum(prompt_seconds for replica, prompt_seconds in self._on_way.values() if replica == hp.id)
        return max(0.0, hp.busy_until - now) + seconds

    def _place_new(self, seq: SeqView, low: Mapping[str, Sequence[View]], high: Mapping[str, Sequence[View]]) -> View:
        """Returns the replica for a new request: groups in turn; in a group an HP with a ticket whose decodes can
        stall, else its LPs in turn."""
        group = self._next(sorted({*low, *high}), "group")
        if group not in low:
            return self._next(high[group], (group, HP))
        if group in self._groups_begun:  # an HP's first ticket comes after the first request of an LP
            max_running = min(len(lp.running) for lp in low[group])
            for view in high.get(group, ()):
                if self._has_ticket(view) and _can_stall(view, _seconds_alone(seq, view), max_running):
                    return view
        self._groups_begun.add(group)
        return self._next(low[group], (group, LP))

    def _next(self, among: Sequence[T], turn: object) -> T:
        """Returns the next of these in turn; each `turn` is counted on its own."""
        self._turns[turn] += 1
        return among[(self._turns[turn] - 1) % len(among)]

    def _has_ticket(self, hp: View) -> bool:
        """Returns whether an HP issues a ticket: no prompt waits there or is on its way, so there is at most one. A
        full HP issues none, since a request with a ticket must wait for at most one batch (§6.1)."""
        if hp.waiting or any(s.pending > s.in_flight for s in hp.prefilling):
            return False
        if _lacks_kv(hp):
            return False
        self._forget_arrived(hp)
        return all(replica != hp.id for replica, _ in self._on_way.values())

    def _forget_arrived(self, hp: View) -> None:
        """Forgets the requests on their way to an HP that its view shows."""
        if on_way := [id for id, (replica, _) in self._on_way.items() if replica == hp.id]:
            here = hp.known
            for id in on_way:
                if id in here:
                    del self._on_way[id]


def _parse_groups(groups: str) -> tuple[int, int]:
    """Parses "2L1H" into the LPs and HPs of a group. Raises ValueError."""
    low, _, high = groups.upper().removesuffix("H").partition("L")
    if not (groups.upper().endswith("H") and low.isdecimal() and high.isdecimal() and int(low) and int(high)):
        raise ValueError(f"groups is {groups!r}: give how many LPs and HPs work together, 1 or more of each, as 2L1H")
    return int(low), int(high)
