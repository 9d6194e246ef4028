"""The figure of today's baselines, from rates made by hand."""

from __future__ import annotations

from typing import Any

import pytest

from experiments import baselines_today, claims
from rubato.planning.judge.search import MEASURES

RATES = {"vllm": 1.0, "sarathi": 2.0, "edf": 4.0, "slos_serve": 4.0, "rubato": 5.0, "scorpio": 3.0, "qoserve": 2.5,
         "jitserve": 1.5}  # fmt: skip
FLEETS = {"slos_serve": 20.0, "least_loaded": 12.0, "lmetric": 15.0}


def value(load: str, name: str, rate: float, **more: Any) -> dict[str, Any]:
    """Of three seeds, one of which holds nothing: that counts as a twentieth of the start."""
    held = {"setting": name, "goodput": [rate, 0.0, 1.1 * rate], "tiers": {}}
    return {"load": load, "name": name, "start": 20.0 * rate, "measures": dict.fromkeys(MEASURES, held)} | more


def test_ratios_are_of_the_geometric_means_and_losses_of_ours_come_first() -> None:
    """On the second load qoserve holds twice what rubato does, and 2.5 times edf."""
    values = [value("coder", name, rate) for name, rate in RATES.items()]
    values += [value("mixed", name, rate) for name, rate in (RATES | {"qoserve": 10.0}).items()]
    values += [value("mixed", name, rate, replicas=4) for name, rate in FLEETS.items()]
    found = baselines_today.found(values, False)
    assert found.estimates.keys() == claims()["baselines-today"].keys()
    means = {name: found.estimates[f"{name}-90"].value for name in ("scorpio-over-edf", "qoserve-over-sarathi")}
    assert means == pytest.approx({"scorpio-over-edf": 0.75, "qoserve-over-sarathi": (1.25 * 5.0) ** 0.5})
    assert found.estimates["rubato-over-best-90"].value == pytest.approx((5 / 4 * 5 / 10) ** 0.5)
    assert found.estimates["lmetric-over-slos-serve-95"].value == pytest.approx(0.75)
    shown = baselines_today.tables(found.data)
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in shown.splitlines() if line.startswith("|")]
    assert rows[2] == ["mixed", "90 % of all", "`qoserve`", "2.00", "2.50", "5.00"]
    assert rows[7][0] == "coder"
