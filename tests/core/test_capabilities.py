"""What is said of a need that is not met."""

from __future__ import annotations

import pytest

from rubato.core.capabilities import CAPABILITIES, cure
from rubato.engines import simulated
from rubato.engines.vllm.policy_driver import SUPPORTS
from rubato_torch import Engine as TorchEngine


def test_every_engines_words_are_known() -> None:
    for supports in (simulated.Engine.supports, TorchEngine.supports, SUPPORTS):
        assert supports <= CAPABILITIES


@pytest.mark.parametrize(
    ("missing", "drafter", "says"),
    [
        ({"draft", "tree"}, "--set x=1", "give it a drafter (--set x=1), or choose another policy"),
        ({"draft"}, "", "choose another policy"),
        ({"preempt"}, "--set x=1", "choose another policy"),
        ({"kv_transfer"}, "", "choose a policy that moves no KV (polyserve: mode co); vLLM servers move it"),
        ({"preemption", "draft"}, "--set x=1", "no engine knows the need 'preemption': did you mean 'preempt'? (known"),
        ({"xyz"}, "", "no engine knows the need 'xyz': known are chunked, draft, handoff"),
    ],
)
def test_what_to_do(missing: set[str], drafter: str, says: str) -> None:
    assert cure(missing, drafter).startswith(says)
    assert cure(missing, drafter).count("known are") == (says[:9] == "no engine")
