"""What engine cores tell API servers: over the real sockets, with vLLM's real scheduler and the formula for a model."""

from __future__ import annotations

import os
import random
import stat
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client import CollectorRegistry
from vllm import SamplingParams
from vllm.v1.engine import FinishReason
from zmq import EVENTS, POLLOUT

from rubato.core.clock import WallClock
from rubato.core.events import Event, Finished, Offered, Placed, Started, Tokens
from rubato.core.plan import Limits, Role
from rubato.core.request import SLO, Request, Stage
from rubato.engines.vllm import core_link, link, reports
from rubato.engines.vllm.core_link import CoreLink
from rubato.engines.vllm.link import Reader
from rubato.engines.vllm.sequence import request_of, sealed
from rubato.policy_kit.fair_share import FairShare
from rubato.serving.vllm_reports import EngineReports, PluginMetrics
from rubato.wire.messages import (
    PROTOCOL,
    CoreAbout,
    EngineState,
    Ping,
    RequestEvents,
    Resync,
    Subscribe,
    assign,
    do,
    encode,
    full_row,
)
from tests.vllm.harness import harness

ABOUT = CoreAbout("edf", (), Limits(8, 512, 1024, 100, 16), {}, None, "m", "0", "0")
Said = RequestEvents | EngineState


def drained(reader: Reader) -> list[Said]:
    """All that was told: ZeroMQ delivers from a thread of its own."""
    found: list[Said] = []
    quiet = 0
    while quiet < 20:
        time.sleep(0.02)
        came = list(reader.messages())
        found += came
        quiet = 0 if came else quiet + 1
    return found


def listening(folder: str, engine: int, *clients: int) -> tuple[CoreLink, list[Reader]]:
    """A core's link, and API servers that it knows of."""
    made = CoreLink(None, link.endpoint(folder, engine))
    made.start(lambda: ABOUT, WallClock().now)
    readers = [Reader(folder, [engine], client) for client in clients]
    heard(made, readers)
    return made, readers


def wait_until(is_so: Callable[[], bool]) -> None:
    for _ in range(1000):
        if is_so():
            return
        time.sleep(0.01)
    raise AssertionError("it never came")


def heard(made: CoreLink, readers: list[Reader]) -> None:
    """Wait until the core knows its API servers."""
    for _ in range(500):
        if len(made.clients) == len(readers):
            return
        time.sleep(0.01)
        for reader in readers:
            reader._ask()
    raise AssertionError(f"{made.clients} of {len(readers)} have come")


@pytest.fixture
def folder(tmp_path: Path) -> str:
    return str(tmp_path / "link")


def request(id: str) -> Request:
    return Request(id, (Stage(1),), 0.0)


def test_each_api_server_hears_of_its_own_requests_and_all_of_every_engine(folder: str) -> None:
    links = [CoreLink(None, link.endpoint(folder, engine)) for engine in (0, 1)]
    readers = [Reader(folder, (0, 1), client) for client in (0, 1, 10)]
    for engine, made in enumerate(links):
        made.start(lambda: ABOUT, WallClock().now)
        heard(made, readers)
        for client in (0, 1, 10):
            id = f"{engine}-{client}"
            rows = [full_row(Offered(0.0, id, request(id)))]
            made.tell_client(client, RequestEvents(engine, 1, rows, {id: "ticket"}))
        made.tell_clients(EngineState(engine, 1, {"steps": engine}))
    for client, reader in zip((0, 1, 10), readers, strict=True):
        found = drained(reader)
        heard_ids = {
            event.id for message in found if isinstance(message, RequestEvents) for event in message.happened()
        }
        assert heard_ids == {f"0-{client}", f"1-{client}"}
        assert sorted(message.engine for message in found if isinstance(message, EngineState)) == [0, 1]
        assert not any(message.lost for message in found)
    assert stat.S_IMODE(os.stat(folder).st_mode) == 0o700
    for end in (*readers, *links):
        end.close()


def test_a_reader_that_is_too_slow_is_told_what_it_lost_and_no_step_waits(
    folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(link, "MAX_QUEUED_MESSAGES", 10)
    monkeypatch.setattr(core_link, "MAX_QUEUED_MESSAGES", 10)
    made, [reader] = listening(folder, 0, 0)
    for step in range(20_000):
        made.tell_clients(EngineState(0, step + 1, {"step": step, "filler": "x" * 1000}))
    found = drained(reader)
    for number in range(20_001, 20_101):  # until one has come: the thread may be behind yet, and drop it
        made.tell_clients(EngineState(0, number, {"step": number}))
        found += drained(reader)
        if found[-1].n == number:
            break
    assert 0 < sum(message.lost for message in found) == number - len(found)
    reader.close()
    made.close()


def test_an_api_server_says_who_it_is_and_asks_for_nothing_else(folder: str) -> None:
    made, [reader] = listening(folder, 0, 3)
    (socket,) = reader._sockets
    for message in (do(assign(Role(kind="hp"))), Ping(1.0), Resync()):
        socket.send(encode(message))
        for _ in range(500):
            if socket.getsockopt(EVENTS) & POLLOUT:  # its queue has room for one
                break
            time.sleep(0.01)
    wait_until(lambda: made.refusals == 3)
    assert drained(reader) == []
    assert (made.refusals, made.commands(), made.listeners, made.clients) == (3, [], 0, {3})
    socket.send(encode(Subscribe(PROTOCOL + 1, 3, "")))
    wait_until(lambda: made.refusals == 4)
    with pytest.raises(OSError, match="version"):
        drained(reader)
    reader.close()
    made.close()


def test_who_has_not_the_key_hears_nothing_of_requests(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stranger of this machine may reach the link's port, where it has no token, and not the folder."""
    monkeypatch.setenv(link.KEY, "ours")
    made = CoreLink(None, link.endpoint(folder, 0), "ours")
    made.start(lambda: ABOUT, WallClock().now)
    reader = Reader(folder, [0], 0)
    heard(made, [reader])
    monkeypatch.setenv(link.KEY, "")
    stranger = Reader(folder, [0], 0)
    wait_until(lambda: made.refusals == 1)
    with pytest.raises(OSError, match="key"):
        drained(stranger)
    assert len(made._peers) == 1
    for end in (reader, stranger, made):
        end.close()


def test_a_folder_that_others_may_enter_is_refused(folder: str) -> None:
    os.makedirs(folder, mode=0o755)
    os.chmod(folder, 0o755)
    with pytest.raises(OSError, match="not a folder of this user's alone"):
        link.endpoint(folder, 0)


def watched(model: Path, folder: str, **around: Any) -> tuple[Any, Reader]:
    """A scheduler of the harness that reports."""
    made = harness(model, **{"policy": "edf", "blocks": 30, **around})
    driver = made.scheduler.rubato
    driver.reporting.link, [reader] = listening(folder, 0, 0)
    driver.reporting.api_servers = reports.Reports(driver.reporting.link, 0)
    return made, reader


@pytest.mark.parametrize("seed", range(3))
def test_reports_are_the_events_of_the_engine(model: Path, folder: str, seed: int) -> None:
    made, reader = watched(model, folder)
    made.serve(random.Random(seed), 40, 3, aborts=0.1)
    made.step()
    messages = drained(reader)
    heard: list[Event] = [
        event for message in messages if isinstance(message, RequestEvents) for event in message.happened()
    ]
    kinds = Counter((type(event), event.id) for event in heard)
    output: Counter[str] = Counter()
    for event in heard:
        if isinstance(event, Tokens):
            output[event.id] += event.tokens
    for i in range(40):
        id = f"r{i}"
        assert kinds[Offered, id] == kinds[Finished, id] == 1
        assert kinds[Placed, id] <= 1
        assert kinds[Tokens, id] <= 3  # the first, those before a report of all sequences, and the rest
        assert output[id] == len(made.out[id])
    own = [e for e in made.policy.events if isinstance(e, Finished)]
    assert [e for e in heard if isinstance(e, Finished)] == own
    started = [e for e in made.policy.events if isinstance(e, Started)]
    assert [e for e in heard if isinstance(e, Started)] == started
    expected = [e.ttft for e in heard if isinstance(e, Placed)]
    assert expected
    assert all(ttft is not None and ttft > 0.0 for ttft in expected)
    states = [message.fields for message in messages if isinstance(message, EngineState)]
    assert 0 <= made.scheduler.rubato.guard.steps - states[-1]["steps"] <= 2  # empty ones at the end
    assert states[-1]["sequences"] == []
    assert states[-1]["kv_free"] == made.scheduler.rubato.limits.kv_blocks  # not as of the last batch
    assert sum(tokens for state in states for tokens, _, _ in state["batches"]) == sum(
        sum(batch.values()) for batch in made.scheduled
    )
    assert not made.scheduler.rubato.guard.faults
    made.scheduler.rubato.reporting.close()
    reader.close()


def test_a_link_that_fails_costs_the_reports_and_nothing_else(model: Path, folder: str) -> None:
    made, reader = watched(model, folder)
    driver = made.scheduler.rubato
    driver.reporting.link._to_thread.close()
    for i in range(20):
        made.add(f"r{i}", [i] * 10, 5)
    while made.scheduler.has_requests():
        made.step()
    assert driver.guard.faults.keys() == {"report"}
    assert not driver.guard.has_given_up
    assert not driver.reporting.api_servers._events
    assert all(made.ended[f"r{i}"] == 1 for i in range(20))
    reader.close()


@pytest.mark.parametrize("step", range(2, 6))
def test_what_a_fault_kept_from_an_api_server_is_made_up_for(model: Path, folder: str, step: int) -> None:
    """Offers and ends of one step are lost, of requests in a view and in none; no request is open for ever."""
    made, reader = watched(model, folder)
    told = EngineReports(reader, PluginMetrics(CollectorRegistry(), counts=True))
    driver = made.scheduler.rubato
    for i in range(10):
        made.add(f"r{i}", [i] * 10, 2 + i)
    own, calls = driver.reporting.link.tell_client, 0

    def events(*args: Any) -> None:
        nonlocal calls
        calls += 1
        if calls == step:
            raise OverflowError("an event that cannot be written")
        own(*args)

    driver.reporting.link.tell_client = events
    while made.scheduler.has_requests():
        made.step()
        told.read()
    made.step()
    wait_until(lambda: told.read() or not told._open)
    assert made.scheduler.rubato.guard.faults == {"report": 1}
    assert not told._open
    made.scheduler.rubato.reporting.close()
    reader.close()


def test_a_miss_is_put_down_to_its_cause(model: Path, folder: str) -> None:
    """Four places, each request 20 steps long: who waits for one of them misses its TTFT by the queue, who decodes
    beside a long prompt its TPOT by that, and who asks for less than a step takes would miss it alone."""
    made, _ = watched(model, folder, policy="vllm", seqs=4, tokens=64, blocks=200)
    for i in range(8):
        made.add(f"q{i}", [i] * 10, 20, slo_ttft_ms=100)
    while made.scheduler.has_requests():
        made.step()
    made.add("decodes", [1] * 10, 30, slo_tpot_ms=12)
    for _ in range(3):
        made.step()
    for i in range(3):
        made.add(f"long{i}", list(range(150)), 2)
    while made.scheduler.has_requests():
        made.step()
    made.add("fast", [1] * 10, 20, slo_ttft_ms=30, slo_tpot_ms=2)
    while made.scheduler.has_requests():
        made.step()
    made.step()
    ends = {e.id: e.verdict for e in made.policy.events if isinstance(e, Finished)}
    assert (ends["fast"].met, ends["fast"].cause) == (False, "infeasible")
    assert [ends[f"q{i}"].met for i in range(8)] == [True] * 4 + [False] * 4
    assert {ends[f"q{i}"].cause for i in range(4, 8)} == {"queue"}
    assert (ends["decodes"].met, ends["decodes"].cause) == (False, "prefill interference")
    made.scheduler.rubato.reporting.close()


@pytest.mark.parametrize("fair", [True, False])
def test_a_flood_leaves_another_tenant_its_share(
    model: Path, folder: str, monkeypatch: pytest.MonkeyPatch, fair: bool
) -> None:
    """A tenant with one request at a time beside one with 60 at once, in the order of arrival."""
    monkeypatch.setenv(link.KEY, "key")
    made = harness(model, policy="vllm", seqs=4, tokens=64, blocks=200)
    if fair:
        made.scheduler.rubato.requests.fair = FairShare({"flood": 1.0, "quiet": 1.0}, window=4)
    for i in range(60):
        made.add(f"f{i}", [i] * 20, 10, **sealed({"slo_tenant": "flood", "slo_arrival": "0.0"}))
    waits = []
    for i in range(5):
        made.add(f"q{i}", [i] * 20, 10, **sealed({"slo_tenant": "quiet", "slo_arrival": repr(made.now)}))
        begun = made.now
        while not made.ended[f"q{i}"]:
            made.step()
        waits.append(made.now - begun)
    while made.scheduler.has_requests():
        made.step()
    assert all(made.ended[f"f{i}"] == 1 for i in range(60))
    assert not made.scheduler.rubato.guard.faults
    assert not made.scheduler.rubato.requests.over_share
    if fair:
        assert max(waits) < 1.0  # a request takes 0.3 s alone
    else:
        assert waits[0] > 3.0


@pytest.mark.parametrize(
    ("reason", "outcome"),
    [
        (FinishReason.STOP, "completed"),
        (FinishReason.LENGTH, "completed"),
        (FinishReason.REPETITION, "completed"),
        (FinishReason.ABORT, "cancelled"),
        (FinishReason.ERROR, "failed"),
    ],
)
def test_what_vllm_ends_with_an_error_has_failed(model: Path, folder: str, reason: FinishReason, outcome: str) -> None:
    made, _ = watched(model, folder)
    made.add("a", [1] * 10, 5)
    made.step()
    last = SimpleNamespace(request_id="a", new_token_ids=[], finish_reason=reason)
    made.scheduler.rubato._book(last, made.now, 0)
    made.scheduler.rubato.policy.observe(made.scheduler.rubato.reporting.policy_events)
    (end,) = [e for e in made.policy.events if isinstance(e, Finished)]
    assert (end.outcome, end.verdict.met) == (outcome, outcome == "completed")
    made.scheduler.rubato.reporting.close()


def test_an_engine_core_that_begins_anew_has_lost_nothing(folder: str) -> None:
    reader = Reader(folder, [0], 0)
    for _ in range(2):
        made = CoreLink(None, link.endpoint(folder, 0))
        made.start(lambda: ABOUT, WallClock().now)
        heard(made, [reader])
        for step in range(3):
            made.tell_clients(EngineState(0, step + 1, {"step": step}))
        found = drained(reader)
        assert [message.lost for message in found] == [0, 0, 0]
        made.close()
    reader.close()


def test_an_engine_that_gave_up_keeps_nothing(model: Path, folder: str) -> None:
    made, reader = watched(model, folder)
    made.exact = False
    made.scheduler.rubato.policy.plan = lambda view: 1 / 0
    for i in range(60):
        made.add(f"r{i}", [i] * 10, 5)
        made.step()
    while made.scheduler.has_requests():
        made.step()
    driver = made.scheduler.rubato
    assert driver.guard.has_given_up
    assert driver.reporting.policy_events == driver.reporting.api_servers._new == []
    assert not driver.requests.seqs
    ends = [e for m in drained(reader) if isinstance(m, RequestEvents) for e in m.happened() if isinstance(e, Finished)]
    assert len(ends) == 60
    reader.close()
    driver.reporting.close()


def test_what_another_nodes_server_sealed_is_dropped_and_not_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(link.KEY, "theirs")
    said = sealed({"slo_ttft_ms": "300", "slo_tenant": "a", "slo_ticket": "t"})
    monkeypatch.setenv(link.KEY, "ours")
    params = SamplingParams(max_tokens=1, extra_args=said)
    own = SimpleNamespace(sampling_params=params, request_id="r", num_prompt_tokens=1, max_tokens=1, arrival_time=0.0)
    request, ticket = request_of(own, 0.0)
    assert (request.stages[0].slo.ttft, request.tenant, ticket) == (0.3, "default", "")


def test_longest_pause_inside_vllm_is_the_middlewares_word_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(link.KEY, "ours")

    def asked(extra: dict[str, str]) -> SLO:
        params = SamplingParams(max_tokens=1, extra_args=extra)
        own = SimpleNamespace(
            sampling_params=params, request_id="r", num_prompt_tokens=1, max_tokens=1, arrival_time=0.0
        )
        return request_of(own, 0.0)[0].stages[0].slo

    said = {"slo_tpot_ms": "50", "slo_max_pause_ms": "1000"}
    assert asked(sealed(said)) == SLO(tpot=0.05, max_pause=1.0)
    with pytest.raises(ValueError, match="unknown key 'slo_max_pause_ms'"):
        asked(said)
