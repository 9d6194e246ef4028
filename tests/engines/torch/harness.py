"""A torch engine behind a replica, driven by random plans that verify random parts of what is drafted."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from rubato.core.events import Event, Finished, Preempted, Tokens
from rubato.core.interfaces import SeqView, View
from rubato.core.plan import Entry, Logprob, Plan, Tree, Work
from rubato.core.request import Request, Sampling, Stage
from rubato.replica.replica import Replica
from rubato.workloads.prompts import TEXTS
from rubato_torch import Engine
from rubato_torch.drafters import Draft, Wanted
from rubato_torch.tokenizer import Text
from tests.kit import integrity

BLOCK, BLOCKS = 4, 64
DEEP, WIDE = 4, 3
NEW = 20
GO_ON = Sampling(max_tokens=NEW, ignore_eos=True)
CHUNKS = (1, 3, 8, 50)


def random_tree(rng: random.Random, depth: int, width: int) -> Tree:
    """Up to `width` nodes in each layer, under random nodes of the layer before it."""
    parents: list[int] = []
    paths: list[float] = []
    layer = [-1]
    for _ in range(rng.randint(1, depth)):
        chosen = sorted(rng.choice(layer) for _ in range(rng.randint(1, width)))
        layer = list(range(len(parents), len(parents) + len(chosen)))
        parents += chosen
        for parent in chosen:
            paths.append((paths[parent] if parent >= 0 else 1.0) * 0.5)
    return Tree(tuple(parents), tuple(paths))


@dataclass
class Toy:
    """Drafts random trees; the first child of a node that is right is right itself with this probability, else wrong as
    all others are. truth: each sequence's tokens in the end, as they are without drafts; exact: whether they are to be
    the same with drafts."""

    rng: random.Random
    right: float
    truth: dict[str, list[int]] = field(default_factory=dict)
    exact: bool = True
    judged: list[int] = field(default_factory=list)  # accepted nodes of each verification
    live: set[str] = field(default_factory=set)

    def draft(self, wanted: Sequence[Wanted]) -> list[Draft]:
        return [self._draft(one) for one in wanted]

    def _draft(self, wanted: Wanted) -> Draft:
        truth, at = self.truth[wanted.seq], len(wanted.tokens)
        assert not self.exact or list(wanted.tokens) == truth[:at]
        self.live.add(wanted.seq)
        tree = random_tree(self.rng, wanted.depth, wanted.width)
        tokens: list[int] = []
        depths: list[int] = []
        good = {-1}
        led: set[int] = set()
        for node, parent in enumerate(tree.parents):
            depth = depths[parent] + 1 if parent >= 0 else 0
            depths.append(depth)
            true = truth[at + depth] if at + depth < len(truth) else 0
            if parent in good and parent not in led and self.rng.random() < self.right:
                good.add(node)
                tokens.append(true)
            else:
                tokens.append((true + node + 1) % 256)
            led.add(parent)
        return Draft(tree, tuple(tokens))

    def verified(self, seq: str, draft: Draft, tried: Sequence[int], accepted: Sequence[int]) -> None:
        assert set(accepted) <= set(tried)
        for before, node in zip((-1, *accepted), accepted, strict=False):
            assert draft.tree.parents[node] == before
        self.judged.append(len(accepted))

    def forget(self, seq: str) -> None:
        self.live.discard(seq)


@dataclass
class Served:
    """What one request's client got."""

    ids: list[int] = field(default_factory=list)
    text: str = ""
    logprobs: list[Logprob] = field(default_factory=list)
    stages: list[int] = field(default_factory=list)
    reason: str = ""


@dataclass
class Harness:
    """An engine behind a replica, driven by random plans that verify what is drafted. check: called after each step."""

    engine: Engine
    replica: Replica
    loop: asyncio.AbstractEventLoop
    rng: random.Random
    chunks: Sequence[int] = CHUNKS
    planner: Callable[[View, random.Random], Plan] | None = None  # in place of random plans
    served: dict[str, Served] = field(default_factory=dict)
    tokens: dict[str, list[int]] = field(default_factory=dict)  # all that the engine has of each
    branched: int = 0  # entries with a tree that is no chain
    preempted: int = 0
    together: int = 0  # batches of a prefill chunk, a decode and a tree
    steps: int = 0
    accepted: int = 0
    largest: int = 0  # sequences in a batch
    events: list[Event] = field(default_factory=list)

    def run(
        self,
        requests: Sequence[Request],
        preempt: float = 0.0,
        check: Callable[[], None] = lambda: None,
        cancel: str = "",
    ) -> None:
        waiting = list(requests)
        while waiting or not self.replica.empty:
            if waiting and self.steps % 3 == 0:
                request = waiting.pop(0)
                self.engine.add(request)
                self.served[request.id] = Served()
                self._note(self.replica.submit(request, float(self.steps)))
            self.steps += 1
            assert self.steps < 2000
            self._step(float(self.steps), preempt, cancel)
            check()
        integrity.check(self.replica)
        assert self.replica.kv.free == self.replica.kv.total

    def _step(self, now: float, preempt: float, cancel: str) -> None:
        view = self.replica.view(now)
        if self.planner is not None:
            plan = self.planner(view, self.rng)
        else:
            plan = random_plan(view, self.rng, preempt, "draft" in view.supports, self.chunks)
        if not plan.work and not plan.preempt:
            return
        batch, events = self.replica.apply(plan, now, "random")
        self._note(events)
        if batch.entries:
            self.largest = max(self.largest, len(batch.entries))
            branched = sum(branches(e, self.replica.running[e.seq].draft) for e in batch.entries)
            counts = {e.count for e in batch.entries if not e.verify}
            self.branched += branched
            self.together += branched > 0 and 1 in counts and len(counts) > 1
            result = self.loop.run_until_complete(self.engine.execute(batch))
            if cancel and any(e.seq == cancel and e.verify for e in batch.entries):
                self._note(self.replica.cancel(cancel, now, "client"))
            self._note(self.replica.commit(batch, result, now))
            for id in self.served:
                if id in self.engine._seqs:
                    self.tokens[id] = list(self.engine._seqs[id].tokens)
        self.engine.forget(self.replica.take_gone_ids())

    def _note(self, events: Sequence[Event]) -> None:
        self.events += events
        for event in events:
            match event:
                case Tokens():
                    one = self.served[event.id]
                    one.ids += event.token_ids
                    one.text += event.text
                    one.logprobs += event.logprobs
                    one.stages += [event.stage] * event.tokens
                    assert event.tried >= event.tokens - 1
                    self.accepted += len(event.accepted)
                case Preempted():
                    self.preempted += 1
                case Finished():
                    self.served[event.id].reason = event.reason


def branches(entry: Entry, tree: Tree | None) -> bool:
    """Whether what it verifies is no chain."""
    parents = [tree.parents[node] for node in entry.verify] if tree is not None else []
    return parents != [-1, *entry.verify[:-1]] if parents else False


def random_plan(view: View, rng: random.Random, preempt: float, drafts: bool, chunks: Sequence[int] = CHUNKS) -> Plan:
    """Each sequence with probability 0.8, chunks of random sizes, as far as KV goes, with a random part of its tree.
    One loses its KV at random, or the last where a running one lacks some (recompute, as vLLM's)."""
    gone: list[str] = []
    if view.running and rng.random() < preempt:
        gone.append(rng.choice(view.running).id)
    seqs: list[SeqView] = [s for s in (*view.running, *view.waiting) if s.id not in gone]
    rng.shuffle(seqs)
    free, work, lacking = view.kv_free, [], False
    for seq in seqs:
        tokens = min(seq.pending, rng.choice(chunks))
        verify: tuple[int, ...] = ()
        draft = None
        if drafts and tokens == seq.pending:
            draft = (rng.randint(1, DEEP), rng.randint(1, WIDE)) if rng.random() < 0.9 else None
            verify = some_nodes(rng, seq.draft)
        need = max(0, view.limits.blocks(seq.cached + tokens + len(verify)) - seq.blocks)
        lacking = lacking or (need > free and seq.blocks > 0)
        if need <= free and rng.random() < 0.8:
            work.append(Work(seq.id, tokens, verify, draft))
            free -= need
    if lacking and not gone:
        gone = [view.running[-1].id]
        work = [one for one in work if one.seq != gone[0]]
    return Plan(tuple(work), tuple(gone), wake_at=view.now + 1.0)


def some_nodes(rng: random.Random, tree: Tree | None) -> tuple[int, ...]:
    """Most of a tree, parents before their children, in a random order of those."""
    if tree is None or rng.random() < 0.1:
        return ()
    nodes: list[int] = []
    open_ = [node for node, parent in enumerate(tree.parents) if parent < 0]
    while open_:
        node = open_.pop(rng.randrange(len(open_)))
        if rng.random() < 0.9:
            nodes.append(node)
            open_ += [child for child, parent in enumerate(tree.parents) if parent == node]
    return tuple(nodes)


def asked(count: int, sampling: Sampling = GO_ON, seed: int = 5) -> list[Request]:
    rng = random.Random(seed)
    prompts = [tuple(rng.randrange(256) for _ in range(rng.randint(3, 40))) for _ in range(count)]
    return [
        Request(f"r{i}", (Stage(len(ids), token_ids=ids),), 0.0, sampling=sampling) for i, ids in enumerate(prompts)
    ]


def mixed_requests(text: Text, count: int, sampling: Sampling, seed: int = 1) -> list[Request]:
    """Chats, code to complete and summaries in turn, as the model's chat template writes them; 20 to 400 tokens, most
    of them short."""
    rng = np.random.default_rng(seed)
    requests = []
    for i in range(count):
        kind = ("chat", "code", "summary")[i % 3]
        written = TEXTS[kind](rng, int(np.exp(rng.uniform(np.log(10), np.log(320)))))
        ids = tuple(text.chat([{"role": "user", "content": written}]) if kind == "chat" else text.encode(written))[:400]
        requests.append(Request(f"{kind}-{i}", (Stage(len(ids), token_ids=ids),), 0.0, sampling=sampling))
    return requests
