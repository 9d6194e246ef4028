"""Figures: each gives exactly the claims in the file, its checks hold small, and the pages are what full runs say."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from functools import cache
from math import inf
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

import experiments
from experiments import Claim, claims, failed, golden, names, quick
from experiments.__main__ import QUICK, main
from experiments.paper_headlines import HEADLINES
from experiments.paper_page import PAPERS, SECTION, pages, seeds
from rubato.measure.confidence import Estimate
from rubato.planning.capacity import too_short

ROOT = Path(__file__).parents[2]
FULL = sorted((ROOT / "docs" / "figures").glob("*.json"))


THREE = ("ascendra-model", "polyserve-limits", "slos-serve-toy")  # of three papers; the others: `make figures-quick`


@pytest.mark.parametrize(
    "name", [*THREE, *(pytest.param(name, marks=pytest.mark.full) for name in sorted(quick.LEFT_OUT))]
)
def test_a_figure_gives_its_claims_and_its_checks_hold(name: str) -> None:
    quick.check(name)


def test_quick_figures_that_give_what_they_must_not_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    data = experiments.run("slos-serve-toy", small=True, workers=1)
    first, *rest = data["claims"]
    for wrong, says in (
        ({"claims": [first | {"kind": "check", "verdict": "misses"}, *rest]}, f"do not hold: {first['name']}"),
        ({"claims": rest}, "its claims are not those of claims.yaml"),
        (
            {"claims": [{key: first[key] for key in first if key != "unit"}, *rest]},
            "lacks a field",
        ),
        ({"claims": [first | {"low": first["ours"] + 1.0}, *rest]}, "or is not within its interval"),
    ):
        monkeypatch.setattr(experiments, "run", lambda *_, wrong=wrong, **__: data | wrong)
        with pytest.raises(quick.CheckError, match=says):
            quick.check("slos-serve-toy")
    monkeypatch.setattr(experiments, "run", lambda *_, **__: {key: data[key] for key in data if key != "slo_rule"})
    with pytest.raises(quick.CheckError, match="its JSON lacks slo_rule"):
        quick.check("slos-serve-toy")
    monkeypatch.setattr(experiments, "run", lambda *_, **__: data)
    monkeypatch.setattr(experiments.load("slos-serve-toy"), "SECONDS", 0.0)
    with pytest.raises(quick.CheckError, match="its full run takes no time"):
        quick.check("slos-serve-toy")


def test_the_claims_file_and_the_figures_are_the_same() -> None:
    files = [file for folder in experiments.__path__ for file in Path(folder).glob("*.py")]
    figures = [file.stem for file in files if "\nSECONDS = " in file.read_text()]
    assert sorted(name.replace("_", "-") for name in figures) == names()
    assert set(names()) >= quick.LEFT_OUT
    for own in claims().values():
        for claim in own.values():
            assert claim.kind in ("check", "paper", "ours")
            assert claim.kind in ("paper", "ours") or not claim.headline
            assert not claim.headline or claim.kind == "ours" or SECTION.search(claim.says)
            assert claim.headline or claim.kind == "paper" or not claim.cause
            assert claim.relation in ("=", ">=", "<=")
            assert claim.says
            assert claim.unit


AT_LEAST = Claim("c", "paper", 2.0, ">=", "×", "twice")


@pytest.mark.parametrize(
    ("claim", "low", "high", "verdict"),
    [
        (AT_LEAST, 2.0, 2.4, "holds"),
        (AT_LEAST, 1.9, 2.4, "inconclusive"),
        (AT_LEAST, 1.2, 1.9, "misses"),
        (AT_LEAST, -inf, inf, "inconclusive"),
        (replace(AT_LEAST, relation="<="), 1.2, 1.9, "holds"),
        (replace(AT_LEAST, relation="<="), 2.1, 2.2, "misses"),
        (replace(AT_LEAST, relation="=", within=0.1), 1.95, 2.05, "holds"),
        (replace(AT_LEAST, relation="=", within=0.1), 1.95, 2.15, "inconclusive"),
        (replace(AT_LEAST, relation="=", within=0.1), 2.15, 2.3, "misses"),
        (replace(AT_LEAST, relation="="), 2.0, 2.0, "holds"),
    ],
)
def test_verdicts_come_from_the_interval(claim: Claim, low: float, high: float, verdict: str) -> None:
    assert claim.verdict(Estimate((low + high) / 2 if high < inf else 2.0, low, high)) == verdict


def test_a_figure_with_other_claims_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    known = claims()
    del known["slos-serve-toy"]["sarathi-third-prefill"]
    monkeypatch.setattr(experiments, "claims", lambda: known)
    with pytest.raises(ValueError, match=r"figure 'slos-serve-toy': sarathi-third-prefill stand"):
        experiments.run("slos-serve-toy", small=True, workers=1)


def test_what_a_figure_runs_may_follow_from_what_its_first_jobs_returned(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    toy, given = experiments.load("slos-serve-toy"), []

    def then(values: list[Any], small: bool) -> list[Any]:
        given.append((len(values), small))
        return [replace(job, key=f"{job.key} again") for job in toy.jobs(small)]

    monkeypatch.setattr(toy, "then", then, raising=False)
    was = toy.found
    monkeypatch.setattr(toy, "found", lambda values, small: was(values[3:], small))
    file = tmp_path / "toy.jsonl"
    assert failed(experiments.run("slos-serve-toy", workers=1, file=file)) == []
    assert given == [(3, False)]
    assert len(file.read_text().splitlines()) == 1 + 6
    assert "6 of 6 jobs were in the file already" in experiments.run("slos-serve-toy", workers=1, file=file)["notes"][0]


def test_a_figure_of_a_recorded_stream(tmp_path: Path) -> None:
    trace = tmp_path / "stream.csv"
    rows = [f"{0.4 * i},{('coding,1.2', 'chat,-50', 'summarization,-150')[i % 3]},40,20" for i in range(12)]
    trace.write_text("\n".join(["t_s,category,slo_ratio,input_tokens,output_tokens", *rows]))
    data = experiments.run("adaserve-scale", small=True, workers=1, trace=trace)
    assert data["trace"] == "stream.csv"
    assert {v["requests"] for v in data["data"]} == {12}
    assert set(data["data"][0]["runs"][0]["systems"]["adaserve"]["by_tier"]) == {"code", "chat", "summary"}
    with pytest.raises(
        ValueError,
        match=r"'adaserve-urgent' takes no trace: .*adaserve-rate, adaserve-scale, slos-serve-capacity take one",
    ):
        experiments.run("adaserve-urgent", small=True, trace=trace)


MINE = '''
"""In order of arrival, of whatever tier."""

from dataclasses import dataclass
from typing import ClassVar

from rubato.policy_kit.batch_builder import BatchBuilder, admit_in_order, run_in_order

SOURCE = "a test"


@dataclass
class Scheduler:
    needs: ClassVar[frozenset[str]] = frozenset({"chunked", "preempt", "mixed"})
    budget: int = 2048

    def observe(self, events):
        pass

    def plan(self, view):
        builder = BatchBuilder(view, self.budget)
        run_in_order(builder, view.running)
        admit_in_order(builder, view.waiting)
        return builder.plan()
'''


def test_a_policy_of_ones_own_runs_beside_the_systems(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, out = tmp_path / "mine.py", tmp_path / "scale.json"
    file.write_text(MINE)
    mine = f"{file}:budget=256"
    words = ["adaserve-scale", "--small", "--workers", "1", "--no-progress"]
    assert main([*words, "--policy", mine, "--json", str(out)]) == 0
    assert len([line for line in capsys.readouterr().out.splitlines() if f"| {mine} |" in line]) == 1
    data = json.loads(out.read_text())
    assert data["policy"] == mine
    runs = [value["runs"][0]["systems"] for value in data["data"]]
    assert all(0.0 <= run[mine]["share"]["2 s"] <= 1.0 for run in runs)
    plain = experiments.run("adaserve-scale", small=True, workers=1)
    theirs = [value["runs"][0]["systems"] for value in plain["data"]]
    assert [{name: run[name] for name in run if name != mine} for run in runs] == theirs
    assert [claim["ours"] for claim in data["claims"]] == [claim["ours"] for claim in plain["claims"]]
    with pytest.raises(ValueError, match="was run with --policy, which not all have"):
        pages([data | {"small": False}])


@pytest.mark.parametrize(
    "name", ["adaserve-rate", "adaserve-scale", "sa-gain", "polyserve-goodput", "polyserve-flip", "ascendra-capacity",
             "slos-serve-capacity"]
)  # fmt: skip
@pytest.mark.parametrize("small", [True, False])
def test_the_jobs_of_a_figure_with_a_policy_are_those_without_and_that_policys(name: str, small: bool) -> None:
    figure = experiments.load(name)
    plain, more = figure.jobs(small), figure.jobs(small, policy="vllm:budget=300")
    assert {job.key for job in plain} <= {job.key for job in more}
    assert [job.key for job in more if "vllm:budget=300" in str(job.args)]
    assert len({job.key for job in more}) == len(more)
    if len(more) > len(plain):  # a job a system: the others' stay as they are
        assert [job for job in more if job.key in {own.key for own in plain}] == plain


@pytest.mark.parametrize(
    ("figure", "policy", "says"),
    [
        ("slos-serve-toy", "vllm", r"takes no policy: leave out --policy \(adaserve-.*slos-serve-capacity take one\)"),
        ("slos-serve-capacity", "edf", "'edf' is the name of a system in this figure already"),
        ("adaserve-rate", "nowhere.py", "there is no policy file 'nowhere.py'"),
        ("adaserve-rate", "vllm:budgets=1", "did you mean 'budget'"),
    ],
)
def test_a_policy_that_cannot_be_run_is_an_error(figure: str, policy: str, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        experiments.run(figure, small=True, policy=policy)


# --------------------------------------------------------------------------- the command


def test_names_and_list(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--names"]) == 0
    assert capsys.readouterr().out.split("\n")[:-1] == names()
    assert main([]) == 0
    listed = capsys.readouterr().out
    assert all(name in listed for name in names())
    assert main(["slos-serve-tou", "--small"]) == 2
    assert "did you mean 'slos-serve-toy'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--docs", "nowhere"], "nowhere holds no JSON of a figure"),
        (["slos-serve-toy", "--small", "--resume", "x"], "--resume is what a full run goes on from"),
        (["simulator-speeds"], "unknown figure 'simulator-speeds'"),
    ],
)
def test_what_is_impossible_is_one_sentence_and_status_2(
    words: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words) == 2
    error = capsys.readouterr().err
    assert says in error
    assert "Traceback" not in error


def test_a_full_run_says_its_time_goes_on_and_leaves_nothing_behind(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    out, kept = tmp_path / "toy.json", tmp_path / "results" / "figures" / "slos-serve-toy.jobs.jsonl"
    words = ["slos-serve-toy", "--workers", "1", "--no-progress", "--json", str(out)]

    def stop(*_: Any) -> None:
        raise RuntimeError("stopped")

    with monkeypatch.context() as patch:
        patch.setattr(experiments.load("slos-serve-toy"), "found", stop)
        assert main(words) == 2
    assert kept.exists()
    assert main(words) == 0
    assert "about 0.4 s of one core; if interrupted, the same command goes on" in capsys.readouterr().err
    assert "3 of 3 jobs were in the file already" in json.loads(out.read_text())["notes"][0]
    assert not kept.exists()


QUICKLY = ["--quick", "--workers", "1"]


def test_quick_figures_go_on_where_a_check_failed_or_they_were_stopped(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(experiments, "names", lambda: ["polyserve-limits", "slos-serve-toy"])
    toy = experiments.load("slos-serve-toy")
    with monkeypatch.context() as patch:
        patch.setattr(experiments, "failed", lambda data: ["a-check"] * (data["figure"] == "slos-serve-toy"))
        assert main(QUICKLY) == 1
    assert "slos-serve-toy: these checks do not hold: a-check" in capsys.readouterr().out
    with monkeypatch.context() as patch:
        patch.setattr(toy, "found", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            quick.run(QUICK, 1)
    assert main(QUICKLY) == 0
    said = capsys.readouterr().out
    assert f"1 figures have run, says {QUICK}" in said
    assert re.findall(r"^([\w-]+): ", said, re.MULTILINE) == ["slos-serve-toy"]
    assert "2 figures in their small form" in said
    assert not QUICK.exists()


def test_a_check_that_does_not_hold_is_exit_status_1(
    capsysbinary: pytest.CaptureFixture[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    known = claims()
    own = known["slos-serve-toy"]
    own["sarathi-third-prefill"] = replace(own["sarathi-third-prefill"], paper=12.0)
    monkeypatch.setattr(experiments, "claims", lambda: known)
    assert main(["slos-serve-toy", "--small", "--workers", "1", "--no-progress", "--json", "-"]) == 1
    captured = capsysbinary.readouterr()
    assert b"these checks do not hold: sarathi-third-prefill" in captured.err
    verdicts = {claim["name"]: claim["verdict"] for claim in json.loads(captured.out)["claims"]}
    assert verdicts["sarathi-third-prefill"] == "misses"


# --------------------------------------------------------------------------- the pages


RUNS = [json.loads(file.read_bytes()) for file in FULL]


@cache
def made_pages() -> dict[str, str]:
    """Returns the pages of all full runs, made once, by the command."""
    with TemporaryDirectory() as folder:
        assert main(["--docs", str(FULL[0].parent), "--out", folder]) == 0
        files = sorted(Path(folder).rglob("*.md"))
        return {file.relative_to(folder).as_posix(): file.read_text(encoding="utf-8") for file in files}


def test_the_pages_are_what_the_full_runs_say() -> None:
    made = made_pages()
    there = [ROOT / "docs" / "papers.md", *(ROOT / "docs" / "papers").glob("*.md")]
    assert {file.relative_to(ROOT / "docs").as_posix() for file in there} == set(made)
    for name, text in made.items():
        assert (ROOT / "docs" / name).read_text(encoding="utf-8") == text, name


def test_the_index_is_short_counts_every_claim_of_a_paper_and_opens_with_those_that_miss() -> None:
    text = made_pages()["papers.md"]
    assert len(re.sub("<details.*?</details>", "", text, flags=re.DOTALL).splitlines()) <= 70
    verdicts = [claim.verdict(ours) if ours else "not run" for claim, ours in of_papers()]
    counts = [verdicts.count(verdict) for verdict in ("misses", "inconclusive", "not run", "holds")]
    said = re.search(r"Of (\d+) claims .*\*\*(\d+) miss.*\D(\d+) are inc.*\D(\d+) were not run and (\d+) hold", text)
    assert said is not None
    assert [int(number) for number in said.groups()] == [len(verdicts), *counts]
    by_paper = re.findall(r"^\| \[.*\]\(papers/[\w-]+\.md\).* \| (.*) \|$", text, re.MULTILINE)
    assert len(by_paper) == len(PAPERS)
    for word, count in zip(("miss", "inconclusive", "not run", "hold"), counts, strict=True):
        assert sum(int(number) for cell in by_paper for number in re.findall(rf"(\d+) {word}", cell)) == count
    parts = text.split("\n## ")[1:]
    assert [part.split("\n")[0] for part in parts] == [
        "Claims that miss, and why",
        "The other claims",
        "How to read this",
    ]
    assert len(re.findall(r"\.md#[\w-]+\) \|$", parts[0], re.MULTILINE)) == counts[0]
    assert f"<summary>{counts[1]} claims that are inconclusive</summary>" in parts[1]


def test_the_index_names_what_was_not_run() -> None:
    without = pages([run for run in RUNS if run["figure"] != "polyserve-flip"])["papers.md"]
    rows = [
        line
        for line in without.splitlines()
        if line.endswith("| [polyserve-flip](papers/polyserve.md#polyserve-flip) |")
    ]
    assert len(rows) == 2
    assert all("| not run |" in row for row in rows)


def of_papers() -> list[tuple[Claim, Estimate | None]]:
    """What the papers say, and ours where it was run in full."""
    ours = {(run["figure"], claim["name"]): claim for run in RUNS for claim in run["claims"]}
    found: list[tuple[Claim, Estimate | None]] = []
    for figure, own in claims().items():
        for name, claim in own.items():
            if claim.kind == "paper":
                got = ours.get((figure, name))
                found.append((claim, got and estimate(got["ours"], got["low"], got["high"])))
    return found


def estimate(value: float, low: float | None, high: float | None) -> Estimate:
    return Estimate(value, -inf if low is None else low, inf if high is None else high)


def test_verdicts_are_the_stored_ones() -> None:
    for run in RUNS:
        known = claims()[run["figure"]]
        for stored in [own for own in run["claims"] if own["name"] in known]:
            given = estimate(stored["ours"], stored["low"], stored["high"])
            assert known[stored["name"]].verdict(given) == stored["verdict"], (run["figure"], stored["name"])


def test_a_claim_newer_than_its_figures_run_was_not_run_and_one_that_is_gone_is_not_shown() -> None:
    [run] = [run for run in RUNS if run["figure"] == "slos-serve-toy"]
    first, *rest = run["claims"]
    page = pages([{**run, "claims": [{**first, "name": "gone"}, *rest]}])["papers/slos-serve.md"]
    section = page.split("\n### slos-serve-toy\n")[1].split("\n### ")[0]
    [row] = [line for line in section.splitlines() if line.startswith(f"| `{first['name']}` |")]
    assert row.endswith("| not run | not run |")
    assert "gone" not in section
    assert section.count("| not run |") == 1


def test_every_claim_stands_on_one_page_and_no_cell_is_padded() -> None:
    made = made_pages()
    for figure, own in claims().items():
        page = [text for text in made.values() if f"\n### {figure}\n" in text]
        assert len(page) == 1
        section = page[0].split(f"\n### {figure}\n")[1].split("\n### ")[0]
        assert all(f"| `{name}` | {claim.says} | {claim.kind} |" in section for name, claim in own.items())
    for text in made.values():
        assert "∞" not in text
        assert not re.findall(r"^\|.*\S  +\|$|^\|.*-{4,}\|", text, re.MULTILINE)
        for file, anchor in re.findall(r"\]\((papers/[\w-]+\.md)?#([\w-]+)\)", text):
            assert f"\n### {anchor}\n" in (made[file] if file else text)


def test_a_page_opens_with_headlines_then_what_misses_and_takes_full_runs_only() -> None:
    data = experiments.run("slos-serve-toy", workers=1)
    opening, first, second, third, _ = pages([data])["papers/slos-serve.md"].split("\n## ")
    assert opening.startswith("# SLOs-Serve beside ours\n")
    assert all(f"| {headline.words} |" in opening for headline in HEADLINES["slos-serve"])
    assert first.startswith("Where it differs, and why\n")
    assert "the third and the fourth miss their TPOT" in first
    assert "the oldest decode first starves one request" in first
    assert second.startswith("How to run it\n")
    assert third.startswith("Other claims that do not hold\n")
    assert "<summary>Not run: " in third
    assert "Not run in full" in pages([data])["papers/ascendra.md"]
    assert "Every figure measures its policies as they are." in pages([data])["papers.md"]
    assert data["behaviour"]["slos_serve"] == golden.recorded()["slos_serve"]
    assert data["command"] == "python -m experiments slos-serve-toy"
    other = data | {"behaviour": data["behaviour"] | {"sarathi": {"one, sarathi": "0" * 16}}}
    assert "**Older than its policies**: `sarathi` does otherwise since then" in pages([other])["papers/slos-serve.md"]
    assert "<summary>1 of 1 figures are older than" in pages([other])["papers.md"]
    for bad, says in (
        (data | {"small": True}, "was run with --small"),
        (data | {"claims": []}, "run it again"),
        (data | {"format": "x"}, "format 'x' is no figure's"),
        (data | {"trace": "t.csv"}, "was run with --trace"),
        (data | {"policy": "mine.py"}, "was run with --policy"),
    ):
        with pytest.raises(ValueError, match=says):
            pages([bad])


def test_the_page_says_which_systems_have_fewer_seeds_and_what_has_one() -> None:
    by_name = [{"name": "ours", "seeds": [1, 2, 3]}, {"name": "theirs", "seeds": [0]}]
    assert seeds({"seeds": [0, 1, 2, 3], "data": by_name}) == "3 seeds (1: theirs)"
    by_run = [{"seed": 1, "systems": {"a": {}, "b": {}}}, {"seed": 2, "systems": {"a": {}}}]
    assert seeds({"seeds": [1, 2], "data": by_run}) == "2 seeds (1: b)"
    assert seeds({"seeds": [7], "data": {}}) == "1 seed"
    page = made_pages()["papers/polyserve.md"]
    assert "3 seeds (1: edf, polyserve co untaught, polyserve pd untaught)" in page
    assert "| 1.202 (one seed) |" in made_pages()["papers/simulator.md"]


def test_the_page_says_which_runs_are_too_short() -> None:
    data = json.loads((ROOT / "docs" / "figures" / "slos-serve-coder-load.json").read_bytes())
    data["data"] = [{**value, "seconds": 4.9 * value["e2e_p99"]} for value in data["data"]]
    runs = [{"seconds": 50.0, "e2e_p99": 10.0}, {"seconds": 49.0, "e2e_p99": 10.0}, {"seconds": 20.0, "e2e_p99": 10.0}]
    assert too_short(runs[:1]) == too_short([{}]) == ""
    assert "2 of 3 runs are too short" in too_short(runs)
    assert "worst: 20 s of arrivals, p99 10 s" in too_short(runs)
    assert f"**Short runs.** {too_short(data['data'])}" in pages([data])["papers/slos-serve.md"]


LEAST = 0.1  # seconds that are said of what takes none


@pytest.mark.parametrize("run", [run for run in RUNS if hasattr(experiments.load(run["figure"]), "draw")],
                         ids=lambda run: run["figure"])  # fmt: skip
def test_a_picture_is_drawn_of_the_recorded_run(run: dict[str, Any]) -> None:
    axes = pytest.importorskip("matplotlib.figure").Figure().add_subplot()
    experiments.load(run["figure"]).draw(run["data"], axes)
    assert axes.get_ylabel()
    assert axes.lines or axes.patches or axes.collections


@pytest.mark.parametrize("run", RUNS, ids=[run["figure"] for run in RUNS])
def test_the_seconds_said_are_those_of_the_recorded_run(run: dict[str, Any]) -> None:
    """CPU seconds; the live runs' servers are other processes, whose time only the wall clock has."""
    took = max(LEAST, run["wall"] if run["figure"] == "simulator-fidelity" else run["cpu"])
    assert took / 1.5 <= experiments.load(run["figure"]).SECONDS <= 1.5 * took


def test_a_file_that_the_page_cannot_be_made_of_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, whole = tmp_path / "toy.json", FULL[0].read_text()
    for content, says in (
        ("[]", "is no run of a figure (all of it: Input should be a valid dictionary"),
        ('{"format": "rubato-figure/1"}', "is no run of a figure (figure: Field required)"),
        (whole.replace('"verdict"', '"verdikt"', 1), "is no run of a figure (claims.0.verdict: Field required)"),
        (whole[: len(whole) // 2], "is not JSON ("),
    ):
        file.write_text(content)
        assert main(["--docs", str(tmp_path), "--out", str(tmp_path)]) == 2
        error = capsys.readouterr().err
        assert f"{file} {says}" in error
        assert f"): give what `python -m experiments NAME --json {file}` writes" in error
        assert error.count("\n") == 1
    file.write_text(whole.replace('"small": false', '"small": true'))
    assert main(["--docs", str(tmp_path), "--out", str(tmp_path)]) == 2
    assert f"{file}: figure " in capsys.readouterr().err
