"""Options of `serve`, `gateway`, `epp`, `check` and `simulate` that make the configuration of a server."""

from __future__ import annotations

import argparse
from typing import Any

from rubato.cli import common_options
from rubato.config.schema import Config, load
from rubato.fleet.cluster_options import PolicyChoice


def add(parser: argparse.ArgumentParser, *, replicas: bool = True, file: bool = True) -> None:
    """Declares the options, with `file` also --config; other verbs take the file as an argument."""
    if file:
        parser.add_argument("--config", metavar="FILE", help="YAML file")
    parser.add_argument(
        "--policy", action=common_options.Once, metavar="NAME[:SETTING=VALUE,...][@ROUTER[:...]]",
        help="scheduling policy with settings and router; NAME is a policy's, a file.py or a dotted module",
    )  # fmt: skip
    parser.add_argument("--router", metavar="NAME", help="routing policy: a name, a file.py or a dotted module")
    if replicas:
        common_options.replicas(parser)
    parser.add_argument(
        "--set", action="append", default=[], metavar="NAME=VALUE",
        help="a policy setting (`safety_margin=0.2`, `router.per_request=32`) or any of the configuration "
        "(`engine.kv_gib=2`)",
    )  # fmt: skip


def address(parser: argparse.ArgumentParser) -> None:
    """Declares where a server listens, and its event log."""
    parser.add_argument(
        "--host", metavar="ADDRESS", help="address to listen on (default: the configuration's, or 127.0.0.1)"
    )
    parser.add_argument(
        "--port", type=int, metavar="N", help="0 = any free one (default: the configuration's, or 8000)"
    )
    parser.add_argument("--event-log", metavar="FILE", help="write the event log here (JSON lines)")


def config(args: argparse.Namespace, **option_values: Any) -> Config:
    """Returns the configuration in the file of --config, changed by options and then by --set. A name without a dot in
    --set is a setting of the policy, unless the configuration has it.

    Args:
        args: as parsed.
        option_values: of the options, by setting; None: not given.
    """
    values = {name: value for name, value in option_values.items() if value is not None}
    if args.policy and (":" in args.policy or "@" in args.policy):  # written as for `sweep`
        choice = PolicyChoice.parse(args.policy, args.router or "auto")
        values |= {"policy": choice.policy, "router": choice.router}
        values |= {f"policy.{name}": value for name, value in choice.settings.items()}
        values |= {f"router.{name}": value for name, value in choice.router_settings.items()}
    else:
        values |= {name: value for name in ("policy", "router") if (value := getattr(args, name))}
    if getattr(args, "replicas", None) is not None:
        values["replicas"] = args.replicas
    overrides = []
    for setting in args.set:
        name = setting.partition("=")[0]
        overrides.append(setting if "." in name or name in Config.model_fields else f"policy.{setting}")
    config = load(args.config or {}, overrides, values)
    if config.model is None and config.engine.name == "torch":
        config = config.model_copy(update={"model": "bundled"})
    return config
