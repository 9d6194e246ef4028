"""The command `rubato`: a module of this package for each verb, imported when it is asked for."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Iterable, Sequence

import rubato
from rubato.cli import running
from rubato.cli.parsing import Parser, escape_percent, words_of_command
from rubato.core.did_you_mean import nearest

# The texts stand here so that `rubato --help` imports no verb's module.
VERBS = {
    "serve": "serve a model over OpenAI's API",
    "gateway": "balance load over OpenAI-compatible servers, such as vLLM, by the SLO of each request",
    "epp": "choose servers for Envoy: an endpoint picker of the Gateway API Inference Extension",
    "check": "check a configuration as a start would, without starting, and say what it runs",
    "bench": "send a workload to a server and judge the answers by their SLOs",
    "simulate": "run a workload through the scheduler on a virtual clock",
    "compare": "compare two result files tier by tier, by request where both offered the same workload",
    "fit": "fit a latency model to an event log, a table of steps or a running vLLM; prints `latency:`",
    "workload": "write a workload file, or list the papers' workloads",
    "sweep": "simulate policies at several rates under several seeds, in parallel and resumable",
    "capacity": "find the largest rate at which a fleet attains 90 and 98 % of its requests",
    "judge": "judge policies on your own loads: the largest rate that each holds, ratios and intervals",
    "bound": "compute the largest rate, or share of requests, that any policy without drafts could attain",
    "plan": "find the smallest fleet that attains a share of a trace's requests, its cost and what binds it",
    "demo": "serve three tiers of requests with a real model on this machine, policy against policy",
    "profile": "make a hardware profile: measure a model, or read kernel tables",
    "completion": "print a script that completes commands, options and names in your shell",
    "policies": "list policies; with NAME, what it is for, its settings and its source",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one verb and returns its exit status; 2 if the request is impossible, and the message says why."""
    sys.path.append(os.getcwd())  # for the user's own policy, `--policy my_package.my_module`
    words = words_of_command(argv)
    verb = next((word for word in words if not word.startswith("-")), "")
    commands = parser({verb} & set(VERBS))
    if verb and verb not in VERBS:
        commands.error(f"unknown command {verb!r}{nearest(verb, VERBS)}")
    args = commands.parse_args(words or ["--help"])
    args.words = words  # as typed, for a report
    return running.run_verb(f"rubato {args.command}", args, args.run)


def parser(verbs: Iterable[str] = VERBS) -> Parser:
    """Returns the parser of the command, with the options of `verbs`; only their modules are imported."""
    commands = Parser(prog="rubato", description="Serve language models to stated SLOs.")
    commands.add_argument("--version", action="version", version=f"rubato {rubato.__version__}")
    subparsers = commands.add_subparsers(dest="command", required=True, metavar="COMMAND", title="commands")
    for verb, about in VERBS.items():
        own = subparsers.add_parser(verb, help=escape_percent(about), description=about)
        if verb in verbs:
            module = importlib.import_module(f"rubato.cli.{verb}")
            module.add(own)
            own.epilog = "examples:\n" + "\n".join(f"  rubato {verb} {words}".rstrip() for words in module.EXAMPLES)
            own.set_defaults(run=module.run)
            own.add_own_usage()
    commands.add_own_usage()
    return commands
