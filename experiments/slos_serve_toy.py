"""The toy of SLOs-Serve's Fig. 3: six tokens a step, three running decodes, a burst of four prompts.

Every step takes one unit and holds six tokens. Three requests decode, one token a unit each; four more come at once,
six prompt tokens each, first token due within six units, then one a unit. None ends while it matters. Prefill-first
lets the running wait for the whole burst; decode-first leaves the burst what decodes do not take, ever less. SLOs-Serve
admits three of the four: 36 tokens in six units, 18 for those that run, 18 for three prompts.

The paper says that requests three and four miss their TPOT under prefill-first. Seven decodes face six tokens a unit,
so one of them must; that it is two needs a rule that takes turns, which neither vLLM nor the paper's text has. Ours,
the oldest first, starves the last alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from experiments import Found
from rubato.core.plan import Limits
from rubato.core.request import SLO
from rubato.fleet.cluster_options import PolicyChoice
from rubato.latency.affine import Model
from rubato.measure.confidence import Estimate
from rubato.planning.jobs import Job
from rubato.simulation.run_spec import Hardware, RunSpec
from rubato.simulation.simulate import simulate
from rubato.workloads import Arrival, Workload

SOURCE = "SLOs-Serve, Fig. 3 and §2.3"
SECONDS = 0.4

OUTPUT = 40  # tokens, beyond what the figure shows
LIMITS = Limits(max_num_seqs=64, max_num_batched_tokens=6, max_model_len=1024, kv_blocks=1024, block_size=16)
MACHINE = Hardware("six tokens a unit", Model(k=(0.0, 0.0), b=(1.0, 0.0)), LIMITS)
TIERS = {"running": SLO(ttft=1.0, tpot=1.0), "new": SLO(ttft=6.0, tpot=1.0)}
BURST = 1.0  # when: the running have just had their first token
POLICIES = ("prefill_first", "sarathi", "slos_serve")


def toy() -> Workload:
    running = [Arrival(f"running-{i}", 0.0, "running", "", 2, OUTPUT) for i in range(3)]
    new = [Arrival(f"new-{i}", BURST, "new", "", 6, OUTPUT) for i in range(4)]
    return Workload("toy", 0, 7.0, 1.0, TIERS, (*running, *new))


def jobs(small: bool) -> list[Job]:
    return [Job(policy, play, (policy,)) for policy in POLICIES]


def play(policy: str) -> dict[str, Any]:
    """Units from the burst until each prefill has ended, and requests attained, by the deadline rule."""
    records = simulate(toy(), RunSpec(MACHINE, PolicyChoice(policy))).records
    return {
        "prefilled": [r.times[0] - BURST for r in records if r.tier == "new"],
        "attained": {tier: sum(r.verdict.met for r in records if r.tier == tier) for tier in TIERS},
    }


def found(values: Sequence[Any], small: bool) -> Found:
    prefill_first, sarathi, slos_serve = values
    numbers = {
        "prefill-first-running-attained": prefill_first["attained"]["running"],
        "prefill-first-last-prefill": max(prefill_first["prefilled"]),
        "prefill-first-new-missed": 4 - prefill_first["attained"]["new"],
        "prefill-first-new-attained": prefill_first["attained"]["new"],
        "sarathi-running-attained": sarathi["attained"]["running"],
        "sarathi-first-prefill": sarathi["prefilled"][0],
        "sarathi-second-prefill": sarathi["prefilled"][1],
        "sarathi-third-prefill": sarathi["prefilled"][2],
        "sarathi-new-attained": sarathi["attained"]["new"],
        "slos-serve-running-attained": slos_serve["attained"]["running"],
        "slos-serve-new-attained": slos_serve["attained"]["new"],
    }
    estimates = {name: Estimate.exact(float(value)) for name, value in numbers.items()}
    return Found(estimates, dict(zip(POLICIES, values, strict=True)), (0,), "deadline", MACHINE.describe())
