"""What a replica is told beside its engine: how it judges requests, what it knows of their lengths, what it keeps."""

from __future__ import annotations

from dataclasses import dataclass

from rubato.core.interfaces import LengthPredictor


@dataclass(frozen=True)
class ReplicaOptions:
    """lengths: what predicts outputs, and learns from those that end; None: nothing is known of them. slo_rule: how
    requests are judged, one of `SLO_RULES`. prefix_cache: requests of one tenant that begin alike share the KV of full
    blocks, also after the first has ended. causes: work out why requests miss; without, it is faster where many do."""

    lengths: LengthPredictor | None = None
    slo_rule: str = "deadline"
    prefix_cache: bool = False
    causes: bool = True


DEFAULT_OPTIONS = ReplicaOptions()
