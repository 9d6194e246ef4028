"""That no best-effort request starves: the oldest one that is behind is planned as if it were admitted."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import inf

from rubato.core.interfaces import SeqView
from rubato.policies.slos_serve.demand import DemandReader
from rubato.policies.slos_serve.token_budget import Demand

BEST_EFFORT_PATIENCE = 4.0  # seconds that a prompt without a TTFT, or best effort, may wait before it is planned
BEST_EFFORT_INTERVAL = BEST_EFFORT_PATIENCE / 16  # seconds a token; best effort with fewer tokens is behind


@dataclass
class OldestBestEffort:
    """Its id ("": there is none), its length when last seen, and when its next token is to be out (inf: there is no
    room for it yet)."""

    id: str = ""
    length: int = 0
    due: float = inf

    def find(self, able: Iterable[SeqView], now: float) -> SeqView | None:
        """The same one as long as it is there, else the oldest of these that is behind."""
        seqs = list(able)
        oldest = next((s for s in seqs if s.id == self.id), None)
        if oldest is None:
            behind = [s for s in seqs if now > s.stage_start + BEST_EFFORT_PATIENCE + s.output * BEST_EFFORT_INTERVAL]
            oldest = min(behind, key=arrival, default=None)
            self.id, self.length, self.due = (oldest.id, oldest.length, inf) if oldest is not None else ("", 0, inf)
        if oldest is not None:
            self.due += (oldest.length - self.length) * BEST_EFFORT_INTERVAL
            self.length = oldest.length
        return oldest

    def demand(self, seq: SeqView, reader: DemandReader) -> Demand:
        """What it demands, as if admitted."""
        return reader.demand(seq)._replace(due=max(self.due - reader.now, 0.0), tpot=BEST_EFFORT_INTERVAL)


def arrival(seq: SeqView) -> tuple[float, str]:
    return (seq.request.arrival, seq.id)
