"""`slos_serve` with a drafter: what entries demand, what is planned, and what is kept."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rubato.core.interfaces import View
from rubato.core.plan import Plan, Tree, Work
from rubato.core.request import SLO, Request, Sampling, Stage
from rubato.engines.simulated import Drafter
from rubato.engines.simulated.acceptance import Acceptance
from rubato.latency.roofline import Model
from rubato.policies import PolicyError, load
from rubato.policies.slos_serve import Scheduler
from rubato.policies.slos_serve.demand import Demand
from rubato.policies.slos_serve.speculation import NO_SPECULATION, SpeculationPlan, SpeculationState
from rubato.policy_kit.acceptance import AcceptanceRates
from rubato.replica.plan_check import spelled_out
from tests.conftest import few
from tests.kit import Linear, Seq, request, view
from tests.kit.plans import LIMITS, decode
from tests.policies.slos_serve import test_guarantee
from tests.policies.slos_serve.test_guarantee import kept, promised
from tests.policies.test_properties import Load

CHAIN = Tree((-1, 0, 1), (0.7, 0.49, 0.343))
DRAFTS = frozenset({"chunked", "preempt", "mixed", "draft", "tree"})

# --------------------------------------------------------------------------- what entries demand


def test_a_decode_that_drafts_wants_an_entry_every_so_many_tokens() -> None:
    """Two tokens verified, both right, in each 0.1 s instead of one in each 0.05 s."""
    certain = Demand("a", 0.1, 1, 0.05, accepts=1.0)
    [entry] = SpeculationPlan(0.1, 1, 10).entries([certain], {"a": 1})
    assert (entry.due, entry.tokens, entry.tpot, entry.verified) == (0.1, 2, 0.1, 2)


def test_a_request_whose_drafts_are_not_there_yet_is_wanted_sooner() -> None:
    """One token comes now and lasts 0.05 s of the 0.1 s until the entry after."""
    certain = Demand("a", 0.2, 1, 0.05, accepts=1.0)
    [entry] = SpeculationPlan(0.1, 1, 10).entries([certain], {})
    assert (entry.due, entry.tokens) == (pytest.approx(0.15), 1)
    [first] = SpeculationPlan(0.1, 1, 10).entries([certain._replace(tokens=60)], {})
    assert (first.due, first.tokens, first.verified) == (pytest.approx(0.15), 60, 2)


def test_a_loose_tier_decodes_as_before() -> None:
    loose = Demand("a", 0.1, 1, 0.1, accepts=0.7)
    assert SpeculationPlan(0.1, 3, 10).entries([loose], {"a": 3}) == [loose]
    assert NO_SPECULATION.entries([loose._replace(tpot=0.01)], {}) == [loose._replace(tpot=0.01)]


def test_a_request_that_was_unlucky_is_wanted_in_the_next_batch() -> None:
    unlucky = Demand("a", 0.06, 1, 0.05, accepts=0.7)
    [entry] = SpeculationPlan(0.08, 1, 10).entries([unlucky], {"a": 1})
    assert (entry.due, entry.verified) == (0.0, 2)


# --------------------------------------------------------------------------- what is planned on


def test_the_mean_is_planned_on_where_a_decode_can_be_ahead() -> None:
    seq = Seq(request("a", ttft=1.0, tpot=0.05))
    certain, half = AcceptanceRates(1.0), AcceptanceRates(0.5)
    assert SpeculationState(9, can_draft=True, acceptance=certain).planned_acceptance(seq) == 1.0
    assert SpeculationState(9, can_draft=True, acceptance=half).planned_acceptance(seq) == 0.5
    assert SpeculationState(9, acceptance=half).planned_acceptance(seq) == 0.0
    from_first_token = Seq(request("b", tpot=0.05))
    assert SpeculationState(9, can_draft=True, acceptance=half).planned_acceptance(from_first_token) == 0.0


# --------------------------------------------------------------------------- view in, plan out


def shown(waiting: list[Seq], running: list[Seq], supports: frozenset[str] = DRAFTS) -> View:
    """With memory for hardly more than one of them."""
    return view(waiting, running, kv_total=6, limits=LIMITS, latency=Linear(), supports=supports)


def planned(one: Seq, **changes: int) -> tuple[Work, ...]:
    seen = replace(shown([], [one]), **changes)  # type: ignore[arg-type]
    return spelled_out(Scheduler().plan(seen), seen).work


def test_nothing_is_drafted_where_the_engine_cannot_or_no_request_wants_it() -> None:
    one = decode("a", tpot=0.05, due=0.05)
    plain = shown([], [one], frozenset({"chunked", "preempt", "mixed"}))
    assert Scheduler().plan(plain) == Scheduler(max_draft=0).plan(shown([], [one]))
    assert not Scheduler(max_draft=0).uses
    assert Scheduler().uses == {"draft"}
    [entry] = planned(one)
    assert entry.draft is not None
    [roomy] = planned(one, kv_total=40)
    assert roomy.draft is None


def test_what_is_there_is_verified_and_no_draft_goes_beyond_the_end() -> None:
    one = replace(decode("a", tpot=0.05, due=0.05), draft=CHAIN, predicted=10.0)
    [entry] = planned(one)
    assert (entry.tokens, entry.verify) == (1, (0, 1, 2))
    for left, most in ((1.0, 0), (2.0, 0), (3.0, 1), (4.0, 2)):
        [entry] = planned(replace(one, predicted=left))
        assert len(entry.verify) == min(3, left - 1)
        assert entry.draft == ((most, 1) if most else None)


def test_verification_takes_no_memory_from_anyone() -> None:
    """Ten tokens in a block of ten, none free: its token fits nowhere else, and its drafts not at all."""
    one = replace(decode("a", 19, tpot=0.05, due=0.05), draft=CHAIN)
    [entry] = planned(one, kv_free=0)
    assert entry.tokens + len(entry.verify) <= one.blocks * LIMITS.block_size - one.cached


@pytest.mark.parametrize("wrong", [{"max_draft": 10}, {"max_draft": -1}])
def test_impossible_setting_is_named(wrong: dict[str, object]) -> None:
    with pytest.raises(PolicyError, match="draft"):
        load("slos_serve", wrong)


# --------------------------------------------------------------------------- what is kept


class Recording(test_guarantee.Recording):
    """Beside promises the deepest draft beyond an end."""

    def __init__(self, prior: float) -> None:
        super().__init__()
        self.inner._speculation.acceptance.prior = prior
        self.verified = self.beyond = 0

    def plan(self, shown: View) -> Plan:
        plan = super().plan(shown)
        for w in plan.work:
            seq = shown.known[w.seq]
            self.verified += len(w.verify)
            assert seq.predicted is not None
            self.beyond = max(self.beyond, 1 + len(w.verify) - int(seq.predicted) if w.verify else 0)
        return plan


def played(load: Load, model: Model, alpha: float) -> tuple[Recording, set[str]]:
    scheduler = Recording(alpha)
    return scheduler, kept(load, model, scheduler, drafter=Drafter(Acceptance(alpha)))


@few
@given(promised(), st.sampled_from([0.0, 0.5, 1.0]), st.sampled_from([0.0, 0.001]))
def test_no_draft_is_verified_beyond_an_end(case: tuple[Load, Model], alpha: float, per_step: float) -> None:
    load, model = case
    scheduler, _ = played(load, replace(model, k2=(per_step, per_step)), alpha)
    assert scheduler.beyond <= 0


@few
@given(promised(), st.sampled_from([0.0, 0.001]))
def test_where_all_drafts_are_right_no_admitted_request_misses(case: tuple[Load, Model], per_step: float) -> None:
    load, model = case
    scheduler, met = played(load, replace(model, k2=(per_step, per_step)), 1.0)
    assert scheduler.promised <= met


def test_a_tpot_below_any_step_is_held_by_drafts_alone() -> None:
    """A step takes 20 ms at least, a token is due every 15 ms: two requests are in time with drafts, none without."""
    slo = SLO(0.2, 0.015)
    requests = tuple(Request(f"q{i}", (Stage(40, slo),), 0.3 * i, sampling=Sampling(max_tokens=60)) for i in range(2))
    truth: dict[str, tuple[int, ...]] = {r.id: (60,) for r in requests}
    limits = replace(LIMITS, kv_blocks=400, max_model_len=400)
    model = Model(k1=(0.0, 1e-4), k2=(1e-3, 1e-3), b=(0.02, 0.002))
    for alpha, attained in ((1.0, 2), (0.0, 0)):
        scheduler, met = played(Load(requests, truth, limits), model, alpha)
        assert len(met) == attained == len(scheduler.promised)
        assert (scheduler.verified > 0) == (attained > 0)
