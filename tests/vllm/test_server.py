"""vLLM's real API server as a process, with the scheduler and the middleware, asked over HTTP."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from tests.vllm.test_routes import documented_paths

CONFIG = {
    "policy": "edf",
    "tiers": {
        "chat": {"ttft_ms": 60_000, "tpot_ms": 60_000},
        "strict": {"ttft_ms": 0.1, "on_decline": "refuse"},
        "hopeless": {"ttft_ms": 0.1},
    },
    "default_tier": "chat",
    "tenants": {
        "acme": {"keys": ["acme-key"], "tiers": ["chat", "strict", "hopeless"]},
        "other": {"keys": ["other-key"], "tiers": ["chat"]},
        "ops": {"keys": ["ops-key"], "admin": True},
    },
}
PROMPT = "w5 w6 w7"
READY = 240.0  # seconds


@contextlib.contextmanager
def server(model: Path, folder: Path, sockets: Path) -> Iterator[tuple[httpx.Client, subprocess.Popen[bytes], Path]]:
    (folder / "rubato.yaml").write_text(yaml.safe_dump(CONFIG))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    flags = {
        "--model": str(model), "--served-model-name": "m", "--port": str(port), "--host": "127.0.0.1",
        "--dtype": "float32", "--max-model-len": "8192", "--max-num-seqs": "8", "--block-size": "32",
        "--scheduler-cls": "rubato.vllm.Scheduler", "--middleware": "rubato.vllm.Middleware",
        "--additional-config": json.dumps({"rubato": {"config": str(folder / "rubato.yaml")}}),
    }  # fmt: skip
    words = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--enforce-eager"]
    words += ["--enable-prompt-tokens-details"]
    environment = {k: v for k, v in os.environ.items() if not k.startswith("VLLM_")}
    environment |= {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1", "TMPDIR": str(sockets)}
    environment |= {"VLLM_ENABLE_RESPONSES_API_STORE": "1"}
    log = folder / "log"
    with log.open("w") as out:
        process = subprocess.Popen(
            [*words, *(word for pair in flags.items() for word in pair)],
            stdout=out, stderr=subprocess.STDOUT, env=environment, start_new_session=True,
        )  # fmt: skip
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60.0) as http:
            until = time.monotonic() + READY
            while True:
                with contextlib.suppress(httpx.TransportError):
                    http.get("/health")
                    break
                assert process.poll() is None, log.read_text()[-3000:]
                assert time.monotonic() < until, log.read_text()[-3000:]
                time.sleep(0.5)
            yield http, process, log
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # the group that it was started as
        process.wait()


class Client:
    def __init__(self, http: httpx.Client) -> None:
        self.http = http

    def ask(self, kind: str = "chat", key: str = "acme-key", headers: Any = None, **more: Any) -> httpx.Response:
        path, said = {
            "chat": ("/v1/chat/completions", {"messages": [{"role": "user", "content": PROMPT}]}),
            "text": ("/v1/completions", {"prompt": PROMPT}),
            "responses": ("/v1/responses", {"input": PROMPT, "max_output_tokens": 4}),
            "messages": ("/v1/messages", {"messages": [{"role": "user", "content": PROMPT}]}),
        }[kind]
        body = {"model": "m", "max_tokens": 4, "ignore_eos": True, **said, **more}
        return self.send("POST", path, key, json=body, headers=headers)

    def send(self, method: str, path: str, key: str = "ops-key", headers: Any = None, **more: Any) -> httpx.Response:
        return self.http.request(method, path, headers={"authorization": f"Bearer {key}", **(headers or {})}, **more)

    def get(self, path: str) -> Any:
        return self.send("GET", path).json()

    def metrics(self, name: str) -> float:
        lines = self.http.get("/metrics").text.splitlines()
        return sum(float(line.rpartition(" ")[2]) for line in lines if re.match(name + r"[ {]", line))


def chunks(answer: httpx.Response) -> list[Any]:
    parts = [part.removeprefix("data: ") for part in answer.text.split("\n\n") if part]
    assert parts.pop() == "[DONE]"
    return [json.loads(part) for part in parts]


def test_a_server_with_the_middleware(speaking_model: Path, tmp_path: Path) -> None:
    # a short path, of which a socket file's name may be made
    with (
        tempfile.TemporaryDirectory() as sockets,
        server(speaking_model, tmp_path, Path(sockets)) as (http, process, log),
    ):
        client = Client(http)
        assert http.post("/v1/chat/completions", json={}).status_code == 401
        _verdicts(client)
        _refusals(client)
        _clients_that_leave(client)
        _counts(client)
        _caches_of_tenants(client)
        _responses_of_tenants(client)
        _paths_of_tenants(client)
        with http.stream("POST", "/v1/completions", **_long()) as answer:  # SIGTERM in the middle
            next(answer.iter_bytes())
            process.send_signal(signal.SIGTERM)
            process.wait(60)
        assert not list(Path(sockets).glob("rubato-*"))
        assert "src/rubato" not in log.read_text()  # in no traceback; vLLM itself writes one at its end


def _long() -> dict[str, Any]:
    """A stream that goes on for seconds on a fast machine, too."""
    body = {"model": "m", "prompt": PROMPT, "max_tokens": 8000, "ignore_eos": True, "stream": True}
    return {"json": body, "headers": {"authorization": "Bearer acme-key"}}


def _verdicts(client: Client) -> None:
    for kind in ("chat", "text"):
        whole = client.ask(kind)
        assert whole.status_code == 200
        assert (whole.json()["service_tier"], whole.json()["rubato"]["met"]) == ("chat", True)
        last = chunks(client.ask(kind, stream=True))[-1]
        assert (last["service_tier"], last["rubato"]["served"]) == ("chat", "slo")
        *_, before, last = chunks(client.ask(kind, stream=True, stream_options={"include_usage": True}))
        assert "rubato" not in before
        assert (last["usage"]["completion_tokens"], last["rubato"]["met"]) == (4, True)
    several = client.ask("text", prompt=[PROMPT, PROMPT], n=2)
    assert len(several.json()["rubato"]["choices"]) == 4
    page = client.get(f"/rubato/requests/{several.json()['id']}")
    assert (page["tenant"], page["state"], len(page["choices"])) == ("acme", "finished", 4)
    # soft admission: what is predicted late is served, as best effort
    late = client.ask(service_tier="hopeless").json()
    assert (late["service_tier"], late["rubato"]["tier"], late["rubato"]["met"]) == ("flex", "hopeless", False)
    assert late["rubato"]["cause"] is not None
    clamped = client.ask(headers={"x-slo-ttft-ms": "0.01"})
    assert clamped.headers["x-rubato-clamped"] == "ttft"
    assert client.ask(stop="w9").json()["rubato"] is not None


def _refusals(client: Client) -> None:
    for stream in (False, True):
        refused = client.ask(service_tier="strict", stream=stream)
        assert refused.status_code == 429, refused.text
        assert (refused.headers["x-should-retry"], "retry-after" in refused.headers) == ("false", False)
        assert refused.headers["x-rubato-reject-reason"] == "rejected-slo-infeasible"
    typo = client.ask(slo={"tfft_ms": 5})
    assert typo.status_code == 400
    assert "ttft_ms" in typo.json()["error"]["message"]
    assert client.ask(max_tokens=10_000).status_code == 400  # vLLM's own


def _clients_that_leave(client: Client) -> None:
    with client.http.stream("POST", "/v1/completions", **_long()) as answer:
        next(answer.iter_bytes())
    for _ in range(300):
        client.ask()  # a step, with which what happened before is told, though not before its answer
        if client.metrics('rubato_requests_finished_total{outcome="cancelled".*') == 1:
            break
        time.sleep(0.1)
    assert client.metrics('rubato_requests_finished_total{outcome="cancelled".*') == 1
    assert client.get("/rubato/state")["in_flight"] == {}


def _counts(client: Client) -> None:
    for _ in range(100):  # the last one's end is told after its answer
        if client.metrics("rubato_requests_offered_total") == client.metrics("rubato_requests_finished_total"):
            break
        time.sleep(0.1)
    assert client.metrics("rubato_requests_offered_total") == client.metrics("rubato_requests_finished_total") > 15
    met, missed = client.metrics('rubato_slo_met_total{dimension="all".*'), client.metrics("rubato_slo_missed_total")
    assert met + missed == client.metrics("rubato_requests_offered_total")
    for _ in range(100):  # steps are told at times, with another step
        if client.metrics("rubato_step_seconds_count") > 20 and client.metrics("rubato_plan_seconds_count") > 0:
            break
        client.ask()
        time.sleep(0.1)
    assert client.metrics("rubato_step_seconds_count") > 20
    assert client.metrics("rubato_plan_seconds_count") > 0
    assert client.metrics("rubato_plan_stood_aside_total") > 0
    assert client.metrics("rubato_plan_fallbacks_total") == 0
    assert client.metrics("rubato_plan_deviations_total") == client.metrics("rubato_plan_faults_total") == 0
    refused = client.metrics("rubato_requests_refused_total")  # for which vLLM counts a first token
    assert client.metrics("vllm:time_to_first_token_seconds_count") == (
        client.metrics("rubato_ttft_seconds_count") + refused
    )
    assert refused == 2
    (engine,) = client.get("/rubato/state")["engines"]
    assert (engine["policy"], engine["faults"], engine["given_up"]) == ("edf", {}, False)


def _caches_of_tenants(client: Client) -> None:
    """A prompt of another tenant is not found in the prefix cache, one's own is."""
    for at, (kind, field) in enumerate(
        [("chat", "messages"), ("text", "prompt"), ("responses", "input"), ("messages", "messages")]
    ):
        words = " ".join(f"w{200 + at} w{word}" for word in range(20, 70))
        prompt: Any = [{"role": "user", "content": words}] if field == "messages" else words
        cached = []
        for key in ("acme-key", "other-key", "acme-key", "other-key"):
            answer = client.ask(kind, key, **{field: prompt})
            found = re.search(r'"(?:cached_tokens|cache_read_input_tokens)":\s*(\d+)', answer.text)
            assert found is not None, answer.text
            cached.append(int(found[1]))
        assert cached[0] == cached[1] == 0, kind
        assert cached[2] == cached[3] == 96, kind


def _responses_of_tenants(client: Client) -> None:
    """A stored response is its tenant's; a refused one is a 429 in each form that a client may ask for."""
    stored = client.ask("responses", store=True).json()["id"]
    running = client.ask("responses", background=True, max_output_tokens=8000).json()["id"]
    for id in (stored, running):
        for key, status in (("acme-key", 200), ("ops-key", 200), ("other-key", 404)):
            assert client.send("GET", f"/v1/responses/{id}", key).status_code == status
        assert client.ask("responses", "other-key", previous_response_id=id).status_code == 404
        assert client.send("POST", f"/v1/responses/{id}/cancel", "other-key").status_code == 404
    assert client.ask("responses", previous_response_id=stored).status_code == 200
    assert client.send("POST", f"/v1/responses/{running}/cancel", "acme-key").json()["status"] == "cancelled"
    assert client.ask("responses", background=True, temperature=-1).status_code == 400
    before = client.metrics("rubato_requests_refused_total")
    for kind, form in (
        ("responses", {}), ("responses", {"stream": True}), ("responses", {"background": True}),
        ("responses", {"background": True, "stream": True}), ("messages", {"stream": True}),
    ):  # fmt: skip
        assert client.ask(kind, service_tier="strict", **form).status_code == 429, (kind, form)
    assert client.metrics("rubato_requests_refused_total") == before + 5
    for kind in ("responses", "messages"):
        answer = client.ask(kind, stream=True).text
        assert answer.count("event: response.created" if kind == "responses" else "event: message_start") == 1
    for _ in range(100):
        if not client.get("/rubato/state")["in_flight"]:
            break
        client.ask()
        time.sleep(0.1)
    assert client.get("/rubato/state")["in_flight"] == {}


def _paths_of_tenants(client: Client) -> None:
    paths = {path for path, methods in client.get("/openapi.json")["paths"].items() if methods.keys() - {"get"}}
    documented = documented_paths()
    assert paths <= documented.keys()
    for path in paths:
        refused = client.send("POST", path, "other-key", json={}).status_code == 403
        assert refused == (documented[path] == "an admin"), path
    unsealed = client.ask(vllm_xargs={"kv_transfer_params": "x"})
    assert (unsealed.status_code, unsealed.json()["error"]["param"]) == (400, "vllm_xargs.kv_transfer_params")


@pytest.mark.parametrize("config", ["tiers: {a: {ttft: 5}}", "default_tier: chatt", "latency: roofline"])
def test_a_file_that_is_wrong_ends_the_start_with_a_sentence(speaking_model: Path, tmp_path: Path, config: str) -> None:
    from rubato.vllm import Scheduler
    from tests.vllm.harness import engine_config

    path = tmp_path / "rubato.yaml"
    path.write_text(config)
    made = engine_config(str(speaking_model))
    made.additional_config = {"rubato": {"config": str(path)}}
    with pytest.raises(ValueError, match=r"ttft_ms|default_tier|affine"):
        Scheduler(made)
