"""Where AdaServe's time goes: drafting, verification with prefill, and selection on the CPU (Fig. 15).

3.6 requests/s, 128 output tokens, unequal acceptance, 120 s, else as `adaserve-rate`. Drafting and verification are
simulated step times, verification with the prompts that run beside; selection is CPU time measured here: what each
request needs, how many nodes pay (the paper's B is fixed) and Algorithm 2. The whole plan, which also decides who is
served and builds the batch, stands beside.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from experiments import Found
from experiments._adaserve_runs import JUDGE, MODELS, OURS, REAL, choice, hardware, served, with_ttft
from experiments._timed_adaserve import Scheduler
from rubato.core.events import Event, Stepped
from rubato.latency.with_drafter import without_drafts
from rubato.measure.confidence import over_seeds
from rubato.measure.tables import markdown
from rubato.planning.jobs import Job
from rubato.workloads import scenarios

SOURCE = "AdaServe, §6.3 and Fig. 15"
SECONDS = 15.0
ALONE = True
RATE, OUTPUT = 3.6, 128
SEEDS = (1, 2, 3)
PARTS = ("drafting", "verification", "selection", "plan")
TIMED = "experiments._timed_adaserve"


def jobs(small: bool) -> list[Job]:
    models, seeds, seconds = (("llama",), SEEDS[:1], 5.0) if small else (tuple(MODELS), SEEDS, 120.0)
    return [Job(f"{model} seed={seed}", spent, (model, seconds, seed)) for model in models for seed in seeds]


def spent(model: str, seconds: float, seed: int) -> dict[str, Any]:
    """Seconds of each part, and of all steps."""
    of = MODELS[model]
    kinds = scenarios.categories(of.unloaded, output=OUTPUT)
    load = with_ttft(scenarios.make(of.scenario, RATE, duration=seconds, seed=seed, kinds=kinds))
    Scheduler.spent.update(plan=0.0, selection=0.0)
    steps: list[Stepped] = []

    def hear(event: Event) -> None:
        if isinstance(event, Stepped):
            steps.append(event)

    run = served(model, choice(model, OURS).replace("adaserve", TIMED, 1), load, REAL, seed, hear)
    target = hardware(model).model
    verification = sum(target.step_time(without_drafts(step.shape)) for step in steps)
    drafting = sum(step.seconds for step in steps) - verification
    parts = {"drafting": drafting, "verification": verification, **Scheduler.spent}
    return {"model": model, "seed": seed, "steps": len(steps), "share": run.summary()["share"][JUDGE], "parts": parts}


def _percent(value: Any, part: str) -> float:
    """Of all time: of steps, and of selection, which comes before each."""
    parts = value["parts"]
    return float(100.0 * parts[part] / (parts["drafting"] + parts["verification"] + parts["selection"]))


def found(values: Sequence[Any], small: bool) -> Found:
    estimates = {}
    for model in MODELS:
        own = [v for v in values if v["model"] == model] or values  # a small run has one model
        estimates[f"{model}-selection"] = over_seeds([_percent(v, "selection") for v in own])
    settings = {"rate": RATE, "output": OUTPUT, "acceptance": REAL}
    return Found(estimates, list(values), sorted({v["seed"] for v in values}), "mean", settings)


def tables(data: Any) -> str:
    rows = [["% of the time", *PARTS, "selection, ms a step", "steps"]]
    for model in dict.fromkeys(v["model"] for v in data):
        own = [v for v in data if v["model"] == model]
        each = [f"{sum(_percent(v, part) for v in own) / len(own):.2f}" for part in PARTS]
        steps = sum(v["steps"] for v in own)
        rows.append([model, *each, f"{1e3 * sum(v['parts']['selection'] for v in own) / steps:.2f}", str(steps)])
    return markdown(rows)


def draw(data: Any, axes: Any) -> None:
    models = list(dict.fromkeys(v["model"] for v in data))
    below = [0.0] * len(models)
    for part in PARTS[:3]:
        own = [[_percent(v, part) for v in data if v["model"] == model] for model in models]
        heights = [sum(each) / len(each) for each in own]
        axes.bar(models, heights, bottom=below, label=part)
        below = [b + h for b, h in zip(below, heights, strict=True)]
    axes.set_ylabel("% of the time")
    axes.legend()
