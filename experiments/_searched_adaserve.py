"""AdaServe with the constants of equations 8 and 9 that the paper found by search and did not publish, for
`adaserve_control`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rubato.core.interfaces import SeqView, View
from rubato.policies import adaserve
from rubato.policy_kit.draft_tree import adaptive
from rubato.policy_kit.paced_admission import Draft

SOURCE = "AdaServe, §5.2, equations 8 and 9"


@dataclass
class Scheduler(adaserve.Scheduler):
    """As `adaserve` with `verify_tokens`. b1: of equation 8, which the authors' code gives apart from B (0: B)."""

    b1: int = 0
    c1: int = 0
    c2: int = 0

    def _draft(self, view: View, decodes: Sequence[SeqView]) -> Draft | None:
        n, b1 = max(1, len(decodes)), self.b1 or self.verify_tokens
        if self.verify_tokens <= n:
            return None
        bounds = self.min_depth, self.max_depth, self.max_width
        return adaptive(n, b1, self.draft_tokens, self.c1, self.c2, *bounds)
