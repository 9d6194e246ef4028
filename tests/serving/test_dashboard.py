"""The Grafana dashboard and the alerts show metrics that the server has, and labels that they carry."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path

import yaml
from prometheus_client.parser import text_string_to_metric_families

from rubato.core.events import Event
from rubato.core.request import SLO
from rubato.serving.request_slo import Tier, Tiers
from tests.serving.conftest import Edge

DOCS = Path(__file__).parents[2] / "docs"
SUFFIXES = {"counter": ("_total",), "gauge": ("",), "histogram": ("_bucket", "_sum", "_count")}
TIERS = Tiers([Tier("good", SLO(5.0, 0.5, 9.0)), Tier("late", SLO(ttft=0.05)), Tier("never", SLO(1e-3), "refuse")])


def full(event: Event) -> None:
    raise OSError(28, "No space left on device")


async def exported(at: Edge) -> dict[str, set[str]]:
    """Every metric of a server that has met, missed and refused a request, and lost events -> its labels."""
    asyncio.get_running_loop().set_exception_handler(lambda loop, what: None)
    at.cluster.listen(full)
    for tier in ("good", "late", "never"):
        await at.chat(service_tier=tier)
    found: dict[str, set[str]] = {}
    for family in text_string_to_metric_families((await at.http.get("/metrics")).text):
        labels = {label for sample in family.samples for label in sample.labels}
        for suffix in SUFFIXES[family.type]:
            found[family.name + suffix] = labels
    return found


def labels_in(expr: str) -> set[str]:
    """Those that an expression groups by or selects."""
    grouped = {word.strip() for group in re.findall(r"by \(([^)]*)\)", expr) for word in group.split(",")}
    return grouped | set(re.findall(r"[{,]\s*(\w+)\s*!?=", expr))


def names_in(title: str, expr: str, there: Mapping[str, set[str]]) -> set[str]:
    """The metrics of an expression: all exported, with the labels that it asks for."""
    names = set(re.findall(r"(?:rubato_|vllm:)\w+", expr))
    assert names, title
    assert names <= set(there), (title, names - set(there))
    labels = set.union(*(there[name] for name in names))
    assert labels_in(expr) <= labels, (title, labels_in(expr) - labels)
    return names


def test_every_metric_and_label_of_the_dashboard_is_exported(edge: Callable[..., None]) -> None:
    async def scenario(at: Edge) -> None:
        there = await exported(at)
        board = json.loads((DOCS / "grafana.json").read_text())
        asked = [(p["title"], t["expr"]) for p in board["panels"] for t in p.get("targets", ())]
        used = set().union(*(names_in(title, expr, there) for title, expr in asked))
        ids = [panel["id"] for panel in board["panels"]]
        assert len(set(ids)) == len(ids)
        own = {
            name for name in there if name.startswith("rubato_") and not name.endswith(("_count", "_sum", "_bucket"))
        }
        assert own <= used, own - used  # what is measured is shown

    edge(scenario, tiers=TIERS)


def test_every_metric_and_label_of_the_alerts_is_exported(edge: Callable[..., None]) -> None:
    async def scenario(at: Edge) -> None:
        there = await exported(at)
        (group,) = yaml.safe_load((DOCS / "alerts.yml").read_text())["groups"]
        page = (DOCS / "operations.md").read_text().split("## Alerts\n")[1].split("\n## ")[0]
        said = dict(re.findall(r"^\| `(\w+)` \| (\w+) \|", page, re.MULTILINE))
        assert {slo_rule["alert"]: slo_rule["labels"]["severity"] for slo_rule in group["rules"]} == said
        for slo_rule in group["rules"]:
            names_in(slo_rule["alert"], slo_rule["expr"], there)
            told = " ".join(slo_rule["annotations"].values())
            assert set(re.findall(r"\$labels\.(\w+)", told)) <= labels_in(slo_rule["expr"])
            assert set(re.findall(r"rubato_\w+", told)) <= set(there)

    edge(scenario, tiers=TIERS)


def test_a_draining_server_is_alive_but_not_ready(edge: Callable[..., None]) -> None:
    """The probes of docs/operations.md: it is sent no more requests, and it is not restarted."""

    async def scenario(at: Edge) -> None:
        page = (DOCS / "operations.md").read_text()
        probes = dict(re.findall(r"(\w+)Probe:.*\n +httpGet: {path: ([\w/]+),", page))
        assert set(probes) == {"startup", "readiness", "liveness"}
        assert {(await at.http.get(path)).status_code for path in probes.values()} == {200}
        at.app.state.draining = True
        answers = {name: (await at.http.get(path)).status_code for name, path in probes.items()}
        assert answers == {"startup": 503, "readiness": 503, "liveness": 200}

    edge(scenario)
