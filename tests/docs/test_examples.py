"""What `examples/` shows runs as it says. Its client is run in tests/processes/test_openai_client.py."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from rubato.cli.main import main
from rubato.config.for_vllm import VLLM_OWNED
from rubato.config.schema import load
from rubato.core.request import SLO
from rubato.frontdoor.tenants import tiers_of
from rubato.workloads import read
from tests.docs.pages import ROOT

EXAMPLES = ROOT / "examples"
TIERS = EXAMPLES / "tiers.yaml"


def test_every_example_is_named_once_in_the_readme() -> None:
    named = re.findall(r"\]\(([^)]+)\)", (EXAMPLES / "README.md").read_text(encoding="utf-8"))
    assert sorted(named) == sorted(path.name for path in EXAMPLES.iterdir() if path.name[0] not in "_R")


def test_tiers_of_the_file_are_granted_at_each_door() -> None:
    config = load(TIERS)
    tiers = tiers_of(config)
    assert {name: tiers.tier_of(name).slo for name in config.tiers} == {
        "chat": SLO(1.0, 0.08, None, 1.6), "voice": SLO(0.4, 0.06), "completion": SLO(e2e=4.0),
        "report": SLO(10.0, 0.2), "batch": SLO(),
    }  # fmt: skip
    assert config.default_tier == "chat"
    assert not VLLM_OWNED & config.model_fields_set  # no setting without effect inside vLLM


def test_tenants_of_the_file_are_right_once_uncommented(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    text = TIERS.read_text(encoding="utf-8")
    head, tenants = text.split("# tenants:\n")
    file = tmp_path / "tiers.yaml"
    file.write_text(head + "tenants:\n" + re.sub(r"^# ", "", tenants, flags=re.MULTILINE))
    config = load(file)
    assert {name: tenant.tiers for name, tenant in config.tenants.items()} == {
        "web": ("chat", "voice"), "nightly": ("batch",),
    }  # fmt: skip
    monkeypatch.setenv("WEB_KEYS", "sk-a,sk-b")
    assert len(config.tenants["web"].digests()) == 2


def test_policy_runs_by_the_command_that_it_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = (EXAMPLES / "my_policy.py").read_text(encoding="utf-8")
    (command,) = re.findall(r"^    rubato (simulate (?:.*\\\n)?.*)$", text, re.MULTILINE)
    words = command.replace("\\\n", "").replace("--duration 60", "--duration 2").split()
    monkeypatch.chdir(ROOT)
    assert main([*words, "--json", str(tmp_path / "out.json")]) == 0
    assert json.loads((tmp_path / "out.json").read_text())


def test_mix_runs_with_prompts_of_every_kind(tmp_path: Path) -> None:
    made, out = tmp_path / "mix.jsonl", tmp_path / "out.json"
    words = ["--kinds", str(EXAMPLES / "mix.yaml"), "--rate", "8", "--duration", "5"]
    assert main(["workload", *words, "-o", str(made)]) == 0
    load_of_file = read(made)
    assert {one.app for one in load_of_file.arrivals} == {"chat", "code", "agent", "nightly"}
    assert all(one.messages for one in load_of_file.arrivals)
    profile = ["--profile", "llama-3.1-8b-h100", "--json", str(out)]
    assert main(["simulate", "--workload", str(made), "--policy", "edf", *profile]) == 0
    (rows,) = json.loads(out.read_text())["policies"].values()
    assert rows[-1]["completed"] == len(load_of_file.arrivals)
