"""Steps that do not end: their replica is lost in time, its requests end, and the rest of the fleet goes on."""

from __future__ import annotations

import asyncio

import pytest

from rubato.core.clock import COMPLETION, VirtualClock, run_virtual
from rubato.core.events import Event, Finished
from rubato.core.plan import Batch, Limits, StepResult
from rubato.engines.simulated import Engine
from rubato.fleet.build import local_cluster
from rubato.fleet.cluster_options import ClusterOptions, PolicyChoice
from rubato.fleet.local_host import CLOSE_S, MAX_STEP_SLOWDOWN
from tests.fleet.test_silence import stop_everything
from tests.kit import Linear, request

LIMITS = Limits(max_num_seqs=4, max_num_batched_tokens=256, max_model_len=256, kv_blocks=64, block_size=16)
STEP, TIMEOUT = 0.1, 30.0


class Hanging(Engine):
    """Hangs where it is told to; `step`: None = for ever."""

    step: float | None = STEP
    stopped = 0.0  # seconds, in the middle of a step
    fails = False
    restart_hangs = False
    close_hangs = False

    async def execute(self, batch: Batch) -> StepResult:
        if self.fails:
            self.restart_hangs = True
            raise RuntimeError("injected failure")
        if self.step is None:
            await asyncio.Event().wait()
        if self.stopped:
            await self._clock.sleep_until(self._clock.now() + STEP, COMPLETION)
            stop_everything(self.stopped)
        await self._clock.sleep_until(self._clock.now() + (self.step or 0.0), COMPLETION)
        return self.run(batch)

    async def start(self) -> None:
        if self.restart_hangs:
            await asyncio.Event().wait()
        await super().start()

    async def close(self) -> None:
        if self.close_hangs:
            await asyncio.Event().wait()
        await super().close()


def serve(*engines: dict[str, object], offers: int = 1) -> tuple[dict[str, Finished], bool, float]:
    """The ends of requests offered one after the other, whether the cluster is dead, and how long closing took."""

    async def main() -> tuple[dict[str, Finished], bool, float]:
        clock = VirtualClock()
        made = [Hanging(Linear(), LIMITS, clock) for _ in engines]
        for engine, how in zip(made, engines, strict=True):
            for name, value in how.items():
                setattr(engine, name, value)
        models = [Linear(STEP, 0.0) for _ in made]
        cluster = local_cluster(
            made, models, clock, ClusterOptions(PolicyChoice("edf", router="round_robin")), step_timeout=TIMEOUT
        )  # fmt: skip
        ends: dict[str, Finished] = {}

        def hear(event: Event) -> None:
            if isinstance(event, Finished):
                assert event.id not in ends
                ends[event.id] = event

        cluster.listen(hear)
        await cluster.start()
        for number in range(offers):
            cluster.offer(request(f"q{number}", arrival=clock.now(), most=2))
            while cluster.in_flight:
                await clock.sleep_until(clock.now() + 1.0, COMPLETION)
        dead, began = cluster.dead.is_set(), clock.now()
        await cluster.close()
        return ends, dead, clock.now() - began

    return run_virtual(main())


def test_a_step_that_hangs_ends_its_requests_in_time() -> None:
    ends, dead, _ = serve({"step": None})
    assert ends["q0"].outcome == "failed"
    assert "replica r0: the engine hangs: a step of 10 tokens has not ended after 32.0 s" in ends["q0"].reason
    assert ends["q0"].at == pytest.approx(TIMEOUT + MAX_STEP_SLOWDOWN * STEP)
    assert dead


def test_a_step_that_is_slow_beyond_its_prediction_is_waited_for() -> None:
    ends, dead, _ = serve({"step": TIMEOUT + MAX_STEP_SLOWDOWN * STEP - 0.5})
    assert (ends["q0"].outcome, dead) == ("completed", False)


def test_time_in_which_the_process_was_stopped_does_not_count() -> None:
    """A virtual machine is suspended for ten minutes in the middle of a step."""
    ends, dead, _ = serve({"stopped": 600.0})
    assert (ends["q0"].outcome, dead) == ("completed", False)
    assert ends["q0"].at > 2 * 600.0  # its prefill and its decode


def test_the_other_replicas_go_on() -> None:
    ends, dead, _ = serve({"step": None}, {}, offers=3)
    assert {id: end.outcome for id, end in ends.items()} == {"q0": "failed", "q1": "completed", "q2": "completed"}
    assert not dead


def test_an_engine_that_does_not_start_again_is_lost() -> None:
    ends, dead, _ = serve({"fails": True}, offers=2)
    assert (ends["q0"].outcome, ends["q1"].outcome, dead) == ("failed", "failed", True)
    assert ends["q0"].reason == "RuntimeError: injected failure"
    assert "the engine hangs: its start after a failed step has not ended after 30.0 s" in ends["q1"].reason


def test_a_host_that_fails_to_close_still_ends_its_requests() -> None:
    async def main() -> list[Event]:
        clock = VirtualClock()
        engines = [Hanging(Linear(), LIMITS, clock) for _ in range(2)]
        cluster = local_cluster(engines, [Linear()] * 2, clock, ClusterOptions(PolicyChoice("edf")))
        events: list[Event] = []
        cluster.listen(events.append)
        await cluster.start()
        for number in range(2):
            cluster.offer(request(f"q{number}"))

        async def broken() -> None:
            raise OSError("injected failure")

        cluster.hosts["r0"].close = broken  # type: ignore[method-assign]
        await cluster.close()
        assert cluster.in_flight == 0
        return events

    ends = [event for event in run_virtual(main()) if isinstance(event, Finished)]
    assert [(end.outcome, end.reason) for end in ends] == [("failed", "the server closed")] * 2


def test_engines_that_do_not_close_are_left_after_one_time_limit_together() -> None:
    ends, dead, seconds = serve({"close_hangs": True}, {"close_hangs": True})
    assert (ends["q0"].outcome, dead) == ("completed", False)
    assert seconds == pytest.approx(CLOSE_S)
