"""Verification of candidate trees: which nodes of a draft one step runs, and which of them the model itself chooses.

Acceptance samples the target's token at the current node exactly as without a draft: from that node's logits, by the
sequence's own settings, penalties and generator. If a child holds that token it is accepted and the walk goes on from
it, else the token ends the walk. So the output has the target's distribution, a seed gives the tokens that it gives
without drafts, and the drafter's probabilities are not needed. Since candidates are fixed before the draw, it accepts
as often as multi-branch rejection (SpecInfer) would, which takes the children of a node one by one: each with its
probability under the target. Greedy: the longest path that agrees with the model, and the model's own next token
(AdaServe).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from rubato.core.plan import Emitted, Logprob
from rubato_torch.drafters import Draft, Wanted
from rubato_torch.sampling import choose, logprobs
from rubato_torch.sequence import Sequence as Running


@dataclass(frozen=True, slots=True)
class Candidates:
    """The nodes of a draft that one step verifies, in the order in which their KV lies. parents: where the parent of
    each is among them, -1 for the sequence's last token; depths: from 1, the last token's children."""

    draft: Draft
    nodes: tuple[int, ...]
    tokens: tuple[int, ...]
    parents: tuple[int, ...]
    depths: tuple[int, ...]

    @classmethod
    def of(cls, seq: str, draft: Draft | None, nodes: tuple[int, ...]) -> Candidates:
        """Raises ValueError for nodes that the draft does not have, come twice, or come without their parents."""
        there = 0 if draft is None else len(draft.tokens)
        if draft is None or not all(0 <= node < there for node in nodes):
            raise ValueError(f"nodes {nodes} of sequence {seq!r} are to be verified, whose draft has {there}")
        place = {node: i for i, node in enumerate(nodes)}
        place[-1] = -1
        parents, depths = [], [0] * len(nodes)
        for i, node in enumerate(nodes):
            at = place.get(draft.tree.parents[node], i)
            if at >= i or place[node] != i:
                raise ValueError(
                    f"nodes {nodes} of sequence {seq!r} are to be verified: name each once, its parent before it"
                )
            parents.append(at)
            depths[i] = 1 if at < 0 else depths[at] + 1
        return cls(draft, nodes, tuple(draft.tokens[node] for node in nodes), tuple(parents), tuple(depths))

    @property
    def branch(self) -> bool:
        """Whether they are no chain: some node does not see all those before it."""
        return any(parent != i - 1 for i, parent in enumerate(self.parents))

    def ways(self) -> list[tuple[int, ...]]:
        """For each leaf the places of the nodes that lead to it, from a child of the last token."""
        inner = set(self.parents)
        found = []
        for leaf in range(len(self.nodes)):
            if leaf in inner:
                continue
            way = [leaf]
            while self.parents[way[0]] >= 0:
                way.insert(0, self.parents[way[0]])
            found.append(tuple(way))
        return found


def check_draft(wanted: Wanted, draft: Draft, vocab: int) -> None:
    """Raises ValueError unless `draft` is a tree of tokens of the vocabulary whose probabilities never rise along a
    path, at most as deep as wanted: beyond that the model may have no positions."""
    parents, paths, tokens = draft.tree.parents, draft.tree.paths, draft.tokens
    if not len(parents) == len(tokens) == len(paths):
        raise ValueError(
            f"the draft for {wanted.seq!r} has {len(parents)} parents, {len(paths)} paths and {len(tokens)} "
            "tokens: give one of each for every node"
        )
    for node, (parent, token) in enumerate(zip(parents, tokens, strict=True)):
        if not -1 <= parent < node or not 0 <= token < vocab:
            raise ValueError(
                f"node {node} of the draft for {wanted.seq!r} has parent {parent} and token {token}: give a node "
                f"before it or -1 (the last token), and a token of 0..{vocab - 1}"
            )
        most = paths[parent] if parent >= 0 else 1.0
        if not 0.0 <= paths[node] <= most:
            raise ValueError(
                f"node {node} of the draft for {wanted.seq!r} comes out with probability {paths[node]}: give the "
                f"product along its path, here 0 to {most}"
            )
    depth = max(draft.tree.depths, default=0)
    if depth > wanted.depth:
        raise ValueError(f"the draft for {wanted.seq!r} is {depth} deep: at most {wanted.depth} were wanted")


@dataclass(slots=True)
class Walk:
    """One sequence's way through its candidates. row: of the logits, that of the token it is at.

    accepted: places in `candidates` whose tokens came out and were gone on from; the token that ends the walk is not
    among them, also where a candidate held it. tried: as `Emitted.tried`.
    """

    seq: Running
    root: int
    candidates: Candidates | None
    accepted: list[int] = field(default_factory=list)
    tried: int = 0
    judged: list[int] = field(default_factory=list)  # node ids
    right: list[int] = field(default_factory=list)  # node ids: the accepted, and one that held the token that ended it
    out: list[Emitted] = field(default_factory=list)

    @property
    def row(self) -> int:
        return self.root + self.accepted[-1] + 1 if self.accepted else self.root

    def take(self, token: int, likely: tuple[Logprob, ...]) -> bool:
        """The model's token at the current place: append it to the sequence. Whether to go on from a candidate."""
        out = self.seq.take(token, likely)
        self.out.append(out)
        tree = self.candidates
        if tree is None:
            return False
        at = self.accepted[-1] if self.accepted else -1
        offered = [i for i, parent in enumerate(tree.parents) if parent == at]
        if not offered:
            return False
        self.judged += [tree.nodes[i] for i in offered]
        hit = next((i for i in offered if tree.tokens[i] == token), None)
        if hit is None:
            self.tried += 1
            return False
        self.right.append(tree.nodes[hit])
        if out.finish is not None or out.stage_done:
            return False  # what follows a token that ends request or stage is nothing that the model was asked for
        self.tried += 1
        self.accepted.append(hit)
        return True

    @property
    def emitted(self) -> Emitted:
        """All that came out."""
        if len(self.out) == 1:
            return self.out[0]._replace(tried=self.tried) if self.tried else self.out[0]
        assert self.candidates is not None
        last = self.out[-1]
        return Emitted(
            len(self.out),
            "".join(out.text for out in self.out),
            tuple(token for out in self.out for token in out.token_ids),
            last.finish,
            last.stage_done,
            tuple(each for out in self.out for each in out.logprobs),
            tried=self.tried,
            accepted=tuple(self.candidates.nodes[at] for at in self.accepted),
        )


def accept(logits: Tensor, seqs: Sequence[Running], candidates: Mapping[str, Candidates]) -> list[Walk]:
    """Sample each sequence's next token, and on along its candidates as long as they hold what is sampled.

    logits: (rows, vocab); per sequence the row of its last token, then those of its candidates in their order.
    """
    walks, row = [], 0
    for seq in seqs:
        tree = candidates.get(seq.request.id)
        walks.append(Walk(seq, row, tree))
        row += 1 if tree is None else 1 + len(tree.nodes)
    going = walks
    while going:
        some = logits
        if len(going) < logits.shape[0]:
            some = logits[torch.tensor([walk.row for walk in going], device=logits.device)]
        chosen = choose(some, [walk.seq.choice for walk in going])
        likely = logprobs(some, chosen, [walk.seq.request.sampling for walk in going])
        going = [walk for walk, token, lp in zip(going, chosen, likely, strict=True) if walk.take(token, lp)]
    return walks
