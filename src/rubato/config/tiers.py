"""A tier as an operator writes it, for a server or in a file of request kinds: its SLO in milliseconds."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field

from rubato.core.request import LEAST_MS, MOST_MS, SLO, OnDecline


class StrictSettings(BaseModel):
    """Settings of which every name and type must be right."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, allow_inf_nan=False, protected_namespaces=())


class TierSettings(StrictSettings):
    """An SLO in milliseconds, and what becomes of a request whose SLO cannot be met."""

    ttft_ms: float | None = Field(default=None, ge=LEAST_MS, le=MOST_MS)
    tpot_ms: float | None = Field(default=None, ge=LEAST_MS, le=MOST_MS)
    e2e_ms: float | None = Field(default=None, ge=LEAST_MS, le=MOST_MS)
    on_decline: OnDecline = "best_effort"

    @property
    def slo(self) -> SLO:
        return SLO.from_ms(self.ttft_ms, self.tpot_ms, self.e2e_ms)
