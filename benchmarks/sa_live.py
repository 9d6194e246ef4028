"""SA in front of the embedded engine, batch by batch: G against order of arrival, and `edf` beside.

    python benchmarks/sa_live.py [--seeds 5] [--batches 1,4] [--dispatch batch_end|interval] [--small] [--json FILE]

Half chat, half code, with the lengths of `sa-mixed` times `SCALE`, all at once, on the bundled model in this process.
SLOs keep the paper's ratios (§5.1): end to end, 10 × what a mean code request takes alone; TTFT, 3.3 × that; TPOT, 3.1
× an unloaded decode step. The latency model (`bilinear`, as the paper's) is fitted to steps measured before; output
lengths are known by a Gaussian of 200 earlier requests, by their mean, or exactly. A batch is sent when the one before
has ended, or 0.1 ms after it, so that the engine fills each place as it is free. In each round the systems serve the
same requests one after the other, in an order that turns from round to round.

G = requests in SLO / sum of end-to-end latencies. Reported: its mean over seeds, and the ratio to order of arrival with
a 95 % interval by seeds.
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
from rubato.workloads import Workload, scenarios
from rubato_torch import Engine, bundled_model

SCALE = 0.12  # of all lengths: a full-length request takes 5 s alone here
LONGEST = 512  # tokens that a client asks for, not knowing how long the answer will be
HISTORY, EARLIER = 200, 1000
E2E, TTFT, TPOT = 10.0, 3.3, 3.1  # the paper's ratios
COUNTS = (10, 40)
ARRIVAL, SA, MEAN, EXACT, EDF = "order of arrival", "sa", "sa, mean lengths", "sa, exact lengths", "edf"
SYSTEMS = (ARRIVAL, SA, MEAN, EXACT, EDF)


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


def requests(load: Workload, slos: dict[str, SLO], seed: int, vocabulary: int) -> list[Request]:
    rng = np.random.default_rng([seed, 3])
    return [
        Request(
            a.id, (Stage(a.prompt_tokens, slos[a.app], "eos", tuple(rng.integers(10, vocabulary, a.prompt_tokens))),),
            0.0, app=a.app, tier=a.tier, sampling=Sampling(a.output_tokens, ignore_eos=True),
        )
        for a in load.arrivals
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
    dispatch: str = "batch_end",
) -> list[Event]:
    """All events of one run, on a fresh engine that takes `batch` sequences."""
    clock = WallClock()
    engine = Engine(bundled_model.ensure(), kv_gib=0.5, max_num_seqs=batch)
    router = "sa" if system in (SA, MEAN, EXACT) else "round_robin"
    settings = {"dispatch": dispatch} if router == "sa" else {}
    choice = PolicyChoice("edf" if system == EDF else "vllm", router=router, router_settings=settings)
    cluster = local_cluster(
        [engine], [copy.deepcopy(model)], clock, ClusterOptions(choice, ReplicaOptions(lengths, "mean")),
    )  # fmt: skip
    events: list[Event] = []
    cluster.listen(events.append)
    await cluster.start()
    now = clock.now()
    for request in offered:  # all in one turn of the event loop: the router sees them together
        cluster.offer(dataclasses.replace(request, arrival=now))
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


def slos_of(model: bilinear.Model) -> dict[str, SLO]:
    """By the paper's ratios, from what a mean code request takes alone."""
    code = [a for a in drawn(400, EARLIER - 1).arrivals if a.app == "code"]
    prompt, output = (
        round(float(np.mean([getattr(a, name) for a in code]))) for name in ("prompt_tokens", "output_tokens")
    )
    alone = prefill_seconds(model, 1, prompt) + decode_seconds(model, 1, prompt, output)
    return {
        "chat": SLO(ttft=TTFT * alone, tpot=TPOT * model.step_time(Shape(1, 1, prompt))),
        "code": SLO(e2e=E2E * alone),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--batches", type=lambda given: [int(b) for b in given.split(",")], default=[1, 4])
    parser.add_argument("--dispatch", choices=("batch_end", "interval"), default="batch_end", help="of sa's batches")
    parser.add_argument("--small", action="store_true", help="one cell of 4 requests, one seed: whether it runs")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    vocabulary = 40000
    model = fitted(vocabulary)
    slos = slos_of(model)
    print(f"p {model.p}, d {model.d}")
    for app, slo in slos.items():
        print(f"{app}: {slo}")
    cells, seeds = ([(4, 2)], 1) if args.small else ([(n, b) for n in COUNTS for b in args.batches], args.seeds)
    rows: list[dict[str, Any]] = []
    for n, batch in cells:
        for seed in range(seeds):
            load = drawn(n, seed)
            for turn in range(len(SYSTEMS)):
                system = SYSTEMS[(turn + seed) % len(SYSTEMS)]
                offered = requests(load, slos, seed, vocabulary)
                events = asyncio.run(serve(system, offered, batch, model, known(system, load, seed), args.dispatch))
                assert all(e.outcome == "completed" for e in events if isinstance(e, Finished))
                found = measured(events)
                rows.append({"n": n, "batch": batch, "seed": seed, "system": system, **found})
                if args.json:
                    args.json.write_text(json.dumps({"p": model.p, "d": model.d, "rows": rows}))
        print(f"\n{n} requests at once, batches of {batch}: G × 1000, in SLO, mean latency; G over order of arrival")
        for system in SYSTEMS:
            own, base = (
                sorted(
                    (r for r in rows if (r["n"], r["batch"], r["system"]) == (n, batch, which)), key=lambda r: r["seed"]
                )
                for which in (system, ARRIVAL)
            )
            mean = {key: np.mean([r[key] for r in own]) for key in ("g", "attained", "latency")}
            ratio = over_seeds([a["g"] / b["g"] if b["g"] else float("nan") for a, b in zip(own, base, strict=True)])
            print(
                f"  {system:20} {1e3 * mean['g']:7.1f} {100 * mean['attained']:4.0f} % {mean['latency']:6.2f} s   "
                f"{ratio.value:.2f} [{ratio.low:.2f}, {ratio.high:.2f}]",
                flush=True,
            )


if __name__ == "__main__":
    main()
