"""Lets requests of one group (`Request.group`) share the KV of one prompt: the others wait for the first's prefill."""

from __future__ import annotations

from collections.abc import Callable, Container

from rubato.replica.sequence import Seq


class Groups:
    """Sequences by group, in order of submission.

    Args:
        block_size: tokens of a KV block.
        queue: called with each sequence that need not wait for its group.
    """

    def __init__(self, block_size: int, queue: Callable[[Seq], None]) -> None:
        self._block_size = block_size
        self._queue = queue
        self._groups: dict[str, list[Seq]] = {}

    def __len__(self) -> int:
        return len(self._groups)

    def enter(self, seq: Seq) -> None:
        """Adds a new sequence; queues it if it is the first of its group, or of no group."""
        if seq.request.group:
            group = self._groups.setdefault(seq.request.group, [])
            group.append(seq)
            if len(group) > 1 and not self._is_prompt_in_kv(group[0]):
                seq.waits_for_group = True
                return
        self._queue(seq)

    def leave(self, seq: Seq) -> None:
        """Removes a sequence that ended or moves; the next of its group takes its place if it was the first."""
        group = self._groups.get(seq.request.group)
        if group is None:
            return
        group.remove(seq)
        self._release(group)
        if not group:
            del self._groups[seq.request.group]

    def after_step(self, running: Container[str]) -> None:
        """Queues sequences whose group's prompt is in KV after a step.

        Args:
            running: ids of running sequences.
        """
        for group in self._groups.values():
            if any(seq.id in running for seq in group):
                self._release(group)

    def _release(self, group: list[Seq]) -> None:
        """Queues the sequences of a group that need not wait any more."""
        for at, seq in enumerate(group):
            if seq.waits_for_group and (at == 0 or self._is_prompt_in_kv(group[0])):
                seq.waits_for_group = False
                self._queue(seq)

    def _is_prompt_in_kv(self, first: Seq) -> bool:
        """Returns whether other sequences of its group would find its prompt's KV if they started now."""
        return first.cached >= first.request.stages[0].prompt // self._block_size * self._block_size
