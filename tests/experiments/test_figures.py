"""Figures: each gives exactly the claims in the file, its checks hold small, and the page is what full runs say."""

from __future__ import annotations

import json
from dataclasses import replace
from math import inf
from pathlib import Path
from typing import Any

import pytest

import experiments
from experiments import Claim, claims, failed, names
from experiments.__main__ import main
from experiments.paper_page import SECTION, page
from rubato.measure.confidence import Estimate
from rubato.planning.capacity import too_short

ROOT = Path(__file__).parents[2]
FULL = sorted((ROOT / "docs" / "figures").glob("*.json"))


# whose parts other tests of this folder try, or which run as another figure does
LONG = (
    "adaserve-urgent", "ascendra-capacity", "ascendra-parts", "sa-gain", "simulator-fidelity", "simulator-speed",
    "slos-serve-ablation", "slos-serve-capacity", "slos-serve-margin", "slos-serve-overload",
)  # fmt: skip


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.full) if name in LONG else name for name in names()]
)
def test_a_figure_gives_its_claims_and_its_checks_hold(name: str) -> None:
    data = experiments.run(name, small=True, workers=1)
    assert [claim["name"] for claim in data["claims"]] == list(claims()[name])
    assert failed(data) == []
    assert {"seeds", "versions", "slo_rule", "settings", "wall", "cpu", "source", "data"} <= data.keys()
    json.dumps(data["data"])
    for claim in data["claims"]:
        assert {"name", "kind", "paper", "ours", "low", "high", "unit", "relation", "verdict"} <= claim.keys()
        assert claim["low"] <= claim["ours"] <= claim["high"]
    figure = experiments.load(name)
    assert figure.SECONDS > 0.0
    assert len(figure.jobs(False)) >= len(figure.jobs(True)) > 0


def test_the_claims_file_and_the_figures_are_the_same() -> None:
    files = [file for folder in experiments.__path__ for file in Path(folder).glob("*.py")]
    figures = [file.stem for file in files if "\nSECONDS = " in file.read_text()]
    assert sorted(name.replace("_", "-") for name in figures) == names()
    for own in claims().values():
        for claim in own.values():
            assert claim.kind in ("check", "paper", "ours")
            assert claim.kind in ("paper", "ours") or not claim.headline
            assert not claim.headline or claim.kind == "ours" or SECTION.search(claim.says)
            assert claim.headline or not claim.cause
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


def test_a_figure_of_a_recorded_stream(tmp_path: Path) -> None:
    trace = tmp_path / "stream.csv"
    rows = [f"{0.4 * i},{('coding,1.2', 'chat,-50', 'summarization,-150')[i % 3]},40,20" for i in range(12)]
    trace.write_text("\n".join(["t_s,category,slo_ratio,input_tokens,output_tokens", *rows]))
    data = experiments.run("adaserve-scale", small=True, workers=1, trace=trace)
    assert data["trace"] == "stream.csv"
    assert {v["requests"] for v in data["data"]} == {12}
    assert set(data["data"][0]["systems"]["adaserve"]["by_tier"]) == {"code", "chat", "summary"}
    with pytest.raises(ValueError, match=r"'adaserve-urgent' takes no trace: .*adaserve-rate, adaserve-scale take one"):
        experiments.run("adaserve-urgent", small=True, trace=trace)


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
    assert "about 0.1 s of one core; if interrupted, the same command goes on" in capsys.readouterr().err
    assert "3 of 3 jobs were in the file already" in json.loads(out.read_text())["notes"][0]
    assert not kept.exists()


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


# --------------------------------------------------------------------------- the page


def test_the_page_is_what_the_full_runs_say() -> None:
    assert (ROOT / "docs" / "papers.md").read_text() == page([json.loads(file.read_bytes()) for file in FULL])


def test_the_page_opens_with_the_headline_claims_and_takes_full_runs_only() -> None:
    data = experiments.run("slos-serve-toy", workers=1)
    first, second, rest = page([data]).split("\n## ")[1:4]
    assert first.startswith("SLOs-Serve\n\n| headline claim")
    assert "the oldest decode first starves one request" in first
    assert second.startswith("Claims of papers that miss")
    assert "the third and the fourth miss their TPOT" in second
    assert "simulator-queue" in second  # not run in full
    assert rest.startswith("slos-serve-toy")
    for bad, says in (
        (data | {"small": True}, "was run with --small"),
        (data | {"claims": data["claims"][1:]}, "run it again"),
        (data | {"format": "x"}, "format 'x' is no figure's"),
        (data | {"trace": "t.csv"}, "was run with --trace"),
    ):
        with pytest.raises(ValueError, match=says):
            page([bad])


def test_the_page_says_which_runs_are_too_short() -> None:
    data = json.loads((ROOT / "docs" / "figures" / "slos-serve-scaling.json").read_bytes())
    runs = [{"seconds": 50.0, "e2e_p99": 10.0}, {"seconds": 49.0, "e2e_p99": 10.0}, {"seconds": 20.0, "e2e_p99": 10.0}]
    assert too_short(runs[:1]) == too_short([{}]) == ""
    assert "2 of 3 runs are too short" in too_short(runs)
    assert "worst: 20 s of arrivals, p99 10 s" in too_short(runs)
    assert f"**Short runs.** {too_short(data['data'])}" in page([data])


def test_a_file_that_the_page_cannot_be_made_of_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, whole = tmp_path / "toy.json", FULL[0].read_text()
    for content, says in (
        ("[]", "is no run of a figure (all of it: Input should be a valid dictionary"),
        ('{"format": "rubato-figure/1"}', "is no run of a figure (figure: Field required)"),
        (whole.replace('"verdict"', '"verdikt"', 1), "is no run of a figure (claims.0.verdict: Field required)"),
        (whole[: len(whole) // 2], "is not JSON ("),
    ):
        file.write_text(content)
        assert main(["--docs", str(tmp_path), "--out", str(tmp_path / "page.md")]) == 2
        error = capsys.readouterr().err
        assert f"{file} {says}" in error
        assert f"): give what `python -m experiments NAME --json {file}` writes" in error
        assert error.count("\n") == 1
    file.write_text(whole.replace('"small": false', '"small": true'))
    assert main(["--docs", str(tmp_path), "--out", str(tmp_path / "page.md")]) == 2
    assert f"{file}: figure " in capsys.readouterr().err
