"""Schedulers for `vllm_plugin.py` that say what they cost: one line a step in the file that STEPS_FILE names.

Loaded by vLLM, inside its own environment. Both sides are watched by the same code. A line: the monotonic clock at the
end, CPU seconds of the thread in `schedule` and in `update_from_output`, tokens, sequences, plans not carried out.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

from vllm.v1.core.sched.scheduler import Scheduler

from rubato.engines.vllm.scheduler import SyncScheduler


class Timed(Scheduler):  # type: ignore[misc]
    """vLLM's own scheduler, timed."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.lines = Path(os.environ["STEPS_FILE"]).open("w", buffering=1)  # noqa: SIM115 - open as long as the engine
        self.planned = 0.0

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        begin = time.thread_time()
        output = super().schedule(*args, **kwargs)
        self.planned = time.thread_time() - begin
        return output

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any:
        begin = time.thread_time()
        outputs = super().update_from_output(scheduler_output, model_runner_output)
        booked = time.thread_time() - begin
        if tokens := scheduler_output.total_num_scheduled_tokens:
            seqs, missed = len(scheduler_output.num_scheduled_tokens), self.deviations()
            print(time.monotonic(), self.planned, booked, tokens, seqs, missed, file=self.lines)
        return outputs

    def deviations(self) -> int:
        return 0


class TimedRubato(Timed, SyncScheduler):
    """The plug-in, timed."""

    def deviations(self) -> int:
        return int(self.rubato.guard.deviations.total())
