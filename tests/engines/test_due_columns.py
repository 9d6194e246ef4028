"""Due times of requests inside vLLM, all at once, are those of each."""

from math import inf
from types import SimpleNamespace
from typing import Any

from rubato.core.request import SLO, Request, Sampling, Stage
from rubato.engines.vllm.due_columns import DueColumns
from rubato.engines.vllm.sequence import VllmSeq

SLOS = (
    SLO(0.3, 0.02),
    SLO(2.0),
    SLO(tpot=0.03),
    SLO(),
    SLO(1.0, 0.05, 1.1),
    SLO(e2e=4.0),
    SLO(0.5, 0.1, max_pause=0.06),
)


def test_due_times_at_once_are_those_of_each() -> None:
    vllms: Any = SimpleNamespace()
    requests = [Request(f"r{at}", (Stage(10, slo),), 0.1 * at, sampling=Sampling(16)) for at, slo in enumerate(SLOS)]
    seqs = [VllmSeq(request, vllms, vllms, at, None) for at, request in enumerate(requests)]
    columns = DueColumns(seqs)
    for step in range(6):
        columns.begin_view()
        assert columns.compute().tolist() == [seq.due for seq in seqs]
        assert columns.compute() is columns.compute()  # once for each view
        for at, seq in enumerate(seqs):
            if (at + step) % 3:
                seq.add_tokens([0.7 + 0.04 * step])
            seq.expected_tokens = (at + step) % 2
    assert DueColumns(()).compute().tolist() == []


def test_first_due_is_of_requests_that_have_missed_nothing() -> None:
    vllms: Any = SimpleNamespace()
    seqs = [
        VllmSeq(Request(id, (Stage(10, SLO(at)),), 0.0), vllms, vllms, 0, None) for id, at in (("a", 1.0), ("b", 2.0))
    ]
    assert DueColumns(seqs).first_unmissed() == 1.0
    seqs[0].add_tokens([1.5])
    assert seqs[0].missed
    assert DueColumns(seqs).first_unmissed() == 2.0
    assert DueColumns(()).first_unmissed() == inf
