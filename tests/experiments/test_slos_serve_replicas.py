"""What the figures `slos-serve-scaling` and `slos-serve-planning` are made of."""

from __future__ import annotations

from collections import Counter

import pytest

from experiments import slos_serve_planning as planning
from experiments import slos_serve_scaling as scaling
from experiments._slos_serve_runs import FULL


def test_chat_comes_to_each_replica_and_bursts_to_all() -> None:
    counts = {
        (case, n): len(scaling._load(case, n, 1, FULL).arrivals) for case in scaling.CASES for n in (1, 4)
    }  # fmt: skip
    assert counts["chatbot", 4] == 4 * counts["chatbot", 1]
    assert counts["coder", 4] == counts["coder", 1]


@pytest.mark.parametrize(("running", "new"), [(10, 10), (100, 10), (500, 1)])
def test_bursts_come_at_one_instant(running: int, new: int) -> None:
    requests, begin = planning.load(running, new, 3, 1, 7)
    together = Counter(r.arrival for r in requests)
    bursts = [at for at, count in together.items() if count == new and at >= begin]
    assert len(bursts) >= 7
    assert {r.stages[0].slo.tpot for r in requests} <= set(planning.TPOTS[3])
