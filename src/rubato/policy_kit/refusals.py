"""Says why a request that asked for it is refused: its SLO cannot be met beside the others, or cannot be met at all."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from zlib import crc32

from rubato.core.infeasible import StageLengths, find_infeasible
from rubato.core.interfaces import SeqView, View, nothing_sent
from rubato.core.request import INFEASIBLE, LATE

# One request in so many is not judged by its predicted length: otherwise a mean that is too long would refuse every
# request that could correct it.
UNPREDICTED_ONE_IN = 32


def refusable(seq: SeqView) -> bool:
    """Returns whether a request prefers a refusal to late service, and its client has received nothing."""
    return seq.request.on_decline == "refuse" and nothing_sent(seq)


def known_output(seq: SeqView) -> float | None:
    """Returns the output tokens still to come: exact if only `max_tokens` ends them, else as predicted, if at all."""
    sampling = seq.request.sampling
    if sampling.ignore_eos and not (sampling.stop or sampling.stop_ids) and len(seq.request.stages) == 1:
        return float(sampling.max_tokens - seq.output)
    return None if crc32(seq.id.encode("utf-8", "replace")) % UNPREDICTED_ONE_IN == 0 else seq.predicted


def why_infeasible(seq: SeqView, view: View) -> str | None:
    """Returns why a request that has not begun would miss the SLO of its first stage even alone on this replica, with
    numbers; None if it would not, or if that is unknown, as where the engine may draft."""
    stage, fewest, most = seq.request.stages[0], 1, seq.request.sampling.max_tokens
    if "draft" in view.supports:
        most = 1
    elif len(seq.request.stages) == 1 and (known := known_output(seq)) is not None:
        fewest = most = max(1, round(known))
    lengths = StageLengths(stage.prompt, stage.slo, fewest, most)
    chunk = view.limits.max_num_batched_tokens
    return find_infeasible([lengths], view.latency, chunk, cached=min(seq.cached, stage.prompt - 1))


def wants_refusal(seq: SeqView, view: View) -> bool:
    """Returns whether a request that prefers a refusal could not meet its SLO here even alone."""
    return refusable(seq) and why_infeasible(seq, view) is not None


def refusal(seq: SeqView, *views: View) -> str:
    """Returns the reason to refuse a request whose SLO cannot be met at these replicas now."""
    found = [why_infeasible(seq, view) for view in views]
    return f"{INFEASIBLE}: {found[0]}" if found and all(found) else LATE


def refusals(seqs: Iterable[SeqView], view: View) -> dict[str, str]:
    """Returns reasons by id for the requests, all unable to meet their SLO, that are to be refused for it."""
    return {seq.id: refusal(seq, view) for seq in seqs if refusable(seq)}


def fleet_refusal(seq: SeqView, fleet: Sequence[View]) -> str:
    """Returns `refusal` for a router; a generic reason if a server's step times are a guess."""
    return refusal(seq, *fleet) if all("step_times" in view.supports for view in fleet) else LATE
