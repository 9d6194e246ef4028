"""Virtual time: jumps, a defined order of simultaneous events, no standing still in silence."""

import asyncio
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rubato.core.clock import ARRIVAL, COMPLETION, PLAN, VirtualClock, WallClock, run_virtual, watch_timers


@given(st.lists(st.tuples(st.sampled_from([0.0, 0.1, 0.3, 1e6]), st.sampled_from([COMPLETION, ARRIVAL, PLAN]))))
def test_timers_run_by_time_then_rank_then_order(timers: list[tuple[float, int]]) -> None:
    async def main() -> list[tuple[float, int, int]]:
        clock, ran = VirtualClock(), []
        for i, (when, rank) in enumerate(timers):
            clock.call_at(when, rank, lambda key=(when, rank, i): ran.append((*key, clock.now())))
        await clock.sleep_until(2e6, PLAN)
        return ran

    ran = run_virtual(main())
    assert [key[:3] for key in ran] == sorted((w, r, i) for i, (w, r) in enumerate(timers))
    assert all(when == now for when, _, _, now in ran)


def test_settle_lets_what_is_due_now_happen_first() -> None:
    async def main() -> list[str]:
        clock, log = VirtualClock(), []

        async def planner() -> None:
            await clock.sleep_until(1.0, COMPLETION)
            log.append("completed")
            await clock.settle()
            log.append("planned")

        task = asyncio.create_task(planner())
        clock.call_at(1.0, ARRIVAL, lambda: log.append("arrived"))
        await task
        assert clock.now() == 1.0
        return log

    assert run_virtual(main()) == ["completed", "arrived", "planned"]


def test_asyncio_sleep_and_timeouts_use_virtual_time() -> None:
    async def main() -> float:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(asyncio.sleep(3600), 1800)
        return asyncio.get_running_loop().time()

    assert run_virtual(main()) == 1800


def test_waiting_for_nothing_is_an_error() -> None:
    async def main() -> None:
        await asyncio.Event().wait()

    with pytest.raises(RuntimeError, match="virtual time stands still"):
        run_virtual(main())


def test_virtual_clock_on_a_real_loop_says_what_to_do() -> None:
    async def main() -> None:
        VirtualClock().call_at(0.0, PLAN, lambda: None)

    with pytest.raises(RuntimeError, match="run_virtual"):
        asyncio.run(main())


def test_wall_clock_is_the_loops_own() -> None:
    async def main() -> tuple[float, float, float]:
        before = asyncio.get_running_loop().time()
        return before, WallClock().now(), asyncio.get_running_loop().time()

    before, now, after = asyncio.run(main())
    assert before <= now <= after


def test_timers_of_a_loop_that_is_held_up_are_told_late_each() -> None:
    late: list[float] = []

    async def main() -> None:
        watch = asyncio.create_task(watch_timers(0.01, late.append))
        await asyncio.sleep(0)
        time.sleep(0.1)  # noqa: ASYNC251 - it is to hold up the loop
        await asyncio.sleep(0.02)
        watch.cancel()

    asyncio.run(main())
    assert len(late) >= 9
    assert sorted(late[:8], reverse=True) == late[:8]
    assert late[0] >= 0.08


def test_timers_of_an_idle_loop_are_not_late() -> None:
    late: list[float] = []

    async def main() -> None:
        watch = asyncio.create_task(watch_timers(0.5, late.append))
        await asyncio.sleep(1.75)
        watch.cancel()

    run_virtual(main())
    assert late == [0.0] * 3
