"""Time inside a cluster, its router included and its replicas' own steps left out."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

from rubato.core.clock import WallClock, process_cpu_time
from rubato.fleet.cluster import Cluster

now = WallClock().now
ENTRIES = ("offer", "_route_until_settled", "_emit")  # of Cluster, where the driver and the hosts enter it


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
        self._former = {name: getattr(Cluster, name) for name in (*ENTRIES, "_call_router")}
        for name in ENTRIES:
            setattr(Cluster, name, self._timed(self._former[name], name == "offer"))
        Cluster._call_router = self._each(self._former["_call_router"])  # type: ignore[method-assign]
        return self

    def __exit__(self, *_: object) -> None:
        for name, method in self._former.items():
            setattr(Cluster, name, method)

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
