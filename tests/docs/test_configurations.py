"""The configurations, settings, metrics and names that pages state are those of the code."""

from __future__ import annotations

import importlib
import json
import re
from pathlib import Path

import pytest

from rubato import policies
from rubato.config.build import drafter_of, latency_of, link_of, simulation_limits
from rubato.config.schema import load
from rubato.core.clock import VirtualClock
from rubato.engines.simulated import FREE_LINK
from rubato.engines.vllm.sequence import KEYS
from rubato.engines.vllm.settings import Settings, settings_of
from rubato.frontdoor.admission import SLO_FIELDS
from rubato.frontdoor.errors import ApiError
from rubato.frontdoor.slo_body import SLOBody
from rubato.frontdoor.slo_fields import KNOWN_HEADERS
from rubato.frontdoor.tenants import tenants_of
from rubato.latency import profiles
from rubato.serving import schemas
from rubato.serving.serve import build
from tests.docs.pages import PAGES, blocks, fenced, prose

EXAMPLES = [(page, text) for page in PAGES for text in fenced(page, "yaml")]


def column(page: str, heading: str, at: int = 0) -> list[str]:
    """The code in one column of the tables below this heading (and above the next), row by row."""
    section = prose(page).split(f"{heading}\n")[1].split("\n#")[0]
    section = re.sub(r"^\|.*\n(?=\|--)", "", section, flags=re.MULTILINE)  # the tables' heads
    rows = [line.split("|")[at + 1] for line in section.splitlines() if line.startswith("|")]
    return [name for row in rows for name in re.findall(r"`([^`]+)`", row)]


@pytest.mark.parametrize(("page", "text"), EXAMPLES, ids=[page for page, _ in EXAMPLES])
def test_configurations_load(page: str, text: str, tmp_path: Path) -> None:
    (tmp_path / "rubato.yaml").write_text(text)
    config = load(tmp_path / "rubato.yaml")
    policies.load(config.policy.name, config.policy.settings)
    policies.router_for(config.policy.name, config.router.name, config.router.settings)
    latency_of(config)
    if config.engine.name == "simulated":
        assert simulation_limits(config)["kv_blocks"] == config.engine.settings["kv_blocks"]
        assert (drafter_of(config) is not None) == ("drafter" in config.engine.settings)
        assert (link_of(config) == FREE_LINK) == ("link" not in config.engine.settings)


def test_the_operators_example_builds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch")
    (tmp_path / "keys").write_text("sk-ops\n")
    monkeypatch.setenv("ACME_KEYS", "sk-acme")
    (example,) = fenced("server.md", "yaml")
    (tmp_path / "rubato.yaml").write_text(example.replace("/run/secrets/ops", str(tmp_path / "keys")))
    config = load(tmp_path / "rubato.yaml")
    assert [tenant.name for tenant in tenants_of(config)] == ["acme", "ops"]
    engines, _ = build(config, VirtualClock())
    assert len(engines) == 1


@pytest.mark.parametrize("name", sorted(schemas.UNSUPPORTED))
def test_a_field_that_is_not_supported_is_refused(name: str) -> None:
    body = {"model": "m", "messages": [{"role": "user", "content": "hi"}], name: "some other value"}
    with pytest.raises(ApiError) as refused:
        schemas.parse(schemas.ChatCompletion, json.dumps(body).encode())
    assert (refused.value.status, refused.value.param, refused.value.code) == (400, name, "unsupported_parameter")


def test_what_is_not_supported_is_named_all_of_it() -> None:
    assert sorted(column("http-api.md", "## Unsupported fields", 1)) == sorted(schemas.UNSUPPORTED)


@pytest.mark.parametrize(
    "message",
    [
        {"role": "tool", "content": "4"},
        {"role": "assistant", "tool_calls": [{"id": "a"}]},
        {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:"}}]},
    ],
)
def test_messages_of_other_kinds_are_refused(message: object) -> None:
    with pytest.raises(ApiError) as refused:
        schemas.parse(schemas.ChatCompletion, json.dumps({"model": "m", "messages": [message]}).encode())
    assert refused.value.status == 400


def test_architectures_are_named_all_of_them() -> None:
    pytest.importorskip("torch")
    from rubato_torch.model_config import FAMILIES

    section = PAGES["server.md"].split("## Models\n")[1]
    assert set(re.findall(r"`(\w+ForCausalLM)`", section)) == set(FAMILIES)


def test_settings_and_keys_inside_vllm() -> None:
    page = "vllm.md"
    assert set(column(page, "## Settings")) == set(Settings.model_fields)
    shell = blocks(page, "pip install")[0]
    for flag in ("--scheduler-cls ", "--middleware "):
        name, _, attribute = shell.split(flag)[1].split()[0].rpartition(".")
        assert callable(getattr(importlib.import_module(name), attribute))
    (given,) = re.findall(r"--additional-config '(.*)'", shell)
    assert settings_of(json.loads(given)).config == "rubato.yaml"


def test_ways_to_state_an_slo_are_named_all_of_them() -> None:
    ways, names = column("http-api.md", "## State an SLO"), column("http-api.md", "## State an SLO", 1)
    assert set(SLO_FIELDS) | {"vllm_xargs"} == set(ways)
    assert [name for name in names if name.startswith("slo_")] == list(KEYS)
    assert {name for name in names if name.startswith("x-")} == set(KNOWN_HEADERS)
    assert [name for name in names if not name.startswith(("slo_", "x-"))] == list(SLOBody.model_fields)


def test_policies_and_profiles_are_named_all_of_them() -> None:
    assert set(column("policies.md", "## The packaged policies")) == set(policies.names())
    assert column("latency.md", "## Hardware profiles")[: len(profiles.names())] == profiles.names()


def test_the_profile_is_loaded_as_shown() -> None:
    (example,) = blocks("latency.md", "from rubato import profiles")
    made: dict[str, object] = {}
    exec(example, made)
    assert f"{made['profile'].kv_tokens:,}" in PAGES["latency.md"]  # type: ignore[attr-defined]
