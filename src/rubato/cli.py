"""The command `rubato`: each subcommand parses its words and hands over."""

from __future__ import annotations

import argparse
import asyncio
import copy
import os
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import yaml

from rubato import bench, policies, results, trace, workload
from rubato import plot as plotting
from rubato.config import Config, load
from rubato.metrics import steps
from rubato.slo import RULES
from rubato.types import SLO, Limits


def main(argv: Sequence[str] | None = None) -> int:
    """Run one subcommand; its exit status. 2: what was asked for is impossible, and the message says why."""
    sys.path.append(os.getcwd())  # for a policy of one's own, `--policy my_package.my_module`
    parser = _parser()
    args = parser.parse_args(argv)
    run: Callable[[argparse.Namespace], int] = args.run
    try:
        return run(args)
    except (ValueError, ImportError, OSError, RuntimeError) as error:
        print(f"rubato {args.command}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


def _end_on_sigterm() -> None:
    """Leave by an exception, so that child processes are stopped on the way out (`serve` has a way of its own)."""

    def leave(number: int, frame: object) -> None:
        raise SystemExit(128 + number)

    signal.signal(signal.SIGTERM, leave)


# --------------------------------------------------------------------------- what can be said


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="rubato", description="Serve language models to stated SLOs.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def command(name: str, run: Callable[[argparse.Namespace], int], about: str) -> argparse.ArgumentParser:
        sub = commands.add_parser(name, help=about, description=about)
        sub.set_defaults(run=run)
        return sub

    serve = command("serve", _serve, "serve a model over OpenAI's API")
    serve.add_argument("model", nargs="?", help="a local Hugging Face folder, or `bundled` (the default)")
    _server_options(serve)
    serve.add_argument("--host")
    serve.add_argument("--port", type=int)
    serve.add_argument("--trace", help="write the event log here (JSON lines)")

    run = command("bench", _bench, "offer a workload to a server, open loop, and judge what comes back")
    run.add_argument("url", help="the server, such as http://127.0.0.1:8000")
    run.add_argument("--model", help="model name (default: the first that the server lists)")
    _workload_options(run)
    run.add_argument("--label", default="run", help="what the table calls this run")
    run.add_argument(
        "--slo", choices=("slo", "body", "tier", "none"), default="body",
        help="how to state SLOs: body = in the body; slo = and the tier by its name, which the server must know",
    )  # fmt: skip
    run.add_argument("--timeout", type=float, default=600.0, help="seconds until a request is given up")
    run.add_argument("--max-delay", type=float, help="seconds the load generator may be late at p99")
    run.add_argument("--allow-late", action="store_true", help="exit 0 also when the run is invalid")
    run.add_argument("--no-progress", action="store_true")
    _result_options(run)

    simulate = command("simulate", _simulate, "run a workload through the same cluster code on a virtual clock")
    _workload_options(simulate)
    _server_options(simulate)
    simulate.add_argument("--steps", help="event log of a live run: fit the latency model on its steps")
    simulate.add_argument("--noise", type=float, default=0.0, help="relative spread of simulated step times")
    _result_options(simulate)

    make = command("workload", _workload, "write a workload file")
    make.add_argument("output", help="file to write")
    _workload_options(make, file=False)

    demo = command("demo", _demo, "measure this machine, then serve three classes of requests, policy against policy")
    demo.add_argument("--out", default="results/demo", help="folder for JSON, PNG and logs")
    demo.add_argument("--policy", default="edf", help="the policy to set against the baselines")
    demo.add_argument("--seconds", type=float, help="seconds of load per policy")
    demo.add_argument("--seed", type=int, default=0)
    demo.add_argument("--no-progress", action="store_true")

    command("policies", _policies, "list policies, their settings and sources")
    return parser


def _server_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--config", help="YAML file")
    parser.add_argument("--policy", help="scheduling policy, by name or dotted module")
    parser.add_argument("--router", help="routing policy, by name or dotted module")
    parser.add_argument("--replicas", type=int)
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="a policy setting (`safety=0.2`, `router.per_request=32`) or any of the configuration (`engine.kv_gib=2`)",
    )


def _workload_options(parser: argparse.ArgumentParser, file: bool = True) -> None:
    if file:
        parser.add_argument("--workload", help="workload file (default: one is made)")
    parser.add_argument("--rate", type=float, help="requests per second (default 1)")
    parser.add_argument("--duration", type=float, default=60.0, help="seconds of arrivals")
    parser.add_argument("--seed", type=int, default=0)
    for tier, ttft, tpot in (("chat", 2000, 150), ("code", 3000, 200), ("summary", 6000, 300)):
        parser.add_argument(
            f"--{tier}", type=_slo, default=SLO(ttft / 1e3, tpot / 1e3), metavar="TTFT_MS,TPOT_MS",
            help=f"SLO of tier {tier} (default {ttft},{tpot})",
        )  # fmt: skip
    parser.add_argument("--judge", choices=RULES, help="judging rule (default deadline)")


def _result_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", metavar="FILE", help="write results as JSON; - for standard output")
    parser.add_argument("--plot", metavar="FILE", help="write a PNG")
    parser.add_argument("--records", metavar="FILE", help="write one JSON line per request")


def _slo(text: str) -> SLO:
    try:
        ttft, tpot = (float(part) / 1e3 if part.strip() else None for part in text.split(","))
        return SLO(ttft, tpot)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r}: give TTFT and TPOT in ms, such as 1000,80 ({error})") from error


# --------------------------------------------------------------------------- what they do


def _serve(args: argparse.Namespace) -> int:
    from rubato.serve import serve  # the server's libraries are not needed by the other commands

    return serve(_config(args, model=args.model, host=args.host, port=args.port, trace=args.trace))


def _config(args: argparse.Namespace, **given: Any) -> Config:
    """The configuration of --config, changed by options: a bare --set is a setting of the policy."""
    overrides = [f"{name}={value}" for name, value in given.items() if value is not None]
    if args.policy:
        overrides.append(f"policy={args.policy}")
    if args.router:
        overrides.append(f"router={args.router}")
    if args.replicas is not None:
        overrides.append(f"replicas={args.replicas}")
    for setting in args.set:
        name = setting.partition("=")[0]
        overrides.append(setting if "." in name or name in Config.model_fields else f"policy.{setting}")
    config = load(args.config or {}, overrides)
    if config.model is None and config.engine.name == "torch":
        config = config.model_copy(update={"model": "bundled"})
    return config


def _asked(args: argparse.Namespace) -> workload.Workload:
    path = getattr(args, "workload", None)
    if path:
        read = workload.read(path)
        return read if args.rate is None else read.rescaled(args.rate)
    kinds = [
        workload.chat(args.chat, share=0.4),
        workload.code(args.code, share=0.3),
        workload.summary(args.summary, share=0.3),
    ]
    return workload.make("mix", kinds, 1.0 if args.rate is None else args.rate, duration=args.duration, seed=args.seed)


def _workload(args: argparse.Namespace) -> int:
    made = _asked(args)
    workload.write(made, args.output)
    print(f"{args.output}: {len(made.arrivals)} requests in {made.duration:g} s")
    return 0


def _bench(args: argparse.Namespace) -> int:
    asked = _asked(args)
    model = args.model or asyncio.run(bench.first_model(args.url))
    run = asyncio.run(
        bench.run(
            asked,
            args.url,
            model,
            label=args.label,
            tier_field=args.slo,
            rule=args.judge or "deadline",
            timeout=args.timeout,
            max_delay=args.max_delay,
            progress=not args.no_progress,
        )
    )
    _report(args, [run])
    return 0 if run.valid or args.allow_late else 1


def _simulate(args: argparse.Namespace) -> int:
    from rubato.serve import latency_of, lengths_of, simulation_limits
    from rubato.simulate import Setup, simulated_run

    config = _config(args)
    asked = _asked(args)
    model = latency_of(config)
    if args.steps:
        model.fit(steps(trace.read(args.steps)))
    setup = Setup(
        latency=lambda: copy.deepcopy(model),
        limits=Limits(**simulation_limits(config)),
        policy=config.policy.name,
        settings=config.policy.settings,
        router=config.router.name,
        router_settings=config.router.settings,
        replicas=config.replicas,
        noise=args.noise,
        seed=args.seed,
        max_in_flight=config.max_in_flight,
        lengths=lengths_of(config, {a.id: a.output_tokens for a in asked.arrivals}),
        rule=args.judge or config.judge,
    )
    _report(args, [simulated_run(asked, setup)])
    return 0


def _report(args: argparse.Namespace, runs: Sequence[results.Run]) -> None:
    to_stdout = args.json == "-"
    print(results.table(runs), file=sys.stderr if to_stdout else sys.stdout)
    if to_stdout:
        sys.stdout.buffer.write(results.dumps(runs))
    elif args.json:
        results.write_json(args.json, runs)
    if args.records:
        for run in runs:
            results.write_records(args.records, run)
    if args.plot:
        plotting.plot(args.plot, runs)


def _demo(args: argparse.Namespace) -> int:
    from rubato.demo import demo

    _end_on_sigterm()
    return demo(Path(args.out), policy=args.policy, seconds=args.seconds, seed=args.seed, progress=not args.no_progress)


def _policies(args: argparse.Namespace) -> int:
    for name, kind, about, source, settings in policies.describe():
        print(f"{name}  ({kind})\n    {about}\n    source: {source}")
        for setting, default in settings.items():
            print(f"    --set {setting}={yaml.safe_dump(default).split(chr(10))[0]}")
        print()
    return 0


if __name__ == "__main__":
    sys.exit(main())
