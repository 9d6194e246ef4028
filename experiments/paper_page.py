"""The pages that set papers' numbers beside ours, from the JSON of full runs: an index, and a page a paper.

A page opens with headline claims, then says what misses and why, and how to run it; all other claims and the tables of
its figures are folded. The index does the same for the five papers. Numbers come from the runs, words and bars from
today's `claims.yaml`.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from math import inf, isinf
from pathlib import Path
from typing import Any

import orjson
from pydantic import BaseModel, ValidationError

import experiments
from experiments import Claim, provenance
from experiments.paper_headlines import HEADLINES
from rubato.measure.confidence import Estimate
from rubato.planning.capacity import too_short

SECTION = re.compile(r"§([\d.]*\d)")  # named by every headline claim that is a paper's
INDEX = "papers.md"
# papers, and how the names of their figures and pages begin; what is left over is the simulator's
PAPERS = {"SLOs-Serve": "slos-serve", "PolyServe": "polyserve", "Ascendra": "ascendra", "SA": "sa",
          "AdaServe": "adaserve"}  # fmt: skip
OUR_POLICY = "rubato"  # the page of our own policy's figures, whose names begin so, and of these:
OURS_BESIDES = ("baselines-today", "jitserve-mix", "load-curve", "sensitivity")
SIMULATOR = "simulator"
NOT_RUN = "not run"
COUNTED = {"misses": "miss", "inconclusive": "inconclusive", NOT_RUN: NOT_RUN, "holds": "hold"}
HOW = """A claim *holds* when all of our 95 % interval over seeds fulfils it, *misses* when none of it does, and else is
*inconclusive*. Serving is simulated, on [hardware profiles](latency.md#hardware-profiles); CPU time is measured. A
*paper* claim is what a paper reports, *ours* a bar that we set, in brackets above; a *check* must hold."""
WRITTEN = "Written by `python -m experiments --docs` from full runs (`docs/figures/*.json`); do not edit."
RUN = """    python -m experiments {figure} --small  # seconds, checks only
    python -m experiments {figure} --json docs/figures/{figure}.json
    python -m experiments --docs  # writes this page anew

Run them in the checkout. The CPU time of each figure stands below."""


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
    behaviour: dict[str, dict[str, str]]
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
        return self._shown(lambda value: f"{value:.4g}")

    @property
    def rounded(self) -> str:
        """To three digits."""
        return self._shown(three_digits)

    def _shown(self, number: Callable[[float], str]) -> str:
        if self.ours is None:
            return NOT_RUN
        value, low, high = self.ours.value, self.ours.low, self.ours.high
        if low == high:
            return number(value)
        if isinf(low) or isinf(high):
            return f"{number(value)} (one seed)"
        return f"{number(value)} [{number(low)}, {number(high)}]"

    @property
    def said(self) -> str:
        """What a paper says, or our bar in brackets, in words."""
        claim = self.claim
        words = {">=": "at least ", "<=": "at most ", "=": ""}[claim.relation] if claim.kind == "ours" else ""
        number = f"{words}{claim.paper:,g} {claim.unit}"
        return f"({number})" if claim.kind == "ours" else number

    @property
    def in_words(self) -> str:
        if self.ours is None or self.verdict == "holds":
            return self.verdict
        if self.verdict == "inconclusive":
            return "inconclusive: the interval spans it"
        return f"misses: {'lower' if self.ours.value < self.claim.paper else 'higher'}"

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
    rest = [row for verdict in (NOT_RUN, "holds") for row in papers if row.claim.headline and row.verdict == verdict]
    misses, unsure = ([row for row in papers if row.verdict == verdict] for verdict in ("misses", "inconclusive"))
    return "\n".join([
        f"# Papers reproduced\n\n{_summary(rows)}\n",
        f"## Claims that miss, and why\n\n{_listed(misses, linked=True)}\n",
        "## The other claims\n",
        _folded(f"{len(unsure)} claims that are inconclusive", _listed(unsure, linked=True)),
        _folded(f"{len(rest)} headline claims that hold or were not run", _listed(rest, linked=True)),
        _folded(f"{len(bars)} headline bars of our own that do not hold", _listed(bars, linked=True)),
        _older(runs),
        f"## How to read this\n\n{HOW}\n\n{WRITTEN}\n",
    ])  # fmt: skip


def _summary(rows: Sequence[_Row]) -> str:
    """One sentence, the counts, and a line for each paper: its first headline, and its claims by verdict."""
    papers = [row for row in rows if row.claim.kind == "paper"]
    all_ = Counter(row.verdict for row in papers)
    table = [["paper", "its main claim", "ours, simulated", "verdict", "of all claims"]]
    for title, page in PAPERS.items():
        own = Counter(row.verdict for row in papers if page_of(row.figure) == page)
        counts = ", ".join(f"{own[verdict]} {word}" for verdict, word in COUNTED.items() if own[verdict])
        words, said, ours, verdict = _headlines(page, rows)[0]
        table.append([f"[{title}](papers/{page}.md)", f"{words}: {said}", ours, verdict.split(":")[0], counts])
    return f"""Five papers' schedulers, written anew and held against the papers' own numbers in simulation.

Of {len(papers)} claims of five papers **{all_["misses"]} miss**, \
{all_["inconclusive"]} are inconclusive, {all_[NOT_RUN]} were not run and {all_["holds"]} hold.

{compact(table)}

Our own bars: [the policy `rubato`](papers/{OUR_POLICY}.md), [the simulator](papers/{SIMULATOR}.md)."""


def _headlines(page: str, rows: Iterable[_Row]) -> list[list[str]]:
    """Cells for each headline of a page: the claim, the paper's number or our bar, ours, and the verdict in words."""
    of = {(row.figure, row.claim.name): row for row in rows}
    return [
        [words, (row := of[figure, name]).said, row.rounded, row.in_words] for figure, name, words in HEADLINES[page]
    ]


def _older(runs: Sequence[Mapping[str, Any]]) -> str:
    """Names the figures whose policies do otherwise since they ran."""
    old = sorted(run["figure"] for run in runs if provenance.changed(run))
    if not old:
        return "Every figure measures its policies as they are."
    links = ", ".join(f"[{figure}](papers/{page_of(figure)}.md#{figure})" for figure in old)
    head = f"{len(old)} of {len(runs)} figures are older than what their policies do now"
    return _folded(head, f"{links}. The page of each names the policies.")


def _listed(rows: Iterable[_Row], linked: bool = False) -> str:
    """linked: from the index, to the figure's section; else within a page."""
    table = [["claim", "held against", "ours", "why it differs", "figure"]]
    for row in rows:
        place = f"papers/{page_of(row.figure)}.md" if linked else ""
        link = f"[{row.figure}]({place}#{row.figure})"
        table.append([row.claim.says, row.bar, row.rounded, row.claim.cause if row.verdict != "holds" else "", link])
    return compact(table)


def _folded(summary: str, text: str) -> str:
    """Shown on a click, on the site and on GitHub."""
    return f'<details markdown="1"><summary>{summary}</summary>\n\n{text}\n\n</details>\n'


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
    """Headline claims, what misses and why, how to run it, and folded lists of what is inconclusive."""
    policy = "" if page == SIMULATOR else f" The policy: [`{page.replace('-', '_')}`](../policies/{page}.md)."
    heads = {OUR_POLICY: "# Our own policy beside others", SIMULATOR: "# The simulator's own checks"}
    papers = [row for row in rows if row.claim.kind == "paper"]
    said = f" Of {_count(papers)} ([what that means](../{INDEX}#how-to-read-this))." if papers else ""
    table = [["claim", "the paper" if papers else "our bar", "ours, 95 % interval", "verdict"], *_headlines(page, rows)]
    parts = [
        f"{heads.get(page, f'# {title} beside ours')}\n",
        f"[All papers](../{INDEX}).{policy}{said}\n\n{compact(table)}\n",
    ]
    misses = sorted((row for row in papers if row.verdict == "misses"), key=lambda row: row.section)
    if misses:
        parts.append(f"## Where it differs, and why\n\n{_listed(misses)}\n")
    parts.append(f"## How to run it\n\n{RUN.format(figure=HEADLINES[page][0].figure)}\n")
    more = _more(rows, misses)
    parts += ["## Other claims that do not hold\n", *more] if more else []
    return "\n".join([*parts, f"## Figures\n\n{WRITTEN}\n"])


def _more(rows: Sequence[_Row], shown: Sequence[_Row]) -> list[str]:
    """Folded lists of the claims that do not hold, by kind and verdict, but for those shown."""
    parts = []
    for whose, kind in (("claims of the paper", "paper"), ("bars of our own", "ours"), ("checks", "check")):
        for verdict, word in list(COUNTED.items())[:3]:
            own = [row for row in rows if row.claim.kind == kind and row.verdict == verdict and row not in shown]
            if own:
                own.sort(key=lambda row: row.section)
                parts.append(_folded(f"{word.capitalize()}: {len(own)} {whose}", _listed(own)))
    return parts


def _figure(name: str, run: Mapping[str, Any] | None, rows: Sequence[_Row]) -> str:
    table = [["claim", "what", "kind", "held against", "ours", "verdict"]]
    for row in rows:
        claim = row.claim
        table.append([f"`{claim.name}`", claim.says, claim.kind, row.bar, row.measured, row.verdict])
    figure = experiments.load(name)
    about = f"{experiments.about(name)} Source: {figure.SOURCE}."
    if run is None:
        how = f"**Not run in full**: no number is recorded. A run takes about {figure.SECONDS:g} s of one core."
        return f"### {name}\n\n{about} {how}\n\n{_folded(f'{len(rows)} claims', compact(table))}"
    tables = getattr(figure, "tables", None)
    more = "" if tables is None else f"\n\n{_unpadded(tables(run['data'])).strip()}"
    cpu = float(f"{run['cpu']:.3g}")
    how = f"{seeds(run)}, {run['slo_rule']} rule, {cpu:,g} CPU seconds. {_origin(run)}"
    short = too_short(run["data"]) if isinstance(run["data"], list) else ""
    warning = f"**Short runs.** {short}.\n\n" if short else ""
    folded = _folded(f"{_count(rows)}; tables", f"{how}\n\n{warning}{compact(table)}{more}")
    return f"### {name}\n\n{about}\n\n{folded}"


def _count(rows: Sequence[_Row]) -> str:
    """`12 claims: 2 miss, 10 hold`."""
    counts = Counter(row.verdict for row in rows)
    return f"{len(rows)} claims: {', '.join(f'{counts[v]} {w}' for v, w in COUNTED.items() if counts[v])}"


def _origin(run: Mapping[str, Any]) -> str:
    """Of which day and code it is, and which of its policies do otherwise now."""
    commit = run["commit"][:7] + ("+" if run["commit"].endswith("+") else "")
    said = f"Of {run['date']}, commit `{commit}`: `{run['command']}`."
    changed = provenance.changed(run)
    if not changed:
        return said
    named = ", ".join(f"`{name}`" for name in changed)
    return f"{said} **Older than its policies**: {named} do{'es' if len(changed) == 1 else ''} otherwise since then."


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


def three_digits(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:#.3g}".rstrip(".")


def bar(claim: Mapping[str, Any]) -> str:
    """What ours is held against."""
    within = f" ± {claim['within']:g}" if claim["within"] > 1e-6 else ""
    return f"{claim['relation']} {claim['paper']:.4g}{within}"
