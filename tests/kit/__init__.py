"""What tests are built of: requests, views, replicas, simulated runs, scenarios, and the books of a replica."""

from tests.kit import integrity
from tests.kit.replicas import Linear, run_step
from tests.kit.requests import Seq, request, shown
from tests.kit.runs import changed, run_spec
from tests.kit.scenarios import on, on_virtual_clock
from tests.kit.views import idle_fleet, view

__all__ = [
    "Linear", "Seq", "changed", "idle_fleet", "integrity", "on", "on_virtual_clock", "request", "run_spec", "run_step",
    "shown", "view",
]  # fmt: skip
