"""The gate: our own policy beside others and README's example, on every load near or beyond capacity, in five noises.

A cell is a load (`_gate_loads`) under one kind of noise; each runs under every policy in its default settings, on the
same requests and seeds. Attainment of all can be won by giving up a whole tier, so that the worst tier stands beside it
(of sessions: whole ones, and the worst tier of their turns). Of requests whose first token came in time, a promise,
those that missed a later one are counted, and how many did within one second. On some loads of one replica each part of
the policy is left out, too (`_gate_parts`). Below capacity: mean TTFT and e2e beside those of `vllm`, in the setting
that holds most, at shares of the rate that it holds (`rubato-replica`), seed by seed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from experiments import Found
from experiments._gate import NOISES, cell
from experiments._gate_loads import loads
from experiments._gate_parts import PARTS, without
from experiments._rubato_runs import hardware, recorded, served
from rubato.measure.confidence import Estimate, over_seeds
from rubato.measure.tables import markdown
from rubato.planning.jobs import Job
from rubato.planning.request_source import ScenarioSource
from rubato.workloads import Workload

SOURCE = "ours"
SECONDS = 4570.0

OURS, EXAMPLE, LEFT_OUT = "rubato", "example", "without "
MY_POLICY = Path(__file__).parents[1] / "examples" / "my_policy.py"
OTHERS = ("edf", "vllm", "sarathi", "slos_serve", "qoserve", EXAMPLE)
SEEDS = (1, 2)
PARTS_LOADS = (
    "demo 1.3", "chatbot", "coder", "sessions 4.5", "mix 18", "mix 24, learnt", "uniform-4096-1024 x1", "burst",
)  # fmt: skip
PARTS_NOISES = ("independent", "wandering")
NEAR = 0.98  # of the best other
SCENARIOS, SHARES = ("chatbot", "coder", "summarizer", "mixed"), (0.5, 0.7)  # below capacity
BELOW_COUNT, BELOW_SEEDS = 1000, (1, 2, 3, 4, 5, 6)


def jobs(small: bool) -> list[Job]:
    chosen, parts = (("coder",), list(PARTS)[-2:]) if small else (tuple(loads()), list(PARTS))
    noises, seeds = (PARTS_NOISES, SEEDS[:1]) if small else (tuple(NOISES), SEEDS)
    cells = [(load, policy, noises, seed) for seed in seeds for load in chosen for policy in (OURS, *OTHERS)]
    cells += [
        (load, LEFT_OUT + part, PARTS_NOISES, seed)
        for seed in seeds for load in PARTS_LOADS if load in chosen for part in parts
    ]  # fmt: skip
    uncrowded = (BELOW_SEEDS[:2], 30) if small else (BELOW_SEEDS, BELOW_COUNT)
    return [Job(f"{given[0]}, {given[1]}, seed {given[3]}", measured, given) for given in cells] + [
        Job(f"{scenario} below", below, (scenario, *uncrowded)) for scenario in (chosen if small else SCENARIOS)
    ]


def measured(load: str, name: str, noises: Sequence[str], seed: int) -> list[dict[str, Any]]:
    """The cells of a policy, of `EXAMPLE`, or of ours with a part left out."""
    if name.startswith(LEFT_OUT):
        with without(name.removeprefix(LEFT_OUT)):
            return [cell(load, noise, OURS, seed) | {"policy": name} for noise in noises]
    policy = str(MY_POLICY) if name == EXAMPLE else name
    return [cell(load, noise, policy, seed) | {"policy": name} for noise in noises]


def below(scenario: str, seeds: Sequence[int], count: int) -> list[dict[str, Any]]:
    """By share of what `vllm` holds: the means of ours over its own, by seed, and what attains of each."""
    named = {(v["load"], v["name"]): v["measures"]["90 % of all"] for v in recorded("rubato-replica")}
    vllm = named[scenario, "vllm"]
    cells = []
    for share in SHARES:
        pairs = []
        for seed in seeds:
            load = ScenarioSource(f"slos-serve-{scenario}", hardware(scenario), count=count).make(seed)
            load = load.rescaled(share * float(np.mean(vllm["goodput"])))
            pairs.append([means(load, scenario, policy, seed) for policy in (OURS, vllm["setting"])])
        e2e, ttft, attained = np.moveaxis(np.array(pairs), 2, 0)  # each by seed, and by policy
        cells.append({
            "scenario": scenario, "share": share, "e2e": (e2e[:, 0] / e2e[:, 1]).tolist(),
            "ttft": (ttft[:, 0] / ttft[:, 1]).tolist(), "attained": attained.mean(axis=0).tolist(),
        })  # fmt: skip
    return cells


def means(load: Workload, scenario: str, policy: str, seed: int) -> Any:
    """Mean e2e and TTFT, and what attains."""
    verdicts = [r.verdict for r in served(load, scenario, policy, seed)]
    return np.mean([(v.e2e or 0.0, v.ttft or 0.0, v.met) for v in verdicts], axis=0)


# --------------------------------------------------------------------------- what was found


class Table:
    """Cells by load and noise, seed by seed. both: the mean of `attained` and `worst`."""

    def __init__(self, values: Sequence[Any]) -> None:
        runs = [v | {"both": (v["attained"] + v["worst"]) / 2} for v in values if "noise" in v]
        self.runs: dict[tuple[str, str, str], list[Any]] = {}
        for run in runs:
            self.runs.setdefault((run["load"], run["noise"], run["policy"]), []).append(run)
        self.cells = [(load, noise) for load, noise, policy in self.runs if policy == OURS]
        self.below = [v for v in values if "share" in v]

    def shares(self, cell: tuple[str, str], policy: str, key: str = "attained") -> Any:
        """By seed."""
        return np.array([run[key] for run in self.runs[*cell, policy]])

    def best(self, cells: Sequence[tuple[str, str]], key: str = "attained") -> str:
        """Of the others the one with the largest mean."""
        return max(OTHERS, key=lambda other: self.mean(cells, other, key))

    def mean(self, cells: Sequence[tuple[str, str]], policy: str, key: str = "attained") -> float:
        return float(np.mean([self.shares(cell, policy, key) for cell in cells]))

    def ratio(self, key: str) -> Estimate:
        """Ours over the best other of each cell: the ratio of means over cells, by seed. A mean of ratios would be that
        of the cells in which the others attain next to nothing."""
        ours = np.mean([self.shares(cell, OURS, key) for cell in self.cells], axis=0)
        best = np.mean([self.shares(cell, self.best([cell], key), key) for cell in self.cells], axis=0)
        return over_seeds((ours / best).tolist())

    def near(self) -> float:
        """Percent of cells in which ours is near the best other, or ahead of it."""
        return 100.0 * float(
            np.mean([self.mean([c], OURS) >= NEAR * self.mean([c], self.best([c])) for c in self.cells])
        )

    def ahead(self, other: str, key: str) -> Estimate:
        """Points, mean over cells, by seed."""
        each = [self.shares(cell, OURS, key) - self.shares(cell, other, key) for cell in self.cells]
        return over_seeds((100.0 * np.mean(each, axis=0)).tolist())

    def broken(self, cells: Sequence[tuple[str, str]], policy: str = OURS) -> float:
        """Percent of the promises."""
        runs = [run for cell in cells for run in self.runs[*cell, policy]]
        broken, promised = (sum(int(run[key]) for run in runs) for key in ("broken", "promised"))
        return 100.0 * broken / max(1, promised)

    def lost(self, part: str, key: str) -> Estimate:
        """Points that are lost without a part, mean over its cells, by seed."""
        each = [
            self.shares(cell, OURS, key) - self.shares(cell, LEFT_OUT + part, key) for cell in self.without(part)
        ]  # fmt: skip
        return over_seeds((100.0 * np.mean(each, axis=0)).tolist())

    def without(self, part: str) -> list[tuple[str, str]]:
        """The cells in which it was left out."""
        return [(load, noise) for load, noise, policy in self.runs if policy == LEFT_OUT + part]

    def parts(self) -> list[str]:
        """What gives least first."""
        ran = [part for part in PARTS if self.without(part)]
        return sorted(ran, key=lambda part: self.lost(part, "both").value)


def found(values: Sequence[Any], small: bool) -> Found:
    data = [cell for own in values for cell in own]
    table = Table(data)
    estimates = {
        "near-best": Estimate.exact(table.near()), "ratio": table.ratio("attained"),
    }  # fmt: skip
    for other in ("edf", "vllm"):
        estimates[f"over-{other}"] = table.ahead(other, "attained")
        estimates[f"worst-over-{other}"] = table.ahead(other, "worst")
    estimates["broken"] = Estimate.exact(table.broken(table.cells))
    estimates["broken-cell"] = Estimate.exact(max(table.broken([cell]) for cell in table.cells))
    return Found(estimates, data, SEEDS[:1] if small else SEEDS, "deadline", {"noises": NOISES})


def tables(data: Sequence[Any]) -> str:
    """Losses first."""
    table = Table(data)
    everyone = (OURS, *OTHERS)

    def shares(cells: Sequence[tuple[str, str]], policy: str) -> str:
        return ", ".join(f"{100.0 * table.mean(cells, policy, key):.1f}" for key in ("attained", "worst"))

    def by(which: int) -> Callable[[str], list[tuple[str, str]]]:
        return lambda name: [cell for cell in table.cells if cell[which] == name]

    def ahead(load: str) -> float:
        own = by(0)(load)
        return table.mean(own, OURS) - table.mean(own, table.best(own))

    rows = [["load", "ours", "the best other", "ours broken, %", "its", "most together"]]
    for load in sorted(dict.fromkeys(load for load, _ in table.cells), key=ahead):
        own = by(0)(load)
        best, runs = table.best(own), [run for cell in own for run in table.runs[*cell, OURS]]
        rows.append([
            load, shares(own, OURS), f"`{best}` {shares(own, best)}", f"{table.broken(own):.2f}",
            f"{table.broken(own, best):.2f}", str(max(run["together"] for run in runs)),
        ])  # fmt: skip
    parts = [f"Attained, worst tier, %, means over noises and seeds:\n\n{markdown(rows)}"]
    rows = [["noise", *(f"`{policy}`" for policy in everyone)]]
    for noise in [noise for noise in NOISES if by(1)(noise)]:
        rows.append([noise, *(shares(by(1)(noise), policy) for policy in everyone)])
    rows.append(["all", *(shares(table.cells, policy) for policy in everyone)])
    rows.append(["broken of all, %", *(f"{table.broken(table.cells, policy):.2f}" for policy in everyone)])
    parts.append(f"Means over loads:\n\n{markdown(rows)}")
    rows = [["left out", "points lost", "of the worst tier", "broken, %"]]
    for part in table.parts():
        lost = [table.lost(part, key).shown(".1f") for key in ("attained", "worst")]
        rows.append([part, *lost, f"{table.broken(table.without(part), LEFT_OUT + part):.2f}"])
    whole = f"{table.broken(table.without(table.parts()[0])):.2f} % with all of them"
    parts.append(f"Each part left out, promises broken ({whole}):\n\n{markdown(rows)}")
    rows = [["scenario", "share of `vllm`'s rate", "mean TTFT over `vllm`'s", "mean e2e", "attained, `vllm`'s"]]
    for own in sorted(table.below, key=lambda own: -float(np.mean(own["ttft"]))):
        ratios = [over_seeds(own[name]) for name in ("ttft", "e2e")]
        rows.append([
            own["scenario"], f"{own['share']:g}", *(ratio.shown(".3f") for ratio in ratios),
            ", ".join(f"{100.0 * share:.1f} %" for share in own["attained"]),
        ])  # fmt: skip
    parts.append(f"Below capacity:\n\n{markdown(rows)}")
    return "\n\n".join(parts)
