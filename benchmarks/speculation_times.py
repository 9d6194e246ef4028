"""Seconds of drafting, verification and selection in AdaServe's steps, live, beside what was predicted.

    python benchmarks/speculation_times.py [--trace FILE] [--at 1,4,8,16] [--rounds 3] [--json FILE]

Requests and engine as in `speculation_speed.py`. First some rounds are served from which the latency model learns the
time of a step, and from which the rest is fitted: drafting, seconds a step and a tree; selection, a step and a request.
Then each round's requests are served twice. Predicted are both: each step's time by the latency model before it has
seen that step, drafting and selection by the fit; verification, with the prompts that run in its steps, is what is left
of the step. Beside stands how much the two times differ from each other: no prediction can be nearer than that. Last,
the probabilities of verified nodes, as the drafter gave them, beside the share that came out.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from speculation_speed import drawn, engine, engine_with, prompts, served, size

from rubato.core.clock import WallClock
from rubato.core.interfaces import SeqView, View
from rubato.core.plan import Plan, Sample
from rubato.core.replica_options import ReplicaOptions
from rubato.fleet.build import local_cluster
from rubato.fleet.cluster_options import ClusterOptions, PolicyChoice
from rubato.latency import affine
from rubato.policies import adaserve
from rubato_torch.drafters import Draft, Wanted
from rubato_torch.drafters.suffix import SuffixDrafter

PARTS = ("drafting", "verification", "selection")
CLOCK = WallClock()


@dataclass
class Times:
    """Seconds so far, and what they are predicted by. steps: measured and predicted seconds of each."""

    drafting: list[tuple[int, float]] = field(default_factory=list)  # of each step: trees, seconds
    steps: list[tuple[float, float]] = field(default_factory=list)
    selection: list[tuple[int, float]] = field(default_factory=list)  # sequences, seconds
    plans: list[float] = field(default_factory=list)  # whole ones, with the batch that they build
    chosen: dict[str, tuple[int, ...]] = field(default_factory=dict)  # by sequence, the nodes that a step verifies
    nodes: list[tuple[float, bool]] = field(default_factory=list)  # of each verified: its probability, whether right


class TimedDrafter(SuffixDrafter):
    def __init__(self, times: Times) -> None:
        super().__init__(0)
        self._times = times
        self._learning = 0.0  # seconds that this step's verified nodes took it so far

    def draft(self, wanted: Sequence[Wanted]) -> list[Draft]:
        began = CLOCK.now()
        drafts = super().draft(wanted)
        self._times.drafting.append((len(drafts), self._learning + CLOCK.now() - began))
        self._learning = 0.0
        return drafts

    def verified(self, seq: str, draft: Draft, tried: Sequence[int], accepted: Sequence[int]) -> None:
        began = CLOCK.now()
        super().verified(seq, draft, tried, accepted)
        self._learning += CLOCK.now() - began
        right = set(accepted)
        self._times.nodes += [(draft.tree.paths[n], n in right) for n in self._times.chosen.pop(seq)]


class TimedModel(affine.Model):
    times: Times

    def update(self, sample: Sample) -> None:
        self.times.steps.append((sample.seconds, self.step_time(sample.shape)))
        super().update(sample)


def time_selection(times: Times) -> None:
    """From now on `adaserve` says what choosing nodes takes it."""
    chosen = adaserve.Scheduler._choose_nodes

    def timed(self: Any, view: View, decodes: Sequence[SeqView], *others: Any) -> Any:
        began = CLOCK.now()
        found = chosen(self, view, decodes, *others)
        times.selection.append((len(decodes), CLOCK.now() - began))
        times.chosen.update({seq: nodes for seq, nodes in found.items() if nodes})
        return found

    plan = adaserve.Scheduler.plan

    def timed_plan(self: Any, view: View) -> Plan:
        began = CLOCK.now()
        made = plan(self, view)
        if made.work:
            times.plans.append(CLOCK.now() - began)
        return made

    adaserve.Scheduler._choose_nodes = timed  # type: ignore[method-assign,assignment]
    adaserve.Scheduler.plan = timed_plan  # type: ignore[method-assign]


@dataclass
class Fit:
    """Seconds a step, and a tree (drafting) or a sequence (selection)."""

    drafting: tuple[float, float]
    selection: tuple[float, float]

    @classmethod
    def of(cls, times: Times) -> Fit:
        return cls(_line(times.drafting), _line(times.selection))


def _line(measured: Sequence[tuple[int, float]]) -> tuple[float, float]:
    rows = np.array([(1.0, n) for n, _ in measured])
    step, each = np.linalg.lstsq(rows, np.array([seconds for _, seconds in measured]), rcond=None)[0].tolist()
    return step, each


def _said(measured: Sequence[tuple[int, float]], line: tuple[float, float]) -> tuple[float, float]:
    """Seconds measured and predicted."""
    return sum(seconds for _, seconds in measured), sum(line[0] + line[1] * n for n, _ in measured)


def parts_of(times: Times, fit: Fit) -> dict[str, tuple[float, float]]:
    """Of each part, seconds measured and predicted."""
    took, said = (sum(column) for column in zip(*times.steps, strict=True))
    drafting = _said(times.drafting, fit.drafting)
    return {
        "drafting": drafting,
        "verification": (took - drafting[0], said - drafting[1]),
        "selection": _said(times.selection, fit.selection),
    }


async def measured(args: argparse.Namespace) -> None:
    times = Times()

    def renewed() -> Times:
        """What was measured since the last call."""
        done = replace(
            times, drafting=list(times.drafting), steps=list(times.steps), selection=list(times.selection),
            plans=list(times.plans), chosen={}, nodes=list(times.nodes),
        )  # fmt: skip
        times.drafting.clear()
        times.steps.clear()
        times.selection.clear()
        times.plans.clear()
        times.nodes.clear()
        return done

    model = TimedModel()
    model.times = times
    time_selection(times)
    cluster = local_cluster(
        [engine_with(TimedDrafter(times))],
        [model],
        CLOCK,
        ClusterOptions(PolicyChoice("adaserve"), ReplicaOptions(slo_rule="mean")),
    )
    await cluster.start()
    text = engine("vllm", 0).text
    sources = prompts(args.trace, args.seed)
    for clients in (4, *args.at):
        if clients == args.at[0]:
            renewed()  # the first rounds compile, and the model begins with a guess
        for turn in range(2):
            requests, _ = drawn(sources, text, size(clients), f"w{clients}-{turn}")
            await served(cluster, requests, clients)
    fit = Fit.of(renewed())
    (step, tree), (plan, seq) = ([1e6 * seconds for seconds in line] for line in (fit.drafting, fit.selection))
    print(
        f"drafting {step:.0f} us a step and {tree:.0f} a tree; selection {plan:.0f} us a step and {seq:.0f} a sequence"
    )
    rows: list[dict[str, Any]] = []
    for clients in args.at:
        own = [row async for row in rounds(args, clients, cluster, text, sources, fit, renewed)]
        rows += own
        if args.json:
            args.json.write_text(json.dumps({"fit": asdict(fit), "rows": rows}))
        show(own, clients)
    show_calibration([node for row in rows for node in row["nodes"]])
    await cluster.close()


async def rounds(
    args: argparse.Namespace, clients: int, cluster: Any, text: Any, sources: dict[str, Iterator[str]], fit: Fit,
    renewed: Any,
) -> Any:  # fmt: skip
    """Each round's parts, served twice."""
    for turn in range(args.rounds):
        requests, _ = drawn(sources, text, size(clients), f"{clients}-{turn}")
        for again in ("a", "b"):
            await served(cluster, [replace(r, id=r.id + again) for r in requests], clients)
            times = renewed()
            yield {
                "clients": clients, "round": turn, "steps": len(times.steps), "parts": parts_of(times, fit),
                "plan": sum(times.plans), "nodes": times.nodes,
            }  # fmt: skip


def show(rows: Sequence[dict[str, Any]], clients: int) -> None:
    took = {part: np.array([row["parts"][part] for row in rows]) for part in PARTS}  # measured, predicted
    whole = sum(float(took[part][:, 0].sum()) for part in PARTS)
    steps = sum(row["steps"] for row in rows)
    print(f"\n{clients} at once, {steps} steps: ms a step, % of the time; predicted, off by; live and live differ by")
    for part, both in took.items():
        seconds, said = both.sum(axis=0).tolist()
        differ = np.abs(both[::2, 0] - both[1::2, 0]).sum() / both[::2, 0].sum()
        off = abs(said - seconds) / seconds
        print(
            f"  {part:13} {1e3 * seconds / steps:8.3f} {100 * seconds / whole:6.2f} %  {1e3 * said / steps:8.3f} "
            f"{100 * off:5.1f} %  {100 * differ:5.1f} %  {'within' if off <= max(0.1, 1.5 * differ) else 'OUTSIDE'}",
            flush=True,
        )

    plan = sum(row["plan"] for row in rows)
    print(f"  whole plans   {1e3 * plan / steps:8.3f} {100 * plan / whole:6.2f} %", flush=True)


def show_calibration(nodes: Sequence[tuple[float, bool]]) -> None:
    print("\nverified nodes by probability: how many, what was said, what came out")
    edges = (0.0, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.01)
    for low, high in itertools.pairwise(edges):
        own = [(path, right) for path, right in nodes if low <= path < high]
        if own:
            said, came = (float(np.mean(column)) for column in zip(*own, strict=True))
            print(f"  {low:.2f} to {min(high, 1.0):.2f}  {len(own):7d}  {said:.3f}  {came:.3f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trace", type=Path)
    parser.add_argument("--at", type=lambda given: [int(c) for c in given.split(",")], default=[1, 4, 8, 16])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    asyncio.run(measured(parser.parse_args()))


if __name__ == "__main__":
    main()
