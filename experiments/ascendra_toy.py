"""The toy of Ascendra's Fig. 1: five prompts on two replicas, first come first served, and as LP and HP.

Prompts A to E take 3, 1, 2, 2, 2 units (lengths ours: they reproduce the text), A to D come at 0, E at 1; TTFT is 5.
Round robin and first come first served, E starts at 5 and is late. Ascendra: B goes to the HP by a ticket, E by the
next one; at 3 the LP takes D and offloads C. θ = 0, the LP takes what must start first, of equal ones the later, and
the HP's first ticket comes after A is placed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from experiments import Found
from rubato.core.events import Finished, Placed, Started
from rubato.core.interfaces import SeqView, View
from rubato.core.plan import Limits
from rubato.core.request import SLO, Request, Sampling, Stage
from rubato.fleet.cluster_options import PolicyChoice
from rubato.latency.affine import Model
from rubato.measure.confidence import Estimate
from rubato.measure.tables import markdown
from rubato.planning.jobs import Job
from rubato.policies.ascendra import deadline
from rubato.simulation.run_spec import Hardware, RunSpec
from rubato.simulation.simulate import simulate_events

SOURCE = "Ascendra, Fig. 1"
SECONDS = 0.1

PROMPTS = {"A": (3, 0.0), "B": (1, 0.0), "C": (2, 0.0), "D": (2, 0.0), "E": (2, 1.0)}
TTFT = 5.0
LIMITS = Limits(max_num_seqs=8, max_num_batched_tokens=4, max_model_len=100, kv_blocks=100, block_size=1)
POLICIES = {
    "first come": "prefill_first:budget=3@round_robin",
    "ascendra": f"ascendra:theta=0.0,value={__name__}.latest_start",
}


def latest_start(seq: SeqView, view: View) -> float:
    """A token of a prompt takes a unit."""
    return seq.pending - deadline(seq)


def jobs(small: bool) -> list[Job]:
    return [Job(name, play, (choice,)) for name, choice in POLICIES.items()]


def play(choice: str) -> dict[str, Any]:
    """Of each prompt: the replicas that it was placed on, and when it started and ended."""
    requests = [
        Request(id, (Stage(tokens, SLO(ttft=TTFT)),), at, sampling=Sampling(max_tokens=1))
        for id, (tokens, at) in PROMPTS.items()
    ]
    machine = Hardware("a unit a token", Model(k=(1.0, 0.0), b=(0.0, 0.0)), LIMITS)
    spec = RunSpec(machine, PolicyChoice.parse(choice), replicas=2)
    events = simulate_events(requests, dict.fromkeys(PROMPTS, (1,)), spec)
    return {
        id: {
            "where": [e.replica for e in events if isinstance(e, Placed) and e.id == id],
            "when": [round(e.at, 6) for e in events if isinstance(e, Started | Finished) and e.id == id],
            "met": next(e.verdict.met for e in events if isinstance(e, Finished) and e.id == id),
        }
        for id in PROMPTS
    }


def found(values: Sequence[Any], small: bool) -> Found:
    first_come, ours = values
    numbers = {
        "first-come-e-starts": first_come["E"]["when"][0],
        "first-come-met": sum(own["met"] for own in first_come.values()),
        "met": sum(own["met"] for own in ours.values()),
        "lp-d-starts": ours["D"]["when"][0],
        "hp-e-starts": ours["E"]["when"][0],
        "hp-c-starts": ours["C"]["when"][0],
        "c-offloaded": len(ours["C"]["where"]) - 1,
    }
    return Found({name: Estimate.exact(n) for name, n in numbers.items()}, list(values), [], "deadline", {"ttft": TTFT})


def tables(data: Any) -> str:
    rows = [["prompt", *(f"{name}: replica, from, to" for name in POLICIES)]]
    rows += [
        [id, *(f"{' → '.join(v[id]['where'])}, {v[id]['when'][0]:g}, {v[id]['when'][1]:g}" for v in data)]
        for id in PROMPTS
    ]
    return markdown(rows)
