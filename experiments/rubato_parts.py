"""What each part of our own policy gives: it alone left out, at the rates at which the whole attains about 90 %.

One replica: four scenarios of SLOs-Serve at 0.8 and 1.0 times the capacity that `rubato_robust` names, two seeds.
Fleet: two of PolyServe's data sets on 20 replicas between which KV moves, at what the whole holds at 90 % of all, one
seed. Parts are left out by other constants in the policy's modules, or by functions that decide nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from math import inf
from typing import Any

import numpy as np

from experiments import Found
from experiments._polyserve_runs import BEFORE, REPLICAS, Tried
from experiments._rubato_runs import recorded
from experiments.polyserve_goodput import HOST
from experiments.rubato_robust import tried
from rubato.measure.confidence import Estimate, over_seeds
from rubato.planning.jobs import Job
from rubato.planning.sweep import markdown
from rubato.policies.rubato import batch, requests, scheduler, supply
from rubato.policies.rubato_pd import prefill_step, replica_model, router
from rubato.policy_kit import kv_survival

SOURCE = "ours"
SECONDS = 500.0

OURS, WHOLE = "rubato", "nothing"
SCENARIOS, MULTIPLES, COUNT, SEEDS = ("chatbot", "coder", "summarizer", "mixed"), (0.8, 1.0), 1000, (1, 2)
DATA = ("splitwise", "mooncake-conversation")
Patches = tuple[tuple[Any, str, Any], ...]
REPLICA: Mapping[str, Patches] = {
    WHOLE: (),
    "heaviest prompts are left out": ((scheduler, "left_out", lambda *_: set()),),
    "several lengths of a step": ((scheduler, "LADDER", (1.25,)),),
    "arrivals bound a step": ((requests, "LATE_ARRIVALS", 1.0),),
    "decodes sit out": ((batch, "SPARE", inf),),
    "memory": ((kv_survival.KVSurvival, "fits", lambda *_: True),),
    "outputs may be longer than predicted": ((kv_survival.OutputRatios, "add", lambda *_: None),),
    "costly prompts leave memory free": ((scheduler, "PRICE", 0.0),),
    "errors of steps are measured": (
        (supply.StepErrors, "spread", lambda _, told: 0.0), (supply.StepErrors, "lead", 0.0),
    ),
    "tiers weigh by their losses": ((requests.TierLosses, "weights", lambda _: {}),),
}  # fmt: skip
FLEET: Mapping[str, Patches] = {
    WHOLE: (),
    "prompts wait in the router": ((replica_model, "AHEAD", inf),),
    "due a token early": ((prefill_step, "LEAD", 0.0),),
    "tiers weigh by their losses": ((router, "FAIRNESS", 0.0),),
    "long prompts are put back": ((router, "PRICE", 0.0),),
    "guests of tighter tiers": ((router, "HOST_ROOM", inf),),
}  # fmt: skip


def jobs(small: bool) -> list[Job]:
    if small:
        return [Job(f"coder {part}", on_one, ("coder", part, 30, (1, 2))) for part in (WHOLE, "memory")] + [
            Job(f"splitwise {part}", on_fleet, ("splitwise", part, 4, 0.2, 0.1))
            for part in (WHOLE, "due a token early")
        ]
    return [Job(f"{one} {part}", on_one, (one, part, COUNT, SEEDS)) for one in SCENARIOS for part in REPLICA] + [
        Job(f"{data} {part}", on_fleet, (data, part, REPLICAS, 1.0, BEFORE)) for data in DATA for part in FLEET
    ]


@contextmanager
def without(patches: Patches) -> Iterator[None]:
    """The policy's modules with other values in them."""
    before = [(owner, name, getattr(owner, name)) for owner, name, _ in patches]
    try:
        for owner, name, value in patches:
            setattr(owner, name, value)
        yield
    finally:
        for owner, name, value in before:
            setattr(owner, name, value)


def on_one(scenario: str, part: str, count: int, seeds: Sequence[int]) -> dict[str, Any]:
    """Shares attained and broken, by multiple and seed; the least attained by a tier."""
    with without(REPLICA[part]):
        runs = [[tried(scenario, "plain", OURS, seed, count, multiple) for seed in seeds] for multiple in MULTIPLES]
    return {
        "of": scenario, "part": part, "seeds": list(seeds),
        "attained": [[run["attained"] for run in own] for own in runs],
        "broken": [[run["broken"] for run in own] for own in runs],
        "worst": [[min(run["tiers"].values()) for run in own] for own in runs],
    }  # fmt: skip


def on_fleet(data: str, part: str, replicas: int, stays: float, fill: float) -> dict[str, Any]:
    """The same of a fleet, at one rate and on one seed; what is broken is not known of it."""
    [held] = [v for v in recorded("rubato-fleet") if (v["data"], v["name"]) == (data, OURS)]
    rate = float(np.mean(held["measures"]["90 % of all"]["goodput"])) / held["replicas"] * replicas
    with without(FLEET[part]):
        shares = Tried(data, HOST, 1, stays, replicas, fill).run(f"{OURS}@{OURS}:mode=pd", rate)
    return {"of": data, "part": part, "seeds": [1], "attained": [[shares["all"]]], "worst": [[shares["worst"]]]}


def lost(values: Sequence[Any], parts: Mapping[str, Patches], at: int, key: str = "attained") -> dict[str, Estimate]:
    """Points that all lose without a part, by part: means over loads, by seed."""
    loads = [v for v in values if v["part"] == WHOLE and (len(v["attained"]) == 2) == (parts is REPLICA)]
    found = {}
    for part in dict.fromkeys(v["part"] for v in values if v["part"] in parts):
        each = []
        for whole in loads:
            [own] = [v for v in values if (v["of"], v["part"]) == (whole["of"], part)]
            each.append(100.0 * (np.array(whole[key][at]) - np.array(own[key][at])))
        found[part] = over_seeds([float(x) for x in np.mean(each, axis=0)])
    return found


def found(values: Sequence[Any], small: bool) -> Found:
    replica = lost(values, REPLICA, 1)
    fleet = lost(values, FLEET, 0)
    del replica[WHOLE], fleet[WHOLE]
    estimates = {
        "least-of-replica": min(replica.values(), key=lambda each: each.value),
        "least-of-fleet": min(fleet.values(), key=lambda each: each.value),
    }
    return Found(estimates, list(values), SEEDS, "deadline", {"multiples": MULTIPLES, "count": COUNT})


def tables(values: Sequence[Any]) -> str:
    """What gives least first."""
    texts = []
    for parts, title, multiples in (
        (REPLICA, "One replica, means of four scenarios", MULTIPLES),
        (FLEET, "Fleet of 20, means of two data sets", (1.0,)),
    ):
        head = [f"{m:g} ×: points lost, of the worst tier" for m in multiples]
        rows = [["left out", *head, *(["broken, % of all"] if parts is REPLICA else [])]]
        order = sorted(lost(values, parts, len(multiples) - 1).items(), key=lambda item: item[1].value)
        for part, _ in order:
            cells = []
            for at in range(len(multiples)):
                all_, worst = (lost(values, parts, at, key)[part] for key in ("attained", "worst"))
                within = f" [{all_.low:.1f}, {all_.high:.1f}]" if parts is REPLICA and part != WHOLE else ""
                cells.append(f"{all_.value:.1f}{within}, {worst.value:.1f}")
            if parts is REPLICA:
                own = [v["broken"] for v in values if v["part"] == part and "broken" in v]
                cells.append(f"{100.0 * float(np.mean(own)):.2f}")
            rows.append([part, *cells])
        texts.append(f"{title}:\n\n{markdown(rows)}")
    return "\n\n".join(texts)


def draw(values: Sequence[Any], axes: Any) -> None:
    """Points lost without each part."""
    rows = [
        (f"{part} ({name})", each.value)
        for parts, name, at in ((REPLICA, "one", 1), (FLEET, "fleet", 0))
        for part, each in lost(values, parts, at).items()
        if part != WHOLE
    ]
    rows.sort(key=lambda row: row[1])
    axes.barh(range(len(rows)), [value for _, value in rows])
    axes.set_yticks(range(len(rows)), [name for name, _ in rows], fontsize=6)
    axes.set_xlabel("points of SLO attainment lost without it")
