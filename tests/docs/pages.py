"""The pages of the manual and the code in them, for the tests that run it or hold it against the code."""

from __future__ import annotations

import re
import shlex
from itertools import takewhile
from pathlib import Path

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
FOLDERS = ("policies", "papers", "measurements")
FILES = [*sorted(DOCS.glob("*.md")), *(file for folder in FOLDERS for file in sorted((DOCS / folder).glob("*.md")))]
# by path below docs/
PAGES = {name: (ROOT / name).read_text(encoding="utf-8") for name in ("README.md", "CONTRIBUTING.md")}
PAGES |= {file.relative_to(DOCS).as_posix(): file.read_text(encoding="utf-8") for file in FILES}
FENCED = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
# after a blank line or a heading: elsewhere four spaces go on with an entry of a list
INDENTED = re.compile(r"(?:^#.*\n|^\n|\A)((?:^    .*\n)+(?:\n+(?:^    .*\n)+)*)", re.MULTILINE)


def fenced(page: str, language: str) -> list[str]:
    """The blocks between ``` of this language."""
    return [match[2] for match in FENCED.finditer(PAGES[page]) if match[1] == language]


def blocks(page: str, begins: str = "") -> list[str]:
    """All code of a page, fenced before indented, that begins so."""
    indented = INDENTED.findall(FENCED.sub("", PAGES[page]))
    texts = [match[2] for match in FENCED.finditer(PAGES[page])]
    texts += [re.sub(r"^    ", "", block, flags=re.MULTILINE) for block in indented]
    return [text for text in texts if text.startswith(begins)]


def prose(page: str) -> str:
    """What is left of a page without its code."""
    return INDENTED.sub("\n", FENCED.sub("", PAGES[page]))


def spans(page: str) -> list[str]:
    """The code within its sentences and tables."""
    return [re.sub(r"\s+", " ", span) for span in re.findall(r"`([^`]+)`", prose(page))]


def commands(page: str, program: str = "rubato") -> list[list[str]]:
    """The words after `program` of each of its commands, without comments and redirections."""
    text = "".join(blocks(page)).replace("\\\n", " ")
    found = [shlex.split(line, comments=True) for line in re.findall(rf"^{program}\b.*", text, re.MULTILINE)]
    return [list(takewhile(lambda word: word != ">", words))[len(program.split()) :] for words in found]
