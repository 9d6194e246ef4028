"""PB*, speculative (SLOs-Serve, Appendix D): how many tokens to verify for a decode of each tier.

A tier's length is the tokens verified in one entry: the pending one and the drafted. With acceptance a, sl of them give
Acc(sl) = (1 - a^sl) / (1 - a) tokens on average (a = 1: sl), so a batch may last TPOT · Acc(sl) without its decodes
falling behind. Longer batches hold more tokens a second; more verified tokens leave fewer of them for prefill.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import ceil, floor, inf

from rubato.core.events import Event, Finished, HandedOff, Preempted
from rubato.core.interfaces import SeqView, View
from rubato.core.plan import Shape, Work
from rubato.policies.slos_serve.demand import BatchCapacity, counted, prompt_stage
from rubato.policies.slos_serve.token_budget import Demand
from rubato.policy_kit.acceptance import Accepted
from rubato.policy_kit.batch_builder import remaining_output

LONGEST = 10  # tokens verified in one entry (the paper: lengths are below ten)
CLOSE = 1e-9  # relative: TPOTs times expected tokens that are equal but for rounding


@dataclass(frozen=True, slots=True)
class Tier:
    """`count` requests that decode at `tpot` seconds a token; acceptance: probability that a drafted token is right."""

    tpot: float
    count: int
    acceptance: float


@dataclass(frozen=True, slots=True)
class Lengths:
    """verified: tokens an entry, by tier (1: plain decoding). seconds: of a batch. prefill: tokens of it that are left
    for prefill, per second in `throughput`."""

    verified: tuple[int, ...]
    seconds: float
    prefill: int

    @property
    def throughput(self) -> float:
        return self.prefill / self.seconds


def expected(acceptance: float, length: int) -> float:
    """Acc(sl): tokens that verifying so many gives on average."""
    if acceptance >= 1.0:
        return float(length)
    return float((1.0 - acceptance**length) / (1.0 - acceptance))


def keeping_up(tpot: float, acceptance: float, seconds: float, longest: int = LONGEST) -> int:
    """The smallest length with which a decode keeps up with batches of so many seconds; `longest` where none does."""
    enough = seconds * (1.0 - CLOSE) / tpot
    return next((n for n in range(1, longest) if expected(acceptance, n) >= enough), longest)


def best_lengths(
    tiers: Sequence[Tier], time2bs: Callable[[float, int], int], longest: int = LONGEST, most: float = inf
) -> Lengths | None:
    """The lengths with the largest prefill throughput; of equal ones those that verify least. None: decodes alone do
    not fit.

    time2bs: tokens of a batch that takes so many seconds, so many draft steps included. most: seconds of a batch. For
    each tier as the one that bounds the batch, at each length, the others take the smallest length that keeps up.
    Raises ValueError without tiers, or with one that is empty or whose acceptance is no probability.
    """
    if not tiers:
        raise ValueError("no tier decodes: a batch is as large as the engine takes, and nothing is to be verified")
    for tier in tiers:
        if tier.count < 1 or not 0.0 <= tier.acceptance <= 1.0 or not tier.tpot > 0.0:
            raise ValueError(f"{tier}: give at least 1 request, an acceptance in [0, 1] and a TPOT above 0")
    best: Lengths | None = None
    for bound in tiers:
        for length in range(1, longest + 1):
            lasts = bound.tpot * expected(bound.acceptance, length)
            found = _at(min(lasts, most), tiers, time2bs, longest)
            if found is not None and (best is None or _rank(found, tiers) > _rank(best, tiers)):
                best = found
    return best


def _at(seconds: float, tiers: Sequence[Tier], time2bs: Callable[[float, int], int], longest: int) -> Lengths | None:
    """The smallest lengths whose decodes keep up with batches of so many seconds."""
    verified = [keeping_up(tier.tpot, tier.acceptance, seconds, longest) for tier in tiers]
    lasts = [tier.tpot * expected(tier.acceptance, n) for tier, n in zip(tiers, verified, strict=True)]
    if min(lasts) < seconds * (1.0 - CLOSE):
        return None
    cost = sum(tier.count * n for tier, n in zip(tiers, verified, strict=True))
    left = time2bs(seconds, max(verified) - 1) - cost
    return Lengths(tuple(verified), seconds, left) if left >= 0 else None


def _rank(lengths: Lengths, tiers: Sequence[Tier]) -> tuple[float, int]:
    return lengths.throughput, -sum(t.count * n for t, n in zip(tiers, lengths.verified, strict=True))


# --------------------------------------------------------------------------- drafting for decodes

# Drafting for decodes: how long batches may be because of it, what entries cost then, how deep to draft for each.
#
# A `SpeculationPlan` has the seconds of a batch that every decode keeps up with, by the smallest length of its own:
# an entry of `verified` tokens, `expected` of which come out, is wanted every TPOT · expected instead of a token every
# TPOT. Nothing else changes for `token_budget` and `admission`. As the tokens of an entry come together, the first of
# them is early when the last is just in time: so a prompt is due that much sooner.
#
# What comes out is random. Plans are made on what drafts bring on average, as in the paper. An unlucky decode has the
# next batch cut short for it where others can spare that. And where they can and memory fills, drafts are as deep as
# makes decodes fastest, whatever was planned: an ended request holds no memory, which admits others.

LONGER_BATCH_GAIN = 1.5  # times the prefill throughput of plain decoding: what makes longer batches worth their risk
CATCHING_UP = 0.1  # of a batch: what the drafter may take for prompts that it has not seen
ACCEPTANCE_STEP = 0.02  # of planned chances: lengths do not change with every try


@dataclass(frozen=True, slots=True)
class SpeculationPlan:
    """seconds: of batches that decodes keep up with by drafting (0: none drafts). steps: draft steps there is time for
    in each. longest: tokens verified in an entry at most."""

    seconds: float = 0.0
    steps: int = 0
    longest: int = 1

    def entries(self, demands: Iterable[Demand], drafted: Mapping[str, int]) -> list[Demand]:
        """The demands as entries of verified tokens; drafted: how many tokens there are to be verified now, by id."""
        return [self._entry(d, drafted.get(d.id, 0)) for d in demands] if self.steps else list(demands)

    def _entry(self, demand: Demand, drafted: int) -> Demand:
        verified = self.verified(demand)
        if verified == 1:
            return demand
        period = demand.tpot * expected(demand.accepts, verified)
        now, tokens = 1.0, demand.tokens
        if tokens == 1:
            there = min(verified, 1 + drafted)
            now, tokens = expected(demand.accepts, there), float(there)
        due = demand.due - (period - demand.tpot * now)
        if demand.accepts < 1.0 and due < period:  # behind by chance, or too soon to be ahead
            due = min(demand.due, period) if demand.tokens > 1 else 0.0
        return demand._replace(due=due, tokens=tokens, tpot=period, verified=verified)

    def verified(self, demand: Demand) -> int:
        return keeping_up(demand.tpot, demand.accepts, self.seconds, self.longest) if demand.tpot < inf else 1


PLAIN = SpeculationPlan()


@dataclass
class Drafts:
    """most: tokens drafted for an entry at most. able: whether the engine drafts."""

    most: int
    able: bool = False
    in_force: SpeculationPlan = PLAIN
    drafted: dict[str, int] = field(default_factory=dict)  # tokens there are to be verified now, by id
    accepted: Accepted = field(default_factory=Accepted)
    _seen: dict[str, int] = field(default_factory=dict, init=False)  # tokens that the drafter knows, by id

    def observe(self, event: Event) -> None:
        self.accepted.observe(event)
        if isinstance(event, Finished | HandedOff | Preempted):
            self._seen.pop(event.id, None)

    def look(self, view: View) -> None:
        """What there is to be verified, and whose tries are to be counted."""
        self.able = self.most > 0 and "draft" in view.supports
        if self.able:
            self.accepted.follow(view.running)
            self.drafted = {  # not beyond its end, as far as that is known
                s.id: min(len(s.draft.parents), max(0, ceil(remaining_output(s)) - 1))
                for s in view.running
                if s.draft is not None
            }

    def entries(self, demands: Sequence[Demand], plan: SpeculationPlan | None = None) -> list[Demand]:
        """The demands as entries of verified tokens, by a plan or the one in force."""
        return (self.in_force if plan is None else plan).entries(demands, self.drafted)

    def chance(self, seq: SeqView) -> float:
        """What plans assume for it: the mean; 0 where deadlines run from the first token, as no decode is then
        ahead."""
        if not self.able:
            return 0.0
        slo = seq.request.stages[prompt_stage(seq)].slo
        if slo.ttft is None and slo.e2e is None:
            return 0.0
        mean = self.accepted.mean(seq.request)
        return 1.0 if mean >= 1.0 else floor(mean / ACCEPTANCE_STEP) * ACCEPTANCE_STEP

    def candidates(self, demands: Sequence[Demand], capacity: BatchCapacity, most: float) -> Iterator[SpeculationPlan]:
        """What to try, in this order: none, and the one with the largest prefill throughput if all are there, whose
        batches take at most `most` seconds."""
        yield PLAIN
        counts = Counter((d.tpot, d.accepts) for d in demands if d.tpot < inf) if self.able else None
        if not counts:
            return
        tiers = [Tier(tpot, count, chance) for (tpot, chance), count in counts.items()]
        plain = best_lengths(tiers, capacity.tokens, 1, most)
        best = best_lengths(tiers, capacity.tokens, self.most + 1, most)
        if best is None or max(best.verified) == 1:
            return
        if plain is None or best.throughput >= LONGER_BATCH_GAIN * plain.throughput:
            yield SpeculationPlan(best.seconds, max(best.verified) - 1, self.most + 1)

    def to_draft(
        self, view: View, seqs: Sequence[SeqView], most: int, tokens: float, bound: float, prefill_weight: float = 1.0
    ) -> tuple[dict[str, tuple[int, int]], float]:
        """(Depth, width) of what to draft for each whose entry may end in a batch of so many tokens, where those of
        prefill count `prefill_weight`, and seconds: `most` deep, but not beyond its end; of those whose tokens the
        drafter has not all seen, no more than a part of the batch's time is enough for. And the seconds of that, which
        a batch's shape does not say."""
        found: dict[str, tuple[int, int]] = {}
        lag, late = 0, 0.0
        for seq in seqs if most else ():
            depth = min(most, ceil(remaining_output(seq)) - 2)
            if counted(seq.pending, prefill_weight) > tokens or depth < 1:
                continue
            if behind := self._behind(seq):
                seconds = self._catching_up(view, lag + behind)
                if lag and seconds > CATCHING_UP * bound:
                    continue
                lag, late = lag + behind, seconds
            found[seq.id] = (depth, 1)
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

    def remember(self, work: Iterable[Work], view: View) -> None:
        """Note which draft in the next batch: the drafter will know all their tokens."""
        if drafting := [given.seq for given in work if given.draft is not None]:
            known = view.known
            self._seen.update((id, known[id].length) for id in drafting)
