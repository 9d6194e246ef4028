"""The simulator against queueing theory: Little's law under every policy, M/D/1 waits and Lindley's recursion."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from rubato.core.plan import Limits
from rubato.core.request import SLO
from rubato.fleet.cluster_options import PolicyChoice
from rubato.latency.affine import Model
from rubato.policies import describe, load
from rubato.simulation.run_spec import Hardware, RunSpec
from rubato.simulation.simulate import simulate
from rubato.workloads import Arrival, Workload
from tests.planning.machine import mix, spec
from tests.simulation.littles_law import littles_law

# Machines of these tests have no drafter.
SCHEDULERS = sorted({n for n, kind, *_ in describe() if kind == "scheduler" and not {"draft", "tree"} & load(n).needs})


@pytest.mark.parametrize("policy", SCHEDULERS)
@pytest.mark.parametrize("rate", [3.0, 80.0])
def test_on_every_policys_runs(policy: str, rate: float) -> None:
    run = simulate(mix().make(1).rescaled(rate), spec(policy, replicas=2))
    found = littles_law(run)
    assert found.gap < 1e-9
    assert found.in_system > 0.0
    assert found.left_out == sum(record.outcome != "completed" for record in run.records)


def test_a_record_that_contradicts_itself_is_named() -> None:
    run = simulate(mix().make(0), spec())
    first = run.records[0]
    for bad in (
        replace(first, at=first.times[0] + 1.0),
        replace(first, output=first.output + 1),
        replace(first, times=first.times[::-1]),
    ):
        with pytest.raises(ValueError, match="mix-0"):
            littles_law(replace(run, records=(bad, *run.records[1:])))
    with pytest.raises(ValueError, match="completed no request"):
        littles_law(replace(run, records=()))


def test_a_moment_lost_between_tokens_and_verdicts_is_a_gap() -> None:
    run = simulate(mix().make(0), spec())
    late = [replace(r, times=(*r.times[:-1], r.times[-1] + 0.01)) for r in run.records]
    assert littles_law(replace(run, records=tuple(late))).gap > 1e-3


STEP_S, OUTPUT_TOKENS = 0.05, 2  # of a step; a request holds the server for as many steps as it has tokens
SERVICE_S = STEP_S * OUTPUT_TOKENS
ONE_AT_A_TIME = Hardware(
    "one at a time",
    Model(k=(0.0, 0.0), b=(STEP_S, 0.0)),
    Limits(max_num_seqs=1, max_num_batched_tokens=64, max_model_len=1024, kv_blocks=64, block_size=16, max_running=1),
)


def waits(policy: str, load: float, seed: int, count: int = 1200) -> tuple[float, float, float]:
    """Requests that are all alike, by Poisson, to one server: their mean wait over that of M/D/1, the largest
    difference of a wait from Lindley's recursion on the same arrivals, and the gap of Little's law."""
    at = np.cumsum(np.random.default_rng([seed, 30]).exponential(SERVICE_S / load, size=count)).tolist()
    arrivals = tuple(Arrival(f"q{i}", t, "all-alike", "", 8, OUTPUT_TOKENS) for i, t in enumerate(at))
    offered = Workload("queue", seed, load / SERVICE_S, at[-1], {"all-alike": SLO()}, arrivals)
    run = simulate(offered, RunSpec(ONE_AT_A_TIME, PolicyChoice(policy)))
    own = [record.times[0] - STEP_S - record.at for record in run.records]
    lindley = [0.0]
    for before, after in pairwise(at):
        lindley.append(max(0.0, lindley[-1] + SERVICE_S - (after - before)))
    theory = load * SERVICE_S / (2 * (1 - load))  # Pollaczek and Khinchine
    most = max(abs(a - b) for a, b in zip(own, lindley, strict=True))
    return float(np.mean(own)) / theory, most, littles_law(run).gap


@pytest.mark.parametrize(("load", "within"), [(0.5, 0.15), (0.8, 0.25)])
def test_waits_of_one_server_are_those_of_theory(load: float, within: float) -> None:
    runs = [waits(policy, load, seed) for seed, policy in enumerate(("vllm", "sarathi", "prefill_first", "vllm"))]
    assert np.mean([over_theory for over_theory, _, _ in runs]) == pytest.approx(1.0, abs=within)
    assert max(difference for _, difference, _ in runs) < 1e-6
    assert max(gap for _, _, gap in runs) < 1e-9
