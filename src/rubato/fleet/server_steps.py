"""`rubato fit --server`: fits the latency model of a running server to its reports under load.

With Rubato's plug-in a vLLM server reports each step over its link: batch and seconds. Without it `/metrics` has to do.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from rubato.core.clock import ARRIVAL, Clock, WallClock
from rubato.core.plan import Sample
from rubato.fleet import server_metrics
from rubato.fleet.http_client import HttpServer
from rubato.fleet.server_link import Link, ZmqLink
from rubato.fleet.server_probe import link_address
from rubato.fleet.upstream import UpstreamError
from rubato.latency.fit import Fitted, fit
from rubato.wire.link_keys import TOKEN_ENV
from rubato.wire.messages import HEARTBEAT_S, PROTOCOL, Greeting, Hello, Ping, Refused, Report, Unknown

GATEWAY_NAME = "rubato fit"  # on the link
MAX_SILENCE_S = 10.0  # until the core greets


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
        steps = await collect_steps(link, clock, seconds)
    finally:
        link.close()
    return fit_steps(steps, kind, url)


def fit_steps(steps: Sequence[Sample], kind: str, url: str) -> Fitted:
    """The last fifth is held out. Raises ValueError, with what to do, where steps cannot determine the model."""
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


async def collect_steps(link: Link, clock: Clock, seconds: float) -> list[Sample]:
    """The steps that an engine core reports over its link. Raises ValueError where it does not let us in, or is
    silent."""
    reader = _StepReader(link, clock)
    listening = clock.spawn(reader.listen(), "steps of a server")
    until = clock.now() + seconds
    try:
        while (now := clock.now()) < until:
            reader.check(now)
            link.send(Ping(now) if reader.is_greeted else Hello(PROTOCOL, GATEWAY_NAME, now))
            await clock.sleep_until(min(until, now + HEARTBEAT_S), ARRIVAL)
        reader.check(until)
    finally:
        listening.cancel()
    return reader.steps


class _StepReader:
    """What a core has said."""

    def __init__(self, link: Link, clock: Clock) -> None:
        self.steps: list[Sample] = []
        self.is_greeted = False
        self._link, self._clock = link, clock
        self._began = clock.now()
        self._refused = ""

    async def listen(self) -> None:
        while True:
            match await self._link.receive():
                case Greeting():
                    self.is_greeted = True
                case Refused(why):
                    self._refused = why
                case Unknown():
                    self.is_greeted = False
                case Report(done=(shape, seconds)) if shape.tokens > 0 and seconds > 0.0:
                    self.steps.append(Sample(shape, seconds))

    def check(self, now: float) -> None:
        """Raises ValueError where nothing will come."""
        if self._refused:
            raise ValueError(f"the server's engine does not let us in: {self._refused}")
        if self._link.is_refused:
            raise ValueError(f"the server's engine does not let us in: set {TOKEN_ENV} to the secret that it has")
        if not self.is_greeted and now >= self._began + MAX_SILENCE_S:
            raise ValueError(f"the server's engine does not answer on its link within {MAX_SILENCE_S:g} s")
