"""The suffix drafter: what followed the last tokens earlier in the same sequence is likely to follow them again.

No model, no training. For every context of 1 to 6 tokens it counts which tokens came next, in the sequence's own prompt
and output and, where a store is asked for, in its tenant's earlier outputs. A token's probability joins all contexts
that match, the longest first (PPM, interpolated). AdaServe's beam search (§4.3) makes a tree of them, and a monotone
map, refitted as drafts are verified, turns the probability of each step into the share of such steps that is right.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from heapq import nlargest
from operator import itemgetter

from rubato.core.plan import Tree
from rubato_torch.drafters import NO_DRAFT, Draft, Wanted
from rubato_torch.drafters.calibration import Calibration

MAX_CONTEXT_TOKENS = 6  # tokens of the longest context
MOST = 8  # next tokens of a context that count, the most frequent
END = -1  # no token: where a text ends


class Context:
    """A run of tokens that occurred: how often (`count`), how often something followed it (`total`), and what.

    next: token -> the context with that token at its end; while that occurred only once, the position of its end
    instead, since what follows it stands in the text. Most contexts occur once: this is where the memory is saved.
    """

    __slots__ = ("_frequent", "count", "next", "total")

    def __init__(self, count: int = 0) -> None:
        self.count = count
        self.total = 0
        self.next: dict[int, Context | int] = {}
        self._frequent: list[tuple[int, int]] | None = None

    def frequent(self) -> list[tuple[int, int]]:
        """The `MOST` most frequent next tokens, each with its count; of equals, those that came up first."""
        if self._frequent is not None:
            return self._frequent
        counts = [(token, 1 if isinstance(to, int) else to.count) for token, to in self.next.items()]
        if len(counts) > MOST:
            self._frequent = counts = nlargest(MOST, counts, key=itemgetter(1))
        return counts

    def changed(self, by: int) -> None:
        self.total += by
        self._frequent = None


class Counts:
    """What followed each context of up to `MAX_CONTEXT_TOKENS` tokens, in one text that grows or in several texts.

    A trie of all runs of up to MAX_CONTEXT_TOKENS + 1 tokens, in 84 bytes a token where nothing repeats, about 300 in
    chats, code and summaries, 950 at worst (all of it twice); 1 to 5 us a token.
    """

    def __init__(self) -> None:
        self.text: list[int] = []
        self._first = 0  # the position of text[0]; what was dropped came before it
        self._ends: deque[int] = deque()  # positions where texts end, but for the last
        self._root = Context()
        self.suffixes = [self._root]  # the last 0, 1, 2... tokens of the text, as far as they occurred before

    def __len__(self) -> int:
        return len(self.text) - len(self._ends)

    def append(self, token: int) -> None:
        """Count one more token."""
        position = self._first + len(self.text)
        self.text.append(token)
        longer = [self._root]
        for order, context in enumerate(self.suffixes, 1):
            context.changed(1)
            known = context.next.get(token)
            if known is None:
                context.next[token] = position
            elif isinstance(known, Context):
                known.count += 1
                longer.append(known)
            else:
                twice = context.next[token] = Context(2)
                longer.append(twice)
                after = self.after(known)
                if order <= MAX_CONTEXT_TOKENS and after is not None:
                    twice.total = 1
                    twice.next[after] = known + 1
        self.suffixes = longer[: MAX_CONTEXT_TOKENS + 1]

    def end(self) -> None:
        """The next token begins another text: no context reaches across."""
        self._ends.append(self._first + len(self.text))
        self.text.append(END)
        self.suffixes = [self._root]

    def drop_oldest(self) -> None:
        """Take the oldest text that has ended and all it counted out again."""
        size = self._ends.popleft() - self._first
        for start in range(size):
            context = self._root
            for token in self.text[start : min(start + MAX_CONTEXT_TOKENS + 1, size)]:
                context.changed(-1)
                longer = context.next[token]
                if isinstance(longer, Context) and longer.count > 1:
                    longer.count -= 1
                    context = longer
                else:
                    del context.next[token]
                    break
        del self.text[: size + 1]
        self._first += size + 1

    def matches_of(self, tokens: Sequence[int]) -> list[Context | int]:
        """The contexts that `tokens` end in, the empty one first, each longer by one token than the one before."""
        contexts: list[Context | int] = [self._root]
        for token in tokens[-MAX_CONTEXT_TOKENS:]:
            contexts = self.longer(contexts, token)
        return contexts

    def longer(self, contexts: Sequence[Context | int], token: int) -> list[Context | int]:
        """The contexts that match when `token` follows."""
        found: list[Context | int] = [self._root]
        for context in contexts[:MAX_CONTEXT_TOKENS]:
            if isinstance(context, Context):
                to = context.next.get(token)
                if to is None:
                    break  # and so it never followed a longer context
                found.append(to)
            elif self.after(context) == token:
                found.append(context + 1)
            else:
                break
        return found

    def after(self, position: int) -> int | None:
        """The token that follows `position` in the same text."""
        at = position + 1 - self._first
        token = self.text[at] if at < len(self.text) else END
        return None if token == END else token


Match = tuple[Counts, Sequence[Context | int]]  # counts, and the contexts in them that match, as in `matches_of`


def probabilities(matches: Sequence[Match]) -> dict[int, float]:
    """What may come next, token -> probability; their sum is below 1, the rest belongs to tokens never seen here.

    Interpolated from the longest context to that of one token: each gives c/(n + 2t) to a token that followed it c of
    n times, and leaves 2t/(n + 2t) to the shorter ones, t being how many different tokens followed it. That is Witten
    and Bell's estimate with t doubled: the trees are as good, and the probabilities off by 0.017 in the mean, not 0.070
    (the nodes that `SHARES` is of). Of contexts equally long the first of `matches` comes first.
    """
    found: dict[int, float] = {}
    left = 1.0
    for order in range(max(len(contexts) for _, contexts in matches) - 1, 0, -1):
        for counts, contexts in matches:
            if order >= len(contexts):
                continue
            context = contexts[order]
            if not isinstance(context, Context):
                token = counts.after(context)
                if token is not None:
                    found[token] = found.get(token, 0.0) + left / 3.0
                    left *= 2.0 / 3.0
            elif context.total:
                share = left / (context.total + 2 * len(context.next))
                for token, count in context.frequent():
                    found[token] = found.get(token, 0.0) + share * count
                left = share * 2 * len(context.next)
    return found


def beam(
    matches: Sequence[Match], depth: int, width: int, calibrated: Callable[[float], float]
) -> tuple[Draft, list[float]]:
    """AdaServe's beam search (§4.3): the `width` most probable next tokens, then `depth` - 1 times the `width` most
    probable of all that may follow a node of the last layer, by path probability, the product of calibrated steps. Ties
    go to the parent found first, then to the child that was more probable before it was calibrated.

    Beside the draft, the step of each node: its probability given its parent, before it was calibrated.
    """
    parents: list[int] = []
    tokens: list[int] = []
    paths: list[float] = []
    steps: list[float] = []
    layer: list[tuple[float, int, Sequence[Match]]] = [(1.0, -1, matches)]
    for _ in range(depth):
        found = []
        for path, node, matching in layer:
            likely = sorted(probabilities(matching).items(), key=itemgetter(1), reverse=True)[:width]
            found += [(path * calibrated(step), node, token, step, matching) for token, step in likely]
        found.sort(key=itemgetter(0), reverse=True)
        layer = []
        for path, node, token, step, matching in found[:width]:
            layer.append((path, len(parents), [(counts, counts.longer(known, token)) for counts, known in matching]))
            parents.append(node)
            tokens.append(token)
            paths.append(path)
            steps.append(step)
    return Draft(Tree(tuple(parents), tuple(paths)), tuple(tokens)), steps


# The share of nodes that were right, of those whose parent was, in bins of their probability: 7,476 nodes of trees of
# depth 4 and width 3 along 60 greedy outputs of SmolLM2-135M-Instruct in float32 (5,875 tokens, 2026-11-23), no store.
# Prompts: 24 HumanEval problems, 24 chats and 12 summaries of AdaServe's artifact.
EDGES = (0.0, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.98, 0.99, 1.0)
SHARES = (0.022, 0.073, 0.138, 0.235, 0.338, 0.376, 0.583, 0.621, 0.724, 0.824, 0.896, 0.942, 0.961, 0.976)


class _Sequence:
    """A sequence's counts and its last draft."""

    def __init__(self, tenant: str, output: int) -> None:
        self.tenant = tenant
        self.output = output  # where its output begins: with the token before its first draft
        self.counts = Counts()
        self.draft = NO_DRAFT
        self.steps: list[float] = []


class SuffixDrafter:
    """A `Drafter` by counts of what followed each context.

    store_tokens: how many tokens of each tenant's earlier outputs it drafts from, too; the oldest output is dropped
    first. An output is the tokens from a sequence's first draft to its last; without a tenant ("") none is kept. All
    tenants share the calibration, which knows frequencies but no text. Raises ValueError for what is no such number.
    """

    def __init__(self, store_tokens: int = 0) -> None:
        if type(store_tokens) is not int or store_tokens < 0:
            raise ValueError(f"store_tokens is {store_tokens!r}: give a whole number of tokens, or 0 for no store")
        self._store_tokens = store_tokens
        self._stores: dict[str, Counts] = {}
        self._seqs: dict[str, _Sequence] = {}
        self.calibration = Calibration(EDGES, SHARES)

    def draft(self, wanted: Sequence[Wanted]) -> list[Draft]:
        return [self._draft(want) for want in wanted]

    def verified(self, seq: str, draft: Draft, tried: Sequence[int], accepted: Sequence[int]) -> None:
        known = self._seqs.get(seq)
        if known is None or known.draft != draft:
            return
        right = {-1, *accepted}
        for node in tried:
            if draft.tree.parents[node] in right:
                self.calibration.observe(known.steps[node], node in right)
        known.draft = NO_DRAFT

    def forget(self, seq: str) -> None:
        known = self._seqs.pop(seq, None)
        output = [] if known is None else known.counts.text[known.output :][-self._store_tokens :]
        if known is None or not (output and known.tenant and self._store_tokens):
            return
        store = self._stores.setdefault(known.tenant, Counts())
        for token in output:
            store.append(token)
        store.end()
        while len(store) > self._store_tokens:
            store.drop_oldest()

    def _draft(self, want: Wanted) -> Draft:
        known = self._follow(want)
        matches: list[Match] = [(known.counts, known.counts.suffixes)]
        store = self._stores.get(want.tenant)
        if store is not None:
            matches.append((store, store.matches_of(known.counts.text)))
        known.draft, known.steps = beam(matches, want.depth, want.width, self.calibration)
        return known.draft

    def _follow(self, want: Wanted) -> _Sequence:
        """The sequence, with all its tokens counted; anew if they do not go on from the last of those known."""
        known = self._seqs.get(want.seq)
        counted = 0 if known is None else len(known.counts.text)
        last = list(want.tokens[max(0, counted - MAX_CONTEXT_TOKENS) : counted])
        if known is None or known.tenant != want.tenant or last != known.counts.text[-MAX_CONTEXT_TOKENS:]:
            known = self._seqs[want.seq] = _Sequence(want.tenant, max(0, len(want.tokens) - 1))
            counted = 0
        for token in want.tokens[counted:]:
            known.counts.append(token)
        return known
