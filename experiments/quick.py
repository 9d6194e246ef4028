"""The figures whose small form takes seconds, on all cores: `python -m experiments --quick`, a step of `.ci/run`."""

from __future__ import annotations

import json
from hashlib import blake2b
from pathlib import Path

import experiments
from rubato.planning.jobs import Job, open_runner

# 31 CPU s, of four papers' figures that run by themselves; and live servers, which take minutes of the wall clock
ROOT = Path(__file__).parents[1]
LEFT_OUT = frozenset({"host-today", "simulator-fidelity"})


class CheckError(Exception):
    """A figure gives something else than it must."""


def run(file: Path, workers: int | None = None) -> int:
    """Prints each figure's CPU seconds; what `file` says has run with this very code does not run again. Its end
    removes the file. Returns 1 where a check does not hold, and stops there. workers: processes (None: one a core)."""
    names = [name for name in experiments.names() if name not in LEFT_OUT]
    alone = [name for name in names if getattr(experiments.load(name), "ALONE", False)]
    sources = [*ROOT.glob("src/**/*.py"), *ROOT.glob("experiments/**/*.py"), ROOT / "experiments/claims.yaml"]
    code = blake2b(b"".join(source.read_bytes() for source in sorted(sources))).hexdigest()
    if file.exists() and code not in file.read_text(encoding="utf-8").partition("\n")[0]:
        file.unlink()  # of other code or claims
    with open_runner(file=file, head={"figures": "quick", "code": code}, workers=workers) as runner:
        try:
            # Those that measure time run one at a time, after the others.
            for group in ([name for name in names if name not in alone], *([name] for name in alone)):
                runner.run([Job(name, check, (name,)) for name in group])
        except CheckError as error:
            print(error)
            return 1
        done = runner.job_results()
    if done.resumed:
        print(f"{done.resumed} figures have run, says {file}: without it they run again")
    print(f"{len(done.results)} figures in their small form, whose checks hold: {done.cpu:.0f} CPU s")
    file.unlink()
    return 0


def check(name: str) -> None:
    """Runs a figure in its small form. Raises CheckError for what it must not give."""
    figure, data = experiments.load(name), experiments.run(name, small=True, workers=1)
    wrong = [f"these checks do not hold: {', '.join(failed)}"] if (failed := experiments.failed(data)) else []
    if [claim["name"] for claim in data["claims"]] != list(experiments.claims()[name]):
        wrong.append("its claims are not those of claims.yaml")
    if lacking := {"seeds", "versions", "slo_rule", "settings", "wall", "cpu", "source"} - data.keys():
        wrong.append(f"its JSON lacks {', '.join(sorted(lacking))}")
    for claim in data["claims"]:
        is_whole = {"kind", "paper", "unit", "relation", "verdict"} <= claim.keys()
        if not (is_whole and claim["low"] <= claim["ours"] <= claim["high"]):
            wrong.append(f"claim {claim['name']} lacks a field, or is not within its interval")
    json.dumps(data["data"])
    if not (figure.SECONDS > 0.0 and len(figure.jobs(False)) >= len(figure.jobs(True)) > 0):
        wrong.append("its full run takes no time, or has fewer jobs than its small run")
    if wrong:
        raise CheckError(f"{name}: {'; '.join(wrong)}")
    print(f"{name}: {data['cpu']:.1f} s", flush=True)
