"""From what a configuration calls a model to the Hugging Face folder that is read."""

from __future__ import annotations

from pathlib import Path

from rubato_torch import gguf


def folder_of(model: str | Path) -> tuple[Path, str]:
    """The folder, and the model's name, of a folder, a GGUF file (converted once, into the cache) or "bundled"."""
    if str(model) == "bundled":
        # not above: `python -m rubato_torch.bundled_model` would warn
        from rubato_torch import bundled_model

        return bundled_model.ensure(), bundled_model.NAME
    path = Path(model)
    if path.is_file():
        return gguf.ensure(path), path.resolve().stem
    return path, path.resolve().name
