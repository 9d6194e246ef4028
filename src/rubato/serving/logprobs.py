"""Log probabilities in OpenAI's two shapes: a list of tokens in a chat, parallel lists in a completion."""

from __future__ import annotations

import codecs
from collections.abc import Callable, Iterable
from typing import Any

from rubato.core.plan import Logprob

TokenBytes = Callable[[int], bytes]


def chat(token_bytes: TokenBytes, logprobs: Iterable[Logprob]) -> dict[str, Any]:
    """Returns `choices[].logprobs` of a chat. A token that is part of a character has a replacement character as
    `token` and exact `bytes`."""

    def entry(token: int, logprob: float) -> dict[str, Any]:
        raw = token_bytes(token)
        return {"token": raw.decode(errors="replace"), "logprob": logprob, "bytes": list(raw)}

    content = [
        {**entry(one.token, one.logprob), "top_logprobs": [entry(id, value) for id, value in one.top]}
        for one in logprobs
    ]
    return {"content": content, "refusal": None}


class Offsets:
    """Makes `choices[].logprobs` of a completion, chunk by chunk: token offsets go on from chunk to chunk.

    Offsets count characters of the output's own text. A token that is no UTF-8 by itself is spelled as OpenAI spells
    it, "bytes:\\xe2\\x82": two of them must not become one key of `top_logprobs`.
    """

    __slots__ = ("_at", "_decoder", "_token_bytes")

    def __init__(self, token_bytes: TokenBytes) -> None:
        self._token_bytes = token_bytes
        self._at = 0
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def add(self, logprobs: Iterable[Logprob]) -> dict[str, Any]:
        tokens, values, tops, offsets = [], [], [], []
        for one in logprobs:
            raw = self._token_bytes(one.token)
            token = _name(raw)
            # of two with one spelling the likelier stays; the chosen one always, even beyond the n likeliest
            top = {_name(self._token_bytes(id)): value for id, value in reversed(one.top)}
            top[token] = one.logprob
            tokens.append(token)
            values.append(one.logprob)
            tops.append(top)
            offsets.append(self._at)
            self._at += len(self._decoder.decode(raw))
        return {"tokens": tokens, "token_logprobs": values, "top_logprobs": tops, "text_offset": offsets}


def _name(raw: bytes) -> str:
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)
