"""Little's law holds under every policy, and a run that breaks it is seen."""

from __future__ import annotations

from dataclasses import replace

import pytest

from experiments.littles_law import littles_law
from rubato.policies import describe, load
from rubato.simulation.simulate import simulate
from tests.planning.machine import mix, spec

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
