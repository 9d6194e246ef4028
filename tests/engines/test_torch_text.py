"""Text out of tokens: whole characters only, stop strings never shown, stages that end at a literal."""

import random
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from rubato.engines.torch.sequence import Sequence  # noqa: E402
from rubato.engines.torch.text import Detokeniser, StopText, Text, _sentencepiece  # noqa: E402
from rubato.types import Emitted, Request, Sampling, Stage  # noqa: E402

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
