"""Computes what an SLO asks of the steps to come: tokens by the next one's end, a pace until the request ends; and
which requests can go on together, each at its pace.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate, chain
from math import inf

import numpy as np

from rubato.core.interfaces import LatencyModel, SeqView, View
from rubato.core.slo import WINDOW_TOKENS
from rubato.policy_kit.acceptance import PRIOR
from rubato.policy_kit.batch_builder import remaining_output
from rubato.policy_kit.draft_value import drafting, with_nodes


def tokens_needed(seq: SeqView, end: float, now: float) -> float:
    """Returns A(r), the tokens that a request must get from the step that ends at `end`, its own next one among them
    (AdaServe, section 3).
    """
    if seq.best_effort:
        return 0.0
    slo, most = seq.slo, 0.0
    if slo.tpot is not None and seq.first_token_at is not None:
        most = (end - seq.first_token_at) / slo.tpot - (seq.output - 1)
    if slo.e2e is not None:
        seconds_left = seq.request.arrival + seq.tool_seconds + slo.e2e - now
        most = max(most, remaining_output(seq) * (end - now) / seconds_left if seconds_left > 0.0 else inf)
    return most


def time_for(seq: SeqView, tokens: float, now: float) -> float:
    """Returns when the step that brings a request so many tokens must have ended at the latest: `tokens_needed`, the
    other way.
    """
    if seq.best_effort:
        return inf
    slo, time = seq.slo, inf
    if slo.tpot is not None and seq.first_token_at is not None:
        time = seq.first_token_at + slo.tpot * (seq.output - 1 + tokens)
    if slo.e2e is not None:
        end = seq.request.arrival + seq.tool_seconds + slo.e2e
        time = min(time, now + (end - now) * tokens / remaining_output(seq))
    return time


def pace_of(seq: SeqView, now: float) -> float:
    """Returns the seconds that each of a request's tokens to come may take on average, its lead or lag spread over
    them.

    It is inf where nothing asks for a pace, 0 where it is too late for any.
    """
    slo, tokens_left = seq.slo, remaining_output(seq)
    pace = inf if slo.tpot is None else slo.tpot
    if slo.tpot is not None and seq.first_token_at is not None:
        pace = (seq.first_token_at + slo.tpot * (seq.output - 1 + tokens_left) - now) / tokens_left
    if slo.e2e is not None:
        pace = min(pace, (seq.request.arrival + seq.tool_seconds + slo.e2e - now) / tokens_left)
    return max(pace, 0.0)


def tightest_tpot(seq: SeqView) -> float:
    """Returns the tightest TPOT of this stage and of the decode-only stages that follow it; inf for one token alone."""
    stages = seq.request.stages
    tpot = stages[seq.stage].slo.tpot or inf
    if len(stages) == 1:
        return tpot if seq.request.sampling.max_tokens > 1 else inf
    for stage in stages[seq.stage + 1 :]:
        if stage.prompt:
            break
        tpot = min(tpot, stage.slo.tpot or inf)
    return tpot


Window = tuple[int, int, float]  # stage, tokens of it that were out when it began, and when


def windows(view: View, before: Mapping[str, Window]) -> dict[str, Window]:
    """Returns the current window of `WINDOW_TOKENS` tokens of each decode, by id; the paper judges a window as a whole.

    The first window of a stage begins with its first token.
    """
    new_windows = {}
    for seq in view.running:
        if seq.output:
            new = seq.stage, seq.output - (seq.output - 1) % WINDOW_TOKENS, view.now
            known = before.get(seq.id, new)
            new_windows[seq.id] = known if known[:2] == new[:2] else new
    return new_windows


class JointPace:
    """Checks which sequences can continue together, each at its pace.

    There must be a step, as long as s seconds, in which one whose tokens may take p seconds each gets s / p of them, on
    average. The shortest is found by lengthening a step of the roots by the nodes that this asks for, until it asks for
    no more.

    Args:
        latency: predicts step times.
        draft: (depth, width) of the trees; None: nothing is drafted.
        trees: path probabilities of those there are now; each sequence counts with an even share of what the most
            probable nodes of all bring.
        stretch: how many times as long steps are for other work.
    """

    def __init__(
        self, latency: LatencyModel, draft: tuple[int, int] | None, trees: Sequence[Sequence[float]], stretch: float
    ) -> None:
        self._latency, self._draft, self._stretch = latency, draft, stretch
        if draft is None:
            trees = []
        elif not trees:
            trees = [[PRIOR**depth for depth in range(1, draft[0] + 1)]]
        n = max(1, len(trees))
        likely = sorted(chain.from_iterable(trees), reverse=True)
        expected = list(accumulate(likely))
        self._brings = np.array([1.0, *[1.0 + tokens / n for tokens in expected[n - 1 :: n]]])  # by nodes of each

    def can_keep(self, seqs: Sequence[SeqView], paces: Sequence[float], safety: float = 1.0) -> bool:
        """Returns whether these sequences (at least one) can continue.

        Args:
            seqs: the sequences
            paces: `pace_of` each
            safety: factor on step times
        """
        n, kv = len(seqs), sum([s.length for s in seqs])
        base, each_pace = drafting(self._draft, n), np.array(paces) + 1e-9
        seconds, nodes = 0.0, 0
        while True:
            step = self._latency.step_time(with_nodes(base, n, kv, nodes)) * self._stretch * safety
            if step <= seconds:
                return True
            seconds = step
            each = np.searchsorted(self._brings, seconds / each_pace - 1e-9)
            if int(each.max()) == len(self._brings):
                return False
            nodes = int(each.sum())

    def count_that_can(self, seqs: Sequence[SeqView], paces: Sequence[float]) -> int:
        """Returns how many of these, from the first on, can continue; at least 1."""
        low, high = min(1, len(seqs)), len(seqs)
        middle = high
        while low < high:
            if self.can_keep(seqs[:middle], paces[:middle]):
                low = middle
            else:
                high = middle - 1
            middle = (low + high + 1) // 2
        return low
