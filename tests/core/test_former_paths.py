"""The module paths that users' policies were written with still work, and say what they are called now."""

import importlib
import sys

import pytest

MOVED = {"types": ("request", "plan", "events"), "interfaces": ("interfaces",), "packing": ("batch_builder",)}


@pytest.mark.parametrize("old", MOVED)
def test_a_former_path_gives_the_same_objects_and_warns(old: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, f"rubato.{old}", raising=False)
    news = [importlib.import_module(f"rubato.core.{name}") for name in MOVED[old]]
    with pytest.warns(FutureWarning, match=f"rubato.{old} is now rubato.core.{MOVED[old][0]}"):
        module = importlib.import_module(f"rubato.{old}")
    for new in news:
        public = [name for name in vars(new) if not name.startswith("_")]
        assert len(public) > 10
        assert all(getattr(module, name) is getattr(new, name) for name in public)
