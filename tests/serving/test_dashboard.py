"""The Grafana dashboard shows metrics that the servers have, and labels that they carry."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable

from tests.scenario import on
from tests.serving.conftest import Edge, edge
from tests.serving.promql import DOCS, PLUGIN, TIERS, all_of, check, exported, labels_left


def ours(names: Iterable[str]) -> set[str]:
    """What they are samples of."""
    return {re.sub("_(total|bucket|sum|count)$", "", name) for name in names if name.startswith("rubato_")}


@on(edge, tiers=TIERS)
async def test_every_metric_and_label_of_the_dashboard_is_exported(at: Edge) -> None:
    server = await exported(at)
    there = all_of(server)
    used: set[str] = set()
    for panel in json.loads((DOCS / "grafana.json").read_text())["panels"]:
        for target in panel.get("targets", ()):
            used |= check(panel["title"], target["expr"], there)
            shown = set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"]))
            assert shown <= labels_left(target["expr"], there), panel["title"]
    assert ours({*server, *PLUGIN}) <= ours(used)  # what is measured is shown


def test_the_panels_of_the_dashboard_have_a_place_each() -> None:
    panels = json.loads((DOCS / "grafana.json").read_text())["panels"]
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
    at.app.state.draining = True
    answers = {name: (await at.http.get(path)).status_code for name, path in probes.items()}
    assert answers == {"startup": 503, "readiness": 503, "liveness": 200}
