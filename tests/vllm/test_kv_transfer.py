"""KV that comes from another engine and goes to one, with a formula for a model."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from vllm.config import KVTransferConfig

from rubato.core.events import Finished, HandedOff, Preempted, Transferred
from rubato.core.interfaces import View
from rubato.core.plan import Plan, Role, Work
from rubato.core.request import SLO, Handoff
from rubato.engines.vllm import kv_transfer
from rubato.policies import load
from rubato.wire.messages import assign
from tests.vllm.harness import Harness, harness
from tests.vllm.test_gateway_link import Gateway, promise, told

ASKED = {"do_remote_decode": True, "do_remote_prefill": False}
COMES = {
    "do_remote_prefill": True, "do_remote_decode": False, "remote_block_ids": [[1, 2]], "remote_engine_id": "e",
    "remote_request_id": "r", "remote_host": "127.0.0.1", "remote_port": 1,
}  # fmt: skip
PREFILLED = Handoff("r1", "prefilled", 0.0, 10)


@pytest.fixture(autouse=True)
def _known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_transfer, "CONNECTORS", {"HandoverConnector"})


def made_for(model: Path, policy: str, *, recompute: bool = False, **more: Any) -> Harness:
    def change(config: Any) -> None:
        config.kv_transfer_config = KVTransferConfig(
            kv_connector="HandoverConnector",
            kv_connector_module_path="tests.vllm.handover_connector",
            kv_role="kv_both",
            kv_load_failure_policy="recompute" if recompute else "fail",
        )
        config.scheduler_config.disable_hybrid_kv_cache_manager = True

    if policy == "distserve":  # (a driver without a gateway refuses it)
        policy, more = "edf", {"wrap": lambda name: load("distserve"), **more}
    made = harness(model, policy, change=change, **{"blocks": 24, **more})
    made.exact = False
    made.scheduler.rubato.supports |= {"kv_transfer", "handoff"}
    return made


def add(made: Harness, id: str, prompt: list[int], most: int, params: dict[str, Any] | None, **slo: Any) -> None:
    given = made.scheduler.add_request

    def adding(request: Any) -> None:
        request.kv_transfer_params = None if params is None else dict(params)
        given(request)

    made.scheduler.add_request = adding
    try:
        made.add(id, prompt, most, **slo)
    finally:
        made.scheduler.add_request = given


def seen(made: Harness, name: str) -> list[tuple[str, int, int]]:
    """In every view that the policy is shown from now on: where a request is, tokens in KV, and blocks that are
    free."""
    views: list[tuple[str, int, int]] = []
    asked = made.policy.inner.plan

    def looking(view: View) -> Plan:
        for where in ("waiting", "running", "moving"):
            views.extend((where, s.cached, view.kv_free) for s in getattr(view, where) if name in s.id)
        return asked(view)

    made.policy.inner.plan = looking  # type: ignore[method-assign]
    return views


def clean(made: Harness, *causes: str) -> None:
    assert made.scheduler.rubato.guard.deviations.keys() <= set(causes)
    assert not made.scheduler.rubato.guard.faults
    assert not made.scheduler.rubato.guard.fallbacks
    assert not made.scheduler.rubato.requests.arriving
    assert not made.scheduler.rubato.requests.leaving


@pytest.mark.parametrize("asynchronous", [False, True])
def test_kv_that_comes_is_moving_and_then_runs_on(model: Path, asynchronous: bool) -> None:
    made = made_for(model, "edf", asynchronous=asynchronous)
    gateway, views = told(made), seen(made, "cmpl-a")
    promise(gateway, "cmpl-a", 40, SLO(5.0, 1.0), handoff=PREFILLED)
    add(made, "cmpl-a-0-0a1b2c3d", [7] * 40, 5, COMES)
    made.add("other", [6] * 20, 8)
    made.run()
    gateway.hear()
    assert "waiting" not in {where for where, _, _ in views}
    assert views[0][0] == "moving"
    assert views[0][2] == 24 - 3  # its blocks are kept for it
    assert next(cached for where, cached, _ in views if where == "running") == 39
    assert made.ended == {"cmpl-a-0-0a1b2c3d": 1, "other": 1}
    moved = [e for e in gateway.events if isinstance(e, Transferred)]
    assert [(e.id, e.replica, e.source, e.tokens) for e in moved] == [("cmpl-a", "r0", "r1", 39)]
    assert made.scheduler.connector.told == ["cmpl-a-0-0a1b2c3d"]
    made.finish()
    clean(made)


def test_what_comes_waits_for_memory_and_holds_nobody_up(model: Path) -> None:
    """Its blocks are not free yet: others go on, and start behind it."""
    made = made_for(model, "edf", blocks=8)
    told(made)
    made.add("big", [5] * 60, 30)
    made.step()
    add(made, "far", [7] * 70, 3, COMES)
    made.add("small", [6] * 10, 3)
    made.run()
    assert made.ended == {"big": 1, "far": 1, "small": 1}
    order = [id for step in made.scheduled for id in step]
    assert order.index("small") < order.index("far")
    made.finish()
    clean(made, "kv")


@pytest.mark.parametrize("recompute", [False, True])
def test_kv_that_does_not_come_is_prefilled_here_or_ends_the_request(model: Path, recompute: bool) -> None:
    """As vLLM's `kv_load_failure_policy` has it."""
    made = made_for(model, "edf", recompute=recompute)
    gateway = told(made)
    promise(gateway, "cmpl-a", 40, SLO(5.0, 1.0), handoff=PREFILLED)
    made.scheduler.connector.fails.add("cmpl-a-0-0a1b2c3d")
    add(made, "cmpl-a-0-0a1b2c3d", [7] * 40, 5, COMES)
    made.add("other", [6] * 20, 20)
    made.run()
    gateway.hear()
    kinds = [type(e).__name__ for e in gateway.events if getattr(e, "id", "") == "cmpl-a"]
    if recompute:
        assert kinds[:4] == ["Offered", "Transferred", "Preempted", "Started"]
        assert len(made.out["cmpl-a-0-0a1b2c3d"]) == 5
    else:
        assert kinds == ["Offered", "Finished"]
        (end,) = [e for e in gateway.events if isinstance(e, Finished) and e.id == "cmpl-a"]
        assert end.outcome == "failed"
    made.finish()
    clean(made)


@pytest.mark.parametrize("when", [0, 1, 3])
def test_a_request_whose_kv_comes_can_be_aborted(model: Path, when: int) -> None:
    made = made_for(model, "edf")
    add(made, "far", [7] * 40, 5, COMES)
    made.add("other", [6] * 20, 8)
    for _ in range(when):
        made.step()
    made.abort("far")
    made.run()
    assert made.scheduler.connector.told == ["far"]  # its sender may free the KV
    made.finish()
    clean(made)


class Preempting:
    """Gives up the KV of what has just come."""

    needs = frozenset({"preempt"})

    def __init__(self, inner: Any) -> None:
        self._inner = inner
        self.done = False

    def observe(self, events: Any) -> None:
        self._inner.observe(events)

    def plan(self, view: View) -> Plan:
        found = [s.id for s in view.running if s.id == "far"]
        if found and not self.done:
            self.done = True
            return Plan(preempt=tuple(found))
        return self._inner.plan(view)  # type: ignore[no-any-return]


def test_what_has_come_can_be_preempted_before_it_starts(model: Path) -> None:
    made = made_for(model, "edf", wrap=lambda name: Preempting(load(name)))
    add(made, "far", [7] * 40, 5, COMES)
    made.run()
    kinds = [type(e) for e in made.policy.events if getattr(e, "id", "") == "far"]
    assert kinds.index(Transferred) < kinds.index(Preempted)
    assert len(made.out["far"]) == 5
    made.finish()
    clean(made)


def test_a_request_that_needs_its_prompt_here_is_prefilled_here(model: Path) -> None:
    """As with `prompt_logprobs`, for which vLLM reads no KV."""
    made = made_for(model, "edf")
    given = made.scheduler.add_request

    def adding(request: Any) -> None:
        request.skip_reading_prefix_cache = True
        given(request)

    made.scheduler.add_request = adding
    add(made, "far", [7] * 40, 5, COMES)
    made.run()
    assert len(made.out["far"]) == 5
    made.finish()
    clean(made)


def prefilled(made: Harness, gateway: Gateway) -> list[tuple[str, int]]:
    return [(e.id, e.cached) for e in gateway.events if getattr(e, "reason", "") == "prefilled"]


@pytest.mark.parametrize("policy", ["edf", "distserve"])
def test_a_prompt_stays_in_kv_for_where_it_goes_on(model: Path, policy: str) -> None:
    made = made_for(model, policy)
    gateway = told(made)
    if policy == "distserve":
        gateway.wire.asked.append(("g", assign(Role("prefill", kind="prefill"))))
    promise(gateway, "cmpl-a", 40, SLO(5.0, 1.0))
    add(made, "cmpl-a-0-0a1b2c3d", [7] * 40, 1, ASKED)
    for _ in range(5):
        made.step()
        gateway.hear()
    assert prefilled(made, gateway) == [("cmpl-a", 39)]
    view = made.scheduler.view()
    assert [s.id for s in view.moving] == ["cmpl-a-0-0a1b2c3d"]
    mine = gateway.mirror.view(made.now)
    assert (view.kv_free, mine.kv_free) == (21, 21)
    assert [s.id for s in mine.moving] == ["cmpl-a"]
    assert [s.blocks for s in mine.moving] == [3]
    assert not [e for e in gateway.events if type(e).__name__ in ("Tokens", "Finished")]
    gateway.wire.wants_snapshot = True  # a snapshot tells of it, too
    made.step()
    gateway.hear()
    assert [s.id for s in gateway.mirror.view(made.now).moving] == ["cmpl-a"]
    made.scheduler.connector.read.add("cmpl-a-0-0a1b2c3d")
    made.run()
    gateway.hear()
    assert gateway.mirror.view(made.now).kv_free == 24
    assert gateway.mirror.is_empty
    assert made.ended == {"cmpl-a-0-0a1b2c3d": 1}
    clean(made)
    assert [e for e in made.policy.events if isinstance(e, HandedOff)]
    made.finish()


def test_past_gateways_a_prompt_for_another_engine_ends_as_any_request(model: Path) -> None:
    """As under a router of others that speaks vLLM's protocol."""
    made = made_for(model, "edf")
    add(made, "theirs", [7] * 40, 1, ASKED)
    for _ in range(4):
        made.step()
    made.scheduler.connector.read.add("theirs")
    made.run()
    assert made.finish()["theirs"].outcome == "completed"
    clean(made)


def test_an_engine_at_which_only_kv_is_on_its_way_is_not_idle_and_goes_on_speaking(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tests.vllm.handover_connector.HandoverConnector.STEPS", 20)
    made = made_for(model, "edf")
    made.pace = 0.5
    gateway = told(made)
    assert gateway.wire.idle
    promise(gateway, "cmpl-a", 40, SLO(50.0, 10.0), handoff=PREFILLED)
    add(made, "cmpl-a-0-0a1b2c3d", [7] * 40, 5, COMES)
    assert not gateway.wire.idle
    gateway.hear()
    for _ in range(15):
        made.step()
    assert len(gateway.wire.messages) >= 6  # one a second
    made.run()
    assert gateway.wire.idle
    clean(made)


@pytest.mark.parametrize("lacks", ["remote_engine_id", "remote_request_id", "remote_host", "remote_port"])
def test_a_request_that_does_not_say_where_its_kv_is_is_prefilled_here(model: Path, lacks: str) -> None:
    """vLLM would keep it waiting for ever, and NIXL's connector end the engine when its client leaves."""
    made = made_for(model, "edf")
    add(made, "far", [7] * 40, 5, {k: v for k, v in COMES.items() if k != lacks})
    assert made.scheduler.requests["far"].kv_transfer_params is None
    made.run()
    assert len(made.out["far"]) == 5
    made.finish()
    clean(made)


class Lazy(Preempting):
    """Passes over what has come, a few times."""

    def plan(self, view: View) -> Plan:
        plan: Plan = self._inner.plan(view)
        self.seen = [*getattr(self, "seen", []), *("running" for s in view.running if s.id == "far")]
        assert not [s for s in view.waiting if s.id == "far"]
        if self.seen and len(self.seen) < 4:
            others = tuple(Work(s.id, 1) for s in view.running if s.id != "far" and s.pending == 1)
            return Plan(work=others)
        return plan


def test_what_has_come_runs_until_a_plan_starts_it(model: Path) -> None:
    made = made_for(model, "edf", wrap=lambda name: Lazy(load(name)))
    add(made, "far", [7] * 40, 5, COMES)
    made.add("other", [6] * 20, 20)
    made.run()
    assert len(made.out["far"]) == 5
    assert len(made.policy.inner.seen) >= 4  # type: ignore[attr-defined]
    made.finish()
    clean(made)


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("seed", range(3))
def test_a_small_batch_where_kv_comes_past_gateways_and_through_them(
    model: Path, seed: int, asynchronous: bool
) -> None:
    """At an engine that decodes: some before their gateway has said so, some never."""
    rng = random.Random(seed)
    made = made_for(model, "distserve", blocks=60, seqs=4, asynchronous=asynchronous)
    gateway = told(made)
    gateway.wire.asked.append(("g", assign(Role("decode"))))
    for i in range(40):
        late = rng.random() < 0.3
        if not late:
            promise(gateway, f"cmpl-{i}", 40, SLO(5.0, 1.0), handoff=PREFILLED)
        add(made, f"cmpl-{i}-0-0a1b2c3d", [7] * rng.randint(20, 60), rng.randint(1, 9), COMES)
        if late and rng.random() < 0.5:
            made.step()
            promise(gateway, f"cmpl-{i}", 40, SLO(5.0, 1.0), handoff=PREFILLED)
        for _ in range(rng.randint(0, 2)):
            made.step()
    made.run()
    assert len(made.ended) == 40
    assert set(made.ended.values()) == {1}
    made.finish()
    clean(made, "not_in_view", "kv")


@pytest.mark.parametrize("phase", ["prefill", "decode"])
def test_a_request_past_gateways_runs_whole_where_prompts_and_decodes_run_apart(model: Path, phase: Any) -> None:
    made = made_for(model, "distserve")
    gateway = told(made)
    gateway.wire.asked.append(("g", assign(Role(phase, kind=phase))))
    params = ASKED if phase == "prefill" else COMES
    more = {"handoff": PREFILLED} if phase == "decode" else {}
    for i in range(4):
        made.add(f"theirs{i}", [6] * 30, 8)
        made.add(f"tiny{i}", [6] * 3, 2)
        promise(gateway, f"cmpl-{i}", 40, SLO(5.0, 1.0), **more)
        add(made, f"cmpl-{i}-0-0a1b2c3d", [7] * 40, 1 if phase == "prefill" else 5, params)
        made.step()
    for _ in range(60):
        made.step()
        made.scheduler.connector.read |= made.scheduler.connector.kept
    assert {id: len(tokens) for id, tokens in made.out.items() if id[:2] == "th"} == {f"theirs{i}": 8 for i in range(4)}
    assert len(made.ended) == 12
    beside = max(sum(id[0] == "t" for id in step) for step in made.scheduled)
    assert beside == 4  # half of 8
    clean(made, "not_in_view")
    made.finish()


@pytest.mark.parametrize(
    ("seed", "asynchronous", "policy"), [(0, False, "edf"), (1, True, "edf"), (2, False, "distserve"), (3, True, "sa")]
)
def test_what_gateways_fold_is_what_the_scheduler_shows(
    model: Path, seed: int, asynchronous: bool, policy: str
) -> None:
    """Of random requests, some of which come with KV, and some leave it here, with aborts and missed reports."""
    rng = random.Random(seed)
    made = made_for(model, policy, blocks=30, asynchronous=asynchronous)
    gateway = told(made, random.Random(seed), 0.05 if seed % 2 else 0.0)
    if policy == "distserve":
        gateway.wire.asked.append(("g", assign(Role("prefill", kind="prefill"))))
    kinds: list[Callable[[], dict[str, Any] | None]] = [lambda: None, lambda: ASKED, lambda: COMES]
    if policy == "distserve":
        kinds = [lambda: ASKED]
    right = 0

    def step() -> None:
        nonlocal right
        made.step()
        gateway.hear()
        kept = list(made.scheduler.connector.kept)
        if kept and rng.random() < 0.2:
            made.scheduler.connector.read.add(rng.choice(kept))
        up = gateway.reader.number == made.scheduler.rubato.reporting.gateways._number
        if up and not gateway.wire.wants_snapshot:
            right += 1
            theirs, ours = made.scheduler.view(), gateway.mirror.view(made.now)
            driver = made.scheduler.rubato
            known = {id.rpartition("-0-")[0] for id in (*driver.requests.seqs, *driver.requests.leaving)}
            if {s.id for s in ours.moving} <= known:  # but for some whose end was lost, which their streams tell
                assert ours.kv_free in (theirs.kv_free, 0)  # (here also of what waits for memory)
            names = {s.id: s.id.rpartition("-0-")[0] for s in (*theirs.running, *theirs.waiting, *theirs.moving)}
            for group in ("waiting", "running"):
                there = {names[s.id] for s in getattr(theirs, group)}
                told_of = {s.id for s in getattr(ours, group)}
                if group == "running":  # in flight
                    told_of |= {s.id for s in ours.moving}
                    there |= {names[s.id] for s in theirs.moving}
                assert there - {i for i, _ in prefilled(made, gateway)} <= told_of

    for i in range(50):
        prompt = [rng.randrange(5) for _ in range(rng.randint(5, 60))]
        params = rng.choice(kinds)()
        more = {"handoff": PREFILLED} if params is COMES else {}
        promise(gateway, f"cmpl-{i}", len(prompt), SLO(rng.uniform(0.1, 2.0), 0.1), **more)
        add(made, f"cmpl-{i}-0-0a1b2c3d", prompt, 1 if params is ASKED else rng.randint(1, 12), params)
        for _ in range(rng.randint(0, 6)):
            step()
        if rng.random() < 0.1 and (ids := list(made.scheduler.requests)):
            made.abort(rng.choice(ids))
    gateway.wire._share = 0.0
    for _ in range(3000):
        if not (made.scheduler.has_requests() or made.running):
            break
        step()
        made.scheduler.connector.read |= made.scheduler.connector.kept
    assert right > 30
    made.finish()
    clean(made, "kv")
