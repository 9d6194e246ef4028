"""The examples of docs/workloads.md do what they say."""

import json
import re

from rubato.cli.main import main
from rubato.config import kinds_file
from rubato.workloads import read
from rubato.workloads.arrivals import parse
from tests.docs.pages import PAGES, blocks, commands

PAGE = "workloads.md"
DOCS = PAGES[PAGE]


def test_python_examples_run():
    one, two = blocks(PAGE, "from rubato")
    made = {}
    exec(one, made)
    assert len(made["load"].arrivals) == 1000
    exec(two, made)
    assert {a.app for a in made["load"].arrivals[:500]} == {"ask"}
    assert {a.app for a in made["load"].arrivals[500:]} == {"ask", "think"}


def test_kinds_are_read(tmp_path):
    (text,) = blocks(PAGE, "tiers:")
    (tmp_path / "mix.yaml").write_text(text)
    assert [kind.app for kind in kinds_file.read(tmp_path / "mix.yaml")] == ["chat", "summary", "code", "search"]


def test_commands_make_workloads(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (text,) = blocks(PAGE, "tiers:")
    (tmp_path / "mix.yaml").write_text(text)
    rows = [f"2023-11-16 18:15:{second},5,5" for second in (46, 46, 47)]
    (tmp_path / "code.csv").write_text("\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *rows]))
    (tmp_path / "conv.csv").write_text("t_s,input_tokens,output_tokens\n0,50,5\n2,60,5\n")
    (tmp_path / "log.csv").write_text("sent_ms,tokens_in,tokens_out,queue\n0,50,5,chat\n2000,60,5,code\n")
    rows = ["7,50,0", "8,40,3", "3608,50,5", "3611,60,5", "5000,70,5"]
    (tmp_path / "burstgpt.csv").write_text("\n".join(["Timestamp,Request tokens,Response tokens", *rows]))
    for words in commands(PAGE):
        if words[0] == "workload":
            assert main([word.replace(".csv.gz", ".csv") for word in words]) == 0
    assert [len(read(name).arrivals) for name in ("chat.jsonl", "conv.jsonl")] == [1000, 2]
    assert [(a.at, a.tier) for a in read("day.jsonl").arrivals] == [(0.0, "chat"), (2.0, "code")]
    assert [a.at for a in read("busy.jsonl").arrivals] == [0.0, 3.0]


def test_the_header_shown_is_read(tmp_path):
    (header,) = blocks(PAGE, '{"format"')
    (tmp_path / "mine.jsonl").write_text(
        header.replace("\n", " ") + '\n{"id": "a", "at": 0, "tier": "free", "prompt_tokens": 5, "output_tokens": 1}\n'
    )
    made = read(tmp_path / "mine.jsonl")
    assert set(made.tiers) == set(json.loads(header)["tiers"])
    assert (made.name, made.seed, made.arrivals[0].id) == ("mine", 1, "a")


def test_words_for_arrivals_are_understood():
    rows = re.findall(r"^\| `([a-z-]+(?::[^`]*)?)` \|", DOCS.split("## Arrivals")[1].split("##")[0], flags=re.MULTILINE)
    assert len(rows) == 7
    for words in rows:
        parse(words)
