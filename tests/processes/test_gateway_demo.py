"""`rubato gateway --demo` as processes: it serves every tier, over four servers with the link, and leaves nothing."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest

from tests.processes.conftest import ROOT, STOP_SECONDS

TIERS = {"chat", "code", "summary", "batch"}
LIMIT_S = 120.0  # of a machine that does other things


@pytest.fixture
def demo(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [sys.executable, "-m", "rubato.cli", "gateway", "--demo", "--port", "0", "--policy", "edf"],
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=(tmp_path / "stderr").open("wb"), text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)])},
    )  # fmt: skip
    yield process
    process.kill()
    process.wait(STOP_SECONDS)
    assert process.stdout is not None
    process.stdout.close()


def board(url: str, until: Any) -> dict[str, Any]:
    """The board's numbers, once `until` says that they will do."""
    end = time.monotonic() + LIMIT_S
    while time.monotonic() < end:
        found: dict[str, Any] = httpx2.get(f"{url}/board.json").json()
        if until(found):
            return found
        time.sleep(0.2)
    raise AssertionError(f"not within {LIMIT_S} s: {found['tiers']}, {found['replicas']}")


def children(pid: int) -> list[int]:
    return [int(child) for each in Path(f"/proc/{pid}/task").glob("*/children") for child in each.read_text().split()]


@pytest.mark.slow
def test_demo_serves_every_tier_survives_a_killed_server_and_leaves_no_process(
    demo: subprocess.Popen[str], tmp_path: Path
) -> None:
    assert demo.stdout is not None
    said = ""
    while "Ctrl-C" not in said:
        line = demo.stdout.readline()
        assert line, (tmp_path / "stderr").read_text()
        said += line
    url = re.findall(r"http://\S+", said)[0]
    servers = {server: int(pid) for server, pid in re.findall(r"(http://\S+), process (\d+)", said)}
    assert httpx2.get(url).headers["content-type"] == "text/html; charset=utf-8"
    assert len(servers) == 4
    all_linked = dict.fromkeys(servers, "linked")  # one that was slow to answer is left out at first
    board(url, lambda shown: {row["url"]: row["link"] for row in shown["replicas"]} == all_linked)
    board(url, lambda shown: {tier["name"] for tier in shown["tiers"] if "completed" in tier["outcomes"]} == TIERS)
    own = children(demo.pid)
    assert set(servers.values()) < set(own)
    assert len(own) == 5  # and the load
    victim = min(servers)
    os.kill(servers[victim], signal.SIGKILL)
    board(url, lambda shown: victim in [row["url"] for row in shown["replicas"] if row["state"] == "lost"])
    demo.send_signal(signal.SIGINT)
    assert demo.wait(LIMIT_S) == 0, (tmp_path / "stderr").read_text()
    assert [pid for pid in own if Path(f"/proc/{pid}").exists()] == []
