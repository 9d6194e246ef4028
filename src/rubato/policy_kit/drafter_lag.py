"""How far a drafter is behind the sequences that it drafts for: it has to run their tokens first, prompts above all."""

from __future__ import annotations

from collections.abc import Iterable

from rubato.core.events import Event, Finished, HandedOff, Preempted
from rubato.core.interfaces import LatencyModel, SeqView
from rubato.core.plan import Shape, Work

MAX_ENTRY_TOKENS = 10  # tokens: no further behind is one that drafted in its last entry


class DrafterLag:
    """Of each sequence the tokens that the drafter has run."""

    def __init__(self) -> None:
        self._tokens_run: dict[str, int] = {}

    def observe(self, event: Event) -> None:
        if isinstance(event, Finished | HandedOff | Preempted):
            self._tokens_run.pop(event.id, None)

    def tokens_behind(self, seq: SeqView) -> int:
        """Tokens of it that the drafter has not run, but for those of its last entry."""
        behind = seq.length - self._tokens_run.get(seq.id, 0)
        return behind if behind > MAX_ENTRY_TOKENS else 0

    def seconds(self, latency: LatencyModel, tokens: int) -> float:
        """In which the drafter runs so many tokens, by what the latency model says of a batch of them."""
        batch, one = Shape().plus(tokens, 0), Shape().plus(1, 0)
        whole, least = (latency.step_time(s._replace(spec_steps=1)) - latency.step_time(s) for s in (batch, one))
        return max(0.0, whole - least)

    def remember(self, work: Iterable[Work], seqs: Iterable[SeqView]) -> None:
        """Note which of these draft in the next batch: the drafter will have run all their tokens."""
        drafting = {given.seq for given in work if given.draft is not None}
        self._tokens_run.update((seq.id, seq.length) for seq in seqs if seq.id in drafting)
