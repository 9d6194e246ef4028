"""What the rules and the dashboard in docs/ ask Prometheus for, and what our servers export."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml
from prometheus_client.parser import text_string_to_metric_families

from rubato.core.events import Event
from rubato.core.request import SLO
from rubato.frontdoor.slo_fields import Tier, Tiers
from tests.kit.apps import Edge

DOCS = Path(__file__).parents[2] / "docs"
SUFFIXES = {"counter": ("_total",), "gauge": ("",), "histogram": ("_bucket", "_sum", "_count")}
TIERS = Tiers([Tier("good", SLO(5.0, 0.5, 9.0)), Tier("late", SLO(ttft=0.05)), Tier("never", SLO(1e-3), "refuse")])
TARGET = {"instance", "job"}  # labels that Prometheus adds to every sample
PLUGIN = {  # in vLLM's /metrics only
    "rubato_plan_seconds_bucket": {"replica", "le"},
    "rubato_plan_seconds_count": {"replica"},
    "rubato_plan_seconds_sum": {"replica"},
    "rubato_plan_deviations_total": {"replica", "cause"},
    "rubato_plan_fallbacks_total": {"replica"},
    "rubato_plan_stood_aside_total": {"replica"},
    "rubato_plan_faults_total": {"replica", "place"},
    "rubato_given_up": {"replica"},
    "rubato_reports_lost_total": {"replica"},
    "rubato_link_refused_total": {"replica"},
}
GATEWAY = {  # in a gateway's only
    "rubato_server_linked": {"replica"},
    "rubato_requests_placed_again_total": set[str](),
    "rubato_streams_continued_total": set[str](),
}
# Words of PromQL, as many as are used.
LANGUAGE = {
    "sum", "max", "and", "or", "unless", "group_left", "rate", "increase", "absent", "max_over_time",
    "histogram_quantile", "clamp_max",
}  # fmt: skip

Labels = Mapping[str, set[str]]  # metric -> its labels


def full(event: Event) -> None:
    raise OSError(28, "No space left on device")


async def exported(at: Edge) -> dict[str, set[str]]:
    """Every metric of a server that has met, missed and refused a request, and lost events."""
    asyncio.get_running_loop().set_exception_handler(lambda loop, what: None)
    at.cluster.listen(full)
    for tier in ("good", "late", "never"):
        await at.chat(service_tier=tier)
    return read((await at.http.get("/metrics")).text)


def read(page: str) -> dict[str, set[str]]:
    """The metrics of a page of them, with their labels."""
    found: dict[str, set[str]] = {}
    for family in text_string_to_metric_families(page):
        for suffix in SUFFIXES[family.type]:
            samples = [sample for sample in family.samples if sample.name == family.name + suffix]
            found[family.name + suffix] = {label for sample in samples for label in sample.labels}
    return found


def rules(kind: str) -> list[dict[str, Any]]:
    """kind: `record` or `alert`."""
    groups = yaml.safe_load((DOCS / "alerts.yml").read_text())["groups"]
    return [rule for group in groups for rule in group["rules"] if kind in rule]


def recorded() -> dict[str, set[str]]:
    """Prometheus' convention is level:metric:operations, where the level is the labels that are left."""
    names = [rule["record"] for rule in rules("record")]
    return {name: set(name.split(":")[0].split("_")) for name in names}


def all_of(server: Labels) -> dict[str, set[str]]:
    """What can be asked for where servers of every kind are scraped."""
    every = {**server, **PLUGIN, **GATEWAY}
    return {**{name: labels | TARGET for name, labels in every.items()}, **recorded()}


def check(title: str, expr: str, there: Labels) -> set[str]:
    """The metrics of an expression: there, and with the labels that it selects and groups by."""
    names = _names(expr)
    assert names, title
    assert names <= set(there), (title, names - set(there))
    for name, selected in re.findall(r"([\w:]+)\{([^}]*)\}", expr):
        asked = set(re.findall(r"(\w+)\s*(?:=|!=|=~|!~)\s*[\"']", selected))
        assert asked <= there[name], (title, name, asked - there[name])
    for labels, body in _grouped(expr):
        for name in _names(body):
            assert labels <= there[name], (title, name, labels - there[name])
    return names


def labels_left(expr: str, there: Labels) -> set[str]:
    """Those that the result may have."""
    groups = [labels for labels, _ in _grouped(expr)]
    return set().union(*groups) if groups else set().union(*(there[name] for name in _names(expr)))


def _names(expr: str) -> set[str]:
    for aside in (r"\"[^\"]*\"", r"\{[^}]*\}", r"\[[^\]]*\]", r"\b(?:by|on)\s*\([^)]*\)"):
        expr = re.sub(aside, " ", expr)
    return set(re.findall(r"(?<![\w:.])[a-zA-Z_][\w:]*", expr)) - LANGUAGE


def _grouped(expr: str) -> Iterator[tuple[set[str], str]]:
    """The labels of each aggregation, and what is aggregated."""
    for match in re.finditer(r"\bby\s*\(([^)]*)\)\s*\(", expr):
        depth, body = 1, ""
        for letter in expr[match.end() :]:
            depth += {"(": 1, ")": -1}.get(letter, 0)
            if not depth:
                break
            body += letter
        yield {label.strip() for label in match[1].split(",")}, body
