"""Prefill on one torch engine, decode on another: hand-off, KV and all, through the cluster on the wall clock."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from rubato.fleet.cluster_options import ClusterOptions, PolicyChoice

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from rubato.core.clock import WallClock, run_strict  # noqa: E402
from rubato.core.events import Assigned, Event, Finished, Stepped, Tokens, Transferred  # noqa: E402
from rubato.core.request import SLO, Request, Sampling, Stage  # noqa: E402
from rubato.fleet.build import local_cluster  # noqa: E402
from rubato.latency import affine  # noqa: E402
from rubato_torch import Engine  # noqa: E402

NONE = SLO()
PROMPTS = {"a": 45, "b": 7, "c": 33}


def serve(
    model: Path, policy: str, blocks: Sequence[int], slo: SLO = NONE, **router_settings: object
) -> list[Event]:  # fmt: skip
    """All events of serving the prompts, greedily, on engines of these block sizes."""
    events: list[Event] = []

    async def main() -> None:
        clock = WallClock()
        engines = [Engine(model, dtype="float32", device="cpu", kv_gib=0.002, block_size=block) for block in blocks]
        options = ClusterOptions(PolicyChoice(policy, router_settings=router_settings))
        cluster = local_cluster(engines, [affine.Model() for _ in engines], clock, options)
        cluster.listen(events.append)
        await cluster.start()
        for id, length in PROMPTS.items():
            ids = tuple((7 * i * i + 3 * length) % 256 for i in range(length))
            sampling = Sampling(max_tokens=12, ignore_eos=True)
            cluster.offer(Request(id, (Stage(length, slo, token_ids=ids),), clock.now(), sampling=sampling))
        await asyncio.wait_for(cluster.drain(), 60)
        for host in cluster.hosts.values():
            await host.drain()
            assert host.view().kv_free == host.view().kv_total
        await cluster.close()

    run_strict(main())
    return events


def tokens(events: Sequence[Event]) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {id: [] for id in PROMPTS}
    for event in events:
        if isinstance(event, Tokens):
            found[event.id] += event.token_ids
    return found


def test_a_sequence_prefilled_here_goes_on_there(twin: Callable[[str], Path]) -> None:
    alone = serve(twin("llama"), "vllm", [16])
    moved = serve(twin("llama"), "distserve", [4, 16])
    assert tokens(moved) == tokens(alone)
    assert {len(ids) for ids in tokens(moved).values()} == {12}
    transfers = {e.id: (e.source, e.replica, e.tokens) for e in moved if isinstance(e, Transferred)}
    assert transfers == {id: ("r0", "r1", length) for id, length in PROMPTS.items()}
    assert all(e.size > 0 for e in moved if isinstance(e, Transferred))
    assert {e.outcome for e in moved if isinstance(e, Finished)} == {"completed"}
    prefilled = sum(e.shape.tokens for e in moved if isinstance(e, Stepped) and e.id == "r0")
    decoded = sum(e.shape.tokens for e in moved if isinstance(e, Stepped) and e.id == "r1")
    assert (prefilled, decoded) == (sum(PROMPTS.values()), 3 * 11)


def test_polyserve_gives_replicas_to_prompts_and_decodes_as_it_serves(twin: Callable[[str], Path]) -> None:
    alone = serve(twin("llama"), "vllm", [16])
    apart = serve(twin("llama"), "polyserve", [16, 16], SLO(ttft=60.0, tpot=10.0), mode="pd", tiers=[10.0])
    assert tokens(apart) == tokens(alone)
    assert {e.id for e in apart if isinstance(e, Transferred)} == set(PROMPTS)
    assert {e.role.phase for e in apart if isinstance(e, Assigned)} >= {"prefill", "decode"}
    assert {e.outcome for e in apart if isinstance(e, Finished)} == {"completed"}


def test_low_and_high_priority_engines_say_the_same(twin: Callable[[str], Path]) -> None:
    served = serve(twin("llama"), "ascendra", [4, 16])
    assert tokens(served) == tokens(serve(twin("llama"), "vllm", [16]))
    assert {e.id for e in served if isinstance(e, Stepped)} == {"r0", "r1"}
