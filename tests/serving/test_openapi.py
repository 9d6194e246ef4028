"""The OpenAPI document against the server: whatever is sent by it, no 5xx and no status that it does not name."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Iterator
from typing import Any

import httpx2
import pytest
import schemathesis
import uvicorn
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
    unsupported_method,
)

from rubato.core.clock import WallClock
from rubato.core.plan import Limits
from rubato.core.replica_options import ReplicaOptions
from rubato.core.request import SLO
from rubato.engines.simulated import Engine
from rubato.fleet.build import local_cluster
from rubato.fleet.cluster_options import ClusterOptions, PolicyChoice
from rubato.frontdoor.slo_fields import Tier, Tiers
from rubato.frontdoor.tenants import Tenants
from rubato.latency.affine import Model
from rubato.serving.app import Service, create_app
from rubato.serving.connections import Connections
from rubato.serving.stalled_clients import stall_guard
from tests.conftest import examples
from tests.kit.asgi import key, tenant

CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_schema_conformance,
    unsupported_method,
]
HI = {"role": "user", "content": "hi"}
EXAMPLES = examples(20, 60)  # an operation and a test
TIERS = Tiers([Tier("fast", SLO(1.0, 0.2))])
TENANTS = Tenants([tenant("a"), tenant("limited", tiers=("flex",), requests_per_minute=5)], TIERS)


async def _run(listening: socket.socket, started: threading.Event, ended: threading.Event, found: list[Any]) -> None:
    clock = WallClock()
    takes, learns = (Model(k=(0.0, 0.0), b=(1e-5, 0.0)) for _ in range(2))  # what learns must not be the truth
    engine = Engine(takes, Limits(8, 512, 256, 64, 16), clock)
    options = ClusterOptions(PolicyChoice("edf"), ReplicaOptions(prefix_cache=True))
    cluster = local_cluster([engine], [learns], clock, options)
    await cluster.start()
    app = create_app(Service(cluster, "simulated", 256, engine.text, tenants=TENANTS, max_body_bytes=4096))
    found.append(app.openapi())
    http = stall_guard(5.0, Connections(100))
    server = uvicorn.Server(uvicorn.Config(app, http=http, lifespan="off", ws="none", log_level="critical"))
    task = asyncio.create_task(server.serve(sockets=[listening]))
    started.set()
    await asyncio.to_thread(ended.wait)
    server.should_exit = True
    await task
    await cluster.close()


@pytest.fixture(scope="module")
def url_and_document() -> Iterator[tuple[str, Any]]:
    """A server in a thread, on a free port."""
    started, ended, found = threading.Event(), threading.Event(), []
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP) as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen()
        url = "http://{}:{}".format(*listening.getsockname())
        thread = threading.Thread(target=lambda: asyncio.run(_run(listening, started, ended, found)))
        thread.start()
        try:
            assert started.wait(10)
            yield url, found[0]
        finally:
            ended.set()
            thread.join(20)
        assert not thread.is_alive()


def operations(url_and_document: tuple[str, Any]) -> list[Any]:
    url, found = url_and_document
    schema = schemathesis.openapi.from_dict(found)
    schema.config.update(base_url=url)
    return [result.ok() for result in schema.get_all_operations()]


LIMITS = settings(
    max_examples=EXAMPLES, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck)
)


@pytest.mark.parametrize("mode", [GenerationMode.POSITIVE, GenerationMode.NEGATIVE])
def test_whatever_the_document_allows_or_forbids(url_and_document: tuple[str, Any], mode: GenerationMode) -> None:
    asked = set()
    for operation in operations(url_and_document):
        if mode == GenerationMode.NEGATIVE and not (operation.body or operation.path_parameters):
            continue  # nothing about it could be wrong

        @LIMITS
        @given(case=operation.as_strategy(generation_mode=mode), own=st.booleans())
        def ask(case: schemathesis.Case, own: bool) -> None:
            if isinstance(case.body, dict) and isinstance(case.body.get("model"), str):
                case.body["model"] = "simulated"  # past the first check, so that what else is said is looked at too
            if mode == GenerationMode.POSITIVE and isinstance(case.body, dict):
                case.body["max_tokens"] = 3
                if not own:
                    case.body |= {"prompt": "abc"} if "chat" not in case.path else {"messages": [HI]}
            case.call_and_validate(headers=key("a"), checks=CHECKS, timeout=20)

        ask()
        asked.add(operation.path)
    assert len(asked) >= 4


def test_without_a_key_with_a_wrong_one_and_beyond_a_limit(url_and_document: tuple[str, Any]) -> None:
    for operation in operations(url_and_document):
        if not operation.path.startswith(("/v1", "/debug", "/board")):
            continue

        @settings(LIMITS, max_examples=8)
        @given(case=operation.as_strategy())
        def ask(case: schemathesis.Case) -> None:
            for headers in ({}, {"authorization": "Bearer nobody"}, key("limited")):
                answer = case.call(headers=headers, timeout=20)
                case.validate_response(answer, checks=CHECKS, headers=headers)
                if headers != key("limited"):
                    assert answer.status_code == 401 or "invalid_path" in answer.text

        ask()


def bodies(text: bool) -> Any:
    """Bodies that mostly are valid, so that most of them reach the engine."""
    ms = st.none() | st.floats(1e-3, 1e9)
    prompt = st.text(min_size=1, max_size=50)
    slo = st.fixed_dictionaries({}, optional={"ttft_ms": ms, "tpot_ms": ms, "e2e_ms": ms})
    messages = st.lists(st.fixed_dictionaries({"role": st.just("user"), "content": prompt}), min_size=1, max_size=3)
    ids = st.lists(st.integers(0, 255) | st.integers(0, 2**70), min_size=1, max_size=40)
    several = st.lists(prompt, min_size=1, max_size=4) | st.lists(
        st.lists(st.integers(0, 255), min_size=1, max_size=9), min_size=1, max_size=4
    )
    content: Any = {"prompt": prompt | ids | several} if text else {"messages": messages}
    logprobs = {"logprobs": st.integers(0, 20)} if text else {"top_logprobs": st.integers(0, 20)}
    penalty = st.floats(-2, 2)
    optional = {
        "n": st.integers(1, 4),
        "min_p": st.floats(0, 1),
        "presence_penalty": penalty,
        "frequency_penalty": penalty,
        "repetition_penalty": st.floats(0.01, 100),
        "stop_token_ids": st.lists(st.integers(0, 2**63 - 1) | st.integers(0, 20), max_size=8),
        **logprobs,
        "temperature": st.none() | st.floats(0, 2),
        "top_p": st.floats(0.1, 1),
        "top_k": st.integers(-1, 100),
        "seed": st.integers(-(2**63), 2**63 - 1),
        "stop": st.none() | prompt | st.lists(prompt, max_size=4),
        "stream": st.booleans(),
        "service_tier": st.sampled_from(["fast", "flex", "auto", "default", "priority"]),
        "ignore_eos": st.booleans(),
        "user": st.text(),
        "slo": slo,
    }
    usual = {"model": st.just("simulated"), "max_tokens": st.integers(1, 20), **content}
    if not text:
        usual["logprobs"] = st.booleans()
    return st.fixed_dictionaries(usual, optional=optional).map(_top_with_logprobs)


def _top_with_logprobs(body: dict[str, Any]) -> dict[str, Any]:
    return {k: v for k, v in body.items() if k != "top_logprobs" or body["logprobs"]}


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_valid_bodies_are_answered(url_and_document: tuple[str, Any], path: str) -> None:
    statuses: list[int] = []
    with httpx2.Client(base_url=url_and_document[0], headers=key("a"), timeout=20) as http:

        @LIMITS
        @given(body=bodies(text=not path.startswith("/v1/chat")))
        def ask(body: dict[str, Any]) -> None:
            answer = http.post(path, json=body)
            assert answer.status_code in (200, 400), answer.text
            statuses.append(answer.status_code)

        ask()
        assert statuses.count(200) > len(statuses) / 2


def test_nothing_is_left_behind(url_and_document: tuple[str, Any]) -> None:
    families = text_string_to_metric_families(httpx2.get(f"{url_and_document[0]}/metrics").text)
    value = {s.name: s.value for family in families for s in family.samples if s.name.startswith("rubato_")}
    assert value["rubato_requests_in_flight"] == 0
    assert value["rubato_kv_blocks_free"] == value["rubato_kv_blocks_total"]


def test_the_document_says_what_a_client_must_know(url_and_document: tuple[str, Any]) -> None:
    document = url_and_document[1]
    chat = document["paths"]["/v1/chat/completions"]["post"]
    assert {"200", "400", "401", "404", "413", "429", "500", "503"} == set(chat["responses"])
    assert "422" not in str(document["paths"])
    assert {p["name"] for p in chat["parameters"]} >= {"x-slo-ttft-ms", "x-slo-tpot-ms", "x-slo-e2e-ms"}
    assert chat["security"] == [{"key": []}]
    assert "security" not in document["paths"]["/health"]["get"]
    body = document["paths"]["/v1/completions"]["post"]["requestBody"]["content"]["application/json"]["schema"]
    kinds = body["properties"]["prompt"]["anyOf"]
    assert [kind.get("items", {}).get("type") for kind in kinds] == [None, "integer", "string", "array"]
