"""Writes docs/metrics.md: the metrics of each door with their labels, from what Prometheus is told of them.

python docs/metrics.py
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

from prometheus_client import CollectorRegistry

from rubato.frontdoor.metrics import SLOMetrics
from rubato.serving.gateway_metrics import GatewayMetrics
from rubato.serving.server_metrics import Metrics
from rubato.serving.vllm_reports import PluginMetrics

PAGE = Path(__file__).resolve().parent / "metrics.md"
HEAD = """# Metrics

`/metrics` of each door is Prometheus' text format and needs no key. [Operate](operate.md) has the dashboard and the
alerts. Label values are tiers, tenants, replicas and fixed words, never a client's text; beyond a hundred tiers or
tenants, the rest is `other`. `make api` writes this page from the code.

## Attainment

Attainment is the share of offered requests that kept their whole SLO. Refused, failed and cancelled requests were
offered, too:

    sum by (tier) (rate(rubato_slo_met_total{dimension="all"}[5m]))
      / sum by (tier) (rate(rubato_requests_offered_total[5m]))

Over a window that is not much longer than a request, divide by `rubato_requests_finished_total` instead: those that end
in it are not those that were offered in it.

To see which time is missed, divide `rubato_slo_met_total` by `rubato_slo_promised_total` for `dimension` `ttft`,
`tpot` (the mean over the request) or `e2e`. `rubato_slo_missed_total` counts misses by [cause](http-api.md#causes).
"""
TITLES = (
    ("Requests and SLOs", "All doors but the endpoint picker have these."),
    ("Server and gateway", "`rubato serve` and `rubato gateway` have these, too."),
    ("Gateway", "`rubato gateway` has these, too."),
    ("Plug-in", "In vLLM's `/metrics`, beside vLLM's own and those of the first table."),
    ("Under vLLM's names", "`rubato serve` and `rubato gateway` export these where the meaning is vLLM's."),
)


def page() -> str:
    """The page as the code has it now."""
    common = rows(SLOMetrics(CollectorRegistry()).registry)
    server = Metrics("model", list, lambda: 0)
    of_server = rows(server.registry)
    GatewayMetrics(server, {}, list)
    of_gateway = rows(server.registry)
    of_plugin = rows(PluginMetrics(CollectorRegistry(), counts=True).registry)
    tables = (
        common,
        {name: row for name, row in of_server.items() if name not in common and not name.startswith("vllm:")},
        {name: row for name, row in of_gateway.items() if name not in of_server},
        {name: row for name, row in of_plugin.items() if name not in common},
        {name: row for name, row in of_server.items() if name.startswith("vllm:")},
    )
    return "\n".join([HEAD, *(line for (title, about), table in zip(TITLES, tables, strict=True)
                              for line in section(title, about, table))])  # fmt: skip


def rows(registry: CollectorRegistry) -> Mapping[str, str]:
    """Of each metric its row of a table, by name."""
    found = {}
    for collector in list(registry._collector_to_names):
        for family in collector.collect():
            labels = getattr(family, "_labelnames", None) or getattr(collector, "_labelnames", ())
            name = f"{family.name}_total" if family.type == "counter" else family.name
            shown = ", ".join(label for label in labels if label != "model_name")
            found[name] = f"| `{name}` | {family.type} | {shown} | {family.documentation} |"
    return found


def section(title: str, about: str, table: Mapping[str, str]) -> Iterator[str]:
    yield f"## {title}\n\n{about}\n\n| metric | type | labels | meaning |\n|---|---|---|---|"
    yield from (table[name] for name in sorted(table))
    yield ""


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
