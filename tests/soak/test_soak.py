"""`make soak-short`: four servers, a minute each, under load and faults drawn from a seed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.full
def test_servers_hold_for_four_minutes_of_faults(tmp_path: Path) -> None:
    words = [sys.executable, "-m", "tests.soak", "--minutes", "3", "--seed", "1", "--folder", str(tmp_path)]
    done = subprocess.run(words, cwd=Path(__file__).parents[2], capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("== ") == 4
