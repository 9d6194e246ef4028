"""Each path of the installed vLLM by which something is made or changed is in the table of docs/vllm.md, in the row
that the door's own rules put it in. A path that a new release adds fails this; no tenant may use it meanwhile."""

from __future__ import annotations

import re
from importlib.util import find_spec
from pathlib import Path

from rubato.frontdoor.paths import GENERATE, OPEN_PATHS, RESPONSES, is_shared

DOCS = Path(__file__).parents[2] / "docs" / "vllm.md"
ROUTE = re.compile(r'\.(?:post|put|patch|delete|websocket|api_route|add_\w*route)\(\s*"(/[^"]*)"')


def test_each_path_of_vllm_stands_where_the_door_has_it() -> None:
    spec = find_spec("vllm")
    assert spec is not None
    (folder,) = spec.submodule_search_locations or ()
    found = {path for file in Path(folder, "entrypoints").rglob("*.py") for path in ROUTE.findall(file.read_text())}
    assert set(GENERATE) <= found
    documented = documented_paths()
    assert {path: _row_of(path) for path in found} == {path: documented.get(path) for path in found}


def _row_of(path: str) -> str:
    """Who may use it where tenants are configured, as the table's first column begins."""
    if path in GENERATE:
        return "admitted"
    if path.startswith(RESPONSES + "/{"):
        return "its tenant"
    return "anyone" if path in OPEN_PATHS else "every tenant" if is_shared(path) else "an admin"


def documented_paths() -> dict[str, str]:
    """Who may use each path, by docs/vllm.md."""
    section = DOCS.read_text().partition("### Paths with tenants")[2].partition("\n#")[0]
    rows = [line.strip("| ").split(" | ", 1) for line in section.splitlines() if line.startswith("| ")]
    return {path: who.partition(":")[0] for who, paths in rows for path in re.findall(r"`(/[^`]*)`", paths)}
