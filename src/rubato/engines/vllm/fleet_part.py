"""What an engine core does as one of a fleet: it takes commands of gateways, and hands requests off."""

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
from rubato.engines.vllm.kv_transfer import hands_over
from rubato.engines.vllm.reports import NAME
from rubato.engines.vllm.sequence import VllmSeq, promised_request
from rubato.latency import affine
from rubato.policy_kit.fair_share import FairShare
from rubato.wire.messages import Assign, Command, CoreAbout, Demote, Expect, Recall, decode_command

if TYPE_CHECKING:
    from rubato.engines.vllm.kv_view import KVView

NONE: frozenset[str] = frozenset()


class FleetPart:
    """Of a `PolicyDriver`. role: as a gateway has assigned it."""

    name: str
    supports: frozenset[str]
    limits: Limits
    latency: affine.Model
    clock: Callable[[], float]
    seqs: dict[str, VllmSeq]
    role: Role
    link: CoreLink | None
    _gateways: GatewayReports | None
    _strange: int  # requests here that no gateway can place elsewhere
    _settled: int
    _fair: FairShare | None
    _held: dict[str, VllmSeq]
    kv_lease: float | None
    _kv: KVView
    arriving: set[str]  # ids of requests whose KV is at another engine, or on its way
    come: set[str]  # of those whose KV has come, and that were in no batch since
    leaving: dict[str, VllmSeq]  # requests that have left, of which KV is still here
    hidden: frozenset[str]  # requests here that the last view did not show
    beside: frozenset[str]  # of these, those that vLLM schedules beside the plan

    if TYPE_CHECKING:

        def odd_command(self) -> None: ...
        def _happened(self, seq: VllmSeq, event: Event) -> None: ...
        def _to_observe(self, event: Event) -> None: ...
        def preempted(self, id: str) -> None: ...
        def _taken_out(self, id: str) -> VllmSeq | None: ...

    def open_link(self, *, model: str, vllm: str, rubato: str) -> None:
        """The engine is ready: who asks on the link is answered from now on. vllm, rubato: their versions."""
        if self.link is None:
            return

        def about() -> CoreAbout:
            latency, supports = self.latency.to_dict(), tuple(sorted(self.supports))
            return CoreAbout(self.name, supports, self.limits, latency, self.kv_lease, model, vllm, rubato)

        if self._gateways is not None:
            self._gateways.begin(self.clock(), self._kv.free())
        self.link.start(about, self.clock)

    def obey(self) -> list[tuple[str, HandoffReason]]:
        """Take in what gateways ask for. Returns requests that are to be handed off, and why."""
        if self._gateways is None:
            return []
        leaving: list[tuple[str, HandoffReason]] = []
        for gateway, raw in self._gateways.link.commands():
            try:
                self._obey(gateway, decode_command(raw), leaving)
            except Exception:  # another version's, or no gateway of ours: no fault of the policy, which goes on
                self.odd_command()
        return leaving

    def _obey(self, gateway: str, command: Command, leaving: list[tuple[str, HandoffReason]]) -> None:
        assert self._gateways is not None
        match command:
            case Expect(answer, contract):
                self._gateways.expect(gateway, answer, contract)
                for seq in self.seqs.values() if self._strange else ():
                    if seq.promised is None:
                        self._promise_late(seq)
            case Assign():
                self.role = command.role
                self._settled = 0
            case Recall(kind):
                own = [s for s in self.seqs.values() if s.promised and s.promised.gateway == gateway and movable(s)]
                leaving += [
                    (seq.id, "recalled")
                    for seq in own
                    if not seq.arriving
                    and (seq.best_effort if kind == "best_effort" else seq.waiting and not seq.own.num_computed_tokens)
                ]
            case Demote(answer):
                self._gateways.demote(answer)
                for seq in self.seqs.values():
                    if seq.promised and seq.promised.contract.ids == self._gateways.ids(answer) and not seq.best_effort:
                        seq.demoted = True
                        self._happened(seq, Demoted(self.clock(), seq.id))

    def _promise_late(self, seq: VllmSeq) -> None:
        """A request may be here before what its gateway says of it: it was taken for one of no gateway."""
        assert self._gateways is not None
        if (promised := self._gateways.promised(seq.id)) is not None:
            seq.request = promised_request(seq.own, promised.contract)
            seq.promised, seq.demoted = promised, promised.contract.demoted
            seq.prefill_only = hands_over(seq.own)
            seq._deadlines = None
            self._strange -= movable(seq)
            self._settled = 0
            self._gateways.link.begin_afresh()

    @guarded
    def hand_off(self, id: str, reason: HandoffReason, cached: int = 0) -> None:
        """Its gateway is to place it on another replica; here it is over, but for the KV of `cached` tokens."""
        seq = self._taken_out(id)
        if seq is None or self._gateways is None:
            return
        now = self.clock()
        if cached:
            self.leaving[id] = seq
        if self._fair is not None:
            self._fair.record_end(id, "cancelled", len(seq.times_of_stage()), now)
        moved = Handoff.after(seq.request.handoff, NAME, reason, now, cached)
        self._to_observe(HandedOff(now, id, replace(seq.request, handoff=moved)))
        self._gateways.hand_off(seq, reason, now, cached)

    def hide(self) -> None:
        """Choose what the next view does not show. Where prompts and decodes run apart, requests that no gateway can
        place at the other part cannot be shown to a policy. vLLM schedules them by its own rule, prompt and decode, as
        many at a time as half a batch has."""
        if not self._strange or self.role.phase == "both":
            self.hidden = self.beside = NONE
            return
        found = [id for id, seq in self.seqs.items() if not movable(seq)]
        self.hidden, self.beside = frozenset(found), frozenset(found[: self.limits.max_num_seqs // 2])

    # ----------------------------------------------------------------- KV between engines

    def sent(self, id: str) -> None:
        """vLLM has freed the blocks of a request that has ended."""
        if self.leaving.pop(id, None) is not None and self._gateways is not None:
            self._gateways.sent(id)

    def arrives(self, id: str) -> bool:
        """Whether its KV is at another engine, or on its way, of one that views show."""
        return id in self.arriving and id not in self.hidden

    def has_come(self, id: str) -> bool:
        """Whether its KV has come, and it was in no batch since."""
        return id in self.come

    @guarded
    def kv_missed(self, id: str) -> None:
        """The KV of a request has not come: it is prefilled here."""
        self._arrive(self.seqs[id], self.clock(), 0)
        self.preempted(id)

    def _arrive(self, seq: VllmSeq, now: float, cached: int) -> None:
        self.arriving.discard(seq.id)
        if cached:
            self.come.add(seq.id)
        seq.arrives_at(now, cached)
        handoff = seq.request.handoff
        self._happened(seq, Transferred(now, seq.id, NAME, "" if handoff is None else handoff.source, cached, 0))


def movable(seq: VllmSeq) -> bool:
    """Whether a gateway can place it elsewhere."""
    return seq.promised is not None and seq.promised.movable
