"""AdaServe: each request's draft tree is cut to what its TPOT needs; the rest of the budget goes where it is likeliest.

For requests with TPOTs where the engine drafts, near and beyond capacity. docs/adaserve.md has the rest.

Reproduced (AdaServe, sections 3 to 5.2): a step verifies B tokens, of all decodes. Beam search drafts a tree for
each, whose depth and width fall with the number of requests (equations 8 and 9). From the trees, a step takes the nodes
that each request's TPOT needs by the step's end, then the most probable of all (`policy_kit.draft_tree`, Algorithm 2).
Prompts run beside, in chunks.

Ours, where the paper is silent. B ("determined based on hardware profiling"): as many nodes as bring the most tokens
per second by the latency model: below its knee, where a node costs nothing, all that were drafted, and none where none
pays. Equation 8 knows neither what a draft step costs nor what a token is worth: trees get the depth with the most
tokens per second, if they are as good as those so far, or are left out.

Ours in place of the paper's order of needs: those that lack the fewest nodes first, which keeps the most requests where
not all can be kept; one that needs more than its whole tree will likely bring is counted as needing nothing.

Overload, ours too: those that run go on together only while there is a step in which each gets what its pace asks for
(`policy_kit.paces.Together`); the one that would have to run fastest gives up its place, root and all. Prompts
begin, by deadline, only where the same holds with them; one whose TTFT has passed is best effort, or refused if it
asked for that, as with `edf`. These and best effort get the time that is left, and the oldest a turn in any case.

With `verify_tokens` B, depth and who runs are the paper's. n_max is the depth and the root; c1 and c2 are 0. On an
engine that verifies chains only, as vLLM does, trees are of width 1. Nodes take only KV that is free. A request with an
end-to-end SLO needs tokens at the even pace that meets it; best effort needs nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from operator import attrgetter
from typing import ClassVar, NamedTuple

from rubato.core.events import Event
from rubato.core.interfaces import SeqView, View
from rubato.core.plan import Plan
from rubato.policy_kit.acceptance import Offered
from rubato.policy_kit.batch_builder import BatchBuilder, admit_in_order, make_room, run_in_order
from rubato.policy_kit.draft_tree import DEPTH, DRAFT_TOKENS, WIDTH, adaptive, select
from rubato.policy_kit.draft_value import depth_that_pays, drafting, fastest, with_nodes, worth
from rubato.policy_kit.paces import Together, pace_of, time_for, tokens_needed
from rubato.policy_kit.refusals import refusals, wants_refusal

SOURCE = "AdaServe: SLO-customized speculative decoding (2025)"
ARRIVAL, DUE = attrgetter("request.arrival"), attrgetter("due")
SAFETY = 1.2  # a prompt begins if all could go on together with steps so many times as long: what drafts bring is luck
MEMORY = 10.0  # seconds over which the share of prompts in the time is averaged
TURN, TURN_TOKENS = 16, 64  # one step in 16 is a turn of the oldest of the rest, with so many tokens of its prompt

Draft = tuple[int, int]


class _Load(NamedTuple):
    """decodes, prompts: that run, and are in this step. starting: prompts that wait, and may begin. rest: the others,
    first those that would have to run fastest, then by arrival. demoted, refused: ids of those whose TTFT has passed.
    """

    decodes: Sequence[SeqView]
    prompts: Sequence[SeqView]
    starting: Sequence[SeqView]
    rest: Sequence[SeqView] = ()
    demoted: Sequence[str] = ()
    refused: dict[str, str] = {}  # noqa: RUF012  nobody writes to it


@dataclass
class Scheduler:
    """verify_tokens: B and B1, tokens that a step verifies, roots included; 0 = as many as pay by the latency model, of
    trees as deep as pays. draft_tokens: B2, tokens of a drafter's step. min_depth, max_depth, max_width: bounds of
    equations 8 and 9, or of what pays (the authors' for Llama-70B: B1 512, B2 96, depths 4 to 8, widths to 3).
    prefill_chunk: prompt tokens of a step."""

    needs: ClassVar[frozenset[str]] = frozenset({"chunked", "preempt", "mixed", "draft"})
    uses: ClassVar[frozenset[str]] = frozenset({"tree"})
    verify_tokens: int = 0
    draft_tokens: int = DRAFT_TOKENS
    min_depth: int = 1
    max_depth: int = DEPTH
    max_width: int = WIDTH
    prefill_chunk: int = 256
    _offered: Offered = field(default_factory=Offered, init=False, repr=False)
    _drafted: Draft | None = field(default=None, init=False)  # in the last step
    _prompts: float = field(default=0.0, init=False)  # share of the time that prompts take
    _steps: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        if min(self.draft_tokens, self.min_depth, self.max_width, self.prefill_chunk) < 1 or self.verify_tokens < 0:
            raise ValueError(
                f"draft_tokens {self.draft_tokens}, min_depth {self.min_depth}, max_width {self.max_width}, "
                f"prefill_chunk {self.prefill_chunk}, verify_tokens {self.verify_tokens}: give 1 or more of each, "
                "verify_tokens 0 for what pays"
            )
        if self.max_depth < self.min_depth:
            raise ValueError(f"depths from {self.min_depth} to {self.max_depth}: give the smaller one first")

    def observe(self, events: Sequence[Event]) -> None:
        pass

    def plan(self, view: View) -> Plan:
        self._steps += 1
        for seq in view.running:
            if seq.draft is not None and seq.pending == 1:
                self._offered.see(seq.request, seq.draft)
        load = self._load(view)
        draft = self._draft(view, load.decodes)
        chosen = self._chosen(view, load.decodes, [*load.prompts, *load.starting], draft) if load.decodes else {}
        builder = BatchBuilder(view, len(load.decodes) + sum(map(len, chosen.values())) + self.prefill_chunk)
        self._make_room(builder, load, chosen)
        run_in_order(builder, [*load.decodes, *load.prompts], lambda seq: chosen.get(seq.id, ()), draft)
        admit_in_order(builder, load.starting, draft)
        self._follow(builder, load.decodes, chosen, draft)
        self._fill(builder, load, chosen, draft)
        return builder.plan(demote=load.demoted, drop=load.refused)

    # ----------------------------------------------------------------- which requests a step serves

    def _load(self, view: View) -> _Load:
        running, waiting = view.running, view.waiting
        if self.verify_tokens:
            return _Load([s for s in running if s.pending == 1], [s for s in running if s.pending > 1], waiting)
        asking = [s for s in (*running, *waiting) if not s.best_effort]
        late = [
            s for s in asking
            if s.first_token_at is None and (s.due < view.now or wants_refusal(s, view))
        ]  # fmt: skip
        refused = refusals(late, view)
        out = {s.id for s in late}
        pace = {s.id: pace_of(s, view.now) for s in asking if s.id not in out}
        trees = [s.draft.paths for s in running if s.draft is not None and s.pending == 1]
        together = Together(view.latency, self._drafted, trees, 1.0 / (1.0 - self._prompts))
        able = sorted([s for s in running if s.id in pace], key=lambda s: pace[s.id], reverse=True)
        served = able[: together.most(able, [pace[s.id] for s in able])]
        kept = {s.id for s in served}
        starting, tight = list[SeqView](), -1.0
        for seq in sorted([s for s in waiting if s.id in pace], key=DUE):
            if sum([s.pending for s in starting]) >= self.prefill_chunk:
                break
            if pace[seq.id] > tight:  # where one was too much, so is one of a tighter pace
                joined = [*served, seq]
                if served and not together.can(joined, [pace[s.id] for s in joined], SAFETY):
                    tight = pace[seq.id]
                else:
                    starting, served = [*starting, seq], joined
        others = [s for s in (*running, *waiting) if s.id not in pace and s.id not in refused]
        kept |= {s.id for s in starting}
        others += [
            s for s in waiting if s.id in pace and s.id not in kept and (s.first_token_at is not None or s.due == inf)
        ]
        rest = [*(s for s in able if s.id not in kept), *sorted(others, key=ARRIVAL)]
        strict = [s for s in running if s.id in kept]
        decodes, prompts = [s for s in strict if s.pending == 1], [s for s in strict if s.pending > 1]
        if not strict:
            decodes = [s for s in rest if s.pending == 1 and s.id in view.running_ids]
            rest = [s for s in rest if s not in decodes]
        return _Load(decodes, sorted(prompts, key=DUE), starting, rest, sorted(out - refused.keys()), refused)

    def _make_room(self, builder: BatchBuilder, load: _Load, chosen: Mapping[str, Sequence[int]]) -> None:
        """KV that those served lack comes from the youngest of the rest that hold some; the oldest keeps its own."""
        limits, left = builder.view.limits, self.prefill_chunk
        need = sum([max(0, limits.blocks(s.cached + 1 + len(chosen.get(s.id, ()))) - s.blocks) for s in load.decodes])
        for seq in (*load.prompts, *load.starting):
            tokens = min(seq.pending, left)
            need, left = need + max(0, limits.blocks(seq.cached + tokens) - seq.blocks), left - tokens
        for seq in sorted(load.rest, key=ARRIVAL)[:0:-1]:
            if builder.kv_left < need and seq.own_blocks:
                builder.preempt(seq)

    def _follow(
        self, builder: BatchBuilder, decodes: Sequence[SeqView], chosen: Mapping[str, Sequence[int]],
        draft: Draft | None,
    ) -> None:  # fmt: skip
        """Learn the share of prompts in the time."""
        self._drafted, seconds, alone = draft, builder.view.latency.step_time(builder.shape), 0.0
        if decodes:
            n, kv = len(decodes), sum([s.cached for s in decodes])
            shape = with_nodes(drafting(draft, n), n, kv, sum(map(len, chosen.values())))
            alone = builder.view.latency.step_time(shape)
        share = min(0.9, max(0.0, 1.0 - alone / seconds)) if builder.work else 0.0
        self._prompts += (share - self._prompts) * min(1.0, seconds / MEMORY)

    def _fill(
        self, builder: BatchBuilder, load: _Load, chosen: Mapping[str, Sequence[int]], draft: Draft | None
    ) -> None:
        """The rest: in the time until the first of those served would be late with what it can expect, and in turns."""
        view, rest, until, least = builder.view, load.rest, inf, inf
        for seq in load.decodes:
            expected = [seq.draft.paths[node] for node in chosen.get(seq.id, ())] if seq.draft is not None else []
            until, least = min(until, time_for(seq, 1.0 + sum(expected), view.now)), min([least, *expected])
        turn = self._steps % TURN == 0 or not builder.work
        oldest = min(rest, key=ARRIVAL, default=None) if turn else None
        if oldest is not None:
            victims = [*sorted(rest, key=ARRIVAL)[:0:-1], *load.prompts[::-1], *load.decodes[::-1]]
            make_room(builder, oldest, min(oldest.pending, TURN_TOKENS), victims)
        for seq in sorted(rest, key=lambda s: s is not oldest):
            fits = seq is oldest or seq.id in builder.running or not builder.lacks(seq, seq.pending)
            tokens = builder.tokens_that_fit(seq) if fits and seq not in builder.preempted else 0
            if tokens and until < inf:
                least_of = min(tokens, TURN_TOKENS) if seq is oldest else 0
                tokens = max(least_of, view.latency.largest_chunk(until - view.now, builder.shape, seq.cached, tokens))
            if tokens:
                paths = seq.draft.paths if seq.pending == 1 and seq.draft is not None else ()
                nodes = tuple([node for node, f in enumerate(paths) if f >= least])  # as likely as those chosen
                end = view.now + view.latency.step_time(builder.shape.plus(1 + len(nodes), seq.cached))
                if end > until or builder.verifiable(seq, len(nodes)) < len(nodes):
                    nodes = ()
                builder.add(seq, tokens, nodes, draft if tokens == seq.pending else None)
            elif seq is not oldest and seq not in builder.preempted:
                return

    # ----------------------------------------------------------------- what it drafts and verifies

    def _draft(self, view: View, decodes: Sequence[SeqView]) -> Draft | None:
        """(depth, width) of the next trees; None where nothing is to be drafted. Depths that may pay are the last one's
        neighbours, all where nothing was drafted last."""
        n = max(1, len(decodes))
        verify = self.verify_tokens or n * (self.max_depth + 1)  # or whatever any tree may need
        bounds = self.min_depth, self.max_depth, self.max_width if "tree" in view.supports else 1
        depth, width = adaptive(n, verify, self.draft_tokens, 0, 0, *bounds)
        if self.verify_tokens:
            return (depth, width) if verify > n else None
        least, kv = self.min_depth, sum([s.cached for s in decodes])
        if self._drafted is not None:
            least, depth = max(least, min(depth, self._drafted[0]) - 1), min(depth, self._drafted[0] + 1)
        chances = [self._offered.chances(s.request, depth) for s in decodes]
        best = depth_that_pays(view.latency, n, kv, chances, width, least, depth)
        return (best, width) if best else None

    def _chosen(
        self, view: View, decodes: Sequence[SeqView], prompts: Sequence[SeqView], draft: Draft | None
    ) -> Mapping[str, tuple[int, ...]]:
        """Of each request the nodes to verify."""
        trees, n = [s.draft for s in decodes], len(decodes)
        drafts, kv = drafting(draft, n), sum([s.cached for s in decodes])
        chunk, kv_free = self._beside(view, prompts)
        beside = drafts.plus(chunk, 0) if chunk else drafts
        likely = sorted((f for tree in trees if tree is not None for f in tree.paths), reverse=True)
        likely = likely[: max(0, view.limits.max_num_batched_tokens - n)]
        if self.verify_tokens:
            nodes = min(self.verify_tokens - n, len(likely))
        else:
            nodes, token = fastest(view.latency, drafts, n, kv, likely)
            if chunk:
                nodes = worth(view.latency, beside, n, kv, likely, token)
        if nodes < 1:
            return {}
        end = view.now + view.latency.step_time(with_nodes(beside, n, kv, nodes))
        needed = self._needed(decodes, end, view.now)
        deepest = max([max(tree.depths, default=0) for tree in trees if tree is not None], default=0)
        found = select(trees, needed, n + nodes, deepest + 1)
        return _within(view, decodes, found, kv_free)

    def _needed(self, decodes: Sequence[SeqView], end: float, now: float) -> list[float]:
        """Tokens that each needs from the step that ends then."""
        return [tokens_needed(s, end, now) for s in decodes]

    def _beside(self, view: View, prompts: Sequence[SeqView]) -> tuple[int, int]:
        """Tokens of prompts that run in this step, and the KV blocks that these and the decodes' next tokens leave."""
        left, free = self.prefill_chunk, view.kv_free - view.decode_blocks
        for seq in prompts:
            tokens = min(seq.pending, left)
            blocks = max(0, view.limits.blocks(seq.cached + tokens) - seq.blocks)
            if not tokens or blocks > free:
                break
            left, free = left - tokens, free - blocks
        return self.prefill_chunk - left, max(0, free)


def _within(
    view: View, decodes: Sequence[SeqView], found: Sequence[tuple[int, ...]], kv_free: int
) -> dict[str, tuple[int, ...]]:
    """Of each request the first of these nodes, as far as its last block and the free ones go, in order of start."""
    chosen = {}
    for seq, nodes in zip(decodes, found, strict=True):
        held = max(seq.blocks, view.limits.blocks(seq.cached + 1))
        room = (held + kv_free) * view.limits.block_size - seq.cached - 1
        chosen[seq.id] = nodes[:room] if room < len(nodes) else nodes
        kv_free -= max(0, view.limits.blocks(seq.cached + 1 + len(chosen[seq.id])) - held)
    return chosen
