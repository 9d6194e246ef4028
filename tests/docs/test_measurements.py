"""Numbers that the tables of benchmarks quote are those of the files that their rows name; those that the page of
policies by load quotes are on the pages that it names."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from datetime import date
from pathlib import Path
from typing import Any

import pytest

from tests.docs.pages import FENCED, PAGES, ROOT

FOLDER = ROOT / "docs" / "measurements"
FILES = sorted(FOLDER.glob("*.json"))
REQUIRED = {"format", "date", "commit", "machine", "command", "seeds", "values"}
NUMBER = re.compile(r"(?<![\w.])[+-]?\d+(?:,\d{3})*(?:\.\d+)?(?![\w]|\.\d)")
INTERVAL = re.compile(r"(-?[\d.,]+) (?:% )?\[(-?[\d.,]+), (-?[\d.,]+)\]")
ALL = "measurements/benchmarks.md"
COLUMNS = {
    "benchmarks.md": ["question", "result", "against", "measured on"],
    ALL: ["question", "result", "against", "seeds, runs", "measured on", "file"],
}
EXAMPLE: dict[str, Any] = json.loads(FENCED.findall((FOLDER / "README.md").read_text(encoding="utf-8"))[0][1])


def rows(page: str) -> list[dict[str, str]]:
    """Of the first table of a page; page: where the row stands."""
    lines = re.findall(r"(?:^\|.*\n)+", PAGES[page], re.MULTILINE)[0].splitlines()
    head, _, *rest = ([cell.strip() for cell in line.strip("|").split("|")] for line in lines)
    assert head == COLUMNS[page]
    return [{**dict(zip(head, cells, strict=True)), "page": page} for cells in rest]


ROWS = rows(ALL)
QUOTED = [*rows("benchmarks.md"), *ROWS]


def files_in(text: str, page: str) -> list[Path]:
    """The JSON files that a text of a page links."""
    return [(ROOT / "docs" / page).parent.joinpath(path).resolve() for path in re.findall(r"\]\(([^)]+\.json)\)", text)]


def linked(row: Mapping[str, str], folder: str) -> list[Path]:
    """The files of this folder that a row names in its last cell."""
    last = row[COLUMNS[row["page"]][-1]]
    return [file for file in files_in(last, row["page"]) if file.parent.name == folder]


def numbers(cell: str) -> list[str]:
    """Those in a cell, without the ones in code and in links' addresses."""
    return NUMBER.findall(re.sub(r"`[^`]*`|\]\([^)]*\)", " ", cell).replace("\N{MINUS SIGN}", "-"))


def leaves(values: object) -> Iterator[float]:
    if isinstance(values, Mapping):
        values = list(values.values())
    if isinstance(values, list):
        for value in values:
            yield from leaves(value)
    elif isinstance(values, int | float) and not isinstance(values, bool):
        yield float(values)


def is_shown(number: str, value: float) -> bool:
    """Whether a value, rounded as the page rounds, is this number of a page; a half may be rounded either way."""
    plain = number.replace(",", "")
    half = 0.5 * 10.0 ** -len(plain.partition(".")[2])
    return abs(float(plain) - value) <= half * (1.0 + 1e-9)


def not_in(cell: str, values: object) -> list[str]:
    """Numbers that a cell quotes and no value is."""
    known = list(leaves(values))
    return [number for number in numbers(cell) if not any(is_shown(number, value) for value in known)]


def faults(found: Mapping[str, Any]) -> list[str]:
    """What is wrong with a measurement's file, a sentence each."""
    wrong = [f"no {name}" for name in sorted(REQUIRED - set(found))]
    wrong += [f"unknown: {name}" for name in sorted(set(found) - REQUIRED - {"notes"})]
    if wrong:
        return wrong
    if found["format"] != "rubato-measurement/1":
        wrong.append(f"format {found['format']!r}")
    try:
        date.fromisoformat(found["date"])
    except ValueError:
        wrong.append(f"date {found['date']!r}")
    if not re.fullmatch("[0-9a-f]{40}", found["commit"]):
        wrong.append(f"commit {found['commit']!r}")
    if not found["machine"].get("cpu") or not isinstance(found["machine"].get("cores"), int):
        wrong.append("machine: give cpu and cores")
    if not found["command"].strip():
        wrong.append("command is empty")
    if not found["seeds"]:
        wrong.append("seeds: give at least one")
    if not list(leaves(found["values"])):
        wrong.append("values: no number")
    return wrong


CHOICES = [  # of the page of policies by load
    [cell.strip() for cell in line.strip("|").split("|")]
    for table in re.findall(r"(?:^\|.*\n)+", PAGES["which-policy.md"], re.MULTILINE)
    if "| because |" in table
    for line in table.splitlines()[2:]
]


@pytest.mark.parametrize("row", CHOICES, ids=lambda row: f"{row[0]}, {row[1]}")
def test_numbers_of_which_policy_are_on_a_page_that_the_row_links(row: list[str]) -> None:
    cells = row[2:]
    pages = [PAGES[page] for page in re.findall(r"\]\(([\w/-]+\.md)", "".join(cells))]
    known = [float(number.replace(",", "")) for page in pages for number in NUMBER.findall(page)]
    known += leaves([json.loads(file.read_bytes())["values"] for file in files_in("".join(cells), "which-policy.md")])
    known += [abs(number) for number in known]  # "loses 3" for "-3 points"
    assert [not_in(cell, known) for cell in cells] == [[], []]


def test_the_example_is_one() -> None:
    assert faults(EXAMPLE) == []


@pytest.mark.parametrize("name", sorted(REQUIRED))
def test_each_field_is_needed(name: str) -> None:
    assert faults({key: value for key, value in EXAMPLE.items() if key != name}) == [f"no {name}"]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("format", "rubato-measurement/9"),
        ("date", "yesterday"),
        ("commit", "0123456"),
        ("machine", {"cpu": "a good one"}),
        ("command", " "),
        ("seeds", []),
        ("values", {"attained": "most"}),
        ("folder", "here"),
    ],
)
def test_each_field_is_looked_at(field: str, value: object) -> None:
    assert len(faults({**EXAMPLE, field: value})) == 1


def test_numbers_are_compared_as_they_are_shown() -> None:
    assert not_in("95 % [94, 97] of 486; `n=7` ([13.4](figures/x3.json))", EXAMPLE["values"]) == []
    assert not_in("95.1 % [94, 97] of 1,486", EXAMPLE["values"]) == ["95.1", "1,486"]


def test_every_measurement_says_what_it_is_of() -> None:
    assert {file.name: faults(json.loads(file.read_bytes())) for file in FILES} == {file.name: [] for file in FILES}


def test_every_row_names_its_files() -> None:
    assert len(ROWS) > 20
    assert len(QUOTED) == len(ROWS) + 12
    for row in QUOTED:
        named = linked(row, "measurements") + linked(row, "figures")
        assert named, row["question"]
        assert all(file.is_file() for file in named), row["question"]
        assert re.search(r", \[?\d\d?\b", row["measured on"]), row["question"]  # the day


def test_rows_quote_their_measurements() -> None:
    for row in QUOTED:
        if files := linked(row, "measurements"):
            values = [json.loads(file.read_bytes())["values"] for file in files]
            assert not_in(row["result"], values) == [], row["question"]


def of_figures(files: Iterable[Path]) -> list[object]:
    """Their claims, and the sections of the papers' pages that are made of their data: numbers, as these show them."""
    claims: list[object] = [
        [claim[name] for name in ("ours", "low", "high", "paper")]
        for file in files
        for claim in json.loads(file.read_bytes())["claims"]
    ]
    shown = [section for file in files for section in sections_of(file.stem)]
    return [*claims, [float(number.replace(",", "")) for text in shown for number in numbers(text)]]


def sections_of(figure: str) -> list[str]:
    """On the pages that `python -m experiments --docs` writes, and the page that is one figure's."""
    if figure == "simulator-fidelity":
        return [PAGES["measurements/fidelity-loads.md"]]
    pages = [page for name, page in PAGES.items() if name.startswith("papers/")]
    return [text for page in pages for text in re.split("^### ", page, flags=re.M) if text.startswith(f"{figure}\n")]


def test_rows_quote_their_figures() -> None:
    for row in QUOTED:
        if (files := linked(row, "figures")) and "does `edf` hold where" not in row["question"]:  # has its own test
            assert not_in(row["result"], of_figures(files)) == [], row["question"]


def tables() -> Iterator[tuple[str, str, list[Path], str]]:
    """Of the sections below the first table: head of the section, row, files that the section names, and cells."""
    for section in re.split("^## ", PAGES[ALL], flags=re.M)[1:]:
        files = files_in(section, ALL)
        for table in re.findall(r"(?:^\|.*\n)+", section, re.M):
            for row in table.splitlines()[2:]:
                first, *cells = row.strip("|").split("|")
                yield section.split("\n")[0], first, files, "|".join(cells)


def test_tables_of_the_benchmarks_are_those_of_their_files() -> None:
    """All numbers but a row's first cell, which says under what condition the others were measured."""
    checked = 0
    for section, first, files, cells in tables():
        figures = [file for file in files if file.parent.name == "figures"]
        values = [json.loads(file.read_bytes())["values"] for file in files if file not in figures]
        assert not_in(cells, [values, of_figures(figures)]) == [], (section, first)
        checked += len(numbers(cells))
    assert checked > 100


def test_every_measurement_is_quoted() -> None:
    assert {file for row in ROWS for file in linked(row, "measurements")} == set(FILES)


def test_intervals_of_figures_are_those_of_their_claims() -> None:
    compared = 0
    for row in QUOTED:
        claims = [claim for file in linked(row, "figures") for claim in json.loads(file.read_bytes())["claims"]]
        known = [[claim[name] for name in ("ours", "low", "high")] for claim in claims]
        for shown in INTERVAL.findall(row["result"]) if claims else ():
            pairs = [[*zip(shown, one, strict=True)] for one in known if None not in one]
            assert any(all(is_shown(*pair) for pair in three) for three in pairs), (row["question"], shown)
            compared += 1
    assert compared > 15


def test_what_edf_holds_is_what_the_figures_say() -> None:
    """Requests/s of the default policy beside the best baseline of each data set, both means over their seeds."""
    (row,) = [row for row in ROWS if "does `edf` hold where" in row["question"]]
    said = {
        name: (edf, best) for edf, best, name in re.findall(r"([\d.]+) of ([\d.]+) \(`?([^`)]+)`?\)", row["result"])
    }
    shares = []
    for file in linked(row, "figures"):
        held: dict[str, dict[str, float]] = {}
        for one in json.loads(file.read_bytes())["data"]:
            rates = one["measures"]["90 % of all"]["goodput"]
            held.setdefault(one["data"], {})[one["name"]] = sum(rates) / len(rates)
        for data, by in held.items():
            if "edf" not in by:
                continue
            edf, best = by["edf"], max(rate for name, rate in by.items() if name.startswith("baseline"))
            mine, theirs = said.pop("tiers turned round" if data == "flip" else data)
            assert is_shown(mine, edf), data
            assert is_shown(theirs, best), data
            shares.append(edf / best)
    assert not said
    least, most = re.findall(r"^([\d.]+) to ([\d.]+) of", row["result"])[0]
    assert is_shown(least, min(shares))
    assert is_shown(most, max(shares))


def test_the_readmes_intervals_stand_in_the_table() -> None:
    """The README repeats some rows: with the same numbers, or not at all."""
    said = re.findall(r"[\d.]+ \[-?[\d.]+, [\d.]+\]", PAGES["README.md"])
    assert len(said) >= 3
    known = "\n".join([*(row["result"] for row in ROWS), PAGES["papers/rubato.md"]])
    assert [interval for interval in said if interval not in known] == []


@pytest.mark.parametrize("heading", ["What you gain", "Where it does not help"])
def test_the_readmes_numbers_stand_where_they_can_be_checked(heading: str) -> None:
    """In the benchmarks, whose rows and tables are held to files, or on the page that is written from the figures."""
    (section,) = re.findall(rf"^## {heading}.*?(?=^## )", PAGES["README.md"], re.MULTILINE | re.DOTALL)
    tables_below = [f"{first} {cells}" for _, first, _, cells in tables()]
    pages = [*(" ".join(row.values()) for row in ROWS), *tables_below, PAGES["papers/rubato.md"]]
    known = {*numbers("\n".join(pages))}
    assert [number for number in numbers(section) if number not in known] == []


def test_the_readme_counts_what_the_demos_file_has() -> None:
    values = json.loads((FOLDER / "demo.json").read_text(encoding="utf-8"))["values"]
    (row,) = re.findall(r"^\| \*\*On time under load\*\* \| (.*) \|$", PAGES["README.md"], re.MULTILINE)
    met = values["in time"]
    assert row.startswith(f"{met['rubato']} of {values['requests']} requests")
    assert f"which has {met['vllm']} (" in row
