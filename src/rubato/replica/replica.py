"""The only code that changes the state of a replica: no I/O, no clock of its own.

A life in six calls: `submit` puts a request in `waiting`; `view` shows the replica to a policy; `begin` checks the
policy's plan and makes it a run of steps; `end` books what they brought; `cancel` and `fail` end requests early. Each
returns the events it caused. An engine is given a batch with an entry for each sequence (`apply`, `commit`: one step);
a simulator says of a run only how its steps ended and which sequences to look at. What a plan hands off is another
replica's from then on: here it only keeps its KV until `release`; there `reserve` and `arrive` take the place of
`submit`. What a router recalls (`recall`) is handed off without KV before the next plan (`hand_back`). A request that
waits for a tool is neither waiting nor running until `resume`; its KV is kept as that of a prefix is, until the memory
is needed. There is no prefill phase and no decode phase: a sequence has `length` tokens of which `cached` are in KV,
and the difference is pending. A sequence with one pending is in the `DecodePool`: a step does no work for it.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from math import inf

from rubato.core.clock import HandClock
from rubato.core.events import (
    Demoted,
    Event,
    Finished,
    HandedOff,
    Preempted,
    Promoted,
    Returned,
    Started,
    Tokens,
    Transferred,
)
from rubato.core.interfaces import LatencyModel, View
from rubato.core.plan import Batch, Emitted, Entry, Limits, Plan, Recall, StepResult
from rubato.core.replica_options import DEFAULT_OPTIONS, ReplicaOptions
from rubato.core.request import NOTHING, Cause, Handoff, HandoffReason, Outcome, Request, without_texts
from rubato.core.slo import StageTimes, judge
from rubato.replica.kv_ledger import KVByBlock, KVCounts
from rubato.replica.miss_cause import MissCauses
from rubato.replica.plan_check import check, check_emitted
from rubato.replica.sequence import Seq, Wait
from rubato.replica.step_log import Chunk, Run, Speculation, StepLog
from rubato.replica.view import ReplicaState

KEPT = 4096  # steps kept before checking which are still wanted


def refusal_reason(request: Request, limits: Limits) -> str | None:
    """Why a replica with these limits could not run it even alone, None if it could."""
    most = request.prompt + request.sampling.max_tokens
    if most > limits.max_model_len:
        return "rejected-too-long"
    return "rejected-exceeds-kv" if limits.blocks(most) > limits.kv_blocks else None


def _order(seq: Seq) -> int:
    """What the queue is sorted by: requests wait in the order in which they were submitted, whenever they arrived."""
    return seq.order


class Replica(ReplicaState):
    """Sequences, queues and KV of one engine. `latency` predicts steps, for views and for blaming interference.

    counts: KV blocks have no ids; then nothing is shared, no request waits for tools, and a run may have many steps.
    tokens: tell of each token (`Tokens`). decodes: called with each sequence that joins those that decode. ended:
    called with each end and the times it was judged by. output_ids: the ids of output tokens first, ..., after - 1,
    where the steps do not tell them.
    """

    def __init__(
        self,
        id: str,
        limits: Limits,
        latency: LatencyModel,
        options: ReplicaOptions = DEFAULT_OPTIONS,
        *,
        supports: frozenset[str] = frozenset(),
        counts: bool = False,
        tokens: bool = True,
        clock: HandClock | None = None,
        decodes: Callable[[Seq], None] | None = None,
        ended: Callable[[Finished, Sequence[StageTimes]], None] | None = None,
        output_ids: Callable[[int, int], Sequence[int]] | None = None,
    ) -> None:
        kv: KVCounts | KVByBlock
        if counts:
            kv = KVCounts(limits.kv_blocks, limits.block_size)
        else:
            kv = KVByBlock(id, limits.kv_blocks, limits.block_size, options.prefix_cache)
        super().__init__(id, limits, latency, supports, kv, clock or HandClock())
        self.in_flight: Batch | None = None
        self._log = StepLog(self.steps)
        self._causes = MissCauses(self.steps, self._log, latency) if options.causes else None
        self._asked_since = inf  # by the clock: when a view was first asked for; it is idle no longer than that
        self._seqs: dict[str, Seq] = {}
        self._order = 0
        self._started = 0
        self._most_kept = KEPT
        self._lengths = options.lengths
        self._slo_rule = options.slo_rule
        self._prefix_cache = options.prefix_cache
        self._tell_tokens = tokens
        self._decodes = decodes
        self._ended = ended
        self._output_ids = output_ids
        self._groups: dict[str, list[Seq]] = {}
        self.recalled: list[Seq] = []
        self._gone: list[str] = []
        self._untold: list[Event] = []  # of a call that raised half-way: `fail` tells them
        self._drafted: list[Seq] = []  # whose draft is to be verified in the next step that they are in, or never
        self._looked_up = -1  # the version of `kv` at which those that wait were looked up
        self._unseen = False  # whether a request has come to wait since

    # ----------------------------------------------------------------- coming and going

    def submit(self, request: Request, now: float) -> list[Event]:
        """Queue a request. One that could never be run is refused at once, with a reason that says why. Raises
        ValueError for one that shares KV, or waits for tools, where KV is counted only."""
        if not self.kv.by_block and (request.group or request.tools):
            raise ValueError(f"request {request.id!r} shares KV or waits for a tool: that needs blocks with ids")
        seq = self._new(request, now)
        if reason := refusal_reason(request, self.limits):
            return [self._finished(seq, now, "refused", reason)]
        self._seqs[request.id] = seq
        if request.group:
            group = self._groups.setdefault(request.group, [])
            group.append(seq)
            if len(group) > 1 and not self._prompt_is_in(group[0]):
                seq.held = True
                return []
        self._wait(seq)
        return []

    def reserve(self, request: Request, now: float) -> list[Event] | None:
        """Hold KV for a request on its way here, from a replica that handed it off; None while that much is not free.
        One that could never be run is refused."""
        handoff = request.handoff
        assert handoff is not None, "what was not handed off is submitted"
        seq = self._new(request, now)
        if reason := refusal_reason(request, self.limits):
            return [self._finished(seq, now, "refused", reason)]
        most = self.limits.max_running
        if most is not None and len(self.running) + len(self.leaving) + len(self.arriving) >= most:
            return None
        if self.limits.blocks(handoff.cached) > self.kv.free:
            return None
        self.kv.reserve(seq, handoff.cached)
        seq.cached = handoff.cached
        seq.since = handoff.at
        self._seqs[request.id] = self.arriving[request.id] = seq
        return []

    def arrive(self, id: str, size: int, now: float) -> list[Event]:
        """The KV of a reserved request, `size` bytes, is here: it runs on."""
        seq = self.arriving.pop(id)
        assert seq.request.handoff is not None
        self._run_from_now(seq, now, "transfer")
        self._here(seq)
        self.kv.name(seq, 0)
        if seq.pending > 1:
            self._prefills(seq)
        elif self.run is not None:
            self.resting.append(seq)
        else:
            self._join(seq)
        return [Transferred(now, id, self.id, seq.request.handoff.source, seq.cached, size)]

    def release(self, id: str) -> bool:
        """The KV of a request that left, or that will not come after all, is free again. Whether it was here."""
        seq = self.leaving.pop(id, None)
        if seq is None and id in self.arriving:
            seq = self.arriving.pop(id)
            del self._seqs[id]
        if seq is None:
            return False
        self.kv.release(seq)
        self._gone.append(id)
        return True

    def cancel(self, id: str, now: float, reason: str, outcome: Outcome = "cancelled") -> list[Event]:
        """End a request now. KV that the batch in flight uses goes back at its end. Unknown id: nothing."""
        seq = self._seqs.get(id)
        if seq is None or seq.ended:
            return []
        return [self._end(seq, now, outcome, reason)]

    def resume(self, id: str, now: float) -> list[Event]:
        """The tool that a request waits for has returned: its next stage begins, in the queue. Ignored for one that
        waits for none."""
        seq = self._seqs.get(id)
        if seq is None or not seq.calling:
            return []
        seq.calling = seq.started = False
        self._next_stage(seq, now)
        self._queue(seq, now)
        return [Returned(now, id)]

    def fail(self, now: float, reason: str) -> list[Event]:
        """The engine broke: every request here ends as failed, all KV is free. What is on its way from here or to here
        is just forgotten: it has not begun here, or is another's by now."""
        run = self.run
        if run is not None:
            run.steps = run.done
            if not run.done:
                self._log.drop()
            self.kv.give_up(run)
            self._landed(now)
        for id in [*self.leaving, *self.arriving]:
            self.release(id)
        events, self._untold = self._untold, []
        for seq in list(self._seqs.values()):
            if seq.ended:
                self._release(seq)
            else:
                events.append(self._end(seq, now, "failed", reason))
        self.ending.clear()
        self.resting.clear()
        self.kv.clear()
        return events

    def recall(self, kind: Recall) -> bool:
        """Mark for `hand_back` those that now hold no KV, or are best effort; not those that move or wait for a tool.
        Whether there are any."""
        here = [s for s in self._seqs.values() if not (s.ended or s.calling or s.id in self.arriving)]
        chosen = [s for s in here if (s.best_effort if kind == "best_effort" else s.id not in self.running)]
        self.recalled += chosen
        return bool(chosen)

    def hand_back(self, now: float) -> list[Event]:
        """Hand off what was recalled and is still here, in the order of the queue. Not while a batch is in flight."""
        marked, self.recalled = self.recalled, []
        here = {s.id: s for s in marked if self._seqs.get(s.id) is s and not s.calling}  # marked twice, it goes once
        events: list[Event] = []
        self._untold = events
        for seq in sorted(here.values(), key=_order):
            events.append(self._hand_off(seq, "recalled", now, with_kv=False))
        self._untold = []
        return events

    def gone(self) -> list[str]:
        """Ids that ended since the last call and that no batch mentions any more."""
        ids, self._gone = self._gone, []
        return ids

    @property
    def empty(self) -> bool:
        return not self._seqs and not self.leaving

    @property
    def idle(self) -> bool:
        """Nothing is here that a plan could be about."""
        return not self.here

    # ----------------------------------------------------------------- steps

    def view(self, now: float) -> View:
        """As it is now; the same object each time, which goes on showing what is."""
        self._asked_since = min(self._asked_since, now)
        if self.run is None:
            self.latency.idle(now - max(self.idle_since, self._asked_since))
        self._show(now)
        return self.shown

    def begin(self, plan: Plan, now: float, policy: str) -> tuple[Run | None, list[Event]]:
        """Carry out a plan up to the engine's part: the run of one step that it is, unless it is empty. A simulator
        gives it more steps and their ends. Raises PlanError, with nothing changed, for an impossible plan."""
        if self.run is not None:
            raise RuntimeError(f"replica {self.id!r}: a batch is in flight; commit it before the next plan")
        check(plan, self.shown, policy)
        if self.kv.by_block:  # before anything is given back or reused: what the plan counted on is still there
            for work in plan.work:
                if work.seq not in self.running:
                    self.kv.take_found(self._seqs[work.seq])
        events: list[Event] = []
        if plan.drop or plan.handoff or plan.preempt or plan.demote or plan.promote:
            self._untold = events
            self._carry_out(plan, now, events)
            self._untold = []
        if plan.work and not plan.decode and self.pool.count:
            self._rest({work.seq for work in plan.work})
        order: list[Seq] = []
        chunks: list[Chunk] = []
        speculation: dict[str, Speculation] = {}
        for id, tokens, verify, draft in plan.work:
            seq = self._seqs[id]
            order.append(seq)
            if id not in self.running:
                self._start(seq, now, events)
            if verify or draft is not None:
                speculation[id] = Speculation(seq, seq.cached, tokens, verify, draft)
                seq.in_flight = len(verify)
            if not seq.decoding:
                chunks.append(Chunk(seq, seq._cached, tokens, seq.pending if plan.steady else tokens))
                seq.in_flight = tokens + len(verify)
        if not order and not (plan.decode and self.pool.count):
            return None, events
        return self._begun(now, chunks, order, plan.decode, speculation), events

    def go_on(self, now: float) -> Run:
        """`begin`, of the plan that gives all that decode a token, and for which there is KV."""
        return self._begun(now, (), (), True, NOTHING)

    def _begun(
        self, now: float, chunks: Sequence[Chunk], order: Sequence[Seq], decode: bool,
        speculation: Mapping[str, Speculation],
    ) -> Run:  # fmt: skip
        steps, pool = self.steps, self.pool
        self.run = run = Run(now, steps.tick, pool.count, pool.kv, chunks, order, decode, [inf], speculation)
        self.kv.begin(run)
        steps.under_way = True
        if self._causes is not None:
            self._log.keep(run)
        return run

    def end(self, emitted: Mapping[str, Emitted], now: float) -> list[Event]:
        """The run's last step has ended now, or when `Run.ends` says. emitted: what sequences got out of it, in the
        order of the batch; a decode that is not named got one token and goes on. Raises RuntimeError for tokens that
        verification cannot have brought (`check_emitted`)."""
        run = self.run
        assert run is not None, "no run is under way"
        self.book(run)
        if self._output_ids is not None and self.kv.by_block:
            for seq in self.pool.filling():
                self._catch_up(seq)
        self.kv.end(run)
        self._landed(now)
        run.order = ()  # the log keeps the run, and need not keep sequences that have ended
        events: list[Event] = []
        if not (emitted or run.chunks or self.resting or self.ending or self._drafted or self._groups):
            return events
        for chunk in run.chunks:
            seq = chunk.seq
            if seq.ended:
                continue
            self.kv.name(seq, chunk.start)
            if seq.pending == 1:
                self.prefilling.pop(seq.id, None)
                self._join(seq)
        drafted: list[Seq] = []
        if self._drafted:
            drafted = [seq for seq in self._drafted if seq.decoding]
            self._drafted = [seq for seq in self._drafted if not seq.decoding]
        if self.resting:
            for seq in self.resting:
                if not seq.ended and self.running.get(seq.id) is seq:
                    self._join(seq)
            self.resting.clear()
        for name, group in self._groups.items():
            if any(seq.id in self.running for seq in group):
                self._release_group(name)
        self._untold = events
        for id, out in emitted.items():
            seq = self._seqs[id]
            if not seq.ended:
                self._emit(seq, out, now, run, events)
        self._untold = []
        for seq in drafted:
            if seq.id not in emitted:
                seq.draft = None
        if self.ending:
            for seq in self.ending:
                self._release(seq)
            self.ending.clear()
        return events

    def apply(self, plan: Plan, now: float, policy: str) -> tuple[Batch, list[Event]]:
        """`begin`, for an engine: the step as a batch with an entry for each sequence."""
        self._show(now)
        run, events = self.begin(plan, now, policy)
        if run is None:
            return Batch(), events
        batch = self.in_flight = self.batch(run)
        return batch, events

    def batch(self, run: Run) -> Batch:
        """The run of one step that has just begun, with an entry for each sequence."""
        seqs = run.order
        if run.decode:
            named = {seq.id for seq in run.order}
            seqs = [*(seq for seq in self.running.values() if seq.decoding and seq.id not in named), *run.order]
        chunks = {chunk.seq.id: chunk.tokens for chunk in run.chunks}  # the others decode
        entries = [self._entry(seq, chunks.get(seq.id, 1), run.speculation.get(seq.id)) for seq in seqs]
        return Batch(tuple(entries), run.shape(0).spec_steps)

    def commit(self, batch: Batch, result: StepResult, now: float) -> list[Event]:
        """`end`, of a batch that an engine has run: KV written, tokens out, stages and requests ended. Raises
        RuntimeError as `end`, and for another batch than the one in flight."""
        if batch is not self.in_flight or self.run is None:
            raise RuntimeError(f"replica {self.id!r}: commit of a batch that is not in flight")
        self.run.ends = [now]
        self.run.begin = now - result.seconds
        return self.end({e.seq: result.emitted[e.seq] for e in batch.entries if e.sample}, now)

    # ----------------------------------------------------------------- a plan is carried out

    def _carry_out(self, plan: Plan, now: float, events: list[Event]) -> None:
        """What a plan says beside work."""
        for id, reason in plan.drop.items():
            events.append(self._end(self._seqs[id], now, "refused", reason))
        for id, why in plan.handoff.items():
            events.append(self._hand_off(self._seqs[id], why, now, with_kv=id not in plan.without_kv))
        for id in plan.preempt:
            events.append(self._preempt(self._seqs[id], now))
        for id in plan.demote:
            self._seqs[id].demoted = True
            events.append(Demoted(now, id))
        for id in plan.promote:
            self._seqs[id].demoted = False
            events.append(Promoted(now, id))

    def _rest(self, at_work: set[str]) -> None:
        """Those that could decode and are not asked to."""
        for seq in self.running.values():
            if seq.decoding and seq.id not in at_work:
                self._leave_pool(seq)
                self.resting.append(seq)

    def _start(self, seq: Seq, now: float, events: list[Event]) -> None:
        self.waiting.remove(seq)
        self._run_from_now(seq, now, "preemption" if seq.started else "queue")
        events.append(Started(now, seq.id, resumed=seq.started, cached=seq.cached))
        seq.started = True
        if seq.pending > 1:
            self._prefills(seq)
        else:
            self._join(seq)

    def _run_from_now(self, seq: Seq, now: float, cause: Cause) -> None:
        tick = self.steps.tick
        self.running[seq.id] = seq
        self._started += 1
        seq.nth = self._started
        seq.waits.append(Wait(tick, now - seq.since, cause, seq.recompute))
        seq.recompute = False
        seq.begun.append((tick, -1))
        if self._dues is not None:
            self._dues.add(seq)

    def _prefills(self, seq: Seq) -> None:
        self.prefilling[seq.id] = seq
        if next(reversed(self.running)) != seq.id:  # in order of start
            self.prefilling = {id: s for id, s in self.running.items() if id in self.prefilling}
        self._renew(seq)

    def _join(self, seq: Seq) -> None:
        self.pool.join(seq)
        self._renew(seq)
        if self._decodes is not None:
            self._decodes(seq)

    def _leave_pool(self, seq: Seq) -> None:
        self.pool.leave(seq)
        self._catch_up(seq)
        self._renew(seq)

    def _renew(self, seq: Seq) -> None:
        if self._dues is not None:
            self._dues.renew(seq)

    def _entry(self, seq: Seq, tokens: int, spec: Speculation | None) -> Entry:
        verify, draft = (spec.verify, spec.draft) if spec is not None else ((), None)
        return Entry(seq.id, seq.cached, tokens + len(verify), seq.block_ids, tokens == seq.pending, verify, draft)

    # ----------------------------------------------------------------- what a step brought

    def _landed(self, now: float) -> None:
        """No batch is in flight any more."""
        if self.run is not None:
            for chunk in self.run.chunks:
                chunk.seq.in_flight = 0
            if self.run.speculation:
                for spec in self.run.speculation.values():
                    spec.seq.in_flight = 0
        self.run = self.in_flight = None
        self.steps.under_way = False
        self.idle_since = now

    def _emit(self, seq: Seq, out: Emitted, now: float, run: Run, events: list[Event]) -> None:
        """Tokens of one sequence came out."""
        spec = run.speculation.get(seq.id) if run.speculation else None
        if spec is not None or out.tokens != 1 or out.accepted:
            check_emitted(out, seq.id, spec.verify if spec is not None else (), seq.draft)
        more = out.tokens - 1
        if seq.decoding:
            if seq.first_token_at is None:
                seq.first_token(now)
                self._renew(seq)
            if more:
                self.pool.accept(seq, [now] * more)
                self._renew(seq)
        else:
            seq.got([now] * out.tokens)
            seq._cached += more
            seq.spans.append((self.steps.tick - 1, self.steps.tick))
            self.prefilling.pop(seq.id, None)
            self.shown.pending += 1
        if self._output_ids is None:
            if seq.token_ids is not None:
                seq.token_ids += out.token_ids
            if seq.ids is not None:
                seq.extend(out.token_ids, out.tokens)
                seq.learn_keys(self.limits.block_size)
        seq.draft = out.draft
        if out.draft is not None:
            self._drafted.append(seq)
        if out.tried:
            seq.tried += out.tried
            seq.accepted += more
        if spec is not None and spec.verify:
            self._catch_up(seq)
            self.kv.accepted(seq, more, ended=out.finish is not None)
        stage_done = out.finish is None and out.stage_done and seq.stage + 1 < len(seq.request.stages)
        if self._tell_tokens and (out.tokens or out.text):
            event = Tokens(now, seq.id, out.tokens, out.text, out.token_ids, seq.stage, out.logprobs, stage_done,
                           out.tried, out.accepted)  # fmt: skip
            events.append(event)
        if out.finish is not None:
            events.append(self._end(seq, now, "completed", out.finish))
        elif stage_done:
            self._end_stage(seq, now)
        elif not seq.decoding:
            self._join(seq)

    def _end_stage(self, seq: Seq, now: float) -> None:
        """The next stage begins, or waits for its tool."""
        if seq.decoding:
            self._leave_pool(seq)
        if seq.request.stages[seq.stage + 1].tool:
            seq.calling = True
            self._no_longer_here(seq)
            self._catch_up(seq)
            self._stop(seq, keep=True)
            return
        self._next_stage(seq, now)
        self.shown.pending += seq.pending - 1
        if seq.pending > 1:
            self._prefills(seq)
        else:
            self._join(seq)

    def _next_stage(self, seq: Seq, now: float) -> None:
        self._catch_up(seq)
        seq.next_stage(now)
        stage = seq.request.stages[seq.stage]
        seq.extend(stage.token_ids, stage.prompt)
        seq.learn_keys(self.limits.block_size)

    def _catch_up(self, seq: Seq) -> None:
        """Write down the ids of its output tokens, where the steps do not tell them."""
        if seq.ids is None or self._output_ids is None:
            return
        missing = seq.length - len(seq.ids)
        if missing:
            total = seq.total_output
            seq.ids += self._output_ids(total - missing, total)
            seq.learn_keys(self.limits.block_size)

    # ----------------------------------------------------------------- parts

    def _new(self, request: Request, now: float) -> Seq:
        if request.id in self._seqs or request.id in self.leaving:
            raise ValueError(f"request id {request.id!r} is here already: ids must be unique")
        self._order += 1
        ids: list[int] | None = None
        if self.kv.by_block and request.stages[0].token_ids and (self._prefix_cache or request.group):
            ids = list(request.stages[0].token_ids)
        seq = Seq(request, self._order, now, steps=self.steps, lengths=self._lengths, kv=self.kv, token_ids=[], ids=ids)
        self.kv.register(seq, request)
        return seq

    def _wait(self, seq: Seq) -> None:
        """It is in the queue from now on."""
        insort(self.waiting, seq, key=_order)
        self._here(seq)
        self._unseen = True

    def _here(self, seq: Seq) -> None:
        """Plans can be about it from now on."""
        self.here[seq.id] = seq
        self.shown.count += 1
        self.shown.pending += seq.pending

    def _no_longer_here(self, seq: Seq) -> None:
        """No plan can be about it from now on."""
        if self.here.pop(seq.id, None) is not None:
            self.shown.count -= 1
            self.shown.pending -= seq.pending
            if seq.id not in self.running:
                self.waiting.remove(seq)

    def _show(self, now: float) -> None:
        """The view is of now, and says of those that wait what they need not compute."""
        self.clock.time = now
        if not self.kv.by_block:
            return
        version = self.kv.version
        if version == self._looked_up and not self._unseen:
            return
        self._looked_up, self._unseen = version, False
        for seq in self.waiting:
            if seq.seen != version:
                self.shown.pending += seq.cached
                self.kv.look_up(seq)
                self.shown.pending -= seq.cached

    def _prompt_is_in(self, first: Seq) -> bool:
        """Whether the others of its group, if they start now, find its prompt's KV."""
        block = self.limits.block_size
        return first.cached >= first.request.stages[0].prompt // block * block

    def _release_group(self, name: str) -> None:
        """Move to the queue those held behind the first of their group, or the next of them."""
        group = self._groups.get(name, [])
        for at, seq in enumerate(group):
            if seq.held and (at == 0 or self._prompt_is_in(group[0])):
                seq.held = False
                self._wait(seq)

    def _leave_group(self, seq: Seq) -> None:
        if not seq.request.group:
            return
        group = self._groups[seq.request.group]
        group.remove(seq)
        self._release_group(seq.request.group)
        if not group:
            del self._groups[seq.request.group]

    def _preempt(self, seq: Seq, now: float) -> Event:
        self._no_longer_here(seq)
        self._stop(seq)
        seq.recompute = True
        self._queue(seq, now)
        return Preempted(now, seq.id)

    def _stop(self, seq: Seq, keep: bool = False) -> None:
        """It runs no longer and holds no KV. keep: what can be found stays so."""
        self._run_no_longer(seq)
        self.kv.release(seq, keep)

    def _run_no_longer(self, seq: Seq) -> None:
        if seq.decoding:
            self.pool.leave(seq)
            self._catch_up(seq)
        self.prefilling.pop(seq.id, None)
        del self.running[seq.id]
        if self._dues is not None:
            self._dues.drop(seq)
        seq.begun[-1] = (seq.begun[-1][0], self.steps.tick)
        seq.draft = None

    def _queue(self, seq: Seq, now: float) -> None:
        """It waits, again."""
        seq.since = now
        seq.seen = -1
        self._wait(seq)

    def _hand_off(self, seq: Seq, reason: HandoffReason, now: float, *, with_kv: bool) -> Event:
        before = seq.request.handoff
        runs = seq.id in self.running
        if not runs:
            seq.waits.append(Wait(self.steps.tick, now - seq.since, "preemption" if seq.started else "queue", False))
        delays = self.delays(seq)
        self._no_longer_here(seq)
        del self._seqs[seq.id]
        self._leave_group(seq)
        cached = 0
        if runs and with_kv:
            self._run_no_longer(seq)
            self.leaving[seq.id] = seq
            cached = seq.cached
        else:
            if runs:
                self._stop(seq)
            self._gone.append(seq.id)
        handoff = Handoff(self.id, reason, now, cached, before.hops + 1 if before else 1)
        output = seq.total_output
        if self._output_ids is not None and seq.token_ids is not None:
            seq.token_ids += self._output_ids(len(seq.token_ids), output)
        progress = seq.progress(delays) if output > 0 or seq.demoted or delays else None
        return HandedOff(now, seq.id, replace(seq.request, group="", progress=progress, handoff=handoff))

    def _end(self, seq: Seq, now: float, outcome: Outcome, reason: str) -> Finished:
        run = self.run
        busy = run is not None and (seq.decoding or any(seq is chunk.seq for chunk in run.chunks))
        if seq.decoding and not busy:
            seq.settle()
        event = self._finished(seq, now, outcome, reason)
        if outcome == "completed" and self._lengths is not None:
            self._lengths.learn(seq.request, event.output)
        seq.ended = True  # not before there is an event that says so
        self._no_longer_here(seq)
        self.arriving.pop(seq.id, None)
        self._leave_group(seq)
        if busy:
            self.ending.append(seq)
        else:
            self._release(seq)
        return event

    def _release(self, seq: Seq) -> None:
        if seq.id in self.running:
            self._stop(seq)
        else:
            self.kv.release(seq)
        del self._seqs[seq.id]
        self._gone.append(seq.id)
        seq.request = without_texts(seq.request)  # the log still has it in thousands of steps
        if self.steps.kept > self._most_kept:
            self._forget_steps()

    def _forget_steps(self) -> None:
        """Forget the steps before any sequence now here first ran."""
        before = min((seq.begun[0][0] for seq in self._seqs.values() if seq.begun), default=self.steps.tick)
        self._log.forget(before)
        self.steps.forget(before - 1)  # the first step kept begins when the one before it ended
        self._most_kept = 2 * self.steps.kept + KEPT

    def forget_all(self) -> None:
        """No step is asked about any more."""
        self._log.clear()

    def delays(self, seq: Seq) -> Mapping[Cause, float]:
        """Seconds lost so far, by cause."""
        return seq.before if self._causes is None else self._causes.delays(seq)

    def _finished(self, seq: Seq, now: float, outcome: Outcome, reason: str) -> Finished:
        stages = [StageTimes(start, times) for start, times in zip(seq.starts, seq.times_of_all(), strict=True)]
        verdict = judge(seq.request, stages, outcome, self._slo_rule)
        if outcome == "completed" and not verdict.met and (delays := self.delays(seq)):
            verdict = replace(verdict, cause=max(delays.items(), key=lambda item: item[1])[0])
        event = Finished(now, seq.id, outcome, reason, verdict, seq.total_output, seq.best_effort)
        if self._ended is not None:
            self._ended(event, stages)
        return event

    def check_integrity(self) -> None:
        """Raise AssertionError unless the counts are what looking at every sequence gives, KV is conserved and the
        queues agree with each other."""
        seqs = self._seqs.values()
        self.kv.check_integrity([*self.running.values(), *self.leaving.values(), *self.arriving.values()])
        held = [s for group in self._groups.values() for s in group if s.held]
        calling = [s for s in seqs if s.calling]
        ids = [s.id for s in [*self.waiting, *held, *calling]] + [*self.running, *self.arriving]
        assert sorted(ids) == sorted(self._seqs), "waiting, held, calling, running and arriving are not a partition"
        assert not held or len(held) < len(self._seqs), "all are held behind one that is not here"
        running = [s for s in self.running.values() if not s.ended]
        assert sorted(self.here) == sorted(s.id for s in [*self.waiting, *running]), (
            "the sequences that a plan can name"
        )
        assert self.shown.count == len(self.here)
        assert self.shown.pending == sum(s.pending for s in self.here.values()), "pending tokens"
        decodes = [s for s in self.running.values() if s.decoding]
        assert self.pool.count == len(decodes), "those that decode"
        assert self.pool.kv == sum(s.cached for s in decodes), "their KV"
        assert self.pool.blocks() == sum(s.cached % self.limits.block_size == 0 for s in decodes), (
            "the blocks they need"
        )
        for seq in seqs:
            assert seq.cached <= seq.length, "more cached than there is"
