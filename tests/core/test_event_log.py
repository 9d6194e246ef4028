"""The event log reads back as what was written; a broken line is named."""

import os
import stat
from dataclasses import replace
from pathlib import Path

import pytest

from experiments._timelines import timelines
from rubato.core.event_log import EventLogWriter, encode, read, without_content
from rubato.core.events import Event, Finished, Offered, Stepped, Tokens, Verdict
from rubato.core.plan import Limits, Shape
from rubato.core.request import SLO, Request, Stage, without_texts
from rubato.core.timeline import steps
from rubato.simulation.simulate import simulate_events
from tests.kit import Linear, request, run_spec

LIMITS = Limits(max_num_seqs=2, max_num_batched_tokens=16, max_model_len=100, kv_blocks=6, block_size=8)


def events() -> list[Event]:
    stages = (Stage(4, SLO(ttft=0.1, tpot=0.02), "</think>", (1, 2, 3, 4)), Stage(0, SLO(e2e=3.0)))
    requests = [Request("a", stages, 0.0), *(request(f"r{i}", 20, ttft=0.05, refuse=i == 1) for i in range(4))]
    return simulate_events(requests, {"a": (3, 2)}, run_spec(Linear(), LIMITS, "edf"))


def test_round_trip(tmp_path: Path) -> None:
    written = events()
    with EventLogWriter(tmp_path / "log", content=True) as log:
        for event in written:
            log(event)
    assert list(read(tmp_path / "log")) == written


def test_a_log_from_before_accepted_nodes_and_draft_tokens_were_kept_is_still_read(tmp_path: Path) -> None:
    now = (
        Tokens(1.0, "a", 2, "xy", (7, 8), tried=2, accepted=(1,)),
        Stepped(1.0, "r0", Shape(4, 1, 9, spec_steps=3, draft_tokens=6), 0.01),
    )
    (tmp_path / "log").write_bytes(b"".join(map(encode, now)))
    assert list(read(tmp_path / "log")) == list(now)
    was = (tmp_path / "log").read_bytes().replace(b',"accepted":[1]', b"").replace(b',"draft_tokens":6', b"")
    assert b"accepted" not in was
    assert b"draft_tokens" not in was
    (tmp_path / "log").write_bytes(was)
    assert list(read(tmp_path / "log")) == [
        replace(now[0], accepted=()),
        replace(now[1], shape=now[1].shape._replace(draft_tokens=0)),
    ]


def test_a_log_from_before_pauses_were_measured_is_still_read(tmp_path: Path) -> None:
    verdict = Verdict(True, "deadline", None, 0.1, 0.02, 0.5, 0.3, 0.02, True, False)
    now = encode(Finished(1.0, "a", "completed", "length", verdict))
    was = now.replace(b',"pause":0.02,"met_by_deadline":true,"met_by_windows":false', b"")
    assert was != now
    (tmp_path / "log").write_bytes(now + was)
    first, second = read(tmp_path / "log")
    assert isinstance(first, Finished)
    assert isinstance(second, Finished)
    assert first.verdict == verdict
    assert second.verdict == replace(verdict, pause=None, met_by_deadline=None, met_by_windows=None)


def test_what_is_remembered_of_a_prompt_has_no_keys_of_it() -> None:
    asked = Request("a", (Stage(70),), 0.0, prefix=(5,), session="s")
    assert without_texts(asked) == replace(asked, prefix=())
    assert without_content(Offered(0.0, "a", asked)) == Offered(0.0, "a", replace(asked, prefix=()))


def test_prompts_and_outputs_stay_out_unless_asked_for(tmp_path: Path) -> None:
    with EventLogWriter(tmp_path / "log") as log:
        for event in events():
            log(event)
    back = list(read(tmp_path / "log"))
    assert back == [without_content(e) for e in events()]
    assert not any(e.text or e.token_ids for e in back if isinstance(e, Tokens))


@pytest.mark.parametrize("line", [b"{", b"[1]", b'{"kind":"Nothing"}', b'{"kind":"Placed","at":1.0,"id":"a"}'])
def test_a_broken_line_is_named(tmp_path: Path, line: bytes) -> None:
    (tmp_path / "log").write_bytes(encode(events()[0]) + line + b"\n")
    with pytest.raises(ValueError, match="line 2: not an event"):
        list(read(tmp_path / "log"))


def test_a_last_line_that_was_cut_short_is_left_out_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    one, two = (encode(without_content(e)) for e in events()[:2])
    for end in (1, len(two) // 2, len(two) - 2):
        caplog.clear()
        (tmp_path / "log").write_bytes(one + two[:end])
        assert [encode(e) for e in read(tmp_path / "log")] == [one]
        assert "line 2: cut short" in caplog.text
    (tmp_path / "log").write_bytes(one + two[:20] + b"\n" + two)
    with pytest.raises(ValueError, match="line 2: not an event"):
        list(read(tmp_path / "log"))


def test_folds() -> None:
    log = events()
    lines = list(timelines(log))
    assert {line.request.id for line in lines} == {"a", "r0", "r1", "r2", "r3"}
    for line in lines:
        assert line.end is not None
        assert (line.tokens[-1] if line.tokens else 0) == line.end.output
    assert len(steps(log)) == sum(type(e).__name__ == "Stepped" for e in log)


def test_a_log_that_is_there_is_gone_on_with(tmp_path: Path) -> None:
    """A supervisor starts the server again: what the one before it said of its end is still there."""
    written = events()
    for part in (written[:3], [], written[3:]):
        with EventLogWriter(tmp_path / "log", content=True) as log:
            for event in part:
                log(event)
    assert list(read(tmp_path / "log")) == written
    assert stat.S_IMODE((tmp_path / "log").stat().st_mode) == 0o600


@pytest.mark.parametrize("cut", [1, 20, -1])
def test_what_a_killed_server_left_of_a_line_is_left_out(tmp_path: Path, cut: int) -> None:
    one, two, *_ = events()
    (tmp_path / "log").write_bytes(encode(one) + encode(two)[:cut])
    with EventLogWriter(tmp_path / "log", content=True) as log:
        log(two)
    assert list(read(tmp_path / "log")) == [one, two]


@pytest.mark.parametrize(
    "content",
    [
        b"policy: edf\n", b"{", b'{"kind":"Nothing"}\n', b"\x00" * 100_000, b"\n", b'{"kind":"Pod","apiVersion":"v1"}',
        encode(Stepped(1.0, "r0", Shape(1, 1, 1), 0.1)) + b'{"kind":"Pod"}',
    ],
)  # fmt: skip
def test_a_file_that_is_no_event_log_is_left_as_it_is(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "log").write_bytes(content)
    with pytest.raises(ValueError, match=r"the file is there and is no event log; name another, or move it away"):
        EventLogWriter(tmp_path / "log")
    assert (tmp_path / "log").read_bytes() == content


def test_a_pipe_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ValueError, match="it is a pipe, and its reader could stop the server; name a file"):
        EventLogWriter(tmp_path / "pipe")


def test_two_writers_of_one_file_are_refused(tmp_path: Path) -> None:
    with EventLogWriter(tmp_path / "log"), pytest.raises(ValueError, match="another process writes it"):
        EventLogWriter(tmp_path / "log")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="a device that is always full")
def test_a_log_that_cannot_be_written_to_its_end_says_so_and_no_more(caplog: pytest.LogCaptureFixture) -> None:
    log = EventLogWriter("/dev/full")
    log(events()[0])
    log.close()
    assert "event log /dev/full: its last events could not be written (No space left on device)" in caplog.text
