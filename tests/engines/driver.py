"""Drive an engine by hand, one batch at a time, without scheduler or replica; or start one behind a replica."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

from rubato.core.interfaces import Engine
from rubato.core.plan import KV, Batch, Emitted, Entry, StepResult
from rubato.core.replica_options import ReplicaOptions
from rubato.core.request import Request, Sampling, Stage
from rubato.latency import affine
from rubato.replica.replica import Replica


def started_behind_replica(engine: Any, cache: bool) -> tuple[Replica, asyncio.AbstractEventLoop]:
    """A torch engine, started on a loop of its own, with something in all its KV: nothing may depend on KV not its own.
    cache: whether the replica has a prefix cache."""
    import torch

    loop = asyncio.new_event_loop()
    loop.run_until_complete(engine.start())
    with torch.inference_mode():
        engine._model.kv.uniform_(-50, 50)
    options = ReplicaOptions(prefix_cache=cache)
    return Replica("r", engine.limits, affine.Model(), options, supports=engine.supports), loop


class Driver:
    """Owns an event loop, the free blocks and how far each sequence is. `with Driver(engine) as drive:` starts and
    closes the engine; `drive.add`, then `drive.step({"a": 5, "b": 1})` runs so many pending tokens of each."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.loop = asyncio.new_event_loop()
        self.free: list[int] = []
        self.blocks: dict[str, list[int]] = {}
        self.cached: dict[str, int] = {}
        self.length: dict[str, int] = {}
        self.ids: dict[str, list[int]] = {}
        self.text: dict[str, str] = {}
        self.finished: dict[str, str] = {}

    def __enter__(self) -> Driver:
        self.loop.run_until_complete(self.engine.start())
        self.free = list(range(self.engine.limits.kv_blocks))
        return self

    def __exit__(self, *_: object) -> None:
        self.loop.run_until_complete(self.engine.close())
        self.loop.close()

    def add(self, id: str, prompt: Sequence[int], sampling: Sampling) -> None:
        """A request of one stage with these prompt ids."""
        self.add_request(Request(id, (Stage(len(prompt), token_ids=tuple(prompt)),), 0.0, sampling=sampling))

    def add_request(self, request: Request) -> None:
        """Of one with `progress`, add what it has beyond its first prompt to `length`."""
        self.engine.add(request)
        self.blocks[request.id], self.cached[request.id] = [], 0
        self.length[request.id] = request.stages[0].prompt
        self.ids[request.id], self.text[request.id] = [], ""

    def pending(self, id: str) -> int:
        return self.length[id] - self.cached[id]

    @property
    def live(self) -> list[str]:
        return [id for id in self.length if id not in self.finished]

    def batch(self, work: Mapping[str, int]) -> Batch:
        """The batch that runs so many pending tokens of each sequence; takes the blocks it needs."""
        entries = []
        for id, count in work.items():
            self._grow(id, self.cached[id] + count)
            entries.append(Entry(id, self.cached[id], count, tuple(self.blocks[id]), count == self.pending(id)))
        return Batch(tuple(entries))

    def step(self, work: Mapping[str, int]) -> StepResult:
        """Run one batch and book what came out; finished sequences give their blocks back and are forgotten."""
        result = self.loop.run_until_complete(self.engine.execute(self.batch(work)))
        for id, count in work.items():
            self.cached[id] += count
        for id, out in result.emitted.items():
            self._book(id, out)
        return result

    def preempt(self, id: str) -> None:
        """Give a sequence's blocks back (to the end of the free list); its next step prefills from the start."""
        self.free += self.blocks[id]
        self.blocks[id], self.cached[id] = [], 0

    def export_kv(self, id: str) -> KV:
        """What is in KV of a sequence."""
        return self.loop.run_until_complete(self.engine.export_kv(self.blocks[id], self.cached[id]))

    def import_kv(self, id: str, kv: KV) -> None:
        """Begin a sequence, of which nothing is in KV yet, with that of another engine."""
        self._grow(id, kv.tokens)
        self.loop.run_until_complete(self.engine.import_kv(self.blocks[id], kv))
        self.cached[id] = kv.tokens

    def run(self) -> None:
        """Run everything to its end: each step all that is pending of every sequence."""
        while live := self.live:
            self.step({id: self.pending(id) for id in live})

    def _grow(self, id: str, tokens: int) -> None:
        while len(self.blocks[id]) * self.engine.limits.block_size < tokens:
            self.blocks[id].append(self.free.pop(0))

    def _book(self, id: str, out: Emitted) -> None:
        self.length[id] += out.tokens
        self.ids[id] += out.token_ids
        self.text[id] += out.text
        if out.finish is not None:
            self.finished[id] = out.finish
            self.preempt(id)
            self.engine.forget([id])
