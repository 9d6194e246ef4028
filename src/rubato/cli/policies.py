"""`rubato policies`."""

from __future__ import annotations

import argparse

import yaml

from rubato import policies


def add(parser: argparse.ArgumentParser) -> None:
    """No words of its own."""


def run(args: argparse.Namespace) -> int:
    for name, kind, about, source, settings in policies.describe():
        print(f"{name}  ({kind})\n    {about}\n    source: {source}")
        for setting, default in settings.items():
            print(f"    --set {setting}={yaml.safe_dump(default, default_flow_style=True).split(chr(10))[0]}")
        print()
    return 0
