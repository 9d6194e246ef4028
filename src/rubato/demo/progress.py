"""Progress of `rubato demo`: a line for each phase with the time left, and warnings about other programs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from rubato.core.clock import WallClock, process_cpu_time
from rubato.core.cpu_usage import TakenCores, cpu_seconds_of, usable_cores

MAX_OTHER_CORES = 0.25  # used by other programs; beyond it the result comes with a warning
LOAD_S = 24.0  # of load for each policy, on a machine that is not slow
CHECK_S = 14.0  # of each rate tried on the real server
BURST_S = 7.0  # the largest burst of the measurement should take this
SERVER_START_S = 6.0  # a server takes this to load
POLICY_TAIL_S = 10.0  # warm-up of a policy, and serving after the last arrival


@dataclass
class PhaseProgress:
    """Prints one line for each phase with the time left, and records how busy other programs kept the cores.

    Args:
        seconds: of load for each policy, as far as it is known.
    """

    policy: str
    seconds: float = LOAD_S
    phases_begun: int = 0
    current_phase: str = ""
    disturbances: list[str] = field(default_factory=list)

    def phases(self) -> list[tuple[str, float]]:
        """Each phase with about how many seconds it takes."""
        contest = SERVER_START_S + self.seconds + POLICY_TAIL_S
        return [
            ("measuring TTFT and decode step, unloaded", SERVER_START_S + 6.0),
            ("measuring steps of every kind, for the latency model", 2 * BURST_S),
            ("simulating which rate vllm holds", 5.0),
            ("trying that rate on the real server", SERVER_START_S + 2 * (CHECK_S + 4.0)),
            *((f"serving under {policy}", contest) for policy in ("vllm", "sarathi", self.policy)),
        ]

    def begin(self) -> None:
        """Begin the next phase."""
        phases = self.phases()
        minutes, seconds = divmod(round(sum(seconds for _, seconds in phases[self.phases_begun :])), 60)
        self.current_phase, _ = phases[self.phases_begun]
        self.phases_begun += 1
        say(
            f"[{self.phases_begun}/{len(phases)}] {self.current_phase} ...".ljust(66)
            + f"about {minutes}:{seconds:02} left"
        )

    @contextmanager
    def watch_cores(self, pid: int) -> Iterator[None]:
        """Record when programs other than this one and the server `pid` use the cores."""
        current_phase = self.current_phase
        others = TakenCores(WallClock(), own=lambda: process_cpu_time() + cpu_seconds_of(pid), window=0.0)
        yield
        if (taken := others.now()) > MAX_OTHER_CORES:
            self.disturbances.append(f"{taken:.1f} while {current_phase}")

    def disturbance(self) -> str:
        """A warning where other programs used the cores; "" where they did not."""
        if not self.disturbances:
            return ""
        return (
            f"other programs used some of this machine's {len(usable_cores())} cores ({', '.join(self.disturbances)}), "
            "and a policy that had more of that beside it than another looks worse than it is"
        )


def say(text: str) -> None:
    print(text, flush=True)
