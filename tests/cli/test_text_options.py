"""Text that the command line is given arrives letter by letter, whatever YAML would make of it."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any

import pytest

from rubato.cli.main import main
from rubato.config.schema import Config, load

ODD = ["a: b.jsonl", "3.1", "null", "yes", "1e3", "0x10", "[a]", "{a: b}", "'a'", "# a", "a #b", "- a", "*a", "ü", "~"]


def config_of(words: Sequence[str], monkeypatch: pytest.MonkeyPatch) -> Config:
    """What a command would serve by."""
    found: list[Config] = []
    module = "epp_server" if words[0] == "epp" else "serve"

    def serve(config: Config) -> int:
        found.append(config)
        return 0

    monkeypatch.setattr(importlib.import_module(f"rubato.serving.{module}"), "serve", serve)
    assert main(words) == 0
    return found[0]


def setting(config: Config, path: str) -> Any:
    value: Any = config
    for name in path.split("."):
        value = value[name] if isinstance(value, dict) else getattr(value, name)
    return value


GATEWAY = ["gateway", "--server", "http://10.0.0.7"]
OPTIONS = [
    (["serve"], "", "model"),
    (["serve"], "--host", "host"),
    (["serve"], "--event-log", "event_log"),
    (["serve"], "--engine", "engine.name"),
    (["serve"], "--served-model-name", "served_model_name"),
    (["serve"], "--policy", "policy.name"),
    (["serve"], "--router", "router.name"),
    (["serve"], "--ray-address", "fleet.settings.address"),
    (GATEWAY, "--host", "host"),
    (GATEWAY, "--event-log", "event_log"),
    (["epp", "--server", "http://10.0.0.7"], "--event-log", "event_log"),
]


@pytest.mark.parametrize("text", ODD)
@pytest.mark.parametrize(("words", "option", "path"), OPTIONS)
def test_an_option_of_text_given_anything_keeps_it(
    words: list[str], option: str, path: str, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if option == "--policy" and ":" in text:
        pytest.skip("NAME:SETTING=VALUE")
    if text.startswith("-") and not option:
        pytest.skip("argparse takes it for an option")
    given = [f"{option}={text}"] if option else [text]
    assert setting(config_of([*words, *given], monkeypatch), path) == text


@pytest.mark.parametrize("text", ODD)
@pytest.mark.parametrize(
    "path",
    [
        "model", "served_model_name", "host", "event_log", "step_log", "policy.name", "engine.kind", "tls.cert",
        "tls.key_password", "tenants.a.key_file", "tenants.a.keys_env",
    ],
)  # fmt: skip
def test_set_of_a_text_given_anything_keeps_it(path: str, text: str) -> None:
    found = load({"tls": {"cert": "c", "key": "k"}}, [f"{path}={text}"])
    value = setting(found, path.replace("kind", "name"))
    assert (value.get_secret_value() if path == "tls.key_password" else value) == text


def test_set_of_anything_else_is_read_as_yaml() -> None:
    found = load({"event_log": "a", "policy": "edf"}, [
        "event_log=", "port=80", "max_in_flight=null", "policy.safety_margin=0.2", "engine={kind: x, y: [1]}",
        "tiers.a.ttft_ms=1000.0", "log.level=debug",
    ])  # fmt: skip
    assert found.event_log is None
    assert (found.port, found.max_in_flight, found.policy.settings) == (80, None, {"safety_margin": 0.2})
    assert (found.engine.name, found.engine.settings) == ("x", {"y": [1]})
    assert (found.tiers["a"].ttft_ms, found.log.level) == (1000.0, "debug")
