"""What a drafter is asked for, and what it answers: candidates for the tokens that follow a sequence's last."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from rubato.core.plan import Tree


@dataclass(frozen=True, slots=True)
class Draft:
    """Candidates for what follows a sequence's last token: `tokens`, the token id of each node of `tree`."""

    tree: Tree  # parents[i] < i, -1 = the last token; paths never rise along a path
    tokens: tuple[int, ...]


NO_DRAFT = Draft(Tree((), ()), ())


class Wanted(NamedTuple):
    """One sequence that a draft is wanted for, at most `depth` tokens deep and `width` nodes in a layer."""

    seq: str
    tokens: Sequence[int]  # all token ids so far, prompt and output
    depth: int
    width: int
    tenant: str = ""  # whose text it is: it may go into no other's drafts ("": unknown, into those of no other request)


class Drafter(Protocol):
    """Called on the engine's own thread, between steps of the model; what it raises fails the step."""

    def draft(self, wanted: Sequence[Wanted]) -> list[Draft]:
        """One for each of `wanted`, in order; trees may be empty."""
        ...

    def verified(self, seq: str, draft: Draft, tried: Sequence[int], accepted: Sequence[int]) -> None:
        """Of a draft's nodes, those that the model has judged (all that were offered after an accepted one, or after
        the last token), and which of them it would have chosen itself."""
        ...

    def forget(self, seq: str) -> None:
        """The sequence has ended, or goes on elsewhere. It may be one that nothing was drafted for."""
        ...
