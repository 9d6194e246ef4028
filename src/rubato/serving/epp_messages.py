"""Reads and makes the messages of Envoy's external processing, as the endpoint picker protocol uses them.

Source: kubernetes-sigs/gateway-api-inference-extension, docs/proposals/004-endpoint-picker-protocol, v1.0.0, and
envoyproxy/data-plane-api, envoy/service/ext_proc/v3.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from envoy_data_plane.envoy.config.core.v3 import HeaderValue, HeaderValueOption, HeaderValueOptionHeaderAppendAction
from envoy_data_plane.envoy.extensions.filters.http.ext_proc.v3 import ProcessingModeBodySendMode
from envoy_data_plane.envoy.service.ext_proc.v3 import (
    BodyMutation,
    BodyResponse,
    CommonResponse,
    HeaderMutation,
    HeadersResponse,
    HttpHeaders,
    ImmediateResponse,
    ProcessingRequest,
    ProcessingResponse,
    StreamedBodyResponse,
)
from envoy_data_plane.envoy.type.v3 import HttpStatus, StatusCode
from envoy_data_plane.google.protobuf import Struct

from rubato.frontdoor.errors import ApiError

SERVICE = "envoy.service.ext_proc.v3.ExternalProcessor"
DESTINATION = "x-gateway-destination-endpoint"  # a header, and a key in the metadata
SERVED_ENDPOINT = "x-gateway-destination-endpoint-served"
SUBSET = "x-gateway-destination-endpoint-subset"
LB_NAMESPACE, SUBSET_NAMESPACE = "envoy.lb", "envoy.lb.subset_hint"  # namespaces of metadata
MAX_CHUNK_BYTES = 62_000  # of a body in one message: envoy.proto recommends at most 64 KiB
OVERWRITE = HeaderValueOptionHeaderAppendAction.OVERWRITE_IF_EXISTS_OR_ADD
FULL_DUPLEX = ProcessingModeBodySendMode.FULL_DUPLEX_STREAMED


@dataclass(slots=True)
class RequestChanges:
    """Changes a request's headers on the way to its server."""

    set: dict[str, str] = field(default_factory=dict)
    remove: list[str] = field(default_factory=list)


class ProtocolError(Exception):
    """Says which setting of Envoy's breaks the protocol, and what to set."""


# --------------------------------------------------------------------------- messages from Envoy


def headers_of(head: HttpHeaders) -> dict[str, str]:
    """Returns the headers by lower-case name, with `:path`, `:method` and `:status`; of equal names the first."""
    headers: dict[str, str] = {}
    for header in head.headers.headers if head.headers is not None else ():
        value = header.raw_value.decode("utf-8", "replace") if header.raw_value else header.value
        headers.setdefault(header.key.lower(), value)
    return headers


def check_modes(message: ProcessingRequest) -> None:
    """Raises ProtocolError where Envoy reports that a body is not streamed in full duplex."""
    if (modes := message.protocol_config) is None:
        return
    for name, mode in (("request", modes.request_body_mode), ("response", modes.response_body_mode)):
        if mode != FULL_DUPLEX:
            raise ProtocolError(f"{name}_body_mode is {mode.name}: set the filter's to FULL_DUPLEX_STREAMED")


def subset_of(message: ProcessingRequest) -> frozenset[str] | None:
    """Returns the endpoints that may be picked, each `ip:port` or `ip`; None: all.

    The hint is a list of strings, or one string with commas, as the reference implementation reads it; any other hint
    allows no endpoint.
    """
    hint = _metadata(message, SUBSET_NAMESPACE)
    if SUBSET not in hint:
        return None
    texts = hint[SUBSET] if isinstance(hint[SUBSET], list) else [hint[SUBSET]]
    return frozenset(
        [part.strip() for text in texts if isinstance(text, str) for part in text.split(",") if part.strip()]
    )


def served_of(message: ProcessingRequest) -> str:
    """Returns the endpoint that a response comes from; "" if Envoy does not say."""
    endpoint = _metadata(message, LB_NAMESPACE).get(SERVED_ENDPOINT, "")
    return endpoint if isinstance(endpoint, str) else ""


def _metadata(message: ProcessingRequest, namespace: str) -> dict[str, Any]:
    context = message.metadata_context
    fields = context.filter_metadata.get(namespace) if context is not None else None
    return {} if fields is None else dict(fields.to_dict())


# --------------------------------------------------------------------------- answers to Envoy


def goes_to(endpoint: str, changes: RequestChanges) -> ProcessingResponse:
    """Returns the answer to a request's headers: send it to `endpoint`, in header and metadata, with these changes."""
    options = [
        HeaderValueOption(HeaderValue(key=name, raw_value=value.encode()), append_action=OVERWRITE)
        for name, value in {DESTINATION: endpoint, **changes.set}.items()
    ]
    mutation = HeaderMutation(set_headers=options, remove_headers=[n for n in changes.remove if n not in changes.set])
    common = CommonResponse(header_mutation=mutation, clear_route_cache=True)
    metadata = Struct.from_dict({LB_NAMESPACE: {DESTINATION: endpoint}})
    return ProcessingResponse(request_headers=HeadersResponse(common), dynamic_metadata=metadata)


def refused(error: ApiError) -> ProcessingResponse:
    """Returns the answer that sends an error to the client, and the request to no server."""
    headers = [("content-type", "application/json"), *error.headers]
    options = [
        HeaderValueOption(HeaderValue(key=name, raw_value=value.encode()), append_action=OVERWRITE)
        for name, value in headers
    ]
    return ProcessingResponse(
        immediate_response=ImmediateResponse(
            status=HttpStatus(StatusCode(error.status)),
            headers=HeaderMutation(set_headers=options),
            body=error.body(),
            details=f"rubato {error.code or error.status}".replace(" ", "_"),
        )
    )


def body_pieces(body: bytes, *, last: bool) -> Iterator[BodyResponse]:
    """Splits a part of a body into messages of MAX_CHUNK_BYTES; after the `last` not even trailers follow."""
    for at in range(0, max(1, len(body)), MAX_CHUNK_BYTES):
        piece = StreamedBodyResponse(
            body=body[at : at + MAX_CHUNK_BYTES], end_of_stream=last and at + MAX_CHUNK_BYTES >= len(body)
        )
        yield BodyResponse(CommonResponse(body_mutation=BodyMutation(streamed_response=piece)))
