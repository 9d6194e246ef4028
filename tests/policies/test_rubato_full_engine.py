"""A plan of `rubato` for a full engine is the one it makes when it looks at all requests."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, ClassVar

import pytest

from rubato.core.events import Event
from rubato.core.interfaces import SeqView, View
from rubato.core.length_prediction import PREDICTORS
from rubato.core.plan import Limits, Plan
from rubato.core.request import SLO, Request, Sampling, Stage
from rubato.policies.rubato.scheduler import Scheduler
from rubato.policy_kit.batch_builder import BatchBuilder
from rubato.simulation.simulate import simulate_events
from tests.conftest import PROFILE
from tests.kit import Linear, run_spec
from tests.kit.plans import LIMITS, prompt, seen
from tests.policies.test_edf_plans import decided

SLOS = (SLO(0.3, 0.02), SLO(1.0, 0.05), SLO(4.0, 0.1), SLO(2.0), SLO(tpot=0.03), SLO(0.5, 0.05, max_pause=0.06), SLO())


@dataclass
class Both:
    """Asks a scheduler that looks at all requests in every step, too."""

    needs: ClassVar[frozenset[str]] = Scheduler.needs
    quick: int = 0  # plans without a look at all requests
    differ: list[tuple[dict[str, Any], dict[str, Any]]] = field(default_factory=list)
    waiting: tuple[list[tuple[Any, ...]], tuple[SeqView, ...]] = ([], ())  # of the last view, and what tells a change

    def __post_init__(self) -> None:
        self.ours, self.reference = Scheduler(), Scheduler()
        self.reference._full.find_batch = lambda *_: None  # type: ignore[method-assign]
        find_batch = self.ours._full.find_batch

        def counted(*args: Any) -> BatchBuilder | None:
            found = find_batch(*args)
            self.quick += found is not None
            return found

        self.ours._full.find_batch = counted  # type: ignore[method-assign]

    def observe(self, events: Sequence[Event]) -> None:
        self.ours.observe(events)
        self.reference.observe(events)

    def plan(self, view: View) -> Plan:
        key = [(s.id, s.length, s.cached, s.demoted) for s in view.waiting]
        if key != self.waiting[0]:  # the same tuple while only time passes, as inside vLLM
            self.waiting = key, tuple(view.waiting)
        of_view = {f.name: getattr(view, f.name) for f in fields(View)} | {"waiting": self.waiting[1]}
        view = View(**of_view)
        wanted, ours = self.reference.plan(view), self.ours.plan(view)
        if ours != wanted:
            self.differ.append((decided(ours, view), decided(wanted, view)))
        return wanted


def made_up(rng: random.Random) -> tuple[list[Request], dict[str, tuple[int, ...]]]:
    """More requests than slots; now and then one with an e2e, a second stage, or that prefers a refusal."""
    requests, truth, special, now = list[Request](), dict[str, tuple[int, ...]](), rng.choice((0.0, 0.1)), 0.0
    for i in range(60):
        now += rng.expovariate(rng.choice((5.0, 60.0)))
        odd = rng.random() < special
        slo = SLO(2.0, 0.05, 9.0) if odd and i % 3 == 0 else rng.choice(SLOS)
        thinks = odd and i % 3 == 1
        stages = (Stage(rng.choice((1 if odd else 20, 40, 400)), slo, "</think>" if thinks else "eos"),)
        truth[f"q{i}"] = (rng.choice((1, 30, 120)),)
        if thinks:
            stages, truth[f"q{i}"] = (*stages, Stage(0, rng.choice(SLOS))), (20, 20)
        tokens = Sampling(max_tokens=sum(truth[f"q{i}"]) + rng.choice((0, 50)))
        decline: Any = "refuse" if odd and i % 3 == 2 else "best_effort"
        requests.append(Request(f"q{i}", stages, now, rng.choice(("a", "b")), sampling=tokens, on_decline=decline))
    return requests, truth


@pytest.mark.parametrize(
    ("lengths", "seeds"),
    [(None, (0, 1, 2, 4)), ("running_mean", (3, 5, 6, 10)), ("quantile", (9, 11, 7, 8))],
)
def test_plans_are_those_of_a_look_at_all_requests(
    lengths: str | None, seeds: Sequence[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Both] = []

    def build(*_: Any) -> Both:
        made.append(Both())
        return made[-1]

    for where in ("rubato.fleet.build.load", "rubato.simulation.driver.load"):
        monkeypatch.setattr(where, build, raising=False)
    for seed in seeds[: 2 if PROFILE == "quick" else 4]:
        rng = random.Random(seed)
        requests, truth = made_up(rng)
        slots = rng.choice((2, 6, 12))
        limits = Limits(64, 512, 4096, rng.choice((60, 400)), 16, slots)
        model = Linear(rng.choice((0.001, 0.01)), rng.choice((1e-5, 1e-4)), 1e-6)
        changes: dict[str, Any] = {} if lengths is None else {"lengths": lambda _: PREDICTORS[lengths]()}
        simulate_events(requests, truth, run_spec(model, limits, "rubato", noise=rng.choice((0.0, 0.1)), **changes))
    assert [both.differ[:1] for both in made if both.differ] == []
    assert sum(both.quick for both in made) > 200


def test_an_engine_without_slots_for_us_is_planned_again_and_again() -> None:
    """Inside vLLM all slots may be taken by requests that are in no view, such as those of a pipeline's other steps."""
    scheduler, waiting = Scheduler(), (prompt("a", 20, ttft=1.0),)
    for now in (0.0, 0.01):
        assert not scheduler.plan(seen(waiting, [], now=now, limits=replace(LIMITS, max_running=0))).work
