"""Another policy, which drops what waits beyond its TTFT: Ascendra's Fig. 12 has all systems do so (§8.6)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar

from rubato import policies
from rubato.core.events import Event
from rubato.core.interfaces import Scheduler as Policy
from rubato.core.interfaces import SeqView, View, nothing_sent
from rubato.core.plan import Plan
from rubato.core.request import SATURATED

SOURCE = "Ascendra, §8.6"


@dataclass
class Scheduler:
    """of: the policy. budget: its tokens per step; 0 = its default. reserve_kv: passed on to it if set."""

    needs: ClassVar[frozenset[str]] = frozenset({"chunked", "preempt", "mixed"})
    of: str = "sarathi"
    budget: int = 0
    reserve_kv: bool = False
    _inner: Policy = field(init=False, repr=False)

    def __post_init__(self) -> None:
        given: dict[str, Any] = {}
        if self.budget:
            given["budget"] = self.budget
        if self.reserve_kv:
            given["reserve_kv"] = True
        self._inner = policies.load(self.of, given)

    def observe(self, events: Sequence[Event]) -> None:
        self._inner.observe(events)

    def plan(self, view: View) -> Plan:
        """As its policy plans without those that are late."""
        late = {s.id: SATURATED for s in view.waiting if _late(s, view.now)}
        if not late:
            return self._inner.plan(view)
        shown = {f.name: getattr(view, f.name) for f in fields(View)}
        shown["waiting"] = [s for s in view.waiting if s.id not in late]
        plan = self._inner.plan(View(**shown))
        return plan._replace(drop={**plan.drop, **late})


def _late(seq: SeqView, now: float) -> bool:
    """Whether it waits beyond its TTFT and nothing of it has been sent."""
    ttft = seq.request.stages[seq.stage].slo.ttft
    return ttft is not None and now > seq.stage_start + ttft and nothing_sent(seq)
