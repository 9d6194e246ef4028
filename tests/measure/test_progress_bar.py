"""Progress where standard error is no terminal."""

from __future__ import annotations

import pytest

from rubato.measure import progress_bar
from rubato.measure.progress_bar import ProgressBar


class Clock:
    at = 0.0

    def now(self) -> float:
        return self.at


def test_progress_into_a_pipe_is_lines_not_more_often_than_needed(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock()
    monkeypatch.setattr(progress_bar, "WallClock", lambda: clock)
    with ProgressBar(total=40, unit="job", desc="search", mininterval=0.0, miniters=1) as bar:
        for clock.at in range(1, 21):
            bar.update()
        bar.desc, bar.total = "verify: ", 20  # as `JobRunner` does: all is done
        bar.refresh()
        bar.refresh()
    assert capsys.readouterr().err == "".join(f"search: {n} of 40 jobs\n" for n in (0, 10, 20))
    with ProgressBar(total=2, unit="job", disable=True) as bar:
        bar.update(2)
    assert capsys.readouterr().err == ""
