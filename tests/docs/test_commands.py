"""The commands on the pages are ones that can be given; those that take little time are."""

from __future__ import annotations

import argparse
import re

import pytest

from experiments.__main__ import parser as experiments_parser
from rubato.cli.main import parser as rubato_parser
from tests.docs.pages import PAGES, ROOT, blocks, commands, spans

COMMANDS = [(page, words) for page in PAGES for words in commands(page)]
OTHERS = {  # vLLM's, pip's
    "--api-server-count", "--disable-log-stats", "--enforce-eager", "--extra-index-url", "--middleware",
    "--build-arg", "--otlp-traces-endpoint", "--scheduling-policy", "--shutdown-timeout", "--speculative-config",
}  # fmt: skip


def subcommands() -> dict[str, argparse.ArgumentParser]:
    return {**rubato_parser().own_parsers()}


@pytest.mark.parametrize(("page", "words"), COMMANDS, ids=[f"{page}:{' '.join(words)}" for page, words in COMMANDS])
def test_commands_are_understood(page: str, words: list[str]) -> None:
    rubato_parser().parse_args(words)


EXPERIMENTS = [(page, words) for page in PAGES for words in commands(page, "python -m experiments")]


@pytest.mark.parametrize(("page", "words"), EXPERIMENTS)
def test_commands_of_experiments_are_understood(page: str, words: list[str]) -> None:
    experiments_parser().parse_args(words)


def test_every_subcommand_but_the_tour_has_an_example() -> None:
    shown = {words[0] for _, words in COMMANDS} | {"demo"}  # `make demo`
    shown |= {span.split()[1] for page in PAGES for span in spans(page) if span.startswith("rubato ")}
    assert shown == set(subcommands())


@pytest.mark.parametrize("page", PAGES)
def test_options_and_targets_in_sentences_exist(page: str) -> None:
    known = {word for sub in subcommands().values() for word in sub._option_string_actions} | OTHERS
    known |= {*experiments_parser()._option_string_actions}
    for script in (ROOT / "benchmarks").glob("*.py"):
        known |= set(re.findall(r'"(--[a-z-]+)"', script.read_text(encoding="utf-8")))
    said = {word for span in spans(page) for word in re.findall(r"(?<![\w-])--[a-z][a-z0-9-]*", span)}
    assert said <= known
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    code = "\n".join([*spans(page), *blocks(page)])
    asked = set(re.findall(r"^make ([a-z-]+)", code, re.MULTILINE))
    assert asked <= targets


@pytest.mark.parametrize("page", PAGES)
def test_files_of_ours_exist(page: str) -> None:
    pattern = r"(?<![\w/.])((?:benchmarks|tests|tools|docs|policies|rubato)/[\w/.-]+)"
    named = {path for code in [*spans(page), *blocks(page)] for path in re.findall(pattern, code)}
    places = (ROOT, ROOT / "src", ROOT / "src" / "rubato", ROOT / "src" / "rubato" / "policies")
    assert not [path for path in named if not any((place / path).exists() for place in places)]
