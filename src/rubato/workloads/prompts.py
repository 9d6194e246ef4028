"""Prompt texts of our own for load generation: chat questions, Python modules to complete, reports to summarise.

Each text is composed from fragments by a small grammar, so that prompts are plausible, fresh (a prefix cache finds
nothing to reuse beyond the opening words) and reproducible: the same generator state gives the same text. Sizes are
in tokens by `estimate`, so a text does not depend on the tokenizer of whichever model it is sent to.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from importlib import resources
from itertools import chain, repeat
from typing import Any

import numpy as np
import yaml

from rubato.workloads.workload import Arrival, Workload

# What byte-pair vocabularies of 30-130k entries do with English and Python: a common word with its leading space is
# one token, a long one two, a run of digits or of punctuation one or more, a line break with its indentation one.
_PIECE = re.compile(r"\n\s*|[A-Za-z]+|\d|[^\sA-Za-z\d]+")

SLACK = 8


def estimate(text: str) -> int:
    """About how many tokens a byte-pair tokenizer makes of `text` (no chat template); 1 or more."""
    tokens = 0
    for piece in _PIECE.findall(text):
        tokens += 1 + (len(piece) - 1) // 9 if piece[0].isalpha() else 1 + (len(piece) - 1) // 4
    return max(1, tokens)


@cache
def _fragments() -> dict[str, Any]:
    """The word lists and sentences of `prompt_fragments.yaml`."""
    text = (resources.files("rubato.workloads") / "prompt_fragments.yaml").read_text(encoding="utf-8")
    fragments: dict[str, Any] = yaml.safe_load(text)
    return fragments


class _Slots(dict[str, str]):
    """Values for one fragment's slots: `{person}` and `{person2}` are two draws from the list `person`, each kept for
    the rest of the fragment (and distinct from the other where the list allows)."""

    def __init__(self, rng: np.random.Generator, lists: Mapping[str, Sequence[str]], **given: str) -> None:
        super().__init__(given)
        self.rng, self.lists = rng, lists

    def __missing__(self, key: str) -> str:
        kind = key.rstrip("0123456789")
        if kind == "n":
            value = str(self.rng.integers(2, 60))
        elif kind == "big":
            value = str(self.rng.integers(110, 9800))
        else:
            choices = [word for word in self.lists[kind] if word not in self.values()] or self.lists[kind]
            value = _pick(self.rng, choices)
            if "{" in value:
                value = value.format_map(self)
        self[key] = value
        return value


def _pick(rng: np.random.Generator, choices: Sequence[Any]) -> Any:
    return choices[int(rng.integers(len(choices)))]


def _shuffled(rng: np.random.Generator, choices: Sequence[str]) -> list[str]:
    return [choices[i] for i in rng.permutation(len(choices))]


def _endless(rng: np.random.Generator, choices: Sequence[str]) -> Iterator[str]:
    """All choices in random order, then all in another; the first order is drawn at once."""
    return chain(_shuffled(rng, choices), chain.from_iterable(_shuffled(rng, choices) for _ in repeat(None)))


def _upper_first(text: str) -> str:
    return text[:1].upper() + text[1:]


def _grow(head: str, tail: str, tokens: int, joint: str, fragments: Iterator[str]) -> str:
    """head + fragments + tail, as near to `tokens` as whole fragments allow: it stops at the tenth that would go
    beyond by more than SLACK tokens, or by more than half of itself."""
    size = estimate(head) + estimate(tail)
    middle: list[str] = []
    passed = 0
    while passed < 10:
        text = next(fragments)
        more = estimate(joint + text)
        if size + more > tokens + min(more / 2, SLACK):
            passed += 1
        else:
            middle.append(text)
            size += more
    return joint.join(part for part in (head, *middle, tail) if part)


def chat(rng: np.random.Generator, tokens: int) -> str:
    """A question of everyday life or work, as a person would type it, of about `tokens` tokens."""
    parts, words = _fragments()["chat"], _fragments()["everyday"]
    slots = _Slots(rng, words)
    topic = slots["topic"] = _pick(rng, parts["topics"]).format_map(slots)
    ask = _pick(rng, parts["asks"]).format_map(slots)
    contexts = _endless(rng, parts["context"])
    opener = _pick(rng, parts["openers"]).format_map(slots)
    filled = (_upper_first(text.format_map(_Slots(rng, words, topic=topic))) for text in contexts)
    return _grow(opener, ask, tokens, " ", filled)


def code(rng: np.random.Generator, tokens: int) -> str:
    """A Python module of about `tokens` tokens that breaks off after the docstring of its last function, with the
    request to finish it. What precedes the break is valid Python."""
    parts = _fragments()["code"]
    words = parts["words"]
    functions = _endless(rng, parts["functions"])
    last = _Slots(rng, words)
    tail = _pick(rng, parts["unfinished"]).format_map(last) + "\n```"
    constants = "\n".join(
        f"{name} = {rng.integers(2, 900)}" for name in _shuffled(rng, words["constant"])[: int(rng.integers(1, 4))]
    )
    imports = "\n".join(sorted(_shuffled(rng, parts["imports"])[: int(rng.integers(2, 5))]))
    ask = _pick(rng, parts["asks"])
    about = _pick(rng, parts["docs"]).format_map(last)
    head = f'{ask}\n\n```python\n"""{about}"""\n\n{imports}\n\n{constants}'
    return _grow(head, tail, tokens, "\n\n\n", (text.format_map(_Slots(rng, words)) for text in functions))


def summary(rng: np.random.Generator, tokens: int) -> str:
    """A report of some organisation's doings, of about `tokens` tokens, with the request to summarise it."""
    parts = _fragments()["report"]
    words = _fragments()["everyday"] | parts["words"] | _pick(rng, parts["settings"])
    title = _pick(rng, parts["titles"]).format_map(_Slots(rng, words))
    ask = _pick(rng, parts["asks"]).format_map(_Slots(rng, words))
    head = f"{ask}\n\n{_upper_first(title)}\n\n"
    order = _endless(rng, parts["sentences"])

    def sentences() -> Iterator[str]:
        for index, text in enumerate(order):
            link = _pick(rng, parts["links"]) if index % 3 == 2 else ""
            filled = text.format_map(_Slots(rng, words))
            yield f"{link}, {filled}" if link else _upper_first(filled)

    return head + _grow("", "", tokens - estimate(head), " ", sentences())


TEXTS: Mapping[str, Callable[[np.random.Generator, int], str]] = {"chat": chat, "code": code, "summary": summary}


# --------------------------------------------------------------------------- prompts for requests of given lengths

Count = Callable[[str], int]
STREAM = 3  # of `generate.make`'s random streams: the same seed makes the same texts, at once or later


def fresh_text(app: str, tokens: int, rng: np.random.Generator, seen: set[str]) -> str:
    """A text that this workload does not have yet (`seen`). Raises ValueError when there is none of that length."""
    for _ in range(100):
        text = TEXTS[app](rng, tokens)
        if text not in seen:
            seen.add(text)
            return text
    raise ValueError(f"no fresh {app} prompt of {tokens} tokens in 100 tries: allow longer prompts")


def with_texts(workload: Workload, count_tokens: Count | None = None) -> Workload:
    """The same workload with a fresh text of about its length for each request that has none; prompt_tokens are the
    text's. Apps that have no texts of their own get those of chat. Prompts that begin alike will not.

    Raises ValueError for a request of several stages: only an engine that knows no text can end them where it should.
    """
    used_texts: set[str] = set()

    def written(index: int, a: Arrival) -> Arrival:
        if a.parts:
            raise ValueError(f"request {a.id!r} has {len(a.parts)} stages: this workload can only be simulated")
        if a.messages:
            return a
        app = a.app if a.app in TEXTS else "chat"
        text = fresh_text(app, a.prompt_tokens, np.random.default_rng([workload.seed, STREAM, index]), used_texts)
        tokens = count_tokens(text) if count_tokens is not None else estimate(text)
        return dataclasses.replace(a, prompt_tokens=tokens, messages=(("user", text),), blocks=())

    arrivals = tuple(written(index, a) for index, a in enumerate(workload.arrivals))
    return dataclasses.replace(workload, arrivals=arrivals, counted=count_tokens is not None)
