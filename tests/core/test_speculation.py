"""Drafted tokens: what a plan may verify, what comes of it, and a random process that no policy can shift."""

from __future__ import annotations

import random
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import inf, sqrt

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rubato.core.events import Event, Finished, Stepped, Tokens
from rubato.core.interfaces import LatencyModel, View
from rubato.core.plan import Emitted, Limits, Plan, Sample, Shape, StepResult, Tree, Work
from rubato.core.request import SLO, Request, Sampling, Stage
from rubato.engines.simulated import Drafter
from rubato.engines.simulated.acceptance import Acceptance
from rubato.latency import affine
from rubato.latency.with_drafter import WithDrafter, WithLearntDrafter, without_drafts
from rubato.policy_kit.batch_builder import BatchBuilder
from rubato.replica.plan_check import PlanError
from rubato.replica.replica import Replica
from rubato.simulation.simulate import simulate, simulate_events
from rubato.workloads.generate import make
from rubato.workloads.request_kinds import Kind
from tests.kit import Linear, changed, integrity, request, run_spec

LIMITS = Limits(max_num_seqs=4, max_num_batched_tokens=64, max_model_len=200, kv_blocks=8, block_size=4)
BOTH = frozenset({"draft", "tree"})
FORK = Tree((-1, -1, 0, 0, 1), (0.6, 0.3, 0.4, 0.2, 0.2))


def expected(alpha: float, verified: int) -> float:
    """Acc(sl) = (1 - alpha^sl)/(1 - alpha), sl tokens verified: one pending, the others drafted."""
    return (1.0 - alpha**verified) / (1.0 - alpha)


# --------------------------------------------------------------------------- the books of one replica


def drafted(supports: frozenset[str] = BOTH, tree: Tree = FORK) -> Replica:
    """A replica whose sequence `a` has 6 tokens in KV, one pending, and `tree`."""
    r = Replica("r0", LIMITS, Linear(), supports=supports)
    r.submit(request("a", 6), 0.0)
    batch, _ = r.apply(Plan((Work("a", 6),)), 0.0, "test")
    r.commit(batch, StepResult({"a": Emitted(1, "x", (7,), draft=tree)}, 0.1), 0.1)
    return r


def test_verified_nodes_take_kv_and_the_rejected_give_it_back() -> None:
    r = drafted()
    (seq,) = r.view(0.1).running
    assert (seq.draft, seq.acceptance, seq.cached, r.kv.free) == (FORK, None, 6, 6)
    batch, _ = r.apply(Plan((Work("a", 1, (0, 1, 2, 3, 4), (2, 1)),)), 0.1, "test")
    (entry,) = batch.entries
    assert (entry.start, entry.count, entry.verify, entry.draft, len(entry.blocks)) == (
        6,
        6,
        (0, 1, 2, 3, 4),
        (2, 1),
        3,
    )
    shape = batch.shape
    assert (shape.tokens, shape.kv, shape.spec_steps, shape.draft_tokens, r.kv.free) == (6, 12, 2, 1, 5)
    (out,) = r.commit(batch, StepResult({"a": Emitted(2, "yz", (8, 9), tried=2, accepted=(1,))}, 0.1), 0.2)
    assert out == Tokens(0.2, "a", 2, "yz", (8, 9), tried=2, accepted=(1,))
    assert (seq.length, seq.cached, seq.pending, seq.draft, r.kv.free) == (9, 8, 1, None, 6)
    assert (seq.tried, seq.acceptance, seq.output) == (2, 0.5, 3)
    integrity.check(r)


@pytest.mark.parametrize(
    ("out", "says"),
    [
        (Emitted(2), "emitted 2 tokens of 'a' with 0 nodes accepted"),
        (Emitted(1, accepted=(0,)), "emitted 1 tokens of 'a' with 1 nodes accepted"),
        (Emitted(2, accepted=(1,)), r"accepted nodes \(1,\) of 'a', of which \(0, 2\) were verified"),
        (Emitted(2, accepted=(2,)), "a path of these from the root on"),
        (Emitted(3, accepted=(2, 0)), "a path of these from the root on"),
        (Emitted(4, accepted=(0, 2, 4)), "a path of these from the root on"),
    ],
)
def test_what_verification_cannot_have_brought(out: Emitted, says: str) -> None:
    r = drafted()
    batch, _ = r.apply(Plan((Work("a", 1, (0, 2)),)), 0.1, "test")
    with pytest.raises(RuntimeError, match=says):
        r.commit(batch, StepResult({"a": out}, 0.1), 0.2)


def test_a_tree_is_for_the_next_step_or_never() -> None:
    r = drafted()
    batch, _ = r.apply(Plan((Work("a", 1),)), 0.1, "test")
    r.commit(batch, StepResult({"a": Emitted(1)}, 0.1), 0.2)
    assert r.running["a"].draft is None
    r = drafted()
    r.apply(Plan(preempt=("a",)), 0.1, "test")
    assert r.waiting[0].draft is None


@pytest.mark.parametrize(
    ("work", "supports", "says"),
    [
        (Work("a", 1, (5,)), BOTH, r"verifies nodes \(5,\) of 'a', whose tree has 5"),
        (Work("a", 1, (0, 0)), BOTH, "name each once"),
        (Work("a", 1, (2,)), BOTH, "without their parents"),
        (Work("a", 1, (0, 1)), frozenset({"draft"}), "has a tree that branches"),
        (Work("a", 1, (), (2, 2)), frozenset({"draft"}), "has a tree that branches"),
        (Work("a", 1, (0,)), frozenset[str](), "drafts or verifies, which this engine cannot"),
        (Work("a", 1, (), (0, 1)), BOTH, "give a depth and a width of 1 or more"),
        (Work("b", 2, (), (1, 1)), BOTH, "beside 2 of 4 pending tokens"),
    ],
)
def test_impossible(work: Work, supports: frozenset[str], says: str) -> None:
    r = drafted(supports)
    r.submit(request("b", 4), 0.1)
    with pytest.raises(PlanError, match=says):
        r.apply(Plan((work,)), 0.1, "test")


def test_verified_nodes_count_against_every_limit() -> None:
    chain = Tree(tuple(range(-1, 62)), (0.5,) * 63)
    r = drafted(tree=chain)
    with pytest.raises(PlanError, match="65 tokens in a batch, the engine takes 64"):
        drafted(tree=Tree(tuple(range(-1, 63)), (0.5,) * 64)).apply(Plan((Work("a", 1, tuple(range(64))),)), 0.1, "t")
    with pytest.raises(PlanError, match="7 new KV blocks needed, 6 of 8 free"):
        r.apply(Plan((Work("a", 1, tuple(range(29))),)), 0.1, "test")


# --------------------------------------------------------------------------- the process


@pytest.mark.parametrize("certainty", [inf, 3.0])
@pytest.mark.parametrize("alpha", [0.0, 0.5, 0.8, 1.0])
def test_a_chain_accepts_what_the_paper_says(alpha: float, certainty: float) -> None:
    """Mean tokens a verification within four standard errors, over 4000 of them."""
    process = Acceptance(alpha, certainty=certainty, seed=1).of(request())
    at, counts = 0, []
    for _ in range(4000):
        draft = process.draft(at, 4, 1)
        accepted, tried = process.accept(at, draft, range(len(draft.tree.parents)))
        assert accepted == tuple(range(len(accepted)))
        assert len(accepted) <= tried <= min(4, len(accepted) + 1)
        counts.append(len(accepted) + 1)
        at += len(accepted) + 1
    mean = sum(counts) / len(counts)
    spread = sqrt(sum((c - mean) ** 2 for c in counts) / len(counts))
    want = 5.0 if alpha == 1.0 else expected(alpha, 5)
    assert mean == pytest.approx(want, abs=4 * spread / sqrt(len(counts)) + 1e-9)


@pytest.mark.parametrize("certainty", [inf, 3.0])
def test_path_probabilities_are_what_happens(certainty: float) -> None:
    """Σ f over all nodes is the mean number accepted: each node is right as often as its path says."""
    process = Acceptance(0.6, certainty=certainty, seed=2).of(request())
    promised = got = 0.0
    n = 3000
    for i in range(n):
        draft = process.draft(3 * i, 3, 3)
        tree = draft.tree
        assert len(tree.parents) == 9
        assert all(-1 <= p < i for i, p in enumerate(tree.parents))
        assert all(p < 0 or tree.paths[p] >= f for p, f in zip(tree.parents, tree.paths, strict=True))
        promised += sum(tree.paths)
        got += len(process.accept(3 * i, draft, range(9))[0])
    assert got / n == pytest.approx(promised / n, abs=4 * 1.1 / sqrt(n))
    assert got / n > expected(0.6, 4) - 1.0  # more than a chain of three


def test_requests_differ_by_app_and_by_chance() -> None:
    drawn = Acceptance(0.7, {"code": 0.9}, spread=0.05, seed=3)
    chat = [drawn.of(Request(f"q{i}", (Stage(1),), 0.0)).alpha for i in range(300)]
    code = [drawn.of(Request(f"q{i}", (Stage(1),), 0.0, app="code")).alpha for i in range(300)]
    for alphas, mean in ((chat, 0.7), (code, 0.9)):
        average = sum(alphas) / 300
        assert average == pytest.approx(mean, abs=0.012)
        assert sqrt(sum((a - average) ** 2 for a in alphas) / 300) == pytest.approx(0.05, rel=0.25)
    with pytest.raises(ValueError, match="give a probability, and a spread that it allows"):
        Acceptance(0.95, spread=0.3)


# --------------------------------------------------------------------------- simulated


@dataclass
class Drafting:
    """Drafts trees of (depth, width) for all, and verifies the first `most` nodes of each, one request at a time."""

    depth: int
    width: int
    most: int
    needs = frozenset({"draft", "tree"})

    def observe(self, events: Sequence[Event]) -> None: ...

    def plan(self, view: View) -> Plan:
        for seq in sorted([*view.running, *view.waiting], key=lambda s: s.id)[:1]:
            room = view.kv_free * view.limits.block_size + seq.blocks * view.limits.block_size - seq.cached
            if room < seq.pending:
                return Plan(preempt=tuple(s.id for s in view.running if s is not seq))
            tokens = min(seq.pending, view.limits.max_num_batched_tokens)
            nodes = len(seq.draft.parents) if seq.draft else 0
            verify = range(min(self.most, nodes, room - tokens, view.limits.max_num_batched_tokens - tokens))
            draft = (self.depth, self.width) if tokens == seq.pending else None
            return Plan((Work(seq.id, tokens, tuple(verify), draft),))
        return Plan()


def run(
    policy: object, requests: Sequence[Request], truth: dict[str, tuple[int, ...]], limits: Limits = LIMITS,
    **given: object,
) -> list[Event]:  # fmt: skip
    spec = changed(run_spec(Linear(), limits, "vllm", drafter=Drafter(Acceptance(0.6, spread=0.1))), **given)

    def watch(cluster: object, event: Event) -> None:
        if isinstance(event, Stepped):
            for host in cluster.hosts.values():  # type: ignore[attr-defined]
                integrity.check(host.replica)

    with pytest.MonkeyPatch.context() as patch:
        if not isinstance(policy, str):
            patch.setattr("rubato.fleet.build.load", lambda name, settings: policy)
        else:
            spec = changed(spec, policy=policy)
        return simulate_events(requests, truth, spec, watch=watch)


@given(
    outputs=st.lists(st.tuples(st.integers(1, 12), st.integers(1, 12)), min_size=1, max_size=4),
    shape=st.tuples(st.integers(1, 5), st.integers(1, 3), st.integers(0, 9)),
    alpha=st.sampled_from([0.0, 0.5, 0.9, 1.0]),
)
def test_never_too_many_tokens(outputs: list[tuple[int, int]], shape: tuple[int, int, int], alpha: float) -> None:
    """Every token of every stage once, whatever is drafted; tokens = accepted + 1; KV conserved (watched)."""
    requests = [
        Request(f"q{i}", (Stage(3, ends="</think>"), Stage(0)), 0.0, sampling=Sampling(max_tokens=first + rest))
        for i, (first, rest) in enumerate(outputs)
    ]
    truth = {f"q{i}": pair for i, pair in enumerate(outputs)}
    events = run(Drafting(*shape), requests, truth, drafter=Drafter(Acceptance(alpha)))
    got: dict[str, Counter[int]] = defaultdict(Counter)
    for event in events:
        if isinstance(event, Tokens):
            got[event.id][event.stage] += event.tokens
            assert event.tokens == len(event.accepted) + 1
            assert event.tokens - 1 <= event.tried <= event.tokens
            assert len(event.token_ids) == event.tokens
    assert {id: (c[0], c[1]) for id, c in got.items()} == truth
    assert {e.output for e in events if isinstance(e, Finished)} == {sum(pair) for pair in outputs}


def right(events: Sequence[Event]) -> dict[str, dict[int, bool]]:
    """Per request, by output position: whether the drafter was right there, where a chain put it to the test."""
    found: dict[str, dict[int, bool]] = defaultdict(dict)
    at: Counter[str] = Counter()
    for event in events:
        if isinstance(event, Tokens):
            for i in range(event.tried):
                found[event.id][at[event.id] + i] = i < event.tokens - 1
            at[event.id] += event.tokens
    return found


def test_no_policy_shifts_what_is_right() -> None:
    """Chains of 2, 4 and 6, on other replicas, in another order: wherever two of them test a position, they agree."""
    requests = [request(f"q{i}", 5, arrival=0.05 * i, most=25) for i in range(6)]
    truth = {r.id: (20,) for r in requests}
    limits = replace(LIMITS, kv_blocks=30)
    runs = [
        right(run("vllm_spec", requests, truth, limits=limits, settings={"n": n}, replicas=replicas))
        for n, replicas in ((2, 1), (4, 2), (6, 1))
    ]
    for one in runs:
        for other in runs:
            for id in truth:
                shared = one[id].keys() & other[id].keys()
                assert len(shared) >= 5
                assert all(one[id][p] == other[id][p] for p in shared)


def test_drafting_takes_the_drafters_time() -> None:
    """One prompt of 5, chain of 3, all right: prefill and first draft, then a verification of 4 with its drafts."""
    drafter = Drafter(Acceptance(1.0), Linear(0.002, 0.0001))
    events = run("vllm_spec", [request("a", 5, most=9)], {}, drafter=drafter, settings={"n": 3})
    steps = [e for e in events if isinstance(e, Stepped)]
    assert [s.shape for s in steps] == [
        Shape(5, 1, 5, 0, 25, 3, 1, 5, 2), Shape(4, 1, 9, 20, 16, 3, 1, 9, 2), Shape(4, 1, 13, 36, 16, 3, 1, 13, 2),
    ]  # fmt: skip
    assert steps[0].seconds == pytest.approx(0.015 + 3 * 0.002 + (6 + 1 + 1) * 0.0001)
    assert steps[1].seconds == pytest.approx(0.014 + 3 * 0.002 + (4 + 1 + 1) * 0.0001)
    free = run("vllm_spec", [request("a", 5, most=9)], {}, drafter=Drafter(Acceptance(1.0)), settings={"n": 3})
    assert [s.seconds for s in free if isinstance(s, Stepped)] == pytest.approx([0.015, 0.014, 0.014])


def test_an_engine_that_does_not_speculate_refuses_the_policy() -> None:
    with pytest.raises(ValueError, match="policy 'vllm_spec' needs draft"):
        simulate_events([request()], {}, run_spec(Linear(), LIMITS, "vllm_spec"))


def test_a_workloads_own_acceptance_is_what_happens() -> None:
    kinds = [
        Kind(app, SLO(5.0, 0.5), (20, 20), (50, 50), acceptance=(alpha, alpha))
        for app, alpha in (("sure", 1.0), ("never", 0.0))
    ]
    load = make("two", kinds, 1.0, count=20, seed=1, texts=False)
    limits = replace(LIMITS, kv_blocks=400)
    spec = run_spec(Linear(), limits, "vllm_spec", settings={"n": 4}, drafter=Drafter(Acceptance(0.5)), learns=False)
    for record in simulate(load, spec).records:
        steps = len(set(record.times))
        assert steps == (50 if record.app == "never" else 11)
    assert spec.for_load(load).drafter != spec.drafter
    with pytest.raises(ValueError, match=r"acceptance 1\.5 of a request"):
        Acceptance(requests={"a": 1.5})


def test_a_scheduler_knows_the_drafters_time() -> None:
    """10 ms and 1 ms a token; a draft step 2 ms and 0.1 ms a token, the first of all that the batch brings."""
    model = WithDrafter(Linear(), Linear(0.002, 0.0001))
    batch = Shape().plus(30, 0).plus(1, 50)
    assert model.step_time(batch) == Linear().step_time(batch)
    assert model.step_time(batch._replace(spec_steps=3)) == pytest.approx(0.041 + 0.0051 + 2 * 0.0022)
    base = Shape(spec_steps=3).plus(1, 50)
    chunk = model.largest_chunk(0.05, base, 0, 100)
    assert model.step_time(base.plus(chunk, 0)) <= 0.05 < model.step_time(base.plus(chunk + 1, 0))
    assert model.largest_chunk(0.05, base._replace(spec_steps=0), 0, 100) == 39
    spec = run_spec(Linear(), LIMITS, "vllm", drafter=Drafter(latency=Linear()), learns=True)
    assert next(spec.scheduler_models()) == WithDrafter(Linear(), Linear())


@dataclass
class TreesForAll:
    """A token of everyone in every step, whole prompts, the first `most` nodes verified, a tree of (depth, width)."""

    depth: int
    width: int
    most: int = 0
    needs = frozenset({"draft", "tree"})

    def observe(self, events: Sequence[Event]) -> None: ...

    def plan(self, view: View) -> Plan:
        builder = BatchBuilder(view)
        for seq in [*view.running, *view.waiting]:
            nodes = len(seq.draft.parents) if seq.draft is not None else 0
            assert builder.tokens_that_fit(seq) == seq.pending
            builder.add(seq, seq.pending, tuple(range(min(nodes, self.most))), (self.depth, self.width))
        return builder.plan()


@pytest.mark.parametrize(("depth", "width"), [(1, 1), (1, 3), (4, 1), (4, 2), (5, 3)])
@pytest.mark.parametrize(
    ("drafter", "rel"),
    [(Linear(0.002, 0.0001), 1e-9), (affine.Model(k=(1e-6, 1e-4), a=1e-7, d=2e-7, e=1e-8, b=(0.002, 0.001)), 5e-3)],
)
def test_predicted_and_simulated_drafts_take_the_same_time(
    depth: int, width: int, drafter: LatencyModel, rel: float
) -> None:
    """Four sequences that decode and draft alike; what a context is longer by after the step is all that differs."""
    requests = [request(f"q{i}", 100 + 20 * i, most=40) for i in range(4)]
    limits = Limits(max_num_seqs=4, max_num_batched_tokens=1000, max_model_len=400, kv_blocks=400, block_size=4)
    acceptance = Acceptance(0.6)
    events = run(
        TreesForAll(depth, width), requests, {}, limits=limits, drafter=Drafter(acceptance, drafter), learns=False
    )
    model = WithDrafter(Linear(), drafter)
    steps = [e for e in events if isinstance(e, Stepped)][1:30]
    assert [s.shape.draft_tokens for s in steps] == [4 * (depth - 1) * width] * 29
    assert [s.seconds for s in steps] == pytest.approx([model.step_time(s.shape) for s in steps], rel=rel)
    chains = [model.step_time(s.shape._replace(draft_tokens=4 * (depth - 1))) for s in steps]
    assert depth == 1 or width == 1 or all(s.seconds > 1.005 * c for s, c in zip(steps, chains, strict=True))


def test_a_shape_that_does_not_say_how_wide_is_of_chains() -> None:
    model = WithDrafter(Linear(), Linear(0.002, 0.0001))
    four = Shape(4, 4, 400, spec_steps=3)
    assert model.step_time(four) == model.step_time(four._replace(draft_tokens=8))
    assert model.step_time(four._replace(draft_tokens=17)) == pytest.approx(
        0.014 + 0.0024 + 2 * 0.002 + (8 + 9) * 0.0001
    )


def test_trees_verified_are_booked_by_node() -> None:
    """All 12 nodes of each tree: `accepted` is a path down the tree, as long as the tokens say."""
    requests = [request(f"q{i}", 10, most=40) for i in range(4)]
    limits = Limits(max_num_seqs=4, max_num_batched_tokens=1000, max_model_len=400, kv_blocks=400, block_size=4)
    events = run(TreesForAll(4, 3, 12), requests, {}, limits=limits)
    out = [e for e in events if isinstance(e, Tokens)]
    assert all(e.tokens == len(e.accepted) + 1 for e in out)
    assert any(node % 3 for e in out for node in e.accepted)  # not first choices alone
    assert max(e.tokens for e in out) == 5
    sums = {r.id: sum(e.tokens for e in out if e.id == r.id) for r in requests}
    assert set(sums.values()) == {40}


@pytest.mark.parametrize("stop", [Sampling(max_tokens=40, stop_ids=(8,)), Sampling(max_tokens=40, stop=("so la",))])
def test_what_comes_after_a_stop_was_not_accepted(stop: Sampling) -> None:
    """The eighth token is one that ends it, and `la` the ninth: it is found inside an accepted chain of four."""
    limits = Limits(max_num_seqs=4, max_num_batched_tokens=1000, max_model_len=400, kv_blocks=400, block_size=4)
    events = run(
        TreesForAll(4, 1, 4),
        [replace(request("a"), sampling=stop)],
        {},
        limits=limits,
        drafter=Drafter(Acceptance(1.0)),
    )
    out = [e for e in events if isinstance(e, Tokens)]
    last = 2 if stop.stop_ids else 3
    assert [e.tokens for e in out] == [1, 5, last]
    assert (out[-1].accepted, out[-1].tried) == (tuple(range(last - 1)), last - 1)


def test_a_target_learns_what_its_own_part_of_a_step_took() -> None:
    target = Recorder()
    model = WithDrafter(target, Linear(0.002, 0.0001))
    shape = Shape().plus(30, 0)
    model.update(Sample(shape._replace(spec_steps=1), 0.05))
    model.update(Sample(shape, 0.04))
    assert target.seen == [Sample(shape, pytest.approx(0.045)), Sample(shape, 0.04)]


def test_drafts_are_learnt_from_their_own_seconds() -> None:
    """Also where every step drafts alike for a while, so that whole steps could not tell the two parts apart; and the
    target's part is what is left."""
    target = Linear(0.02, 0.0005)

    def drafting(shape: Shape) -> float:
        return (
            0.003 * shape.spec_steps + 0.0001 * (shape.tokens + shape.draft_tokens) + 1e-7 * shape.kv * shape.spec_steps
        )

    model, rng = WithLearntDrafter(affine.Model()), random.Random(2)
    for step in range(400):
        seqs = rng.randint(1, 16)
        depth, width = (4, 2) if step < 200 else (rng.randint(1, 8), rng.randint(1, 3))
        shape = Shape().with_entries([(1 + depth, rng.randint(10, 900)) for _ in range(seqs)], [(depth, width)] * seqs)
        mine = drafting(shape)
        model.update(Sample(shape, mine + target.step_time(without_drafts(shape)), mine))
        if step == 199:
            assert model.step_time(shape) - model.step_time(without_drafts(shape)) == pytest.approx(mine, rel=0.1)
    for depth, width, seqs in ((1, 1, 4), (8, 3, 12), (2, 2, 1)):
        shape = Shape().with_entries([(1 + depth, 300)] * seqs, [(depth, width)] * seqs)
        plain = without_drafts(shape)
        assert model.step_time(shape) - model.step_time(plain) == pytest.approx(drafting(shape), rel=0.15)
        assert model.step_time(plain) == pytest.approx(target.step_time(plain), rel=0.1)
    assert model.largest_chunk(0.1, shape, 0, 4000) < model.largest_chunk(0.1, plain, 0, 4000)


class Recorder(Linear):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Sample] = []

    def update(self, sample: Sample) -> None:
        self.seen.append(sample)
