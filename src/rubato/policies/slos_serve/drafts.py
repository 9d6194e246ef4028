"""Drafting for decodes: how long batches may be because of it, what entries cost then, how deep to draft for whom.

A stride is the seconds of a batch that every decode keeps up with, by the smallest length of its own (`speculation`):
an entry of `verified` tokens, `expected` of which come out, is wanted every TPOT · expected instead of a token every
TPOT. Nothing else changes for `budget` and `admission`. As the tokens of an entry come together, the first of them is
early by as much as the last is just in time: a prompt is wanted so much sooner.

What comes out is random. Strides are planned on what drafts bring on average, as in the paper, or on less (`caution`).
Who was unlucky has the next batch cut short for it where others can spare that. And where they can and memory fills,
drafts are as deep as makes decodes fastest, whatever was planned: who has ended holds no memory, which admits others.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import ceil, floor, inf, sqrt

from rubato.core.batch_builder import remaining
from rubato.core.events import Event, Finished, HandedOff, Preempted, Tokens
from rubato.core.interfaces import SeqView, View
from rubato.core.plan import Plan, Shape, Work
from rubato.core.request import Request
from rubato.policies.slos_serve.budget import Job
from rubato.policies.slos_serve.demand import Machine, counted, round_of
from rubato.policies.slos_serve.speculation import LONGEST, Tier, best_lengths, expected, keeping_up

PRIOR, WEIGHT = 0.7, 10.0  # chance that a drafted token is right before any was tried, and how many tries that is worth
MEMORY = 2000.0  # tries of a class that are remembered
HORIZON = 20.0  # tries over which a plan allows for bad luck
WORTH = 1.5  # times the prefill throughput of plain decoding: what makes longer batches worth their risk
CATCHING_UP = 0.1  # of a batch: what the drafter may take for prompts that it has not seen
GRAIN = 0.02  # of planned chances: lengths do not change with every try


@dataclass
class Accepted:
    """How many drafted tokens were right, by class: a request's application, or its tier where it names none. prior:
    the share that is right before any was tried, worth `WEIGHT` tries."""

    prior: float = PRIOR
    _class: dict[str, str] = field(default_factory=dict, init=False)
    _counts: dict[str, tuple[float, float]] = field(default_factory=dict, init=False)  # right, tried

    def follow(self, seqs: Iterable[SeqView]) -> None:
        """Whose tries are to be counted. What one has had already counts where its class has no other."""
        for seq in seqs:
            if seq.id not in self._class:
                self._class[seq.id] = class_of(seq.request)
                if seq.acceptance is not None:
                    self._add(self._class[seq.id], seq.acceptance * seq.tried, seq.tried)

    def observe(self, event: Event) -> None:
        if isinstance(event, Tokens) and event.tried and event.id in self._class:
            self._add(self._class[event.id], event.tokens - 1, event.tried)
        elif isinstance(event, Finished | HandedOff):
            self._class.pop(event.id, None)

    def mean(self, request: Request) -> float:
        right, tried = self._counts.get(class_of(request), (0.0, 0.0))
        return (right + self.prior * WEIGHT) / (tried + WEIGHT)

    def _add(self, name: str, right: float, tried: float) -> None:
        before = self._counts.get(name, (0.0, 0.0))
        all_ = before[1] + tried
        kept = min(1.0, MEMORY / all_) if all_ else 1.0
        self._counts[name] = ((before[0] + right) * kept, all_ * kept)


def class_of(request: Request) -> str:
    return request.app or request.tier


@dataclass(frozen=True, slots=True)
class Stride:
    """seconds: of batches that decodes keep up with by drafting (0: none drafts). steps: draft steps there is time for
    in each. longest: tokens verified in an entry at most."""

    seconds: float = 0.0
    steps: int = 0
    longest: int = 1

    def entries(self, jobs: Iterable[Job], drafted: Mapping[str, int]) -> list[Job]:
        """The jobs as entries of verified tokens; drafted: how many tokens there are to be verified now, by id."""
        return [self._entry(job, drafted.get(job.id, 0)) for job in jobs] if self.steps else list(jobs)

    def _entry(self, job: Job, drafted: int) -> Job:
        verified = self.verified(job)
        if verified == 1:
            return job
        period = job.tpot * expected(job.accepts, verified)
        now, tokens = 1.0, job.tokens
        if tokens == 1:
            there = min(verified, 1 + drafted)
            now, tokens = expected(job.accepts, there), float(there)
        due = job.due - (period - job.tpot * now)
        if job.accepts < 1.0 and due < period:  # behind by chance, or too soon to be ahead
            due = min(job.due, period) if job.tokens > 1 else 0.0
        return job._replace(due=due, tokens=tokens, tpot=period, verified=verified)

    def verified(self, job: Job) -> int:
        return keeping_up(job.tpot, job.accepts, self.seconds, self.longest) if job.tpot < inf else 1


PLAIN = Stride()


@dataclass
class Drafts:
    """most: tokens drafted for an entry at most. caution: standard deviations of luck that plans allow for. prior: as
    `Accepted` has it. able: whether the engine drafts."""

    most: int
    caution: float
    prior: float = PRIOR
    able: bool = False
    stride: Stride = PLAIN
    drafted: dict[str, int] = field(default_factory=dict)  # tokens there are to be verified now, by id
    accepted: Accepted = field(init=False)
    _seen: dict[str, int] = field(default_factory=dict, init=False)  # tokens that the drafter knows, by id

    def __post_init__(self) -> None:
        self.accepted = Accepted(self.prior)

    def observe(self, event: Event) -> None:
        self.accepted.observe(event)
        if isinstance(event, Finished | HandedOff | Preempted):
            self._seen.pop(event.id, None)

    def look(self, view: View) -> None:
        """What there is to be verified, and whose tries are to be counted."""
        self.able = self.most > 0 and "draft" in view.supports
        if self.able:
            self.accepted.follow(view.running)
            self.drafted = {s.id: _verifiable(s) for s in view.running if s.draft is not None}

    def entries(self, jobs: Sequence[Job], stride: Stride | None = None) -> list[Job]:
        """The jobs as entries of verified tokens, by a stride or the one in force."""
        return (self.stride if stride is None else stride).entries(jobs, self.drafted)

    def chance(self, seq: SeqView) -> float:
        """What is planned on for it: less than the mean, but for certainty; nothing where deadlines run from the first
        token, for nobody is ahead of such."""
        if not self.able:
            return 0.0
        slo = seq.request.stages[round_of(seq)].slo
        if slo.ttft is None and slo.e2e is None:
            return 0.0
        mean = self.accepted.mean(seq.request)
        planned = mean - self.caution * sqrt(mean * (1.0 - mean) / HORIZON)
        return 1.0 if planned >= 1.0 else max(0.0, floor(planned / GRAIN) * GRAIN)

    def strides(self, jobs: Sequence[Job], machine: Machine, most: float) -> Iterator[Stride]:
        """What to try, in this order: none, and the one with the largest prefill throughput if all are there, whose
        batches take at most `most` seconds."""
        yield PLAIN
        counts = Counter((job.tpot, job.accepts) for job in jobs if job.tpot < inf) if self.able else None
        if not counts:
            return
        tiers = [Tier(tpot, count, chance) for (tpot, chance), count in counts.items()]
        plain = best_lengths(tiers, machine.capacity, 1, most)
        best = best_lengths(tiers, machine.capacity, self.most + 1, most)
        if best is None or max(best.verified) == 1:
            return
        if plain is None or best.throughput >= WORTH * plain.throughput:
            yield Stride(best.seconds, max(best.verified) - 1, self.most + 1)

    def depths(
        self, view: View, seqs: Sequence[SeqView], most: int, tokens: float, bound: float, light: float = 1.0
    ) -> tuple[dict[str, int], float]:
        """How many tokens to draft for each whose entry may end in a batch of so many tokens, where those of prefill
        count `light`, and seconds: `most`, but none beyond its end, and of those that the drafter lags behind with no
        more than a part of the batch is enough for. And the seconds of that, which a batch's shape does not say."""
        found: dict[str, int] = {}
        lag, late = 0, 0.0
        for seq in seqs if most else ():
            depth = min(most, ceil(remaining(seq)) - 2)
            if counted(seq.pending, light) > tokens or depth < 1:
                continue
            if behind := self._behind(seq):
                seconds = self._catching_up(view, lag + behind)
                if lag and seconds > CATCHING_UP * bound:
                    continue
                lag, late = lag + behind, seconds
            found[seq.id] = depth
        return found, late

    def _catching_up(self, view: View, tokens: int) -> float:
        """Seconds in which the drafter runs so many tokens, by what the latency model says of a batch of them."""
        model, batch, one = view.latency, Shape().plus(tokens, 0), Shape().plus(1, 0)
        whole, least = (model.step_time(s._replace(spec_steps=1)) - model.step_time(s) for s in (batch, one))
        return max(0.0, whole - least)

    def _behind(self, seq: SeqView) -> int:
        """Tokens of it that the drafter has not seen, but for those of its last entry."""
        lag = seq.length - self._seen.get(seq.id, 0)
        return lag if lag > LONGEST else 0

    def fastest(self, view: View, seqs: Sequence[SeqView], beside: int) -> int:
        """Tokens to draft for each of these, for all to be done soonest and their memory free, beside so many tokens of
        prefill."""
        if not seqs or not self.able:
            return 0
        chance = sum(self.accepted.mean(s.request) for s in seqs) / len(seqs)

        count, cached = len(seqs), sum(s.length for s in seqs)

        def speed(depth: int) -> float:
            n = 1 + depth
            kv, chunks = cached + count * n, count if depth else 0
            shape = Shape(
                count * n, count, kv, n * cached * (depth > 0), n * n * chunks, depth, chunks, kv * (depth > 0)
            )
            if beside:
                shape = shape.plus(beside, 0)
            return expected(chance, n) / view.latency.step_time(shape)

        best, fastest = 0, speed(0)
        while best < self.most and (faster := speed(best + 1)) > fastest:
            best, fastest = best + 1, faster
        return best

    def written(self, plan: Plan, view: View, depths: Mapping[str, int]) -> Plan:
        """The plan with what of its work is verification, and what to draft."""
        if not self.drafted and not depths:
            return plan
        known = view.known

        def work(given: Work) -> Work:
            seq = known[given.seq]
            verify = tuple(range(given.tokens - seq.pending))
            depth = depths.get(given.seq, 0) if given.tokens >= seq.pending else 0
            if depth:
                self._seen[given.seq] = seq.length
            return Work(given.seq, given.tokens - len(verify), verify, (depth, 1) if depth else None)

        return plan._replace(work=tuple(map(work, plan.work)))


def _verifiable(seq: SeqView) -> int:
    """Drafted tokens that are not beyond its end, as far as that is known."""
    return min(len(seq.draft.parents), max(0, ceil(remaining(seq)) - 1)) if seq.draft is not None else 0
