"""The site builds without a warning, shows the pages as they are meant, and asks nothing of other hosts."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from mkdocs.commands.build import build
from mkdocs.config import load_config

from tests.docs.pages import ROOT, blocks, prose
from tests.docs.test_file_map import script

ON_SITE = script("words").pages_on_site()


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NO_MKDOCS_2_WARNING", "1")
        build(load_config(str(ROOT / "mkdocs.yml"), site_dir=str(folder)))  # strict: a warning raises
    return folder


def article(site: Path, page: str) -> str:
    name = page.removesuffix(".md")
    html = (site if name == "index" else site / name) / "index.html"
    return html.read_text(encoding="utf-8").split("<article", 1)[1].split("</article>")[0]


@pytest.mark.parametrize("page", [page for page in ON_SITE if page != "changelog.md"])  # which is another file's text
def test_code_and_tables_are_shown_as_such(site: Path, page: str) -> None:
    html = article(site, page)
    assert html.count("<pre") == len(blocks(page))
    assert html.count("<table") == len(re.findall(r"^(?:> )?\|[-|: ]+\|$", prose(page), re.MULTILINE))
    text = re.sub(r"<(code|pre|table).*?</\1>", "", html, flags=re.DOTALL)
    assert not re.findall(r"^(?:<p>)?(?:[|#]|[-*] |```).*|.*(?:`|\*\*|\]\().*", text, re.MULTILINE)


def test_nothing_is_fetched_from_elsewhere(site: Path) -> None:
    pages = [html.read_text(encoding="utf-8") for html in site.rglob("*.html")]
    assert len(pages) == len(ON_SITE) + 1  # and the one for what is not found
    for html in pages:
        assert not re.findall(r"<(?!a )[^>]*(?:src|href)=[\"']?(?:https?:)?//[^>]*>", html)
