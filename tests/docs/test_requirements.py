"""Ranges in pyproject.toml, exact versions in constraints.txt: the second lie within the first."""

from __future__ import annotations

import ast
import re
import tomllib
from itertools import chain

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.docs.pages import PAGES, ROOT
from tests.docs.test_configurations import column

PROJECT, TORCH = (
    tomllib.loads((ROOT / folder / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    for folder in (".", "packages/rubato-torch")
)
EXTRAS: dict[str, list[str]] = PROJECT["optional-dependencies"]
STATED = [Requirement(each) for each in chain(PROJECT["dependencies"], TORCH["dependencies"], *EXTRAS.values())]
OTHERS = {each.name: each for each in STATED if each.name not in (PROJECT["name"], TORCH["name"])}
LOCKED = [
    line.split("==")
    for line in (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    if not line.startswith("#")
]


@pytest.mark.parametrize("name", OTHERS)
def test_the_lock_has_a_version_in_its_range(name: str) -> None:
    versions = dict(LOCKED)
    assert OTHERS[name].specifier.contains(versions[canonicalize_name(name)])


def test_ranges_have_both_ends_and_pin_nothing() -> None:
    """An upper end is for what users install beside others; packaging numbers its versions by year."""
    for name, requirement in OTHERS.items():
        operators = {each.operator for each in requirement.specifier}
        assert operators == ({">="} if name == "packaging" else {">=", "<"}), name


def test_the_lock_is_exact_and_in_order() -> None:
    names = [name for name, _ in LOCKED]
    assert names == sorted(set(names)) == [canonicalize_name(name) for name in names]
    assert all(re.fullmatch(r"[\w.]+", version) for _, version in LOCKED)


def test_extras_are_those_of_the_page() -> None:
    assert set(column("install.md", "## What `pip install` brings")) - {"rubato-llm"} == set(EXTRAS)


def test_all_but_the_kernel_tables_come_with_dev() -> None:
    seen, left = {"dev"}, [Requirement(each) for each in EXTRAS["dev"]]
    while left:
        for name in left.pop().extras - seen:
            seen.add(name)
            left += [Requirement(each) for each in EXTRAS[name] if each.startswith(PROJECT["name"])]
    assert seen == set(EXTRAS) - {"aiconfigurator"}


def test_the_manual_names_extras_that_exist() -> None:
    lists = [found for page in PAGES.values() for found in re.findall(r"rubato-llm\[([\w,]+)\]", page)]
    named = {name for each in lists for name in each.split(",")}
    assert named <= set(EXTRAS)


def test_results_state_the_versions_of_what_is_always_installed() -> None:
    """A result file that names another package could not be written where that is missing."""
    core = {Requirement(each).name for each in PROJECT["dependencies"]}
    calls = [
        node
        for folder in (ROOT / "src" / "rubato", ROOT / "experiments")
        for file in folder.rglob("*.py")
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "versions"
    ]
    assert len(calls) >= 4
    named = {each.value for call in calls for each in call.args if isinstance(each, ast.Constant)}
    assert named <= core


def test_the_distributions_ask_for_each_other_in_their_version() -> None:
    between = {each.name: each for each in STATED if each.name in (PROJECT["name"], TORCH["name"]) and each.specifier}
    assert PROJECT["version"] == TORCH["version"]
    assert between.keys() == {PROJECT["name"], TORCH["name"]}
    assert all(each.specifier.contains(PROJECT["version"]) for each in between.values())
