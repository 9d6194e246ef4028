"""The fleet for a workload: question, simulations, and answer in text and JSON; `fleet_size` searches for it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from math import inf
from typing import Any

from rubato.core.interfaces import Line
from rubato.core.plan import Sample, Shape
from rubato.latency.model_wrapper import ModelWrapper
from rubato.measure.confidence import Estimate
from rubato.measure.pictures import COLOURS, DASHED, Ink, Picture, bars_with_intervals, lines_with_intervals
from rubato.measure.records import Record, versions
from rubato.measure.result import Result, with_interval
from rubato.measure.tables import Table, listed, percent
from rubato.planning import feasibility
from rubato.planning.jobs import JobResults
from rubato.planning.request_source import RequestSource
from rubato.simulation.run_spec import RunSpec
from rubato.simulation.simulate import gc_paused, simulate
from rubato.workloads import Workload
from rubato.workloads.resample import Stretch, bootstrapped, inside

FORMAT = "rubato-plan/1"


@dataclass(frozen=True)
class FleetQuestion:
    """Asks how many replicas attain a target.

    Args:
        target: share of requests to attain.
        seconds: length of the busiest stretch.
        seeds: how many to begin with, and at most.
        exclude: whether requests that no idle replica can attain are left out, and counted.
        price: of a GPU, an hour.
    """

    source: RequestSource
    spec: RunSpec
    target: float = 0.9
    seconds: float = 600.0
    seeds: tuple[int, int] = (4, 16)
    exclude: bool = False
    price: float | None = None

    def __post_init__(self) -> None:
        if not 0.0 < self.target < 1.0:
            raise ValueError(f"target is {self.target}: give a share in (0, 1), such as 0.9")
        if not 2 <= self.seeds[0] <= self.seeds[1]:
            least, most = self.seeds
            raise ValueError(f"--least-seeds {least}, --most-seeds {most}: give 2 or more, and no fewer at most")
        if not 0.0 < self.seconds < inf:
            raise ValueError(f"the busiest stretch is {self.seconds} s long: give a positive, finite number of seconds")
        if self.price is not None and not 0.0 < self.price < inf:
            raise ValueError(f"price is {self.price} a GPU-hour: give a positive, finite number")

    def describe(self) -> dict[str, Any]:
        own = {"target": self.target, "seconds": self.seconds, "exclude": self.exclude}
        return {"source": self.source.describe(), "setting": self.spec.describe(), **own}

    def stretch(self, seed: int) -> Stretch:
        return self.source.busiest(seed, self.seconds)

    def load(self, seed: int, stretch: Stretch | None = None) -> Workload:
        """The whole workload under a seed, or a stretch of it."""
        made = self.source.make(seed, stretch)
        return feasibility.feasible_only(made, self.spec.hardware, self.spec.slo_rule) if self.exclude else made


# --------------------------------------------------------------------------- jobs


@gc_paused()
def peak(question: FleetQuestion, replicas: int, relaxed: str, factor: float, seed: int) -> dict[str, Any]:
    """Returns met and offered requests, in all and per tier, in the busiest stretch drawn by `seed`.

    Args:
        relaxed: the constraint to relax, "" for none.
    """
    load = bootstrapped(question.load(seed, question.stretch(seed)), seed)
    spec = replace(question.spec, replicas=replicas)
    if relaxed:
        load, spec = relax(load, spec, relaxed, factor)
    return _counts(simulate(load, spec, seed, times=False, causes=False).records)


@gc_paused()
def whole(question: FleetQuestion, replicas: int) -> dict[str, Any]:
    """The whole workload under seed 0: requests met and offered, in all and in its busiest stretch, and its tokens."""
    load = question.load(0)
    stretch = question.stretch(0)
    records = simulate(load, replace(question.spec, replicas=replicas), times=False, causes=False).records
    return _counts(records) | {
        "busiest": _counts([r for r in records if inside(r.at, stretch, load.duration)]),
        "prompt_tokens": sum(a.prompt_tokens for a in load.arrivals),
        "output_tokens": sum(r.output for r in records),
        "seconds": load.duration,
    }


def _counts(records: Sequence[Record]) -> dict[str, Any]:
    tiers: dict[str, list[int]] = {}
    for record in records:
        tier = tiers.setdefault(record.tier, [0, 0])
        tier[0] += record.verdict.met
        tier[1] += 1
    return {"met": sum(record.verdict.met for record in records), "offered": len(records), "tiers": tiers}


@dataclass(frozen=True)
class Faster(ModelWrapper):
    """A latency model whose steps take 1/by of the time."""

    by: float

    def step_time(self, shape: Shape) -> float:
        return self.model.step_time(shape) / self.by

    def seconds_of(
        self, tokens: int, seqs: int, kv: int, chunk_context: int, chunk_sq: int, chunks: int, chunk_kv: int
    ) -> float:
        return self.model.seconds_of(tokens, seqs, kv, chunk_context, chunk_sq, chunks, chunk_kv) / self.by

    def line(self, seqs: int, kv: int) -> Line | None:
        """None: the line would not equal `step_time` to the last bit."""
        return None

    def largest_chunk(self, seconds: float, base: Shape, cached: int, most: int) -> int:
        return self.model.largest_chunk(seconds * self.by, base, cached, most)

    def fit(self, samples: Sequence[Sample]) -> None:
        self.model.fit([replace(sample, seconds=sample.seconds * self.by) for sample in samples])

    def update(self, sample: Sample) -> None:
        self.model.update(replace(sample, seconds=sample.seconds * self.by))


def relax(load: Workload, spec: RunSpec, constraint: str, factor: float) -> tuple[Workload, RunSpec]:
    """compute: steps `factor` times as fast; kv: so many times the KV; ttft, tpot, e2e: SLOs so many times as long."""
    hardware = spec.hardware
    if constraint == "compute":
        return load, replace(spec, hardware=replace(hardware, model=Faster(hardware.model, factor)))
    if constraint == "kv":
        limits = replace(hardware.limits, kv_blocks=int(hardware.limits.kv_blocks * factor))
        return load, replace(spec, hardware=replace(hardware, limits=limits))
    return load.with_slo_scale(factor, what=constraint), spec


def effect(all_seeds: Estimate, same: Sequence[Mapping[str, Any]], relaxed: Sequence[Mapping[str, Any]]) -> float:
    """Attainment with one constraint relaxed: the share of misses that is left under the seeds run both ways is applied
    to the misses of all seeds. So a change of nothing has no effect; few seeds suffice."""
    left, were = (sum(1.0 - v["met"] / v["offered"] for v in values) for values in (relaxed, same))
    return max(0.0, 1.0 - (1.0 - all_seeds.value) * left / were) if were else 1.0


# --------------------------------------------------------------------------- the answer


@dataclass(frozen=True, repr=False)
class FleetPlan(Result):
    """The answer: so many `replicas` attain the target.

    Args:
        decided: whether the mean with one fewer is below the target; else it is too close for the number of seeds to
            tell.
        whole: the whole workload on that many replicas.
        relaxed: attainment of one replica fewer by the constraint that is relaxed (`effect`).
        infeasible: what no idle replica attains.
        tried: attainment of the busiest stretch by number of replicas.
    """

    title = "Fleet"
    question: FleetQuestion
    stretch: tuple[float, float]
    replicas: int
    decided: bool
    seeds: int
    with_n: Estimate
    with_one_fewer: Estimate
    whole: Mapping[str, Any]
    relaxed: Mapping[str, float]
    relaxed_by: float
    relaxed_seeds: Mapping[str, int]
    infeasible: feasibility.Feasibility
    tried: Mapping[int, Estimate] = field(default_factory=dict)
    job_results: JobResults = field(default_factory=lambda: JobResults(()))

    @property
    def gpus(self) -> int:
        return self.replicas * self.question.spec.hardware.gpus

    @property
    def binds(self) -> list[str]:
        """What, relaxed alone, lets one replica fewer attain the target; the largest gain first."""
        able = [what for what, attained in self.relaxed.items() if attained >= self.question.target]
        return sorted(able, key=lambda what: -self.relaxed[what])

    @property
    def cost(self) -> dict[str, float] | None:
        """In the price's currency: of the whole workload, held from its first to its last arrival, and per million
        tokens (prompt and output; output alone)."""
        if self.question.price is None:
            return None
        total = self.question.price * self.gpus * self.whole["seconds"] / 3600.0
        tokens = self.whole["prompt_tokens"] + self.whole["output_tokens"]
        return {
            "total": total,
            "per_million_tokens": 1e6 * total / tokens,
            "per_million_output_tokens": 1e6 * total / self.whole["output_tokens"],
        }

    @property
    def notes(self) -> tuple[str, ...]:
        notes = [*self.job_results.notes, *self.question.source.notes]
        if self.infeasible.count:
            how = "left out" if self.question.exclude else "they count as misses"
            notes.append(f"{self.infeasible.text}; {how}")
        if not self.decided:
            notes.append(
                f"{counted(self.replicas - 1, 'replica')} attain {percent(self.with_one_fewer)}: too close to "
                f"{100 * self.question.target:g} % for {self.seeds} seeds to tell; {self.replicas} is on the safe side"
            )
        if self._share(self.whole) < self.question.target:
            same = self._share(self.whole["busiest"]) >= self.question.target
            why = (
                "its busiest stretch is not its hardest"
                if same
                else "what it was sized on attains less in its place in the whole; size on a longer --window"
            )
            notes.append(f"the whole workload is NOT attained with this fleet: {why}")
        return tuple(notes)

    def to_json(self) -> dict[str, Any]:
        return {
            "format": FORMAT,
            **self.question.describe(),
            "slo_rule": self.question.spec.slo_rule,
            "replicas": self.replicas,
            "gpus": self.gpus,
            "decided": self.decided,
            "seeds": list(range(self.seeds)),
            "stretch": self.stretch,
            "attainment": {str(self.replicas): self.with_n, str(self.replicas - 1): self.with_one_fewer},
            "interval": "95 %, of the mean over seeds: Student's t, at least Wilson's of all requests",
            "whole": self.whole,
            "relaxed": {
                "by": self.relaxed_by,
                "replicas": self.replicas - 1,
                "attainment": dict(self.relaxed),
                "seeds": dict(self.relaxed_seeds),
                "of": "one fewer's misses over all seeds, times how many are left of those under the seeds relaxed",
            },
            "binds": self.binds,
            "infeasible": asdict(self.infeasible),
            "price": self.question.price,
            "cost": self.cost,
            "wall": self.job_results.wall,
            "cpu": self.job_results.cpu,
            "notes": self.notes,
            "versions": versions("numpy"),
        }

    @property
    def settings(self) -> Mapping[str, Any]:
        return self.question.describe() | {"price": self.question.price}

    @property
    def answer(self) -> str:
        spec = self.question.spec
        fleet = f"{counted(self.replicas, 'replica')} of {spec.hardware.name} ({counted(self.gpus, 'GPU')})"
        verb = "attains" if self.replicas == 1 else "attain"
        return (
            f"{fleet} {verb} {100 * self.question.target:g} % of requests with policy {spec.choice.label} "
            f"({spec.slo_rule} rule)."
        )

    @property
    def findings(self) -> tuple[str, ...]:
        return tuple(filter(None, (self._binding(), self._costs())))

    def table(self) -> str:
        return f"**{self.answer}**\n\n{super().table()}"

    def tables(self) -> list[Table]:
        start, end = self.stretch
        rows = [(f"busiest stretch, {start:.0f} to {end:.0f} s, {self.seeds} seeds", self.replicas, self.with_n)]
        if self.replicas > 1:
            rows.append(("the same, one replica fewer", self.replicas - 1, self.with_one_fewer))
        cells = [(what, str(replicas), percent(attained)) for what, replicas, attained in rows]
        cells += self._relaxed_rows()
        cells.append(("the whole workload", str(self.replicas), self._of(self.whole)))
        cells.append(("of it, the busiest stretch", str(self.replicas), self._of(self.whole["busiest"])))
        return [Table(("what was run", "replicas", "attainment"), tuple(cells))]

    def _relaxed_rows(self) -> list[tuple[str, str, str]]:
        """A row for each constraint that binds, and one for those that do not."""
        times, fewer = f"relaxed {self.relaxed_by:.3g} times", str(self.replicas - 1)
        seeds = {what: counted(count, "seed") for what, count in self.relaxed_seeds.items()}
        rows = [
            (f"and {what} {times}, {seeds[what]}", fewer, f"{100 * self.relaxed[what]:.1f} %") for what in self.binds
        ]
        others = {what: attained for what, attained in self.relaxed.items() if what not in self.binds}
        if others:
            low, high = (f"{100 * end(others.values()):.1f}" for end in (min, max))
            share = f"{low} %" if low == high else f"{low} to {high} %"
            rows.append((f"and {listed(list(others), 'or')} {times}", fewer, share))
        return rows

    def rows(self) -> list[dict[str, Any]]:
        """One for each fleet tried on the busiest stretch, and for each constraint relaxed in a fleet one smaller."""
        tried = [
            {"replicas": n, "relaxed": ""} | with_interval("attainment", attained) for n, attained in self.tried.items()
        ]
        return tried + [
            {"replicas": self.replicas - 1, "relaxed": what, "attainment": attained}
            for what, attained in self.relaxed.items()
        ]

    def picture(self) -> Picture:
        """Attainment by the number of replicas; where one fewer misses, with each constraint relaxed, too."""
        target, fewer = 100 * self.question.target, counted(self.replicas - 1, "replica")

        def draw(figure: Any, ink: Ink) -> None:
            panels = figure.subplots(1, 2 if self.relaxed else 1, squeeze=False)[0]
            counts = sorted(self.tried)
            lines_with_intervals(panels[0], {"": [self.tried[n] for n in counts]}, counts, target, ink)
            panels[0].axvline(self.replicas, color=COLOURS[3], linewidth=1.0, zorder=0)
            panels[0].set(xlabel="replicas", ylabel="attained in the busiest stretch (%)")
            panels[0].set_title(f"{counted(self.replicas, 'replica')}: {percent(self.with_n)}")
            if self.relaxed:
                bars = [("as they are", 100 * self.with_one_fewer.value, COLOURS[6])]
                bars += [(w, 100 * a, COLOURS[2 if w in self.binds else 6]) for w, a in self.relaxed.items()]
                rows = [(name, Estimate.exact(a), f"{a:.1f} %", colour) for name, a, colour in bars]
                bars_with_intervals(panels[1], rows, ink)
                panels[1].axvline(target, color=ink.rule, linewidth=0.8, linestyle=DASHED)
                panels[1].set(xlabel="attained (%)", xlim=(0, 125))
                panels[1].set_title(f"{fewer}, one constraint relaxed {self.relaxed_by:.3g} times")

        return Picture(f"Attainment by the number of replicas; line at {target:g} %", draw, (9.0, 3.6))

    def _binding(self) -> str:
        if self.replicas == 1:
            return ""
        fewer, times = counted(self.replicas - 1, "replica"), f"relaxed {self.relaxed_by:.3g} times"
        if not self.relaxed:
            return f"What binds cannot be told: in the mean, {fewer} would do."
        if not self.binds:
            return f"What binds: no single constraint; none, {times}, makes one fewer do."
        return f"What binds: {' or '.join(self.binds)}. {times.capitalize()}, {fewer} would do."

    def _costs(self) -> str:
        if self.cost is None:
            return ""
        return (
            f"Cost at {self.question.price:g} a GPU-hour: {self.cost['total']:.2f} for these "
            f"{self.whole['seconds']:.0f} s, "
            f"{self.cost['per_million_tokens']:.3g} per million tokens (prompt and output), "
            f"{self.cost['per_million_output_tokens']:.3g} per million output tokens."
        )

    def _of(self, counts: Mapping[str, Any]) -> str:
        tiers = ", ".join(f"{tier} {100 * met / offered:.1f}" for tier, (met, offered) in counts["tiers"].items())
        return f"{100 * self._share(counts):.1f} % ({tiers})"

    @staticmethod
    def _share(counts: Mapping[str, Any]) -> float:
        return float(counts["met"] / counts["offered"]) if counts["offered"] else 1.0


def counted(count: int, what: str) -> str:
    return f"{count} {what}{'s' if count != 1 else ''}"
