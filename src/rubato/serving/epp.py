"""An endpoint picker: our routers choose where a data plane such as Envoy sends each request.

It speaks protocol v1.0.0 of the Gateway API Inference Extension (`epp_messages`): a gRPC stream for each HTTP request.
The picker reads headers and body whole, the router places the request, and the picker answers with the endpoint and
passes the body on unchanged. Envoy also shows the response chunk by chunk, by which the cluster counts tokens and
judges requests as behind the gateway.
"""

from __future__ import annotations

import asyncio
import logging
import math
import re
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import Any, cast

import betterproto2
from envoy_data_plane.envoy.service.ext_proc.v3 import (
    CommonResponse,
    HeadersResponse,
    HttpHeaders,
    ProcessingRequest,
    ProcessingResponse,
    TrailersResponse,
)

from rubato.config.build import check_names
from rubato.config.schema import Config, ConfigError
from rubato.core.clock import PLAN, Clock
from rubato.core.interfaces import Router
from rubato.core.request import NO_REPLICA
from rubato.fleet.cluster import Cluster
from rubato.fleet.http_client import HttpServer
from rubato.fleet.picked_trip import PickedTrip, endpoint_of
from rubato.fleet.relay import Ask, Trips
from rubato.fleet.served_models import ServedModels
from rubato.fleet.server_fleet import server_cluster
from rubato.fleet.server_replica import ServerReplica
from rubato.fleet.upstream import Upstream
from rubato.frontdoor.admission import ApiRequest, FrontDoor, without_slo_fields
from rubato.frontdoor.choices import response_id
from rubato.frontdoor.errors import REJECT_REASON, ApiError, from_finished
from rubato.frontdoor.headers import is_ours, new_id
from rubato.frontdoor.offers import Offers
from rubato.frontdoor.paths import GENERATE, canonical_path, is_internal, written_path
from rubato.frontdoor.slo_fields import to_headers
from rubato.frontdoor.tenants import Tenants, tiers_of
from rubato.policy_kit.candidates import Candidates
from rubato.serving import epp_messages
from rubato.serving.epp_messages import ProtocolError, RequestChanges
from rubato.serving.model_list import asked_model
from rubato.serving.server_fleets import fleet_of

MAX_HELD_S = 60.0  # a request waits this long for a place, or its e2e if less
MAX_HELD_BYTES = 256 << 20  # of all bodies not yet forwarded
REQUEST_TIMEOUT_S = 30.0  # for a whole request: Envoy forwards it as its client sends it

Write = Callable[[ProcessingResponse], Awaitable[None]]

log = logging.getLogger(__name__)


@dataclass
class Picker:
    """Picks an endpoint for each HTTP request of the data plane (`process`), and holds what all streams share.

    Args:
        trips: the trip of each request, by id, for the replicas.
        allowed_endpoints: by request id, where not all endpoints are allowed (`policy_kit.candidates`).
        round_robin_count: requests so far that went to the servers in turn.
        held_bytes: of bodies not yet forwarded.
    """

    cluster: Cluster
    trips: Trips
    allowed_endpoints: dict[str, frozenset[str]]
    door: FrontDoor
    models: ServedModels
    is_draining: bool = False
    round_robin_count: int = 0
    held_bytes: int = 0

    @property
    def is_ready(self) -> bool:
        """Returns whether it can place a request."""
        return bool(self.cluster.hosts) and not self.is_draining and not self.cluster.dead.is_set()

    async def process(self, messages: AsyncIterator[ProcessingRequest], write: Write) -> None:
        """Handles one HTTP request, with answers to the data plane through `write`. Raises ProtocolError for messages
        that the protocol does not allow."""
        await _Stream(self, messages, write).run()

    def endpoints(self) -> frozenset[str]:
        """Returns the endpoints of the servers that are not lost."""
        hosts = self.cluster.hosts.values()
        return frozenset([endpoint_of(host.url) for host in hosts if isinstance(host, ServerReplica)])

    def candidates(self, subset: frozenset[str] | None) -> frozenset[str]:
        """Returns the endpoints in the data plane's subset, which may omit ports. Raises ApiError 503 if none is."""
        endpoints = self.endpoints()
        if subset is not None:
            endpoints = frozenset([each for each in endpoints if not subset.isdisjoint((each, _address(each)))])
        if not endpoints:
            which = "is ready" if subset is None else "that may take this request is ready"
            raise ApiError(503, f"No server {which}.", code="no_server", kind="server_error")
        return endpoints


async def picker_of(
    config: Config, clock: Clock, *, transport: Callable[[str], Upstream] = HttpServer
) -> Picker:  # fmt: skip
    """Makes a picker over `servers`; the caller starts and closes its cluster.

    Args:
        transport: makes the connection by which a server is asked about itself.

    Raises:
        ConfigError, PolicyError, ValueError: also for a server given by name, and for one that does not answer.
    """
    check_names(config)
    if config.tenants:
        raise ConfigError("tenants: an endpoint picker does not check keys; leave them out, or use `rubato gateway`")
    if config.otlp_traces_endpoint is not None:
        raise ConfigError("otlp_traces_endpoint: an endpoint picker makes no spans, your proxy does; leave it out")
    endpoints = {server.url: endpoint_of(server.url) for server in config.servers}
    trips: Trips = {}
    allowed_endpoints: dict[str, frozenset[str]] = {}

    def endpoint(replica: str) -> str:
        host = cluster.hosts[replica]
        assert isinstance(host, ServerReplica)
        return endpoints[host.url]

    def max_model_len() -> int:
        assert fleet.homogeneity.first_server is not None, "the cluster has started"
        return fleet.homogeneity.first_server.limits.max_model_len

    # No link: by it an engine could hand off requests, which Envoy would not follow.
    fleet, options, _ = fleet_of(config, clock, trips, transport=transport, link=None)
    cluster = await server_cluster(
        fleet, clock, options,
        wrap_router=lambda router: cast(Router, Candidates(router, allowed_endpoints.get, endpoint)),
    )  # fmt: skip
    door = FrontDoor(
        Tenants((), tiers_of(config)), clock, cluster, cluster.retry_after, max_model_len,
        config.max_body_bytes, config.max_choices,
    )  # fmt: skip
    return Picker(cluster, trips, allowed_endpoints, door, fleet.homogeneity.models)


class _Stream:
    """Handles the gRPC stream of one HTTP request."""

    def __init__(self, picker: Picker, messages: AsyncIterator[ProcessingRequest], write: Write) -> None:
        self._picker = picker
        self._cluster = picker.cluster
        self._messages = aiter(messages)
        self._write = write
        self._next_message: asyncio.Future[ProcessingRequest | None] | None = None  # already being read
        self._arrival = picker.cluster.clock.now()
        self._headers: dict[str, str] = {}
        self._subset: frozenset[str] | None = None
        self._body: list[bytes] = []
        self._raw = b""
        self._size = 0
        self._changes = RequestChanges()
        self._has_body = self._has_trailers = False
        self._trip: PickedTrip | None = None
        self._max_held_s = MAX_HELD_S
        self._has_timed_out = False  # while waiting for a place
        self._is_complete = False  # the response has ended

    async def run(self) -> None:
        try:
            if not await self._read_request():
                return
            endpoint = await self._endpoint()
            if endpoint:
                await self._forward_request(endpoint)
                await self._pass_response()
        except ApiError as error:
            self._picker.door.count_status(error.status)
            await self._write(epp_messages.refused(error))
        finally:
            self._leave()

    # ----------------------------------------------------------------- the request

    async def _next(self) -> ProcessingRequest | None:
        """Returns the next message; None when the stream has ended."""
        ahead, self._next_message = self._next_message, None
        return await (anext(self._messages, None) if ahead is None else ahead)

    async def _read_request(self) -> bool:
        """Reads the request. Returns whether it is complete. Raises ApiError 408 if it is slow, 413 if it is long."""
        try:
            async with asyncio.timeout(REQUEST_TIMEOUT_S):
                return await self._read_parts()
        except TimeoutError:
            message = f"The request did not come whole within {REQUEST_TIMEOUT_S:g} s."
            raise ApiError(408, message, code="request_timeout") from None

    async def _read_parts(self) -> bool:
        while (message := await self._next()) is not None:
            match _part(message):
                case kind, _ if (kind == "request_headers") == bool(self._headers):
                    when = "twice" if self._headers else "before the end of the request, and before request_headers"
                    raise ProtocolError(f"{kind or 'an empty message'} came {when}")
                case "request_headers", head:
                    epp_messages.check_modes(message)
                    self._headers = {":path": "", **epp_messages.headers_of(head)}
                    self._subset = epp_messages.subset_of(message)
                    if head.end_of_stream:
                        return True
                case "request_body", part:
                    self._has_body = True
                    self._body.append(part.body)
                    self._count_body_bytes(len(part.body))
                    if part.end_of_stream:
                        return True
                case "request_trailers", _:
                    self._has_trailers = True
                    return True
                case kind, _:
                    raise ProtocolError(f"{kind or 'an empty message'} came before the end of the request")
        return False

    def _count_body_bytes(self, size: int) -> None:
        """Counts received bytes of the body. Raises ApiError 413 for a long body, 429 where all bodies are too much."""
        self._size += size
        self._picker.held_bytes += size
        self._picker.door.check_size(self._size)
        if self._picker.held_bytes > MAX_HELD_BYTES:
            message = "Too many large bodies are on their way: try again in 1 s."
            retry_header = (("retry-after", "1"),)
            raise ApiError(429, message, code="rejected-saturated", kind="rate_limit_error", headers=retry_header)

    def _release_body(self) -> None:
        self._picker.held_bytes -= self._size
        self._size, self._raw = 0, b""
        self._body.clear()

    async def _endpoint(self) -> str:
        """Chooses the endpoint; "" if the data plane has left meanwhile. Raises ApiError."""
        written, _, query = self._headers.get(":path", "").partition("?")
        path = canonical_path(written)
        if path != written:
            self._changes.set[":path"] = written_path(path, query)
        if is_internal(path):
            raise ApiError(403, f"{path[:80]} is for gateways.", code="admin_only")
        self._changes.remove += [name for name in self._headers if is_ours(name)]
        self._raw = b"".join(self._body)
        self._body.clear()
        endpoints = self._picker.candidates(self._subset)
        if path not in GENERATE or self._headers.get(":method") != "POST":  # other paths go to the servers in turn
            self._picker.round_robin_count += 1
            return sorted(endpoints)[self._picker.round_robin_count % len(endpoints)]
        trip = await self._offer(path, endpoints)
        await self._until_settled(trip)
        return trip.endpoint

    async def _offer(self, path: str, endpoints: frozenset[str]) -> PickedTrip:
        """Admits the request and offers it to the cluster. Raises ApiError 400 and 429."""
        picker, door = self._picker, self._picker.door
        tenant = door.identify({})
        body = door.read_fields(self._raw)
        admitted = door.admit(ApiRequest(path, self._headers, body, self._arrival), tenant)
        model = asked_model(body, picker.models, door, admitted)
        id = new_id(path, self._headers.get("x-request-id", ""), picker.trips)
        offers = Offers(door, self._cluster, admitted, admitted.requests(id, self._arrival, body))
        ids = [request.id for request in offers.requests]
        self._changes.set |= dict(to_headers(admitted.granted))
        if (changed := without_slo_fields(body)) is not body:
            self._raw = changed.to_json()
            self._changes.set["content-length"] = str(len(self._raw))

        def over() -> None:
            for id in ids:
                picker.trips.pop(id, None)
                picker.allowed_endpoints.pop(id, None)

        streams = body.flag("stream")
        answer = response_id(offers.requests)
        ask = Ask(path, path, answer, admitted.n, streams, True, False, (), lambda name, is_counted: b"", model)
        trip = self._trip = PickedTrip(ask, offers.requests, lambda tokens: door.learn_length(admitted, tokens), over)
        for id in ids:
            picker.trips[id] = trip
            if self._subset is not None:
                picker.allowed_endpoints[id] = endpoints
        await offers.offer_all(trip.on_event)
        self._max_held_s = min(MAX_HELD_S, offers.requests[0].stages[0].slo.e2e or math.inf)
        return trip

    async def _until_settled(self, trip: PickedTrip) -> None:
        """Waits until the request is placed or the data plane leaves. Raises ApiError if it cannot be placed."""

        def too_late() -> None:
            self._has_timed_out = True
            self._cancel(f"held for {self._max_held_s:g} s")

        timer = self._cluster.clock.call_at(self._cluster.clock.now() + self._max_held_s, PLAN, too_late)
        self._next_message = asyncio.ensure_future(anext(self._messages, None))
        settled = asyncio.ensure_future(trip.placement_known.wait())
        try:
            await asyncio.wait({self._next_message, settled}, return_when=asyncio.FIRST_COMPLETED)
            if not settled.done() and await self._next_message is None:
                return  # the client has left
            await settled
        finally:
            timer.cancel()
            settled.cancel()
        if trip.failed_end is not None:
            raise self._placement_error(trip)

    def _placement_error(self, trip: PickedTrip) -> ApiError:
        """Returns the error of a request that was not placed."""
        assert trip.failed_end is not None
        seconds = self._cluster.retry_after()
        if self._has_timed_out:
            after = str(max(1, math.ceil(min(seconds, 3600.0))))
            why = f"No server was free for this request within {self._max_held_s:g} s: try again in {after} s."
            more = (("retry-after", after), (REJECT_REASON, "held-too-long"))
            return ApiError(429, why, code="held-too-long", kind="rate_limit_error", headers=more)
        if trip.failed_end.reason == NO_REPLICA or not self._cluster.hosts:
            return ApiError(503, "No server is ready.", code="no_server", kind="server_error")
        return from_finished(trip.failed_end, seconds)

    async def _forward_request(self, endpoint: str) -> None:
        """Sends headers, body and trailers, in the protocol's order."""
        await self._write(epp_messages.goes_to(endpoint, self._changes))
        if self._has_body:
            for piece in epp_messages.body_pieces(self._raw, last=not self._has_trailers):
                await self._write(ProcessingResponse(request_body=piece))
        self._release_body()
        if self._has_trailers:
            await self._write(ProcessingResponse(request_trailers=TrailersResponse()))

    # ----------------------------------------------------------------- the response

    async def _pass_response(self) -> None:
        """Forwards each part of the response, and then counts it."""
        has_begun = False
        while (message := await self._next()) is not None:
            match _part(message):
                case kind, _ if (kind == "response_headers") == has_begun:
                    when = "twice" if has_begun else "after the end of the request, and before response_headers"
                    raise ProtocolError(f"{kind or 'an empty message'} came {when}")
                case "response_headers", head:
                    has_begun = True
                    await self._write(ProcessingResponse(response_headers=HeadersResponse(CommonResponse())))
                    self._begin_response(head, epp_messages.served_of(message))
                    if head.end_of_stream:
                        self._count_response(b"", last=True)
                case "response_body", part:
                    for piece in epp_messages.body_pieces(part.body, last=part.end_of_stream):
                        await self._write(ProcessingResponse(response_body=piece))
                    self._count_response(part.body, last=part.end_of_stream)
                case "response_trailers", _:
                    await self._write(ProcessingResponse(response_trailers=TrailersResponse()))
                    self._count_response(b"", last=True)
                case kind, _:
                    raise ProtocolError(f"{kind or 'an empty message'} came after the end of the request")

    def _begin_response(self, head: HttpHeaders, served: str) -> None:
        headers = epp_messages.headers_of(head)
        status = headers.pop(":status", "")
        if not re.fullmatch("[0-9]{3}", status):
            raise ProtocolError("response_headers without a :status")
        self._picker.door.count_status(int(status))
        if (trip := self._trip) is None:
            return
        if served and served != trip.endpoint:
            if served in self._picker.endpoints():
                self._picker.allowed_endpoints.update(dict.fromkeys(trip.ids, frozenset({served})))
            else:
                log.warning("request %s was served by %s, which is none of the servers", trip.answer, served)
                served = ""
        trip.begin_response(int(status), list(headers.items()), served)

    def _count_response(self, data: bytes, *, last: bool) -> None:
        self._is_complete = self._is_complete or last
        if self._trip is not None:
            self._trip.add_part(data, last=last)

    # ----------------------------------------------------------------- the end

    def _cancel(self, why: str) -> None:
        for id in self._trip.ids if self._trip is not None else ():
            self._cluster.cancel(id, why)

    def _leave(self) -> None:
        """Cleans up at the end of the stream; without the end of a response, cancels the requests."""
        self._release_body()
        if self._next_message is not None:
            self._next_message.cancel()
        if (
            self._trip is not None
            and self._trip.is_open
            and not (self._is_complete and self._trip.response is not None)
        ):
            self._cancel("the client left, or the connection broke")


def _address(endpoint: str) -> str:
    return endpoint.rpartition(":")[0].strip("[]")


def _part(message: ProcessingRequest) -> tuple[str, Any]:
    return betterproto2.which_one_of(message, "request")
