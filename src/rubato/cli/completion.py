"""`rubato completion`: a script that completes commands, options and names in a shell."""

from __future__ import annotations

import argparse

from rubato import policies
from rubato.latency import profiles
from rubato.workloads import scenarios

EXAMPLES = (
    "bash > ~/.local/share/bash-completion/completions/rubato",
    "zsh > ~/.zfunc/_rubato",
    "fish > ~/.config/fish/completions/rubato.fish",
)


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("shell", choices=("bash", "zsh", "fish"), metavar="SHELL", help="bash, zsh or fish")


def run(args: argparse.Namespace) -> int:
    import shtab  # the other commands need no script

    from rubato.cli.main import parser  # which imports this module

    commands = parser()
    paths = {"FILE": shtab.FILE, "LOG": shtab.FILE, "FOLDER": shtab.DIRECTORY}  # by what the help calls a value
    names = {
        "--policy": policies.names(),
        "--profile": profiles.names(),
        "--scenario": scenarios.names(),
    }
    for own in commands.own_parsers().values():
        for action in own._actions:
            action.choices = next((names[each] for each in action.option_strings if each in names), action.choices)
            if isinstance(action.metavar, str) and action.metavar in paths:
                action.complete = paths[action.metavar]  # type: ignore[attr-defined]  # shtab's
    print(shtab.complete(commands, args.shell))
    return 0
