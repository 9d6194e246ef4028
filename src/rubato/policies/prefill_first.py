"""vLLM v0: whole prefills before any decode, first come first served; decodes stall meanwhile.

A prompt longer than the engine's batch is run alone, in chunks as long as a batch (v0 refused such limits at start).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from rubato.core.batch_builder import Packing, run_in_order, starting
from rubato.core.events import Event
from rubato.core.interfaces import SeqView, View
from rubato.core.plan import Plan

SOURCE = "vLLM before V1, default scheduler; SLOs-Serve's and Ascendra's baseline"


@dataclass
class Scheduler:
    """budget: max_num_batched_tokens of a prefill batch. watermark: share of KV kept free when admitting.
    whole: start a request only when KV for all of it is left (`batch_builder.starting`)."""

    needs: ClassVar[frozenset[str]] = frozenset({"preempt"})
    budget: int = 2048
    watermark: float = 0.01
    whole: bool = False

    def __post_init__(self) -> None:
        if self.budget < 1 or not 0.0 <= self.watermark < 1.0:
            raise ValueError(f"budget {self.budget}, watermark {self.watermark}: give >= 1 token and a share in [0, 1)")

    def observe(self, events: Sequence[Event]) -> None:
        pass

    def plan(self, view: View) -> Plan:
        prefills = Packing(view, self.budget)
        self._prefill(prefills, view)
        if prefills.work:
            return prefills.plan()
        decodes = Packing(view)
        if not decodes.decode_all() or not decodes.decode:  # where nobody decodes, later stages' prompts lack KV
            run_in_order(decodes, view.running)
        return decodes.plan(steady=decodes.steady())

    def _prefill(self, packing: Packing, view: View) -> None:
        begun = [s for s in view.running if s.pending > 1]
        for seq in begun:  # a prompt longer than a batch, part of the way
            tokens = packing.room(seq)
            if tokens:
                packing.add(seq, tokens)
        reserve = 0 if not view.running else int(self.watermark * view.kv_total)
        for seq in starting(view, self.whole):
            whole = self._whole(packing, seq)
            if begun or whole == 0 or packing.room(seq) < whole:
                return
            packing.add(seq, whole)
            if packing.kv_left < reserve:
                packing.remove(seq)
                return

    def _whole(self, packing: Packing, seq: SeqView) -> int:
        """The whole prompt; or a batch full of it, when it is longer than a batch and has this one for itself."""
        if seq.pending > packing.tokens_left and not packing.work:
            return packing.tokens_left
        return seq.pending
