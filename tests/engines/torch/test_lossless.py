"""Greedy output of the bundled model in float32, token for token the same with verified trees as one at a time without:
50 prompts in mixed batches, KV so scarce that sequences lose theirs."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from rubato.core.interfaces import View  # noqa: E402
from rubato.core.plan import Plan  # noqa: E402
from rubato.core.request import Request, Sampling  # noqa: E402
from rubato.policy_kit.batch_builder import BatchBuilder, admit_in_order, run_in_order  # noqa: E402
from rubato_torch import Engine, bundled_model  # noqa: E402
from rubato_torch.drafters import Drafter  # noqa: E402
from rubato_torch.drafters.suffix import SuffixDrafter  # noqa: E402
from rubato_torch.model import bytes_per_token  # noqa: E402
from rubato_torch.model_config import load_config  # noqa: E402
from rubato_torch.model_drafter import ModelDrafter  # noqa: E402
from tests.engines.driver import Driver, started_behind_replica  # noqa: E402
from tests.engines.torch.harness import DEEP, WIDE, Harness, Toy, mixed_requests, some_nodes  # noqa: E402

PROMPTS, NEW = 50, 48
BLOCK, BLOCKS = 16, 64
BUDGET = 160  # tokens of a step
Truth = dict[str, list[int]]  # all tokens of each sequence in the end

pytestmark = pytest.mark.full


@dataclass(frozen=True)
class Alone:
    """What each request gives when it runs by itself."""

    folder: Path
    requests: tuple[Request, ...]
    tokens: Truth


def engine(folder: Path, drafter: Drafter | None = None) -> Engine:
    gib = BLOCKS * BLOCK * bytes_per_token(load_config(folder), torch.float32) / 2**30
    return Engine(folder, dtype="float32", device="cpu", kv_gib=gib, block_size=BLOCK, drafter=drafter)


@pytest.fixture(scope="module")
def alone() -> Alone:
    try:
        folder = bundled_model.ensure()
    except RuntimeError as error:
        pytest.skip(f"the bundled model is not here: {error}")
    tokens = {}
    with Driver(engine(folder)) as drive:
        sampling = Sampling(max_tokens=NEW, ignore_eos=True)
        requests = tuple(mixed_requests(drive.engine.text, PROMPTS, sampling))  # type: ignore[attr-defined]
        for request in requests:
            drive.add_request(request)
            drive.run()
            tokens[request.id] = [*request.stages[0].token_ids, *drive.ids[request.id]]
    return Alone(folder, requests, tokens)


def planned(view: View, rng: random.Random) -> Plan:
    """vLLM's rule, which preempts the sequence started last, with random parts of all trees."""
    builder = BatchBuilder(view, BUDGET)
    drafts = (rng.randint(1, DEEP), rng.randint(1, WIDE))
    decodes_first = sorted(view.running, key=lambda seq: seq.pending > 1)
    run_in_order(builder, decodes_first, lambda seq: some_nodes(rng, seq.draft), drafts)
    admit_in_order(builder, view.waiting, drafts)
    return builder.plan()._replace(wake_at=view.now + 1.0)


@pytest.mark.parametrize(
    ("drafter", "accepted"),
    [
        pytest.param(lambda truth: SuffixDrafter(), 200, id="suffix"),
        pytest.param(lambda truth: Toy(random.Random(3), 0.9, truth), 800, id="knows-the-output"),
        pytest.param(lambda truth: ModelDrafter(layers=list(range(30))), 800, id="the-target-as-draft-model"),
    ],
)
def test_greedy_output_is_that_of_each_alone(drafter: Callable[[Truth], Drafter], accepted: int, alone: Alone) -> None:
    with_trees = engine(alone.folder, drafter(alone.tokens))
    replica, loop = started_behind_replica(with_trees, False)
    run = Harness(with_trees, replica, loop, random.Random(1), planner=planned)
    try:
        run.run(alone.requests)
    finally:
        loop.run_until_complete(with_trees.close())
        loop.close()
    print(f"{run.steps} steps, {run.preempted} preemptions, {run.branched} trees, {run.accepted} accepted")
    for request in alone.requests:
        assert run.served[request.id].ids == alone.tokens[request.id][request.prompt :], request.id
    assert run.preempted > 10
    assert run.branched > 100
    assert run.together > 10
    assert run.accepted > accepted
