"""The page that sets papers' numbers beside ours, from the JSON of full runs; it opens with what misses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import orjson
from pydantic import BaseModel, ValidationError

from rubato import experiments
from rubato.planning.sweep import markdown

HEAD = """# Papers beside ours

Written by `rubato figure --docs` from full runs (`docs/figures/*.json`); do not edit. Each claim is held against our
95 % interval over seeds: it *holds* when all of the interval fulfils it, *misses* when none does, else it is
*inconclusive*. A *check* (a toy, an invariant) must hold; a *paper* claim is what a paper reports, and is only shown.
"""


class _Claim(BaseModel):
    name: str
    says: str
    kind: str
    relation: str
    unit: str
    verdict: str
    paper: float
    within: float
    ours: float | None
    low: float | None
    high: float | None


class _Run(BaseModel):
    """What the page shows of a run."""

    format: str
    figure: str
    about: str
    source: str
    small: bool
    judge: str
    cpu: float
    seeds: list[int]
    claims: list[_Claim]
    data: Any


def read(path: Path) -> Mapping[str, Any]:
    """A run of a figure. Raises ValueError, naming the file, for what `page` cannot show."""
    right = f"give what `rubato figure NAME --json {path}` writes"
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
        raise ValueError(f"format {run.get('format')!r} is no figure's: give what `rubato figure --json` wrote")
    if run["small"]:
        raise ValueError(f"figure {run['figure']!r} was run with --small: run it in full")
    if [claim["name"] for claim in run["claims"]] != list(known.get(run["figure"], {})):
        raise ValueError(f"figure {run['figure']!r} was run with claims that claims.yaml has not: run it again")


def page(runs: Sequence[Mapping[str, Any]]) -> str:
    """The Markdown of `docs/papers.md`. Raises ValueError for what is not a full run of today's claims."""
    known = experiments.claims()
    for run in runs:
        _check(run)
    parts = [HEAD, "## Misses\n", _misses(runs)]
    missing = sorted(set(known) - {run["figure"] for run in runs})
    if missing:
        parts.append(f"\nNot run in full yet: {', '.join(missing)}.\n")
    parts += [_figure(run) for run in runs]
    return "\n".join(parts)


def _misses(runs: Sequence[Mapping[str, Any]]) -> str:
    odd = [(run, claim) for run in runs for claim in run["claims"] if claim["verdict"] != "holds"]
    if not odd:
        return "None: every claim below holds.\n"
    rows = [["figure", "claim", "kind", "paper", "ours", "verdict"]]
    for run, claim in sorted(odd, key=lambda pair: pair[1]["verdict"] != "misses"):
        rows.append([run["figure"], claim["says"], claim["kind"], _paper(claim), _ours(claim), claim["verdict"]])
    return markdown(rows) + "\n"


def _figure(run: Mapping[str, Any]) -> str:
    rows = [["claim", "what", "kind", "paper", "ours", "verdict"]]
    for claim in run["claims"]:
        rows.append([f"`{claim['name']}`", claim["says"], claim["kind"], _paper(claim), _ours(claim), claim["verdict"]])
    seeds = run["seeds"]
    tables = getattr(experiments.load(run["figure"]), "tables", None)
    more = "" if tables is None else f"\n{tables(run['data'])}\n"
    how = f"{len(seeds)} seed{'s' if len(seeds) > 1 else ''}, {run['judge']} rule, {run['cpu']:.3g} CPU seconds."
    return f"\n## {run['figure']}\n\n{run['about']} Source: {run['source']}. {how}\n\n{markdown(rows)}\n{more}"


def bar(claim: Mapping[str, Any]) -> str:
    """What ours is held against."""
    within = f" ± {claim['within']:g}" if claim["within"] > 1e-6 else ""
    return f"{claim['relation']} {claim['paper']:.4g}{within}"


def _paper(claim: Mapping[str, Any]) -> str:
    return f"{bar(claim)} {claim['unit']}"


def _ours(claim: Mapping[str, Any]) -> str:
    if claim["low"] == claim["high"]:
        return f"{claim['ours']:.4g}"
    low, high = ("∞" if end is None else f"{end:.4g}" for end in (claim["low"], claim["high"]))
    return f"{claim['ours']:.4g} [{low}, {high}]"
