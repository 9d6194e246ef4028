"""The workload file: JSON lines, a header and then one request a line, in order of arrival.

The header: format, name, seed, rate (requests/s it was made for), duration (seconds over which requests are offered),
whether prompt_tokens were counted or estimated, each tier's SLOs in seconds, notes, and a hardware profile if it is
meant for one. `rubato-workload/1`, which had neither stages nor SLOs of single requests, is still read.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import orjson

from rubato.core.json_lines import json_object
from rubato.core.request import SLO
from rubato.workloads.workload import HASH_BLOCK, Arrival, OfferedStage, Workload

FORMAT = "rubato-workload/2"
READABLE = ("rubato-workload/1", FORMAT)


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
        "tiers": {name: _slo(slo) for name, slo in workload.tiers.items()},
        "notes": workload.notes,
    }
    if workload.profile:
        header["profile"] = workload.profile
    with open(path, "wb") as file:
        file.write(orjson.dumps(header) + b"\n")
        for a in workload.arrivals:
            file.write(orjson.dumps(_row(a)) + b"\n")


def _slo(slo: SLO) -> dict[str, float]:
    promised = (("ttft", slo.ttft), ("tpot", slo.tpot), ("e2e", slo.e2e))
    return {name: value for name, value in promised if value is not None}


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
        row["slo"] = _slo(a.slo)
    if a.blocks:
        row["blocks"] = a.blocks
    for name, default in (("temperature", 0.0), ("seed", None), ("tenant", "default"), ("acceptance", None)):
        if getattr(a, name) != default:
            row[name] = getattr(a, name)
    if len(a.messages) == 1 and a.messages[0][0] == "user":
        row["prompt"] = a.messages[0][1]
    elif a.messages:
        row["messages"] = [{"role": role, "content": content} for role, content in a.messages]
    return row


def _stage(part: OfferedStage) -> dict[str, Any]:
    row: dict[str, Any] = {"prompt_tokens": part.prompt, "output_tokens": part.output, "slo": _slo(part.slo)}
    return row | ({"ends": part.ends} if part.ends != "eos" else {}) | ({"pause": part.pause} if part.pause else {})


# --------------------------------------------------------------------------- reading


def read(path: str | Path) -> Workload:
    """Read a workload file. Raises WorkloadError naming file, line and field, and OSError when it cannot be opened."""
    with open(path, "rb") as file:
        lines = ((number, line) for number, line in enumerate(file, start=1) if line.strip())
        first = next(lines, None)
        if first is None:
            raise WorkloadError(f"{path} is empty: the first line should be a header with name, seed and tiers")
        header = _Line(str(path), *first)
        if header.values.get("format") not in READABLE:
            raise header.error("format", f"is {header.values.get('format')!r}: expected {FORMAT!r}, in the first line")
        tiers = _read_tiers(header)
        arrivals: list[Arrival] = []
        ids: set[str] = set()
        slos: dict[SLO, SLO] = {}
        for number, line in lines:
            row = _Line(str(path), number, line)
            arrival = _read_arrival(row, tiers, slos)
            if arrival.id in ids:
                raise row.error("id", f"is {arrival.id!r}, which an earlier line has already: ids must be unique")
            if arrivals and arrival.at < arrivals[-1].at:
                raise row.error("at", f"is {arrival.at} s, before the line above ({arrivals[-1].at} s): sort by time")
            ids.add(arrival.id)
            arrivals.append(arrival)
    if not arrivals:
        raise WorkloadError(f"{path} has a header but no requests")
    duration = max(header.number("duration", least=0.0, default=arrivals[-1].at), arrivals[-1].at)
    rate = header.number("rate", least=0.0, default=len(arrivals) / duration if duration else float(len(arrivals)))
    if rate == 0.0:
        raise header.error("rate", "is 0 requests/s: give a positive number")
    counted = header.text("prompt_tokens", default="estimated")
    if counted not in ("counted", "estimated"):
        raise header.error("prompt_tokens", f'is {counted!r}: the header says "counted" or "estimated"')
    notes = header.values.get("notes", {})
    if not isinstance(notes, dict):
        raise header.error("notes", "should be an object")
    header.only("format", "name", "seed", "rate", "duration", "prompt_tokens", "tiers", "notes", "profile")
    return Workload(
        header.text("name"), header.integer("seed", least=0, default=0), rate, duration, tiers, tuple(arrivals),
        counted == "counted", notes, header.text("profile", default=""),
    )  # fmt: skip


def _read_tiers(header: _Line) -> dict[str, SLO]:
    tiers = header.values.get("tiers")
    if not isinstance(tiers, dict) or not tiers:
        raise header.error("tiers", 'should map each tier to its SLOs in seconds, as {"chat": {"ttft": 1.5}}')
    return {name: header.slo(slo, f"tiers.{name}") for name, slo in tiers.items()}


_ROW = (
    "id", "at", "tier", "app", "prompt_tokens", "output_tokens", "prompt", "messages", "temperature", "seed", "slo",
    "stages", "blocks", "tenant", "acceptance",
)  # fmt: skip
_STAGE = ("prompt_tokens", "output_tokens", "slo", "ends", "pause")


def _read_arrival(row: _Line, tiers: Mapping[str, SLO], slos: dict[SLO, SLO]) -> Arrival:
    """slos: those met so far, so that equal ones are one object."""
    tier = row.text("tier")
    if tier not in tiers:
        raise row.error("tier", f"is {tier!r}: the header has {', '.join(tiers)}")
    row.only(*_ROW)
    parts = _read_stages(row)
    if parts:
        prompt, output = sum(part.prompt for part in parts), sum(part.output for part in parts)
    else:
        prompt, output = row.integer("prompt_tokens", least=1), row.integer("output_tokens", least=1)
    slo = row.slo(row.values["slo"], "slo") if "slo" in row.values else None
    return Arrival(
        id=row.text("id"),
        at=row.number("at", least=0.0),
        tier=tier,
        app=row.text("app", default=""),
        prompt_tokens=prompt,
        output_tokens=output,
        messages=_read_messages(row),
        temperature=row.number("temperature", least=0.0, default=0.0),
        seed=row.integer("seed", least=0) if "seed" in row.values else None,
        slo=slos.setdefault(slo, slo) if slo is not None else None,
        parts=parts,
        blocks=_read_blocks(row, parts[0].prompt if parts else prompt),
        tenant=row.text("tenant", default="default"),
        acceptance=row.number("acceptance", least=0.0, most=1.0) if "acceptance" in row.values else None,
    )


def _read_stages(row: _Line) -> tuple[OfferedStage, ...]:
    stages = row.values.get("stages", [])
    if not isinstance(stages, list) or not all(isinstance(stage, dict) for stage in stages):
        raise row.error("stages", "should be a list of {prompt_tokens, output_tokens, slo, ends, pause}")
    for field in ("prompt_tokens", "output_tokens", "slo"):
        if stages and field in row.values:
            raise row.error(field, "stands beside stages, which say it")
    parts: list[OfferedStage] = []
    for index, values in enumerate(stages):
        stage = _Line(row.path, row.line, values, f"stages[{index}].")
        stage.only(*_STAGE)
        parts.append(
            OfferedStage(
                stage.integer("prompt_tokens", least=0 if index else 1),
                stage.integer("output_tokens", least=1),
                stage.slo(stage.values.get("slo", {}), "slo"),
                stage.text("ends", default="eos"),
                stage.number("pause", least=0.0, default=0.0),
            )
        )
    return tuple(parts)


def _read_blocks(row: _Line, prompt: int) -> tuple[int, ...]:
    blocks = row.values.get("blocks", [])
    if not isinstance(blocks, list) or not all(type(b) is int and b >= 0 for b in blocks):
        raise row.error("blocks", "should be a list of whole numbers, 0 or more")
    if blocks and len(blocks) != -(-prompt // HASH_BLOCK):
        raise row.error("blocks", f"has {len(blocks)} ids for {prompt} prompt tokens: give one for each {HASH_BLOCK}")
    return tuple(blocks)


def _read_messages(row: _Line) -> tuple[tuple[str, str], ...]:
    if "prompt" in row.values and "messages" in row.values:
        raise row.error("messages", "stands beside prompt: give one of them")
    if "prompt" in row.values:
        return (("user", row.text("prompt")),)
    messages = row.values.get("messages", [])
    if not isinstance(messages, list):
        raise row.error("messages", "should be a list of {role, content}")
    read: list[tuple[str, str]] = []
    for index, message in enumerate(messages):
        pair = (message.get("role"), message.get("content")) if isinstance(message, dict) else (None, None)
        if not isinstance(pair[0], str) or not isinstance(pair[1], str):
            raise row.error(f"messages[{index}]", "should have a role and a content, both text")
        read.append((pair[0], pair[1]))
    return tuple(read)


class _Line:
    """One JSON line of a file, or an object within it; its fields by type, with errors that say where."""

    def __init__(self, path: str, line: int, content: bytes | dict[str, Any], within: str = "") -> None:
        self.path, self.line, self.within = path, line, within
        self.values = content if isinstance(content, dict) else json_object(path, line, content, WorkloadError)

    def error(self, field: str, problem: str) -> WorkloadError:
        return WorkloadError(f"{self.path}, line {self.line}: {self.within}{field} {problem}")

    def only(self, *known: str) -> None:
        for name in self.values:
            if name not in known:
                near = difflib.get_close_matches(name, known, n=1)
                raise self.error(name, f"is not a field here{f': did you mean {near[0]}?' if near else ''}")

    def _get(self, field: str, default: Any) -> Any:
        if field not in self.values and default is None:
            raise self.error(field, "is missing")
        return self.values.get(field, default)

    def text(self, field: str, default: str | None = None) -> str:
        value = self._get(field, default)
        if not isinstance(value, str):
            raise self.error(field, f"is {value!r}: expected text")
        return value

    def number(self, field: str, least: float, default: float | None = None, most: float = math.inf) -> float:
        value = self._get(field, default)
        if (
            isinstance(value, bool)
            or not isinstance(value, int | float)
            or not (least <= value <= most and math.isfinite(value))
        ):
            span = f"{least:g} or more" if most == math.inf else f"{least:g} to {most:g}"
            raise self.error(field, f"is {value!r}: expected a number, {span}")
        return float(value)

    def integer(self, field: str, least: int, default: int | None = None) -> int:
        value = self._get(field, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise self.error(field, f"is {value!r}: expected a whole number, {least} or more")
        return value

    def slo(self, value: Any, field: str) -> SLO:
        if not isinstance(value, dict) or not set(value) <= {"ttft", "tpot", "e2e"}:
            raise self.error(field, f"is {value!r}: give ttft, tpot and e2e in seconds, each optional")
        try:
            return SLO(**value)
        except (ValueError, TypeError) as error:
            raise self.error(field, str(error)) from error
