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
    "gateway": "one address in front of OpenAI servers, vLLM's above all; each request goes where its SLO is kept",
    "epp": "our routers for Envoy and the like: an endpoint picker of the Gateway API Inference Extension",
    "bench": "offer a workload to a server, open loop, and judge what comes back",
    "simulate": "run a workload through the same cluster code on a virtual clock",
    "compare": "two result files, tier by tier: paired by request where the workload is the same",
    "fit": "fit a latency model to a server's event log or a table; prints `latency:` for its configuration",
    "workload": "write a workload file, or list the papers' workloads",
    "sweep": "policies at rates under seeds, simulated on all cores; one line a job in a file, resumable",
    "capacity": "the largest rate at which a fleet attains 90 and 98 % of its requests, per replica and per GPU",
    "bound": "the largest rate, or share of requests attained, that any policy without drafts could reach",
    "plan": "the smallest fleet that attains a share of a trace's requests, what it costs and what binds it",
    "demo": "measure this machine, then serve three tiers of requests, policy against policy",
    "profile": "make a hardware profile: measure a model, or ask kernel tables",
    "policies": "list policies, a line each; of one: what it is for, its settings and source",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one verb; its exit status. 2: what was asked for is impossible, and the message says why."""
    sys.path.append(os.getcwd())  # for a policy of one's own, `--policy my_package.my_module`
    words = sys.argv[1:] if argv is None else list(argv)
    asked = next((word for word in words if not word.startswith("-")), "")
    args = parser({asked} & set(VERBS)).parse_args(words)
    return running.carried_out(f"rubato {args.command}", args, args.run)


def parser(verbs: Iterable[str] = VERBS) -> argparse.ArgumentParser:
    """The command's words; the options of these verbs only, whose modules are imported for it."""
    made = argparse.ArgumentParser(prog="rubato", description="Serve language models to stated SLOs.")
    made.add_argument("--version", action="version", version=f"rubato {rubato.__version__}")
    commands = made.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for verb, about in VERBS.items():
        about = about.replace("%", "%%")  # argparse formats it
        own = commands.add_parser(verb, help=about, description=about)
        if verb in verbs:
            module = importlib.import_module(f"rubato.cli.{verb}")
            module.add(own)
            own.set_defaults(run=module.run)
    return made
