"""The command `rubato`: a module of this package for each verb, imported when it is asked for."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Iterable, Sequence

import rubato
from rubato.cli import running

# Stated here, so that `rubato --help` imports none of them.
VERBS = {
    "serve": "serve a model over OpenAI's API",
    "bench": "offer a workload to a server, open loop, and judge what comes back",
    "simulate": "run a workload through the same cluster code on a virtual clock",
    "compare": "two result files, tier by tier: paired by request where the workload is the same",
    "fit": "fit a latency model to a server's event log or a table; prints `latency:` for its configuration",
    "workload": "write a workload file, or list the papers' workloads",
    "sweep": "policies at rates under seeds, simulated on all cores; one line a job in a file, resumable",
    "capacity": "the largest rate at which a fleet attains 90 and 98 % of its requests, per replica and per GPU",
    "plan": "the smallest fleet that attains a share of a trace's requests, what it costs and what binds it",
    "demo": "measure this machine, then serve three tiers of requests, policy against policy",
    "profile": "make a hardware profile: measure a model, or ask kernel tables",
    "policies": "list policies, their settings and sources",
}

# Beyond what either policy holds.
DIFFER = "rubato simulate --profile opt-13b-2xa100-40g --scenario slos-serve-mixed --rate 6 --duration 60 --policy edf"


def main(argv: Sequence[str] | None = None) -> int:
    """Run one verb; its exit status. 2: what was asked for is impossible, and the message says why."""
    sys.path.append(os.getcwd())  # for a policy of one's own, `--policy my_package.my_module`
    words = sys.argv[1:] if argv is None else list(argv)
    asked = next((word for word in words if not word.startswith("-")), "")
    args = parser({asked} & set(VERBS)).parse_args(words)
    return running.carried_out(f"rubato {args.command}", args, args.run)


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
    serve.add_argument("--event-log", metavar="FILE", help="write the event log here (JSON lines)")

    run = command("bench", _bench, "offer a workload to a server, open loop, and judge what comes back")
    run.add_argument("url", help="the server, such as http://127.0.0.1:8000")
    _target_options(run)
    _workload_options(run)
    run.add_argument("--label", default="run", help="what the table calls this run")
    run.add_argument("--timeout", type=float, default=600.0, help="seconds until a request is given up")
    run.add_argument("--max-delay", type=float, help="seconds the load generator may be late at p99")
    run.add_argument("--allow-late", action="store_true", help="exit 0 also when the run is invalid")
    run.add_argument("--no-progress", action="store_true")
    _result_options(run)

    simulate = command("simulate", _simulate, "run a workload through the same cluster code on a virtual clock")
    _workload_options(simulate)
    _server_options(simulate)
    simulation_options.replica(simulate)
    simulate.add_argument("--steps", metavar="LOG", help="event log of a live run: fit the latency model on its steps")
    simulate.add_argument("--label", help="what the table calls this run (default: the policy)")
    _result_options(simulate)

    against = command(
        "compare", _compare, "two result files, tier by tier: paired by request where the workload is the same"
    )
    against.add_argument("a", help="what `bench --json` wrote; FILE:POLICY where a file holds several")
    against.add_argument("b")
    against.add_argument("--json", metavar="FILE", help="write the comparison as JSON; - for standard output")

    fit.add(commands)

    make = command("workload", _workload, "write a workload file, or list the papers' workloads")
    make.add_argument("output", nargs="?", help="file to write")
    make.add_argument("-o", "--out", metavar="FILE", help="the same")
    make.add_argument("--list", action="store_true", help="name the scenarios, with their mean lengths")
    _workload_options(make, file=False)

    for module in (sweep, capacity, plan):
        module.add(commands)

    demo = command("demo", _demo, "measure this machine, then serve three tiers of requests, policy against policy")
    demo.add_argument("--out", default="results/demo", help="folder for JSON, PNG and logs")
    demo.add_argument("--policy", default="edf", help="the policy to set against the baselines")
    demo.add_argument("--seconds", type=float, help="seconds of load per policy (default: by the machine's speed)")
    demo.add_argument("--seed", type=int, default=0)

    profile.add(commands)
    command("policies", _policies, "list policies, their settings and sources")
    return parser


def _server_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--config", help="YAML file")
    parser.add_argument(
        "--policy", action=common_options.Once, metavar="NAME[:SETTING=VALUE,...][@ROUTER[:...]]",
        help="scheduling policy with settings and router; NAME is a policy's, a file.py or a dotted module",
    )  # fmt: skip
    parser.add_argument("--router", help="routing policy: a name, a file.py or a dotted module")
    parser.add_argument("--replicas", type=int)
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="a policy setting (`safety_margin=0.2`, `router.per_request=32`) or any of the configuration "
        "(`engine.kv_gib=2`)",
    )


def _target_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", help="model name (default: the first that the server lists)")
    parser.add_argument("--endpoint", choices=("chat", "completions"), default="chat")
    parser.add_argument("--api-key", default=os.environ.get("OPENAI_API_KEY"), help="default: $OPENAI_API_KEY")
    parser.add_argument("--header", action="append", default=[], metavar="NAME=VALUE", help="an HTTP header to send")
    parser.add_argument(
        "--slo-as", choices=("auto", "body", "slo", "tier", "vllm-xargs", "none"), default="auto",
        help="how to state SLOs: body = as `slo` in the body; slo = and the tier by its name, which the server must "
        "know; vllm-xargs = as flat keys in `vllm_xargs`; auto = body for a Rubato server, none for any other",
    )  # fmt: skip
    parser.add_argument("--slo-fields", dest="slo_as", action="store_const", const="body", help="same as --slo-as body")
    parser.add_argument(
        "--ignore-eos", action=argparse.BooleanOptionalAction,
        help="ask for exactly as many tokens as the workload says (default: where the server is known to take it)",
    )  # fmt: skip


def _workload_options(parser: argparse.ArgumentParser, file: bool = True) -> None:
    if file:
        parser.add_argument("--workload", help="workload file (default: one is made)")
        several = parser.add_mutually_exclusive_group()
        several.add_argument(
            "--seeds", type=common_options.seeds, metavar="0,1,2", help="seeds: one run each, pooled in the table"
        )
        several.add_argument("--rounds", type=int, help="number of runs: seeds from --seed on, or a file again")
    common_options.tiers(parser)
    offered.options(parser)
    if file:
        parser.add_argument("--judge", choices=RULES, help="judging rule (default deadline)")
        parser.add_argument(
            "--goodput", nargs="+", metavar="NAME:MS",
            help="bounds on a good request, all of which it must keep, in vLLM's spelling: ttft:200 tpot:30 e2el:5000",
        )  # fmt: skip


def _result_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", metavar="FILE", help="write results as JSON; - for standard output")
    parser.add_argument("--plot", metavar="FILE", help="write a PNG")
    parser.add_argument("--records", metavar="FILE", help="write one JSON line per request")


# --------------------------------------------------------------------------- what they do


def _serve(args: argparse.Namespace) -> int:
    from rubato.serving.serve import serve  # the server's libraries are not needed by the other commands

    return serve(_config(args, model=args.model, host=args.host, port=args.port, event_log=args.event_log))


def _config(args: argparse.Namespace, **given: Any) -> Config:
    """The configuration of --config, changed by options: a bare --set is a setting of the policy."""
    overrides = [f"{name}={value}" for name, value in given.items() if value is not None]
    if args.policy and (":" in args.policy or "@" in args.policy):  # written as for `sweep`
        choice = PolicyChoice.parse(args.policy, args.router or "auto")
        overrides += [f"policy={choice.policy}", f"router={choice.router}"]
        overrides += [f"policy.{name}={json.dumps(value)}" for name, value in choice.settings.items()]
        overrides += [f"router.{name}={json.dumps(value)}" for name, value in choice.router_settings.items()]
    else:
        given = {"policy": args.policy, "router": args.router}
        overrides += [f"{name}={value}" for name, value in given.items() if value]
    if args.replicas is not None:
        overrides.append(f"replicas={args.replicas}")
    for setting in args.set:
        name = setting.partition("=")[0]
        overrides.append(setting if "." in name or name in Config.model_fields else f"policy.{setting}")
    config = load(args.config or {}, overrides)
    if config.model is None and config.engine.name == "torch":
        config = config.model_copy(update={"model": "bundled"})
    return config


def _loads(args: argparse.Namespace) -> list[Workload]:
    """One workload for each run."""
    if args.rounds is not None and args.rounds < 1:
        raise ValueError(f"--rounds {args.rounds}: give 1 or more")
    if args.workload:
        if args.seeds:
            raise ValueError("--seeds makes workloads, but --workload is one already: use --rounds to repeat it")
        return [offered.from_file(args)] * (args.rounds or 1)
    kinds = partial(common_options.kinds, args)
    return [offered.asked(args, kinds, seed) for seed in args.seeds or range(args.seed, args.seed + (args.rounds or 1))]


def _workload(args: argparse.Namespace) -> int:
    return offered.run(args, partial(common_options.kinds, args))


def _bench(args: argparse.Namespace) -> int:
    loads = _loads(args)
    headers = dict(_header(text) for text in args.header)
    bounds = goodput.parse(args.goodput) if args.goodput else None
    listed = asyncio.run(load_generator.list_models(args.url, args.api_key, headers))
    slo_as: load_generator.TierField = "body" if listed.knows_slos else "none"
    if args.slo_as != "auto":
        slo_as = args.slo_as
    fixed = listed.fixed_lengths
    runs = [
        asyncio.run(
            load_generator.run(
                load,
                args.url,
                args.model or listed.first(args.url),
                label=args.label,
                tier_field=slo_as,
                rule=args.judge or "deadline",
                timeout=args.timeout,
                max_delay=args.max_delay,
                progress=not args.no_progress,
                endpoint=args.endpoint,
                ignore_eos=fixed if args.ignore_eos is None else args.ignore_eos,
                continuous_usage=fixed,
                api_key=args.api_key,
                headers=headers,
                goodput=bounds,
            )
        )
        for load in loads
    ]
    _report(args, runs)
    return 0 if all(run.valid for run in runs) or args.allow_late else 1


def _header(text: str) -> tuple[str, str]:
    name, found, value = text.partition("=")
    if not found or not name:
        raise ValueError(f"--header {text!r}: write it as NAME=VALUE")
    return name, value


def _simulate(args: argparse.Namespace) -> int:
    from rubato.config.build import drafter_of, fair_share_of, lengths_of, link_of, most_in_flight
    from rubato.simulation.simulate import SimulationSetup, simulated_run

    if args.steps and args.profile:
        raise ValueError("--steps and --profile both say how long a step takes: leave out one of them")
    config = _config(args)
    machine = simulation_options.replica_of(args, config)
    if args.profile and args.prefill_ms is None:
        args.prefill_ms = machine.prefill  # what TTFTs that are slowdowns are multiples of
    loads = _loads(args)
    model = machine.model
    if args.steps:
        model.fit(steps(event_log.read(args.steps)))
    bounds = goodput.parse(args.goodput) if args.goodput else None
    note = _guesses(args, config, {load.profile for load in loads} - {""})
    if note:
        print(f"rubato simulate: {note}", file=sys.stderr)
    if config.tenants:
        said = "tenants share by weight; their keys, tiers and limits are not simulated"
        print(f"rubato simulate: {said}", file=sys.stderr)

    def setup(number: int, load: Workload) -> SimulationSetup:
        return SimulationSetup(
            latency=lambda: copy.deepcopy(model),
            limits=machine.limits,
            policy=config.policy.name,
            settings=config.policy.settings,
            router=config.router.name,
            router_settings=config.router.settings,
            replicas=config.replicas,
            noise=args.noise,
            seed=args.seed + number,
            max_in_flight=most_in_flight(config, machine.limits),
            lengths=lengths_of(config, {a.id: a.output_tokens for a in load.arrivals}),
            rule=args.judge or config.judge,
            prefix_cache=config.prefix_cache,
            link=link_of(config),
            drafter=drafter_of(config),
            fair=partial(fair_share_of, config) if config.tenants else None,
        )

    runs = [simulated_run(load, setup(number, load), args.label) for number, load in enumerate(loads)]
    _report(args, [dataclasses.replace(run, goodput=bounds) for run in runs])
    return 0


def _guesses(args: argparse.Namespace, config: Config, meant: Collection[str]) -> str:
    """What of the replica nobody has said, "" if nothing. meant: profiles that the workload is made for."""
    from rubato.config.build import guessed, simulation_limits

    if args.profile:
        return ""
    parts, missing = [], [] if args.steps else guessed(config)
    if missing:
        kind = config.latency.name if config.latency else "affine"
        how = "give --profile NAME, --steps LOG, or --config with what `rubato fit` prints"
        parts.append(f"step times ({kind} without {', '.join(missing)}: {how})")
    if args.kv_tokens is None and "kv_blocks" not in config.engine.settings:
        limits = simulation_limits(config)
        parts.append(f"KV capacity ({limits['kv_blocks'] * limits['block']} tokens: give --kv-tokens N)")
    if not parts:
        return ""
    if meant:
        then = f"; the workload is made for --profile {', '.join(sorted(meant))}"
    else:
        then = "" if args.workload else f". To see policies differ: {DIFFER}, then --policy vllm"
    return f"a guess, not your machine's: {' and '.join(parts)}{then}"


def _compare(args: argparse.Namespace) -> int:
    report = compare.compare(compare.read(args.a), compare.read(args.b))
    common_options.write(args.json, report.text(), results.as_json(report.to_json()))
    return 0


def _report(args: argparse.Namespace, runs: Sequence[results.Run]) -> None:
    common_options.write(args.json, results.table(runs), results.dumps(runs))
    if args.records:
        results.write_records(args.records, runs)
    if args.plot:
        plotting.plot(args.plot, runs)


def _demo(args: argparse.Namespace) -> int:
    from rubato.demo.demo import demo

    return demo(Path(args.out), policy=args.policy, seconds=args.seconds, seed=args.seed)


def _policies(args: argparse.Namespace) -> int:
    for name, kind, about, source, settings in policies.describe():
        print(f"{name}  ({kind})\n    {about}\n    source: {source}")
        for setting, default in settings.items():
            print(f"    --set {setting}={yaml.safe_dump(default, default_flow_style=True).split(chr(10))[0]}")
        print()
    return 0
