"""The examples of docs/workloads.md do what they say."""

import re
import shlex
from pathlib import Path

import numpy as np
import pytest

from rubato.cli import main
from rubato.workloads import mix, read, scenarios
from rubato.workloads.arrivals import parse

DOCS = (Path(__file__).parents[2] / "docs" / "workloads.md").read_text(encoding="utf-8")


def blocks(begins):
    """The indented blocks whose first line begins so."""
    found = re.findall(r"(?:^    .*\n|^\n)+", DOCS, flags=re.MULTILINE)
    texts = [re.sub(r"^    ", "", block.strip("\n"), flags=re.MULTILINE) for block in found if block.strip()]
    return [text for text in texts if text.startswith(begins)]


def test_python_examples_run():
    one, two = blocks("from rubato")
    made = {}
    exec(one, made)
    assert len(made["load"].arrivals) == 1000
    exec(two, made)
    assert {a.app for a in made["load"].arrivals[:500]} == {"ask"}
    assert {a.app for a in made["load"].arrivals[500:]} == {"ask", "think"}


def test_kinds_are_read(tmp_path):
    (text,) = blocks("tiers:")
    (tmp_path / "mix.yaml").write_text(text)
    assert [kind.app for kind in mix.read(tmp_path / "mix.yaml")] == ["chat", "summary", "code", "search"]


def test_commands_make_workloads(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (text,) = blocks("tiers:")
    (tmp_path / "mix.yaml").write_text(re.sub(r"^ *- \{app: search.*\n?", "", text, flags=re.MULTILINE))
    rows = [f"2023-11-16 18:15:{second},5,5" for second in (46, 46, 47)]
    (tmp_path / "code.csv").write_text("\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *rows]))
    (tmp_path / "conv.csv").write_text("t_s,input_tokens,output_tokens\n0,50,5\n2,60,5\n")
    (words,) = blocks("rubato workload")
    for line in words.replace(".csv.gz", ".csv").splitlines():
        command, *rest = shlex.split(line, comments=True)[1:]
        if command == "workload":
            assert main([command, *rest]) == 0
    assert [len(read(name).arrivals) for name in ("chat.jsonl", "conv.jsonl")] == [1000, 2]


def test_words_for_arrivals_are_understood():
    rows = re.findall(r"^\| `([a-z-]+(?::[^`]*)?)` \|", DOCS.split("## Arrivals")[1].split("##")[0], flags=re.MULTILINE)
    assert len(rows) == 5
    for words in rows:
        parse(words)


@pytest.mark.parametrize("name", ["slos-serve-summarizer", "slos-serve-toolllm"])
def test_tails_are_as_stated(name):
    kind = scenarios.get(name).kinds[0]
    said, lengths = ("1,308", kind.output) if "summ" in name else ("1,955", kind.prompt)
    found = float(lengths.at(np.array([0.99]))[0])
    assert found == pytest.approx(float(said.replace(",", "")), rel=0.002)
    assert said in DOCS
