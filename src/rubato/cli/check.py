"""`rubato check`: says whether a configuration would start and what it would run, or prints the JSON schema."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Mapping
from typing import Any

from rubato import policies
from rubato.cli import server_options
from rubato.config.schema import Config
from rubato.core.server_url import host_in_url

EXAMPLES = (
    "rubato.yaml",
    "gateway.yaml --set policy=edf",
    "--schema > rubato.schema.json",
)
NOT_CHECKED = "checked without its port, its servers and its weights"


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("config", nargs="?", metavar="FILE", help="YAML file, as of `serve` and `gateway` --config")
    server_options.add(parser, file=False)
    parser.add_argument("--schema", action="store_true", help="print the JSON schema of a configuration, for editors")


def run(args: argparse.Namespace) -> int:
    if args.schema:
        from rubato.config.json_schema import json_schema

        json.dump(json_schema(), sys.stdout, indent=2, ensure_ascii=False)
        print()
        return 0
    if args.config is None:
        raise ValueError("name the configuration: rubato check FILE (or --schema)")
    config = server_options.config(args)
    from rubato.serving.check import check_start  # the server's libraries

    check_start(config)
    print(f"{args.config}: valid ({NOT_CHECKED})")
    for what, text in _summary(config):
        print(f"  {what:9} {text}")
    return 0


def _summary(config: Config) -> Iterator[tuple[str, str]]:
    """Yields label and text of each line about what the configuration runs."""
    if config.servers:
        yield "runs", f"a gateway over {_several(len(config.servers), 'server')}"
        for server in config.servers:
            yield "", server.url
    elif config.engine.name == "vllm":
        yield "runs", f"{_several(config.replicas, 'vLLM server')} of {config.model} on Ray"
    else:
        where = "Ray actors" if config.fleet.name == "ray" else "this process"
        model = "" if config.model is None else f" of {config.model}"
        yield "runs", f"engine {config.engine.name}{model}, {_several(config.replicas, 'replica')} in {where}"
    yield "policy", _with_settings(config.policy.name, config.policy.settings)
    own = config.policy.name if hasattr(policies.module_of(config.policy.name), "Router") else "least_loaded"
    auto = config.router.name == "auto"
    yield "router", _with_settings(f"{own} (auto)" if auto else config.router.name, config.router.settings)
    for name, tier in config.tiers.items():
        times = {"TTFT": tier.ttft_ms, "TPOT": tier.tpot_ms, "e2e": tier.e2e_ms, "pause": tier.max_pause_ms}
        slo = ", ".join(f"{what} {ms:g} ms" for what, ms in times.items() if ms is not None) or "best effort"
        refused = "; refused when late" if tier.on_decline == "refuse" else ""
        yield "tier", f"{name}: {slo}{refused}{' (default)' if name == config.default_tier else ''}"
    for name, tenant in config.tenants.items():
        yield "tenant", f"{name}: {'all tiers' if tenant.tiers is None else ', '.join(tenant.tiers)}"
    scheme = "http" if config.tls is None else "https"
    yield "listens", f"{scheme}://{host_in_url(config.host)}:{config.port}"
    for what, path in {"event log": config.event_log, "step log": config.step_log}.items():
        if path is not None:
            yield what, path


def _several(count: int, what: str) -> str:
    return f"{count} {what}{'' if count == 1 else 's'}"


def _with_settings(name: str, settings: Mapping[str, Any]) -> str:
    pairs = ", ".join(f"{key}={value}" for key, value in settings.items())
    return f"{name} ({pairs})" if pairs else name
