"""The longest times that an SLO may ask for: sums and products of them stay numbers."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given

from rubato.core.events import Finished
from rubato.core.plan import Limits
from rubato.core.request import MAX_SLO_S, SLO, Request, Sampling, Stage
from rubato.latency.affine import Model
from rubato.policies.slos_serve import admission, dynamic_program
from rubato.policies.slos_serve.dynamic_program import DemandLine, Floats
from rubato.simulation.simulate import simulate_events
from tests.conftest import few
from tests.kit import run_spec
from tests.policies.test_properties import EXTREME, Load, loads, run

ROUNDS = 12


def one_round(at: float) -> list[Request]:
    """A plain request, and three that ask for as much time as they may: with 1.7e305 s instead of `MAX_SLO_S`, batches
    beyond a deadline held more tokens than a float, and what others left of them was inf - inf."""
    wanted = [
        (at, (Stage(10, SLO(0.5, 1.0)),), "best_effort"),
        (at, (Stage(1, SLO(tpot=MAX_SLO_S), "zzz"), Stage(0, SLO(0.05))), "best_effort"),
        (at + 0.02, (Stage(1, SLO(MAX_SLO_S, MAX_SLO_S, 1.0)),), "refuse"),
        (at + 0.02, (Stage(40, SLO(tpot=1.0, e2e=MAX_SLO_S)),), "best_effort"),
    ]
    return [
        Request(f"{at:g} {i}", stages, begin, sampling=Sampling(max_tokens=60), on_decline=decline)  # type: ignore[arg-type]
        for i, (begin, stages, decline) in enumerate(wanted)
    ]


def test_the_longest_times_fail_nobody() -> None:
    requests = [request for i in range(ROUNDS) for request in one_round(0.05 * i)]
    spec = run_spec(Model(k=(1e-4, 0.0), b=(0.002, 0.0)), Limits(64, 2048, 8192, 4096, 16), "slos_serve")
    ends = [e for e in simulate_events(requests, {}, spec) if isinstance(e, Finished)]
    assert [e.outcome for e in ends] == ["completed"] * 4 * ROUNDS


@few
@given(load=loads(EXTREME))
def test_what_is_left_of_a_grid_is_always_a_number(load: Load) -> None:
    def line(grid: Floats, forced: Floats) -> DemandLine:
        left = made(grid, forced)
        assert np.isfinite(left.room).all()  # else the step, and with it the requests of `run`, would fail
        return left

    made = admission.demand_line
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(admission, "demand_line", line)
        patch.setattr(dynamic_program, "demand_line", line)
        run(load, "slos_serve")
