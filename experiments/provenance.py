"""Where a run's numbers come from: commit, command, day and code; and what of that code has changed since.

The code that a figure measures is that of the policies which ran, and of what policies share (`policies`,
`policy_kit`). A run keeps a digest of each of these modules; a module whose digest is another now has changed, and the
page of the figure says so. Comments, docstrings and blank lines are in no digest: they change no number. What is under
the policies (replica, simulator, step times) is kept for figures that measure it (`CODE`); tests hold it to its
results.
"""

from __future__ import annotations

import ast
import io
import os
import subprocess
import sys
import tokenize
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from functools import cache
from hashlib import blake2b
from pathlib import Path
from typing import Any

import rubato
from rubato.core.clock import unix_time
from rubato.planning.jobs import Job

SEVERAL = "several"
PACKAGES = ("policies", "policy_kit")  # of `rubato`
ROOT = Path(rubato.__file__).parent
REPOSITORY = Path(__file__).parents[1]


def recorded(job: Job, also: Sequence[str] = ()) -> Job:
    """The same job, which also says which modules of policies, and of the packages `also`, were loaded where it ran:
    `values` and `code` take its results apart."""
    return Job(job.key, _with_code, (job.work, job.given, (*PACKAGES, *also)))


def _with_code(work: Any, given: tuple[Any, ...], packages: tuple[str, ...]) -> dict[str, Any]:
    return {"value": work(*given), "code": {module: _now(module) for module in loaded(packages)}}


def values(results: Sequence[Mapping[str, Any]]) -> list[Any]:
    """What recorded jobs returned."""
    return [result["value"] for result in results]


def code(results: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """Module -> digest of it, of every module that was loaded in some job; SEVERAL where it changed between jobs."""
    found: dict[str, str] = {}
    for result in results:
        for module, own in result["code"].items():
            found[module] = own if found.get(module, own) == own else SEVERAL
    return dict(sorted(found.items()))


def loaded(packages: Sequence[str] = PACKAGES) -> list[str]:
    """The modules of these packages in this process, as paths below ours: `policies/edf.py`."""
    files = (getattr(module, "__file__", None) for module in list(sys.modules.values()))
    within = (Path(file).relative_to(ROOT) for file in files if file and Path(file).is_relative_to(ROOT))
    prefixes = tuple(f"{own}/" for own in packages)
    return sorted(
        path.as_posix() for path in within
        if path.as_posix().startswith(prefixes) and not (path.name == "__init__.py" and path.parts[0] in PACKAGES)
    )  # fmt: skip


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


def changed(run: Mapping[str, Any]) -> list[str]:
    """The modules that a run measured and that are others now, or gone."""
    return [module for module, was in run["code"].items() if _now(module) != was]


@cache
def _now(module: str) -> str:
    file = ROOT / module
    return digest_of(file) if file.is_file() else ""


def digest_of(file: Path) -> str:
    """Of a module's code."""
    return digest(file.read_text(encoding="utf-8"))


def digest(text: str) -> str:
    """Of Python source without comments, docstrings and blank lines: the same in every version of Python."""
    lines = text.splitlines()
    for row, column in _comments(text):
        lines[row - 1] = lines[row - 1][:column]
    for first, last in _docstrings(ast.parse(text)):
        lines[first - 1 : last] = [""] * (last - first + 1)
    kept = "\n".join(line.rstrip() for line in lines if line.strip())
    return blake2b(kept.encode(), digest_size=8).hexdigest()


def _comments(text: str) -> Iterable[tuple[int, int]]:
    """Where comments begin: line from 1, column from 0."""
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    return [token.start for token in tokens if token.type == tokenize.COMMENT]


def _docstrings(tree: ast.Module) -> Iterable[tuple[int, int]]:
    """First and last line of each."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        if ast.get_docstring(node, clean=False) is not None:
            yield node.body[0].lineno, node.body[0].end_lineno or node.body[0].lineno
