"""An error of the fair shares themselves ends no request, whichever of their methods it is in."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace

import pytest

from rubato.core.events import Placed
from rubato.core.plan import Limits
from rubato.fleet.cluster import Cluster
from rubato.policies import router_for
from rubato.policy_kit.fair_share import FairShare
from tests.fleet.routers import ends, serve
from tests.kit import request
from tests.kit.fleets import Elsewhere, cancels, vanishes

LIMITS = Limits(max_num_seqs=256, max_num_batched_tokens=2048, max_model_len=4096, kv_blocks=16384, block_size=16)


class Fails(FairShare):
    """One of its methods always raises."""

    def __init__(self, method: str) -> None:
        super().__init__()

        def fails(*_: object) -> None:
            raise OverflowError("cannot convert float infinity to integer")

        fails.__qualname__ = f"FairShare.{method}"  # what its errors are reported as
        setattr(self, method, fails)


def as_live() -> tuple[list[str], Callable[[Cluster], None]]:
    """What is reported, once this was called on the loop: there a simulation would end with the first error."""
    said: list[str] = []

    def hear(cluster: Cluster) -> None:
        asyncio.get_running_loop().set_exception_handler(lambda loop, what: said.append(what["message"]))

    return said, hear


def test_a_simulation_ends_with_an_error_of_the_shares() -> None:
    with pytest.raises(OverflowError):
        serve("simulated", router_for("edf", "least_loaded"), [request("q")], fair=Fails("release"))


@pytest.mark.parametrize("router", ["least_loaded", "sa"])  # placed at once, and in a timer
@pytest.mark.parametrize(
    "method", ["release", "add_request", "record_placement", "record_return", "record_end", "beyond_share"]
)
def test_an_error_of_the_shares_ends_no_request(method: str, router: str) -> None:
    """One is cancelled, one is beyond what may be in flight, and a replica is lost: the others complete."""
    clusters: list[Cluster] = []
    said, heard = as_live()

    def bounded(cluster: Cluster) -> None:
        cluster._max_in_flight = 8
        clusters.append(cluster)
        heard(cluster)

    requests = [replace(request(f"q{i}", 50, ttft=1.0, tpot=0.05), tenant="ab"[i % 2]) for i in range(9)]
    placing = router_for("sa" if router == "sa" else "edf", "auto" if router == "sa" else router)
    events = serve(
        "simulated", placing, requests, acts=[(0.03, vanishes(0)), (0.03, cancels("q1"))], host=Elsewhere,
        limits=LIMITS, fair=Fails(method), setup=bounded,
    )  # fmt: skip
    outcomes = {id: e.outcome for id, e in ends(events).items()}  # each ended once, as `serve` saw
    assert outcomes.pop("q1") == "cancelled"
    # without `add_request` nothing is known to be in flight: the tenant still has places
    assert outcomes.pop("q8") == ("completed" if method == "add_request" else "refused")
    assert set(outcomes.values()) == {"completed"}
    assert clusters[0].listener_errors[f"FairShare.{method}"] > 0
    own = [message for message in said if message.startswith(f"FairShare.{method} ")]
    assert own == [f"FairShare.{method} failed, and requests go on without it, errors so far: 1"]  # once a minute


def test_shares_that_fail_let_all_pass_in_order_of_arrival() -> None:
    requests = [replace(request(f"q{i}"), tenant="ab"[i % 2]) for i in range(6)]
    events = serve("simulated", router_for("edf", "least_loaded"), requests, fair=Fails("release"), setup=as_live()[1])
    assert [e.id for e in events if isinstance(e, Placed)] == [f"q{i}" for i in range(6)]
