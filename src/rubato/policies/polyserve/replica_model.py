"""What PolyServe's router knows of a replica: the requests on it, their KV and queue to come, and step times; from
these, when a request placed there would have its next token."""

from __future__ import annotations

from bisect import bisect_right, insort
from dataclasses import dataclass
from functools import cache
from math import ceil, inf
from typing import NamedTuple

from rubato.core.interfaces import LatencyModel, SeqView, View
from rubato.core.plan import Shape
from rubato.policies.polyserve.kv_forecast import KVForecast
from rubato.policies.polyserve.scheduler import dynamic_chunk
from rubato.policy_kit.batch_builder import remaining_output

PREFILL = -1  # the group of the prefill replicas; tiers are counted from 0
KV_GRAIN, PROMPT_GRAIN = 4096, 256  # tokens up to which step times are remembered alike
PROBE = Shape(32, 32, 32_000)


class StepTable:
    """Step times by (batch size, KV) as the paper profiles them: asked of the latency model once each, and again when
    its predictions have changed."""

    def __init__(self, latency: LatencyModel, most: int, budget: int) -> None:
        self._latency = latency
        self._most = most
        self._budget = budget
        self._decodes = cache(lambda seqs, kv: latency.step_time(Shape(seqs, seqs, kv)))
        self._chunk = cache(self._find_chunk)
        self._alone = cache(self._find_alone)
        self._probed = (-inf, 0.0)  # when, and what a step of some size took

    def renew(self, now: float) -> None:
        """Forget all when the model predicts other times by now; looked at once a second."""
        when, before = self._probed
        if now - when < 1.0:
            return
        probe = self._latency.step_time(PROBE)
        if abs(probe - before) > 0.02 * before:
            for times in (self._decodes, self._chunk, self._alone):
                times.cache_clear()
        else:
            probe = before
        self._probed = (now, probe)

    def decodes(self, seqs: int, kv: int) -> float:
        """Seconds of so many decodes with `kv` tokens together."""
        return self._decodes(seqs, _rounded_up(kv, KV_GRAIN))

    def chunk(self, tpot: float, seqs: int, kv: int, prompt: int) -> tuple[int, float]:
        """The tokens of a prompt that a step of `tpot` has room for beside so many decodes, up to its end; and the
        seconds of that step. (0, 0.0) for none."""
        return self._chunk(tpot, seqs, _rounded_up(kv, KV_GRAIN), _rounded_up(prompt, PROMPT_GRAIN))

    def alone(self, prompt: int) -> float:
        """Seconds of a prompt with nothing beside it, in dynamic chunks."""
        return self._alone(_rounded_up(prompt, PROMPT_GRAIN))

    def _find_chunk(self, tpot: float, seqs: int, kv: int, prompt: int) -> tuple[int, float]:
        base = Shape(seqs, seqs, kv)
        tokens = self._latency.largest_chunk(tpot, base, prompt, self._most - seqs)
        if tokens < prompt:  # the last of them has this much before it
            tokens = self._latency.largest_chunk(tpot, base, prompt - tokens, self._most - seqs)
        if not tokens:
            return 0, 0.0
        return tokens, self._latency.step_time(base.plus(tokens, max(0, prompt - tokens)))

    def _find_alone(self, prompt: int) -> float:
        seconds, done = 0.0, 0
        while done < prompt:
            chunk = min(dynamic_chunk(prompt - done, self._budget), self._most)
            seconds += self._latency.step_time(Shape().plus(chunk, done))
            done += chunk
        return seconds


def _rounded_up(tokens: int, grain: int) -> int:
    return -(-tokens // grain) * grain


@dataclass(slots=True)
class HeldRequest:
    """A request to be placed. tier: its own. due: of its next token. moves: it brings its KV. late: it cannot be in
    time any more, and is served as if its next token had no deadline."""

    seq: SeqView
    tier: int
    due: float
    pending: int
    length: int
    remaining: float
    moves: bool
    late: bool = False

    @property
    def most(self) -> int:
        """Tokens of it at its predicted end."""
        return int(self.length + self.remaining)


class QueuedPrompt(NamedTuple):
    """A prompt at a prefill replica."""

    due: float
    id: str
    tokens: int
    seconds: float


class Replica:
    """group: the tier it serves, `PREFILL`, or None in the pool. draining: it has requests of looser tiers only, and
    admits none. residents: how many of each tier. prompts: nearest deadline first."""

    def __init__(self, view: View, index: int, tiers: int, steps: StepTable) -> None:
        self.id = view.id
        self.index = index
        self.view = view
        self.group: int | None = None
        self.draining = False
        self.residents = [0] * tiers
        self.forecast = KVForecast()
        self.prompts: list[QueuedPrompt] = []
        self.queued = 0.0  # seconds of `prompts`
        self.added = 0  # tokens that this dispatch places here
        self.capacity = view.kv_total * view.limits.block_size
        self.steps = steps
        self.load = 0.0

    @property
    def empty(self) -> bool:
        return not (len(self.forecast) or self.prompts)

    def renew(self, now: float) -> int:
        """The replica's step by now. Residents that have outlived what was predicted are predicted again."""
        self.steps.renew(now)
        step = self.view.steps
        if late := self.forecast.overdue(step):
            known = self.view.known
            for id in late:
                seq = known.get(id)
                self.forecast.add(id, seq.length if seq else 1, remaining_output(seq) if seq else 1.0, step)
        return step

    def weigh(self) -> None:
        """Its predicted iteration time, at its fullest; for one that prefills, what is queued."""
        count = len(self.forecast)
        self.load = self.steps.decodes(count, self.forecast.peak(self.view.steps)) if count else self.queued

    def add(self, request: HeldRequest) -> None:
        """It is placed here."""
        if self.group == PREFILL:
            seconds = self.steps.alone(request.pending)
            prompt = QueuedPrompt(request.due, request.seq.id, request.pending, seconds)
            insort(self.prompts, prompt, lo=min(1, len(self.prompts)))
            self.queued += seconds
        else:
            self.forecast.add(request.seq.id, request.length, request.remaining, self.view.steps)
            self.residents[request.tier] += 1
        self.added += 0 if request.moves else request.pending

    def add_unknown(self, id: str) -> None:
        """One that another placed here: overdue from the start, so that its length is looked up next time."""
        self.forecast.add(id, 1, 1.0, self.view.steps - 1)

    def drop(self, id: str, tier: int | None) -> None:
        """It has left. tier: None if it is not among `residents`."""
        self.forecast.drop(id)
        if tier is not None:
            self.residents[tier] -= 1
        if self.prompts:
            self.prompts = [prompt for prompt in self.prompts if prompt.id != id]
            self.queued = sum(prompt.seconds for prompt in self.prompts)

    # ----------------------------------------------------------------- whether a request fits

    def next_token_at(self, request: HeldRequest, tpot: float, now: float, alone: bool = False) -> float | None:
        """When its next token would be out beside decodes; None if that is too late, or a step or the KV would come to
        be too much. alone: all that are here leave."""
        step = self.renew(now)
        limits = self.view.limits
        count = 1 if alone else len(self.forecast) + 1
        if count > limits.max_num_seqs:
            return None
        if count > 1:
            peak = self.forecast.peak_with(request.length, request.remaining, step)
        else:
            peak = request.most
        seconds = self.steps.decodes(count, peak)
        if peak > self.capacity or seconds > tpot:
            return None
        if request.moves:
            if is_source(self, request.seq) or limits.blocks(request.length) > self.view.kv_free:
                return None
        elif count == 1:
            seconds = self.steps.alone(request.pending + self.added)
        else:
            tokens, each = self.steps.chunk(tpot, count - 1, peak, request.pending)
            if tokens < 1:
                return None
            seconds = ceil((self._backlog() + request.pending) / tokens) * each
        when = now + seconds
        if when <= request.due:
            when += self._wait(now)  # the dearest to ask
        return when if when <= request.due or request.late else None

    def first_token_at(self, request: HeldRequest, now: float) -> float | None:
        """When its first token would be out, nearest deadline first behind the prompt that is begun; None if that, or
        another's, is late."""
        self.steps.renew(now)
        view, prompts = self.view, self.prompts
        queued = sum(prompt.tokens for prompt in prompts)
        if queued + request.pending > view.kv_free * view.limits.block_size:
            return None
        at = now + self._wait(now)
        if prompts:  # less what steps have taken up
            at -= self.queued * max(0, queued - self._backlog()) / queued
        own = self.steps.alone(request.pending)
        place = bisect_right(prompts, (request.due, request.seq.id), lo=min(1, len(prompts)), key=lambda p: p[:2])
        at += sum(prompt.seconds for prompt in prompts[:place]) + own
        if at > request.due and not request.late:
            return None
        when = at
        for prompt in prompts[place:]:
            at += prompt.seconds
            if at - own <= prompt.due < at:
                return None
        return when

    def _wait(self, now: float) -> float:
        """Seconds until the step in flight ends."""
        return max(0.0, self.view.busy_until - now)

    def _backlog(self) -> int:
        """Tokens of prompts that no step has taken up, those placed just now included."""
        view = self.view
        flight = view.in_flight
        return max(0, view.pending - view.decodes.seqs - (flight.tokens - flight.seqs + flight.chunks)) + self.added


def is_source(replica: Replica, seq: SeqView) -> bool:
    """Whether the KV that it would bring is there, from before that replica served another group."""
    handoff = seq.request.handoff
    return handoff is not None and seq.cached > 0 and handoff.source == replica.id
