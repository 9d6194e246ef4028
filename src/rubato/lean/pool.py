"""Those that decode on a lean replica, as counts; and at which step somebody must look at one of them."""

from __future__ import annotations

from heapq import heappop, heappush

from rubato.kv import blocks_for
from rubato.lean.run import Run
from rubato.lean.seq import DECODING, LeanSeq


class Pool:
    """count: sequences that the next step of all decodes advances; kv: tokens they have in KV. block: tokens of a KV
    block."""

    def __init__(self, block: int) -> None:
        self.count = 0
        self.kv = 0
        self._block = block
        self._phases = [0] * block  # how many need another block at which ticks, modulo block
        self._milestones: list[tuple[int, int, LeanSeq]] = []

    def join(self, seq: LeanSeq, tick: int) -> None:
        """From this step on it decodes."""
        self.count += 1
        self.kv += seq._cached
        seq.decode(tick)
        self._phases[seq._cached % self._block] += 1
        self.aim(seq, tick)

    def leave(self, seq: LeanSeq, tick: int, state: int) -> None:
        """From this step on it does not, if it did."""
        if seq.state == DECODING:
            self.count -= 1
            self.kv -= seq.cached
            self._phases[seq._cached % self._block] -= 1
        seq.halt(tick, state)

    def aim(self, seq: LeanSeq, tick: int) -> None:
        """Somebody must look at it when its first or its last token of the stage comes."""
        seq.due_tick = (tick + 1) if seq.first_token_at is None else seq.target - seq._output
        heappush(self._milestones, (seq.due_tick, seq.order, seq))

    def steps_left(self, tick: int, most: int) -> int:
        """Until somebody must look at one, at most `most`."""
        milestones = self._milestones
        while milestones and not _due(*milestones[0]):
            heappop(milestones)
        return min(most, milestones[0][0] - tick) if milestones else most

    def due(self, tick: int) -> bool:
        """Whether a first or last token of a stage may have come."""
        return bool(self._milestones) and self._milestones[0][0] <= tick

    def came(self, tick: int) -> list[LeanSeq]:
        """Whose has."""
        found: list[LeanSeq] = []
        while self.due(tick):
            entry = heappop(self._milestones)
            if _due(*entry):
                found.append(entry[2])
        return found

    def blocks(self, tick: int) -> int:
        """KV blocks that a step of all decodes needs at this tick."""
        return self._phases[-tick % self._block]

    def count_blocks(self, run: Run, most: int) -> None:
        """KV blocks taken when each step begins, cumulated; fewer steps than `most` when they would run short."""
        block, phases, needs, free, need = self._block, self._phases, run.needs, run.free, 0
        for i in range(most):
            need += phases[-(run.tick + i) % block]
            for part in run.chunks:
                before = part.start + i * part.tokens
                need += blocks_for(before + part.tokens, block) - blocks_for(before, block)
            if need > free and i:
                break
            needs.append(need)


def _due(tick: int, order: int, seq: LeanSeq) -> bool:
    return seq.state == DECODING and seq.due_tick == tick and not seq.ended
