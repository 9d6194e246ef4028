"""A workload: which request arrives when, of which tier, with which prompt and which output length. One file, seeded.

The file is JSON lines. The first line is a header: name, seed, rate (requests/s it was made for), duration (seconds
over which requests are offered), whether prompt_tokens were counted by a tokenizer or estimated, and each tier's SLOs
in seconds. Then one request per line, in order of arrival. The same file drives a server (`bench`) and a simulation.

Output lengths are true lengths: a client sends them as max_tokens with ignore_eos, so that every policy has the same
work to do.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import orjson

from rubato import prompts
from rubato.types import SLO, Request, Sampling, Stage

FORMAT = "rubato-workload/1"
_ARRIVALS, _KINDS, _LENGTHS, _TEXTS = range(4)  # one random stream for each purpose

Count = Callable[[str], int]


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of request in a mix. prompt and output: least and most tokens, drawn uniformly.

    app: which texts (`prompts.TEXTS`). share: weight in the mix; shares need not add up to 1.
    """

    app: str
    slo: SLO
    prompt: tuple[int, int]
    output: tuple[int, int]
    tier: str = ""  # "" = the app's name
    share: float = 1.0

    def __post_init__(self) -> None:
        if self.app not in prompts.TEXTS:
            raise ValueError(f"kind {self.app!r} has no texts: choose one of {', '.join(prompts.TEXTS)}")
        for name in ("prompt", "output"):
            least, most = getattr(self, name)
            if not 1 <= least <= most:
                raise ValueError(f"kind {self.app!r}: {name} is ({least}, {most}) tokens: give 1 <= least <= most")
        if not 0.0 < self.share < math.inf:
            raise ValueError(f"kind {self.app!r}: share is {self.share}: give a positive weight")
        if not self.tier:
            object.__setattr__(self, "tier", self.app)


def chat(slo: SLO, **changes: Any) -> Kind:
    """Short prompts, answers that somebody reads along."""
    return dataclasses.replace(Kind("chat", slo, prompt=(30, 200), output=(40, 120)), **changes)


def code(slo: SLO, **changes: Any) -> Kind:
    """A file to complete in an editor."""
    return dataclasses.replace(Kind("code", slo, prompt=(100, 400), output=(40, 120)), **changes)


def summary(slo: SLO, **changes: Any) -> Kind:
    """Long prompts, short answers, nobody in a hurry."""
    return dataclasses.replace(Kind("summary", slo, prompt=(400, 900), output=(30, 80)), **changes)


@dataclass(frozen=True, slots=True)
class Arrival:
    """One request of a workload. at: seconds from the start. messages: (role, content); none when only simulated.
    prompt_tokens: of the text; with the model's chat template if the count that `make` was given includes it.
    """

    id: str
    at: float
    tier: str
    app: str
    prompt_tokens: int
    output_tokens: int
    messages: tuple[tuple[str, str], ...] = ()
    temperature: float = 0.0
    seed: int | None = None


@dataclass(frozen=True)
class Workload:
    """A named list of arrivals, ascending in `at`, and the SLOs of the tiers they belong to."""

    name: str
    seed: int
    rate: float
    duration: float
    tiers: Mapping[str, SLO]
    arrivals: tuple[Arrival, ...]
    counted: bool = False  # prompt_tokens by a tokenizer; else by prompts.estimate
    notes: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if "all" in self.tiers:
            raise ValueError('a tier cannot be called "all": that is the name of the sum over tiers')

    def rescaled(self, rate: float) -> Workload:
        """The same requests at `rate` requests/s: only the times change, all by the same factor."""
        check_rate(rate)
        factor = self.rate / rate
        arrivals = tuple(dataclasses.replace(a, at=a.at * factor) for a in self.arrivals)
        return dataclasses.replace(self, rate=rate, duration=self.duration * factor, arrivals=arrivals)

    def with_slos(self, tiers: Mapping[str, SLO]) -> Workload:
        """The same requests with other SLOs for the tiers named. Raises ValueError for a tier it does not have."""
        for tier in tiers:
            if tier not in self.tiers:
                raise ValueError(f"workload {self.name!r} has no tier {tier!r}: it has {', '.join(self.tiers)}")
        return dataclasses.replace(self, tiers={**self.tiers, **tiers})

    def requests(self) -> Iterator[Request]:
        """As the simulator and the judge take them: arrival in seconds from the workload's start, true lengths."""
        for a in self.arrivals:
            sampling = Sampling(a.output_tokens, a.temperature, seed=a.seed, ignore_eos=True)
            stages = (Stage(a.prompt_tokens, self.tiers[a.tier]),)
            yield Request(a.id, stages, a.at, tier=a.tier, app=a.app, sampling=sampling)


# --------------------------------------------------------------------------- making one


def make(
    name: str,
    kinds: Sequence[Kind],
    rate: float,
    *,
    duration: float | None = None,
    count: int | None = None,
    seed: int = 0,
    count_tokens: Count | None = None,
    temperature: float = 0.0,
) -> Workload:
    """Poisson arrivals at `rate` requests/s of a mix of kinds, for `duration` seconds or of `count` requests.

    Arrivals, kinds, lengths and texts each have a random stream of their own (a text one per request): another rate
    gives the same requests at other times, and a longer run begins with the shorter one. count_tokens: a tokenizer's
    count of a text; without it prompt_tokens are estimates. Raises ValueError for impossible arguments.
    """
    check_rate(rate)
    if (duration is None) == (count is None):
        raise ValueError("give either duration (seconds) or count (requests)")
    tiers = tiers_of(kinds)
    streams = [np.random.default_rng([seed, purpose]) for purpose in (_ARRIVALS, _KINDS, _LENGTHS)]
    shares = np.cumsum([kind.share for kind in kinds]) / sum(kind.share for kind in kinds)
    arrivals: list[Arrival] = []
    seen: set[str] = set()
    units = 0.0  # mean gaps since the start
    while count is None or len(arrivals) < count:
        units += float(streams[_ARRIVALS].exponential())
        if duration is not None and units / rate >= duration:
            break
        kind = kinds[min(int(np.searchsorted(shares, streams[_KINDS].random(), side="right")), len(kinds) - 1)]
        prompt, output = (
            least + int(u * (most - least + 1))
            for u, (least, most) in zip(streams[_LENGTHS].random(2), (kind.prompt, kind.output), strict=True)
        )
        text = fresh_text(kind.app, prompt, np.random.default_rng([seed, _TEXTS, len(arrivals)]), seen)
        tokens = count_tokens(text) if count_tokens is not None else prompts.estimate(text)
        id = f"{name}-{len(arrivals)}"
        message = (("user", text),)
        arrivals.append(Arrival(id, units / rate, kind.tier, kind.app, tokens, output, message, temperature))
    if not arrivals:
        raise ValueError(f"workload {name!r} is empty: no request arrives in {duration} s at {rate} requests/s")
    length = duration if duration is not None else arrivals[-1].at
    notes = {"kinds": [dataclasses.asdict(kind) for kind in kinds], "arrivals": "poisson"}
    return Workload(name, seed, rate, length, tiers, tuple(arrivals), count_tokens is not None, notes)


def check_rate(rate: float) -> None:
    """Raises ValueError unless it is a positive, finite number of requests/s."""
    if not 0.0 < rate < math.inf:
        raise ValueError(f"rate is {rate} requests/s: give a positive number")


def tiers_of(kinds: Sequence[Kind]) -> dict[str, SLO]:
    """Each tier's SLO. Raises ValueError without kinds, or when two of them disagree about a tier."""
    if not kinds:
        raise ValueError("a workload needs at least one kind of request")
    tiers: dict[str, SLO] = {}
    for kind in kinds:
        if tiers.setdefault(kind.tier, kind.slo) != kind.slo:
            raise ValueError(f"two kinds share the tier {kind.tier!r} but not its SLO: {tiers[kind.tier]}, {kind.slo}")
    return tiers


def fresh_text(app: str, tokens: int, rng: np.random.Generator, seen: set[str]) -> str:
    """A text that this workload does not have yet (`seen`). Raises ValueError when there is none of that length."""
    for _ in range(100):
        text = prompts.TEXTS[app](rng, tokens)
        if text not in seen:
            seen.add(text)
            return text
    raise ValueError(f"no fresh {app} prompt of {tokens} tokens in 100 tries: allow longer prompts")


# --------------------------------------------------------------------------- the file


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
        "tiers": {name: _without_none(dataclasses.asdict(slo)) for name, slo in workload.tiers.items()},
        "notes": workload.notes,
    }
    with open(path, "wb") as file:
        file.write(orjson.dumps(header) + b"\n")
        for a in workload.arrivals:
            row: dict[str, Any] = _without_none(dataclasses.asdict(a))
            messages = row.pop("messages")
            if len(messages) == 1 and messages[0][0] == "user":
                row["prompt"] = messages[0][1]
            elif messages:
                row["messages"] = [{"role": role, "content": content} for role, content in messages]
            file.write(orjson.dumps(row) + b"\n")


def _without_none(values: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in values.items() if value is not None}


def read(path: str | Path) -> Workload:
    """Read a workload file. Raises WorkloadError naming file, line and field, and OSError when it cannot be opened."""
    with open(path, "rb") as file:
        lines = [(number, line) for number, line in enumerate(file, start=1) if line.strip()]
    if not lines:
        raise WorkloadError(f"{path} is empty: the first line should be a header with name, seed and tiers")
    header = _Line(str(path), *lines[0])
    if header.values.get("format") != FORMAT:
        raise header.error("format", f"is {header.values.get('format')!r}: expected {FORMAT!r}, in the first line")
    tiers = _read_tiers(header)
    arrivals: list[Arrival] = []
    ids: set[str] = set()
    for number, line in lines[1:]:
        row = _Line(str(path), number, line)
        arrival = _read_arrival(row, tiers)
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
    counted = header.text("prompt_tokens", default="estimated")
    if counted not in ("counted", "estimated"):
        raise header.error("prompt_tokens", f'is {counted!r}: the header says "counted" or "estimated"')
    notes = header.values.get("notes", {})
    if not isinstance(notes, dict):
        raise header.error("notes", "should be an object")
    header.only("format", "name", "seed", "rate", "duration", "prompt_tokens", "tiers", "notes")
    seed = header.integer("seed", least=0, default=0)
    return Workload(
        header.text("name"), seed, rate, duration, tiers, tuple(arrivals), counted == "counted", notes
    )  # fmt: skip


def _read_tiers(header: _Line) -> dict[str, SLO]:
    tiers = header.values.get("tiers")
    if not isinstance(tiers, dict) or not tiers:
        raise header.error("tiers", 'should map each tier to its SLOs in seconds, as {"chat": {"ttft": 1.5}}')
    read: dict[str, SLO] = {}
    for name, slo in tiers.items():
        if not isinstance(slo, dict) or not set(slo) <= {"ttft", "tpot", "e2e"}:
            raise header.error(f"tiers.{name}", f"is {slo!r}: give ttft, tpot and e2e in seconds, each optional")
        try:
            read[name] = SLO(**slo)
        except (ValueError, TypeError) as error:
            raise header.error(f"tiers.{name}", str(error)) from error
    return read


def _read_arrival(row: _Line, tiers: Mapping[str, SLO]) -> Arrival:
    tier = row.text("tier")
    if tier not in tiers:
        raise row.error("tier", f"is {tier!r}: the header has {', '.join(tiers)}")
    row.only(*_ROW)
    return Arrival(
        id=row.text("id"),
        at=row.number("at", least=0.0),
        tier=tier,
        app=row.text("app", default=""),
        prompt_tokens=row.integer("prompt_tokens", least=1),
        output_tokens=row.integer("output_tokens", least=1),
        messages=_read_messages(row),
        temperature=row.number("temperature", least=0.0, default=0.0),
        seed=row.integer("seed", least=0) if "seed" in row.values else None,
    )


_ROW = (
    "id", "at", "tier", "app", "prompt_tokens", "output_tokens", "prompt", "messages", "temperature", "seed",
)  # fmt: skip


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


def json_object(path: str | Path, line: int, text: bytes, error: type[ValueError]) -> dict[str, Any]:
    """The object of one line of a file. Raises `error`, saying where and what is wrong, for anything else."""
    try:
        values = orjson.loads(text)
    except orjson.JSONDecodeError as problem:
        raise error(f"{path}, line {line}: not JSON ({problem})") from problem
    if not isinstance(values, dict):
        raise error(f"{path}, line {line}: should be a JSON object, is {type(values).__name__}")
    return values


class _Line:
    """One JSON line of a file; its fields by type, with errors that say where."""

    def __init__(self, path: str, line: int, text: bytes) -> None:
        self.path, self.line = path, line
        self.values = json_object(path, line, text, WorkloadError)

    def error(self, field: str, problem: str) -> WorkloadError:
        return WorkloadError(f"{self.path}, line {self.line}: {field} {problem}")

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

    def number(self, field: str, least: float, default: float | None = None) -> float:
        value = self._get(field, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value < math.inf:
            raise self.error(field, f"is {value!r}: expected a number, {least:g} or more")
        return float(value)

    def integer(self, field: str, least: int, default: int | None = None) -> int:
        value = self._get(field, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise self.error(field, f"is {value!r}: expected a whole number, {least} or more")
        return value
