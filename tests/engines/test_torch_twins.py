"""Tiny random models of every family give transformers' own greedy tokens: driven through a replica by random plans,
batched, in chunks, preempted, with shared prompts, with and without the prefix cache."""

import json
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from rubato.core.events import Finished, Started  # noqa: E402
from rubato.core.request import Request, Sampling, Stage  # noqa: E402
from rubato_torch.model_config import load_config  # noqa: E402
from tests.engines.conftest import TWINS  # noqa: E402
from tests.engines.torch.harness import Harness  # noqa: E402

NEW = 14
GO_ON = Sampling(max_tokens=NEW, ignore_eos=True)


def prompts_that_share(rng: random.Random) -> list[list[int]]:
    """Twelve: eight that begin like another, four of their own; 3 to 70 tokens."""

    def some(least: int, most: int) -> list[int]:
        return [rng.randrange(256) for _ in range(rng.randint(least, most))]

    prefixes = [some(24, 30), some(40, 50)]
    return [prefixes[i % 2] + some(1, 20) for i in range(8)] + [some(3, 60) for _ in range(4)]


def requests_for(prompts: Sequence[Sequence[int]]) -> list[Request]:
    """One for each prompt; three for the last one, as a group."""
    plain = [
        Request(f"p{i}", (Stage(len(ids), token_ids=tuple(ids)),), 0.0, sampling=GO_ON) for i, ids in enumerate(prompts)
    ]
    last = plain.pop()
    return plain + [Request(f"g{i}", last.stages, 0.0, sampling=GO_ON, group="g") for i in range(3)]


@pytest.mark.parametrize("family", ["Llama", "Mistral", "Qwen2", "Qwen3"])
@pytest.mark.parametrize("more", [{}, {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 3}])
def test_what_a_config_leaves_out_is_as_transformers_has_it(family: str, more: dict[str, Any], tmp_path: Path) -> None:
    raw = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 5, "num_attention_heads": 32, **more}
    theirs = getattr(transformers, f"{family}Config")(**raw)
    raw |= {"architectures": [f"{family}ForCausalLM"], "vocab_size": 300}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    ours = load_config(tmp_path)
    assert ours.kv_heads == theirs.num_key_value_heads
    assert ours.head_dim == (getattr(theirs, "head_dim", None) or 2)
    assert (ours.context, ours.norm_eps, ours.rope.theta) == (
        theirs.max_position_embeddings,
        theirs.rms_norm_eps,
        theirs.rope_theta,
    )
    all_layers = ["sliding_attention" if family == "Mistral" else "full_attention"] * 5
    kinds = getattr(theirs, "layer_types", all_layers)
    assert ours.windows == tuple(theirs.sliding_window if kind == "sliding_attention" else None for kind in kinds)
    assert (more == {}) or (ours.windows.count(7) == {"Llama": 0, "Mistral": 5}.get(family, 2))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"layer_types": ["sliding_attention"] * 3}, "sliding_attention layers and the window None"),
        ({"layer_types": ["full_attention"] * 2}, "for each of its 3 layers"),
        ({"use_sliding_window": True, "sliding_window": 0, "layer_types": None, "max_window_layers": 0}, "window 0"),
    ],
)
def test_impossible_windows_are_refused(
    change: dict[str, Any], words: str, twin: Callable[[str], Path], tmp_path: Path
) -> None:
    raw = json.loads((twin("qwen2") / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**raw, **change}))
    with pytest.raises(ValueError, match=words):
        load_config(tmp_path)


@pytest.mark.parametrize("name", TWINS)
def test_greedy_tokens_are_transformers_own(
    name: str,
    twin: Callable[[str], Path],
    reference: Callable[[Path, Sequence[Sequence[int]], Sequence[Sequence[int]]], list[list[int]]],
    harness: Callable[..., Harness],
) -> None:
    prompts = prompts_that_share(random.Random(name))
    cached, again, greedy = {}, {}, dict[str, list[int]]()
    for cache in (False, True):
        run = harness(name, None, cache=cache)
        run.run(requests_for(prompts), preempt=0.3)
        ids = {id: one.ids for id, one in run.served.items()}
        said = [ids[f"p{i}"] for i in range(len(prompts) - 1)] + [ids["g0"]]
        if not cache:
            assert said == reference(twin(name), prompts, said)
            assert {len(own) for own in said} == {NEW}
            assert len({tuple(own) for own in said}) > 6  # the model's output depends on the prompt
            greedy = ids
        assert ids == greedy
        assert ids["g1"] == ids["g2"] == ids["g0"]
        ends = {e.id: (e.outcome, e.reason) for e in run.events if isinstance(e, Finished)}
        assert ends == dict.fromkeys(ids, ("completed", "length"))
        assert run.preempted >= 5
        assert run.largest >= 4
        starts = [e for e in run.events if isinstance(e, Started)]
        cached[cache] = sum(e.cached for e in starts if not e.resumed and e.id.startswith("p"))
        again[cache] = sum(e.cached for e in starts if e.resumed)
        assert sum(e.cached for e in starts if not e.resumed and e.id.startswith("g")) > 0
    assert cached[False] == 0
    assert cached[True] >= 100  # of about 500 prompt tokens, 280 of them in the two prefixes
    assert again[True] > again[False]
