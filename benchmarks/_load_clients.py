"""A load offered by several processes, so that no single event loop limits what is measured."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from multiprocessing import get_context
from typing import Self

from rubato.measure import load_generator
from rubato.measure.http_client import Endpoint
from rubato.measure.records import BenchResult, ClientLoad
from rubato.workloads import Workload


class LoadClients:
    """Processes that each offer every n-th request of a load at its time; a context manager."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._pool = ProcessPoolExecutor(count, mp_context=get_context("spawn"))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown(cancel_futures=True)

    def offer(self, load: Workload, target: Endpoint, label: str) -> BenchResult:
        """Offer it all and return one result, its records in the load's order."""
        n = min(self._count, len(load.arrivals))
        parts = [replace(load, arrivals=load.arrivals[i::n]) for i in range(n)]
        results = list(self._pool.map(_offer, parts, [target] * n, [label] * n))
        return merged(load, results)


def _offer(load: Workload, target: Endpoint, label: str) -> BenchResult:
    return asyncio.run(load_generator.run(load, target, label=label, warmup=0, progress=False))


def merged(load: Workload, results: Sequence[BenchResult]) -> BenchResult:
    """The results of parts of a load as one. Of the clients' delays the largest count, of their CPU the sum."""
    of = {record.id: record for result in results for record in result.records}
    clients = [result.client for result in results if result.client is not None]
    worst = {
        name: max(getattr(client, name) for client in clients)
        for name in ("wall", "send_delay_p50", "send_delay_p99", "send_delay_max", "lag_p99", "bound")
    }
    return replace(
        results[0],
        workload=load,
        records=tuple(of[arrival.id] for arrival in load.arrivals),
        client=ClientLoad(cpu=sum(client.cpu for client in clients), **worst),
        problems=tuple(problem for result in results for problem in result.problems),
        notes=tuple(note for result in results for note in result.notes),
    )
