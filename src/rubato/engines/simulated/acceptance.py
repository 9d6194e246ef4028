"""Which drafted tokens turn out right, where there is neither drafter nor model: one random process a request.

For every output token of a request two things are drawn: how sure the drafter is of its first choice (c), and which of
its choices is the target's: choice j (from 0) with probability c·(1-c)^j. A chain's tokens are right one by one with
probability alpha, so that sl tokens verified bring Acc(sl) = (1-alpha^sl)/(1-alpha); a tree's path probabilities are
what really happens. Draws depend on seed, request and position alone: no policy can shift them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from math import inf
from zlib import crc32

import numpy as np

from rubato.core.plan import Tree
from rubato.core.request import Request

RANDOM_STREAM = 0xACC  # separates these draws from arrivals, lengths and noise
TOKENS_PER_DRAW = 64


@dataclass(frozen=True)
class Acceptance:
    """Says how good a drafter is.

    Args:
        alpha: chance that its first choice is right, mean over requests.
        apps: that mean by app, where it differs.
        requests: alpha by id, of requests with one of their own.
        spread: standard deviation of alpha between the other requests (Beta).
        certainty: concentration of a token's c about its request's alpha (Beta); inf: the same for every token.
    """

    alpha: float = 0.7
    apps: Mapping[str, float] = field(default_factory=dict)
    requests: Mapping[str, float] = field(default_factory=dict)
    spread: float = 0.0
    certainty: float = inf
    seed: int = 0

    def __post_init__(self) -> None:
        if wrong := [alpha for alpha in self.requests.values() if not 0.0 <= alpha <= 1.0]:
            raise ValueError(f"acceptance {wrong[0]} of a request: give a probability")
        for alpha in (self.alpha, *self.apps.values()):
            if not 0.0 <= alpha <= 1.0 or (self.spread and self.spread**2 >= alpha * (1.0 - alpha)):
                raise ValueError(
                    f"acceptance {alpha} with spread {self.spread}: give a probability, and a spread that it allows, "
                    "below sqrt(alpha·(1-alpha))"
                )
        if self.spread < 0.0 or not self.certainty > 0.0:
            raise ValueError(f"spread {self.spread}, certainty {self.certainty}: give 0 or more, and above 0")

    def of(self, request: Request) -> AcceptanceProcess:
        """Returns the process of one request."""
        rng = np.random.default_rng([self.seed, RANDOM_STREAM, crc32(request.id.encode())])
        own = self.requests.get(request.id)
        alpha = self.apps.get(request.app, self.alpha) if own is None else own
        if self.spread and own is None:
            alpha = _beta(rng, alpha, alpha * (1.0 - alpha) / self.spread**2 - 1.0, 1)[0]
        return AcceptanceProcess(rng, alpha, self.certainty)


class AcceptanceProcess:
    """Decides what happens to the drafts of one request.

    Args:
        alpha: the request's own.
        certainty: as in `Acceptance`.
    """

    def __init__(self, rng: np.random.Generator, alpha: float, certainty: float) -> None:
        self.alpha = alpha
        self._rng = rng
        self._certainty = certainty
        self._is_constant = certainty == inf or alpha in (0.0, 1.0)  # c is alpha for every token
        self._draws: list[tuple[float, int]] = []

    def at(self, position: int) -> tuple[float, int]:
        """Returns how sure the drafter is of its first choice for output token `position` (from 0), and which choice is
        right."""
        while len(self._draws) <= position:
            certainties = (
                [self.alpha] * TOKENS_PER_DRAW
                if self._is_constant
                else _beta(self._rng, self.alpha, self._certainty, TOKENS_PER_DRAW)
            )
            self._draws += [
                (c, _choice(c, u)) for c, u in zip(certainties, self._rng.random(TOKENS_PER_DRAW).tolist(), strict=True)
            ]
        return self._draws[position]

    def draft(self, position: int, depth: int, width: int) -> Draft:
        """Returns a draft by beam search (AdaServe): the `width` best children of the last layer's nodes, by path
        probability, `depth` times. Ties go to the parent that came first."""
        if self._is_constant:
            return _draft_of_equals(self.alpha, depth, width)
        return _beam([self.at(position + step)[0] for step in range(depth)], width)

    def accept(self, position: int, draft: Draft, verify: Sequence[int]) -> tuple[tuple[int, ...], int]:
        """Returns the verified nodes that agree with the target from output token `position` on, and how many tokens
        were tried, including the place where all offered ones were wrong."""
        accepted: list[int] = []
        children, choices, node = draft.children, draft.choices, -1
        while True:
            right: int | None = None  # which choice is, once one was offered
            for child in children.get(node, ()):
                if child in verify:
                    if right is None:
                        right = self.at(position)[1]
                    if choices[child] == right:
                        break
            else:
                return tuple(accepted), len(accepted) + (right is not None)
            accepted.append(node := child)
            position += 1


@dataclass(frozen=True, slots=True)
class Draft:
    """Holds a tree as it was drafted.

    Args:
        choices: which of its parent's choices each node is (from 0).
        children: of each node; -1: of the root.
        depth: of the beam search, which leaves out nodes of probability 0.
        width: of the beam search.
    """

    tree: Tree
    choices: tuple[int, ...]
    children: Mapping[int, Sequence[int]]
    depth: int
    width: int


def _beam(certainties: Sequence[float], width: int) -> Draft:
    """Returns the draft, given how sure the drafter is of its first choice per depth."""
    parents: list[int] = []
    paths: list[float] = []
    choices: list[int] = []
    children_of: dict[int, list[int]] = {}
    layer = [(1.0, -1)]
    for c in certainties:
        children = [(path * c * (1.0 - c) ** j, node, j) for path, node in layer for j in range(width)]
        layer = []
        for path, node, j in sorted(children, key=lambda child: -child[0])[:width]:
            if path > 0.0:
                layer.append((path, len(parents)))
                children_of.setdefault(node, []).append(len(parents))
                parents.append(node)
                paths.append(path)
                choices.append(j)
    return Draft(Tree(tuple(parents), tuple(paths)), tuple(choices), children_of, len(certainties), width)


@lru_cache(1024)
def _draft_of_equals(c: float, depth: int, width: int) -> Draft:
    return _beam([c] * depth, width)


def _beta(rng: np.random.Generator, mean: float, concentration: float, size: int) -> list[float]:
    draws: list[float] = rng.beta(mean * concentration, (1.0 - mean) * concentration, size).tolist()
    return draws


def _choice(c: float, u: float) -> int:
    """Returns which choice is right, for u uniform in [0, 1): the j with (1-c)^(j+1) <= 1-u < (1-c)^j."""
    if u < c:
        return 0
    return int(np.log1p(-u) / np.log1p(-c)) if c > 0.0 else -1
