"""Time inside a cluster, its router included and its replicas' own steps left out."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

from rubato.core.clock import WallClock, process_cpu_time
from rubato.fleet.cluster import Cluster
from rubato.fleet.routing import Routing

now = WallClock().now
# Where the driver and the hosts enter a cluster.
ENTRIES = ((Cluster, "offer"), (Routing, "route_until_settled"), (Cluster, "_emit"))


class Inside:
    """Wall seconds inside these methods of all clusters, however they call each other, and how long each time that a
    router was asked took. after: requests offered before the time counts."""

    def __init__(self, after: int = 0) -> None:
        self.seconds = 0.0
        self.asked: list[float] = []
        self.offered = 0
        self.began = (now(), process_cpu_time())  # when it began to count: wall and CPU
        self._after = after
        self._depth = 0

    def __enter__(self) -> Inside:
        self._former = {(of, name): getattr(of, name) for of, name in ENTRIES}
        self._former_call = Routing._call_router
        for (of, name), method in self._former.items():
            setattr(of, name, self._timed(method, name == "offer"))
        Routing._call_router = self._each(self._former_call)  # type: ignore[method-assign]
        return self

    def __exit__(self, *_: object) -> None:
        for (of, name), method in self._former.items():
            setattr(of, name, method)
        Routing._call_router = self._former_call  # type: ignore[method-assign]

    def _timed(self, method: Callable[..., Any], offers: bool) -> Callable[..., Any]:
        @wraps(method)
        def call(*given: Any) -> Any:
            if offers:
                self.offered += 1
                if self.offered == self._after:
                    self.seconds, self.began = 0.0, (now(), process_cpu_time())
                    self.asked.clear()
            if self._depth:
                return method(*given)
            self._depth = 1
            began = now()
            try:
                return method(*given)
            finally:
                self.seconds += now() - began
                self._depth = 0

        return call

    def _each(self, method: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(method)
        def call(*given: Any) -> Any:
            began = now()
            try:
                return method(*given)
            finally:
                self.asked.append(now() - began)

        return call
