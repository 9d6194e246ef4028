"""Sampling: reproducible by seed, independent of batch mates, and from the right distribution."""

import math
import random
from collections import Counter
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from rubato.core.request import Progress, Request, Sampling, Stage  # noqa: E402
from rubato_torch.sampling import Choice, choose  # noqa: E402
from tests.engines.driver import Driver  # noqa: E402

PROMPT = tuple(range(1000, 1040))
LOGITS = torch.tensor([2.0, 1.0, 0.5, 0.0, -1.0, -1.0])
DRAWS = 20_000


def draw(sampling: Sampling, draws: int = DRAWS) -> Counter[int]:
    choice = Choice.of(sampling)
    found: Counter[int] = Counter()
    for _ in range(draws // 100):
        found.update(choose(LOGITS.expand(100, -1), [choice] * 100))
    return found


def softmax(logits: list[float]) -> list[float]:
    weights = [math.exp(x) for x in logits]
    return [w / sum(weights) for w in weights]


def assert_drawn_from(found: Counter[int], expected: dict[int, float]) -> None:
    """Pearson's chi-square against its 99.99 % point for up to 5 degrees of freedom; the generators are seeded."""
    assert set(found) <= set(expected)
    total = sum(found.values())
    assert sum((found[i] - total * p) ** 2 / (total * p) for i, p in expected.items()) < 25.7


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_temperature_draws_from_the_softmax(temperature: float) -> None:
    expected = softmax([x / temperature for x in LOGITS.tolist()])
    assert_drawn_from(draw(Sampling(temperature=temperature, seed=1)), dict(enumerate(expected)))


@pytest.mark.parametrize("temperature", [1e-46, 1e-300, 1e-6, 1e-4])
@pytest.mark.parametrize("top_p", [1.0, 0.9])
def test_a_tiny_temperature_takes_the_likeliest(temperature: float, top_p: float) -> None:
    logits = torch.tensor([[0.0, 1.0, 2.0, -1.0]])
    choice = Choice.of(Sampling(temperature=temperature, top_p=top_p, seed=1))
    assert [choose(logits, [choice]) for _ in range(20)] == [[2]] * 20


@pytest.mark.parametrize("penalty", [0.01, 100.0])
@pytest.mark.parametrize("temperature", [0.0, 1e-5])
def test_the_strongest_repetition_penalties_are_still_numbers(penalty: float, temperature: float) -> None:
    choice = Choice.of(Sampling(temperature=temperature, repetition_penalty=penalty, seed=1))
    choice.saw([2], output=True)
    expected = 2 if penalty < 1 else 1
    assert choose(torch.tensor([[0.0, 50.0, 100.0, -1.0]]), [choice]) == [expected]


def test_top_k_draws_from_the_first_k_renormalised() -> None:
    assert_drawn_from(draw(Sampling(temperature=1.0, top_k=3, seed=2)), dict(enumerate(softmax([2.0, 1.0, 0.5]))))


def test_top_p_keeps_the_smallest_set_that_reaches_it() -> None:
    """Probabilities .53 .20 .12 .07 .03 .03: .70 is reached by two tokens, .75 by three."""
    two, three = dict(enumerate(softmax([2.0, 1.0]))), dict(enumerate(softmax([2.0, 1.0, 0.5])))
    assert_drawn_from(draw(Sampling(temperature=1.0, top_p=0.70, seed=3)), two)
    assert_drawn_from(draw(Sampling(temperature=1.0, top_p=0.75, seed=4)), three)


def test_top_p_applies_to_what_top_k_leaves() -> None:
    """Of the first three (.63 .23 .14 renormalised) .80 takes two, though of all it would take three."""
    assert_drawn_from(draw(Sampling(temperature=1.0, top_k=3, top_p=0.8, seed=5)), dict(enumerate(softmax([2.0, 1.0]))))


def test_top_p_on_a_flat_row_reaches_beyond_the_first_thousand() -> None:
    logits = torch.zeros(1, 5000)
    choice = Choice.of(Sampling(temperature=1.0, top_p=0.9, seed=6))
    found = {choose(logits, [choice])[0] for _ in range(2000)}
    assert len(found) > 1400  # 2,000 draws of 4,500 give about 1,615 different ones; of 1,024 at most 1,024


def test_rows_keep_their_own_settings_in_one_batch() -> None:
    settings = [
        Sampling(),
        Sampling(temperature=5.0, top_k=1),
        Sampling(temperature=5.0, top_p=1e-6, seed=1),
        Sampling(temperature=1e-4, seed=1),
        Sampling(temperature=1.0, seed=9),
        Sampling(temperature=1.0, top_k=4, seed=9),
    ]
    torch.manual_seed(0)
    logits = torch.randn(len(settings), 3000)
    together = choose(logits, [Choice.of(s) for s in settings])
    alone = [choose(row[None], [Choice.of(s)])[0] for row, s in zip(logits, settings, strict=True)]
    assert together == alone
    assert together[:4] == logits[:4].argmax(-1).tolist()


def test_seeded_output_does_not_depend_on_batch_mates_or_preemption(tiny: Driver) -> None:
    settings = [
        Sampling(max_tokens=20, temperature=1.0, top_p=p, seed=s, ignore_eos=True) for p in (1, 0.9) for s in (1, 2)
    ]
    for i, sampling in enumerate(settings):
        tiny.add(f"alone-{i}", PROMPT, sampling)
        while f"alone-{i}" not in tiny.finished:
            tiny.step({f"alone-{i}": tiny.pending(f"alone-{i}")})
    rng = random.Random(3)
    for i, sampling in enumerate(settings):
        tiny.add(f"mate-{i}", [rng.randrange(100, 49000) for _ in range(9 * i + 1)], Sampling(25, 0.8, ignore_eos=True))
        tiny.add(f"beside-{i}", PROMPT, sampling)
    while live := tiny.live:
        tiny.step(
            {id: min(tiny.pending(id), rng.choice((1, 5, 40))) for id in live if rng.random() < 0.7} or {live[0]: 1}
        )
        if rng.random() < 0.2 and tiny.live:
            tiny.preempt(rng.choice(tiny.live))
    outputs = [tiny.ids[f"alone-{i}"] for i in range(4)]
    assert [tiny.ids[f"beside-{i}"] for i in range(4)] == outputs
    assert len({tuple(output) for output in outputs}) == 4


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_request_that_moves_to_a_fresh_engine_goes_on_to_the_same_output(tiny: Driver, temperature: float) -> None:
    sampling = Sampling(max_tokens=12, temperature=temperature, seed=4, frequency_penalty=0.5, ignore_eos=True)
    tiny.add("whole", PROMPT, sampling)
    tiny.run()
    for at in range(12):
        before = tuple(tiny.ids["whole"][:at])
        request = Request(
            f"from-{at}",
            (Stage(len(PROMPT), token_ids=PROMPT),),
            0.0,
            sampling=sampling,
            progress=Progress((0.0,), (tuple(map(float, range(at))),), before),
        )
        tiny.add_request(request)
        tiny.length[request.id] += at
        tiny.run()
        assert [*before, *tiny.ids[request.id]] == tiny.ids["whole"]


def test_top_k_one_and_tiny_top_p_are_greedy(tiny: Driver) -> None:
    same: dict[str, Any] = {"max_tokens": 15, "ignore_eos": True}
    for i, sampling in enumerate(
        (Sampling(**same), Sampling(temperature=2.0, top_k=1, **same), Sampling(temperature=2.0, top_p=1e-9, **same))
    ):
        tiny.add(str(i), PROMPT, sampling)
    tiny.run()
    assert tiny.ids["0"] == tiny.ids["1"] == tiny.ids["2"]


def test_without_a_seed_outputs_differ(tiny: Driver) -> None:
    for i in range(2):
        tiny.add(str(i), PROMPT, Sampling(max_tokens=20, temperature=1.5, ignore_eos=True))
    tiny.run()
    assert tiny.ids["0"] != tiny.ids["1"]


@pytest.mark.parametrize(
    ("sampling", "words"),
    [
        (Sampling(temperature=-0.1), "temperature is -0.1"),
        (Sampling(temperature=math.nan), "temperature is nan"),
        (Sampling(top_p=0.0), "top_p is 0.0"),
        (Sampling(top_p=1.5), "top_p is 1.5"),
        (Sampling(top_k=-1), "top_k is -1"),
        (Sampling(repetition_penalty=1e-60), "repetition_penalty is 1e-60"),
        (Sampling(repetition_penalty=1e60), "repetition_penalty is 1e"),
    ],
)
def test_settings_out_of_range_are_refused(sampling: Sampling, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Choice.of(sampling)
