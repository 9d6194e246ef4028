"""Where a request goes (SLOs-Serve, §4.2): it lands on replicas in turn; one that a replica declines goes to the next.

After `max_hops` replicas more, or when all have declined it, the backup policy decides.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from rubato.core.interfaces import Dispatch, SeqView, View
from rubato.policies.slos_serve.scheduler import Scheduler
from rubato.policy_kit.refusals import fleet_refusal
from rubato.policy_kit.stateless import Stateless

BACKUPS = ("best_effort", "refuse")


@dataclass
class Router(Stateless):
    """Places requests in turn, and hands on what a replica declines.

    Args:
        max_hops ([-1, inf)): as in the scheduler
        backup (best_effort, refuse): what becomes of a request that all decline
    """

    max_hops: int = Scheduler.max_hops
    backup: str = "best_effort"
    _landed: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        if self.max_hops < -1 or self.backup not in BACKUPS:
            raise ValueError(
                f"max_hops {self.max_hops}, backup {self.backup!r}: give 0 or more, or -1 for none handed on; one of "
                f"{', '.join(BACKUPS)}"
            )

    def place(self, held: Sequence[SeqView], fleet: Sequence[View], now: float) -> Dispatch:
        here = {view.id: view.count for view in fleet}
        place, reject, demote = {}, {}, []
        for seq in held:
            handoff = seq.request.handoff
            if seq.best_effort:
                to = min(fleet, key=lambda view: here[view.id])
            elif handoff is not None and handoff.reason == "declined":
                if handoff.hops > min(self.max_hops, len(fleet) - 1):
                    if "refuse" in (self.backup, seq.request.on_decline):
                        reject[seq.id] = fleet_refusal(seq, fleet)
                        continue
                    demote.append(seq.id)
                at = next((i for i, view in enumerate(fleet) if view.id == handoff.source), -1)
                to = fleet[(at + 1) % len(fleet)]
            else:
                to = fleet[self._landed % len(fleet)]
                self._landed += 1
            place[seq.id] = to.id
            here[to.id] += 1
        return Dispatch(place, reject, demote)
