"""A server under load and faults for a while, and what must hold meanwhile.

    python -m tests.soak [--minutes 30] [--seed 1] [--only torch] [--json soak.json] [--folder FOLDER]

Engines in turn: simulated with two replicas and the policies one after another, the bundled model, two Ray actors, and
a gateway over four stub servers, one of which lies, with an endpoint picker over the same (`tests.soak.hostile`).
Three tenants offer 0.5, 1.0 and 1.5 times what a machine of two cores does with these; one of them states SLOs that are
lies. Faults come at even distances, drawn from the seed. With `--minutes` below 10 there is one server of each kind.

Exit status 1 when something did not hold: finished <= offered <= finished + in flight, each second; each request ends
once; no request fails but by a fault that was injected; what the metrics count of the tenants that behave is what their
clients saw; at rest all KV is free and descriptors are back; memory does not grow by more than a quarter in the second
half; the log stays below 1 MB a minute and holds no other traceback; SIGTERM ends the process within the drain and
10 s, and nothing is left over. Of a gateway: the tenants that behave attain, of all they offer, at most 10 points less
than in a quiet phase before, of the same load without faults and without the hostile tenant.
Times (of /health, between the tokens of a stream, outside of what stops the server) are reported.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import aiohttp

from rubato.measure.confidence import wilson
from rubato_torch import bundled_model
from tests.soak import faults, fleet
from tests.soak.clients import Seen, load, metrics, probe
from tests.soak.faults import Fault
from tests.soak.hostile import harass
from tests.soak.server import DRAIN_SECONDS, KEYS, Server

CLOSE_SECONDS = 10.0  # after the drain, in which the process has promised to end
KEPT_ALIVE = 7.0  # seconds after which no connection that is between two requests is left
MOST_LOG = 1e6  # bytes a minute
TRACEBACKS = 2  # that a fault may leave in the log
SPARE_DESCRIPTORS = 8
WARM_UP = 0.5  # of a segment, before memory is looked at
MOST_GROWTH, SPARE_MIB = 1.25, 64
LIES = 0.15  # of the answers of the server that lies
GOOD = ("shop", "lab")
POINTS = 0.10  # of attainment, that faults may cost
MIN_QUIET = 0.9  # in SLO in the quiet phase: else the machine is too slow to tell
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
    quiet: float = 0.0  # seconds of the same load before, without faults


@dataclass
class Result:
    segment: str
    faults: list[str] = field(default_factory=list)
    seen: Seen = field(default_factory=Seen)
    figures: dict[str, float | list[float]] = field(default_factory=dict)


def config(policy: str, engine: Mapping[str, Any], **more: Any) -> dict[str, Any]:
    return {
        "policy": policy, "engine": engine, "served_model_name": "soak", "stall_seconds": STALL_SECONDS,
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
    """A gateway over four stub servers; its own clients' faults and those of the servers. The one that lies has no link
    where the policy's router does without: there the gateway believes what its answers say."""
    own = fleet.FAULTS if seconds > 200.0 else (fleet.silent_link, fleet.killed_server)
    clients = (faults.slow_clients, faults.cancels, faults.reconnects, faults.infeasible, faults.edges)
    made = config(policy, {"kind": "simulated"}, stubs=4, linked=3 if policy == "edf" else 4)
    del made["engine"]
    quiet = max(20.0, seconds / 4)
    return Segment(f"gateway, {policy}", made, 10.0, seconds, own, clients, quiet=quiet)


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
    kind: type[Server] = fleet.Fleet if "stubs" in settings else Server
    server = await kind.start(settings, folder, result.seen)
    before = Seen()
    try:
        await load(server, segment.rate, 3.0, seed, before)  # what is loaded at the first request is loaded
        await asyncio.sleep(KEPT_ALIVE)
        base = [one.descriptors() for one in (server, *server.beside)]
        watching = asyncio.create_task(probe(server, result.seen))
        quiet = Seen()
        if segment.quiet:
            await load(server, segment.rate, segment.quiet, seed, quiet, hostile=False)
        tasks = [load(server, segment.rate, segment.seconds, seed, result.seen, segment.hostile)]
        if isinstance(server, fleet.Fleet):
            server.lies(LIES)
            result.seen.lies, result.seen.may_fail = True, fleet.LOST
            tasks.append(harass(server, segment.seconds, Random(f"harass {seed}"), result.seen))
        loading = asyncio.gather(*tasks)
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
        if isinstance(server, fleet.Fleet):
            server.lies(0.0)
            result.seen.others.update(server.told)
            _check_attainment(quiet, result)
        await _check_rest(server, base, (before, quiet, result.seen), result)
        seconds = time.monotonic() - began
    finally:
        if sys.exc_info()[0] is not None:
            server.kill()
    for one in (*server.beside, server):
        await asyncio.to_thread(_check_end, one, seconds, result, "picker: " if one is not server else "")
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


def _check_attainment(quiet: Seen, result: Result) -> None:
    """Of the tenants that behave, over all that they offered: whatever is no answer in time is a miss."""
    result.seen.violations += quiet.violations
    shares = []
    for phase, seen in (("quiet", quiet), ("under faults", result.seen)):
        met, sent = sum(seen.met[name] for name in GOOD), sum(seen.sent[name] for name in GOOD)
        low, high = wilson(met, sent)
        shares.append(met / sent)
        result.figures |= {f"{phase}: in SLO": met, f"{phase}: offered": sent}
        result.figures[f"{phase}: % [95 %]"] = [round(100 * share, 1) for share in (met / sent, low, high)]
    if shares[0] < MIN_QUIET:
        result.seen.broken(f"in the quiet phase {shares[0]:.1%} are in SLO: the machine is too slow to tell")
    if shares[1] < shares[0] - POINTS:
        result.seen.broken(f"under faults {shares[1]:.1%} are in SLO, in the quiet phase {shares[0]:.1%}")


async def _check_rest(server: Server, base: Sequence[int], all_seen: Sequence[Seen], result: Result) -> None:
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
        offered, ended = value("rubato_requests_offered_total"), value("rubato_requests_finished_total")
        result.figures["offered"] = offered
        if offered != ended:
            result.seen.broken(f"at rest {offered} offered, {ended} finished")
        _check_metrics(value, all_seen, result)
        result.figures["log lines dropped"] = value("rubato_log_lines_dropped_total")
        result.figures["listener errors"] = value("rubato_listener_errors_total")
    for one, first in zip((server, *server.beside), base, strict=True):
        until = time.monotonic() + 3 * KEPT_ALIVE
        while one.descriptors() > first + SPARE_DESCRIPTORS and time.monotonic() < until:  # noqa: ASYNC110 - of another process
            await asyncio.sleep(0.5)
        result.figures[f"{one.verb}: descriptors more than at first"] = one.descriptors() - first
        if one.descriptors() > first + SPARE_DESCRIPTORS:
            result.seen.broken(f"{one.verb}: {one.descriptors()} descriptors at rest, {first} at first")


def _check_metrics(value: Callable[..., float], all_seen: Sequence[Seen], result: Result) -> None:
    """What is counted of the tenants that behave is what their clients saw. An engine may have completed what its
    client lost the last bytes of."""
    for name in GOOD:
        sent = sum(seen.sent[name] for seen in all_seen)
        if (offered := value("rubato_requests_offered_total", tenant=name)) != sent:
            result.seen.broken(f"{name}: {sent} requests sent, {offered} counted as offered")
        outcomes = sum((seen.outcomes[name] for seen in all_seen), Counter[str]())
        others = outcomes.total() - outcomes["completed"]
        completed = value("rubato_requests_finished_total", tenant=name, outcome="completed")
        met = value("rubato_slo_met_total", tenant=name, dimension="all")
        for what, saw, counted in (
            ("completed", outcomes["completed"], completed),
            ("in SLO", sum(seen.met[name] for seen in all_seen), met),
        ):
            if not saw <= counted <= saw + others:
                result.seen.broken(f"{name}: {saw} {what} by its clients, {counted} by the metrics, {others} failed")


def _check_events(log: Path, result: Result) -> None:
    """Each request that was offered ends once."""
    found: dict[bytes, Counter[bytes]] = {b"Offered": Counter(), b"Finished": Counter()}
    for line in log.read_bytes().splitlines():
        if kind := re.match(rb'{"kind":"(Offered|Finished)",.*?"id":"(.*?)"', line):
            found[kind[1]][kind[2]] += 1
    if found[b"Offered"] != found[b"Finished"] or set(found[b"Offered"].values()) != {1}:
        odd = [id for id, ends in found[b"Finished"].items() if ends != 1 or found[b"Offered"][id] != 1]
        open_ = list(found[b"Offered"] - found[b"Finished"])
        result.seen.broken(f"not offered once and ended once: {odd[:3]} {open_[:3]}")


def _check_end(server: Server, seconds: float, result: Result, name: str) -> None:
    seen, log = result.seen, server.log
    status, took = server.end()
    tail = server.log[len(log) :][-500:]
    if status != 0:
        seen.broken(f"{name}exit status {status}: {tail}")
    if took > DRAIN_SECONDS + CLOSE_SECONDS:
        seen.broken(f"{name}SIGTERM took {took:.1f} s")
    until = time.monotonic() + 10.0
    while (left := server.left()) and time.monotonic() < until:
        time.sleep(0.2)
    if left:
        seen.broken(f"{name}left over: {left}")
        server.kill()
    per_minute = server.log_bytes() / max(1.0, seconds / 60.0)
    if per_minute > MOST_LOG:
        seen.broken(f"{name}{per_minute:.0f} bytes of log a minute")
    tracebacks = server.log.count("Traceback (most recent call last)")
    if tracebacks > TRACEBACKS * len([f for f in result.faults if f in ("failing_step", "hanging_step", "disk_full")]):
        seen.broken(f"{name}{tracebacks} tracebacks in the log: {_last_lines(server.log)}")
    if "disk_full" not in result.faults:
        _check_events(server.event_log, result)
    (first, _), (last, end) = server.memory[0], server.memory[-1]
    half = next(mib for at, mib in server.memory if at >= first + WARM_UP * (last - first))
    if end > max(MOST_GROWTH * half, half + SPARE_MIB):
        seen.broken(f"{name}{half} MiB at half time, {end} at the end")
    result.figures |= {
        f"{name}seconds to end": round(took, 1),
        f"{name}log bytes a minute": round(per_minute),
        f"{name}memory at half time, MiB": half,
        f"{name}memory at the end, MiB": end,
        "longest /health, s": round(seen.worst(seen.health), 2),
        "longest gap between tokens, s": round(seen.worst(seen.gaps), 2),
    }


def _last_lines(log: str) -> list[str]:
    """Of each traceback."""
    found = []
    for block in log.split("Traceback (most recent call last)")[1:]:
        lines = [line for line in block.splitlines()[1:] if line and not line.startswith(" ")]
        found.append(lines[0] if lines else "")
    return found[:5]


def _measured(results: Sequence[Result], seed: int) -> dict[str, Any]:
    """What a file of docs/measurements says of a run, but for its date, commit and machine."""
    values = {
        one.segment: {
            "faults": len(one.faults), **one.figures, "violations": len(one.seen.violations),
            **{name: dict(counts) for name, counts in one.seen.outcomes.items() if counts}, "others": one.seen.others,
        }
        for one in results
    }  # fmt: skip
    return {"command": " ".join(["python -m tests.soak", *sys.argv[1:]]), "seeds": [seed], "values": values}


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
            print(f"   {dict(sorted(result.seen.others.items()))}\n   {result.figures}")
            for violation in result.seen.violations:
                print(f"   DID NOT HOLD: {violation}", flush=True)
    if args.json:
        args.json.write_text(json.dumps(_measured(results, args.seed), indent=1) + "\n")
    return int(any(result.seen.violations for result in results))


if __name__ == "__main__":
    sys.exit(main())
