"""The requests of one vLLM engine core, from their offer to their end, and the KV that comes and goes with them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from rubato.core.clock import WallClock, unix_time
from rubato.core.events import Event, Finished, HandedOff, Offered, Preempted, Started, Transferred
from rubato.core.interfaces import LatencyModel, LengthPredictor, View
from rubato.core.plan import Limits
from rubato.core.request import Handoff, HandoffReason, Outcome
from rubato.core.slo import StageTimes, judge
from rubato.engines.vllm.guards import Guard, guarded
from rubato.engines.vllm.kv_transfer import comes_with_kv, is_prefill_only
from rubato.engines.vllm.miss_causes import VllmMissCauses
from rubato.engines.vllm.reporting import Reporting
from rubato.engines.vllm.reports import REPLICA_NAME
from rubato.engines.vllm.sequence import GatewayRequest, VllmSeq, request_of, request_of_gateway
from rubato.engines.vllm.slack import SlackCheck
from rubato.policy_kit.fair_share import FairShare
from rubato.replica.miss_cause import is_infeasible

if TYPE_CHECKING:
    from rubato.engines.vllm.kv_view import KVView

OUTCOMES: Mapping[str, tuple[Outcome, str]] = {  # of vLLM's finish reasons; "stop" also of what else ends a text
    "length": ("completed", "length"),
    "abort": ("cancelled", "aborted"),
    "error": ("failed", "error"),
}


class OpenRequests:
    """Keeps the requests that have not ended.

    `arriving` has ids of requests whose KV is at another engine, or being transferred; `kv_arrived` ids of requests
    whose KV has come, and that have run in no batch since; `leaving` requests that have left, and whose KV is still
    here. `untracked` counts requests here that no gateway can place elsewhere; `over_share` has requests held back, of
    tenants over their share; `changes` counts events of requests so far, tokens left out.

    Args:
        limits: of the engine.
        latency: predicts the time of steps.
        lengths: what a policy may know of output lengths.
        slo_rule: judges requests that end.
        fair: holds requests of tenants over their share back from the policy.
        trust_client_slos: clients may set SLOs themselves.
        kv_lease: seconds that KV stays here for another engine (`kv_transfer`); None: no KV leaves.
    """

    def __init__(
        self, limits: Limits, kv: KVView, latency: LatencyModel, clock: WallClock, guard: Guard, reporting: Reporting,
        slack: SlackCheck, *, lengths: LengthPredictor | None, slo_rule: str, fair: FairShare | None,
        trust_client_slos: bool, kv_lease: float | None,
    ) -> None:  # fmt: skip
        self.seqs: dict[str, VllmSeq] = {}
        self.arriving: set[str] = set()
        self.kv_arrived: set[str] = set()
        self.leaving: dict[str, VllmSeq] = {}
        self.untracked = self.changes = 0
        self.over_share: dict[str, VllmSeq] = {}
        self.guard, self.kv_lease, self.lengths, self.fair = guard, kv_lease, lengths, fair
        self.unix: Callable[[], float] = unix_time
        self.miss_causes = VllmMissCauses(latency)
        self._limits, self._kv, self._latency, self._clock = limits, kv, latency, clock
        self._reporting, self._slack, self._slo_rule = reporting, slack, slo_rule
        self._trust_client_slos = trust_client_slos
        self._order = 0

    # ----------------------------------------------------------------- offered

    @guarded
    def offer(self, vllm_request: Any) -> str:
        """Takes a new request. Returns why it can never be served, or an empty text; a refused request is not kept."""
        now = self._clock.now()
        gateways, gateway_request = self._reporting.gateways, None
        if gateways is not None:
            gateway_request = gateways.gateway_request_of(vllm_request.request_id)
        try:
            if gateway_request is None:
                arrival = now - max(0.0, self.unix() - vllm_request.arrival_time)
                request, ticket = request_of(vllm_request, arrival, trust_client_slos=self._trust_client_slos)
            else:
                request, ticket = request_of_gateway(vllm_request, gateway_request.contract), ""
        except ValueError as error:
            return f"rejected-invalid: {error}"
        self._order += 1
        seq = self.seqs[request.id] = VllmSeq(request, vllm_request, self._kv, self._order, self.lengths, ticket)
        if gateway_request is not None:
            self._attach(seq, gateway_request)
        if self.kv_lease is not None and comes_with_kv(vllm_request):
            seq.arriving = True
            self.arriving.add(request.id)
        self.untracked += not is_movable(seq)
        self.record(seq, Offered(now, request.id, request))
        self._slack.invalidate()
        self._slack.add_request(request)
        if self.fair is not None:
            self.fair.add_request(request, now)
            self.over_share[request.id] = seq
        most = vllm_request.num_prompt_tokens + vllm_request.max_tokens + self._kv.lookahead_tokens
        most = min(most, self._limits.max_model_len)
        if self._kv.is_exact and self._limits.blocks(most) > self._limits.kv_blocks:
            reason = f"rejected-exceeds-kv: {most} tokens, there is memory for {self._limits.kv_blocks} blocks"
            self._end(request.id, "refused", reason)
            return reason
        return ""

    def _attach(self, seq: VllmSeq, gateway_request: GatewayRequest) -> None:
        seq.gateway_request, seq.demoted = gateway_request, gateway_request.contract.demoted
        seq.prefill_only = is_prefill_only(seq.vllm_request)

    def attach_gateway_requests(self) -> None:
        """Attaches contracts to requests that arrived before them, and that counted as untracked until now."""
        gateways = self._reporting.gateways
        assert gateways is not None
        for seq in self.seqs.values() if self.untracked else ():
            if seq.gateway_request is None and (own := gateways.gateway_request_of(seq.id)) is not None:
                seq.request = request_of_gateway(seq.vllm_request, own.contract)
                self._attach(seq, own)
                seq._deadlines = None
                self.untracked -= is_movable(seq)
                self.changes += 1
                self._slack.invalidate()
                gateways.link.request_resync()

    def ids_over_share(self, now: float, latency: LatencyModel) -> Collection[str]:
        """Returns the ids of requests of tenants over their share. All others go on to the policy, for good."""
        if not self.over_share:
            return ()
        assert self.fair is not None
        waiting = [s for s in self.seqs.values() if s.waiting and s.id not in self.over_share]
        running = [s for s in self.seqs.values() if not s.waiting]
        view = View(REPLICA_NAME, now, waiting, running, 0, self._limits.kv_blocks, self._limits, latency)
        for request in self.fair.release([seq.request for seq in self.over_share.values()], [view], now):
            self.fair.record_placement(request.id)
            del self.over_share[request.id]
        return self.over_share.keys()

    # ----------------------------------------------------------------- while they are here

    def record(self, seq: VllmSeq, event: Event) -> None:
        """Records an event of a request."""
        self.changes += 1
        self._reporting.record(seq, event, self.seqs)

    def start(self, seq: VllmSeq, now: float, cached: int) -> None:
        """Marks a request as started.

        Args:
            cached: tokens of it that were in KV.
        """
        self.record(seq, Started(now, seq.id, resumed=seq.started, cached=cached))
        seq.mark_started(now, cached)

    @guarded
    def preempted(self, id: str) -> None:
        """Marks a request as waiting again: vLLM has freed its KV."""
        self._slack.invalidate()
        seq = self.seqs.get(id)
        self.kv_arrived.discard(id)
        if seq is not None:
            seq.waiting, seq.hit = True, None
            seq.waiting_since = self._clock.now()
            self.record(seq, Preempted(seq.waiting_since, id))

    def kv_sent(self, id: str) -> None:
        """Forgets an ended request whose blocks vLLM has freed."""
        if self.leaving.pop(id, None) is not None and self._reporting.gateways is not None:
            self._reporting.gateways.kv_sent(id)

    @guarded
    def kv_missed(self, id: str) -> None:
        """Prefills a request here, because its KV has not come."""
        self.take_kv(self.seqs[id], self._clock.now(), 0)
        self.preempted(id)

    def take_kv(self, seq: VllmSeq, now: float, cached: int) -> None:
        """Marks the KV of `cached` tokens as arrived."""
        self.arriving.discard(seq.id)
        if cached:
            self.kv_arrived.add(seq.id)
        seq.mark_kv_arrived(now, cached)
        handoff = seq.request.handoff
        self.record(seq, Transferred(now, seq.id, REPLICA_NAME, "" if handoff is None else handoff.source, cached, 0))

    # ----------------------------------------------------------------- ended

    @guarded
    def end(self, id: str, outcome: Outcome, reason: str) -> None:
        """Ends a request, whose KV is free. Does nothing for an unknown or ended one."""
        self._end(id, outcome, reason)

    def finish(self, id: str, finish_reason: object) -> None:
        """Ends a request as vLLM says."""
        self._end(id, *OUTCOMES.get(str(finish_reason), ("completed", "stop")))

    def _end(self, id: str, outcome: Outcome, reason: str) -> None:
        seq = self._remove(id)
        if seq is None:
            return
        times = seq.times_of_stage()
        stages = [StageTimes(seq.request.arrival, times)]
        verdict = judge(seq.request, stages, outcome, self._slo_rule, reason=reason)
        if outcome == "completed" and not verdict.met:
            alone = is_infeasible(seq, seq.cached_at_start, self._latency, self._limits, self._slo_rule)
            verdict = replace(verdict, cause="infeasible" if alone else self.miss_causes.cause(seq))
        if outcome == "completed" and self.lengths is not None:
            self.lengths.learn(seq.request, len(times))
        if self.fair is not None:
            self.fair.record_end(id, outcome, len(times), self._clock.now())
        self.record(seq, Finished(self._clock.now(), id, outcome, reason, verdict, len(times), seq.best_effort))

    def _remove(self, id: str) -> VllmSeq | None:
        """Removes a request, and returns it; None if it was not here."""
        seq = self.seqs.pop(id, None)
        if seq is not None:
            self._slack.invalidate()
            self.arriving.discard(id)
            self.kv_arrived.discard(id)
            self.over_share.pop(id, None)
            self.untracked -= not is_movable(seq)
        return seq

    @guarded
    def refuse(self, id: str, reason: str) -> None:
        """Refuses a request for good."""
        self.guard.record_refusal(id, reason)
        self._end(id, "refused", reason)

    @guarded
    def aborted(self, id: str) -> None:
        """Ends a request that vLLM's front end aborted, because the client left or a stop string came. vLLM does not
        say which, so a request with stop strings that has begun counts as completed."""
        seq = self.seqs.get(id)
        if seq is not None and seq.first_token_at is not None and seq.request.sampling.stop:
            self._end(id, "completed", "stop")
        else:
            self._end(id, "cancelled", "aborted")

    @guarded
    def hand_off(self, id: str, reason: HandoffReason, cached: int = 0) -> None:
        """Hands a request off to its gateway; only the KV of `cached` tokens stays here."""
        seq, gateways = self._remove(id), self._reporting.gateways
        if seq is None or gateways is None:
            return
        now = self._clock.now()
        if cached:
            self.leaving[id] = seq
        if self.fair is not None:
            self.fair.record_end(id, "cancelled", len(seq.times_of_stage()), now)
        moved = Handoff.after(seq.request.handoff, REPLICA_NAME, reason, now, cached)
        self._reporting.queue_for_policy(HandedOff(now, id, replace(seq.request, handoff=moved)))
        gateways.hand_off(seq, reason, now, cached)


def is_movable(seq: VllmSeq) -> bool:
    """Returns whether a gateway can place the request elsewhere."""
    return seq.gateway_request is not None and seq.gateway_request.is_movable
