"""Greedy tokens are transformers' own, whatever runs beside a sequence and however often it is preempted."""

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from rubato.core.request import Sampling  # noqa: E402
from rubato_torch import Engine  # noqa: E402
from tests.engines.driver import Driver  # noqa: E402

NEW = 20
CHATS = (
    "What is the capital of France?",
    "Name three rivers in South America and say one thing about each of them.",
    "My cat refuses to eat in the morning. What could be the reason?",
    "Tell me a joke about a programmer and a lighthouse.",
    "Explain to a child of eight why the moon changes its shape during a month.",
    "I have 17 apples, eat 3 and give half of the rest away. How many are left?",
    "Translate into French: the train to the coast leaves at nine.",
)
CODE = (
    "def fibonacci(n):\n",
    "import csv\n\ndef rows(path):\n    '''Every row of a CSV file as a dict.'''\n",
    "class Stack:\n    def __init__(self):\n        self.items = []\n\n    def push(self, item):\n",
    "SELECT name, count(*) FROM orders WHERE year = 2024 GROUP BY",
    "#!/bin/sh\n# back up the home directory to an external disk\n",
    "// Returns the larger of two integers.\nint max(int a, int b) {",
    "x = [i * i for i in range(10)]\nprint(x)\n# prints [",
)
NOTE = (
    "The harbour committee met on Tuesday. The dredging of the northern channel is six weeks late because the barge "
    "was damaged in the March storm; the repair will cost 42,000 euros, of which the insurer pays two thirds. The "
    "ferry company asked for a second berth from May to September. The committee agreed, on condition that the lights "
    "on the eastern mole are replaced first. The fishermen's association objects to the new fees. "
)
SUMMARIES = tuple(
    f"{NOTE * times}\n\n{question}"
    for times, question in (
        (1, "Summary:"),
        (1, "In one sentence, the committee decided"),
        (2, "The three most important points are:\n1."),
        (2, "Who objects, and to what?"),
        (2, "Summary for the newspaper:"),
        (3, "Headline:"),
    )
)


@pytest.fixture(scope="module")
def reference(bundled_folder: Path) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(bundled_folder, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def real(bundled_folder: Path) -> Any:
    with Driver(Engine(bundled_folder, dtype="float32", device="cpu", kv_gib=0.5)) as drive:
        yield drive


@pytest.fixture(scope="module")
def prompts(real: Driver) -> list[tuple[int, ...]]:
    text = real.engine.text  # type: ignore[attr-defined]
    chats = [text.chat([{"role": "user", "content": chat}]) for chat in CHATS]
    return chats + [text.encode(prompt) for prompt in CODE + SUMMARIES]


@pytest.fixture(scope="module")
def expected(reference: Any, prompts: list[tuple[int, ...]]) -> list[list[int]]:
    """Seven at a time of about one length: most of what is padded is computed for nothing."""
    order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
    found: dict[int, list[int]] = {}
    for at in range(0, len(order), 7):
        some = order[at : at + 7]
        found |= zip(some, generate(reference, [prompts[i] for i in some], NEW), strict=True)
    return [found[i] for i in range(len(prompts))]


def generate(model: Any, prompts: Sequence[Sequence[int]], new: int) -> list[list[int]]:
    """transformers' greedy continuations, end-of-text ignored; the prompts padded on the left to one length."""
    longest = max(map(len, prompts))
    ids = torch.tensor([[2] * (longest - len(prompt)) + list(prompt) for prompt in prompts])
    mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    with torch.inference_mode():
        out = model.generate(
            ids, attention_mask=mask, max_new_tokens=new, do_sample=False, eos_token_id=[-1], pad_token_id=2
        )
    found: list[list[int]] = out[:, longest:].tolist()
    return found


def submit(drive: Driver, prompts: Sequence[Sequence[int]], name: str, new: int = NEW) -> list[str]:
    ids = [f"{name}-{i}" for i in range(len(prompts))]
    for id, prompt in zip(ids, prompts, strict=True):
        drive.add(id, prompt, Sampling(max_tokens=new, ignore_eos=True))
    return ids


def run_mixed(drive: Driver, rng: random.Random, preempt: float) -> int:
    """Steps of random membership and chunk sizes to the end; each step preempts a sequence with this probability.
    Returns the number of preemptions."""
    preempted = 0
    while live := drive.live:
        if rng.random() < preempt and (started := [id for id in live if drive.cached[id]]):
            drive.preempt(rng.choice(started))
            preempted += 1
        members = [id for id in live if rng.random() < 0.8] or live[:1]
        sizes = (1, 7, 33, 64, 500)
        drive.step({id: min(drive.pending(id), rng.choice(sizes)) for id in members})
    return preempted


def test_three_prompts_together_in_random_chunks(reference: Any, real: Driver, prompts: list[tuple[int, ...]]) -> None:
    """One of each kind."""
    some = prompts[3::7]  # 0 to 6 are chats, 7 to 13 code
    assert len(some) == 3
    ids = submit(real, some, "few", new=8)
    run_mixed(real, random.Random(5), preempt=0.1)
    assert [real.ids[id] for id in ids] == generate(reference, some, 8)


@pytest.mark.full  # with what is expected of all of them, a minute
def test_twenty_prompts_together_in_random_chunks(
    real: Driver, prompts: list[tuple[int, ...]], expected: list[list[int]]
) -> None:
    assert len(prompts) == 20
    assert len({len(prompt) for prompt in prompts}) > 12
    ids = submit(real, prompts, "mixed")
    run_mixed(real, random.Random(5), preempt=0.0)
    assert [real.ids[id] for id in ids] == expected


@pytest.mark.full
def test_preemption_changes_no_token(real: Driver, prompts: list[tuple[int, ...]], expected: list[list[int]]) -> None:
    rng = random.Random(6)
    ids = submit(real, prompts, "preempted")
    rng.shuffle(real.free)
    with torch.inference_mode():
        real.engine._model.kv.uniform_(-50, 50)  # type: ignore[attr-defined]  # nothing may depend on KV not its own
    assert run_mixed(real, rng, preempt=0.4) >= 15
    assert [real.ids[id] for id in ids] == expected


def test_llama3_rope_untied_head_and_other_head_counts(tiny: Driver, tiny_folder: Path) -> None:
    """The tiny model's context runs past the rope's original 128 positions."""
    model = transformers.AutoModelForCausalLM.from_pretrained(tiny_folder, dtype=torch.float32).eval()
    rng = random.Random(7)
    prompts = [[rng.randrange(100, 49000) for _ in range(size)] for size in (1, 2, 5, 30, 130, 200, 260)]
    ids = submit(tiny, prompts, "tiny", new=16)
    run_mixed(tiny, rng, preempt=0.3)
    assert [tiny.ids[id] for id in ids] == generate(model, prompts, 16)


@pytest.mark.full
def test_bfloat16_stays_close_to_float32(
    bundled_folder: Path, prompts: list[tuple[int, ...]], expected: list[list[int]]
) -> None:
    """The fast layouts compute the same model: the first token of most prompts is that of float32."""
    with Driver(Engine(bundled_folder, dtype="bfloat16", device="cpu", kv_gib=0.1)) as drive:
        agreed = 0
        for i, prompt in enumerate(prompts):
            drive.add(str(i), prompt, Sampling(max_tokens=1, ignore_eos=True))
            drive.step({str(i): len(prompt)})
            agreed += drive.ids[str(i)] == expected[i][:1]
    assert agreed >= 16
