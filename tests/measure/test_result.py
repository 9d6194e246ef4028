"""Results: each as a table, rows, a picture and a page, with words that say what the intervals tell."""

from __future__ import annotations

import re
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest

from rubato.core.extras import MissingExtra
from rubato.measure import report
from rubato.measure.confidence import Estimate
from rubato.measure.pictures import Picture, bars_with_intervals
from rubato.measure.result import Result, told_apart
from rubato.measure.runs import Runs
from rubato.planning import bound, capacity, fleet_size, optimum, sweep
from rubato.planning.bound import BoundQuestion
from rubato.planning.capacity import CapacityQuestion
from rubato.planning.fleet_size_model import FleetQuestion
from rubato.planning.sweep import Sweep
from rubato.simulation.simulate import simulate
from tests.planning.machine import MACHINE, mix, spec

SPECS = (spec("sarathi"), spec("vllm"))


def _plan() -> Result:
    return fleet_size.plan(FleetQuestion(mix(40), spec(), seeds=(2, 2)), workers=1)


def _runs() -> Result:
    load = mix(30).make(0).rescaled(20.0)
    return Runs(tuple(simulate(load, one) for one in SPECS))


def _optimum() -> Result:
    load = mix(20).make(0)
    found = (optimum.optimum(load, MACHINE.model, MACHINE.limits, mode) for mode in optimum.COSTS)
    return optimum.Optima(MACHINE, tuple(found))


MADE = {
    "runs": _runs,
    "sweep": lambda: sweep.run(Sweep(mix(), SPECS, (2.0, 60.0), (0, 1)), workers=1),
    "capacity": lambda: capacity.run(CapacityQuestion(mix(30), SPECS, (0, 1), (0.9,), 0.2), workers=1),
    "plan": _plan,
    "bound": lambda: bound.run(BoundQuestion(mix(20), MACHINE, (0, 1), tolerance=0.2), workers=1),
    "optimum": _optimum,
}


@pytest.fixture(scope="module", params=list(MADE))
def result(request: pytest.FixtureRequest) -> Result:
    return MADE[request.param]()


class _Tags(HTMLParser):
    """All tags of a page, and what they refer to; `open` is what was not closed."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.seen: set[str] = set()
        self.links: list[str] = []
        self.open: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.add(tag)
        self.links += [value or "" for name, value in attrs if name in ("src", "href", "xlink:href", "action")]
        if tag not in ("meta", "br"):
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_a_result_shows_its_answer_everywhere(result: Result) -> None:
    assert result.answer.endswith(".")
    assert result.answer in repr(result)
    assert len(repr(result)) < 300
    assert result.answer.split("[")[0].split("%")[0] in result._repr_html_().replace("&#x27;", "'")
    for table in result.tables():
        assert all(len(row) == len(table.head) for row in table.rows)
    assert "Note" not in result.table()


def test_rows_are_plain_columns(result: Result) -> None:
    rows = result.rows()
    assert rows
    assert all(isinstance(value, str | int | float | None) for row in rows for value in row.values())


def test_a_report_is_one_page_that_needs_nothing_else(result: Result) -> None:
    pytest.importorskip("matplotlib")
    page = report.page(result, "rubato verb --policy '<script>'")
    tags = _Tags(page)
    assert not tags.open
    assert {"svg", "table", "title", "style"} <= tags.seen
    assert not {"script", "img", "link", "iframe"} & tags.seen
    assert all(link.startswith("#") for link in tags.links)  # within a picture
    assert not re.search(r"url\((?!#)|@import", page)
    assert "rubato verb --policy &#x27;&lt;script&gt;&#x27;" in page
    assert "fill: var(--text)" in page


def test_a_picture_is_written_in_both_formats(result: Result, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    result.plot(tmp_path / "a.png")
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    shown = result.plot(tmp_path / "a.svg")
    assert (tmp_path / "a.svg").read_text().startswith("<?xml")
    assert shown._repr_svg_().startswith("<svg")


def test_a_frame_has_a_row_for_each(result: Result) -> None:
    pytest.importorskip("pandas")
    frame = result.frame()
    assert len(frame) == len(result.rows())
    assert list(frame.columns) == list(dict.fromkeys(name for row in result.rows() for name in row))


def test_a_missing_library_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    result = _optimum()
    for library in ("pandas", "matplotlib"):
        monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(MissingExtra, match=r"a frame needs more .*pip install 'rubato-llm\[notebook\]'"):
        result.frame()
    with pytest.raises(MissingExtra, match=r"a picture needs more .*pip install 'rubato-llm\[plot\]'"):
        result.plot()


def test_bars_of_nothing_are_empty_axes(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    empty = Picture("nothing", lambda figure, ink: bars_with_intervals(figure.add_subplot(), [], ink))
    empty.save(tmp_path / "a.svg")
    assert (tmp_path / "a.svg").stat().st_size > 0


@pytest.mark.parametrize(
    ("ends", "says"),
    [
        ((0.01, 0.05), "a attains more than b (it)"),
        ((-0.05, -0.01), "a attains less than b (it)"),
        ((-0.01, 0.05), "a and b are not told apart (it): more seeds"),
        ((0.0, 0.0), "a and b are not told apart (it): more seeds"),
    ],
)
def test_intervals_in_words(ends: tuple[float, float], says: str) -> None:
    assert told_apart({"a": Estimate(sum(ends) / 2, *ends)}, "b", "attains", {"a": "it"}) == says


def test_policies_are_compared_seed_by_seed() -> None:
    *found, judged = MADE["sweep"]().findings
    assert judged.startswith("Judged by the deadline rule; by deadline each token has its own, by windows each ten ")
    assert [line.split(" requests/s")[0] for line in found] == ["At 2", "At 60"]
    assert all("vllm" in line and "sarathi" in line for line in found)
    assert sweep.run(Sweep(mix(), SPECS, (2.0,), (0,)), workers=1).findings == (judged,)  # one seed tells nothing
