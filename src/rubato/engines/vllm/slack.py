"""Checks whether vLLM's own order keeps every SLO; vLLM then schedules the step as if there were no plug-in.

Below capacity no policy can serve requests better, and planning costs CPU time. The check is conservative: the longest
step that vLLM may make now fits between any two due tokens, each waiting request is prefilled before its first token is
due, and there is KV for all requests.
"""

from __future__ import annotations

from collections import deque
from math import inf

from rubato.core.interfaces import SeqView, View
from rubato.core.request import Request

STEP_MARGIN = 1.25  # a step may take this many times its prediction
TTFT_SHARE = 0.3  # of the tightest recent TTFT that a step may take: the next request must not wait longer
RECENT_REQUESTS = 64  # whose TTFTs count
STABLE_STEPS = 16  # steps in a row that vLLM may schedule unchecked while only decodes run


class SlackCheck:
    """Checks the slack of every request of a view. `stable_steps` counts further steps that vLLM may schedule
    unchecked.

    Args:
        max_decode_tokens: tokens of a decode step, drafts included.
        lookahead_tokens: further tokens for which a drafter takes KV.
        is_on: without it no request counts as having slack.
    """

    def __init__(self, max_decode_tokens: int = 1, lookahead_tokens: int = 0, *, is_on: bool = True) -> None:
        self.stable_steps = 0
        self._max_decode_tokens = max_decode_tokens
        self._lookahead_tokens = lookahead_tokens
        self._is_on = is_on
        self._ttfts: deque[float] = deque(maxlen=RECENT_REQUESTS)

    def invalidate(self) -> None:
        """Forces a check at the next step: a request came or went, or lost its KV."""
        self.stable_steps = 0

    def take_stable_step(self) -> bool:
        """Takes one step that vLLM may schedule unchecked. Returns False if there is none."""
        if not self.stable_steps:
            return False
        self.stable_steps -= 1
        return True

    def set_stable_steps(self, view: View, requests: int) -> None:
        """Allows unchecked steps after one in which every request had slack, if only decodes run.

        Args:
            view: of that step.
            requests: number of all requests; one that waits for a grammar or KV may be in no View.
        """
        self.stable_steps = STABLE_STEPS if len(view.running) == requests and not view.prefilling else 0

    def add_request(self, request: Request) -> None:
        """Remembers the TTFT of a new request."""
        ttft = request.stages[0].slo.ttft
        if ttft is not None:
            self._ttfts.append(ttft)

    def all_within_slo(self, view: View) -> bool:
        """Returns whether every request of the view keeps its SLO if vLLM schedules this step by its own rule."""
        if not self._is_on:
            return False
        now, limits, decodes, running = view.now, view.limits, view.decodes, view.running
        starting = (*view.waiting, *view.prefilling)
        # blocks: of decodes until the next look, and of prompts whole, since what they hit may be free till they start
        growth = len(running) * (1 + limits.blocks(STABLE_STEPS * self._max_decode_tokens + self._lookahead_tokens))
        places = limits.max_num_seqs if limits.max_running is None else min(limits.max_num_seqs, limits.max_running)
        if len(running) + len(view.waiting) > places:  # a policy may let more run than a batch of vLLM's has room for
            return False
        growth += sum([limits.blocks(seq.cached + seq.pending + self._lookahead_tokens) for seq in starting])
        if growth > view.kv_free:
            return False
        pending = sum([seq.pending for seq in starting])
        chunk = min(pending, max(0, limits.max_num_batched_tokens - decodes.tokens))
        if pending and not chunk:
            return False
        shape = decodes.plus(chunk, max([seq.cached for seq in starting])) if chunk else decodes
        step = STEP_MARGIN * view.latency.step_time(shape) if shape.seqs else 0.0
        if step > TTFT_SHARE * min(self._ttfts, default=inf):
            return False
        prefilled_at = now + step * (-(-pending // chunk) if chunk else 1)  # all that is here has been prefilled
        return all(_is_within_slo(seq, now + step, prefilled_at, step) for seq in (*view.waiting, *running))


def _is_within_slo(seq: SeqView, next_step: float, prefilled_at: float, step: float) -> bool:
    """Returns whether a request keeps its SLO.

    Args:
        next_step: when the first step ends (s).
        prefilled_at: when all prompts are prefilled (s).
        step: seconds of each step.
    """
    if seq.best_effort:
        return True
    due, slo = seq.due, seq.request.stages[seq.stage].slo
    if due < (prefilled_at if seq.pending > 1 else next_step):
        return False
    if slo.tpot is not None and step > slo.tpot and due < prefilled_at + STABLE_STEPS * step:
        return False
    if slo.e2e is None:
        return True
    most = seq.request.sampling.max_tokens - seq.output
    return prefilled_at + most * step <= seq.request.arrival + slo.e2e
