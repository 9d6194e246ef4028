"""Which URLs are taken as a server's address, and how hosts and failures are written."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable

import pytest

from rubato.core.server_url import check_url, connection_failure, host_in_url, server_base_url
from rubato.fleet.http_client import HttpServer
from rubato.fleet.server_probe import link_address
from rubato.fleet.upstream import UpstreamError
from rubato.measure.http_client import BenchError, list_models
from tests.stubs.vllm_server import MemoryReply

PASSWORD = "hush-hush"


@pytest.mark.parametrize(
    ("url", "base"),
    [
        ("http://10.0.0.7:8000", "http://10.0.0.7:8000"),
        ("https://vllm/", "https://vllm"),
        ("http://[fd00::7]:8000", "http://[fd00::7]:8000"),
        ("http://vllm-0.vllm.default.svc:8000/v1", "http://vllm-0.vllm.default.svc:8000"),
        ("http://10.0.0.7:8000/v1/", "http://10.0.0.7:8000"),
        ("http://10.0.0.7:8000/team-a", "http://10.0.0.7:8000/team-a"),
        ("https://10.0.0.7/team-a/b.2/v1", "https://10.0.0.7/team-a/b.2"),
        ("http://10.0.0.7/openai/v12", "http://10.0.0.7/openai/v12"),
        ("http://v1", "http://v1"),
    ],
)
def test_a_server_url_is_taken_with_its_path_and_without_v1(url: str, base: str) -> None:
    assert server_base_url(url, "") == base
    assert server_base_url(base, "") == base


@pytest.mark.parametrize(
    ("check", "url", "says"),
    [
        (check_url, "127.0.0.1:8000", "give http://127.0.0.1:8000"),
        (check_url, "localhost:8000", "give http://localhost:8000"),
        (check_url, "[fd00::7]:8000", r"give http://\[fd00::7\]:8000"),
        (check_url, "gpu-1", "give http://gpu-1"),
        (check_url, "ftp://10.0.0.7", "begins with http:// or https://"),
        (check_url, f"10.0.0.7:8000/?key={PASSWORD}", "begins with http:// or https://"),
        (check_url, "", "begins with http:// or https://"),
        (check_url, f"http://user:{PASSWORD}@10.0.0.7", "must not hold a user or a password.*; do this"),
        (check_url, f"http://user:{PASSWORD}/@10.0.0.7", "must not hold a user or a password.*; do this"),
        (check_url, f"user:{PASSWORD}@10.0.0.7:8000", "must not hold a user or a password.*; do this"),
        (server_base_url, f"http://{PASSWORD}@10.0.0.7", "must not hold a user or a password.*; do this"),
        (server_base_url, f"http://10.0.0.7:8000?key={PASSWORD}", "give the address of a server, such as"),
        (server_base_url, f"http://10.0.0.7:8000/v1?key={PASSWORD}", "give the address of a server, such as"),
        (server_base_url, f"http://10.0.0.7:8000/a#{PASSWORD}", "give the address of a server, such as"),
        (server_base_url, f"http://10.0.0.7 {PASSWORD}", "give the address of a server, such as"),
        (server_base_url, f"http://10.0.0.7/a {PASSWORD}", "give the address of a server, such as"),
        (server_base_url, "http://10.0.0.7/a/../b", "give the address of a server, such as"),
        (server_base_url, "http://10.0.0.7//a", "give the address of a server, such as"),
    ],
)
def test_another_url_is_refused_without_its_password(check: Callable[[str, str], object], url: str, says: str) -> None:
    with pytest.raises(ValueError, match=says) as error:
        check(url, "do this")
    assert PASSWORD not in str(error.value)


@pytest.mark.parametrize(
    ("host", "written"), [("::", "[::]"), ("fd00::7", "[fd00::7]"), ("127.0.0.1", "127.0.0.1"), ("vllm", "vllm")]
)
def test_a_host_in_a_url_stands_in_brackets_where_it_is_ipv6(host: str, written: str) -> None:
    assert host_in_url(host) == written


class Link:
    """A server that says where its link is."""

    def __init__(self, host: str, page: str = "") -> None:
        self.page = page or f'{{"host": "{host}", "port": 5557}}'

    async def open(self, *_: object, **__: object) -> MemoryReply:
        reply = MemoryReply(200, "application/json")
        reply.put(self.page.encode())
        reply.put(b"")
        return reply

    async def close(self) -> None: ...


@pytest.mark.parametrize(
    ("url", "host", "address"),
    [
        ("http://[fd00::7]", "0.0.0.0", "tcp://[fd00::7]:5557"),
        ("http://[fd00::7]:8000/", "::", "tcp://[fd00::7]:5557"),
        ("http://10.0.0.7", "0.0.0.0", "tcp://10.0.0.7:5557"),
        ("https://vllm-0:8000", "127.0.0.1", "tcp://vllm-0:5557"),
        ("http://10.0.0.7:8000", "10.0.0.7", "tcp://10.0.0.7:5557"),
        ("http://VLLM-0", "vllm-0", "tcp://vllm-0:5557"),
        ("http://127.0.0.1:8000", "127.0.0.2", "tcp://127.0.0.1:5557"),
    ],
)
def test_a_links_address_of_any_family_can_be_connected_to(url: str, host: str, address: str) -> None:
    assert asyncio.run(link_address(url, Link(host))) == address


@pytest.mark.parametrize("host", ["10.0.0.8", "fd00::8", "vllm-1", "10.0.0.7.example", ""])
def test_link_address_of_another_host_is_refused_and_names_the_setting(host: str) -> None:
    with pytest.raises(ValueError, match=r"server http://10\.0\.0\.7:8000 names .* on another host: .* link: tcp://"):
        asyncio.run(link_address("http://10.0.0.7:8000", Link(host)))


@pytest.mark.parametrize("page", ["{}", "[]", "no JSON", '{"host": "10.0.0.7"}', '{"host": "10.0.0.7", "port": "x"}'])
def test_link_address_that_cannot_be_read_is_a_sentence(page: str) -> None:
    with pytest.raises(ValueError, match="names no address"):
        asyncio.run(link_address("http://10.0.0.7:8000", Link("", page)))


def test_a_failed_connection_is_said_without_the_address() -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        port = closed.getsockname()[1]

        async def main() -> None:
            async with HttpServer(f"http://127.0.0.1:{port}") as server:
                with pytest.raises(UpstreamError, match=r"^connection refused$"):
                    await server.open("GET", "/health", (), b"")
            with pytest.raises(BenchError, match=f"^no OpenAI-compatible server at http://127.0.0.1:{port}/v1: conn"):
                await list_models(f"http://127.0.0.1:{port}")

        asyncio.run(main())


@pytest.mark.parametrize(
    ("error", "says"),
    [
        (TimeoutError("10.0.0.7"), "no answer in time"),
        (ConnectionResetError(104, "10.0.0.7"), "connection reset by peer"),
        (socket.gaierror(-2, "vllm-0 is not known"), "its name cannot be looked up"),
        (ValueError("10.0.0.7"), "ValueError"),
        (OSError("Multiple exceptions: 10.0.0.7"), "OSError"),
    ],
)
def test_a_failure_is_said_in_words_of_its_own(error: Exception, says: str) -> None:
    assert connection_failure(error) == says
