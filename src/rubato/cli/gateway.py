"""`rubato gateway`."""

from __future__ import annotations

import argparse

from rubato.cli import server_options

EXAMPLES = (
    "--server http://gpu-1:8000 --server http://gpu-2:8000",
    "--config gateway.yaml --policy edf",
)


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--server", action="append", default=[], metavar="URL",
        help="an OpenAI server, such as http://10.0.0.7:8000; as often as there are servers",
    )  # fmt: skip
    server_options.add(parser, replicas=False)
    parser.add_argument(
        "--host", metavar="ADDRESS", help="address to listen on (default: the configuration's, or 127.0.0.1)"
    )
    parser.add_argument(
        "--port", type=int, metavar="N", help="0 = any free one (default: the configuration's, or 8000)"
    )
    parser.add_argument("--event-log", metavar="FILE", help="write the event log here (JSON lines)")


def run(args: argparse.Namespace) -> int:
    from rubato.serving.serve import serve  # the server's libraries are not needed by the other commands

    servers = args.server or None
    config = server_options.config(args, servers=servers, host=args.host, port=args.port, event_log=args.event_log)
    if not config.servers:
        raise ValueError("no server: give --server URL, or `servers` in the configuration")
    return serve(config)
