"""A replica's options: how it judges requests, predicts their lengths and caches prefixes."""

from __future__ import annotations

from dataclasses import dataclass

from rubato.core.interfaces import LengthPredictor


@dataclass(frozen=True)
class ReplicaOptions:
    """Options of one replica beside its engine.

    Args:
        lengths: predicts output lengths and learns from ended requests; None: no predictor.
        slo_rule: judges requests, one of `SLO_RULES`.
        prefix_cache: requests of one tenant that begin alike share the KV of full blocks, also after the first ended.
        causes: attribute each miss to a cause; False is faster where many requests miss.
    """

    lengths: LengthPredictor | None = None
    slo_rule: str = "deadline"
    prefix_cache: bool = False
    causes: bool = True


DEFAULT_OPTIONS = ReplicaOptions()
