"""Reports of an engine core to vLLM's API servers: events at once, steps and sequences at intervals."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import replace
from math import inf
from typing import Any, cast

from rubato.core.events import Event, Finished, Offered, Placed, Tokens
from rubato.core.interfaces import View
from rubato.core.request import without_texts
from rubato.engines.vllm.core_link import CoreLink
from rubato.engines.vllm.sequence import VllmSeq
from rubato.policy_kit.backlog import prefill_seconds
from rubato.wire.messages import EngineState, RequestEvents, full_row

REPLICA_NAME = "vllm"  # of the one replica that an engine core is
REPORT_S, VIEW_S = 0.25, 1.0  # interval of step reports, and of reports of all sequences


class Reports:
    """Collects the next reports to API servers. `planned` has the seconds of each plan, `batches` tokens, sequences and
    seconds of each step.

    Args:
        engine: number of this core.
    """

    def __init__(self, link: CoreLink, engine: int) -> None:
        self._link, self._engine = link, engine
        self._message_counts: Counter[int | None] = Counter()  # messages to each API server, and to all
        self._events: dict[int, list[Event]] = {}  # by API server
        self._tickets: dict[int, dict[str, str]] = {}
        self._new: list[VllmSeq] = []  # in no view yet
        self._has_views, self._was_idle = True, False
        self._view_fields: dict[str, Any] = {}  # of the last reported view
        self._steps_sent_at = self._view_sent_at = -inf  # when steps were last reported, and all sequences
        self.planned: list[float] = []
        self.batches: list[tuple[int, int, float]] = []

    def add(self, seq: VllmSeq, event: Event) -> None:
        client: int = seq.vllm_request.client_index
        events = self._events.setdefault(client, [])
        if type(event) is Offered:
            event = replace(event, request=without_texts(event.request))
            self._tickets.setdefault(client, {})[seq.id] = seq.ticket
            if self._has_views:
                self._new.append(seq)
        elif type(event) is Finished:
            self._tell_tokens(seq, event.output)
        events.append(event)

    def add_tokens(self, seq: VllmSeq, tokens: int, at: float) -> None:
        self._events.setdefault(seq.vllm_request.client_index, []).append(Tokens(at, seq.id, tokens))

    def _tell_tokens(self, seq: VllmSeq, output: int) -> None:
        """Reports the tokens of `output` that API servers do not know, at the time of the last one."""
        if (more := output - seq.reported_tokens) > 0:
            seq.reported_tokens = output
            self.add_tokens(seq, more, seq.times_of_stage()[-1])

    def stop_views(self) -> None:
        """Stops reports of views: the policy was given up."""
        self._has_views = False
        self._new.clear()

    def add_view(self, view: View, held: Collection[str]) -> None:
        """Adds the expected TTFT of requests that are new in this view; once in VIEW_S seconds also all sequences of
        the view, and the tokens that each got since.

        Args:
            held: ids of requests of tenants over their share.
        """
        if self._new:
            expected = prefill_seconds(view, 0)
            for seq in self._new:
                if not seq.ended and seq.id not in held:
                    self.add(
                        seq, Placed(view.now, seq.id, REPLICA_NAME, ttft=view.now - seq.request.arrival + expected)
                    )
            self._new = [seq for seq in self._new if seq.id in held]
        if view.now < self._view_sent_at + VIEW_S:
            return
        self._view_sent_at = view.now
        queues = (("waiting", view.waiting), ("running", view.running), ("moving", view.moving))
        for _, seqs in queues:
            for seq in cast("Sequence[VllmSeq]", seqs):
                self._tell_tokens(seq, seq._output)
        self._view_fields = {
            "at": view.now,
            "kv_total": view.kv_total,
            "held": list(held),
            "sequences": [
                (seq.id, name, at, seq.pending, seq.blocks, seq.best_effort, seq.due if seq.due < inf else None)
                for name, seqs in queues
                for at, seq in enumerate(seqs)
            ],
        }

    def send(self, now: float, state: Callable[[], dict[str, Any]], open: Iterable[str], *, idle: bool) -> None:
        """Sends events at once, steps and views at intervals. Messages that cannot be sent are dropped.

        Args:
            now: when (s).
            state: makes the engine's counters.
            open: ids of all requests that have not ended.
            idle: nothing runs.
        """
        by_client, tickets = self._events, self._tickets
        self._events, self._tickets = {}, {}
        for client, events in by_client.items():
            if client in self._link.clients:
                rows, number = [full_row(event) for event in events], self._number(client)
                self._link.tell_client(client, RequestEvents(self._engine, number, rows, tickets.get(client, {})))
        if now < self._steps_sent_at + REPORT_S and (
            self._was_idle or not idle
        ):  # an engine with nothing to run may spin
            return
        self._steps_sent_at, self._was_idle = now, idle
        view_fields = {**self._view_fields, "at": now, "held": [], "sequences": []} if idle else self._view_fields
        if view_fields:
            view_fields = {**view_fields, "open": list(open)}
        steps = {"planned": self.planned, "batches": self.batches}
        self.planned, self.batches, self._view_fields = [], [], {}
        if self._link.clients:
            self._link.tell_clients(EngineState(self._engine, self._number(None), {**state(), **steps, **view_fields}))

    def _number(self, client: int | None) -> int:
        self._message_counts[client] += 1
        return self._message_counts[client]
