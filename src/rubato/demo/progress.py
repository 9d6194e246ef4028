"""What `rubato demo` says while it runs: its phases with the time left, and what other programs did meanwhile."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from rubato.core.clock import WallClock, process_cpu_time
from rubato.core.cpu_usage import TakenCores, cpu_seconds_of, usable

DISTURBED = 0.25  # cores that other programs used: beyond it the result is to be read with care
SECONDS = 24.0  # of load for each policy, where the machine is not slow
CHECK_SECONDS = 14.0  # of each rate tried on the real server
BURST_SECONDS = 7.0  # what the largest burst of the measurement should take
SERVING = "serving under"
START = 6.0  # seconds that a server takes to load
TAIL = 10.0  # that a policy takes to warm up, and to serve what is left when the last request has come


@dataclass
class Progress:
    """One line for each phase, with the time left; and what other programs did meanwhile."""

    policy: str
    left: list[tuple[str, float]] = field(init=False)  # phases to come, with about how many seconds each takes
    disturbances: list[str] = field(default_factory=list)
    phases: int = field(init=False)

    def __post_init__(self) -> None:
        self.left = [
            ("measuring TTFT and decode step, unloaded", START + 6.0),
            ("measuring steps of every kind, for the latency model", 2 * BURST_SECONDS),
            ("simulating which rate vllm holds", 5.0),
            ("trying that rate on the real server", START + 2 * (CHECK_SECONDS + 4.0)),
            *((f"{SERVING} {policy}", 0.0) for policy in ("vllm", "sarathi", self.policy)),
        ]
        self.phases = len(self.left)
        self.contest_takes(SECONDS)

    def contest_takes(self, seconds: float) -> None:
        each = START + seconds + TAIL
        self.left = [(name, each if name.startswith(SERVING) else old) for name, old in self.left]

    def begin(self) -> None:
        """The next phase begins."""
        minutes, seconds = divmod(round(sum(seconds for _, seconds in self.left)), 60)
        number = self.phases - len(self.left) + 1
        name, _ = self.left.pop(0)
        say(f"[{number}/{self.phases}] {name} ...".ljust(66) + f"about {minutes}:{seconds:02} left")

    @contextmanager
    def watched(self, what: str, pid: int) -> Iterator[None]:
        """Note it when programs other than this one and the server `pid` use the cores."""
        others = TakenCores(WallClock(), own=lambda: process_cpu_time() + cpu_seconds_of(pid), window=0.0)
        yield
        if (taken := others.now()) > DISTURBED:
            self.disturbances.append(f"{taken:.1f} while {what}")

    def disturbance(self) -> str:
        """How to read a result that other programs had a part in; "" where they had none."""
        if not self.disturbances:
            return ""
        return (
            f"other programs used some of this machine's {len(usable())} cores ({', '.join(self.disturbances)}), "
            "and a policy that had more of that beside it than another looks worse than it is"
        )


def say(text: str) -> None:
    print(text, flush=True)


def ms(seconds: float | None) -> str:
    return "-" if seconds is None else f"{1e3 * seconds:.0f} ms"
