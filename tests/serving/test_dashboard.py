"""The Grafana dashboard shows metrics that the server has, and labels that they carry."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

from rubato.core.request import SLO
from rubato.serving.request_slo import Tier, Tiers
from tests.serving.conftest import Edge

DASHBOARD = Path(__file__).parents[2] / "docs" / "grafana.json"
SUFFIXES = {"counter": ("_total",), "gauge": ("",), "histogram": ("_bucket", "_sum", "_count")}


def test_every_metric_and_label_of_the_dashboard_is_exported(edge: Callable[..., None]) -> None:
    async def scenario(at: Edge) -> None:
        for tier in ("good", "late", "never"):  # one met, one missed, one refused
            await at.chat(service_tier=tier)
        families = list(text_string_to_metric_families((await at.http.get("/metrics")).text))
        exported: dict[str, set[str]] = {}
        for family in families:
            labels = {label for sample in family.samples for label in sample.labels}
            for suffix in SUFFIXES[family.type]:
                exported[family.name + suffix] = labels
        board = json.loads(DASHBOARD.read_text())
        asked = [(p["title"], t["expr"]) for p in board["panels"] for t in p.get("targets", ())]
        used = set()
        for title, expr in asked:
            names = set(re.findall(r"(?:rubato_|vllm:)\w+", expr))
            assert names, title
            assert names <= set(exported), (title, names - set(exported))
            labels = set.union(*(exported[name] for name in names))
            wanted = {word.strip() for group in re.findall(r"by \(([^)]*)\)", expr) for word in group.split(",")}
            wanted |= set(re.findall(r"[{,]\s*(\w+)\s*!?=", expr))
            assert wanted <= labels, (title, wanted - labels)
            used |= names
        ids = [panel["id"] for panel in board["panels"]]
        assert len(set(ids)) == len(ids)
        own = {
            name for name in exported if name.startswith("rubato_") and not name.endswith(("_count", "_sum", "_bucket"))
        }
        assert own <= used, own - used  # what is measured is shown

    tiers = Tiers([Tier("good", SLO(5.0, 0.5, 9.0)), Tier("late", SLO(ttft=0.05)), Tier("never", SLO(1e-3), "refuse")])
    edge(scenario, tiers=tiers)
