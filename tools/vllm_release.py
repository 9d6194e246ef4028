"""A CUDA release of vLLM without its kernels: `python tools/vllm_release.py 0.33.0` prints the folder that it is in.

For the tests of the plug-in under a configuration that only GPUs have (`make test-vllm-cuda`). The Python files of the
wheel go before the CPU build on the path; each compiled extension is replaced by an empty module. Downloads 330 MB and
keeps 60 MB.
"""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path, PurePosixPath

ROOT = Path(__file__).resolve().parents[1]
RELEASES = ROOT / ".vllm-releases"
NOT_PYTHON = {".cu", ".cuh", ".h", ".hpp", ".inl"}  # sources of kernels that are compiled at run time


def unpacked(version: str) -> Path:
    """The folder of this release, downloaded where it is not there. Raises SystemExit with what pip said."""
    folder = RELEASES / version
    if folder.exists():
        return folder
    RELEASES.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=RELEASES) as scratch:
        command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "--quiet", "--no-deps"]
        command += ["--no-cache-dir", "--only-binary=:all:", *shlex.split(os.environ.get("PIP_ARGS", ""))]
        command += ["--dest", scratch, f"vllm=={version}"]
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        if done.returncode:
            raise SystemExit(f"vllm {version} was not downloaded: {shlex.join(command)}\n{done.stdout[-2000:]}")
        made = Path(scratch) / version
        with zipfile.ZipFile(next(Path(scratch).glob("*.whl"))) as wheel:
            for member in wheel.infolist():
                _extract(wheel, member, made)
        shutil.move(made, folder)
    return folder


def _extract(wheel: zipfile.ZipFile, member: zipfile.ZipInfo, into: Path) -> None:
    path = PurePosixPath(member.filename)
    if member.is_dir() or path.suffix in NOT_PYTHON or path.name == "vllm-rs":
        return
    if path.suffix != ".so":
        wheel.extract(member, into)
        return
    stand_in = into / path.parent / f"{path.name.partition('.')[0]}.py"
    stand_in.parent.mkdir(parents=True, exist_ok=True)
    stand_in.write_text(f'"""In place of {path.name}, which is not here."""\n')


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("version")
    print(unpacked(parser.parse_args().version))


if __name__ == "__main__":
    main()
