"""AdaServe's plans and SmartSpec's: which drafted nodes a step verifies, and what it drafts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import pytest

from rubato.core.events import Event
from rubato.core.interfaces import View
from rubato.core.plan import Limits, Plan, Shape, Tree
from rubato.policies import PolicyError
from rubato.policy_kit.draft_value import count_paying_nodes, find_fastest_nodes
from rubato.policy_kit.paced_admission import PacedScheduler
from rubato.policy_kit.paces import tokens_needed
from tests.kit import Linear, Seq, view
from tests.kit.plans import LIMITS, decode, load, prompt

FIG5 = (  # AdaServe, Fig. 5: two trees of depth 3 and width 2
    Tree((-1, -1, 0, 0, 2, 2), (0.7, 0.2, 0.6, 0.1, 0.5, 0.05)),
    Tree((-1, -1, 0, 1, 2, 3), (0.5, 0.4, 0.3, 0.25, 0.2, 0.1)),
)
CHAIN = Tree((-1, 0, 1, 2), (0.9, 0.8, 0.3, 0.1))


@dataclass
class Drafting(Linear):
    """`Linear`, and some seconds a draft step."""

    per_draft: float = 0.0

    def step_time(self, shape: Shape) -> float:
        return super().step_time(shape) + self.per_draft * shape.spec_steps

    def knee(self, base: Shape) -> int:
        return 16


def drafted(id: str, tree: Tree | None, length: int = 21, **slo: float) -> Seq:
    seq = decode(id, length, **slo)
    seq.draft = tree
    seq.first_token_at = 0.0
    return seq


def seen(
    running: list[Seq], waiting: tuple[Seq, ...] = (), *, latency: Linear | None = None, kv_free: int = 40,
    now: float = 0.0, limits: Limits = LIMITS,
) -> View:  # fmt: skip
    shown = view(waiting, running, kv_free=kv_free, kv_total=40, limits=limits, latency=latency or Drafting(), now=now)
    return replace(shown, supports=frozenset({"draft", "tree"}))


def verified(plan: Plan) -> dict[str, tuple[int, ...]]:
    return {work.seq: work.verify for work in plan.work if work.verify}


def drafts(plan: Plan) -> set[tuple[int, int] | None]:
    return {work.draft for work in plan.work}


def test_each_takes_what_its_tpot_needs_and_the_most_probable_get_the_rest() -> None:
    """The step takes 18 ms; `tight`, whose first token was due at 0, needs 1 + (0.002 + 0.018) / 0.02 = 2 tokens, which
    1 + 0.5 + 0.4 + 0.3 are, and `loose` none. The two nodes that are left over are the most probable: 0.7 and 0.6."""
    policy = {"verify_tokens": 7}
    tight, loose = drafted("t", FIG5[1], tpot=0.02), drafted("l", FIG5[0])
    plan = load("adaserve", policy).plan(seen([loose, tight], now=0.002, latency=Drafting(0.011)))
    assert verified(plan) == {"t": (0, 1, 2), "l": (0, 2)}
    plan = load("adaserve", policy).plan(seen([loose, drafted("t", FIG5[1])], now=0.002, latency=Drafting(0.011)))
    assert verified(plan) == {"l": (0, 2, 4), "t": (0, 1)}  # no request needs any: 0.7, 0.6, 0.5 and 0.5, 0.4


def test_who_lacks_the_fewest_nodes_comes_first() -> None:
    """A step has three nodes and ends 61 ms after the first tokens. `two` needs 1.9 tokens and takes two nodes; `three`
    needs 2.1, its three do not fit, and the last node is the most probable."""
    three, two = drafted("a", FIG5[1], tpot=0.0555), drafted("b", FIG5[0], tpot=0.0678)
    at = seen([three, two], now=0.05, latency=Linear(0.011, 0.0))
    assert verified(load("adaserve", {"verify_tokens": 5}).plan(at)) == {"b": (0, 2), "a": (0,)}


@pytest.mark.parametrize("settings", [{}, {"verify_tokens": 5}])
def test_who_needs_more_than_its_tree_brings_takes_no_node_before_others(settings: dict[str, int]) -> None:
    """A step takes three nodes. `late` needs 2.3 tokens, which its tree brings; `lost` needs 27, and by the paper is
    the first to be served. Ours gives up its root, too: `late` has a node more."""
    lost, late = drafted("a", FIG5[0], tpot=0.001), drafted("b", FIG5[1], tpot=0.02)
    now = seen([lost, late], now=0.016, latency=Linear(0.01, 0.0), limits=replace(LIMITS, max_num_batched_tokens=5))
    nodes = verified(load("adaserve", settings).plan(now))
    assert nodes == ({"b": (0, 1, 2, 3)} if not settings else {"b": (0, 1, 2)})


@pytest.mark.parametrize(
    ("per_token", "nodes"),
    [
        (0.0, (0, 1, 2, 3)),  # below the knee a node costs nothing
        (0.003, (0, 1)),  # 10 ms and 3 a token: 13.0, 8.4, 7.0, 7.3, 8.1 ms a token
        (0.1, ()),  # 110.0, 110.5... ms: a node costs what a decode does
    ],
)
def test_as_many_nodes_as_bring_the_most_tokens_per_second(per_token: float, nodes: tuple[int, ...]) -> None:
    plan = load("adaserve").plan(seen([drafted("r", CHAIN)], latency=Drafting(0.01, per_token)))
    assert verified(plan).get("r", ()) == nodes


def test_a_long_prompt_beside_makes_no_node_worth_more() -> None:
    """Over the time of the whole step even a node of 0.1 would seem to pay."""
    costly = Drafting(0.01, 0.003)
    plan = load("adaserve").plan(seen([drafted("r", CHAIN)], (prompt("p", 80),), latency=costly))
    assert verified(plan) == {"r": (0, 1)}
    assert {w.seq: w.tokens for w in plan.work} == {"r": 1, "p": 80}
    alone = find_fastest_nodes(costly, Shape(), 1, 20, CHAIN.paths)
    beside = Shape().plus(80, 0)
    assert count_paying_nodes(costly, beside, 1, 20, CHAIN.paths, alone.token) == alone.nodes
    assert find_fastest_nodes(costly, beside, 1, 20, CHAIN.paths).nodes == 4


def test_with_more_requests_than_budget_each_keeps_its_root_and_nothing_is_drafted() -> None:
    running = [drafted(f"r{i}", CHAIN, tpot=0.001) for i in range(4)]
    plan = load("adaserve", {"verify_tokens": 4}).plan(seen(running))
    assert (verified(plan), drafts(plan)) == ({}, {None})


def test_trees_become_shallower_and_narrower_with_more_requests() -> None:
    policy = {"verify_tokens": 36, "draft_tokens": 12, "min_depth": 2, "max_depth": 8}
    for count, expected in [(1, (8, 3)), (4, (8, 3)), (6, (5, 2)), (8, (3, 1))]:
        plan = load("adaserve", policy).plan(seen([drafted(f"r{i}", None) for i in range(count)]))
        assert drafts(plan) == {expected}, count


def test_trees_are_as_deep_as_pays() -> None:
    """10 ms and 1 a token: at an acceptance of 0.7 and 1 ms a draft step 7.6, 6.8, 6.7, 6.9 ms a token with 1 to 4
    steps, at 10 ms a step more than 11, without drafts 11; when trees offer hardly any, more even at 1 ms. One unlucky
    tree does not say so: without trees nothing more would be learned."""
    policy = load("adaserve")
    one = drafted("r", None)
    assert drafts(policy.plan(seen([one], latency=Drafting(per_draft=0.001)))) == {(3, 3)}
    assert drafts(policy.plan(seen([one], latency=Drafting(per_draft=0.01)))) == {None}
    assert drafts(load("adaserve", {"verify_tokens": 9}).plan(seen([one], latency=Drafting(per_draft=0.01)))) == {
        (8, 3)
    }
    one.draft = Tree((-1, 0), (0.01, 0.001))
    assert drafts(policy.plan(seen([one], latency=Drafting(per_draft=0.001)))) == {(3, 3)}
    for _ in range(200):
        plan = policy.plan(seen([one], latency=Drafting(per_draft=0.001)))
    assert drafts(plan) == {None}
    assert drafts(policy.plan(seen([one]))) == {(8, 3)}  # a drafter that costs nothing may always try


def test_nodes_take_only_free_kv() -> None:
    """A block holds 10 tokens: `r` has 19 of 20 in its two, so its next token needs none and its nodes do; `s` has 8
    of 10, so there is room for one more. With one block free it goes to the request that started first."""
    free = Linear(0.01, 0.0)
    for blocks, nodes in [(0, {"s": (0,)}), (1, {"r": (0, 1, 2, 3), "s": (0,)}), (9, {"r": (0, 1, 2, 3)})]:
        running = [drafted("r", CHAIN, 20), drafted("s", CHAIN, 9)]
        plan = load("adaserve").plan(seen(running, latency=free, kv_free=blocks))
        assert verified(plan).items() >= nodes.items(), blocks
        assert plan.preempt == ()


def test_a_prompt_that_cannot_start_takes_no_kv_from_nodes() -> None:
    """Six blocks are free: a prompt of 90 tokens waits for more, one of 50 leaves one."""
    for tokens, work in [(90, {"r": 5}), (50, {"r": 5, "p": 50}), (60, {"r": 1, "p": 60})]:
        running, waiting = [drafted("r", CHAIN, 20, tpot=1.0)], (prompt("p", tokens, ttft=1.0),)
        plan = load("adaserve").plan(seen(running, waiting, latency=Linear(0.01, 0.0), kv_free=6))
        assert {w.seq: w.tokens + len(w.verify) for w in plan.work} == work


def test_prompts_run_in_chunks_beside_decodes() -> None:
    begun = Seq(decode("b").request, 60, 20, 2)
    plan = load("adaserve", {"prefill_chunk": 45}).plan(seen([begun, drafted("r", None)], (prompt("p", 30),)))
    assert [(w.seq, w.tokens, w.draft is not None) for w in plan.work] == [
        ("r", 1, True), ("b", 40, True), ("p", 5, False),
    ]  # fmt: skip


def test_what_a_request_needs() -> None:
    seq = drafted("r", None, tpot=0.02)
    seq.first_token_at, seq.output = 1.0, 11  # ten after the first, by 1.25: 12.5 are due
    assert tokens_needed(seq, 1.25, 1.2) == pytest.approx(2.5)
    assert tokens_needed(drafted("r", None), 9.0, 8.0) == 0.0
    seq.demoted = True
    assert tokens_needed(seq, 1.25, 1.2) == 0.0
    whole = decode("e", e2e=2.0)  # 15 of 16 tokens to come, 0.5 s left, of which the step takes 0.1
    whole.predicted = 15.0
    assert tokens_needed(whole, 1.6, 1.5) == pytest.approx(3.0)
    assert tokens_needed(whole, 2.6, 2.5) == float("inf")


@pytest.mark.parametrize(
    ("per_token", "per_draft", "length"), [(0.0, 0.0, 3), (0.003, 0.0, 2), (0.003, 0.006, 0), (0.1, 0.0, 0)]
)
def test_smart_spec_verifies_and_drafts_as_many_for_all_as_bring_the_most(
    per_token: float, per_draft: float, length: int
) -> None:
    """At 0.7 a token, 10 ms a step and 3 a token run: 8.0, 6.5, 6.4, 6.7 ms a token; 6 ms a draft step: 8.2, 9.1."""
    running = [drafted("a", CHAIN), drafted("b", CHAIN)]
    latency = Drafting(0.01, per_token, 0.0, per_draft)
    plan = load("smart_spec", {"most": 3}).plan(seen(running, latency=latency))
    assert {len(w.verify) for w in plan.work} == {length}
    assert drafts(plan) == {(length, 1) if length else None}


def test_v0s_chains_run_whole_prompts_first_and_alone() -> None:
    running, chains = [drafted("a", CHAIN), drafted("b", None)], load("experiments._v0_chains", {"n": 3})
    plan = chains.plan(seen(running, (prompt("p", 50), prompt("q", 20))))
    assert [(w.seq, w.tokens, w.draft) for w in plan.work] == [("p", 50, (3, 1)), ("q", 20, (3, 1))]
    plan = chains.plan(seen(running))
    assert [(w.seq, w.verify, w.draft) for w in plan.work] == [("a", (0, 1, 2, 3), (3, 1)), ("b", (), (3, 1))]


@pytest.mark.parametrize(
    ("name", "settings", "says"),
    [
        ("adaserve", {"verify_tokens": -1}, "verify_tokens -1: give 1 or more of each, verify_tokens 0"),
        ("adaserve", {"prefill_chunk": 0}, "prefill_chunk 0"),
        ("adaserve", {"min_depth": 5, "max_depth": 4}, "depths from 5 to 4: give the smaller one first"),
        ("smart_spec", {"most": 0}, "most 0: give at least 1 token per step, and 1 to draft"),
    ],
)
def test_settings_that_cannot_be_are_named(name: str, settings: dict[str, object], says: str) -> None:
    with pytest.raises(PolicyError, match=says):
        load(name, settings)


def test_where_chains_alone_are_verified_trees_have_one_leaf() -> None:
    shown = seen([decode("a", 20)])
    for supports, width in ((frozenset({"draft", "tree"}), 3), (frozenset({"draft"}), 1)):
        plan = load("adaserve", {"verify_tokens": 512}).plan(replace(shown, supports=supports))
        assert [w.draft[1] for w in plan.work if w.draft is not None] == [width]


def begun(id: str, **slo: float) -> Seq:
    """A decode whose first token came at 0."""
    seq = drafted(id, None, **slo)
    seq.output = 1
    return seq


def served(plan: Plan) -> set[str]:
    return {work.seq for work in plan.work}


def test_prompts_begin_only_where_all_can_go_on_together() -> None:
    """A step takes 10 ms and 2 a token: with six decodes of 27 ms each 22 ms, which is as much as they may take if a
    fifth more has to fit. A seventh would be too much, a prompt with a loose TPOT too; beside two both may begin. One
    whose TTFT has passed is best effort, or refused if it asked for that."""
    costly = Drafting(0.01, 0.002, per_draft=1.0)
    running = [begun(f"r{i}", tpot=0.027) for i in range(6)]
    tight, loose = prompt("t", 20, ttft=1.0, tpot=0.027), prompt("l", 20, ttft=1.5, tpot=0.3)
    policy = load("adaserve")
    assert served(policy.plan(seen(running, (tight,), latency=costly))) == {s.id for s in running}
    assert served(policy.plan(seen(running[:5], (tight, loose), latency=costly))) == {*(s.id for s in running[:5]), "t"}
    assert served(policy.plan(seen(running[:2], (tight, loose), latency=costly))) >= {"t", "l"}
    assert policy.plan(seen(running, (tight,), latency=costly, now=1.1)).demote == ("t",)
    refused = prompt("x", 20, ttft=1.0, refuse=True)
    assert load("adaserve").plan(seen(running, (refused,), now=1.1)).drop == {"x": "rejected-slo-late"}


def test_who_would_have_to_run_fastest_gives_up_its_root() -> None:
    """Three decodes take 16 ms together and two 14: `a` and `b` may take 15 a token, and `a` is behind. Where a step
    takes 5 ms all go on."""
    behind, even, loose = begun("a", tpot=0.015), begun("b", tpot=0.015), begun("c", tpot=1.0)
    behind.first_token_at = -0.01
    shown = [behind, even, loose]
    assert served(load("adaserve").plan(seen(shown, latency=Drafting(0.01, 0.002, per_draft=1.0)))) == {"b", "c"}
    assert served(load("adaserve").plan(seen(shown, latency=Drafting(0.005, 0.0)))) == {"a", "b", "c"}


def test_best_effort_gets_the_time_that_is_left_and_turns() -> None:
    """The next token of a strict decode is due in 12 ms: one of best effort fits beside it if a step takes 9 ms and 1 a
    token, none if it takes 10.5 and 1. Then one step in 16 is the turn of the oldest."""
    policy = load("adaserve")
    shown = [begun("s", tpot=0.012), begun("o"), begun("p")]
    assert served(policy.plan(seen(shown, latency=Drafting(0.009, 0.001)))) == {"s", "o", "p"}
    slow = seen(shown, latency=Drafting(0.0105, 0.001, per_draft=1.0))
    assert [own for own in (served(policy.plan(slow)) for _ in range(32)) if own != {"s"}] == [{"s", "o"}] * 2


class Demoting:
    """It says itself who is best effort."""

    needs = frozenset[str]()

    def observe(self, events: Sequence[Event]) -> None:
        pass

    def plan(self, view: View) -> Plan:
        return Plan(demote=("b",))


@pytest.mark.parametrize("name", ["vllm", "vllm_spec", "smart_spec"])
def test_any_policy_that_plans_work_runs_behind_the_same_admission(name: str) -> None:
    """As above, `a` gives up its place; a prompt whose TTFT has passed is best effort."""
    behind, even, loose = begun("a", tpot=0.015), begun("b", tpot=0.015), begun("c", tpot=1.0)
    behind.first_token_at = -0.01
    paced, slow = PacedScheduler(load(name), 256), Drafting(0.01, 0.002, per_draft=1.0)
    assert served(paced.plan(seen([behind, even, loose], latency=slow))) == {"b", "c"}
    assert paced.plan(seen([loose], (prompt("x", 20, ttft=1.0),), now=1.1)).demote == ("x",)


@pytest.mark.parametrize("name", ["vllm", "vllm_spec", "smart_spec"])
def test_what_the_admission_lets_wait_still_holds_its_place_in_the_engine(name: str) -> None:
    """The engine holds two, one of which gives up its place in the step: no third begins."""
    behind, even = begun("a", tpot=0.015), begun("b", tpot=1.0)
    behind.first_token_at = -0.01
    shown = seen([behind, even], (prompt("x", 20, ttft=1.0),), latency=Drafting(0.01, 0.002, per_draft=1.0))
    for most, begins in ((2, False), (3, True)):
        plan = PacedScheduler(load(name), 256).plan(replace(shown, limits=replace(shown.limits, max_running=most)))
        assert ("x" in served(plan)) == begins


def test_a_policy_that_says_itself_who_runs_has_no_place_behind_the_admission() -> None:
    with pytest.raises(ValueError, match="test_adaserve decides itself who runs: give a policy that only plans work"):
        PacedScheduler(Demoting(), 256).plan(seen([begun("b")]))
