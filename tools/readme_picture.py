"""Draws the README's picture, requests in time by load, from the last full run of figure `load-curve`.

python tools/readme_picture.py
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from experiments._rubato_runs import recorded
from experiments.load_curve import draw
from rubato.measure.pictures import CLEAR, DARK, Ink, Picture

IMAGES = Path(__file__).parents[1] / "docs" / "images"


def drawn(figure: Any, ink: Ink) -> None:
    axes = figure.add_subplot()
    axes.grid(axis="y")
    draw(recorded("load-curve"), axes)


if __name__ == "__main__":
    for name, ink in (("light", CLEAR), ("dark", DARK)):
        Picture("", drawn, (8.2, 3.4)).save(IMAGES / f"load-{name}.svg", ink)
