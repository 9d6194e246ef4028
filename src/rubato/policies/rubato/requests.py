"""Sorts a replica's requests: decodes and prompts that can still be in time, by deadline; all others are best effort to
their end."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import exp, inf
from operator import attrgetter

from rubato.core.interfaces import SeqView, View
from rubato.core.length_prediction import class_of
from rubato.core.plan import Shape
from rubato.core.slo import WINDOW_TOKENS
from rubato.policies.rubato.supply import MAX_LEAD_STEPS, MEMORY_STEPS, SLACK_SHARE, STEP_LENGTHS, DecodeEntry, Task
from rubato.policy_kit.kv_survival import MAX_OUTPUT_RATIO, Resident
from rubato.policy_kit.paces import Window, tightest_tpot, windows
from rubato.policy_kit.refusals import wants_refusal

# Least pace of decodes with an e2e SLO, in steps of a single token: a tighter pace forces short steps, which lose
# capacity.
MIN_E2E_PACE_STEPS = 3.0
ARRIVAL = attrgetter("request.arrival")


@dataclass(slots=True)
class _TrackedRequest:
    """What is remembered of a request.

    Args:
        tier: its tier
        kind: whose output lengths are like its own (`OutputRatios`)
        expected: output tokens as predicted at its first one; 0: unknown
        tpot: the tightest TPOT of `stage` and of the stages that follow without a prompt, in seconds
        stage: for which `tpot` was looked up
        job: its task while it waits
        until: time up to which `job` is valid
    """

    tier: str
    kind: str
    expected: float = 0.0
    tpot: float = inf
    stage: int = -1
    job: Task | None = None
    until: float = -inf


@dataclass(slots=True)
class PlanCandidates:
    """The requests of one plan.

    Args:
        decodes: that can be in time, by deadline
        prompts: that can be in time, by deadline
        best_effort_running: best effort with KV
        best_effort_waiting: best effort without KV, in the view's order
        late: requests that are best effort since this step
    """

    decodes: list[Task] = field(default_factory=list)
    prompts: list[Task] = field(default_factory=list)
    best_effort_running: list[SeqView] = field(default_factory=list)
    best_effort_waiting: list[SeqView] = field(default_factory=list)
    late: list[SeqView] = field(default_factory=list)

    def sort_by_deadline(self, now: float, lead: float, doubt: float, reserve: float, entry: DecodeEntry) -> None:
        """Sorts decodes and prompts by deadline.

        Args:
            now: seconds
            lead: seconds that decodes stay ahead of their deadlines, bounded in tokens; drafts, whose yield varies, add
                to it, and prompts are due sooner by that
            doubt: relative error that one step may have
            reserve: seconds kept before a deadline
            entry: the average entry of a decode
        """
        self.decodes = [_with_lead(job, now, lead, entry, doubt, reserve) for job in self.decodes]
        if entry.draft is not None:
            self.prompts = [job._replace(due=job.due - entry.unlucky(job.tpot)) for job in self.prompts]
        self.decodes.sort()
        self.prompts.sort()


class TierLosses:
    """Counts the recent losses of each tier, and weighs its prompts: a tier that loses more than others is omitted
    less."""

    def __init__(self, fairness: float) -> None:
        self._fairness = fairness
        self._tiers: dict[str, tuple[float, float]] = {}  # offered, and of these lost

    def count_request(self, tier: str, lost: bool) -> None:
        """Counts a request that ended in time or was lost. All tiers fade with each, so that they compare."""
        fade = 1.0 - 1.0 / MEMORY_STEPS
        # A client may name any tier: one that has faded away is dropped.
        self._tiers = {name: (o * fade, n * fade) for name, (o, n) in self._tiers.items() if o > 1.0 / MEMORY_STEPS}
        offered, before = self._tiers.get(tier, (0.0, 0.0))
        self._tiers[tier] = offered + 1.0, before + lost

    def lost_share(self) -> float:
        """Returns the share of recent requests that were lost."""
        offered = sum([o for o, _ in self._tiers.values()])
        return sum([n for _, n in self._tiers.values()]) / offered if offered else 0.0

    def weights(self) -> Mapping[str, float]:
        """Returns weights by tier; a tier that is not named weighs 1."""
        if not self._fairness or len(self._tiers) < 2:
            return {}
        mean, fairness = self.lost_share(), self._fairness
        return {tier: exp(fairness * (mean - n / o)) for tier, (o, n) in self._tiers.items()}


class RequestBook:
    """Tracks the requests of a replica from step to step.

    Args:
        patience: seconds in which a prompt without a TTFT is due, and after which the oldest best effort gets turns
        fairness: how strongly tiers that lose more are favoured
    """

    def __init__(self, patience: float, fairness: float) -> None:
        self._patience = patience
        self._tracked: dict[str, _TrackedRequest] = {}
        self._permanently_best_effort: set[str] = set()  # best effort to their ends: not looked at again
        self._windows: Mapping[str, Window] = {}  # of decodes, if these are judged
        self._oldest = ""
        self.losses = TierLosses(fairness)
        self._pace = self._quickest = 0.0  # seconds of a token of a decode with an e2e SLO: as expected, and at best

    def forget_request(self, id: str, finished: bool) -> tuple[str, float]:
        """Forgets a request that left the replica. Returns its class and the output tokens first predicted, 0 if
        unknown. A request that became best effort has been counted as lost before."""
        known = self._tracked.pop(id, None)
        if id in self._permanently_best_effort:
            self._permanently_best_effort.discard(id)
        elif known is not None and finished:
            self.losses.count_request(known.tier, False)
        return ("", 0.0) if known is None else (known.kind, known.expected)

    def set_step_seconds(self, quickest: float, usual: float) -> None:
        """Sets the seconds of a step of a single token, and of a recent average step."""
        self._quickest, self._pace = quickest, STEP_LENGTHS[0] * max(usual, MIN_E2E_PACE_STEPS * quickest)

    def find_candidates(self, view: View) -> PlanCandidates:
        """Sorts the requests at the replica; call `sort_by_deadline` on the result before use."""
        candidates, now, permanently_best_effort, all_ = (
            PlanCandidates(),
            view.now,
            self._permanently_best_effort,
            self._tracked,
        )
        if view.slo_rule == "windowed":
            self._windows = windows(view, self._windows)
        for seq in view.running:
            if seq.id in permanently_best_effort:
                candidates.best_effort_running.append(seq)
            else:
                self._classify(view, seq, candidates, candidates.best_effort_running, candidates.decodes)
        prompts, best_effort_waiting = candidates.prompts, candidates.best_effort_waiting
        for seq in view.waiting:
            id = seq.id
            if id in permanently_best_effort:
                best_effort_waiting.append(seq)
                continue
            known = all_.get(id)
            job = known.job if known is not None and now < known.until else None
            if job is not None and seq.cached == job.cached and seq.length - job.cached == job.pending:
                prompts.append(job)
                continue
            self._classify(view, seq, candidates, best_effort_waiting, prompts)
        return candidates

    def find_oldest(self, view: View, candidates: PlanCandidates) -> SeqView | None:
        """Returns the oldest best effort once it is older than `patience`; the same one until it ends."""
        if not (candidates.best_effort_running or candidates.best_effort_waiting):
            return None
        if self._oldest in self._permanently_best_effort and (seq := view.known.get(self._oldest)) is not None:
            return seq
        oldest = min([*candidates.best_effort_running, *candidates.best_effort_waiting], key=ARRIVAL)
        if view.now < oldest.request.arrival + self._patience:
            return None
        self._oldest = oldest.id
        return oldest

    def find_next_change(self, candidates: PlanCandidates, oldest: SeqView | None) -> float:
        """Returns until when waiting requests stay what they are as candidates, and `find_oldest` returns `oldest`, if
        only time passes."""
        jobs = [(self._tracked[job.id], job) for job in candidates.prompts]
        until = min([known.until if known.job is job else -inf for known, job in jobs], default=inf)
        if oldest is None and candidates.best_effort_waiting:
            until = min(until, min(map(ARRIVAL, candidates.best_effort_waiting)) + self._patience)
        return until

    def sure_steps(self, decodes: Sequence[SeqView]) -> tuple[int, SeqView | None]:
        """Returns the steps of all decodes in which `as_resident` learns nothing of them, and one of which nothing is
        known: of that it learns once it is predicted."""
        expected = [known.expected if (known := self._tracked.get(seq.id)) is not None else 0.0 for seq in decodes]
        unpredicted = next((seq for seq, tokens in zip(decodes, expected, strict=True) if not tokens), None)
        left = [MAX_OUTPUT_RATIO * e - s.output for s, e in zip(decodes, expected, strict=True) if e]
        return int(max(0.0, min(left, default=1e9))), unpredicted

    def as_resident(self, seq: SeqView) -> Resident:
        """Returns the request as `KVSurvival` counts it, up to the end of its last stage."""
        known, request, length = self._tracked.get(seq.id), seq.request, seq.length
        stages = request.stages
        prompt, later = stages[0].prompt, 0
        for i, stage in enumerate(stages[1:], 1):
            if i <= seq.stage:
                prompt += stage.prompt
            else:
                later += stage.prompt
        output = length - prompt
        expected = known.expected if known is not None else 0.0
        unsure = not output or output > MAX_OUTPUT_RATIO * expected  # by its first token more may be known of its class
        if unsure and (predicted := seq.predicted) is not None:
            expected = output + predicted
            if known is not None:
                known.expected = expected
        most = max(request.sampling.max_tokens, output + 1)
        return Resident(class_of(request), output, expected or most, most, length + later)

    def _classify(
        self, view: View, seq: SeqView, candidates: PlanCandidates, best_effort: list[SeqView], single: list[Task]
    ) -> None:
        """Appends a request to the right list: `best_effort` if it cannot be in time, `single` if one token is pending,
        else the prompts. For a waiting request `single` are the prompts, too: it must be admitted even if a prefix
        cache holds all but one of its tokens."""
        known = self._tracked.get(seq.id)
        if known is None:
            if seq.best_effort:
                self._permanently_best_effort.add(seq.id)
                best_effort.append(seq)
                return
            known = self._tracked[seq.id] = _TrackedRequest(seq.request.tier, class_of(seq.request))
        cached = seq.cached
        pending = seq.length - cached
        due, tpot, until, last = self._times(view, seq, known, pending)
        alone = view.latency.step_time(Shape.prefill(pending, cached)) if pending > 1 else 0.0
        refuses = seq.request.on_decline == "refuse"
        if last < view.now + alone or seq.missed or (refuses and wants_refusal(seq, view)):
            self._permanently_best_effort.add(seq.id)
            self.losses.count_request(known.tier, True)
            best_effort.append(seq)
            candidates.late.append(seq)
            return
        job = Task(due, seq.request.arrival, seq.id, tpot, pending, cached, seq)
        if pending == 1:
            single.append(job)
        else:
            candidates.prompts.append(job)
            known.job, known.until = job, min(until, due - alone)

    def _times(
        self, view: View, seq: SeqView, known: _TrackedRequest, pending: int
    ) -> tuple[float, float, float, float]:
        """Returns the times of a request's next token.

        Returns:
            when it is due, the seconds to the token after it, until when both stay true if no token comes out, and when
            the token is late for good
        """
        if known.stage != seq.stage:
            known.stage, known.tpot = seq.stage, tightest_tpot(seq)
        due, tpot, now = seq.due, known.tpot, view.now
        last = due
        if pending == 1 and (window := self._windows.get(seq.id)) is not None:
            _, before, began = window
            due, last = min(due, began + (seq.output + 1 - before) * tpot), min(due, began + WINDOW_TOKENS * tpot)
        e2e = seq.slo.e2e
        if e2e is not None:
            end = seq.request.arrival + seq.tool_seconds + e2e
            pace = self._pace
            # While nothing is known of lengths, half of the time is for the decode.
            left = (0.5 * e2e / pace if seq.predicted is None else seq.predicted) - 1.0
            # In time if its next token is out by `early` at the usual pace, by `latest` at the quickest; one that is
            # behind is asked for a token a pace, no more.
            early, latest = end - left * pace, end - left * self._quickest
            return max(min(due, early), min(due, now + pace)), min(tpot, pace), now, min(last, max(latest, early))
        if due == inf and (pending > 1 or not seq.output):  # no TTFT: due after `patience`, then always `soon`
            soon, due = min(tpot, self._patience), seq.stage_start + self._patience
            return max(due, now + soon), tpot, due - soon, inf
        return due, tpot, inf, last


def _with_lead(job: Task, now: float, lead: float, entry: DecodeEntry, doubt: float, reserve: float) -> Task:
    """Returns a decode with its deadline moved up by the lead; a decode without that lead gains it gradually."""
    due, arrival, id, tpot, pending, cached, seq = job
    ahead = min(lead, MAX_LEAD_STEPS * tpot) + (entry.unlucky(tpot) if entry.draft is not None else 0.0)
    soon = now + (1.0 - SLACK_SHARE if entry.tokens == 1.0 else 1.0 + SLACK_SHARE) * tpot * entry.tokens
    sooner = min(max(due - ahead, min(due, soon)), now + (due - now - reserve) / (1.0 + doubt))
    return Task(sooner, arrival, id, tpot, pending, cached, seq)


def has_e2e(seq: SeqView) -> bool:
    return seq.slo.e2e is not None
