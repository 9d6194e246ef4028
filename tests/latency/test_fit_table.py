"""`rubato fit` on a table of steps: which are fitted on, which are held out, which are of another distribution."""

from __future__ import annotations

import random
from pathlib import Path

import orjson
import pytest

from rubato.cli.main import main
from rubato.core.plan import Sample
from rubato.latency import affine, profiles, step_samples
from rubato.latency.fit import error_report, fit_file, fit_groups
from rubato.latency.model_kinds import MODELS
from tests.latency.steps import mixed, run

TABLE = Path(__file__).with_name("serving_iterations.csv")
pytestmark = pytest.mark.filterwarnings("ignore:a batch of .* is outside the measured table")
# p95 of the relative error on held-out steps of the same workloads, and on other workloads; measured, with some room
BOUNDS = {
    "affine": (0.13, 0.10),
    "roofline": (0.5, 0.7),
    "operation_count": (0.15, 0.10),
    "bilinear": (0.10, 0.14),
    "table": (0.2, 0.3),
}


def test_iterations_become_shapes() -> None:
    groups = step_samples.read(TABLE)
    assert {tag: len(steps) for tag, steps in groups.items()} == dict.fromkeys(
        ("a100|uniform|512|0.6", "a100|uniform|2048|1.1", "a100|azconv|512|1.1", "a100|azcode|2048|0.6"), 100
    )
    for sample in (s for steps in groups.values() for s in steps):
        shape = sample.shape
        chunk = shape.tokens - (shape.seqs - shape.chunks)
        assert (chunk > 1) == (shape.chunks > 0) == (shape.chunk_sq > 0)
        assert shape.chunk_sq <= chunk * chunk
        if shape.chunks == 1:
            assert (shape.chunk_sq, shape.chunk_context) == (chunk * chunk, chunk * (shape.chunk_kv - chunk))


def test_the_packaged_profile_agrees_with_steps_composed_elsewhere() -> None:
    plain = {"decode_gemm": 1.0, "prefill_gemm": 1.0, "context_attention": 1.0}
    profile = profiles.load("llama-3.1-8b-a100", host=0.0, **plain)
    assert profile.host_term is not None
    per = profile.host_term.host_per_seq
    groups = step_samples.read(TABLE).values()
    samples = [Sample(s.shape, s.seconds + per * s.shape.seqs) for steps in groups for s in steps]
    # beyond 32 sequences of 4096 tokens aiconfigurator estimates more for 62 of them than for 64: nothing to agree with
    usual = [s for s in samples if s.shape.seqs <= 32 or s.shape.kv <= 4096 * s.shape.seqs]
    assert len(usual) > 300
    report = error_report(profile.model(), usual)
    assert report.p50 < 0.01
    assert report.p95 < 0.03


@pytest.mark.parametrize("kind", MODELS)
def test_every_model_within_its_known_error(kind: str) -> None:
    found = fit_file(TABLE, kind, train=["uniform"], of="llama-3.1-8b-a100" if kind == "operation_count" else None)
    inside, outside = BOUNDS[kind]
    assert (found.inside.n, found.held_out.n) == (160, 40)
    assert set(found.outside) == {"a100|azconv|512|1.1", "a100|azcode|2048|0.6", "all of these"}
    assert found.held_out.p95 < inside
    assert found.outside["all of these"].p95 < outside


def test_what_is_tested_on_was_not_fitted_on() -> None:
    truth = affine.Model(k=(1e-5, 1e-4), b=(0.01, 0.002), a=1e-7, d=1e-8, e=1e-8, host_per_seq=1e-4)
    exact = run(truth, mixed, 100, random.Random(1))
    slow = [Sample(s.shape, 2.0 * s.seconds) for s in exact]
    found = fit_groups({"fast": exact, "slow": slow}, "affine", train=["fast"])
    assert found.held_out.p95 < 1e-6
    assert set(found.outside) == {"slow"}
    assert found.outside["slow"].p50 == pytest.approx(0.5)
    both = fit_groups({"fast": exact, "slow": slow})
    assert (both.held_out.n, both.outside) == (40, {})


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "fit.json"
    argv = ["fit", str(TABLE), "--train", "uniform", "--test", "azcode", "--json", str(out)]
    assert main(argv) == 0
    said = capsys.readouterr().out
    assert "# affine, held out (every fifth): R²" in said
    assert "# affine, out of distribution, a100|azcode|2048|0.6: R²" in said
    written = orjson.loads(out.read_bytes())
    assert set(written["out_of_distribution"]) == {"a100|azcode|2048|0.6"}
    assert written["latency"]["kind"] == "affine"


def test_what_is_asked_wrongly_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["fit", str(TABLE), "--train", "mooncake"]) == 2
    assert "no tag contains mooncake" in capsys.readouterr().err
    assert main(["fit", str(TABLE), "--model", "operation_count", "--of", "qwen2.5-7b-2xv100"]) == 2
    assert "does not say what `operation_count` counts from" in capsys.readouterr().err
    bad = tmp_path / "bad.csv"
    head = "# a remark counts as a line\ntokens,seqs,kv,chunk_context,chunk_sq,chunks,chunk_kv,seconds\n"
    good = "1,1,50,0,0,0,0,0.01\n"
    for row, says in (
        ("1,1,50,0,0,0,0,nan", "seconds is 'nan': expected a time above 0"),
        ("1,1,50,0,0,0,0,0", "seconds is '0': expected a time above 0"),
        ("1,x1,50,0,0,0,0,0.01", "seqs is 'x1': expected a whole number, 0 or more"),
        ("1,1,-50,0,0,0,0,0.01", "kv is '-50': expected a whole number, 0 or more"),
        ("1,1,50", "chunk_context is missing (a short row): expected a whole number"),
        ("1,1,50,0,0,0,0,0.01,7", "9 fields, but the header names 8"),
    ):
        bad.write_text(f"{head}{good}# another\n{row}\n{good}")
        assert main(["fit", str(bad)]) == 2
        assert f"bad.csv, line 5: {says}" in capsys.readouterr().err
    bad.write_text("b,kv,npre,c,cp,c2,pmax,time_ms\n1,50,0,0,0,0,0,inf\n")
    assert main(["fit", str(bad)]) == 2
    assert "bad.csv, line 2: time_ms is 'inf': expected a time above 0" in capsys.readouterr().err
    bad.write_text("a,b\n1,2\n")
    assert main(["fit", str(bad)]) == 2
    assert "its columns are a, b" in capsys.readouterr().err
    (tmp_path / "log.jsonl").write_text("")
    assert main(["fit", str(tmp_path / "log.jsonl"), "--train", "x"]) == 2
    assert "no tags" in capsys.readouterr().err
