"""The simulator against live runs: the same requests on a server twice, and in simulation.

The embedded engine with the bundled model, `vllm` and `edf` at 60, 90 and 120 % of what simulated `vllm` holds, 300
requests or more in each live run, the latency model from other runs (`experiments.fidelity`). It needs the torch
extra and two free cores. A small run does without: a server of the simulated engine in real time, whose step times are
given, one policy at one load for half a second, both live runs on one server. What then differs is the event loop, HTTP
and whatever else the machine does.

A cell is one policy at one load. They share one fit run, made by the first; a run that is resumed fits again, and the
rates and SLOs of its cells follow from that fit: each cell's data says which.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from functools import lru_cache
from math import inf
from pathlib import Path
from typing import Any

from experiments import Found
from experiments.fidelity.live_runs import ENGINE, HOLDS, LOADS, LiveRig, LoadLevel, Outcome, Scale, torch_rig
from rubato.core.plan import Limits
from rubato.engines.simulated import ByteText
from rubato.latency.affine import Model
from rubato.measure.confidence import Estimate
from rubato.planning.jobs import Job

SOURCE = "ours; the rule is 3 points, 7 % and 15 %, or 1.5 times what two live runs differ by"
SECONDS = 880.0
ALONE = True

SMALL = replace(LOADS, policies=("vllm",), loads=(0.9,), per_tier=5, seeds=2, warmup=1, search=20.0, fresh=False)
STEPS = Model(k=(5e-6, 1e-5), b=(5e-3, 2.5e-3), a=1e-8)  # of the simulated engine
# few sequences at once: a workload of 20 s is enough to find a rate that vllm does not hold
LIMITS = Limits(max_num_seqs=10, max_num_batched_tokens=2048, max_model_len=8192, kv_blocks=4096, block_size=16)
MEASURES = {"attainment": "attainment-worst", "e2e": "e2e-worst", "TTFT": "ttft-p99-worst"}


def scale_of(small: bool) -> Scale:
    return SMALL if small else LOADS


def jobs(small: bool) -> list[Job]:
    scale = scale_of(small)
    return [
        Job(f"{policy} load={load:g}", compared, (policy, load, small))
        for policy in scale.policies
        for load in scale.loads
    ]


def compared(policy: str, load: float, small: bool) -> dict[str, Any]:
    """One cell's row, how far off it is, and what differs between its runs."""
    scale = scale_of(small)
    with tempfile.TemporaryDirectory() as folder:
        ground = grounds(small)
        outcome = rig_in(Path(folder), small).cell(policy, load, ground, scale)
    (row,) = outcome.rows
    return {
        **row.to_json(),
        "verdict": row.verdict(),
        "shares": {name: asdict(off.share()) for name, off in row.offs.items()},
        **differing(outcome),
        "holds_rate": ground.rate,
        "slos": {tier: asdict(slo) for tier, slo in ground.slos.items()},
        "model": ground.what.truth.to_dict(),
        "noise": ground.what.noise,
        "problems": [problem for run in outcome.live for problem in run.problems],
    }


@lru_cache(maxsize=1)
def grounds(small: bool) -> LoadLevel:
    """The fit run, once in a process."""
    with tempfile.TemporaryDirectory() as folder:
        return rig_in(Path(folder), small).ground(scale_of(small))


def rig_in(folder: Path, small: bool) -> LiveRig:
    if not small:
        return torch_rig(folder)
    limits = {
        name: getattr(LIMITS, name)
        for name in ("max_num_seqs", "max_num_batched_tokens", "max_model_len", "kv_blocks", "block_size")
    }
    return LiveRig(folder, None, {"kind": "simulated", **limits}, LIMITS, count, STEPS)


def count(content: str) -> int:
    return len(ByteText().chat([{"role": "user", "content": content}]))


def differing(outcome: Outcome) -> dict[str, int]:
    """Requests that did not end alike in all runs, and those of other lengths than asked for in any."""
    runs = (*outcome.live, *outcome.simulated)
    fates = list(zip(*(run.records for run in runs), strict=True))
    return {
        "ends_differ": sum(len({(r.id, r.outcome) for r in each}) > 1 for each in fates),
        "tokens_differ": sum(any(r.output != r.asked for r in each) for each in fates),
    }


def found(values: Sequence[Any], small: bool) -> Found:
    estimates = {claim: worst([v["shares"][name] for v in values]) for name, claim in MEASURES.items()}
    estimates["cells-that-hold"] = holding([v["shares"] for v in values])
    if small:  # ten requests on a simulated engine: no statement about a machine
        estimates = {claim: Estimate(found.value, -inf, inf) for claim, found in estimates.items()}
    estimates["ends-differ"] = Estimate.exact(sum(v["ends_differ"] for v in values))
    estimates["tokens-differ"] = Estimate.exact(sum(v["tokens_differ"] for v in values))
    given = {"kind": "simulated", "model": STEPS.to_dict()}
    settings = {
        "engine": given if small else {"kind": "torch", "model": "bundled", **ENGINE},
        "holds": HOLDS,
        "scale": asdict(scale_of(small)),
    }
    return Found(estimates, list(values), range(scale_of(small).seeds), "deadline", settings)


def worst(shares: Sequence[Mapping[str, float]]) -> Estimate:
    """The largest of several, none known better than its interval says."""
    return Estimate(*(max(share[end] for share in shares) for end in ("value", "low", "high")))


def holding(cells: Sequence[Mapping[str, Mapping[str, float]]]) -> Estimate:
    """The share of cells with every measure within its bound; from those surely within to those perhaps within."""

    def within(end: str) -> float:
        return sum(all(share[end] <= 1.0 for share in cell.values()) for cell in cells) / len(cells)

    return Estimate(within("value"), within("high"), within("low"))
