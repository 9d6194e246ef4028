"""`rubato judge`: policies on loads of yours, each policy in the one setting given; nothing is tuned.

One table for each load of a folder: the largest rate at which 90 % of all, 95 % of all, and 90 % of each tier attain,
and what is attained at the load's own rate. Loads are drawn anew for each seed (blocks of a minute, bootstrapped), and
all policies serve the same requests; ratios of policies are paired by seed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from rubato.measure.pictures import WIDTH, Ink, Picture, bars_with_intervals
from rubato.measure.records import versions
from rubato.measure.result import Result
from rubato.measure.tables import Table, listed
from rubato.planning import jobs
from rubato.planning.jobs import Job, JobResults
from rubato.planning.judge.loads import JudgedLoad
from rubato.planning.judge.search import FIRST, TOLERANCE, search
from rubato.planning.judge.table import bars, contrast_sentence, result, rows_of, table, winner
from rubato.planning.request_source import digest
from rubato.planning.sweep import able, left_out
from rubato.simulation.run_spec import Hardware, RunSpec

FORMAT = "rubato-judge/1"
REFERENCE = "edf"  # the policy that others are set against


@dataclass(frozen=True)
class JudgeQuestion:
    """Asks which policy serves each load best.

    Args:
        specs: one for each policy, for the hardware that a load is offered to; `REFERENCE` is among them.
    """

    loads: Sequence[JudgedLoad]
    specs: Callable[[Hardware], Sequence[RunSpec]]
    seeds: Sequence[int]

    def __post_init__(self) -> None:
        if not self.seeds or len(set(self.seeds)) != len(self.seeds):
            raise ValueError(f"--seeds {','.join(map(str, self.seeds))}: give at least one, and each once")
        labels = [spec.choice.label for spec in self.specs(self.loads[0].machine)]
        if twice := [label for label in labels if labels.count(label) > 1]:
            raise ValueError(f"policy {twice[0]} is given twice")


def run(question: JudgeQuestion, **how: Any) -> JudgeResult:
    """`how`: as `jobs.run` takes it. A policy that cannot run is left out. Raises ValueError where none can."""
    judged = [_JudgedLoad(load, *able(question.specs(load.machine))) for load in question.loads]
    work = [
        Job(
            f"{one.load.file.name} {spec.choice.label} seed={seed}",
            search,
            (one.load.file.name, one.load.source, spec, seed),
        )
        for one in judged
        for spec in one.specs
        for seed in question.seeds
    ]
    head = {"judge": [one.describe() for one in judged]}
    return JudgeResult(question, judged, jobs.run(work, head=head, about="judge", **how))


@dataclass(frozen=True)
class _JudgedLoad:
    """A load with the policies that can run, and why the others cannot."""

    load: JudgedLoad
    specs: tuple[RunSpec, ...]
    skipped: Mapping[str, str]

    def describe(self) -> dict[str, Any]:
        """What decides the numbers of a load; files by their content."""
        own = [(spec.choice.policy, Path(spec.choice.policy)) for spec in self.specs]
        kinds = self.load.kinds
        return {
            "load": self.load.file.name,
            "content": digest(self.load.file),
            "kinds": None if kinds is None else {"file": kinds.name, "content": digest(kinds)},
            "source": self.load.source.describe(),
            "settings": [spec.describe() for spec in self.specs],
            "policy_files": {name: digest(file) for name, file in own if file.suffix == ".py" and file.is_file()},
        }


@dataclass(frozen=True, repr=False)
class JudgeResult(Result):
    """What was found on each load."""

    title = "Judged"
    question: JudgeQuestion
    judged: Sequence[_JudgedLoad]
    job_results: JobResults

    @cached_property
    def loads(self) -> list[dict[str, Any]]:
        """Each load's part of the JSON."""
        values = self.job_results.costed()
        return [
            one.describe()
            | result(one.load, one.specs, [v for v in values if v["load"] == one.load.file.name], left_out(one.skipped))
            for one in self.judged
        ]

    @property
    def answer(self) -> str:
        best = {judged["load"]: winner(judged) for judged in self.loads}
        counts = Counter(policy for policy in best.values() if policy is not None)
        held = [f"{policy} on {count} of {len(best)} loads" for policy, count in counts.most_common()]
        without = [load for load, policy in best.items() if policy is None]
        said = [f"The largest rate is held by {listed(held)}."] if held else []
        said += [f"No policy holds the largest rate on {listed(without)}: see the notes."] if without else []
        return " ".join(said)

    @property
    def settings(self) -> Mapping[str, Any]:
        return {"seeds": self.question.seeds, "loads": [one.describe() for one in self.judged]}

    @property
    def findings(self) -> tuple[str, ...]:
        return tuple(filter(None, (contrast_sentence(judged, REFERENCE) for judged in self.loads)))

    @property
    def notes(self) -> tuple[str, ...]:
        return (
            *self.job_results.notes,
            *(f"{judged['load']}: {note}" for judged in self.loads for note in judged["notes"]),
        )

    def tables(self) -> list[Table]:
        return [table(judged) for judged in self.loads]

    def rows(self) -> list[dict[str, Any]]:
        """One for each load, policy and measure."""
        return [row for judged in self.loads for row in rows_of(judged)]

    def picture(self) -> Picture:
        """Each policy's rate, a panel a load."""
        bars_by_load = [(judged, bars(judged)) for judged in self.loads]

        def draw(figure: Any, ink: Ink) -> None:
            panels = figure.subplots(len(bars_by_load), 1, squeeze=False)[:, 0]
            for axes, (judged, own) in zip(panels, bars_by_load, strict=True):
                if own:
                    bars_with_intervals(axes, own, ink)
                else:
                    axes.set_xticks([])
                    axes.set_yticks([])
                    axes.text(0.5, 0.5, "no rate to show: see the notes", ha="center", va="center", color=ink.text)
                axes.set_title(judged["load"])
                axes.set_xlabel("times the trace's rate" if judged["times_own_rate"] else "requests/s of the fleet")

        height = sum(1.2 + 0.32 * len(own) for _, own in bars_by_load)
        return Picture(f"Rate held ({FIRST}) with 95 % intervals", draw, (WIDTH, height))

    def to_json(self) -> dict[str, Any]:
        return {
            "format": FORMAT,
            "seeds": list(self.question.seeds),
            "tolerance": TOLERANCE,
            "interval": "95 %, Student's t over seeds; each seed's capacity is within the tolerance",
            "loads": self.loads,
            "wall": self.job_results.wall,
            "cpu": self.job_results.cpu,
            "notes": self.notes,
            "versions": versions("numpy"),
        }
