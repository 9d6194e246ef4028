"""Judging, rule by rule: token times in, met or not and the margin out."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rubato.core.request import MAX_SLO_MS, MAX_SLO_S, MIN_SLO_MS, MIN_SLO_S, SLO, Request, Sampling, Stage
from rubato.core.slo import SLO_RULES, StageTimes, as_passed_on, judge
from tests.kit import request

CASES = [
    # rule, slo, token times (arrival 0), met, margin
    ("deadline", SLO(ttft=1.0), [0.9, 5.0], True, 0.1),
    ("deadline", SLO(ttft=1.0), [1.1], False, -0.1),
    ("deadline", SLO(ttft=1.0, tpot=0.1), [0.5, 0.6, 1.2], True, 0.0),  # the third is due at 1.2: early work is slack
    ("deadline", SLO(ttft=1.0, tpot=0.1), [0.5, 0.6, 1.21], False, -0.01),
    ("mean", SLO(ttft=1.0, tpot=0.1), [0.5, 0.6, 1.2], False, -0.5),  # 0.7 s for two gaps of 0.1
    ("mean", SLO(ttft=1.0, tpot=0.1), [0.5, 0.69, 0.7], True, 0.0),
    ("windowed", SLO(tpot=0.1), [0.0, *[0.1 * i for i in range(1, 21)]], True, 0.0),
    ("windowed", SLO(tpot=0.1), [0.0] * 11 + [1.2], False, -1.1),  # a fast window does not pay for a slow tail of one
    ("mean", SLO(tpot=0.12), [0.0] * 11 + [1.2], True, 0.12),
    ("deadline", SLO(tpot=0.1), [3.0, 3.1, 3.2], True, 0.0),  # no TTFT: deadlines run from the first token
    ("deadline", SLO(1.0, 0.1, max_pause=0.3), [0.1, 0.2, 0.5], True, 0.0),
    ("deadline", SLO(1.0, 0.1, max_pause=0.3), [0.1, 0.2, 0.6], False, -0.1),  # due at 1.2, and 0.3 s after the second
    ("deadline", SLO(1.0, 0.1, max_pause=0.3), [0.9, 1.0, 1.1], True, 0.1),  # the first token is no pause
    ("deadline", SLO(1.0, max_pause=0.3), [0.1, 5.0], True, 0.9),  # beside a TPOT only
    ("windowed", SLO(tpot=1.0, max_pause=0.3), [0.0, 0.5], True, 0.5),  # by the deadline rule only
    ("deadline", SLO(e2e=2.0), [0.1, 1.9], True, 0.1),
    ("windowed", SLO(e2e=2.0), [0.1, 2.1], False, -0.1),
]


@pytest.mark.parametrize(("slo_rule", "slo", "times", "met", "margin"), CASES)
def test_rules(slo_rule: str, slo: SLO, times: list[float], met: bool, margin: float) -> None:
    verdict = judge(Request("a", (Stage(5, slo),), 0.0), [StageTimes(0.0, times)], slo_rule=slo_rule)
    assert verdict.met is met
    assert verdict.margin == pytest.approx(margin, abs=1e-9)
    assert verdict.slo_rule == slo_rule


def test_pause_of_tokens_is_the_longest_within_a_stage() -> None:
    """Neither the time to the first token nor that of a tool is one."""
    asked = Request("a", (Stage(5), Stage(5, tool=True)), 0.0)
    assert judge(asked, [StageTimes(0.0, [3.0, 3.1, 3.4]), StageTimes(10.0, [12.0, 12.2])]).pause == pytest.approx(0.3)
    assert judge(asked, [StageTimes(0.0, [3.0]), StageTimes(10.0, [12.0])]).pause is None
    assert judge(asked, [], "failed").pause is None
    times = [0.01 * i for i in range(60)] + [1.6]
    assert judge(asked, [StageTimes(0.0, times)], "cancelled").pause == pytest.approx(1.01)


gaps = st.lists(st.sampled_from([0.0, 0.03, 0.05, 0.08, 0.4]), min_size=1, max_size=60)


@given(gaps, st.sampled_from(SLO_RULES), st.sampled_from([None, 0.08]))
def test_judge_under_any_rule_says_what_both_rules_say(
    gaps: list[float], slo_rule: str, max_pause: float | None
) -> None:
    asked, times = Request("a", (Stage(5, SLO(0.5, 0.05, None, max_pause)),), 0.0), np.cumsum([0.1, *gaps])
    verdict = judge(asked, [StageTimes(0.0, times)], slo_rule=slo_rule)
    by = {rule: judge(asked, [StageTimes(0.0, times)], slo_rule=rule) for rule in ("deadline", "windowed")}
    assert (verdict.met_by_deadline, verdict.met_by_windows) == (by["deadline"].met, by["windowed"].met)
    windows = [
        (times[i : i + 11][0], times[i : i + 11][-1], len(times[i : i + 11]) - 1) for i in range(0, len(gaps), 10)
    ]
    assert by["windowed"].margin == pytest.approx(min(0.4, *[n * 0.05 - (b - a) for a, b, n in windows]))


def test_a_decode_only_stage_continues_from_the_last_deadline() -> None:
    """Thinking ends early; its deadline, not its end, starts the response's clock (SYSTEMS: §0, stages)."""
    thinking, response = Stage(5, SLO(ttft=1.0, tpot=0.1), "</think>"), Stage(0, SLO(tpot=0.5))
    asked = Request("a", (thinking, response), 0.0)
    early = StageTimes(0.0, [0.2, 0.3])  # due 1.0 and 1.1
    assert judge(asked, [early, StageTimes(0.3, [1.6, 2.1])]).met
    assert not judge(asked, [early, StageTimes(0.3, [1.6, 2.11])]).met


@pytest.mark.parametrize("outcome", ["refused", "failed", "cancelled"])
def test_what_did_not_complete_is_not_met(outcome: str) -> None:
    verdict = judge(request(), [], outcome)  # type: ignore[arg-type]
    assert not verdict.met
    assert verdict.cause == {"cancelled": "client"}.get(outcome, outcome)


def test_best_effort_completed_is_met() -> None:
    verdict = judge(request(), [StageTimes(0.0, [100.0, 200.0])])
    assert verdict.met
    assert verdict.margin is None
    assert (verdict.ttft, verdict.tpot, verdict.e2e) == (100.0, 100.0, 200.0)


def test_a_promise_needs_a_token_to_be_kept() -> None:
    assert not judge(request(ttft=1.0), [StageTimes(0.0, [])]).met


def test_cause_is_the_largest_loss() -> None:
    verdict = judge(request(ttft=1.0), [StageTimes(0.0, [3.0])], delays={"queue": 0.5, "prefill interference": 1.5})
    assert verdict.cause == "prefill interference"


def test_unknown_rule_names_the_known() -> None:
    with pytest.raises(ValueError, match="deadline, mean, windowed"):
        judge(request(), [], slo_rule="median")


@given(
    gaps=st.lists(st.floats(0.0, 1.0), min_size=1, max_size=40),
    ttft=st.floats(0.01, 2.0),
    tpot=st.floats(0.01, 1.0),
    slack=st.floats(0.0, 1.0),
)
def test_looser_slos_never_turn_met_into_missed(gaps: list[float], ttft: float, tpot: float, slack: float) -> None:
    times = [sum(gaps[: i + 1]) for i in range(len(gaps))]
    for slo_rule in SLO_RULES:
        tight = Request("a", (Stage(1, SLO(ttft, tpot)),), 0.0, sampling=Sampling())
        loose = Request("a", (Stage(1, SLO(ttft + slack, tpot + slack)),), 0.0)
        if judge(tight, [StageTimes(0.0, times)], slo_rule=slo_rule).met:
            assert judge(loose, [StageTimes(0.0, times)], slo_rule=slo_rule).met


@pytest.mark.parametrize("bad", [0.0, -1.0, float("inf"), float("nan"), 1e-303, 0.99e-6, 1.01e6, 1.7e305])
@pytest.mark.parametrize("name", ["ttft", "tpot", "e2e"])
def test_an_absurd_slo_is_named(name: str, bad: float) -> None:
    with pytest.raises(ValueError, match=rf"slo\.{name} is .*: give 1e-06 to 1e\+06 seconds, or none"):
        SLO(**{name: bad})


def test_the_bounds_are_allowed_and_the_same_in_milliseconds() -> None:
    assert SLO(MIN_SLO_S, MIN_SLO_S, MAX_SLO_S) == SLO(MIN_SLO_MS / 1e3, MIN_SLO_MS / 1e3, MAX_SLO_MS / 1e3)


def test_the_time_of_a_tool_is_in_no_slo() -> None:
    """Each round in 0.6 s, 30 s of a tool between them: TPOT is that of the tokens after each prompt's first."""
    promise = SLO(ttft=1.0, tpot=0.1, e2e=2.0)
    asked = Request("a", (Stage(5, promise, "</call>"), Stage(5, promise, tool=True)), 0.0)
    verdict = judge(asked, [StageTimes(0.0, [0.5, 0.6]), StageTimes(30.6, [31.1, 31.2])])
    assert verdict.met
    assert (verdict.tpot, verdict.e2e, verdict.margin) == pytest.approx((0.1, 1.2, 0.5))


delays = st.floats(0.0, 2.0)


@given(st.sampled_from(SLO_RULES), delays, delays, st.lists(st.floats(0.01, 0.5), min_size=1, max_size=30))
def test_tokens_that_are_passed_on_late_make_no_verdict_better(
    slo_rule: str, first: float, last: float, gaps: list[float]
) -> None:
    asked = Request("a", (Stage(5, SLO(ttft=1.0, tpot=0.2, e2e=4.0)),), 10.0)
    times = [10.0 + sum(gaps[: n + 1]) for n in range(len(gaps))]
    at_engine = judge(asked, [StageTimes(10.0, times)], "completed", slo_rule)
    there = as_passed_on(asked, at_engine, len(times), times[0], times[-1])
    assert (there.met, there.cause, there.margin) == (at_engine.met, None, pytest.approx(at_engine.margin))
    late = as_passed_on(asked, at_engine, len(times), times[0] + first, times[-1] + last)
    assert late.met <= at_engine.met
    assert late.margin is not None
    assert at_engine.margin is not None
    assert late.margin <= at_engine.margin
    assert (late.cause == "gateway") == (at_engine.met and not late.met)
    assert late.e2e == pytest.approx(max(times[-1] + last, times[0] + first) - 10.0)
    if slo_rule == "deadline" and len(times) == 2 and times[0] + first <= times[1] + last:
        seen = judge(asked, [StageTimes(10.0, [times[0] + first, times[1] + last])], "completed", slo_rule)
        assert (late.met, late.margin, late.ttft, late.tpot) == (
            seen.met, *[pytest.approx(value) for value in (seen.margin, seen.ttft, seen.tpot)]
        )  # fmt: skip
