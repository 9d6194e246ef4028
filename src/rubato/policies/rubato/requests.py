"""What a replica's requests are to the policy: decodes and prompts that can still be in time, by deadline; the rest is
best effort, to its end."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import exp, inf
from operator import attrgetter

from rubato.core.interfaces import SeqView, View
from rubato.core.length_prediction import class_of
from rubato.core.plan import Shape
from rubato.core.slo import WINDOW_TOKENS
from rubato.policies.rubato.supply import LADDER, MEMORY, MOST_AHEAD_STEPS, SLACK, Entry, Job
from rubato.policy_kit.batch_builder import remaining_output
from rubato.policy_kit.kv_survival import SENSELESS, Resident
from rubato.policy_kit.paces import Window, tightest_tpot, windows
from rubato.policy_kit.refusals import wants_refusal

# Steps of a single token, as long as which a step of decodes with an e2e SLO is taken to be at least: paced by shorter
# ones they force steps to be short, and these lose capacity.
E2E_STEP = 3.0
ARRIVAL = attrgetter("request.arrival")


@dataclass(slots=True)
class _Known:
    """expected: output tokens in all, as predicted by its first one (0: nothing was). tpot: the tightest of `stage` and
    of what follows it without a prompt. job: as it waits, good until then."""

    tier: str
    kind: str
    expected: float = 0.0
    tpot: float = inf
    stage: int = -1
    job: Job | None = None
    until: float = -inf


@dataclass(slots=True)
class Parts:
    """decodes, prompts: that can be in time, by deadline. held, queued: best effort, with KV and without, the second
    in the view's order. late: of these, those that are so from now on."""

    decodes: list[Job] = field(default_factory=list)
    prompts: list[Job] = field(default_factory=list)
    held: list[SeqView] = field(default_factory=list)
    queued: list[SeqView] = field(default_factory=list)
    late: list[SeqView] = field(default_factory=list)

    def in_order(self, now: float, lead: float, doubt: float, reserve: float, entry: Entry) -> None:
        """Decodes and prompts by deadline. lead: seconds that decodes stay ahead, at most some tokens; with drafts,
        whose luck varies, more, and prompts are due sooner by what is more."""
        self.decodes = [_ahead(job, now, lead, entry, doubt, reserve) for job in self.decodes]
        if entry.draft is not None:
            self.prompts = [job._replace(due=job.due - entry.unlucky(job.tpot)) for job in self.prompts]
        self.decodes.sort()
        self.prompts.sort()


class TierLosses:
    """How many requests of each tier were lost of late, and what a tier's prompts therefore weigh when some are to be
    left out: less, the more it loses beyond others."""

    def __init__(self, fairness: float) -> None:
        self._fairness = fairness
        self._tiers: dict[str, tuple[float, float]] = {}  # offered, and of these lost

    def count(self, tier: str, lost: bool) -> None:
        """A request has ended in time, or is lost. All tiers fade with each, so that they compare."""
        fade = 1.0 - 1.0 / MEMORY
        # A client may name any tier: one that has faded away is dropped.
        self._tiers = {name: (o * fade, n * fade) for name, (o, n) in self._tiers.items() if o > 1.0 / MEMORY}
        offered, before = self._tiers.get(tier, (0.0, 0.0))
        self._tiers[tier] = offered + 1.0, before + lost

    def share(self) -> float:
        """Of all requests of late, those that were lost."""
        offered = sum([o for o, _ in self._tiers.values()])
        return sum([n for _, n in self._tiers.values()]) / offered if offered else 0.0

    def weights(self) -> Mapping[str, float]:
        """By tier; those not named weigh 1."""
        if not self._fairness or len(self._tiers) < 2:
            return {}
        mean, fairness = self.share(), self._fairness
        return {tier: exp(fairness * (mean - n / o)) for tier, (o, n) in self._tiers.items()}


class Requests:
    """patience: seconds in which a prompt without a TTFT is due, and after which the oldest best effort has turns."""

    def __init__(self, patience: float, fairness: float) -> None:
        self._patience = patience
        self._known: dict[str, _Known] = {}
        self._given_up: set[str] = set()  # best effort to their ends: not looked at again
        self._windows: Mapping[str, Window] = {}  # of decodes, if these are judged
        self._oldest = ""
        self.losses = TierLosses(fairness)
        self._pace = self._quickest = 0.0  # seconds of a token of a decode with an e2e SLO: as expected, and at best

    def left(self, id: str, finished: bool) -> tuple[str, float]:
        """A request has left the replica: its class, and the output tokens first predicted for it, 0 if unknown. One
        that was given up has been counted as lost."""
        known = self._known.pop(id, None)
        if id in self._given_up:
            self._given_up.discard(id)
        elif known is not None and finished:
            self.losses.count(known.tier, False)
        return ("", 0.0) if known is None else (known.kind, known.expected)

    def steps_take(self, quickest: float, usual: float) -> None:
        """Seconds of a step of a single token, and of one as they are of late."""
        self._quickest, self._pace = quickest, LADDER[0] * max(usual, E2E_STEP * quickest)

    def parts(self, view: View) -> Parts:
        """What is here; `Parts.in_order` must be called before decodes and prompts are used."""
        parts, now, given_up, all_ = Parts(), view.now, self._given_up, self._known
        if view.slo_rule == "windowed":
            self._windows = windows(view, self._windows)
        for seq in view.running:
            if seq.id in given_up:
                parts.held.append(seq)
            else:
                self._sort_in(view, seq, parts, parts.held, parts.decodes)
        prompts, queued = parts.prompts, parts.queued
        for seq in view.waiting:
            id = seq.id
            if id in given_up:
                queued.append(seq)
                continue
            known = all_.get(id)
            job = known.job if known is not None and now < known.until else None
            if job is not None and seq.cached == job.cached and seq.length - job.cached == job.pending:
                prompts.append(job)
                continue
            self._sort_in(view, seq, parts, queued, prompts)
        return parts

    def oldest(self, view: View, parts: Parts) -> SeqView | None:
        """The best effort that has been here longest, once it is longer than `patience`; the same until it ends."""
        if not (parts.held or parts.queued):
            return None
        if self._oldest in self._given_up and (seq := view.known.get(self._oldest)) is not None:
            return seq
        oldest = min([*parts.held, *parts.queued], key=ARRIVAL)
        if view.now < oldest.request.arrival + self._patience:
            return None
        self._oldest = oldest.id
        return oldest

    def resident(self, seq: SeqView) -> Resident:
        """As `KVSurvival` counts it, up to the end of its last stage."""
        known, stages = self._known.get(seq.id), seq.request.stages
        output, later = seq.length, 0
        for i, stage in enumerate(stages):
            if i <= seq.stage:
                output -= stage.prompt
            else:
                later += stage.prompt
        expected = known.expected if known is not None else 0.0
        unsure = not output or output > SENSELESS * expected  # by its first token more may be known of its class
        if unsure and (predicted := seq.predicted) is not None:
            expected = output + predicted
            if known is not None:
                known.expected = expected
        most = max(seq.request.sampling.max_tokens, output + 1)
        kind = class_of(seq.request)
        return Resident(kind, output, expected or output + remaining_output(seq), most, seq.length + later)

    def _sort_in(self, view: View, seq: SeqView, parts: Parts, best_effort: list[SeqView], single: list[Job]) -> None:
        """best_effort, single: where it belongs if it cannot be in time, and if it has one token pending. (One that
        waits is a prompt even then, however much of it a prefix cache holds: it has to be let in.)"""
        known = self._known.get(seq.id)
        if known is None:
            if seq.best_effort:
                self._given_up.add(seq.id)
                best_effort.append(seq)
                return
            known = self._known[seq.id] = _Known(seq.request.tier, class_of(seq.request))
        cached = seq.cached
        pending = seq.length - cached
        due, tpot, until, last = self._times(view, seq, known, pending)
        alone = view.latency.step_time(Shape().plus(pending, cached)) if pending > 1 else 0.0
        if last < view.now + alone or seq.missed or wants_refusal(seq, view):
            self._given_up.add(seq.id)
            self.losses.count(known.tier, True)
            best_effort.append(seq)
            parts.late.append(seq)
            return
        job = Job(due, seq.request.arrival, seq.id, tpot, pending, cached, seq)
        if pending == 1:
            single.append(job)
        else:
            parts.prompts.append(job)
            known.job, known.until = job, min(until, due - alone)

    def _times(self, view: View, seq: SeqView, known: _Known, pending: int) -> tuple[float, float, float, float]:
        """When its next token is due, the seconds from there to the one after it, until when that is so if nothing
        comes out, and when that token must be out at the very latest."""
        if known.stage != seq.stage:
            known.stage, known.tpot = seq.stage, tightest_tpot(seq)
        due, tpot, now = seq.due, known.tpot, view.now
        last = due
        if pending == 1 and (window := self._windows.get(seq.id)) is not None:
            _, before, began = window
            due, last = min(due, began + (seq.output + 1 - before) * tpot), min(due, began + WINDOW_TOKENS * tpot)
        e2e = seq.request.stages[seq.stage].slo.e2e
        if e2e is not None:
            end = seq.request.arrival + seq.tool_seconds + e2e
            pace = self._pace
            # While nothing is known of lengths, half of the time is for the decode.
            left = (0.5 * e2e / pace if seq.predicted is None else seq.predicted) - 1.0
            early, latest = end - left * pace, end - left * self._quickest
            return max(min(due, early), min(due, now + pace)), min(tpot, pace), now, min(last, max(latest, early))
        if due == inf and (pending > 1 or not seq.output):
            soon, due = min(tpot, self._patience), seq.stage_start + self._patience
            return max(due, now + soon), tpot, due - soon, inf
        return due, tpot, inf, last


def _ahead(job: Job, now: float, lead: float, entry: Entry, doubt: float, reserve: float) -> Job:
    """A decode that is to stay so many seconds ahead, and more with drafts; one that is not gets there by and by."""
    ahead = min(lead, MOST_AHEAD_STEPS * job.tpot) + entry.unlucky(job.tpot)
    soon = now + (1.0 - SLACK if entry.tokens == 1.0 else 1.0 + SLACK) * job.tpot * entry.tokens
    due = max(job.due - ahead, min(job.due, soon))
    return job._replace(due=min(due, now + (job.due - now - reserve) / (1.0 + doubt)))


def has_e2e(seq: SeqView) -> bool:
    return seq.request.stages[seq.stage].slo.e2e is not None
