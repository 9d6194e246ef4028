"""Where results go: a report has the command without secrets; what cannot be drawn is said before hours of work."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from rubato.cli.answers import command
from rubato.cli.main import main

RUN = ["simulate", "--count", "5", "--policy", "vllm"]


@pytest.mark.parametrize(
    ("words", "shown"),
    [
        (["bench", "http://h", "--api-key", "k1", "--rate", "2"], "rubato bench http://h --api-key *** --rate 2"),
        (["bench", "--header=authorization=Bearer k1"], "rubato bench --header=***"),
        (["bench", "--header", "x=k1", "--header", "y=k2"], "rubato bench --header *** --header ***"),
        (["sweep", "--set", "a=$(b)"], "rubato sweep --set 'a=$(b)'"),
    ],
)
def test_a_command_is_shown_without_secrets(words: list[str], shown: str) -> None:
    assert command(words).replace(" \\\n   ", "") == shown


def test_a_report_of_a_run_has_its_command_and_its_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    report = tmp_path / "run.html"
    assert main([*RUN, "--label", "<b>mine</b>", "--report", str(report)]) == 0
    page = report.read_text()
    assert "<b>mine" not in page
    assert "&lt;b&gt;mine&lt;/b&gt;" in page
    assert "--count 5" in page
    assert "<b>mine</b>" in capsys.readouterr().out


def test_a_missing_library_is_said_before_the_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    out = tmp_path / "run.json"
    assert main([*RUN, "--json", str(out), "--report", str(tmp_path / "run.html")]) == 2
    assert "pip install 'rubato-llm[plot]'" in capsys.readouterr().err
    assert not out.exists()
