"""One response, several requests: `n` choices of each of its prompts, in OpenAI's order (first prompt first).

The choices of one prompt are a group: they are placed on one replica and share the prompt's KV. Prompts share nothing
but the response.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from rubato.core.events import Finished
from rubato.core.request import Request


def spread(prompts: Sequence[Request], n: int) -> tuple[Request, ...]:
    """One request a choice. prompts: one request each, which carry the answer's id; a seed counts up from each
    prompt's first choice, else they would all be the same."""
    if len(prompts) == n == 1:
        return tuple(prompts)
    found = []
    for at, prompt in enumerate(prompts):
        group = "" if n == 1 else f"{prompt.id}-{at * n}"  # the id of its first choice
        for choice in range(n):
            sampling = prompt.sampling
            if sampling.seed is not None:
                sampling = replace(sampling, seed=sampling.seed + choice)
            found.append(replace(prompt, id=f"{prompt.id}-{at * n + choice}", group=group, sampling=sampling))
    return tuple(found)


def response_id(requests: Sequence[Request]) -> str:
    """The id of the response that these requests, all of one, are for."""
    id = requests[0].id
    return id if len(requests) == 1 else id.rpartition("-")[0]


def prompt_tokens(request: Request, end: Finished) -> int:
    """Of the prompt, as a bill has them: of several choices of one prompt the first brings them."""
    if request.group not in ("", request.id):
        return 0
    return request.prompt if end.prompt is None else end.prompt


def answer_of(id: str) -> str:
    """The id of the answer (`KIND-HEX`) that the request of this id (`KIND-HEX` or `KIND-HEX-CHOICE`) is for."""
    return "-".join(id.split("-", 2)[:2])


def prompt_of(request: Request) -> str:
    """What all choices of one prompt have in common, and no other request has."""
    return request.group or request.id


def firsts(requests: Sequence[Request]) -> list[int]:
    """Where in an answer's requests each prompt's first choice is."""
    names = [prompt_of(request) for request in requests]
    return [at for at, name in enumerate(names) if at == 0 or name != names[at - 1]]
