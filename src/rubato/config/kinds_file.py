"""A mix of request kinds from a YAML file: tiers with their SLOs, and the requests of each.

    tiers:
      chat: {ttft_ms: 1000, tpot_ms: 80}
      batch: {e2e_ms: 60000}
      free: {}                                # best effort
    kinds:
      - {app: chat, share: 6}                 # tier: the app's name unless given
      - {app: summary, tier: batch, share: 1, prompt: [400, 900], output: [30, 80]}
      - {app: code, tier: free, share: 3, prompt: 200, output: {mean: 60, std: 50, p99: 250}}

app: what it is for, any name; chat, code and summary have texts of their own, and usual lengths if theirs are left
out. The others get texts of chat, and need both lengths. prompt, output: tokens, a number, least and most, or a
distribution: {mean, std, p99}, {mean, p99} or {percentiles: {50: tokens}}. share: weight in the mix. ttft_slowdown:
TTFT in zero-load prefill times, instead of the tier's.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, ValidationError

from rubato.config.parts import TierSettings
from rubato.config.yaml_text import parse_yaml
from rubato.core.did_you_mean import nearest
from rubato.core.strict_settings import StrictSettings
from rubato.workloads.lengths import Percentiles, log_normal, log_normal_p99
from rubato.workloads.request_kinds import Kind, Range, chat, code, summary

USUAL_KINDS = {"chat": chat, "code": code, "summary": summary}


class _Shape(StrictSettings):
    mean: float | None = None
    std: float | None = None
    p99: float | None = None
    percentiles: Mapping[float, float] | None = None


_Tokens = int | Annotated[tuple[int, int], Field(strict=False)] | _Shape  # YAML has lists, no tuples


class _Kind(StrictSettings):
    app: str
    tier: str = ""
    share: float = Field(default=1.0, gt=0)
    prompt: _Tokens | None = None
    output: _Tokens | None = None
    ttft_slowdown: float | None = Field(default=None, gt=0)


class _Mix(StrictSettings):
    tiers: Mapping[str, TierSettings] = Field(min_length=1)
    kinds: tuple[_Kind, ...] = Field(min_length=1, strict=False)


def read(path: str | Path) -> list[Kind]:
    """Reads the kinds in a file. Raises ValueError that names file and mistake, OSError if it cannot be opened."""
    tree = parse_yaml(Path(path).read_bytes(), str(path))
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


def _kind(row: _Kind, mix: _Mix) -> Kind:
    lengths = {name: _range(row.app, name, getattr(row, name)) for name in ("prompt", "output")}
    settings: dict[str, Any] = {name: value for name, value in lengths.items() if value is not None}
    if row.app not in USUAL_KINDS and len(settings) < 2:
        near = nearest(row.app, USUAL_KINDS, list_all=False)
        raise ValueError(f"kind {row.app!r} has no usual lengths: give both of prompt and output{near}")
    tier = row.tier or row.app
    if tier not in mix.tiers:
        raise ValueError(f"kind {row.app!r} is of tier {tier!r}, which has no entry{nearest(tier, mix.tiers)}")
    settings |= {"tier": tier, "share": row.share, "ttft_slowdown": row.ttft_slowdown}
    slo = mix.tiers[tier].slo
    return USUAL_KINDS[row.app](slo, **settings) if row.app in USUAL_KINDS else Kind(row.app, slo, **settings)


def _range(app: str, name: str, tokens: _Tokens | None) -> Range | None:
    if not isinstance(tokens, _Shape):
        return (tokens, tokens) if isinstance(tokens, int) else tokens
    match tokens:
        case _Shape(mean=None, std=None, p99=None, percentiles=dict() as table) if table:
            shares = sorted(table)
            return Percentiles(tuple(share / 100 for share in shares), tuple(table[share] for share in shares))
        case _Shape(mean=float() as mean, std=float() as std, p99=float() as p99, percentiles=None):
            return log_normal(mean, std, p99)
        case _Shape(mean=float() as mean, std=None, p99=float() as p99, percentiles=None):
            return log_normal_p99(mean, p99)
    raise ValueError(
        f"kind {app!r}: {name} should be {{mean, std, p99}}, {{mean, p99}} or {{percentiles: {{50: tokens}}}}"
    )
