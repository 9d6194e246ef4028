"""docs/compare.md: what each policy needs, and the scenarios of its table, against the code."""

from __future__ import annotations

import re

from rubato import policies
from rubato.fleet.cluster_options import PolicyChoice
from rubato.planning.sweep import able
from rubato.simulation.run_spec import RunSpec, packaged_hardware
from rubato.workloads import scenarios
from tests.docs.pages import PAGES, commands

PAGE = PAGES["compare.md"]


def rows(head: str) -> list[list[str]]:
    """The cells of each row of the table that begins with this head."""
    lines = PAGE.split(f"\n| {head} |")[1].split("\n\n")[0].splitlines()[2:]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def test_policies_are_left_out_as_stated() -> None:
    """On one replica without a drafter; each with what it needs is run by the page's commands."""
    stated = {
        name: row[3].partition(":")[0].partition(",")[0] == "left out"
        for row in rows("policy | needs | said how | without it")
        for name in re.findall(r"`([^`]+)`", row[0])
    }
    machine = packaged_hardware("opt-13b-2xa100-40g")
    _, reasons = able([RunSpec(machine, PolicyChoice.read(name)) for name in stated])
    assert stated == {name: name in reasons for name in stated}
    assert any(stated.values())


def test_scenarios_are_run_on_the_profiles_they_are_made_for_and_by_the_commands() -> None:
    table = rows("paper | scenario | profile | replicas | requests/s | SLO rule | lengths")
    assert len(table) == 5
    given = [(words, " ".join(words)) for words in commands("compare.md") if words[0] in ("sweep", "simulate")]
    for _, scenario, profile, replicas, rate, judge, _ in table:
        (name,), machine = re.findall(r"`([^`]+)`", scenario), re.findall(r"`([^`]+)`", profile)[0]
        assert scenarios.get(name).profile == machine
        said = next(text for words, text in given if name in words)
        assert f"--profile {machine} --scenario {name}" in said
        assert ("--replicas" in said) == (replicas != "1")
        assert (f"--rates {rate} " in said) == (rate != "-")
        assert ("--slo-rule" in said) == ("`deadline`" not in judge)


def test_settings_that_are_tried_are_those_of_the_policy() -> None:
    settings: dict[str, set[str]] = {}
    for name, _, _, _, own in policies.describe():
        settings.setdefault(name, set()).update(own)
    tried = {row[0].strip("`"): re.findall(r"`(\w+)(?:=\w+)?`", row[1]) for row in rows("baseline | settings tried")}
    assert len(tried) == 7
    for name, named in tried.items():
        assert set(named) - set(policies.names()) <= settings[name], name
