"""What `rubato demo` says while it runs: its phases with the time left, and what other programs did meanwhile."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from rubato.core.clock import WallClock, process_cpu_time
from rubato.core.cpu_usage import TakenCores, cpu_seconds_of, usable_cores

DISTURBED = 0.25  # cores that other programs used: beyond it the result is to be read with care
SECONDS = 24.0  # of load for each policy, where the machine is not slow
CHECK_SECONDS = 14.0  # of each rate tried on the real server
BURST_SECONDS = 7.0  # what the largest burst of the measurement should take
START = 6.0  # seconds that a server takes to load
TAIL = 10.0  # that a policy takes to warm up, and to serve what is left when the last request has come


@dataclass
class Progress:
    """One line for each phase, with the time left; and what other programs did meanwhile. seconds: of load for each
    policy, as far as it is known."""

    policy: str
    seconds: float = SECONDS
    begun: int = 0  # phases
    doing: str = ""  # the phase that began last
    disturbances: list[str] = field(default_factory=list)

    def phases(self) -> list[tuple[str, float]]:
        """All of them, with about how many seconds each takes."""
        contest = START + self.seconds + TAIL
        return [
            ("measuring TTFT and decode step, unloaded", START + 6.0),
            ("measuring steps of every kind, for the latency model", 2 * BURST_SECONDS),
            ("simulating which rate vllm holds", 5.0),
            ("trying that rate on the real server", START + 2 * (CHECK_SECONDS + 4.0)),
            *((f"serving under {policy}", contest) for policy in ("vllm", "sarathi", self.policy)),
        ]

    def begin(self) -> None:
        """The next phase begins."""
        phases = self.phases()
        minutes, seconds = divmod(round(sum(seconds for _, seconds in phases[self.begun :])), 60)
        self.doing, _ = phases[self.begun]
        self.begun += 1
        say(f"[{self.begun}/{len(phases)}] {self.doing} ...".ljust(66) + f"about {minutes}:{seconds:02} left")

    @contextmanager
    def watched(self, pid: int) -> Iterator[None]:
        """Note it when programs other than this one and the server `pid` use the cores."""
        doing = self.doing
        others = TakenCores(WallClock(), own=lambda: process_cpu_time() + cpu_seconds_of(pid), window=0.0)
        yield
        if (taken := others.now()) > DISTURBED:
            self.disturbances.append(f"{taken:.1f} while {doing}")

    def disturbance(self) -> str:
        """How to read a result that other programs had a part in; "" where they had none."""
        if not self.disturbances:
            return ""
        return (
            f"other programs used some of this machine's {len(usable_cores())} cores ({', '.join(self.disturbances)}), "
            "and a policy that had more of that beside it than another looks worse than it is"
        )


def say(text: str) -> None:
    print(text, flush=True)
