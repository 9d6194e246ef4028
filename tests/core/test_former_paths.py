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


@pytest.mark.parametrize(
    ("old", "name"), [("interfaces", "untold"), ("packing", "Packing"), ("packing", "memory"), ("types", "Shape")]
)
def test_what_has_another_name_now_is_there_by_its_former_one(old: str, name: str) -> None:
    sys.modules.pop(f"rubato.{old}", None)
    with pytest.warns(FutureWarning):
        module = importlib.import_module(f"rubato.{old}")
    assert hasattr(module, name)
