"""Each request to the replica whose next iteration is predicted to be the shortest; ties to the fewest pending tokens.

For replicas whose steps are to stay short: a baseline.

The next iteration is what an engine runs when nothing but its limits holds it back: every decode, then pending prefill
in order up to its batch. A request just placed counts as prefill there, so a burst spreads.

With prefill and decode apart (under distserve's scheduler), a prompt goes to one of those that prefill, its KV to one
of those that decode and have memory for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from rubato.core.interfaces import SeqView, View
from rubato.core.plan import Shape
from rubato.policy_kit.pools import PooledRouter

SOURCE = "PolyServe, §5.1: baselines PD-Minimal and CO-Minimal (lowest cycle time)"


@dataclass
class Router(PooledRouter):
    """Places each request on the replica with the shortest next iteration.

    Args:
        prefill: with `decode`, the ratio of replicas that do one of them only; 0: all do both
        decode: see `prefill`
    """

    _loads: dict[str, _Load] = field(init=False, repr=False, default_factory=dict)  # in this dispatch

    def begin(self, held: Sequence[SeqView], fleet: Sequence[View]) -> None:
        self._loads = {view.id: _Load(view) for view in fleet}

    def choose(self, seq: SeqView, fleet: Sequence[View]) -> int:
        loads = [self._loads[view.id] for view in fleet]
        least = min(range(len(loads)), key=lambda i: loads[i].cost)
        loads[least].add(seq.pending, seq.cached)
        return least


class _Load:
    """A replica's next iteration. `cost` is its predicted seconds, then the pending prefill tokens."""

    def __init__(self, view: View) -> None:
        self.view = view
        self._shape, prefills = _running(view)
        self._pending = 0
        self._cost: tuple[float, int] | None = None  # until something is added
        for seq in (*prefills, *view.waiting):
            self.add(seq.pending, seq.cached)

    def add(self, pending: int, cached: int) -> None:
        limits, shape = self.view.limits, self._shape
        tokens = min(pending, limits.max_num_batched_tokens - shape.tokens) if shape.seqs < limits.max_num_seqs else 0
        if tokens > 0:
            self._shape = shape.plus(tokens, cached)
        self._pending += pending
        self._cost = None

    @property
    def cost(self) -> tuple[float, int]:
        if self._cost is None:
            seconds = self.view.latency.step_time(self._shape) if self._shape.seqs else 0.0
            self._cost = (seconds, self._pending)
        return self._cost


def _running(view: View) -> tuple[Shape, Sequence[SeqView]]:
    """Returns the shape of the next iteration's decodes, as many as a batch takes, and the running prefills."""
    decodes, prefills = view.decodes, view.prefilling
    if decodes.seqs <= view.limits.max_num_seqs:
        return decodes, prefills
    cached = [seq.cached for seq in view.running if seq.pending == 1][: view.limits.max_num_seqs]
    return Shape.decodes(len(cached), sum(cached) + len(cached)), prefills
