"""The parts of `rubato`'s step, and how each is left out: other values in the policy's modules while a cell runs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from math import inf
from typing import Any
from unittest import mock

from rubato.policies.rubato import batch, requests, scheduler, supply
from rubato.policy_kit import kv_survival

PARTS: Mapping[str, tuple[tuple[Any, str, Any], ...]] = {
    "heaviest prompts are left out": ((scheduler, "find_omitted", lambda *_: set()),),
    "several lengths of a step": ((scheduler, "STEP_LENGTHS", (1.25,)),),
    "decodes sit out": ((batch, "DECODE_SHARE_OF_SPARE_TIME", inf),),
    "memory": ((kv_survival.KVSurvival, "fits", lambda *_: True),),
    "outputs may be longer than predicted": ((kv_survival.OutputRatios, "add", lambda *_: None),),
    "costly prompts leave memory free": ((scheduler, "FREE_KV_SHARE", 0.0),),
    "errors of steps are measured": (
        (supply.StepErrors, "spread", lambda _, model_spread: 0.0), (supply.StepErrors, "lead", 0.0),
    ),
    "lead and floor": ((supply.StepErrors, "lead", 0.0),),
    "floor": ((supply.DecodeSteps, "shortest", lambda _: 0.0),),
    "e2e answers are not hurried": ((requests, "MIN_E2E_PACE_STEPS", 1.0),),
    "tiers weigh by their losses": ((requests.TierLosses, "weights", lambda _: {}),),
}  # fmt: skip


@contextmanager
def without(part: str) -> Iterator[None]:
    """Raises AttributeError where the policy's modules have no such name any more."""
    with ExitStack() as stack:
        for owner, name, value in PARTS[part]:
            stack.enter_context(mock.patch.object(owner, name, value))
        yield
