"""Options that several verbs share."""

from __future__ import annotations

import argparse
import math
import re
from typing import Any

from rubato.core.request import SLO
from rubato.workloads.request_kinds import USUAL_SLOS, Kind, usual_kinds

TIERS = (("chat", 2000, 150), ("code", 3000, 200), ("summary", 6000, 300))  # default TTFT and TPOT, ms


class Once(argparse.Action):
    """Refuses an option that is given twice; argparse would silently keep the last value."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        if getattr(namespace, self.dest) is not None:
            parser.error(f"{option_string} is given twice: this command takes one (`rubato sweep` takes several)")
        setattr(namespace, self.dest, values)


def replicas(parser: argparse._ActionsContainer) -> None:
    parser.add_argument(
        "--replicas", type=int, metavar="N", help="replicas of the fleet (default: the configuration's, or 1)"
    )


def amount(options: argparse._ActionsContainer, default: str = "") -> None:
    """Declares how many requests there are; `default` is what the help of --duration says of it."""
    options.add_argument(
        "--count", "--num-prompts", type=int, metavar="N", help="number of requests (of a trace: its first)"
    )
    options.add_argument(
        "--duration", type=float, metavar="SECONDS", help=f"seconds of arrivals (of a trace: its first{default})"
    )


def check_amount(args: argparse.Namespace) -> None:
    """Raises ValueError for an impossible --count or --duration."""
    if args.count is not None and args.count < 1:
        raise ValueError(f"--count {args.count}: give 1 or more")
    if args.duration is not None and not 0.0 < args.duration < math.inf:
        raise ValueError(f"--duration {args.duration}: give seconds above 0")


def tiers(parser: argparse.ArgumentParser | argparse._ArgumentGroup) -> None:
    """Declares the options of request kinds: a file, or the SLOs of three tiers."""
    parser.add_argument("--kinds", metavar="FILE", help="YAML: tiers, their SLOs and the kinds of request in each")
    for tier, usual in USUAL_SLOS.items():
        milliseconds = ",".join(f"{1e3 * (bound or 0.0):g}" for bound in (usual.ttft, usual.tpot))
        parser.add_argument(
            f"--{tier}", type=slo, default=usual, metavar="TTFT_MS,TPOT_MS",
            help=f"SLO of tier {tier} (default {milliseconds}), without --kinds",
        )  # fmt: skip


def kinds(args: argparse.Namespace) -> list[Kind]:
    """Returns the request kinds of the options of `tiers`. Raises ValueError or OSError for an unusable file."""
    if args.kinds:
        from rubato.config import kinds_file  # the other commands need no pydantic

        return kinds_file.read(args.kinds)
    return list(usual_kinds({tier: getattr(args, tier) for tier in USUAL_SLOS}))


def slo(text: str) -> SLO:
    parts = text.split(",")
    expected = f"{text!r}: give TTFT and TPOT in ms, such as 1000,80"
    if len(parts) != 2:
        raise argparse.ArgumentTypeError(expected)
    try:
        return SLO(*(float(part) / 1e3 if part.strip() else None for part in parts))
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{expected} ({error})") from error


def gib(text: str) -> float:
    """Returns the GiB of a number of bytes as vLLM reads it: 4G and 4096M are binary, 4g and 4000m decimal."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([kmgtKMGT]?)", text)
    if match is None or not float(match[1]):
        raise argparse.ArgumentTypeError(f"{text!r}: give bytes, such as 4G or 4294967296")
    step = 1024.0 if match[2].isupper() else 1000.0
    power = " kmgt".index(match[2].lower() or " ")
    return float(match[1]) * math.pow(step, power) / 2**30


def seeds(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r}: give whole numbers, such as 0,1,2") from error


def numbers(text: str) -> list[float]:
    try:
        return [float(part) for part in text.split(",")]
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r}: give numbers, such as 1,2.5,4") from error
