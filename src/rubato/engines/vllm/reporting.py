"""Passes what happens in an engine core on: to its policy, to vLLM's API servers and to gateways."""

from __future__ import annotations

from collections.abc import Mapping

from rubato.core.events import Event, Tokens
from rubato.engines.vllm.core_link import CoreLink
from rubato.engines.vllm.gateway_reports import GatewayReports
from rubato.engines.vllm.reports import Reports
from rubato.engines.vllm.sequence import VllmSeq


class Reporting:
    """Collects events of requests.

    `policy_events` has those that the policy has not observed. `api_servers` and `gateways` are the reports to them;
    None where the link does not reach them.

    Args:
        link: to vLLM's API servers, and to gateways if the engine is one of a fleet.
        engine: number of the engine in its server.
    """

    def __init__(self, link: CoreLink | None, engine: int) -> None:
        self.link = link
        self.gateways = GatewayReports(link) if link is not None and link.port else None
        self.api_servers = Reports(link, engine) if link is not None and link.endpoint else None
        self.policy_events: list[Event] = []
        self._has_policy = True

    def record(self, seq: VllmSeq, event: Event, open: Mapping[str, VllmSeq]) -> None:
        """Records an event of a request.

        Args:
            open: all requests that have not ended.
        """
        self.queue_for_policy(event)
        if self.api_servers is not None:
            self.api_servers.add(seq, event)
        if self.gateways is not None:
            self.gateways.add(seq, event, open)

    def record_tokens(self, event: Tokens) -> None:
        """Records tokens, of which API servers are told at intervals."""
        self.queue_for_policy(event)
        if self.gateways is not None:
            self.gateways.add_tokens(event)

    def queue_for_policy(self, event: Event) -> None:
        """Queues an event for the policy, unless the policy was given up."""
        if self._has_policy:
            self.policy_events.append(event)

    def take_policy_events(self) -> list[Event]:
        events, self.policy_events = self.policy_events, []
        return events

    def stop_policy(self) -> None:
        """Queues no more events for the policy, and reports no more of its views: it was given up."""
        self._has_policy = False
        self.policy_events.clear()
        if self.api_servers is not None:
            self.api_servers.stop_views()

    def close(self) -> None:
        if self.link is not None:
            self.link.close()
