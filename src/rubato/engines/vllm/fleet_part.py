"""The part of an engine core that belongs to a fleet: it carries out gateways' commands and hands requests off."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from rubato.core.events import Demoted, Event, HandedOff, Transferred
from rubato.core.plan import Limits, Role
from rubato.core.request import Handoff, HandoffReason
from rubato.engines.vllm.core_link import CoreLink
from rubato.engines.vllm.gateway_reports import GatewayReports
from rubato.engines.vllm.guards import guarded
from rubato.engines.vllm.kv_transfer import is_prefill_only
from rubato.engines.vllm.reports import REPLICA_NAME
from rubato.engines.vllm.sequence import VllmSeq, request_of_gateway
from rubato.latency import affine
from rubato.policy_kit.fair_share import FairShare
from rubato.wire.messages import Assign, Command, CoreAbout, Demote, Expect, Recall, decode_command

if TYPE_CHECKING:
    from rubato.engines.vllm.kv_view import KVView

NO_IDS: frozenset[str] = frozenset()


class FleetPart:
    """The part of a `PolicyDriver` for gateways. role: as assigned by a gateway."""

    name: str
    supports: frozenset[str]
    limits: Limits
    latency: affine.Model
    clock: Callable[[], float]
    seqs: dict[str, VllmSeq]
    role: Role
    link: CoreLink | None
    _gateways: GatewayReports | None
    _untracked: int  # requests here that no gateway can place elsewhere
    _stable_steps: int
    _fair: FairShare | None
    _over_share: dict[str, VllmSeq]
    kv_lease: float | None
    _kv: KVView
    arriving: set[str]  # ids of requests whose KV is at another engine, or being transferred
    kv_arrived: set[str]  # ids of requests whose KV has come, and that have run in no batch since
    leaving: dict[str, VllmSeq]  # requests that have left, and whose KV is still here
    hidden_ids: frozenset[str]  # requests here that the last view did not show
    unplanned_ids: frozenset[str]  # of these, requests that vLLM schedules outside the plan

    if TYPE_CHECKING:

        def record_bad_command(self) -> None: ...
        def _record(self, seq: VllmSeq, event: Event) -> None: ...
        def _queue_for_policy(self, event: Event) -> None: ...
        def preempted(self, id: str) -> None: ...
        def _remove(self, id: str) -> VllmSeq | None: ...

    def open_link(self, *, model: str, vllm: str, rubato: str) -> None:
        """Starts the link: the engine is ready. vllm, rubato: their versions."""
        if self.link is None:
            return

        def about() -> CoreAbout:
            latency, supports = self.latency.to_dict(), tuple(sorted(self.supports))
            return CoreAbout(self.name, supports, self.limits, latency, self.kv_lease, model, vllm, rubato)

        if self._gateways is not None:
            self._gateways.begin(self.clock(), self._kv.free())
        self.link.start(about, self.clock)

    def apply_gateway_commands(self) -> list[tuple[str, HandoffReason]]:
        """Carries out gateways' commands. Returns requests to hand off, and why."""
        if self._gateways is None:
            return []
        leaving: list[tuple[str, HandoffReason]] = []
        for gateway, raw in self._gateways.link.commands():
            try:
                self._apply_command(gateway, decode_command(raw), leaving)
            except Exception:  # another version's, or no gateway of ours: no fault of the policy, which goes on
                self.record_bad_command()
        return leaving

    def _apply_command(self, gateway: str, command: Command, leaving: list[tuple[str, HandoffReason]]) -> None:
        assert self._gateways is not None
        match command:
            case Expect(answer, contract):
                self._gateways.expect(gateway, answer, contract)
                for seq in self.seqs.values() if self._untracked else ():
                    if seq.gateway_request is None:
                        self._attach_gateway_request(seq)
            case Assign():
                self.role = command.role
                self._stable_steps = 0
            case Recall(kind):
                of_gateway = [
                    s
                    for s in self.seqs.values()
                    if s.gateway_request and s.gateway_request.gateway == gateway and is_movable(s)
                ]
                leaving += [
                    (seq.id, "recalled")
                    for seq in of_gateway
                    if not seq.arriving
                    and (
                        seq.best_effort
                        if kind == "best_effort"
                        else seq.waiting and not seq.vllm_request.num_computed_tokens
                    )
                ]
            case Demote(answer):
                self._gateways.demote(answer)
                for seq in self.seqs.values():
                    if (
                        seq.gateway_request
                        and seq.gateway_request.contract.ids == self._gateways.ids(answer)
                        and not seq.best_effort
                    ):
                        seq.demoted = True
                        self._record(seq, Demoted(self.clock(), seq.id))

    def _attach_gateway_request(self, seq: VllmSeq) -> None:
        """Attaches a contract to a request that arrived before it, and that counted as untracked until now."""
        assert self._gateways is not None
        if (gateway_request := self._gateways.gateway_request_of(seq.id)) is not None:
            seq.request = request_of_gateway(seq.vllm_request, gateway_request.contract)
            seq.gateway_request, seq.demoted = gateway_request, gateway_request.contract.demoted
            seq.prefill_only = is_prefill_only(seq.vllm_request)
            seq._deadlines = None
            self._untracked -= is_movable(seq)
            self._stable_steps = 0
            self._gateways.link.request_resync()

    @guarded
    def hand_off(self, id: str, reason: HandoffReason, cached: int = 0) -> None:
        """Hands a request off to its gateway; only the KV of `cached` tokens stays here."""
        seq = self._remove(id)
        if seq is None or self._gateways is None:
            return
        now = self.clock()
        if cached:
            self.leaving[id] = seq
        if self._fair is not None:
            self._fair.record_end(id, "cancelled", len(seq.times_of_stage()), now)
        moved = Handoff.after(seq.request.handoff, REPLICA_NAME, reason, now, cached)
        self._queue_for_policy(HandedOff(now, id, replace(seq.request, handoff=moved)))
        self._gateways.hand_off(seq, reason, now, cached)

    def hide_untracked(self) -> None:
        """Hides untracked requests from the next view if prefill and decode are disaggregated: no gateway can hand them
        to the other part. vLLM schedules them by its own rule, up to half a batch at a time."""
        if not self._untracked or self.role.phase == "both":
            self.hidden_ids = self.unplanned_ids = NO_IDS
            return
        found = [id for id, seq in self.seqs.items() if not is_movable(seq)]
        self.hidden_ids, self.unplanned_ids = frozenset(found), frozenset(found[: self.limits.max_num_seqs // 2])

    # ----------------------------------------------------------------- KV between engines

    def kv_sent(self, id: str) -> None:
        """Forgets an ended request whose blocks vLLM has freed."""
        if self.leaving.pop(id, None) is not None and self._gateways is not None:
            self._gateways.kv_sent(id)

    def is_kv_arriving(self, id: str) -> bool:
        """Whether a request in view waits for its KV from another engine."""
        return id in self.arriving and id not in self.hidden_ids

    def has_kv_arrived(self, id: str) -> bool:
        """Whether a request's KV has come, and it has run in no batch since."""
        return id in self.kv_arrived

    @guarded
    def kv_missed(self, id: str) -> None:
        """Prefills a request here, because its KV has not come."""
        self._arrive(self.seqs[id], self.clock(), 0)
        self.preempted(id)

    def _arrive(self, seq: VllmSeq, now: float, cached: int) -> None:
        self.arriving.discard(seq.id)
        if cached:
            self.kv_arrived.add(seq.id)
        seq.mark_kv_arrived(now, cached)
        handoff = seq.request.handoff
        self._record(seq, Transferred(now, seq.id, REPLICA_NAME, "" if handoff is None else handoff.source, cached, 0))


def is_movable(seq: VllmSeq) -> bool:
    """Whether a gateway can place the request elsewhere."""
    return seq.gateway_request is not None and seq.gateway_request.is_movable
