"""Factors on simulated steps: what text names, what they are, and that a run is the same in both drivers."""

from __future__ import annotations

from itertools import islice
from math import log
from pathlib import Path

import numpy as np
import pytest

from rubato.engines.simulated import step_noise


def drawn(noise: step_noise.Noise, count: int, seed: int = 0) -> list[float]:
    found = step_noise.factors(noise, seed)
    assert found is not None
    return list(islice(found, count))


def test_none_where_steps_take_what_the_model_says() -> None:
    assert step_noise.factors(0.0, 0) is None
    assert step_noise.factors("iid:0", 0) is None


def test_a_spread_by_any_of_its_names_is_the_same() -> None:
    assert drawn(0.05, 3000) == drawn("0.05", 3000) == drawn("iid:0.05", 3000)
    assert np.std(drawn(0.05, 20_000)) == pytest.approx(0.05, rel=0.05)
    assert np.mean(drawn(0.05, 20_000)) == pytest.approx(1.0, abs=0.002)


def test_a_recording_is_replayed_in_order_from_a_place_of_the_seeds(tmp_path: Path) -> None:
    file = tmp_path / "run.txt"
    file.write_bytes(b"\xef\xbb\xbf# what it is\n0.5\n1.25 # a comment\n\n2\n")
    places = {tuple(drawn(f"replay:{file}", 3, seed)) for seed in range(20)}
    assert places == {(0.5, 1.25, 2.0), (1.25, 2.0, 0.5), (2.0, 0.5, 1.25)}
    assert drawn(f"replay:{file}", 9, 1)[:3] == drawn(f"replay:{file}", 9, 1)[6:]


def test_wander_stays_a_while_and_pauses() -> None:
    factors = np.array(drawn("wander", 80_000))
    assert np.mean(factors > 2.0) == pytest.approx(1 / 200 + 1 / 800, rel=0.15)
    assert np.mean(factors > 5.0) == pytest.approx(1 / 800, rel=0.3)
    logs = np.log(factors[factors < 2.0])
    assert np.std(logs) == pytest.approx(0.15, rel=0.15)
    assert np.corrcoef(logs[:-1], logs[1:])[0, 1] > 0.9


def test_parts_are_multiplied() -> None:
    assert drawn("fast:1.3", 3) == [1.3] * 3
    assert drawn("0.05+fast:2", 5) == drawn("5e-02 + fast:2", 5) == drawn("iid:0.05+fast:2", 5)
    both = drawn("iid:0.05+fast:2", 5, seed=3)
    assert both == pytest.approx([2.0 * factor for factor in drawn(0.05, 5, seed=3)])
    two = np.log(drawn("iid:0.05+iid:0.05", 20_000))
    assert np.std(two) == pytest.approx(0.05 * 2**0.5, rel=0.05)  # they are not the same draws


def test_recordings_that_ship_are_of_a_model_that_fits() -> None:
    assert step_noise.recordings() == ["torch-busy", "torch-quiet", "vllm-cpu"]
    for name in step_noise.recordings():
        factors = step_noise.read(name)
        assert len(factors) >= 500
        assert abs(log(float(np.median(factors)))) < 0.3, name


@pytest.mark.parametrize(
    ("noise", "message"),
    [
        (1.0, "noise 1.0: give a relative spread in [0, 1), or iid:SPREAD, replay:RECORDING"),
        (float("nan"), "noise nan: give a relative spread"),
        ("-0.1", "noise -0.1: give a relative spread"),
        ("", "noise '': give iid:SPREAD, replay:RECORDING"),
        ("nan", "'nan' is none"),
        ("inf", "noise inf: give a relative spread"),
        ("0.05+2", "noise 0.05+2: give a relative spread"),
        ("iid", "noise iid: give a relative spread"),
        ("iid:2", "noise iid:2: give a relative spread"),
        ("fast:0", "noise 'fast:0': fast:0: give a factor in (0, 1000]"),
        ("fast:1001", "fast:1001: give a factor"),
        ("fast:", "fast:: give a factor"),
        ("wandr", "'wandr' is none: did you mean 'wander'?"),
        ("wander:2", "'wander:2' is none"),
        ("wander+", "'' is none"),
        (
            "replay:torch-quit",
            "no recording 'torch-quit' ships, nor is it a file with a suffix: did you mean 'torch-quiet'?",
        ),
    ],
)
def test_what_is_no_noise_is_named(noise: step_noise.Noise, message: str) -> None:
    with pytest.raises(ValueError) as raised:
        step_noise.check(noise)
    assert message in str(raised.value)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"1\nx\n", "line 2: 'x' is no factor"),
        (b"1e308\n", "line 1: '1e308' is no factor"),
        (b"# no\n", "holds no factors"),
        (b"\xff\xfe1\n", "run.txt is no text"),
    ],
)
def test_a_recording_that_cannot_be_is_named(tmp_path: Path, data: bytes, message: str) -> None:
    file = tmp_path / "run.txt"
    file.write_bytes(data)
    with pytest.raises(ValueError, match=message):
        step_noise.check(f"replay:{file}")
    with pytest.raises(OSError, match=r"none\.txt"):
        step_noise.check(f"replay:{tmp_path}/none.txt")
