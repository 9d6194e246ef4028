"""What counts in JITServe's mix, by hand."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from experiments import jitserve_mix
from rubato.core.request import SLO
from rubato.workloads import Arrival, Workload


def test_a_task_counts_once_and_only_when_all_its_turns_are_in_time() -> None:
    """Tokens: 10 of a prompt and 8 times 10 of an output each."""
    rows = [
        ("a", "chat", ""),
        ("b", "research", "s"),
        ("c", "research", "s"),
        ("d", "research", "t"),
        ("e", "chat", ""),
    ]
    arrivals = tuple(Arrival(id, 0.0, tier, tier, 10, 10, session=session) for id, tier, session in rows)
    load = Workload("mix", 0, 1.0, 1.0, {"chat": SLO(), "research": SLO()}, arrivals)
    late = {"c"}
    records: Any = [
        SimpleNamespace(verdict=SimpleNamespace(met=a.id not in late), best_effort=a.id == "e") for a in arrivals
    ]
    found = jitserve_mix.in_slo(load, records)
    assert found == pytest.approx({"requests": 2 / 4, "tokens": 2 / 5, "chat": 1 / 2, "research": 1 / 2})


def test_a_figure_compares_by_seed_at_the_scripts_rate() -> None:
    held = {"vllm": 0.4, "sarathi": 0.4, "edf": 0.8, "qoserve": 0.7, "slos_serve": 0.2, "jitserve": 0.5, "rubato": 0.6}
    values = [
        {"seats": seats, "rate": rate, "name": name, "measures": {
            measure: {"setting": name, "shares": [share, share], "tiers": dict.fromkeys(jitserve_mix.TIERS, share)}
            for measure in jitserve_mix.MEASURES}}
        for seats in jitserve_mix.SEATS for rate in jitserve_mix.RATES for name, share in held.items()
    ]  # fmt: skip
    table = jitserve_mix.Shares(values)
    pairs = [("jitserve", "vllm"), ("jitserve", "slos_serve"), ("edf", "jitserve"), ("qoserve", "jitserve")]
    ratios = [table.over(name, base, "tokens").value for name, base in pairs]
    assert ratios == pytest.approx([1.25, 2.5, 1.6, 1.4])
    estimates = jitserve_mix.found(values, False).estimates
    assert estimates["rubato-over-best-tokens"].value == pytest.approx(0.75)
    assert jitserve_mix.tables(values).count("`edf`") == 2 * 8
