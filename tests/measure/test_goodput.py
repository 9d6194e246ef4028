"""Goodput in vLLM's spelling: what is good, and how it is counted."""

import dataclasses

import pytest

from rubato.measure import results
from rubato.measure.goodput import SLOBounds, parse
from rubato.measure.records import summarise
from tests.measure.test_results import FATES, run


def test_bounds_are_milliseconds_by_vllms_names():
    assert parse(["ttft:200", "tpot:30.5", "e2el:5000"]) == SLOBounds(0.2, 0.0305, 5.0)
    assert str(parse(["e2el:5000", "ttft:200"])) == "ttft:200 e2el:5000"


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["ttfb:200"], "'ttfb:200': write NAME:MILLISECONDS"),
        (["ttft"], "write NAME:MILLISECONDS"),
        (["ttft:-3"], "write NAME:MILLISECONDS"),
        (["ttft:inf"], "write NAME:MILLISECONDS"),
        (["tpot:3", "tpot:4"], "tpot twice"),
        ([], "at least one bound"),
    ],
)
def test_what_is_no_bound_is_refused(words, says):
    with pytest.raises(ValueError, match=says):
        parse(words)


@pytest.mark.parametrize(
    ("outcome", "ttft", "tpot", "e2e", "good"),
    [
        ("completed", 0.2, 0.03, 5.0, True),
        ("completed", 0.201, 0.03, 5.0, False),
        ("completed", 0.2, 0.031, 5.0, False),
        ("completed", 0.2, 0.03, 5.1, False),
        ("completed", 0.2, None, 0.2, True),  # a single token has no pace to keep
        ("completed", None, None, None, False),
        ("refused", None, None, None, False),
        ("failed", 0.1, 0.01, None, False),
    ],
)
def test_a_good_request_completes_and_keeps_every_bound(outcome, ttft, tpot, e2e, good):
    assert parse(["ttft:200", "tpot:30", "e2el:5000"]).are_met(outcome, ttft, tpot, e2e) is good


def test_a_summary_counts_good_requests_beside_attained_ones():
    """TTFTs of 0.5, 0.9, 1.5, 0.1 s (fast) and 2.0, 12.0 s (slow); 8 requests in 8 s; mean TPOT 0.05 s."""
    bounded = dataclasses.replace(run("p", FATES), goodput=SLOBounds(ttft=1.5))
    fast, slow, everything = summarise(bounded)
    assert (fast.met, fast.good, slow.good, everything.good) == (3, 4, 0, 4)
    assert everything.goodput_rps == pytest.approx(0.5)
    assert everything.goodput_rps_low < 0.5 < everything.goodput_rps_high
    assert summarise(dataclasses.replace(bounded, goodput=SLOBounds(ttft=1.5, tpot=0.04)))[-1].good == 0
    assert summarise(run("p", FATES))[-1].good is None
    text = results.table([bounded])
    assert "goodput 0.50 requests/s [" in text
    assert "within ttft:1500: 4 of 8; per tier fast 4/6, slow 0/2" in text
    with pytest.raises(ValueError, match="same goodput bounds"):
        summarise([bounded, run("p", FATES)])
    with pytest.raises(ValueError, match="no goodput bounds"):
        run("p", FATES).good(bounded.records[0])
