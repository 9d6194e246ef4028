"""The requests that are open at one server: their tokens, their ends, and what listeners learn of both."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace
from math import inf

from rubato.core.clock import Clock
from rubato.core.events import Event, Finished, HandedOff, Offered, Started, Stepped, Tokens, Transferred, Verdict
from rubato.core.interfaces import TransferError
from rubato.core.request import Cause, Outcome
from rubato.core.slo import StageTimes, as_passed_on, judge, judge_untimed
from rubato.fleet.event_bus import Listener
from rubato.fleet.relay import Trip
from rubato.fleet.remote_view import RemoteReplica
from rubato.fleet.token_path import TokenCount
from rubato.replica.miss_cause import is_infeasible
from rubato.replica.sequence import Seq
from rubato.wire.replica_report import HandOffReport

TOKEN_EVENTS_S = 1.0  # counted tokens are reported to listeners at this interval


class ServerRequests:
    """Keeps the open requests of a server. Without a link's reports it counts their tokens itself.

    Args:
        replica: id of the server's replica.
        remote: returns the mirror of the replica, once it has started.
        emit: gets the events of the requests, and of steps.
        drop_response: drops the connection of a trip's response.
        all_ended: called when no request is open.
    """

    def __init__(
        self, replica: str, remote: Callable[[], RemoteReplica], clock: Clock, slo_rule: str, *, emit: Listener,
        drop_response: Callable[[Trip], None], all_ended: Callable[[], None],
    ) -> None:  # fmt: skip
        self.trips: dict[str, Trip] = {}  # by request
        self.is_linked = False  # a link reports every step; if not, tokens are counted here
        self.absent_since: dict[str, float] = {}  # since when the engine does not know a request that is open here
        self.aborted_ids: set[str] = set()  # of these, requests that the engine was told to abort
        self.prefill_reports: dict[str, HandOffReport] = {}  # from the link, ahead of their responses
        self.kv_arrivals: dict[str, asyncio.Future[None]] = {}  # by request whose KV is on its way
        self.failed_answers: set[str] = set()  # since the server's last token
        self._replica, self._remote, self._clock, self._slo_rule = replica, remote, clock, slo_rule
        self._emit, self._drop_response, self._all_ended = emit, drop_response, all_ended
        self.prompt_tokens: dict[str, int] = {}  # tokens as the server counts them, by a trip's first id
        self._counts: dict[str, TokenCount] = {}  # by request

    def are_open(self, trip: Trip) -> bool:
        """Returns whether a request of the trip is open here."""
        return any(id in self.trips for id in trip.ids)

    def lacks_end_report(self, trip: Trip) -> bool:
        """Returns whether the end of a request of the trip has not been reported."""
        return any(id in self.trips and id not in self.prefill_reports for id in trip.ids)

    def forget(self, id: str) -> Trip | None:
        """Removes a request without an event. Returns its trip."""
        self._counts.pop(id, None)
        return self.trips.pop(id, None)

    def clear(self) -> None:
        for state in (self.trips, self._counts, self.prompt_tokens, self.aborted_ids):
            state.clear()

    # ----------------------------------------------------------------- events

    def fold(self, *events: Event) -> None:
        """Applies and emits events that the gateway knows of without the link."""
        remote = self._remote()
        for event in events:
            remote.fold(event)
        self.emit(events, is_from_link=False)

    def emit(self, events: Sequence[Event], *, is_from_link: bool = True) -> None:
        """Emits events of the gateway's own requests, and of steps.

        Args:
            is_from_link: the engine reported them.
        """
        for event in events:
            if isinstance(event, Stepped):
                self._emit(event)
                continue
            if self.absent_since:
                self.absent_since.pop(event.id, None)
            if type(event) is Tokens:
                if self.failed_answers:
                    self.failed_answers.clear()
                if event.id in self.trips:
                    self._emit(event)
            elif (trip := self.trips.get(event.id)) is None:
                continue
            elif isinstance(event, Offered):  # it has come there; the cluster has offered it
                self._take_prompt_tokens(trip, event)
            else:
                self._emit_change(trip, event, is_from_link=is_from_link)
        if not self.trips:
            self._all_ended()

    def _take_prompt_tokens(self, trip: Trip, event: Offered) -> None:
        is_first = trip.ids.index(event.id) % trip.choices == 0  # choice of its prompt
        if event.request.progress is None and is_first and trip.ids[0] in self.trips:
            self.prompt_tokens[trip.ids[0]] = self.prompt_tokens.get(trip.ids[0], 0) + event.request.prompt
            if len(trip.ids) == 1:
                trip.on_prompt_tokens(event.request.prompt)

    def _emit_change(self, trip: Trip, event: Event, *, is_from_link: bool) -> None:
        """Emits an event of a request that is no token, once what it ends here has ended: the wait for its KV, and for
        one that has finished or goes on elsewhere all that is kept of it. Where it failed before its KV had come, the
        wait fails in place of the request, which is then placed again."""
        id = event.id
        if isinstance(event, Finished):
            verdict = self._as_passed_on(trip, event) if is_from_link else event.verdict
            event = replace(event, prompt=self.prompt_tokens.pop(id, None), verdict=verdict)
            if event.outcome == "failed" and self.fail_arrival(
                trip, f"replica {self._replica} could not read the KV of request {id!r}"
            ):
                self.forget(id)
                self._drop_response(trip)
                return
        arrival = self.kv_arrivals.get(id)
        if isinstance(event, Transferred | Finished | HandedOff) and arrival is not None and not arrival.done():
            arrival.set_result(None)
        if isinstance(event, Finished | HandedOff):
            self.prompt_tokens.pop(id, None)
            self.prefill_reports.pop(id, None)
            self.aborted_ids.discard(id)
            self.forget(id)
            trip.news.set()
            if isinstance(event, HandedOff) and not self.are_open(trip):
                self._drop_response(trip)
        self._emit(event)

    def fail_arrival(self, trip: Trip, why: str) -> bool:
        """Fails the transfer of a trip's KV, if the trip still waits for it; it is then placed again. Returns whether
        it waited."""
        arrival = self.kv_arrivals.get(trip.ids[0])
        if arrival is None:
            return False
        if not arrival.done():
            arrival.set_exception(TransferError(why))
        return True

    def _as_passed_on(self, trip: Trip, end: Finished) -> Verdict:
        """Returns the verdict with the gateway's own delay. The last chunk waits for the verdict, so it is yet to be
        passed on."""
        if end.outcome != "completed":
            return end.verdict
        request = trip.requests[trip.ids.index(end.id)]
        return as_passed_on(request, end.verdict, end.output, trip.began_at, self._clock.now())

    # ----------------------------------------------------------------- tokens

    def set_prompt_tokens(self, trip: Trip, prompt: int) -> None:
        """Sets the prompt tokens of a trip, as its server counts them; 0: the server did not count."""
        if prompt and trip.tries <= 1 and trip.ids[0] in self.trips:
            self.prompt_tokens[trip.ids[0]] = prompt
            trip.on_prompt_tokens(prompt)

    def max_output(self, trip: Trip) -> int:
        """Returns the limit on a trip's output tokens, whatever its server claims."""
        seqs = [self._remote().seq_of(id) for id in trip.ids]
        return sum([seq.request.sampling.max_tokens for seq in seqs if seq is not None])

    def mark_started(self, trip: Trip, prompt: int) -> None:
        """Marks a trip's requests as started: their first bytes have come.

        Args:
            prompt: tokens; 0 if not known.
        """
        now, remote = self._clock.now(), self._remote()
        for id in trip.ids:
            if (
                id in self.trips
                and remote.is_arriving(id)
                and (seq := remote.seq_of(id))
                and (handoff := seq.request.handoff)
            ):
                self.fold(Transferred(now, id, self._replica, handoff.source, handoff.cached, 0))
            if id in self.trips and remote.is_waiting(id):
                if prompt and len(trip.ids) == 1:
                    remote.set_prompt_tokens(id, prompt)
                self.fold(Started(now, id))

    def count(self, trip: Trip, choices: Sequence[int]) -> None:
        """Counts a token of each of these choices."""
        for at in choices:
            if at < len(trip.ids) and (count := self._count_of(trip, trip.ids[at])) is not None:
                count.add()

    def count_of(self, trip: Trip) -> TokenCount | None:
        """Returns the counter of a trip with one choice; None before its first token, and while a link reports
        tokens."""
        return None if self.is_linked else self._counts.get(trip.ids[0])

    def _count_of(self, trip: Trip, id: str) -> TokenCount | None:
        if id not in self._counts and id in self.trips:
            if self._remote().running_seq(id) is None:
                self.mark_started(trip, 0)
            now = self._clock.now
            self._counts[id] = TokenCount(id, now, self._emit_tokens, now() + TOKEN_EVENTS_S)
        return self._counts.get(id)

    def _emit_tokens(self, count: TokenCount) -> None:
        """Emits the tokens that have come since the last call."""
        now = self._clock.now()
        count.emit_at = now + TOKEN_EVENTS_S
        if count.times:
            self._show_tokens(count)
            times, count.times, count.shown_count = tuple(count.times), [], 0
            self.failed_answers.clear()
            self._emit(Tokens(now, count.id, len(times), times=times))

    def emit_counted_tokens(self, before: float = inf) -> None:
        """Emits the counted tokens of all requests whose report is due before this time."""
        for count in [count for count in self._counts.values() if count.emit_at <= before]:
            self._emit_tokens(count)

    def show_counted_tokens(self) -> None:
        """Shows the counted tokens of all requests in the view."""
        for count in self._counts.values():
            self._show_tokens(count)

    def _show_tokens(self, count: TokenCount) -> None:
        if len(count.times) > count.shown_count:
            if (seq := self._remote().seq_of(count.id)) is not None:
                seq.add_tokens(count.times[count.shown_count :])
            count.shown_count = len(count.times)

    # ----------------------------------------------------------------- ends

    def end(self, trip: Trip, outcome: Outcome, reason: str) -> None:
        """Ends the trip's requests that are open here."""
        for id in trip.ids:
            was_cut = outcome == "completed" and id in self.aborted_ids
            self.finish(id, *(("cancelled", "aborted") if was_cut else (outcome, reason)))

    def finish(self, id: str, outcome: Outcome, reason: str) -> None:
        """Ends a request whose end the link has not reported."""
        if id not in self.trips:
            return
        if (count := self._counts.get(id)) is not None:
            self._emit_tokens(count)
        now, remote = self._clock.now(), self._remote()
        seq = remote.seq_of(id)
        assert seq is not None, "a request with a trip has a sequence"
        trip, output = self.trips[id], seq.total_output
        untimed = trip.untimed_tokens(id)
        if outcome == "completed" and untimed is not None:
            output = max(output, untimed)
            verdict = judge_untimed(seq.request, now, self._slo_rule)
        else:
            stages = [StageTimes(*stage) for stage in zip(seq.starts, seq.times_of_all(), strict=True)]
            verdict = judge(seq.request, stages, outcome, self._slo_rule, reason=reason)
        if outcome == "completed" and verdict.missed:
            verdict = replace(verdict, cause=self._why_missed(seq, verdict, trip))
        self.fold(Finished(now, id, outcome, reason, verdict, output, seq.best_effort))

    def _why_missed(self, seq: Seq, verdict: Verdict, trip: Trip) -> Cause:
        """Returns the cause of a miss, as far as the gateway knows: the SLO is infeasible even on an idle server, or
        the wait for a replica was at least half of the delay."""
        remote = self._remote()
        if "step_times" in remote.supports:
            cached = seq.request.prompt  # what a prefix cache there saves is not known
            if is_infeasible(seq, cached, remote.latency, remote.limits, self._slo_rule):
                return "infeasible"
        waited = 0.0 if trip.sent_at is None else trip.sent_at - seq.request.arrival
        return "queue" if verdict.margin is not None and 0.0 < -verdict.margin <= 2 * waited else "not reported"
