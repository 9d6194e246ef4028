"""The board in Chromium, by playwright-core: narrow and wide, light and dark, with keys, and when nobody answers.

Needs Debian's `chromium` (or another, named by CHROMIUM), node, and `npm install -g playwright-core` (or a folder with
it in NODE_PATH); skipped where one of them is absent. `BOARD_SCREENSHOTS=folder` keeps what was seen.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import threading
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import httpx2
import pytest

from tests.processes.conftest import Server, servers

SCRIPT = Path(__file__).with_name("look.cjs")
LONG = "x" * 64
TIERS = {"fast": {"ttft_ms": 5000, "tpot_ms": 500}, LONG: {"ttft_ms": 0.001}}


@cache
def _lacking() -> str:
    """What of a browser is not here; "" where all is."""
    if not _chromium():
        return "no chromium: apt install chromium, or set CHROMIUM"
    if not shutil.which("node"):
        return "no node"
    probe = subprocess.run(["node", "-e", "require('playwright-core')"], env=_env(), capture_output=True, check=False)
    return "no playwright-core: npm install -g playwright-core, or set NODE_PATH" if probe.returncode else ""


def _chromium() -> str | None:
    return os.environ.get("CHROMIUM") or shutil.which("chromium")


def _env() -> dict[str, str]:
    folders = [os.environ.get("NODE_PATH", "")]
    if npm := shutil.which("npm"):
        root = subprocess.run([npm, "root", "-g"], capture_output=True, text=True, check=False)
        folders.append(root.stdout.strip())
    return {**os.environ, "NODE_PATH": os.pathsep.join(filter(None, folders))}


def needs_browser() -> None:
    if lacking := _lacking():
        pytest.skip(lacking)


def seen(server: Server, what: str) -> list[Any]:
    words = ["node", str(SCRIPT), server.url, _chromium() or "", what, os.environ.get("BOARD_SCREENSHOTS", "")]
    done = subprocess.run(words, env=_env(), capture_output=True, text=True, timeout=180, check=False)
    assert done.returncode == 0, f"{done.stderr}\n{server.log}"
    found = json.loads(done.stdout)
    assert isinstance(found, list)
    return found


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    """One with two requests in flight, and a miss."""
    needs_browser()
    with servers(tmp_path) as start:
        at = start(tiers=TIERS, default_tier="fast", engine={"kind": "simulated", "max_num_seqs": 8})
        answer = httpx2.post(f"{at.url}/v1/completions", json=_body(service_tier=LONG, max_tokens=2))
        assert answer.json()["rubato"]["met"] is False
        threads = [threading.Thread(target=_stream, args=(at.url,), daemon=True) for _ in range(2)]
        for thread in threads:
            thread.start()
        yield at


def _body(**more: Any) -> dict[str, Any]:
    return {"model": "simulated", "prompt": "abc", **more}


def _stream(url: str) -> None:
    """Until the server is ended."""
    try:
        httpx2.post(f"{url}/v1/completions", json=_body(max_tokens=3000, ignore_eos=True), timeout=300)
    except httpx2.HTTPError:
        return


@pytest.mark.full
def test_narrow_and_wide_light_and_dark(server: Server) -> None:
    looks = seen(server, "look")
    assert [(look["width"], look["colorScheme"]) for look in looks] == [
        (390, "light"),
        (390, "dark"),
        (1400, "light"),
        (1400, "dark"),
    ]
    for look in looks:
        assert (look["console"], look["foreign"], look["dialogs"]) == ([], [], 0)
        assert look["wide"] == look["width"]  # nothing to scroll sideways to
        shown, (kept, best_effort) = look["shown"], look["runs"]
        assert set(shown["tiers"]) >= {"fast", LONG}
        assert (shown["requests"], shown["lanes"], shown["moving"]) == (2, 1, 0)
        assert "infeasible" in shown["causes"]
        assert all(word in shown["facts"] for word in ("simulated", "policy rubato", "0.1.0"))
        assert look["panel"]["verdict"].startswith(("Decodes at r0", "Its prompt runs"))
        assert look["panel"]["phases"] >= 1
        assert look["panel"]["events"] >= 3
        assert kept["verdict"].startswith("SLO met")
        assert best_effort["verdict"].startswith("Completed; no SLO was asked for")
        for run in look["runs"]:
            assert run["text"] == "la ti do re mi fa sol so "[: len(run["text"])] != ""
            assert run["facts"][2] == "8"
        assert (look["markup"]["elements"], look["markup"]["wide"]) == (0, look["width"])
        assert look["markup"]["shown"] > 10
        if look["width"] == 1400:
            assert look["tall"] == look["height"]  # one screen
    light, dark = {look["shown"]["ground"] for look in looks[::2]}, {look["shown"]["ground"] for look in looks[1::2]}
    assert len(light) == len(dark) == 1
    assert light != dark


@pytest.mark.full
def test_budgets_causes_and_what_is_not_known_are_worded(server: Server) -> None:
    (look,) = seen(server, "words")
    flag, used = "1.2× allowed misses", "1.2× used"
    assert (look["console"], look["status"]) == ([], f"late at 88\u202f%: {flag}")
    late, own, best_effort = look["cards"]
    assert late == [flag, "first token 5.0\u202fms", "of 100 on time", used]
    assert own == [flag, "SLO of each request", "of 100 on time", used]
    assert (best_effort[:2], best_effort[3]) == (["", "best effort"], None)
    assert "tokens/s" in best_effort[2]
    assert look["title"] == "Error budget: 10\u202f% of the requests may miss their SLO. 12\u202f% did."
    named = ["queue", "prefill interference", "decode interference", "preemption", "infeasible", "gateway"]
    assert look["legend"] == ["offered", "on time", *named, "other (client, failed)"]
    assert look["why"].startswith("Not reported: these servers have no plug-in")
    assert any(event.endswith("placedat gpu-4:8000") for event in look["events"])
    assert "late by 250\u202fms: first token 300\u202fms, then 20\u202fms each" in look["example"]


@pytest.mark.full
def test_every_part_is_reached_and_used_by_keys(server: Server) -> None:
    (look,) = seen(server, "keyboard")
    assert (look["console"], look["foreign"]) == ([], [])
    order = [name for name in ("search", "card", "outcomes-chart", "lane", "row", "group") if name in look["tabs"]]
    assert order == sorted(order, key=look["tabs"].index)
    assert len(order) == 6
    assert look["tabs"].count("card") == 1  # arrows go on from there
    assert look["filtered"] == [f"of {look['second']}", 1]
    assert (look["free"], look["search"]) == (0, "search")
    assert "ago" in look["moment"]
    assert look["opened"] == f"Request {look['id']}"
    assert look["closed"] == [True, "search"]
    assert (look["paused"], look["theme"]) == ("Paused", "dark")
    assert look["load"] == ["8 streams", "no load"]


@pytest.mark.full
def test_a_key_opens_it_and_is_forgotten(tmp_path: Path) -> None:
    needs_browser()
    with servers(tmp_path) as start:
        (look,) = seen(start(tenants={"a": {"keys": ["sk-a"]}}), "keys")
    assert (look["before"]["board"], look["foreign"]) == (False, [])
    assert "asks for an API key" in look["before"]["status"]
    assert "a: your requests" in look["own"]["facts"]
    assert look["own"]["fleet"] is False
    assert look["stored"] == [1, 0, ""]  # in this tab's session, and nowhere else
    assert (look["after"]["board"], look["after"]["stored"]) == (False, 0)
    assert not [line for line in look["console"] if "401" not in line]


@pytest.mark.full
def test_it_says_when_nobody_answers_and_rests_when_nobody_looks(server: Server) -> None:
    (look,) = seen(server, "silence")
    assert look["stale"] is True
    assert "Paused" in look["paused"]
    assert look["whileHidden"] == 0
    assert 2 <= look["whileSeen"] <= 5
