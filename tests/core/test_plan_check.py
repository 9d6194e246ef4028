"""Impossible plans and dispatches, one a row: what the error must say."""

from collections.abc import Sequence
from dataclasses import replace

import pytest

from rubato.core.interfaces import Dispatch, View
from rubato.core.plan import Limits, Plan, Role, Shape, Work
from rubato.core.request import Handoff
from rubato.replica.plan_check import PlanError, check, check_dispatch
from tests.kit import Seq, request, shown, view

LIMITS = Limits(max_num_seqs=2, max_num_batched_tokens=20, max_model_len=100, kv_blocks=4, block_size=8)


def example() -> object:
    waiting = [Seq(request("w", 40), length=40), Seq(request("d", refuse=True), demoted=True, length=5)]
    running = [Seq(request("r", ttft=1.0), length=10, cached=9, blocks=2), Seq(request("s", ttft=1.0), 17, 16, 2)]
    return view(waiting, running, kv_free=0, kv_total=4, limits=LIMITS)


CASES = [
    (Plan((Work("x", 1),)), "names 'x', which is neither waiting nor running"),
    (Plan((Work("r", 1), Work("r", 1))), "names 'r' twice"),
    (Plan((Work("r", 2),)), "gives 'r' 2 tokens, and it has 1 pending"),
    (Plan((Work("r", 0),)), "gives 'r' 0 tokens"),
    (Plan((Work("s", 1),)), "1 new KV blocks needed, 0 of 4 free"),
    (Plan((Work("r", 1), Work("s", 1), Work("d", 1))), "3 sequences in a batch, the engine takes 2"),
    (Plan((Work("w", 21),)), "21 tokens in a batch, the engine takes 20"),
    (Plan(decode_all=True), "1 new KV blocks needed, 0 of 4 free"),
    (Plan((Work("w", 19),), decode_all=True), "21 tokens in a batch, the engine takes 20"),
    (Plan((Work("d", 1),), decode_all=True), "3 sequences in a batch, the engine takes 2"),
    (Plan((Work("d", 6),), decode_all=True), "gives 'd' 6 tokens, and it has 5 pending"),
    (Plan((Work("r", 1),), decode_all=True), "names 'r' beside decode_all, which it is among"),
    (Plan((Work("r", 1),), preempt=("r",)), "which the same plan preempts"),
    (Plan(preempt=("w",)), "preempt names 'w', which holds no KV"),
    (Plan(drop={"r": "why"}), "drop names 'r', whose client asked for best effort"),
    (Plan(drop={"r": "rejected-saturated"}), "before it has begun"),
    (Plan(demote=("d",)), "demote names 'd', which is best effort already"),
    (Plan(promote=("r",)), "promote names 'r', which was not demoted"),
    (Plan(), "nothing planned though 4 requests are here"),
    (Plan(wake_at=0.0), "it would spin"),
    (Plan(wake_at=float("nan")), "or never wake"),
    (Plan(wake_at=float("inf")), "or never wake"),
]


@pytest.mark.parametrize(
    ("plan", "says"),
    [
        (None, "plan returned NoneType: return a Plan"),
        ((), "plan returned tuple"),
        (Plan((Work("r", 0.5),)), "work gives 'r' 0.5 tokens: give a whole number"),  # type: ignore[arg-type]
        (Plan((Work("r", float("nan")),)), "work gives 'r' nan tokens"),  # type: ignore[arg-type]
        (Plan(preempt=iter(["r"])), "preempt is list_iterator: give a tuple"),  # type: ignore[arg-type]
        (Plan(demote=(id for id in "s")), "demote is generator: give a tuple"),  # type: ignore[arg-type]
        (Plan(promote="s"), "promote is str: give a tuple"),  # type: ignore[arg-type]
        (Plan(drop={"d": 5}), "give a mapping with a text for each request id"),  # type: ignore[dict-item]
        (Plan(drop=["d"]), "give a mapping with a text for each request id"),  # type: ignore[arg-type]
    ],
)
def test_no_plan(plan: object, says: str) -> None:
    """What goes through here is carried out, where it would be an exception of the engine or stand still."""
    with pytest.raises(PlanError, match=f"policy 'mine', replica 'r0', t=0.000000: .*{says}"):
        check(plan, example(), "mine")  # type: ignore[arg-type]


@pytest.mark.parametrize(("plan", "says"), CASES)
def test_impossible(plan: Plan, says: str) -> None:
    with pytest.raises(PlanError, match=f"policy 'mine', replica 'r0', t=0.000000: .*{says}"):
        check(plan, example(), "mine")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "plan",
    [
        Plan((Work("r", 1),)),
        Plan((Work("s", 1),), preempt=("r",)),  # the plan's own preemption frees the block
        Plan((Work("w", 16),), preempt=("r",)),
        Plan(drop={"d": "rejected-slo-infeasible"}),
        Plan(wake_at=1.0),
    ],
)
def test_possible(plan: Plan) -> None:
    check(plan, example(), "mine")  # type: ignore[arg-type]


def test_decode_all_takes_the_last_free_block_and_the_engines_limits() -> None:
    here = replace(example(), kv_free=1)  # type: ignore[type-var]
    check(Plan(decode_all=True), here, "mine")
    limits = replace(LIMITS, max_num_seqs=3, max_num_batched_tokens=7)
    check(Plan((Work("d", 5),), decode_all=True), replace(here, kv_free=2, limits=limits), "mine")


def test_an_engine_with_few_slots_holds_no_more_sequences() -> None:
    here = example()
    here = replace(here, limits=replace(here.limits, max_running=len(here.running)))
    with pytest.raises(PlanError, match=f"1 started beside {len(here.running)} that run on, the engine holds"):
        check(Plan((Work("w", 1),)), here, "mine")
    check(Plan((Work("w", 16),), preempt=("r",)), here, "mine")


def test_decode_all_counts_neither_preempted_decodes_nor_prefills() -> None:
    here = view([], [Seq(request(id, 9), 10, cached=9) for id in ("a", "b")] + [Seq(request("p", 9), 9)])
    limits = replace(here.limits, max_num_seqs=1)
    check(Plan(decode_all=True, preempt=("a", "p")), replace(here, limits=limits), "mine")
    with pytest.raises(PlanError, match="2 sequences"):
        check(Plan(decode_all=True, preempt=("p",)), replace(here, limits=limits), "mine")


# --------------------------------------------------------------------------- dispatches

KV_AT_R0 = replace(request("moved", 20), handoff=Handoff("r0", "prefilled", 0.1, cached=20))
HELD = shown(request("a", 10, ttft=1.0), KV_AT_R0)
COMING = shown(replace(request("coming", 20), handoff=Handoff("r0", "prefilled", 0.1, cached=20)))
FLEET = [
    replace(view(), id="r0", supports=frozenset({"recall"})),
    replace(view([Seq(request("w"))]), id="r1", in_flight=Shape(1, 1, 5), moving=COMING),
]


def dispatched(dispatch: Dispatch, placed: int = 2, fleet: Sequence[View] = FLEET) -> None:
    check_dispatch(dispatch, HELD, fleet, 5.0, "mine", placed=placed, replicas=[view.id for view in fleet])


@pytest.mark.parametrize(
    ("dispatch", "says"),
    [
        (Dispatch({"x": "r0"}), "place names 'x', which is not among the 2 held: it ended, or is placed already"),
        (Dispatch(reject={"x": "why"}), "reject names 'x', which is not among the 2 held"),
        (Dispatch(demote=("x",)), "demote names 'x', which is not among the 2 held"),
        (Dispatch({"a": "r7"}), "place puts 'a' on 'r7', which is no replica: there are r0, r1"),
        (Dispatch({"a": "r0"}, {"a": "why"}), "place puts 'a' on 'r0', and reject refuses it: choose one"),
        (Dispatch({"moved": "r0"}), "place puts 'moved' on 'r0', which had handed it off with its KV of 20 tokens"),
        (Dispatch(demote=("moved",)), "demote names 'moved', which is best effort already"),
        (Dispatch(reject={"a": "why"}, demote=("a",)), "demote names 'a', and reject refuses it"),
        (Dispatch(demote=("a", "a")), "demote names a request twice: a, a"),
        (Dispatch(recall={"r7": "waiting"}), "recall names 'r7', which is no replica: there are r0, r1"),
        (Dispatch(recall={"r0": "all"}), "recall asks 'r0' for 'all': give waiting or best_effort"),  # type: ignore[dict-item]
        (Dispatch(recall={"r1": "waiting"}), "recall names 'r1', which hands nothing back"),
        (Dispatch(assign={"r7": Role("decode")}), "assign names 'r7', which is no replica: there are r0, r1"),
        (Dispatch(assign={"r0": "decode"}), "assign is {'r0': 'decode'}: give a mapping with a Role"),  # type: ignore[dict-item]
        (
            Dispatch(assign={"r1": Role("decode")}),
            "assign turns 'r1' from both to decode while the KV of 'coming' is on",
        ),
        (Dispatch({"a": "r0"}, why={"moved": "it is"}), "why explains 'moved', which place does not name"),
        (Dispatch({"a": "r0"}, why={"a": ""}), "why is {'a': ''}: give a text for each"),
        (Dispatch(wake_at=5.0), "wake_at 5.0 is not 1e-06 s or more in the future"),
        (Dispatch(wake_at=float("inf")), "wake_at inf is not 1e-06 s or more in the future: it would spin, or never"),
        (Dispatch(wake_at=float("nan")), "wake_at nan is not 1e-06 s or more in the future"),
    ],
)
def test_impossible_dispatches(dispatch: Dispatch, says: str) -> None:
    with pytest.raises(PlanError, match=f"policy 'mine', router, t=5.000000: {says}"):
        dispatched(dispatch)


@pytest.mark.parametrize(
    "dispatch",
    [
        Dispatch(),
        Dispatch({"a": "r0", "moved": "r1"}, demote=("a",), recall={"r0": "best_effort"}, wake_at=5.1),
        Dispatch(reject={"a": "why", "moved": "why"}),
        Dispatch({"a": "r1"}, assign={"r0": Role("prefill"), "r1": Role(kind="pool")}, why={"a": "it is empty"}),
    ],
)
def test_possible_dispatches(dispatch: Dispatch) -> None:
    dispatched(dispatch)


def test_holding_everything_is_possible_while_something_will_happen() -> None:
    """A request is at a replica, the last step of one that was cancelled runs, or a time is given."""
    idle = [replace(view, in_flight=Shape()) for view in FLEET]
    dispatched(Dispatch(), placed=1, fleet=idle)
    dispatched(Dispatch(), placed=0)
    dispatched(Dispatch(wake_at=6.0), placed=0, fleet=idle)
    for dispatch in (Dispatch(), Dispatch(demote=("a",)), Dispatch(recall={"r0": "waiting"})):
        with pytest.raises(PlanError, match="all of 2 requests are held though the 2 replicas have none"):
            dispatched(dispatch, placed=0, fleet=idle)
