"""Which host term a figure's hardware profile has: that of the paper's scenario, or that of vLLM today."""

from __future__ import annotations

from rubato.latency import profiles

AS_STATED, TODAY = "", "today"


def at_host(profile: str, host: str) -> str:
    """The profile's name with its own host term, which is today's, or as it stands."""
    return profiles.named(profile)[0] if host == TODAY else profile
