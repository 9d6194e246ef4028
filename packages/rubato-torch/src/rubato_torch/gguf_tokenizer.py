"""The tokenizer in a GGUF file's metadata, as the tokenizer.json and tokenizer_config.json of a Hugging Face folder."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tokenizers import (  # type: ignore[import-untyped]
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
)

CONTROL, USER_DEFINED = 3, 4  # GGUF's token types of special tokens and of others that are never split
TOKENS = "tokenizer.ggml.tokens"
KINDS = "tokenizer.ggml.token_type"


@dataclass(frozen=True, slots=True)
class Pieces:
    """How text is cut before byte-level BPE merges, by GGUF's name for it (`tokenizer.ggml.pre`).

    split: the pieces, as a regular expression; None = GPT-2's own. digits: every digit by itself. nfc: normalised
    first. whole: a piece that is a token needs no merges. bos: begins with the beginning-of-text token unless said
    otherwise. ends: tokens that end a text beside the one named eos.
    """

    split: str | None = None
    digits: bool = False
    nfc: bool = False
    whole: bool = False
    bos: bool = False
    ends: tuple[str, ...] = ()


# The patterns are those of the models' own tokenizer.json.
WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
UPPER, LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
CASED = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{UPPER}*{LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{UPPER}+{LOWER}*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
PIECES = {
    "gpt-2": Pieces(),
    "smollm": Pieces(digits=True),
    "llama-bpe": Pieces(split=WORDS % "{1,3}", whole=True, bos=True, ends=("<|eot_id|>", "<|eom_id|>")),
    "qwen2": Pieces(split=WORDS % "", nfc=True, ends=("<|im_end|>", "<|endoftext|>")),
    "tekken": Pieces(split=CASED, whole=True, bos=True),
}


def tokenizer(file: str, fields: dict[str, Any]) -> Tokenizer:
    """From vocabulary and merges (or scores) of the GGUF `file`. Raises ValueError for a kind not known here."""
    kind, pre = fields.get("tokenizer.ggml.model"), fields.get("tokenizer.ggml.pre")
    if kind == "gpt2" and pre in PIECES:
        made = _byte_level(fields, PIECES[pre])
    elif kind == "llama":
        made = _sentencepiece(fields)
    else:
        raise ValueError(
            f"{file} has a tokenizer of model {kind!r}, pre {pre!r}: known are llama (SentencePiece), and gpt2 with "
            f"pre {', '.join(PIECES)}"
        )
    tokens = list(zip(fields[TOKENS], fields[KINDS], strict=True))
    made.add_special_tokens([AddedToken(t, normalized=False, special=True) for t, kind in tokens if kind == CONTROL])
    made.add_tokens([AddedToken(t, normalized=False, special=False) for t, kind in tokens if kind == USER_DEFINED])
    if _begins(fields):
        id = fields["tokenizer.ggml.bos_token_id"]
        bos = fields[TOKENS][id]
        begun = processors.TemplateProcessing(
            single=[bos, "$A"], pair=[bos, "$A", bos, "$B:1"], special_tokens=[(bos, id)]
        )
        if kind == "gpt2":
            begun = processors.Sequence([processors.ByteLevel(trim_offsets=False), begun])
        made.post_processor = begun
    return made


def _begins(fields: dict[str, Any]) -> bool:
    """Whether a text begins with the beginning-of-text token."""
    pieces = PIECES.get(fields.get("tokenizer.ggml.pre", ""))
    usual = pieces.bos if fields["tokenizer.ggml.model"] == "gpt2" and pieces else True
    return fields.get("tokenizer.ggml.add_bos_token", usual) and "tokenizer.ggml.bos_token_id" in fields


def _byte_level(fields: dict[str, Any], pieces: Pieces) -> Tokenizer:
    merges = [tuple(merge.split(" ")) for merge in fields["tokenizer.ggml.merges"]]
    vocab = {token: i for i, token in enumerate(fields[TOKENS])}
    made = Tokenizer(models.BPE(vocab=vocab, merges=merges, ignore_merges=pieces.whole))
    if pieces.nfc:
        made.normalizer = normalizers.NFC()
    if pieces.split is not None:
        first = pre_tokenizers.Split(Regex(pieces.split), behavior="isolated")
        steps = [first, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    else:
        steps = [pre_tokenizers.Digits(individual_digits=True)] if pieces.digits else []
        steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False))
    made.pre_tokenizer = pre_tokenizers.Sequence(steps)
    made.decoder = decoders.ByteLevel()
    return made


def _sentencepiece(fields: dict[str, Any]) -> Tokenizer:
    """Spaces are written as U+2581, one is put before the text, and bytes stand in for characters without a token."""
    tokens: list[str] = fields[TOKENS]
    vocab = {token: i for i, token in enumerate(tokens)}
    unknown = tokens[fields.get("tokenizer.ggml.unknown_token_id", 0)]
    merges = _merges(vocab, fields["tokenizer.ggml.scores"])
    made = Tokenizer(models.BPE(vocab=vocab, merges=merges, unk_token=unknown, fuse_unk=True, byte_fallback=True))
    before = fields.get("tokenizer.ggml.add_space_prefix", True)
    spaces = normalizers.Replace(" ", "\u2581")
    made.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), spaces] if before else [spaces])
    steps = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    made.decoder = decoders.Sequence([*steps, decoders.Strip(content=" ", left=1)] if before else steps)
    return made


def _merges(vocab: dict[str, int], scores: list[float]) -> list[tuple[str, str]]:
    """SentencePiece joins the two neighbours whose joint token scores best: as BPE, every split of a token into two
    others is a merge, in order of the whole's score."""
    found = [
        (-scores[i], i, vocab[token[:at]], vocab[token[at:]], token[:at], token[at:])
        for token, i in vocab.items()
        for at in range(1, len(token))
        if token[:at] in vocab and token[at:] in vocab
    ]
    return [(left, right) for *_, left, right in sorted(found)]


def special_ids(fields: dict[str, Any]) -> dict[str, Any]:
    """As config.json says them: where a text begins, and every id that ends one."""
    get = {name: fields.get(f"tokenizer.ggml.{name}_token_id") for name in ("bos", "eos", "eot", "eom", "padding")}
    pieces = PIECES.get(fields.get("tokenizer.ggml.pre", ""), Pieces())
    kinds = zip(fields[TOKENS], fields[KINDS], strict=True)
    ends = {id for name in ("eos", "eot", "eom") if (id := get[name]) is not None}
    ends |= {i for i, (token, kind) in enumerate(kinds) if kind == CONTROL and token in pieces.ends}
    eos = sorted(ends)
    found = {"bos_token_id": get["bos"], "eos_token_id": eos[0] if len(eos) == 1 else eos or None}
    return {key: id for key, id in {**found, "pad_token_id": get["padding"]}.items() if id is not None}


def tokenizer_config(fields: dict[str, Any], context: int) -> dict[str, Any]:
    names = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
    ids = {hf: fields.get(f"tokenizer.ggml.{name}_token_id") for hf, name in names.items()}
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_prefix_space": False,
        "clean_up_tokenization_spaces": False,
        **{f"{name}_token": fields[TOKENS][id] for name, id in ids.items() if id is not None},
        "model_max_length": context,
    }
    if template := fields.get("tokenizer.chat_template"):
        config["chat_template"] = template
    return config
