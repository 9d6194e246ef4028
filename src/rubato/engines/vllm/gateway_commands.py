"""Carries out what gateways ask of an engine core that belongs to a fleet."""

from __future__ import annotations

from rubato.core.clock import WallClock
from rubato.core.events import Demoted
from rubato.core.plan import ANY
from rubato.core.request import HandoffReason
from rubato.engines.vllm.guards import Guard
from rubato.engines.vllm.open_requests import OpenRequests, is_movable
from rubato.engines.vllm.reporting import Reporting
from rubato.engines.vllm.slack import SlackCheck
from rubato.wire.messages import Assign, Command, Demote, Expect, Recall, decode_command

NO_IDS: frozenset[str] = frozenset()


class GatewayCommands:
    """Carries out commands. `role` is as a gateway assigned it; `hidden_ids` has requests here that the next view does
    not show, `unplanned_ids` those of them that vLLM schedules outside the plan."""

    def __init__(
        self, requests: OpenRequests, reporting: Reporting, clock: WallClock, guard: Guard, slack: SlackCheck
    ) -> None:
        self.role = ANY
        self.hidden_ids = self.unplanned_ids = NO_IDS
        self._requests, self._reporting, self._clock = requests, reporting, clock
        self._guard, self._slack = guard, slack

    def apply(self) -> list[tuple[str, HandoffReason]]:
        """Carries out gateways' commands. Returns requests to hand off, and why."""
        if self._reporting.gateways is None:
            return []
        leaving: list[tuple[str, HandoffReason]] = []
        for gateway, raw in self._reporting.gateways.link.commands():
            try:
                self._apply(gateway, decode_command(raw), leaving)
            except Exception:  # another version's, or no gateway of ours: no fault of the policy, which goes on
                self._guard.record_harmless_fault("command", "what a gateway asks for cannot be done")
        return leaving

    def _apply(self, gateway: str, command: Command, leaving: list[tuple[str, HandoffReason]]) -> None:
        gateways, seqs = self._reporting.gateways, self._requests.seqs.values()
        assert gateways is not None
        match command:
            case Expect(answer, contract):
                gateways.expect(gateway, answer, contract)
                self._requests.attach_gateway_requests()
            case Assign():
                self.role = command.role
                self._slack.invalidate()
            case Recall(kind):
                for seq in seqs:
                    own = seq.gateway_request
                    if own is None or own.gateway != gateway or not own.is_movable or seq.arriving:
                        continue
                    is_unstarted = seq.waiting and not seq.vllm_request.num_computed_tokens
                    if seq.best_effort if kind == "best_effort" else is_unstarted:
                        leaving.append((seq.id, "recalled"))
            case Demote(answer):
                gateways.demote(answer)
                for seq in seqs:
                    own = seq.gateway_request
                    if own is not None and own.contract.ids == gateways.ids(answer) and not seq.best_effort:
                        seq.demoted = True
                        self._requests.record(seq, Demoted(self._clock.now(), seq.id))

    def hide_untracked(self, most: int) -> None:
        """Hides untracked requests from the next view if prefill and decode are disaggregated: no gateway can hand them
        to the other part. vLLM schedules them by its own rule, up to `most` at a time."""
        if not self._requests.untracked or self.role.phase == "both":
            self.hidden_ids = self.unplanned_ids = NO_IDS
            return
        ids = [id for id, seq in self._requests.seqs.items() if not is_movable(seq)]
        self.hidden_ids, self.unplanned_ids = frozenset(ids), frozenset(ids[:most])
