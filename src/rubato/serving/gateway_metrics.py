"""Metrics that only a gateway has: which servers have a link, and requests placed again after failures."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

from prometheus_client.core import GaugeMetricFamily
from prometheus_client.metrics_core import Metric

from rubato.core.events import Event, Finished, HandedOff, Lost, Placed
from rubato.fleet.relay import Trip
from rubato.fleet.server_replica import ServerReplica
from rubato.frontdoor.metrics import SLOMetrics


class GatewayMetrics:
    """Adds to `metrics` what it hears, as a listener for `Cluster.listen`.

    Args:
        metrics: of the app.
        trips: by request id, of responses that have not ended.
        servers: those that are not lost.
    """

    hears_tokens = False

    def __init__(
        self, metrics: SLOMetrics, trips: Mapping[str, Trip], servers: Callable[[], Sequence[ServerReplica]]
    ) -> None:
        self._trips, self._servers = trips, servers
        self._requeued: set[str] = set()  # by a failed server, and not placed again yet
        self._placed_again = metrics.counter(
            "requests_placed_again", "Requests placed again, since their server failed"
        )
        self._continued = metrics.counter("streams_continued", "Streams that broke and continued at another server")
        metrics.registry.register(self)

    def __call__(self, event: Event) -> None:
        match event:
            case Lost(id=id):
                self._requeued.add(id)
            case HandedOff(id=id, request=request):
                if request.handoff is not None and request.handoff.reason == "failed":
                    self._requeued.add(id)
            case Placed(id=id):
                if id in self._requeued:
                    self._requeued.discard(id)
                    self._placed_again.inc()
                    trip = self._trips.get(id)
                    if trip is not None and trip.has_begun:
                        self._continued.inc()
            case Finished(id=id):
                self._requeued.discard(id)

    def collect(self) -> Iterator[Metric]:
        """Yields which servers are linked (prometheus_client's collector protocol)."""
        linked = GaugeMetricFamily(
            "rubato_server_linked",
            "1: the link reports the server's load; 0: it is counted",
            labels=["replica"],  # its address is only in the log: clients can read this page
        )
        for host in self._servers():
            linked.add_metric([host.id], float(host.is_linked))
        yield linked
