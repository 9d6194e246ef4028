"""Explains where a request's time went, as phases and as a sentence: "Late by 410 ms: waited 380 ms behind 3 others
at r2."

The board and `/debug/requests/{id}` compute it from a `RequestRecord` when asked.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping
from typing import Literal, NamedTuple

from rubato.core.events import Finished
from rubato.core.request import NOTHING
from rubato.frontdoor.request_record import HELD, LOST, PREEMPTED, QUEUE, TRANSFER, RequestRecord

# "remote": at a server that does not report when a request waits and when it runs.
Phase = Literal["queue", "remote", "prefill", "decode", "transfer"]
MAX_PHASES = 12  # the last ones of a longer history

CAUSE_SENTENCES = {
    "prefill interference": "prompts of other requests ran in its steps",
    "decode interference": "too many others decoded in its steps",
    "preemption": "it was preempted and had to be run again",
    "transfer": "its KV had to move to another replica",
    "infeasible": "not even an idle server could have met its SLO",
    "gateway": "the gateway passed its tokens on late",
}
WAIT_CAUSES = {HELD: "queue", QUEUE: "queue", PREEMPTED: "preemption", TRANSFER: "transfer", LOST: "failed"}  # -> cause
INTERFERENCE = "prefill or decode interference"  # the server reports which one at the end
NOT_REPORTED = "not reported"


def phases(record: RequestRecord, now: float, counted_replicas: Collection[str] = ()) -> list[tuple[Phase, float]]:
    """Returns the phases of a request and their seconds, from its arrival until its end or now.

    Args:
        record: of the request.
        now: seconds of the clock.
        counted_replicas: ids of replicas that do not report their state.
    """
    end = now if record.end is None else record.end.at
    story: list[tuple[Phase, float]] = []
    at = record.request.arrival
    waits = ((why, min(begin, end), min(until, end)) for why, begin, until in record.waits_until(end))
    for why, begin, until in waits:
        # A request is held from its arrival on.
        _add_phases(story, _running_phases(record, at, begin) if story else [("queue", begin - at)])
        kind: Phase = "transfer" if why == TRANSFER else "queue"
        if why == QUEUE and record.replicas and record.replicas[-1] in counted_replicas:
            kind = "remote"
        _add_phases(story, [(kind, until - begin)])
        at = max(at, until)
    _add_phases(story, _running_phases(record, at, end))
    return story[-MAX_PHASES:]


def _running_phases(record: RequestRecord, begin: float, end: float) -> Iterator[tuple[Phase, float]]:
    """Returns the phases of a span without waits: prefill until the first token, then decode."""
    first = record.stages[0].first
    split = end if first is None else min(max(first, begin), end)
    yield "prefill", split - begin
    yield "decode", end - split


def _add_phases(
    story: list[tuple[Phase, float]], more: Iterator[tuple[Phase, float]] | list[tuple[Phase, float]]
) -> None:
    for kind, seconds in more:
        if seconds <= 0.0:
            continue
        if story and story[-1][0] == kind:
            story[-1] = (kind, story[-1][1] + seconds)
        else:
            story.append((kind, seconds))


def cause_so_far(record: RequestRecord, now: float, counted_replicas: Collection[str] = ()) -> tuple[str, float]:
    """Returns what has cost a request in flight the most time, and its seconds; INTERFERENCE: the time it has run."""
    is_counted = bool(record.replicas) and record.replicas[-1] in counted_replicas
    lost: defaultdict[str, float] = defaultdict(float)
    lost["queue"] = record.offered_at - record.request.arrival  # until it was offered
    for why, begin, until in record.waits_until(now):
        lost[NOT_REPORTED if is_counted and why == QUEUE else WAIT_CAUSES[why]] += until - begin
    lost[NOT_REPORTED if is_counted else INTERFERENCE] += now - record.request.arrival - sum(lost.values())
    return max(lost.items(), key=lambda item: item[1])


class Lateness(NamedTuple):
    """Says how late the next token of a request in flight is, and the cause that has cost it the most; seconds."""

    seconds: float
    cause: str
    cause_seconds: float


def lateness(record: RequestRecord, now: float, due: float, counted_replicas: Collection[str] = ()) -> Lateness | None:
    """Judges a request in flight whose next token is due at `due`.

    Args:
        record: of the request.
        now: seconds of the clock.
        due: time of its next token, in seconds.
        counted_replicas: ids of replicas that do not report their state.

    Returns:
        The lateness; None for a request that is not late or has ended.
    """
    if record.end is not None or now <= due:
        return None
    return Lateness(now - due, *cause_so_far(record, now, counted_replicas))


def explain(
    record: RequestRecord, now: float, late: Lateness | None = None, names: Mapping[str, str] = NOTHING
) -> str:  # fmt: skip
    """Explains the state of a request, or why it ended as it did.

    Args:
        record: of the request.
        now: seconds of the clock.
        late: how late it is, by `lateness`.
        names: of replicas, where the reader knows them by another name than their id.

    Returns:
        A sentence or two.
    """
    end = record.end
    if end is None:
        return " ".join([*_lateness_sentences(record, now, late, names), _in_flight(record, now, names)])
    judged = end.verdict
    if end.outcome == "refused":
        return f"Refused: {end.reason}."
    if end.outcome == "failed":
        return f"Failed: {end.reason}."
    if end.outcome == "cancelled":
        return f"Cancelled after {_time(end.at - record.request.arrival)}: {end.reason}."
    if judged.unjudged:
        return "Completed; its first token and its pace were not measured."
    if record.request.best_effort:
        return f"Completed as best effort in {_time(end.at - record.request.arrival)}."
    if judged.met:
        return "On time." if judged.margin is None else f"On time, with {_time(judged.margin)} to spare."
    by = "" if judged.margin is None else f" by {_time(-judged.margin)}"
    return f"Late{by}: {_why(record, end, names)}."


def _why(record: RequestRecord, end: Finished, names: Mapping[str, str]) -> str:
    cause = end.verdict.cause
    if record.lost_replica:
        return f"{names.get(record.lost_replica, record.lost_replica)} was lost, and it began again elsewhere"
    if cause in CAUSE_SENTENCES:
        return CAUSE_SENTENCES[cause]
    if cause == NOT_REPORTED:
        return _unreported(record, names)
    waited = sum(until - begin for _, begin, until in record.waits)
    if not waited:
        return "no wait and no interference was seen"
    where = f" at {_last_replica(record, names)}" if record.replicas else " in the router"
    return f"waited {_time(waited)}{_behind(record.queue_ahead)}{where}"


def _unreported(record: RequestRecord, names: Mapping[str, str]) -> str:
    """Returns an explanation for a request at a server that does not report."""
    sent = max((step["at"] for step in record.steps if step["event"] == "placed"), default=record.request.arrival)
    first, server = record.stages[0].first, _last_replica(record, names) if record.replicas else "its server"
    took = (
        "" if first is None or first < sent else f"its first token came {_time(first - sent)} after it was sent, and "
    )
    return f"{took}{server} does not report how it spent the time"


def _lateness_sentences(
    record: RequestRecord, now: float, late: Lateness | None, names: Mapping[str, str]
) -> Iterator[str]:  # fmt: skip
    """Yields sentences on how late a request is and why, and on where and when it became best effort."""
    if late is not None:
        age, spent = _time(now - record.request.arrival), _time(late.cause_seconds)
        if late.cause == INTERFERENCE:
            why = f"it ran beside others for {spent} of {age} ({late.cause})"
        elif late.cause == NOT_REPORTED:
            why = f"at its server for {spent} of {age}, which does not report how it spends the time"
        else:
            why = f"{late.cause} for {spent} of {age}"
        yield f"Late by {_time(late.seconds)} so far: {why}."
    if record.best_effort_since is not None:
        where = f"at {names.get(record.demoted_at, record.demoted_at)}" if record.demoted_at else "by the router"
        after = _time(record.best_effort_since - record.request.arrival)
        yield f"Given up {where} {after} after it came: served as best effort since then."


def _in_flight(record: RequestRecord, now: float, names: Mapping[str, str]) -> str:
    if record.waiting is not None:
        why, since = record.waiting
        where = f" at {_last_replica(record, names)}" if record.replicas and why == QUEUE else ""
        behind = _behind(record.queue_ahead) if why == QUEUE else ""
        return f"Has waited {_time(now - since)}{behind}{where}: {why}."
    where = f" at {_last_replica(record, names)}" if record.replicas else ""
    if record.stages[0].first is None:
        return f"Its prompt runs{where}."
    return f"Decodes{where}: {record.output} of at most {record.request.sampling.max_tokens} tokens."


def _behind(ahead: int) -> str:
    return f" behind {ahead} other{'s' if ahead > 1 else ''}" if ahead else ""


def _last_replica(record: RequestRecord, names: Mapping[str, str]) -> str:
    return names.get(record.replicas[-1], record.replicas[-1])


def _time(seconds: float) -> str:
    ms = max(0.0, seconds) * 1e3
    if ms < 100:
        return f"{ms:.3g} ms"
    return f"{ms:.0f} ms" if ms < 1000 else f"{ms / 1e3:.3g} s" if ms < 100_000 else f"{ms / 60_000:.3g} min"
