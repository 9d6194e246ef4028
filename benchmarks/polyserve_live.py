"""PolyServe, live: two replicas of the bundled model in this process, one core each.

    python benchmarks/polyserve_live.py [--seeds 3] [--seconds 60] [--rate 4.0] [--json FILE]

The flip: two TPOT tiers, of `TIGHT` and `LOOSE` unloaded decode steps, share the requests 1 : 3, and 3 : 1 from half of
the time on. The same requests at the same times go to `polyserve` (co-located) and to CO-Chunk, on the least loaded
replica, in turns; attainment by tier, over requests offered, before the flip, in `WINDOW` seconds after it, and from
then on. Then prompts on one replica and decodes on the other, the KV moved: outputs are compared with those of one
replica that does both, and the time from the hand-off to the arrival of the KV is measured. Keep the machine quiet.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from ascendra_live import cpu_core

from rubato.core.clock import WallClock, run_strict
from rubato.core.events import Assigned, Event, Finished, HandedOff, Tokens, Transferred
from rubato.core.length_prediction import RunningMean
from rubato.core.plan import Shape
from rubato.core.replica_options import ReplicaOptions
from rubato.core.request import SLO, Request, Sampling, Stage
from rubato.core.timeline import steps
from rubato.fleet.build import local_cluster
from rubato.fleet.cluster_options import ClusterOptions, PolicyChoice
from rubato.latency import operation_count
from rubato_torch import Engine, bundled_model

TIGHT, LOOSE = 2.5, 8.0  # TPOT in unloaded decode steps
PREFILLS = 8.0  # TTFT in unloaded prefills of a median prompt
PROMPT, OUTPUT = (40, 160), (40, 120)  # tokens, uniform
WINDOW = 10.0  # seconds after the flip that count as "during"
MOVED = 12  # requests of the run with KV moved


@dataclasses.dataclass(frozen=True)
class Coming:
    at: float
    request: Request  # its arrival is set when it is offered


def made(id: str, rng: Any, tier: str, slo: SLO) -> Request:
    ids = tuple(int(x) for x in rng.integers(1000, 40_000, int(rng.integers(*PROMPT))))
    sampling = Sampling(max_tokens=int(rng.integers(*OUTPUT)), ignore_eos=True)
    return Request(id, (Stage(len(ids), slo, token_ids=ids),), 0.0, tier, app=tier, sampling=sampling)


def flipping(slos: Mapping[str, SLO], rate: float, seconds: float, seed: int) -> list[Coming]:
    rng = np.random.default_rng(seed)
    found: list[Coming] = []
    at = float(rng.exponential(1.0 / rate))
    while at < seconds:
        tight = rng.random() < (0.25 if at < seconds / 2 else 0.75)
        tier = "tight" if tight else "loose"
        found.append(Coming(at, made(f"{len(found)}", rng, tier, slos[tier])))
        at += float(rng.exponential(1.0 / rate))
    return found


def serve(
    folder: Path, coming: Sequence[Coming], choice: PolicyChoice, model: operation_count.Model, replicas: int = 2
) -> tuple[float, list[Event]]:
    """All events, and when the first request could come."""
    events: list[Event] = []
    began = [0.0]

    async def main() -> None:
        clock = WallClock()
        engines = [
            Engine(folder, kv_gib=0.5, max_num_seqs=64, max_num_batched_tokens=1024, threads=1) for _ in range(replicas)
        ]
        cluster = local_cluster(
            engines, [dataclasses.replace(model) for _ in engines], clock,
            ClusterOptions(choice, ReplicaOptions(RunningMean(), "mean")),
        )  # fmt: skip
        cluster.listen(events.append)
        warm = asyncio.Event()
        cluster.listen(lambda _: warm.set() if sum(isinstance(e, Finished) for e in events) >= 2 * replicas else None)
        await cluster.start()
        for nth in range(2 * replicas):  # the first steps of an engine are slower
            cluster.offer(dataclasses.replace(made(f"warm-{nth}", np.random.default_rng(nth), "warm", SLO()),
                                              arrival=clock.now()))  # fmt: skip
        await warm.wait()
        events.clear()
        began[0] = clock.now()
        for one in coming:
            await asyncio.sleep(max(0.0, began[0] + one.at - clock.now()))
            cluster.offer(dataclasses.replace(one.request, arrival=clock.now()))
        await cluster.drain()
        await cluster.close()

    run_strict(main())
    return began[0], events


def by_phase(coming: Sequence[Coming], events: Sequence[Event], seconds: float) -> dict[str, list[int]]:
    """met and offered by tier and phase."""
    ended = {e.id: e for e in events if isinstance(e, Finished)}
    assert len(ended) == len(coming), "a request has no end"
    found: dict[str, list[int]] = {}
    for one in coming:
        half = seconds / 2
        phase = "before" if one.at < half else "during" if one.at < half + WINDOW else "after"
        counts = found.setdefault(f"{one.request.tier} {phase}", [0, 0])
        end = ended[one.request.id]
        counts[0] += end.verdict.met and not end.best_effort
        counts[1] += 1
    return found


def fitted(folder: Path) -> operation_count.Model:
    blank = cpu_core(folder)
    rng = np.random.default_rng(0)
    coming = [Coming(0.15 * n, made(f"{n}", rng, "any", SLO())) for n in range(60)]
    _, events = serve(folder, coming, PolicyChoice.parse("sarathi:budget=256@round_robin"), blank)
    model = dataclasses.replace(blank)
    model.fit(steps(events))
    return model


def outputs(events: Sequence[Event]) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {}
    for event in events:
        if isinstance(event, Tokens):
            found.setdefault(event.id, []).extend(event.token_ids)
    return found


def moved(folder: Path, model: operation_count.Model, slo: SLO) -> dict[str, Any]:
    """Outputs of one replica against those of two with the KV moved, and how long moving it took."""
    rng = np.random.default_rng(7)
    coming = [Coming(0.4 * n, made(f"{n}", rng, "loose", slo)) for n in range(MOVED)]
    _, alone = serve(folder, coming, PolicyChoice.parse("vllm@round_robin"), model, replicas=1)
    _, apart = serve(folder, coming, PolicyChoice("polyserve", {}, "auto", {"mode": "pd", "tiers": [slo.tpot]}), model)
    left = {e.id: e.at for e in apart if isinstance(e, HandedOff)}
    came = [e for e in apart if isinstance(e, Transferred)]
    mine, other = outputs(apart), outputs(alone)
    took = sorted(1e3 * (e.at - left[e.id]) for e in came)
    return {
        "requests": MOVED, "moved": len(came), "equal": sum(mine[id] == other[id] for id in other),
        "transfer_ms": {"p50": float(np.median(took)), "max": took[-1]},
        "kib": sum(e.size for e in came) / len(came) / 1024,
        "met": sum(e.verdict.met for e in apart if isinstance(e, Finished)),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--rate", type=float, default=4.0, help="requests/s")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    folder = bundled_model.ensure()
    model = fitted(folder)
    decode = model.step_time(Shape(1, 1, 150))
    prefill = model.step_time(Shape().plus(sum(PROMPT) // 2, 0))
    slos = {
        name: SLO(ttft=PREFILLS * prefill, tpot=steps_ * decode)
        for name, steps_ in (("tight", TIGHT), ("loose", LOOSE))
    }
    print(f"decode step {1e3 * decode:.1f} ms, prefill {1e3 * prefill:.0f} ms: {slos}", flush=True)
    tiers = [slos["tight"].tpot, slos["loose"].tpot]
    systems = {
        "polyserve": PolicyChoice("polyserve", {}, "auto", {"mode": "co", "tiers": tiers}),
        "CO-Chunk, least_loaded": PolicyChoice("sarathi", {"budget": 128}, "least_loaded", {}),
    }
    kept: dict[str, Any] = {"rate": args.rate, "seconds": args.seconds, "rows": []}
    for seed in range(1, args.seeds + 1):
        coming = flipping(slos, args.rate, args.seconds, seed)
        for name in list(systems)[:: 1 if seed % 2 else -1]:
            began, events = serve(folder, coming, systems[name], model)
            roles = [
                (round(e.at - began, 1), e.id, f"{e.role.kind} {e.role.tier}".strip())
                for e in events if isinstance(e, Assigned)
            ]  # fmt: skip
            row = {"system": name, "seed": seed, **by_phase(coming, events, args.seconds)}
            print(json.dumps(row), roles, flush=True)
            kept["rows"].append({**row, "roles": roles})
    print("| system | " + " | ".join(f"{t} {p}" for t in slos for p in ("before", "during", "after")) + " |")
    print("|---" * 7 + "|")
    for name in systems:
        cells = []
        for tier in slos:
            for phase in ("before", "during", "after"):
                own = [r.get(f"{tier} {phase}", [0, 0]) for r in kept["rows"] if r["system"] == name]
                met, came = (sum(column) for column in zip(*own, strict=True))
                cells.append(f"{100 * met / max(1, came):.0f} % of {came}")
        print(f"| {name} | " + " | ".join(cells) + " |")
    kept["moved"] = moved(folder, model, slos["loose"])
    print(json.dumps(kept["moved"]))
    if args.json:
        args.json.write_text(json.dumps(kept, indent=2) + "\n")


if __name__ == "__main__":
    main()
