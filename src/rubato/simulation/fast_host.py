"""A host that counts: one replica with its scheduler and the time its engine would take (`Host`), on a hand-set clock.

It does what `Replica`, `local_host.LocalHost` and `engines.simulated` do with the same plans, in the same order.
A plan is carried out as `RepeatedSteps`, one or more equal steps; they end where the next plan may differ: at the first
token or the end of a sequence, at the end of a prefill, when KV runs short, and when something arrives.
"""

from __future__ import annotations

import itertools
from bisect import bisect_right, insort
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from heapq import heappush
from itertools import repeat

from rubato.core.clock import COMPLETION, PLAN, HandClock
from rubato.core.events import Demoted, Event, Finished, Preempted, Promoted, Started
from rubato.core.interfaces import KV, Host, LatencyModel, LengthPredictor, Scheduler, View
from rubato.core.kv_blocks import blocks_for
from rubato.core.plan import Limits, Plan, Recall, Role
from rubato.core.plan_check import PlanError, check
from rubato.core.replica import refusal_reason
from rubato.core.request import Outcome, Request
from rubato.core.slo import StageTimes, judge
from rubato.simulation.decode_pool import DecodePool
from rubato.simulation.due_times import DueTimes
from rubato.simulation.fast_miss_cause import delays_by_cause
from rubato.simulation.fast_sequence import DECODING, PREFILLING, WAITING, FastSeq
from rubato.simulation.fast_view import FastView
from rubato.simulation.repeated_steps import ChunkShare, RepeatedSteps, StepTimes
from rubato.simulation.step_log import StepLog

NO_HANDOFF = "the fast host hands nothing off and receives nothing: use local_host.LocalHost"
LONGEST = 24  # steps of a run that are worked out ahead; an arrival makes the rest of them vain


class EventQueue:
    """When which host is to be called (`complete`, `plan`), by time, rank and order of asking, with its version."""

    def __init__(self) -> None:
        self.heap: list[tuple[float, int, int, FastHost, int]] = []
        self.count = itertools.count()


class FastHost:
    """truth: the time steps take; latency: what the scheduler believes, which does not learn here, nor forget (so it is
    not told of idle time). targets: request id -> output tokens of each stage. It tells of what begins and ends, not of
    each step and token: `ran` is given each run when it is over, `ended` each request's token times with its end.
    causes: work out why requests miss.
    """

    def __init__(
        self,
        id: str,
        truth: LatencyModel,
        latency: LatencyModel,
        limits: Limits,
        scheduler: Scheduler,
        clock: HandClock,
        *,
        emit: Callable[[Event], None],
        agenda: EventQueue,
        policy: str,
        targets: Mapping[str, Sequence[int]],
        lengths: LengthPredictor | None = None,
        rule: str = "deadline",
        noise: float = 0.0,
        seed: int = 0,
        ran: Callable[[RepeatedSteps], None] | None = None,
        ended: Callable[[Finished, Sequence[StageTimes]], None] | None = None,
        causes: bool = True,
    ) -> None:
        self.id = id
        self.limits = limits
        self.block = limits.block
        self.latency = latency
        self.scheduler = scheduler
        self.clock = clock
        self.lengths = lengths
        self.tick = 0  # steps done
        self.waiting: list[FastSeq] = []
        self.running: dict[str, FastSeq] = {}
        self.known: dict[str, FastSeq] = {}
        self.prefilling: dict[str, FastSeq] = {}  # running, more than one token pending
        self.kv_free = limits.kv_blocks  # before the run, while one is under way
        self.pool = DecodePool(limits.block)
        self.run: RepeatedSteps | None = None
        self.dues: DueTimes | None = None  # once somebody has asked for them
        self.log = StepLog(latency, causes)
        self._resting: list[FastSeq] = []  # decoding, but not in the step that runs
        self._ending: list[FastSeq] = []  # cancelled while the step with them runs
        self._steps = StepTimes(truth, noise, seed)
        self._emit = emit
        self._heap, self._count = agenda.heap, agenda.count
        self._policy = policy
        self._targets = targets
        self._rule = rule
        self._ran = ran
        self._ended = ended
        self._outbox: list[Event] = []
        self._order = 0
        self._started = 0
        self._version = 0
        self._planned = False
        self._steady = 0  # for how many more steps the last plan stands, unless something happens
        self._view = FastView(self)
        self._at_once = repeat(self._view).__next__  # asked of every host at every arrival
        self.view: Callable[[], View] = self._at_once

    # ----------------------------------------------------------------- Host

    async def start(self) -> None: ...

    async def drain(self) -> None: ...

    async def close(self) -> None: ...

    def assign(self, role: Role) -> None:
        raise ValueError(NO_HANDOFF)

    def recall(self, kind: Recall) -> None:
        raise ValueError(NO_HANDOFF)

    def reserve(self, request: Request) -> bool:
        raise ValueError(NO_HANDOFF)

    async def transfer(self, id: str, to: Host) -> None:
        raise ValueError(NO_HANDOFF)

    async def receive(self, id: str, kv: KV) -> None:
        raise ValueError(NO_HANDOFF)

    def release(self, id: str) -> None:
        raise ValueError(NO_HANDOFF)

    def resume(self, id: str) -> None:
        raise ValueError("the fast host serves nobody who waits for a tool: use local_host.LocalHost")

    def submit(self, request: Request) -> None:
        """Raises ValueError for one that shares KV with others, began elsewhere or waits for tools: use
        `local_host.LocalHost`."""
        progress = request.progress
        began = progress is not None and (any(progress.times) or len(progress.delays) > 0)
        if request.group or began or request.tools:
            raise ValueError(
                f"request {request.id!r} shares KV, began elsewhere or waits for a tool: the fast host cannot count it"
            )
        now = self.clock.time
        self.sync()
        self._order += 1
        seq = FastSeq(request, self._order, now, self, self._targets.get(request.id))
        reason = refusal_reason(request, self.limits)
        if reason is not None:
            self._tell([self._finished(seq, now, "refused", reason)])
            return
        self.known[seq.id] = seq
        self._view.count = len(self.known)
        self._view.pending += seq.prompt
        insort(self.waiting, seq)
        self._changed(now)

    def cancel(self, id: str, reason: str) -> None:
        now = self.clock.now()
        self.sync()
        seq = self.known.get(id)
        if seq is None or seq.ended:
            return
        self._changed(now)
        self._tell([self._end(seq, now, "cancelled", reason)])

    # ----------------------------------------------------------------- time passes

    def sync(self) -> View:
        """Book the steps of the run that are over by now."""
        run = self.run
        if run is not None and run.done < run.steps and run.ends[run.done] <= self.clock.time:
            self._advance(run, bisect_right(run.ends, self.clock.time))
        return self._view

    def under_way(self) -> RepeatedSteps | None:
        """The run of which a step has begun and not ended; None at the instant between two, when a plan is due."""
        self.sync()
        run = self.run
        between = run is None or run.done == run.steps or (run.done and run.ends[run.done - 1] >= self.clock.time)
        return None if between else run

    def free_now(self) -> int:
        """KV blocks that neither the steps that are over nor the one under way have taken."""
        self.sync()
        run = self.run
        if run is None:
            return self.kv_free
        return self.kv_free - self._blocks(run, min(run.done + 1, len(run.ends)))

    def complete(self, version: int) -> bool:
        """The run's last step is over. False if it is not, since something came between."""
        run = self.run
        if run is None or version != self._version:
            return False
        if run.done < run.steps:
            self._advance(run, run.steps)
        now = run.ends[-1]
        self.run = None
        self.view = self._at_once
        self.kv_free -= self._blocks(run, run.steps)
        if self._ran is not None:
            self._ran(run)
        run.ends = []
        self._planned = True
        if run.chunks or self.pool.next <= self.tick or self._resting or self._ending:
            for seq in self._book(run):
                if not seq.ended:
                    self._token(seq, now)
            for seq in self._ending:
                self._release(seq)
            self._ending.clear()
            if self.waiting or self.prefilling:
                self._steady = 0
        return True

    def plan(self, version: int) -> None:
        """Ask the policy, and begin what it says, unless it was asked since."""
        if self.run is not None or not (self._planned or version == self._version):
            return
        self._planned = False
        self._version += 1
        now = self.clock.time
        if not self.known:
            self._flush()
            return
        if self._steady > 0 and self.pool.blocks(self.tick) <= self.kv_free:  # the last plan stands
            self._run(now, True, (), ())
            self._flush()
            return
        plan = self._ask()
        events = self._carry_out(plan, now)
        self._outbox += events
        self._flush()
        if self.run is not None:
            return
        self._steady = 0  # nothing was run that could go on
        if self._planned:
            return
        if events:
            self._plan_at(now)
        elif plan.wake_at is not None:
            heappush(self._heap, (plan.wake_at, PLAN, next(self._count), self, self._version))

    def _ask(self) -> Plan:
        """What the policy says."""
        view = self._view
        try:
            plan = self.scheduler.plan(view)
            if not self._plainly_possible(plan):
                check(plan, view, self._policy)
        except PlanError:
            raise
        except Exception as error:
            where = f"policy {self._policy!r}, replica {self.id!r}, t={view.now:.6f}"
            raise PlanError(f"{where}: {type(error).__name__}: {error}") from error
        again = plan.steady and plan.decode and not (plan.preempt or plan.drop or plan.demote or plan.promote)
        self._steady = plan.steady + 1 if again else 0
        return plan

    # ----------------------------------------------------------------- a plan is carried out

    def _carry_out(self, plan: Plan, now: float) -> list[Event]:
        events: list[Event] = []
        for id, reason in plan.drop.items():
            events.append(self._end(self.known[id], now, "refused", reason))
        for id in plan.preempt:
            events.append(self._preempt(self.known[id], now))
        for id in plan.demote:
            self.known[id].demoted = True
            events.append(Demoted(now, id))
        for id in plan.promote:
            self.known[id].demoted = False
            events.append(Promoted(now, id))
        if not plan.decode:
            self._rest({w.seq for w in plan.work})
        order, chunks = [], []
        for id, tokens, _, _ in plan.work:
            seq = self.known[id]
            order.append(seq)
            if seq.state == WAITING:
                self._begin(seq, now, events)
            if seq.state == PREFILLING:
                chunks.append(ChunkShare(seq, seq._cached, tokens, seq.pending if plan.steady else tokens))
        if order or (plan.decode and self.pool.count):
            self._run(now, plan.decode, chunks, order)
        return events

    def _rest(self, at_work: set[str]) -> None:
        """Those that could decode and are not asked to."""
        for seq in self.running.values():
            if seq.state == DECODING and seq.id not in at_work:
                self.pool.leave(seq, self.tick, PREFILLING)
                self._resting.append(seq)
                self._renew(seq)

    def _begin(self, seq: FastSeq, now: float, events: list[Event]) -> None:
        self.waiting.remove(seq)
        self.running[seq.id] = seq
        self._started += 1
        seq.nth = self._started
        seq.waits.append((self.tick, now - seq.since, seq.started))
        seq.begun.append((self.tick, -1))
        events.append(Started(now, seq.id, resumed=seq.started))
        seq.started = True
        seq.state = PREFILLING
        if self.dues is not None:
            self.dues.add(seq)
        if seq.pending > 1:
            self.prefilling[seq.id] = seq
        else:
            self._join(seq)

    def _join(self, seq: FastSeq) -> None:
        self.pool.join(seq, self.tick)
        self.pool.aim(seq, self.tick)
        self._renew(seq)

    def _renew(self, seq: FastSeq) -> None:
        if self.dues is not None:
            self.dues.renew(seq)

    def _run(self, now: float, goes_on: bool, chunks: Sequence[ChunkShare], order: Sequence[FastSeq]) -> None:
        pool, tick = self.pool, self.tick
        most, spare = 1, self.kv_free
        if goes_on and self._steady > 1:
            most = min(self._steady, LONGEST, pool.next - tick)
            for part in chunks:
                most = min(most, -(-part.total // part.tokens))
                spare -= part.total
        self.run = run = RepeatedSteps(now, tick, pool.count, pool.kv, chunks, order, [])
        if pool.count * most > spare:  # else there is KV enough, were it a block for every token
            while most > 1 and self._blocks(run, most) > self.kv_free:
                most -= 1
        self._steady -= most
        self._steps.take(run, most)
        self.log.keep(run)
        if chunks and most > 1:
            self.view = self.sync
        self._version += 1
        heappush(self._heap, (run.ends[-1], COMPLETION, next(self._count), self, self._version))

    def _blocks(self, run: RepeatedSteps, steps: int) -> int:
        """KV blocks that so many steps of the run take."""
        need = self.pool.blocks_until(run.tick, steps)
        for part in run.chunks:
            need += part.blocks(steps, self.block)
        return need

    def _advance(self, run: RepeatedSteps, done: int) -> None:
        steps = done - run.done
        self.tick += steps
        self.pool.kv += steps * run.seqs
        for part in run.chunks:
            tokens = min(steps * part.tokens, part.total - run.done * part.tokens)
            part.seq._cached += tokens
            self._view.pending -= tokens
        run.done = done

    def _book(self, run: RepeatedSteps) -> list[FastSeq]:
        """Who has a token that somebody must look at: the first or the last of a stage; in the batch's order."""
        came = self.pool.came(self.tick)
        for part in run.chunks:
            seq = part.seq
            if seq.ended:
                continue
            left = seq.pending
            if left > 1:
                continue
            del self.prefilling[seq.id]
            if left:
                self._join(seq)
                continue
            seq._output += 1
            seq.spans[-1].append((self.tick - 1, self.tick))
            self._view.pending += 1
            self.pool.join(seq, self.tick)
            if seq.first_token_at is not None:  # resumed: `_token` has nothing to renew
                self._renew(seq)
            came.append(seq)
        for seq in self._resting:
            if not seq.ended and seq.id in self.running:
                self._join(seq)
        self._resting.clear()
        if len(came) > 1:  # decodes in order of start, then whom the plan named
            place = {seq.id: i for i, seq in enumerate(run.order)}
            came.sort(key=lambda seq: (place.get(seq.id, -1), seq.nth))
        return came

    def _token(self, seq: FastSeq, now: float) -> None:
        """A first or last token of a stage came out."""
        if seq.first_token_at is None:
            seq.first_token(now)
            self._renew(seq)
        output = seq._output + self.tick  # it decodes
        if output < seq.target:
            self.pool.aim(seq, self.tick)
            return
        if seq.total + output >= seq.most:
            self._outbox.append(self._end(seq, now, "completed", "length"))
            return
        if seq.stage + 1 == len(seq.request.stages):
            self._outbox.append(self._end(seq, now, "completed", "stop"))
            return
        self.pool.leave(seq, self.tick, PREFILLING)
        seq.next_stage(now)
        if seq.pending > 1:
            self._view.pending += seq.pending - 1
            self.prefilling[seq.id] = seq
            if next(reversed(self.running)) != seq.id:  # in order of start
                self.prefilling = {id: s for id, s in self.running.items() if id in self.prefilling}
            self._renew(seq)
        else:
            self._join(seq)

    def _plainly_possible(self, plan: Plan) -> bool:
        """Whether `check` would find nothing, for the plans that most steps have; False is no verdict."""
        if not plan.decode or len(plan.work) > 1 or plan.preempt or plan.drop or plan.demote or plan.promote:
            return False
        limits, need = self.limits, self.pool.blocks(self.tick)
        tokens = seqs = self.pool.count
        for work in plan.work:
            seq = self.known.get(work.seq)
            if seq is None or seq.state == DECODING or not 1 <= work.tokens <= seq.pending or limits.max_running:
                return False
            tokens += work.tokens
            seqs += 1
            need += blocks_for(seq._cached + work.tokens, limits.block) - blocks_for(seq._cached, limits.block)
        return 0 < seqs <= limits.max_seqs and tokens <= limits.max_tokens and need <= self.kv_free

    # ----------------------------------------------------------------- ends

    def _preempt(self, seq: FastSeq, now: float) -> Event:
        self.kv_free += seq.blocks
        self._view.pending -= seq.pending
        self.prefilling.pop(seq.id, None)
        self.pool.leave(seq, self.tick, WAITING)
        self._leave(seq)
        seq.begun[-1] = (seq.begun[-1][0], self.tick)
        seq._cached = 0
        self._view.pending += seq.pending
        seq.since = now
        insort(self.waiting, seq)
        return Preempted(now, seq.id)

    def _end(self, seq: FastSeq, now: float, outcome: Outcome, reason: str) -> Finished:
        seq.ended = True
        event = self._finished(seq, now, outcome, reason)
        if outcome == "completed" and self.lengths is not None:
            self.lengths.learn(seq.request, event.output)
        run = self.run
        busy = run is not None and (seq.state == DECODING or any(seq is part.seq for part in run.chunks))
        if seq.state == WAITING:
            self.waiting.remove(seq)
        if busy:
            self._ending.append(seq)
        else:
            self._release(seq)
        return event

    def _release(self, seq: FastSeq) -> None:
        self._view.pending -= seq.pending
        if seq.state != WAITING:
            self.kv_free += seq.blocks
            self.prefilling.pop(seq.id, None)
            self.pool.leave(seq, self.tick, WAITING)
            self._leave(seq)
        del self.known[seq.id]
        self._view.count = len(self.known)
        if self.log.long:
            self.log.forget(min((s.begun[0][0] for s in self.known.values() if s.begun), default=self.tick))

    def _leave(self, seq: FastSeq) -> None:
        """It runs no longer."""
        del self.running[seq.id]
        if self.dues is not None:
            self.dues.drop(seq)

    def _finished(self, seq: FastSeq, now: float, outcome: Outcome, reason: str) -> Finished:
        stages = [
            StageTimes(start, self.log.times(spans)) for start, spans in zip(seq.starts, seq.spans_now(), strict=True)
        ]
        verdict = judge(seq.request, stages, outcome, self._rule)
        if self.log.causes and outcome == "completed" and not verdict.met:
            lost = delays_by_cause(seq, self.log, self.latency, self.tick)
            if lost:
                verdict = replace(verdict, cause=max(lost.items(), key=lambda item: item[1])[0])
        event = Finished(now, seq.id, outcome, reason, verdict, seq.total_output, seq.best_effort)
        if self._ended is not None:
            self._ended(event, stages)
        return event

    # ----------------------------------------------------------------- telling

    def _changed(self, now: float) -> None:
        """Something came: the run ends with the step that is under way."""
        self._steady = 0
        run = self.run
        if run is None:
            if not self._planned:
                self._plan_at(now)
            return
        keep = run.done + (run.done == 0 or run.ends[run.done - 1] < now)
        if keep < len(run.ends):
            del run.ends[keep:]
            run.steps = keep
            self._version += 1
            heappush(self._heap, (run.ends[-1], COMPLETION, next(self._count), self, self._version))

    def _plan_at(self, when: float) -> None:
        self._planned = True
        heappush(self._heap, (when, PLAN, next(self._count), self, self._version))

    def _tell(self, events: Sequence[Event]) -> None:
        self._outbox += events
        self._flush()
        if self.run is None and not self._planned:
            self._plan_at(self.clock.time)

    def _flush(self) -> None:
        if not self._outbox:
            return
        events, self._outbox = self._outbox, []
        for event in events:
            self._emit(event)
        self.scheduler.observe(events)

    def check_integrity(self) -> None:
        """Raise AssertionError unless the counts are what looking at every sequence gives."""
        assert sorted(self.known) == sorted([*self.running, *(s.id for s in self.waiting)])
        decodes = [s for s in self.running.values() if s.state == DECODING]
        assert self._view.pending == sum(s.pending for s in self.known.values())
        assert self.pool.count == len(decodes)
        assert self.pool.kv == sum(s.cached for s in decodes)
        assert self.kv_free == self.limits.kv_blocks - sum(s.blocks for s in self.running.values())
        assert self.pool.blocks(self.tick) == sum(s.cached % self.limits.block == 0 for s in decodes)
