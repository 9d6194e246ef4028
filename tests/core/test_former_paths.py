"""The module paths that users' policies were written with still work, and say what they are called now."""

import importlib
import sys

import pytest

MOVED = {"types": "types", "interfaces": "interfaces", "packing": "batch_builder"}


@pytest.mark.parametrize("old", MOVED)
def test_a_former_path_gives_the_same_objects_and_warns(old: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, f"rubato.{old}", raising=False)
    new = importlib.import_module(f"rubato.core.{MOVED[old]}")
    with pytest.warns(FutureWarning, match=f"rubato.{old} is now rubato.core.{MOVED[old]}"):
        module = importlib.import_module(f"rubato.{old}")
    public = [name for name in vars(new) if not name.startswith("_")]
    assert len(public) > 10
    assert all(getattr(module, name) is getattr(new, name) for name in public)
