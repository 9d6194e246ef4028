"""What an engine core tells gateways, with a formula for a model; and the link itself, over ZMQ."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq

from rubato.core.events import Finished, HandedOff, Offered, Started, Tokens
from rubato.core.plan import Role
from rubato.core.request import SLO, Progress, Request, Stage
from rubato.engines.vllm import core_link
from rubato.engines.vllm.core_link import CoreLink
from rubato.engines.vllm.gateway_reports import GatewayReports, choice_of
from rubato.engines.vllm.policy_driver import FLEET_SUPPORTS
from rubato.engines.vllm.settings import LinkSettings
from rubato.fleet.link_reader import LinkReader, MissedReportError
from rubato.fleet.remote_view import RemoteReplica
from rubato.fleet.server_link import ZmqLink
from rubato.latency import affine
from rubato.wire import messages
from rubato.wire.link_keys import TOKEN_ENV, protect_gateway
from rubato.wire.messages import (
    PROTOCOL,
    Beat,
    Demote,
    FromCore,
    Greeting,
    Hello,
    Ping,
    Recall,
    Refused,
    Resync,
    Snapshot,
    ToCore,
    Unknown,
    assign,
    decode_from_core,
    do,
    encode,
    expect,
)
from rubato.wire.replica_report import HandOffReport, ReplicaReport
from tests.vllm.harness import Harness, harness


class Wire:
    """In the place of the socket: messages go through as bytes, in order, to one gateway; some get lost."""

    def __init__(self, losses: random.Random | None = None, share: float = 0.0) -> None:
        self.listeners, self.wants_snapshot, self.refusals = 1, True, 0
        self.asked: list[tuple[str, Any]] = []
        self.messages: list[FromCore] = []
        self._losses, self._share = losses, share
        self.idle = False  # the last snapshot is true until something happens
        self.lost = 0

    def commands(self) -> list[tuple[str, msgspec.Raw]]:
        asked, self.asked = self.asked, []
        return [(gateway, msgspec.Raw(encode(command))) for gateway, command in asked]

    def report(self, message: messages.Report) -> None:
        if self._losses is not None and self._losses.random() < self._share:
            self.lost += 1
        else:
            self.messages.append(decode_from_core(encode(message)))

    def snapshot(self, message: Snapshot, *, idle: bool) -> None:
        self.idle = idle
        if self.wants_snapshot:
            self.wants_snapshot = False
            self.messages.append(decode_from_core(encode(message)))

    def end_idle(self) -> None:
        self.idle = False

    def request_resync(self) -> None:
        self.wants_snapshot = True


class Gateway:
    """A gateway's books of one core: the reader and the mirror that gateways have."""

    def __init__(self, made: Harness, wire: Wire) -> None:
        self.made, self.wire = made, wire
        self.reader = LinkReader("r0")
        limits = made.scheduler.rubato.limits
        self.mirror = RemoteReplica("r0", limits, affine.Model(), frozenset(), 0.0)
        self.events: list[Any] = []
        self.handed_on: list[str] = []  # ids of those that would go on at another replica
        self.gaps = 0

    def hear(self) -> None:
        messages, self.wire.messages = self.wire.messages, []
        for message in messages:
            try:
                report = self.reader.read(message)
            except MissedReportError:
                self.gaps += 1
                self.wire.wants_snapshot = True
                continue
            if report is not None:
                self._take(report)

    def _take(self, report: ReplicaReport) -> None:
        self.mirror.apply(report)
        self.events += [*report.events, *report.hand_offs]
        for id, reason, at, cached in report.hand_offs:
            self.handed_on.append(id)
            if (request := self.mirror.handed_off_request(id, reason, at, cached)) is not None:
                self.mirror.fold(HandedOff(at, id, request))

    def differences(self) -> Iterator[str]:
        """Where the fold is not what the scheduler itself shows."""
        theirs, ours = self.made.scheduler.view(), self.mirror.view(self.made.now)
        names = {
            seq.id: seq.gateway_request.id if seq.gateway_request else seq.id
            for seq in self.made.scheduler.rubato.requests.seqs.values()
        }
        over = {id.rpartition("-")[0] for id in self.made.ended}  # of which their streams tell, if no report does
        if {names[s.id] for s in theirs.waiting} != {s.id for s in ours.waiting} - over:
            yield f"waiting {[names[s.id] for s in theirs.waiting]} {[s.id for s in ours.waiting]}"
        if {names[s.id] for s in (*theirs.running, *theirs.moving)} != {s.id for s in ours.running}:
            yield f"running {[names[s.id] for s in theirs.running]} {[s.id for s in ours.running]}"
        if theirs.kv_free != ours.kv_free:
            yield f"kv_free {theirs.kv_free} {ours.kv_free}"
        for seq in (*theirs.running, *theirs.moving):
            own = self.mirror.seq_of(names[seq.id])
            if own is None:
                continue
            for what, one, other in (
                ("cached", seq.cached - seq.in_flight, own.cached),
                ("in_flight", seq.in_flight, own.in_flight),
                ("blocks", seq.blocks, own.blocks),
                ("output", seq.output - seq.expected_tokens, own.output),
                ("demoted", seq.demoted, own.demoted),
                ("prompt", seq.request.stages[0].prompt, own.request.stages[0].prompt),
            ):
                if one != other:
                    yield f"{names[seq.id]}: {what} {one} {other}"


def told(made: Harness, losses: random.Random | None = None, share: float = 0.0) -> Gateway:
    """The harness with a gateway that listens."""
    wire = Wire(losses, share)
    driver = made.scheduler.rubato
    driver.reporting.gateways = GatewayReports(wire)  # type: ignore[arg-type]
    driver.supports |= FLEET_SUPPORTS
    driver.report()
    return Gateway(made, wire)


def promise(gateway: Gateway, id: str, prompt: int, slo: SLO, **more: Any) -> None:
    """The gateway sends a request: what it promises comes before it."""
    request = Request(id, (Stage(prompt, slo),), gateway.made.now, **more)
    gateway.mirror.submit(request, gateway.made.now)
    gateway.wire.asked.append(("g", expect(id, (id,), 1, request)))


@pytest.mark.parametrize(
    ("seed", "asynchronous", "policy", "prefix"),
    [(0, False, "edf", False), (1, False, "edf", True), (2, True, "edf", False), (3, False, "slos_serve", False),
     (4, True, "edf", True), (5, False, "polyserve", False)],
)  # fmt: skip
def test_what_gateways_fold_is_what_the_scheduler_shows_after_every_step(
    model: Path, seed: int, asynchronous: bool, policy: str, prefix: bool
) -> None:
    rng = random.Random(seed)
    made = harness(model, policy, blocks=14, asynchronous=asynchronous, prefix=prefix)
    made.exact = False  # hand-offs are not in the plan's chunks
    gateway = told(made)
    gateway.hear()
    offered = preempted = 0
    for i in range(60):
        id, prompt = f"chatcmpl-{i}", [rng.randrange(5) for _ in range(rng.randint(5, 60))]
        if rng.random() < 0.7:
            slo = rng.choice([SLO(), SLO(rng.uniform(0.05, 1.0), rng.uniform(0.02, 0.2)), SLO(e2e=rng.uniform(0.5, 5))])
            promise(gateway, id, len(prompt) + rng.choice([0, 0, 7]), slo)  # a length that may be an estimate
            made.add(f"{id}-0a1b2c3d", prompt, rng.randint(1, 12))
        else:
            made.add(f"other{i}", prompt, rng.randint(1, 12), slo_ttft_ms=rng.uniform(50, 1000))
        offered += 1
        for _ in range(rng.randint(0, 6)):
            made.step()
            gateway.hear()
            assert not list(gateway.differences()), (i, list(gateway.differences()))
            preempted = sum(type(e).__name__ == "Preempted" for e in gateway.events)
        if rng.random() < 0.15 and (ids := list(made.scheduler.requests)):
            made.abort(rng.choice(ids))
            gateway.hear()
    while made.scheduler.has_requests() or made.running:
        made.step()
        gateway.hear()
        assert not list(gateway.differences())
    ends = [*(event.id for event in gateway.events if isinstance(event, Finished)), *gateway.handed_on]
    assert len(ends) == len(set(ends)) == offered
    assert all(id.startswith("chatcmpl-") for id in gateway.handed_on)  # others came by no gateway, and stay
    assert gateway.mirror.is_empty
    assert gateway.gaps == 0
    assert preempted > 0 or seed != 0
    heard = {event.id: 0 for event in gateway.events if isinstance(event, Offered)}
    for event in gateway.events:
        if isinstance(event, Tokens):
            assert len(event.token_ids) == event.tokens
            heard[event.id] += event.tokens
    assert sum(heard.values()) == sum(map(len, made.out.values()))
    made.finish()


@pytest.mark.parametrize("seed", range(4))
def test_a_gateway_that_missed_reports_is_right_again_after_a_snapshot(model: Path, seed: int) -> None:
    rng = random.Random(seed)
    made = harness(model, "edf", blocks=14, asynchronous=seed % 2 == 1)
    gateway = told(made, random.Random(seed), 0.1)
    right = 0
    for i in range(40):
        id = f"chatcmpl-{i}"
        promise(gateway, id, 30, SLO(0.5, 0.1))
        made.add(f"{id}-0a1b2c3d", [rng.randrange(200) for _ in range(30)], rng.randint(1, 12))
        for _ in range(rng.randint(0, 6)):
            made.step()
            gateway.hear()
            number = made.scheduler.rubato.reporting.gateways._number
            if not gateway.wire.wants_snapshot and gateway.reader.number == number:
                assert not list(gateway.differences())
                right += 1
    gateway.wire._share = 0.0
    while made.scheduler.has_requests() or made.running:
        made.step()
        gateway.hear()
    made.step()
    gateway.hear()
    assert gateway.wire.lost > 5
    assert gateway.gaps > 5
    assert right > 20
    assert not gateway.mirror.view(made.now).running
    # those whose end was lost are told by their streams: for all that a snapshot says, they may be on their way
    assert {s.id for s in gateway.mirror.view(made.now).waiting} <= {f"chatcmpl-{i}" for i in range(40)}


def test_a_gateway_gives_roles_and_takes_back_what_is_its_own(model: Path) -> None:
    made = harness(model, "edf", blocks=40, seqs=2, tokens=16)
    made.exact = False
    gateway = told(made)
    gateway.wire.asked.append(("g", assign(Role(tier="fast", kind="hp"))))
    for i in range(6):
        promise(gateway, f"chatcmpl-{i}", 16, SLO(5.0, 1.0) if i % 2 else SLO())
        made.add(f"chatcmpl-{i}-0a1b2c3d", [3] * 16, 8)
    made.add("other", [3] * 16, 8)
    for _ in range(3):
        made.step()
    gateway.hear()
    assert made.scheduler.view().role == Role(tier="fast", kind="hp")
    waiting = {s.id for s in gateway.mirror.view(made.now).waiting}
    assert {"other"} < waiting
    gateway.wire.asked.append(("g", Recall("waiting")))
    made.step()
    gateway.hear()
    back = [event for event in gateway.events if isinstance(event, HandOffReport)]
    assert {event.id for event in back} == waiting - {"other"}
    assert {event.reason for event in back} == {"recalled"}
    assert not any(event.id == "other" for event in back)
    gateway.wire.asked.append(("g", Recall("best_effort")))
    made.step()
    gateway.hear()
    left = made.scheduler.rubato.requests.seqs.values()
    assert all(seq.gateway_request is None or not seq.best_effort for seq in left)
    made.run()
    gateway.hear()
    assert gateway.mirror.is_empty
    ended = {event.id for event in gateway.events if isinstance(event, Finished | HandOffReport)}
    assert ended == {*(f"chatcmpl-{i}" for i in range(6)), "other"}


def test_another_gateways_requests_and_strangers_stay_at_a_recall(model: Path) -> None:
    made = harness(model, "edf", blocks=40, seqs=1)
    gateway = told(made)
    promise(gateway, "chatcmpl-a", 16, SLO())
    request = Request("chatcmpl-b", (Stage(16),), 0.0)
    gateway.wire.asked.append(("h", expect("chatcmpl-b", ("chatcmpl-b",), 1, request)))
    for id in ("chatcmpl-a", "chatcmpl-b"):
        made.add(f"{id}-0a1b2c3d", [3] * 16, 4)
    gateway.wire.asked.append(("h", Recall("best_effort")))
    made.run()
    gateway.hear()
    assert [event.id for event in gateway.events if isinstance(event, HandOffReport)] == ["chatcmpl-b"]
    assert [event.id for event in gateway.events if isinstance(event, Finished)] == ["chatcmpl-a"]


def test_demoted_requests_are_best_effort_from_the_start_and_while_they_run(model: Path) -> None:
    made = harness(model, "vllm", blocks=40)  # edf would bring them back
    gateway = told(made)
    for id in ("chatcmpl-a", "chatcmpl-b"):
        promise(gateway, id, 16, SLO(5.0, 1.0))
    gateway.wire.asked.append(("g", Demote("chatcmpl-a")))
    for id in ("chatcmpl-a", "chatcmpl-b"):
        made.add(f"{id}-0a1b2c3d", [3] * 16, 4)
    made.step()
    assert [s.best_effort for s in made.scheduler.rubato.requests.seqs.values()] == [True, False]
    gateway.wire.asked.append(("g", Demote("chatcmpl-b")))
    made.step()
    assert [s.best_effort for s in made.scheduler.rubato.requests.seqs.values()] == [True, True]
    made.run()


def test_time_that_a_gateway_held_a_request_counts_and_what_it_had_elsewhere(model: Path) -> None:
    made = harness(model, "edf", blocks=40)
    gateway = told(made)
    made.now = 10.0
    request = Request("cmpl-a", (Stage(16, SLO(2.0, 0.5)),), 7.0, progress=Progress((7.0,), ((8.0, 8.5, 9.0),)))
    gateway.wire.asked.append(("g", expect("cmpl-a", ("cmpl-a",), 1, request)))
    made.add("cmpl-a-0-0a1b2c3d", [3] * 19, 5)
    made.step()
    seq = next(iter(made.scheduler.rubato.requests.seqs.values()))
    assert seq.request.arrival == 7.0
    assert seq.request.stages[0].prompt == 16
    assert seq.request.sampling.max_tokens == 8
    assert list(seq.times_of_stage())[:3] == [8.0, 8.5, 9.0]
    made.run()
    gateway.hear()
    (end,) = [event for event in gateway.events if isinstance(event, Finished)]
    assert end.output == 8
    assert end.verdict.ttft == 1.0


def test_a_promise_that_comes_after_its_request_counts_from_then_on(model: Path) -> None:
    made = harness(model, "edf", blocks=40)
    gateway = told(made)
    made.add("chatcmpl-a-0a1b2c3d", [3] * 16, 8)
    for _ in range(3):
        made.step()
    gateway.hear()
    assert [seq.best_effort for seq in made.scheduler.view().running] == [True]
    promise(gateway, "chatcmpl-a", 16, SLO(5.0, 1.0))
    made.step()
    gateway.hear()
    assert not list(gateway.differences())
    (seq,) = gateway.mirror.view(made.now).running
    assert (seq.id, seq.best_effort, seq.output) == ("chatcmpl-a", False, 4)
    assert "handoff" in made.scheduler.view().supports
    made.run()
    gateway.hear()
    assert [event.id for event in gateway.events if isinstance(event, Finished)] == ["chatcmpl-a"]


def test_commands_that_cannot_be_are_faults_and_change_nothing(model: Path) -> None:
    made = harness(model, "edf", blocks=40)
    gateway = told(made)
    gateway.wire.asked += [
        ("g", ["expect", "chatcmpl-a", {"ids": []}]), ("g", ["assign", {"colour": "red"}]), ("g", ["recall", "all"]),
        ("g", ["end"]), ("g", []),
    ] * 3  # fmt: skip
    made.add("chatcmpl-a-0a1b2c3d", [3] * 16, 4)
    made.run()
    assert made.scheduler.rubato.guard.faults == {"command": 15}
    assert not made.scheduler.rubato.guard.has_given_up
    assert len(made.out["chatcmpl-a-0a1b2c3d"]) == 4


@pytest.mark.parametrize(
    ("id", "place"),
    [
        ("chatcmpl-abc-0123abcd", ("chatcmpl-abc", 0, 0)),
        ("2_chatcmpl-abc-0123abcd", ("chatcmpl-abc", 0, 2)),
        ("cmpl-abc-3-0123abcd", ("cmpl-abc", 3, 0)),
        ("1_cmpl-abc-3-0123abcd", ("cmpl-abc", 3, 1)),
    ],
)
def test_which_choice_of_which_prompt_a_request_is(id: str, place: tuple[str, int, int]) -> None:
    assert choice_of(id) == place


# --------------------------------------------------------------------------- over the socket


class Peer:
    """A gateway's raw socket."""

    def __init__(self, port: int, **options: int) -> None:
        self.socket = zmq.Context.instance().socket(zmq.DEALER)
        self.socket.setsockopt(zmq.LINGER, 0)
        for name, value in options.items():
            self.socket.setsockopt(getattr(zmq, name), value)
        protect_gateway(self.socket)
        self.socket.connect(f"tcp://127.0.0.1:{port}")

    def say(self, message: ToCore) -> None:
        self.socket.send(encode(message))

    def hello(self, protocol: int = PROTOCOL) -> Any:
        self.say(Hello(protocol, "g"))
        return self.next()

    def next(self, kind: type = object) -> Any:
        """The next message of this kind."""
        while True:
            assert self.socket.poll(5000), f"nothing came of kind {kind!r}"
            if isinstance(message := decode_from_core(self.socket.recv()), kind):
                return message


@pytest.fixture
def linked(model: Path) -> Iterator[Any]:
    made = harness(model, "edf", blocks=60, rubato={"link": {}})
    yield made
    made.scheduler.rubato.reporting.close()


def port_of(made: Harness) -> int:
    link = made.scheduler.rubato.reporting.gateways.link
    assert isinstance(link, CoreLink)
    return link.port


def test_a_gateway_is_greeted_at_once_by_an_idle_engine_and_told_of_all_that_is_there_by_a_busy_one(
    linked: Harness,
) -> None:
    first = Peer(port_of(linked))
    hello = first.hello()
    assert isinstance(hello, Greeting)
    assert hello.about.policy == "edf"
    assert affine.Model.from_dict(hello.about.latency).host == 0.0
    assert hello.about.limits.kv_blocks == 60
    assert {"handoff", "recall", "chunked"} <= set(hello.about.supports)
    assert first.next().seqs == []
    first.say(Ping(1.5))
    assert first.next(Beat).asked == 1.5
    linked.add("chatcmpl-a-0a1b2c3d", [3] * 30, 20)
    for _ in range(4):
        linked.step()
    second = Peer(port_of(linked))
    second.hello()
    time.sleep(0.1)
    linked.step()
    snapshot = second.next(Snapshot)
    assert [row.request.id for row in snapshot.seqs] == ["chatcmpl-a-0a1b2c3d"]
    reader = LinkReader("r0")
    assert reader.read(snapshot) is not None
    linked.step()
    while reader.number < linked.scheduler.rubato.reporting.gateways._number:
        reader.read(second.next())
    linked.run()
    first.socket.close()
    second.socket.close()


def test_who_has_not_the_token_or_another_version_is_told_so_and_is_not_obeyed(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(TOKEN_ENV, "secret")
    made = harness(model, "edf", blocks=60, rubato={"link": {"host": "127.0.0.1"}})
    monkeypatch.setenv(TOKEN_ENV, "guess")
    forger, gateway = Peer(port_of(made)), ZmqLink(f"tcp://127.0.0.1:{port_of(made)}")
    forger.say(Hello(PROTOCOL, "g"))
    forger.say(do(assign(Role(kind="hp"))))
    assert not forger.socket.poll(500)
    assert gateway.is_refused
    gateway.close()
    monkeypatch.setenv(TOKEN_ENV, "secret")
    old = Peer(port_of(made))
    old.say(do(assign(Role(kind="hp"))))
    assert isinstance(old.next(), Unknown)
    old.socket.send(b"\xff no JSON")
    refused = old.hello(protocol=PROTOCOL + 1)
    assert isinstance(refused, Refused)
    assert "version" in refused.why
    old.say(do(assign(Role(kind="hp"))))
    assert isinstance(old.next(), Unknown)
    made.add("a", [3] * 16, 4)
    made.run()
    assert made.scheduler.view().role == Role()
    assert not made.scheduler.rubato.guard.faults
    assert made.scheduler.rubato._state()["link_refused"] > 2
    assert isinstance(old.hello(), Greeting)
    made.scheduler.rubato.reporting.close()
    for peer in (forger, old):
        peer.socket.close()


def test_an_open_address_needs_a_token_and_settings_are_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(TOKEN_ENV, raising=False)
    with pytest.raises(ValueError, match=TOKEN_ENV):
        LinkSettings.of({"host": "0.0.0.0"})
    monkeypatch.setenv(TOKEN_ENV, "secret")
    assert LinkSettings.of({"host": "0.0.0.0"}).host == "0.0.0.0"
    for wrong in ({"port": 70_000}, {"port": True}, {"host": ""}, {"prot": 1}):
        with pytest.raises(ValueError, match=r"rubato\.link"):
            LinkSettings.of(wrong, "rubato.link.")


@pytest.mark.parametrize("how", ["stalled", "dead"])
def test_no_listener_holds_up_a_step_and_one_that_lives_hears_all(
    model: Path, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The one that does not read costs the engine nothing: reports go on, and it would need a snapshot."""
    monkeypatch.setattr(core_link, "MAX_QUEUED_MESSAGES", 200)
    made = harness(model, "edf", blocks=60, rubato={"link": {}})
    bad = Peer(port_of(made), RCVHWM=1)
    bad.hello()
    good = Peer(port_of(made))
    good.hello()
    reader = LinkReader("r0")
    reader.read(good.next(Snapshot))
    if how == "dead":
        bad.socket.close(linger=0)
    events: list[Any] = []
    for i in range(300):
        made.add(f"r{i}", [3] * 30, 10)
        while made.scheduler.has_requests():
            made.step()
        while good.socket.poll(0) or reader.number < made.scheduler.rubato.reporting.gateways._number:
            try:
                report = reader.read(good.next())
            except MissedReportError:
                good.say(Resync())
                continue
            if report is not None:
                events += report.events
    ended = [event.id for event in events if isinstance(event, Finished)]
    assert ended == [f"r{i}" for i in range(300)]
    assert sum(isinstance(event, Started) for event in events) == 300
    made.scheduler.rubato.reporting.close()
    good.socket.close()
    if how == "stalled":
        bad.socket.close()
