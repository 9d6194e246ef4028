"""The end of an error about an unknown name."""

from __future__ import annotations

import pytest

from rubato.core.did_you_mean import nearest

PROFILES = ["llama-3.1-8b-h100", "opt-13b-h100", "llama-3.1-8b-a100"]


@pytest.mark.parametrize(
    ("word", "known", "says"),
    [
        ("tttft_ms", ["ttft_ms", "tpot_ms"], ": did you mean 'ttft_ms'?"),
        ("H100", PROFILES, ": did you mean 'llama-3.1-8b-h100' or 'opt-13b-h100'?"),
        ("chatbot", ["slos-serve-chatbot", "slos-serve-coder"], ": did you mean 'slos-serve-chatbot'?"),
        ("part", [f"a-long-name-of-part-{i}" for i in range(9)], "part-5' or 3 others?"),
        ("h1", PROFILES, ": known are llama-3.1-8b-a100, llama-3.1-8b-h100, opt-13b-h100"),  # too short to look for
        ("x", [], ": there is none"),
        ("--tirs", ["--tiers", "--texts"], ": did you mean '--tiers'?"),
        ("--tiers", ["--texts", "--kinds"], ": known are --kinds, --texts"),  # alike by their dashes alone
        ("my_edf_policy", ["edf", "sa"], ": did you mean 'edf'?"),
    ],
)
def test_an_unknown_name_gets_the_near_ones_or_all(word: str, known: list[str], says: str) -> None:
    assert nearest(word, known).endswith(says)


def test_an_unknown_name_without_near_ones_gets_nothing_where_all_are_too_many() -> None:
    assert nearest("zzz", PROFILES, list_all=False) == ""
