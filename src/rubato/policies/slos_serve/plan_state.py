"""One plan of the scheduler in the making."""

from __future__ import annotations

from dataclasses import dataclass, field

from rubato.core.interfaces import SeqView, View
from rubato.policies.slos_serve.demand import DemandReader
from rubato.policies.slos_serve.token_budget import Demand


@dataclass
class PlanState:
    """The requests there, and what is decided of them."""

    view: View
    reader: DemandReader
    admitted: list[SeqView] = field(default_factory=list)
    undecided: list[SeqView] = field(default_factory=list)
    best_effort: list[SeqView] = field(default_factory=list)
    oldest: SeqView | None = None  # best-effort one that is planned as if admitted
    demands: dict[str, Demand] = field(default_factory=dict)  # of the promised, the asked, and the oldest
    demoted: list[str] = field(default_factory=list)
    promoted: list[str] = field(default_factory=list)
    drop: dict[str, str] = field(default_factory=dict)

    @property
    def now(self) -> float:
        return self.reader.now

    @property
    def undecided_running(self) -> list[SeqView]:
        """Those that run, with the KV of earlier prompts, while the next prompt is not decided yet."""
        running = self.view.running_ids if self.undecided else ()  # made anew whenever it is asked for
        return [s for s in self.undecided if s.id in running]

    def demote(self, seq: SeqView) -> None:
        self.best_effort.append(seq)
        if seq.id in self.promoted:
            self.promoted.remove(seq.id)
        else:
            self.demoted.append(seq.id)

    def promote(self, seq: SeqView) -> None:
        self.best_effort.remove(seq)
        self.admitted.append(seq)
        self.promoted.append(seq.id)
