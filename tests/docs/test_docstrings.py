"""Names in docstrings are names of something: modules, their contents, attributes, settings."""

from __future__ import annotations

import ast
import dataclasses
import importlib
import importlib.util
import re
from collections.abc import Iterator
from functools import cache

import pytest

from rubato import policies
from rubato.config.schema import Config
from tests.docs.pages import ROOT

SOURCES = ((ROOT / "src", "rubato"), (ROOT / "packages/rubato-torch/src", "rubato_torch"), (ROOT, "experiments"))
FILES = {
    ".".join(path.relative_to(base).with_suffix("").parts).removesuffix(".__init__"): path
    for base, folder in SOURCES
    for path in sorted((base / folder).rglob("*.py"))
}
DOTTED = re.compile(r"`([A-Za-z_]\w*(?:\.[A-Za-z_]\w*)+)`")
STATED = re.compile(r"(?:^|[.;] )([a-z_]\w*(?:, [a-z_]\w*)*): ")  # `a, b: what they are`
OWN = ("my_policy", "my_pkg", "app")  # of examples; Starlette's
# a library that need not be there, a key of GGUF, a field of a request's body, a policy's module
OTHERS = {"ray.init", "tokenizer.ggml.pre", "slo.stages", "rubato.policies.NAME"}
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


@cache
def tree(module: str) -> ast.Module:
    return ast.parse(FILES[module].read_text(encoding="utf-8"))


def docstrings(module: str) -> Iterator[str]:
    for node in ast.walk(tree(module)):
        if isinstance(node, DOCUMENTED):
            yield ast.get_docstring(node) or ""


def bound(body: list[ast.stmt]) -> Iterator[str]:
    """The names that these statements bind, imports among them."""
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            yield from (each.id for target in targets for each in ast.walk(target) if isinstance(each, ast.Name))
        elif isinstance(node, ast.Import | ast.ImportFrom):
            yield from ((alias.asname or alias.name).partition(".")[0] for alias in node.names)


@cache
def members() -> dict[str, set[str]]:
    """What the classes of a name have: methods, fields, and attributes that are assigned."""
    found: dict[str, set[str]] = {}
    for module in FILES:
        for node in ast.walk(tree(module)):
            if isinstance(node, ast.ClassDef):
                own = found.setdefault(node.name, set())
                own |= set(bound(node.body))
                own |= {n.attr for n in ast.walk(node) if isinstance(n, ast.Attribute) and isinstance(n.ctx, ast.Store)}
    return found


def is_something(name: str) -> bool:
    head, *rest = name.split(".")
    if name in OTHERS or head in OWN or name.endswith((".py", ".yaml", ".json")):
        return True
    for module in FILES:
        for count in range(len(rest) + 1, 0, -1):
            path = ".".join(name.split(".")[:count])
            if module == path or module.endswith(f".{path}"):
                left = name.split(".")[count:]
                if not left or (
                    left[0] in set(bound(tree(module).body)) and set(left[1:]) <= members().get(left[0], set(left[1:]))
                ):
                    return True
    if any(rest[0] in own for owner, own in members().items() if owner.lower() == head.lower()):  # `request.handoff`
        return True
    if head in Config.model_fields or any(head == module.rpartition(".")[2] for module in FILES):
        return head in Config.model_fields
    anything = set().union(*members().values())
    if rest[-1] in anything:  # of a variable, such as `limits.block_size`
        return True
    return importlib.util.find_spec(head) is not None and hasattr(importlib.import_module(head), rest[0])


@pytest.mark.parametrize("module", FILES)
def test_dotted_names_are_names_of_something(module: str) -> None:
    assert [name for text in docstrings(module) for name in DOTTED.findall(text) if not is_something(name)] == []


def classes() -> Iterator[type]:
    for name, kind, *_ in policies.describe():
        yield getattr(importlib.import_module(f"rubato.policies.{name}"), kind.capitalize())


@pytest.mark.parametrize("policy", list(classes()), ids=lambda cls: cls.__module__.removeprefix("rubato.policies."))
def test_settings_that_a_policys_docstring_explains_are_its_settings(policy: type) -> None:
    text = " ".join((policy.__doc__ or "").split())
    explained = {name for group in STATED.findall(text) for name in group.split(", ")}
    explained |= set(re.findall(r"^ {8}(\w+) \(", policy.__doc__ or "", re.MULTILINE))  # below `Args:`
    fields = {field.name for field in dataclasses.fields(policy)}
    assert explained <= fields
