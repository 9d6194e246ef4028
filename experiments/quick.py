"""The figures whose small form takes seconds, one after the other in one process: `python -m experiments --quick`."""

from __future__ import annotations

from pathlib import Path

import experiments
from rubato.planning.jobs import Job, open_runner

# 31 CPU s, of four papers' figures that run by themselves; and live servers, which take minutes of the wall clock
LEFT_OUT = frozenset({"host-today", "simulator-fidelity"})


class CheckError(Exception):
    """A check of a figure does not hold."""


def run(file: Path) -> int:
    """Prints each figure's CPU seconds; what `file` says has run does not run again. Its end removes the file. Returns
    1 where a check does not hold, and stops there."""
    with open_runner(file=file, head={"figures": "quick"}, workers=1) as runner:
        for name in [name for name in experiments.names() if name not in LEFT_OUT]:
            resumed = runner.job_results().resumed
            try:
                runner.run([Job(name, _check, (name,))])
            except CheckError as error:
                print(error)
                return 1
            done = runner.job_results()
            if done.resumed == resumed:
                print(f"{name}: {done.results[-1].cpu:.1f} s", flush=True)
    if done.resumed:
        print(f"{done.resumed} figures have run, says {file}: without it they run again")
    print(f"{len(done.results)} figures in their small form: {done.cpu:.0f} CPU s")
    file.unlink()
    return 0


def _check(name: str) -> None:
    """Runs a figure in its small form. Raises CheckError."""
    if failed := experiments.failed(experiments.run(name, small=True, workers=1)):
        raise CheckError(f"{name}: these checks do not hold: {', '.join(failed)}")
