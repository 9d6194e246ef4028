"""When a server of a fleet is ready: whatever one answers before it is, the others serve, and it is taken back."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Awaitable, Callable
from dataclasses import replace

import pytest

from rubato.fleet.cluster import Cluster
from rubato.fleet.cluster_options import ClusterOptions
from rubato.fleet.server_replica import ServerReplica
from tests.fleet.test_server_fleet import options, serving, used
from tests.kit.servers import Served
from tests.stubs.vllm_server import StubServer

MODELS, LINK = "/v1/models", "/rubato/link"
CHOSEN = options("edf", {}, "least_loaded")
NOT_READY = [
    ("/health", 500, b""),
    ("/health", 503, b"loading"),
    ("/health", 0, b""),
    ("/health", 401, b""),
    (MODELS, 0, b""),
    (MODELS, 401, b"{}"),
    (MODELS, 404, b'{"detail":"Not Found"}'),
    (MODELS, 503, b""),
    *[
        (MODELS, 200, body)
        for body in (
            b"", b"<html>", b"\xff", b"[]", b"5", b"null", b"{}", b'{"data":null}', b'{"data":[]}', b'{"data":5}',
            b'{"data":[5]}', b'{"data":[{}]}', b'{"data":["stub"]}', b'{"data":[{"id":5}]}', b'{"data":[{"id":null}]}',
            b'{"data":[{"id":["stub"]}]}', b'{"data":[{"id":"other"}]}', b"[" * 100_000,
        )
    ],
    (LINK, 0, b""),
    (LINK, 503, b""),
    *[
        (LINK, 200, body)
        for body in (
            b"", b"<html>", b"[]", b"5", b"{}", b'{"host":"h"}', b'{"host":"h","port":"x"}', b"{}" * 9,
            b'{"host":"h","port":null}', b'{"host":"h","port":99999}', b'{"host":"","port":5557}',
        )
    ],
]  # fmt: skip
ODD_LENGTH = [
    (MODELS, 200, b'{"data":[{"id":"stub","max_model_len":%b}]}' % value)
    for value in (b"-1", b'"x"', b"1e99", b"99999999999999999999", b"[1]", b"true")
]


def of_three(
    scenario: Callable[[Served], Awaitable[None]], *, linked: bool | None = True, chosen: ClusterOptions = CHOSEN,
    change: Callable[[list[StubServer]], None] = lambda servers: None,
) -> None:  # fmt: skip
    """A cluster over three servers, which say themselves where their links are. linked: None where none is asked
    for."""

    def say_links(servers: list[StubServer]) -> None:
        for server in servers:
            server.pages[LINK] = (200, b'{"host":"0.0.0.0","port":5557}') if linked else (404, b"{}")
        change(servers)

    serving(scenario, chosen=chosen, change=say_links, **({"link": None} if linked is None else {}))


def addresses(cluster: Cluster) -> list[str]:
    return sorted(host.url for host in cluster.hosts.values() if isinstance(host, ServerReplica))


@pytest.mark.parametrize(
    ("linked", "path", "status", "body"),
    [*[(True, *case) for case in NOT_READY], *[(False, *case) for case in ODD_LENGTH]],
)
def test_lost_server_that_answers_oddly_is_taken_back_once_it_answers_rightly(
    linked: bool, path: str, status: int, body: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario(fleet: Served) -> None:
        odd, other = fleet.servers[:2]
        right = odd.pages.get(path)
        odd.down = odd.core.silent = True
        await asyncio.sleep(20.0)
        assert addresses(fleet.cluster) == ["http://s1", "http://s2"]
        odd.pages[path] = (status, body)
        odd.down = odd.core.silent = False
        await asyncio.sleep(20.0)
        assert addresses(fleet.cluster) == ["http://s1", "http://s2"]
        odd.pages.pop(path)
        if right is not None:
            odd.pages[path] = right
        await asyncio.sleep(5.0)
        assert addresses(fleet.cluster) == ["http://s0", "http://s1", "http://s2"]
        assert all(host.is_linked == linked for host in fleet.cluster.hosts.values() if isinstance(host, ServerReplica))
        other.down = other.core.silent = True  # another one is lost after it, and comes back, too
        await asyncio.sleep(20.0)
        assert addresses(fleet.cluster) == ["http://s0", "http://s2"]
        other.down = other.core.silent = False
        await asyncio.sleep(5.0)
        assert addresses(fleet.cluster) == ["http://s0", "http://s1", "http://s2"]

    with caplog.at_level(logging.WARNING):
        of_three(scenario, linked=linked)
    waits = [record for record in caplog.records if "is waited for" in record.message]
    assert len([record for record in waits if "http://s0" in record.message]) == 1
    assert "autoscaler" not in caplog.text


def test_start_says_of_each_server_without_the_link_that_batches_follow_its_order_and_what_to_do(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def change(servers: list[StubServer]) -> None:
        servers[1].pages[LINK] = (404, b"{}")

    async def scenario(fleet: Served) -> None:
        assert addresses(fleet.cluster) == ["http://s0", "http://s1", "http://s2"]

    with caplog.at_level(logging.WARNING):
        of_three(scenario, change=change)
    (said,) = [record.message for record in caplog.records if "has no link" in record.message]
    assert said.startswith("server http://s1 has no link")
    assert "its batches follow its own order" in said
    assert "--scheduler-cls rubato.vllm.Scheduler --middleware rubato.vllm.Middleware" in said
    given = json.loads(said.partition("--additional-config '")[2].partition("'")[0])
    assert given == {"rubato": {"policy": "edf", "link": {}}}


def test_what_to_do_names_all_that_the_batches_depend_on(caplog: pytest.LogCaptureFixture) -> None:
    """Of an endpoint picker, too, which never has the link."""
    chosen = options("edf", {"fairness": 0.1}, "least_loaded")
    chosen = replace(chosen, replica=replace(chosen.replica, slo_rule="windowed"))
    told = {"policy": "edf", "settings": {"fairness": 0.1}, "slo_rule": "windowed"}

    async def scenario(fleet: Served) -> None:
        assert len(fleet.cluster.hosts) == 3

    for linked, more in ((False, {"link": {}}), (None, {})):
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            of_three(scenario, linked=linked, chosen=chosen)
        said = [record.message for record in caplog.records if "has no link" in record.message]
        assert len(said) == 3
        for text in said:
            assert json.loads(text.partition("--additional-config '")[2].partition("'")[0]) == {"rubato": told | more}


@pytest.mark.parametrize(
    ("linked", "path", "status", "body"),
    [*[(True, *case) for case in NOT_READY], *[(False, *case) for case in ODD_LENGTH]],
)
def test_server_that_answers_oddly_at_the_start_is_waited_for_while_others_serve(
    linked: bool, path: str, status: int, body: bytes
) -> None:
    def change(servers: list[StubServer]) -> None:
        servers[1].pages[path] = (status, body)

    async def scenario(fleet: Served) -> None:
        await asyncio.sleep(5.0)
        assert addresses(fleet.cluster) == ["http://s0", "http://s2"]
        other, odd = fleet.servers[:2]
        del odd.pages[path]
        if path == LINK:
            odd.pages[path] = other.pages[path]
        await asyncio.sleep(5.0)
        assert addresses(fleet.cluster) == ["http://s0", "http://s1", "http://s2"]

    of_three(scenario, linked=linked, change=change)


def test_start_fails_with_the_reasons_where_no_server_is_ready() -> None:
    async def scenario(fleet: Served) -> None:
        raise AssertionError("it has started")

    def change(servers: list[StubServer]) -> None:
        servers[0].down = True
        servers[1].pages[MODELS] = (200, b'{"data":[]}')
        servers[2].pages["/health"] = (503, b"")

    with pytest.raises(ValueError, match=r"s0 is not there .*; .*s1: /v1/models names no model yet; .*s2 is not there"):
        of_three(scenario, change=change)


@pytest.mark.parametrize("page", ["vllm:cache_config_info{", used("x").replace('"100"', '"' + "9" * 5000 + '"'), "\0"])
def test_metrics_that_cannot_be_read_keep_no_server_back(page: str) -> None:
    def change(servers: list[StubServer]) -> None:
        for server in servers:
            server.metrics = page

    async def scenario(fleet: Served) -> None:
        await asyncio.sleep(5.0)
        assert len(fleet.cluster.hosts) == 3

    of_three(scenario, linked=False, change=change)


@pytest.mark.parametrize("linked", [True, False])
def test_server_without_health_is_ready_and_watched_by_its_list_of_models(linked: bool) -> None:
    def change(servers: list[StubServer]) -> None:
        servers[0].pages["/health"] = (404, b'{"detail":"Not Found"}')

    async def scenario(fleet: Served) -> None:
        await asyncio.sleep(20.0)
        assert list(fleet.cluster.hosts) == ["r0", "r1", "r2"]
        fleet.servers[0].pages[MODELS] = (0, b"")
        await asyncio.sleep(20.0)
        assert list(fleet.cluster.hosts) == ["r1", "r2"]
        del fleet.servers[0].pages[MODELS]
        await asyncio.sleep(5.0)
        assert len(fleet.cluster.hosts) == 3

    of_three(scenario, linked=linked, change=change)
