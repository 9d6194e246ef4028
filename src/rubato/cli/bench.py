"""`rubato bench`."""

from __future__ import annotations

import argparse
import asyncio
import os
import sys

from rubato.cli import answers, workload_options
from rubato.core.server_url import check_url
from rubato.measure import goodput, http_client, load_generator
from rubato.workloads.workload import Workload

EXAMPLES = (
    "http://127.0.0.1:8000 --kinds mix.yaml --rate 4 --duration 120",
    "http://127.0.0.1:8000 --scenario slos-serve-chatbot --rate 2 --json run.json --plot run.png",
)

NO_SLO_SENT = "no SLO is sent, since this server is not known to take them; --slo-as body sends them"


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("url", metavar="URL", help="the server, such as http://127.0.0.1:8000")
    parser.add_argument("--model", metavar="NAME", help="model name (default: the first that the server lists)")
    parser.add_argument("--endpoint", choices=("chat", "completions"), default="chat", help="of OpenAI's API")
    parser.add_argument(
        "--api-key", default=os.environ.get("OPENAI_API_KEY"), metavar="KEY", help="default: $OPENAI_API_KEY"
    )
    parser.add_argument("--header", action="append", default=[], metavar="NAME=VALUE", help="an HTTP header to send")
    parser.add_argument(
        "--slo-as", choices=("auto", "body", "slo", "tier", "vllm-xargs", "none"), default="auto",
        help="how to state SLOs: body = as `slo` in the body; slo = and the tier by its name, which the server must "
        "know; vllm-xargs = as flat keys in `vllm_xargs`; auto = body for Rubato's server, gateway and vLLM plug-in, "
        "none for any other",
    )  # fmt: skip
    parser.add_argument(
        "--ignore-eos", action=argparse.BooleanOptionalAction,
        help="ask for exactly as many tokens as the workload says (default: where the server is known to take it)",
    )  # fmt: skip
    workload_options.add(parser)
    parser.add_argument("--label", default="run", metavar="NAME", help="what the table calls this run")
    parser.add_argument(
        "--timeout", type=float, default=600.0, metavar="SECONDS", help="seconds until a request is given up"
    )
    parser.add_argument(
        "--max-delay", type=float, metavar="SECONDS", help="seconds the load generator may be late at p99"
    )
    parser.add_argument("--allow-late", action="store_true", help="exit 0 also when the run is invalid")
    parser.add_argument("--no-progress", action="store_true", help="say nothing until the results")
    answers.add(parser, records=True)


def run(args: argparse.Namespace) -> int:
    check_url(args.url, "give --api-key, or a --header")
    loads = workload_options.workloads_of(args)
    headers = dict(_header(text) for text in args.header)
    bounds = goodput.parse(args.goodput) if args.goodput else None
    models = asyncio.run(http_client.list_models(args.url, args.api_key, headers))
    slo_as = args.slo_as
    if slo_as == "auto":
        slo_as = "body" if models.knows_slos else "none"
        if slo_as == "none" and any(has_slos(load) for load in loads):
            print(f"rubato bench: {NO_SLO_SENT}", file=sys.stderr)
    target = http_client.Endpoint(
        args.url,
        args.model or models.first(args.url),
        args.endpoint,
        slo_as,
        ignore_eos=models.fixed_lengths if args.ignore_eos is None else args.ignore_eos,
        continuous_usage=models.fixed_lengths,
        api_key=args.api_key,
        headers=headers,
    )
    runs = [
        asyncio.run(
            load_generator.run(
                load,
                target,
                label=args.label,
                slo_rule=args.slo_rule or "deadline",
                timeout=args.timeout,
                max_delay=args.max_delay,
                progress=not args.no_progress,
                goodput=bounds,
            )
        )
        for load in loads
    ]
    answers.write_runs(args, runs)
    return 0 if all(run.valid for run in runs) or args.allow_late else 1


def has_slos(load: Workload) -> bool:
    """Returns whether any request has an SLO."""
    return any(not load.slo(one).best_effort for one in load.arrivals)


def _header(text: str) -> tuple[str, str]:
    name, found, value = text.partition("=")
    if not found or not name:
        raise ValueError(f"--header {text!r}: write it as NAME=VALUE")
    return name, value
