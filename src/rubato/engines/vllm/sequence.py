"""vLLM's requests as a policy sees them, and their SLOs (`vllm_xargs`): set by clients, or by Rubato's middleware in
vLLM's API server (`rubato.serving.vllm_middleware`), which seals its fields."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from hmac import compare_digest
from math import inf
from typing import Any, NamedTuple, Protocol

from rubato.core.interfaces import LengthPredictor
from rubato.core.request import MAX_SLO_MS, MIN_SLO_MS, SLO, Cause, OnDecline, Request, Sampling, Stage
from rubato.core.slo import TOLERANCE_S
from rubato.engines.vllm import link
from rubato.replica.sequence import Seq
from rubato.wire.messages import Contract

PREFIX = "slo_"
MILLISECONDS = ("slo_ttft_ms", "slo_tpot_ms", "slo_e2e_ms")
TIER, ON_DECLINE = "slo_tier", "slo_on_decline"
KEYS = (*MILLISECONDS, TIER, ON_DECLINE)
TENANT, ARRIVAL, TICKET, SEAL = "slo_tenant", "slo_arrival", "slo_ticket", "slo_seal"
MAX_PAUSE = "slo_max_pause_ms"
MIDDLEWARE_KEYS = frozenset({TENANT, ARRIVAL, TICKET, MAX_PAUSE})  # which clients may not set
MAX_TEXT_CHARACTERS = 64  # of a tier's name, and of a client's text in an error


def sealed(fields: Mapping[str, str]) -> dict[str, str]:
    """Returns the middleware's fields of a request, as sealed `vllm_xargs`."""
    return {**fields, SEAL: link.seal(fields)}


def request_of_gateway(vllm_request: Any, contract: Contract) -> Request:
    """Returns a vLLM request as announced by the gateway that sent it."""
    request = _request(
        vllm_request, contract.slo, contract.arrival, contract.tier, contract.tenant, contract.on_decline
    )
    progress = contract.progress
    if progress is not None and (received := sum(map(len, progress.times))):
        stage, sampling = request.stages[0], request.sampling
        request = replace(
            request,
            stages=(replace(stage, prompt=max(1, stage.prompt - received)),),
            sampling=replace(sampling, max_tokens=sampling.max_tokens + received),
            progress=progress,
        )
    return replace(request, handoff=contract.handoff)


def request_of(vllm_request: Any, arrival: float, *, trust_client_slos: bool = True) -> tuple[Request, str]:
    """Converts a vLLM request; returns also the middleware's ticket, or an empty string.

    Args:
        vllm_request: vLLM's Request.
        arrival: when it came to vLLM (s, of our clock).
        trust_client_slos: SLOs without a seal of the middleware count.

    Raises:
        ValueError: the SLO is invalid; the message is for the client.
    """
    params = vllm_request.sampling_params
    if params is None:
        raise ValueError("this engine schedules generation only; a pooling request has no tokens to be on time with")
    extra = {key: value for key, value in (params.extra_args or {}).items() if key.startswith(PREFIX)}
    seal = extra.pop(SEAL, "")
    is_sealed = isinstance(seal, str) and seal != "" and _is_ours(seal, extra)
    if not is_sealed:  # from a client, or from an API server on another node, whose key differs
        extra = {k: v for k, v in extra.items() if trust_client_slos and not (seal and k in MIDDLEWARE_KEYS)}
    for key in extra:
        if key not in KEYS and not (is_sealed and key in MIDDLEWARE_KEYS):
            raise ValueError(f"vllm_xargs: unknown key {_value_text(key)}; known are {', '.join(KEYS)}")
    times = (_seconds(key, extra.get(key)) for key in (*MILLISECONDS, MAX_PAUSE))
    # Seconds since it came to the middleware.
    seconds_held = vllm_request.arrival_time - float(extra[ARRIVAL]) if ARRIVAL in extra else 0.0
    request = _request(
        vllm_request,
        SLO(*times),
        arrival - max(0.0, seconds_held),
        _tier(extra.get(TIER, "default")),
        extra.get(TENANT, "default"),
        _on_decline(extra.get(ON_DECLINE, "best_effort")),
    )
    return request, extra.get(TICKET, "")


def _request(vllm_request: Any, slo: SLO, arrival: float, tier: str, tenant: str, on_decline: OnDecline) -> Request:
    params = vllm_request.sampling_params
    sampling = Sampling(
        max_tokens=vllm_request.max_tokens,
        temperature=params.temperature,
        stop=tuple(params.stop or ()),
        ignore_eos=params.ignore_eos,
    )
    stages = (Stage(vllm_request.num_prompt_tokens, slo),)
    return Request(vllm_request.request_id, stages, arrival, tier, tenant, sampling=sampling, on_decline=on_decline)


def _is_ours(seal: str, extra: Mapping[str, Any]) -> bool:
    """Returns whether an API server of this vLLM sealed the fields. A client may have sent any values."""
    if not all(isinstance(value, str) for value in extra.values()):
        return False
    return compare_digest(seal.encode("utf-8", "replace"), link.seal(extra).encode())


def _seconds(key: str, value: object) -> float | None:
    if value is None:
        return None
    try:
        milliseconds = float(value) if isinstance(value, int | float | str) else 0.0
    except (ValueError, OverflowError):
        milliseconds = 0.0
    if not MIN_SLO_MS <= milliseconds <= MAX_SLO_MS:
        raise ValueError(
            f"vllm_xargs: {key} is {_value_text(value)}: give {MIN_SLO_MS:g} to {MAX_SLO_MS:g} milliseconds"
        )
    return milliseconds / 1e3


def _tier(value: object) -> str:
    if isinstance(value, str) and 1 <= len(value) <= MAX_TEXT_CHARACTERS:
        return value
    raise ValueError(
        f"vllm_xargs: {TIER} is {_value_text(value)}: give a name of 1 to {MAX_TEXT_CHARACTERS} characters"
    )


def _on_decline(value: object) -> OnDecline:
    if value == "best_effort" or value == "refuse":
        return value
    raise ValueError(f"vllm_xargs: {ON_DECLINE} is {_value_text(value)}: give best_effort or refuse")


def _value_text(value: object) -> str:
    """Returns a client's value as an error names it; it may be of any kind and length."""
    if isinstance(value, str):
        return repr(value[:MAX_TEXT_CHARACTERS]) + (
            f"... ({len(value)} characters)" if len(value) > MAX_TEXT_CHARACTERS else ""
        )
    if isinstance(value, int | float):
        return repr(value)  # vLLM lets no integer beyond 64 bits through
    return f"of type {type(value).__name__}"


@dataclass(frozen=True, slots=True)
class Hit:
    """Holds the cached prefix of a waiting request.

    Args:
        tokens: in KV.
        blocks: that hold them.
        computed: vLLM's own result; None: the KV came from another engine.
        keys: hashes of the blocks.
        longer: hash of the next block, with which the hit would be longer; None: unknown.
    """

    tokens: int
    blocks: Sequence[Any]
    computed: Any
    keys: Sequence[Any] = ()
    longer: Any = None


class GatewayRequest(NamedTuple):
    """Holds one request as announced by a gateway (`wire.messages`).

    Args:
        gateway: its name.
        id: the gateway's own.
    """

    gateway: str
    id: str
    contract: Contract

    @property
    def is_movable(self) -> bool:
        """Whether the request can move: the choices of one answer stay together."""
        return len(self.contract.ids) == 1


class KVMemory(Protocol):
    """vLLM's KV memory (`kv_view.KVView`)."""

    def blocks_of(self, seq: VllmSeq) -> int: ...
    def own_blocks_of(self, seq: VllmSeq) -> int: ...
    def look_up(self, seq: VllmSeq) -> Hit: ...


class VllmSeq(Seq):
    """Shows one vLLM request to policies (a `SeqView`): vLLM keeps its tokens and KV, `Seq` the rest.

    `expected_tokens` counts output tokens that the batches in flight bring at least, one each; `output` and `due` count
    them, since the next step's token comes after them. `length`, `cached` and `pending` are read from vLLM's request,
    but for the `hit_tokens` that the prefix cache had of a waiting one at the last view. `wait_spans` has begin, end
    and cause of each wait. `reported_tokens` counts output tokens that API servers know. `gateway_request` is None if
    no gateway sent the request. While `arriving`, its KV is at another engine, or being transferred. With
    `prefill_only` it ends here after its prefill, and decodes elsewhere.

    Args:
        vllm_request: vLLM's Request.
        kv: vLLM's KV memory.
        order: of arrival here.
        ticket: the middleware's name for the request.
    """

    __slots__ = (
        "arriving", "expected_tokens", "gateway_request", "hit", "hit_tokens", "prefill_only", "reported_tokens",
        "ticket", "vllm_request", "wait_spans", "waiting",
    )  # fmt: skip
    kv: KVMemory  # type: ignore[assignment]  # which asks for vLLM's own of it

    def __init__(
        self,
        request: Request,
        vllm_request: Any,
        kv: KVMemory,
        order: int,
        lengths: LengthPredictor | None,
        ticket: str = "",
    ) -> None:
        self.expected_tokens = 0
        super().__init__(request, order, request.arrival, lengths=lengths, kv=kv)  # type: ignore[arg-type]
        self.vllm_request = vllm_request
        self.waiting = True
        self.hit: Hit | None = None
        self.hit_tokens = 0
        self.reported_tokens = self._output  # its output before a move was reported there
        self.ticket = ticket
        self.gateway_request: GatewayRequest | None = None
        self.arriving = self.prefill_only = False
        self.wait_spans: list[tuple[float, float, Cause]] = []

    def mark_started(self, now: float, cached: int) -> None:
        """Marks the request as started: it is in its first batch since it came or was preempted."""
        self.wait_spans.append((self.waiting_since, now, "preemption" if self.started else "queue"))
        self.waiting, self.started, self.cached_at_start = False, True, cached

    def mark_kv_arrived(self, now: float, cached: int) -> None:
        """Marks that its KV has come."""
        self.wait_spans.append((self.waiting_since, now, "transfer"))
        self.arriving = self.waiting = False
        self.started, self.cached_at_start = True, cached

    @property
    def output(self) -> int:
        return self._output + self.expected_tokens

    @property  # type: ignore[misc]  # vLLM sets it
    def in_flight(self) -> int:
        return int(self.vllm_request.num_in_flight_tokens)

    @property  # type: ignore[misc]  # vLLM counts it
    def cached(self) -> int:
        tokens: int = self.hit_tokens if self.waiting and not self.arriving else self.vllm_request.num_computed_tokens
        return tokens

    @property
    def length(self) -> int:
        vllm_request = self.vllm_request
        return int(vllm_request.num_tokens + vllm_request.num_output_placeholders)

    @property
    def pending(self) -> int:
        return self.length - self.cached

    @property
    def due(self) -> float:
        first, tpot, end, max_pause = self._deadlines or self._compute_deadlines()
        i = self._output + self.expected_tokens
        at = first + i * tpot if i else first
        if max_pause < inf and i:  # from the last that is out, since when those in flight come is not known
            at = min(at, self.last_token_at + max_pause)
        return at if at < end else end

    def show_waiting(self, hit_tokens: int) -> None:
        """Shows the request as waiting, with so many tokens of it in the prefix cache."""
        self.draft, self.waiting, self.hit_tokens = None, True, hit_tokens

    def show_moving(self) -> None:
        """Shows the request as not schedulable: its batch runs, or its KV has not come."""
        self.waiting = self.waiting and self.arriving  # as it was until its KV has come

    def add_decoded(self, now: float) -> None:
        """Adds one token of a request that decodes, and checks whether it was late."""
        times, place = self.times[-1], self._output
        if self._checked == place and not self._missed:
            first, tpot, end, max_pause = self._deadlines or self._compute_deadlines()
            at = first + place * tpot if place else first  # (`Deadlines.token`, without a call)
            if max_pause < inf and place:
                at = min(at, times[-1] + max_pause)
            self._missed = now > (at if at < end else end) + TOLERANCE_S
            self._checked = place + 1
        times.append(now)
        self._output = place + 1

    @property
    def missed(self) -> bool:
        return self._missed if self._missed or self._checked == self._output else super().missed
