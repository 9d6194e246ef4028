"""Keeps step times by (batch size, KV), as PolyServe profiles them (its §4.5): asked of the latency model once each,
and again when its predictions have changed."""

from __future__ import annotations

from functools import cache
from math import inf

from rubato.core.infeasible import prefill_time
from rubato.core.interfaces import LatencyModel
from rubato.core.plan import Shape
from rubato.policy_kit.prefill_queue import dynamic_prefill_time

KV_GRAIN_TOKENS, PROMPT_GRAIN_TOKENS, SEQS_GRAIN = 4096, 256, 8  # step times are those of numbers rounded up to these
PROBE_SHAPE = Shape.decodes(32, 32_000)


class StepTable:
    """Remembers step times of one latency model.

    Args:
        latency: predicts step times.
        most: tokens that a batch may have.
    """

    def __init__(self, latency: LatencyModel, most: int) -> None:
        self._latency = latency
        self._most = most
        self._decodes = cache(lambda seqs, kv: latency.step_time(Shape.decodes(seqs, kv)))
        self._chunk = cache(self._find_chunk)
        self._alone = cache(lambda prompt, cached: prefill_time(latency, prompt, cached, most))
        self._in_chunks = cache(lambda new, cached, budget: dynamic_prefill_time(latency, new, cached, budget, most))
        self._probed = (-inf, 0.0)  # when, and what a step of some size took

    def renew(self, now: float) -> None:
        """Forgets all times if the model's predictions have changed; checks once a second."""
        when, before = self._probed
        if now - when < 1.0:
            return
        probe = self._latency.step_time(PROBE_SHAPE)
        if abs(probe - before) > 0.02 * before:
            before = probe
            for times in (self._decodes, self._chunk, self._alone, self._in_chunks):
                times.cache_clear()
        self._probed = (now, before)

    # Rounded up here and not by a function: a router asks dozens of times for a request that it places.

    def decodes(self, seqs: int, kv: int) -> float:
        """Returns the seconds of a step of `seqs` decodes with `kv` tokens together."""
        return self._decodes(seqs, -(-kv // KV_GRAIN_TOKENS) * KV_GRAIN_TOKENS)

    def chunk(self, tpot: float, seqs: int, kv: int, prompt: int) -> tuple[int, float]:
        """Returns the tokens of a prompt that fit in each step of `tpot` seconds with `seqs` decodes, to the prompt's
        end, and the seconds of such a step; (0, 0.0) if none fit."""
        return self._chunk(
            tpot,
            -(-seqs // SEQS_GRAIN) * SEQS_GRAIN,
            -(-kv // KV_GRAIN_TOKENS) * KV_GRAIN_TOKENS,
            -(-prompt // PROMPT_GRAIN_TOKENS) * PROMPT_GRAIN_TOKENS,
        )

    def isolated_seconds(self, prompt: int, cached: int = 0) -> float:
        """Returns the seconds of a prompt's tokens after the cached ones, alone and in as few steps as possible."""
        grain = PROMPT_GRAIN_TOKENS
        return self._alone(-(-prompt // grain) * grain, -(-cached // grain) * grain)

    def in_chunks(self, prompt: int, cached: int, budget: int) -> float:
        """Returns the seconds of a prompt's tokens after the cached ones, alone and in dynamic chunks
        (`prefill_queue`)."""
        grain = PROMPT_GRAIN_TOKENS
        return self._in_chunks(-(-prompt // grain) * grain, -(-cached // grain) * grain, budget)

    def _find_chunk(self, tpot: float, seqs: int, kv: int, prompt: int) -> tuple[int, float]:
        """Computes `chunk`."""
        base = Shape.decodes(seqs, kv)
        tokens = self._latency.largest_chunk(tpot, base, prompt, self._most - seqs)
        if tokens < prompt:  # the last of them has this much before it
            tokens = self._latency.largest_chunk(tpot, base, prompt - tokens, self._most - seqs)
        if not tokens:
            return 0, 0.0
        return tokens, self._latency.step_time(base.plus(tokens, max(0, prompt - tokens)))
