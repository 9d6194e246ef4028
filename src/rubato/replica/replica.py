"""Changes the state of one replica, which only this module and `handoff` do; it does no I/O and has no clock of its
own.

A request's life in six calls: `submit` puts it in `waiting`; `view` shows the replica to a policy; `begin` checks the
policy's plan and makes it a run of steps; `end` books their output; `cancel` and `fail` end requests early. Each but
`view` returns the events that it caused.

An engine gets a batch with an entry for each sequence (`apply`, `commit`: one step). A simulator only passes when the
steps of a run ended, and the output of some sequences.

There is no prefill phase and no decode phase: a sequence has `length` tokens, of which `cached` are in KV; the others
are pending. A sequence with one pending token is in the `DecodePool`, where a step costs it no work. A request that
waits for a tool is neither waiting nor running until `resume`; its KV stays findable like a prefix's, until the memory
is needed.
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

MIN_KEPT_STEPS = 4096  # steps in the log before the first check of which are needed


class Replica(ReplicaState):
    """Takes requests from submission to end, and the steps between. Its arguments are those of `ReplicaState`.

    A request's first token comes out of the batch whose chunk ends its prompt (`Entry.sample`).
    """

    in_flight: Batch | None = None
    _first_view_at = inf  # time of the first view: the replica counts as idle from then on at the earliest
    _max_kept_steps = MIN_KEPT_STEPS

    # ----------------------------------------------------------------- coming and going

    def submit(self, request: Request, now: float) -> list[Event]:
        """Queues a request; refuses it at once, with a reason, if it could never run.

        Raises:
            ValueError: the request shares KV or waits for tools where KV is only counted.
        """
        if not self.kv.by_block and (request.group or request.uses_tools):
            raise ValueError(f"request {request.id!r} shares KV or waits for a tool: that needs blocks with ids")
        seq = self.make_seq(request, now)
        if reason := refusal_reason(request, self.limits):
            return [self.judge_end(seq, now, "refused", reason)]
        self.seqs[request.id] = seq
        self.groups.enter(seq)  # and so into `waiting`, unless it waits for another of its group
        return []

    def cancel(self, id: str, now: float, reason: str, outcome: Outcome = "cancelled") -> list[Event]:
        """Ends a request now; KV that the batch in flight uses is released at its end. Ignores an unknown id."""
        seq = self.seqs.get(id)
        if seq is None or seq.ended:
            return []
        return [self._end(seq, now, outcome, reason)]

    def resume(self, id: str, now: float) -> list[Event]:
        """Begins the next stage of a request whose tool has returned, in the queue. Ignores a request that waits for
        none.
        """
        seq = self.seqs.get(id)
        if seq is None or not seq.waiting_for_tool:
            return []
        seq.waiting_for_tool = seq.started = False
        self._next_stage(seq, now)
        seq.waiting_since = now
        self.queue(seq)
        return [ToolCallFinished(now, id)]

    def fail(self, now: float, reason: str) -> list[Event]:
        """Fails every request here and frees all KV, after the engine broke.

        Requests that migrate from here or to here are only forgotten: another replica owns them, or their router does.
        """
        run = self.run
        if run is not None:
            run.steps = run.steps_done
            if not run.steps_done:
                self.log.drop(run)
            self.kv.end(run)
            self._clear_run(now)
        for id in [*self.migrating_out, *self.migrating_in]:
            handoff.release(self, id)
        for seq in list(self.seqs.values()):
            if seq.ended:
                self._release(seq)
            else:
                self.events.append(self._end(seq, now, "failed", reason))
        self.ending.clear()
        self.idle_decodes.clear()
        if self.kv.by_block:
            self.kv.clear()
        return self.take_events()

    def take_gone_ids(self) -> list[str]:
        """Returns the ids that ended since the last call and are in no batch."""
        ids, self.gone_ids = self.gone_ids, []
        return ids

    @property
    def empty(self) -> bool:
        return not self.seqs and not self.migrating_out

    @property
    def idle(self) -> bool:
        """Returns whether no request is waiting or running."""
        return not self.present

    # ----------------------------------------------------------------- steps

    @cached_property
    def live_view(self) -> LiveView:
        return LiveView(self)

    def view(self, now: float) -> View:
        """Returns the view at `now`: always the same object, which stays current."""
        self._first_view_at = min(self._first_view_at, now)
        if self.run is None:
            self.latency.idle(now - max(self.idle_since, self._first_view_at))
        self._look_up(now)
        return self.live_view

    def begin(self, plan: Plan, now: float, policy: str) -> tuple[StepRun | None, list[Event]]:
        """Carries out a plan except for the engine's part: as a run of one step, unless it is empty.

        A simulator gives the run more steps and their ends.

        Raises:
            PlanError: the plan is impossible; nothing has changed.
        """
        if self.run is not None:
            raise RuntimeError(f"replica {self.id!r}: a batch is in flight; commit it before the next plan")
        check(plan, self.live_view, policy)
        if self.kv.by_block:  # before KV is released or reused: the cached blocks that the plan counted on
            for work in plan.work:
                if work.seq not in self.running:
                    self.kv.take_found(self.seqs[work.seq])
        self._carry_out(plan, now)
        if plan.work and not plan.decode_all and self.pool.count:
            self._take_from_step({work.seq for work in plan.work})
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
            run = self._start_run(now, chunks, order, plan.decode_all, speculation)
        return run, self.take_events()

    def go_on(self, now: float) -> StepRun:
        """Begins a step of one token for each decode, for which KV is free."""
        return self._start_run(now, (), (), True, NOTHING)

    def _start_run(
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
        """Ends the run, whose last step ended now, or as `StepRun.ends` has it.

        Args:
            emitted: the output of sequences, in the order of the batch; a decode that is not named got one token and
                continues.
            now: time in seconds.

        Raises:
            RuntimeError: a sequence got tokens that verification cannot bring (`check_emitted`).
        """
        run = self.run
        assert run is not None, "no run is under way"
        if run.steps_done < run.steps:
            self.book(run)
        by_block = self.kv.by_block
        if by_block and self.output_ids is not None:
            for seq in self.pool.filling():
                self.learn_ids(seq)
        self.kv.end(run)
        self._clear_run(now)
        run.order = ()  # the log keeps the run, but not its ended sequences
        for seq, *_ in run.chunks:
            if not seq.ended and seq.pending == 1:
                self.prefilling.pop(seq.id, None)
                self.join(seq)
        for seq in self.idle_decodes:
            if not seq.ended and self.running.get(seq.id) is seq:
                self.join(seq)
        self.idle_decodes.clear()
        if by_block:  # else there are no groups (`submit`)
            self.groups.after_step(self.running)
        for id, out in emitted.items():
            seq = self.seqs[id]
            if not seq.ended:
                self._emit(seq, out, now, run)
        for seq in self.ending:
            self._release(seq)
        self.ending.clear()
        return self.take_events()

    def apply(self, plan: Plan, now: float, policy: str) -> tuple[Batch, list[Event]]:
        """Begins a step for an engine: returns its batch, with an entry for each sequence, and the events."""
        self._look_up(now)
        run, events = self.begin(plan, now, policy)
        if run is None:
            return Batch(), events
        batch = self.in_flight = self.batch(run)
        return batch, events

    def batch(self, run: StepRun) -> Batch:
        """Returns the batch of a run of one step that has just begun, with an entry for each sequence."""
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
        """Ends the step of a batch that an engine has run.

        Raises:
            RuntimeError: the batch is not in flight, or as `end`.
        """
        if batch is not self.in_flight or self.run is None:
            raise RuntimeError(f"replica {self.id!r}: commit of a batch that is not in flight")
        self.run.ends = [now]
        self.run.begin = now - result.seconds
        return self.end({e.seq: result.emitted[e.seq] for e in batch.entries if e.sample}, now)

    # ----------------------------------------------------------------- a plan is carried out

    def _look_up(self, now: float) -> None:
        """Sets the time to `now`, and looks up the cached KV of waiting sequences."""
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
        """Carries out a plan except its work."""
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
        """Frees the KV of a running sequence and queues it."""
        self.hide(seq)
        self.stop(seq)
        seq.recompute = True
        seq.waiting_since = now
        self.queue(seq)
        self.events.append(Preempted(now, seq.id))

    def _take_from_step(self, at_work: set[str]) -> None:
        """Takes decodes that are not `at_work` out of the next step."""
        for seq in self.running.values():
            if seq.decoding and seq.id not in at_work:
                self.leave_pool(seq)
                self.idle_decodes.append(seq)

    def _start(self, seq: Seq, now: float) -> None:
        """Starts a waiting sequence."""
        self.waiting.remove(seq)
        self.run_from_now(seq, now, "preemption" if seq.started else "queue")
        self.events.append(Started(now, seq.id, resumed=seq.started, cached=seq.cached))
        seq.started = True
        self.proceed(seq)

    # ----------------------------------------------------------------- output of a step

    def _clear_run(self, now: float) -> None:
        """Clears the run, after which no batch is in flight."""
        assert self.run is not None
        for chunk in self.run.chunks:
            chunk.seq.in_flight = 0
        for spec in self.run.speculation.values():
            spec.seq.in_flight = 0
        self.run = self.in_flight = None
        self.steps.under_way = False
        self.idle_since = now

    def _emit(self, seq: Seq, out: Emitted, now: float, run: StepRun) -> None:
        """Books the output of one sequence."""
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
            seq.add_tokens([now] * tokens)
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
            self.kv.book_accepted(seq, more, ended=finish is not None)
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
        """Begins the next stage, or waits for its tool."""
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
        """Begins the next stage of a sequence that does not decode."""
        self.learn_ids(seq)
        seq.next_stage(now)
        stage = seq.request.stages[seq.stage]
        seq.extend(stage.token_ids, stage.prompt)
        seq.learn_keys(self.limits.block_size)

    # ----------------------------------------------------------------- ends

    def _end(self, seq: Seq, now: float, outcome: Outcome, reason: str) -> Finished:
        """Ends a request; its KV is released now, or at the end of the run if it takes part in that."""
        run = self.run
        busy = run is not None and (seq.decoding or any(seq is chunk.seq for chunk in run.chunks))
        event = self.judge_end(seq, now, outcome, reason)
        if outcome == "completed" and self.options.lengths is not None:
            self.options.lengths.learn(seq.request, event.output)
        seq.ended = True  # not before its event exists
        self.hide(seq)
        self.migrating_in.pop(seq.id, None)
        self.groups.leave(seq)
        if busy:
            self.ending.append(seq)
        else:
            self._release(seq)
        return event

    def _release(self, seq: Seq) -> None:
        """Frees all KV of an ended sequence and forgets it."""
        if seq.id in self.running:
            self.stop(seq)
        else:
            self.kv.release(seq)
        del self.seqs[seq.id]
        self.gone_ids.append(seq.id)
        seq.request = without_texts(seq.request)  # the log still has it in thousands of steps
        if self.steps.count > self._max_kept_steps:
            self._forget_steps()

    def _forget_steps(self) -> None:
        """Forgets the steps before any present sequence first ran."""
        first = [seq.running_spans[0][0] for seq in self.seqs.values() if seq.running_spans]
        before = min(first, default=self.steps.tick)
        self.log.forget(before)
        self.steps.forget(before - 1)  # the first step kept begins when the one before it ended
        self._max_kept_steps = 2 * self.steps.count + MIN_KEPT_STEPS
