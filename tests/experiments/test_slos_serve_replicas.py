"""What the figures `slos-serve-scaling` and `slos-serve-planning` are made of."""

from __future__ import annotations

from collections import Counter

import pytest

from experiments import slos_serve_planning as planning
from experiments import slos_serve_scaling as scaling


def test_the_crossing_is_a_line_in_the_last_bracket() -> None:
    tried = [(1.0, 1.0), (2.0, 0.95), (4.0, 0.85), (8.0, 0.91)]
    assert scaling.crossed(tried, 8.0**0.5) == pytest.approx(2.0 * 2.0**0.5)
    assert scaling.crossed([(2.0, 0.9), (4.0, 0.5)], 8.0**0.5) == pytest.approx(2.0)


def test_small_runs_have_short_outputs_and_nobody_infeasible() -> None:
    source, setting = scaling._asked("toolllm", scaling.OURS, 2, scaling.SMALL)
    load = source.make(1)
    assert setting.replicas == 2
    assert 0 < len(load.arrivals) <= scaling.SMALL.count
    assert all(part.output <= scaling.SMALL.output for a in load.arrivals for part in a.parts)
    assert all(a.prompt_tokens + a.output_tokens <= setting.hardware.limits.max_model_len for a in load.arrivals)


@pytest.mark.parametrize(("running", "new"), [(10, 10), (100, 10), (500, 1)])
def test_bursts_come_at_one_instant(running: int, new: int) -> None:
    requests, begin = planning.load(running, new, 3, 1, 7)
    together = Counter(r.arrival for r in requests)
    bursts = [at for at, count in together.items() if count == new and at >= begin]
    assert len(bursts) >= 7
    assert {r.stages[0].slo.tpot for r in requests} <= set(planning.TPOTS[3])
