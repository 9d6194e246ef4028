"""Every unknown or impossible setting is an error that names it, and what would do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rubato.clock import VirtualClock
from rubato.config import Config, ConfigError, load
from rubato.engines.simulated import Engine
from rubato.latency.roofline import Model as Roofline
from rubato.policies import PolicyError
from rubato.serve import build
from rubato.types import SLO

YAML = """
model: some-model
engine: {kind: simulated, max_seqs: 4, noise: 0.1}
latency: {kind: roofline, k1: [0.0, 1.0e-3]}
policy: {name: edf, safety: 0.2}
tiers:
  interactive: {ttft_ms: 1000, tpot_ms: 80}
  batch: {e2e_ms: 60000, on_decline: refuse}
default_tier: interactive
replicas: 2
"""


def test_a_file_and_overrides(tmp_path: Path) -> None:
    path = tmp_path / "rubato.yaml"
    path.write_text(YAML)
    config = load(path, ["policy.safety=0.3", "tiers.batch.e2e_ms=5000", "max_in_flight=null", "router.per_request=9"])
    assert config.policy.settings == {"safety": 0.3}
    assert config.tiers["batch"].slo == SLO(e2e=5.0)
    assert config.tiers["interactive"].slo == SLO(1.0, 0.08)
    assert config.max_in_flight is None
    assert config.router.settings == {"per_request": 9}
    assert load(path).router.name == load({}).router.name
    engines, cluster = build(load(path), VirtualClock())
    assert len(engines) == len(cluster.hosts) == 2
    assert all(isinstance(engine, Engine) for engine in engines)
    assert engines[0].limits.max_seqs == 4
    latencies = [host.latency for host in cluster.hosts.values()]  # type: ignore[attr-defined]
    assert all(isinstance(latency, Roofline) and latency.k1 == (0.0, 1e-3) for latency in latencies)
    assert latencies[0] is not latencies[1]


def test_defaults_and_short_forms() -> None:
    assert load({}) == Config()
    assert load({"policy": "sarathi"}).policy.name == "sarathi"
    assert load({"policy": "sarathi"}, ["policy.chunk=64"]).policy.settings == {"chunk": 64}
    assert load({}, ["policy.name=vllm"]).policy.name == "vllm"
    assert load({}, ["engine.kind=simulated"]).engine.name == "simulated"


@pytest.mark.parametrize(
    ("tree", "says"),
    [
        ({"modle": "x"}, ["modle", "'model'"]),
        ({"port": 99999}, ["port", "65535"]),
        ({"port": "80"}, ["port", "'80'"]),
        ({"replicas": 0}, ["replicas", "got 0"]),
        ({"max_in_flight": 0}, ["max_in_flight"]),
        ({"drain_seconds": -1}, ["drain_seconds"]),
        ({"max_body_bytes": 0}, ["max_body_bytes"]),
        ({"tiers": {"a": {"ttft": 1}}}, ["tiers.a.ttft", "'ttft_ms'"]),
        ({"tiers": {"a": {"ttft_ms": 0}}}, ["tiers.a.ttft_ms", "got 0"]),
        ({"tiers": {"a": {"on_decline": "refused"}}}, ["tiers.a.on_decline", "'refuse'"]),
        ({"tiers": {"a": 5}}, ["tiers.a"]),
        ({"tiers": {"über fast": {}}}, ["tiers", "über fast", "letters"]),
        ({"tiers": {"auto": {}}}, ["tiers", "auto", "default_tier"]),
        ({"tiers": {"gold": {}}, "default_tier": "glod"}, ["default_tier", "'gold'"]),
        ({"judge": "dedline"}, ["judge", "'deadline'"]),
        ({"policy": {"safety": 1}}, ["policy", "name"]),
        ({"policy": 7}, ["policy"]),
        ({"engine": {"kind": 7}}, ["engine", "7"]),
    ],
)
def test_impossible_settings(tree: dict[str, Any], says: list[str]) -> None:
    with pytest.raises(ConfigError) as error:
        load(tree)
    for word in says:
        assert word in str(error.value)


SIMULATED = {"engine": {"kind": "simulated"}}


@pytest.mark.parametrize(
    ("tree", "says"),
    [
        ({"engine": "simulatd"}, ["simulatd", "'simulated'"]),
        ({"engine": {"kind": "simulated", "max_sqs": 4}}, ["max_sqs", "'max_seqs'"]),
        ({"engine": {"kind": "simulated", "noise": 2}}, ["noise"]),
        ({"engine": {"kind": "simulated", "block": 0}}, ["engine.block", "0"]),
        ({"engine": {"kind": "simulated", "max_seqs": "many"}}, ["engine.max_seqs", "many"]),
        ({"engine": "no.such.module"}, ["no.such.module"]),
        ({"engine": "rubato.clock"}, ["rubato.clock", "Engine"]),
        ({**SIMULATED, "latency": "afine"}, ["afine", "'affine'"]),
        ({**SIMULATED, "latency": {"kind": "affine", "hots": 1}}, ["hots", "'host'"]),
        ({**SIMULATED, "latency": {"kind": "affine", "host": -1}}, ["host", "-1"]),
        ({**SIMULATED, "policy": "eddf"}, ["eddf", "'edf'"]),
        ({**SIMULATED, "policy": {"name": "edf", "safty": 1.0}}, ["safty", "'safety'"]),
        ({**SIMULATED, "router": "least_laoded"}, ["least_laoded", "'least_loaded'"]),
        ({**SIMULATED, "lengths": "running_men"}, ["running_men", "'running_mean'"]),
        ({**SIMULATED, "lengths": {"kind": "running_mean", "lest": 1}}, ["lest", "'least'"]),
    ],
)
def test_what_cannot_be_built(tree: dict[str, Any], says: list[str]) -> None:
    with pytest.raises((ConfigError, PolicyError)) as error:
        build(load(tree), VirtualClock())
    for word in says:
        assert word in str(error.value)


@pytest.mark.parametrize(
    ("text", "says"),
    [("- a", "top level"), ("5", "top level"), ("a: [", "not YAML"), ("1: 2", "top level")],
)
def test_files_that_are_no_settings(tmp_path: Path, text: str, says: str) -> None:
    path = tmp_path / "bad.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=says):
        load(path)
    with pytest.raises(ConfigError, match="cannot be read"):
        load(tmp_path / "none.yaml")


@pytest.mark.parametrize("override", ["port", "=5", "port=[", "policy.safty"])
def test_overrides_that_are_none(override: str) -> None:
    with pytest.raises(ConfigError, match="override"):
        load({}, [override])


def test_an_empty_file_is_all_defaults(tmp_path: Path) -> None:
    path = tmp_path / "empty.yaml"
    path.write_text("# nothing yet\n")
    assert load(path) == Config()
