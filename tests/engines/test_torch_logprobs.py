"""Log probabilities, penalties and min-p against plain float64 arithmetic, row by row, without a tensor."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Sequence

import pytest

torch = pytest.importorskip("torch")

from rubato.core.request import Request, Sampling, Stage  # noqa: E402
from rubato_torch.sampling import Choice, choose, logprobs  # noqa: E402
from tests.engines.driver import Driver  # noqa: E402

VOCAB = 3000
PROMPT = tuple(range(1000, 1040))


def penalised(logits: Sequence[float], s: Sampling, prompt: Sequence[int], output: Sequence[int]) -> list[float]:
    found = list(logits)
    for id in {*prompt, *output}:
        found[id] = found[id] / s.repetition_penalty if found[id] > 0 else found[id] * s.repetition_penalty
    for id, count in Counter(output).items():
        found[id] -= s.frequency_penalty * count + s.presence_penalty
    return found


def expected(logits: Sequence[float], s: Sampling, u: float) -> tuple[int, float]:
    """The token that number `u` draws, and how near u is to drawing another."""
    likeliest = max(range(len(logits)), key=lambda i: logits[i])
    if s.temperature == 0.0 or s.top_k == 1:
        return likeliest, 1.0
    weights = {i: math.exp((x - logits[likeliest]) / s.temperature) for i, x in enumerate(logits)}
    order = list(weights)
    weights = {i: w for i, w in weights.items() if w >= s.min_p}
    if s.top_k or s.top_p < 1.0:
        order = sorted(weights, key=lambda i: -weights[i])
        kept = order[: s.top_k or None]
        whole, before = sum(weights[i] for i in kept), 0.0
        order = []
        for i in kept:
            if before / whole < s.top_p:
                order.append(i)
            before += weights[i]
    order = [i for i in order if i in weights]
    whole, at = sum(weights[i] for i in order), 0.0
    for i in order:
        low, at = at, at + weights[i] / whole
        if u < at:
            return i, min(u - low, at - u)
    return order[-1], 0.0


def some_sampling(rng: random.Random) -> Sampling:
    def either(off: float, *on: float) -> float:
        return off if rng.random() < 0.4 else rng.choice(on)

    return Sampling(
        temperature=either(0.0, 0.3, 1.0, 1.7),
        top_p=either(1.0, 0.3, 0.95),
        top_k=int(either(0, 1, 5, 400)),
        min_p=either(0.0, 0.02, 0.3, 1.0),
        presence_penalty=either(0.0, -2.0, 0.7, 2.0),
        frequency_penalty=either(0.0, -0.5, 0.3, 2.0),
        repetition_penalty=either(1.0, 0.8, 1.3, 5.0),
        logprobs=rng.choice((None, 0, 1, 5, 20)),
        seed=rng.randrange(1000),
    )


def test_all_settings_against_plain_arithmetic_and_independent_of_batch_mates() -> None:
    rng = random.Random(5)
    checked = 0
    for batch in range(30):
        settings = [some_sampling(rng) for _ in range(rng.randrange(1, 12))]
        torch.manual_seed(batch)
        logits = 3.0 * torch.randn(len(settings), VOCAB)
        plain = logits.tolist()
        # what a sequence holds are likely tokens too: else no penalty would change a choice
        likely = logits.topk(30).indices.tolist()
        prompts = [rng.choices(ids, k=9) + rng.choices(range(VOCAB), k=rng.randrange(200)) for ids in likely]
        outputs = [rng.choices(ids, k=rng.choice((0, 20))) for ids in likely]

        def choices(
            settings: list[Sampling] = settings, prompts: list[list[int]] = prompts, outs: list[list[int]] = outputs
        ) -> list[Choice]:
            made = [Choice.of(s) for s in settings]
            for choice, prompt, out in zip(made, prompts, outs, strict=True):
                if choice.sampling.repetition_penalty != 1.0:
                    choice.saw(prompt, output=False)
                for id in out:
                    choice.saw((id,), output=True)
            return made

        together = choose(logits, choices())
        alone = [choose(logits[row : row + 1], [choice])[0] for row, choice in enumerate(choices())]
        assert together == alone
        for row, s in enumerate(settings):
            wanted = penalised(plain[row], s, prompts[row], outputs[row])
            token, slack = expected(wanted, s, random.Random(s.seed).random())
            if slack > 1e-4:
                checked += 1
                assert together[row] == token, s
        assert logits.tolist() == plain
    assert checked > 100


def test_a_penalty_of_each_kind_by_hand() -> None:
    """Logits 3, 2.5, -1. Prompt holds 0; the output 1, twice."""
    logits = torch.tensor([[3.0, 2.5, -1.0]])

    def after(**fields: float) -> int:
        choice = Choice.of(Sampling(**fields))  # type: ignore[arg-type]
        if choice.sampling.repetition_penalty != 1.0:
            choice.saw((0,), output=False)
        choice.saw((1, 1), output=True)
        return choose(logits, [choice])[0]

    assert after() == after(presence_penalty=2.0) == after(frequency_penalty=2.0) == 0  # prompts are not penalised
    assert after(presence_penalty=-0.6) == 1  # 2.5 + .6
    assert after(frequency_penalty=-0.2) == 0  # 2.5 + 2 x .2
    assert after(frequency_penalty=-0.3) == 1  # 2.5 + 2 x .3
    assert after(repetition_penalty=2.0) == 0  # 1.5, 1.25, -1
    assert after(repetition_penalty=2.0, presence_penalty=-0.5) == 1  # 1.5, 1.75, -1
    assert after(repetition_penalty=100.0, presence_penalty=2.0, frequency_penalty=2.0) == 0  # .03, -5.98, -1


def test_min_p_leaves_what_is_likely_enough() -> None:
    logits = torch.tensor([0.5, 0.3, 0.16, 0.04]).log().expand(500, -1)

    def drawn(min_p: float, **fields: float) -> set[int]:
        choice = Choice.of(Sampling(temperature=1.0, min_p=min_p, seed=1, **fields))  # type: ignore[arg-type]
        return set(choose(logits, [choice] * 500))

    assert drawn(0.0) == {0, 1, 2, 3}
    assert drawn(0.1) == {0, 1, 2}
    assert drawn(0.5) == {0, 1}
    assert drawn(1.0) == {0}
    assert drawn(0.1, top_p=0.6) == drawn(0.1, top_k=2) == {0, 1}


def test_logprobs_are_the_models_own() -> None:
    """Natural logarithms of the softmax itself, whatever the temperature, penalties and cuts."""
    torch.manual_seed(0)
    logits = 3.0 * torch.randn(5, VOCAB)
    chosen = [7, 8, 9, 10, 11]
    settings = [
        Sampling(logprobs=0),
        Sampling(logprobs=20, temperature=2.0, presence_penalty=2.0),
        Sampling(),
        Sampling(logprobs=3, top_k=1, min_p=0.5),
        Sampling(logprobs=1),
    ]
    found = logprobs(logits, chosen, settings)
    assert found[2] == ()
    for row in (0, 1, 3, 4):
        (one,) = found[row]
        plain = [float(x) for x in logits[row].double()]
        whole = math.log(sum(math.exp(x) for x in plain))
        assert one.token == chosen[row]
        assert one.logprob == pytest.approx(plain[chosen[row]] - whole, abs=1e-5)
        order = sorted(range(VOCAB), key=lambda i: -plain[i])[: settings[row].logprobs]
        assert [id for id, _ in one.top] == order
        assert [value for _, value in one.top] == pytest.approx([plain[i] - whole for i in order], abs=1e-5)
        assert logprobs(logits[row : row + 1], chosen[row : row + 1], [settings[row]]) == [found[row]]


def test_logprobs_of_a_small_vocabulary_and_of_the_impossible() -> None:
    logits = torch.tensor([[0.0, -math.inf, 0.0]])
    ((one,),) = logprobs(logits, [1], [Sampling(logprobs=20)])
    assert one.logprob == -9999.0  # minus infinity is no JSON
    assert len(one.top) == 3
    assert [value for _, value in one.top] == [pytest.approx(-math.log(2))] * 2 + [-9999.0]


def test_the_engine_gives_a_logprob_with_each_token_and_only_where_asked(tiny: Driver) -> None:
    tiny.add("with", PROMPT, Sampling(max_tokens=6, logprobs=2, ignore_eos=True))
    tiny.add("without", PROMPT, Sampling(max_tokens=6, ignore_eos=True))
    seen = []
    while tiny.live:
        emitted = tiny.step({id: tiny.pending(id) for id in tiny.live}).emitted
        assert emitted["without"].logprobs == ()
        seen.extend(emitted["with"].logprobs)
    assert [one.token for one in seen] == tiny.ids["with"] == tiny.ids["without"]
    for one in seen:
        assert len(one.top) == 2
        assert one.top[0] == (one.token, one.logprob)  # greedy: the chosen one is the likeliest
        assert 0.0 > one.top[0][1] >= one.top[1][1]


def test_penalties_see_what_came_out_and_not_what_waits(tiny: Driver) -> None:
    """A strong penalty forbids every repetition, in a batch, preempted and resumed; alone the model repeats itself."""
    fields = {"max_tokens": 40, "ignore_eos": True}
    tiny.add("plain", PROMPT, Sampling(**fields))
    tiny.add("alone", PROMPT, Sampling(repetition_penalty=100.0, presence_penalty=2.0, **fields))
    for id in ("alone", "plain"):
        while id not in tiny.finished:
            tiny.step({id: tiny.pending(id)})
    assert len(set(tiny.ids["alone"])) == 40
    assert not set(tiny.ids["alone"]) & set(PROMPT)
    assert tiny.ids["plain"] != tiny.ids["alone"]
    rng = random.Random(1)
    tiny.add("beside", PROMPT, Sampling(repetition_penalty=100.0, presence_penalty=2.0, **fields))
    tiny.add("mate", PROMPT[:7], Sampling(max_tokens=60, temperature=1.0, frequency_penalty=0.5))
    while live := tiny.live:
        tiny.step({id: min(tiny.pending(id), 16) for id in live if rng.random() < 0.8} or {live[0]: 1})
        if "beside" in tiny.live and rng.random() < 0.1:
            tiny.preempt("beside")
    assert tiny.ids["beside"] == tiny.ids["alone"]


def test_a_second_stages_prompt_counts_for_the_repetition_penalty(tiny: Driver) -> None:
    from rubato_torch.sequence import Sequence

    stages = (Stage(2, ends="</think>", token_ids=(5, 6)), Stage(2, token_ids=(7, 8)))
    literal = 9
    for penalty, seen in ((1.5, [5, 6, literal, 7, 8]), (1.0, [literal])):
        sampling = Sampling(repetition_penalty=penalty, presence_penalty=0.1)
        seq = Sequence(Request("r", stages, 0.0, sampling=sampling), [b""] * 10, frozenset(), [literal, None])
        assert seq.take(literal).stage_done
        assert seq.choice.seen is not None
        assert list(seq.choice.seen.ids) == seen
        assert list(seq.choice.seen.counts) == [float(id == literal) for id in seen]


@pytest.mark.parametrize(
    ("sampling", "words"),
    [
        (Sampling(min_p=-0.1), "min_p is -0.1"),
        (Sampling(min_p=math.nan), "min_p is nan"),
        (Sampling(presence_penalty=2.1), "presence_penalty is 2.1"),
        (Sampling(frequency_penalty=-2.1), "frequency_penalty is -2.1"),
        (Sampling(repetition_penalty=0.0), "repetition_penalty is 0.0"),
        (Sampling(repetition_penalty=math.inf), "repetition_penalty is inf"),
        (Sampling(logprobs=21), "logprobs is 21"),
        (Sampling(logprobs=-1), "logprobs is -1"),
        (Sampling(stop_ids=(5, -3)), "stop_ids holds -3"),
    ],
)
def test_settings_out_of_range_are_refused(sampling: Sampling, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Choice.of(sampling)


def test_seeds_of_either_sign_draw_their_own() -> None:
    """Random() itself takes the absolute value: choices of seeds -1, 0, 1 must not be two of three."""
    logits = torch.zeros(1, 1000)
    assert len({choose(logits, [Choice.of(Sampling(temperature=1.0, seed=s))])[0] for s in (-1, 0, 1)}) == 3
