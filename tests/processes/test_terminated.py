"""A command that is told to end (SIGTERM) takes what it started with it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

SECONDS = 60.0


def children(pid: int) -> list[int]:
    """Of all its threads."""
    return [int(child) for each in Path(f"/proc/{pid}/task").glob("*/children") for child in each.read_text().split()]


def alive(session: int) -> bool:
    try:
        os.killpg(session, 0)
    except ProcessLookupError:
        return False
    return True


FIGURE = ["experiments", "simulator-fidelity", "--small"]  # starts a server
LONG = (
    "rubato.cli sweep --profile opt-13b-2xa100-40g --scenario slos-serve-chatbot --policy slos_serve --rates 20 "
    "--count 50000 --seeds 0,1 --workers 2"
)


@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="children are looked up in /proc")
@pytest.mark.parametrize(("words", "starts"), [(FIGURE, 1), (LONG.split(), 2)], ids=["server", "jobs"])
@pytest.mark.slow
def test_what_a_command_started_ends_with_it(tmp_path: Path, words: list[str], starts: int) -> None:
    """Its server; jobs that would take minutes yet."""
    path = [str(Path(__file__).parents[2]), *filter(None, [os.environ.get("PYTHONPATH")])]
    env = os.environ | {"PYTHONPATH": os.pathsep.join(path)}  # where `experiments` is
    command = [sys.executable, "-m", *words, "--no-progress"]
    with subprocess.Popen(command, cwd=tmp_path, env=env, start_new_session=True) as process:
        until = time.monotonic() + SECONDS
        while len(children(process.pid)) < starts and time.monotonic() < until:
            time.sleep(0.02)
        assert len(children(process.pid)) >= starts, "it should have started others"
        process.send_signal(signal.SIGTERM)
        try:
            assert process.wait(SECONDS) == 128 + signal.SIGTERM
        finally:
            if process.poll() is None:  # else leaving `with` would wait for ever
                os.killpg(process.pid, signal.SIGKILL)
    until = time.monotonic() + SECONDS
    while alive(process.pid) and time.monotonic() < until:  # Python's own, that looks after semaphores, ends by itself
        time.sleep(0.02)
    assert not alive(process.pid), "a process of its session is left"


STUCK = """
import signal, sys, threading
from rubato.planning import jobs
jobs.SHUTDOWN_SECONDS = 0.5
jobs.ProcessPoolExecutor.shutdown = lambda pool, **how: threading.Event().wait()
with jobs._pool(2):
    sys.exit(143)
"""


@pytest.mark.slow
def test_a_pool_that_does_not_end_keeps_nobody_waiting() -> None:
    assert subprocess.run([sys.executable, "-c", STUCK], timeout=SECONDS, check=False).returncode == 143
