"""Options of `workload`, `bench` and `simulate` that say which requests are offered, and the workloads they make."""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from pathlib import Path

from rubato.cli import common_options, trace_options
from rubato.core.slo import SLO_RULES
from rubato.workloads import scenarios, traces, workload_file
from rubato.workloads.arrivals import ArrivalProcess, AtOnce, parse
from rubato.workloads.generate import Prefill, make
from rubato.workloads.prompts import with_texts
from rubato.workloads.workload import Workload


def add(parser: argparse.ArgumentParser, file: bool = True) -> None:
    """Declares the options, with `file` also a workload file, several runs and a judging rule."""
    _requests(parser.add_argument_group("requests"), file)
    _arrivals(parser.add_argument_group("arrivals"))
    _slos(parser.add_argument_group("SLOs and lengths"), file)
    runs = parser.add_argument_group("random draws and runs")
    runs.add_argument("--seed", type=int, default=0, metavar="N", help="of all random draws (default 0)")
    if file:
        several = runs.add_mutually_exclusive_group()
        several.add_argument(
            "--seeds", type=common_options.seeds, metavar="0,1,2", help="seeds: one run each, pooled in the table"
        )
        several.add_argument(
            "--rounds", type=int, metavar="N", help="number of runs: seeds from --seed on, or a file again"
        )


def _requests(options: argparse._ArgumentGroup, file: bool) -> None:
    """Declares where requests come from; without file, scenario or trace the kinds define the workload."""
    if file:
        options.add_argument("--workload", metavar="FILE", help="workload file (default: one is made)")
    options.add_argument(
        "--scenario", metavar="NAME", help="a paper's workload (`rubato workload --list`); lengths only"
    )
    options.add_argument(
        "--trace", metavar="FILE",
        help="CSV, JSON lines or JSON array of times and lengths; with --scenario its times only",
    )  # fmt: skip
    trace_options.add(options)
    common_options.tiers(options)
    options.add_argument(
        "--texts", action=argparse.BooleanOptionalAction,
        help="make prompts of these lengths, as a server needs them (default: but for scenarios)",
    )  # fmt: skip


def _arrivals(options: argparse._ArgumentGroup) -> None:
    options.add_argument(
        "--rate", "--request-rate", type=float, metavar="RATE", help="requests/s (default 1, or the trace's own)"
    )
    common_options.amount(options, "; default 60, or all of it")
    options.add_argument(
        "--arrivals", metavar="WORDS",
        help="poisson, gamma:cv=3, bursts:peak=6,size=130, on-off:on=10,off=50,quiet=0.1, "
        "piecewise:0=1,60=3,90=1,360=0, at-once, trace (default: the trace's, the scenario's, or poisson)",
    )  # fmt: skip
    options.add_argument(
        "--concurrency", "--max-concurrency", type=int, metavar="N",
        help="closed loop: N requests in flight, the next as one ends, as fast as that goes unless --rate, --arrivals "
        "or a trace say when each comes at the earliest",
    )  # fmt: skip


def _slos(options: argparse._ArgumentGroup, file: bool) -> None:
    options.add_argument("--slo-scale", type=float, metavar="F", help="factor on all SLO times")
    options.add_argument(
        "--prefill-ms", type=_line, metavar="BASE,PER_TOKEN",
        help="zero-load prefill time, of which a TTFT stated as a slowdown is a multiple",
    )  # fmt: skip
    options.add_argument(
        "--unloaded-ms", type=float, metavar="MS",
        help="time per token of a request alone, of which a trace's slo_ratio is a multiple",
    )  # fmt: skip
    options.add_argument(
        "--prompt-scale", type=float, default=1.0, metavar="F", help="with --scenario: factor on prompt lengths"
    )
    options.add_argument(
        "--max-model-len", type=int, metavar="TOKENS", help="most tokens of prompt + output: outputs are cut"
    )
    if file:
        options.add_argument("--slo-rule", choices=SLO_RULES, help="judging rule (default deadline)")
        options.add_argument(
            "--goodput", nargs="+", metavar="NAME:MS",
            help="bounds on a good request, all of which it must keep, in vLLM's spelling: ttft:200 tpot:30 e2el:5000",
        )  # fmt: skip


def _line(text: str) -> Prefill:
    try:
        base, per_token = (float(part) / 1e3 for part in text.split(","))
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r}: give two numbers of ms, such as 12,0.1") from error
    if base < 0.0 or per_token < 0.0 or base + per_token == 0.0:
        raise argparse.ArgumentTypeError(f"{text!r}: give two numbers of ms, 0 or more")
    return lambda tokens: base + per_token * tokens


def workload_of(args: argparse.Namespace, seed: int) -> Workload:
    """Makes the workload that the options describe: a scenario, a trace, --kinds or three tiers.

    Raises ValueError for options that contradict each other, OSError for a file that cannot be opened.
    """
    common_options.check_amount(args)
    if not args.trace:
        trace_options.check_unused(args)
    process = None if args.arrivals in (None, "trace") else parse(args.arrivals)
    if args.concurrency is not None and args.arrivals is None and args.rate is None and not args.trace:
        if args.count is None:
            raise ValueError("--concurrency offers requests as fast as others end: say how many by --count")
        process = AtOnce()
    if args.scenario:
        return _scale_slos(args, _scenario(args, seed, process))
    return _scale_slos(args, _trace(args, seed, process) if args.trace else _mix(args, seed, process))


def from_file(args: argparse.Namespace) -> Workload:
    """Reads the file of --workload, at --rate, with texts for --texts."""
    if args.kinds or args.trace or args.scenario:
        raise ValueError("--workload says everything: leave out --kinds, --trace and --scenario")
    trace_options.check_unused(args)
    workload = workload_file.read(args.workload)
    workload = _scale_slos(args, workload if args.rate is None else workload.rescaled(args.rate))
    return with_texts(workload) if args.texts else workload


def _scale_slos(args: argparse.Namespace, workload: Workload) -> Workload:
    """Returns the workload with --slo-scale and --concurrency applied."""
    if args.concurrency is not None:
        workload = replace(workload, concurrency=args.concurrency)
    return workload if args.slo_scale is None else workload.with_slo_scale(args.slo_scale)


def _duration(args: argparse.Namespace) -> float | None:
    return 60.0 if args.duration is None and args.count is None else args.duration


def _scenario(args: argparse.Namespace, seed: int, process: ArrivalProcess | None) -> Workload:
    if args.kinds:
        raise ValueError("--scenario has kinds of its own: leave out --kinds")
    rate = args.rate
    if args.trace:
        if process is not None:
            raise ValueError("--scenario takes its arrivals from --trace or from --arrivals: leave out one of them")
        whole = replace(trace_options.trace_options_of(args), seconds=None, count=None)
        process = traces.read(args.trace, whole).times
        rate = process.rate if rate is None else rate
    workload = scenarios.make(
        args.scenario,
        1.0 if rate is None else rate,
        count=args.count,
        duration=_duration(args),
        seed=seed,
        arrivals=process,
        prefill=args.prefill_ms,
        scale=args.prompt_scale,
        max_model_len=args.max_model_len,
    )
    return with_texts(workload) if args.texts else workload


def _trace(args: argparse.Namespace, seed: int, process: ArrivalProcess | None) -> Workload:
    trace = traces.read(args.trace, trace_options.trace_options_of(args))
    own = trace.has_slos and not args.kinds
    return traces.make(
        Path(args.trace).name.partition(".")[0],
        trace,
        () if own else common_options.kinds(args),
        rate=args.rate,
        arrivals=process,
        seed=seed,
        prefill=args.prefill_ms,
        unloaded=None if args.unloaded_ms is None else args.unloaded_ms / 1e3,
        texts=args.texts is not False,
    )


def _mix(args: argparse.Namespace, seed: int, process: ArrivalProcess | None) -> Workload:
    return make(
        Path(args.kinds or "mix").name.partition(".")[0],
        common_options.kinds(args),
        1.0 if args.rate is None else args.rate,
        duration=_duration(args),
        count=args.count,
        seed=seed,
        arrivals=process,
        prefill=args.prefill_ms,
        texts=args.texts is not False,
        max_model_len=args.max_model_len,
    )


def workloads_of(args: argparse.Namespace) -> list[Workload]:
    """Makes a workload for each run."""
    if args.rounds is not None and args.rounds < 1:
        raise ValueError(f"--rounds {args.rounds}: give 1 or more")
    if args.workload:
        if args.seeds:
            raise ValueError("--seeds makes workloads, but --workload is one already: use --rounds to repeat it")
        return [from_file(args)] * (args.rounds or 1)
    workloads = [workload_of(args, seed) for seed in args.seeds or range(args.seed, args.seed + (args.rounds or 1))]
    for name in traces.NOTES:
        if name in workloads[0].notes:
            print(f"rubato {args.command}: {workloads[0].notes[name]}", file=sys.stderr)
    return workloads
