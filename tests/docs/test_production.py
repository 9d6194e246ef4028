"""What production needs: each row has a state, and what is present is a section that one can read.

That the sections exist is held by the site's strict build.
"""

from __future__ import annotations

import re

import pytest

from tests.docs.pages import PAGES

ROWS = re.findall(r"^\| (.+?) \| (present|partial|absent) \| (.+) \|$", PAGES["production.md"], re.MULTILINE)


def test_every_row_has_a_state() -> None:
    lines = re.findall(r"^\| (?!need|-)", PAGES["production.md"], re.MULTILINE)
    assert len(ROWS) == len(lines) > 30
    assert {state for _, state, _ in ROWS} == {"present", "partial", "absent"}
    assert len({need for need, _, _ in ROWS}) == len(ROWS)


@pytest.mark.parametrize(("need", "where"), [(need, where) for need, state, where in ROWS if state == "present"])
def test_what_is_present_is_a_section(need: str, where: str) -> None:
    assert re.search(r"\]\([a-z-]+\.md#[a-z-]+\)", where), need
