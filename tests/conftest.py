"""Hypothesis profiles, and which tests take turns where others run beside each other.

Profiles, chosen by HYPOTHESIS_PROFILE: `quick` for `make test`, `ci` for `.ci/run`, `more` for `make test-full`, `full`
for the numbers that are reported. A test marked `full` runs in `make test-full` only; one marked `slow`, which takes
seconds of real time with real processes, in `make test-slow` and `.ci/run`, too.
"""

import gc
import logging
import os
import signal
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

slow = [HealthCheck.too_slow, HealthCheck.data_too_large]
settings.register_profile("ci", max_examples=40, deadline=None, derandomize=True, suppress_health_check=slow)
settings.register_profile("quick", settings.get_profile("ci"), max_examples=16)
settings.register_profile("more", settings.get_profile("ci"), max_examples=240)
settings.register_profile("full", max_examples=2000, deadline=None, suppress_health_check=slow)
PROFILE = os.environ.get("HYPOTHESIS_PROFILE", "quick")
settings.load_profile(PROFILE)


def examples(ci: int, more: int) -> int:
    """How many a test takes: two fifths of `ci` in `make test`, `ci` in `.ci/run`, else `more`."""
    return {"quick": max(1, 2 * ci // 5), "ci": ci}.get(PROFILE, more)


few = settings(max_examples=examples(10, settings.default.max_examples))  # whole simulations


@pytest.fixture
def process_as_it_was() -> Iterator[None]:
    """For what runs a command in the process of the tests: it sets up the log and the signals of its process."""
    root, numbers = logging.getLogger(), (signal.SIGTERM, signal.SIGINT)
    handlers, level, signals = root.handlers[:], root.level, [signal.getsignal(number) for number in numbers]
    yield
    root.handlers[:] = handlers
    root.setLevel(level)
    for number, handler in zip(numbers, signals, strict=True):
        signal.signal(number, handler)


PROCESSES = (
    "cli/test_bench.py",
    "cli/test_demo.py",
    "experiments/test_fidelity.py",
    "experiments/test_figures.py::test_a_figure_gives_its_claims_and_its_checks_hold[simulator-fidelity]",
    "measure/",
    "planning/test_ray_jobs.py",
    "docs/test_runs.py",
    "fleet/test_ray_",
    "processes/",
    "serving/board/",
    "serving/test_openapi.py",
    "soak/",
)
# Tests that one worker of pytest-xdist runs one after another: those with processes, sockets and real time; PyTorch's;
# those of a file whose fixture, or what they read, takes long.
GROUPS = (
    PROCESSES,
    ("engines/",),
    ("docs/test_docstrings.py",),
    ("docs/test_site.py",),
    ("experiments/test_figures.py",),
    ("planning/test_fleet_size.py",),
)


def pytest_collection_finish() -> None:
    """All that was imported stays: the garbage collector need not look through it again and again."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(optionalhook=True)  # without pytest-xdist nobody asks
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """What is in no group goes to whoever is free. (pytest-xdist's own groups, 3.8, get lost in pytest 9.2's ids.)"""
    from xdist.scheduler import LoadScopeScheduling

    class Grouped(LoadScopeScheduling):  # type: ignore[misc]
        def _split_scope(self, nodeid: str) -> str:
            own = nodeid.removeprefix("tests/")
            return next((group[0] for group in GROUPS if own.startswith(group)), nodeid)

    return Grouped(config, log)
