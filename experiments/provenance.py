"""Where a run's numbers come from: commit, command and day, and what its policies do otherwise since.

A run keeps the behaviour digests (`golden`) of the policies that its jobs loaded, and of what else its figure says that
it measures (`BEHAVIOURS`). A figure is older than its code where one of these is another now; code that was moved or
renamed changes no number.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import rubato
from experiments import golden
from rubato.core.clock import unix_time
from rubato.planning.jobs import Job

POLICIES = Path(rubato.__file__).parent / "policies"
REPOSITORY = Path(__file__).parents[1]


def recorded(job: Job) -> Job:
    """The same job, which also says which policies were loaded where it ran: `values` and `behaviour` take its results
    apart."""
    return Job(job.key, _with_policies, (job.work, job.args))


def _with_policies(work: Any, given: tuple[Any, ...]) -> dict[str, Any]:
    return {"value": work(*given), "policies": loaded()}


def values(results: Sequence[Mapping[str, Any]]) -> list[Any]:
    """What recorded jobs returned."""
    return [result["value"] for result in results]


def loaded() -> list[str]:
    """The policies and routers whose modules are loaded in this process."""
    files = (getattr(module, "__file__", None) for module in list(sys.modules.values()))
    within = {
        Path(file).relative_to(POLICIES).parts[0] for file in files if file and Path(file).is_relative_to(POLICIES)
    }
    return sorted(name.removesuffix(".py") for name in within - {"__init__.py"})


def behaviour(results: Sequence[Mapping[str, Any]], measures: Sequence[str] = ()) -> golden.Digests:
    """The digests of all policies that were loaded in some job, and of `measures`, as they are meant to be now."""
    names = {name for result in results for name in result["policies"]} | set(measures)
    return {name: runs for name, runs in golden.recorded().items() if name in names}


def changed(run: Mapping[str, Any]) -> list[str]:
    """The policies that a run measured and that do otherwise now, or are gone."""
    return golden.differing(run["behaviour"], golden.recorded())


def origin(arguments: Sequence[str]) -> dict[str, str]:
    """Commit, day and command of a run that begins now. commit: with `+` where files under version control differ from
    it, "" where there is no git."""
    command = " ".join(["python -m experiments", *arguments])
    return {
        "commit": _commit(),
        "date": datetime.fromtimestamp(unix_time(), UTC).date().isoformat(),
        "command": command,
    }


def _commit() -> str:
    def git(*words: str) -> str:
        return subprocess.run(
            ["git", "-C", str(REPOSITORY), *words], capture_output=True, text=True, check=True,
            env={**os.environ, "GIT_OPTIONAL_LOCKS": "0"},
        ).stdout.strip()  # fmt: skip

    try:
        return git("rev-parse", "HEAD") + ("+" if git("status", "--porcelain", "--untracked-files=no") else "")
    except (OSError, subprocess.CalledProcessError):
        return ""
