"""Writes requirements/*.txt: the exact versions that `make`, CI and the images install, with the hashes of wheels.

    make lock                  # after a range in pyproject.toml has changed: other versions stay
    make lock UPGRADE=1        # the newest versions within the ranges

uv resolves; this tool takes the wheels of CPython 3.11 to 3.13 on Linux (x86-64, ARM) and macOS (ARM) and writes one
package a line. pip installs the files with `--require-hashes --no-deps`. A package without such a wheel is an error:
a source distribution would be built by tools that nothing pins.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import tempfile
import tomllib
from itertools import product
from pathlib import Path
from typing import Any

from packaging.markers import Marker
from packaging.utils import parse_wheel_filename

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "requirements"
OURS = ("rubato-llm", "rubato-llm-torch")
# Each file has what the requirements bring beyond the files that it names, and these.
FILES: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "build": ((), ("setuptools",)),
    "serve": ((), ("-e .[serve]",)),
    "demo": (("build", "serve"), ("-e .[demo]", "-e ./packages/rubato-torch")),
    "dev": (("demo",), ("-e .[dev]", "-e ./packages/rubato-torch")),
    "aiconfigurator": (("dev",), ("-e .[dev,aiconfigurator]", "-e ./packages/rubato-torch")),
}
TOOLS = ("uv", "cyclonedx-bom")  # in an environment of their own: `make lock` and `make sbom`
TORCH = re.compile(r"torch$|cuda-|nvidia-|triton$")  # PyTorch, and what its CUDA build alone needs
HEAD = "# Written by `make lock` (tools/lock.py): {}.\n"
SAID = {
    "build": "the tool that builds the package",
    "serve": "the package with the extra `serve`",
    "demo": "the extra `demo` and the embedded engine, less PyTorch: torch-cpu.txt or torch.txt",
    "dev": "the extra `dev`: what tests and checks need",
    "aiconfigurator": "the extra `aiconfigurator`",
    "torch": "PyPI's build of PyTorch; on Linux it is the one with CUDA",
    "torch-cpu": "PyTorch's CPU build, of an index of its own",
    "tools": "uv and CycloneDX, in an environment of their own",
}
PYTHONS = ("3.11", "3.12", "3.13")
MIN_PYTHON = "3.11.5"  # the oldest that every package of the extra `docs` takes
MACHINES = (("linux", "x86_64"), ("linux", "aarch64"), ("darwin", "arm64"))
PLATFORM = re.compile(r"any|(many)?linux\w*_(x86_64|aarch64)|macosx_\w+_(arm64|universal2)")
# PyTorch's CPU builds are on its own index alone. From https://download.pytorch.org/whl/cpu/torch/
TORCH_CPU = {
    "2.13.0": {
        "cp311-cp311-manylinux_2_28_aarch64": "84453b69508ec79902f899c5ed9495acb9e2bbe9fda5f1d5d6f19e3c3842e1a7",
        "cp311-cp311-manylinux_2_28_x86_64": "6746dbcbeb526eb61330b76b41ff1b4eb848951103a892eeb080dfa2b264667b",
        "cp312-cp312-manylinux_2_28_aarch64": "6f307c2c32d764ffc6ff6893b801fad6d4752f3e67966cb8abf1843427c02604",
        "cp312-cp312-manylinux_2_28_x86_64": "4ca4a9394b0c771238a4f73590fdbbc4debad85ed0fa63d026ae1b085da7d6e2",
        "cp313-cp313-manylinux_2_28_aarch64": "0b8f7d0423027ae8b90c7977c627f3379f325363a08224dffad9b4b2d684a83d",
        "cp313-cp313-manylinux_2_28_x86_64": "3fbf9c9d1f3c10c2d59d04aca426dee9ccc6ceb32d255c61e93acc3b4f75fae6",
    }
}


def resolved(uv: Path, requirements: tuple[str, ...], constraints: list[str]) -> dict[str, dict[str, Any]]:
    """The packages that uv finds for all PYTHONS, by name. Raises SystemExit with what uv said."""
    with tempfile.TemporaryDirectory() as scratch:
        wanted, pins, out = (Path(scratch) / name for name in ("wanted.in", "pins.txt", "pylock.toml"))
        wanted.write_text("\n".join(requirements), encoding="utf-8")
        pins.write_text("\n".join(constraints), encoding="utf-8")
        command = [str(uv), "pip", "compile", str(wanted), "--constraints", str(pins), "--output-file", str(out)]
        command += ["--universal", "--python-version", MIN_PYTHON, "--no-header", "--no-annotate", "--quiet"]
        command += [word for name in OURS for word in ("--no-emit-package", name)]
        done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        if done.returncode:
            raise SystemExit(f"uv finds no versions for {', '.join(requirements)}:\n{done.stdout}")
        packages = tomllib.loads(out.read_text(encoding="utf-8"))["packages"]
    return {package["name"]: package for package in packages if where(package) is not None}


def where(package: dict[str, Any]) -> str | None:
    """The marker that the package's line needs: empty where every machine has it, None where none of ours has."""
    marker = package.get("marker", "")
    if not marker:
        return ""
    held = {
        Marker(marker).evaluate(
            {
                "python_version": python,
                "python_full_version": f"{python}.9",
                "sys_platform": system,
                "platform_machine": machine,
                "platform_system": system.capitalize(),
                "os_name": "posix",
                "implementation_name": "cpython",
                "platform_python_implementation": "CPython",
            }
        )
        for python, (system, machine) in product(PYTHONS, MACHINES)
    }
    return None if held == {False} else "" if held == {True} else f" ; {marker}"


def hashes(package: dict[str, Any]) -> list[str]:
    """Of the wheels that one of PYTHONS can install. Raises SystemExit where there is none for one of them."""
    found = {wheel["url"].rpartition("/")[2]: wheel["hashes"]["sha256"] for wheel in package.get("wheels", ())}
    fitting = {name: pythons_of(name) for name in found}
    missing = set(PYTHONS) - set().union(*fitting.values())
    if missing:
        raise SystemExit(
            f"{package['name']} {package['version']} has no wheel for Python {', '.join(sorted(missing))}."
        )
    return sorted({found[name] for name, pythons in fitting.items() if pythons})


def pythons_of(wheel: str) -> set[str]:
    """The ones of PYTHONS that install this wheel on one of our machines."""
    fitting = set()
    for tag, python in product(parse_wheel_filename(wheel)[3], PYTHONS):
        minor = int(python.partition(".")[2])
        own = tag.interpreter == f"cp3{minor}" and tag.abi in (tag.interpreter, "none")
        since = re.fullmatch(r"cp3(\d+)" if tag.abi == "abi3" else r"py3(\d*)", tag.interpreter)
        later = tag.abi in ("abi3", "none") and since is not None and int(since[1] or 0) <= minor
        if PLATFORM.fullmatch(tag.platform) and (own or later):
            fitting.add(python)
    return fitting


def torch_cpu(version: str) -> dict[str, Any]:
    """Raises SystemExit where TORCH_CPU lacks the version."""
    if version not in TORCH_CPU:
        raise SystemExit(f"TORCH_CPU in tools/lock.py has no hashes of PyTorch {version}: add them.")
    wheels = [
        {"url": f"torch-{version}+cpu-{tag}.whl", "hashes": {"sha256": digest}}
        for tag, digest in TORCH_CPU[version].items()
    ]
    return {"name": "torch", "version": f"{version}+cpu", "wheels": wheels}


def write(name: str, below: tuple[str, ...], packages: dict[str, dict[str, Any]]) -> None:
    lines = [f"-r {each}.txt\n" for each in below]
    for package in (packages[each] for each in sorted(packages)):
        words = [f"{package['name']}=={package['version']}{where(package)}"]
        lines.append(" ".join([*words, *(f"--hash=sha256:{each}" for each in hashes(package))]) + "\n")
    (FOLDER / f"{name}.txt").write_text(HEAD.format(SAID[name]) + "".join(lines), encoding="utf-8")


def pins(*names: str) -> list[str]:
    """`name==version` of the files as they are."""
    files = [FOLDER / f"{name}.txt" for name in names]
    text = "\n".join(file.read_text(encoding="utf-8") for file in files if file.exists())
    return re.findall(r"^[\w.-]+==[\w.]+", text, re.MULTILINE)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--uv", type=Path, required=True, help="the program uv")
    parser.add_argument("--upgrade", action="store_true", help="the newest versions, not those that are locked")
    args = parser.parse_args()
    every = resolved(args.uv, FILES["aiconfigurator"][1], [] if args.upgrade else pins(*FILES, "torch"))
    versions = [f"{name}=={package['version']}" for name, package in every.items()]
    of_torch = {name: package for name, package in every.items() if TORCH.match(name)}
    write("torch", (), of_torch)
    write("torch-cpu", (), {"torch": torch_cpu(of_torch["torch"]["version"])})
    inside: dict[str, set[str]] = {}
    for name, (below, requirements) in FILES.items():
        inside[name] = resolved(args.uv, requirements, versions).keys() - of_torch.keys()
        write(name, below, {each: every[each] for each in inside[name].difference(*(inside[each] for each in below))})
    write("tools", (), resolved(args.uv, TOOLS, [] if args.upgrade else pins("tools")))


if __name__ == "__main__":
    main()
