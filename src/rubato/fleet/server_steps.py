"""`rubato fit --server`: fits the latency model of a running server to its reports under load.

With Rubato's plug-in a vLLM server reports each step over its link: batch and seconds. Without it `/metrics` has to do.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from rubato.core.clock import ARRIVAL, Clock, WallClock
from rubato.core.events import Stepped
from rubato.core.plan import Sample
from rubato.fleet import server_metrics
from rubato.fleet.http_client import HttpServer
from rubato.fleet.remote_host import LinkSession
from rubato.fleet.server_link import Link, ZmqLink
from rubato.fleet.server_probe import link_address
from rubato.fleet.upstream import UpstreamError
from rubato.latency.fit import Fitted, fit
from rubato.wire.messages import HEARTBEAT_S
from rubato.wire.replica_report import ReplicaReport


async def fit_server(url: str, kind: str, seconds: float, key: str = "") -> Fitted:
    """Fits a model to the steps of a server.

    Args:
        url: of the server.
        kind: of the model.
        seconds: of observation.
        key: for the server's API.

    Raises:
        ValueError: the server cannot be reached, reports too little, or its load did not vary enough.
    """
    clock = WallClock()
    try:
        async with HttpServer(url) as server:
            address = await link_address(url, server, key)
            if address is None:
                if kind != "affine":
                    raise ValueError(f"--model {kind}: {url} has no link, and /metrics alone gives an affine model")
                pages = await server_metrics.scrape(server, clock, seconds)
                return server_metrics.fit_scrapes(pages, url)
    except UpstreamError as error:
        raise ValueError(f"server {url}: {error}") from error
    link = ZmqLink(address)
    try:
        steps = await collect_steps(link, clock, seconds, url)
    finally:
        link.close()
    return fit_steps(steps, kind, url)


def fit_steps(steps: Sequence[Sample], kind: str, url: str) -> Fitted:
    """Fits a model to steps; the last fifth is held out. Raises ValueError, with what to do, if they cannot determine
    it."""
    if not steps:
        raise ValueError(f"server {url} ran no step: put it under load meanwhile; {server_metrics.load_advice(url)}")
    try:
        fitted = fit(steps, kind)
    except ValueError as error:
        raise ValueError(f"{len(steps)} steps of {url}: {error}; {server_metrics.load_advice(url)}") from error
    low, high = np.quantile([step.shape.seqs for step in steps], [0.05, 0.95])
    prompts = [step.shape.tokens - step.shape.seqs + step.shape.chunks for step in steps]
    note = (
        f"nine of ten steps ran {low:.0f} to {high:.0f} sequences; {np.count_nonzero(prompts)} of {len(steps)} ran "
        f"prompts, of up to {max(prompts)} tokens: for other steps its errors are not known"
    )
    return replace(fitted, notes=[note])


async def collect_steps(link: Link, clock: Clock, seconds: float, url: str) -> list[Sample]:
    """Returns the steps that an engine core reports over its link. Raises ValueError if the core rejects us, or is
    silent."""
    steps: list[Sample] = []

    def apply(report: ReplicaReport) -> None:
        ended = [event for event in report.events if isinstance(event, Stepped)]
        steps.extend([Sample(e.shape, e.seconds) for e in ended if e.shape.tokens > 0 and e.seconds > 0.0])

    until = clock.now() + seconds
    session = LinkSession("of the server", link, clock, is_idle=lambda: False, apply=apply, lose=lambda error: None)
    listening = clock.spawn(session.listen(), "steps of a server")
    try:
        await session.greet(url)
        session.begin_reports()
        while (now := clock.now()) < until:
            session.send_heartbeat()
            await clock.sleep_until(min(until, now + HEARTBEAT_S), ARRIVAL)
    finally:
        listening.cancel()
    return steps
