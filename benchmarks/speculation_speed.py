"""Tokens per second with AdaServe's trees and without drafts, live: the bundled model in this process.

    python benchmarks/speculation_speed.py [--trace FILE] [--at 1,2,4,8,16] [--rounds 10] [--store 0] [--json FILE]

Chat, code and summaries in equal thirds, no prompt twice, 128 output tokens at most, greedy. In a round so many clients
send one request after the other until the round's are served, first by one system, then by the next, each with an
engine and a learning latency model of its own; which is first turns from round to round. `vllm` is the engine's fastest
path: compiled kernels, no drafts. Output tokens over the seconds of a round, prefill included; the ratio to `vllm` of
the same round, geometric mean with a 95 % interval over rounds. TPOT leaves prefill out where one client is alone.
Beside: accepted tokens a verification, by class. --trace: prompts of a recorded trace with texts (AdaServe's artifact:
1.2 times the unloaded TPOT is code, 50 ms chat, 150 ms summary); else prompts of our own. --store: tokens of earlier
outputs that the suffix drafter keeps; with 0 it knows nothing but a request's own text. Keep the machine quiet.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from rubato.core.clock import WallClock
from rubato.core.events import Event, Finished, Tokens
from rubato.core.replica_options import ReplicaOptions
from rubato.core.request import SLO, Request, Sampling, Stage
from rubato.fleet.build import local_cluster
from rubato.fleet.cluster import Cluster
from rubato.fleet.cluster_options import ClusterOptions, PolicyChoice
from rubato.latency import affine
from rubato.latency.with_drafter import WithLearntDrafter
from rubato.measure.confidence import over_seeds
from rubato.policies import load
from rubato.workloads import traces
from rubato.workloads.prompts import fresh_text
from rubato_torch import Engine, bundled_model
from rubato_torch.drafters.suffix import SuffixDrafter
from rubato_torch.tokenizer import Text

MOST = 128  # output tokens
LONGEST = 1200  # tokens of a prompt
OWN = {"chat": 40, "code": 150, "summary": 600}  # tokens of a prompt of our own
CLASSES = tuple(OWN)
PLAIN = "vllm:budget=1024"
SYSTEMS = (PLAIN, "adaserve")


@dataclass
class Served:
    """What one system did in one round. first, last: when a request's first and last token came out."""

    seconds: float = 0.0
    tokens: dict[str, int] = field(default_factory=dict)
    first: dict[str, float] = field(default_factory=dict)
    last: dict[str, float] = field(default_factory=dict)
    verified: dict[str, int] = field(default_factory=dict)  # steps that verified drafted tokens
    accepted: dict[str, int] = field(default_factory=dict)

    def note(self, event: Tokens) -> None:
        id, now = event.id, event.at
        self.tokens[id] = self.tokens.get(id, 0) + event.tokens
        self.first.setdefault(id, now)
        self.last[id] = now
        if event.tried:
            self.verified[id] = self.verified.get(id, 0) + 1
            self.accepted[id] = self.accepted.get(id, 0) + len(event.accepted)

    @property
    def tpot(self) -> float:
        """Seconds a token after the first, over all requests."""
        later = sum(self.tokens.values()) - len(self.tokens)
        return sum(self.last[id] - self.first[id] for id in self.tokens) / max(1, later)

    def figures(self, classes: dict[str, str]) -> dict[str, Any]:
        return {
            "rate": sum(self.tokens.values()) / self.seconds,
            "tpot": self.tpot,
            "tpot_by": {
                name: sum(self.last[i] - self.first[i] for i in own) / max(1, sum(self.tokens[i] - 1 for i in own))
                for name in CLASSES if (own := [i for i in self.tokens if classes[i] == name])
            },
            "accepted": {
                name: [sum(by.get(i, 0) for i in self.tokens if classes[i] == name)
                       for by in (self.accepted, self.verified, self.tokens)]
                for name in CLASSES
            },
        }  # fmt: skip


def prompts(trace: Path | None, seed: int) -> dict[str, Iterator[str]]:
    """Of each class, texts that all differ."""
    if trace is None:
        rng, seen = np.random.default_rng(seed), set[str]()
        return {name: iter(lambda n=name: fresh_text(n, OWN[n], rng, seen), "") for name in CLASSES}  # type: ignore[misc]
    found: dict[str, dict[str, None]] = {name: {} for name in CLASSES}
    for offer in traces.read(trace).offers:
        found[class_of(offer)][offer.text] = None
    mixed = random.Random(seed)
    return {name: iter(mixed.sample(list(texts), len(texts))) for name, texts in found.items()}


def class_of(offer: traces.TraceRequest) -> str:
    """By what AdaServe's artifact promises it."""
    if offer.tpot_slowdown is not None:
        return "code"
    return "chat" if offer.tpot is not None and offer.tpot < 0.1 else "summary"


def engine(policy: str, store: int, seqs: int = 32) -> Engine:
    """With a drafter where the policy needs one."""
    return engine_with(SuffixDrafter(store) if "draft" in load(policy).needs else None, seqs)


def engine_with(drafter: SuffixDrafter | None, seqs: int = 32) -> Engine:
    return Engine(bundled_model.ensure(), kv_gib=0.7, max_num_seqs=seqs, max_model_len=2048, drafter=drafter)


async def cluster_of(policy: str, store: int, seqs: int = 32) -> Cluster:
    choice = PolicyChoice.parse(policy)
    latency = WithLearntDrafter(affine.Model()) if "draft" in load(choice.policy).needs else affine.Model()
    cluster = local_cluster(
        [engine(choice.policy, store, seqs)], [latency], WallClock(),
        ClusterOptions(choice, ReplicaOptions(slo_rule="mean")),
    )  # fmt: skip
    await cluster.start()
    return cluster


async def served(cluster: Cluster, requests: Sequence[Request], clients: int) -> Served:
    """So many clients, each of which sends its next request when it has the answer to the last."""
    clock, found, waiting = WallClock(), Served(), list(reversed(requests))
    done = asyncio.Event()
    left = len(requests)

    def heard(event: Event) -> None:
        nonlocal left
        if isinstance(event, Tokens):
            found.note(event)
        elif isinstance(event, Finished):
            assert event.outcome == "completed", event
            left -= 1
            if waiting:
                send()
            elif left == 0:
                done.set()

    def send() -> None:
        cluster.offer(replace(waiting.pop(), arrival=clock.now()), heard)

    began = clock.now()
    for _ in range(min(clients, len(requests))):
        send()
    await done.wait()
    found.seconds = clock.now() - began
    return found


def size(clients: int) -> int:
    """Requests of a round: at least one and a half a client, in thirds."""
    return 3 * math.ceil(clients / 2)


def drawn(
    sources: dict[str, Iterator[str]], text: Text, count: int, prefix: str
) -> tuple[list[Request], dict[str, str]]:
    """So many requests, of the classes in turn, and the class of each."""
    found: list[Request] = []
    classes: dict[str, str] = {}
    while len(found) < count:
        name = CLASSES[len(found) % 3]
        ids = text.chat([{"role": "user", "content": next(sources[name])}])
        if len(ids) > LONGEST:
            continue
        id = f"{prefix}-{len(found)}"
        classes[id] = name
        stage, sampling = Stage(len(ids), SLO(), "eos", ids), Sampling(MOST, temperature=0.0)
        found.append(Request(id, (stage,), 0.0, app=name, tenant="bench", sampling=sampling))
    return found, classes


async def measured(args: argparse.Namespace) -> list[dict[str, Any]]:
    clusters = {name: await cluster_of(name, args.store) for name in args.systems}
    text = engine("vllm", 0).text
    rows: list[dict[str, Any]] = []
    sources = prompts(args.trace, args.seed)
    for clients in (4, 1):  # latency models begin with a guess
        requests, _ = drawn(sources, text, size(clients), f"warm{clients}")
        for cluster in clusters.values():
            await served(cluster, requests, clients)
    for clients in args.at:
        for turn in range(args.rounds):
            requests, classes = drawn(sources, text, size(clients), f"{clients}-{turn}")
            order = [args.systems[(turn + i) % len(args.systems)] for i in range(len(args.systems))]
            for name in order:
                found = await served(clusters[name], requests, clients)
                rows.append({"clients": clients, "round": turn, "system": name, **found.figures(classes)})
        if args.json:
            args.json.write_text(json.dumps(rows))
        show(rows, clients, args.systems)
    for cluster in clusters.values():
        await cluster.close()
    return rows


def show(rows: Sequence[dict[str, Any]], clients: int, systems: Sequence[str]) -> None:
    of = {s: [r for r in rows if r["clients"] == clients and r["system"] == s] for s in systems}
    of = {s: sorted(own, key=lambda r: r["round"]) for s, own in of.items()}
    print(f"\n{clients} at once: tokens/s, TPOT; tokens/s and 1/TPOT over {systems[0]}'s; accepted a verification")
    for name, own in of.items():
        base = of[systems[0]]
        speed = over_seeds([math.log(a["rate"] / b["rate"]) for a, b in zip(own, base, strict=True)]).exp()
        tpot = over_seeds([math.log(b["tpot"] / a["tpot"]) for a, b in zip(own, base, strict=True)]).exp()
        by = [
            f"{c} {ratio(own, c):.2f}" + (f" (x {by_class(own, base, c):.2f})" if clients == 1 else "") for c in CLASSES
        ]
        rate, ms = np.median([r["rate"] for r in own]), 1e3 * np.median([r["tpot"] for r in own])
        ratios = [f"{e.value:.2f} [{e.low:.2f}, {e.high:.2f}]" for e in (speed, tpot)]
        print(f"  {name:22} {rate:7.1f} {ms:6.1f} ms ", *ratios, *by, sep="  ", flush=True)


def ratio(rows: Sequence[dict[str, Any]], name: str) -> float:
    accepted, verified = (sum(r["accepted"][name][i] for r in rows) for i in (0, 1))
    return accepted / verified if verified else 0.0


def by_class(own: Sequence[dict[str, Any]], base: Sequence[dict[str, Any]], name: str) -> float:
    """How much faster the decoding of this class's requests is, geometric mean over rounds."""
    logs = [math.log(b["tpot_by"][name] / a["tpot_by"][name]) for a, b in zip(own, base, strict=True)]
    return math.exp(sum(logs) / len(logs))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trace", type=Path)
    parser.add_argument("--at", type=lambda given: [int(c) for c in given.split(",")], default=[1, 2, 4, 8, 16])
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--store", type=int, default=0)
    parser.add_argument("--system", action="append", dest="systems", help=f"default: {' and '.join(SYSTEMS)}")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    args.systems = args.systems or list(SYSTEMS)
    asyncio.run(measured(args))


if __name__ == "__main__":
    main()
