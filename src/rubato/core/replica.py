"""The state of one replica, and the only code that changes it: no I/O, no clock.

A life in five calls: `submit` puts a request in `waiting`; `view` shows the replica to a policy; `apply` checks the
policy's plan and makes it a batch; `commit` books what the engine returned; `cancel` and `fail` end requests early.
Each returns the events it caused. What a plan hands off is another replica's from then on: here it only keeps its KV
until `release`; there `reserve` and `arrive` take the place of `submit`. What a router recalls (`recall`) is handed off
without KV before the next plan (`hand_back`). A request that waits for a tool is neither
waiting nor running until `resume`; its KV is kept as that of a prefix is, as long as nobody needs the memory. There is
no prefill phase and no decode phase: a sequence has `length` tokens of which `cached` are in KV, and the difference is
pending.
"""

from __future__ import annotations

from bisect import insort
from dataclasses import replace
from math import inf

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
from rubato.core.interfaces import LatencyModel, LengthPredictor, View
from rubato.core.kv_blocks import KVBlocks, first_key, next_key
from rubato.core.miss_cause import delays_by_cause
from rubato.core.plan import ANY, NO_BATCH, Batch, Emitted, Entry, Limits, Plan, Recall, StepResult, Work
from rubato.core.plan_check import check, check_emitted, spelled_out
from rubato.core.request import Handoff, HandoffReason, Outcome, Request
from rubato.core.sequence import Seq
from rubato.core.slo import StageTimes, judge


def refusal_reason(request: Request, limits: Limits) -> str | None:
    """Why a replica with these limits could not run it even alone, None if it could."""
    most = request.prompt + request.sampling.max_tokens
    if most > limits.max_length:
        return "rejected-too-long"
    return "rejected-exceeds-kv" if limits.blocks(most) > limits.kv_blocks else None


def _order(seq: Seq) -> int:
    """What the queue is sorted by: requests wait in the order in which they were submitted, whenever they arrived."""
    return seq.order


class Replica:
    """Sequences, queues and KV of one engine. `latency` predicts steps, for views and for blaming interference.

    prefix_cache: requests of one tenant that begin alike share the KV of full blocks, also after the first has ended.
    """

    def __init__(
        self,
        id: str,
        limits: Limits,
        latency: LatencyModel,
        *,
        supports: frozenset[str] = frozenset(),
        lengths: LengthPredictor | None = None,
        rule: str = "deadline",
        prefix_cache: bool = False,
    ) -> None:
        self.id = id
        self.limits = limits
        self.latency = latency
        self.supports = supports
        self.kv = KVBlocks(limits.kv_blocks, limits.block, keep=prefix_cache)
        self.waiting: list[Seq] = []
        self.running: dict[str, Seq] = {}
        self.leaving: dict[str, Seq] = {}  # handed off, KV still here
        self.arriving: dict[str, Seq] = {}  # reserved, KV not yet here
        self.role = ANY
        self.in_flight: Batch | None = None
        self.shape = NO_BATCH  # of the batch in flight
        self.busy_until = 0.0
        self._asked_since = inf  # by the clock: when a view was first asked for; it is idle no longer than that
        self._seqs: dict[str, Seq] = {}
        self._order = 0
        self._lengths = lengths
        self._rule = rule
        self._prefix_cache = prefix_cache
        self._drafts = "draft" in supports
        self._groups: dict[str, list[Seq]] = {}
        self._recalled: list[Seq] = []
        self._gone: list[str] = []

    # ----------------------------------------------------------------- coming and going

    def submit(self, request: Request, now: float) -> list[Event]:
        """Queue a request. One that could never be run is refused at once, with a reason that says why."""
        seq = self._new(request, now)
        if reason := refusal_reason(request, self.limits):
            return [self._finished(seq, now, "refused", reason)]
        self._seqs[request.id] = seq
        group = self._groups.setdefault(request.group, []) if request.group else []
        group.append(seq)
        if len(group) > 1 and not self._prompt_is_in(group[0]):
            seq.held = True
        else:
            insort(self.waiting, seq, key=_order)
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
        self.kv.grow(seq.block_ids, handoff.cached)
        seq.cached = handoff.cached
        seq.since = handoff.at
        self._seqs[request.id] = self.arriving[request.id] = seq
        return []

    def arrive(self, id: str, size: int, now: float) -> list[Event]:
        """The KV of a reserved request, `size` bytes, is here: it runs on."""
        seq = self.arriving.pop(id)
        assert seq.request.handoff is not None
        self.running[id] = seq
        seq.book_delay("transfer", now - seq.since)
        tokens, seq.cached = seq.cached, 0
        self._advance(seq, tokens)
        return [Transferred(now, id, self.id, seq.request.handoff.source, tokens, size)]

    def release(self, id: str) -> bool:
        """The KV of a request that left, or that will not come after all, is free again. Whether it was here."""
        seq = self.leaving.pop(id, None)
        if seq is None and id in self.arriving:
            seq = self.arriving.pop(id)
            del self._seqs[id]
        if seq is None:
            return False
        self.kv.release(seq.block_ids)
        self._gone.append(id)
        return True

    def cancel(self, id: str, now: float, reason: str, outcome: Outcome = "cancelled") -> list[Event]:
        """End a request now. KV that the batch in flight uses goes back at its commit. Unknown id: nothing."""
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
        self._landed(now)
        for id in [*self.leaving, *self.arriving]:
            self.release(id)
        events: list[Event] = []
        for seq in list(self._seqs.values()):
            if seq.ended:
                self._release(seq)
            else:
                events.append(self._end(seq, now, "failed", reason))
        self.kv.clear()
        return events

    def recall(self, kind: Recall) -> bool:
        """Mark for `hand_back` those that now hold no KV, or are best effort; not those that move or wait for a tool.
        Whether there are any."""
        here = [s for s in self._seqs.values() if not (s.ended or s.calling or s.id in self.arriving)]
        chosen = [s for s in here if (s.best_effort if kind == "best_effort" else s.id not in self.running)]
        self._recalled += chosen
        return bool(chosen)

    def hand_back(self, now: float) -> list[Event]:
        """Hand off what was recalled and is still here, in the order of the queue. Not while a batch is in flight."""
        marked, self._recalled = self._recalled, []
        here = {s.id: s for s in marked if self._seqs.get(s.id) is s and not s.calling}  # marked twice, it goes once
        return [self._hand_off(s, "recalled", now, with_kv=False) for s in sorted(here.values(), key=_order)]

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
        return not self.waiting and not self.running

    # ----------------------------------------------------------------- one step

    def view(self, now: float) -> View:
        self._asked_since = min(self._asked_since, now)
        if self.in_flight is None:
            self.latency.idle(now - max(self.busy_until, self._asked_since))
        for seq in self.waiting:
            if seq.seen != self.kv.version:
                self._look_up(seq)
        limits = self.limits
        moving: tuple[Seq, ...] = ()
        if self.leaving or self.arriving:
            moving = (*self.leaving.values(), *self.arriving.values())
            if limits.max_running is not None:  # they hold KV, too
                limits = replace(limits, max_running=limits.max_running - len(moving))
        return View(
            id=self.id,
            now=now,
            waiting=self.waiting,
            running=[s for s in self.running.values() if not s.ended],
            kv_free=self.kv.free,
            kv_total=self.kv.total,
            limits=limits,
            latency=self.latency,
            supports=self.supports,
            busy_until=self.busy_until,
            role=self.role,
            moving=moving,
            in_flight=self.shape,
        )

    def apply(self, plan: Plan, now: float, policy: str) -> tuple[Batch, list[Event]]:
        """Carry out a plan up to the engine's part. Raises PlanError, with nothing changed, for an impossible one."""
        if self.in_flight is not None:
            raise RuntimeError(f"replica {self.id!r}: a batch is in flight; commit it before the next plan")
        view = self.view(now)
        check(plan, view, policy)
        plan = spelled_out(plan, view)
        starting = [self._seqs[work.seq] for work in plan.work if work.seq not in self.running]
        for seq in starting:  # before anything is given back or reused: what the plan counted on is still there
            self.kv.take(seq.block_ids, self.kv.find(seq.keys[1 : 1 + seq.cached // self.limits.block]))
            seq.shared = 0
        events: list[Event] = []
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
        entries = [self._entry(self._seqs[work.seq], work, now, events) for work in plan.work]
        steps = max((w.draft[0] for w in plan.work if w.draft), default=0) if self._drafts else 0
        batch = Batch(tuple(entries), steps)
        if entries:
            self.in_flight, self.shape = batch, batch.shape
            self.busy_until = now + self.latency.step_time(self.shape)
        return batch, events

    def commit(self, batch: Batch, result: StepResult, now: float) -> list[Event]:
        """Book a finished batch: KV written, tokens out, stages and requests ended. Raises RuntimeError for tokens that
        verification cannot have brought (`check_emitted`)."""
        if batch is not self.in_flight:
            raise RuntimeError(f"replica {self.id!r}: commit of a batch that is not in flight")
        self._landed(now)
        delays_by_cause(batch, result.seconds, self._seqs, self.running, self.latency)
        events: list[Event] = []
        for entry in batch.entries:
            seq = self._seqs[entry.seq]
            seq.in_flight = 0
            if seq.ended:
                self._release(seq)
                continue
            if entry.sample:
                check_emitted(result.emitted[entry.seq], entry, seq.draft)
            self._advance(seq, entry.count - len(entry.verify) if entry.verify else entry.count)
            if entry.sample:
                out = result.emitted[entry.seq]
                self._emit(seq, out, now, events)
                if entry.verify and not seq.ended:
                    self._advance(seq, out.tokens - 1)  # the last one's KV is not there yet
                    self.kv.shrink(seq.block_ids, seq.cached)
                if seq.calling:
                    self._leave_for_tool(seq)
        return events

    # ----------------------------------------------------------------- parts

    def _new(self, request: Request, now: float) -> Seq:
        if request.id in self._seqs or request.id in self.leaving:
            raise ValueError(f"request id {request.id!r} is here already: ids must be unique")
        self._order += 1
        ids, keys = None, []
        if request.stages[0].token_ids and (self._prefix_cache or request.group):
            ids = list(request.stages[0].token_ids)
            keys = [first_key(request.tenant if self._prefix_cache else f"{request.tenant}/{request.group}")]
        seq = Seq.queued(request, self._order, now, lengths=self._lengths, kv=self.kv, token_ids=[], ids=ids, keys=keys)
        seq.learn_keys(self.limits.block)
        return seq

    def _landed(self, now: float) -> None:
        """No batch is in flight any more."""
        self.in_flight, self.shape = None, NO_BATCH
        self.busy_until = now

    def _prompt_is_in(self, first: Seq) -> bool:
        """Whether the others of its group, if they start now, find its prompt's KV."""
        block = self.limits.block
        return first.cached >= first.request.stages[0].prompt // block * block

    def _release_group(self, name: str) -> None:
        """Let those wait in the queue who were held behind the first of their group, or the next of them."""
        group = self._groups.get(name, [])
        for at, seq in enumerate(group):
            if seq.held and (at == 0 or self._prompt_is_in(group[0])):
                seq.held = False
                insort(self.waiting, seq, key=_order)

    def _look_up(self, seq: Seq) -> None:
        """What the prefix cache would save it: full blocks, and at least one token is left to run."""
        seq.seen = self.kv.version
        found = self.kv.find(seq.keys[1 : 1 + (seq.length - 1) // self.limits.block])
        seq.cached = len(found) * self.limits.block
        seq.shared = self.kv.shared(found)

    def _advance(self, seq: Seq, tokens: int) -> None:
        """`tokens` more are in KV; the blocks they filled can be found from now on."""
        before, block = seq.cached // self.limits.block, self.limits.block
        seq.cached += tokens
        for i in range(before, min(seq.cached // block, len(seq.keys) - 1)):
            self.kv.name(seq.block_ids[i], seq.keys[i + 1])
        if seq.request.group:
            self._release_group(seq.request.group)

    def _entry(self, seq: Seq, work: Work, now: float, events: list[Event]) -> Entry:
        if seq.id not in self.running:
            self.waiting.remove(seq)
            self.running[seq.id] = seq
            seq.book_delay("preemption" if seq.started else "queue", now - seq.since)
            events.append(Started(now, seq.id, resumed=seq.started, cached=seq.cached))
            seq.started = True
        count = work.tokens + len(work.verify)
        self.kv.grow(seq.block_ids, seq.cached + count)
        seq.in_flight = count
        sample = work.tokens == seq.pending
        return Entry(seq.id, seq.cached, count, tuple(seq.block_ids), sample, work.verify, work.draft)

    def _preempt(self, seq: Seq, now: float) -> Event:
        self._stop(seq)
        seq.resumed_by_recompute = True
        self._queue(seq, now)
        return Preempted(now, seq.id)

    def _stop(self, seq: Seq, keep: bool = False) -> None:
        """It runs no longer and holds no KV. keep: its named blocks stay findable."""
        del self.running[seq.id]
        self.kv.release(seq.block_ids, keep)
        seq.cached = 0
        seq.draft = None

    def _queue(self, seq: Seq, now: float) -> None:
        """It waits, again."""
        seq.since = now
        seq.seen = -1
        insort(self.waiting, seq, key=_order)

    def _hand_off(self, seq: Seq, reason: HandoffReason, now: float, *, with_kv: bool) -> Event:
        before = seq.request.handoff
        runs = seq.id in self.running
        del self._seqs[seq.id]
        if seq.request.group:
            self._leave_group(seq)
        seq.draft = None
        if runs and with_kv:
            self.leaving[seq.id] = self.running.pop(seq.id)
        else:
            if runs:
                self._stop(seq)
            else:
                if not seq.held:
                    self.waiting.remove(seq)
                seq.book_delay("preemption" if seq.started else "queue", now - seq.since)
            self._gone.append(seq.id)
        cached = seq.cached if seq.id in self.leaving else 0
        handoff = Handoff(self.id, reason, now, cached, before.hops + 1 if before else 1)
        moves = seq.total_output > 0 or seq.demoted or bool(seq.delays)
        progress = seq.progress if moves else None
        return HandedOff(now, seq.id, replace(seq.request, group="", progress=progress, handoff=handoff))

    def _emit(self, seq: Seq, out: Emitted, now: float, events: list[Event]) -> None:
        seq.got([now] * out.tokens)
        seq.extend(out.token_ids, out.tokens)
        if seq.token_ids is not None:
            seq.token_ids += out.token_ids
        seq.learn_keys(self.limits.block)
        seq.draft = out.draft
        if out.tried:
            seq.tried += out.tried
            seq.accepted += out.tokens - 1
        stage_done = out.finish is None and out.stage_done and seq.stage + 1 < len(seq.request.stages)
        if out.tokens or out.text:
            event = Tokens(now, seq.id, out.tokens, out.text, out.token_ids, seq.stage, out.logprobs, stage_done,
                           out.tried, out.accepted)  # fmt: skip
            events.append(event)
        if out.finish is not None:
            events.append(self._end(seq, now, "completed", out.finish))
        elif stage_done and seq.request.stages[seq.stage + 1].tool:
            seq.calling = True
        elif stage_done:
            self._next_stage(seq, now)

    def _next_stage(self, seq: Seq, now: float) -> None:
        seq.next_stage(now)
        stage = seq.request.stages[seq.stage]
        seq.extend(stage.token_ids, stage.prompt)
        seq.learn_keys(self.limits.block)

    def _leave_for_tool(self, seq: Seq) -> None:
        """What is in its full blocks can be found when it is back, by keys of its own where its tokens' ids are not
        known."""
        full = seq.cached // self.limits.block
        if not seq.keys:
            seq.keys.append(first_key(f"{self.id}/{seq.order}"))
        while len(seq.keys) <= full:
            seq.keys.append(next_key(seq.keys[-1], (-1, seq.order)))  # no token has a negative id
        for block, key in zip(seq.block_ids, seq.keys[1 : 1 + full], strict=False):
            self.kv.name(block, key)
        self._stop(seq, keep=True)

    def _end(self, seq: Seq, now: float, outcome: Outcome, reason: str) -> Finished:
        seq.ended = True
        busy = self.in_flight is not None and any(e.seq == seq.id for e in self.in_flight.entries)
        event = self._finished(seq, now, outcome, reason)
        if outcome == "completed" and self._lengths is not None:
            self._lengths.learn(seq.request, event.output)
        if seq.request.group:
            self._leave_group(seq)
        if seq.id in self.arriving:
            del self.arriving[seq.id]
        elif seq.id not in self.running and not seq.held and not seq.calling:
            self.waiting.remove(seq)
        if not busy:
            self._release(seq)
        return event

    def _leave_group(self, seq: Seq) -> None:
        group = self._groups[seq.request.group]
        group.remove(seq)
        self._release_group(seq.request.group)
        if not group:
            del self._groups[seq.request.group]

    def _release(self, seq: Seq) -> None:
        self.running.pop(seq.id, None)
        self.kv.release(seq.block_ids)
        del self._seqs[seq.id]
        self._gone.append(seq.id)

    def _finished(self, seq: Seq, now: float, outcome: Outcome, reason: str) -> Finished:
        stages = [StageTimes(start, times) for start, times in zip(seq.starts, seq.times, strict=True)]
        verdict = judge(seq.request, stages, outcome, self._rule, seq.delays)
        return Finished(now, seq.id, outcome, reason, verdict, seq.total_output, seq.best_effort)

    def check_integrity(self) -> None:
        """Raise AssertionError unless KV is conserved and the queues agree with each other."""
        self.kv.check_integrity([s.block_ids for s in [*self._seqs.values(), *self.leaving.values()]])
        held = [s for group in self._groups.values() for s in group if s.held]
        calling = [s for s in self._seqs.values() if s.calling]
        ids = [s.id for s in [*self.waiting, *held, *calling]] + [*self.running, *self.arriving]
        assert sorted(ids) == sorted(self._seqs), "waiting, held, calling, running and arriving are not a partition"
        assert not held or len(held) < len(self._seqs), "all are held behind one that is not here"
        for seq in self._seqs.values():
            here = len(seq.block_ids) if seq.id in self.running or seq.id in self.arriving else seq.cached
            assert self.limits.blocks(seq.cached) <= here or seq.ended, "KV cached beyond its blocks"
            assert seq.cached <= seq.length, "more cached than there is"
