"""PB*, speculative (SLOs-Serve, §3.2.3 and Appendix D): how many tokens to verify for a decode of each tier.

A tier's length is the tokens verified in one entry: the pending one and the drafted. With acceptance a, sl of them give
Acc(sl) = (1 - a^sl) / (1 - a) tokens on average (a = 1: sl), so a batch may last TPOT · Acc(sl) without its decodes
falling behind. Longer batches hold more tokens a second; more verified tokens leave fewer of them for prefill.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import ceil, floor, inf
from typing import NamedTuple

from rubato.core.interfaces import SeqView, View
from rubato.policies.slos_serve.batch_capacity import BatchCapacity
from rubato.policies.slos_serve.demand import Demand, prompt_stage
from rubato.policy_kit.acceptance import AcceptanceRates
from rubato.policy_kit.batch_builder import remaining_output
from rubato.policy_kit.draft_value import find_paying_depth
from rubato.policy_kit.drafter_lag import DrafterLag

MAX_ENTRY_TOKENS = 10  # tokens verified in one entry (the paper: lengths are below ten)
TPOT_ROUNDING = 1e-9  # relative: TPOTs times expected tokens that are equal but for rounding
LONGER_BATCH_GAIN = 1.5  # times the prefill throughput of plain decoding: what makes longer batches worth their risk
DRAFTER_CATCH_UP_SHARE = 0.1  # of a batch: what the drafter may take for prompts that it has not seen
ACCEPTANCE_STEP = 0.02  # of planned chances: lengths do not change with every try


class DecodeTier(NamedTuple):
    """`requests` that decode at `tpot` seconds a token; acceptance: probability that a drafted token is right."""

    tpot: float
    requests: int
    acceptance: float


class EntryLengths(NamedTuple):
    """verified: tokens an entry, by tier (1: plain decoding). seconds: of a batch. throughput: tokens a second that are
    left for prefill."""

    verified: tuple[int, ...]
    seconds: float
    throughput: float


def expected(acceptance: float, length: int) -> float:
    """Returns Acc(sl): the average tokens from an entry of `length` verified tokens."""
    return float(length) if acceptance >= 1.0 else (1.0 - acceptance**length) / (1.0 - acceptance)


def keeping_up(tpot: float, acceptance: float, seconds: float, longest: int = MAX_ENTRY_TOKENS) -> int:
    """Returns the smallest length with which a decode keeps up with batches of `seconds`; `longest` if none does."""
    enough = seconds * (1.0 - TPOT_ROUNDING) / tpot
    return next((n for n in range(1, longest) if expected(acceptance, n) >= enough), longest)


def best_lengths(
    tiers: Sequence[DecodeTier],
    time2bs: Callable[[float, int], int],
    longest: int = MAX_ENTRY_TOKENS,
    most: float = inf,
) -> EntryLengths | None:
    """The lengths with the largest prefill throughput; of equal ones those that verify least. None: decodes alone do
    not fit.

    time2bs: tokens of a batch that takes so many seconds, so many draft steps included. most: seconds of a batch. For
    each tier as the one that bounds the batch, at each length, the others take the smallest length that keeps up.
    """
    best, highest = None, (-inf, 0)
    for bound in tiers:
        for length in range(1, longest + 1):
            seconds = min(bound.tpot * expected(bound.acceptance, length), most)
            verified = [keeping_up(tier.tpot, tier.acceptance, seconds, longest) for tier in tiers]
            lasts = [tier.tpot * expected(tier.acceptance, n) for tier, n in zip(tiers, verified, strict=True)]
            cost = sum(tier.requests * n for tier, n in zip(tiers, verified, strict=True))
            left = time2bs(seconds, max(verified) - 1) - cost
            if left >= 0 and min(lasts) >= seconds * (1.0 - TPOT_ROUNDING) and (left / seconds, -cost) > highest:
                highest = left / seconds, -cost
                best = EntryLengths(tuple(verified), seconds, left / seconds)
    return best


@dataclass(frozen=True, slots=True)
class SpeculationPlan:
    """That batches are longer than a TPOT: each decode keeps up by the smallest length of its own. An entry of
    `verified` tokens, `expected` of which come out on average, is wanted every TPOT · expected instead of a token every
    TPOT. As the tokens of an entry come together, the first of them is early when the last is just in time: so a prompt
    is due that much sooner.

    seconds: of batches (0: none drafts). steps: draft steps there is time for in each. longest: tokens verified in an
    entry at most."""

    seconds: float = 0.0
    steps: int = 0
    longest: int = 1

    def entries(self, demands: Iterable[Demand], draft_tokens: Mapping[str, int]) -> list[Demand]:
        """Returns the demands as entries of verified tokens; `draft_tokens` are those to verify now, by id."""
        return [self._entry(d, draft_tokens.get(d.id, 0)) for d in demands] if self.steps else list(demands)

    def _entry(self, demand: Demand, draft_tokens: int) -> Demand:
        verified = keeping_up(demand.tpot, demand.accepts, self.seconds, self.longest)
        if verified == 1 or demand.tpot == inf:
            return demand
        period = demand.tpot * expected(demand.accepts, verified)
        now, tokens = 1.0, demand.tokens
        if tokens == 1:
            there = min(verified, 1 + draft_tokens)
            now, tokens = expected(demand.accepts, there), float(there)
        due = demand.due - (period - demand.tpot * now)
        if demand.accepts < 1.0 and due < period:  # behind by chance, or too soon to be ahead
            due = min(demand.due, period) if demand.tokens > 1 else 0.0
        return demand._replace(due=due, tokens=tokens, tpot=period, verified=verified)


NO_SPECULATION = SpeculationPlan()


@dataclass
class SpeculationState:
    """most: largest number of tokens drafted for an entry. able: whether the engine drafts."""

    most: int
    able: bool = False
    in_force: SpeculationPlan = NO_SPECULATION
    draft_tokens: dict[str, int] = field(default_factory=dict)  # tokens there are to be verified now, by id
    acceptance: AcceptanceRates = field(default_factory=AcceptanceRates)
    lag: DrafterLag = field(default_factory=DrafterLag)

    def look(self, view: View) -> None:
        """Updates the drafted tokens to verify, up to known ends, and the requests whose tries count."""
        self.able = self.most > 0 and "draft" in view.supports
        if self.able:
            self.acceptance.follow(view.running)
            there = {s.id: (len(s.draft.parents), remaining_output(s)) for s in view.running if s.draft is not None}
            self.draft_tokens = {id: min(nodes, max(0, ceil(left) - 1)) for id, (nodes, left) in there.items()}

    def chance(self, seq: SeqView) -> float:
        """Returns the acceptance that plans assume: the mean; 0 if deadlines run from the first token, since no decode
        is ahead then."""
        slo = seq.request.stages[prompt_stage(seq)].slo
        if not self.able or (slo.ttft is None and slo.e2e is None):
            return 0.0
        return floor(self.acceptance.mean(seq.request) / ACCEPTANCE_STEP + TPOT_ROUNDING) * ACCEPTANCE_STEP

    def candidates(self, demands: Sequence[Demand], capacity: BatchCapacity, most: float) -> Iterator[SpeculationPlan]:
        """What to try, in this order: none, and the one with the largest prefill throughput if all are there, whose
        batches take at most `most` seconds."""
        yield NO_SPECULATION
        counts = Counter((d.tpot, d.accepts) for d in demands if d.tpot < inf) if self.able else {}
        tiers = [DecodeTier(tpot, count, chance) for (tpot, chance), count in counts.items()]
        plain = best_lengths(tiers, capacity.tokens, 1, most)
        best = best_lengths(tiers, capacity.tokens, self.most + 1, most)
        least = LONGER_BATCH_GAIN * plain.throughput if plain is not None else 0.0
        if best is not None and max(best.verified) > 1 and best.throughput >= least:
            yield SpeculationPlan(best.seconds, max(best.verified) - 1, self.most + 1)

    def to_draft(
        self, view: View, seqs: Iterable[SeqView], most: int, tokens: float, bound: float
    ) -> tuple[dict[str, tuple[int, int]], float]:
        """(Depth, width) of what to draft for each whose entry may end in a batch of so many tokens of prefill, and
        seconds: `most` deep, but not beyond its end; of those whose tokens the drafter has not all seen, no more than a
        part of the batch's time is enough for. And the seconds of that, which a batch's shape does not say."""
        drafts_by_id: dict[str, tuple[int, int]] = {}
        lag, late = 0, 0.0
        for seq in seqs if most else ():
            depth = min(most, ceil(remaining_output(seq)) - 2)
            if seq.pending > tokens or depth < 1:
                continue
            if behind := self.lag.tokens_behind(seq):
                seconds = self.lag.seconds(view.latency, lag + behind)
                if lag and seconds > DRAFTER_CATCH_UP_SHARE * bound:
                    continue
                lag, late = lag + behind, seconds
            drafts_by_id[seq.id] = (depth, 1)
        return drafts_by_id, late

    def fastest(self, view: View, seqs: Sequence[SeqView]) -> int:
        """Returns the tokens to draft for each request so that all end soonest and free their memory."""
        if not seqs or not self.able:
            return 0
        chances = [[self.acceptance.mean(s.request) ** depth for depth in range(1, self.most + 1)] for s in seqs]
        return find_paying_depth(view.latency, len(seqs), sum(s.length for s in seqs), chances, 1, 1, self.most)
