"""The figure `silicon`: its points are those of the source, its fit finds host terms, its halves share no server."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from experiments import silicon
from experiments.silicon import Point


def test_every_point_of_the_source_is_used_or_left_out_with_a_reason() -> None:
    left_out = json.loads((silicon.DATA / "left_out.json").read_text())
    assert len(silicon.points()) + sum(left_out.values()) == 5221
    assert {p.source for p in silicon.points()} == {*silicon.BENCHMARKS, "unclear"}
    assert all((silicon.DATA / f"{p.profile}.json").exists() for p in silicon.points())


def test_what_is_unclear_is_what_one_server_could_not_have_run() -> None:
    # kernel seconds a second: at most 1, but for the error of the tables
    used = [silicon.busy(p) for p in silicon.chosen(small=False)[::20]]
    unclear = [silicon.busy(p) for p in silicon.points() if p.source == "unclear"]
    assert max(used) < 1.15
    assert sum(share > 1.15 for share in unclear) >= len(unclear) - 2


def test_half_of_the_servers_of_each_kind_are_fitted() -> None:
    own = silicon.chosen(small=False)
    half = silicon.fitted_servers(own)
    assert half == silicon.fitted_servers(list(reversed(own)))
    for kind in {silicon.kind_of(p.profile) for p in own}:
        servers = {p.profile for p in own if silicon.kind_of(p.profile) == kind}
        assert len(servers & half) == len(servers) // 2
    assert 0.4 * len(own) < sum(p.profile in half for p in own) <= 0.5 * len(own)


def test_the_fit_finds_the_host_terms_that_times_were_made_with() -> None:
    given = {"inferencemax": (1.5e-3, 1e-5), "vllm-0.12": (2e-3, 7e-5)}

    def made(p: Point) -> tuple[Point, dict[str, dict[str, float]]]:
        kernels, seqs = 1e-4 * p.concurrency + 1e-6 * p.isl, 0.9 * p.concurrency
        host, per_seq = given[p.source]
        spoilt = 1.0 if p.profile in half else 3.0  # what is not fitted must not count
        then = {"kernels": {"tpot": kernels}, "vllm-2024": {"tpot": kernels + 4.4e-3 + 5.8e-5 * seqs}}
        return replace(p, tpot=spoilt * (kernels + host + per_seq * seqs)), then

    own = silicon.chosen(small=False)
    half = silicon.fitted_servers(own)
    measured, runs = zip(*(made(p) for p in own), strict=True)
    found = silicon.host_terms(measured, runs)
    assert {source: pytest.approx(term) for source, term in given.items()} == found


def test_a_closed_loop_has_the_clients_and_lengths_of_its_benchmark() -> None:
    by_source = {p.source: p for p in silicon.chosen(small=False) if p.concurrency == 16}
    burst, spread = (silicon.offered(by_source[name], small=False) for name in ("inferencemax", "vllm-0.12"))
    p, q = by_source["inferencemax"], by_source["vllm-0.12"]
    assert (burst.concurrency, len(burst.arrivals), len(spread.arrivals)) == (16, 160, 80)
    assert all(0.8 * p.isl - 1 <= a.prompt_tokens <= p.isl for a in burst.arrivals)
    assert len({a.output_tokens for a in burst.arrivals}) > 50
    assert {(a.prompt_tokens, a.output_tokens) for a in spread.arrivals[16:]} == {(q.isl, q.osl)}
    assert len({a.output_tokens for a in spread.arrivals[:16]}) == 16
