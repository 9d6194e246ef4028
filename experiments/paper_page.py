"""The page that sets papers' numbers beside ours, from the JSON of full runs.

It opens with one table per paper: headline claim, ours, verdict, cause; our own headline bars come last in it. The
claims that miss or are inconclusive follow, a paper's apart from our own bars, and then every claim, figure by figure.
Numbers come from the runs, words and bars from today's `claims.yaml`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from math import inf, isinf
from pathlib import Path
from typing import Any

import orjson
from pydantic import BaseModel, ValidationError

import experiments
from experiments import Claim
from rubato.measure.confidence import Estimate
from rubato.planning.capacity import too_short
from rubato.planning.sweep import markdown

SECTION = re.compile(r"§([\d.]*\d)")  # named by every headline claim that is a paper's
HEAD = """# Papers beside ours

Written by `python -m experiments --docs` from full runs (`docs/figures/*.json`); do not edit. A claim *holds* when all
of our 95 % interval over seeds fulfils it, *misses* when none of the interval does, and else is *inconclusive*. What is
held against a paper is simulated, on the packaged [hardware profiles](latency.md#hardware-profiles). Kinds: *paper* is
what a paper reports, *ours* a bar that we set, and neither is a gate; a *check* (a toy, an invariant) must hold. """


class _Claim(BaseModel):
    """What a run says of a claim. low, high: the interval's ends, None where it has none."""

    name: str
    verdict: str
    ours: float
    low: float | None
    high: float | None


class _Run(BaseModel):
    """What the page shows of a run."""

    format: str
    figure: str
    about: str
    source: str
    small: bool
    slo_rule: str
    cpu: float
    seeds: list[int]
    claims: list[_Claim]
    data: Any


def read(path: Path) -> Mapping[str, Any]:
    """A run of a figure. Raises ValueError, naming the file, for what `page` cannot show."""
    right = f"give what `python -m experiments NAME --json {path}` writes"
    try:
        run: Mapping[str, Any] = orjson.loads(path.read_bytes())
        _Run.model_validate(run)
        _check(run)
    except orjson.JSONDecodeError as error:
        raise ValueError(f"{path} is not JSON ({error}): {right}") from error
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "all of it"
        raise ValueError(f"{path} is no run of a figure ({where}: {first['msg']}): {right}") from error
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    return run


def _check(run: Mapping[str, Any]) -> None:
    """Raises ValueError for what is not a full run of today's claims."""
    known = experiments.claims()
    if run.get("format") != experiments.FORMAT:
        raise ValueError(f"format {run.get('format')!r} is no figure's: give what `python -m experiments --json` wrote")
    if run["small"]:
        raise ValueError(f"figure {run['figure']!r} was run with --small: run it in full")
    if "trace" in run:
        raise ValueError(f"figure {run['figure']!r} was run with --trace, which not all have: run it without")
    if [claim["name"] for claim in run["claims"]] != list(known.get(run["figure"], {})):
        raise ValueError(f"figure {run['figure']!r} was run with claims that claims.yaml has not: run it again")


@dataclass(frozen=True)
class _Row:
    """One claim of one figure, as the page shows it."""

    figure: str
    seeds: int
    claim: Claim
    ours: Estimate

    @property
    def cause(self) -> str:
        whose = "our bar" if self.claim.kind == "ours" else "the paper's number"
        spans = f"the interval of {self.seeds} seeds spans {whose}"
        return self.claim.cause or (spans if self.verdict == "inconclusive" else "")

    @property
    def verdict(self) -> str:
        return self.claim.verdict(self.ours)

    @property
    def paper(self) -> str:
        return f"{bar(asdict(self.claim))} {self.claim.unit}"

    @property
    def measured(self) -> str:
        ours = self.ours
        if ours.low == ours.high:
            return f"{ours.value:.4g}"
        low, high = ("∞" if isinf(end) else f"{end:.4g}" for end in (ours.low, ours.high))
        return f"{ours.value:.4g} [{low}, {high}]"


def page(runs: Sequence[Mapping[str, Any]]) -> str:
    """The Markdown of `docs/papers.md`. Raises ValueError for what is not a full run of today's claims."""
    known = experiments.claims()
    for run in runs:
        _check(run)
    rows = [row for run in runs for row in _rows(run, known)]
    parts = [HEAD]
    for paper in dict.fromkeys(row.claim.headline for row in rows if row.claim.headline):
        parts.append(f"## {paper}\n\n{_headlines([row for row in rows if row.claim.headline == paper])}\n")
    for title, kinds in (("Claims of papers", ("paper", "check")), ("Our own bars", ("ours",))):
        for verdict, word in (("misses", "that miss"), ("inconclusive", "that are inconclusive")):
            own = [row for row in rows if row.claim.kind in kinds and row.verdict == verdict]
            if own:
                parts.append(f"## {title} {word}\n\n{_listed(own)}\n")
    missing = sorted(set(known) - {run["figure"] for run in runs})
    if missing:
        parts.append(f"Not run in full yet: {', '.join(missing)}.\n")
    parts += [_figure(run, _rows(run, known)) for run in runs]
    return "\n".join(parts)


def _rows(run: Mapping[str, Any], known: Mapping[str, Mapping[str, Claim]]) -> list[_Row]:
    figure, seeds = run["figure"], len(run["seeds"])
    return [_Row(figure, seeds, known[figure][claim["name"]], _estimate(claim)) for claim in run["claims"]]


def _estimate(claim: Mapping[str, Any]) -> Estimate:
    low, high = claim["low"], claim["high"]
    return Estimate(claim["ours"], -inf if low is None else low, inf if high is None else high)


def _headlines(rows: Sequence[_Row]) -> str:
    """In the order of the paper's sections; our own bars last, of which the paper says nothing."""
    own = [row for row in rows if row.claim.kind == "ours"]
    rows = [row for row in rows if row.claim.kind != "ours"]
    rows.sort(key=lambda row: [int(part) for part in SECTION.findall(row.claim.says)[0].split(".")])
    table = [["headline claim", "paper", "ours", "verdict", "cause of the difference", "figure"]]
    for row in [*rows, *own]:
        claim = row.claim
        paper = f"- (our bar: {row.paper})" if claim.kind == "ours" else row.paper
        table.append([claim.says, paper, row.measured, row.verdict, row.cause, f"[{row.figure}](#{row.figure})"])
    return markdown(table)


def _listed(rows: Sequence[_Row]) -> str:
    table = [["figure", "claim", "held against", "ours"]]
    table += [[row.figure, row.claim.says, row.paper, row.measured] for row in rows]
    return markdown(table)


def _figure(run: Mapping[str, Any], rows: Sequence[_Row]) -> str:
    name = run["figure"]
    table = [["claim", "what", "kind", "held against", "ours", "verdict"]]
    for row in rows:
        claim = row.claim
        table.append([f"`{claim.name}`", claim.says, claim.kind, row.paper, row.measured, row.verdict])
    seeds = run["seeds"]
    figure = experiments.load(name)
    tables = getattr(figure, "tables", None)
    more = "" if tables is None else f"\n{tables(run['data'])}\n"
    how = f"{len(seeds)} seed{'s' if len(seeds) > 1 else ''}, {run['slo_rule']} rule, {run['cpu']:.3g} CPU seconds."
    about = f"{experiments.about(name)} Source: {figure.SOURCE}. {how}"
    short = too_short(run["data"]) if isinstance(run["data"], list) else ""
    warning = f"**Short runs.** {short}.\n\n" if short else ""
    return f"## {name}\n\n{about}\n\n{warning}{markdown(table)}\n{more}"


def bar(claim: Mapping[str, Any]) -> str:
    """What ours is held against."""
    within = f" ± {claim['within']:g}" if claim["within"] > 1e-6 else ""
    return f"{claim['relation']} {claim['paper']:.4g}{within}"
