"""Serve language models to stated service-level objectives."""

from pathlib import Path

# where `rubato.types`, `rubato.interfaces` and `rubato.packing` are found, for one release
__path__.append(str(Path(__file__).parent / "core" / "former_paths"))
