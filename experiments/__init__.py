"""Figures of the papers and checks of the simulator: a module each, `slos_serve_toy` is figure `slos-serve-toy`.

A module has a docstring (its first line says what is shown), `SOURCE`, `SECONDS` (of a full run, on one core) and

    def jobs(small: bool) -> list[Cell]: ...                                  # what to run, `rubato.planning.jobs`
    def found(values: Sequence[Any], small: bool) -> Found: ...                # from what the jobs returned, in order

and may have `then(values, small)`, further jobs that follow from what those returned, `ALONE = True`, for a figure
that measures time and must run its jobs one at a time, `draw(data, axes)`, its picture, and `tables(data)`, Markdown
for the page below its claims. `jobs` (and `then`) may take `trace` as well, the path of a recorded stream to offer, or
`policy`, one more system to run beside those in it (`mine.py:setting=value`), under the same requests, seeds and judge;
no claim reads its numbers. `claims.yaml` names each figure's claims and what they are held against; a figure gives one
estimate for each, no more and no fewer. Adding a figure is one module and its claims; modules without claims of their
own help the others. `SECONDS` are the CPU seconds of the recorded run, rounded. A run's JSON has its commit,
its command and the behaviour digests of the policies that ran (`provenance`), and those of `BEHAVIOURS` (names in
`golden`), where a figure measures something else.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import lru_cache
from hashlib import blake2b
from math import inf, isnan
from pathlib import Path
from typing import Any, Literal, Protocol, cast

import yaml

from experiments import provenance
from rubato.core.did_you_mean import nearest
from rubato.fleet.cluster_options import PolicyChoice
from rubato.measure.confidence import Estimate
from rubato.measure.records import versions
from rubato.planning import jobs
from rubato.planning.jobs import Job

FORMAT = "rubato-figure/1"
OPTIONS = ("trace", "policy")  # of some experiments; a run with one is not what the claims are of
Kind = Literal["check", "paper", "ours"]
Relation = Literal["=", ">=", "<="]
Verdict = Literal["holds", "misses", "inconclusive"]


@dataclass(frozen=True, slots=True)
class Claim:
    """A number and what it is held against.

    kind: `check` must hold, also in a small run; `paper` is what a paper reports and `ours` a bar that we set, neither
    of them a gate. paper: the number that the paper reports, that theory gives, or our bar. relation: of ours to it, to
    within `within`. says: what is counted or timed, in words. headline: the paper of whose claims the index lists this
    one also where it holds, or "". cause: why ours differs from the paper's, as far as it is known, or "".
    """

    name: str
    kind: Kind
    paper: float
    relation: Relation
    unit: str
    says: str
    within: float = 1e-9
    headline: str = ""
    cause: str = ""

    def verdict(self, ours: Estimate) -> Verdict:
        """holds: all of the interval fulfils the relation; misses: none of it; else inconclusive."""
        least = self.paper - self.within if self.relation in ("=", ">=") else -inf
        most = self.paper + self.within if self.relation in ("=", "<=") else inf
        if least <= ours.low and ours.high <= most:
            return "holds"
        return "misses" if ours.high < least or ours.low > most else "inconclusive"


@dataclass(frozen=True)
class Found:
    """What a figure shows: an estimate for each claim, and the data of its picture. seeds, judge, settings, interval
    (what it is over): of its runs, for the reader of its JSON."""

    estimates: Mapping[str, Estimate]
    data: Any
    seeds: Sequence[int]
    slo_rule: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    interval: str = "over seeds; low = ours = high where no seed can change the value"


class Figure(Protocol):
    """A module of this package."""

    SOURCE: str
    SECONDS: float

    def jobs(self, small: bool, **options: str) -> list[Job]: ...
    def found(self, values: Sequence[Any], small: bool) -> Found: ...


def names() -> list[str]:
    """Every figure, sorted: those that claims.yaml has claims of."""
    return sorted(claims())


def load(name: str) -> Figure:
    """Raises ValueError for a figure that is not there."""
    if name not in names():
        raise ValueError(f"unknown figure {name!r}{nearest(name, names())}")
    return cast(Figure, importlib.import_module(f"{__name__}.{name.replace('-', '_')}"))


def about(name: str) -> str:
    return (load(name).__doc__ or "").strip().split("\n")[0]


def claims() -> dict[str, dict[str, Claim]]:
    """Figure -> name -> claim, as the file has them."""
    return {
        figure: {name: Claim(name, **claim) for name, claim in own.items()} for figure, own in _claims_file().items()
    }


@lru_cache(maxsize=1)
def _claims_file() -> Mapping[str, Mapping[str, Mapping[str, Any]]]:
    """Read once: PyYAML takes a quarter of a second for it."""
    tree: dict[str, Any] = yaml.safe_load((Path(__file__).parent / "claims.yaml").read_text(encoding="utf-8"))
    return tree


def run(
    name: str, *, small: bool = False, trace: str | Path | None = None, policy: str | None = None, **how: Any
) -> dict[str, Any]:
    """A figure's JSON. trace: a recorded stream to offer instead of a synthetic one. policy: one more system, as
    `rubato simulate --policy` takes it. how: as `jobs.run` takes it. Raises ValueError when its estimates are not its
    claims, for a trace or policy that it does not take, or for a policy that is not there; OSError for a trace that
    cannot be read."""
    figure = load(name)
    given: dict[str, str] = {}
    recorded: dict[str, str] = {}
    if trace is not None:
        _check_takes(name, "trace")
        given["trace"] = str(trace)
        recorded |= {"trace": Path(trace).name, "content": _digest(Path(trace))}
    if policy is not None:
        _check_takes(name, "policy")
        PolicyChoice.parse(policy)
        given["policy"] = policy
        file = Path(policy.partition("@")[0].partition(":")[0])
        recorded |= {"policy": policy} | ({"policy_content": _digest(file)} if file.is_file() else {})
    if getattr(figure, "ALONE", False):
        how["workers"] = 1
    origin = provenance.origin([name, *(["--small"] if small else []), *(f"--{o} {v}" for o, v in given.items())])
    with jobs.open_runner(head={"figure": name, "small": small, **recorded}, **how) as runner:
        runner.about = name
        values = provenance.values(runner.run([provenance.recorded(job) for job in figure.jobs(small, **given)]))
        then = getattr(figure, "then", None)
        if then is not None:
            runner.run([provenance.recorded(job) for job in then(values, small, **given)])
        done = runner.job_results()
    found = figure.found(provenance.values(done.values), small)
    known = claims().get(name, {})
    if found.estimates.keys() != known.keys():
        odd = sorted(found.estimates.keys() ^ known.keys())
        raise ValueError(f"figure {name!r}: {', '.join(odd)} stand in claims.yaml or in its estimates, not in both")
    return {
        "format": FORMAT,
        "figure": name,
        "about": about(name),
        "source": figure.SOURCE,
        "small": small,
        **recorded,
        **origin,
        "behaviour": provenance.behaviour(done.values, getattr(figure, "BEHAVIOURS", ())),
        "claims": [_judged(claim, found.estimates[name]) for name, claim in known.items()],
        "seeds": list(found.seeds),
        "slo_rule": found.slo_rule,
        "settings": dict(found.settings),
        "interval": f"95 %, {found.interval}",
        "wall": done.wall,
        "cpu": done.cpu,
        "notes": done.notes,
        "versions": versions("numpy"),
        "data": found.data,
    }


def _check_takes(name: str, option: str) -> None:
    """Raises ValueError for an experiment that has no use for the option, naming those that have."""
    takers = [other for other in names() if option in inspect.signature(load(other).jobs).parameters]
    if name not in takers:
        raise ValueError(f"figure {name!r} takes no {option}: leave out --{option} ({', '.join(takers)} take one)")


def _digest(path: Path) -> str:
    """Of a file, or of all files of a folder."""
    files = sorted(file for file in path.iterdir() if file.is_file()) if path.is_dir() else [path]
    return blake2b(b"".join(file.read_bytes() for file in files), digest_size=8).hexdigest()


def _judged(claim: Claim, ours: Estimate) -> dict[str, Any]:
    if isnan(ours.value):
        raise ValueError(f"claim {claim.name!r} has no number")
    own = {"ours": ours.value, "low": ours.low, "high": ours.high, "verdict": claim.verdict(ours)}
    held_against = asdict(claim)
    del held_against["headline"], held_against["cause"]  # of the page, not of the run
    return held_against | own


def failed(data: Mapping[str, Any]) -> list[str]:
    """Names of the checks of a figure's JSON that do not hold."""
    return [c["name"] for c in data["claims"] if c["kind"] == "check" and c["verdict"] != "holds"]
