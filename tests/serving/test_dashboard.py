"""The Grafana dashboard shows metrics that the servers have, and labels that they carry."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from typing import Any

from prometheus_client import CollectorRegistry

from rubato.serving.vllm_reports import PluginMetrics
from tests.kit import on
from tests.kit.apps import Edge, edge
from tests.kit.gateways import Fleet, gateway
from tests.serving.promql import DOCS, GATEWAY, PLUGIN, TIERS, all_of, check, exported, labels_left, read

FILTERS = {"instance": "instance", "model_name": "model", "tier": "tier", "tenant": "tenant"}  # label -> variable
PLUGIN_ONLY = re.compile("|".join(PLUGIN))  # what is asked for beside these is the plug-in's, too


def dashboard() -> dict[str, Any]:
    page: dict[str, Any] = json.loads((DOCS / "grafana.json").read_text())
    return page


def server_metrics() -> dict[str, set[str]]:
    """Those of a server of its own."""
    found: dict[str, set[str]] = {}

    async def scenario(at: Edge) -> None:
        found.update(await exported(at))

    edge(scenario, tiers=TIERS)
    return found


def ours(names: Iterable[str]) -> set[str]:
    """What they are samples of."""
    return {re.sub("_(total|bucket|sum|count)$", "", name) for name in names if name.startswith("rubato_")}


@on(edge, tiers=TIERS)
async def test_every_metric_and_label_of_the_dashboard_is_exported(at: Edge) -> None:
    server = await exported(at)
    there = all_of(server)
    used: set[str] = set()
    for panel in dashboard()["panels"]:
        for target in panel.get("targets", ()):
            used |= check(panel["title"], target["expr"], there)
            shown = set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"]))
            assert shown <= labels_left(target["expr"], there), panel["title"]
    assert ours({*server, *PLUGIN, *GATEWAY}) <= ours(used)  # what is measured is shown


def test_metrics_of_a_gateway_alone_are_those_that_rules_and_dashboard_are_held_against() -> None:
    own = server_metrics()

    async def scenario(fleet: Fleet) -> None:
        await fleet.chat()
        there = read((await fleet.http.get("/metrics")).text)
        assert {name: there.get(name) for name in GATEWAY} == GATEWAY
        assert ours(there) - ours(own) == ours(GATEWAY)

    gateway(scenario)


def test_metrics_of_the_plug_in_alone_are_those_that_rules_and_dashboard_are_held_against() -> None:
    there = {metric.name for metric in PluginMetrics(CollectorRegistry(), counts=True).registry.collect()}
    assert {name for name in there if name.startswith("rubato_")} - ours(server_metrics()) == ours(PLUGIN)


@on(edge, tiers=TIERS)
async def test_every_expression_of_the_dashboard_is_filtered_by_the_variables(at: Edge) -> None:
    there = all_of(await exported(at))
    page = dashboard()
    variables = {v["name"]: v["query"] for v in page["templating"]["list"] if v["type"] == "query"}
    assert set(variables) == {*FILTERS.values(), "plugin"}
    for label, name in (*FILTERS.items(), ("instance", "plugin")):
        metric, asked = re.fullmatch(r"label_values\(([\w:]+), (\w+)\)", variables[name]).groups()  # type: ignore[union-attr]
        assert (asked, label in there[metric]) == (label, True)
    selected = re.compile(r"(?<![\w:.$])((?:rubato_|vllm:|tier:)[\w:]+)(\{[^}]*\})?")
    for panel in page["panels"]:
        spared = {"tenant"} if panel["title"] == "Attainment by dimension" else set()  # its divisor has no tenants
        for target in panel.get("targets", ()):
            filters = FILTERS | ({"instance": "plugin"} if PLUGIN_ONLY.search(target["expr"]) else {})
            for metric, chosen in selected.findall(target["expr"]):
                asked = {label for label, name in filters.items() if f'{label}=~"${name}"' in chosen}
                assert there[metric] & set(FILTERS) - asked <= spared, (panel["title"], metric)


def test_all_instances_of_the_dashboard_are_those_that_count_requests() -> None:
    """Servers behind a gateway have metrics under the same names: with them "All" would show each token twice."""
    (variable,) = (v for v in dashboard()["templating"]["list"] if v["name"] == "instance")
    assert variable["query"] == "label_values(rubato_requests_offered_total, instance)"
    assert "allValue" not in variable


def test_attainment_of_the_dashboard_is_a_share_of_requests_that_ended() -> None:
    """Those that were offered in the same minute are others: of a load that falls, many times more are met."""
    panels = [panel for panel in dashboard()["panels"] if panel["title"].startswith("Attainment")]
    shares = {panel["title"]: panel["targets"][0]["expr"] for panel in panels}
    assert shares.pop("Attainment by dimension").startswith("clamp_max(")  # ends are not counted by dimension
    assert len(shares) == 3
    assert [title for title, expr in shares.items() if "rubato_requests_offered" in expr] == []


def test_the_panels_of_the_dashboard_have_a_place_each() -> None:
    panels = dashboard()["panels"]
    ids = [panel["id"] for panel in panels]
    assert len(set(ids)) == len(ids)
    taken: dict[tuple[int, int], str] = {}
    for panel in panels:
        at = panel["gridPos"]
        assert at["x"] + at["w"] <= 24, panel["title"]
        for x in range(at["x"], at["x"] + at["w"]):
            for y in range(at["y"], at["y"] + at["h"]):
                assert taken.setdefault((x, y), panel["title"]) == panel["title"]


@on(edge)
async def test_a_draining_server_is_alive_but_not_ready(at: Edge) -> None:
    """The probes of docs/operate.md: it is sent no more requests, and it is not restarted."""
    page = (DOCS / "operate.md").read_text()
    probes = dict(re.findall(r"(\w+)Probe:.*\n +httpGet: {path: ([\w/]+),", page))
    assert set(probes) == {"startup", "readiness", "liveness"}
    assert {(await at.http.get(path)).status_code for path in probes.values()} == {200}
    at.app.state.is_draining = True
    answers = {name: (await at.http.get(path)).status_code for name, path in probes.items()}
    assert answers == {"startup": 503, "readiness": 503, "liveness": 200}
