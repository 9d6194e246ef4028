"""Prompt texts for requests that so far have lengths only."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np

from rubato.workloads import prompts
from rubato.workloads.workload import Arrival, Workload

Count = Callable[[str], int]
STREAM = 3  # of `making.make`'s random streams: the same seed makes the same texts, at once or later


def fresh_text(app: str, tokens: int, rng: np.random.Generator, seen: set[str]) -> str:
    """A text that this workload does not have yet (`seen`). Raises ValueError when there is none of that length."""
    for _ in range(100):
        text = prompts.TEXTS[app](rng, tokens)
        if text not in seen:
            seen.add(text)
            return text
    raise ValueError(f"no fresh {app} prompt of {tokens} tokens in 100 tries: allow longer prompts")


def with_texts(workload: Workload, count_tokens: Count | None = None) -> Workload:
    """The same workload with a fresh text of about its length for each request that has none; prompt_tokens are the
    text's. Apps that have no texts of their own get those of chat. Prompts that begin alike will not.

    Raises ValueError for a request of several stages: only an engine that knows no text can end them where it should.
    """
    seen: set[str] = set()

    def written(index: int, a: Arrival) -> Arrival:
        if a.parts:
            raise ValueError(f"request {a.id!r} has {len(a.parts)} stages: this workload can only be simulated")
        if a.messages:
            return a
        app = a.app if a.app in prompts.TEXTS else "chat"
        text = fresh_text(app, a.prompt_tokens, np.random.default_rng([workload.seed, STREAM, index]), seen)
        tokens = count_tokens(text) if count_tokens is not None else prompts.estimate(text)
        return dataclasses.replace(a, prompt_tokens=tokens, messages=(("user", text),), blocks=())

    arrivals = tuple(written(index, a) for index, a in enumerate(workload.arrivals))
    return dataclasses.replace(workload, arrivals=arrivals, counted=count_tokens is not None)
