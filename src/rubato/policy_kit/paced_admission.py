"""Admits requests that can run together, each at the pace of its SLO; used inside a policy, or around one.

Those that run go on only while there is a step in which each gets what its pace asks for (`paces.JointPace`); the one
that would have to run fastest gives up its place. Prompts begin, by deadline, only where the same holds with them; one
whose TTFT has passed is best effort, or refused if it asked for that. These and best effort get the time until the
first of the others would be late, and the oldest a turn in any case.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import inf
from operator import attrgetter
from typing import NamedTuple

from rubato.core.interfaces import Scheduler, SeqView, View
from rubato.core.plan import Plan
from rubato.policy_kit.batch_builder import BatchBuilder, make_room
from rubato.policy_kit.draft_value import drafting, with_nodes
from rubato.policy_kit.paces import JointPace, pace_of, time_for
from rubato.policy_kit.refusals import refusals, wants_refusal
from rubato.policy_kit.wrapper import Wrapper

ARRIVAL, DUE = attrgetter("request.arrival"), attrgetter("due")
# A prompt begins if all could go on together with steps so many times as long: what drafts bring is luck.
STEP_SAFETY = 1.2
PROMPT_SHARE_MEMORY_S = 10.0  # seconds over which the share of prompts in the time is averaged
# One step in so many is a turn of the oldest of the rest, with so many tokens of its prompt.
TURN_EVERY_STEPS, TURN_TOKENS = 16, 64

Draft = tuple[int, int]


class AdmittedLoad(NamedTuple):
    """Who may use this step, and who may not.

    Args:
        decodes: admitted running requests with one token pending.
        prompts: admitted running requests that prefill.
        starting: admitted waiting requests, which may begin.
        remaining: the others: first running ones whose pace is too tight, the tightest last, then the rest by arrival.
        demote_ids: of those whose TTFT has passed.
        refusal_reasons: by id, of those to refuse since their TTFT has passed.
    """

    decodes: Sequence[SeqView]
    prompts: Sequence[SeqView]
    starting: Sequence[SeqView]
    remaining: Sequence[SeqView] = ()
    demote_ids: Sequence[str] = ()
    refusal_reasons: dict[str, str] = {}  # noqa: RUF012  nobody writes to it


def everyone(view: View) -> AdmittedLoad:
    """Admits all requests, in order."""
    return AdmittedLoad(
        [s for s in view.running if s.pending == 1], [s for s in view.running if s.pending > 1], view.waiting
    )


@dataclass
class PacedAdmission:
    """Admits requests by the paces of their SLOs, from step to step.

    Args:
        chunk: prompt tokens of a step.
        last_draft: (depth, width) of the trees drafted in the last step.
    """

    chunk: int
    last_draft: Draft | None = field(default=None, init=False)
    _prompts: float = field(default=0.0, init=False)  # share of the time that prompts take
    _steps: int = field(default=0, init=False)

    def load(self, view: View) -> AdmittedLoad:
        """Decides who is admitted to this step."""
        running, waiting = view.running, view.waiting
        asking = [s for s in (*running, *waiting) if not s.best_effort]
        late = [
            s for s in asking
            if s.first_token_at is None and (s.due < view.now or wants_refusal(s, view))
        ]  # fmt: skip
        refusal_reasons = refusals(late, view)
        late_ids = {s.id for s in late}
        pace = {s.id: pace_of(s, view.now) for s in asking if s.id not in late_ids}
        trees = [s.draft.paths for s in running if s.draft is not None and s.pending == 1]
        together = JointPace(view.latency, self.last_draft, trees, 1.0 / (1.0 - self._prompts))
        loosest_first = sorted([s for s in running if s.id in pace], key=lambda s: pace[s.id], reverse=True)
        paced = loosest_first[: together.count_that_can(loosest_first, [pace[s.id] for s in loosest_first])]
        starting = self._choose_starting(waiting, pace, paced, together)
        admitted_ids = {s.id for s in (*paced, *starting)}
        others = [s for s in (*running, *waiting) if s.id not in pace and s.id not in refusal_reasons]
        for seq in waiting:  # before its deadline one that has not begun only waits
            if seq.id in pace and seq.id not in admitted_ids and (seq.first_token_at is not None or seq.due == inf):
                others.append(seq)
        remaining = [*(s for s in loosest_first if s.id not in admitted_ids), *sorted(others, key=ARRIVAL)]
        admitted = [s for s in running if s.id in admitted_ids]
        decodes, prompts = [s for s in admitted if s.pending == 1], [s for s in admitted if s.pending > 1]
        if not admitted:
            decodes = [s for s in remaining if s.pending == 1 and s.id in view.running_ids]
            remaining = [s for s in remaining if s not in decodes]
        return AdmittedLoad(
            decodes,
            sorted(prompts, key=DUE),
            starting,
            remaining,
            sorted(late_ids - refusal_reasons.keys()),
            refusal_reasons,
        )

    def _choose_starting(
        self, waiting: Sequence[SeqView], pace: Mapping[str, float], paced: Sequence[SeqView], together: JointPace
    ) -> list[SeqView]:
        """Returns the waiting requests that may begin, by deadline, until a step's prompt tokens are used up.

        Args:
            waiting: requests, of which those in `pace` may begin.
            pace: of each request, in seconds per token.
            paced: running requests that go on; all must be able to keep their paces with each that begins.
            together: says whether they can.
        """
        starting: list[SeqView] = []
        too_tight = -1.0
        for seq in sorted([s for s in waiting if s.id in pace], key=DUE):
            if sum([s.pending for s in starting]) >= self.chunk:
                break
            if pace[seq.id] > too_tight:  # where one was too much, so is one of a tighter pace
                joined = [*paced, seq]
                if paced and not together.can_keep(joined, [pace[s.id] for s in joined], STEP_SAFETY):
                    too_tight = pace[seq.id]
                else:
                    starting.append(seq)
                    paced = joined
        return starting

    def make_room(self, builder: BatchBuilder, load: AdmittedLoad, chosen: Mapping[str, Sequence[int]]) -> None:
        """Preempts the youngest unadmitted requests for the KV that admitted ones lack; the oldest keeps its own."""
        limits, chunk_left = builder.view.limits, self.chunk
        need = sum([max(0, limits.blocks(s.cached + 1 + len(chosen.get(s.id, ()))) - s.blocks) for s in load.decodes])
        for seq in (*load.prompts, *load.starting):
            tokens = min(seq.pending, chunk_left)
            need += max(0, limits.blocks(seq.cached + tokens) - seq.blocks)
            chunk_left -= tokens
        for seq in sorted(load.remaining, key=ARRIVAL)[:0:-1]:
            if builder.kv_left < need and seq.own_blocks:
                builder.preempt(seq)

    def follow(
        self, builder: BatchBuilder, decodes: Sequence[SeqView], chosen: Mapping[str, Sequence[int]],
        draft: Draft | None,
    ) -> None:  # fmt: skip
        """Learns the share of the time that prompts take."""
        self.last_draft, seconds, alone = draft, builder.view.latency.step_time(builder.shape), 0.0
        if decodes:
            n, kv = len(decodes), sum([s.cached for s in decodes])
            shape = with_nodes(drafting(draft, n), n, kv, sum(map(len, chosen.values())))
            alone = builder.view.latency.step_time(shape)
        share = min(0.9, max(0.0, 1.0 - alone / seconds)) if builder.work else 0.0
        self._prompts += (share - self._prompts) * min(1.0, seconds / PROMPT_SHARE_MEMORY_S)

    def fill(
        self, builder: BatchBuilder, load: AdmittedLoad, chosen: Mapping[str, Sequence[int]], draft: Draft | None
    ) -> None:
        """Adds unadmitted requests in the time until the first admitted one would be late, and in turns."""
        self._steps += 1
        view, remaining, until, least = builder.view, load.remaining, inf, inf
        for seq in load.decodes:
            expected = [seq.draft.paths[node] for node in chosen.get(seq.id, ())] if seq.draft is not None else []
            until, least = min(until, time_for(seq, 1.0 + sum(expected), view.now)), min([least, *expected])
        turn = self._steps % TURN_EVERY_STEPS == 0 or not builder.work
        oldest = min(remaining, key=ARRIVAL, default=None) if turn else None
        if oldest is not None:
            victims = [*sorted(remaining, key=ARRIVAL)[:0:-1], *load.prompts[::-1], *load.decodes[::-1]]
            make_room(builder, oldest, min(oldest.pending, TURN_TOKENS), victims)
        for seq in sorted(remaining, key=lambda s: s is not oldest):
            fits = seq is oldest or seq.id in builder.running or not builder.lacks(seq, seq.pending)
            tokens = builder.tokens_that_fit(seq) if fits and seq not in builder.preempted else 0
            if tokens and until < inf:
                least_of = min(tokens, TURN_TOKENS) if seq is oldest else 0
                tokens = max(least_of, view.latency.largest_chunk(until - view.now, builder.shape, seq.cached, tokens))
            if tokens:
                paths = seq.draft.paths if seq.pending == 1 and seq.draft is not None else ()
                nodes = tuple([node for node, f in enumerate(paths) if f >= least])  # as likely as those chosen
                end = view.now + view.latency.step_time(builder.shape.plus(1 + len(nodes), seq.cached))
                if end > until or builder.verifiable(seq, len(nodes)) < len(nodes):
                    nodes = ()
                builder.add(seq, tokens, nodes, draft if tokens == seq.pending else None)
            elif seq is not oldest and seq not in builder.preempted:
                return


class PacedScheduler(Wrapper[Scheduler]):
    """Wraps a policy that drafts in this admission.

    Args:
        inner: plans the steps of those that run, as if there were no others; it may not demote, refuse or hand off any.
        chunk: its token budget.
    """

    def __init__(self, inner: Scheduler, chunk: int) -> None:
        super().__init__(inner)
        self._admission = PacedAdmission(chunk)

    def plan(self, view: View) -> Plan:
        admission = self._admission
        load, builder = admission.load(view), BatchBuilder(view, admission.chunk)
        drafted = {s.id: range(len(s.draft.parents)) for s in load.decodes if s.draft is not None}
        admission.make_room(builder, load, drafted)
        serving = {s.id: s for s in (*load.decodes, *load.prompts)}
        running = [s for s in view.running if s.id in serving]
        limits = view.limits
        if limits.max_running is not None:  # the rest hold places, too
            limits = replace(limits, max_running=len(running) + builder.slots_left)
        inner_view = View(
            view.id, view.now, load.starting, running, builder.kv_left, view.kv_total, limits, view.latency,
            view.supports, slo_rule=view.slo_rule,
        )  # fmt: skip
        plan = self.inner.plan(inner_view)
        if plan.demote or plan.promote or plan.drop or plan.handoff:
            raise ValueError(
                f"{type(self.inner).__module__} decides itself who runs: give a policy that only plans work"
            )
        serving |= {s.id: s for s in load.starting}
        for id in plan.preempt:
            builder.preempt(serving[id])
        named = {work.seq for work in plan.work} | set(plan.preempt)
        for seq in load.decodes if plan.decode_all else ():
            if seq.id not in named:
                builder.add(seq, 1)
        for work in plan.work:
            builder.add(serving[work.seq], work.tokens, work.verify, work.draft)
        chosen = {work.seq: work.verify for work in plan.work if work.verify}
        draft = max((work.draft for work in plan.work if work.draft is not None), default=None)
        admission.follow(builder, load.decodes, chosen, draft)
        admission.fill(builder, load, chosen, draft)
        return builder.plan(demote=load.demote_ids, drop=load.refusal_reasons)
