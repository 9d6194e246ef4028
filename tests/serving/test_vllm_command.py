"""`engine: {kind: vllm}`: the command of a server follows from the configuration."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rubato.config.schema import ConfigError, load
from rubato.config.vllm_server import API_KEY_VARIABLE, vllm_command


def config(**given: Any) -> Any:
    return load({"model": "a/model", "engine": {"kind": "vllm"}, **given})


def words(**given: Any) -> list[str]:
    return vllm_command(config(**given))[0].words_at("10.0.0.7", 8123)


def plugin(**given: Any) -> dict[str, Any]:
    (said,) = [word.partition("=")[2] for word in words(**given) if word.startswith("--additional-config=")]
    told: dict[str, Any] = json.loads(said)["rubato"]
    return told


def test_all_that_is_said_reaches_the_server() -> None:
    engine = {"kind": "vllm", "python": "/opt/v/python", "tensor_parallel_size": 2, "args": ["--max-model-len=512"]}
    said = words(engine=engine, served_model_name="m", prefix_cache=False, policy={"name": "edf", "safety_margin": 0.2})
    assert said[:3] == ["/opt/v/python", "-m", "vllm.entrypoints.openai.api_server"]
    assert {
        "--model=a/model", "--host=10.0.0.7", "--port=8123", "--scheduler-cls=rubato.vllm.Scheduler",
        "--middleware=rubato.vllm.Middleware", "--tensor-parallel-size=2", "--served-model-name=m",
        "--no-enable-prefix-caching", "--max-model-len=512",
    } <= set(said)  # fmt: skip
    assert plugin(policy={"name": "edf", "safety_margin": 0.2}) == {
        "policy": "edf", "settings": {"safety_margin": 0.2}, "slo_rule": "deadline", "link": {"host": "10.0.0.7"},
    }  # fmt: skip


def test_what_a_plug_in_is_told_beside_its_policy(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    engine = {"kind": "vllm", "plugin": {"stand_aside": False}}
    told = plugin(engine=engine, lengths="running_mean", latency={"kind": "affine", "window": 64}, slo_rule="mean")
    assert (told["stand_aside"], told["lengths"], told["latency"]) == (False, "running_mean", {"window": 64})
    assert told["slo_rule"] == "mean"
    assert plugin(lengths=None)["lengths"] is None
    (tmp_path / "mine.py").write_text("from rubato.policies.edf import Scheduler\n")
    assert plugin(policy={"name": "mine.py"})["policy"] == str(tmp_path / "mine.py")  # servers run elsewhere


def test_each_start_has_a_key_of_its_own_unless_one_is_given() -> None:
    command, key = vllm_command(config())
    assert command.environment[API_KEY_VARIABLE] == key
    assert len(key) == 32
    assert vllm_command(config())[1] != key
    assert vllm_command(config(engine={"kind": "vllm", "env": {API_KEY_VARIABLE: "sk-ours"}}))[1] == "sk-ours"


@pytest.mark.parametrize(
    ("engine", "says"),
    [
        ({"args": "--api-key=hush"}, r"^engine\.args: give a list$"),
        ({"args": ["-tp", "2"]}, r"engine\.args: leave -tp out: set engine\.tensor_parallel_size"),
        ({"tensor_parallel_size": True}, r"engine\.tensor_parallel_size: Input should be a valid integer, got True"),
        ({"python": ""}, r"engine\.python: String should have at least 1 character"),
        ({"env": {"A": 1}}, r"^engine\.env\.A: Input should be a valid string, got 1$"),
        ({"plugin": []}, r"engine\.plugin: Input should be a valid dictionary, got \[\]"),
        ({"plugin": {"policy": "edf"}}, r"engine\.plugin: policy follows from the rest"),
        ({"plugin": {"stand_asid": True}}, r"engine\.plugin\.stand_asid: unknown setting: did you mean 'stand_aside'"),
        ({"start_seconds": 0}, r"engine\.start_seconds: Input should be greater than 0, got 0"),
        ({"arg": []}, r"engine\.arg: unknown setting: did you mean 'args'"),
        ({"env": {"KEY": ["hush"]}}, r"^engine\.env\.KEY: Input should be a valid string$"),
    ],
)
def test_what_cannot_be_is_named(engine: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        vllm_command(config(engine={"kind": "vllm", **engine}))


def test_only_a_predictor_without_settings_goes_into_vllm() -> None:
    with pytest.raises(ConfigError, match="inside vLLM 'gaussian' has no settings: leave out mean"):
        vllm_command(config(lengths={"kind": "gaussian", "mean": 5}))


def test_servers_move_kv_where_the_policy_asks_for_it() -> None:
    flag = "--kv-transfer-config"
    assert not [word for word in words() if word.startswith(flag)]
    for apart in (
        {"policy": {"name": "distserve"}},
        {"policy": {"name": "polyserve"}, "router": {"name": "polyserve", "mode": "pd"}},
    ):
        (found,) = [word for word in words(**apart) if word.startswith(flag)]
        assert json.loads(found.partition("=")[2]) == {"kv_connector": "NixlConnector", "kv_role": "kv_both"}
        command, _ = vllm_command(config(**apart))
        first, second = (command.environment_at("127.0.0.1") for _ in range(2))
        assert first["VLLM_NIXL_SIDE_CHANNEL_HOST"] == "127.0.0.1"
        assert first["VLLM_NIXL_SIDE_CHANNEL_PORT"] != second["VLLM_NIXL_SIDE_CHANNEL_PORT"]
    own = words(policy={"name": "distserve"}, engine={"kind": "vllm", "args": [flag, "{}"]})
    assert [word for word in own if word.startswith(flag)] == [flag]
