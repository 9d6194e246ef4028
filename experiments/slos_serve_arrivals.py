"""Azure's arrivals and what stands in for them: how bursty they are over 10 ms to a minute (Fig. 8).

Of the LLM inference traces of 2023, coding and conversation: the coefficient of variation of gaps; the variance of
counts in windows over their mean (1: Poisson); and what requests meet, the rate within the second (5, 20 s) in which
each comes over the mean rate. Stand-ins are drawn at the trace's rate, as many requests. Without `--trace` the traces'
numbers are those recorded here; with it (their folder, or one of them) they are read from the files.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from experiments import Found
from experiments._slos_serve_runs import trace_files
from rubato.measure.confidence import Estimate, over_seeds
from rubato.measure.tables import markdown
from rubato.planning.jobs import Job
from rubato.workloads import traces
from rubato.workloads.arrivals import ArrivalProcess
from rubato.workloads.lengths import Floats
from rubato.workloads.scenarios import CHAT_ARRIVALS, CODE_ARRIVALS, CODE_STAND_IN

SOURCE = "SLOs-Serve, Fig. 8 and §6; Azure LLM inference traces 2023"
SECONDS = 0.1

WINDOWS = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 60.0)  # seconds
MET = (1.0, 5.0, 20.0)  # seconds, of the rates that requests meet
SHARES = (0.1, 0.25, 0.5, 0.75, 0.9, 0.97)  # of requests
STAND_INS: Mapping[str, tuple[str, ArrivalProcess]] = {
    "code": ("code", CODE_STAND_IN), "code-alike": ("code", CODE_ARRIVALS), "conv": ("conv", CHAT_ARRIVALS),
}  # fmt: skip
SEEDS = tuple(range(1, 11))
LEAST = 0.01  # spread that counts where arrivals are regular, or end within one window
RECORDED: Mapping[str, Mapping[str, Any]] = {
    "code": {
        "requests": 8819, "seconds": 3435.9, "cv": 13.151,
        "spread": [1.92, 2.2, 2.54, 5.16, 13.19, 32.4, 71.64, 123.79, 163.96],
        "met": [
            [1.95, 2.73, 4.68, 8.18, 11.69, 16.75],
            [1.56, 2.34, 3.35, 5.61, 8.73, 20.88],
            [0.99, 1.54, 2.63, 3.99, 5.55, 7.5],
        ],
    },
    "conv": {
        "requests": 19366, "seconds": 3501.7, "cv": 1.094,
        "spread": [1.03, 1.03, 1.06, 1.13, 1.39, 1.97, 3.86, 8.87, 16.13],
        "met": [
            [0.54, 0.9, 1.27, 1.63, 1.99, 2.35],
            [0.72, 0.87, 1.05, 1.27, 1.52, 1.74],
            [0.77, 0.88, 1.03, 1.26, 1.41, 1.51],
        ],
    },
}  # fmt: skip


def measures(times: Floats) -> dict[str, Any]:
    """Of arrivals (seconds, ascending): how many and how long, `cv` of gaps, `spread` of counts by window, `met` by
    window and share of requests."""
    at = times - times[0]
    length, gaps = float(at[-1]), np.diff(at)

    def counts(window: float) -> Any:
        return np.bincount((at / window).astype(int))

    whole = {w: counts(w)[: max(1, int(length / w))] for w in WINDOWS}
    met = {w: np.repeat(own := counts(w), own) / (w * len(at) / length) for w in MET}
    return {
        "requests": len(at), "seconds": round(length, 1), "cv": round(float(gaps.std() / gaps.mean()), 3),
        "spread": [max(LEAST, round(float(own.var() / own.mean()), 2)) for own in whole.values()],
        "met": [np.quantile(own, SHARES).round(2).tolist() for own in met.values()],
    }  # fmt: skip


def jobs(small: bool, trace: str | None = None) -> list[Job]:
    files = {} if trace is None else trace_files(trace)
    return [
        *(Job(f"{name} trace", recorded, (name, str(files.get(name, "")))) for name in RECORDED),
        *(Job(name, drawn, (name, SEEDS[:2] if small else SEEDS)) for name in STAND_INS),
    ]


def recorded(name: str, file: str) -> dict[str, Any]:
    own = measures(np.array(traces.read(file).times.seconds)) if file else RECORDED[name]
    return {"trace": name, **own}


def drawn(name: str, seeds: Sequence[int]) -> list[dict[str, Any]]:
    """As many requests as the recorded trace has, at its rate."""
    of, process = STAND_INS[name]
    count, seconds = RECORDED[of]["requests"], RECORDED[of]["seconds"]
    each = (process.times((count - 1) / seconds, count, np.random.default_rng(seed)) for seed in seeds)
    return [{"stand_in": name, "of": of, "seed": seed, **measures(t)} for seed, t in zip(seeds, each, strict=True)]


def _vector(value: Mapping[str, Any], measure: str) -> Any:
    return np.array(value[measure], float).ravel()


def _off(values: Sequence[Mapping[str, Any]], trace: Mapping[str, Any], measure: str) -> Estimate:
    """The measure's largest factor from the trace, over windows (and shares), of the geometric mean of seeds."""
    mean = np.exp(np.mean([np.log(_vector(v, measure)) for v in values], axis=0))
    return Estimate.exact(float(np.exp(np.abs(np.log(mean / _vector(trace, measure))).max())))


def found(values: Sequence[Any], small: bool) -> Found:
    of_trace = {v["trace"]: v for v in values if isinstance(v, dict)}
    stand_ins = {own[0]["stand_in"]: own for own in values if isinstance(own, list)}
    estimates = {}
    for name, own in stand_ins.items():
        trace = of_trace[own[0]["of"]]
        estimates[f"{name}-cv"] = over_seeds([v["cv"] / trace["cv"] for v in own])
        estimates[f"{name}-spread"] = _off(own, trace, "spread")
        estimates[f"{name}-met"] = _off(own, trace, "met")
    ten = WINDOWS.index(10.0)
    estimates["code-over-conv"] = Estimate.exact(of_trace["code"]["spread"][ten] / of_trace["conv"]["spread"][ten])
    data = [*of_trace.values(), *(v for own in stand_ins.values() for v in own)]
    settings = {
        "windows": WINDOWS, "met": MET, "shares": SHARES, "stand_ins": {n: str(p) for n, (_, p) in STAND_INS.items()},
    }  # fmt: skip
    return Found(estimates, data, SEEDS[:2] if small else SEEDS, "none", settings)


def tables(data: Sequence[Mapping[str, Any]]) -> str:
    """Traces, and geometric means of stand-ins."""
    rows = [["arrivals", "CV of gaps", *(f"spread, {w:g} s" for w in WINDOWS), "rate met in a second, by 10 to 97 %"]]
    for value in data:
        if "trace" in value:
            rows.append(_row(f"Azure, {value['trace']}", [value]))
    for name, (_, process) in STAND_INS.items():
        rows.append(_row(f"`{process}`", [v for v in data if v.get("stand_in") == name]))
    return markdown(rows)


def _row(name: str, values: Sequence[Mapping[str, Any]]) -> list[str]:
    cv, spread, met = (
        np.exp(np.mean([np.log(_vector(v, measure)) for v in values], axis=0)) for measure in ("cv", "spread", "met")
    )
    return [name, f"{cv[0]:.3g}", *(f"{own:.3g}" for own in spread), " ".join(f"{x:.1f}" for x in met[: len(SHARES)])]


def draw(data: Sequence[Mapping[str, Any]], axes: Any) -> None:
    """How spread counts are by window: traces, and the first seed of each stand-in."""
    for value in data:
        if "trace" in value or value["seed"] == SEEDS[0]:
            label, style = (value["trace"], "-") if "trace" in value else (f"{value['stand_in']}, stand-in", ":")
            axes.plot(WINDOWS, value["spread"], style, label=label)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlabel("window (s)")
    axes.set_ylabel("variance of counts over their mean")
    axes.legend()
