"""Commands that do alike take alike: where a policy comes from, and what is said of requests that were not served."""

from __future__ import annotations

from pathlib import Path

import pytest

from rubato.cli.main import main

SMALL = ["--profile", "llama-3.1-8b-h200", "--chat", "2000,100", "--duration", "2", "--no-progress", "--workers", "1"]


def test_the_configurations_policy_and_router_are_taken_where_no_option_names_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mine.yaml").write_text("policy: {name: vllm, budget: 1024}\nrouter: random\nreplicas: 2\n")
    words = ["sweep", *SMALL, "--rates", "2", "--seeds", "0", "--resume", "jobs.jsonl"]
    assert main([*words, "--config", "mine.yaml"]) == 0
    assert "vllm:budget=1024@random" in capsys.readouterr().out
    assert main([*words, "--config", "mine.yaml", "--policy", "sarathi", "--resume", "other.jsonl"]) == 0
    assert "sarathi" in capsys.readouterr().out
    assert main([*words, "--set", "policy=nonesuch", "--resume", "third.jsonl"]) == 2
    assert "unknown policy 'nonesuch'" in capsys.readouterr().err


def test_one_policy_is_asked_for_once(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["simulate", "--policy", "sarathi", "--policy", "edf"])
    assert "--policy is given twice: this command takes one" in capsys.readouterr().err


def test_the_table_says_why_requests_were_not_served(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["simulate", "--profile", "llama-3.1-8b-h200", "--chat", "2000,100", "--duration", "2", "--rate", "3"]
    assert main([*words, "--set", "engine.max_model_len=100", "--policy", "vllm"]) == 0
    assert "requests were not served: rejected-too-long" in capsys.readouterr().out
