"""The workload file: JSON lines, a header and then one request a line, in order of arrival.

The header: format, name, seed, rate (requests/s it was made for), duration (seconds over which requests are offered),
whether prompt_tokens were counted or estimated, each tier's SLOs in seconds, notes, a hardware profile if it is meant
for one, and the concurrency if it is a closed loop. `rubato-workload/1`, which had neither stages nor SLOs of single
requests, is still read.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import orjson
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from rubato.core.did_you_mean import nearest
from rubato.core.request import MAX_SLO_S, MIN_SLO_S, SLO
from rubato.workloads.workload import HASH_BLOCK_TOKENS, NO_SLO, Arrival, OfferedStage, Workload

FORMAT = "rubato-workload/2"
DEFAULTS = {
    "temperature": 0.0, "seed": None, "tenant": "default", "acceptance": None, "after": "", "gap": 0.0, "session": "",
    "session_e2e": None,
}  # fmt: skip


class WorkloadError(ValueError):
    """A workload file that cannot be used; names file, line and field."""


def write(workload: Workload, path: str | Path) -> None:
    """Write the file; `read` gives back an equal workload."""
    header = {
        "format": FORMAT,
        "name": workload.name,
        "seed": workload.seed,
        "rate": workload.rate,
        "duration": workload.duration,
        "prompt_tokens": "counted" if workload.counted else "estimated",
        "tiers": {name: slo.bounds for name, slo in workload.tiers.items()},
        "notes": workload.notes,
    }
    if workload.profile:
        header["profile"] = workload.profile
    if workload.concurrency is not None:
        header["concurrency"] = workload.concurrency
    with open(path, "wb") as file:
        file.write(orjson.dumps(header) + b"\n")
        for a in workload.arrivals:
            file.write(orjson.dumps(_row(a)) + b"\n")


def _row(a: Arrival) -> dict[str, Any]:
    """A request without what is at its default."""
    row: dict[str, Any] = {"id": a.id, "at": a.at, "tier": a.tier}
    if a.app:
        row["app"] = a.app
    if a.parts:
        row["stages"] = [_stage(part) for part in a.parts]
    else:
        row |= {"prompt_tokens": a.prompt_tokens, "output_tokens": a.output_tokens}
    if a.slo is not None:
        row["slo"] = a.slo.bounds
    if a.blocks:
        row["blocks"] = a.blocks
    for name, default in DEFAULTS.items():
        if getattr(a, name) != default:
            row[name] = getattr(a, name)
    if len(a.messages) == 1 and a.messages[0][0] == "user":
        row["prompt"] = a.messages[0][1]
    elif a.messages:
        row["messages"] = [{"role": role, "content": content} for role, content in a.messages]
    return row


def _stage(part: OfferedStage) -> dict[str, Any]:
    row: dict[str, Any] = {"prompt_tokens": part.prompt, "output_tokens": part.output, "slo": part.slo.bounds}
    return row | ({"ends": part.ends} if part.ends != "eos" else {}) | ({"pause": part.pause} if part.pause else {})


# --------------------------------------------------------------------------- reading

Whole = Annotated[int, Field(ge=0)]
Positive = Annotated[int, Field(ge=1)]
Number = Annotated[float, Field(ge=0.0)]


class _Fields(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)


class _Header(_Fields):
    format: Literal["rubato-workload/1", "rubato-workload/2"]
    name: str
    tiers: dict[str, SLO] = Field(min_length=1)
    seed: Whole = 0
    rate: Annotated[float, Field(gt=0.0)] | None = None
    duration: Number = 0.0
    prompt_tokens: Literal["counted", "estimated"] = "estimated"
    notes: dict[str, Any] = {}
    profile: str = ""
    concurrency: Positive | None = None


class _Stage(_Fields):
    prompt_tokens: Whole
    output_tokens: Positive
    slo: SLO = NO_SLO
    ends: str = "eos"
    pause: Number = 0.0


class _Message(BaseModel):
    role: str
    content: str


class _Request(_Fields):
    id: str
    at: Number
    tier: str
    app: str = ""
    prompt_tokens: Positive = 0
    output_tokens: Positive = 0
    prompt: str | None = None
    messages: tuple[_Message, ...] = ()
    temperature: Number = 0.0
    seed: Whole | None = None
    slo: SLO | None = None
    stages: tuple[_Stage, ...] = ()
    blocks: tuple[Whole, ...] = ()
    tenant: str = "default"
    acceptance: Annotated[float, Field(ge=0.0, le=1.0)] | None = None
    after: str = ""
    gap: Number = 0.0
    session: str = ""
    session_e2e: Annotated[float, Field(ge=MIN_SLO_S, le=MAX_SLO_S)] | None = None


def read(path: str | Path) -> Workload:
    """Read a workload file. Raises WorkloadError naming file, line and field, and OSError when it cannot be opened."""
    with open(path, "rb") as file:
        lines = ((number, line) for number, line in enumerate(file, start=1) if line.strip())
        first = next(lines, None)
        if first is None:
            raise WorkloadError(f"{path} is empty: the first line should be a header with name, seed and tiers")
        header = _parsed(_Header, path, *first)
        arrivals: list[Arrival] = []
        ids: set[str] = set()
        sessions = {""}
        slos: dict[SLO, SLO] = {}
        for number, line in lines:
            row = _parsed(_Request, path, number, line)
            try:
                if row.id in ids:
                    raise ValueError(f"id is {row.id!r}, which an earlier line has already: ids must be unique")
                if arrivals and row.at < arrivals[-1].at:
                    raise ValueError(f"at is {row.at} s, before the line above ({arrivals[-1].at} s): sort by time")
                if row.after and row.after not in ids:
                    raise ValueError(
                        f"after is {row.after!r}, the id of no line above: give that of an earlier request"
                    )
                if row.session_e2e is not None and row.session in sessions:
                    raise ValueError("session_e2e stands with a request that is no session's first")
                if row.gap and not row.after:
                    raise ValueError(f"gap is {row.gap} s after no request: say which in `after`")
                arrivals.append(_arrival(row, header.tiers, slos))
            except ValueError as error:
                raise WorkloadError(f"{path}, line {number}: {error}") from error
            ids.add(row.id)
            sessions.add(row.session)
    if not arrivals:
        raise WorkloadError(f"{path} has a header but no requests")
    duration = max(header.duration, next(a.at for a in reversed(arrivals) if not a.after))
    rate = header.rate or (len(arrivals) / duration if duration else float(len(arrivals)))
    return Workload(
        header.name, header.seed, rate, duration, header.tiers, tuple(arrivals), header.prompt_tokens == "counted",
        header.notes, header.profile, header.concurrency,
    )  # fmt: skip


def _arrival(row: _Request, tiers: Mapping[str, SLO], slos: dict[SLO, SLO]) -> Arrival:
    """Reads one request of the file.

    Args:
        slos: SLOs read so far, so that equal ones are one object.

    Raises:
        ValueError: a field is wrong; the text names it.
    """
    if row.tier not in tiers:
        raise ValueError(f"tier is {row.tier!r}: the header has {', '.join(tiers)}")
    fields_set = row.model_fields_set
    for field in ("prompt_tokens", "output_tokens", "slo"):
        if row.stages and field in fields_set:
            raise ValueError(f"{field} stands beside stages, which say it")
        if not row.stages and field not in fields_set and field != "slo":
            raise ValueError(f"{field} is missing")
    if row.stages and not row.stages[0].prompt_tokens:
        raise ValueError("stages[0].prompt_tokens is 0: the first stage has a prompt of 1 token or more")
    prompt = row.stages[0].prompt_tokens if row.stages else row.prompt_tokens
    if row.blocks and len(row.blocks) != -(-prompt // HASH_BLOCK_TOKENS):
        raise ValueError(
            f"blocks has {len(row.blocks)} ids for {prompt} prompt tokens: give one for each {HASH_BLOCK_TOKENS}"
        )
    if {"prompt", "messages"} <= fields_set:
        raise ValueError("messages stands beside prompt: give one of them")
    messages = tuple((message.role, message.content) for message in row.messages)
    return Arrival(
        id=row.id,
        at=row.at,
        tier=row.tier,
        app=row.app,
        prompt_tokens=row.prompt_tokens or sum(stage.prompt_tokens for stage in row.stages),
        output_tokens=row.output_tokens or sum(stage.output_tokens for stage in row.stages),
        messages=messages if row.prompt is None else (("user", row.prompt),),
        temperature=row.temperature,
        seed=row.seed,
        slo=None if row.slo is None else slos.setdefault(row.slo, row.slo),
        parts=tuple(OfferedStage(s.prompt_tokens, s.output_tokens, s.slo, s.ends, s.pause) for s in row.stages),
        blocks=row.blocks,
        tenant=row.tenant,
        acceptance=row.acceptance,
        after=row.after,
        gap=row.gap,
        session=row.session,
        session_e2e=row.session_e2e,
    )


Schema = TypeVar("Schema", bound=_Fields)


def _parsed(schema: type[Schema], path: str | Path, number: int, line: bytes) -> Schema:
    try:
        return schema.model_validate_json(line)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
    field = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in first["loc"])[1:]
    if first["type"] == "json_invalid":
        problem = f"not JSON ({first['msg']})"
    elif not field:
        problem = f"should be a JSON object, is {line.decode(errors='replace').strip():.80}"
    elif first["type"] == "missing":
        problem = f"{field} is missing"
    elif first["type"] == "extra_forbidden":
        problem = f"{field} is not a field here{nearest(field, schema.model_fields)}"
    else:
        problem = (
            f"{field} is {first['input']!r:.80}: {first['msg'].removeprefix('Value error, ').removeprefix('Input ')}"
        )
    raise WorkloadError(f"{path}, line {number}: {problem}")
