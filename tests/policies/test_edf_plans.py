"""`edf` decides what its first form decided (`edf_reference`), which asks everybody about everything, in every step."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from math import inf
from typing import Any, ClassVar

import pytest
from hypothesis import given, settings

from experiments import _slos_serve_runs
from rubato.core.events import Event, Finished, Verdict
from rubato.core.interfaces import View
from rubato.core.plan import Limits, Plan
from rubato.core.request import SLO, Request, Sampling, Stage
from rubato.fleet.cluster_options import PolicyChoice
from rubato.policies import edf
from rubato.policies.edf.requests import SortedRequests
from rubato.replica.plan_check import spelled_out
from rubato.simulation.run_spec import RunSpec, oracle_lengths
from rubato.simulation.simulate import simulate
from tests.conftest import examples
from tests.kit import Linear, Seq, view
from tests.policies import edf_reference
from tests.policies.test_properties import Load, loads, run

BLOCK = 16
TIERS = ("gold", "silver", "bronze")
SLOS = (
    SLO(ttft=0.1, tpot=0.02), SLO(ttft=0.5, tpot=0.05), SLO(ttft=2.0), SLO(tpot=0.03), SLO(e2e=1.5),
    SLO(1.0, 0.03, 3.0), SLO(),
)  # fmt: skip


def decided(plan: Plan, view_: View) -> dict[str, Any]:
    """A plan, whatever order its work is named in."""
    spelled = spelled_out(plan, view_)
    parts = {name: getattr(spelled, name) for name in ("preempt", "demote", "promote", "drop")}
    return parts | {"work": {work.seq: work.tokens for work in spelled.work}}


@dataclass
class Both:
    """Asks both, and goes on with what both say."""

    needs: ClassVar[frozenset[str]] = edf.Scheduler.needs
    given: dict[str, Any] = field(default_factory=dict)
    plans: int = 0
    same: Counter[bool] = field(
        default_factory=Counter
    )  # plans for the last one's decodes; if best effort is among them
    differ: list[tuple[dict[str, Any], dict[str, Any]]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.ours, self.reference = edf.Scheduler(**self.given), edf_reference.Scheduler(**self.given)
        sort_requests = self.ours._requests.sort

        def counted(view: View) -> SortedRequests:
            decodes = (found := sort_requests(view)).decodes
            self.same[bool(decodes.others)] += decodes.are_same
            return found

        self.ours._requests.sort = counted  # type: ignore[method-assign]

    def observe(self, events: Sequence[Event]) -> None:
        self.ours.observe(events)
        self.reference.observe(events)

    def plan(self, view: View) -> Plan:
        wanted = decided(self.reference.plan(view), view)
        plan = self.ours.plan(view)
        self.plans += 1
        if (ours := decided(plan, view)) != wanted:
            self.differ.append((ours, wanted))
        return plan


# --------------------------------------------------------------------------- made up


def made_up(rng: random.Random, waiting: int, running: int) -> View:
    """Few distinct times and sizes (ties); KV and slots from plenty to none; some late, some set aside before."""
    now = rng.choice((0.0, 1.0))
    block_cost, tight = rng.choice((0.0, 1e-6)), rng.random()

    def seq(id: str, runs: bool) -> Seq:
        slo = rng.choice(SLOS)
        prompt = rng.choice((1, 20, 20, 60, 160, rng.randint(1, 400)))
        request = Request(
            id,
            (Stage(prompt, slo),),
            now - rng.choice((0.0, 0.0, 0.1, rng.random())),
            tier=rng.choice(TIERS),
            sampling=Sampling(max_tokens=64),
            on_decline=rng.choice(("best_effort", "best_effort", "refuse")),
        )
        ahead = rng.choice((-0.01, 0.0, 0.02, 0.05, 0.2, 0.5, 2.0, rng.random()))
        due = inf if slo.best_effort or rng.random() < 0.05 else now + ahead * (0.1 + 3.0 * tight)
        output = rng.choice((0, 0, 3)) if not runs else rng.choice((0, 1, 5))
        length = prompt + output
        cached = 0
        if runs:
            cached = length - 1 if output or prompt == 1 else rng.randint(0, max(0, prompt - 2))
        blocks = -(-cached // BLOCK)
        return Seq(
            request, length, cached, blocks, output=output, due=due, demoted=not slo.best_effort and rng.random() < 0.3,
            missed=rng.random() < 0.1, predicted=rng.choice((None, 0.5, 10.0, 100.0)),
        )  # fmt: skip

    held = [seq(f"r{i}", True) for i in range(running)]
    queue = [seq(f"w{i}", False) for i in range(waiting)]
    used = sum(s.blocks for s in held)
    free = rng.choice((0, 1, 2, running, 20, 200, 5000))
    limits = Limits(
        max_num_seqs=rng.choice((1, 4, running + 2, 256)),
        max_num_batched_tokens=rng.choice((1, 64, 512, 4096)),
        max_model_len=4096,
        kv_blocks=used + free,
        block_size=BLOCK,
        max_running=rng.choice((None, None, running, running + 1, running + 8)),
    )
    model = Linear(rng.choice((0.0, 0.001, 0.02)), rng.choice((1e-5, 1e-4, 1e-3)), block_cost)
    return replace(
        view(queue, held, now=now, kv_free=free, kv_total=used + free, limits=limits, latency=model),
        supports=edf.Scheduler.needs,
    )


GIVEN: tuple[dict[str, Any], ...] = (
    {}, {"safety_margin": 0.0}, {"fairness": 0.0}, {"turn_every": 2}, {"decode_lead": 0.5, "max_ttft_share": 1.0},
)  # fmt: skip


def with_past(rng: random.Random) -> Both:
    """Tiers that have lost more than others, and a turn that is due sooner or later."""
    both = Both(given=rng.choice(GIVEN))
    for i in range(rng.choice((0, 30))):
        seq = Seq(
            Request(f"past{i}", (Stage(10, SLO(ttft=rng.choice((0.05, 1.0)))),), 0.0, tier=TIERS[i % 3]), 10, due=9.0
        )
        both.plan(view([seq], []))
        both.observe([Finished(0.0, seq.id, "completed", "stop", Verdict(i % 3 > 0 or i > 20, "deadline"))])
    return both


def compare(seed: int, waiting: int, running: int, rounds: int = 3) -> None:
    """Plans for views one after another, of one history."""
    rng = random.Random(seed)
    both = with_past(rng)
    for _ in range(rounds):
        seen = made_up(rng, rng.randint(0, waiting), rng.randint(0, running))
        both.plan(seen)
        ended = [s.id for s in [*seen.running, *seen.waiting]]
        both.observe([Finished(0.0, id, "completed", "stop", Verdict(rng.random() < 0.5, "deadline")) for id in ended])
    assert both.differ == []


@pytest.mark.parametrize("part", range(4))
def test_plans_of_made_up_views_are_those_of_the_reference(part: int) -> None:
    for seed in range(examples(500, 5000)):
        compare(4 * seed + part, 12, 8)


def test_plans_of_made_up_long_queues_are_those_of_the_reference() -> None:
    for seed in range(examples(20, 300)):
        compare(-1 - seed, 120, 40, 1)


# --------------------------------------------------------------------------- whole runs


def in_a_run(monkeypatch: pytest.MonkeyPatch) -> list[Both]:
    """Both schedulers wherever one is built."""
    made: list[Both] = []

    def build(name: str, given: dict[str, Any]) -> Both:
        made.append(Both(given=dict(given)))
        return made[-1]

    for where in ("rubato.fleet.build.load", "rubato.simulation.driver.load"):
        monkeypatch.setattr(where, build, raising=False)
    return made


@settings(max_examples=examples(20, 1000))
@given(load=loads())
def test_runs_on_a_replica_are_those_of_the_reference(load: Load) -> None:
    """KV barely above the largest request, prefixes shared, tools, stages, slots (`loads`)."""
    with pytest.MonkeyPatch.context() as patch:
        made = in_a_run(patch)
        run(load, "edf")
    assert sum(both.plans for both in made) > 0
    assert [both.differ for both in made if both.differ] == []


@pytest.mark.parametrize(
    ("scenario", "rate", "count"),
    [
        ("chatbot", 6.0, 100),  # most are beyond help, KV is short
        ("coder", 1.2, 150),
        *(pytest.param(*case, marks=pytest.mark.full) for case in (
            ("chatbot", 4.0, 400), ("chatbot", 5.2, 400), ("mixed", 4.0, 200), ("summarizer", 4.0, 200),
            ("toolllm", 0.3, 200),
        )),
    ],
)  # fmt: skip
def test_overloaded_scenarios_are_those_of_the_reference(
    scenario: str, rate: float, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    scale = replace(_slos_serve_runs.FULL, count=count)
    load = _slos_serve_runs.load(scenario, 1, scale).rescaled(rate)
    made = in_a_run(monkeypatch)
    machine = _slos_serve_runs.hardware(scenario, scale)
    simulate(load, RunSpec(machine, PolicyChoice.parse("edf"), 1, lengths=oracle_lengths), 1, causes=False)
    assert sum(both.plans for both in made) > count
    assert sum(sum(both.same.values()) for both in made) > 100
    assert [both.differ for both in made if both.differ] == []
