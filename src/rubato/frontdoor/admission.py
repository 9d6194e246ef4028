"""Admission, the same at each door: identifies the tenant, grants the SLO, charges limits, and settles at the end.

Our own server, the gateway, the middleware in vLLM's API server and the endpoint picker transport bytes in their own
ways; this module alone decides whether an API request may pass, and with which SLO.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol
from uuid import uuid4

from pydantic import ValidationError
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest
from starlette.types import Message, Scope, Send

from rubato.core.clock import Clock
from rubato.core.events import Finished
from rubato.core.request import SATURATED, Request, Sampling
from rubato.core.server_url import PROBE
from rubato.engines.vllm.sequence import KEYS, PREFIX, TIER
from rubato.frontdoor import headers as header_fields
from rubato.frontdoor.body_fields import BodyFields
from rubato.frontdoor.choices import prompt_tokens, spread_choices
from rubato.frontdoor.errors import ApiError, from_finished, invalid
from rubato.frontdoor.paths import GENERATE, RESPONSES, TEXT, is_shared
from rubato.frontdoor.prompt_length import PromptLengths, prefix_keys
from rubato.frontdoor.rate_limits import RATE_LIMITED, TenantUsage
from rubato.frontdoor.slo_body import Body, SLOBody, bad_request
from rubato.frontdoor.slo_fields import GrantedSLO, check_names, grant, unknown_name
from rubato.frontdoor.tenants import Tenant, Tenants

SLO_FIELDS = ("slo", "service_tier")  # of a body, which no server gets
KV_FIELDS = ("kv_transfer_params", "ec_transfer_params")  # these make a server connect to another
KV_FIELD_REFUSAL = "leave it out: where KV is, the fleet says, and no client."
PROBE_HEADER = PROBE.encode()
SMALL_FIELDS = ("stream", "ignore_eos", "background", "cache_salt")
DEFAULT_MAX_TOKENS = {TEXT: 16}  # of a choice; on other paths it may fill the model's context
MIN_ITEMS = 65_536  # always allowed in the lists of a body, however small the model's context

Headers = list[tuple[bytes, bytes]]


class Refuser(Protocol):
    """Counts requests as offered and refused: a `Cluster`, or the reader of an engine's reports."""

    def refuse(self, request: Request, reason: str) -> Finished: ...


@dataclass(frozen=True, slots=True)
class ApiRequest:
    """Describes one API request at a door.

    Args:
        path: canonical (`paths.canonical_path`).
        headers: by lower-case name.
        body: its fields.
        arrival: seconds of the door's clock.
        prompt_tokens: of each prompt, where the door has the model's tokenizer; None: estimated.
        has_stages: whether a request may have several stages here.
    """

    path: str
    headers: Mapping[str, str]
    body: BodyFields
    arrival: float
    prompt_tokens: Sequence[int] | None = None
    has_stages: bool = False


@dataclass(slots=True)
class AdmittedRequest:
    """Describes an API request that may pass, and its share of the tenant's limits.

    Args:
        n: choices of each prompt.
        prompt_tokens: of all prompts, maybe estimated.
        prompt_bytes: of the text by which they were estimated; 0 if they were not.
        max_tokens: output tokens that one choice may have.
    """

    path: str
    tenant: Tenant
    granted: GrantedSLO
    prompts: int
    n: int
    prompt_tokens: int
    prompt_bytes: int
    max_tokens: int
    session: str
    open_choices: int = field(init=False)  # not settled yet
    reserved_tokens: int = field(init=False)  # charged beforehand for these

    def __post_init__(self) -> None:
        self.open_choices = self.choices
        self.reserved_tokens = self.prompt_tokens + self.choices * self.max_tokens

    @property
    def choices(self) -> int:
        return self.prompts * self.n

    def requests(self, id: str, arrival: float, body: BodyFields) -> tuple[Request, ...]:
        """Makes a request for each choice of a body that goes to one server whole.

        Args:
            id: of the API request.
            arrival: seconds of the cluster's clock.
        """
        request = Request(
            id,
            self.granted.stages_of_length(max(1, self.prompt_tokens // self.prompts)),
            arrival,
            tier=self.granted.tier,
            tenant=self.tenant.name,
            sampling=Sampling(max_tokens=self.max_tokens, ignore_eos=body.flag("ignore_eos")),
            on_decline=self.granted.on_decline,
            session=self.session,
            prefix=prefix_keys(body),
        )
        return spread_choices([request], self.choices)


@dataclass(slots=True)
class FrontDoor:
    """Admits the API requests of one door, and settles them at their end.

    Args:
        refuser: counts requests refused here.
        retry_after: seconds until room is expected.
        max_model_len: tokens of prompt and output together, once it is known.
        max_choices: prompts times `n` of one body.
        max_in_flight: choices in flight in all, where nothing behind the door bounds them; None: no bound.
        weights: share of `max_in_flight` of each tenant, relative to others; 1 where it is left out.
        count_client_error: called with the status of each response to a client's mistake.
        in_flight: choices, by tenant.
    """

    tenants: Tenants
    clock: Clock
    refuser: Refuser
    retry_after: Callable[[], float]
    max_model_len: Callable[[], int]
    max_body_bytes: int
    max_choices: int = 16
    max_in_flight: int | None = None
    weights: Mapping[str, float] = field(default_factory=dict)
    count_client_error: Callable[[int], None] = lambda status: None
    lengths: PromptLengths = field(default_factory=PromptLengths)
    in_flight: Counter[str] = field(default_factory=Counter)  # choices, by tenant
    _usage: dict[str, TenantUsage] = field(init=False)

    def __post_init__(self) -> None:
        self._usage = {name: TenantUsage(quota) for name, quota in self.tenants.quotas.items()}

    # ----------------------------------------------------------------- tenants

    def identify(self, headers: Mapping[str, str]) -> Tenant:
        """Returns the tenant of the key, or the tenant that an admin names in a header.

        Raises:
            ApiError: 401 for no key or an unknown one, 400 for a tenant that this key may not name.
        """
        tenant = self.tenants.authenticate(headers)
        named = headers.get(header_fields.TENANT_HEADER)
        if named is None or not self.tenants.configured:
            return tenant
        if not tenant.admin:
            raise invalid(header_fields.TENANT_HEADER, "only an admin's key may name another tenant.")
        return self.tenants.tenant_of_name(named)

    def authorize(self, tenant: Tenant, path: str) -> None:
        """Raises ApiError 403 for a path that only an admin may use, since no tenant's limits apply to it."""
        if not self.tenants.configured or tenant.admin or path in GENERATE or is_shared(path):
            return
        if path.startswith(f"{RESPONSES}/"):
            self._check_response_id(tenant, path.split("/")[3], "id")
        else:
            raise ApiError(403, f"Only an admin's key may use {path[:80]} here.", code="admin_only")

    def enter(self, tenant: Tenant) -> None:
        """Charges one API request before its body is read, which costs time, too. Raises ApiError 429."""
        usage = self._usage.get(tenant.name)
        if usage is not None and (wait := usage.enter(self.clock.now())):
            unstated = grant(self.tenants.tiers(tenant), {}, None, None)  # its body is not read
            raise self._refused(tenant, unstated, 1, RATE_LIMITED, wait)

    async def read_body(self, http: HttpRequest) -> bytes:
        """Reads the whole body.

        Raises:
            ApiError: 413 as soon as the body is longer than this door takes, 400 where the client leaves.
        """
        declared = http.headers.get("content-length", "")
        self.check_size(int(declared) if re.fullmatch("[0-9]{1,18}", declared) else 0)
        parts, size = [], 0
        try:
            async for part in http.stream():
                size += len(part)
                self.check_size(size)
                parts.append(part)
        except ClientDisconnect:
            raise ApiError(400, "The client went away before its body was read.") from None
        return b"".join(parts)

    def check_size(self, size: int) -> None:
        """Raises ApiError 413 for a body of more bytes than this door takes."""
        if size > self.max_body_bytes:
            raise ApiError(413, f"The body is larger than {self.max_body_bytes} bytes.", code="request_too_large")

    def read_fields(self, raw: bytes) -> BodyFields:
        """Parses the fields of a body. Raises ApiError 400 unless it is a JSON object of limited size."""
        return BodyFields.parse(raw, max(MIN_ITEMS, 2 * self.max_model_len()))

    # ----------------------------------------------------------------- admission

    def admit(self, request: ApiRequest, tenant: Tenant) -> AdmittedRequest:
        """Grants the SLO of an API request and charges its choices and tokens.

        Raises:
            ApiError: 400 for an impossible header or field, 429 where a limit of the tenant or of the door is used up.
        """
        body, path = request.body, request.path
        for name in SMALL_FIELDS:  # read again after the charge, when errors come too late
            body.value(name)
        if not isinstance(body.value("stream_options") or {}, dict):
            raise invalid("stream_options", 'give an object, such as {"include_usage": true}.')
        for name in KV_FIELDS:
            if body.json(name) and not (self.tenants.configured and tenant.admin):
                raise invalid(name, KV_FIELD_REFUSAL)
            if name in _xargs(body):  # vLLM's engine would read it there
                raise invalid(f"vllm_xargs.{name}", KV_FIELD_REFUSAL)
        if body.flag("use_beam_search"):
            raise ApiError(400, "use_beam_search: its requests carry no SLO; leave it out.", param="use_beam_search")
        if previous := body.value("previous_response_id"):
            self._check_response_id(tenant, str(previous), "previous_response_id")
        stated = parse_slo_fields(body)
        if stated.slo is not None and stated.slo.stages is not None and not request.has_stages:
            raise ApiError(400, "slo.stages: inside vLLM a request has one stage.", param="slo.stages")
        granted = grant(self.tenants.tiers(tenant), request.headers, stated.service_tier, stated.slo)
        session = header_fields.session_name(request.headers)
        prompts, n = body.prompts, body.n
        usage = self._usage.get(tenant.name)
        self.check_choices(tenant, prompts, n)
        longest = self.max_model_len()
        if request.prompt_tokens is not None:
            tokens, size = sum(request.prompt_tokens), 0
        elif ids := body.prompt_ids:
            tokens, size = ids, 0
        else:
            size = self.lengths.text_bytes(body)
            tokens = min(self.lengths.estimate(tenant.name, path, size), prompts * longest)  # no server accepts more
        room = longest if size else max(1, longest - tokens // prompts)  # an estimate must not cut the output
        max_tokens = min(max(1, body.max_tokens(DEFAULT_MAX_TOKENS.get(path, longest))), room)
        admitted = AdmittedRequest(path, tenant, granted, prompts, n, tokens, size, max_tokens, session)
        self._charge(admitted, usage)
        return admitted

    def admit_other(self, path: str, tenant: Tenant) -> AdmittedRequest:
        """Admits a request that passes unread, as one of the tenant's `max_in_flight`. Raises ApiError 429."""
        unstated = grant(self.tenants.tiers(tenant), {}, None, None)
        admitted = AdmittedRequest(path, tenant, unstated, 1, 1, 0, 0, 0, "")
        self._charge(admitted, self._usage.get(tenant.name))
        return admitted

    def _check_response_id(self, tenant: Tenant, id: str, param: str) -> None:
        """Raises ApiError 404 for a stored response that is not the tenant's."""
        if self.tenants.configured and not tenant.admin and not self.tenants.owns_response(tenant, id):
            raise ApiError(404, f"There is no response {id[:80]!r}.", param=param, code="response_not_found")

    def check_choices(self, tenant: Tenant, prompts: int, n: int) -> None:
        """Raises ApiError 400 for more choices than one body or one tenant may have."""
        max_choices, usage = self.max_choices, self._usage.get(tenant.name)
        if n > max_choices:
            raise invalid("n", f"{n} choices asked for; this server gives at most {max_choices}.")
        if prompts * n > max_choices:
            asked = f"{prompts} prompts with n = {n} ask for {prompts * n} choices"
            raise invalid("prompt", f"{asked}; at most {max_choices} are given.")
        if usage is not None and prompts * n > usage.max_in_flight:
            at_once = f"this key may have at most {usage.max_in_flight} in flight"
            raise invalid("n" if n > 1 else "prompt", f"{prompts * n} choices asked for; {at_once}.")

    def _charge(self, admitted: AdmittedRequest, usage: TenantUsage | None) -> None:
        now, tenant = self.clock.now(), admitted.tenant
        if self.max_in_flight is not None and self.in_flight.total() >= self.max_in_flight:
            # a tenant below its share passes: another tenant's flood must not take all places
            active = {name for name, count in self.in_flight.items() if count} | {tenant.name}
            weights = {name: self.weights.get(name, 1.0) for name in active}
            share = self.max_in_flight * weights[tenant.name] / sum(weights.values())
            if self.in_flight[tenant.name] >= max(1.0, share):
                raise self._refused(tenant, admitted.granted, admitted.choices, SATURATED)
        if usage is not None:
            if refusal := usage.charge(admitted.choices, admitted.reserved_tokens, now):
                raise self._refused(tenant, admitted.granted, admitted.choices, *refusal)
            usage.tokens.take(admitted.reserved_tokens, now)
            usage.in_flight += admitted.choices
        self.in_flight[tenant.name] += admitted.choices

    def _refused(
        self, tenant: Tenant, granted: GrantedSLO, choices: int, reason: str, wait: float = 0.0
    ) -> ApiError:  # fmt: skip
        """Returns the error of a refusal here, and counts one refused request for each choice."""
        stages, id = granted.stages_of_length(1), f"refused-{uuid4().hex}"
        for choice in range(choices):
            request = Request(f"{id}-{choice}", stages, self.clock.now(), tier=granted.tier, tenant=tenant.name)
            end = self.refuser.refuse(request, reason)
        return from_finished(end, wait or self.retry_after())

    # ----------------------------------------------------------------- the end

    def settle(self, admitted: AdmittedRequest, choices: int, prompt_tokens: int, output_tokens: int) -> None:
        """Ends some choices: frees their places, and returns the tokens that they reserved and did not use.

        Args:
            admitted: the API request.
            choices: how many have ended; choices settled before do not count again, tokens do.
            prompt_tokens: used; the first choice of each prompt brings them. A server may claim any number, so no more
                count than fit the model's context.
            output_tokens: used.
        """
        prompt_tokens = min(prompt_tokens, admitted.prompts * self.max_model_len())
        choices = min(choices, admitted.open_choices)
        part = admitted.reserved_tokens * choices // max(1, admitted.open_choices)
        admitted.open_choices -= choices
        admitted.reserved_tokens -= part
        self.in_flight[admitted.tenant.name] -= choices
        if (usage := self._usage.get(admitted.tenant.name)) is not None:
            usage.in_flight -= choices
            usage.tokens.take(prompt_tokens + output_tokens - part, self.clock.now())

    def settle_end(self, admitted: AdmittedRequest, request: Request, end: Finished) -> None:
        """Ends one choice by its last event."""
        self.settle(admitted, 1, 0 if end.outcome == "refused" else prompt_tokens(request, end), end.output)

    def settle_unknown(self, admitted: AdmittedRequest) -> None:
        """Ends one choice whose usage is unknown; all reserved tokens count as used."""
        self.settle(admitted, 1, 0, admitted.reserved_tokens // max(1, admitted.open_choices))

    def learn_length(self, admitted: AdmittedRequest, prompt_tokens: int) -> None:
        """Learns the number of prompt tokens that a server reports; impossible numbers are ignored."""
        if prompt_tokens > admitted.prompts * self.max_model_len():
            return
        self.lengths.learn(admitted.tenant.name, admitted.path, admitted.prompt_bytes, prompt_tokens)

    # ----------------------------------------------------------------- responses

    def response_headers(self, admitted: AdmittedRequest) -> Headers:
        """Returns the response headers about admission: clamped SLOs and rate limits."""
        clamped = admitted.granted.clamped
        headers = [(b"x-rubato-clamped", ", ".join(clamped).encode())] if clamped else []
        return headers + self.limit_headers(admitted.tenant)

    def limit_headers(self, tenant: Tenant | None) -> Headers:
        """Returns the rate-limit headers of a tenant; none where it has no limits."""
        usage = self._usage.get(tenant.name) if tenant is not None else None
        return usage.headers(self.clock.now()) if usage is not None else []

    def count_status(self, status: int) -> None:
        """Counts a response: any 4xx but 429 is the client's mistake, and no missed SLO."""
        if 400 <= status < 500 and status != 429:
            self.count_client_error(status)

    def count_responses(self, scope: Scope, send: Send) -> Send:
        """Returns an ASGI `send` that counts the response, but not to gateways' probes for the link or the models."""
        if scope["method"] == "GET" and any(name.lower() == PROBE_HEADER for name, _ in scope["headers"]):
            return send

        async def send_counted(message: Message) -> None:
            if message["type"] == "http.response.start":
                self.count_status(message["status"])
            await send(message)

        return send_counted

    # ----------------------------------------------------------------- bodies for servers

    def with_salt(self, body: BodyFields, tenant: Tenant) -> BodyFields:
        """Returns a body for vLLM, whose prefix cache keeps tenants apart by `cache_salt`."""
        if not self.tenants.configured:
            return body
        return body.with_fields(cache_salt=self.tenants.salt(tenant, str(body.value("cache_salt") or "")))


class SloFields(Body):
    """The fields of a body that concern the SLO."""

    slo: SLOBody | None = None
    service_tier: str | None = None


def parse_slo_fields(body: BodyFields) -> SloFields:
    """Returns the SLO fields of a body; where they are missing, those in `vllm_xargs`. Raises ApiError 400."""
    check_names(body, SLO_FIELDS)
    xargs = slo_xargs(body)
    for key in xargs:
        if key not in KEYS:
            raise unknown_name(f"vllm_xargs.{key}", key, KEYS)
    stated_slo = body.value("slo")
    slo = {key.removeprefix(PREFIX): _number(value) for key, value in xargs.items() if key != TIER}
    tier = body.value("service_tier")
    try:
        if isinstance(stated_slo, dict):
            stated_slo = {**slo, **stated_slo}
        elif stated_slo is None:
            stated_slo = slo or None
        return SloFields.model_validate({"slo": stated_slo, "service_tier": xargs.get(TIER) if tier is None else tier})
    except ValidationError as error:
        raise bad_request(error, shown=True) from None


def slo_xargs(body: BodyFields) -> dict[str, Any]:
    """Returns the keys of a body's `vllm_xargs` that state an SLO."""
    return {k: v for k, v in _xargs(body).items() if k.startswith(PREFIX)}


def _xargs(body: BodyFields) -> dict[str, Any]:
    """Returns a body's `vllm_xargs`; empty where they are no object."""
    return body.value("vllm_xargs") if body.json("vllm_xargs").startswith(b"{") else {}


def _number(value: Any) -> Any:
    """Returns a value of `vllm_xargs`, where numbers may be written as text."""
    try:
        return float(value) if isinstance(value, str) else value
    except ValueError:
        return value


def without_slo_fields(body: BodyFields) -> BodyFields:
    """Returns the body for a server without SLO fields: the server would refuse a tier that it does not know."""
    xargs = slo_xargs(body)
    fields: dict[str, Any] = dict.fromkeys(name for name in SLO_FIELDS if name in body)
    if xargs:
        fields["vllm_xargs"] = {k: v for k, v in body.value("vllm_xargs").items() if k not in xargs} or None
    return body.with_fields(**fields) if fields else body
