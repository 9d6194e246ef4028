"""What an engine core reports to gateways step by step, and whose requests they are (`wire.messages`)."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rubato.core.events import Event, Finished, Offered, Tokens
from rubato.core.plan import Shape
from rubato.core.request import HandoffReason, without_texts
from rubato.engines.vllm.core_link import CoreLink
from rubato.engines.vllm.sequence import GatewayRequest, VllmSeq
from rubato.wire.messages import (
    HEARTBEAT_S,
    Contract,
    HandOffRow,
    PresentRow,
    Report,
    Row,
    SentRow,
    Snapshot,
    State,
    event_row,
    offered_row,
)

MAX_CONTRACTS = 20_000  # of answers whose requests have not arrived


def answer_of(id: str) -> str:
    """Returns the id of the response that a vLLM request belongs to: its id without the numbers of choice and prompt,
    and without vLLM's random suffix."""
    return choice_of(id)[0]


def choice_of(id: str) -> tuple[str, int, int]:
    """Returns the id of the response, the number of the prompt and the number of the choice of a vLLM request."""
    choice, found, rest = id.partition("_")
    at, id = (int(choice), rest) if found and choice.isdecimal() else (0, id)
    id = re.sub(r"-[0-9a-f]{8}$", "", id)
    if (parts := re.fullmatch(r"(cmpl-.+)-(\d+)|(resp_.+)_\d+", id)) is None:
        return id, 0, at
    return (parts[1], int(parts[2]), at) if parts[1] else (parts[3], 0, at)


class GatewayReports:
    """Collects reports for gateways. Without a listening gateway only contracts are kept."""

    def __init__(self, link: CoreLink) -> None:
        self.link = link
        self._number = 0
        self._sent_at = 0.0  # when the last report was sent
        self._rows: list[Row] = []
        self._sent_kv: dict[str, tuple[int, int]] = {}  # tokens and blocks of each request that holds KV, as last sent
        self._hits: dict[str, int] = {}  # cached tokens of each waiting request, as last sent
        self._contracts: dict[str, tuple[str, Contract]] = {}  # gateway and contract by answer

    # ----------------------------------------------------------------- whose requests these are

    def expect(self, gateway: str, answer: str, contract: Contract) -> None:
        self._contracts[answer] = (gateway, contract)
        while len(self._contracts) > MAX_CONTRACTS:
            del self._contracts[next(iter(self._contracts))]

    def demote(self, answer: str) -> None:
        """Makes later requests of this answer best effort."""
        if (found := self._contracts.get(answer)) is not None:
            self._contracts[answer] = (found[0], found[1]._replace(demoted=True))

    def ids(self, answer: str) -> tuple[str, ...]:
        """Returns the gateway's names for the requests of this answer."""
        found = self._contracts.get(answer)
        return () if found is None else found[1].ids

    def gateway_request_of(self, id: str) -> GatewayRequest | None:
        """Returns the gateway's request behind a vLLM request; None if no gateway sent it."""
        answer, prompt, choice = choice_of(id)
        if (found := self._contracts.get(answer)) is None:
            return None
        gateway, contract = found
        place = prompt * contract.n + choice
        if not (choice < contract.n and place < len(contract.ids)):
            return None
        return GatewayRequest(gateway, contract.ids[place], contract)

    def begin(self, now: float, kv_free: int) -> None:
        """Makes the first snapshot: the engine is ready, and has no requests.

        Args:
            now: the time (s).
            kv_free: free KV blocks.
        """
        self._snapshot(now, kv_free, {}, (), idle=True)

    def _forget(self, id: str, open: Iterable[str]) -> None:
        """Forgets an ended vLLM request; the contract goes with the last request of its answer."""
        answer = answer_of(id)
        found = self._contracts.get(answer)
        if found is not None and (
            len(found[1].ids) == 1 or not any(other != id and answer_of(other) == answer for other in open)
        ):
            del self._contracts[answer]

    # ----------------------------------------------------------------- what happened

    def add(self, seq: VllmSeq, event: Event, open: Iterable[str]) -> None:
        """Adds an event of a request.

        Args:
            open: ids of all requests that have not ended.
        """
        if type(event) is Finished:
            self._forget(seq.id, open)
            self._sent_kv.pop(seq.id, None)
            self._hits.pop(seq.id, None)
        if type(event) is Offered:
            self.link.end_idle()  # (it may wait for its KV, and no batch run)
        if not self.link.listeners:
            return
        self._rows.append(offered_row(event, _own(seq)) if type(event) is Offered else event_row(event))

    def hand_off(self, seq: VllmSeq, reason: HandoffReason, at: float, cached: int) -> None:
        """Adds the hand-off of a request.

        Args:
            seq: the request, which its gateway places elsewhere.
            reason: why it is handed off.
            at: when (s).
            cached: tokens whose KV stays here until `kv_sent`.
        """
        self._contracts.pop(answer_of(seq.id), None)
        if not cached:
            self._sent_kv.pop(seq.id, None)
        self._hits.pop(seq.id, None)
        if self.link.listeners:
            self._rows.append(HandOffRow(seq.id, reason, at, cached))

    def kv_sent(self, id: str) -> None:
        """Adds that a request's KV has been read, or that its lease is over."""
        self._sent_kv.pop(id, None)
        if self.link.listeners:
            self._rows.append(SentRow(id))

    def add_tokens(self, event: Tokens) -> None:
        if self.link.listeners:
            self._rows.append(event_row(event))

    def batch(
        self,
        now: float,
        shape: Shape,
        seconds: float,
        tokens: Mapping[str, int],
        kv_free: int,
        seqs: Mapping[str, VllmSeq],
    ) -> None:
        """Reports a batch that begins to run.

        Args:
            now: when (s).
            shape: of the batch.
            seconds: its predicted duration.
            tokens: of each request in it.
            kv_free: free KV blocks.
            seqs: all requests of the engine.
        """
        self.link.end_idle()
        if not self.link.listeners:
            return
        hits = {}
        for seq in seqs.values():
            if seq.waiting and not seq.arriving and self._hits.get(seq.id, 0) != seq.cached:
                hits[seq.id] = self._hits[seq.id] = seq.cached
        held = self._changed(seqs)  # their new blocks
        self._send(now, kv_free, shape=shape, busy=now + seconds, tokens=tokens, held=held, hits=hits)

    def step(
        self,
        now: float,
        done: tuple[Shape, float] | None,
        kv_free: int,
        seqs: Mapping[str, VllmSeq],
        leaving: Mapping[str, VllmSeq],
        batches: Sequence[Mapping[str, int]],
    ) -> None:
        """Reports what has happened.

        Args:
            now: when (s).
            done: a completed batch, and its seconds.
            kv_free: free KV blocks.
            seqs: all requests of the engine.
            leaving: requests that have left only their KV here.
            batches: that run, as tokens of each request.
        """
        if self.link.listeners:
            held = self._changed(seqs)
            silent = seqs and now - self._sent_at >= HEARTBEAT_S
            if done is not None or held or self._rows or silent:
                self._send(now, kv_free, done=done, held=held)
        else:
            self._rows.clear()
            self._sent_kv.clear()
            self._hits.clear()
        idle = not (seqs or leaving or batches)  # nothing will happen before a request comes
        if self.link.wants_snapshot or idle:
            self._snapshot(now, kv_free, {**leaving, **seqs}, batches, idle=idle)

    def _changed(self, seqs: Mapping[str, VllmSeq]) -> dict[str, tuple[int, int]]:
        """Returns the tokens and blocks of requests whose KV changed since the last report."""
        sent_kv, changed = self._sent_kv, {}
        for id, seq in seqs.items():
            vllm_request = seq.vllm_request
            if not seq.waiting or (seq.arriving and vllm_request.num_computed_tokens):
                row = (vllm_request.num_computed_tokens - vllm_request.num_in_flight_tokens, seq.blocks)
                if sent_kv.get(id) != row:
                    sent_kv[id] = changed[id] = row
            elif id in sent_kv:
                del sent_kv[id]
        return changed

    def _send(self, now: float, kv_free: int, **more: Any) -> None:
        self._number += 1
        self._sent_at = now
        rows, self._rows = self._rows, []
        self.link.report(Report(self._number, now, kv_free, rows, **more))

    def _snapshot(
        self, now: float, kv_free: int, seqs: Mapping[str, VllmSeq], batches: Sequence[Mapping[str, int]], *, idle: bool
    ) -> None:
        """Makes a snapshot of all requests in order of arrival."""
        self._changed(seqs)
        rows = []
        for id, seq in seqs.items():
            cached, blocks = self._sent_kv.get(id, (0, 0))
            if seq.waiting:
                cached = self._hits[id] = seq.cached
            state: State = "running"
            if seq.waiting:
                state = "arriving" if seq.arriving else "waiting"
            elif seq.prefill_only and seq.vllm_request.is_finished():
                state = "leaving"
            ids = tuple(seq.vllm_request.output_token_ids)
            times = tuple(seq.times_of_stage())[-len(ids) :] if ids else ()  # not of what came before it moved here
            about = (state, seq.started, seq.demoted, cached, blocks)
            rows.append(PresentRow(without_texts(seq.request), _own(seq), *about, times, ids[: len(times)]))
        self.link.snapshot(Snapshot(self._number, now, kv_free, rows, batches), idle=idle)


def _own(seq: VllmSeq) -> str:
    """Returns the gateway's id of a request; empty if no gateway sent it."""
    return seq.gateway_request.id if seq.gateway_request is not None else ""
