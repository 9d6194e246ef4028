"""What a client may write into `vllm_xargs`, at its extremes: it is served or refused with a sentence, and nobody else
notices."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rubato.engines.vllm.guards import LOG_PAUSE_S
from rubato.engines.vllm.sequence import KEYS, MAX_TEXT_CHARACTERS
from tests.vllm.harness import harness

POLICIES = [
    "rubato", "edf", "sarathi", "vllm", "prefill_first", "priority", "slos_serve", "polyserve", "scorpio",
    "qoserve", "jitserve",
]  # fmt: skip
LONG = "x" * 1_000_000
NUMBERS: list[Any] = [1e-3, 0.0011, 1, 50, 1e9, "250", "1e3", True]  # these are times
NO_NUMBERS: list[Any] = [
    0, -1, 1e-4, 1.1e9, 1e300, float("nan"), float("inf"), -float("inf"), "", "nan", "inf", "soon", LONG, 2**64 - 1,
    -(2**63), False, [], [50], {"ms": 50}, [[[]]] * 100,
]  # fmt: skip
TIMES = st.sampled_from([None, *NUMBERS, *NO_NUMBERS])
XARGS = st.fixed_dictionaries(
    {},
    optional={
        "slo_ttft_ms": TIMES,
        "slo_tpot_ms": TIMES,
        "slo_e2e_ms": TIMES,
        "slo_tier": st.sampled_from(["chat", "code", "", LONG, 5, ["chat"], None])
        | st.text(max_size=2 * MAX_TEXT_CHARACTERS),
        "slo_on_decline": st.sampled_from(["best_effort", "refuse", "never", LONG, None, 1, ["refuse"], {}]),
        "slo_seal": st.sampled_from(["00", "é", "\ud800", "", 5, ["é"]]),  # not ours: of no effect
        "slo_ttft": st.just(1),
        "slo_" + LONG: st.just(1),
        "other": st.sampled_from([LONG, [1], {}]),
    },
)


def wrong(xargs: dict[str, Any]) -> bool:
    """By the table of docs/vllm.md."""
    tier, decline = xargs.get("slo_tier", "default"), xargs.get("slo_on_decline", "refuse")
    times = [xargs[key] for key in KEYS[:3] if xargs.get(key) is not None]
    return (
        any(key.startswith("slo_") and key not in (*KEYS, "slo_seal") for key in xargs)
        or not all(any(time is good for good in NUMBERS) for time in times)
        or not (isinstance(tier, str) and 1 <= len(tier) <= MAX_TEXT_CHARACTERS)
        or decline not in ("best_effort", "refuse")
    )


@pytest.mark.parametrize("policy", POLICIES)
@settings(max_examples=12, deadline=None, suppress_health_check=list(HealthCheck))
@given(offered=st.lists(st.tuples(XARGS, st.integers(0, 3)), min_size=1, max_size=12))
def test_everybody_ends_once_and_no_step_is_vllms(
    model: Path, policy: str, offered: list[tuple[dict[str, Any], int]]
) -> None:
    made = harness(model, policy, blocks=24, block=4, tokens=16, seqs=3)
    for at, (xargs, steps) in enumerate(offered):
        made.add(f"plain{at}", [5] * 9, 3)
        made.add(f"sane{at}", [5] * 9, 3, slo_ttft_ms=1e6, slo_tpot_ms=1e6)
        made.add(f"odd{at}", [6] * 20, 5, **xargs)
        for _ in range(steps):
            made.step()
    made.run()
    made.finish()
    assert made.scheduler.rubato.guard.fallbacks == 0
    names = [f"{kind}{at}" for kind in ("plain", "sane", "odd") for at in range(len(offered))]
    assert made.ended == dict.fromkeys(names, 1)
    for at, (xargs, _) in enumerate(offered):
        assert made.reasons[f"plain{at}"] == made.reasons[f"sane{at}"] == ("length", None)
        finish, reason = made.reasons[f"odd{at}"]
        if wrong(xargs):
            assert finish == "error"
            assert reason.startswith("rejected-invalid: vllm_xargs: ")
            assert len(reason) < 300
        elif finish == "error":
            assert xargs["slo_on_decline"] == "refuse"
            assert reason.startswith("rejected-slo-infeasible: ")
        else:
            assert (finish, reason) == ("length", None)


@pytest.mark.parametrize("seal", ["é", "\ud800", "0" * 32])
def test_a_seal_of_any_text_is_no_fault(model: Path, seal: str) -> None:
    made = harness(model, "edf", blocks=24)
    for at in range(12):
        made.add(str(at), [5] * 20, 2, slo_seal=seal, slo_tier="\ud800", slo_ttft_ms="50")
    made.run()
    assert not made.scheduler.rubato.guard.faults
    assert not made.scheduler.rubato.guard.has_given_up


def test_what_a_refusal_logs_is_bounded(model: Path, caplog: Any) -> None:
    made = harness(model, "edf", blocks=24)
    for at, xargs in enumerate(
        [{"slo_" + LONG: 1}, {"slo_tier": LONG}, {"slo_on_decline": LONG}, {"slo_e2e_ms": LONG}]
    ):
        made.add(f"{at}{LONG}", [5] * 20, 2, **xargs)
        made.now += LOG_PAUSE_S
    for at in range(100):
        made.add(f"{at}{LONG}", [5] * 20, 2, slo_tier="")
    lines = [record.getMessage() for record in caplog.records if "refused" in record.getMessage()]
    assert len(lines) == 5
    assert max(map(len, lines)) < 400
    assert made.scheduler.rubato.guard.refused == 104


@pytest.mark.parametrize("policy", ["edf", "slos_serve"])
def test_of_any_number_of_tiers_a_bounded_number_is_kept(model: Path, policy: str) -> None:
    """Each of the names is the longest allowed; what is kept of them does not grow with the number of requests."""
    made = harness(model, policy, blocks=400, tokens=2048, seqs=64)
    held = []
    for round_ in range(3):
        for at in range(1024):
            made.add(
                f"{round_}-{at}", [5] * 9, 1, slo_ttft_ms=1e6, slo_tier=f"{round_}-{at}".rjust(MAX_TEXT_CHARACTERS)
            )
            if at % 64 == 63:
                made.run()
        made.step()
        held.append(_names_kept(made.policy.inner))
    assert held[2] <= held[1]


def _names_kept(policy: Any) -> int:
    """Entries of whatever a policy keeps."""
    return sum(len(part) for name in vars(policy) if hasattr(part := getattr(policy, name), "__len__"))
