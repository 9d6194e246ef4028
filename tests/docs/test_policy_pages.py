"""The pages of policies: the same headings on each, and settings, defaults and ranges that are those of the code."""

from __future__ import annotations

import json
import re
from math import inf
from typing import NamedTuple

import pytest

from rubato import policies
from tests.docs.pages import PAGES, spans
from tests.docs.test_file_map import script

POLICIES = {page[9:-3]: page[9:-3].replace("-", "_") for page in PAGES if page.startswith("policies/")}
HEADINGS = [
    "What it does",
    "When to take it",
    "Settings",
    "What it needs",
    "Where it loses",
    "Source",
]
LOAD = {"policy": policies.load, "router": policies.load_router}
INTERVAL = re.compile(r"([\[(])(-?[\d.]+), ([\d.]+|inf)([\])])")


class Row(NamedTuple):
    """One setting as a page states it. part: policy or router. allowed: an interval, or the choices; empty if prose."""

    page: str
    part: str
    name: str
    default: object
    allowed: list[str]


def value(text: str) -> object:
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return text


def stated(page: str) -> list[Row]:
    section = PAGES[f"policies/{page}.md"].split("## Settings\n")[1].split("\n## ")[0]
    rows = []
    for part, table in re.findall(r"^\| `(policy|router)` setting .*\n\|[-|]+\n((?:\|.*\n)+)", section, re.MULTILINE):
        for line in table.splitlines():
            name, default, allowed = (re.findall(r"`([^`]+)`", cell) for cell in line.split("|")[1:4])
            rows.append(Row(page, part, *name, *map(value, default), allowed))
    return rows


ROWS = [row for page in POLICIES for row in stated(page)]


def setting_of(row: Row, given: object) -> object:
    return getattr(LOAD[row.part](POLICIES[row.page], {row.name: given}), row.name)


@pytest.mark.parametrize("page", POLICIES)
def test_every_page_has_these_headings(page: str) -> None:
    assert re.findall(r"^## (.*)", PAGES[f"policies/{page}.md"], re.MULTILINE) == HEADINGS


def test_a_page_of_a_policy_is_a_policys() -> None:
    assert len(POLICIES) == 11
    assert set(POLICIES.values()) <= set(policies.names())


@pytest.mark.parametrize("page", POLICIES)
def test_settings_are_those_of_the_policy(page: str) -> None:
    text = PAGES[f"policies/{page}.md"]
    assert script("settings").page(page, text) == text, "run `make api`"


def test_a_setting_without_a_line_in_the_docstring_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(policies.module_of("jitserve").Scheduler, "__doc__", "Plans.\n\nArgs:\n    budget (0): tokens")
    with pytest.raises(ValueError, match=r"no line `name .*: meaning` for max_num_seqs, penalty"):
        script("settings").page("jitserve", PAGES["policies/jitserve.md"])


def test_which_policy_names_every_policy() -> None:
    named = {name for span in spans("which-policy.md") for name in re.findall(r"\w+", span)}
    assert set(policies.names()) - named == set()


def test_settings_of_every_router_are_on_the_page_of_all() -> None:
    stated = re.findall(r"Every router, yours too, takes `(\w+)=true`", PAGES["policies.md"])
    assert dict.fromkeys(stated, False) == policies.ROUTERS.common


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row.page}-{row.name}")
def test_values_are_accepted_and_refused_as_stated(row: Row) -> None:
    interval = INTERVAL.fullmatch(" ".join(row.allowed))
    if interval is None:
        for choice in map(value, row.allowed):
            assert setting_of(row, choice) == choice
        wrong: list[object] = ["neither"] if row.allowed else []
    else:
        opens, low, high, closes = interval.groups()
        step = 1 if isinstance(row.default, int) else 0.001
        wrong = []
        for text, inward, closed in ((low, step, opens == "["), (high, -step, closes == "]")):
            if (bound := float(text)) < inf:
                bound = int(bound) if step == 1 else bound
                inside, outside = (bound, bound - inward) if closed else (bound + inward, bound)
                assert setting_of(row, inside) == inside
                wrong.append(outside)
    for given in wrong:
        with pytest.raises(policies.PolicyError):
            setting_of(row, given)
