"""A torch engine of a tiny random model behind a replica, for tests that verify what is drafted."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from rubato_torch import Engine  # noqa: E402
from rubato_torch.drafters import Drafter  # noqa: E402
from rubato_torch.model import bytes_per_token  # noqa: E402
from rubato_torch.model_config import load_config  # noqa: E402
from tests.engines.driver import started_behind_replica  # noqa: E402
from tests.engines.torch.harness import BLOCK, BLOCKS, Harness  # noqa: E402


@pytest.fixture
def harness(twin: Callable[[str], Path]) -> Iterator[Callable[..., Harness]]:
    """Builds a harness on a twin: `harness("qwen3", drafter, seed)`."""
    made: list[Harness] = []

    def build(
        name: str,
        drafter: Drafter | None,
        seed: int = 1,
        *,
        cache: bool = False,
        dtype: str = "float32",
        block: int = BLOCK,
    ) -> Harness:
        per_block = block * bytes_per_token(load_config(twin(name)), getattr(torch, dtype))
        size = BLOCKS * BLOCK // block * per_block / 2**30
        engine = Engine(twin(name), dtype=dtype, device="cpu", block_size=block, kv_gib=size, drafter=drafter)
        replica, loop = started_behind_replica(engine, cache)
        made.append(Harness(engine, replica, loop, random.Random(seed)))
        return made[-1]

    yield build
    for one in made:
        one.loop.run_until_complete(one.engine.close())
        one.loop.close()
