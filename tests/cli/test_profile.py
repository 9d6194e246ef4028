"""`rubato profile`: a measured engine gives a profile that gives its step times back; kernel tables give another."""

from __future__ import annotations

from pathlib import Path

import orjson
import pytest

from rubato.cli import profile
from rubato.cli.main import main
from rubato.core.clock import VirtualClock, run_virtual
from rubato.core.plan import Limits, Sample, Shape
from rubato.engines.simulated import Engine, KVLink
from rubato.latency import affine, profiles, step_samples
from rubato.latency.fit import error_report
from rubato.measure.profile_engine import points, profile_of
from tools import packaged_profiles

TRUTH = affine.Model(k=(1e-5, 4e-4), b=(0.03, 0.012), a=3e-7, d=2e-8, e=2e-8, host_per_seq=1e-4)
LIMITS = Limits(max_num_seqs=64, max_num_batched_tokens=2048, max_model_len=2048, kv_blocks=2900, block_size=16)


def test_a_measured_engine_is_given_back_by_its_profile(tmp_path: Path) -> None:
    said: list[str] = []

    async def measured() -> tuple[profiles.Profile, list[Sample]]:
        clock = VirtualClock()
        engine = Engine(TRUTH, LIMITS, clock, noise=0.02, seed=3, link=KVLink(kv_bytes=4096))
        return await profile_of(engine, "mine", "a model", "simulated", 3, 0, clock, said.append)

    profile, samples = run_virtual(measured())
    assert len(samples) == len(points(LIMITS))
    assert len(said) == 4
    assert (profile.kv_tokens, profile.kv_bytes_per_token) == (2900 * 16, 4096)
    path = tmp_path / "mine.json"
    path.write_bytes(orjson.dumps(profile.to_json()))
    model = profiles.load(str(path)).model()
    probe = [Shape().plus(1, 300).plus(1, 700), Shape().plus(400, 100), Shape().plus(1, 900).plus(200, 0)]
    assert error_report(model, [Sample(s, TRUTH.step_time(s)) for s in probe]).p95 < 0.03
    step_samples.write(tmp_path / "steps.csv", {"mine": samples})
    assert step_samples.read(tmp_path / "steps.csv") == {"mine": samples}


def test_points_keep_to_what_the_engine_takes() -> None:
    small = Limits(max_num_seqs=8, max_num_batched_tokens=128, max_model_len=600, kv_blocks=100, block_size=16)
    assert points(small)
    for point in points(small):
        assert point.decodes + (point.chunk > 0) <= 8
        assert point.decodes + point.chunk <= 128
        blocks = point.decodes * -(-(point.context + 1) // 16) + -(-(point.cached + point.chunk) // 16)
        assert blocks <= 100


def test_the_list_and_what_is_asked_wrongly(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["profile", "--list"]) == 0
    assert "llama-3.1-8b-h200  Llama-3.1-8B, bfloat16, on 1 x H200" in capsys.readouterr().out
    assert main(["profile"]) == 2
    assert "name one model" in capsys.readouterr().err
    assert main(["profile", "--aiconfigurator", "llama-3.1-8c", "h200"]) == 2
    assert "did you mean 'llama-3.1-8b'" in capsys.readouterr().err


@pytest.mark.parametrize("option", ["--out", "--steps"])
def test_a_file_that_cannot_be_written_is_refused_before_anything_is_measured(
    option: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def measured(*_: object) -> None:
        raise AssertionError("measured for a file that cannot be written")

    monkeypatch.setattr(profile, "_measure_profile", measured)
    assert main(["profile", "bundled", option, "/nonexistent/x.json"]) == 2
    assert f"{option} /nonexistent/x.json cannot be written: there is no folder" in capsys.readouterr().err


def test_a_model_that_fills_the_gpu_or_cannot_be_split_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    for gpu, words in {
        "a100": "leave no room for KV on 1 x a100",
        "3xa100": "cannot be split over 3 GPUs",
        "b300": "no kernel tables",
    }.items():
        assert main(["profile", "--aiconfigurator", "llama-3.1-70b", gpu]) == 2
        assert words in capsys.readouterr().err


def test_without_the_extra_it_is_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(__import__("sys").modules, "aiconfigurator_core", None)
    assert main(["profile", "--aiconfigurator", "llama-3.1-8b", "h200"]) == 2
    assert "pip install 'rubato-llm[aiconfigurator]'" in capsys.readouterr().err


def test_the_packaged_profiles_can_be_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("aiconfigurator_core", reason="the extra aiconfigurator is not installed")
    monkeypatch.setattr("sys.argv", ["packaged_profiles.py", str(tmp_path)])
    packaged_profiles.main()
    made = {path.stem for path in tmp_path.iterdir()}
    assert made == set(profiles.names()) - {"smollm2-135m-cpu"}
    for name in made:
        assert profiles.load(str(tmp_path / f"{name}.json")) == profiles.load(name), name
    out = tmp_path / "one.json"
    assert main(["profile", "--aiconfigurator", "qwen2.5-7b", "2xa100", "--out", str(out)]) == 0
    assert profiles.load(str(out)).gpus == 2
