"""Whatever routers and schedulers decide, and whatever breaks: a request offered is in flight or has ended, once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from rubato.core.events import Event, Finished, HandedOff, Tokens
from rubato.core.interfaces import Dispatch, SeqView, View
from rubato.core.plan import Limits, Plan
from rubato.core.request import Request
from rubato.policies import load
from rubato.policy_kit.fair_share import FairShare
from rubato.replica.plan_check import PlanError
from tests.fleet.routers import Act, lost, moved, serve
from tests.kit import request
from tests.kit.fleets import LINK, Breaks, Elsewhere, breaks, cancels, vanishes

LIMITS = Limits(max_num_seqs=4, max_num_batched_tokens=32, max_model_len=200, kv_blocks=12, block_size=8, max_running=3)
MOVES = 40  # hand-offs and recalls of a run, after which it settles


@dataclass
class Chance:
    """Draws from one stream; `moves` left for the run."""

    rng: np.random.Generator
    moves: int = MOVES

    def of(self, likely: float) -> bool:
        return bool(self.rng.random() < likely)

    def some(self, ids: Sequence[str], likely: float) -> list[str]:
        chosen = [id for id in ids if self.moves > 0 and self.of(likely)]
        self.moves -= len(chosen)
        return chosen


class AnyRouter:
    """Places, holds, rejects, demotes and recalls at random; now and then it says what is impossible."""

    needs: ClassVar[frozenset[str]] = frozenset({"recall"})

    def __init__(self, chance: Chance, wants: frozenset[str], wrong: float) -> None:
        self.chance, self.wants, self.wrong = chance, wants, wrong

    def observe(self, events: Sequence[Event]) -> None: ...

    def place(self, held: Sequence[SeqView], fleet: Sequence[View], now: float) -> Dispatch:
        chance = self.chance
        if chance.moves > 0 and chance.of(self.wrong):
            chance.moves -= 1
            raise PlanError("drawn to fail")
        place, reject, demote = {}, {}, []
        for seq in held:
            handoff = seq.request.handoff
            able = [v.id for v in fleet if handoff is None or not seq.cached or v.id != handoff.source]
            if not able:
                reject[seq.id] = "nowhere to go"
            elif chance.of(0.7):
                place[seq.id] = able[int(chance.rng.integers(len(able)))]
            elif chance.of(0.05):
                reject[seq.id] = "drawn"
            if not seq.best_effort and seq.id not in reject and chance.of(0.2):
                demote.append(seq.id)
        recall: Any = {id: ("waiting", "best_effort")[chance.of(0.5)] for id in chance.some([v.id for v in fleet], 0.2)}
        return Dispatch(place, reject, demote, recall, now + 0.01)


class AnyScheduler:
    """Hands off at random, with KV and without, beside what `vllm` plans; now and then a plan is impossible."""

    needs: ClassVar[frozenset[str]] = frozenset({"handoff", "kv_transfer"})

    def __init__(self, chance: Chance, wrong: float) -> None:
        self.chance, self.wrong = chance, wrong
        self.inner = load("vllm")

    def observe(self, events: Sequence[Event]) -> None: ...

    def plan(self, view: View) -> Plan:
        chance = self.chance
        if chance.moves > 0 and chance.of(self.wrong):
            chance.moves -= 1
            return Plan(preempt=("nobody",))
        plan = self.inner.plan(view)
        planned = {w.seq for w in plan.work if chance.of(0.5)}  # the others may leave in its place
        gone = chance.some([s.id for s in [*view.running, *view.waiting] if s.id not in planned], 0.15)
        gone = [id for id in gone if id not in plan.preempt and id not in plan.drop]
        if not gone:
            return plan
        without = frozenset(id for id in gone if chance.of(0.5))
        return plan._replace(
            work=tuple(w for w in plan.work if w.seq not in gone) if not plan.decode_all else (),
            decode_all=False,
            handoff=dict.fromkeys(gone, "offloaded"),
            without_kv=without,
        )


def some_request(i: int, at: float, tight: bool, grouped: bool) -> Request:
    asked = request(f"q{i}", 20 if grouped else 5 + 3 * i, ttft=0.05 if tight else None, arrival=at, most=10)
    return replace(asked, tenant="ab"[i % 2], group=f"g{i // 3}" if grouped else "")


TIMES = st.sampled_from([0.0, 0.001, 0.004, 0.0041, 0.02, 0.1])
REPLICAS = st.integers(0, 2)


@given(
    seed=st.integers(0, 2**32 - 1),
    arrivals=st.lists(TIMES, min_size=1, max_size=12),
    tight=st.lists(st.booleans(), min_size=12, max_size=12),
    grouped=st.booleans(),
    cancelled=st.lists(st.tuples(TIMES, st.integers(0, 11)), max_size=4),
    broken=st.lists(st.tuples(TIMES, REPLICAS), max_size=2),
    gone=st.lists(st.tuples(TIMES, REPLICAS), max_size=3),
    steps=st.booleans(),
    wrong=st.sampled_from([0.0, 0.0, 0.1]),
    fair=st.booleans(),
)
def test_every_request_ends_once_whatever_happens(
    seed: int, arrivals: list[float], tight: list[bool], grouped: bool, cancelled: list[tuple[float, int]],
    broken: list[tuple[float, int]], gone: list[tuple[float, int]], steps: bool, wrong: float, fair: bool,
) -> None:  # fmt: skip
    """`serve` holds the books at each event: offered = finished + in flight, KV conserved; here that what came out is
    what was counted, and that without losses and errors everybody is served who was not refused or left."""
    chance = Chance(np.random.default_rng(seed))
    requests = [some_request(i, at, tight[i], grouped) for i, at in enumerate(sorted(arrivals))]
    acts: list[Act] = [(at, cancels(f"q{i}")) for at, i in cancelled]
    acts += [(at, breaks(i)) for at, i in broken] + [(at, vanishes(i)) for at, i in gone]
    events = serve(
        "simulated", AnyRouter(chance, frozenset({"step"} if steps else ()), wrong), requests, replicas=3,
        scheduler=lambda: AnyScheduler(chance, wrong), acts=acts, limits=LIMITS, host=Elsewhere, engine=Breaks,
        link=LINK, fair=FairShare(window=2) if fair else None,
    )  # fmt: skip
    out: Counter[str] = Counter()
    for event in events:
        if isinstance(event, Tokens):
            out[event.id] += event.tokens
        elif isinstance(event, Finished):
            assert event.output == out[event.id]
            if event.outcome == "completed":
                assert event.output == 10
            if not (broken or gone or wrong):
                assert event.outcome in ("completed", "refused", "cancelled")


def test_these_runs_see_what_they_are_for() -> None:
    """Of one load, over a few seeds: hand-offs with KV and without, recalls, and requests that outlive a replica."""
    seen: Counter[str] = Counter()
    for seed in range(6):
        chance = Chance(np.random.default_rng(seed))
        requests = [some_request(i, 0.002 * i, i % 2 > 0, False) for i in range(8)]
        events = serve(
            "simulated", AnyRouter(chance, frozenset(), 0.0), requests, replicas=3,
            scheduler=lambda chance=chance: AnyScheduler(chance, 0.0), acts=[(0.03, vanishes(0))], limits=LIMITS,
            host=Elsewhere, engine=Breaks, link=LINK,
        )  # fmt: skip
        seen.update(f"{reason}, {'with' if cached else 'no'} KV" for _, reason, cached in moved(events))
        seen["lost"] += len(lost(events))
        moves = [e.request.handoff for e in events if isinstance(e, HandedOff)]
        seen["moved twice"] += any(handoff is not None and handoff.hops > 1 for handoff in moves)
    assert {"offloaded, with KV", "offloaded, no KV", "recalled, no KV"} <= set(seen)
    assert seen["lost"] > 0
    assert seen["moved twice"] > 0
