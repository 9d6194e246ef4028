"""The pages that set papers' numbers beside ours, from the JSON of full runs: an index, and a page a paper.

The index opens with counts, then lists papers' claims that miss, those that are inconclusive, our own headline bars
that do not hold, and the headline claims that were not run or hold. A paper's page opens with what misses, too; then
comes every claim, figure by figure. Numbers come from the runs, words and bars from today's `claims.yaml`.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from math import inf, isinf
from pathlib import Path
from typing import Any

import orjson
from pydantic import BaseModel, ValidationError

import experiments
from experiments import Claim, provenance
from rubato.measure.confidence import Estimate
from rubato.planning.capacity import too_short

SECTION = re.compile(r"§([\d.]*\d)")  # named by every headline claim that is a paper's
INDEX = "papers.md"
# papers, and how the names of their figures and pages begin; what is left over is the simulator's
PAPERS = {"SLOs-Serve": "slos-serve", "PolyServe": "polyserve", "Ascendra": "ascendra", "SA": "sa",
          "AdaServe": "adaserve"}  # fmt: skip
OUR_POLICY = "rubato"  # the page of our own policy's figures, whose names begin so, and of these:
OURS_BESIDES = ("baselines-today", "jitserve-mix", "sensitivity")
SIMULATOR = "simulator"
NAMED = 4  # modules that a page names of those that have changed
NOT_RUN = "not run"
VERDICTS = ("misses", "inconclusive", NOT_RUN, "holds")
HOW = """A claim *holds* when all of our 95 % interval over seeds fulfils it, *misses* when none of it does, and else is
*inconclusive*. Serving is simulated, on [hardware profiles]({up}latency.md#hardware-profiles); CPU time is measured."""
WRITTEN = "Written by `python -m experiments --docs` from full runs (`docs/figures/*.json`); do not edit."
KINDS = """Kinds of claims:

- *paper*: what a paper reports; no gate.
- *ours*: a bar that we set; no gate.
- *check*: a toy, an invariant, or what was fitted; must hold."""


class _Claim(BaseModel):
    """What a run says of a claim. low, high: the interval's ends, None where it has none."""

    name: str
    verdict: str
    ours: float
    low: float | None
    high: float | None


class _Run(BaseModel):
    """What the pages show of a run."""

    format: str
    figure: str
    about: str
    source: str
    small: bool
    slo_rule: str
    cpu: float
    seeds: list[int]
    commit: str
    date: str
    command: str
    code: dict[str, str]
    claims: list[_Claim]
    data: Any


def read(path: Path) -> Mapping[str, Any]:
    """A run of a figure. Raises ValueError, naming the file, for what `pages` cannot show."""
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
    """Raises ValueError for what is not a full run of a figure of today's."""
    known = experiments.claims()
    if run.get("format") != experiments.FORMAT:
        raise ValueError(f"format {run.get('format')!r} is no figure's: give what `python -m experiments --json` wrote")
    if run["small"]:
        raise ValueError(f"figure {run['figure']!r} was run with --small: run it in full")
    for option in experiments.OPTIONS:
        if option in run:
            raise ValueError(f"figure {run['figure']!r} was run with --{option}, which not all have: run it without")
    if known.get(run["figure"], {}).keys().isdisjoint(claim["name"] for claim in run["claims"]):
        raise ValueError(f"figure {run['figure']!r} was run with claims that claims.yaml has not: run it again")


@dataclass(frozen=True)
class _Row:
    """One claim of one figure, as the pages show it. ours: None where it was not run in full."""

    figure: str
    claim: Claim
    ours: Estimate | None

    @property
    def verdict(self) -> str:
        return NOT_RUN if self.ours is None else self.claim.verdict(self.ours)

    @property
    def bar(self) -> str:
        return f"{bar(asdict(self.claim))} {self.claim.unit}"

    @property
    def measured(self) -> str:
        if self.ours is None:
            return NOT_RUN
        value, low, high = self.ours.value, self.ours.low, self.ours.high
        if low == high:
            return f"{value:.4g}"
        if isinf(low) or isinf(high):
            return f"{value:.4g} (one seed)"
        return f"{value:.4g} [{low:.4g}, {high:.4g}]"

    @property
    def section(self) -> tuple[int, ...]:
        """Where the paper says it; (0,) for our own bars, and where no section is named."""
        named = SECTION.findall(self.claim.says) if self.claim.kind != "ours" else []
        return tuple(int(part) for part in named[0].split(".")) if named else (0,)


def pages(runs: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """Markdown by file, relative to docs/. Raises ValueError for what is not a full run of a figure of today's."""
    known = experiments.claims()
    for run in runs:
        _check(run)
    ran = {run["figure"]: run for run in runs}
    rows = {figure: _rows(figure, own, ran.get(figure)) for figure, own in known.items()}
    made = {INDEX: _index([row for own in rows.values() for row in own], list(ran.values()))}
    for title, page in (*PAPERS.items(), ("Our own policy", OUR_POLICY), ("The simulator", SIMULATOR)):
        figures = [figure for figure in known if page_of(figure) == page]
        own = [row for figure in sorted(figures) for row in rows[figure]]
        parts = [_opening(title, page, own)]
        parts += [_figure(figure, ran.get(figure), rows[figure]) for figure in sorted(figures)]
        made[f"papers/{page}.md"] = "\n".join(parts)
    return made


def page_of(figure: str) -> str:
    """The name of the page that a figure stands on."""
    if figure in OURS_BESIDES:
        return OUR_POLICY
    return next((page for page in (*PAPERS.values(), OUR_POLICY) if figure.startswith(f"{page}-")), SIMULATOR)


def _rows(figure: str, claims: Mapping[str, Claim], run: Mapping[str, Any] | None) -> list[_Row]:
    """Of today's claims; those that are newer than the run were not run."""
    ran = {claim["name"]: _estimate(claim) for claim in run["claims"]} if run is not None else {}
    return [_Row(figure, claim, ran.get(name)) for name, claim in claims.items()]


def _estimate(claim: Mapping[str, Any]) -> Estimate:
    low, high = claim["low"], claim["high"]
    return Estimate(claim["ours"], -inf if low is None else low, inf if high is None else high)


# --------------------------------------------------------------------------- the index


def _index(rows: Sequence[_Row], runs: Sequence[Mapping[str, Any]]) -> str:
    """In the order of papers, and in that of a paper's sections."""
    order = list(PAPERS.values())
    rows = [row for row in rows if page_of(row.figure) in order]
    rows = sorted(rows, key=lambda row: (order.index(page_of(row.figure)), row.section))
    papers = [row for row in rows if row.claim.kind == "paper"]
    bars = [row for row in rows if row.claim.headline and row.claim.kind == "ours" and row.verdict != "holds"]
    parts = [f"# Papers beside ours\n\n{_summary(papers)}\n{_older(runs)}{HOW.format(up='')} {WRITTEN}\n"]
    misses, unsure = ([row for row in papers if row.verdict == verdict] for verdict in VERDICTS[:2])
    parts.append(f"## Papers' claims that miss\n\n{_listed(misses, linked=True)}\n")
    parts.append(f"## Papers' claims that are inconclusive\n\n{_listed(unsure, linked=True)}\n")
    if bars:
        parts.append(f"## Our own headline bars that do not hold\n\n{_listed(bars, linked=True)}\n")
    rest = [row for verdict in VERDICTS[2:] for row in papers if row.claim.headline and row.verdict == verdict]
    parts.append(f"## Headline claims that were not run, and that hold\n\n{_listed(rest, linked=True)}\n")
    return "\n".join(parts)


def _summary(papers: Sequence[_Row]) -> str:
    """In all, and a line for each paper."""
    all_ = Counter(row.verdict for row in papers)
    table = [["paper", "miss", "inconclusive", "not run", "hold"]]
    for title, page in PAPERS.items():
        own = Counter(row.verdict for row in papers if page_of(row.figure) == page)
        table.append([f"[{title}](papers/{page}.md)", *(str(own[verdict]) for verdict in VERDICTS)])
    return f"""Of {len(papers)} claims of five papers **{all_["misses"]} miss**, \
{all_["inconclusive"]} are inconclusive, {all_[NOT_RUN]} were not run and {all_["holds"]} hold.

{compact(table)}

Our own bars and checks stand on each paper's page; those of [our policy](papers/{OUR_POLICY}.md) and of the simulator \
on [their own](papers/{SIMULATOR}.md)."""


def _older(runs: Sequence[Mapping[str, Any]]) -> str:
    """Names the figures whose policies have changed since they ran, and counts those where only what policies share
    has."""
    changed = {run["figure"]: provenance.changed(run) for run in runs}
    old = sorted(figure for figure, modules in changed.items() if any(m.startswith("policies/") for m in modules))
    links = ", ".join(f"[{figure}](papers/{page_of(figure)}.md#{figure})" for figure in old) or "none"
    shared = sum(map(bool, changed.values())) - len(old)
    return (
        f"**{len(old)} of {len(runs)} figures are older than the policies that they measure**: {links}. Of {shared} "
        "more, what policies share (`policy_kit`) has changed since. The page of each names the modules.\n\n"
    )


def _listed(rows: Iterable[_Row], linked: bool = False) -> str:
    """linked: from the index, to the figure's section; else within a page."""
    table = [["figure", "claim", "held against", "ours", "cause of the difference"]]
    for row in rows:
        place = f"papers/{page_of(row.figure)}.md" if linked else ""
        link = f"[{row.figure}]({place}#{row.figure})"
        table.append([link, row.claim.says, row.bar, row.measured, row.claim.cause if row.verdict != "holds" else ""])
    return compact(table)


def compact(table: Sequence[Sequence[str]]) -> str:
    """A Markdown table without padding; the first row is its head."""
    lines = ["| " + " | ".join(row) + " |" for row in table]
    return _unpadded("\n".join([lines[0], "|" + "---|" * len(table[0]), *lines[1:]]))


def _unpadded(text: str) -> str:
    """The same with no space but one on either side of a cell of a table."""
    lines = [re.sub(r" +\|", " |", re.sub(r"-{3,}", "---", x)) if x.startswith("|") else x for x in text.split("\n")]
    return "\n".join(lines)


# --------------------------------------------------------------------------- a paper's page


def _opening(title: str, page: str, rows: Sequence[_Row]) -> str:
    """What it is, and lists of claims by verdict, misses first."""
    policy = "" if page == SIMULATOR else f" The policy: [`{page.replace('-', '_')}`](../{page}.md)."
    heads = {OUR_POLICY: "# Our own policy beside others", SIMULATOR: "# The simulator's own checks"}
    head = heads.get(page, f"# {title} beside ours")
    parts = [f"{head}\n\n[Index of papers](../{INDEX}).{policy} {WRITTEN}\n{HOW.format(up='../')}\n\n{KINDS}\n"]
    words = {"misses": "miss", "inconclusive": "are inconclusive", NOT_RUN: "were not run", "holds": "hold"}
    for whose, kinds, verdicts in (
        ("The paper's claims", ("paper",), VERDICTS), ("Our own bars", ("ours",), VERDICTS[:3]),
        ("Checks", ("check",), VERDICTS[:2]),
    ):  # fmt: skip
        for verdict in verdicts:
            own = [row for row in rows if row.claim.kind in kinds and row.verdict == verdict]
            if own:
                own.sort(key=lambda row: row.section)
                parts.append(f"## {whose} that {words[verdict]}\n\n{_listed(own)}\n")
    return "\n".join(parts)


def _figure(name: str, run: Mapping[str, Any] | None, rows: Sequence[_Row]) -> str:
    table = [["claim", "what", "kind", "held against", "ours", "verdict"]]
    for row in rows:
        claim = row.claim
        table.append([f"`{claim.name}`", claim.says, claim.kind, row.bar, row.measured, row.verdict])
    figure = experiments.load(name)
    about = f"{experiments.about(name)} Source: {figure.SOURCE}."
    if run is None:
        how = f"**Not run in full**: no number is recorded. A run takes about {figure.SECONDS:g} s of one core."
        return f"## {name}\n\n{about} {how}\n\n{compact(table)}\n"
    tables = getattr(figure, "tables", None)
    more = "" if tables is None else f"\n{_unpadded(tables(run['data']))}\n"
    cpu = float(f"{run['cpu']:.3g}")
    how = f"{seeds(run)}, {run['slo_rule']} rule, {cpu:,g} CPU seconds. {_origin(run)}"
    short = too_short(run["data"]) if isinstance(run["data"], list) else ""
    warning = f"**Short runs.** {short}.\n\n" if short else ""
    return f"## {name}\n\n{about} {how}\n\n{warning}{compact(table)}\n{more}"


def _origin(run: Mapping[str, Any]) -> str:
    """Of which day and code it is, and what of the policies in it is another now."""
    commit = run["commit"][:7] + ("+" if run["commit"].endswith("+") else "")
    said = f"Of {run['date']}, commit `{commit}`: `{run['command']}`."
    changed = provenance.changed(run)
    if not changed:
        return said
    more = f" and {len(changed) - NAMED} more" if len(changed) > NAMED else ""
    there = [(provenance.ROOT / module).is_file() for module in changed[:NAMED]]
    named = ", ".join(f"`{m}`" if is_there else f"{m} (gone)" for m, is_there in zip(changed, there, strict=False))
    return f"{said} **Older than its code**: {named}{more} changed since then."


def seeds(run: Mapping[str, Any]) -> str:
    """How many, and which systems have fewer: `3 seeds (1: edf)`."""
    of: dict[str, set[int]] = {}
    for value in run["data"] if isinstance(run["data"], list) else ():
        own = value.get("seeds", [value["seed"]] if "seed" in value else []) if isinstance(value, dict) else []
        systems = value.get("systems", [value.get("name")] if "name" in value else []) if own else []
        for system in systems:
            of.setdefault(system, set()).update(own)
    most = max((len(own) for own in of.values()), default=len(run["seeds"]))
    text = f"{most or 'no'} seed{'' if most < 2 else 's'}"
    fewer = [f"{count}: {', '.join(n for n in of if len(of[n]) == count)}" for count in sorted(
        {len(own) for own in of.values()} - {most})]  # fmt: skip
    return f"{text} ({'; '.join(fewer)})" if fewer else text


def bar(claim: Mapping[str, Any]) -> str:
    """What ours is held against."""
    within = f" ± {claim['within']:g}" if claim["within"] > 1e-6 else ""
    return f"{claim['relation']} {claim['paper']:.4g}{within}"
