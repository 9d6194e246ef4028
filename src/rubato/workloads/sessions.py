"""Sessions of turns: each goes on from the one before, after a tool, with the whole of that one's prompt and answer.

Sessions arrive as requests do; a session's turns follow from its own run (`offering`). A turn's prompt is the first
tokens of its session's stream of blocks: what all sessions of the workload share (a system prompt), then what each
turn adds and what the model answered. So a prefix cache finds the prompt of the turn before. The answer's own KV is not
found in simulation, where its tokens are other ones than the next prompt says: that much is prefilled again.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from rubato.core.request import SLO
from rubato.workloads.arrivals import ArrivalProcess, Poisson, offered
from rubato.workloads.lengths import Ints, Lengths
from rubato.workloads.workload import HASH_BLOCK_TOKENS, NO_SLO, Arrival, Workload, check_rate

_ARRIVALS, _TURNS, _LENGTHS, _GAPS = 30, 31, 32, 33  # random streams, none of `generate.make`'s


@dataclass(frozen=True)
class Sessions:
    """Conversations of agents: each turn adds to what was said before.

    Args:
        turns: number of turns of a session.
        new: tokens that each turn adds to the prompt.
        output: tokens of an answer.
        gap: milliseconds of the tool before each turn but the first.
        system: tokens that all sessions begin with, whole blocks of 512.
        seconds_per_turn: a session's e2e is that many for each turn, and its gaps.
        slo: of each turn, besides.
    """

    turns: Lengths
    new: Lengths
    output: Lengths
    gap: Lengths
    system: int
    seconds_per_turn: float
    slo: SLO = NO_SLO
    tier: str = "agent"

    def __post_init__(self) -> None:
        if self.system % HASH_BLOCK_TOKENS:
            raise ValueError(f"system is {self.system} tokens: give a multiple of {HASH_BLOCK_TOKENS}")

    def means(self) -> tuple[float, float, float]:
        """Turns of a session; prompt and output tokens of a turn."""
        turns = np.maximum(1, self.turns.at(_midpoints()))
        new, output = (float(np.maximum(1, of.at(_midpoints())).mean()) for of in (self.new, self.output))
        mean = float(turns.mean())
        before = float((turns * (turns - 1) / 2).mean()) / mean  # turns before a turn
        return mean, self.system + new * (before + 1.0) + output * before, output


def _midpoints() -> Any:
    return (np.arange(100_000) + 0.5) / 100_000


def make(
    name: str,
    of: Sessions,
    rate: float,
    *,
    count: int | None = None,
    duration: float | None = None,
    seed: int = 0,
    arrivals: ArrivalProcess | None = None,
    scale: float = 1.0,
    max_model_len: int | None = None,
    profile: str = "",
) -> Workload:
    """Makes sessions whose turns come at `rate` requests/s in the mean: those that begin in `duration` seconds, or as
    many as have about `count` turns. A turn's `at` is when it comes if no answer takes any time.

    Args:
        scale: factor on the number of new tokens.
        max_model_len: a session ends before the turn that would exceed it.

    Raises:
        ValueError: impossible arguments, or when no turn fits.
    """
    check_rate(rate)
    mean = of.means()[0]
    process = arrivals or Poisson()
    sessions = None if count is None else max(1, round(count / mean))
    begins = offered(process, rate / mean, [seed, _ARRIVALS], sessions, duration)
    turns = np.maximum(1, of.turns.at(np.random.default_rng([seed, _TURNS]).random(len(begins))))
    new_of = of.new if scale == 1.0 else of.new.scaled(scale)
    all_turns: list[Arrival] = []
    block = of.system // HASH_BLOCK_TOKENS  # ids below are the system prompt's
    for number, (at, n) in enumerate(zip(begins.tolist(), turns.tolist(), strict=True)):
        u = np.random.default_rng([seed, _LENGTHS, number]).random((2, n))
        new, output = np.maximum(1, new_of.at(u[0])), np.maximum(1, of.output.at(u[1]))
        gaps = of.gap.at(np.random.default_rng([seed, _GAPS, number]).random(n)) / 1e3
        gaps[0] = 0.0
        own = _turns(of, f"{name}-{number}", at, (new, output, gaps), block, max_model_len)
        block += -(-(own[-1].prompt_tokens) // HASH_BLOCK_TOKENS) if own else 0
        all_turns += own
    if not all_turns:
        raise ValueError(f"workload {name!r} is empty: no session begins in {duration} s, or no turn fits")
    all_turns.sort(key=lambda a: a.at)
    length = duration if duration is not None else float(begins[-1])
    notes = {"arrivals": f"{process}, of sessions", "sessions": len({a.session for a in all_turns})}
    return Workload(name, seed, rate, length, {of.tier: of.slo}, tuple(all_turns), True, notes, profile)


def _turns(
    of: Sessions, session: str, at: float, drawn: tuple[Ints, Ints, Any], block: int, max_model_len: int | None
) -> list[Arrival]:
    """Makes the turns of one session.

    Args:
        drawn: new tokens, output tokens and gaps of each turn.
        block: id of the first block that is its own.
    """
    session_turns: list[Arrival] = []
    prompt = of.system
    for turn, (new, output, gap) in enumerate(zip(*(column.tolist() for column in drawn), strict=True)):
        prompt += new
        if max_model_len is not None and prompt + output > max_model_len:
            break
        at += gap
        own_blocks = -((of.system - prompt) // HASH_BLOCK_TOKENS)  # rounded up
        ids = (*range(of.system // HASH_BLOCK_TOKENS), *range(block, block + own_blocks))
        session_turns.append(
            Arrival(
                f"{session}-{turn}", at, of.tier, of.tier, prompt, output, blocks=ids, session=session,
                after=f"{session}-{turn - 1}" if turn else "", gap=gap,
            )
        )  # fmt: skip
        prompt += output
    if not session_turns:
        return []
    e2e = sum(a.gap for a in session_turns) + of.seconds_per_turn * len(session_turns)
    return [replace(session_turns[0], session_e2e=e2e), *session_turns[1:]]
