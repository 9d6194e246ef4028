"""`rubato serve`."""

from __future__ import annotations

import argparse

from rubato.cli import server_options

EXAMPLES = (
    "bundled",
    "--config rubato.yaml --policy edf --port 8080",
)


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "model", nargs="?", metavar="MODEL",
        help="a local Hugging Face folder, or `bundled` (the default); with --engine vllm whatever vLLM serves",
    )  # fmt: skip
    server_options.add(parser)
    parser.add_argument("--engine", metavar="KIND", help="torch (the default), simulated, vllm (on Ray), or any")
    parser.add_argument(
        "--tensor-parallel",
        "--tensor-parallel-size",
        type=int,
        metavar="GPUS",
        help="GPUs of one vLLM server (default: 1)",
    )
    parser.add_argument(
        "--ray-address", metavar="ADDRESS",
        help="run replicas in this Ray cluster, such as `auto` (default with --engine vllm: one is started here)",
    )  # fmt: skip
    parser.add_argument(
        "--host", metavar="ADDRESS", help="address to listen on (default: the configuration's, or 127.0.0.1)"
    )
    parser.add_argument(
        "--port", type=int, metavar="N", help="0 = any free one (default: the configuration's, or 8000)"
    )
    parser.add_argument("--event-log", metavar="FILE", help="write the event log here (JSON lines)")


def run(args: argparse.Namespace) -> int:
    from rubato.serving.serve import serve  # the server's libraries are not needed by the other commands

    given = {"model": args.model, "host": args.host, "port": args.port, "event_log": args.event_log}
    given |= {"engine.kind": args.engine, "engine.tensor_parallel": args.tensor_parallel}
    if args.ray_address is not None:
        given |= {"fleet.kind": "ray", "fleet.address": args.ray_address}
    config = server_options.config(args, **given)
    if args.tensor_parallel is not None and config.engine.name != "vllm":
        raise ValueError(
            f"--tensor-parallel: engine {config.engine.name!r} runs a replica on one device; give --engine vllm"
        )
    return serve(config)
