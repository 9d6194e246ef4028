"""The only code that changes the state of a replica, with `handoff`: no I/O, no clock of its own.

A life in six calls: `submit` puts a request in `waiting`; `view` shows the replica to a policy; `begin` checks the
policy's plan and makes it a run of steps; `end` books what they brought; `cancel` and `fail` end requests early. Each
returns the events it caused. An engine is given a batch with an entry for each sequence (`apply`, `commit`: one step);
a simulator says of a run only how its steps ended and which sequences to look at. A request that waits for a tool is
neither waiting nor running until `resume`; its KV is kept as that of a prefix is, until the memory is needed. There is
no prefill phase and no decode phase: a sequence has `length` tokens of which `cached` are in KV, and the difference is
pending. A sequence with one pending is in the `DecodePool`: a step does no work for it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from math import inf

from rubato.core.events import Demoted, Event, Finished, Preempted, Promoted, Started, Tokens, ToolCallFinished
from rubato.core.interfaces import View
from rubato.core.plan import Batch, Emitted, Entry, Plan, StepResult
from rubato.core.request import NOTHING, Outcome, Request, without_texts
from rubato.replica import handoff
from rubato.replica.plan_check import check, check_emitted
from rubato.replica.sequence import Seq
from rubato.replica.state import ReplicaState, refusal_reason
from rubato.replica.step_log import Chunk, Speculation, StepRun
from rubato.replica.view import LiveView

KEPT = 4096  # steps kept before checking which are still wanted


class Replica(ReplicaState):
    """Requests from their submission to their ends, and the steps between; what it is made with: `ReplicaState`."""

    in_flight: Batch | None = None
    _asked_since = inf  # by the clock: when a view was first asked for; it is idle no longer than that
    _most_kept = KEPT

    # ----------------------------------------------------------------- coming and going

    def submit(self, request: Request, now: float) -> list[Event]:
        """Queue a request. One that could never be run is refused at once, with a reason that says why. Raises
        ValueError for one that shares KV, or waits for tools, where KV is counted only."""
        if not self.kv.by_block and (request.group or request.uses_tools):
            raise ValueError(f"request {request.id!r} shares KV or waits for a tool: that needs blocks with ids")
        seq = self.new(request, now)
        if reason := refusal_reason(request, self.limits):
            return [self.finished(seq, now, "refused", reason)]
        self.seqs[request.id] = seq
        self.groups.enter(seq)
        return []

    def cancel(self, id: str, now: float, reason: str, outcome: Outcome = "cancelled") -> list[Event]:
        """End a request now. KV that the batch in flight uses goes back at its end. Unknown id: nothing."""
        seq = self.seqs.get(id)
        if seq is None or seq.ended:
            return []
        return [self._end(seq, now, outcome, reason)]

    def resume(self, id: str, now: float) -> list[Event]:
        """The tool that a request waits for has returned: its next stage begins, in the queue. Ignored for one that
        waits for none."""
        seq = self.seqs.get(id)
        if seq is None or not seq.waiting_for_tool:
            return []
        seq.waiting_for_tool = seq.started = False
        self._next_stage(seq, now)
        seq.waiting_since = now
        self.queue(seq)
        return [ToolCallFinished(now, id)]

    def fail(self, now: float, reason: str) -> list[Event]:
        """The engine broke: every request here ends as failed, all KV is free. What is on its way from here or to here
        is just forgotten: it has not begun here, or is another's by now."""
        run = self.run
        if run is not None:
            run.steps = run.done
            if not run.done:
                self.log.drop(run)
            self.kv.end(run)
            self._landed(now)
        for id in [*self.leaving, *self.arriving]:
            handoff.release(self, id)
        for seq in list(self.seqs.values()):
            if seq.ended:
                self._release(seq)
            else:
                self.events.append(self._end(seq, now, "failed", reason))
        self.ending.clear()
        self.resting.clear()
        if self.kv.by_block:
            self.kv.clear()
        return self.told()

    def gone(self) -> list[str]:
        """Ids that ended since the last call and that no batch mentions any more."""
        ids, self.gone_ids = self.gone_ids, []
        return ids

    @property
    def empty(self) -> bool:
        return not self.seqs and not self.leaving

    @property
    def idle(self) -> bool:
        """Nothing is here that a plan could be about."""
        return not self.here

    # ----------------------------------------------------------------- steps

    @cached_property
    def shown(self) -> LiveView:
        return LiveView(self)

    def view(self, now: float) -> View:
        """As it is now; the same object each time, which goes on showing what is."""
        self._asked_since = min(self._asked_since, now)
        if self.run is None:
            self.latency.idle(now - max(self.idle_since, self._asked_since))
        self._look_up(now)
        return self.shown

    def begin(self, plan: Plan, now: float, policy: str) -> tuple[StepRun | None, list[Event]]:
        """Carry out a plan up to the engine's part: as a run of one step, unless it is empty. A simulator gives it more
        steps and their ends. Raises PlanError, with nothing changed, for an impossible plan."""
        if self.run is not None:
            raise RuntimeError(f"replica {self.id!r}: a batch is in flight; commit it before the next plan")
        check(plan, self.shown, policy)
        if self.kv.by_block:  # before anything is given back or reused: what the plan counted on is still there
            for work in plan.work:
                if work.seq not in self.running:
                    self.kv.take_found(self.seqs[work.seq])
        self._carry_out(plan, now)
        if plan.work and not plan.decode_all and self.pool.count:
            self._rest({work.seq for work in plan.work})
        order: list[Seq] = []
        chunks: list[Chunk] = []
        speculation: dict[str, Speculation] = {}
        for id, tokens, verify, draft in plan.work:
            seq = self.seqs[id]
            order.append(seq)
            if id not in self.running:
                self._start(seq, now)
            if verify or draft is not None:
                speculation[id] = Speculation(seq, seq.cached, tokens, verify, draft)
                seq.in_flight = len(verify)
            if not seq.decoding:
                chunks.append(Chunk(seq, seq._cached, tokens, seq.pending if plan.repeat_steps else tokens))
                seq.in_flight = tokens + len(verify)
        run = None
        if order or (plan.decode_all and self.pool.count):
            run = self._begun(now, chunks, order, plan.decode_all, speculation)
        return run, self.told()

    def go_on(self, now: float) -> StepRun:
        """`begin`, for a plan of one token for each decode, for which there is KV."""
        return self._begun(now, (), (), True, NOTHING)

    def _begun(
        self, now: float, chunks: Sequence[Chunk], order: Sequence[Seq], decode_all: bool,
        speculation: Mapping[str, Speculation],
    ) -> StepRun:  # fmt: skip
        steps, pool = self.steps, self.pool
        self.run = run = StepRun(now, steps.tick, pool.count, pool.kv, chunks, order, decode_all, [inf], speculation)
        if self.causes is not None:
            self.log.keep(run)
        self.kv.begin(run)
        steps.under_way = True
        return run

    def end(self, emitted: Mapping[str, Emitted], now: float) -> list[Event]:
        """The run's last step has ended now, or when `StepRun.ends` says. emitted: what sequences got out of it, in the
        order of the batch; a decode that is not named got one token and goes on. Raises RuntimeError for tokens that
        verification cannot have brought (`check_emitted`)."""
        run = self.run
        assert run is not None, "no run is under way"
        self.book(run)
        if self.output_ids is not None and self.kv.by_block:
            for seq in self.pool.filling():
                self.learn_ids(seq)
        self.kv.end(run)
        self._landed(now)
        run.order = ()  # the log keeps the run, and need not keep sequences that have ended
        for chunk in run.chunks:
            if not chunk.seq.ended and chunk.seq.pending == 1:
                self.prefilling.pop(chunk.seq.id, None)
                self.join(chunk.seq)
        for seq in self.resting:
            if not seq.ended and self.running.get(seq.id) is seq:
                self.join(seq)
        self.resting.clear()
        self.groups.after_step(self.running)
        for id, out in emitted.items():
            seq = self.seqs[id]
            if not seq.ended:
                self._emit(seq, out, now, run)
        for seq in self.ending:
            self._release(seq)
        self.ending.clear()
        return self.told()

    def apply(self, plan: Plan, now: float, policy: str) -> tuple[Batch, list[Event]]:
        """`begin`, for an engine: the step as a batch with an entry for each sequence."""
        self._look_up(now)
        run, events = self.begin(plan, now, policy)
        if run is None:
            return Batch(), events
        batch = self.in_flight = self.batch(run)
        return batch, events

    def batch(self, run: StepRun) -> Batch:
        """The run of one step that has just begun, with an entry for each sequence."""
        seqs = run.order
        if run.decode_all:
            named = {seq.id for seq in run.order}
            seqs = [*(seq for seq in self.running.values() if seq.decoding and seq.id not in named), *run.order]
        chunks = {chunk.seq.id: chunk.tokens for chunk in run.chunks}  # the others decode
        entries = []
        for seq in seqs:
            tokens, spec = chunks.get(seq.id, 1), run.speculation.get(seq.id)
            verify, draft = (spec.verify, spec.draft) if spec is not None else ((), None)
            sample = tokens == seq.pending
            entries.append(Entry(seq.id, seq.cached, tokens + len(verify), seq.block_ids, sample, verify, draft))
        return Batch(tuple(entries))

    def commit(self, batch: Batch, result: StepResult, now: float) -> list[Event]:
        """`end`, of a batch that an engine has run: KV written, tokens out, stages and requests ended. Raises
        RuntimeError as `end`, and for another batch than the one in flight."""
        if batch is not self.in_flight or self.run is None:
            raise RuntimeError(f"replica {self.id!r}: commit of a batch that is not in flight")
        self.run.ends = [now]
        self.run.begin = now - result.seconds
        return self.end({e.seq: result.emitted[e.seq] for e in batch.entries if e.sample}, now)

    # ----------------------------------------------------------------- a plan is carried out

    def _look_up(self, now: float) -> None:
        """Set the time to `now`, and look up the KV that those that wait need not compute."""
        self.clock.time = now
        if not self.kv.by_block or self.looked_up == self.kv.version:
            return
        self.looked_up = self.kv.version
        for seq in self.waiting:
            if seq.kv_version_seen != self.looked_up:
                self.pending += seq.cached
                self.kv.look_up(seq)
                self.pending -= seq.cached

    def _carry_out(self, plan: Plan, now: float) -> None:
        """What a plan says beside work."""
        events, seqs = self.events, self.seqs
        for id, reason in plan.drop.items():
            events.append(self._end(seqs[id], now, "refused", reason))
        for id, why in plan.handoff.items():
            events.append(handoff.hand_off(self, seqs[id], why, now, with_kv=id not in plan.without_kv))
        for id in plan.preempt:
            self._preempt(seqs[id], now)
        for id in plan.demote:
            seqs[id].demoted = True
            events.append(Demoted(now, id))
        for id in plan.promote:
            seqs[id].demoted = False
            events.append(Promoted(now, id))

    def _preempt(self, seq: Seq, now: float) -> None:
        self.hide(seq)
        self.stop(seq)
        seq.recompute = True
        seq.waiting_since = now
        self.queue(seq)
        self.events.append(Preempted(now, seq.id))

    def _rest(self, at_work: set[str]) -> None:
        """Those that could decode and are not asked to."""
        for seq in self.running.values():
            if seq.decoding and seq.id not in at_work:
                self.leave_pool(seq)
                self.resting.append(seq)

    def _start(self, seq: Seq, now: float) -> None:
        self.waiting.remove(seq)
        self.run_from_now(seq, now, "preemption" if seq.started else "queue")
        self.events.append(Started(now, seq.id, resumed=seq.started, cached=seq.cached))
        seq.started = True
        self.proceed(seq)

    # ----------------------------------------------------------------- what a step brought

    def _landed(self, now: float) -> None:
        """No batch is in flight any more."""
        assert self.run is not None
        for chunk in self.run.chunks:
            chunk.seq.in_flight = 0
        for spec in self.run.speculation.values():
            spec.seq.in_flight = 0
        self.run = self.in_flight = None
        self.steps.under_way = False
        self.idle_since = now

    def _emit(self, seq: Seq, out: Emitted, now: float, run: StepRun) -> None:
        """Tokens of one sequence came out."""
        tokens, text, ids, finish, stage_done, logprobs, tried, draft, accepted = out
        spec = run.speculation.get(seq.id)
        if spec is not None or tokens != 1 or accepted:
            check_emitted(out, seq.id, spec.verify if spec is not None else (), seq.draft)
        more = tokens - 1
        if seq.decoding:
            if seq.first_token_at is None:
                seq.first_token(now)
                self.renew(seq)
            if more:
                self.pool.accept(seq, more, now)
                self.renew(seq)
        else:
            seq.got([now] * tokens)
            seq._cached += more
            seq.token_spans.append((self.steps.tick - 1, self.steps.tick))
            self.prefilling.pop(seq.id, None)
            self.pending += 1
        if self.output_ids is None:
            if seq.token_ids is not None:
                seq.token_ids += ids
            if seq.ids is not None:
                seq.extend(ids, tokens)
                seq.learn_keys(self.limits.block_size)
        seq.draft = draft
        if tried:
            seq.tried += tried
            seq.accepted += more
        if spec is not None and spec.verify:
            self.learn_ids(seq)
            self.kv.accepted(seq, more, ended=finish is not None)
        stage_done = stage_done and finish is None and seq.stage + 1 < len(seq.request.stages)
        if self.tell_tokens and (tokens or text):
            event = Tokens(now, seq.id, tokens, text, ids, seq.stage, logprobs, stage_done, tried, accepted)
            self.events.append(event)
        if finish is not None:
            self.events.append(self._end(seq, now, "completed", finish))
        elif stage_done:
            self._end_stage(seq, now)
        elif not seq.decoding:
            self.join(seq)

    def _end_stage(self, seq: Seq, now: float) -> None:
        """The next stage begins, or waits for its tool."""
        if seq.decoding:
            self.leave_pool(seq)
        if seq.request.stages[seq.stage + 1].tool:
            seq.waiting_for_tool = True
            self.hide(seq)
            self.learn_ids(seq)
            self.stop(seq, keep=True)
            return
        self._next_stage(seq, now)
        self.pending += seq.pending - 1
        self.proceed(seq)

    def _next_stage(self, seq: Seq, now: float) -> None:
        self.learn_ids(seq)
        seq.next_stage(now)
        stage = seq.request.stages[seq.stage]
        seq.extend(stage.token_ids, stage.prompt)
        seq.learn_keys(self.limits.block_size)

    # ----------------------------------------------------------------- ends

    def _end(self, seq: Seq, now: float, outcome: Outcome, reason: str) -> Finished:
        run = self.run
        busy = run is not None and (seq.decoding or any(seq is chunk.seq for chunk in run.chunks))
        event = self.finished(seq, now, outcome, reason)
        if outcome == "completed" and self.options.lengths is not None:
            self.options.lengths.learn(seq.request, event.output)
        seq.ended = True  # not before there is an event that says so
        self.hide(seq)
        self.arriving.pop(seq.id, None)
        self.groups.leave(seq)
        if busy:
            self.ending.append(seq)
        else:
            self._release(seq)
        return event

    def _release(self, seq: Seq) -> None:
        if seq.id in self.running:
            self.stop(seq)
        else:
            self.kv.release(seq)
        del self.seqs[seq.id]
        self.gone_ids.append(seq.id)
        seq.request = without_texts(seq.request)  # the log still has it in thousands of steps
        if self.steps.kept > self._most_kept:
            self._forget_steps()

    def _forget_steps(self) -> None:
        """Forget the steps before any sequence now here first ran."""
        first = [seq.running_spans[0][0] for seq in self.seqs.values() if seq.running_spans]
        before = min(first, default=self.steps.tick)
        self.log.forget(before)
        self.steps.forget(before - 1)  # the first step kept begins when the one before it ended
        self._most_kept = 2 * self.steps.kept + KEPT
