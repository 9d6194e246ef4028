"""Protocols of policies, latency models, engines and hosts, and the views that policies read.

A policy only decides. It reads a `View`, whose sequences are the replica's own behind the read-only `SeqView`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from typing import ClassVar, NamedTuple, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from rubato.core.events import Event
from rubato.core.plan import ANY, KV, NO_BATCH, Batch, Limits, Plan, Recall, Role, Sample, Shape, StepResult, Tree
from rubato.core.request import NOTHING, SLO, Request


class SeqView(Protocol):
    """One request on a replica. Times in seconds of the replica's clock, lengths in tokens."""

    @property
    def id(self) -> str: ...
    @property
    def request(self) -> Request: ...
    @property
    def stage(self) -> int: ...  # index into request.stages
    @property
    def slo(self) -> SLO: ...  # of this stage
    @property
    def stage_start(self) -> float: ...
    @property
    def first_token_at(self) -> float | None: ...  # of this stage
    @property
    def output(self) -> int: ...  # tokens out in this stage
    @property
    def length(self) -> int: ...  # prompt + output so far, all stages
    @property
    def cached(self) -> int: ...  # tokens in KV; while it waits: tokens that the prefix cache would save if it started
    @property
    def pending(self) -> int: ...  # length - cached: 1 = decode, more = prefill
    @property
    def blocks(self) -> int: ...  # its KV blocks; while it waits: cached blocks that others hold, no new memory
    @property
    def own_blocks(self) -> int: ...  # its blocks that are not shared: a preemption frees them
    @property
    def in_flight(self) -> int: ...  # tokens in batches not yet returned (`View.in_flight`)
    @property
    def best_effort(self) -> bool: ...  # served as best effort now: by request, or demoted
    @property
    def demoted(self) -> bool: ...  # served as best effort despite its SLO
    @property
    def missed(self) -> bool: ...  # some token was late already (deadline SLO, or e2e)
    @property
    def due(self) -> float: ...  # when the next token must be out; inf = no SLO on it
    @property
    def tool_seconds(self) -> float: ...  # seconds of its tools so far, which no SLO counts
    @property
    def predicted(self) -> float | None: ...  # remaining output tokens, None = no predictor
    @property
    def draft(self) -> Tree | None: ...  # candidates drafted in its last step; only its next step can verify them
    @property
    def tried(self) -> int: ...  # drafted tokens verified so far
    @property
    def acceptance(self) -> float | None: ...  # the accepted share of tried tokens, None = none tried


def nothing_sent(seq: SeqView) -> bool:
    """Returns whether no token of any stage has come out, so that its client has received nothing."""
    return seq.length == seq.request.stages[0].prompt


@dataclass(frozen=True, slots=True)
class View:
    """One replica: for schedulers just before a step, for routers at any time.

    Args:
        waiting: requests that hold no KV, in order of submission, also after a preemption; the same tuple as before, if
            only time has passed for them.
        running: requests that hold KV, in order of start.
        kv_free, kv_total: free KV blocks, and all, of `limits.block_size` tokens.
        as_of: time of the state; `now`, except for a remote replica, whose state is rebuilt from its events.
        moving: requests that hold KV here and cannot be planned, since it moves to another replica, or from one.
        in_flight: the batch that runs now, empty between steps. Its tokens (`SeqView.in_flight`) are pending until it
            ends; only vLLM, which plans ahead and leaves this empty, counts them in `cached` and `output`.
        steps: number of steps that have ended here; 0 inside vLLM, which does not count them.
        slo_rule: judges finished requests (`core.slo`); for a remote replica always "deadline".
    """

    id: str
    now: float
    waiting: Sequence[SeqView]
    running: Sequence[SeqView]
    kv_free: int
    kv_total: int
    limits: Limits
    latency: LatencyModel
    supports: frozenset[str] = frozenset()
    busy_until: float = 0.0  # when the step in flight is predicted to end; <= now when idle
    as_of: float = inf  # inf = now
    role: Role = ANY
    moving: Sequence[SeqView] = ()
    in_flight: Shape = NO_BATCH
    steps: int = 0
    slo_rule: str = "deadline"

    # The properties below are derived. Replicas that keep counters compute them without a loop over all sequences.

    @property
    def known(self) -> Mapping[str, SeqView]:
        """Returns all waiting and running requests, by id."""
        return {s.id: s for group in (self.waiting, self.running) for s in group}

    @property
    def running_ids(self) -> Collection[str]:
        return {s.id for s in self.running}

    @property
    def prefilling(self) -> Sequence[SeqView]:
        """Returns the running requests with more than one token pending, in order of start."""
        return [s for s in self.running if s.pending > 1]

    @property
    def dues(self) -> NDArray[np.float64]:
        """Returns `due` of each running request, in the order of `running`."""
        return np.array([s.due for s in self.running], dtype=np.float64)

    @property
    def first_decode_due(self) -> float:
        """Returns the earliest `due` from now on among running requests with one token pending; inf for none."""
        return min([d for s in self.running if s.pending == 1 and (d := s.due) >= self.now], default=inf)

    @property
    def decodes(self) -> Shape:
        """Returns the shape of a batch of one token for every running sequence with one pending."""
        cached = [c for s in self.running if s.length - (c := s.cached) == 1]  # not by `pending`: half the time
        return Shape.decodes(len(cached), sum(cached) + len(cached))

    @property
    def decode_blocks(self) -> int:
        """Returns the new KV blocks that the batch `decodes` needs."""
        block = self.limits.block_size
        return sum(max(0, s.cached // block + 1 - s.blocks) for s in self.running if s.pending == 1)

    @property
    def newest(self) -> SeqView | None:
        """Returns the running request that started last."""
        return self.running[-1] if self.running else None

    @property
    def pending(self) -> int:
        """Returns the pending tokens of all waiting and running requests."""
        return sum(s.pending for s in self.waiting) + sum(s.pending for s in self.running)

    @property
    def count(self) -> int:
        """Returns the number of waiting and running requests."""
        return len(self.waiting) + len(self.running)


# (fixed, y, slope, x, until): the step time of a number of decodes as their KV grows: fixed + (y + slope·(kv - x))
# seconds for kv below `until`; x is a number of tokens.
Line = tuple[float, float, float, int, float]


class LatencyModel(Protocol):
    """Predicts step time from batch shape. `rubato.latency.model_base.ModelBase` derives the rest from `step_time`: a
    model that inherits from it defines `step_time`, `largest_chunk`, `fit` and `update`.
    """

    @property
    def spread(self) -> float:
        """Returns the root mean square of the relative errors of recent predictions; 0 where unknown, and for models
        that do not learn.
        """
        ...

    def step_time(self, shape: Shape) -> float:
        """Returns the seconds of a batch of this shape: above 0, finite, never less with one more entry or a longer
        one.
        """
        ...

    def seconds_of(
        self, tokens: int, seqs: int, kv: int, chunk_context: int, chunk_sq: int, chunks: int, chunk_kv: int
    ) -> float:
        """Returns `step_time` of a shape with these features and no draft steps, equal to the last bit, without making
        the shape: for callers that ask for many steps in a row."""
        ...

    def line(self, seqs: int, kv: int) -> Line | None:
        """Returns the step time of `seqs` decodes as a straight line in the KV tokens that they read together, from
        `kv` up, equal to `step_time` to the last bit. Always None for a model without lines."""
        ...

    def knee(self, base: Shape) -> int:
        """Returns how many tokens of sequences in the batch, such as drafted ones to verify, can be added before its
        time grows: until compute takes as long as reading weights and KV; 0 for a batch beyond that. This is AdaServe's
        verification budget B without roots (§3: "determined based on hardware profiling"; the authors' artifact: 256
        and 512 tokens a step).
        """
        ...

    def largest_chunk(self, seconds: float, base: Shape, cached: int, most: int) -> int:
        """Returns the largest c in [0, most] such that `base.plus(c, cached)` takes at most `seconds`; 0 for none."""
        ...

    def fit(self, samples: Sequence[Sample]) -> None:
        """Fits from scratch. Raises ValueError, naming what is missing, when the samples cannot determine the model."""
        ...

    def update(self, sample: Sample) -> None:
        """Learns from one more step, at a bounded cost."""
        ...

    def idle(self, seconds: float) -> None:
        """Tells the model that no step has run for `seconds`; its owner calls this before it asks for predictions. A
        policy that refuses all requests by its predictions runs no step, so a slow spell must pass without one.
        """
        ...


class LengthPredictor(Protocol):
    """Predicts a request's output tokens for schedulers and routers; only an oracle knows the truth."""

    def remaining(self, request: Request, output: int) -> float | None: ...
    def learn(self, request: Request, output: int) -> None: ...


class Scheduler(Protocol):
    """Decides each step of one replica. `needs` is checked against `View.supports` at start. An attribute `uses` may
    name optional capabilities, in the same words; `default_lengths` may name a length predictor, as for a Router. With
    `can_skip_tokens = True` a host may leave out `Tokens`, whose counts are in the views.
    """

    needs: ClassVar[frozenset[str]]

    def observe(self, events: Sequence[Event]) -> None: ...
    def plan(self, view: View) -> Plan: ...


MIN_WAKE_S = 1e-6  # from now to `Dispatch.wake_at`, at least


class Dispatch(NamedTuple):
    """A Router's decision, carried out in this order: assign, recall, demote, reject, place.

    A request that is neither placed nor rejected stays held.

    Args:
        place: request id -> replica id; each replica queues requests in the order of this mapping.
        reject: request id -> reason.
        demote: held requests that are served as best effort from now on.
        recall: replica id -> which of its requests come back: "waiting", those without KV, or "best_effort", those
            without SLO or demoted, waiting or running. The replica hands them off without KV (`HandedOff`, reason
            "recalled") before its next step.
        wake_at: call `place` again at this time if a request is held then; it replaces the last Dispatch's.
        assign: replica id -> its role from now on (`View.role`, `Assigned`); its requests stay unless recalled. The
            phase of a replica does not change while KV is in transfer to it.
        why: request id -> an explanation of its placement, for people (`Placed.why`).
    """

    place: Mapping[str, str] = NOTHING
    reject: Mapping[str, str] = NOTHING
    demote: Collection[str] = ()
    recall: Mapping[str, Recall] = NOTHING
    wake_at: float | None = None
    assign: Mapping[str, Role] = NOTHING
    why: Mapping[str, str] = NOTHING


class Router(Protocol):
    """Places held requests on replicas. `needs` is checked against every replica's `View.supports` at start.

    held: in order of arrival, each with the properties of a waiting request (`due`, `predicted`, `length`). A request
    handed off with KV counts it in `cached`; it must not go back to the replica with that KV
    (`request.handoff.source`), and stays held while its new replica lacks KV memory.

    `place` is called while a request is held: when one arrives, ends, is handed off or loses its replica, at `wake_at`,
    and again as long as it places or rejects; if a held request has KV, also when KV may have been freed. A router
    observes all events but `Tokens`, which the views count. With `wants = frozenset({"step"})` it is called at the end
    of every replica's steps, too, at most once an instant and after everything else that happens then.

    A router that decides by output lengths may name its default predictor, one of `length_prediction.PREDICTORS`, as a
    class attribute `default_lengths`.
    """

    needs: ClassVar[frozenset[str]]

    def observe(self, events: Sequence[Event]) -> None: ...
    def place(self, held: Sequence[SeqView], fleet: Sequence[View], now: float) -> Dispatch: ...


@runtime_checkable
class Assigner(Protocol):
    """A Router that also assigns roles to replicas."""

    def roles(self, replicas: Sequence[str]) -> Mapping[str, Role]:
        """Returns the role of each replica at the start; `Dispatch.assign` changes it. Raises ValueError for too few
        replicas."""
        ...


class Scaling(NamedTuple):
    """An Autoscaler's decision.

    Args:
        add: replicas to start (`Joined`, once they serve).
        drain: ids of replicas that take no more requests (`Draining`) and leave once empty (`Left`); never all.
        wake_at: call `scale` again at this time, also when no request is in flight; None when nothing will change
            before the next request, or a simulation would never end.
    """

    add: int = 0
    drain: Collection[str] = ()
    wake_at: float | None = None


class Autoscaler(Protocol):
    """Adds replicas to the fleet and drains them. `scale` is called after requests came or ended, and at `wake_at`; it
    observes all events but `Tokens`."""

    def observe(self, events: Sequence[Event]) -> None: ...

    def scale(self, unplaced: Sequence[SeqView], fleet: Sequence[View], starting: int, now: float) -> Scaling:
        """Decides which replicas to add and drain.

        Args:
            unplaced: requests at no replica, as `held` of `Router.place`.
            fleet: as for a Router, without draining replicas.
            starting: number of added replicas that do not serve yet.
            now: time in seconds.
        """
        ...


class Engine(Protocol):
    """Runs batches. It keeps each sequence's token ids, sampling state and text; the replica keeps counts and KV
    blocks. Block ids in a batch are indices into the engine's own KV memory, [0, limits.kv_blocks).
    """

    @property
    def limits(self) -> Limits: ...
    @property
    def supports(self) -> frozenset[str]:
        """Returns the capabilities that policies may need.

        They are: chunked (part of a prompt), mixed (prefill and decodes in one batch), preempt, kv_transfer
        (`export_kv`, `import_kv`), draft (`Work.draft`, `Work.verify` of chains), tree (of trees). A host adds handoff
        where its plans can pass requests on, and recall where its router can take them back.
        """
        ...

    async def start(self) -> None:
        """Loads weights, preallocates KV, warms up. After a failed step it is called again and must begin afresh."""
        ...

    def add(self, request: Request) -> None:
        """Adds a sequence that batches will soon name, with its progress if it moved here (`Request.progress`). Raises
        ValueError when it can never run."""
        ...

    async def execute(self, batch: Batch) -> StepResult:
        """Runs one batch, off the event loop. The result has every `sample` entry, whose KV is written by then. After
        verification the accepted path's KV is right behind that of the pending tokens, in order of position, whatever
        the nodes' order: the replica only cuts off the KV after it (`Entry.verify`)."""
        ...

    def forget(self, seqs: Iterable[str]) -> None:
        """Drops ended sequences; never called while a batch that names them runs."""
        ...

    async def export_kv(self, blocks: Sequence[int], tokens: int) -> KV:
        """Copies the KV of the first `tokens` tokens in `blocks`, after the steps executed so far."""
        ...

    async def import_kv(self, blocks: Sequence[int], kv: KV) -> None:
        """Writes KV into blocks, before any later step. Raises ValueError for KV of another shape or too long."""
        ...

    async def close(self) -> None: ...


class NotReadyError(ValueError):
    """A host cannot serve yet; a later start may succeed."""


class TransferError(Exception):
    """The KV to move is gone, or no request waits for it, since an engine began afresh meanwhile."""


class Host(Protocol):
    """One replica, which passes events in order to the callback of its constructor: `LocalHost` (own engine),
    `ServerReplica` (by HTTP), `RayHost` or `SimulatedHost`.

    Every submitted request ends in exactly one `Finished`, unless the host is lost: then it calls its other callback
    once, with the requests that must move and their progress.

    A request that it hands off (`HandedOff`) leaves it; its KV stays until `release`. `reserve` replaces `submit` for a
    request that comes with KV.
    """

    @property
    def id(self) -> str: ...
    @property
    def cooldown_until(self) -> float:
        """Returns the time before which no request is placed here, since some have just failed here."""
        ...

    async def start(self) -> None: ...
    def submit(self, request: Request) -> None: ...
    def cancel(self, id: str, reason: str) -> None: ...
    def resume(self, id: str) -> None:
        """Resumes a request whose tool has returned. Ignored for a request that waits for none."""
        ...

    def view(self) -> View: ...
    def assign(self, role: Role) -> None:
        """Sets the role, from the next view on."""
        ...

    def recall(self, kind: Recall) -> None:
        """Hands off all requests of a kind (waiting, or best effort), without KV and before the next plan."""
        ...

    def reserve(self, request: Request) -> bool:
        """Reserves KV memory for a request whose KV will come, which this host owns from then on; False while memory
        is short."""
        ...

    async def transfer(self, id: str, to: Host) -> None:
        """Sends the KV of a request that this host handed off to the host that reserved for it, and releases it. Raises
        TransferError when either has lost the request, ValueError when that host's engine cannot take the KV."""
        ...

    async def receive(self, id: str, kv: KV) -> None:
        """Writes the KV of a reserved request, which then runs (`Transferred`). Raises as `transfer`."""
        ...

    def release(self, id: str) -> None:
        """Frees the KV of a request that was handed off or reserved here, if any, without an event."""
        ...

    async def drain(self) -> None:
        """Returns once no request is waiting, running or moving."""
        ...

    async def close(self) -> None: ...
