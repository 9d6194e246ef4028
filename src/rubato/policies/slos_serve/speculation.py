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
    """The decodes of one TPOT and acceptance.

    Args:
        tpot: seconds a token
        requests: how many there are
        acceptance: probability that a drafted token is right
    """

    tpot: float
    requests: int
    acceptance: float


class EntryLengths(NamedTuple):
    """The lengths chosen for all tiers.

    Args:
        verified: tokens verified in an entry, by tier (1: plain decoding)
        seconds: length of a batch
        throughput: prefill tokens a second beside these entries
    """

    verified: tuple[int, ...]
    seconds: float
    throughput: float


def expected(acceptance: float, length: int) -> float:
    """Returns Acc(sl): the average tokens from an entry of `length` verified tokens."""
    return float(length) if acceptance >= 1.0 else (1.0 - acceptance**length) / (1.0 - acceptance)


def smallest_length(tpot: float, acceptance: float, seconds: float, longest: int = MAX_ENTRY_TOKENS) -> int:
    """Returns the smallest length with which a decode keeps up with batches of `seconds`; `longest` if none does."""
    enough = seconds * (1.0 - TPOT_ROUNDING) / tpot
    return next((n for n in range(1, longest) if expected(acceptance, n) >= enough), longest)


def best_lengths(
    tiers: Sequence[DecodeTier],
    time2bs: Callable[[float, int], int],
    longest: int = MAX_ENTRY_TOKENS,
    max_seconds: float = inf,
) -> EntryLengths | None:
    """Returns the lengths with the largest prefill throughput, of equal ones those that verify least; None if decodes
    alone do not fit.

    It tries each tier as the one that bounds the batch, at each length; the others take the smallest length that keeps
    up.

    Args:
        tiers: the decodes
        time2bs: gives the tokens that fit in a batch of (seconds, draft steps)
        longest: tokens verified in an entry, at most
        max_seconds: length of a batch, at most
    """
    best, highest = None, (-inf, 0)
    for bound in tiers:
        for length in range(1, longest + 1):
            seconds = min(bound.tpot * expected(bound.acceptance, length), max_seconds)
            verified = [smallest_length(tier.tpot, tier.acceptance, seconds, longest) for tier in tiers]
            lasts = [tier.tpot * expected(tier.acceptance, n) for tier, n in zip(tiers, verified, strict=True)]
            cost = sum(tier.requests * n for tier, n in zip(tiers, verified, strict=True))
            prefill = time2bs(seconds, max(verified) - 1) - cost
            if prefill >= 0 and min(lasts) >= seconds * (1.0 - TPOT_ROUNDING) and (prefill / seconds, -cost) > highest:
                highest = prefill / seconds, -cost
                best = EntryLengths(tuple(verified), seconds, prefill / seconds)
    return best


@dataclass(frozen=True, slots=True)
class SpeculationPlan:
    """A plan to run batches longer than a TPOT, in which each decode keeps up by the smallest length of its own.

    Instead of a token every TPOT, a decode needs an entry of `verified` tokens every TPOT · `expected`, the average
    number that come out. As the tokens of an entry come together, the first of them is early when the last is just in
    time: so a prompt is due that much sooner.

    Args:
        seconds: length of a batch; 0: none drafts
        draft_steps: that there is time for in each batch
        max_verified: tokens verified in an entry, at most
    """

    seconds: float = 0.0
    draft_steps: int = 0
    max_verified: int = 1

    def entries(self, demands: Iterable[Demand], draft_tokens: Mapping[str, int]) -> list[Demand]:
        """Returns the demands as entries of verified tokens; `draft_tokens` are those to verify now, by id."""
        return [self._entry(d, draft_tokens.get(d.id, 0)) for d in demands] if self.draft_steps else list(demands)

    def _entry(self, demand: Demand, draft_tokens: int) -> Demand:
        verified = smallest_length(demand.tpot, demand.accepts, self.seconds, self.max_verified)
        if verified == 1 or demand.tpot == inf:
            return demand
        period = demand.tpot * expected(demand.accepts, verified)
        next_output, tokens = 1.0, demand.tokens  # of the next entry
        if tokens == 1:
            verified_next = min(verified, 1 + draft_tokens)
            next_output, tokens = expected(demand.accepts, verified_next), float(verified_next)
        due = demand.due - (period - demand.tpot * next_output)
        if demand.accepts < 1.0 and due < period:  # behind by chance, or too soon to be ahead
            due = min(demand.due, period) if demand.tokens > 1 else 0.0
        return demand._replace(due=due, tokens=tokens, tpot=period, verified=verified)


NO_SPECULATION = SpeculationPlan()


@dataclass
class SpeculationState:
    """What a scheduler knows of drafts: the plan in force, how often they are right, and what the drafter has seen.

    Args:
        max_draft: tokens drafted for an entry, at most
        can_draft: whether the engine drafts
    """

    max_draft: int
    can_draft: bool = False
    in_force: SpeculationPlan = NO_SPECULATION
    draft_tokens: dict[str, int] = field(default_factory=dict)  # id -> drafted tokens that can be verified now
    acceptance: AcceptanceRates = field(default_factory=AcceptanceRates)
    lag: DrafterLag = field(default_factory=DrafterLag)

    def update(self, view: View) -> None:
        """Updates the drafted tokens that can be verified, none beyond a request's end, and the requests whose
        acceptance counts."""
        self.can_draft = self.max_draft > 0 and "draft" in view.supports
        if self.can_draft:
            self.acceptance.follow(view.running)
            self.draft_tokens = {
                s.id: min(len(s.draft.parents), max(0, ceil(remaining_output(s)) - 1))
                for s in view.running
                if s.draft is not None
            }

    def planned_acceptance(self, seq: SeqView) -> float:
        """Returns the acceptance that plans assume: the mean; 0 if deadlines run from the first token, since no decode
        is ahead then."""
        slo = seq.request.stages[prompt_stage(seq)].slo
        if not self.can_draft or (slo.ttft is None and slo.e2e is None):
            return 0.0
        return floor(self.acceptance.mean(seq.request) / ACCEPTANCE_STEP + TPOT_ROUNDING) * ACCEPTANCE_STEP

    def plans_to_try(
        self, demands: Sequence[Demand], capacity: BatchCapacity, max_seconds: float
    ) -> Iterator[SpeculationPlan]:
        """Yields the plans to try, in this order: no speculation; then batches of at most `max_seconds` with the
        largest prefill throughput, were all demands decodes, if they gain enough (`LONGER_BATCH_GAIN`)."""
        yield NO_SPECULATION
        counts = Counter((d.tpot, d.accepts) for d in demands if d.tpot < inf) if self.can_draft else {}
        tiers = [DecodeTier(tpot, count, chance) for (tpot, chance), count in counts.items()]
        plain = best_lengths(tiers, capacity.tokens, 1, max_seconds)
        best = best_lengths(tiers, capacity.tokens, self.max_draft + 1, max_seconds)
        least = LONGER_BATCH_GAIN * plain.throughput if plain is not None else 0.0
        if best is not None and max(best.verified) > 1 and best.throughput >= least:
            yield SpeculationPlan(best.seconds, max(best.verified) - 1, self.max_draft + 1)

    def plan_drafts(
        self, view: View, seqs: Iterable[SeqView], max_depth: int, prefill_tokens: float, bound: float
    ) -> tuple[dict[str, tuple[int, int]], float]:
        """Chooses what to draft for each request whose pending tokens may all be computed in the next batch.

        Drafts do not go beyond a request's end. Requests of which the drafter has not seen all tokens draft only while
        it catches up within a share of the batch's time (`DRAFTER_CATCH_UP_SHARE`); the first may take longer.

        Args:
            seqs: the requests, the most urgent first
            max_depth: tokens drafted for each, at most
            prefill_tokens: that the batch has room for
            bound: seconds of the batch

        Returns:
            (depth, width) by id, and the seconds for which the drafter catches up, which a batch's shape leaves out
        """
        drafts_by_id: dict[str, tuple[int, int]] = {}
        total_behind, catch_up_seconds = 0, 0.0
        for seq in seqs if max_depth else ():
            depth = min(max_depth, ceil(remaining_output(seq)) - 2)
            if seq.pending > prefill_tokens or depth < 1:
                continue
            if behind := self.lag.tokens_behind(seq):
                seconds = self.lag.seconds(view.latency, total_behind + behind)
                if total_behind and seconds > DRAFTER_CATCH_UP_SHARE * bound:
                    continue
                total_behind, catch_up_seconds = total_behind + behind, seconds
            drafts_by_id[seq.id] = (depth, 1)
        return drafts_by_id, catch_up_seconds

    def find_fastest_depth(self, view: View, seqs: Sequence[SeqView]) -> int:
        """Returns the tokens to draft for each request so that all end soonest and free their memory."""
        if not seqs or not self.can_draft:
            return 0
        chances = [[self.acceptance.mean(s.request) ** depth for depth in range(1, self.max_draft + 1)] for s in seqs]
        return find_paying_depth(view.latency, len(seqs), sum(s.length for s in seqs), chances, 1, 1, self.max_draft)
