"""Holds the state of one replica: its sequences by where they are, its KV and its steps, and the changes of each.

`Replica` and `handoff` decide when it changes. This module plans, checks and reports nothing.
"""

from __future__ import annotations

from bisect import bisect_right, insort
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from rubato.core.clock import HandClock
from rubato.core.events import Event, Finished
from rubato.core.interfaces import LatencyModel
from rubato.core.plan import ANY, NO_BATCH, Limits, Shape
from rubato.core.replica_options import DEFAULT_OPTIONS, ReplicaOptions
from rubato.core.request import Cause, Outcome, Request
from rubato.core.slo import StageTimes, judge
from rubato.replica.decode_pool import DecodePool
from rubato.replica.due_times import DueTimes
from rubato.replica.groups import Groups
from rubato.replica.kv_ledger import KVByBlock, KVCounts
from rubato.replica.miss_cause import MissCauses, is_infeasible
from rubato.replica.sequence import Seq, StepEnds, Wait
from rubato.replica.step_log import StepLog, StepRun


def refusal_reason(request: Request, limits: Limits) -> str | None:
    """Returns why a replica with these limits could not run a request even alone; None if it could."""
    most = request.prompt + request.sampling.max_tokens
    if most > limits.max_model_len:
        return "rejected-too-long"
    return "rejected-exceeds-kv" if limits.blocks(most) > limits.kv_blocks else None


def order_of(seq: Seq) -> int:
    """Returns the sort key of the queue: requests wait in order of submission, whenever they arrived."""
    return seq.order


class ReplicaState:
    """Sequences, queues and KV of one engine.

    Args:
        id: of the replica.
        limits: of its engine.
        latency: predicts steps, for views and for the causes of misses.
        options: of the replica.
        supports: capabilities of the engine and the host.
        counts: KV blocks have no ids: nothing is shared, no request waits for tools, and a run may have many steps.
        tokens: emit `Tokens` events.
        clock: the time, set by the caller; `sync` books the steps of a run that it has passed.
        on_decode: called with each sequence that begins to decode.
        on_end: called with each end and the times by which it was judged.
        output_ids: returns the ids of output tokens first, ..., after - 1, where the steps do not.
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
        on_decode: Callable[[Seq], None] | None = None,
        on_end: Callable[[Finished, Sequence[StageTimes]], None] | None = None,
        output_ids: Callable[[int, int], Sequence[int]] | None = None,
    ) -> None:
        total, size = limits.kv_blocks, limits.block_size
        if total < 1 or size < 1:
            raise ValueError(f"KV memory of {total} blocks of {size} tokens: both must be at least 1")
        self.id = id
        self.limits = limits
        self.latency = latency
        self.supports = supports
        self.options = options
        self.tell_tokens = tokens
        self.clock = clock or HandClock()
        self.on_decode = on_decode
        self.on_end = on_end
        self.output_ids = output_ids
        self.role = ANY
        self.steps = StepEnds()
        self.pool = DecodePool(self.steps, limits.block_size, keeps_seqs=not counts)
        self.kv = KVCounts(limits, self.pool) if counts else KVByBlock(id, limits, self.pool, options.prefix_cache)
        self.log = StepLog(self.steps)
        self.causes = MissCauses(self.steps, self.log, latency) if options.causes else None
        self.groups = Groups(limits.block_size, self.queue)
        self.seqs: dict[str, Seq] = {}  # all but those that migrate out
        self.waiting: list[Seq] = []
        self.running: dict[str, Seq] = {}
        self.prefilling: dict[str, Seq] = {}  # running, more than one token pending; in order of start
        self.idle_decodes: list[Seq] = []  # running, one token pending, and not in the run under way
        self.migrating_out: dict[str, Seq] = {}  # handed off, KV still here
        self.migrating_in: dict[str, Seq] = {}  # reserved, KV not yet here
        self.recalled: list[Seq] = []  # to hand back before the next plan
        self.present: dict[str, Seq] = {}  # waiting or running, not ended: a plan may name them
        self.pending = 0  # tokens of `present`
        self.ending: list[Seq] = []  # ended, and in the run under way
        self.gone_ids: list[str] = []  # ended, and in no batch
        self.run: StepRun | None = None
        self.idle_since = 0.0  # when the last run ended
        self._predicted: tuple[StepRun | None, int, Shape, float] = (None, 0, NO_BATCH, 0.0)  # for a step of a run
        self.dues: DueTimes | None = None  # from the first request for them on
        self.events: list[Event] = []  # of the current call; `fail` returns those of a call that raised half-way
        self.looked_up = -1  # version of `kv` at the last look-up of all waiting sequences
        self._submitted = 0
        self._started = 0

    # ----------------------------------------------------------------- time passes

    def sync(self) -> None:
        """Books the steps of the run that are over by now, except the last, whose output is booked at its end."""
        run = self.run
        if run is not None and run.steps_done + 1 < run.steps and run.ends[run.steps_done] <= self.clock.time:
            self._advance(run, min(bisect_right(run.ends, self.clock.time), run.steps - 1))

    def book(self, run: StepRun) -> None:
        """Books all steps of the run, which is over."""
        if run.steps_done < run.steps:
            self._advance(run, run.steps)

    def _advance(self, run: StepRun, steps_done: int) -> None:
        """Books the first `steps_done` steps of the run."""
        steps = steps_done - run.steps_done
        self.steps.add(run.ends if steps == len(run.ends) else run.ends[run.steps_done : steps_done])
        self.pool.kv += steps * run.seqs
        for seq, _, each, total in run.chunks:
            tokens = min(steps * each, total - run.steps_done * each)
            seq._cached += tokens
            seq.in_flight = min(each, total - steps_done * each)
            if not seq.ended:
                self.pending -= tokens
        run.steps_done = steps_done

    def under_way(self) -> StepRun | None:
        """Returns the run whose step has begun and not ended; None between two steps, when a plan is due."""
        run = self.run
        if run is None:
            return None
        self.sync()
        between = run.steps_done == run.steps or (run.steps_done and run.ends[run.steps_done - 1] >= self.clock.time)
        self.steps.under_way = not between
        return None if between else run

    @property
    def shape(self) -> Shape:
        """Returns the shape of the batch in flight, empty between steps."""
        run = self.under_way()
        return NO_BATCH if run is None else self._predict(run)[0]

    @property
    def busy_until(self) -> float:
        """Returns when the step under way ends, as the scheduler's model predicts; without one, when the last step
        ended.
        """
        run = self.under_way()
        if run is None:
            return self.idle_since if self.run is None else self.clock.time
        return self._predict(run)[1]

    def _predict(self, run: StepRun) -> tuple[Shape, float]:
        """Returns the shape of the step under way and its end, computed once, since routers read them many times."""
        predicted_run, step, shape, end = self._predicted
        if predicted_run is not run or step != run.steps_done:
            shape = run.shape(run.steps_done)
            end = (run.ends[run.steps_done - 1] if run.steps_done else run.begin) + self.latency.step_time(shape)
            self._predicted = run, run.steps_done, shape, end
        return shape, end

    # ----------------------------------------------------------------- where a sequence is

    def make_seq(self, request: Request, now: float) -> Seq:
        """Makes the sequence of a new request, which is in no queue yet."""
        if request.id in self.seqs or request.id in self.migrating_out:
            raise ValueError(f"request id {request.id!r} is here already: ids must be unique")
        self._submitted += 1
        ids: list[int] | None = None
        if self.kv.by_block and request.stages[0].token_ids and (self.options.prefix_cache or request.group):
            ids = list(request.stages[0].token_ids)
        seq = Seq(
            request,
            self._submitted,
            now,
            steps=self.steps,
            lengths=self.options.lengths,
            kv=self.kv,
            token_ids=[],
            ids=ids,
        )
        if self.kv.by_block:
            self.kv.register(seq, request)
        return seq

    def queue(self, seq: Seq) -> None:
        """Queues a sequence until a plan starts it."""
        insort(self.waiting, seq, key=order_of)
        seq.kv_version_seen = self.looked_up = -1
        self.show(seq)

    def show(self, seq: Seq) -> None:
        """Lets plans name a sequence."""
        self.present[seq.id] = seq
        self.pending += seq.pending

    def hide(self, seq: Seq) -> None:
        """Lets no plan name a sequence any more."""
        if self.present.pop(seq.id, None) is not None:
            self.pending -= seq.pending
            if seq.id not in self.running:
                self.waiting.remove(seq)

    def run_from_now(self, seq: Seq, now: float, cause: Cause) -> None:
        """Makes a sequence running, which holds KV.

        Args:
            seq: the sequence.
            now: time in seconds.
            cause: why it waited.
        """
        tick = self.steps.tick
        self.running[seq.id] = seq
        self._started += 1
        seq.start_order = self._started
        seq.cached_at_start = seq.cached
        seq.waits.append(Wait(tick, now - seq.waiting_since, cause, seq.recompute))
        seq.recompute = False
        seq.running_spans.append((tick, -1))
        if self.dues is not None:
            self.dues.add(seq)

    def proceed(self, seq: Seq) -> None:
        """Lets a running sequence prefill or decode, by its pending tokens."""
        if seq.pending == 1:
            if self.run is None:
                self.join(seq)
            else:
                self.idle_decodes.append(seq)
            return
        self.prefilling[seq.id] = seq
        if next(reversed(self.running)) != seq.id:  # in order of start
            self.prefilling = {id: s for id, s in self.running.items() if id in self.prefilling}
        self.renew(seq)

    def join(self, seq: Seq) -> None:
        """Lets a sequence decode from the next step on."""
        self.pool.join(seq)
        self.renew(seq)
        if self.on_decode is not None:
            self.on_decode(seq)

    def leave_pool(self, seq: Seq) -> None:
        """Lets a sequence no longer decode from the next step on."""
        self.pool.leave(seq)
        self.learn_ids(seq)
        self.renew(seq)

    def renew(self, seq: Seq) -> None:
        """Updates the due times of a sequence."""
        if self.dues is not None:
            self.dues.renew(seq)

    def stop(self, seq: Seq, keep: bool = False) -> None:
        """Stops a running sequence and releases its KV.

        Args:
            seq: the sequence.
            keep: named blocks stay findable (`KVByBlock.release`).
        """
        self.run_no_longer(seq)
        self.kv.release(seq, keep)

    def run_no_longer(self, seq: Seq) -> None:
        """Stops a running sequence, which keeps its KV."""
        if seq.decoding:
            self.pool.leave(seq)
            self.learn_ids(seq)
        self.prefilling.pop(seq.id, None)
        del self.running[seq.id]
        if self.dues is not None:
            self.dues.drop(seq)
        seq.running_spans[-1] = (seq.running_spans[-1][0], self.steps.tick)
        seq.draft = None

    def learn_ids(self, seq: Seq) -> None:
        """Records the ids of its output tokens, where steps do not report them."""
        if seq.ids is None or self.output_ids is None:
            return
        missing = seq.length - len(seq.ids)
        if missing:
            total = seq.total_output
            seq.ids += self.output_ids(total - missing, total)
            seq.learn_keys(self.limits.block_size)

    # ----------------------------------------------------------------- ends and handoffs

    def delays(self, seq: Seq) -> Mapping[Cause, float]:
        """Returns the seconds lost so far, by cause."""
        return seq.delays_elsewhere if self.causes is None else self.causes.delays(seq)

    def judge_end(self, seq: Seq, now: float, outcome: Outcome, reason: str) -> Finished:
        """Judges a request that ends and returns its last event."""
        stages = [StageTimes(start, times) for start, times in zip(seq.starts, seq.times_of_all(), strict=True)]
        slo_rule = self.options.slo_rule
        verdict = judge(seq.request, stages, outcome, slo_rule, reason=reason)
        if outcome == "completed" and not verdict.met:
            cached = seq.cached_at_start
            if self.causes is not None and is_infeasible(seq, cached, self.latency, self.limits, slo_rule):
                verdict = replace(verdict, cause="infeasible")
            elif delays := self.delays(seq):
                verdict = replace(verdict, cause=max(delays.items(), key=lambda item: item[1])[0])
        event = Finished(now, seq.id, outcome, reason, verdict, seq.total_output, seq.best_effort)
        if self.on_end is not None:
            self.on_end(event, stages)
        return event

    def take_events(self) -> list[Event]:
        """Returns the events of a completed call and clears them."""
        events, self.events = self.events, []
        return events
