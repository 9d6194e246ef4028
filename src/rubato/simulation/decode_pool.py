"""The decodes of a counted replica, as counts, and the steps at which one of them has to be looked at."""

from __future__ import annotations

from heapq import heappop, heappush

from rubato.simulation.fast_sequence import DECODING, FastSeq

NEVER = 1 << 60


class DecodePool:
    """count: sequences that the next step of all decodes advances; kv: tokens they have in KV. block: tokens of a KV
    block. next: no step before this one brings anybody's first or last token of a stage."""

    def __init__(self, block: int) -> None:
        self.count = 0
        self.kv = 0
        self.next = NEVER
        self._block = block
        self._wants = [0] * (2 * block)  # how many need another block at ticks that leave this remainder; twice over
        self._milestones: list[tuple[int, int, FastSeq]] = []

    def join(self, seq: FastSeq, tick: int) -> None:
        """From this step on it decodes; `aim` it."""
        self.count += 1
        self.kv += seq._cached
        seq.decode(tick)
        self._want(seq, 1)

    def leave(self, seq: FastSeq, tick: int, state: int) -> None:
        """From this step on it does not, if it did."""
        if seq.state == DECODING:
            self.count -= 1
            self.kv -= seq._cached + tick
            self._want(seq, -1)
        seq.halt(tick, state)

    def _want(self, seq: FastSeq, more: int) -> None:
        at = -seq._cached % self._block
        self._wants[at] += more
        self._wants[at + self._block] += more

    def aim(self, seq: FastSeq, tick: int) -> None:
        """Somebody must look at it when its first or its last token of the stage comes."""
        due = seq.due_tick = (tick + 1) if seq.first_token_at is None else seq.target - seq._output
        heappush(self._milestones, (due, seq.order, seq))
        if due < self.next:
            self.next = due

    def came(self, tick: int) -> list[FastSeq]:
        """Whose first or last token of a stage has come."""
        found: list[FastSeq] = []
        milestones = self._milestones
        while milestones and milestones[0][0] <= tick:
            due, _, seq = heappop(milestones)
            if seq.due_tick == due and seq.state == DECODING and not seq.ended:
                seq.due_tick = -1  # it may be there twice, having rested
                found.append(seq)
        self.next = milestones[0][0] if milestones else NEVER
        return found

    def blocks(self, tick: int) -> int:
        """KV blocks that a step of all decodes needs at this tick."""
        return self._wants[tick % self._block]

    def blocks_until(self, tick: int, steps: int) -> int:
        """KV blocks that so many steps of all decodes need from this tick on."""
        block = self._block
        first = tick % block
        if steps <= block:
            return sum(self._wants[first : first + steps])
        whole, rest = divmod(steps, block)
        return whole * self.count + sum(self._wants[first : first + rest])
