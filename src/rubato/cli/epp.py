"""`rubato epp`."""

from __future__ import annotations

import argparse

from rubato.cli import server_options
from rubato.core.extras import extra

EXAMPLES = (
    "--server http://10.0.0.7:8000 --server http://10.0.0.8:8000",
    "--config gateway.yaml --listen 0.0.0.0:9002",
)


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--server", action="append", default=[], metavar="URL",
        help="an OpenAI server by its IP address, such as http://10.0.0.7:8000; as often as there are servers",
    )  # fmt: skip
    server_options.add(parser, replicas=False)
    parser.add_argument(
        "--listen", default="127.0.0.1:9002", metavar="ADDRESS:PORT", help="where to serve gRPC (default: %(default)s)"
    )
    parser.add_argument("--event-log", metavar="FILE", help="write the event log here (JSON lines)")


def run(args: argparse.Namespace) -> int:
    host, _, port = args.listen.rpartition(":")
    if not host or not port.isdecimal():
        raise ValueError(f"--listen {args.listen}: give an address and a port, such as 127.0.0.1:9002")
    values = {"servers": args.server or None, "host": host.strip("[]"), "port": int(port), "event_log": args.event_log}
    config = server_options.config(args, **values)
    if not config.servers:
        raise ValueError("no server: give --server URL, or `servers` in the configuration")
    with extra("epp", "rubato epp"):
        from rubato.serving.epp_server import serve
    return serve(config)
