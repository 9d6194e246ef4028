"""Ranges in pyproject.toml, exact versions with hashes in requirements/: the second lie within the first, and what is
installed from them is held against its hash."""

from __future__ import annotations

import ast
import re
import tomllib
from itertools import chain
from pathlib import Path

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
LOCKS = {
    file.name: file.read_text(encoding="utf-8").splitlines() for file in sorted((ROOT / "requirements").glob("*.txt"))
}
PACKAGES = {
    name: [line for line in lines if not line.startswith(("#", "-r "))] for name, lines in LOCKS.items()
}  # fmt: skip
LOCKED = {
    locked.name: locked
    for name in ("build", "serve", "torch", "demo", "dev", "aiconfigurator")
    for locked in (Requirement(line.partition(" --hash")[0]) for line in PACKAGES[f"{name}.txt"])
}


def version_of(locked: Requirement) -> str:
    (pin,) = locked.specifier
    return pin.version


@pytest.mark.parametrize("name", OTHERS)
def test_the_lock_has_a_version_in_its_range(name: str) -> None:
    assert OTHERS[name].specifier.contains(version_of(LOCKED[canonicalize_name(name)]))


@pytest.mark.parametrize("name", PACKAGES)
def test_each_line_of_a_lock_is_one_version_with_hashes(name: str) -> None:
    assert PACKAGES[name]
    for line in PACKAGES[name]:
        stated, *hashes = line.split(" --hash=sha256:")
        (pin,) = Requirement(stated).specifier
        assert pin.operator == "=="
        assert hashes
        assert all(re.fullmatch(r"[0-9a-f]{64}", each) for each in hashes)


def test_locks_name_a_package_once_and_in_order() -> None:
    names = {
        name: [Requirement(line.partition(" --hash")[0]).name for line in lines] for name, lines in PACKAGES.items()
    }
    for each in names.values():
        assert each == sorted(set(each)) == [canonicalize_name(name) for name in each]
    together = [each for name, own in names.items() if name not in ("tools.txt", "torch-cpu.txt") for each in own]
    assert len(together) == len(set(together))


def test_pytorchs_cpu_build_is_of_the_version_of_pypis() -> None:
    (line,) = PACKAGES["torch-cpu.txt"]
    assert line.startswith(f"torch=={version_of(LOCKED['torch'])}+cpu ")


@pytest.mark.parametrize(
    "file", [ROOT / "Makefile", *sorted((ROOT / "deploy").glob("*.Dockerfile"))], ids=lambda f: f.name
)
def test_what_is_installed_from_a_lock_is_held_against_its_hashes(file: Path) -> None:
    """And our own distributions are built by the tools of build.txt, without fetching others."""
    text = re.sub(r"\\\n\s*", " ", file.read_text(encoding="utf-8")).replace("$(LOCKED)", made_of("LOCKED"))
    commands = [each for each in re.split(r"&&|\|\||;|\n", text) if re.search(r"\bpip\b.* (install|wheel) ", each)]
    commands = [each for each in commands if not each.startswith("LOCKED :=")]
    assert commands
    for command in commands:
        if "requirements/" in command or "-r $<" in command:
            assert "--require-hashes" in command, command
        elif "uv pip install" not in command:  # into vLLM's environment, beside its packages
            assert "--no-deps" in command, command
            assert "--no-build-isolation" in command or ".whl" in command, command


def made_of(variable: str) -> str:
    (value,) = re.findall(rf"^{variable} := (.*)$", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    return value


def test_ranges_have_both_ends_and_pin_nothing() -> None:
    """An upper end is for what users install beside others; packaging numbers its versions by year."""
    for name, requirement in OTHERS.items():
        operators = {each.operator for each in requirement.specifier}
        assert operators == ({">="} if name == "packaging" else {">=", "<"}), name


def test_extras_are_those_of_the_page() -> None:
    assert set(column("install.md", "## With pip")) == set(EXTRAS)


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
