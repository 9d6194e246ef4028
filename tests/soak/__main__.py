"""A server under load and faults for a while, and what must hold meanwhile.

    python -m tests.soak [--minutes 30] [--seed 1] [--only torch] [--json soak.json] [--folder FOLDER]

Engines in turn: simulated with two replicas and the policies one after another, the bundled model, two Ray actors, and
a gateway over three stub servers.
Three tenants offer 0.5, 1.0 and 1.5 times what a machine of two cores does with these; one of them states SLOs that are
lies. Faults come at even distances, drawn from the seed. With `--minutes` below 10 there is one server of each kind.

Exit status 1 when something did not hold: offered = finished + in flight, each second; no request fails but by a fault
that was injected; at rest all KV is free and descriptors are back; the log stays below 1 MB a minute and holds no other
traceback; SIGTERM ends the process within the drain and 10 s, and nothing is left over. Times (of /health, between the
tokens of a stream, outside of what stops the server), memory and attainment beside the hostile tenant are reported.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import aiohttp

from rubato_torch import bundled_model
from tests.soak import faults, fleet
from tests.soak.clients import Seen, load, metrics, probe
from tests.soak.faults import Fault
from tests.soak.server import DRAIN_SECONDS, KEYS, Server

CLOSE_SECONDS = 10.0  # after the drain, in which the process has promised to end
KEPT_ALIVE = 7.0  # seconds after which no connection that is between two requests is left
MOST_LOG = 1e6  # bytes a minute
TRACEBACKS = 2  # that a fault may leave in the log
SPARE_DESCRIPTORS = 8
WARM_UP = 0.5  # of a segment, before memory is looked at
STALL_SECONDS = 5


@dataclass(frozen=True)
class Segment:
    """One server: its configuration, requests a second at level 1, seconds, and faults of its own, each once."""

    name: str
    config: Mapping[str, Any]
    rate: float
    seconds: float
    own: tuple[Fault, ...] = ()
    anywhere: tuple[Fault, ...] = faults.ANYWHERE
    every: float = 12.0  # seconds between faults
    hostile: bool = True


@dataclass
class Result:
    segment: str
    faults: list[str] = field(default_factory=list)
    seen: Seen = field(default_factory=Seen)
    figures: dict[str, float] = field(default_factory=dict)


def config(policy: str, engine: Mapping[str, Any], **more: Any) -> dict[str, Any]:
    return {
        "policy": policy, "engine": engine, "served_name": "soak", "stall_seconds": STALL_SECONDS,
        "step_timeout_seconds": 5, "tiers": {"chat": {"ttft_ms": 2000, "tpot_ms": 200}}, "default_tier": "chat",
        "tenants": {name: {"keys": [key], **({"tiers": ["chat"]} if name == "shop" else {})}
                    for name, key in KEYS.items()},
        **more,
    }  # fmt: skip


def simulated(policy: str, seconds: float, **more: Any) -> Segment:
    engine: dict[str, Any] = {"kind": "tests.soak.engine", "faults": "", "max_num_seqs": 32}
    if policy == "adaserve":
        engine["drafter"] = {"alpha": 0.7}
    settings = {"latency": {"kind": "affine", "k": [5e-4, 0.0], "b": [0.02, 0.0]}, "replicas": 2}
    own: tuple[Fault, ...] = (faults.failing_step, faults.hanging_step)
    if policy == "ascendra":  # needs both of its replicas
        own = (faults.failing_step,)
        settings["router"] = {"name": "auto", "groups": "1L1H"}
    return Segment(f"simulated, {policy}", config(policy, engine, **settings), 12.0, seconds, own, **more)


def real(policy: str, seconds: float) -> Segment:
    engine = {"kind": "torch", "kv_gib": 0.5, "max_num_seqs": 16}
    return Segment(f"torch, {policy}", config(policy, engine, model=str(bundled_model.ensure())), 1.2, seconds)


def on_ray(policy: str, seconds: float) -> Segment:
    settings = {"latency": {"kind": "affine", "k": [5e-4, 0.0], "b": [0.02, 0.0]}, "replicas": 2}
    own = (faults.napping_actor, faults.frozen_actor if policy == "edf" else faults.killed_actor)
    engine = {"kind": "simulated", "max_num_seqs": 32}
    return Segment(f"ray, {policy}", config(policy, engine, fleet={"kind": "ray"}, **settings), 8.0, seconds, own)


def gateway(policy: str, seconds: float) -> Segment:
    """A gateway over three stub servers; its own client's faults and those of the servers."""
    own = fleet.FAULTS if seconds > 200.0 else (fleet.silent_link, fleet.killed_server)
    clients = (faults.slow_clients, faults.cancels, faults.reconnects, faults.infeasible, faults.edges)
    made = config(policy, {"kind": "simulated"}, stubs=3)
    del made["engine"]
    return Segment(f"gateway, {policy}", made, 10.0, seconds, own, clients)


def segments(minutes: float) -> list[Segment]:
    third = minutes * 20.0
    if minutes < 10:
        return [simulated("polyserve", third), real("edf", third), on_ray("edf", third), gateway("edf", third)]
    policies = ("edf", "polyserve", "slos_serve", "sa", "adaserve", "ascendra")
    beside = [simulated("edf", 60.0, hostile=on, anywhere=()) for on in (False, True)]
    return [
        *(simulated(policy, (third - 120.0) / len(policies)) for policy in policies),
        *(Segment(f"{s.name}, {'hostile tenant' if s.hostile else 'no hostile tenant'}, no faults", s.config, 8.0, 60.0,
                  (), (), hostile=s.hostile) for s in beside),
        real("edf", third),
        on_ray("edf", third / 2),
        on_ray("polyserve", third / 2),
        gateway("edf", third / 2),
        gateway("polyserve", third / 2),
    ]  # fmt: skip


async def run(segment: Segment, seed: int, folder: Path) -> Result:
    """Start, load, disturb, wait until nothing is in flight, end."""
    result, rng = Result(segment.name), Random(f"{segment.name} {seed}")
    settings = dict(segment.config)
    if "faults" in settings.get("engine", {}):
        settings["engine"] = {**settings["engine"], "faults": str(folder)}
    kind = fleet.Fleet if "stubs" in settings else Server
    server = await asyncio.to_thread(kind, settings, folder)
    try:
        await load(server, segment.rate, 3.0, seed, Seen())  # what is loaded at the first request is loaded
        await asyncio.sleep(KEPT_ALIVE)
        base = server.descriptors()
        watching = asyncio.create_task(probe(server, result.seen))
        loading = asyncio.create_task(load(server, segment.rate, segment.seconds, seed, result.seen, segment.hostile))
        began = time.monotonic()
        for fault in _drawn(segment, rng):
            at = began + segment.every * (len(result.faults) + 1)
            if at > began + segment.seconds - segment.every / 2:
                break
            await asyncio.sleep(max(0.0, at - time.monotonic()))
            result.faults.append(fault.__name__)
            try:
                await fault(server, rng, result.seen)
            except OSError as error:  # it does not answer any more
                result.seen.broken(f"{fault.__name__}: {type(error).__name__} {error}")
            if server.process.poll() is not None:
                raise RuntimeError(f"the server ended in {fault.__name__}: {server.log[-2000:]}")
        await loading
        watching.cancel()
        await _check_rest(server, base, result)
        seconds = time.monotonic() - began
    finally:
        if sys.exc_info()[0] is not None:
            server.kill()
    await asyncio.to_thread(_check_end, server, seconds, result)
    return result


def _drawn(segment: Segment, rng: Random) -> Sequence[Fault]:
    """Its own, the last of them late, for a replica is lost then; between them others, none twice in a row."""
    count = int(segment.seconds / segment.every)
    pool: list[Fault] = []
    while segment.anywhere and len(pool) < count:
        pool += rng.sample(segment.anywhere, len(segment.anywhere))
    if not segment.own:
        return pool
    first, *last = segment.own
    chosen = pool[: max(0, count - 1 - len(segment.own))]
    return [first, *chosen, *last]


async def _check_rest(server: Server, base: int, result: Result) -> None:
    async with aiohttp.ClientSession() as http:
        until = time.monotonic() + 60.0
        while (value := await metrics(server, http))("rubato_requests_in_flight"):
            if time.monotonic() > until:
                result.seen.broken(f"{value('rubato_requests_in_flight')} requests in flight at rest")
                break
            await asyncio.sleep(0.2)
        free, total = value("rubato_kv_blocks_free"), value("rubato_kv_blocks_total")
        if free != total:
            result.seen.broken(f"at rest {free} of {total} KV blocks are free")
        result.figures["offered"] = value("rubato_requests_offered_total")
        result.figures["log lines dropped"] = value("rubato_log_lines_dropped_total")
        result.figures["listener errors"] = value("rubato_listener_errors_total")
    until = time.monotonic() + 3 * KEPT_ALIVE
    while server.descriptors() > base + SPARE_DESCRIPTORS and time.monotonic() < until:  # noqa: ASYNC110 - of another process
        await asyncio.sleep(0.5)
    result.figures["descriptors more than at first"] = server.descriptors() - base
    if server.descriptors() > base + SPARE_DESCRIPTORS:
        result.seen.broken(f"{server.descriptors()} descriptors at rest, {base} at first")


def _check_end(server: Server, seconds: float, result: Result) -> None:
    seen, log = result.seen, server.log
    status, took = server.end()
    tail = server.log[len(log) :][-500:]
    if status != 0:
        seen.broken(f"exit status {status}: {tail}")
    if took > DRAIN_SECONDS + CLOSE_SECONDS:
        seen.broken(f"SIGTERM took {took:.1f} s")
    until = time.monotonic() + 10.0
    while (left := server.left()) and time.monotonic() < until:
        time.sleep(0.2)
    if left:
        seen.broken(f"left over: {left}")
        server.kill()
    per_minute = server.log_bytes() / max(1.0, seconds / 60.0)
    if per_minute > MOST_LOG:
        seen.broken(f"{per_minute:.0f} bytes of log a minute")
    tracebacks = server.log.count("Traceback (most recent call last)")
    if tracebacks > TRACEBACKS * len([f for f in result.faults if f in ("failing_step", "hanging_step", "disk_full")]):
        seen.broken(f"{tracebacks} tracebacks in the log: {_last_lines(server.log)}")
    half = [mib for at, mib in seen.rss if at >= seen.rss[0][0] + WARM_UP * (seen.rss[-1][0] - seen.rss[0][0])]
    result.figures |= {
        "seconds to end": round(took, 1),
        "log bytes a minute": round(per_minute),
        "longest /health, s": round(seen.worst(seen.health), 2),
        "longest gap between tokens, s": round(seen.worst(seen.gaps), 2),
        "memory at half time, MiB": half[0],
        "memory at the end, MiB": half[-1],
    }


def _last_lines(log: str) -> list[str]:
    """Of each traceback."""
    found = []
    for block in log.split("Traceback (most recent call last)")[1:]:
        lines = [line for line in block.splitlines()[1:] if line and not line.startswith(" ")]
        found.append(lines[0] if lines else "")
    return found[:5]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0] if __doc__ else "")
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", default="", help="the servers with this in their name (default: all)")
    parser.add_argument("--json", type=Path, default=None)
    parser.add_argument("--folder", type=Path, default=None, help="for the servers' files (default: a temporary one)")
    args = parser.parse_args()
    results = []
    with tempfile.TemporaryDirectory() as temporary:
        for number, segment in enumerate(s for s in segments(args.minutes) if args.only in s.name):
            print(f"== {segment.name}, {segment.seconds:.0f} s, seed {args.seed}", flush=True)
            result = asyncio.run(run(segment, args.seed, (args.folder or Path(temporary)) / str(number)))
            results.append(result)
            outcomes = {name: dict(of) for name, of in result.seen.outcomes.items() if of}
            print(f"   faults: {', '.join(result.faults)}\n   {outcomes}\n   met: {dict(result.seen.met)}")
            print(f"   {result.figures}")
            for violation in result.seen.violations:
                print(f"   DID NOT HOLD: {violation}", flush=True)
    if args.json:
        rows = [
            {"segment": r.segment, "faults": r.faults, "outcomes": r.seen.outcomes, "met": r.seen.met,
             "figures": r.figures, "violations": r.seen.violations}
            for r in results
        ]  # fmt: skip
        args.json.write_text(json.dumps({"minutes": args.minutes, "seed": args.seed, "segments": rows}, indent=1))
    return int(any(result.seen.violations for result in results))


if __name__ == "__main__":
    sys.exit(main())
