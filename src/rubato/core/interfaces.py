"""Protocols: what a policy sees, and what policies, latency models, engines and hosts fulfil.

A policy decides and owns no request, queue or KV. It reads a `View`, whose sequences are the replica's own objects
seen through the read-only `SeqView`; mutating one is a type error.
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
from rubato.core.request import NOTHING, Request


class SeqView(Protocol):
    """One request being served, as its replica sees it. Times in seconds of the replica's clock, lengths in tokens."""

    @property
    def id(self) -> str: ...
    @property
    def request(self) -> Request: ...
    @property
    def stage(self) -> int: ...  # index into request.stages
    @property
    def stage_start(self) -> float: ...
    @property
    def first_token_at(self) -> float | None: ...  # of this stage
    @property
    def output(self) -> int: ...  # tokens out in this stage
    @property
    def length(self) -> int: ...  # prompt + output so far, all stages
    @property
    def cached(self) -> int: ...  # of which in KV; of a waiting one: what the prefix cache would save if it started
    @property
    def pending(self) -> int: ...  # length - cached: 1 = decode, more = prefill
    @property
    def blocks(self) -> int: ...  # KV blocks held; of a waiting one: cached ones that others hold, no new memory
    @property
    def own_blocks(self) -> int: ...  # of these, those not shared: what preempting it would free
    @property
    def in_flight(self) -> int: ...  # tokens in batches not yet returned (`View.in_flight`)
    @property
    def best_effort(self) -> bool: ...  # as served now: asked for, or demoted
    @property
    def demoted(self) -> bool: ...  # best effort though it asked for more
    @property
    def missed(self) -> bool: ...  # some token was already late (deadline SLO, or e2e)
    @property
    def due(self) -> float: ...  # when the next token must be out; inf = no SLO on it
    @property
    def tool_seconds(self) -> float: ...  # seconds that its tools took so far, which are in no SLO
    @property
    def predicted(self) -> float | None: ...  # remaining output tokens, None = no predictor
    @property
    def draft(self) -> Tree | None: ...  # candidates drafted in its last step, to be verified in its next or never
    @property
    def tried(self) -> int: ...  # drafted tokens put to the test so far
    @property
    def acceptance(self) -> float | None: ...  # the share of them that was right, None = nothing tried


def nothing_sent(seq: SeqView) -> bool:
    """Whether its client has had nothing of it: no token of any stage has come out."""
    return seq.length == seq.request.stages[0].prompt


@dataclass(frozen=True, slots=True)
class View:
    """One replica: for schedulers just before a step, for routers at any time. `waiting` holds no KV (in the order in
    which the replica was given them, preempted ones at their place); `running` holds KV (in order of start). kv_free
    and kv_total count blocks of `limits.block_size` tokens.

    as_of: when this was known; `now`, but for a replica elsewhere, whose view is a fold over what it has told.
    moving: hold KV here and cannot be planned: on their way to another replica, or from one.
    steps: how many steps have ended here so far (0 where that is not counted: inside vLLM).
    slo_rule: how finished requests are judged (`core.slo`); of a replica elsewhere "deadline" is shown.
    in_flight: the batch that runs now, empty between steps. The running step's tokens (`SeqView.in_flight`) are pending
    until it ends; only vLLM, which plans ahead and leaves this empty, has them in `cached` and `output`.
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

    # What follows is derived. Replicas that count as they go show it without looking at every sequence.

    @property
    def known(self) -> Mapping[str, SeqView]:
        """All that are here, by id."""
        return {s.id: s for group in (self.waiting, self.running) for s in group}

    @property
    def running_ids(self) -> Collection[str]:
        return {s.id for s in self.running}

    @property
    def prefilling(self) -> Sequence[SeqView]:
        """Running, with more than one token pending; in order of start."""
        return [s for s in self.running if s.pending > 1]

    @property
    def dues(self) -> NDArray[np.float64]:
        """`due` of each of `running`, in its order."""
        return np.array([s.due for s in self.running], dtype=np.float64)

    @property
    def first_decode_due(self) -> float:
        """The earliest `due`, from now on, of those running with just one token pending; inf for none."""
        return min([d for s in self.running if s.pending == 1 and (d := s.due) >= self.now], default=inf)

    @property
    def decodes(self) -> Shape:
        """The batch of one token for every running sequence that has just one pending."""
        cached = [c for s in self.running if s.length - (c := s.cached) == 1]  # not by `pending`: half the time
        return Shape(len(cached), len(cached), sum(cached) + len(cached))

    @property
    def decode_blocks(self) -> int:
        """New KV blocks that this batch needs."""
        block = self.limits.block_size
        return sum(max(0, s.cached // block + 1 - s.blocks) for s in self.running if s.pending == 1)

    @property
    def newest(self) -> SeqView | None:
        """The running one started last."""
        return self.running[-1] if self.running else None

    @property
    def pending(self) -> int:
        """Tokens pending, of all that are here."""
        return sum(s.pending for s in self.waiting) + sum(s.pending for s in self.running)

    @property
    def count(self) -> int:
        """Sequences that are here."""
        return len(self.waiting) + len(self.running)


# (fixed, y, slope, x, until): step time of so many decodes as their KV grows, fixed + (y + slope·(kv - x)) seconds for
# kv below `until`.
Line = tuple[float, float, float, float, float]


class LatencyModel(Protocol):
    """Step time from batch shape. `rubato.latency.model_base.ModelBase` has all of it that follows from `step_time`: a
    model that inherits it defines `step_time`, `largest_chunk`, `fit` and `update`."""

    @property
    def spread(self) -> float:
        """How far steps have been off what was predicted for them of late: relative, root mean square. 0 where that is
        not known, and of models that do not learn."""
        ...

    def step_time(self, shape: Shape) -> float:
        """Seconds that a batch of this shape takes: above 0, finite, never less when an entry is added to the batch or
        one in it grows."""
        ...

    def seconds_of(
        self, tokens: int, seqs: int, kv: int, chunk_context: int, chunk_sq: int, chunks: int, chunk_kv: int
    ) -> float:
        """`step_time` of a shape with these features and no draft steps, equal to the last bit, without making the
        shape: for callers that ask for many steps in a row."""
        ...

    def line(self, seqs: int, kv: int) -> Line | None:
        """The step time of `seqs` decodes as a straight line in the KV tokens they read together, from `kv` up, equal
        to `step_time` to the last bit. Always None for a model without lines."""
        ...

    def knee(self, base: Shape) -> int:
        """How many tokens can be added to a batch before its time grows: up to where compute takes as long as reading
        weights and KV does, 0 for a batch that is there already. They are tokens of sequences that are in the batch,
        such as drafted ones to be verified. It is AdaServe's verification budget B, roots not counted (§3: "determined
        based on hardware profiling"; the authors' artifact: 256 and 512 tokens a step)."""
        ...

    def largest_chunk(self, seconds: float, base: Shape, cached: int, most: int) -> int:
        """The largest c in [0, most] such that `base.plus(c, cached)` takes at most `seconds`; 0 if none does."""
        ...

    def fit(self, samples: Sequence[Sample]) -> None:
        """Fit from scratch. Raises ValueError, saying what is lacking, when the samples cannot determine the model."""
        ...

    def update(self, sample: Sample) -> None:
        """Learn from one more step, at a bounded cost."""
        ...

    def idle(self, seconds: float) -> None:
        """No step has run for so many seconds; the model's owner says so before asking it. A policy that refuses all
        requests by its predictions runs no step, so a slow spell must be forgotten without one."""
        ...


class LengthPredictor(Protocol):
    """How many output tokens a request will have; what a scheduler may know (never the truth, unless an oracle)."""

    def remaining(self, request: Request, output: int) -> float | None: ...
    def learn(self, request: Request, output: int) -> None: ...


class Scheduler(Protocol):
    """Decides each step of one replica. `needs` is matched with `View.supports` at start. One that can do with or
    without something may say so in an attribute `uses`, in the same words, and may name its length predictor as a
    Router does (`default_lengths`)."""

    needs: ClassVar[frozenset[str]]

    def observe(self, events: Sequence[Event]) -> None: ...
    def plan(self, view: View) -> Plan: ...


SOONEST = 1e-6  # seconds from now that a router may ask to be asked again (`Dispatch.wake_at`)


class Dispatch(NamedTuple):
    """What a Router decides. Carried out in this order: assign, recall, demote, reject, place. A request that is
    neither placed nor rejected is still held.

    place: request id -> replica id; a replica queues requests in the order in which they are named here. reject:
    request id -> reason. demote: held requests that are served as best effort from now on.
    recall: replica id -> which of the requests there come back: "waiting", those without KV, or "best_effort", those
    that asked for no more or were demoted, waiting or running. The replica hands them off without KV (`HandedOff`,
    reason "recalled") before its next step.
    wake_at: ask again at this time, should anything be held then; in the place of what the Dispatch before said.
    assign: replica id -> what it is for from now on (`View.role`, `Assigned`); requests there stay unless recalled. The
    phase of a replica does not change while KV is on its way to it. why: request id -> an explanation of its placement,
    for people (`Placed.why`).
    """

    place: Mapping[str, str] = NOTHING
    reject: Mapping[str, str] = NOTHING
    demote: Collection[str] = ()
    recall: Mapping[str, Recall] = NOTHING
    wake_at: float | None = None
    assign: Mapping[str, Role] = NOTHING
    why: Mapping[str, str] = NOTHING


class Router(Protocol):
    """Places held requests on replicas. `needs` is matched with every replica's `View.supports` at start.

    held: in the order in which they came, each as a replica shows one that waits (`due`, `predicted`, `length`). A
    request handed off with KV has it as `cached`; it must not go back to the replica that holds it
    (`request.handoff.source`), and stays held while its new replica lacks KV memory.

    It is asked while something is held: when a request arrives, ends, is handed off or loses its replica, at `wake_at`,
    and again as long as it places or rejects; if a held one has KV, also when KV may have come free. It observes all
    events but `Tokens`, which the views count. One that says `wants = frozenset({"step"})` is asked whenever a step of
    any replica has ended, too, and then just once at any instant, after all else that happens at it.

    One that decides by output lengths may name the predictor that is used where none is configured, one of
    `length_prediction.PREDICTORS`, as a class attribute `default_lengths`.
    """

    needs: ClassVar[frozenset[str]]

    def observe(self, events: Sequence[Event]) -> None: ...
    def place(self, held: Sequence[SeqView], fleet: Sequence[View], now: float) -> Dispatch: ...


@runtime_checkable
class Assigner(Protocol):
    """A Router that also says what each replica is for."""

    def roles(self, replicas: Sequence[str]) -> Mapping[str, Role]:
        """The role of each of these replicas at the start; `Dispatch.assign` changes them. Raises ValueError for too
        few of them."""
        ...


class Scaling(NamedTuple):
    """What an Autoscaler wants. add: replicas to start (`Joined`, once they have). drain: ids of replicas that take
    nothing more (`Draining`) and leave when nothing is there (`Left`); never all of them. wake_at: ask again at this
    time, also when nothing is in flight; None once nothing is to change before a request comes, or a simulation would
    never end."""

    add: int = 0
    drain: Collection[str] = ()
    wake_at: float | None = None


class Autoscaler(Protocol):
    """Adds machines to the fleet and drains them. It is asked after requests came or ended, and at `wake_at`, and
    observes all events but `Tokens`."""

    def observe(self, events: Sequence[Event]) -> None: ...

    def scale(self, held: Sequence[SeqView], fleet: Sequence[View], starting: int, now: float) -> Scaling:
        """held, fleet: as a Router sees them; a draining one is not in the fleet. starting: replicas under way."""
        ...


class Engine(Protocol):
    """Runs batches. It keeps each sequence's token ids, sampling state and text; the replica keeps counts and KV
    blocks. Block ids in a batch are indices into the engine's own KV memory, [0, limits.kv_blocks)."""

    @property
    def limits(self) -> Limits: ...
    @property
    def supports(self) -> frozenset[str]:
        """What policies may need: chunked (part of a prompt), mixed (prefill beside decodes), preempt, kv_transfer (the
        two calls below), draft (`Work.draft`, `Work.verify` of chains), tree (of trees). A host adds handoff where its
        plans can pass requests on, and recall where its router can take them back."""
        ...

    async def start(self) -> None:
        """Load weights, preallocate KV, warm up. After a failed step it is called again and must begin afresh."""
        ...

    def add(self, request: Request) -> None:
        """A sequence that batches will soon mention, with what it has received already if it moved here
        (`Request.progress`). Raises ValueError when it can never be run."""
        ...

    async def execute(self, batch: Batch) -> StepResult:
        """Run one batch, off the event loop. Every `sample` entry is in the result; its KV is written by then. After
        verification the accepted path's KV is right behind that of the pending tokens, in order of position, whatever
        the nodes' order: the replica only cuts off what comes after (`Entry.verify`)."""
        ...

    def forget(self, seqs: Iterable[str]) -> None:
        """These have ended; not called while a batch that mentions them runs."""
        ...

    async def export_kv(self, blocks: Sequence[int], tokens: int) -> KV:
        """A copy of the KV of the first `tokens` tokens that `blocks` hold, after the steps given so far."""
        ...

    async def import_kv(self, blocks: Sequence[int], kv: KV) -> None:
        """Write KV into blocks, before the steps given later. Raises ValueError for KV of another shape or too long."""
        ...

    async def close(self) -> None: ...


class NotReadyError(ValueError):
    """A host cannot serve yet: another start, later, may succeed."""


class TransferError(Exception):
    """KV that was to move is not there any more, or no request waits for it: an engine began afresh meanwhile."""


class Host(Protocol):
    """One replica wherever it runs. Events come out through the callback given at construction, in order, and every
    request submitted ends in exactly one `Finished`, unless the host is lost: then it says so, once, through the
    other callback, with the requests that must go elsewhere and what they had received.

    A request that it hands off (`HandedOff`) is no longer here, except for its KV, which stays until `release`. For one
    that comes with KV, `reserve` replaces `submit`."""

    @property
    def id(self) -> str: ...
    @property
    def cooldown_until(self) -> float:
        """Before this time it is given nothing: it has just failed at requests."""
        ...

    async def start(self) -> None: ...
    def submit(self, request: Request) -> None: ...
    def cancel(self, id: str, reason: str) -> None: ...
    def resume(self, id: str) -> None:
        """The tool that a request here waits for has returned. Ignored for one that waits for none."""
        ...

    def view(self) -> View: ...
    def assign(self, role: Role) -> None:
        """Set its role, from the next view on."""
        ...

    def recall(self, kind: Recall) -> None:
        """Hand off, without KV and before the next plan, the requests of this kind that are here: those that wait, or
        best effort."""
        ...

    def reserve(self, request: Request) -> bool:
        """Hold KV memory for a request on its way here; False while it lacks. From then on it is this host's."""
        ...

    async def transfer(self, id: str, to: Host) -> None:
        """Send the KV of a request handed off here to the host that has reserved for it, and release it. Raises
        TransferError when either does not know it any more, ValueError when that host's engine cannot take it."""
        ...

    async def receive(self, id: str, kv: KV) -> None:
        """Write the KV of a reserved request, which then runs (`Transferred`). Raises as `transfer`."""
        ...

    def release(self, id: str) -> None:
        """Give up the KV of a request that leaves or comes, if it is here, and say nothing."""
        ...

    async def drain(self) -> None:
        """Return once nothing is waiting, running or moving."""
        ...

    async def close(self) -> None: ...
