"""What a builder says of its batch while it is made is what the batch is."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from rubato.core.interfaces import View
from rubato.core.plan import Emitted, Limits, Plan, StepResult, Tree, Work
from rubato.policy_kit.batch_builder import BatchBuilder, admit_in_order, run_in_order
from rubato.replica.replica import Replica
from tests.kit import Linear, request

LIMITS = Limits(max_num_seqs=8, max_num_batched_tokens=64, max_model_len=200, kv_blocks=64, block_size=4)
BOTH = frozenset({"draft", "tree"})
FORK = Tree((-1, -1, 0, 0, 1), (0.6, 0.3, 0.4, 0.2, 0.2))


def replica(count: int, limits: Limits = LIMITS) -> Replica:
    """`count` running sequences with 4 tokens in KV, one pending and a tree; and one of 30 that waits."""
    r = Replica("r0", limits, Linear(), supports=BOTH)
    for i in range(count):
        r.submit(request(f"q{i}", 4), 0.0)
    batch, _ = r.apply(Plan(tuple(Work(f"q{i}", 4) for i in range(count))), 0.0, "test")
    r.commit(batch, StepResult({f"q{i}": Emitted(1, "x", (7,), draft=FORK) for i in range(count)}, 0.1), 0.1)
    r.submit(request("new", 30), 0.1)
    return r


draft = st.one_of(st.none(), st.tuples(st.integers(1, 5), st.integers(1, 3)))
verify = st.sampled_from([(), (0,), (0, 2), (1, 0, 4), (0, 1, 2, 3, 4)])


@given(st.lists(st.tuples(verify, draft, st.booleans(), st.booleans()), min_size=1, max_size=5), st.integers(0, 30))
def test_shape_work_and_kv_are_those_of_the_batch(
    given: list[tuple[tuple[int, ...], tuple[int, int] | None, bool, bool]], chunk: int
) -> None:
    """Whatever is added and removed, whenever the shape is asked for."""
    r = replica(len(given))
    view = r.view(0.1)
    builder = BatchBuilder(view)
    for seq, (nodes, tree, asked, removed) in zip(view.running, given, strict=True):
        builder.add(seq, 1, nodes, tree)
        if asked:
            assert builder.shape.seqs == len(builder.work)
        if removed:
            builder.remove(seq)
    if chunk:
        builder.add(view.waiting[0], chunk, draft=(2, 2) if chunk == 30 else None)
    plan = builder.plan(wake_at=1.0)
    assert plan.work == tuple(builder.work.values())
    batch, _ = r.apply(plan, 0.1, "test")
    assert builder.shape == batch.shape
    assert (builder.kv_left, builder.tokens_left) == (r.kv.free, LIMITS.max_num_batched_tokens - batch.shape.tokens)
    assert builder.seqs_left == LIMITS.max_num_seqs - batch.shape.seqs


def test_decodes_added_in_one_go_may_draft() -> None:
    r = replica(3)
    view = r.view(0.1)
    builder = BatchBuilder(view)
    assert builder.add_decodes(view.running, {"q1": (3, 2)})
    assert list(builder.work.values()) == [Work("q0", 1), Work("q1", 1, (), (3, 2)), Work("q2", 1)]
    batch, _ = r.apply(builder.plan(), 0.1, "test")
    assert builder.shape == batch.shape
    assert (builder.shape.spec_steps, builder.shape.draft_tokens) == (3, 4)


def test_in_order_as_many_nodes_are_verified_as_the_budget_holds() -> None:
    """9 tokens: 1 + 5 of the first, 1 + 2 of the second, none of the third nor of who waits."""
    view = replica(3).view(0.1)
    builder = BatchBuilder(view, 9)
    run_in_order(builder, view.running, lambda seq: range(5), (2, 1))
    admit_in_order(builder, view.waiting, (2, 1))
    assert builder.plan().work == (Work("q0", 1, (0, 1, 2, 3, 4), (2, 1)), Work("q1", 1, (0, 1), (2, 1)))
    waiting_only = View("r0", 0.1, view.waiting, [], view.kv_free, view.kv_total, view.limits, view.latency)
    whole = BatchBuilder(waiting_only, 64)
    admit_in_order(whole, view.waiting, (2, 1))
    assert whole.plan().work == (Work("new", 30, (), (2, 1)),)
    part = BatchBuilder(waiting_only, 20)
    admit_in_order(part, view.waiting, (2, 1))
    assert part.plan().work == (Work("new", 20),)
