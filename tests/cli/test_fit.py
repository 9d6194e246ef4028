"""`rubato fit`: coefficients that a server takes, and errors on steps that the model has not seen."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import yaml

from rubato.cli.main import main
from rubato.config.build import latency_of
from rubato.config.schema import load
from rubato.core import event_log
from rubato.core.events import Stepped
from rubato.core.plan import Sample, Shape
from rubato.engines.simulated import step_noise
from rubato.latency import affine
from rubato.latency.fit import Fitted, fit, fit_file
from rubato.latency.fitted_model import FittedModel
from rubato.latency.model_kinds import MODELS

TRUE = affine.Model(k=(1e-5, 4e-4), b=(0.02, 0.005), a=1e-6, d=2e-8, e=1e-7, host_per_seq=2e-4)


def samples(count: int = 400, spread: float = 0.02, slow_end: float = 1.0) -> list[Sample]:
    """Steps of a known model; the last fifth `slow_end` times as slow."""
    rng = np.random.default_rng(5)
    found = []
    for i in range(count):
        shape = Shape()
        for _ in range(int(rng.integers(1, 33))):
            shape = shape.plus(1, int(rng.integers(10, 900)))
        if i % 3 == 0:
            shape = shape.plus(int(rng.integers(16, 600)), int(rng.integers(0, 500)))
        factor = float(rng.lognormal(0.0, spread)) * (slow_end if i >= 0.8 * count else 1.0)
        found.append(Sample(shape, TRUE.step_time(shape) * factor))
    return found


def test_a_fit_gives_the_model_back_and_says_how_well() -> None:
    found = fit(samples())
    assert (found.inside.n, found.held_out.n) == (320, 80)
    assert found.inside.p50 < 0.03
    assert found.held_out.p50 < 0.03
    assert found.held_out.r2 > 0.98
    probe = Shape(40, 9, 4000, 32 * 100, 32 * 32)
    assert found.model.step_time(probe) == pytest.approx(TRUE.step_time(probe), rel=0.05)


def test_what_is_held_out_is_the_end_of_the_log_and_was_not_learnt_from() -> None:
    found = fit(samples(slow_end=2.0))
    assert found.inside.p50 < 0.03
    assert found.held_out.p50 == pytest.approx(0.5, abs=0.03)


@pytest.mark.parametrize(("kind", "cls"), MODELS.items())
def test_the_text_is_a_configuration_that_gives_the_same_model(
    tmp_path: Path, kind: str, cls: type[FittedModel]
) -> None:
    log = tmp_path / "log.jsonl"
    with event_log.EventLogWriter(log) as write:
        for i, sample in enumerate(samples()):
            write(Stepped(float(i), "r0", sample.shape, sample.seconds))
    found = fit_file(log, kind)
    assert isinstance(found, Fitted)
    (tmp_path / "server.yaml").write_text(found.text())
    model = latency_of(load(tmp_path / "server.yaml"))
    assert isinstance(model, cls)
    probe = Shape(40, 9, 4000, 32 * 100, 32 * 32, 0, 1, 132)
    assert model.step_time(probe) == pytest.approx(found.model.step_time(probe))
    assert yaml.safe_load(found.text()) == found.config()
    assert "# " + kind + ", held out (the last fifth): R²" in found.text()


def test_a_log_without_steps_is_refused(tmp_path: Path) -> None:
    (tmp_path / "empty").write_text("")
    with pytest.raises(ValueError, match="holds no steps"):
        fit_file(tmp_path / "empty")
    with pytest.raises(ValueError, match="samples cannot determine"):
        fit(samples(10))


def test_residuals_are_a_recording_that_can_be_replayed(tmp_path: Path) -> None:
    log, out = tmp_path / "log.jsonl", tmp_path / "residuals.txt"
    with event_log.EventLogWriter(log) as write:
        for i, sample in enumerate(samples(spread=0.1)):
            write(Stepped(float(i), "r0", sample.shape, sample.seconds))
    assert main(["fit", str(log), "--residuals", str(out)]) == 0
    model, given = fit_file(log).model, samples(spread=0.1)
    usual = float(np.median([model.step_time(s.shape) for s in given]))
    found = step_noise.read(str(out))
    assert len(found) == len(given)
    for residual, sample in zip(found, given, strict=True):
        predicted = model.step_time(sample.shape)
        assert sample.seconds == pytest.approx(predicted + (residual - 1.0) * max(predicted, usual), rel=5e-3)
    assert out.read_text().startswith("# log.jsonl: seconds of each step over those predicted (affine")


@pytest.mark.parametrize("name", ["", "-", "mine", "torch-quiet", "a+b.txt", "log.jsonl"])
def test_residuals_go_to_a_file_that_noise_will_find_and_not_over_the_log(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("log.jsonl").write_text("kept")
    assert main(["fit", "log.jsonl", f"--residuals={name}"]) == 2
    assert f"--residuals {name or '.'}" in capsys.readouterr().err
    assert Path("log.jsonl").read_text() == "kept"
