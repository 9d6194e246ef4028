"""Keeps faults of the policy and of the plug-in from vLLM, and counts and logs what goes wrong."""

from __future__ import annotations

import logging
from collections import Counter, deque
from collections.abc import Callable, Iterable
from functools import wraps
from math import inf
from typing import Any, Concatenate, ParamSpec, TypeVar

from rubato.core.clock import WallClock
from rubato.engines.vllm.link import FAULT_PLACES

log = logging.getLogger("vllm.rubato")  # below vLLM's own logger, whose handler and level it gets
LOG_PAUSE_S = 60.0  # between two log lines of one kind of fault or deviation
MAX_FAULTS, FAULT_WINDOW_S = 10, 60.0  # more faults in this window: vLLM schedules in its own order from then on
MAX_PLAN_S = 1.0  # a slower plan counts as a fault

P = ParamSpec("P")
R = TypeVar("R")


def guarded(method: Callable[Concatenate[Any, P], R]) -> Callable[Concatenate[Any, P], R | None]:
    """Wraps a method of an object with a `guard`: a fault in it is counted and logged, and the caller, vLLM's own code,
    gets None.

    Raises:
        ValueError: the method's name is not in FAULT_PLACES.
    """
    place = FAULT_PLACES[FAULT_PLACES.index(method.__name__.lstrip("_"))]

    @wraps(method)
    def call(self: Any, /, *args: P.args, **kwargs: P.kwargs) -> R | None:
        try:
            return method(self, *args, **kwargs)
        except Exception:
            self.guard.record_fault(place)
            return None

    return call


class Guard:
    """Counts steps and what went wrong in them, and gives the policy up when too much does.

    `steps` counts batches scheduled, `fallbacks` steps in vLLM's own order after a fault, `stood_aside` steps in vLLM's
    own order because every SLO has slack, `deviations` steps that vLLM did not carry out as planned, by cause (a step
    may have several), `faults` errors of the policy, of its plans and in the plug-in, by place, `refused` requests.
    Once `has_given_up` no step is planned any more.

    Args:
        policy: its name.
        clock: of the engine core.
        give_up: called once, when the policy is given up.
    """

    def __init__(self, policy: str, clock: WallClock, give_up: Callable[[], None]) -> None:
        self.steps = self.fallbacks = self.stood_aside = self.refused = 0
        self.deviations: Counter[str] = Counter()
        self.faults: Counter[str] = Counter()
        self.has_given_up = False
        self._policy, self._clock, self._give_up = policy, clock, give_up
        self._fault_times: deque[float] = deque(maxlen=MAX_FAULTS)  # of the last faults, less the slow plans
        self._slow_plan_seconds = 0.0  # spent on plans that were too slow
        self._logged_at: dict[str, float] = {}  # when each kind of fault, and a deviation, was last logged

    def record_fault(self, place: str) -> None:
        """Counts the current exception, and logs it, each place once in LOG_PAUSE_S seconds."""
        self.count_fault(place)
        if self._should_log(place):
            log.exception(
                "policy %r failed at step %d, in %s; vLLM goes on in its own order; faults so far: %d",
                self._policy, self.steps, place, self.faults.total(),
            )  # fmt: skip

    def record_harmless_fault(self, place: str, message: str, *args: object) -> None:
        """Counts and logs the current exception, which is no reason to give the policy up."""
        self.faults[place] += 1
        if self._should_log(place):
            log.exception(message, *args)

    def count_fault(self, place: str) -> None:
        """Counts a fault, and gives the policy up after MAX_FAULTS in FAULT_WINDOW_S seconds."""
        now = self._clock.now() - self._slow_plan_seconds  # else the slowest policy would be given up last
        self.faults[place] += 1
        self._fault_times.append(now)
        are_many = len(self._fault_times) == MAX_FAULTS and now - self._fault_times[0] <= FAULT_WINDOW_S
        if are_many and not self.has_given_up:
            self.has_given_up = True
            self._give_up()
            log.error(
                "policy %r: %d faults in %.0f s: from now on this engine schedules in vLLM's own order, until it is "
                "started again", self._policy, MAX_FAULTS, now - self._fault_times[0],
            )  # fmt: skip

    def record_plan(self, seconds: float) -> None:
        """Counts a plan that took too long as a fault."""
        if seconds > MAX_PLAN_S:
            self._slow_plan_seconds += seconds
            self.count_fault("slow")
            if self._should_log("slow"):
                log.warning("policy %r took %.1f s to plan step %d", self._policy, seconds, self.steps)

    def record_refusal(self, id: str, reason: str) -> None:
        """Counts a refused request. Under overload many are refused: the log has one line in LOG_PAUSE_S seconds."""
        self.refused += 1
        if self._should_log("refused"):
            log.warning("request %.100s refused: %s; refused so far: %d", id, reason, self.refused)  # ids are clients'

    def record_deviation(self, causes: Iterable[str], about: str) -> None:
        """Counts a step that vLLM did not carry out as planned.

        Args:
            causes: words of `docs/vllm.md`'s table.
            about: what differs, for the log.
        """
        self.deviations.update(causes)
        if self._should_log("deviation"):
            log.warning(
                "vLLM did not carry out the plan of step %d: %s; causes so far: %s",
                self.steps, about, ", ".join(f"{cause} {n}" for cause, n in sorted(self.deviations.items())),
            )  # fmt: skip

    def _should_log(self, what: str) -> bool:
        """Returns whether to log this now: a fault may repeat at every step."""
        now = self._clock.now()
        if now < self._logged_at.get(what, -inf) + LOG_PAUSE_S:
            return False
        self._logged_at[what] = now
        return True
