"""A Result as one HTML file that needs nothing else: no scripts, no other files, light or dark as the reader has it."""

from __future__ import annotations

import html
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rubato.measure.records import versions
from rubato.measure.result import Result, html_table

STYLE = """
:root{--text:#1c1e21;--soft:#5d646d;--rule:#9a9fa6;--grid:#e3e6ea;--page:#fff;--panel:#f6f7f9;--accent:#0072b2;--first:#0072b2}
@media (prefers-color-scheme:dark){:root{--text:#e7e9ec;--soft:#a0a7b1;--rule:#7f8690;--grid:#33383f;--page:#14171a;
--panel:#1d2125;--accent:#5db5ea;--first:#4aa3dc}}
*{box-sizing:border-box}
body{margin:0;background:var(--page);color:var(--text);font:16px/1.5 system-ui,sans-serif;color-scheme:light dark}
main{max-width:1320px;margin:0 auto;padding:2rem 1.25rem 4rem}
header{border-bottom:1px solid var(--grid);padding-bottom:1.25rem;margin-bottom:1.75rem}
.kind{margin:0;color:var(--accent);font-size:.85rem;font-weight:600;letter-spacing:.04em;text-transform:uppercase}
h1{font-size:1.5rem;line-height:1.3;margin:.3rem 0 0;text-wrap:balance}
h2{font-size:1.05rem;margin:2.25rem 0 .75rem}
figure{margin:0}
figure svg{display:block;width:100%;height:auto;font-family:system-ui,sans-serif}
.scroll{overflow-x:auto}
table{border-collapse:collapse;font-size:.875rem;font-variant-numeric:tabular-nums;min-width:100%}
caption{text-align:left;color:var(--soft);padding-bottom:.5rem}
th,td{text-align:left;padding:.4rem .8rem .4rem 0;border-bottom:1px solid var(--grid);white-space:nowrap}
th{color:var(--soft);font-weight:600}
ul{margin:0;padding-left:1.2rem}
li{margin:.25rem 0}
pre{background:var(--panel);padding:.9rem 1rem;border-radius:6px;margin:0;white-space:pre-wrap;overflow-wrap:anywhere;
font-size:.875rem}
details{margin-top:.75rem}
summary{cursor:pointer;color:var(--soft)}
details td{white-space:normal;overflow-wrap:anywhere;vertical-align:top}
footer{margin-top:3rem;color:var(--soft);font-size:.85rem}
@media (max-width:600px){figure{overflow-x:auto}figure svg{min-width:620px}main{padding-top:1.25rem}}
"""
POLICY = "default-src 'none'; style-src 'unsafe-inline'"  # nothing is loaded, whatever a name holds


def write(path: str | Path, result: Result, command: str = "") -> None:
    """Raises ImportError, saying what to install, without matplotlib."""
    Path(path).write_text(page(result, command), encoding="utf-8")


def page(result: Result, command: str = "") -> str:
    """Returns the HTML page of a result.

    Args:
        command: the command line as it was typed, without secrets.

    Raises:
        As `write`.
    """
    picture = result.picture()
    parts = [
        f'<header><p class="kind">{_text(result.title)}</p><h1>{_text(result.answer)}</h1></header>',
        _section(picture.title or "Picture", f"<figure>{picture.themed_svg()}</figure>"),
        _section("Results", "".join(_scrolled(html_table(table, styled=False)) for table in result.tables())),
        _section("In words", _list(result.findings)),
        _section("Notes", _list([f"{note}." for note in result.notes])),
        _section("How to run it again", f"<pre><code>{_text(command)}</code></pre>" if command else ""),
        _settings(result.settings),
    ]
    made_with = ", ".join(f"{name} {version}" for name, version in versions("numpy").items())
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">'
        f"<title>{_text(result.title)}: {_text(result.answer)}</title><style>{STYLE}</style></head>\n"
        f"<body><main>{''.join(parts)}<footer>{_text(made_with)}</footer></main></body></html>\n"
    )


def _text(words: str) -> str:
    return html.escape(words).replace(" %", "&nbsp;%")


def _section(title: str, content: str) -> str:
    return f"<section><h2>{_text(title)}</h2>{content}</section>\n" if content else ""


def _scrolled(table: str) -> str:
    return f'<div class="scroll" tabindex="0">{table}</div>'


def _list(sentences: Sequence[str]) -> str:
    return f"<ul>{''.join(f'<li>{_text(one)}</li>' for one in sentences)}</ul>" if sentences else ""


def _settings(settings: Mapping[str, Any]) -> str:
    rows = "".join(f"<tr><td>{_text(name)}</td><td>{_text(value)}</td></tr>" for name, value in flat(settings))
    return f"<details><summary>All settings</summary><table><tbody>{rows}</tbody></table></details>" if rows else ""


def flat(value: Any, name: str = "") -> Iterator[tuple[str, str]]:
    """Names such as `settings.0.policy`, each with its value as text; what is not set is left out."""
    if isinstance(value, list | tuple) and any(isinstance(one, Mapping | list | tuple) for one in value):
        value = dict(enumerate(value))
    if isinstance(value, Mapping):
        for key, one in value.items():
            yield from flat(one, f"{name}.{key}" if name else str(key))
    elif isinstance(value, list | tuple):
        yield name, ", ".join(map(str, value))
    elif value is not None:
        yield name, str(value)
