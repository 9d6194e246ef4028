"""A request of a trace; turns that go on from others, and blocks where they are of fewer than 512 tokens.

A turn comes at its recorded time, or, if that is later, when the one before has ended and its gap has passed. What the
trace says lies between the beginnings of two turns includes an answer that took the time of the recorded system, so
that it is no gap: Bailian's turns have none.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from rubato.core.request import SLO
from rubato.workloads.workload import HASH_BLOCK_TOKENS, Arrival


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One request of a trace.

    Args:
        at: seconds since the first request.
        prompt, output: lengths in tokens.
        tier: "": not said.
        tpot: promised seconds per token.
        tpot_slowdown: the same as a multiple of the unloaded time.
        blocks: ids of the prompt's blocks of 512 tokens.
        text: the prompt itself.
        id: its own.
        after: id of the request that it goes on from, `gap` seconds after that one has ended.
        session: the session's name; "" where the trace names none.
        slo: in full, where the trace is an event log.
    """

    at: float
    prompt: int
    output: int
    tier: str = ""
    tpot: float | None = None
    tpot_slowdown: float | None = None
    blocks: tuple[int, ...] = ()
    text: str = ""
    id: str = ""
    after: str = ""
    session: str = ""
    gap: float = 0.0
    slo: SLO | None = None


def coarser(ids: Sequence[int], block: int, names: dict[tuple[int, ...], int]) -> tuple[int, ...]:
    """Returns ids of blocks of 512 tokens from those of smaller ones: equal where all smaller ones are. A prefix that
    ends within 512 tokens is found up to the last whole block only.

    Args:
        names: ids given so far, by the ids of the smaller blocks.
    """
    each = HASH_BLOCK_TOKENS // block
    runs = (tuple(ids[first : first + each]) for first in range(0, len(ids), each))
    return tuple(names.setdefault(run, len(names)) for run in runs)


def of_parents(offers: Sequence[TraceRequest], name: str) -> list[TraceRequest]:
    """Bailian's: each says which request it goes on from, and a session is all that comes from one. A parent that is
    not there is as none. Raises ValueError, naming the trace, for two requests with one id."""
    ids: set[str] = set()
    for offer in offers:
        if offer.id in ids:
            raise ValueError(f"{name} has two requests with chat_id {offer.id}: give each its own")
        ids.add(offer.id)
    after = {offer.id: offer.after for offer in offers if offer.after in ids}
    roots: dict[str, str] = {}

    def root(id: str) -> str:
        chain = [id]
        while chain[-1] not in roots and chain[-1] in after and len(chain) <= len(ids):
            chain.append(after[chain[-1]])
        found = roots.get(chain[-1], chain[-1])
        roots.update(dict.fromkeys(chain, found))
        return found

    return [replace(offer, after=after.get(offer.id, ""), session=root(offer.id)) for offer in offers]


def of_sessions(offers: Sequence[TraceRequest]) -> list[TraceRequest]:
    """aiperf's: turns of a session in the file's order, `gap` after the one before. Each says what it adds: its prompt
    is all before it, answers included, and that. Blocks are the session's own, since those of what is added do not end
    where blocks of the prompt do."""
    last: dict[str, TraceRequest] = {}
    base: dict[str, int] = {}  # session -> id of its first block
    longest = sum((o.prompt + o.output) // HASH_BLOCK_TOKENS + 1 for o in offers)  # blocks, more than any session has
    turns: list[TraceRequest] = []
    for offer in offers:
        before = last.get(offer.session)
        first = base.setdefault(offer.session, len(base) * longest)
        prompt, at = offer.prompt, offer.at
        if before is not None:
            prompt, at = prompt + before.prompt + before.output, max(at, before.at + offer.gap)
        blocks = tuple(range(first, first - -prompt // HASH_BLOCK_TOKENS))
        last[offer.session] = replace(
            offer, at=at, prompt=prompt, blocks=blocks, after="" if before is None else before.id
        )  # fmt: skip
        turns.append(last[offer.session])
    return turns


def linked(name: str, rows: Sequence[Arrival], offers: Sequence[TraceRequest]) -> tuple[Arrival, ...]:
    """The arrivals made of a trace's requests, in their order, as turns of its sessions. Raises ValueError for a turn
    that is recorded before the one that it goes on from."""
    places: Mapping[str, str] = {offer.id: row.id for offer, row in zip(offers, rows, strict=True) if offer.id}
    come: set[str] = set()
    arrivals: list[Arrival] = []
    for row, offer in zip(rows, offers, strict=True):
        after = places.get(offer.after, "")
        if after and after not in come:
            raise ValueError(f"trace {name!r}: {offer.id} is recorded before {offer.after}, from which it goes on")
        come.add(row.id)
        arrivals.append(replace(row, after=after, gap=offer.gap if after else 0.0, session=offer.session))
    return tuple(arrivals)
