"""Text out of tokens: whole characters only, stop strings never shown, stages that end at a literal."""

import random
import threading
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from rubato.core.plan import Emitted  # noqa: E402
from rubato.core.request import Progress, Request, Sampling, Stage  # noqa: E402
from rubato.core.stop_strings import StopText  # noqa: E402
from rubato_torch.sequence import Sequence  # noqa: E402
from rubato_torch.tokenizer import Detokeniser, Text, _sentencepiece  # noqa: E402

TEXTS = (
    "Plain words, 12345 digits and\n\ttabs.",
    "Ein Zäpfchen für Übermut: àéîõū, ß, Ł, ğ, ₿",
    "你好，世界。これはテストです。한국어도 있습니다",
    "🎉🚀 flags 🇫🇷🇩🇪, a family 👨‍👩‍👧‍👦, a thumb 👍🏽 and 𝔘𝔫𝔦𝔠𝔬𝔡𝔢",
    "العربية עברית ไทย हिन्दी",
    "mixed �: a replacement character that was written as such",
)


@pytest.fixture(scope="module")
def text(bundled_folder: Path) -> Text:
    return Text(bundled_folder)


@pytest.mark.parametrize("written", TEXTS)
def test_token_by_token_gives_the_text_and_never_half_a_character(text: Text, written: str) -> None:
    detokeniser = Detokeniser(text.token_bytes)
    pieces = [detokeniser.add(id) for id in text.encode(written)]
    assert "".join(pieces) == written
    at = 0
    for piece in pieces:
        assert written.startswith(piece, at)
        at += len(piece)


def test_some_characters_span_tokens(text: Text) -> None:
    """Else the test above would prove little."""
    detokeniser = Detokeniser(text.token_bytes)
    assert sum(detokeniser.add(id) == "" for id in text.encode("".join(TEXTS[2:5]))) > 20


def test_an_incomplete_character_at_the_end_is_left_out(text: Text) -> None:
    ids = text.encode("so 𝔘")
    detokeniser = Detokeniser(text.token_bytes)
    assert "".join(detokeniser.add(id) for id in ids[:-1]) == "so "


def test_random_tokens_agree_with_the_tokenizer(text: Text) -> None:
    """Whatever comes out, bytes that are no UTF-8 included, is what decoding all at once gives."""
    rng = random.Random(2)
    for _ in range(30):
        ids = [rng.randrange(0, 49152) for _ in range(60)] + list(text.encode(" end"))
        detokeniser = Detokeniser(text.token_bytes)
        assert "".join(detokeniser.add(id) for id in ids) == text.decode(ids)


def test_special_and_unknown_ids_have_no_text(text: Text) -> None:
    detokeniser = Detokeniser(text.token_bytes)
    assert [detokeniser.add(id) for id in (0, 1, 2, 10**6)] == ["", "", "", ""]


def test_sentencepiece_tokens_are_bytes_too() -> None:
    assert [_sentencepiece(t) for t in ("▁the", "<0xE2>", "ing", "<0x>")] == [b" the", b"\xe2", b"ing", b"<0x>"]


@pytest.mark.parametrize(
    ("stops", "pieces", "shown", "held", "stopped"),
    [
        (("END",), ["a E", "N", "D b"], ["a ", "", ""], "", True),
        (("END",), ["a E", "N", "x"], ["a ", "", "ENx"], "", False),
        (("END",), ["one EN"], ["one "], "EN", False),
        (("\n\n", "stop"), ["x\n", "y\n", "\nz"], ["x", "\ny", ""], "", True),
        (("aab",), ["a", "a", "a", "b", "c"], ["", "", "a", ""], "", True),
        (("two", "one"), ["zero one two"], ["zero "], "", True),
        ((), ["as", " it is"], ["as", " it is"], "", False),
        (("",), ["an empty stop string"], ["an empty stop string"], "", False),
    ],
)
def test_stop_strings(stops: tuple[str, ...], pieces: list[str], shown: list[str], held: str, stopped: bool) -> None:
    stop = StopText(stops)
    results = []
    for piece in pieces:
        results.append(stop.add(piece))
        if results[-1][1]:
            break
    assert [final for final, _ in results] == shown
    assert results[-1][1] is stopped
    assert stop.flush() == held


def outputs(text: Text, written: str, sampling: Sampling, *stages: Stage, eos: bool = False) -> list[Emitted]:
    """What a sequence emits while the tokens of `written` are sampled one after another, up to its finish."""
    request = Request("r", (Stage(1, token_ids=(5,)), *stages), 0.0, sampling=sampling)
    if stages:
        request = Request("r", stages, 0.0, sampling=sampling)
    literals = [None if stage.ends == "eos" else text.id_of(stage.ends) for stage in request.stages]
    seq = Sequence(request, text.token_bytes, frozenset({2}), literals)
    found = []
    for id in (*text.encode(written), *((2,) if eos else ())):
        found.append(seq.take(id))
        if found[-1].finish:
            break
    return found


def test_a_stop_string_across_tokens_ends_the_request_unseen(text: Text) -> None:
    found = outputs(text, "The answer is 42.\n###\nNext question", Sampling(stop=("\n###",)))
    assert "".join(out.text for out in found) == "The answer is 42."
    assert found[-1].finish == "stop"
    assert all(out.tokens == len(out.token_ids) == 1 for out in found)


def test_what_was_held_back_comes_out_at_the_end(text: Text) -> None:
    by_eos = outputs(text, "so long ##", Sampling(stop=("###",)), eos=True)
    assert ("".join(out.text for out in by_eos), by_eos[-1].finish) == ("so long ##", "stop")
    size = len(text.encode("so long ##"))
    by_length = outputs(text, "so long ##", Sampling(max_tokens=size, stop=("###",)))
    assert ("".join(out.text for out in by_length), by_length[-1].finish) == ("so long ##", "length")


def test_a_stage_ends_at_its_literal_and_the_next_goes_on(text: Text) -> None:
    stages = (Stage(1, ends="</think>", token_ids=(5,)), Stage(0))
    found = outputs(text, "let me see</think>It is</think> 4", Sampling(), *stages)
    assert [out.stage_done for out in found].count(True) == 1
    at = next(i for i, out in enumerate(found) if out.stage_done)
    assert "".join(out.text for out in found[: at + 1]).startswith("let me see</think>")
    assert "</think>" not in "".join(out.text for out in found[:at])
    assert all(out.finish is None for out in found)


def test_a_stage_may_end_at_a_special_token(text: Text) -> None:
    stages = (Stage(1, ends="<file_sep>", token_ids=(5,)), Stage(2, token_ids=(7, 8)))
    found = outputs(text, "one<file_sep>two", Sampling(), *stages)
    assert [out.stage_done for out in found] == [False, True, False]


def test_encode_and_chat_agree_with_transformers(text: Text, bundled_folder: Path) -> None:
    transformers = pytest.importorskip("transformers")
    theirs = transformers.AutoTokenizer.from_pretrained(bundled_folder)
    for written in TEXTS:
        assert list(text.encode(written)) == theirs(written)["input_ids"]
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hi 👋 1234"},
        {"role": "assistant", "content": "Hello."},
        {"role": "user", "content": "What now?"},
    ]
    for some in (messages, messages[1:]):
        assert list(text.chat(some)) == theirs.apply_chat_template(some, add_generation_prompt=True)


def test_without_a_template_chat_says_so(tmp_path: Path, bundled_folder: Path) -> None:
    (tmp_path / "tokenizer.json").symlink_to(bundled_folder / "tokenizer.json")
    with pytest.raises(ValueError, match="no chat template"):
        Text(tmp_path).chat([{"role": "user", "content": "hello"}])


def test_a_template_that_refuses_is_a_value_error(tmp_path: Path, bundled_folder: Path) -> None:
    (tmp_path / "tokenizer.json").symlink_to(bundled_folder / "tokenizer.json")
    (tmp_path / "chat_template.jinja").write_text("{{ raise_exception('roles must alternate') }}")
    with pytest.raises(ValueError, match="roles must alternate"):
        Text(tmp_path).chat([{"role": "user", "content": "hello"}])


@pytest.mark.parametrize("ignore_eos", [False, True])
def test_a_stop_id_ends_the_text_as_eos_does(text: Text, ignore_eos: bool) -> None:
    ids = text.encode("one two three")
    sampling = Sampling(stop_ids=(ids[2], 10**6), stop=("two!",))
    request = Request("r", (Stage(1, token_ids=(5,)),), 0.0, sampling=sampling)
    seq = Sequence(request, text.token_bytes, frozenset() if ignore_eos else frozenset({2}), [None])
    found = [seq.take(id) for id in ids[:3]]
    assert [out.finish for out in found] == [None, None, "stop"]
    assert "".join(out.text for out in found) == "one two"  # what was held back comes out, the stop id's text does not
    assert found[-1].token_ids == (ids[2],)


def test_every_id_has_a_spelling(text: Text) -> None:
    ids = text.encode("naïve 🎉")
    assert b"".join(text.bytes_of_token(id) for id in ids).decode() == "naïve 🎉"
    assert text.bytes_of_token(2) == b"<|im_end|>"  # no text in an output, but a name where tokens are listed
    assert text.bytes_of_token(10**9) == b""


# --------------------------------------------------------------------------- a request that moved here

THINKING = (Stage(1, ends="</think>", token_ids=(5,)), Stage(0, ends="<file_sep>"), Stage(2, token_ids=(7, 8)))
MOVED = "Zäpf 🇫🇷 EN ENDE 好 a</think>b</th<file_sep>c 🎉 ENx EN"


def state(seq: Sequence) -> dict[str, Any]:
    """All that what it says next depends on."""
    seen = seq.choice.seen
    return {
        "tokens": seq.tokens,
        "output": seq.output,
        "stage": seq.stage,
        "tail": seq._tail,
        "held": seq._stop._withheld,
        "half": seq._detokeniser._decoder.getstate(),
        "random": seq.choice.generator.getstate(),
        "seen": seen and (list(seen.ids), list(seen.counts)),
    }


@pytest.mark.parametrize("temperature", [0.0, 0.7])
@pytest.mark.parametrize("stages", [(Stage(1, token_ids=(5,)),), THINKING])
def test_a_moved_request_goes_on_as_if_it_had_been_here(
    text: Text, stages: tuple[Stage, ...], temperature: float
) -> None:
    """Interrupted after every token in turn, with characters and stop strings half out."""
    ids = text.encode(MOVED)
    sampling = Sampling(temperature=temperature, seed=3, stop=("END!", "c 🎉 ENxy"), repetition_penalty=1.1)
    literals = [None if stage.ends == "eos" else text.id_of(stage.ends) for stage in stages]

    def fresh(progress: Progress | None = None) -> Sequence:
        request = Request("r", stages, 0.0, sampling=sampling, progress=progress)
        return Sequence(request, text.token_bytes, frozenset({2}), literals)

    def take(seq: Sequence, id: int) -> Emitted:
        if temperature:
            seq.choice.generator.random()  # as `choose` does for each token
        return seq.take(id)

    whole = fresh()
    times: list[list[float]] = [[]]
    held = 0
    for at, id in enumerate(ids):
        progress = Progress(tuple(0.0 for _ in times), tuple(map(tuple, times)), ids[:at])
        moved = fresh(progress)
        moved.resume(progress)
        assert state(moved) == state(whole)
        expected = [take(whole, id)]
        assert expected == [take(moved, id)]
        held += expected[0].text == ""
        assert expected[0].finish is None
        times[-1].append(float(at))
        if expected[0].stage_done and len(times) < len(stages):
            times.append([])
    assert len(times) == len(stages)
    assert held > 5


def test_a_progress_that_cannot_be_is_refused(text: Text) -> None:
    def resumed(progress: Progress, **sampling: Any) -> None:
        request = Request("r", (Stage(1, token_ids=(5,)),), 0.0, sampling=Sampling(**sampling))
        Sequence(request, text.token_bytes, frozenset({2}), [None]).resume(progress)

    ids = text.encode("one two")
    with pytest.raises(ValueError, match=r"ends \(length\) with token 2"):
        resumed(Progress((0.0,), ((1.0, 2.0),), ids), max_tokens=2)
    with pytest.raises(ValueError, match=r"ends \(stop\) with token 1"):
        resumed(Progress((0.0,), ((1.0, 2.0),), (2, 5)))
    with pytest.raises(ValueError, match="needs the ids of all its output"):
        resumed(Progress((0.0,), ((1.0, 2.0),)))
    with pytest.raises(ValueError, match="said to have had 2 tokens in 2 stages"):
        resumed(Progress((0.0, 1.0), ((1.0, 2.0), ()), ids))


def test_no_token_of_a_prompt_is_longer_than_the_longest(text: Text) -> None:
    longest = max(text.token_bytes, key=len)
    for written in (longest.decode(), "<|im_start|>", "<|endoftext|>", *TEXTS):
        ids = text.encode(written)
        assert len(written.encode()) <= text.max_token_bytes * len(ids)
    assert text.max_token_bytes == len(longest) == 81  # SmolLM2's, a newline and eighty blanks


def test_other_threads_go_on_while_a_long_text_is_tokenized(text: Text) -> None:
    turns = 0
    over = threading.Event()

    def run() -> None:
        nonlocal turns
        while not over.wait(0.001):
            turns += 1

    thread = threading.Thread(target=run)
    thread.start()
    try:
        before = turns
        assert len(text.encode("7" * 400_000)) == 400_000  # 300 ms and more
        during = turns - before
    finally:
        over.set()
        thread.join()
    assert during >= 10  # two or three where the GIL is held
