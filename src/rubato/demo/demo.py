"""`rubato demo`: one model, this machine, three tiers of requests, policy against policy, in some three minutes.

The demo measures the unloaded TTFT and step time and sets each tier's SLO as a fixed multiple of them. It fits the
latency model on steps of every kind, asks the simulator which rate `vllm` sustains, and tries that rate twice. Then it
offers 1.3 times the rate, the same requests at the same times, to `vllm`, `sarathi` (with a budget tuned on this
workload) and one policy of ours, each in its own server. A slow machine gets shorter requests, and only then a longer
load, `runs.MAX_LOAD_S` at most.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from rubato.core.extras import extra
from rubato.demo.progress import PhaseProgress, say
from rubato.demo.runs import HOLDING_ATTAINMENT, OVERLOAD, DemoStage, attained_share, count_met
from rubato.measure import compare, pictures, plot, results
from rubato.measure.http_client import BenchError
from rubato.measure.records import BenchResult
from rubato.policies import PolicyError, router_for
from rubato.policies import load as load_policy
from rubato.workloads import write


def demo(out: Path, *, policy: str = "rubato", seconds: float | None = None, seed: int = 0) -> int:
    """Run the demo and write everything into `out`.

    Args:
        seconds: of load for each policy; None: chosen by the machine's speed.

    Returns:
        0 when the demo ran to its end, whatever the verdict; 1 when the load generator was late in a run.

    Raises:
        ServerError, BenchError, PolicyError, ImportError
    """
    with extra("demo", "the demo"):
        import matplotlib  # noqa: F401

        import rubato.serving  # noqa: F401
        from rubato_torch import bundled_model

    _check_able(policy)
    if seconds is not None and not 1.0 <= seconds <= 3600.0:
        raise BenchError(f"--seconds is {seconds:g}: give 1 to 3600 seconds of load for each policy")
    began = time.monotonic()
    out.mkdir(parents=True, exist_ok=True)
    stage = DemoStage(out, str(bundled_model.ensure()), seed, PhaseProgress(policy))
    warm = stage.warm_up(seconds)
    load = stage.load(OVERLOAD * warm.rate, warm.seconds, warm.slos, warm.scale)
    write(load, out / "workload.jsonl")
    budget = stage.tune_budget(warm, load)
    contestants: list[tuple[str, dict[str, object]]] = [("vllm", {}), ("sarathi", {"budget": budget}), (policy, {})]
    say(f"      {len(load.arrivals)} requests in {load.duration:.0f} s ({load.rate:.2f}/s), the same for each policy")
    runs = []
    for name, settings in contestants:
        stage.progress.begin()
        runs.append(stage.contest(name, settings, warm, load))
    comparisons = [compare.compare([compare.saved(runs[-1])], [compare.saved(run)]) for run in runs[:-1]]
    results.write_json(out / "demo.json", runs, [comparison.to_json() for comparison in comparisons])
    title = f"{OVERLOAD} x the rate that vllm holds: {load.rate:.2f} requests/s"
    plot.picture_of_runs(runs, title).save(out / "demo.png")
    attainment = plot.picture_of_attainment(runs)
    attainment.save(out / "attainment-light.svg", pictures.CLEAR)
    attainment.save(out / "attainment-dark.svg", pictures.DARK)
    print("\n" + results.table(runs) + "\n")
    print(outcome_sentence(runs, bool(warm.doubt)) + "\n")
    for comparison in comparisons:
        print(interval_sentence(comparison))
    for warning in filter(None, [warm.doubt, warm.poor_fit, no_overload_warning(runs), stage.progress.disturbance()]):
        print(f"READ WITH CARE: {warning}.")
    print(f"\nPicture: {out}/demo.png. Every request: {out}/*.records.jsonl. {time.monotonic() - began:.0f} s in all.")
    print("\nTry next:\n" + "\n".join(f"    {line}" for line in next_commands(out)))
    return 0 if all(run.valid for run in runs) else 1


def _check_able(policy: str) -> None:
    """Raises PolicyError for an unknown policy, or one that a single replica of the embedded engine cannot run."""
    from rubato_torch import Engine

    if lacking := load_policy(policy).needs - Engine.supports:
        raise PolicyError(f"policy {policy!r} needs an engine that can {', '.join(sorted(lacking))}; the demo's cannot")
    if hasattr(router_for(policy, "auto", {}, {}), "roles"):
        raise PolicyError(f"policy {policy!r} runs on several replicas; the demo has one: try `rubato simulate`")


def outcome_sentence(runs: Sequence[BenchResult], doubtful: bool = False) -> str:
    """Returns the outcome in a sentence.

    Args:
        doubtful: whether the rates tried did not enclose the rate that vllm holds.
    """
    *baselines, ours = runs
    others = " and ".join(f"{run.label} of {count_met(run)}" for run in baselines)
    holds = "may hold (see below)" if doubtful else "holds"
    return (
        f"Under {OVERLOAD} x the load that vLLM's scheduling {holds}, {ours.label} met the SLO of "
        f"{count_met(ours)} of {len(ours.records)} requests, {others}."
    )


def no_overload_warning(runs: Sequence[BenchResult]) -> str:
    """A warning where vllm sustained the load after all; "" where the load was an overload."""
    vllm = runs[0]
    if attained_share(vllm) < HOLDING_ATTAINMENT:
        return ""
    return (
        f"{vllm.label} attained {attained_share(vllm):.0%} of a load that was to be {OVERLOAD} x what it holds, so "
        "this machine is faster now than when that rate was tried: run the demo again"
    )


def interval_sentence(comparison: compare.ComparisonReport) -> str:
    """A sentence with the difference in attainment to one baseline, in points, over all requests."""
    d = comparison.tiers["all"].attained
    value, low, high = (100 * v for v in (d.difference, d.difference_low, d.difference_high))
    certainty = "" if low > 0 or high < 0 else ": too few requests to tell which is better"
    return (
        f"{comparison.a} against {comparison.b}: {value:+.0f} points of attainment, "
        f"95 % interval {low:+.0f} to {high:+.0f}{certainty}"
    )


def next_commands(out: Path) -> list[str]:
    """Commands to try next, as typed from this folder."""
    program = os.path.relpath(sys.argv[0]) if Path(sys.argv[0]).name == "rubato" else "rubato"
    return [
        f"{program} serve bundled --port 8000        # any OpenAI client; state SLOs as docs/http-api.md shows",
        f"{program} simulate --workload {out}/workload.jsonl --steps {out}/measure.events.jsonl --policy slos_serve"
        "  # simulated, which is optimistic about a real machine",
        f"{program} demo --policy slos_serve --out {out}-slos_serve  # others: `{program} policies`",
    ]
