"""`rubato check`: what a start would refuse is refused, without starting; what is valid is told in a few lines."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from rubato.cli.main import main
from rubato.config.json_schema import choices, json_schema
from tests.docs.pages import PAGES, fenced

GATEWAY = """
servers: [http://gpu-1:8000, {url: "http://gpu-2:8000"}]
policy: {name: edf, fairness: 0.1}
tiers: {chat: {ttft_ms: 1000, tpot_ms: 60}, batch: {e2e_ms: 60000, on_decline: refuse}}
default_tier: chat
tenants: {acme: {keys: [sk-1], tiers: [chat]}}
host: "::1"
"""


def written(folder: Path, text: str) -> str:
    path = folder / "rubato.yaml"
    path.write_text(text)
    return str(path)


def test_a_valid_configuration_says_what_it_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", written(tmp_path, GATEWAY)]) == 0
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert lines[1:] == [
        "runs a gateway over 2 servers",
        "http://gpu-1:8000",
        "http://gpu-2:8000",
        "policy edf (fairness=0.1)",
        "router least_loaded (auto)",
        "tier chat: TTFT 1000 ms, TPOT 60 ms (default)",
        "tier batch: e2e 60000 ms; refused when late",
        "tenant acme: chat",
        "listens http://[::1]:8000",
    ]


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("policy=efd", "unknown policy 'efd': did you mean 'edf'?"),
        ("policy.fairnes=1", "policy 'edf' has no setting 'fairnes': did you mean 'fairness'?"),
        ("router=nonesuch", "unknown router 'nonesuch'"),
        ("tiers.chat.tttft_ms=3", "tiers.chat.tttft_ms: unknown setting: did you mean 'ttft_ms'?"),
        ("tenants.acme.key_file=nowhere", "key_file: nowhere cannot be read"),
        ("tls={cert: nowhere.pem, key: nowhere.pem}", "tls: nowhere.pem and nowhere.pem cannot be used"),
        ("event_log=nowhere/events.jsonl", "event log nowhere/events.jsonl: it cannot be made in nowhere"),
        ("lengths=oracle", "the oracle knows simulated requests only"),
        ("servers=[http://a:1, http://a:1]", "servers: http://a:1 is named twice"),
        ("autoscale=pool", "autoscale: servers that run already are not started here"),
    ],
)
def test_what_a_start_would_refuse_is_refused(
    override: str, says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["check", written(tmp_path, GATEWAY), "--set", override]) == 2
    assert says in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("engine: {kind: simulated, max_num_seq: 3}", "engine 'simulated' has no setting 'max_num_seq'"),
        ("engine: {kind: simulated}\nautoscale: {kind: attainment, max: 0}", "autoscaler 'attainment'"),
        ("engine: {kind: simulated}\nfleet: {kind: ray, num_cpu: 1}", "fleet 'ray' has no setting 'num_cpu'"),
        ("engine: vllm", "model: engine 'vllm' needs a Hugging Face name"),
        ("engine: {kind: vllm, arg: []}\nmodel: a/b", "engine.arg: unknown setting: did you mean 'args'"),
    ],
)
def test_engines_and_fleets_are_checked_without_being_started(
    text: str, says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["check", written(tmp_path, text)]) == 2
    assert says in capsys.readouterr().err


def test_an_event_log_that_is_checked_is_left_as_it_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    events = tmp_path / "events.jsonl"
    file = written(tmp_path, f"engine: simulated\nevent_log: {events}")
    assert main(["check", file]) == 0
    assert not events.exists()
    events.write_text("something else\n")
    assert main(["check", file]) == 2
    assert "no event log" in capsys.readouterr().err
    assert events.read_text() == "something else\n"


def test_the_schema_is_printed_and_is_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "--schema"]) == 0
    schema = json.loads(capsys.readouterr().out)
    jsonschema.Draft202012Validator.check_schema(schema)
    assert "title" not in schema["properties"]["port"]
    assert "policy" in schema["properties"]["policy"]["description"]


EXAMPLES = [(page, text) for page in PAGES for text in fenced(page, "yaml")]


@pytest.fixture(scope="module")
def schema() -> Any:
    return jsonschema.Draft202012Validator(json_schema())


@pytest.mark.parametrize(("page", "text"), [*EXAMPLES, ("here", GATEWAY)])
def test_the_schema_takes_every_configuration_of_the_manual(page: str, text: str, schema: Any) -> None:
    schema.validate(yaml.safe_load(text))


@pytest.mark.parametrize(
    "text", ["prot: 1", "port: many", "tiers: {chat: {ttft: 1}}", "engine: 3", "log: {level: loud}", "policy: {x: 1}"]
)
def test_the_schema_refuses_what_a_start_refuses(text: str, schema: Any) -> None:
    with pytest.raises(jsonschema.ValidationError):
        schema.validate(yaml.safe_load(text))


def test_every_setting_of_a_packaged_choice_is_explained() -> None:
    assert not [
        (key, name, setting.name)
        for key, known in choices().items()
        for name, own in known.items()
        for setting in own
        if not setting.text
    ]
