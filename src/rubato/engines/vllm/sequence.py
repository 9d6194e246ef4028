"""vLLM's requests as a policy sees them, and the SLOs that come with them (`vllm_xargs`): from clients, or from our
middleware in vLLM's API server (`rubato.serving.vllm_middleware`), which seals what it says."""

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
OF_MIDDLEWARE = frozenset({TENANT, ARRIVAL, TICKET, MAX_PAUSE})  # which no client may say
MAX_CHARACTERS = 64  # of a tier's name, which policies keep, and of what a refusal shows of a client's text


def sealed(fields: Mapping[str, str]) -> dict[str, str]:
    """What the middleware says of a request, as `vllm_xargs`."""
    return {**fields, SEAL: link.seal(fields)}


def promised_request(own: Any, contract: Contract) -> Request:
    """What a vLLM request asks for by the word of the gateway that sent it."""
    asked = _request(own, contract.slo, contract.arrival, contract.tier, contract.tenant, contract.on_decline)
    progress = contract.progress
    if progress is not None and (received := sum(map(len, progress.times))):
        stage, sampling = asked.stages[0], asked.sampling
        asked = replace(
            asked,
            stages=(replace(stage, prompt=max(1, stage.prompt - received)),),
            sampling=replace(sampling, max_tokens=sampling.max_tokens + received),
            progress=progress,
        )
    return replace(asked, handoff=contract.handoff)


def request_of(own: Any, arrival: float, *, strangers: bool = True) -> tuple[Request, str]:
    """What a vLLM request asks for, in our terms, and the middleware's ticket for it, if it has one.
    arrival: seconds of our clock, at which it came to vLLM. strangers: keys count that are not sealed.

    Raises ValueError, with a sentence for the client, for an invalid SLO.
    """
    params = own.sampling_params
    if params is None:
        raise ValueError("this engine schedules generation only; a pooling request has no tokens to be on time with")
    extra = {key: value for key, value in (params.extra_args or {}).items() if key.startswith(PREFIX)}
    seal = extra.pop(SEAL, "")
    by_us = isinstance(seal, str) and seal != "" and _is_ours(seal, extra)
    if not by_us:  # nobody's word, or that of an API server whose key this core has not: another node's
        extra = {k: v for k, v in extra.items() if strangers and not (seal and k in OF_MIDDLEWARE)}
    for key in extra:
        if key not in KEYS and not (by_us and key in OF_MIDDLEWARE):
            raise ValueError(f"vllm_xargs: unknown key {_shown(key)}; known are {', '.join(KEYS)}")
    times = (_seconds(key, extra.get(key)) for key in (*MILLISECONDS, MAX_PAUSE))
    held = own.arrival_time - float(extra[ARRIVAL]) if ARRIVAL in extra else 0.0  # since it came to the middleware
    request = _request(
        own,
        SLO(*times),
        arrival - max(0.0, held),
        _tier(extra.get(TIER, "default")),
        extra.get(TENANT, "default"),
        _on_decline(extra.get(ON_DECLINE, "best_effort")),
    )
    return request, extra.get(TICKET, "")


def _request(own: Any, slo: SLO, arrival: float, tier: str, tenant: str, on_decline: OnDecline) -> Request:
    params = own.sampling_params
    sampling = Sampling(
        max_tokens=own.max_tokens,
        temperature=params.temperature,
        stop=tuple(params.stop or ()),
        ignore_eos=params.ignore_eos,
    )
    stages = (Stage(own.num_prompt_tokens, slo),)
    return Request(own.request_id, stages, arrival, tier, tenant, sampling=sampling, on_decline=on_decline)


def _is_ours(seal: str, extra: Mapping[str, Any]) -> bool:
    """Whether an API server of this vLLM wrote this. Both may be a client's, of any kind."""
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
        raise ValueError(f"vllm_xargs: {key} is {_shown(value)}: give {MIN_SLO_MS:g} to {MAX_SLO_MS:g} milliseconds")
    return milliseconds / 1e3


def _tier(value: object) -> str:
    if isinstance(value, str) and 1 <= len(value) <= MAX_CHARACTERS:
        return value
    raise ValueError(f"vllm_xargs: {TIER} is {_shown(value)}: give a name of 1 to {MAX_CHARACTERS} characters")


def _on_decline(value: object) -> OnDecline:
    if value == "best_effort" or value == "refuse":
        return value
    raise ValueError(f"vllm_xargs: {ON_DECLINE} is {_shown(value)}: give best_effort or refuse")


def _shown(value: object) -> str:
    """A client's value as an error names it; it may be of any kind and length."""
    if isinstance(value, str):
        return repr(value[:MAX_CHARACTERS]) + (f"... ({len(value)} characters)" if len(value) > MAX_CHARACTERS else "")
    if isinstance(value, int | float):
        return repr(value)  # vLLM lets no integer beyond 64 bits through
    return f"of type {type(value).__name__}"


@dataclass(frozen=True, slots=True)
class Hit:
    """What of a waiting request is in KV: `tokens` tokens in `blocks`, found by vLLM as `found` (None: they are its
    own, come from another engine). keys: vLLM's names of these blocks; longer: that of the one after them, with which
    the hit would be longer (None: not to be told)."""

    tokens: int
    blocks: Sequence[Any]
    found: Any
    keys: Sequence[Any] = ()
    longer: Any = None


class Promised(NamedTuple):
    """What a gateway has said of one request (`wire.messages`); the gateway's name, and its name for it."""

    gateway: str
    id: str
    contract: Contract

    @property
    def movable(self) -> bool:
        """Whether it can be placed elsewhere: the choices of one answer stay together."""
        return len(self.contract.ids) == 1


class KV(Protocol):
    """vLLM's KV memory (`kv_view.KVView`)."""

    def blocks_of(self, seq: VllmSeq) -> int: ...
    def own_blocks_of(self, seq: VllmSeq) -> int: ...
    def look_up(self, seq: VllmSeq) -> Hit: ...


class VllmSeq(Seq):
    """One vLLM request (a `SeqView` to policies): vLLM keeps tokens and KV, `Seq` what it does not know.

    own: vLLM's Request; kv: vLLM's KV memory; order: of arrival here. coming: output tokens that the batches in flight
    bring at least, one each: `output` and `due` count them as out, since the next step's token comes after them.
    length, cached, pending: as of the last view, which sets them. waited: from when until when, and why. ticket: the
    middleware's name for it. reported: output tokens that API servers know of. promised: what a gateway has said of it;
    None: it came past them all. arriving: its KV is at another engine, or on its way. prefill_only: it ends here with
    its prompt in KV, and goes on elsewhere.
    """

    __slots__ = (
        "arriving", "cached", "coming", "hit", "length", "own", "pending", "prefill_only",
        "promised", "reported", "ticket", "waited", "waiting",
    )  # fmt: skip
    kv: KV  # type: ignore[assignment]  # which asks for vLLM's own of it
    length: int
    cached: int
    pending: int

    def __init__(
        self, request: Request, own: Any, kv: KV, order: int, lengths: LengthPredictor | None, ticket: str = ""
    ) -> None:
        self.coming = 0
        super().__init__(request, order, request.arrival, lengths=lengths, kv=kv)  # type: ignore[arg-type]
        self.own = own
        self.waiting = True
        self.hit: Hit | None = None
        self.length = self.pending = own.num_tokens
        self.cached = 0
        self.reported = self._output  # what it had before it moved here was told there
        self.ticket = ticket
        self.promised: Promised | None = None
        self.arriving = self.prefill_only = False
        self.waited: list[tuple[float, float, Cause]] = []

    def starts_at(self, now: float, cached: int) -> None:
        """It is in a batch, for the first time since it came or was preempted."""
        self.waited.append((self.waiting_since, now, "preemption" if self.started else "queue"))
        self.waiting, self.started, self.cached_at_start = False, True, cached

    def arrives_at(self, now: float, cached: int) -> None:
        """Its KV has come."""
        self.waited.append((self.waiting_since, now, "transfer"))
        self.arriving = self.waiting = False
        self.started, self.cached_at_start = True, cached

    @property
    def output(self) -> int:
        return self._output + self.coming

    @property  # type: ignore[misc]  # vLLM sets it
    def in_flight(self) -> int:
        return int(self.own.num_in_flight_tokens)

    @property
    def due(self) -> float:
        due = self._deadlines or self._compute_deadlines()
        i = self._output + self.coming
        at = due.first + i * due.tpot if i else due.first
        if due.max_pause < inf and i:  # from the last that is out, since when those in flight come is not known
            at = min(at, self.last_token_at + due.max_pause)
        return at if at < due.end else due.end

    def holds_kv(self) -> None:
        """Show it as one that holds KV, with what vLLM has of it now."""
        own = self.own
        self.waiting = False
        self.cached = own.num_computed_tokens
        self.length = own.num_tokens + own.num_output_placeholders
        self.pending = self.length - self.cached

    def show_moving(self) -> None:
        """Show it as one that cannot be scheduled: its batch runs, or its KV is not here yet."""
        waits = self.waiting  # told as it was until its KV has come
        self.holds_kv()
        self.waiting = waits and self.arriving

    @property
    def missed(self) -> bool:
        if self._missed or self._checked == self._output:
            return self._missed
        if self._checked < self._output - 1:
            return super().missed
        place = self._checked  # of one token more, as after most steps
        times = self.times[-1]
        due = self.deadlines.token(place, times[place - 1] if place else inf)
        self._missed = times[place] > due + TOLERANCE_S
        self._checked += 1
        return self._missed
