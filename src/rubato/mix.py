"""A mix of request kinds from a YAML file: tiers with their SLOs, and what is asked of each.

    tiers:
      chat: {ttft_ms: 1000, tpot_ms: 80}
      batch: {e2e_ms: 60000}
      free: {}                                # best effort
    kinds:
      - {app: chat, share: 6}                 # tier: the app's name unless given
      - {app: summary, tier: batch, share: 1, prompt: [400, 900], output: [30, 80]}
      - {app: code, tier: free, share: 3, prompt: 200, output: 60}

app: which texts are made (chat, code, summary). prompt, output: tokens, a number or least and most; the app's usual
ones if left out. share: weight in the mix.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from rubato.config import TierSettings
from rubato.policies import nearest
from rubato.types import SLO
from rubato.workload import Kind, chat, code, summary

USUAL = {"chat": chat, "code": code, "summary": summary}
Range = int | tuple[int, int]


class _Kind(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    app: str
    tier: str = ""
    share: float = Field(default=1.0, gt=0)
    prompt: Range | None = None
    output: Range | None = None


class _Mix(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    tiers: Mapping[str, TierSettings] = Field(min_length=1)
    kinds: tuple[_Kind, ...] = Field(min_length=1)


def read(path: str | Path) -> list[Kind]:
    """The kinds of a file. Raises ValueError naming the file and what is wrong, OSError when it cannot be opened."""
    try:
        tree = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except yaml.YAMLError as error:
        raise ValueError(f"{path}: not YAML ({' '.join(str(error).split())})") from error
    try:
        mix = _Mix.model_validate(tree)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(str(part) for part in first["loc"]) or "the file"
        raise ValueError(f"{path}: {where}: {first['msg']}, got {first['input']!r:.80}") from None
    try:
        return [_kind(kind, mix) for kind in mix.kinds]
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def _kind(asked: _Kind, mix: _Mix) -> Kind:
    if asked.app not in USUAL:
        raise ValueError(f"kind {asked.app!r} has no texts{nearest(asked.app, USUAL)}")
    tier = asked.tier or asked.app
    if tier not in mix.tiers:
        raise ValueError(f"kind {asked.app!r} is of tier {tier!r}, which has no entry{nearest(tier, mix.tiers)}")
    lengths = {"prompt": asked.prompt, "output": asked.output}
    changes: dict[str, Any] = {
        name: (value, value) if isinstance(value, int) else value
        for name, value in lengths.items()
        if value is not None
    }
    slo: SLO = mix.tiers[tier].slo
    return USUAL[asked.app](slo, tier=tier, share=asked.share, **changes)
