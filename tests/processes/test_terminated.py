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
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="children are looked up in /proc")
def test_the_server_of_a_figure_ends_with_it(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "rubato.cli", "figure", "simulator-fidelity", "--small", "--no-progress"]
    with subprocess.Popen(command, cwd=tmp_path, start_new_session=True) as process:
        until = time.monotonic() + SECONDS
        while not children(process.pid) and time.monotonic() < until:
            time.sleep(0.02)
        assert children(process.pid), "it should have started a server"
        process.send_signal(signal.SIGTERM)
        assert process.wait(SECONDS) == 128 + signal.SIGTERM
    with pytest.raises(ProcessLookupError):  # nobody of its session is left
        os.killpg(process.pid, 0)
