"""Learns how often drafted tokens are accepted, from verified tokens or from the drafter's own probabilities."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from rubato.core.events import Event, Finished, HandedOff, Tokens
from rubato.core.interfaces import SeqView
from rubato.core.length_prediction import class_of
from rubato.core.plan import Tree
from rubato.core.request import Request

PRIOR = 0.7  # acceptance before any was tried
PRIOR_TRIES = 10.0  # tries, or trees, that it counts as
MEMORY_TRIES = 2000.0  # tries of a class that are remembered
MEMORY_TREES = 500.0  # trees of a class that are remembered


@dataclass
class AcceptanceRates:
    """Learns the share of drafted tokens that were accepted, by class of requests (`class_of`).

    A try is a position in the output: of several candidates for it, one must be accepted. `MEMORY_TRIES` tries of a
    class are remembered.

    Args:
        prior: the share before any was tried, which counts as `PRIOR_TRIES` tries.
    """

    prior: float = PRIOR
    _class: dict[str, str] = field(default_factory=dict, init=False)
    _counts: dict[str, tuple[float, float]] = field(default_factory=dict, init=False)  # right, tried

    def follow(self, seqs: Iterable[SeqView]) -> None:
        """Starts counting the tries of these sequences; tries that a sequence had before count, too."""
        for seq in seqs:
            if seq.id not in self._class:
                self._class[seq.id] = class_of(seq.request)
                if seq.acceptance is not None:
                    self._add(self._class[seq.id], seq.acceptance * seq.tried, seq.tried)

    def observe(self, event: Event) -> None:
        if isinstance(event, Tokens) and event.tried and event.id in self._class:
            self._add(self._class[event.id], event.tokens - 1, event.tried)
        elif isinstance(event, Finished | HandedOff):
            self._class.pop(event.id, None)

    def mean(self, request: Request) -> float:
        """Returns the probability that a drafted token of this request is accepted if all before it are."""
        right, tried = self._counts.get(class_of(request), (0.0, 0.0))
        return (right + self.prior * PRIOR_TRIES) / (tried + PRIOR_TRIES)

    def _add(self, name: str, right: float, tried: float) -> None:
        before = self._counts.get(name, (0.0, 0.0))
        all_ = before[1] + tried
        kept = min(1.0, MEMORY_TRIES / all_) if all_ else 1.0
        self._counts[name] = ((before[0] + right) * kept, all_ * kept)


@dataclass
class TreeChances:
    """Learns, by class and depth, the chance that one of a drafted tree's nodes there comes out: the sum of their path
    probabilities.

    The chance assumed before the first tree so deep counts as `PRIOR_TRIES` trees: one unlucky tree must not end
    drafting. `MEMORY_TREES` trees of a class are remembered.

    It learns from all that was drafted. Of the nodes that a policy verifies, because they are likely, more turn out
    right than the next tree's will: `AcceptanceRates` would promise too much of deep trees.
    """

    _layers: dict[str, list[tuple[float, float]]] = field(default_factory=dict, init=False)  # by depth: mean, trees

    def add_tree(self, request: Request, tree: Tree) -> None:
        """Learns from a tree drafted for this request."""
        if not tree.paths:
            return
        offered = tree.layers
        layers = self._layers.setdefault(class_of(request), [])
        if len(layers) < len(offered):
            layers += [(chance, PRIOR_TRIES) for chance in self.chances(request, len(offered))[len(layers) :]]
        for i, chance in enumerate(offered):
            mean, trees = layers[i]
            layers[i] = mean + (chance - mean) / (trees + 1.0), min(MEMORY_TREES, trees + 1.0)

    def chances(self, request: Request, depth: int) -> list[float]:
        """Returns the chances by depth, from 1 to `depth`.

        Beyond the deepest tree they fall by the last ratio; without any tree, by `PRIOR`.
        """
        chances = [1.0, *(mean for mean, _ in self._layers.get(class_of(request), ())[:depth])]
        fall = PRIOR
        if len(chances) > 1:
            fall = min(1.0, chances[-1] / chances[-2]) if chances[-2] else 0.0
        while len(chances) <= depth:
            chances.append(chances[-1] * fall)
        return chances[1:]
