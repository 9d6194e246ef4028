"""Fills a step with tokens, once the prompts to serve are chosen.

The step takes decodes that are due before the next step could end, and as many others as the prompts can spare; then
prompts by deadline, up to the step's length; then the remaining decodes; then best effort.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence

from rubato.core.interfaces import SeqView, View
from rubato.core.plan import Plan
from rubato.policies.rubato.drafts import nodes_to_verify
from rubato.policies.rubato.requests import ARRIVAL, PlanCandidates
from rubato.policies.rubato.supply import DecodeSteps, Task
from rubato.policy_kit import turns
from rubato.policy_kit.batch_builder import BatchBuilder, blocks_at_end, make_room
from rubato.policy_kit.draft_value import drafting, with_nodes

# Share of the time that prompts can spare which goes to decodes that could wait: without it Coder loses 15 points.
DECODE_SHARE_OF_SPARE_TIME = 0.5


class StepBatch:
    """One step in the making.

    Args:
        view: the replica
        steps: step times with its decodes
        candidates: its requests
        on_time: the prompts to serve, by deadline
        oldest: the best-effort request that gets turns
        shortest: seconds that the step may take in any case, as far as there is enough to do
    """

    def __init__(
        self,
        view: View,
        steps: DecodeSteps,
        candidates: PlanCandidates,
        on_time: Sequence[Task],
        oldest: SeqView | None,
        shortest: float,
    ) -> None:
        self._view, self._steps, self._candidates = view, steps, candidates
        self._on_time, self._oldest, self._shortest = on_time, oldest, shortest
        self._builder = BatchBuilder(view)
        candidates.best_effort_running.sort(key=ARRIVAL)
        self._victims = [s for s in reversed(candidates.best_effort_running) if s is not oldest]

    def seconds(self) -> float:
        """Returns the predicted seconds of the step, 0 for an empty one."""
        builder = self._builder
        return self._view.latency.step_time(builder.shape) if builder.work else 0.0

    def plan(self, demote: Sequence[str], drop: dict[str, str]) -> Plan:
        self._builder.fold_decodes()
        return self._builder.plan(demote=demote, drop=drop)

    def fill(self, longest: float, laxity: float, turn: int) -> bool:
        """Fills the step, in the order that the module's docstring gives.

        Args:
            longest: seconds that the step may take for the prompts
            laxity: seconds that the prompts can spare
            turn: steps since the oldest best effort had its turn, this one included

        Returns:
            whether the oldest best effort has its turn in this step
        """
        builder, decodes, latency = self._builder, self._steps.decodes, self._view.latency
        count, bound = self._decodes_and_length(longest, laxity)
        bound /= self._steps.slower  # in the model's own seconds from here on
        self._add_decodes(decodes[:count], bound, longest)
        is_short_of_time = bool(self._on_time) and count < len(decodes)
        had_turn = (not is_short_of_time or turn >= turns.TURN_EVERY_STEPS) and self._give_turn()
        for job in self._on_time:
            if job.id not in builder.running and not self._make_room(
                job.seq, job.pending + self._view.limits.block_size
            ):
                continue
            if self._add_chunk(job.seq, bound, self._steps.entry.draft) is False:  # out of time
                break
        if is_short_of_time and (self._steps.entry.draft or not self._add_more_decodes(count, bound)):
            for job in decodes[count:]:
                if latency.step_time(builder.shape.plus(1, job.cached)) > bound:
                    break
                if job.seq not in builder.preempted and builder.tokens_that_fit(job.seq):
                    builder.add(job.seq, 1, (), self._steps.entry.draft)
        self._add_best_effort(bound)
        if not builder.work:
            self._add_anything()
        return had_turn

    # ----------------------------------------------------------------- how long, and how many decodes

    def _decodes_and_length(self, longest: float, laxity: float) -> tuple[int, float]:
        """Returns how many decodes, the first due first, the step takes in any case, and its longest duration in
        seconds."""
        steps = self._steps
        all_, now = len(steps.decodes), steps.now
        bound = max(min(longest, steps.first_due() - now), steps.base, self._shortest)
        if not self._on_time:
            return (all_ if steps.seconds_without_drafts(all_) <= bound else steps.most_within(all_, bound)), bound
        urgent = steps.due_by(now + bound + longest)  # before the step after this one would end
        spared = DECODE_SHARE_OF_SPARE_TIME * max(0.0, laxity) / max(steps.each, 1e-9)
        count = min(all_, int(min(1e9, urgent + spared)))
        if steps.seconds_without_drafts(count) > bound:
            count = steps.most_within(count, bound)
        first = self._on_time[0]
        until_due = steps.max_step_until(first.due - now)
        return count, min(bound, until_due) if steps.seconds_with(count, first) <= until_due else bound

    # ----------------------------------------------------------------- what is in it

    def _make_room(self, seq: SeqView, tokens: int, others: Sequence[SeqView] = ()) -> bool:
        """Preempts best effort, the youngest first, then `others`, until `tokens` more fit in KV. Returns whether they
        fit."""
        return make_room(self._builder, seq, tokens, [*self._victims, *others])

    def _add_decodes(self, jobs: Sequence[Task], bound: float, longest: float) -> None:
        """Adds a token of each decode and the drafted tokens that it verifies; if KV is short, the decode due last is
        preempted."""
        builder, chosen = self._builder, [job.seq for job in jobs]
        nodes, draft = self._verified(jobs, bound, longest)
        if not nodes and builder.add_decodes(chosen, {seq.id: draft for seq in chosen} if draft else {}):
            return
        last = [job.seq for job in reversed(self._steps.decodes)]
        for seq in chosen:
            if seq not in builder.preempted and builder.lacks(seq, 1):
                self._make_room(seq, 1, last[: last.index(seq)])
            if seq not in builder.preempted and builder.tokens_that_fit(seq):
                own = nodes.get(seq.id, ())
                builder.add(seq, 1, own[: builder.verifiable(seq, len(own))], draft)

    def _add_more_decodes(self, count: int, bound: float) -> bool:
        """Adds the decodes after the first `count` as far as they end within `bound` seconds, all at once; returns
        False, and adds none, if some need a look of their own."""
        builder, steps, shape = self._builder, self._steps, self._builder.shape
        kv, step_time = steps.kv, self._view.latency.step_time

        def seconds(more: int) -> float:
            """Returns the seconds of the step with so many decodes more."""
            read = shape.kv + kv[count + more] - kv[count]
            return step_time(shape._replace(tokens=shape.tokens + more, seqs=shape.seqs + more, kv=read))

        most = bisect_right(range(1, len(steps.decodes) - count + 1), bound, key=seconds)
        return not builder.preempted and builder.add_decodes([j.seq for j in steps.decodes[count : count + most]])

    def _verified(
        self, jobs: Sequence[Task], bound: float, longest: float
    ) -> tuple[Mapping[str, tuple[int, ...]], tuple[int, int] | None]:
        """Returns the nodes that each decode verifies, as far as time and KV allow, and the (depth, width) to draft."""
        steps, builder, count = self._steps, self._builder, len(jobs)
        draft, most = steps.entry.draft, round(steps.entry.nodes * count)
        if draft is None or not count:
            return {}, None
        kv, step_time = sum([job.cached for job in jobs]), self._view.latency.step_time
        drafts = drafting(draft, count)
        bound *= 1.0 + 1e-9
        if step_time(with_nodes(drafts, count, kv, 0)) > bound:
            return {}, None
        if builder.kv_left < 2 * count + most // self._view.limits.block_size:
            return {}, draft
        low, high = 0, most
        while low < high:
            middle = (low + high + 1) // 2
            fits = step_time(with_nodes(drafts, count, kv, middle)) <= bound
            low, high = (middle, high) if fits else (low, middle - 1)
        end = steps.now + min(bound, longest) + min(steps.full, longest)
        return nodes_to_verify(jobs, end, low), draft

    def _add_chunk(self, seq: SeqView, bound: float, draft: tuple[int, int] | None = None) -> bool | None:
        """Adds as much of a prompt as the step has time for, and its draft at the end. Returns whether that is all that
        the engine would take of it; None if it takes nothing."""
        builder = self._builder
        most = 0 if seq in builder.preempted else builder.tokens_that_fit(seq)
        if not most:
            return None
        tokens = self._view.latency.largest_chunk(bound, builder.shape, seq.cached, most)
        if tokens:
            builder.add(seq, tokens, (), draft if tokens == seq.pending else None)
        return tokens == most

    def _give_turn(self) -> bool:
        """Adds some tokens of the oldest best effort, for which KV is freed. Returns whether it got any."""
        oldest, builder = self._oldest, self._builder
        if oldest is None or oldest in builder.preempted or oldest.id in builder.work:
            return False
        tokens = min(oldest.pending, turns.TURN_TOKENS)
        needs = tokens if oldest.id in builder.running else oldest.pending + self._view.limits.block_size
        if not self._make_room(oldest, needs) and oldest.id not in builder.running:
            return False
        tokens = min(tokens, builder.tokens_that_fit(oldest))
        if tokens:
            builder.add(oldest, tokens)
        return tokens > 0

    def _add_best_effort(self, bound: float) -> None:
        """Gives the remaining time to best effort: first requests that hold KV, oldest first; then, if no prompt is
        waiting, requests whose KV fits to their end next to all others."""
        view, builder, candidates, block = self._view, self._builder, self._candidates, self._view.limits.block_size
        if (
            not (candidates.best_effort_running or candidates.best_effort_waiting)
            or view.latency.step_time(builder.shape.plus(1, 0)) > bound
        ):
            return
        for seq in candidates.best_effort_running:
            if seq.id not in builder.work:
                self._add_chunk(seq, bound)
        if self._on_time or builder.preempted or not candidates.best_effort_waiting:
            return
        here = [*(job.seq for job in self._steps.decodes), *candidates.best_effort_running]
        free = view.kv_total - sum([s.blocks for s in view.moving]) - sum([blocks_at_end(s, block) for s in here])
        for seq in candidates.best_effort_waiting:
            if seq.id in builder.work:
                continue
            free -= blocks_at_end(seq, block)
            if free < 0 or builder.lacks(seq, seq.pending + block) or self._add_chunk(seq, bound) is None:
                return
            if seq.id not in builder.work:
                return

    def _add_anything(self) -> None:
        """Runs the first request if the step would be empty, with KV from the last one if necessary."""
        builder, candidates = self._builder, self._candidates
        best_effort = sorted([*candidates.best_effort_running, *candidates.best_effort_waiting], key=ARRIVAL)
        order = [
            *(job.seq for job in (*self._steps.decodes, *self._on_time)),
            *best_effort,
            *(job.seq for job in candidates.prompts),
        ]
        able = [s for s in dict.fromkeys(order) if s not in builder.preempted]
        if not able:
            return
        first = able[0]
        tokens = min(first.pending, turns.TURN_TOKENS)
        make_room(builder, first, tokens, [seq for seq in able[:0:-1] if seq.id in builder.running])
        if tokens := min(tokens, builder.tokens_that_fit(first)):
            builder.add(first, tokens)
