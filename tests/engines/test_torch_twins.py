"""Tiny random models of every family give transformers' own greedy tokens: driven through a replica by random plans,
batched, in chunks, preempted, with shared prompts, with and without the prefix cache."""

import asyncio
import json
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.kit import integrity

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from rubato.core.events import Event, Finished, Preempted, Started, Tokens  # noqa: E402
from rubato.core.interfaces import SeqView, View  # noqa: E402
from rubato.core.plan import (  # noqa: E402
    Plan,
    Work,
    blocks_for,
)
from rubato.core.request import Request, Sampling, Stage  # noqa: E402
from rubato.replica.replica import Replica  # noqa: E402
from rubato_torch import Engine  # noqa: E402
from rubato_torch.model import bytes_per_token  # noqa: E402
from rubato_torch.model_config import load_config  # noqa: E402
from tests.engines.conftest import TWINS  # noqa: E402
from tests.engines.driver import started_behind_replica  # noqa: E402

BLOCK, BLOCKS = 4, 64
NEW = 14
GO_ON = Sampling(max_tokens=NEW, ignore_eos=True)


@dataclass
class Harness:
    """An engine behind a replica, and what the replica's events say. `waves`: requests by the step they arrive at."""

    engine: Engine
    replica: Replica
    loop: asyncio.AbstractEventLoop
    rng: random.Random
    ids: dict[str, list[int]] = field(default_factory=dict)
    cached: dict[str, int] = field(default_factory=dict)  # when it first started
    again: int = 0  # cached tokens of those that started again
    preempted: int = 0
    together: int = 0  # the most sequences in one batch
    finished: set[str] = field(default_factory=set)

    def run(self, waves: Sequence[Sequence[Request]], preempt: float) -> None:
        """Random plans until all have ended."""
        step = 0
        waiting = list(waves)
        while waiting or not self.replica.empty:
            if waiting and (step % 6 == 0 or self.replica.empty):
                for request in waiting.pop(0):
                    self.engine.add(request)
                    self.ids[request.id] = []
                    self._note(self.replica.submit(request, float(step)))
            step += 1
            assert step < 2000
            self._step(float(step), preempt)
        integrity.check(self.replica)
        assert self.replica.kv.free == self.replica.kv.total

    def _step(self, now: float, preempt: float) -> None:
        plan = random_plan(self.replica.view(now), self.rng, preempt)
        batch, events = self.replica.apply(plan, now, "random")
        self._note(events)
        if batch.entries:
            self.together = max(self.together, len(batch.entries))
            result = self.loop.run_until_complete(self.engine.execute(batch))
            self._note(self.replica.commit(batch, result, now))
        self.engine.forget(self.replica.take_gone_ids())

    def _note(self, events: Sequence[Event]) -> None:
        for event in events:
            match event:
                case Tokens():
                    self.ids[event.id] += event.token_ids
                case Started():
                    if event.resumed:
                        self.again += event.cached
                    else:
                        self.cached[event.id] = event.cached
                case Preempted():
                    self.preempted += 1
                case Finished():
                    assert (event.outcome, event.reason) == ("completed", "length")
                    self.finished.add(event.id)


def random_plan(view: View, rng: random.Random, preempt: float) -> Plan:
    """Each sequence with probability 0.8, chunks of random sizes, as far as KV goes; where nothing fits, or at random,
    one loses its KV."""
    gone: list[str] = []
    if view.running and rng.random() < preempt:
        gone.append(rng.choice(view.running).id)
    seqs: list[SeqView] = [s for s in (*view.running, *view.waiting) if s.id not in gone]
    rng.shuffle(seqs)
    free, work = view.kv_free, []
    for seq in seqs:
        tokens = min(seq.pending, rng.choice((1, 3, 8, 50)))
        need = max(0, blocks_for(seq.cached + tokens, BLOCK) - seq.blocks)
        if need <= free and rng.random() < 0.8:
            work.append(Work(seq.id, tokens))
            free -= need
    if not work and not gone:
        gone = [rng.choice(view.running).id] if view.running else []
    return Plan(tuple(work), tuple(gone), wake_at=view.now + 1.0)


@pytest.fixture
def harness(twin: Callable[[str], Path]) -> Any:
    """Builds a harness, and closes what it built."""
    made: list[Harness] = []

    def build(name: str, cache: bool, seed: int) -> Harness:
        per_block = BLOCK * bytes_per_token(load_config(twin(name)), torch.float32)
        engine = Engine(twin(name), dtype="float32", device="cpu", block_size=BLOCK, kv_gib=BLOCKS * per_block / 2**30)
        assert engine.limits.kv_blocks == BLOCKS
        replica, loop = started_behind_replica(engine, cache)
        made.append(Harness(engine, replica, loop, random.Random(seed)))
        return made[-1]

    yield build
    for harness in made:
        harness.loop.run_until_complete(harness.engine.close())
        harness.loop.close()


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
    harness: Callable[[str, bool, int], Harness],
) -> None:
    prompts = prompts_that_share(random.Random(name))
    requests = requests_for(prompts)
    cached, again, greedy = {}, {}, dict[str, list[int]]()
    for cache in (False, True):
        run = harness(name, cache, 1)
        run.run([requests[:3], requests[3:8], requests[8:]], preempt=0.12)
        said = [run.ids[f"p{i}"] for i in range(len(prompts) - 1)] + [run.ids["g0"]]
        if not cache:
            assert said == reference(twin(name), prompts, said)
            assert {len(ids) for ids in said} == {NEW}
            assert len({tuple(ids) for ids in said}) > 6  # the model's output depends on the prompt
            greedy = run.ids
        assert run.ids == greedy
        assert run.ids["g1"] == run.ids["g2"] == run.ids["g0"]
        assert run.finished == set(run.ids)
        assert run.preempted >= 5
        assert run.together >= 4
        cached[cache] = sum(tokens for id, tokens in run.cached.items() if id.startswith("p"))
        again[cache] = run.again
        assert sum(tokens for id, tokens in run.cached.items() if id.startswith("g")) > 0
    assert cached[False] == 0
    assert cached[True] >= 100  # of about 500 prompt tokens, 280 of them in the two prefixes
    assert again[True] > again[False]
