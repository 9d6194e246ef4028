"""A model as drafter: outputs stay those without drafts, trees are what beam search over that model gives, and its KV
follows the sequences and stays within its blocks."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from rubato.config.build import engine_of, token_drafter_of  # noqa: E402
from rubato.config.schema import ConfigError, load  # noqa: E402
from rubato.core.clock import VirtualClock  # noqa: E402
from rubato.core.interfaces import View  # noqa: E402
from rubato.core.plan import Plan, Tree  # noqa: E402
from rubato.policy_kit.batch_builder import BatchBuilder, admit_in_order, run_in_order  # noqa: E402
from rubato_torch import Engine, model_drafter  # noqa: E402
from rubato_torch.cpu import llvm_jit  # noqa: E402
from rubato_torch.drafters import Draft, Wanted  # noqa: E402
from rubato_torch.model_drafter import ModelDrafter  # noqa: E402
from rubato_torch.tokenizer import vocabulary  # noqa: E402
from tests.engines.driver import Driver  # noqa: E402
from tests.engines.torch.harness import GO_ON, NEW, Harness, asked  # noqa: E402

HALF = 0.0005  # GiB of KV of a twin: far more than these tests fill


def same(plain: Harness, drafted: Harness) -> None:
    for id, one in plain.served.items():
        other = drafted.served[id]
        assert (other.ids, other.text, other.stages, other.reason) == (one.ids, one.text, one.stages, one.reason)


def all_of(depth: int, width: int) -> Callable[[View, random.Random], Plan]:
    """Drafts trees of this size for all, and verifies the whole of them."""

    def planned(view: View, rng: random.Random) -> Plan:
        builder = BatchBuilder(view, 200)
        run_in_order(
            builder, view.running, lambda seq: range(len(seq.draft.parents)) if seq.draft else (), (depth, width)
        )
        admit_in_order(builder, view.waiting, (depth, width))
        return builder.plan()._replace(wake_at=view.now + 1.0)

    return planned


@pytest.mark.parametrize("name", ["llama-linear", "mistral", "qwen3-mixed"])
@pytest.mark.parametrize("layers", [[0, 2], [0, 1, 2]], ids=["two", "all"])
def test_greedy_output_is_the_same(name: str, layers: list[int], harness: Callable[..., Harness]) -> None:
    """Chains and trees of random sizes, in part verified; sequences lose their KV, and find parts of it again; windows
    shorter than the prompts. All of the target's layers are the target: what they draft is accepted."""
    plain = harness(name, None)
    plain.run(asked(7))
    drafter = ModelDrafter(layers=layers)
    drafted = harness(name, drafter, cache=True)
    drafted.run(asked(7), 0.05)
    same(plain, drafted)
    assert drafted.branched > 15
    assert drafted.preempted > 0
    assert drafted.together > 1
    assert drafted.accepted > 40 or layers == [0, 2]
    assert drafted.steps < (0.8 if len(layers) == 3 else 1.2) * plain.steps
    drafted.engine._forget_drafts()
    assert not drafter._seqs
    assert len(drafter._free) == len(set(drafter._free)) == drafter._model.kv.shape[1]  # type: ignore[union-attr]


@pytest.mark.parametrize("size", [(4, 1), (3, 3)], ids=["chain", "tree"])
def test_a_drafter_that_is_the_target_is_always_right(
    size: tuple[int, int], twin: Callable[[str], Path], harness: Callable[..., Harness]
) -> None:
    """Greedy decoding takes the likeliest chain, in float32 by both to the last bit but for the order of sums."""
    plain = harness("qwen2", None)
    plain.run(asked(5))
    drafted = harness("qwen2", ModelDrafter(checkpoint=twin("qwen2")))
    drafted.planner = all_of(*size)
    drafted.run(asked(5))
    same(plain, drafted)
    # a tree can lack the greedy path where other paths are likelier; a chain cannot
    tokens = sum(len(one.ids) for one in drafted.served.values())
    whole = 5 * (NEW - 1 - -(-(NEW - 1) // (size[0] + 1)))  # all steps but the prompt's bring depth + 1 tokens
    assert (drafted.accepted == whole) if size[1] == 1 else (drafted.accepted > 0.5 * tokens)


@pytest.mark.skipif(not llvm_jit.available(), reason="no LLVM kernels on this platform")
def test_with_the_kernels_it_is_nearly_always_right(harness: Callable[..., Harness]) -> None:
    """In bfloat16 on a CPU, where a tree's layers are read by PyTorch from KV that the kernels lay out: a chain's
    tokens are all but those of ties."""
    for size, least in (((4, 1), 0.9), ((3, 3), 0.6)):
        drafter = ModelDrafter(layers=[0, 1, 2])
        drafted = harness("qwen3-mixed", drafter, dtype="bfloat16", block=16)
        assert drafter._model is not None
        assert drafter._model.native is not None
        drafted.planner = all_of(*size)
        drafted.run(asked(5))
        depth = size[0]
        assert drafted.accepted > least * 5 * (NEW - 1 - -(-(NEW - 1) // (depth + 1)))


@pytest.mark.parametrize(
    "sampling",
    [
        replace(GO_ON, temperature=1.0, seed=11, top_p=0.9),
        replace(GO_ON, frequency_penalty=1.5, repetition_penalty=1.2),
        replace(GO_ON, stop=("a", "e", "~"), stop_ids=(7,)),
    ],
    ids=["seeded", "penalties", "stops"],
)
def test_sampled_and_stopped_outputs_are_the_same(sampling: Any, harness: Callable[..., Harness]) -> None:
    plain = harness("llama", None)
    plain.run(asked(5, sampling))
    drafted = harness("llama", ModelDrafter(layers=[0, 1, 2]))
    drafted.run(asked(5, sampling), 0.03)
    same(plain, drafted)
    assert drafted.accepted > 5


def test_a_cancelled_request_leaves_nothing(harness: Callable[..., Harness]) -> None:
    plain = harness("llama", None)
    plain.run(asked(3))
    drafter = ModelDrafter(layers=[0, 1, 2])
    drafted = harness("llama", drafter)
    drafted.run(asked(3), cancel="r1")
    assert drafted.served["r0"].ids == plain.served["r0"].ids
    assert drafted.served["r1"].ids == plain.served["r1"].ids[: len(drafted.served["r1"].ids)]
    drafted.engine._forget_drafts()
    assert not drafter._seqs


def reference_beam(reference: Any, tokens: Sequence[int], depth: int, width: int) -> Draft:
    """Beam search by one pass of transformers' model over each path, alone."""
    parents: list[int] = []
    ids: list[int] = []
    paths: list[float] = []
    layer: list[tuple[int, float, list[int]]] = [(-1, 1.0, list(tokens))]
    for _ in range(depth):
        found = []
        for node, path, text in layer:
            steps = reference(torch.tensor([text])).logits[0, -1].double().softmax(-1)
            found += [(path * float(p), node, id, text) for id, p in enumerate(steps)]
        found.sort(key=lambda one: -one[0])
        layer = []
        for path, node, id, text in found[:width]:
            layer.append((len(parents), path, [*text, id]))
            parents.append(node)
            ids.append(id)
            paths.append(path)
    return Draft(Tree(tuple(parents), tuple(paths)), tuple(ids))


@pytest.mark.parametrize("name", ["llama", "qwen3-mixed"])
@torch.inference_mode()
def test_trees_are_those_of_beam_search_one_path_at_a_time(name: str, twin: Callable[[str], Path]) -> None:
    """Several sequences at once, of other lengths, depths and widths, before and after tokens come out; block borders
    and windows fall inside the trees."""
    reference = transformers.AutoModelForCausalLM.from_pretrained(twin(name), dtype=torch.float32).eval()
    drafter = ModelDrafter(checkpoint=twin(name))
    rng = random.Random(3)
    texts = {f"s{i}": [rng.randrange(256) for _ in range(5 + 9 * i)] for i in range(4)}
    with Driver(Engine(twin(name), dtype="float32", device="cpu", kv_gib=HALF, block_size=4, drafter=drafter)):
        for _ in range(3):
            wanted = [Wanted(id, text, rng.randint(1, 4), rng.randint(1, 4)) for id, text in texts.items()]
            for want, draft in zip(wanted, drafter.draft(wanted), strict=True):
                true = reference_beam(reference, want.tokens, want.depth, want.width)
                assert (draft.tree.parents, draft.tokens) == (true.tree.parents, true.tokens)
                assert draft.tree.paths == pytest.approx(true.tree.paths, rel=1e-3)
                texts[want.seq] = [
                    *want.tokens,
                    draft.tokens[0],
                    *(rng.randrange(256) for _ in range(rng.randint(0, 3))),
                ]
            rng.shuffle(wanted)


def started(folder: Path, drafter: ModelDrafter, **settings: Any) -> Driver:
    settings = {"dtype": "float32", "device": "cpu", "kv_gib": HALF, "block_size": 4, **settings}
    return Driver(Engine(folder, drafter=drafter, **settings))


def test_prompts_are_read_in_chunks(twin: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """No step runs more of prompts than a chunk, and decodes draft meanwhile."""
    monkeypatch.setattr(model_drafter, "CHUNK", 20)
    drafter = ModelDrafter(layers=[0, 2])
    with started(twin("llama"), drafter):
        long = [Wanted(id, list(range(50)), 3, 2) for id in ("a", "b")]
        short = Wanted("c", [1, 2, 3], 3, 2)
        drafted = []
        for step in range(6):
            drafts = drafter.draft([*long, short._replace(tokens=[1, 2, 3, *range(step)])])
            drafted.append([len(draft.tokens) for draft in drafts])
        read = [[0, 0, 6], [0, 0, 6], [6, 0, 6], [6, 0, 6], [6, 6, 6], [6, 6, 6]]
        assert drafted == read


def test_memory_is_bounded(twin: Callable[[str], Path]) -> None:
    """With blocks for two sequences the one that drafted longest ago loses its KV, and is read again; one that lacks
    blocks beside the others of a step has no draft."""
    drafter = ModelDrafter(layers=[0, 1, 2])
    texts = {id: [ord(c) for c in id * 40] for id in "abc"}
    with started(twin("llama"), drafter, max_num_seqs=1) as drive:
        fresh = [drafter.draft([Wanted(id, text, 2, 2)]) for id, text in texts.items()]
        total = drive.engine.limits.kv_blocks + model_drafter.SPARE
        for id in "abc":
            drafter.forget(id)
        drafter._free = drafter._free[:22]
        assert total > 22
        for _ in range(2):
            assert [drafter.draft([Wanted(id, text, 2, 2)]) for id, text in texts.items()] == fresh
            assert list(drafter._seqs) == ["b", "c"]
        together = drafter.draft([Wanted(id, text, 2, 2) for id, text in texts.items()])
        assert sorted(len(draft.tokens) for draft in together) == [0, 4, 4]


def test_what_is_longer_than_its_context_has_no_draft(twin: Callable[[str], Path], tmp_path: Path) -> None:
    folder = changed(twin("llama"), tmp_path, max_position_embeddings=16)
    drafter = ModelDrafter(checkpoint=folder)
    with started(twin("llama"), drafter):
        drafts = [drafter.draft([Wanted("a", list(range(n)), 3, 1)])[0] for n in (13, 14, 15, 16, 17)]
        assert [len(draft.tokens) for draft in drafts] == [3, 3, 2, 1, 0]


def test_it_learns_how_often_steps_are_right(twin: Callable[[str], Path]) -> None:
    """A model that is sure and wrong is not believed for long; before that its softmax stands."""
    drafter = ModelDrafter(layers=[0, 2])
    with started(twin("llama"), drafter):
        (first,) = drafter.draft([Wanted("a", [1, 2, 3], 2, 1)])
        draft = first
        for _ in range(400):
            drafter.verified("a", draft, [0], [])
            (draft,) = drafter.draft([Wanted("a", [1, 2, 3], 2, 1)])
        assert draft.tokens == first.tokens
        assert draft.tree.paths[0] < 0.6 * first.tree.paths[0]


def changed(folder: Path, to: Path, **settings: Any) -> Path:
    """A copy of a model with other settings, without weights for these."""
    made = to / "changed"
    shutil.copytree(folder, made)
    config = json.loads((made / "config.json").read_text())
    (made / "config.json").write_text(json.dumps({**config, **settings}))
    return made


def test_settings_that_cannot_be_are_refused(twin: Callable[[str], Path], tmp_path: Path) -> None:
    def built(**drafter: Any) -> object:
        engine = {"kind": "torch", "dtype": "float32", "device": "cpu", "kv_gib": HALF}
        config = load({"model": str(twin("llama")), "engine": {**engine, "drafter": {"name": "model", **drafter}}})
        return engine_of(config, VirtualClock(), 0)

    assert isinstance(built(layers=[0, 2]), Engine)
    for settings, words in (
        ({}, "give one of the two"),
        ({"layers": [0], "checkpoint": str(twin("qwen2"))}, "give one of the two"),
        ({"layers": [0, 3]}, r"layers \[3\] are not the target's, which has 0 to 2"),
        ({"layers": []}, "list of whole numbers"),
        ({"layers": "first"}, "list of whole numbers"),
        ({"depth": 3}, "no setting 'depth'"),
    ):
        with pytest.raises(ConfigError, match=words):
            built(**settings)
    other = changed(twin("llama"), tmp_path, vocab_size=200)
    (other / "tokenizer.json").unlink()
    with pytest.raises(ConfigError, match="vocabulary of 200 tokens, the target one of 300"):
        built(checkpoint=str(other))
    with pytest.raises((ConfigError, FileNotFoundError), match="no config"):
        built(checkpoint=str(tmp_path / "none"))
    assert isinstance(
        token_drafter_of(load({"engine": {"kind": "torch", "drafter": {"name": "model", "layers": [0]}}})), ModelDrafter
    )


def test_a_vocabulary_is_compared_by_its_tokens(twin: Callable[[str], Path], tmp_path: Path) -> None:
    """Padding may differ; tokens may not."""
    padded = changed(twin("llama"), tmp_path, vocab_size=320)
    ModelDrafter(checkpoint=padded).attach(*target_of(twin("llama")))
    words = json.loads((padded / "tokenizer.json").read_text())
    vocab = words["model"]["vocab"]
    first, second = sorted(vocab)[:2]
    vocab[first], vocab[second] = vocab[second], vocab[first]
    (padded / "tokenizer.json").write_text(json.dumps(words))
    with pytest.raises(ValueError, match=f"{len(vocabulary(padded))} tokens, of which 256 agree"):
        ModelDrafter(checkpoint=padded).attach(*target_of(twin("llama")))


def target_of(folder: Path) -> tuple[Any, Path, Any]:
    engine = Engine(folder, dtype="float32", device="cpu", kv_gib=HALF)
    return engine._config, folder, engine.limits
