"""KVForecast against a walk over all residents and steps."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from rubato.policy_kit.kv_forecast import MAX_STRETCHES, STRETCH_STEPS, KVForecast, PeakKV

LONGEST = MAX_STRETCHES // 2 * STRETCH_STEPS  # within which no end is cut

acts = st.lists(
    st.tuples(
        st.sampled_from(["add", "drop", "pass"]),
        st.sampled_from("abcdef"),
        st.integers(1, 5000),
        st.one_of(st.integers(1, 40), st.integers(1, LONGEST)),
    ),
    max_size=30,
)


def walked(residents: dict[str, tuple[int, int, int]], step: int) -> int:
    """The most tokens from `step` on: (length, step of it, end) each, looked at one by one at all ends."""
    there = [(length - at, end) for length, at, end in residents.values() if end >= step]
    return max((sum(base + t for base, end in there if end >= t) for _, t in there), default=0)


@given(acts=acts, length=st.integers(1, 5000), remaining=st.integers(1, LONGEST))
def test_it_is_a_walk_but_for_the_width_of_a_stretch(
    acts: list[tuple[str, str, int, int]], length: int, remaining: int
) -> None:
    forecast, residents, step = KVForecast(), dict[str, tuple[int, int, int]](), 0
    for what, id, size, left in acts:
        if what == "add":
            forecast.add(id, size, left, step)
            residents[id] = size, step, step + left
        elif what == "drop":
            forecast.drop(id)
            residents.pop(id, None)
        else:
            step += left
        assert len(forecast) == len(residents)
        assert set(forecast.overdue(step)) <= {i for i, (_, _, end) in residents.items() if end <= step}
        exact = walked(residents, step)
        assert exact <= forecast.peak(step) <= exact + STRETCH_STEPS * (len(residents) + 1) + behind(residents, step)
        more = {**residents, "new": (length, step, step + remaining)}
        exact = walked(more, step)
        assert (
            exact
            <= forecast.peak_with(length, remaining, step)
            <= exact + STRETCH_STEPS * (len(more) + 1) + behind(more, step)
        )


def behind(residents: dict[str, tuple[int, int, int]], step: int) -> int:
    """Of those that ended earlier in the stretch of `step`, or before it began: they may count in it."""
    return sum(
        length + step - at + STRETCH_STEPS
        for length, at, end in residents.values()
        if step - STRETCH_STEPS < end < step
    )


def test_who_is_overdue_is_told_once_and_counts_when_added_again() -> None:
    forecast = KVForecast()
    forecast.add("a", 100, 10, 0)
    assert forecast.peak(0) == 100 + STRETCH_STEPS
    assert forecast.overdue(9) == []
    assert forecast.overdue(10) == ["a"]
    assert forecast.overdue(11) == []
    assert forecast.peak(STRETCH_STEPS) == 0
    forecast.add("a", 100 + STRETCH_STEPS, 20, STRETCH_STEPS)
    assert forecast.peak(STRETCH_STEPS) == 100 + STRETCH_STEPS + 2 * STRETCH_STEPS
    forecast.drop("a")
    forecast.drop("a")
    assert forecast.peak(STRETCH_STEPS) == 0
    assert len(forecast) == 0


def test_residents_that_end_at_different_times_hold_less_than_all_their_ends() -> None:
    """10 tokens and 30 to come, 20 and 10: 20 + 30 when the second ends, 40 when the first does; not 70."""
    assert PeakKV([4, 3], [30.0, 10.0], 10).peak_with() == 5
    assert PeakKV([4], [30.0], 10).peak_with() == 4
    assert PeakKV([4], [30.0], 10).peak_with([3], [10.0]) == 5
    assert PeakKV([], [], 10).peak_with() == 0


@given(st.lists(st.tuples(st.integers(0, 50), st.integers(1, 50)), max_size=8))
def test_the_peak_is_what_step_after_step_comes_to(seqs: list[tuple[int, int]]) -> None:
    peak = PeakKV([has + left for has, left in seqs], [left for _, left in seqs], 1)
    assert peak.peak_with() == max((sum(has + k for has, left in seqs if left >= k) for k in range(1, 51)), default=0)
