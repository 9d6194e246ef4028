"""Text to token ids and back: the folder's tokenizer, its chat template, and what of a growing output is final.

Output is put together from bytes, token by token, so each token costs the same however long the output is, and a
character that spans tokens comes out when its last byte is there.
"""

from __future__ import annotations

import codecs
import json
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any, NoReturn

from jinja2 import TemplateError
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer  # type: ignore[import-untyped]

from rubato_torch.model_config import read_json


def vocabulary(folder: Path) -> dict[str, int]:
    """Every token of the folder's tokenizer and its id; {} where it has no tokenizer.json."""
    path = folder / "tokenizer.json"
    return dict(Tokenizer.from_file(str(path)).get_vocab()) if path.is_file() else {}


class Text:
    """A model folder's tokenizer. Raises FileNotFoundError without tokenizer.json, ValueError for a kind of
    tokenizer whose tokens cannot be turned into bytes one by one."""

    def __init__(self, folder: Path) -> None:
        path = folder / "tokenizer.json"
        if not path.is_file():
            raise FileNotFoundError(f"model {str(folder)!r} has no tokenizer.json: the torch engine reads no other")
        self._tokenizer = Tokenizer.from_file(str(path))
        self._config = read_json(folder / "tokenizer_config.json")
        self._template = _chat_template(folder, self._config)
        self._kind = _decoder_kind(json.loads(path.read_text(encoding="utf-8")).get("decoder"))
        if self._kind is None:
            raise ValueError(f"the tokenizer of {str(folder)!r} is neither byte-level BPE nor SentencePiece BPE")

    def encode(self, text: str, special: bool = True) -> tuple[int, ...]:
        """The ids of a plain prompt. special: with the tokenizer's own beginning-of-text token, where it has one."""
        # as a batch: `encode` holds the GIL, and with it all other threads, until it is done; this one does not
        return tuple(self._tokenizer.encode_batch_fast([text], add_special_tokens=special)[0].ids)

    def chat(self, messages: Sequence[Mapping[str, Any]]) -> tuple[int, ...]:
        """The ids of a dialogue up to where the assistant is to speak. Raises ValueError, with the template's words,
        for messages that the model's chat template refuses, and when the model has no template."""
        if self._template is None:
            raise ValueError("this model has no chat template: send a plain prompt instead of messages")
        names = {f"{name}_token": self.special(f"{name}_token") or "" for name in ("bos", "eos", "unk", "pad")}
        try:
            text = self._compiled.render(messages=messages, add_generation_prompt=True, **names)
        except (TemplateError, TypeError) as error:
            raise ValueError(f"the model's chat template refuses these messages: {error}") from error
        return self.encode(text, special=False)

    def decode(self, ids: Iterable[int]) -> str:
        """The text of `ids`, special tokens left out."""
        text: str = self._tokenizer.decode(list(ids), skip_special_tokens=True)
        return text

    def bytes_of_token(self, id: int) -> bytes:
        """The bytes that `id` stands for; a special token's own name. b"" for an id beyond the vocabulary."""
        if 0 <= id < len(self.token_bytes) and self.token_bytes[id]:
            return self.token_bytes[id]
        name: str | None = self._tokenizer.id_to_token(id)
        return b"" if name is None else name.encode()

    def special(self, name: str) -> str | None:
        """The text of e.g. "eos_token" by tokenizer_config.json."""
        value = self._config.get(name)
        return value.get("content") if isinstance(value, dict) else value

    def id_of(self, token: str) -> int | None:
        """The id of a token given in full, e.g. "<|im_end|>"."""
        id: int | None = self._tokenizer.token_to_id(token)
        return id

    @cached_property
    def max_token_bytes(self) -> int:
        """The bytes of UTF-8 in a prompt that one token stands for at most; special tokens have names in a prompt.

        A tokenizer that drops text (whitespace beside a special token, what Unicode normalization shortens) can go
        beyond it. The longest token being some twenty times the usual one, a context is full of other text long before.
        """
        names = (added.content for added in self._tokenizer.get_added_tokens_decoder().values())
        return max(*map(len, self.token_bytes), *(len(name.encode()) for name in names), 1)

    @cached_property
    def token_bytes(self) -> list[bytes]:
        """The bytes that each id stands for in an output; none for special tokens."""
        to_bytes = _byte_level if self._kind == "ByteLevel" else _sentencepiece
        size = self._tokenizer.get_vocab_size()
        table = [b""] * size
        for token, i in self._tokenizer.get_vocab().items():
            if i < size:
                table[i] = to_bytes(token)
        for i, added in self._tokenizer.get_added_tokens_decoder().items():
            if i < size:
                table[i] = b"" if added.special else added.content.encode()
        return table

    @cached_property
    def _compiled(self) -> Any:
        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = _raise
        environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
        return environment.from_string(self._template or "")


class Detokeniser:
    """Ids in, text out, one output: never a part of a character. Bytes that are no UTF-8 become U+FFFD once it is
    certain; a character still incomplete at the end of the output is left out."""

    def __init__(self, token_bytes: Sequence[bytes]) -> None:
        self._bytes = token_bytes
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def add(self, id: int) -> str:
        # an id beyond the tokenizer's vocabulary (padding of the model's output matrix) has no text
        return self._decoder.decode(self._bytes[id] if id < len(self._bytes) else b"")


def _chat_template(folder: Path, config: dict[str, Any]) -> str | None:
    path = folder / "chat_template.jinja"
    if path.is_file():
        return path.read_text(encoding="utf-8")
    template = config.get("chat_template")
    if isinstance(template, list):  # several, by name
        return next((t["template"] for t in template if t["name"] == "default"), None)
    return template


def _decoder_kind(decoder: dict[str, Any] | None) -> str | None:
    """ "ByteLevel" or "ByteFallback", by what the tokenizer's decoder is or contains."""
    for step in [decoder, *(decoder or {}).get("decoders", [])]:
        if step and step["type"] in ("ByteLevel", "ByteFallback"):
            return str(step["type"])
    return None


def _byte_of_character() -> dict[str, int]:
    """GPT-2's byte-level alphabet: printable Latin-1 stands for itself, the other bytes for U+0100 onwards in order."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


BYTE_OF = _byte_of_character()


def _byte_level(token: str) -> bytes:
    if all(character in BYTE_OF for character in token):
        return bytes(BYTE_OF[character] for character in token)
    return token.encode()


def _sentencepiece(token: str) -> bytes:
    if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
        return bytes([int(token[3:5], 16)])
    return token.replace("\u2581", " ").encode()


def _tojson(value: Any, indent: int | None = None) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _raise(message: str) -> NoReturn:
    raise TemplateError(message)
