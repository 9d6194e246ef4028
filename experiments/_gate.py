"""A cell of the gate: one load under one kind of noise and one policy, and what of it was attained and broken."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from experiments._gate_loads import loads
from experiments._rate_search import shares_of
from rubato.fleet.cluster_options import PolicyChoice
from rubato.measure.promises import promises
from rubato.measure.records import summarise_sessions
from rubato.simulation.simulate import simulate

NOISES = {
    "independent": ("iid:0.05",),
    "replayed": ("replay:torch-busy", "replay:torch-quiet", "replay:vllm-cpu"),  # seed by seed
    "wandering": ("wander",),
    "20 % too fast": ("iid:0.05+fast:1.2",),
    "60 % too fast": ("iid:0.05+fast:1.6",),
}


def cell(load: str, noise: str, policy: str, seed: int) -> dict[str, Any]:
    own, kinds = loads()[load], NOISES[noise]
    spec = own.spec(choice=PolicyChoice.parse(policy), noise=kinds[seed % len(kinds)])
    run = simulate(own.make(seed), spec, seed, causes=False)
    records = run.records if own.counted is None else run.records[slice(*own.counted)]
    shares, kept = shares_of(records), promises(replace(run, records=records))
    attained = shares["all"]
    if own.sessions:
        sessions = summarise_sessions(run)
        assert sessions is not None
        attained = sessions.attainment
    return {
        "load": load, "noise": noise, "policy": policy, "seed": seed, "attained": attained, "worst": shares["worst"],
        "promised": kept.made, "broken": kept.broken, "together": kept.together,
    }  # fmt: skip
