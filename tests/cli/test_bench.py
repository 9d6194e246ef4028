"""`rubato bench` as typed, against a scripted server in a thread: what it sends to which kind of server."""

import asyncio
import json
import threading

import pytest
from aiohttp import web

from rubato.cli.main import main
from tests.measure.test_load_generator import Scripted

FIXED = {"ignore_eos": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}}
PLAIN = {"stream_options": {"include_usage": True}}


@pytest.fixture
def server():
    scripted, ready, loop = Scripted(), threading.Event(), asyncio.new_event_loop()
    scripted.all_bodies = []

    async def chat(request):
        scripted.all_bodies.append(await request.json())
        return await scripted.chat(request)

    async def serve():
        app = web.Application()
        app.router.add_get("/v1/models", scripted.models)
        app.router.add_post("/v1/chat/completions", chat)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        scripted.url = f"http://127.0.0.1:{site._server.sockets[0].getsockname()[1]}"
        scripted.stop = asyncio.Event()
        ready.set()
        await scripted.stop.wait()
        await runner.cleanup()

    thread = threading.Thread(target=lambda: loop.run_until_complete(serve()))
    thread.start()
    assert ready.wait(10.0)
    yield scripted
    loop.call_soon_threadsafe(scripted.stop.set)
    thread.join(10.0)
    loop.close()


def benched(server, tmp_path, *words):
    """The JSON of two short rounds, and the body of the last request."""
    out = tmp_path / "out.json"
    options = ["--rate", "100", "--count", "4", "--rounds", "2", "--no-progress", "--max-delay", "60"]
    assert main(["bench", server.url, *options, "--json", str(out), *words]) == 0
    return json.loads(out.read_text()), server.all_bodies[-1]


@pytest.mark.parametrize(
    ("owner", "words", "sent"),
    [
        ("rubato 0.1.0", [], {**FIXED, "slo": {"ttft_ms": 9000.0, "tpot_ms": 800.0}}),
        ("rubato 0.1.0", ["--slo-as", "none"], FIXED),
        ("vllm 0.1.0", [], {**FIXED, "slo": {"ttft_ms": 9000.0, "tpot_ms": 800.0}}),  # a gateway, or the plug-in
        ("somebody 0.1.0", [], {**PLAIN, "slo": {"ttft_ms": 9000.0, "tpot_ms": 800.0}}),
        ("vllm", [], FIXED),
        (
            "vllm",
            ["--slo-as", "vllm-xargs", "--no-ignore-eos"],
            {
                "stream_options": FIXED["stream_options"],
                "vllm_xargs": {"slo_ttft_ms": 9000.0, "slo_tpot_ms": 800.0, "slo_tier": "chat"},
            },
        ),
        ("somebody", [], PLAIN),
        ("somebody", ["--slo-as", "body"], {**PLAIN, "slo": {"ttft_ms": 9000.0, "tpot_ms": 800.0}}),
        ("somebody", ["--ignore-eos"], {**PLAIN, "ignore_eos": True}),
    ],
)
def test_a_server_gets_only_the_fields_it_knows(server, tmp_path, capsys, owner, words, sent):
    server.owner, _, server.version = owner.partition(" ")
    slos = [word for tier in ("chat", "code", "summary") for word in (f"--{tier}", "9000,800")]
    data, body = benched(server, tmp_path, *words, *slos)
    says = capsys.readouterr().err.count("no SLO is sent, since this server is not known to take them")
    assert says == (not server.version and "--slo-as" not in words)
    if "vllm_xargs" in body:
        body["vllm_xargs"]["slo_tier"] = "chat"  # whichever came last
    common = {"model", "messages", "max_tokens", "temperature", "stream"}
    assert {name: value for name, value in body.items() if name not in common} == sent
    assert common <= body.keys()
    assert [run["workload"]["seed"] for run in data["runs"]] == [0, 1]
    (rows,) = data["policies"].values()
    assert (rows[-1]["offered"], rows[-1]["completed"], rows[-1]["met"]) == (8, 8, 8)


def test_goodput_key_and_headers_of_the_command(server, tmp_path, monkeypatch):
    server.key = "k1"
    monkeypatch.setenv("OPENAI_API_KEY", "k1")
    data, _ = benched(server, tmp_path, "--header", "x-team=blue", "--goodput", "ttft:9000", "e2el:90000")
    assert server.headers["x-team"] == "blue"
    assert data["runs"][0]["goodput"] == {"ttft": 9.0, "tpot": None, "e2e": 90.0}
    assert data["policies"]["run"][-1]["good"] == 8
    assert "k1" not in (tmp_path / "out.json").read_text()
    assert main(["bench", server.url, "--api-key", "wrong"]) == 2


def test_best_effort_requests_are_sent_without_a_word_on_slos(server, tmp_path, capsys):
    kinds = tmp_path / "mix.yaml"
    kinds.write_text("{tiers: {free: {}}, kinds: [{app: chat, tier: free}]}")
    benched(server, tmp_path, "--kinds", str(kinds))
    assert "SLO" not in capsys.readouterr().err
