"""Two Ray actors with the simulated engine on the wall clock; one is killed in the middle."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import pytest
import ray

from rubato.core.clock import Clock, WallClock, run_strict
from rubato.core.events import Assigned, Event, Finished, HandedOff, Left, Lost, Placed, Tokens
from rubato.core.interfaces import Dispatch, LatencyModel, LengthPredictor, SeqView, View
from rubato.core.length_prediction import RunningMean
from rubato.core.plan import Limits
from rubato.core.replica_options import ReplicaOptions
from rubato.core.request import Request, Sampling, Stage
from rubato.engines.simulated import WORDS, Engine
from rubato.fleet.cluster import Cluster
from rubato.fleet.cluster_options import ClusterOptions, PolicyChoice
from rubato.fleet.linked_host import EngineParts
from rubato.fleet.ray_host import RayHost, ray_cluster
from tests.kit import Linear, request

LIMITS = Limits(max_num_seqs=8, max_num_batched_tokens=256, max_model_len=500, kv_blocks=200, block_size=16)
SECONDS = 60.0  # after which a test is not merely slow

pytestmark = pytest.mark.slow  # Ray and its processes


def make(clock: Clock) -> tuple[Engine, LatencyModel]:
    return Engine(Linear(0.004, 0.00001), LIMITS, clock, lengths={"talk": (5, 7)}), Linear(0.004, 0.00001)


def broken(clock: Clock) -> tuple[Engine, LatencyModel]:
    class Broken(Engine):
        async def execute(self, batch: object) -> object:  # type: ignore[override]
            raise RuntimeError("the device fell off")

    return Broken(Linear(), LIMITS, clock), Linear()


@pytest.fixture(scope="module", autouse=True)
def a_ray_cluster() -> Iterator[None]:
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, configure_logging=False)
    yield
    ray.shutdown()


EDF = PolicyChoice("edf")


class Fleet:
    """A started cluster, its events, and the books checked at each: run it under `run_strict`."""

    def __init__(
        self,
        *makers: Callable[[Clock], EngineParts],
        choice: PolicyChoice = EDF,
        lengths: LengthPredictor | None = None,
    ) -> None:
        self.cluster: Cluster = ray_cluster(makers, WallClock(), ClusterOptions(choice, ReplicaOptions(lengths)))
        self.events: list[Event] = []
        self.cluster.listen(self.hear)

    def hear(self, event: Event) -> None:
        assert self.cluster.offered == self.cluster.finished + self.cluster.in_flight
        self.events.append(event)

    def tokens(self, number: int) -> Callable[[Event], bool]:
        """At the first event with so many tokens out."""
        return lambda _: sum(isinstance(e, Tokens) for e in self.events) >= number

    async def run(
        self, requests: list[Request], kill_at: Callable[[Event], bool] | None = None, cancel: Sequence[str] = (),
        victim: str = "r0",
    ) -> None:  # fmt: skip
        """Offer all, kill the victim at the first such event and cancel these at once, wait for the end: then nothing
        is left."""
        clock, cluster = self.cluster.clock, self.cluster
        await cluster.start()
        killed = asyncio.Event()

        def watch(event: Event) -> None:
            if kill_at is not None and not killed.is_set() and kill_at(event):
                killed.set()
                host = cluster.hosts[victim]
                assert isinstance(host, RayHost)
                ray.kill(host.actor)
                for id in cancel:
                    cluster.cancel(id)

        cluster.listen(watch)
        for r in requests:
            cluster.offer(Request(r.id, r.stages, clock.now(), sampling=r.sampling, group=r.group))
        await asyncio.wait_for(cluster.drain(), SECONDS)
        assert killed.is_set() == (kill_at is not None)
        assert cluster.in_flight == 0
        assert not [view.id for view in self.views().values() if view.known or view.moving]
        await cluster.close()

    def views(self) -> dict[str, View]:
        return {id: host.view() for id, host in self.cluster.hosts.items()}

    def ends(self) -> dict[str, Finished]:
        found = [e for e in self.events if isinstance(e, Finished)]
        assert max(Counter(e.id for e in found).values()) == 1
        return {e.id: e for e in found}

    def text(self, id: str) -> str:
        return "".join(e.text for e in self.events if isinstance(e, Tokens) and e.id == id)


def test_requests_of_a_killed_replica_go_on_elsewhere() -> None:
    fleet = Fleet(make, make)
    requests = [request(f"q{i}", 40, ttft=5.0, tpot=0.5, most=60) for i in range(12)]
    run_strict(fleet.run(requests, kill_at=fleet.tokens(100)))
    placed = Counter(e.replica for e in fleet.events if isinstance(e, Placed))
    moved = {e.id for e in fleet.events if isinstance(e, Lost)}
    assert placed["r0"] == len(moved) == 6
    assert placed["r1"] == 12
    ends = fleet.ends()
    assert {e.outcome for e in ends.values()} == {"completed"}
    for id, end in ends.items():
        # nothing twice and nothing missing: the tokens before the move and those after it are one output
        assert end.output == sum(e.tokens for e in fleet.events if isinstance(e, Tokens) and e.id == id) == 60
        assert fleet.text(id) == "".join(WORDS[n % len(WORDS)] for n in range(1, 61))
        assert end.verdict.ttft is not None
        assert end.verdict.ttft < 5.0
    assert fleet.cluster.in_flight == 0


def test_who_left_a_killed_replica_does_not_move() -> None:
    """The cancel goes to a process that is dead, which nobody has noticed yet."""
    fleet = Fleet(make, make)
    run_strict(
        fleet.run([request(f"q{i}", 40, most=60) for i in range(4)], kill_at=fleet.tokens(40), cancel=["q0", "q2"])
    )
    there = {e.id for e in fleet.events if isinstance(e, Placed) and e.replica == "r0"}
    assert there == {"q0", "q2"}
    ends = fleet.ends()
    assert {id: e.outcome for id, e in ends.items()} == {
        "q0": "cancelled", "q1": "completed", "q2": "cancelled", "q3": "completed",
    }  # fmt: skip
    assert not [e for e in fleet.events if isinstance(e, Placed) and e.replica == "r1" and e.id in there]
    for id in there:
        assert ends[id].output == sum(e.tokens for e in fleet.events if isinstance(e, Tokens) and e.id == id) < 60


def test_stages_and_cancelling_across_processes() -> None:
    fleet = Fleet(make, make, choice=PolicyChoice("sarathi"))
    talk = Request("talk", (Stage(10, ends="</think>"), Stage(0)), 0.0, sampling=Sampling(100))

    async def main() -> None:
        fleet.cluster.listen(
            lambda e: fleet.cluster.cancel("long") if isinstance(e, Tokens) and e.id == "long" else None
        )
        await fleet.run([talk, request("long", 10, most=400)])

    run_strict(main())
    ends = fleet.ends()
    assert (ends["talk"].outcome, ends["talk"].output) == ("completed", 12)
    assert [e.stage for e in fleet.events if isinstance(e, Tokens) and e.id == "talk"] == [0] * 5 + [1] * 7
    assert (ends["long"].outcome, ends["long"].reason) == ("cancelled", "client disconnected")
    assert ends["long"].output < 400


def test_with_nobody_left_requests_fail_and_the_cluster_is_dead() -> None:
    fleet = Fleet(make)
    run_strict(fleet.run([request("a", most=400), request("b", most=400)], kill_at=fleet.tokens(10)))
    assert {id: e.outcome for id, e in fleet.ends().items()} == {"a": "failed", "b": "failed"}
    assert "no replica is left" in fleet.ends()["a"].reason
    assert fleet.cluster.dead.is_set()


def test_an_engine_beyond_recovery_is_told_across_processes() -> None:
    fleet = Fleet(broken)

    async def main() -> None:
        await fleet.cluster.start()
        for i in range(4):
            fleet.cluster.offer(request(f"q{i}"))
            await asyncio.wait_for(
                fleet.cluster.hosts["r0"].drain() if fleet.cluster.hosts else asyncio.sleep(0), SECONDS
            )
        await asyncio.wait_for(fleet.cluster.dead.wait(), SECONDS)
        await fleet.cluster.close()

    run_strict(main())
    assert {e.outcome for e in fleet.ends().values()} == {"failed"}
    assert "the device fell off" in str(fleet.cluster.error)


def test_waiting_work_is_recalled_from_another_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """All to r0, which runs one at a time, until the last arrives: then what waits there comes back and goes to r1. The
    controller's length predictor learns from what completes there."""

    class Recalls:
        needs = frozenset({"recall"})

        def observe(self, events: Sequence[Event]) -> None: ...

        def place(self, held: Sequence[SeqView], fleet: Sequence[View], now: float) -> Dispatch:
            last = any(s.id == "last" for s in held)
            to = {s.id: "r1" if s.request.handoff else "r0" for s in held}
            return Dispatch(to, recall={"r0": "waiting"} if last else {})

    def one_at_a_time(clock: Clock) -> tuple[Engine, LatencyModel]:
        return Engine(Linear(0.004, 0.00001), replace(LIMITS, max_running=1), clock), Linear(0.004, 0.00001)

    lengths = RunningMean()
    monkeypatch.setattr("rubato.fleet.build.router_for", lambda *_: Recalls())
    fleet = Fleet(one_at_a_time, one_at_a_time, choice=PolicyChoice("vllm"), lengths=lengths)
    requests = [request(f"q{i}", 20, most=10 if i else 150) for i in range(4)]

    begun = asyncio.Event()
    fleet.cluster.listen(lambda e: begun.set() if isinstance(e, Tokens) else None)

    async def main() -> None:
        cluster = fleet.cluster
        await cluster.start()
        for each in requests:
            cluster.offer(replace(each, arrival=cluster.clock.now()))
        await asyncio.wait_for(begun.wait(), SECONDS)
        cluster.offer(request("last", 20, most=10, arrival=cluster.clock.now()))
        await asyncio.wait_for(cluster.drain(), SECONDS)
        await cluster.close()

    run_strict(main())
    back = {e.id: e.request.handoff for e in fleet.events if isinstance(e, HandedOff)}
    assert {id: (h.source, h.reason, h.cached) for id, h in back.items() if h} == {
        f"q{i}": ("r0", "recalled", 0) for i in (1, 2, 3)
    }
    where = {e.id: e.replica for e in fleet.events if isinstance(e, Placed)}
    assert where == {"q0": "r0", "last": "r0", "q1": "r1", "q2": "r1", "q3": "r1"}
    assert {(e.outcome, e.output) for e in fleet.ends().values()} == {("completed", 150), ("completed", 10)}
    assert lengths._sums == {"default": (5, 150 + 4 * 10)}


def test_replicas_change_tiers_across_processes() -> None:
    choice = PolicyChoice("polyserve", router_settings={"tiers": [0.1, 5.0]})
    fleet = Fleet(make, make, choice=choice, lengths=RunningMean())
    tight = [request(f"t{n}", 20, ttft=20.0, tpot=0.2, most=6) for n in range(4)]
    loose = [request(f"l{n}", 20, ttft=10.0, tpot=9.0, most=6) for n in range(4)]
    run_strict(fleet.run([*loose, *tight]))
    roles = [(e.id, e.role.tier) for e in fleet.events if isinstance(e, Assigned)]
    assert {tier for _, tier in roles} == {"", "0.1", "5"}, roles
    placed = {e.id: e.replica for e in fleet.events if isinstance(e, Placed)}
    assert Counter(e.outcome for e in fleet.events if isinstance(e, Finished)) == {"completed": 8}
    assert len({placed[r.id] for r in tight} | {placed[r.id] for r in loose}) == 2


def slow_in_prediction(clock: Clock) -> tuple[Engine, LatencyModel]:
    """10 ms a step, and predicted at 0.1 s a token: what a policy decides hangs on no delay of this machine."""
    return Engine(Linear(0.01, 0.0), replace(LIMITS, kv_blocks=400), clock), Linear(0.0, 0.1)


def test_prompts_are_offloaded_across_processes_and_outlive_the_high_priority_replica() -> None:
    """A prompt takes 20 s by prediction and is due after 50: behind another it would be late on an LP, and two in a row
    are in time on the HP. The rest goes back to where it came from."""
    fleet = Fleet(*[slow_in_prediction] * 3, choice=PolicyChoice("ascendra"))
    requests = [request(f"q{i}", 200, ttft=50.0, tpot=100.0, most=120) for i in range(12)]
    offloaded: dict[str, str] = {}  # from where
    placed: dict[str, list[str]] = {r.id: [] for r in requests}
    unseen = []

    def follow(event: Event) -> None:
        if isinstance(event, HandedOff) and event.request.handoff is not None:
            assert (event.request.handoff.reason, event.request.handoff.cached) == ("offloaded", 0)
            offloaded[event.id] = event.request.handoff.source
        elif isinstance(event, Placed):
            placed[event.id].append(event.replica)
            asyncio.get_running_loop().call_soon(check_shown, event.id, event.replica)

    def check_shown(id: str, replica: str) -> None:
        if id not in fleet.views()[replica].known:
            unseen.append((id, replica))

    def hp_runs_one(event: Event) -> bool:
        return isinstance(event, Tokens) and event.id in offloaded and placed[event.id][-1] == "r2"

    fleet.cluster.listen(follow)
    run_strict(fleet.run(requests, victim="r2", kill_at=hp_runs_one))
    roles = {e.id: e.role.kind for e in fleet.events if isinstance(e, Assigned)}
    assert roles == {"r0": "lp", "r1": "lp", "r2": "hp"}
    assert set(offloaded.values()) == {"r0", "r1"}
    assert [id for id, source in offloaded.items() if placed[id][:2] == [source, source]]
    assert not unseen
    died = next(n for n, e in enumerate(fleet.events) if isinstance(e, Left))
    moved = {e.id for e in fleet.events if isinstance(e, Lost)}
    assert moved & set(offloaded)
    assert moved <= {id for id, where in placed.items() if where[-2:-1] == ["r2"]}
    assert {e.replica for e in fleet.events[died:] if isinstance(e, Placed)} == {"r0", "r1"}
    ends = fleet.ends()
    assert {(e.outcome, e.output) for e in ends.values()} == {("completed", 120)}
    assert set(ends) == set(placed)
    whole = "".join(WORDS[n % len(WORDS)] for n in range(1, 121))
    assert {fleet.text(id) for id in placed} == {whole}  # nothing twice and nothing missing


def test_what_moves_kv_is_refused() -> None:
    with pytest.raises(ValueError, match=r"policy 'distserve' needs kv_transfer\. KV does not move between Ray actors"):
        ray_cluster([make, make], WallClock(), ClusterOptions(PolicyChoice("distserve")))
    fleet = Fleet(make, make, choice=PolicyChoice("polyserve", router_settings={"mode": "pd", "tiers": [0.1]}))
    with pytest.raises(ValueError, match=r"router 'polyserve\.router' needs kv_transfer, which replica 'r0' lacks"):
        run_strict(fleet.run([request("q", 20, ttft=20.0, tpot=0.2)]))
