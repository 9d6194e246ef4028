"""What `--additional-config` may say; needs no vLLM."""

from __future__ import annotations

import pytest

from rubato.core.plan import Limits
from rubato.engines.vllm.bookkeeping import Control, Settings, settings_of
from rubato.policies import PolicyError

LIMITS = Limits(max_seqs=8, max_tokens=64, max_length=256, kv_blocks=20, block=16)


def test_defaults() -> None:
    assert settings_of({}) == settings_of(None) == Settings(policy="edf")


def test_everything() -> None:
    given = {"policy": "sarathi", "settings": {"budget": 64}, "latency": {"b": [0.02, 0.0]}, "rule": "mean"}
    control = Control(settings_of({"rubato": given, "other": 1}), LIMITS)
    assert control.policy.budget == 64  # type: ignore[attr-defined]
    assert control.latency.b == (0.02, 0.0)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"polcy": "edf"}, "has no 'polcy': did you mean 'policy'?"),
        ("edf", "give an object"),
        ({"rule": "strict"}, "choose one of deadline"),
        ({"lengths": "oracle"}, "give running_mean"),
    ],
)
def test_unknown(given: object, words: str) -> None:
    with pytest.raises(ValueError, match=words.replace("?", r"\?")):
        settings_of({"rubato": given})


def test_unknown_policy() -> None:
    with pytest.raises(PolicyError, match="did you mean 'edf'"):
        Control(settings_of({"rubato": {"policy": "edv"}}), LIMITS)
