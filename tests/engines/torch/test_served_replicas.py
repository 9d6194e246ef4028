"""A server that adds a replica of the embedded engine while it serves."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from rubato.config.schema import load  # noqa: E402
from rubato.core.clock import WallClock  # noqa: E402
from rubato.core.events import Event, Finished, Joined  # noqa: E402
from rubato.core.request import SLO, Request, Sampling, Stage  # noqa: E402
from rubato.serving.serve import build  # noqa: E402

ENGINE = {"kind": "torch", "dtype": "float32", "device": "cpu", "kv_gib": 0.001, "block_size": 4, "threads": 1}


def test_a_replica_joins_while_requests_miss(twin: Callable[[str], Path]) -> None:
    """No TTFT of 1 ms is met, so one more is added, up to the maximum; requests reach it, and all end once."""
    config = load(
        {
            "model": str(twin("llama")), "engine": ENGINE, "policy": "vllm", "router": "round_robin",
            "autoscale": {"kind": "attainment", "max": 2},
        }
    )  # fmt: skip

    async def main() -> list[Event]:
        _, cluster = build(config, WallClock())
        await cluster.start()
        events: list[Event] = []
        cluster.listen(events.append)
        try:
            n = 0
            while len(cluster.hosts) < 2 and n < 2000:
                stage = Stage(6, SLO(ttft=0.001), token_ids=(5, 6, 7, 8, 9, 10))
                sampling = Sampling(max_tokens=2, ignore_eos=True)
                cluster.offer(Request(f"q{n}", (stage,), cluster.clock.now(), sampling=sampling))
                n += 1
                await asyncio.sleep(0.02)
            for i in range(2):
                cluster.offer(Request(f"last{i}", (stage,), cluster.clock.now(), sampling=sampling))
            await cluster.drain()
        finally:
            await cluster.close()
        return events

    events = asyncio.run(main())
    joined = [e for e in events if isinstance(e, Joined)]
    assert [e.id for e in joined] == ["r1"]
    assert joined[0].seconds > 0.0
    ends = [e for e in events if isinstance(e, Finished)]
    assert len(ends) == len({e.id for e in ends})
    assert {e.outcome for e in ends} == {"completed"}
    assert {getattr(e, "replica", "r0") for e in events if e.id.startswith("last")} == {"r0", "r1"}
