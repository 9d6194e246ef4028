"""The suffix drafter: its counts against counting anew, its trees against all continuations, its calibration against
what happened."""

import gc
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import pairwise, product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.optimize import isotonic_regression

pytest.importorskip("torch")

from rubato_torch.drafters import Draft, Drafter, Wanted
from rubato_torch.drafters.calibration import REFIT, WEIGHT, Calibration
from rubato_torch.drafters.suffix import (
    EDGES,
    MAX_CONTEXT_TOKENS,
    MOST,
    SHARES,
    Counts,
    SuffixDrafter,
    beam,
    probabilities,
)

Texts = list[list[int]]
few_tokens = st.lists(st.integers(0, 3), max_size=40)
many_tokens = st.lists(st.integers(0, 3) | st.integers(0, 60), max_size=300)
repeats = st.builds(lambda run, tail, times: (run + tail) * times, few_tokens, few_tokens, st.integers(2, 4))
fans = st.lists(st.integers(1, 12), max_size=60).map(lambda after: [token for one in after for token in (0, one)])


# --------------------------------------------------------------------------- the reference: count everything anew


def recounted(sources: Sequence[Texts], end: list[int]) -> dict[int, float]:
    """What `probabilities` says of the token after `end`, from the texts themselves."""
    found: dict[int, float] = {}
    left = 1.0
    for order in range(min(MAX_CONTEXT_TOKENS, len(end)), 0, -1):
        for texts in sources:
            context = end[-order:]
            followed = Counter(
                text[i + order] for text in texts for i in range(len(text) - order) if text[i : i + order] == context
            )
            if not followed:
                continue
            share = left / (followed.total() + 2 * len(followed))
            for token, count in followed.items() if len(followed) <= MOST else followed.most_common(MOST):
                found[token] = found.get(token, 0.0) + share * count
            left = share * 2 * len(followed)
    return found


def searched(
    sources: Sequence[Texts], text: list[int], depth: int, width: int, calibrated: Callable[[float], float]
) -> list[tuple[tuple[int, ...], float]]:
    """The beam by recounting: (tokens from the root, path probability) of each node."""
    nodes: list[tuple[tuple[int, ...], float]] = []
    layer: list[tuple[tuple[int, ...], float]] = [((), 1.0)]
    for _ in range(depth):
        found = []
        for run, path in layer:
            after = recounted(sources, text + list(run))
            ranked = sorted(after.items(), key=lambda item: -item[1])
            found += [((*run, token), path * calibrated(step)) for token, step in ranked]
        layer = sorted(found, key=lambda item: -item[1])[:width]
        nodes += layer
    return nodes


def counted(texts: Texts) -> Counts:
    counts = Counts()
    for text in texts:
        for token in text:
            counts.append(token)
        counts.end()
    return counts


def grown(text: list[int]) -> Counts:
    counts = Counts()
    for token in text:
        counts.append(token)
    return counts


def runs(draft: Draft) -> list[tuple[int, ...]]:
    """Each node's tokens from the root."""
    found: list[tuple[int, ...]] = []
    for parent, token in zip(draft.tree.parents, draft.tokens, strict=True):
        found.append((*(found[parent] if parent >= 0 else ()), token))
    return found


def as_it_is(step: float) -> float:
    return step


# --------------------------------------------------------------------------- counts


@given(few_tokens | many_tokens | repeats | fans)
def test_counts_that_grow_equal_counts_made_anew(text: list[int]) -> None:
    counts = Counts()
    for i, token in enumerate(text, 1):
        counts.append(token)
        if i % 7 == 0 or i > len(text) - 20:
            found = probabilities([(counts, counts.suffixes)])
            expected = recounted([[text[:i]]], text[:i])
            assert found == pytest.approx(expected)
            assert list(found) == list(expected)  # so that ties go the same way


@given(st.lists(few_tokens | repeats, max_size=6), st.integers(0, 6), few_tokens | repeats)
def test_dropping_the_oldest_text_takes_its_counts_out(texts: Texts, dropped: int, end: list[int]) -> None:
    counts = counted(texts)
    for _ in range(min(dropped, len(texts))):
        counts.drop_oldest()
    remaining = texts[dropped:]
    assert len(counts) == sum(map(len, remaining))
    assert probabilities([(counts, counts.matches_of(end))]) == pytest.approx(recounted([remaining], end))
    for text in texts:  # and go on: what comes after is counted as if the dropped had never been
        for token in text:
            counts.append(token)
        counts.end()
    assert probabilities([(counts, counts.matches_of(end))]) == pytest.approx(recounted([remaining + texts], end))


@given(st.lists(few_tokens, max_size=6))
def test_nothing_is_left_when_all_is_dropped(texts: Texts) -> None:
    counts = counted(texts)
    for _ in texts:
        counts.drop_oldest()
    root = counts.suffixes[0]
    assert (len(counts), counts.text, root.next, root.total) == (0, [], {}, 0)


@given(st.lists(few_tokens, max_size=4), few_tokens)
def test_of_two_counts_that_match_alike_the_first_comes_first(texts: Texts, text: list[int]) -> None:
    own, store = grown(text), counted(texts)
    found = probabilities([(own, own.suffixes), (store, store.matches_of(text))])
    assert found == pytest.approx(recounted([[text], texts], text))


# --------------------------------------------------------------------------- trees


@given(few_tokens | repeats, st.lists(few_tokens | repeats, max_size=3), st.integers(0, 5), st.integers(0, 5))
def test_the_beam_is_the_best_of_all_continuations(text: list[int], texts: Texts, depth: int, width: int) -> None:
    own, store = grown(text), counted(texts)
    matches = [(own, own.suffixes), (store, store.matches_of(text))]
    draft, steps = beam(matches, depth, width, as_it_is)
    expected = searched([[text], texts], text, depth, width, as_it_is)
    assert runs(draft) == [run for run, _ in expected]
    assert draft.tree.paths == pytest.approx([path for _, path in expected])
    assert len(steps) == len(draft.tokens)


@given(few_tokens)
def test_a_wide_beam_holds_every_continuation_that_the_counts_allow(text: list[int]) -> None:
    own = grown(text)
    draft, _ = beam([(own, own.suffixes)], 3, 64, as_it_is)
    allowed = [
        run
        for depth in (1, 2, 3)
        for run in product(range(4), repeat=depth)
        if all(run[i] in recounted([[text]], text + list(run[:i])) for i in range(depth))
    ]
    assert sorted(runs(draft)) == sorted(allowed)


@given(many_tokens, st.integers(1, 6), st.integers(1, 8))
def test_a_tree_is_one_with_probabilities(text: list[int], depth: int, width: int) -> None:
    own = grown(text)
    draft, steps = beam([(own, own.suffixes)], depth, width, as_it_is)
    tree = draft.tree
    below: dict[int, float] = {}
    for node, (parent, path, step) in enumerate(zip(tree.parents, tree.paths, steps, strict=True)):
        assert -1 <= parent < node
        assert 0.0 < path <= (1.0 if parent < 0 else tree.paths[parent])
        assert path == pytest.approx(step * (1.0 if parent < 0 else tree.paths[parent]))
        below[parent] = below.get(parent, 0.0) + step
    assert all(total <= 1.0 + 1e-9 for total in below.values())
    children = list(zip(tree.parents, draft.tokens, strict=True))
    assert len(set(children)) == len(children)  # siblings differ
    calibrated = SuffixDrafter().draft([Wanted("a", text, depth, width)])[0].tree
    assert all(
        0.0 < f <= (1.0 if parent < 0 else calibrated.paths[parent])
        for parent, f in zip(calibrated.parents, calibrated.paths, strict=True)
    )


def test_what_repeats_is_drafted_and_nearly_certain() -> None:
    drafter: Drafter = SuffixDrafter()
    (draft,) = drafter.draft([Wanted("a", [1, 2, 3] * 20, 4, 1)])
    assert draft.tokens == (1, 2, 3, 1)
    assert draft.tree.parents == (-1, 0, 1, 2)
    assert draft.tree.paths[0] > 0.95
    assert draft.tree.paths[3] > 0.85


@pytest.mark.parametrize("tokens", [[], [5], [1, 2, 3, 4]])
def test_where_nothing_repeats_nothing_is_drafted(tokens: list[int]) -> None:
    (draft,) = SuffixDrafter().draft([Wanted("a", tokens, 4, 3)])
    assert draft.tokens == draft.tree.parents == draft.tree.paths == ()


# --------------------------------------------------------------------------- sequences


@given(repeats, st.lists(st.integers(1, 5), max_size=10), st.data())
def test_a_sequence_that_grew_here_drafts_as_one_that_came_here(
    text: list[int], grows: list[int], data: st.DataObject
) -> None:
    stayed = SuffixDrafter()
    for by in grows:
        here = stayed.draft([Wanted("a", text, 3, 2), Wanted("b", [3, *text], 3, 2)])
        assert here == SuffixDrafter().draft([Wanted("a", tuple(text), 3, 2), Wanted("x", [3, *text], 3, 2)])
        text += data.draw(st.lists(st.integers(0, 3), min_size=by, max_size=by))


def test_a_sequence_with_other_tokens_begins_anew() -> None:
    drafter = SuffixDrafter()
    drafter.draft([Wanted("a", [1, 2, 3] * 5, 4, 3)])
    for other in ([1, 2, 3, 1], [7, 8, 9] * 8, [1, 2, 3] * 4 + [9, 9, 9, 1]):
        wanted = [Wanted("a", other, 4, 3)]
        assert drafter.draft(wanted) == SuffixDrafter().draft(wanted)


def test_what_is_forgotten_is_freed() -> None:
    drafter = SuffixDrafter()
    drafter.draft([Wanted("a", [1, 2, 1], 4, 3)])
    counts = weakref.ref(drafter._seqs["a"].counts)
    drafter.forget("a")
    drafter.forget("a")
    drafter.forget("never seen")
    gc.collect()
    assert counts() is None


# --------------------------------------------------------------------------- store


def finished(drafter: SuffixDrafter, seq: str, output: list[int], tenant: str = "one") -> None:
    """A request of one prompt token 0 comes, writes `output` and goes."""
    drafter.draft([Wanted(seq, [0, output[0]], 1, 1, tenant), Wanted(seq, [0, *output], 1, 1, tenant)])
    drafter.forget(seq)


def drafted(drafter: SuffixDrafter, last: int, tenant: str = "one") -> tuple[int, ...]:
    (draft,) = drafter.draft([Wanted("asks", [last], 3, 1, tenant)])
    drafter._seqs.pop("asks")
    return draft.tokens


def test_earlier_outputs_are_drafted_from_where_a_store_is_asked_for() -> None:
    for store_tokens, expected in ((0, ()), (100, (6, 7, 8))):
        drafter = SuffixDrafter(store_tokens)
        finished(drafter, "a", [5, 6, 7, 8])
        assert drafted(drafter, 5) == expected
        assert drafted(drafter, 0) == ()  # the prompt is none of the output


def test_no_tenant_is_shown_anothers_text() -> None:
    drafter = SuffixDrafter(100)
    finished(drafter, "a", [5, 6, 7, 8], "one")
    assert drafted(drafter, 5, "one") == (6, 7, 8)
    assert drafted(drafter, 5, "two") == drafted(drafter, 5, "") == ()
    finished(drafter, "b", [15, 16, 17], "")
    assert drafted(drafter, 15, "") == drafted(drafter, 15, "one") == ()  # its request is unknown
    drafter.draft([Wanted("c", [5, 9], 3, 3, "one")])  # under the same id, first the one's, then the other's
    drafter.draft([Wanted("c", [5, 9, 15], 3, 3, "two"), Wanted("c", [5, 9, 15, 16], 3, 3, "two")])
    drafter.forget("c")
    assert drafted(drafter, 15, "one") == ()
    assert drafted(drafter, 15, "two") == (16,)


@given(st.lists(st.tuples(st.sampled_from(["one", "two"]), st.lists(st.integers(0, 9), min_size=1, max_size=12))))
def test_tenants_draft_as_if_alone(outputs: list[tuple[str, list[int]]]) -> None:
    shared = SuffixDrafter(30)
    alone = {"one": SuffixDrafter(30), "two": SuffixDrafter(30)}
    for number, (tenant, output) in enumerate(outputs):
        wanted = [Wanted(str(number), output, 3, 3, tenant)]
        assert shared.draft(wanted) == alone[tenant].draft(wanted)
        for drafter in (shared, alone[tenant]):
            finished(drafter, str(number), output, tenant)


def test_a_full_store_drops_the_oldest_output() -> None:
    drafter = SuffixDrafter(8)
    finished(drafter, "a", [1, 2, 3, 4])
    finished(drafter, "b", [1, 5, 6, 7])
    assert set(drafter.draft([Wanted("asks", [1], 1, 3, "one")])[0].tokens) == {2, 5}
    drafter.forget("asks")
    finished(drafter, "c", [8])
    assert drafted(drafter, 1) == (5, 6, 7)
    assert drafted(drafter, 2) == ()
    finished(drafter, "d", [*range(20, 40)])  # more than it can hold: its end
    assert drafted(drafter, 1) == drafted(drafter, 30) == ()
    assert drafted(drafter, 36) == (37, 38, 39)


def test_a_store_of_less_than_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="store_tokens is -1"):
        SuffixDrafter(-1)


# --------------------------------------------------------------------------- calibration


GRID = [i / 400 for i in range(1, 401)]


@given(st.lists(st.tuples(st.floats(0.001, 1.0), st.booleans(), st.integers(1, 300)), max_size=20))
def test_calibration_is_monotone_and_a_probability(seen: list[tuple[float, bool, int]]) -> None:
    calibration = Calibration(EDGES, SHARES)
    for step, right, times in seen:
        for _ in range(times):
            calibration.observe(step, right)
    shares = [calibration(step) for step in GRID]
    assert all(0.0 < share <= 1.0 for share in shares)
    assert all(low <= high + 1e-12 for low, high in pairwise(shares))


@given(st.lists(st.tuples(st.integers(0, len(SHARES) - 1), st.booleans()), max_size=30))
def test_calibration_is_isotonic_regression(seen: list[tuple[int, bool]]) -> None:
    calibration = Calibration(EDGES, SHARES)
    middles = [(low + high) / 2 for low, high in pairwise(EDGES)]
    right = [WEIGHT * share for share in SHARES]
    nodes = [WEIGHT] * len(SHARES)
    for i, was_right in seen * REFIT:  # a whole number of refits
        calibration.observe(middles[i], was_right)
        right[i] += was_right
        nodes[i] += 1
    expected = isotonic_regression(np.divide(right, nodes), weights=nodes).x
    assert [calibration(middle) for middle in middles] == pytest.approx(expected.tolist())


@pytest.mark.parametrize("truth", [lambda q: q**2, lambda q: 0.5 * q, lambda q: q**0.5], ids=["less", "half", "more"])
def test_calibration_converges_to_what_happens(truth: Callable[[float], float]) -> None:
    rng = np.random.default_rng(1)
    calibration = Calibration(EDGES, SHARES)
    off = []
    for nodes in (0, 1000, 20_000):
        for step in rng.random(nodes).tolist():
            calibration.observe(step, bool(rng.random() < truth(step)))
        off.append(float(np.mean([abs(calibration(step) - truth(step)) for step in GRID])))
    assert off[2] < 0.025
    assert off[2] < off[1] < off[0]


def test_a_node_is_learned_from_where_it_was_tried_and_its_parent_was_right() -> None:
    drafter = SuffixDrafter()
    seen: list[tuple[float, bool]] = []
    drafter.calibration.observe = lambda step, right: seen.append((step, right))  # type: ignore[method-assign]
    text = [1, 2, 3, 1, 2, 4, 1, 3, 1]
    (draft,) = drafter.draft([Wanted("a", text, 2, 2)])
    assert draft.tree.parents == (-1, -1, 0, 0)
    assert draft.tokens == (2, 3, 4, 3)
    steps = drafter._seqs["a"].steps
    for tried, accepted, expected in (
        ((), (), []),
        ((0, 1), (0,), [(0, True), (1, False)]),  # 2 and 3 were not tried
        ((0, 2, 3), (), [(0, False)]),  # 2 and 3 follow what was wrong
        ((0, 1, 2, 3), (0, 3), [(0, True), (1, False), (2, False), (3, True)]),
    ):
        (draft,) = drafter.draft([Wanted("a", text, 2, 2)])
        drafter.verified("a", draft, tried, accepted)
        assert seen == [(steps[node], right) for node, right in expected]
        drafter.verified("a", draft, tried, accepted)  # twice is once
        assert len(seen) == len(expected)
        seen.clear()
    drafter.verified("a", draft, (0,), (0,))  # not its last
    drafter.verified("b", draft, (0,), (0,))  # not its own
    assert not seen


def test_what_turns_out_wrong_is_drafted_with_less_confidence() -> None:
    drafter = SuffixDrafter()
    wanted = [Wanted("a", [1, 2, 3] * 20, 4, 1)]
    (before,) = drafter.draft(wanted)
    for _ in range(600):
        (draft,) = drafter.draft(wanted)
        drafter.verified("a", draft, range(4), ())
    (after,) = drafter.draft(wanted)
    assert after.tokens == before.tokens
    assert after.tree.paths[0] < 0.2 < 0.9 < before.tree.paths[0]
