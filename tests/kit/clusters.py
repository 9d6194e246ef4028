"""A cluster on the virtual clock to which things happen at their times, and whose books are looked at throughout."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

from rubato.core.clock import ARRIVAL, VirtualClock, run_virtual
from rubato.core.events import Event, Finished, Offered
from rubato.core.request import Request
from rubato.fleet.cluster import Cluster
from tests.kit import integrity
from tests.kit.fleets import Act


def offer(*requests: Request) -> Act:
    def act(cluster: Cluster) -> None:
        for each in requests:
            cluster.offer(each)

    return act


def play(build: Callable[[VirtualClock], Cluster], acts: Sequence[tuple[float, Act]]) -> tuple[Cluster, list[Event]]:
    """Do these acts at their times in a fresh cluster, and serve it to its end.

    Returns the cluster, closed, and all its events. Its books and those of its replicas are checked at each event, and
    in the end that each request has ended once and that no KV is held.
    """
    events: list[Event] = []

    async def main() -> Cluster:
        clock = VirtualClock()
        cluster = build(clock)
        cluster.listen(events.append)
        cluster.listen(lambda _: integrity.check_cluster(cluster))
        await cluster.start()
        for at, act in acts:
            clock.call_at(at, ARRIVAL, lambda act=act: act(cluster))
        await clock.sleep_until(max(at for at, _ in acts), ARRIVAL)
        await cluster.drain()
        for host in [*cluster.hosts.values()]:  # one may be lost meanwhile
            await host.drain()
        for host in cluster.hosts.values():
            view = host.view()
            assert view.kv_free == view.kv_total
        await cluster.close()
        return cluster

    cluster = run_virtual(main())
    offered = Counter(e.id for e in events if isinstance(e, Offered))
    assert Counter(e.id for e in events if isinstance(e, Finished)) == offered
    assert set(offered.values()) <= {1}
    return cluster, events
