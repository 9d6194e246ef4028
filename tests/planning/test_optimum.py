"""PolyServe's optimum: the formulas by hand, and what must hold of any batch limit."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from rubato.core.plan import Limits
from rubato.core.request import SLO
from rubato.latency import affine
from rubato.planning.optimum import COSTS, StepParts, co_located, decode_limit, disaggregated, mixed_limit, optimum
from rubato.simulation.run_spec import packaged_hardware
from rubato.workloads import scenarios
from rubato.workloads.generate import make
from rubato.workloads.request_kinds import chat

H200 = packaged_hardware("llama-3.1-8b-h200", max_num_seqs=1024)
PARTS = StepParts(H200.model, H200.limits)


def test_by_hand() -> None:
    """1 ms a step, 10 us a token, 0.1 us a token of KV; a prompt reads its own. p = 100, d = 200, TPOT 4.8 ms."""
    model = affine.Model(k=(0.0, 1e-5), b=(0.0, 1e-3), host=0.0, host_per_seq=0.0, a=1e-7, d=0.0, e=0.0)
    parts = StepParts(model, Limits(10_000, 100_000, 10_000, 10_000, 16))
    limit = decode_limit(parts, 100, 200, 0.0048)
    # 1e-3 + 1e-5 B + 1e-7 * 200 B < 4.8e-3: B < 126.7
    assert (limit.batch, limit.reason) == (126, "tpot")
    assert limit.seconds == pytest.approx(1e-3 + 126 * 3e-5)
    cost = disaggregated(parts, 100, 200, 1.0, 0.0048)
    assert cost.seconds == pytest.approx(100 * (1e-3 + 2048e-5) / 2048 + 1e-5 + 200 * (1e-3 + 126 * 3e-5) / 126)
    assert not cost.late
    # co-located, 2/3 of B decodes: 1e-3 + 1e-5 B + 1e-7 (2/3 B * 200 + 100) < 4.8e-3: B < 162.4
    limit = mixed_limit(parts, 100, 200, 0.0048)
    assert (limit.batch, limit.reason) == (162, "tpot")
    cost = co_located(parts, 100, 200, 1.0, 0.0048)
    assert cost.seconds == pytest.approx(300 * (1e-3 + 162e-5) / 162 + 1e-5 + 1e-7 * 200 * 200)
    assert co_located(parts, 100, 200, 0.008, 0.0048).late  # 300 / 162 steps of 4.79 ms
    small = StepParts(model, Limits(10_000, 100_000, 10_000, 1000, 16))
    assert decode_limit(small, 100, 200, 0.0048)[::2] == (79, "kv")  # 200 tokens each of 16,000, not all
    assert decode_limit(StepParts(model, Limits(50, 100, 100, 1000, 16)), 100, 200, 0.0048)[::2] == (50, "batch")
    assert decode_limit(parts, 100, 200, 0.0005)[::2] == (1, "none")


@given(
    prompt=st.integers(1, 20_000),
    output=st.integers(1, 2000),
    tpot=st.floats(0.015, 0.2),
    mode=st.sampled_from(["pd", "co"]),
)
@example(317, 111, 0.1130739426790918, "co")  # the worst of half a million drawn: 5.8 %
def test_the_batch_is_the_largest_that_fits_and_a_looser_tpot_costs_no_more(
    prompt: int, output: int, tpot: float, mode: str
) -> None:
    find = decode_limit if mode == "pd" else mixed_limit
    limit = find(PARTS, prompt, output, tpot)
    looser = find(PARTS, prompt, output, 1.5 * tpot)
    assert looser.batch >= limit.batch
    if limit.reason == "none":
        assert limit.batch == 1
        return
    assert limit.seconds < tpot
    if limit.reason == "tpot":
        assert find(PARTS, prompt, output, limit.seconds).batch < limit.batch <= H200.limits.max_num_batched_tokens
    tight = COSTS[mode](PARTS, prompt, output, 1.0, tpot).seconds  # type: ignore[index]
    loose = COSTS[mode](PARTS, prompt, output, 1.0, 1.5 * tpot).seconds  # type: ignore[index]
    assert 0.0 < loose <= tight * 1.07  # whole numbers of sequences, and products that take steps


def test_of_a_workload() -> None:
    load = scenarios.make("polyserve-uniform-512-512", 1.0, count=300, prefill=H200.prefill)
    pd, co = (optimum(load, H200.model, H200.limits, mode) for mode in ("pd", "co"))  # type: ignore[arg-type]
    assert pd.requests == co.requests == 300
    assert pd.late == pd.slow == 0
    assert 0.9 < co.rate / pd.rate < 1.1
    slower = replace(H200.model, host=0.0102)  # type: ignore[type-var]
    assert optimum(load, slower, H200.limits, "pd").rate != pd.rate
    without = make("x", [chat(SLO(), prompt=(10, 20), output=(5, 9))], 1.0, count=3)
    assert optimum(without, H200.model, H200.limits, "co").late == 0
    with pytest.raises(ValueError, match="the workload is empty"):
        optimum(replace(load, arrivals=()), H200.model, H200.limits, "pd")
