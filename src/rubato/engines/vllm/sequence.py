"""vLLM's requests as a policy sees them, and the SLOs that clients send with them (`vllm_xargs`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rubato.core.interfaces import LengthPredictor
from rubato.core.request import LEAST_MS, MOST_MS, SLO, OnDecline, Request, Sampling, Stage
from rubato.replica.sequence import Seq

PREFIX = "slo_"
MILLISECONDS = ("slo_ttft_ms", "slo_tpot_ms", "slo_e2e_ms")
TIER, ON_DECLINE = "slo_tier", "slo_on_decline"
KEYS = (*MILLISECONDS, TIER, ON_DECLINE)
MAX_CHARACTERS = 64  # of a tier's name, which policies keep, and of what a refusal shows of a client's text


def request_of(own: Any, arrival: float) -> Request:
    """What a vLLM request asks for, in our terms. arrival: seconds of our clock.

    Raises ValueError, with a sentence for the client, for an invalid SLO.
    """
    params = own.sampling_params
    if params is None:
        raise ValueError("this engine schedules generation only; a pooling request has no tokens to be on time with")
    extra: Mapping[str, Any] = params.extra_args or {}
    for key in extra:
        if key.startswith(PREFIX) and key not in KEYS:
            raise ValueError(f"vllm_xargs: unknown key {_shown(key)}; known are {', '.join(KEYS)}")
    ttft, tpot, e2e = (_seconds(key, extra.get(key)) for key in MILLISECONDS)
    sampling = Sampling(
        max_tokens=own.max_tokens,
        temperature=params.temperature,
        stop=tuple(params.stop or ()),
        ignore_eos=params.ignore_eos,
    )
    return Request(
        own.request_id,
        (Stage(own.num_prompt_tokens, SLO(ttft, tpot, e2e)),),
        arrival,
        tier=_tier(extra.get(TIER, "default")),
        sampling=sampling,
        on_decline=_on_decline(extra.get(ON_DECLINE, "best_effort")),
    )


def _seconds(key: str, value: object) -> float | None:
    if value is None:
        return None
    try:
        milliseconds = float(value) if isinstance(value, int | float | str) else 0.0
    except (ValueError, OverflowError):
        milliseconds = 0.0
    if not LEAST_MS <= milliseconds <= MOST_MS:
        raise ValueError(f"vllm_xargs: {key} is {_shown(value)}: give {LEAST_MS:g} to {MOST_MS:g} milliseconds")
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
    """What vLLM's prefix cache holds of a waiting request: `tokens` tokens in `blocks`. found: vLLM's own answer."""

    tokens: int
    blocks: Sequence[Any]
    found: Any


class VllmSeq(Seq):
    """One vLLM request (a `SeqView` to policies): vLLM keeps tokens and KV, `Seq` what it does not know.

    own: vLLM's Request; manager: its KVCacheManager; order: of arrival here.
    """

    __slots__ = ("hit", "manager", "own", "waiting")

    def __init__(self, request: Request, own: Any, manager: Any, order: int, lengths: LengthPredictor | None) -> None:
        super().__init__(request, order, request.arrival, lengths=lengths)
        self.own = own
        self.manager = manager
        self.waiting = True
        self.hit: Hit | None = None  # looked up once for each view, when it is asked for

    @property
    def output(self) -> int:
        own = self.own
        return int(own.num_output_tokens + own.num_output_placeholders)

    @property
    def length(self) -> int:
        own = self.own
        return int(own.num_tokens + own.num_output_placeholders)

    @property  # type: ignore[misc]  # vLLM sets it
    def cached(self) -> int:
        return self.look_up().tokens if self.waiting else int(self.own.num_computed_tokens)

    @property
    def pending(self) -> int:
        return self.length - self.cached

    @property
    def blocks(self) -> int:
        if self.waiting:  # blocks that no single preemption frees, as `Replica` counts them
            return sum(b.ref_cnt > 1 for b in self.look_up().blocks)
        return len(self._held())

    @property
    def own_blocks(self) -> int:
        return 0 if self.waiting else sum(b.ref_cnt == 1 for b in self._held())

    @property  # type: ignore[misc]  # vLLM sets it
    def in_flight(self) -> int:
        return int(self.own.num_in_flight_tokens)

    def look_up(self) -> Hit:
        """What the prefix cache would save a waiting request, as of this step's view."""
        if self.hit is None:
            found = self.manager.get_computed_blocks(self.own)
            self.hit = Hit(found[1], found[0].blocks[0], found)
        return self.hit

    def _held(self) -> Sequence[Any]:
        # vLLM's own list; its get_blocks() would wrap it thrice, and policies ask some five times a step.
        coordinator = self.manager.coordinator
        held: Sequence[Any] = coordinator.single_type_managers[0].req_to_blocks.get(self.own.request_id, ())
        return held
