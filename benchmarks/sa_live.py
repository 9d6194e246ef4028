"""SA in front of the embedded engine, batch by batch: G against order of arrival, and `edf` beside.

    python benchmarks/sa_live.py [--seeds 5] [--batches 1,4] [--dispatch place|interval|batch_end] [--small]
        [--rows results/sa-live.jsonl] [--json FILE]

Half chat, half code, with the lengths of `sa-mixed` times `SCALE`, on the bundled model in this process, in cells: all
at once and by Poisson arrivals (`LOAD` times what the places serve), one and four at a time. SLOs keep the paper's
ratios (§5.1): end to end, 10 × what a mean code request takes alone; TTFT, 3.3 × that; TPOT, 3.1 × an unloaded decode
step. The latency model (`bilinear`, as the paper's) is fitted to steps measured before; output lengths are known by a
Gaussian of 200 earlier requests, by their mean, or exactly. Order of arrival goes through the same front, which sends
by the same `dispatch`; `edf` has no front. In each round the systems serve the same requests one after the other, in an
order that turns from round to round. With --rows a run that was cut off goes on, with the model and SLOs of its start.

G = requests in SLO / sum of end-to-end latencies. Reported: its mean over seeds, and the ratio of G and the difference
in SLO to order of arrival, with 95 % intervals by seeds.
"""

from __future__ import annotations

import argparse
import asyncio
import copy
import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from experiments.sa_gain import measured
from rubato.core.clock import WallClock
from rubato.core.events import Event, Finished, Stepped
from rubato.core.interfaces import LengthPredictor
from rubato.core.length_prediction import Oracle, RunningMean, seeded_gaussian
from rubato.core.plan import Sample, Shape
from rubato.core.replica_options import ReplicaOptions
from rubato.core.request import SLO, Request, Sampling, Stage
from rubato.fleet.build import local_cluster
from rubato.fleet.cluster_options import ClusterOptions, PolicyChoice
from rubato.latency import bilinear
from rubato.latency.whole_request import decode_seconds, prefill_seconds
from rubato.measure.confidence import over_seeds
from rubato.policies import sa
from rubato.policy_kit.annealing import Predicted, Solution
from rubato.workloads import Workload, scenarios
from rubato_torch import Engine, bundled_model

SCALE = 0.12  # of all lengths: a full-length request takes 5 s alone here
LONGEST = 512  # tokens that a client asks for, not knowing how long the answer will be
HISTORY, EARLIER = 200, 1000
E2E, TTFT, TPOT = 10.0, 3.3, 3.1  # the paper's ratios
AT_ONCE, POISSON = "at once", "poisson"
COUNTS = {AT_ONCE: 12, POISSON: 16}  # requests of a cell
LOAD = 1.3  # of a Poisson cell: mean requests offered over those that its places serve
GAPS = 5  # random stream
ARRIVAL, SA, MEAN, EXACT, EDF = "order of arrival", "sa", "sa, mean lengths", "sa, exact lengths", "edf"
SYSTEMS = (ARRIVAL, SA, MEAN, EXACT, EDF)


@dataclass
class Router(sa.Router):
    """SA's front, in order of arrival; by this file's name a routing policy."""

    def solve(self, predicted: Predicted) -> Solution:
        n = len(predicted.seconds)
        return Solution(tuple((i,) for i in range(n)), 0, float(predicted.seconds[:, 0].sum()), 0)


@dataclass(frozen=True)
class AsAsked:
    """A length predictor that sees of a request what its client said: not that the answer ends where it ends here."""

    inner: LengthPredictor

    def remaining(self, request: Request, output: int) -> float | None:
        asked = dataclasses.replace(request.sampling, max_tokens=LONGEST)
        return self.inner.remaining(dataclasses.replace(request, sampling=asked), output)

    def learn(self, request: Request, output: int) -> None:
        pass  # each run knows what the one before knew


def drawn(count: int, seed: int) -> Workload:
    load = scenarios.make("sa-mixed", 1.0, count=count, seed=seed)
    return dataclasses.replace(
        load,
        arrivals=tuple(
            dataclasses.replace(
                a, prompt_tokens=max(8, round(SCALE * a.prompt_tokens)),
                output_tokens=max(4, round(SCALE * a.output_tokens)),
            )
            for a in load.arrivals
        ),
    )  # fmt: skip


def requests(
    load: Workload, slos: dict[str, SLO], seed: int, vocabulary: int, rate: float | None = None
) -> list[Request]:
    """rate: of Poisson arrivals, requests/s; None = all at once."""
    rng = np.random.default_rng([seed, 3])
    gaps = np.random.default_rng([seed, GAPS]).exponential(1.0 / rate if rate else 0.0, len(load.arrivals))
    times = np.cumsum(gaps).tolist()
    return [
        Request(
            a.id, (Stage(a.prompt_tokens, slos[a.app], "eos", tuple(rng.integers(10, vocabulary, a.prompt_tokens))),),
            at, app=a.app, tier=a.tier, sampling=Sampling(a.output_tokens, ignore_eos=True),
        )
        for a, at in zip(load.arrivals, times, strict=True)
    ]  # fmt: skip


def known(system: str, load: Workload, seed: int) -> LengthPredictor:
    if system == EXACT:
        return Oracle({a.id: a.output_tokens for a in load.arrivals})
    predictor = RunningMean() if system == MEAN else seeded_gaussian(seed=seed)
    before = drawn(HISTORY, EARLIER + seed)
    for request, arrival in zip(before.requests(), before.arrivals, strict=True):
        predictor.learn(request, arrival.output_tokens)
    return AsAsked(predictor)


async def serve(
    system: str,
    offered: Sequence[Request],
    batch: int,
    model: bilinear.Model,
    lengths: LengthPredictor,
    dispatch: str = "place",
) -> list[Event]:
    """All events of one run, on a fresh engine that takes `batch` sequences."""
    clock = WallClock()
    engine = Engine(bundled_model.ensure(), kv_gib=0.5, max_num_seqs=batch)
    router = {ARRIVAL: __file__, SA: "sa", MEAN: "sa", EXACT: "sa"}.get(system, "round_robin")
    settings = {} if router == "round_robin" else {"dispatch": dispatch}
    choice = PolicyChoice("edf" if system == EDF else "vllm", router=router, router_settings=settings)
    cluster = local_cluster(
        [engine], [copy.deepcopy(model)], clock, ClusterOptions(choice, ReplicaOptions(lengths, "mean")),
    )  # fmt: skip
    events: list[Event] = []
    cluster.listen(events.append)
    await cluster.start()
    begin = clock.now()
    for request in offered:  # those of one instant in one turn of the event loop: the router sees them together
        if (left := begin + request.arrival - clock.now()) > 0.0 and request.arrival:
            await asyncio.sleep(left)
        cluster.offer(dataclasses.replace(request, arrival=begin + request.arrival))
    await cluster.drain()
    await cluster.close()
    return events


def fitted(vocabulary: int) -> bilinear.Model:
    """On steps of every kind: so many requests at once, 1 to 4."""
    samples: list[Sample] = []
    for batch in (1, 2, 3, 4):
        load = drawn(6 * batch, 50 + batch)
        events = asyncio.run(
            serve("warm-up", requests(load, {"chat": SLO(), "code": SLO()}, batch, vocabulary), batch, bilinear.Model(),
                  Oracle({a.id: a.output_tokens for a in load.arrivals}))
        )  # fmt: skip
        samples += [Sample(e.shape, e.seconds) for e in events if isinstance(e, Stepped) and e.shape.tokens]
    model = bilinear.Model()
    model.fit(samples)
    return model


def mean_lengths(app: str = "") -> tuple[int, int]:
    """Prompt and output tokens of a mean request (of this app)."""
    load = [a for a in drawn(400, EARLIER - 1).arrivals if app in ("", a.app)]
    prompt, output = (round(float(np.mean([getattr(a, n) for a in load]))) for n in ("prompt_tokens", "output_tokens"))
    return prompt, output


def rate_of(model: bilinear.Model, batch: int) -> float:
    """Requests/s, `LOAD` times what a batch of mean requests gives."""
    prompt, output = mean_lengths()
    return LOAD * batch / (prefill_seconds(model, batch, prompt) + decode_seconds(model, batch, prompt, output))


def slos_of(model: bilinear.Model) -> dict[str, SLO]:
    """By the paper's ratios, from what a mean code request takes alone."""
    prompt, output = mean_lengths("code")
    alone = prefill_seconds(model, 1, prompt) + decode_seconds(model, 1, prompt, output)
    return {
        "chat": SLO(ttft=TTFT * alone, tpot=TPOT * model.step_time(Shape(1, 1, prompt))),
        "code": SLO(e2e=E2E * alone),
    }


def begun(file: Path | None, asked: dict[str, Any], vocabulary: int) -> tuple[bilinear.Model, list[dict[str, Any]]]:
    """The model, fitted now or where the rows of `file` began, and these rows. Raises ValueError for rows of another
    run."""
    if file is None or not file.is_file():
        model = fitted(vocabulary)
        if file is not None:
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(json.dumps({**asked, "p": model.p, "d": model.d}) + "\n")
        return model, []
    head, *rows = map(json.loads, file.read_text().splitlines())
    if {name: head.get(name) for name in asked} != asked:
        raise ValueError(f"{file} has rows of another run ({head}): give another --rows, or remove it")
    model = bilinear.Model()
    model.p, model.d = tuple(head["p"]), tuple(head["d"])
    return model, rows


def summary(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """A line for each cell and system: means, and what is compared with order of arrival [low, high]."""
    lines = []
    for cell in dict.fromkeys((r["arrivals"], r["n"], r["batch"]) for r in rows):
        of = {
            system: {r["seed"]: r for r in rows if (r["arrivals"], r["n"], r["batch"], r["system"]) == (*cell, system)}
            for system in SYSTEMS
        }
        for system, own in of.items():
            seeds = sorted(own.keys() & of[ARRIVAL].keys())
            pairs = [(own[seed], of[ARRIVAL][seed]) for seed in seeds]
            if not pairs:
                continue
            g = over_seeds([a["g"] / b["g"] if b["g"] else float("nan") for a, b in pairs])
            more = over_seeds([a["attained"] - b["attained"] for a, b in pairs])
            lines.append(
                {
                    "arrivals": cell[0], "n": cell[1], "batch": cell[2], "system": system, "seeds": seeds,
                    **{key: float(np.mean([a[key] for a, _ in pairs])) for key in ("g", "attained", "latency")},
                    "g_ratio": [g.value, g.low, g.high], "attained_more": [more.value, more.low, more.high],
                }
            )  # fmt: skip
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--batches", type=lambda given: [int(b) for b in given.split(",")], default=[1, 4])
    parser.add_argument("--dispatch", choices=sa.DISPATCHES, default="place", help="of the front")
    parser.add_argument("--small", action="store_true", help="4 requests, batches of 2, one seed: whether it runs")
    parser.add_argument("--rows", type=Path, help="JSON lines of finished runs; the same command goes on from them")
    parser.add_argument("--json", type=Path, help="what was found, and the rows")
    args = parser.parse_args()
    vocabulary = 40000
    model, rows = begun(args.rows, {"dispatch": args.dispatch, "small": args.small}, vocabulary)
    slos = slos_of(model)
    print(f"p {model.p}, d {model.d}")
    for app, slo in slos.items():
        print(f"{app}: {slo}")
    batches, seeds = ([2], 1) if args.small else (args.batches, args.seeds)
    known_rows = {(r["arrivals"], r["batch"], r["seed"], r["system"]) for r in rows}
    for arrivals, count in COUNTS.items():
        n = 4 if args.small else count
        for batch in batches:
            rate = rate_of(model, batch) if arrivals == POISSON else None
            print(f"{arrivals}, {n} requests, batches of {batch}" + (f", {rate:.2f}/s" if rate else ""), flush=True)
            for seed in range(seeds):
                load = drawn(n, seed)
                for turn in range(len(SYSTEMS)):
                    system = SYSTEMS[(turn + seed) % len(SYSTEMS)]
                    if (arrivals, batch, seed, system) in known_rows:
                        continue
                    offered = requests(load, slos, seed, vocabulary, rate)
                    events = asyncio.run(serve(system, offered, batch, model, known(system, load, seed), args.dispatch))
                    assert all(e.outcome == "completed" for e in events if isinstance(e, Finished))
                    cell = {"arrivals": arrivals, "n": n, "batch": batch, "seed": seed, "system": system}
                    rows.append({**cell, **measured(events)})
                    if args.rows:
                        with args.rows.open("a") as file:
                            file.write(json.dumps(rows[-1]) + "\n")
    found = summary(rows)
    for line in found:
        (g, low, high), (more, least, most) = line["g_ratio"], line["attained_more"]
        print(
            f"{line['arrivals']:8} {line['n']:3}, {line['batch']}  {line['system']:20} "
            f"G × 1000 {1e3 * line['g']:7.1f}, "
            f"{100 * line['attained']:4.0f} % in SLO, {line['latency']:6.2f} s; G × {g:.2f} [{low:.2f}, {high:.2f}], "
            f"{100 * more:+.0f} points [{100 * least:+.0f}, {100 * most:+.0f}]"
        )
    if args.json:
        settings = {"dispatch": args.dispatch, "scale": SCALE, "load": LOAD, "p": model.p, "d": model.d}
        args.json.write_text(json.dumps({"settings": settings, "found": found, "rows": rows}))


if __name__ == "__main__":
    main()
