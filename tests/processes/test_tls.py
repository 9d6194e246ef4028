"""TLS by a certificate made here, and a configuration that cannot work said at once."""

from __future__ import annotations

import json
import socket
import ssl
import subprocess
import time
from pathlib import Path

import httpx2
import openai
import pytest

from tests.processes.conftest import Start

TIMEOUT = 60.0
SUBJECT = ["-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1,DNS:localhost"]


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """A self-signed one; its key is encrypted."""
    folder = tmp_path_factory.mktemp("tls")
    cert, key = folder / "cert.pem", folder / "key.pem"
    made = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-days", "2", "-passout", "pass:hush"]
    subprocess.run([*made, "-keyout", str(key), "-out", str(cert), *SUBJECT], check=True, capture_output=True)
    return {"cert": str(cert), "key": str(key), "key_password": "hush"}


def test_the_official_client_over_tls(start: Start, certificate: dict[str, str]) -> None:
    server = start(tls=certificate, tenants={"a": {"keys": ["sk-a"]}})
    assert server.url.startswith("https://")
    trust = ssl.create_default_context(cafile=certificate["cert"])
    with openai.OpenAI(
        base_url=f"{server.url}/v1",
        api_key="sk-a",
        max_retries=0,
        timeout=TIMEOUT,
        http_client=openai.DefaultHttpxClient(verify=trust),
    ) as client:
        answer = client.chat.completions.create(
            model="simulated", messages=[{"role": "user", "content": "hi"}], max_tokens=4
        )
        assert answer.choices[0].message.content == "la ti do re "
        chunks = list(client.completions.create(model="simulated", prompt="x" * 1000, max_tokens=40, stream=True))
        assert len(chunks) == 41
    with pytest.raises(httpx2.ConnectError, match="CERTIFICATE"):
        httpx2.get(f"{server.url}/health", timeout=TIMEOUT)
    with pytest.raises(httpx2.TransportError):
        httpx2.get(server.url.replace("https", "http") + "/health", timeout=TIMEOUT)
    assert server.end() == 0
    assert "hush" not in server.log


@pytest.mark.full
def test_a_client_that_does_not_read_is_cut_off_over_tls_too(start: Start, certificate: dict[str, str]) -> None:
    fast = {"kind": "affine", "k": [0.0, 0.0], "b": [0.001, 0.0]}
    engine = {"kind": "simulated", "max_model_len": 20_000, "kv_blocks": 8192}
    server = start(tls=certificate, stall_seconds=1.0, latency=fast, engine=engine)
    trust = ssl.create_default_context(cafile=certificate["cert"])
    host, port = server.url.removeprefix("https://").split(":")
    body = {"model": "simulated", "prompt": "hi", "max_tokens": 15_000, "stream": True}
    content = json.dumps(body).encode()
    plain = socket.socket()
    plain.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1024)
    plain.connect((host, int(port)))
    with trust.wrap_socket(plain, server_hostname="127.0.0.1") as connection:
        connection.sendall(
            b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(content) + content
        )
        with httpx2.Client(verify=trust, timeout=TIMEOUT) as http:
            for _ in range(400):
                if 'outcome="cancelled",tenant="default",tier="default"} 1.0' in http.get(f"{server.url}/metrics").text:
                    break
                time.sleep(0.1)
            else:
                pytest.fail("still not cut off")
    assert server.end() == 0


@pytest.mark.full
def test_silent_and_trickling_connections_give_way_to_others(start: Start, certificate: dict[str, str]) -> None:
    server = start(tls=certificate, max_connections=8)
    trust = ssl.create_default_context(cafile=certificate["cert"])
    host, port = server.url.removeprefix("https://").split(":")
    held = []
    for number in range(30):
        connection = socket.create_connection((host, int(port)), timeout=TIMEOUT)
        if number % 3:  # else not even a handshake
            connection = trust.wrap_socket(connection, server_hostname="127.0.0.1")
            connection.sendall(b"GET /health HTTP/1.1\r\nX: ")
        held.append(connection)
    with httpx2.Client(verify=trust, timeout=TIMEOUT) as http:
        assert http.get(f"{server.url}/health").status_code == 200
        over = http.post(f"{server.url}/v1/completions", content=b" " * (10 << 20))
        assert (over.status_code, over.headers["connection"]) == (413, "close")
    for connection in held:
        connection.close()
    assert server.end() == 0
    assert "Traceback" not in server.log


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"key_password": "wrong"}, "cannot be used"),
        pytest.param({"key_password": None}, "cannot be used", marks=pytest.mark.full),
        pytest.param({"cert": "no/such/file.pem"}, "No such file", marks=pytest.mark.full),
    ],
)
def test_a_certificate_that_cannot_be_used(
    start: Start, certificate: dict[str, str], change: dict[str, str | None], says: str
) -> None:
    server = start(wait=False, tls={**certificate, **change})
    assert server.end(None) == 2
    assert "rubato: tls:" in server.log
    assert says in server.log
    assert "wrong" not in server.log


@pytest.mark.slow
def test_keys_from_a_file_and_the_environment(start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keys = tmp_path.parent / f"{tmp_path.name}.keys"
    keys.write_text("# of team a\nsk-one\n\nsk-two\n")
    monkeypatch.setenv("KEYS_OF_B", "sk-three, sk-four")
    server = start(tenants={"a": {"key_file": str(keys)}, "b": {"keys_env": "KEYS_OF_B"}})
    for key in ("sk-one", "sk-two", "sk-three", "sk-four"):
        answer = httpx2.get(f"{server.url}/v1/models", headers={"authorization": f"Bearer {key}"}, timeout=TIMEOUT)
        assert answer.status_code == 200
    assert httpx2.get(f"{server.url}/v1/models", timeout=TIMEOUT).status_code == 401
    assert server.end() == 0
    wrong = ({"key_file": "no/such"}, "tenants.a.key_file"), ({"keys_env": "NOT_SET"}, "NOT_SET")
    for server, says in [(start(wait=False, tenants={"a": tenant}), says) for tenant, says in wrong]:
        assert server.end(None) == 2
        assert says in server.log
        assert "Traceback" not in server.log


def test_a_log_of_the_steps_alone(start: Start, tmp_path: Path) -> None:
    steps = tmp_path.parent / f"{tmp_path.name}.steps"
    server = start(step_log=str(steps))
    body = {"model": "simulated", "prompt": "hi", "max_tokens": 7}
    assert httpx2.post(f"{server.url}/v1/completions", json=body, timeout=TIMEOUT).status_code == 200
    assert server.end() == 0
    lines = [json.loads(line) for line in steps.read_text().splitlines()]
    assert len(lines) == 7
    assert {line["kind"] for line in lines} == {"Stepped"}
