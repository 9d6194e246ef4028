"""SLO attainment of AdaServe and of systems that know no trees, live: the bundled model in this process.

    python benchmarks/adaserve_live.py [--trace FILE] [--load 0.4,0.6,0.8,1.0] [--seeds 5] [--ttft S] [--json FILE]

Code, chat and summaries, 60/20/20 %, with a TPOT of 1.2, 2 and 5 times what one request takes here alone (the mean over
a request's tokens counts, as in the paper); at most 128 output tokens, greedy. `--load` counts in requests/s that eight
clients are served in a closed loop without drafts, measured first. --trace: prompts and arrival times of a recorded
trace with texts, a stretch of it for each seed, its times rescaled; else prompts of our own and Gamma arrivals. In a
round the systems serve the same requests at the same times, one after the other, in an order that turns. Each has an
engine and a latency model that learns all along. --ttft: a TTFT for all, too; else there is none, and a system that
holds requests back breaks no promise. Reported: violations, with a 95 % interval over seeds, and their difference to
each other system's. Keep the machine quiet.
"""

from __future__ import annotations

import argparse
import asyncio
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from speculation_speed import LONGEST, MOST, class_of, cluster_of, drawn, engine, prompts, served

from rubato.core.clock import WallClock
from rubato.core.events import Event, Finished
from rubato.core.request import SLO, Request, Sampling, Stage
from rubato.fleet.cluster import Cluster
from rubato.measure.confidence import over_seeds
from rubato.workloads import traces
from rubato.workloads.arrivals import Gamma
from rubato_torch.tokenizer import Text

SYSTEMS = ("adaserve", "edf", "vllm_spec:n=4", "sarathi")
TPOT = {"code": 1.2, "chat": 2.0, "summary": 5.0}  # times the unloaded one
SHARES = {"code": 0.6, "chat": 0.2, "summary": 0.2}
SECONDS = 20.0  # of arrivals
AT_ONCE = 8  # requests that any system runs at most; the artifact takes 64 and 80, where a step's knee is at 130 tokens
DONE = 60.0  # seconds after the last arrival at which a run is given up


@dataclass(frozen=True)
class Offer:
    at: float
    name: str  # its class
    text: str


def offers(trace: Path | None, rate: float, seed: int) -> list[Offer]:
    """About SECONDS of arrivals at so many a second."""
    count = max(2, round(rate * SECONDS))
    rng = np.random.default_rng([seed, 7])
    if trace is None:
        times = Gamma(1.1).times(rate, count, rng)
        names = rng.choice(list(SHARES), size=count, p=list(SHARES.values()))
        texts = prompts(None, seed)
        return [Offer(float(at), str(name), next(texts[str(name)])) for at, name in zip(times, names, strict=True)]
    recorded = [o for o in traces.read(trace).offers if len(o.text) < 4 * LONGEST]
    first = int(rng.integers(len(recorded) - count))
    part = recorded[first : first + count + 1]
    stretched = SECONDS / (part[-1].at - part[0].at)
    return [Offer((o.at - part[0].at) * stretched, class_of(o), o.text) for o in part[:-1]]


def requests(offered: Sequence[Offer], text: Text, slos: dict[str, SLO]) -> list[tuple[float, Request]]:
    """(seconds after the start, request), ids yet without the run's prefix."""
    found = []
    for number, offer in enumerate(offered):
        ids = text.chat([{"role": "user", "content": offer.text}])
        stage = Stage(len(ids), slos[offer.name], "eos", ids)
        sampling = Sampling(MOST, temperature=0.0)
        found.append(
            (offer.at, Request(str(number), (stage,), 0.0, app=offer.name, tier=offer.name, sampling=sampling))
        )
    return found


async def replayed(cluster: Cluster, offered: Sequence[tuple[float, Request]], run: str) -> list[tuple[str, Finished]]:
    """(class, end) of each request, sent when it is due. Raises TimeoutError `DONE` seconds after the last."""
    clock, ends, done = WallClock(), list[tuple[str, Finished]](), asyncio.Event()
    began = clock.now()
    for after, request in offered:
        await asyncio.sleep(max(0.0, began + after - clock.now()))

        def heard(event: Event, name: str = request.app) -> None:
            if isinstance(event, Finished):
                ends.append((name, event))
                if len(ends) == len(offered):
                    done.set()

        cluster.offer(replace(request, id=f"{run}-{request.id}", arrival=clock.now()), heard)
    await asyncio.wait_for(done.wait(), DONE)
    return ends


async def unloaded(cluster: Cluster, text: Text, clients: int, seed: int) -> tuple[float, float]:
    """Requests/s in a closed loop, and seconds a token."""
    sources = prompts(None, seed)
    some, _ = drawn(sources, text, 3 * max(2, clients), f"u{clients}")
    found = await served(cluster, some, clients)
    return len(some) / found.seconds, found.tpot


async def measured(args: argparse.Namespace) -> None:
    clusters = {name: await cluster_of(name, 0, AT_ONCE) for name in args.systems}
    text = engine("vllm", 0).text
    plain = await cluster_of("vllm:budget=1024", 0)
    for cluster in [*clusters.values(), plain]:  # latency models begin with a guess
        await unloaded(cluster, text, 4, 1)
    capacity, _ = await unloaded(plain, text, 8, 2)
    _, tpot = await unloaded(plain, text, 1, 3)
    await plain.close()
    slos = {name: SLO(ttft=args.ttft, tpot=times * tpot) for name, times in TPOT.items()}
    print(f"unloaded {1e3 * tpot:.1f} ms a token; 8 clients are served {capacity:.2f} requests/s", flush=True)
    rows: list[dict[str, Any]] = []
    for load in args.load:
        for seed in range(args.seeds):
            offered = requests(offers(args.trace, load * capacity, seed), text, slos)
            for turn in range(len(args.systems)):
                system = args.systems[(turn + seed) % len(args.systems)]
                ends = await replayed(clusters[system], offered, f"{load}-{seed}")
                missed = {n: [not e.verdict.met for name, e in ends if name == n] for n in TPOT}
                rows.append({"load": load, "seed": seed, "system": system, "missed": missed})
        if args.json:
            args.json.write_text(json.dumps({"tpot": tpot, "capacity": capacity, "rows": rows}))
        show(rows, load, args.systems)
    for cluster in clusters.values():
        await cluster.close()


def share(row: dict[str, Any], names: Sequence[str] = tuple(TPOT)) -> float:
    """Of requests of these classes, which did not meet their SLO."""
    found = [one for name in names for one in row["missed"][name]]
    return sum(found) / len(found) if found else 0.0


def show(rows: Sequence[dict[str, Any]], load: float, systems: Sequence[str]) -> None:
    of = {
        s: sorted((r for r in rows if r["load"] == load and r["system"] == s), key=lambda r: r["seed"]) for s in systems
    }
    count = sum(len(m) for r in of[systems[0]] for m in r["missed"].values())
    print(f"\nload {load}, {count} requests: violations; {systems[0]}'s less these, points; by class")
    for name, own in of.items():
        missed = over_seeds([100 * share(r) for r in own])
        less = over_seeds([100 * (share(a) - share(b)) for a, b in zip(of[systems[0]], own, strict=True)])
        by = [f"{c} {100 * np.mean([share(r, [c]) for r in own]):.0f}" for c in TPOT]
        print(
            f"  {name:14} {missed.value:5.1f} % [{missed.low:.0f}, {missed.high:.0f}]  "
            f"{less.value:+.1f} [{less.low:+.1f}, {less.high:+.1f}]",
            *by, sep="  ", flush=True,
        )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trace", type=Path)
    parser.add_argument("--load", type=lambda given: [float(c) for c in given.split(",")], default=[0.4, 0.6, 0.8, 1.0])
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--ttft", type=float)
    parser.add_argument("--system", action="append", dest="systems", help=f"default: {', '.join(SYSTEMS)}")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    args.systems = args.systems or list(SYSTEMS)
    asyncio.run(measured(args))


if __name__ == "__main__":
    main()
