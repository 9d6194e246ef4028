"""What a docstring says of each setting."""

from __future__ import annotations

from rubato.core.setting_texts import Setting, setting_texts, settings_of

DOCSTRING = """A thing. rate: requests/s; 0 = none. low, high: bounds, such as
    rate: 3. Not a setting: this.

    seed and salt: of draws. Raises ValueError for a bad seed: that.
"""


def test_a_docstring_gives_the_text_of_each_setting() -> None:
    assert setting_texts(DOCSTRING, ["rate", "low", "high", "seed", "salt", "other"]) == {
        "rate": "requests/s; 0 = none",
        "low": "bounds, such as rate: 3. Not a setting: this",
        "high": "bounds, such as rate: 3. Not a setting: this",
        "seed": "of draws",
        "salt": "of draws",
    }
    assert setting_texts(None, ["rate"]) == setting_texts(DOCSTRING, []) == {}


def test_a_docstring_gives_the_text_of_each_argument() -> None:
    docstring = """A thing.

    Args:
        rate ([0, inf)): requests/s; 0: none
            at all
        other (text): not asked for

    Raises ValueError.
    """
    assert setting_texts(docstring, ["rate"]) == {"rate": "requests/s; 0: none at all; in [0, inf)"}


def test_settings_have_the_texts_of_inherited_docstrings() -> None:
    class Base:
        """low: of the base. high: of the base."""

    class Own(Base):
        """high: of its own."""

    assert settings_of(Own, {"low": 1, "high": 2, "bare": None}) == (
        Setting("low", 1, "of the base"), Setting("high", 2, "of its own"), Setting("bare", None, ""),
    )  # fmt: skip


def test_arguments_need_not_say_what_is_allowed() -> None:
    docstring = (
        "Does.\n\nArgs:\n    rate: requests/s,\n        of all.\n    low, high (0): bounds\n\nRaises:\n    rate: no"
    )
    texts = {"rate": "requests/s, of all", "low": "bounds (0)", "high": "bounds (0)"}
    assert setting_texts(docstring, ["rate", "low", "high"]) == texts
