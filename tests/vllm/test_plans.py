"""vLLM carries out exactly what a policy plans, whatever the policy, the load and the memory."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.interface import PauseState

from rubato.core.events import Finished, Offered, Preempted, Started, Stepped, Tokens
from rubato.core.plan import Plan, Work, blocks_for
from rubato.engines.vllm import open_requests, policy_driver
from rubato.engines.vllm.guards import MAX_FAULTS
from tests.policies.test_properties import Amnesiac, Watching
from tests.vllm.harness import Harness, harness, token, with_model_runner

Fields = Callable[[random.Random, int], dict[str, Any]]
CHANCE = "tests.vllm.random_plans"
DRAFTS = "tests.vllm.random_drafts"
POLICIES = ["rubato", "edf", "vllm", "sarathi", "prefill_first", "priority", "slos_serve", CHANCE]
SEEDS = range(12)
# How many batches run at once, and under which of vLLM's schedulers.
QUEUES: dict[str, dict[str, Any]] = {"sync": {}, "async": {"asynchronous": True}, "pipeline": {"depth": 3}}
SLOS: list[dict[str, Any]] = [
    {},
    {"slo_ttft_ms": 50},
    {"slo_ttft_ms": 200, "slo_tpot_ms": 20, "slo_tier": "chat"},
    {"slo_ttft_ms": 1000.0, "slo_tpot_ms": 50.0, "slo_on_decline": "refuse"},
    {"slo_e2e_ms": 500, "slo_tier": "code"},
]


def drive(
    made: Harness,
    seed: int,
    *,
    aborts: bool = False,
    fields: Callable[[random.Random, int], dict[str, Any]] | None = None,
) -> dict[str, int]:
    """Offer a random load while it runs: prompts that begin alike, ties, now and then an abort. id -> max_tokens.
    fields: of vLLM's Request, from the length of the prompt."""
    rng = random.Random(seed)
    most: dict[str, int] = {}
    aborted = set()
    for i in range(rng.randint(3, 20)):
        prompt = [rng.choice((5, 6))] * rng.choice((1, 15, 16, 17, 40, 90)) + [7] * rng.choice((0, 0, 9))
        most[f"q{i}"] = rng.choice((1, 2, 5, 20))
        more = fields(rng, len(prompt)) if fields is not None else None
        made.add(f"q{i}", prompt, most[f"q{i}"], fields=more, **rng.choice(SLOS))
        for _ in range(rng.choice((0, 0, 1, 5))):
            made.step()
        if aborts and rng.random() < 0.3:
            aborted.add(victim := rng.choice(list(most)))
            made.abort(victim)
    made.run()
    return {id: n for id, n in most.items() if id not in aborted}


def scarce(seed: int) -> dict[str, Any]:
    """KV of 1 to 2 times the largest request, and small batches."""
    rng = random.Random(seed)
    block = rng.choice((1, 4, 16))
    largest = blocks_for(99 + 20, block)
    return {
        "block": block,
        "blocks": largest + rng.randint(0, largest),
        "tokens": rng.choice((16, 64, 256)),
        "seqs": rng.choice((1, 2, 8)),
        "prefix": rng.random() < 0.5,
    }


@pytest.mark.parametrize("queue", QUEUES)
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("policy", POLICIES)
def test_plans_are_carried_out_and_everybody_ends_once(model: Path, policy: str, seed: int, queue: str) -> None:
    settings = {"seed": seed} if policy == CHANCE else None
    made = harness(model, policy, settings=settings, **scarce(seed), **QUEUES[queue])
    most = drive(made, seed)
    finished = made.finish()
    assert made.ended == dict.fromkeys(most, 1)
    assert finished.keys() == most.keys()
    for id, end in finished.items():
        if end.outcome == "completed":
            assert made.out[id] == [token(id, i) for i in range(most[id])]
            assert end.output == most[id]
            assert made.reasons[id] == ("length", None)
        else:
            assert end.outcome == "refused"
            assert made.reasons[id] == ("error", end.reason)


@pytest.mark.parametrize("queue", QUEUES)
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("policy", ["rubato", "edf", CHANCE])
def test_aborts_free_everything(model: Path, policy: str, seed: int, queue: str) -> None:
    made = harness(model, policy, **scarce(seed), **QUEUES[queue])
    most = drive(made, seed, aborts=True)
    finished = made.finish()
    cancelled = [id for id, end in finished.items() if end.outcome == "cancelled"]
    assert made.ended == dict.fromkeys(finished.keys() - set(cancelled), 1)
    assert most.keys() <= finished.keys()
    assert not most.keys() & set(cancelled)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("policy", ["rubato", "edf", "vllm", "sarathi", "priority"])
def test_a_policy_does_not_change_what_it_sees(model: Path, policy: str, seed: int) -> None:
    made = harness(model, policy, wrap=Watching, **scarce(seed))
    drive(made, seed)
    made.finish()
    watching = made.policy.inner
    assert isinstance(watching, Watching)
    assert watching.plans > 0
    assert not watching.changed


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("policy", ["rubato", "edf", "vllm", "sarathi", "priority"])
def test_rebuildable_mid_run(model: Path, policy: str, seed: int) -> None:
    made = harness(model, policy, wrap=partial(Amnesiac, every=1 + seed % 7), **scarce(seed))
    most = drive(made, seed)
    assert made.finish().keys() == most.keys()


@pytest.mark.parametrize("queue", QUEUES)
def test_the_loads_are_scarce_enough(model: Path, queue: str) -> None:
    """The tests above would prove little if nothing were ever preempted, resumed, found in the cache or refused."""
    preempted = resumed = hits = refused = chunks = 0
    for seed in SEEDS:
        made = harness(model, CHANCE, settings={"seed": seed}, **scarce(seed), **QUEUES[queue])
        drive(made, seed)
        refused += sum(e.outcome == "refused" for e in made.finish().values())
        preempted += sum(isinstance(e, Preempted) for e in made.policy.events)
        started = [e for e in made.policy.events if isinstance(e, Started)]
        resumed += sum(e.resumed for e in started)
        hits += sum(e.cached > 0 for e in started)
        chunks += sum(n > 1 for counts in made.scheduled for n in counts.values())
    assert min(preempted, resumed, hits, refused, chunks) >= 5


@pytest.mark.parametrize("queue", QUEUES)
def test_vllms_configuration_chooses_the_scheduler(model: Path, queue: str) -> None:
    made = harness(model, "edf", blocks=20, **QUEUES[queue])
    assert isinstance(made.scheduler, AsyncScheduler) == (queue == "async")
    assert made.depth == {"sync": 1, "async": 2, "pipeline": 3}[queue]


@pytest.mark.parametrize("seed", SEEDS)
def test_memory_that_a_running_batch_may_still_write_is_not_free_yet(model: Path, seed: int) -> None:
    """As where KV comes from other engines while several batches run: what is preempted then frees nothing now."""
    made = harness(model, CHANCE, settings={"seed": seed}, **scarce(seed), asynchronous=True)
    made.scheduler.defer_block_free = True
    most = drive(made, seed, aborts=True)
    assert most.keys() <= made.finish().keys()


def test_while_a_batch_runs_the_next_token_is_due_after_those_in_flight(model: Path) -> None:
    made = harness(model, "vllm", blocks=20, asynchronous=True)
    made.add("a", [5] * 20, 4, slo_ttft_ms=100, slo_tpot_ms=30)
    seen = []
    asked = made.policy.inner.plan

    def looking(view: Any) -> Any:
        (seq,) = [*view.waiting, *view.running]
        seen.append((round(seq.due, 3), seq.output, seq.pending, seq.length, seq.in_flight))
        return asked(view)

    made.policy.inner.plan = looking  # type: ignore[method-assign]
    made.run()
    # no token has come when the second is planned; none is planned that would be the fifth
    assert seen == [(0.1, 0, 20, 20, 0), (0.13, 1, 1, 21, 20), (0.16, 2, 1, 22, 1), (0.19, 3, 1, 23, 1)]
    assert made.finish()["a"].verdict.met
    assert [round(e.seconds, 3) for e in made.policy.events if isinstance(e, Stepped)] == [0.03, 0.011, 0.011, 0.011]


SPECULATIVE = {
    "ngram": {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 3},
    "draft_model": {"method": "draft_model", "num_speculative_tokens": 3},
}


@pytest.mark.parametrize("queue", QUEUES)
@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("policy", ["vllm_spec", "smart_spec", "slos_serve", "adaserve", "edf", DRAFTS])
@pytest.mark.parametrize("method", SPECULATIVE)
def test_drafts_are_verified_as_planned(model: Path, method: str, policy: str, seed: int, queue: str) -> None:
    """Lengths are compared at each step. A policy that plans none gets vLLM's, which are no part of its plans."""
    speculative = {"model": str(model), **SPECULATIVE[method]} if method == "draft_model" else SPECULATIVE[method]
    settings = {"seed": seed} if policy == DRAFTS else None
    memory = scarce(seed)
    memory["blocks"] += 8  # the drafter writes ahead
    made = harness(model, policy, settings=settings, **memory, **QUEUES[queue], speculative=speculative)
    made.exact = policy != "edf"
    most = drive(made, seed)
    finished = made.finish()
    assert made.ended == dict.fromkeys(most, 1)
    assert not made.scheduler.rubato.guard.deviations
    assert not made.scheduler.rubato.guard.faults
    for id, end in finished.items():
        assert end.outcome == "completed" or policy in ("slos_serve", "edf")
        assert end.outcome == "refused" or made.out[id] == [token(id, i) for i in range(most[id])]
    tokens = [e for e in made.policy.events if isinstance(e, Tokens)]
    assert sum(e.tried for e in tokens) >= sum(len(e.accepted) for e in tokens)


@pytest.mark.parametrize("queue", QUEUES)
def test_one_draft_length_for_a_batch(model: Path, queue: str) -> None:
    """With `uniform_drafts` all that can verify as many, and draft as many, as the one for which most is planned."""
    made = harness(
        model, DRAFTS, blocks=200, rubato={"uniform_drafts": True}, speculative=SPECULATIVE["ngram"], **QUEUES[queue]
    )
    made.exact = False
    for i in range(4):
        made.add(f"q{i}", [5] * 10, 60)
    made.run()
    steps = [(counts, drafts) for counts, drafts in zip(made.scheduled, made.verified, strict=True) if drafts]
    assert (
        sum(len(drafts) == len(counts) and len(set(drafts.values())) == 1 for counts, drafts in steps) > len(steps) / 2
    )
    assert not made.scheduler.rubato.guard.deviations
    assert all(made.out[id] == [token(id, i) for i in range(60)] for id in made.out)


def test_a_hit_that_was_planned_on_is_not_given_to_others_first(model: Path) -> None:
    """Of the memory that nobody uses, vLLM takes the least recently used prefix first: that of `old`, which `again`
    begins with, and `big` comes before `again` in the same step."""
    made = harness(model, "vllm", blocks=12, block=4, prefix=True)
    for id, word in (("old", 5), ("new", 6)):  # leave two idle blocks each
        made.add(id, [word] * 8, 1)
        made.run()
    plans = iter([Plan(work=(Work("big", 1),)), Plan(work=(Work("big", 35), Work("again", 1)))])
    made.policy.inner.plan = lambda view: next(plans)  # type: ignore[method-assign]
    made.add("big", [7] * 45, 1)
    made.step()
    assert made.scheduler.view().kv_free == 11
    made.add("again", [5] * 9, 1)
    assert made.step() == {"big": 35, "again": 1}
    assert made.out["again"] == [token("again", 0)]


def test_what_vllm_does_against_the_plan_is_counted_and_nobody_is_lost(model: Path, caplog: Any) -> None:
    made = harness(model, "vllm", blocks=20)
    caplog.set_level("WARNING", "vllm.rubato")
    made.add("a", [5] * 20, 2)
    made.add("b", [6] * 20, 2)
    manager = made.scheduler.kv_cache_manager
    allocate = manager.allocate_slots
    manager.allocate_slots = lambda *args, **kwargs: None
    for _ in range(2):
        with pytest.raises(AssertionError):
            made.step()
    manager.allocate_slots = allocate
    assert made.scheduler.rubato.guard.deviations == {"kv": 2}
    assert [r.request_id for r in made.scheduler.waiting] == ["a", "b"]
    made.scheduler.rubato._batches.clear()  # the harness gave up before the batch, an empty one, was completed
    made.run()
    assert made.scheduler.rubato.guard.deviations == {"kv": 2}
    assert caplog.text.count("did not carry out") == 1  # within a minute
    assert "did not carry out the plan of step 0: a 20 tokens planned, 0 scheduled" in caplog.text
    assert made.ended == {"a": 1, "b": 1}


def test_nothing_to_do_is_a_legal_step(model: Path) -> None:
    made = harness(model, "edf", blocks=20)
    assert made.step() == {}
    assert made.policy.plans == []
    made.add("a", [5] * 20, 3, slo_ttft_ms=500)
    made.run()
    assert made.step() == {}
    assert made.finish()["a"].verdict.met


def test_events_tell_a_request_s_life(model: Path) -> None:
    made = harness(model, "vllm", blocks=20, settings={"budget": 16})
    made.add("a", [5] * 20, 2, slo_ttft_ms=1, slo_tier="chat")
    made.run()
    end = made.finish()["a"]
    kinds = [type(e) for e in made.policy.events]
    assert kinds == [Offered, Started, Stepped, Stepped, Tokens, Stepped, Tokens, Finished]
    first = made.policy.events[0]
    assert isinstance(first, Offered)
    assert first.request.tier == "chat"
    assert first.request.stages[0].slo.ttft == 0.001
    shapes = [(e.shape.tokens, e.shape.kv, e.seconds) for e in made.policy.events if isinstance(e, Stepped)]
    assert shapes == [(16, 16, pytest.approx(0.026)), (4, 20, pytest.approx(0.014)), (1, 21, pytest.approx(0.011))]
    assert not end.verdict.met
    assert end.verdict.margin == pytest.approx(0.001 - 0.040)


def test_demoted_is_kept_and_taken_back(model: Path) -> None:
    made = harness(model, "edf", blocks=20)
    plans = iter([Plan(demote=("a",)), Plan(promote=("a",)), Plan(work=(Work("a", 20),)), Plan(work=(Work("a", 1),))])
    made.policy.inner.plan = lambda view: next(plans)  # type: ignore[method-assign]
    made.add("a", [5] * 20, 2, slo_ttft_ms=100)
    seq = made.scheduler.rubato.requests.seqs["a"]
    made.step()
    assert (seq.demoted, seq.best_effort) == (True, True)
    made.step()
    assert (seq.demoted, seq.best_effort) == (False, False)
    made.run()
    assert not made.finish()["a"].best_effort


def test_an_abort_after_a_stop_string_is_an_end(model: Path) -> None:
    """vLLM's front end finds stop strings, and then takes the request back."""
    made = harness(model, "edf", blocks=20)
    for id, stop in (("said", "."), ("left", None)):
        made.add(id, [5] * 20, 9, stop=stop)
    made.step()
    made.abort("said")
    made.abort("left")
    outcomes = {id: (end.outcome, end.reason, end.output) for id, end in made.finish().items()}
    assert outcomes == {"said": ("completed", "stop", 1), "left": ("cancelled", "aborted", 1)}


def test_a_paused_engine(model: Path) -> None:
    made = harness(model, "vllm", blocks=20)
    made.add("a", [5] * 20, 5)
    made.step()
    made.add("b", [5] * 20, 5)
    made.scheduler.set_pause_state(PauseState.PAUSED_NEW)
    assert made.step() == {"a": 1}
    made.scheduler.set_pause_state(PauseState.PAUSED_ALL)
    assert made.step() == {}
    made.scheduler.set_pause_state(PauseState.UNPAUSED)
    assert made.step() == {"a": 1, "b": 20}
    made.run()
    assert made.finish().keys() == {"a", "b"}


def test_vllm_preempts_everybody_to_reset_its_prefix_cache(model: Path) -> None:
    made = harness(model, "edf", blocks=20, prefix=True)
    made.add("a", [5] * 20, 5)
    made.step()
    assert made.scheduler.reset_prefix_cache(reset_running_requests=True)
    made.run()
    assert made.finish()["a"].output == 5
    assert [e.resumed for e in made.policy.events if isinstance(e, Started)] == [False, True]
    assert sum(isinstance(e, Preempted) for e in made.policy.events) == 1


def test_a_model_runner_with_slots_has_no_more_running(model: Path, monkeypatch: Any) -> None:
    """vLLM's V2 runner has `max_num_seqs` slots for running sequences, whether a batch has them or not."""
    with_model_runner(2, model, monkeypatch)
    made = harness(model, CHANCE, blocks=60, seqs=2)
    assert made.scheduler.rubato.limits.max_running == 2
    most = drive(made, 3)
    assert made.finish().keys() == most.keys()
    assert made.ended == dict.fromkeys(most, 1)
    assert not made.scheduler.rubato.guard.deviations


@pytest.mark.parametrize("queue", ["sync", "async"])
def test_a_request_that_is_passed_over_keeps_its_slot_until_it_is_preempted(
    model: Path, queue: str, monkeypatch: Any, caplog: Any
) -> None:
    with_model_runner(2, model, monkeypatch)
    made = harness(model, "edf", blocks=60, seqs=2, **QUEUES[queue])
    for i in range(3):
        made.add(f"q{i}", [5] * 20, 6)
    slots = []
    plans = iter(
        [
            Plan(work=(Work("q0", 20), Work("q1", 20))),
            Plan(work=(Work("q2", 20),)),
            Plan(work=(Work("q2", 20),), preempt=("q0",)),
        ]
    )

    def planning(view: Any) -> Plan:
        slots.append((view.limits.max_running, [seq.id for seq in (*view.running, *view.moving)]))
        return next(plans, None) or asked(view)

    asked = made.policy.inner.plan
    monkeypatch.setattr(made.policy.inner, "plan", planning)
    made.step()
    made.exact = False
    made.step()  # the plan is impossible
    made.exact = True
    assert "1 started beside 2 that run on, the engine holds 2 at once" in caplog.text
    assert made.step() == {"q2": 20}
    assert slots[:3] == [(2, []), (2, ["q0", "q1"]), (2, ["q0", "q1"])]
    assert made.slots == {"q1", "q2"}
    made.run()
    assert made.ended == {f"q{i}": 1 for i in range(3)}


@pytest.mark.parametrize(
    ("plan", "words"),
    [
        (Plan(work=(Work("b", 1),)), "work names 'b'"),
        (Plan(work=(Work("a", 21),)), "gives 'a' 21 tokens, and it has 20 pending"),
        (Plan(preempt=("a",)), "preempt names 'a', which holds no KV"),
        (Plan(drop={"a": "late"}), "whose client asked for best effort"),
        (Plan(), "no wake_at"),
        (Plan(work=(Work("a", 2.5),)), "gives 'a' 2.5 tokens: give a whole number"),  # type: ignore[arg-type]
        (Plan(demote=(id for id in "a")), "demote is generator"),  # type: ignore[arg-type]
        (Plan(preempt=iter(["a"])), "preempt is list_iterator"),  # type: ignore[arg-type]
        (Plan(demote="a"), "demote is str: give a tuple"),  # type: ignore[arg-type]
        (Plan(drop={"a": object()}), "give a mapping with a text for each"),  # type: ignore[dict-item]
    ],
)
def test_an_impossible_plan_is_logged_with_numbers_and_the_step_is_vllms(
    model: Path, plan: Any, words: str, caplog: Any
) -> None:
    made = harness(model, "edf", blocks=20)
    made.exact = False
    made.add("a", [5] * 20, 2)
    made.policy.inner.plan = lambda view: plan  # type: ignore[method-assign]
    assert made.step() == {"a": 20}
    assert made.scheduler.rubato.guard.fallbacks == 1
    assert not made.scheduler.rubato.guard.deviations
    assert "policy 'edf' failed at step 0" in caplog.text
    assert "policy 'edf', replica 'vllm'" in caplog.text
    assert words in caplog.text


@pytest.mark.parametrize("queue", QUEUES)
@pytest.mark.parametrize("part", ["plan", "observe"])
@pytest.mark.parametrize("seed", range(4))
def test_a_policy_that_raises_costs_nobody_a_token(
    model: Path, part: str, seed: int, queue: str, monkeypatch: Any, caplog: Any
) -> None:
    """Every third call raises; all requests end as they would, and the batches are vLLM's in these steps, and in all
    after the tenth."""
    made = harness(model, CHANCE, settings={"seed": seed}, **scarce(seed), **QUEUES[queue])
    made.exact = False
    calls = 0
    asked = getattr(made.policy.inner, part)

    def failing(given: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls % 3 == 0:
            raise ZeroDivisionError("a fault of the policy")
        return asked(given)

    monkeypatch.setattr(made.policy.inner, part, failing)
    most = drive(made, seed)
    monkeypatch.setattr(made.policy.inner, part, asked)
    made.finish()
    driver = made.scheduler.rubato
    assert driver.guard.faults == {part: calls // 3}
    assert driver.guard.has_given_up == (calls // 3 == MAX_FAULTS)
    assert driver.guard.fallbacks >= calls // 3 > 0
    assert not driver.guard.deviations
    assert made.ended == dict.fromkeys(most, 1)
    (report,) = [record for record in caplog.records if record.exc_info]  # all of them within a minute
    assert "ZeroDivisionError" in str(report.exc_text)


# Of each hook, what it calls in its middle, or itself: of the driver or of its module.
HOOKS = {
    "offer": "VllmSeq", "end": "judge", "preempted": "Preempted", "view": "view", "plan": "chunks_of",
    "shift": "Demoted", "scheduled": "_begin", "completed": "_book", "_starting": "_current_hit",
}  # fmt: skip


@pytest.mark.parametrize("queue", QUEUES)
@pytest.mark.parametrize("hook", HOOKS)
def test_a_fault_in_any_hook_costs_nobody_a_token(
    model: Path, hook: str, queue: str, monkeypatch: Any, caplog: Any
) -> None:
    """The books themselves fail, every time, in the middle: vLLM goes on, and after ten times without them."""
    faults = 0
    for seed in range(3):
        made = harness(model, CHANCE, settings={"seed": seed}, **scarce(seed), **QUEUES[queue])
        made.exact = False
        driver = made.scheduler.rubato
        parts = (driver, made.scheduler, open_requests, policy_driver)
        place = next(part for part in parts if hasattr(part, HOOKS[hook]))
        monkeypatch.setattr(place, HOOKS[hook], lambda *args: 1 / 0)
        most = drive(made, seed)
        monkeypatch.undo()
        assert made.ended == dict.fromkeys(most, 1)
        completed = [id for id in most if made.reasons[id][0] != "error"]
        assert all(made.out[id] == [token(id, i) for i in range(most[id])] for id in completed)
        pool = made.scheduler.kv_cache_manager.block_pool
        assert pool.get_num_free_blocks() == pool.num_gpu_blocks - 1
        faults += driver.guard.faults.total()  # in the hook, or in one that it is called from
    assert faults > 0


def test_ten_faults_in_a_minute_are_the_last(model: Path, caplog: Any, monkeypatch: Any) -> None:
    made = harness(model, "edf", blocks=20)
    made.exact = False
    made.add("a", [5] * 20, 40)
    calls = []
    monkeypatch.setattr(made.policy.inner, "plan", lambda view: calls.append(view.now) or 1 / 0)
    for step in range(19):
        made.now = 7.0 * step  # ten are a minute and more
        made.step()
    driver = made.scheduler.rubato
    assert not driver.guard.has_given_up
    made.run()
    assert driver.guard.has_given_up
    assert len(calls) == driver.guard.faults["plan"] < driver.guard.fallbacks == made.steps
    assert "10 faults in" in caplog.text
    assert made.ended == {"a": 1}


@pytest.mark.parametrize("seconds", [5.0, 30.0])
def test_a_policy_that_sleeps_is_not_asked_for_ever(model: Path, seconds: float, caplog: Any, monkeypatch: Any) -> None:
    made = harness(model, "vllm", blocks=20)
    made.add("a", [5] * 20, 40)
    asked = made.policy.inner.plan

    def sleeping(view: Any) -> Any:
        made.now += seconds
        return asked(view)

    monkeypatch.setattr(made.policy.inner, "plan", sleeping)
    made.exact = False
    made.run()
    assert made.scheduler.rubato.guard.faults == {"slow": 10}
    assert made.scheduler.rubato.guard.has_given_up
    assert f"took {seconds} s to plan step 0" in caplog.text
    assert made.ended == {"a": 1}


def test_more_may_run_under_a_policy_than_vllms_own_batch_has_room_for(model: Path, monkeypatch: Any) -> None:
    """With the V1 model runner. When the policy fails for good, those beyond `max_num_seqs` wait, with their KV, for a
    place."""
    with_model_runner(1, model, monkeypatch)
    made = harness(model, "edf", blocks=60, seqs=2)
    made.exact = False
    for i in range(5):
        made.add(f"q{i}", [5] * 20, 6)
    starts = iter([("q0", "q1"), ("q2", "q3"), ("q4",)])
    monkeypatch.setattr(made.policy.inner, "plan", lambda view: Plan(work=tuple(Work(id, 20) for id in next(starts))))
    for _ in range(3):
        made.step()
    assert len(made.scheduler.running) == 5
    made.run()
    assert made.scheduler.rubato.guard.has_given_up
    assert max(map(len, made.scheduled)) == 2
    assert made.ended == {f"q{i}": 1 for i in range(5)}
    assert all(made.out[id] == [token(id, i) for i in range(6)] for id in made.out)


def test_a_failing_policy_is_reported_once_a_minute(model: Path, caplog: Any, monkeypatch: Any) -> None:
    made = harness(model, "edf", blocks=20)
    made.exact = False
    made.add("a", [5] * 20, 4)
    monkeypatch.setattr(made.policy.inner, "plan", lambda view: 1 / 0)
    for at in (0.0, 59.0, 61.0):
        made.now = at
        made.step()
    reports = [record.getMessage() for record in caplog.records if record.exc_info]
    assert [report.split("; ")[-1] for report in reports] == ["faults so far: 1", "faults so far: 3"]


@pytest.mark.parametrize(
    ("extra", "words"),
    [
        ({"slo_ttft_ms": -1}, "slo_ttft_ms is -1"),
        ({"slo_e2e_ms": 1e300}, "slo_e2e_ms is 1e+300: give 0.001 to 1e+09 milliseconds"),
        ({"slo_tpot_ms": "soon"}, "slo_tpot_ms is 'soon'"),
        ({"slo_ttft": 100}, "unknown key 'slo_ttft'"),
        ({"slo_on_decline": "never"}, "give best_effort or refuse"),
    ],
)
def test_an_impossible_slo_is_refused_and_others_go_on(model: Path, extra: dict[str, Any], words: str) -> None:
    made = harness(model, "edf", blocks=20)
    made.add("bad", [5] * 20, 2, **extra)
    made.add("good", [5] * 20, 2)
    made.run()
    assert made.finish().keys() == {"good"}
    assert made.ended == {"bad": 1, "good": 1}
    assert made.reasons["bad"][0] == "error"
    assert words in made.reasons["bad"][1]


def test_what_can_never_fit_is_refused(model: Path) -> None:
    made = harness(model, "vllm", blocks=4)
    made.add("a", [5] * 60, 20)
    made.run()
    end = made.finish()["a"]
    assert end.outcome == "refused"
    assert end.reason.startswith("rejected-exceeds-kv: 80 tokens")


def test_edf_spares_the_tight_what_the_stock_rule_makes_them_wait_for(model: Path) -> None:
    """A long prompt first, then a tight request: by order of arrival the tight one is late, by deadline it is not."""
    met = {}
    for policy in ("vllm", "edf"):
        made = harness(model, policy, blocks=40, tokens=256)
        made.scheduler.rubato.latency = made.policy.latency = _Known()  # type: ignore[attr-defined]
        made.add("long", [5] * 200, 5, slo_ttft_ms=2000)
        made.add("tight", [6] * 20, 5, slo_ttft_ms=100, slo_tpot_ms=40)
        made.run()
        met[policy] = {id: end.verdict.met for id, end in made.finish().items()}
    assert met == {"vllm": {"long": True, "tight": False}, "edf": {"long": True, "tight": True}}


class _Known:
    """The harness's own step time."""

    def __new__(cls) -> Any:
        from tests.vllm.harness import STEP

        return STEP
