"""A response has a request for each of the `n` choices of each prompt, in OpenAI's order (first prompt first).

The choices of one prompt are a group: they are placed on one replica and share the prompt's KV. Prompts share nothing
but the response.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from rubato.core.events import Finished
from rubato.core.request import Request


def spread_choices(prompts: Sequence[Request], n: int) -> tuple[Request, ...]:
    """Makes a request for each choice from one request for each prompt, which has the response's id. A seed is
    increased from choice to choice, or all would be the same."""
    if len(prompts) == n == 1:
        return tuple(prompts)
    requests = []
    for at, prompt in enumerate(prompts):
        group = "" if n == 1 else f"{prompt.id}-{at * n}"  # the id of its first choice
        for choice in range(n):
            sampling = prompt.sampling
            if sampling.seed is not None:
                sampling = replace(sampling, seed=sampling.seed + choice)
            requests.append(replace(prompt, id=f"{prompt.id}-{at * n + choice}", group=group, sampling=sampling))
    return tuple(requests)


def response_id(requests: Sequence[Request]) -> str:
    """Returns the id of the response that all of these requests belong to."""
    id = requests[0].id
    return id if len(requests) == 1 else id.rpartition("-")[0]


def prompt_tokens(request: Request, end: Finished) -> int:
    """Returns the prompt tokens to charge: all of them for the first choice of a prompt, 0 for the others."""
    if request.group not in ("", request.id):
        return 0
    return request.prompt if end.prompt is None else end.prompt


def answer_of(id: str) -> str:
    """Returns the id of the response (`KIND-HEX`) of a request with this id (`KIND-HEX` or `KIND-HEX-CHOICE`)."""
    return "-".join(id.split("-", 2)[:2])


def prompt_of(request: Request) -> str:
    """Returns a key that the choices of one prompt share and no other request has."""
    return request.group or request.id


def first_choices(requests: Sequence[Request]) -> list[int]:
    """Returns the index of each prompt's first choice among a response's requests."""
    names = [prompt_of(request) for request in requests]
    return [at for at, name in enumerate(names) if at == 0 or name != names[at - 1]]
