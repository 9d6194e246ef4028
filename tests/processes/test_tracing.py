"""Spans of a real server reach a collector before it ends."""

from __future__ import annotations

from typing import Any

import httpx2

from tests.processes.conftest import Start
from tests.serving.test_tracing import collector, sent  # noqa: F401  # a fixture


def test_server_sends_its_last_spans_before_it_ends(start: Start, collector: tuple[str, list[Any]]) -> None:  # noqa: F811
    url, came = collector
    server = start(otlp_traces_endpoint=f"{url}/v1/traces")
    body = {"model": "simulated", "prompt": "abc", "max_tokens": 2}
    assert httpx2.post(f"{server.url}/v1/completions", json=body, timeout=60).status_code == 200
    assert httpx2.get(f"{server.url}/health", timeout=60).status_code == 200
    assert server.end() == 0
    assert sent(came) == {"rubato": ["POST /v1/completions"]}
