"""`rubato serve`."""

from __future__ import annotations

import argparse

from rubato.cli import common_options, server_options

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
    engine = parser.add_argument_group("engine")
    engine.add_argument("--engine", metavar="KIND", help="torch (the default), simulated, vllm (on Ray), or any")
    engine.add_argument("--served-model-name", metavar="NAME", help="what clients call the model (default: its own)")
    engine.add_argument(
        "--kv-cache-memory-bytes", dest="kv_gib", type=common_options.gib, metavar="BYTES",
        help="KV memory of engine torch, such as 4G (default 1G)",
    )  # fmt: skip
    engine.add_argument("--tensor-parallel-size", type=int, metavar="GPUS", help="GPUs of one vLLM server (default: 1)")
    engine.add_argument(
        "--ray-address", metavar="ADDRESS",
        help="run replicas in this Ray cluster, such as `auto` (default with --engine vllm: one is started here)",
    )  # fmt: skip
    server_options.address(parser)


def run(args: argparse.Namespace) -> int:
    from rubato.serving.serve import serve  # the server's libraries are not needed by the other commands

    values = {"model": args.model, "host": args.host, "port": args.port, "event_log": args.event_log}
    values |= {"served_model_name": args.served_model_name, "engine.kind": args.engine}
    values |= {"engine.tensor_parallel_size": args.tensor_parallel_size, "engine.kv_gib": args.kv_gib}
    if args.ray_address is not None:
        values |= {"fleet.kind": "ray", "fleet.address": args.ray_address}
    config = server_options.config(args, **values)
    if args.tensor_parallel_size is not None and config.engine.name != "vllm":
        raise ValueError(
            f"--tensor-parallel-size: engine {config.engine.name!r} runs a replica on one device; give --engine vllm"
        )
    if args.kv_gib is not None and config.engine.name == "vllm":
        raise ValueError("--kv-cache-memory-bytes: give it to vLLM, --set 'engine.args=[--kv-cache-memory-bytes=4G]'")
    return serve(config)
