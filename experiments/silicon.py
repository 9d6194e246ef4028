"""TTFT and TPOT of vLLM on GPUs, in closed loops: simulated against measured.

Points of dense models out of aiconfigurator's sample of them (tools/silicon_points.py): Qwen3-32B in bfloat16 on
H100 under vLLM 0.12.0, and Llama-3.1-70B in FP8 and NVFP4 on H100, H200 and B200, by InferenceMAX in October 2025. Each
is simulated as it was measured: so many clients, each of which sends a request when its last one has ended, on kernel
tables of that model, GPU and number of GPUs. Policy `vllm` with 8192 tokens a step (InferenceMAX's setting, and vLLM's
default on cards of 70 GiB and more). TTFT and TPOT are means over requests.

In a closed loop which requests share a step does not depend on how long steps take. So a TPOT is that of the kernels
alone, and `host`, and `host_per_seq` times the sequences that a step has in the mean; two runs tell how many those
are. Host terms are fitted for each source on half of its servers, TPOT's relative errors squared; the other half
judges, simulated with these terms. A TTFT as a client sees it has more in it than a replica's steps: HTTP,
tokenisation, and how requests of equal length bunch. That is fitted, too, as seconds and seconds a prompt token, on
each sweep's fewest clients; a claim says what is left without it.

What is called `unclear` is not simulated: all 24 points of two models, whose kernels would have to run longer than
there is time, by Little's law (clients over throughput and time), so that what they call concurrency is hardly what one
server had in flight. That is by model: of the points that are used two are as far beyond as the least of these.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np

from experiments import Found
from experiments._axes import name_axes
from rubato.core.interfaces import LatencyModel
from rubato.core.plan import Shape
from rubato.core.request import SLO
from rubato.fleet.cluster_options import PolicyChoice
from rubato.latency import profiles
from rubato.latency.least_squares import nnls
from rubato.measure.confidence import Estimate
from rubato.measure.tables import markdown
from rubato.planning.jobs import Job
from rubato.simulation.run_spec import Hardware, RunSpec
from rubato.simulation.simulate import simulate
from rubato.workloads import Arrival, Workload

SOURCE = "aiconfigurator-core 0.12.0, systems/silicon_sample.csv"
SECONDS = 165.0
BEHAVIOURS = ("latency",)

DATA = Path(__file__).parent / "silicon_data"
BUDGET = 8192
HOST_2024 = (4.4e-3, 5.8e-5)
SEED = 0  # of lengths, and of which servers are fitted
TIMES = ("ttft", "tpot")


@dataclass(frozen=True)
class Benchmark:
    """How a source measured. least: shortest prompt and output, as a share of those stated, up to which they are drawn
    evenly. rounds: requests of each client. burst: all clients begin at once, and that counts, as in InferenceMAX's
    scripts; else they are out of step and the first request of each is left out, for the script is not known."""

    vllm: str
    least: float
    rounds: int
    burst: bool


BENCHMARKS = {
    "inferencemax": Benchmark("October 2025, asynchronous scheduling", 0.8, 10, True),
    "vllm-0.12": Benchmark("0.12.0", 1.0, 5, False),
}


@dataclass(frozen=True)
class Point:
    """A measured point: isl, osl tokens; ttft, tpot seconds; profile of its server."""

    source: str
    profile: str
    isl: int
    osl: int
    concurrency: int
    ttft: float
    tpot: float

    @property
    def sweep(self) -> tuple[str, int, int]:
        return self.profile, self.isl, self.osl


@cache
def points() -> tuple[Point, ...]:
    with (DATA / "points.csv").open(encoding="utf-8", newline="") as file:
        return tuple(
            Point(
                row["source"], row["profile"], int(row["isl"]), int(row["osl"]), int(row["concurrency"]),
                float(row["ttft_ms"]) / 1e3, float(row["tpot_ms"]) / 1e3,
            )
            for row in csv.DictReader(file)
        )  # fmt: skip


def chosen(small: bool) -> list[Point]:
    """The points that are simulated; small: of each server of H100s the shortest, with the fewest clients."""
    every = sorted((p for p in points() if p.source in BENCHMARKS), key=lambda p: (p.source, *p.sweep, p.concurrency))
    return (
        [next(own) for name, own in groupby(every, key=lambda p: p.profile) if name.endswith("h100")]
        if small
        else every
    )


def fewest(own: Sequence[Point]) -> list[bool]:
    """Which of them have the fewest clients of their sweep."""
    least = {sweep: min(p.concurrency for p in own if p.sweep == sweep) for sweep in {p.sweep for p in own}}
    return [p.concurrency == least[p.sweep] for p in own]


def fitted_servers(own: Sequence[Point]) -> set[str]:
    """Half of the servers of each source, model and GPU, drawn; where they are odd, the larger half judges."""
    rng, half = np.random.default_rng(SEED), set()
    servers = sorted({(p.source, kind_of(p.profile), p.profile) for p in own})
    for _, alike in groupby(servers, key=lambda server: server[:2]):
        names = [name for *_, name in alike]
        half |= {str(name) for name in rng.permutation(names)[: len(names) // 2]}
    return half


def kind_of(profile: str) -> str:
    """Model and GPU of a server, whatever the number of GPUs."""
    model, _, gpus = profile.rpartition("-")
    return f"{model} {gpus.rpartition('x')[2]}"


# ------------------------------------------------------------------------------------------------------------- running


def jobs(small: bool) -> list[Job]:
    return [Job(key(p), without_host_and_2024, (p, small)) for p in chosen(small)]


def then(values: Sequence[Any], small: bool) -> list[Job]:
    own = chosen(small)
    terms = host_terms(own, values)
    return [Job(f"{key(p)} fitted", simulated, (p, *terms[p.source], small)) for p in own]


def key(p: Point) -> str:
    return f"{p.profile} {p.isl}/{p.osl} {p.concurrency}"


def without_host_and_2024(p: Point, small: bool) -> dict[str, Any]:
    return {"kernels": simulated(p, 0.0, 0.0, small), "vllm-2024": simulated(p, *HOST_2024, small)}


def simulated(p: Point, host: float, host_per_seq: float, small: bool) -> dict[str, float]:
    """Mean TTFT and TPOT in seconds."""
    profile = profiles.load(str(DATA / f"{p.profile}.json"), host=host, host_per_seq=host_per_seq)
    machine = Hardware(p.profile, profile.model(), profile.limits(max_num_batched_tokens=BUDGET), profile.gpus)
    run = simulate(
        offered(p, small), RunSpec(machine, PolicyChoice("vllm", {"budget": BUDGET})), times=False, causes=False
    )
    skipped = 0 if BENCHMARKS[p.source].burst else p.concurrency
    counted = run.records[skipped:]
    verdicts = [record.verdict for record in counted if record.outcome == "completed"]
    means = {name: [seconds for v in verdicts if (seconds := getattr(v, name)) is not None] for name in TIMES}
    if any(len(seconds) != len(counted) for seconds in means.values()):
        raise RuntimeError(f"{key(p)}: a request did not complete")
    return {name: float(np.mean(seconds)) for name, seconds in means.items()}


def offered(p: Point, small: bool) -> Workload:
    """The closed loop of a point."""
    how, rng = BENCHMARKS[p.source], np.random.default_rng(SEED)
    count = p.concurrency * (2 if small else how.rounds)
    prompts, outputs = (rng.integers(int(how.least * n), n + 1, count) for n in (p.isl, p.osl))
    if not how.burst:
        outputs[: p.concurrency] = rng.permutation(np.linspace(2, p.osl, p.concurrency).astype(int))
    arrivals = tuple(
        Arrival(f"q{i}", 0.0, "all-alike", "", prompt, output)
        for i, (prompt, output) in enumerate(zip(prompts.tolist(), outputs.tolist(), strict=True))
    )
    return Workload(key(p), SEED, 0.0, 0.0, {"all-alike": SLO()}, arrivals, concurrency=p.concurrency)


# ------------------------------------------------------------------------------------------------------------- fitting


def host_terms(own: Sequence[Point], runs: Sequence[Mapping[str, Any]]) -> dict[str, tuple[float, float]]:
    """Source -> host, host_per_seq in seconds, by the servers that are fitted."""
    half = fitted_servers(own)
    return {
        source: host_term([
            pair for pair in zip(own, runs, strict=True) if pair[0].source == source and pair[0].profile in half
        ])
        for source in BENCHMARKS
    }  # fmt: skip


def host_term(fitted: Sequence[tuple[Point, Mapping[str, Any]]]) -> tuple[float, float]:
    """By least squares of TPOT's relative errors, neither below 0."""
    measured = np.array([p.tpot for p, _ in fitted])
    kernels = np.array([run["kernels"]["tpot"] for _, run in fitted])
    share = np.column_stack([np.ones(len(fitted)), [sequences(run) for _, run in fitted]]) / measured[:, None]
    host, per_seq = nnls(share, (measured - kernels) / measured).tolist()
    return host, per_seq


def sequences(run: Mapping[str, Any]) -> float:
    """That a step of a decode has in the mean: by how far the host term of 2024 moves TPOT."""
    host, per_seq = HOST_2024
    return max(0.0, float(run["vllm-2024"]["tpot"] - run["kernels"]["tpot"] - host) / per_seq)


def intakes(rows: Sequence[Mapping[str, Any]]) -> dict[str, tuple[float, float]]:
    """Source -> seconds, and seconds a prompt token, of a TTFT beyond the replica's steps; on fitted servers."""
    found = {}
    for source in BENCHMARKS:
        own = [r for r in rows if r["source"] == source and r["fitted"] and r["fewest"]]
        measured = np.array([r["measured"]["ttft"] for r in own])
        beyond = measured - np.array([r["simulated"]["ttft"] for r in own])
        share = np.column_stack([np.ones(len(own)), [r["isl"] for r in own]]) / measured[:, None]
        seconds, per_token = nnls(share, beyond / measured).tolist()
        found[source] = (seconds, per_token)
    return found


def busy(p: Point) -> float:
    """Kernel seconds of a server for each second that passes, by Little's law: requests/s are concurrency over e2e, and
    each is a prompt in full steps and its share of decode steps."""
    model, c = kernel_times(p.profile), p.concurrency
    decode = model.step_time(Shape(c, c, c * (p.isl + p.osl // 2))) / c
    prompts, together = Shape(), BUDGET // p.isl
    for _ in range(together):
        prompts = prompts.plus(p.isl, 0)
    each = model.step_time(prompts) / together + (p.osl - 1) * decode
    return c / (p.ttft + (p.osl - 1) * p.tpot) * each


@cache
def kernel_times(profile: str) -> LatencyModel:
    return profiles.load(str(DATA / f"{profile}.json"), host=0.0, host_per_seq=0.0).model()


# ------------------------------------------------------------------------------------------------------------- results


def found(values: Sequence[Any], small: bool) -> Found:
    own = chosen(small)
    runs, judged = values[: len(own)], values[len(own) :]
    half, low = fitted_servers(own), fewest(own)
    rows = [
        {
            "source": p.source, "profile": p.profile, "isl": p.isl, "osl": p.osl, "concurrency": p.concurrency,
            "fitted": p.profile in half, "fewest": least, "measured": {"ttft": p.ttft, "tpot": p.tpot},
            "simulated": run, **base,
        }
        for p, least, base, run in zip(own, low, runs, judged, strict=True)
    ]  # fmt: skip
    terms, intake = host_terms(own, runs), intakes(rows)
    for row in rows:
        seconds, per_token = intake[row["source"]]
        row["ttft"] = row["simulated"]["ttft"] + seconds + per_token * row["isl"]
    held = [row for row in rows if not row["fitted"]]
    held_low = [row for row in held if row["fewest"]]
    estimates = {
        "tpot-median": resampled(held, tpot_error, np.median),
        "tpot-p90": resampled(held, tpot_error, p90),
        "ttft-median": resampled(held_low, ttft_error, np.median),
        "ttft-median-steps": resampled(held_low, steps_ttft_error, np.median),
        "host-adds": Estimate.exact(max(off_linear(row, terms[row["source"]]) for row in rows)),
    }
    with (DATA / "left_out.json").open(encoding="utf-8") as file:
        left_out = json.load(file)
    unclear = [{**asdict(p), "busy": busy(p)} for p in points() if p.source not in BENCHMARKS]
    servers = {
        name: host_term(list(pairs))
        for name, pairs in groupby(zip(own, runs, strict=True), key=lambda pair: pair[0].profile)
    }
    data = {
        "rows": rows, "host": terms, "host_by_server": servers, "intake": intake, "left_out": left_out,
        "unclear": unclear,
    }  # fmt: skip
    settings = {
        "policy": "vllm", "max_num_batched_tokens": BUDGET, "benchmarks": {k: asdict(b) for k, b in BENCHMARKS.items()}
    }  # fmt: skip
    drawn = "servers drawn anew 1,000 times; low = ours = high where nothing is drawn"
    return Found(estimates, data, [SEED], "none", settings, drawn)


def tpot_error(row: Mapping[str, Any], which: str = "simulated") -> float:
    return float(row[which]["tpot"] / row["measured"]["tpot"] - 1.0)


def ttft_error(row: Mapping[str, Any]) -> float:
    return float(row["ttft"] / row["measured"]["ttft"] - 1.0)


def steps_ttft_error(row: Mapping[str, Any]) -> float:
    return float(row["simulated"]["ttft"] / row["measured"]["ttft"] - 1.0)


def off_linear(row: Mapping[str, Any], term: tuple[float, float]) -> float:
    """How far a simulated TPOT is from the kernels' and the host term's, of itself."""
    expected = row["kernels"]["tpot"] + term[0] + term[1] * sequences(row)
    return abs(float(row["simulated"]["tpot"] / expected - 1.0))


def p90(errors: Any) -> float:
    return float(np.quantile(errors, 0.9))


def resampled(
    rows: Sequence[Mapping[str, Any]], error: Callable[[Mapping[str, Any]], float], of: Callable[[Any], Any]
) -> Estimate:
    """A quantile of absolute errors, and the 95 % interval by drawing servers, whose points err alike, anew."""
    servers = [
        np.abs([error(row) for row in own]) for _, own in groupby(rows, key=lambda row: (row["source"], row["profile"]))
    ]
    rng = np.random.default_rng(SEED)
    again = [
        float(of(np.concatenate([servers[i] for i in rng.integers(0, len(servers), len(servers))])))
        for _ in range(1000)
    ]
    low, high = np.quantile(again, (0.025, 0.975))
    value = float(of(np.concatenate(servers)))
    return Estimate(value, min(float(low), value), max(float(high), value))


def draw(data: Any, axes: Any) -> None:
    """TPOT, simulated against measured; filled: servers that were not fitted."""
    kinds = sorted({kind_of(row["profile"]) for row in data["rows"]})
    ends = [min(r["measured"]["tpot"] for r in data["rows"]), max(r["measured"]["tpot"] for r in data["rows"])]
    ends = [1e3 * end for end in ends]
    for i, kind in enumerate(kinds):
        for fitted in (True, False):
            own = [r for r in data["rows"] if kind_of(r["profile"]) == kind and r["fitted"] == fitted]
            pairs = [[1e3 * r[which]["tpot"] for r in own] for which in ("measured", "simulated")]
            axes.plot(
                *pairs, "o", color=f"C{i}", markersize=3.5, fillstyle="none" if fitted else "full",
                label=None if fitted else kind,
            )  # fmt: skip
    axes.plot(ends, ends, color="grey", linewidth=0.8)
    for factor in (0.8, 1.2):
        axes.plot(ends, [factor * end for end in ends], color="grey", linewidth=0.6, linestyle=":")
    name_axes(axes, "TPOT measured (ms); dotted: 20 % off", "TPOT simulated (ms)", log="xy")


def tables(data: Any) -> str:
    """Host terms; errors by model, GPU and number of GPUs; what was left out."""
    terms = [["source", "host", "host_per_seq", "TTFT beyond the steps"]]
    for source, (host, per_seq) in data["host"].items():
        seconds, per_token = data["intake"][source]
        terms.append([
            source, f"{1e3 * host:.2f} ms", f"{1e6 * per_seq:.1f} µs",
            f"{1e3 * seconds:.0f} ms + {1e6 * per_token:.1f} µs a prompt token",
        ])  # fmt: skip
    head = "server, half, points, TPOT: median, P90, bias, bias with 2024's, TTFT: bias, steps alone"
    errors = [[*head.split(", "), "host terms of this server alone"]]
    for name, group in groupby(data["rows"], key=lambda row: row["profile"]):
        own = list(group)
        low = [row for row in own if row["fewest"]]
        every = np.array([tpot_error(row) for row in own])
        old = [tpot_error(row, "vllm-2024") for row in own]
        errors.append([
            name, "fitted" if own[0]["fitted"] else "judged", str(len(own)), percent(np.median(np.abs(every))),
            percent(p90(np.abs(every))), percent(np.median(every)), percent(np.median(old)),
            percent(np.median([ttft_error(row) for row in low])),
            percent(np.median([steps_ttft_error(row) for row in low])),
            "{:.2f} ms, {:.0f} µs".format(1e3 * data["host_by_server"][name][0], 1e6 * data["host_by_server"][name][1]),
        ])  # fmt: skip
    clients = [["clients", "points judged", "TPOT: median", "P90", "bias"]]
    judged = [row for row in data["rows"] if not row["fitted"]]
    for count in sorted({row["concurrency"] for row in judged}):
        every = np.array([tpot_error(row) for row in judged if row["concurrency"] == count])
        shown = (np.median(np.abs(every)), p90(np.abs(every)), np.median(every))
        clients.append([str(count), str(len(every)), *map(percent, shown)])
    shares = [point["busy"] for point in data["unclear"]]
    unclear = f"{len(shares)} of vLLM whose kernels would take {min(shares):.2f} to {max(shares):.2f} of the time"
    others = ", ".join(f"{count:,} ({reason})" for reason, count in data["left_out"].items())
    return (
        f"{markdown(terms)}\n\nSimulated over measured, less one; TTFT with the fewest clients of each sweep:\n\n"
        f"{markdown(errors)}\n\n{markdown(clients)}\n\nLeft out: {unclear} (Little's law); {others}."
    )


def percent(share: float) -> str:
    return f"{100 * share:+.1f} %".removeprefix("+")
