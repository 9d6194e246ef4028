"""`rubato serve`."""

from __future__ import annotations

import argparse

from rubato.cli import server_options


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", nargs="?", help="a local Hugging Face folder, or `bundled` (the default)")
    server_options.add(parser)
    parser.add_argument("--host", help="address to listen on (default: the configuration's, or 127.0.0.1)")
    parser.add_argument("--port", type=int, help="default: the configuration's, or 8000")
    parser.add_argument("--event-log", metavar="FILE", help="write the event log here (JSON lines)")


def run(args: argparse.Namespace) -> int:
    from rubato.serving.serve import serve  # the server's libraries are not needed by the other commands

    return serve(
        server_options.config(args, model=args.model, host=args.host, port=args.port, event_log=args.event_log)
    )
