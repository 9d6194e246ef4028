"""Tracks how far a drafter is behind: it must run a sequence's tokens, prompts above all, before it drafts for it."""

from __future__ import annotations

from collections.abc import Iterable

from rubato.core.events import Event, Finished, HandedOff, Preempted
from rubato.core.interfaces import LatencyModel, SeqView
from rubato.core.plan import Shape, Work

MAX_ENTRY_TOKENS = 10  # a sequence that drafted in its last entry is at most this far behind


class DrafterLag:
    """Counts the tokens of each sequence that the drafter has run."""

    def __init__(self) -> None:
        self._tokens_run: dict[str, int] = {}

    def observe(self, event: Event) -> None:
        if isinstance(event, Finished | HandedOff | Preempted):
            self._tokens_run.pop(event.id, None)

    def tokens_behind(self, seq: SeqView) -> int:
        """Returns the tokens of a sequence that the drafter has not run, except those of its last entry."""
        behind = seq.length - self._tokens_run.get(seq.id, 0)
        return behind if behind > MAX_ENTRY_TOKENS else 0

    def seconds(self, latency: LatencyModel, tokens: int) -> float:
        """Returns the seconds in which the drafter runs `tokens`, by the latency model."""
        batch, one = Shape.prefill(tokens), Shape.prefill(1)
        whole, least = (latency.step_time(s._replace(spec_steps=1)) - latency.step_time(s) for s in (batch, one))
        return max(0.0, whole - least)

    def remember(self, work: Iterable[Work], seqs: Iterable[SeqView]) -> None:
        """Notes the sequences that draft in the next batch: the drafter will have run all their tokens."""
        drafting = {given.seq for given in work if given.draft is not None}
        self._tokens_run.update((seq.id, seq.length) for seq in seqs if seq.id in drafting)
