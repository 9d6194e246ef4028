"""What `--additional-config` may say; needs no vLLM."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rubato.config.for_vllm import load_for_vllm
from rubato.core.length_prediction import PREDICTORS
from rubato.core.plan import Limits
from rubato.core.registry import ConfigError
from rubato.engines.vllm.policy_driver import PolicyDriver
from rubato.engines.vllm.settings import Settings, check_version, settings_of
from rubato.policies import PolicyError

LIMITS = Limits(max_num_seqs=8, max_num_batched_tokens=64, max_model_len=256, kv_blocks=20, block_size=16)
KV: Any = SimpleNamespace(lookahead_tokens=0)  # asked for nothing else here


def test_defaults() -> None:
    assert settings_of({}) == settings_of(None) == Settings(policy="rubato")


@pytest.mark.parametrize(
    ("given", "file", "lengths"),
    [
        ({}, "", "conditional_mean"),  # that of `rubato`'s router
        ({"policy": "sarathi"}, "", "running_mean"),  # a client may state an e2e
        ({"lengths": None}, "", None),
        ({}, "lengths: conditional_mean", "conditional_mean"),
        ({}, "lengths: null", None),
        ({}, "policy: edf", "running_mean"),
        ({}, "policy: rubato", "conditional_mean"),
        ({"lengths": "gaussian"}, "lengths: null", "gaussian"),
        ({"lengths": "gaussian"}, "lengths: {kind: quantile, least: 9}", "gaussian"),
    ],
)
def test_lengths_are_the_policys_own_or_the_running_mean_unless_the_operator_says_otherwise(
    tmp_path: Path, given: dict[str, object], file: str, lengths: str | None
) -> None:
    path = tmp_path / "rubato.yaml"
    path.write_text(file)
    settings, _ = load_for_vllm({"rubato": {**given, "config": str(path)} if file else given})
    found = PolicyDriver(settings, LIMITS, KV).requests.lengths
    assert type(found) is type(PREDICTORS[lengths]() if lengths else None)


@pytest.mark.parametrize(
    ("text", "said", "words"),
    [
        (
            "lengths: {kind: quantile, least: 9}",
            {"lengths": None},
            "lengths: inside vLLM 'quantile' has no settings: leave out least",
        ),
        ("lengths: my.module", {"lengths": None}, "lengths: unknown length predictor 'my.module' inside vLLM"),
        ("latency: roofline", {"latency": {}}, "latency: inside vLLM the model is affine"),
    ],
)
def test_what_a_file_has_that_vllm_cannot_is_an_error_unless_it_is_replaced(
    tmp_path: Path, text: str, said: dict[str, object], words: str
) -> None:
    path = tmp_path / "rubato.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=words):
        load_for_vllm({"rubato": {"config": str(path)}})
    load_for_vllm({"rubato": {"config": str(path), **said}})


def test_everything() -> None:
    given = {"policy": "sarathi", "settings": {"budget": 64}, "latency": {"b": [0.02, 0.0]}, "slo_rule": "mean"}
    driver = PolicyDriver(settings_of({"rubato": given, "other": 1}), LIMITS, KV)
    assert driver.policy.budget == 64  # type: ignore[attr-defined]
    assert driver.latency.b == (0.02, 0.0)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"polcy": "edf"}, "rubato.polcy: unknown setting: did you mean 'policy'?"),
        ("edf", "give an object"),
        ({"slo_rule": "strict"}, "rubato.slo_rule: Input should be 'deadline', 'mean' or 'windowed', got 'strict'"),
        ({"lengths": "oracle"}, "rubato.lengths: 'oracle' is none that a server has: give running_mean"),
        ({"lengths": ["running_mean"]}, "rubato.lengths: Input should be a valid string, got ['running_mean']"),
        ({"slo_rule": {}}, "rubato.slo_rule: Input should be 'deadline'"),
        ({"policy": 5}, "rubato.policy: Input should be a valid string, got 5"),
        ({"settings": "x"}, "rubato.settings: Input should be a valid dictionary, got 'x'"),
        ({"settings": None}, "rubato.settings: Input should be a valid dictionary, got None"),
        ({"stand_aside": "yes"}, "rubato.stand_aside: Input should be a valid boolean, got 'yes'"),
        ({"link": {"prot": 1}}, "rubato.link.prot: unknown setting: did you mean 'port'?"),
        ({"latency": [1.0]}, "rubato.latency: Input should be a valid dictionary, got [1.0]"),
        ({"latency": {"bb": 1.0}}, "rubato.latency: latency model 'affine' has no setting 'bb'"),
        ({"latency": {"window": "x"}}, "setting window is 'x'; give a whole number"),
    ],
)
def test_unknown(given: object, words: str) -> None:
    with pytest.raises(ValueError, match=re.escape(words)):
        settings_of({"rubato": given})


@pytest.mark.parametrize(
    "given",
    [
        {"settings": {"safety_margin": float("nan")}},
        {"settings": {"safety_margin": float("inf")}},
        {"latency": {"b": [float("nan"), 0.0]}},
        {"latency": {"host": float("inf")}},
        {"latency": {"window": 0}},
        {"settings": {"nope": 1}},
    ],
)
def test_numbers_that_cannot_be_end_the_start(given: dict[str, object]) -> None:
    """vLLM reads its option as JSON, and Python's JSON knows NaN and Infinity."""
    ((_, named),) = given.items()
    (name,) = named  # type: ignore[misc]
    with pytest.raises(ValueError, match=f"{name}.*(is|has no)|has no.*{name}"):
        PolicyDriver(settings_of({"rubato": given}), LIMITS, KV)


def test_unknown_policy() -> None:
    with pytest.raises(PolicyError, match="did you mean 'edf'"):
        PolicyDriver(settings_of({"rubato": {"policy": "edv"}}), LIMITS, KV)


@pytest.mark.parametrize("found", ["0.32.0", "0.32.1", "0.32.0+cpu", "0.33.0", "0.33.0+cu130"])
def test_versions_that_it_is_written_for(found: str) -> None:
    check_version(found)


@pytest.mark.parametrize("found", ["0.31.2", "0.34.0", "1.0.0", "0.34.0rc1", "dev"])
def test_any_other_version_is_an_error_that_says_which(found: str) -> None:
    with pytest.raises(RuntimeError, match=re.escape(f"vLLM {found} is installed, and this Rubato is written for")):
        check_version(found)


def test_what_needs_drafts_is_told_how_to_have_some() -> None:
    with pytest.raises(PolicyError, match="needs draft, which vLLM lacks for us: give it a drafter"):
        PolicyDriver(settings_of({"rubato": {"policy": "vllm_spec"}}), LIMITS, KV)
    PolicyDriver(settings_of({"rubato": {"policy": "vllm_spec"}}), LIMITS, KV, num_spec_tokens=4)
