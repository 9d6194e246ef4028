"""`rubato gateway`."""

from __future__ import annotations

import argparse

from rubato.cli import server_options

EXAMPLES = (
    "--server http://gpu-1:8000 --server http://gpu-2:8000",
    "--config gateway.yaml --policy edf",
    "--demo",
)


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--server", action="append", default=[], metavar="URL",
        help="an OpenAI server, such as http://10.0.0.7:8000; as often as there are servers",
    )  # fmt: skip
    server_options.add(parser, replicas=False)
    server_options.address(parser)
    parser.add_argument(
        "--demo", action="store_true", help="over four simulated servers under a load that rises above capacity"
    )
    parser.add_argument(
        "--without-slos", action="store_true", help="with --demo: servers without the plug-in, in stock vLLM's order"
    )


def run(args: argparse.Namespace) -> int:
    from rubato.serving.serve import serve  # the server's libraries are not needed by the other commands

    if args.demo or args.without_slos:
        return _demo(args)
    servers = args.server or None
    config = server_options.config(args, servers=servers, host=args.host, port=args.port, event_log=args.event_log)
    if not config.servers:
        raise ValueError("no server: give --server URL, or `servers` in the configuration")
    return serve(config)


def _demo(args: argparse.Namespace) -> int:
    """Runs the demo. Raises ValueError for options that contradict it."""
    import rubato.serving  # noqa: F401 - says what to install where something is missing
    from rubato.demo import gateway_demo

    if not args.demo:
        raise ValueError("--without-slos is for the demo: give --demo too")
    if args.server or args.config:
        raise ValueError("--demo starts servers of its own: leave out --server and --config")
    if args.without_slos and (args.policy or args.router):
        raise ValueError("--without-slos is stock vLLM's order: leave out --policy and --router")
    has_link = not args.without_slos
    values = {"host": args.host, "port": args.port, "event_log": args.event_log}
    values |= gateway_demo.settings(has_link=has_link) | ({} if has_link else gateway_demo.STOCK_ORDER)
    return gateway_demo.run(server_options.config(args, **values), has_link=has_link)
