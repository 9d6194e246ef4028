"""A step that runs out of memory: its requests fail with the error, and the engine serves the next as a fresh one."""

from __future__ import annotations

import asyncio
import weakref
from pathlib import Path
from typing import Any

import pytest

from rubato.core.replica_options import ReplicaOptions
from rubato.fleet.cluster_options import ClusterOptions, PolicyChoice

torch = pytest.importorskip("torch")

from rubato.core.clock import WallClock  # noqa: E402
from rubato.core.events import Event, Finished, Tokens  # noqa: E402
from rubato.core.request import Request, Sampling, Stage  # noqa: E402
from rubato.fleet.build import local_cluster  # noqa: E402
from rubato.latency import affine  # noqa: E402
from rubato_torch import Engine  # noqa: E402

HANG = 60.0  # seconds, generous


def request(id: str, first: int, most: int = 8) -> Request:
    stage = Stage(30, token_ids=tuple(range(first, first + 30)))
    return Request(id, (stage,), 0.0, sampling=Sampling(max_tokens=most, ignore_eos=True))


async def served(engine: Engine, breaks: Any) -> tuple[dict[str, list[int]], dict[str, Finished]]:
    """`a` and `b`, in the midst of which `breaks` is called, and then `c`, with nothing beside it."""
    ids: dict[str, list[int]] = {}
    ends: dict[str, Finished] = {}
    ended = {id: asyncio.Event() for id in "abc"}
    options = ClusterOptions(PolicyChoice("vllm"), ReplicaOptions(prefix_cache=True))
    cluster = local_cluster([engine], [affine.Model()], WallClock(), options)

    def told(event: Event) -> None:
        if isinstance(event, Tokens):
            ids.setdefault(event.id, []).extend(event.token_ids)
            if event.id == "a" and len(ids["a"]) == 3:
                breaks()
        elif isinstance(event, Finished):
            ends[event.id] = event
            ended[event.id].set()

    cluster.listen(told)
    await cluster.start()
    for together in ([request("a", 1000), request("b", 2000)], [request("c", 1000)]):
        for each in together:
            cluster.offer(each)
        await asyncio.gather(*(ended[each.id].wait() for each in together))
    await cluster.drain()
    await cluster.hosts["r0"].drain()
    view = cluster.hosts["r0"].view()
    assert (view.kv_free, view.in_flight.tokens) == (view.kv_total, 0)
    await cluster.close()
    return ids, ends


@pytest.mark.parametrize("error", [MemoryError("no more"), torch.OutOfMemoryError("CUDA out of memory")])
@pytest.mark.parametrize("where", ["pack", "forward", "in the last product"])
def test_a_step_out_of_memory_fails_its_requests_and_no_other(tiny_folder: Path, where: str, error: Exception) -> None:
    engine = Engine(tiny_folder, dtype="float32", device="cpu", kv_gib=0.01)

    allocated: list[weakref.ref[Any]] = []
    free: list[bool] = []

    def breaks() -> None:
        model: Any = engine._model

        def raises(*given: object, **more: object) -> object:
            activations = torch.empty(1 << 20)
            allocated.append(weakref.ref(activations))
            setattr(model, name, real)
            if where == "in the last product":  # all of this step's KV is written, and spoilt
                real(*given, **more)
                model.kv.fill_(float("nan"))
            raise type(error)(*error.args)

        def warm_up() -> None:
            free.append(allocated[0]() is None)
            warm()

        warm, model.warm_up = model.warm_up, warm_up
        name = "pack" if where == "pack" else "forward"
        real = getattr(model, name)
        setattr(model, name, raises)

    async def main() -> tuple[dict[str, list[int]], dict[str, Finished]]:
        return await asyncio.wait_for(served(engine, breaks), HANG)

    ids, ends = asyncio.run(main())
    said = f"{type(error).__name__}: {error}"
    assert {id: (e.outcome, e.reason) for id, e in ends.items() if id != "c"} == dict.fromkeys("ab", ("failed", said))
    assert ends["c"].outcome == "completed"
    fresh = Engine(tiny_folder, dtype="float32", device="cpu", kv_gib=0.01)
    alone, _ = asyncio.run(asyncio.wait_for(served(fresh, lambda: None), HANG))
    assert ids["c"] == alone["a"]
    assert ids["a"] == alone["a"][: len(ids["a"])]
    assert engine._seqs == {}
    assert free == [True]  # what the failed step had allocated, as the engine began afresh
