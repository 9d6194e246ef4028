"""Verified trees change how many tokens a step brings, never which: the same requests with and without drafts, through
a replica, in mixed batches, under preemption."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from scipy.stats import chi2

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from rubato.core.plan import KV, Batch, Entry, Tree  # noqa: E402
from rubato.core.request import Progress, Request, Sampling, Stage  # noqa: E402
from rubato_torch.cpu import llvm_jit  # noqa: E402
from rubato_torch.drafters import Draft, Wanted  # noqa: E402
from rubato_torch.model import Model  # noqa: E402
from rubato_torch.model_config import load_config  # noqa: E402
from rubato_torch.sampling import choose  # noqa: E402
from rubato_torch.sequence import Sequence as Running  # noqa: E402
from rubato_torch.trees import Candidates, Walk, accept, check_draft  # noqa: E402
from rubato_torch.weights import load_weights  # noqa: E402
from tests.engines.driver import Driver  # noqa: E402
from tests.engines.torch.harness import BLOCK, DEEP, GO_ON, NEW, WIDE, Harness, Toy, asked, random_tree  # noqa: E402

needs_kernels = pytest.mark.skipif(not llvm_jit.available(), reason="no LLVM kernels on this platform")


def both(
    harness: Callable[..., Harness], name: str, requests: Sequence[Request], *, right: float, preempt: float = 0.0,
    cache: bool = False,
) -> tuple[Harness, Harness, Toy]:  # fmt: skip
    """The same requests without and with drafts; what clients get is the same."""
    plain = harness(name, None)
    plain.run(requests)
    toy = Toy(random.Random(2), right, plain.tokens)
    trees = harness(name, toy, cache=cache)
    trees.run(requests, preempt)
    for id, one in plain.served.items():
        other = trees.served[id]
        assert (other.ids, other.text, other.stages, other.reason) == (one.ids, one.text, one.stages, one.reason)
        for a, b in zip(one.logprobs, other.logprobs, strict=True):
            assert (a.token, [i for i, _ in a.top]) == (b.token, [i for i, _ in b.top])
            assert a.logprob == pytest.approx(b.logprob, abs=1e-3)
    return plain, trees, toy


@pytest.mark.parametrize("name", ["llama-linear", "mistral", "qwen2", "qwen3-mixed", "qwen2-window"])
def test_greedy_output_is_the_same(name: str, harness: Callable[..., Harness]) -> None:
    """Grouped heads, one KV head for each, normed heads, windows shorter than the prompts, alone and mixed with full
    attention; half of the drafted tokens are right; sequences lose their KV, and find parts of it again."""
    plain, trees, toy = both(harness, name, asked(7), right=0.7, preempt=0.05, cache=True)
    assert all(len(one.ids) == NEW for one in plain.served.values())
    assert len({tuple(one.ids) for one in plain.served.values()}) > 3
    assert trees.branched > 15
    assert trees.preempted > 1
    assert trees.together > 1
    assert sum(toy.judged) > 20
    assert max(toy.judged) == DEEP
    assert 0 in toy.judged


SAMPLED = Sampling(max_tokens=NEW, ignore_eos=True, temperature=1.0, seed=11)


@pytest.mark.parametrize(
    "sampling",
    [
        SAMPLED,
        replace(SAMPLED, top_p=0.9, top_k=40, min_p=0.01, temperature=1.4),
        replace(SAMPLED, presence_penalty=1.0, frequency_penalty=0.7, repetition_penalty=1.3),
        replace(GO_ON, frequency_penalty=1.5, repetition_penalty=1.2, logprobs=3),
    ],
)
def test_a_seed_gives_the_tokens_it_gives_without_drafts(sampling: Sampling, harness: Callable[..., Harness]) -> None:
    _, trees, toy = both(harness, "qwen2", asked(4, sampling), right=0.8, preempt=0.03)
    assert trees.branched > 5
    assert sum(toy.judged) > 15


def test_what_ends_inside_an_accepted_path_ends_there(harness: Callable[..., Harness]) -> None:
    """max_tokens, a stop id, a stop string, eos, and stages that end with a literal, with and without a prompt behind
    it: the drafter is right about all that would come after them."""
    (base,) = asked(1, replace(GO_ON, logprobs=0))
    plain = harness("qwen2", None)
    plain.run([base])
    ids = plain.served["r0"].ids
    text = plain.served["r0"].text
    word = next(text[i : i + 2] for i in range(6, len(text)) if text[i : i + 2].isascii())
    at = ids.index(next(i for i in ids[8:] if i not in ids[:6]))
    stages = (
        (replace(base.stages[0], ends=word), Stage(0)),
        (replace(base.stages[0], ends=word), Stage(9, token_ids=tuple(range(60, 69)))),
    )
    sampling = base.sampling
    requests = [
        *(replace(base, id=f"max{n}", sampling=replace(sampling, max_tokens=n)) for n in range(1, 9)),
        replace(base, id="id", sampling=replace(sampling, stop_ids=(ids[at],))),
        replace(base, id="word", sampling=replace(sampling, stop=(word,))),
        *(replace(base, id=f"stages{i}", stages=parts) for i, parts in enumerate(stages)),
    ]
    whole = base.stages[0].token_ids + tuple(ids)
    without = harness("qwen2", None)
    without.run(requests)
    truth = {r.id: [*without.tokens[r.id], *whole[len(without.tokens[r.id]) :]] for r in requests}
    for seed in range(3):
        toy = Toy(random.Random(seed), 0.97, truth)
        trees = harness("qwen2", toy, seed)
        trees.run(requests)
        for id, one in without.served.items():
            other = trees.served[id]
            assert (id, other.ids, other.text, other.stages, other.reason) == (
                id, one.ids, one.text, one.stages, one.reason,
            )  # fmt: skip
        assert sum(toy.judged) > trees.accepted > 12  # some were right, and ended their request or stage
    assert (without.served["id"].reason, without.served["word"].reason) == ("stop", "stop")
    assert set(without.served["stages1"].stages) == {0, 1}


@pytest.mark.parametrize(
    ("name", "dtype", "block"),
    [
        ("qwen3-mixed", "float32", BLOCK),
        ("llama", "float32", 3),
        pytest.param("qwen3", "bfloat16", 32, marks=needs_kernels),
        pytest.param("qwen3-mixed", "bfloat16", 16, marks=[needs_kernels, pytest.mark.full]),
    ],
)
def test_the_kv_of_an_accepted_path_is_that_of_its_tokens(
    name: str, dtype: str, block: int, harness: Callable[..., Harness]
) -> None:
    """It is what one prefill of all tokens so far writes; in bfloat16 in the kernels' layout."""
    requests = asked(2)
    plain = harness(name, None, dtype=dtype, block=block)
    plain.run(requests)
    toy = Toy(random.Random(3), 0.9, plain.tokens, exact=dtype == "float32")
    trees = harness(name, toy, dtype=dtype, block=block)
    assert (trees.engine._model.native is not None) == (dtype == "bfloat16")  # type: ignore[union-attr]
    compared = 0
    model = plain.engine._model
    assert model is not None

    def same() -> None:
        nonlocal compared
        for seq in trees.replica.running.values():
            if seq.cached > seq.request.prompt and trees.steps % 3 == 0:
                ids = trees.engine._seqs[seq.id].tokens[: seq.cached]
                blocks = tuple(range(-(-seq.cached // block)))
                with torch.inference_mode():
                    model.forward(model.pack(Batch((Entry("x", 0, seq.cached, blocks, False),)), {"x": ids}))
                    found = trees.engine._model.read_kv(seq.block_ids, seq.cached).float()  # type: ignore[union-attr]
                    expected = model.read_kv(blocks, seq.cached).float()
                if dtype == "float32":
                    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)
                else:
                    far = (found - expected).flatten(2).norm(dim=-1) / expected.flatten(2).norm(dim=-1)
                    assert far.max() < 0.1
                compared += 1

    trees.run(requests, check=same)
    assert compared >= 4
    assert sum(toy.judged) > 10
    assert trees.branched > 3


@pytest.mark.parametrize(
    ("name", "dtype", "spare"),
    [
        ("llama-biased", "float32", 0),
        ("qwen3-mixed", "float32", 0),
        ("mistral", "float32", 0),
        pytest.param("qwen3-mixed", "bfloat16", 4, marks=needs_kernels),
        pytest.param("qwen3-mixed", "bfloat16", 40, marks=needs_kernels),
        pytest.param("qwen3-mixed", "bfloat16", 0, marks=[needs_kernels, pytest.mark.full]),
    ],
)
def test_a_node_computes_what_its_path_alone_would(
    name: str, dtype: str, spare: int, twin: Callable[[str], Path]
) -> None:
    """Logits of every node of random trees, beside a decode and a chunk, against one prefill of the path to it. With
    spare blocks for none, some and all of the trees' paths."""
    config = load_config(twin(name))
    weights = load_weights(twin(name), config, getattr(torch, dtype), torch.device("cpu"))
    model = Model(config, weights, 72, 16 if dtype == "bfloat16" else BLOCK, spare)
    rng = random.Random(name)
    tokens = {seq: [rng.randrange(256) for _ in range(40)] for seq in "abcde"}
    order = rng.sample(range(72), 72)
    each = 48 // model.block
    blocks = {seq: tuple(order[i * each : (i + 1) * each]) for i, seq in enumerate("abcdex")}
    with torch.inference_mode():
        if dtype == "float32":
            model.kv.uniform_(-50, 50)
        starts = {"a": 17, "b": 15, "c": 30, "d": 12, "e": 0}
        warm = tuple(Entry(seq, 0, start, blocks[seq], False) for seq, start in starts.items() if start)
        model.forward(model.pack(Batch(warm), tokens))
        candidates = {}
        entries = [Entry("d", 12, 1, blocks["d"], True), Entry("e", 0, 20, blocks["e"], True)]
        pending = {"a": 1, "b": 3, "c": 1}
        for seq, count in pending.items():
            tree = Tree((-1, -1, 0, 0, 1, 2), (0.5,) * 6) if seq == "a" else random_tree(rng, DEEP, WIDE)
            nodes = tuple(range(len(tree.parents)))
            draft = Draft(tree, tuple(rng.randrange(256) for _ in nodes))
            candidates[seq] = Candidates.of(seq, draft, nodes)
            entries.append(Entry(seq, starts[seq], count + len(nodes), blocks[seq], True, nodes))
        packed = model.pack(Batch(tuple(entries)), tokens, candidates)
        found = model.forward(packed).float()
        row = 0
        for seq in packed.seqs:
            entry = next(e for e in entries if e.seq == seq)
            base = tokens[seq][: entry.start + entry.count - len(entry.verify)]
            paths: list[list[int]] = [[]]
            for node in entry.verify:
                parent = candidates[seq].parents[node]
                paths.append([*paths[parent + 1], candidates[seq].tokens[node]])
            for path in paths:
                alone = Entry("x", 0, len(base) + len(path), blocks["x"], True)
                expected = model.forward(model.pack(Batch((alone,)), {"x": base + path})).float()[0]
                far = (found[row] - expected).norm() / expected.norm()
                assert far < (1e-4 if dtype == "float32" else 0.05), (seq, path)
                row += 1
        assert row == len(found)


def test_a_cancelled_request_leaves_nothing(harness: Callable[..., Harness]) -> None:
    plain = harness("qwen2", None)
    plain.run(asked(3))
    toy = Toy(random.Random(2), 0.8, plain.tokens)
    trees = harness("qwen2", toy)
    trees.run(asked(3), cancel="r1")
    assert trees.served["r1"].reason == "client"
    assert len(trees.served["r1"].ids) < NEW
    assert [trees.served[id].ids for id in ("r0", "r2")] == [plain.served[id].ids for id in ("r0", "r2")]
    trees.loop.run_until_complete(trees.engine.close())
    assert not toy.live


def test_a_sequence_moves_between_verifications(harness: Callable[..., Harness]) -> None:
    """With the KV of accepted paths, to an engine without a drafter: its seed goes on where it was."""
    (request,) = asked(1, SAMPLED)
    plain = harness("qwen2", None)
    plain.run([request])
    trees = harness("qwen2", Toy(random.Random(2), 0.9, plain.tokens))
    moved: list[tuple[Progress, KV]] = []

    def leave() -> None:
        seq = trees.replica.running.get("r0")
        if not moved and seq is not None and seq.output > 9 and seq.pending == 1:
            kv = trees.loop.run_until_complete(trees.engine.export_kv(seq.block_ids, seq.cached))
            moved.append((replace(seq.progress({}), token_ids=tuple(trees.served["r0"].ids)), kv))

    trees.run([request], check=leave)
    ((progress, kv),) = moved
    assert trees.accepted > 3
    to = harness("qwen2", None).engine
    with Driver(to) as drive:
        drive.add_request(replace(request, progress=progress))
        drive.length["r0"] += len(progress.token_ids)
        drive.import_kv("r0", kv)
        assert drive.pending("r0") == 1
        drive.run()
        assert [*progress.token_ids, *drive.ids["r0"]] == plain.served["r0"].ids


def test_what_cannot_be_verified_or_drafted_is_refused(harness: Callable[..., Harness]) -> None:
    toy = Toy(random.Random(2), 1.0, {})
    run, plain = harness("qwen2", toy), harness("qwen2", None)
    assert run.engine.supports - plain.engine.supports == {"draft", "tree"}
    (request,) = asked(1)
    for one in (run, plain):
        one.engine.add(request)
    entry = Entry("r0", 0, request.prompt + 1, tuple(range(20)), True, (0,))
    with pytest.raises(ValueError, match=r"nodes \(0,\) of sequence 'r0' are to be verified, whose draft has 0"):
        run.loop.run_until_complete(run.engine.execute(Batch((entry,))))
    with pytest.raises(ValueError, match="all of them must run"):
        run.loop.run_until_complete(run.engine.execute(Batch((entry._replace(count=2),))))
    asks = entry._replace(verify=(), count=request.prompt, draft=(1, 1))
    with pytest.raises(ValueError, match="given no drafter"):
        plain.loop.run_until_complete(plain.engine.execute(Batch((asks,))))
    draft = Draft(Tree((-1, 0), (0.5, 0.5)), (1, 2))
    for nodes in ((1,), (1, 0), (0, 0)):
        with pytest.raises(ValueError, match="name each once, its parent before it"):
            Candidates.of("a", draft, nodes)
    for wrong, says in (
        (Draft(Tree((-1, 1), (0.5, 0.5)), (1, 2)), "node 1 of the draft for 'a' has parent 1"),
        (Draft(Tree((-1,), (0.5,)), (300,)), "and token 300"),
        (Draft(Tree((-1,), (0.5,)), ()), "1 parents, 1 paths and 0 tokens"),
        (Draft(Tree((-1, 0), (0.5, 0.5)), (1, 2)), "is 2 deep: at most 1"),
        (Draft(Tree((-1, 0), (0.5, 0.6)), (1, 2)), "node 1 of the draft for 'a' comes out with probability 0.6"),
        (Draft(Tree((-1,), (float("nan"),)), (1,)), "probability nan: give the product along its path, here 0 to 1.0"),
    ):
        with pytest.raises(ValueError, match=says):
            check_draft(Wanted("a", (), 1, 3), wrong, 300)


# --------------------------------------------------------------------------- the distribution of what is sampled

FEW, LONG = 4, 4  # tokens of the vocabulary, and of an output: all 256 outputs are counted
DRAWS = 4000
LIKELY = torch.randn(FEW, FEW, generator=torch.Generator().manual_seed(1)).mul(1.5).tolist()  # logits after each token
SETTINGS = {
    "plain": SAMPLED,
    "cold": replace(SAMPLED, temperature=0.6),
    "top-p": replace(SAMPLED, top_p=0.8),
    "top-k": replace(SAMPLED, top_k=3, temperature=1.3),
    "min-p": replace(SAMPLED, min_p=0.1),
    "repetition": replace(SAMPLED, repetition_penalty=1.8),
    "all": replace(SAMPLED, temperature=1.2, top_p=0.95, top_k=3, frequency_penalty=0.8, presence_penalty=0.5),
}


def next_token(tokens: Sequence[int], s: Sampling) -> list[float]:
    """The probability of each token after these, of which the first is the prompt, by the settings' definitions."""
    logits = []
    for token, x in enumerate(LIKELY[tokens[-1]]):
        if token in tokens:
            x = x / s.repetition_penalty if x > 0 else x * s.repetition_penalty
        came_out = tokens[1:].count(token)
        logits.append((x - s.frequency_penalty * came_out - s.presence_penalty * (came_out > 0)) / s.temperature)
    weights = [math.exp(x) for x in logits]
    kept = {i for i in range(FEW) if weights[i] >= s.min_p * max(weights)}
    kept = set(sorted(kept, key=lambda i: -weights[i])[: s.top_k or FEW])
    total, above = sum(weights[i] for i in kept), 0.0
    for i in sorted(kept, key=lambda i: -weights[i]):
        if above >= s.top_p * total:
            kept.remove(i)
        above += weights[i]
    total = sum(weights[i] for i in kept)
    return [weights[i] / total if i in kept else 0.0 for i in range(FEW)]


def some_draft(rng: random.Random) -> Draft:
    """A random tree, up to 3 deep, whose siblings differ; the first of them is half the time the likeliest token."""
    tree = random_tree(rng, 3, 3)
    tokens: list[int] = []
    for node, parent in enumerate(tree.parents):
        taken = {tokens[i] for i in range(node) if tree.parents[i] == parent}
        after = tokens[parent] if parent >= 0 else 0
        likeliest = LIKELY[after].index(max(LIKELY[after]))
        free = [token for token in range(FEW) if token not in taken]
        tokens.append(likeliest if likeliest in free and rng.random() < 0.5 else rng.choice(free))
    return Draft(tree, tuple(tokens))


def p_value(sampling: Sampling) -> tuple[float, Counter[int]]:
    """Of Pearson's chi-square test of DRAWS outputs, verified along random trees, against the exact probability of each
    output; outputs expected fewer than 5 times count as one. Beside it how often how many nodes were accepted."""
    rng = random.Random(4)
    depths = Counter[int]()
    table = torch.tensor(LIKELY)
    seqs = []
    for seed in range(DRAWS):
        request = Request(f"{seed}", (Stage(1, token_ids=(0,)),), 0.0, sampling=replace(sampling, seed=seed))
        seqs.append(Running(request, [b"x"] * FEW, frozenset(), [None]))
    while going := [seq for seq in seqs if seq.output < LONG]:
        drafts = [some_draft(rng) for _ in going]
        rows = [row for seq, draft in zip(going, drafts, strict=True) for row in (seq.tokens[-1], *draft.tokens)]
        candidates = {
            seq.request.id: Candidates.of(seq.request.id, draft, tuple(range(len(draft.tokens))))
            for seq, draft in zip(going, drafts, strict=True)
        }
        depths.update(len(walk.accepted) for walk in accept(table[rows], going, candidates))
    counts = Counter(tuple(seq.tokens[1 : LONG + 1]) for seq in seqs)
    exact = {(): 1.0}
    for _ in range(LONG):
        exact = {
            (*tokens, token): p * q
            for tokens, p in exact.items()
            for token, q in enumerate(next_token((0, *tokens), sampling))
        }
    if any(not exact[tokens] for tokens in counts):
        return 0.0, depths  # what cannot come out did
    common = [tokens for tokens, p in exact.items() if p * DRAWS >= 5]
    found, expected = [counts[tokens] for tokens in common], [DRAWS * exact[tokens] for tokens in common]
    if DRAWS - sum(expected) >= 5:
        found.append(DRAWS - sum(found))
        expected.append(DRAWS - sum(expected))
    statistic = sum((n - mean) ** 2 / mean for n, mean in zip(found, expected, strict=True))
    return float(chi2.sf(statistic, len(found) - 1)), depths


@pytest.mark.full
@pytest.mark.parametrize("name", SETTINGS)
def test_the_distribution_is_the_targets(name: str) -> None:
    p, depths = p_value(SETTINGS[name])
    assert p > 0.001
    assert depths[1] > 1000
    assert depths[2] > 300
    assert depths[3] > 50


def drafters_first(walk: Walk, token: int) -> int:
    """The first node offered, whatever was sampled."""
    at = walk.accepted[-1] if walk.accepted else -1
    offered = [] if walk.candidates is None else [i for i, p in enumerate(walk.candidates.parents) if p == at]
    return walk.candidates.tokens[offered[0]] if walk.candidates is not None and offered else token


def second_draw(walk: Walk, token: int) -> int:
    """Sampled anew where no node holds the token."""
    at = walk.accepted[-1] if walk.accepted else -1
    tree = walk.candidates
    offered = [] if tree is None else [t for t, p in zip(tree.tokens, tree.parents, strict=True) if p == at]
    if not offered or token in offered:
        return token
    (again,) = choose(torch.tensor([LIKELY[walk.seq.tokens[-1]]]), [walk.seq.choice])
    return again


@pytest.mark.full
@pytest.mark.parametrize("wrong", [drafters_first, second_draw, None], ids=["drafters-first", "second-draw", "row"])
@pytest.mark.parametrize("name", ["plain", "all"])
def test_wrong_acceptance_has_another_distribution(
    name: str, wrong: Callable[[Walk, int], int] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the test above would say of it. row: every token is sampled from the root's logits."""
    if wrong is None:
        monkeypatch.setattr(Walk, "row", property(lambda walk: walk.root))
    else:
        right = Walk.take
        monkeypatch.setattr(Walk, "take", lambda walk, token, likely: right(walk, wrong(walk, token), likely))
    assert p_value(SETTINGS[name])[0] < 1e-9
