"""Runs of one or more policies as one Result: what `rubato bench` and `rubato simulate` find."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

from rubato.core.extras import extra
from rubato.measure import compare, plot, results
from rubato.measure.confidence import ALL, Estimate
from rubato.measure.pictures import Picture
from rubato.measure.records import BenchResult, TierSummary, summarise
from rubato.measure.result import Result, told_apart
from rubato.measure.tables import Table, percent, points_of


@dataclass(frozen=True, repr=False)
class Runs(Result):
    """Runs of one label are rounds of one policy, pooled in tables. `runs[0].records` has each request's fate."""

    title = "Runs"
    runs: tuple[BenchResult, ...]

    @cached_property
    def tiers(self) -> Mapping[str, tuple[TierSummary, ...]]:
        """By label, a row for each tier and one for "all"."""
        return {label: summarise(own) for label, own in results.by_label(self.runs).items()}

    @property
    def attainment(self) -> Mapping[str, Estimate]:
        """By tier, and of "all": the share of requests attained, of the first label's runs."""
        return {row.tier: _attained(row) for row in next(iter(self.tiers.values()))}

    @property
    def answer(self) -> str:
        invalid = sum(not run.valid for run in self.runs)
        warning = f" {invalid} of {len(self.runs)} runs are INVALID." if invalid else ""
        total = {label: rows[-1] for label, rows in self.tiers.items()}
        said = (f"{label} attains {percent(_attained(row))} of {row.offered}" for label, row in total.items())
        return f"{'; '.join(said)} requests.{warning}"

    def tables(self) -> list[Table]:
        return [Table(tuple(results.HEAD.split("|")), tuple(map(tuple, results.table_rows(self.runs))))]

    def table(self) -> str:
        """For a terminal: aligned, and with the findings."""
        return "\n".join([results.table(self.runs), *self._compared()])

    def rows(self) -> list[dict[str, Any]]:
        """One for each policy and tier, "all" among them."""
        return [{"policy": label} | asdict(row) for label, rows in self.tiers.items() for row in rows]

    def requests(self) -> Any:
        """A pandas DataFrame of all requests, one a row. Raises ImportError, saying what to install, without pandas."""
        with extra("notebook", "a frame"):
            import pandas
        frames = [
            pandas.DataFrame({"policy": run.label, "seed": run.workload.seed} | results.columns(run))
            for run in self.runs
        ]
        return pandas.concat(frames, ignore_index=True)

    def picture(self) -> Picture:
        return plot.picture_of_runs(self.runs)

    @property
    def settings(self) -> Mapping[str, Any]:
        plain = [results.run_json(run, requests=False) for run in self.runs]
        return {"runs": [{name: run[name] for name in ("policy", "workload", "settings")} for run in plain]}

    @property
    def findings(self) -> tuple[str, ...]:
        return (*self._compared(), *results.findings(self.runs))

    def _compared(self) -> list[str]:
        """Which policies attain more than the first, paired by request where the workload is the same."""
        by_label = results.by_label(self.runs)
        (first, own), *others = by_label.items()
        against, points = {}, {}
        for label, runs in others:
            report = compare.compare(*([compare.saved(run) for run in each] for each in (runs, own)))
            against[label] = report.tiers[ALL].attained.estimate
            points[label] = f"{points_of(against[label])} points"
        return [f"{told_apart(against, first, 'attains', points)}."] if others else []

    @property
    def notes(self) -> tuple[str, ...]:
        return tuple(note.removesuffix(".") for note in results.notes(self.runs))

    def to_json(self) -> dict[str, Any]:
        return results.to_json(self.runs)


def _attained(row: TierSummary) -> Estimate:
    return Estimate(row.attainment, row.attainment_low, row.attainment_high)
