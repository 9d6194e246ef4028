"""The rules of docs/alerts.yml ask for metrics that the servers have, can fire, and have tests that promtool runs."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Iterator
from typing import Any

import pytest
import yaml
from prometheus_client import CollectorRegistry

from rubato.serving.vllm_reports import PluginMetrics
from tests.kit import on
from tests.kit.apps import Edge, edge
from tests.serving.promql import DOCS, PLUGIN, TIERS, all_of, check, exported, labels_left, recorded, rules

MINUTES = {"5m": 5, "30m": 30, "1h": 60, "6h": 360, "3d": 4320}
BURNS = {rule["alert"]: rule["expr"] for rule in rules("alert") if "slo_burn" in rule["expr"]}


def unit_tests() -> list[dict[str, Any]]:
    return yaml.safe_load((DOCS / "alerts_test.yml").read_text())["tests"]


@on(edge, tiers=TIERS)
async def test_every_metric_and_label_of_the_rules_is_exported(at: Edge) -> None:
    there = all_of(await exported(at))
    for rule in rules("record"):
        check(rule["record"], rule["expr"], there)
        assert labels_left(rule["expr"], there) == there[rule["record"]], rule["record"]
    for rule in rules("alert"):
        check(rule["alert"], rule["expr"], there)
        told = " ".join(rule["annotations"].values())
        assert set(re.findall(r"\$labels\.(\w+)", told)) <= labels_left(rule["expr"], there), rule["alert"]
        assert set(re.findall(r"rubato_\w+", told)) <= set(there), rule["alert"]
    for case in unit_tests():
        for line in case.get("input_series", ()):
            check(case["name"], line["series"], there)


def test_counts_that_rules_add_up_over_servers_are_dropped_behind_a_gateway() -> None:
    """The plug-in counts what the gateway in front of it counts: docs/operate.md has Prometheus drop those."""
    (regex,) = re.findall(r"^ +regex: (rubato_.*)$", (DOCS / "operate.md").read_text(), re.MULTILINE)
    registry = PluginMetrics(CollectorRegistry(), counts=True).registry
    counters = {f"{metric.name}_total" for metric in registry.collect() if metric.type == "counter"}
    dropped = {name for name in counters if re.fullmatch(regex, name)}
    summed = " ".join(rule["expr"] for rule in (*rules("record"), *rules("alert")) if "instance" not in rule["expr"])
    assert dropped >= counters & set(re.findall(r"rubato_\w+", summed)) >= {"rubato_requests_offered_total"}
    assert not dropped & set(PLUGIN)  # those no gateway has


def test_the_page_on_operating_has_every_alert() -> None:
    page = (DOCS / "operate.md").read_text().split("## Alerts\n")[1].split("\n## ")[0]
    said = dict(re.findall(r"^\| `(\w+)` \| (\w+) \|", page, re.MULTILINE))
    assert {rule["alert"]: rule["labels"]["severity"] for rule in rules("alert")} == said


def test_what_is_recorded_is_there_when_it_is_used() -> None:
    """In the order in which Prometheus evaluates a group, which is that of the file."""
    so_far: set[str] = set()
    for rule in rules("record"):
        assert set(re.findall(r"tier:[\w:]+", rule["expr"])) <= so_far, rule["record"]
        so_far.add(rule["record"])


def test_a_burn_that_alerts_can_be_reached() -> None:
    """Nothing burns faster than a total outage. An alert has a long window, and a short one of the same factor."""
    (stated,) = (rule["expr"] for rule in rules("record") if "objective" in rule["record"])
    most = 1 / (1 - float(stated.split()[0]))
    assert len(BURNS) == 3
    for name, expr in BURNS.items():
        (long, factor), (short, again) = re.findall(r"slo_burn:ratio_rate(\w+) > ([\d.]+)", expr)
        assert factor == again, name
        assert 1 <= float(factor) < 0.5 * most, name  # an outage is seen within half of the long window
        assert 10 <= MINUTES[long] / MINUTES[short] <= 12, name
        assert f"requests_offered:rate{long} *" in expr, name
        assert {f"tier:rubato_slo_burn:ratio_rate{window}" for window in (long, short)} <= set(recorded()), name


def firing(case: dict[str, Any]) -> Iterator[tuple[set[str], set[str]]]:
    """Of each check of a unit test: which alerts it expects, and which others it would see."""
    every = {rule["alert"] for rule in rules("alert")}
    for test in case.get("alert_rule_test", ()):
        named = {test["alertname"]}
        yield (named, set()) if test["exp_alerts"] else (set(), named)
    for test in case.get("promql_expr_test", ()):
        if "ALERTS" in test["expr"]:
            chosen = re.search(r'alertname=~"([^"]*)"', test["expr"])
            seen = {name for name in every if chosen is None or re.fullmatch(chosen[1], name)}
            fired = set(re.findall(r'alertname="(\w+)"', " ".join(s["labels"] for s in test["exp_samples"])))
            yield fired, seen - fired


def test_every_alert_has_a_unit_test_that_fires_and_one_that_does_not() -> None:
    cases = [pair for case in unit_tests() for pair in firing(case)]
    every = {rule["alert"] for rule in rules("alert")}
    assert set().union(*(fired for fired, _ in cases)) == every
    assert set().union(*(quiet for _, quiet in cases)) == every


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed (Debian: package prometheus)")
@pytest.mark.parametrize("what", [("check", "rules", "alerts.yml"), ("test", "rules", "alerts_test.yml")])
def test_promtool_accepts(what: tuple[str, ...]) -> None:
    done = subprocess.run(["promtool", *what], cwd=DOCS, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
