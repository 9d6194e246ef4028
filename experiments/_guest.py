"""A policy of one's own beside the systems of an experiment: its name is the policy as given, in that one setting."""

from __future__ import annotations

from collections.abc import Sequence

from rubato.fleet.cluster_options import PolicyChoice
from rubato.policies import load


def beside(systems: Sequence[str], policy: str | None) -> tuple[str, ...]:
    """The systems, and the policy if there is one. Raises ValueError for one that is a system already."""
    if policy in systems:
        raise ValueError(f"{policy!r} is the name of a system in this figure already: leave out --policy")
    return (*systems, *([policy] if policy else []))


def drafts(policy: str) -> bool:
    """Whether it cannot run without a drafter."""
    chosen = PolicyChoice.parse(policy)
    return "draft" in load(chosen.policy, chosen.settings).needs
