"""Jobs on a Ray cluster: one node, started here."""

from __future__ import annotations

from math import isqrt
from pathlib import Path

import pytest

pytest.importorskip("ray")

from rubato.core.request import SLO
from rubato.fleet.cluster_options import PolicyChoice
from rubato.planning import jobs, sweep
from rubato.planning.jobs import Job
from rubato.planning.request_source import MixSource
from rubato.planning.sweep import Sweep
from rubato.simulation.run_spec import RunSpec, packaged_hardware
from rubato.workloads.request_kinds import chat


@pytest.mark.slow
def test_jobs_on_ray_give_the_local_runs_results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also of a policy in a file of the working folder; a job's error is its own; the file is taken up here."""
    monkeypatch.chdir(tmp_path)
    Path("mine.py").write_text("from rubato.policies.sarathi import Scheduler as Scheduler\n")
    source = MixSource((chat(SLO(0.5, 0.1)),), count=20)
    machine = packaged_hardware("smollm2-135m-cpu")
    asked = Sweep(source, tuple(RunSpec(machine, PolicyChoice(name)) for name in ("edf", "mine.py")), (2.0,), (0, 1))
    head = {"results": sweep.FORMAT, "sweep": asked.describe()}
    with jobs.open_runner(file="jobs", head=head, ray="local") as runner:
        values = runner.run(asked.jobs())
        with pytest.raises(ValueError, match=r"^isqrt\(\) argument must be nonnegative$"):
            runner.run([Job("bad", isqrt, (-1,)), Job("good", isqrt, (4,))])
    again = sweep.run(asked, workers=1, file="jobs")
    assert again.job_results.resumed == 4
    alone = sweep.run(asked, workers=1)
    assert alone.job_results.values == again.job_results.values == values


def test_no_ray_cluster_is_one_sentence() -> None:
    with pytest.raises(ValueError, match=r"--ray 127\.0\.0\.1:9: no Ray cluster answers there \(.*refused\)"):
        jobs.run([Job("n", isqrt, (1,))], ray="127.0.0.1:9")
    with pytest.raises(ValueError, match="--workers are this machine's: leave it out with --ray"):
        jobs.run([], workers=2, ray="auto")
