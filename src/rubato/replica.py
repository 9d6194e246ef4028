"""The state of one replica, and the only code that changes it: no I/O, no clock.

A life in five calls: `submit` puts a request in `waiting`; `view` shows the replica to a policy; `apply` checks the
policy's plan and makes it a batch; `commit` books what the engine returned; `cancel` and `fail` end requests early.
Each returns the events it caused. There is no prefill phase and no decode phase: a sequence has `length` tokens of
which `cached` are in KV, and the difference is pending.
"""

from __future__ import annotations

from bisect import insort

from rubato.check import check, spelled_out
from rubato.interfaces import LatencyModel, LengthPredictor, View
from rubato.kv import KVBlocks, blocks_for, first_key
from rubato.seq import Seq
from rubato.slo import StageTimes, judge
from rubato.types import (
    Batch,
    Cause,
    Demoted,
    Emitted,
    Entry,
    Event,
    Finished,
    Limits,
    Outcome,
    Plan,
    Preempted,
    Promoted,
    Request,
    Shape,
    Started,
    StepResult,
    Tokens,
)


def never(request: Request, limits: Limits) -> str | None:
    """Why a replica with these limits could not run it even alone, None if it could."""
    most = request.prompt + request.sampling.max_tokens
    if most > limits.max_length:
        return "rejected-too-long"
    return "rejected-exceeds-kv" if blocks_for(most, limits.block) > limits.kv_blocks else None


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
        self.in_flight: Batch | None = None
        self.busy_until = 0.0
        self._seqs: dict[str, Seq] = {}
        self._order = 0
        self._lengths = lengths
        self._rule = rule
        self._prefix_cache = prefix_cache
        self._groups: dict[str, list[Seq]] = {}
        self._gone: list[str] = []

    # ----------------------------------------------------------------- coming and going

    def submit(self, request: Request, now: float) -> list[Event]:
        """Queue a request. One that could never be run is refused at once, with a reason that says why."""
        if request.id in self._seqs:
            raise ValueError(f"request id {request.id!r} is here already: ids must be unique")
        self._order += 1
        seq = Seq(request, self._order, request.arrival, now, request.stages[0].prompt, lengths=self._lengths)
        seq.kv = self.kv
        if request.stages[0].token_ids and (self._prefix_cache or request.group):
            seq.ids = list(request.stages[0].token_ids)
            seq.keys.append(first_key(request.tenant if self._prefix_cache else f"{request.tenant}/{request.group}"))
        seq.starts.append(request.arrival)
        seq.renew_due()
        if request.progress is not None:
            seq.resume(request.progress)
        seq.learn_keys(self.limits.block)
        reason = never(request, self.limits)
        if reason is not None:
            return [self._finished(seq, now, "refused", reason)]
        self._seqs[request.id] = seq
        group = self._groups.setdefault(request.group, []) if request.group else []
        group.append(seq)
        if len(group) > 1 and not self._prompt_is_in(group[0]):
            seq.held = True
        else:
            insort(self.waiting, seq, key=lambda s: s.key)
        return []

    def cancel(self, id: str, now: float, reason: str, outcome: Outcome = "cancelled") -> list[Event]:
        """End a request now. KV that the batch in flight uses goes back at its commit. Unknown id: nothing."""
        seq = self._seqs.get(id)
        if seq is None or seq.ended:
            return []
        return [self._end(seq, now, outcome, reason)]

    def fail(self, now: float, reason: str) -> list[Event]:
        """The engine broke: every request here ends as failed, all KV is free."""
        self.in_flight = None
        self.busy_until = now
        events: list[Event] = []
        for seq in list(self._seqs.values()):
            if seq.ended:
                self._release(seq)
            else:
                events.append(self._end(seq, now, "failed", reason))
        self.kv.clear()
        return events

    def gone(self) -> list[str]:
        """Ids that ended since the last call and that no batch mentions any more."""
        ids, self._gone = self._gone, []
        return ids

    @property
    def empty(self) -> bool:
        return not self._seqs

    # ----------------------------------------------------------------- one step

    def view(self, now: float) -> View:
        for seq in self.waiting:
            if seq.seen != self.kv.version:
                self._look_up(seq)
        return View(
            id=self.id,
            now=now,
            waiting=self.waiting,
            running=[s for s in self.running.values() if not s.ended],
            kv_free=self.kv.free,
            kv_total=self.kv.total,
            limits=self.limits,
            latency=self.latency,
            supports=self.supports,
            busy_until=self.busy_until,
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
        for id in plan.preempt:
            events.append(self._preempt(self._seqs[id], now))
        for id in plan.demote:
            self._seqs[id].demoted = True
            events.append(Demoted(now, id))
        for id in plan.promote:
            self._seqs[id].demoted = False
            events.append(Promoted(now, id))
        entries = [self._entry(self._seqs[work.seq], work.tokens, now, events) for work in plan.work]
        batch = Batch(tuple(entries))
        if entries:
            self.in_flight = batch
            self.busy_until = now + self.latency.step_time(batch.shape)
        return batch, events

    def commit(self, batch: Batch, result: StepResult, now: float) -> list[Event]:
        """Book a finished batch: KV written, tokens out, stages and requests ended."""
        if batch is not self.in_flight:
            raise RuntimeError(f"replica {self.id!r}: commit of a batch that is not in flight")
        self.in_flight = None
        self.busy_until = now
        self._blame(batch, result.seconds)
        events: list[Event] = []
        for entry in batch.entries:
            seq = self._seqs[entry.seq]
            if seq.ended:
                self._release(seq)
                continue
            self._advance(seq, entry.count)
            if entry.sample:
                self._emit(seq, result.emitted[entry.seq], now, events)
        return events

    # ----------------------------------------------------------------- parts

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
                insort(self.waiting, seq, key=lambda s: s.key)

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

    def _entry(self, seq: Seq, tokens: int, now: float, events: list[Event]) -> Entry:
        if seq.id not in self.running:
            self.waiting.remove(seq)
            self.running[seq.id] = seq
            seq.lose("preemption" if seq.started else "queue", now - seq.since)
            events.append(Started(now, seq.id, resumed=seq.started, cached=seq.cached))
            seq.started = True
        self.kv.grow(seq.block_ids, seq.cached + tokens)
        return Entry(seq.id, seq.cached, tokens, tuple(seq.block_ids), sample=tokens == seq.pending)

    def _preempt(self, seq: Seq, now: float) -> Event:
        del self.running[seq.id]
        self.kv.release(seq.block_ids)
        seq.cached = 0
        seq.seen = -1
        seq.since = now
        insort(self.waiting, seq, key=lambda s: s.key)
        return Preempted(now, seq.id)

    def _emit(self, seq: Seq, out: Emitted, now: float, events: list[Event]) -> None:
        seq.got([now] * out.tokens)
        seq.extend(out.token_ids, out.tokens)
        seq.learn_keys(self.limits.block)
        stage_done = out.finish is None and out.stage_done and seq.stage + 1 < len(seq.request.stages)
        if out.tokens or out.text:
            event = Tokens(now, seq.id, out.tokens, out.text, out.token_ids, seq.stage, out.logprobs, stage_done)
            events.append(event)
        if out.finish is not None:
            events.append(self._end(seq, now, "completed", out.finish))
        elif stage_done:
            seq.next_stage(now)
            stage = seq.request.stages[seq.stage]
            seq.extend(stage.token_ids, stage.prompt)
            seq.learn_keys(self.limits.block)

    def _end(self, seq: Seq, now: float, outcome: Outcome, reason: str) -> Finished:
        seq.ended = True
        busy = self.in_flight is not None and any(e.seq == seq.id for e in self.in_flight.entries)
        event = self._finished(seq, now, outcome, reason)
        if outcome == "completed" and self._lengths is not None:
            self._lengths.learn(seq.request, event.output)
        if seq.request.group:
            self._leave_group(seq)
        if seq.id not in self.running and not seq.held:
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
        verdict = judge(seq.request, stages, outcome, self._rule, seq.lost)
        return Finished(now, seq.id, outcome, reason, verdict, seq.total_output, seq.best_effort)

    def _blame(self, batch: Batch, seconds: float) -> None:
        """Attribute the step's time, for every running sequence, to what it would not have taken alone.

        Shares come from the latency model: whole batch, the batch's decodes, this entry by itself.
        """
        whole = batch.shape
        predicted = self.latency.step_time(whole)
        scale = seconds / predicted if predicted > 0.0 else 0.0
        decodes = Shape()
        for entry in batch.entries:
            if entry.count == 1:
                decodes = decodes.plus(1, entry.start)
        with_decodes = self.latency.step_time(decodes) if decodes.seqs else 0.0
        one = self.latency.step_time(Shape().plus(1, decodes.kv // decodes.seqs)) if decodes.seqs else 0.0
        for entry in batch.entries:
            seq = self._seqs[entry.seq]
            if entry.count == 1:
                by_prefill, by_decode = predicted - with_decodes, with_decodes - one
            else:
                beside = self.latency.step_time(decodes.plus(entry.count, entry.start))
                alone = self.latency.step_time(Shape().plus(entry.count, entry.start))
                by_prefill, by_decode = predicted - beside, beside - alone
                if seq.total_output:  # its prefill is the price of a preemption
                    seq.lose("preemption", alone * scale)
            seq.lose("prefill interference", by_prefill * scale)
            seq.lose("decode interference", by_decode * scale)
        in_batch = {entry.seq for entry in batch.entries}
        idle: Cause = "prefill interference" if whole.tokens > 2 * decodes.tokens else "decode interference"
        for seq in self.running.values():
            if seq.id not in in_batch:
                seq.lose(idle, seconds)

    def check_integrity(self) -> None:
        """Raise AssertionError unless KV is conserved and the queues agree with each other."""
        self.kv.check_integrity([s.block_ids for s in self._seqs.values()])
        held = [s for group in self._groups.values() for s in group if s.held]
        ids = [s.id for s in [*self.waiting, *held]] + list(self.running)
        assert sorted(ids) == sorted(self._seqs), "waiting, held and running are not a partition"
        assert not held or len(held) < len(self._seqs), "all are held behind one that is not here"
        for seq in self._seqs.values():
            here = len(seq.block_ids) if seq.id in self.running else seq.cached
            assert blocks_for(seq.cached, self.limits.block) <= here or seq.ended, "KV cached beyond its blocks"
            assert seq.cached <= seq.length, "more cached than there is"
