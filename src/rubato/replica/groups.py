"""Requests that share the KV of one prompt (`Request.group`): the others wait until the first has it in KV."""

from __future__ import annotations

from collections.abc import Callable, Container

from rubato.replica.sequence import Seq


class Groups:
    """Sequences by group, in order of submission. queue: called with each that need not wait for its group."""

    def __init__(self, block_size: int, queue: Callable[[Seq], None]) -> None:
        self._block_size = block_size
        self._queue = queue
        self._groups: dict[str, list[Seq]] = {}

    def __len__(self) -> int:
        return len(self._groups)

    def enter(self, seq: Seq) -> None:
        """A new sequence: queued if it is the first of its group, or of no group."""
        if seq.request.group:
            group = self._groups.setdefault(seq.request.group, [])
            group.append(seq)
            if len(group) > 1 and not self._prompt_is_in(group[0]):
                seq.waits_for_group = True
                return
        self._queue(seq)

    def leave(self, seq: Seq) -> None:
        """It has ended, or goes elsewhere: if it was the first, the next of its group takes its place."""
        group = self._groups.get(seq.request.group)
        if group is None:
            return
        group.remove(seq)
        self._release(group)
        if not group:
            del self._groups[seq.request.group]

    def after_step(self, running: Container[str]) -> None:
        """A step has ended that may have brought a prompt into KV. running: ids."""
        for group in self._groups.values():
            if any(seq.id in running for seq in group):
                self._release(group)

    def _release(self, group: list[Seq]) -> None:
        for at, seq in enumerate(group):
            if seq.waits_for_group and (at == 0 or self._prompt_is_in(group[0])):
                seq.waits_for_group = False
                self._queue(seq)

    def _prompt_is_in(self, first: Seq) -> bool:
        """Whether others of its group, if they start now, find its prompt's KV."""
        return first.cached >= first.request.stages[0].prompt // self._block_size * self._block_size
