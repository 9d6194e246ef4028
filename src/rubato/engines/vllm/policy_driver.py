"""The parts that decide and record inside vLLM: the policy, its view, its events, its latency model.

No vLLM code is called here, so that this is the same whichever of vLLM's schedulers carries the plans out. A fault in
here is counted, logged and never reaches vLLM.
"""

from __future__ import annotations

import logging
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from rubato.core.capabilities import cure
from rubato.core.clock import WallClock, unix_time
from rubato.core.events import (
    Demoted,
    Event,
    Finished,
    Offered,
    Preempted,
    Promoted,
    Started,
    Stepped,
    Tokens,
)
from rubato.core.interfaces import LengthPredictor, View
from rubato.core.length_prediction import DEFAULT_LENGTHS, PREDICTORS
from rubato.core.plan import ANY, NO_BATCH, Limits, Plan, Sample, Shape
from rubato.core.request import Outcome
from rubato.core.slo import StageTimes, judge
from rubato.engines.vllm.core_link import CoreLink
from rubato.engines.vllm.drafts import Drafts
from rubato.engines.vllm.fleet_part import NONE, FleetPart, movable
from rubato.engines.vllm.gateway_reports import GatewayReports
from rubato.engines.vllm.guards import guarded
from rubato.engines.vllm.kv_transfer import comes_with_kv, hands_over
from rubato.engines.vllm.lost_time import LostTime
from rubato.engines.vllm.reports import NAME, Reports
from rubato.engines.vllm.room import SETTLED, Room
from rubato.engines.vllm.sequence import VllmSeq, promised_request, request_of
from rubato.engines.vllm.settings import Settings
from rubato.latency import affine
from rubato.policies import PolicyError, default_lengths, load, optional
from rubato.policy_kit.fair_share import FairShare
from rubato.replica.miss_cause import is_infeasible
from rubato.replica.plan_check import check, spelled_out

if TYPE_CHECKING:
    from rubato.engines.vllm.kv_view import KVView

log = logging.getLogger("vllm.rubato")  # below vLLM's own logger, whose handler and level it gets
SUPPORTS = frozenset({"chunked", "preempt", "mixed"})
FLEET = frozenset({"handoff", "recall"})  # with a gateway
QUIET = 60.0  # seconds in which the same kind of fault, or of deviation, is not reported again
FAULTS, WITHIN = 10, 60.0  # so many faults in so many seconds: from then on vLLM's own order, for good

SLOW = 1.0  # seconds: a step that takes longer to plan counts as a fault
OUTCOMES: Mapping[str, tuple[Outcome, str]] = {  # of vLLM's finish reasons; "stop" also of what else ends a text
    "length": ("completed", "length"),
    "abort": ("cancelled", "aborted"),
    "error": ("failed", "error"),
}

ORDER = attrgetter("order")


@dataclass(frozen=True, slots=True)
class Flight:
    """A batch between its plan and its completion. decodes: of its shape, requests that decode. sampling: requests
    that it brings a token at least."""

    output: Any  # vLLM's SchedulerOutput
    shape: Shape
    decodes: Shape
    since: float
    sampling: Sequence[VllmSeq]


@dataclass(frozen=True, slots=True)
class Step:
    """A plan, checked, in vLLM's terms. chunks: tokens to run of each request, drafted ones to be verified among them;
    depths: tokens to draft of each."""

    view: View
    plan: Plan
    chunks: Mapping[str, int]
    depths: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class VllmView(View):
    """A View with what is derived from its sequences worked out when it is made."""

    running_ids: Collection[str] = ()
    prefilling: Sequence[VllmSeq] = ()
    decodes: Shape = NO_BATCH
    decode_blocks: int = 0


class PolicyDriver(FleetPart):
    """One policy over one vLLM engine core.

    steps: batches scheduled. fallbacks: of these, in vLLM's own order because the policy failed; stood_aside: because
    every SLO had room. deviations: steps that
    vLLM did not carry out as planned, by cause (one step may have several). faults: of the policy, of its plans and of
    these books, by place. given_up: no step is planned any more.

    fair: holds requests of tenants beyond their share back from the policy. strangers: clients may state SLOs
    themselves. link: to vLLM's API servers, and to gateways if the engine is one of a fleet. engine: its number among
    those of its server. kv_lease: seconds that KV stays here for another engine (`kv_transfer`); None: none goes
    there.
    """

    def __init__(
        self,
        settings: Settings,
        limits: Limits,
        kv: KVView,
        num_spec_tokens: int = 0,
        *,
        fair: FairShare | None = None,
        strangers: bool = True,
        link: CoreLink | None = None,
        engine: int = 0,
        kv_lease: float | None = None,
    ) -> None:
        self.name = settings.policy
        self.policy = load(settings.policy, settings.settings)
        self.supports = SUPPORTS | {"draft"} if num_spec_tokens else SUPPORTS
        self.link = link
        self._gateways = GatewayReports(link) if link is not None and link.port else None
        if self._gateways is not None:
            self.supports |= FLEET if kv_lease is None else FLEET | {"kv_transfer"}
        self.kv_lease = kv_lease
        self.arriving: set[str] = set()
        self.come: set[str] = set()
        self.leaving: dict[str, VllmSeq] = {}
        self.hidden = self.beside = NONE
        self.role = ANY
        self._strange = 0  # requests here that no gateway can place elsewhere
        missing = self.policy.needs - self.supports
        if missing:
            words = ", ".join(sorted(missing))
            drafter = "" if num_spec_tokens else "--speculative-config"
            raise PolicyError(f"policy {self.name!r} needs {words}, which vLLM lacks for us: {cure(missing, drafter)}")
        self.limits = limits
        self.latency = affine.Model(**settings.latency)
        self.clock: Callable[[], float] = WallClock().now
        self.unix: Callable[[], float] = unix_time
        self.seqs: dict[str, VllmSeq] = {}
        self.steps = self.fallbacks = self.stood_aside = 0
        self.deviations: Counter[str] = Counter()
        self.faults: Counter[str] = Counter()
        self.given_up = False
        self.drafts = Drafts(
            num_spec_tokens,
            planned="draft" in self.policy.needs | optional(self.policy),
            uniform=settings.uniform_drafts,
        )
        # (a policy that plans drafts decides more than an order)
        plans_drafts = self.drafts.planned and num_spec_tokens > 0
        self._room = Room(1 + num_spec_tokens, kv.ahead) if settings.stand_aside and not plans_drafts else None
        self._settled = 0  # steps that may be left to vLLM without a look
        self._kv = kv
        self._recent: deque[float] = deque(maxlen=FAULTS)  # when the last faults were, without `_slow`
        self._slow = 0.0  # seconds that plans took which were too slow
        self.refused = 0  # requests
        self._reported: dict[str, float] = {}  # when each kind of fault, and a deviation, was last logged
        lengths = settings.lengths
        if lengths == "":
            lengths = default_lengths(settings.policy) or DEFAULT_LENGTHS
        self._lengths: LengthPredictor | None = None if lengths is None else PREDICTORS[lengths]()
        self._slo_rule = settings.slo_rule
        self._order = 0
        self._fair = fair
        self._held: dict[str, VllmSeq] = {}  # by `fair`
        self._strangers = strangers
        self._reports = Reports(link, engine) if link is not None and link.endpoint else None
        self._lost_time = LostTime(self.latency)
        self._events: list[Event] = []
        self._flights: deque[Flight] = deque()
        self._last = -inf  # when the last batch completed
        self._asked_since = inf  # when a view was first asked for
        self._busy = False  # whether there was more to do then

    # ----------------------------------------------------------------- requests

    @guarded
    def offer(self, own: Any) -> str:
        """A request arrived. Returns why it can never be served, or nothing; a refused one is not kept."""
        now = self.clock()
        arrival = now - max(0.0, self.unix() - own.arrival_time)
        promised = self._gateways.promised(own.request_id) if self._gateways is not None else None
        try:
            if promised is None:
                request, ticket = request_of(own, arrival, strangers=self._strangers)
            else:
                request, ticket = promised_request(own, promised.contract), ""
        except ValueError as error:
            return f"rejected-invalid: {error}"
        self._order += 1
        seq = self.seqs[request.id] = VllmSeq(request, own, self._kv, self._order, self._lengths, ticket)
        if promised is not None:
            seq.promised, seq.demoted = promised, promised.contract.demoted
            seq.prefill_only = hands_over(own)
        if self.kv_lease is not None and comes_with_kv(own):
            seq.arriving = True
            self.arriving.add(request.id)
        self._strange += not movable(seq)
        self._happened(seq, Offered(now, request.id, request))
        self._settled = 0
        if self._room is not None:
            self._room.offered(request)
        if self._fair is not None:
            self._fair.enter(request, now)
            self._held[request.id] = seq
        most = min(own.num_prompt_tokens + own.max_tokens + self._kv.ahead, self.limits.max_model_len)
        if self._kv.exact and self.limits.blocks(most) > self.limits.kv_blocks:
            reason = f"rejected-exceeds-kv: {most} tokens, there is memory for {self.limits.kv_blocks} blocks"
            self._end(request.id, "refused", reason)
            return reason
        return ""

    @guarded
    def end(self, id: str, outcome: Outcome, reason: str) -> None:
        """A request is over, its KV is free; unknown or ended before: nothing."""
        self._end(id, outcome, reason)

    def _end(self, id: str, outcome: Outcome, reason: str) -> None:
        seq = self._taken_out(id)
        if seq is None:
            return
        times = seq.times_of_stage()
        stages = [StageTimes(seq.request.arrival, times)]
        verdict = judge(seq.request, stages, outcome, self._slo_rule, reason=reason)
        if outcome == "completed" and not verdict.met:
            alone = is_infeasible(seq, seq.cached_at_start, self.latency, self.limits, self._slo_rule)
            verdict = replace(verdict, cause="infeasible" if alone else self._lost_time.cause(seq))
        if outcome == "completed" and self._lengths is not None:
            self._lengths.learn(seq.request, len(times))
        if self._fair is not None:
            self._fair.finished(id, outcome, len(times), self.clock())
        self._happened(seq, Finished(self.clock(), id, outcome, reason, verdict, len(times), seq.best_effort))

    def _taken_out(self, id: str) -> VllmSeq | None:
        """A request that is here no more; None if it was not."""
        seq = self.seqs.pop(id, None)
        if seq is not None:
            self._settled = 0
            self.arriving.discard(id)
            self.come.discard(id)
            self._held.pop(id, None)
            self._strange -= not movable(seq)
        return seq

    def _happened(self, seq: VllmSeq, event: Event) -> None:
        self._to_observe(event)
        if self._reports is not None:
            self._reports.add(seq, event)
        if self._gateways is not None:
            self._gateways.add(seq, event, self.seqs)

    def _to_observe(self, event: Event) -> None:
        """Keep it for the policy, which is not asked any more once it is given up."""
        if not self.given_up:
            self._events.append(event)

    @guarded
    def refuse(self, id: str, reason: str) -> None:
        """A request is refused. Under overload many are: the log has the first of each QUIET seconds."""
        self.refused += 1
        if self._due("refused"):
            log.warning("request %.100s refused: %s; refused so far: %d", id, reason, self.refused)  # ids are clients'
        self._end(id, "refused", reason)

    @guarded
    def aborted(self, id: str) -> None:
        """vLLM's front end took a request back: because the client left, or because it saw a stop string in the text.
        It does not say which, so one that may end by a stop string and has begun is taken to have ended by it."""
        seq = self.seqs.get(id)
        if seq is not None and seq.first_token_at is not None and seq.request.sampling.stop:
            self._end(id, "completed", "stop")
        else:
            self._end(id, "cancelled", "aborted")

    @guarded
    def preempted(self, id: str) -> None:
        self._settled = 0
        seq = self.seqs.get(id)
        self.come.discard(id)
        if seq is not None:
            seq.waiting, seq.hit = True, None
            seq.waiting_since = self.clock()
            self._happened(seq, Preempted(seq.waiting_since, id))

    # ----------------------------------------------------------------- one step

    def view(
        self, waiting: Iterable[Any], running: Iterable[Any], moving: Iterable[Any], places: int, kv_taken: int = 0
    ) -> View:
        """What the policy sees now. waiting, running: vLLM's requests that can be scheduled, running in order of start;
        moving: those that hold KV and cannot, or whose KV is to come, and take so many `places` of those that may run;
        kv_taken: blocks of what comes in this step. Requests that are not known here are left out."""
        now, seqs = self.clock(), self.seqs
        if self.hidden:
            seqs = {id: seq for id, seq in seqs.items() if id not in self.hidden}
        self._asked_since = min(self._asked_since, now)
        if not self._flights:
            self.latency.idle(now - max(self._last, self._asked_since))
        queued = self._queued([seq for own in waiting if (seq := seqs.get(own.request_id)) is not None], now)
        block, ahead, decodes, decode_kv, blocks = self.limits.block_size, self._kv.ahead, 0, 0, 0
        holding, prefilling = [], []
        for own in running:
            seq = seqs.get(own.request_id)
            if seq is None:
                places += 1
                continue
            holding.append(seq)
            seq.holds_kv()
            if seq.arriving:
                self._arrive(seq, now, seq.cached)
            if seq.pending != 1:
                prefilling.append(seq)
                continue
            decodes += 1
            cached = seq.cached
            decode_kv += cached
            if ahead:
                blocks += max(0, cached // block + 1 - seq.blocks)
            elif cached % block == 0:  # else there is room in its last block
                blocks += seq.blocks * block <= cached
        self.drafts.show(holding)
        others = [seq for own in moving if (seq := seqs.get(own.request_id)) is not None]
        for seq in others:
            seq.show_moving()
        others += self.leaving.values()
        limits = self._limits_but_for(places)
        return VllmView(
            id=NAME,
            now=now,
            waiting=queued,
            running=holding,
            moving=others,
            kv_free=max(0, self._kv.free() - kv_taken),
            kv_total=limits.kv_blocks,
            limits=limits,
            latency=self.latency,
            supports=self.supports - {"handoff"} if self._strange and not self.hidden else self.supports,
            role=self.role,
            running_ids={s.id for s in holding},
            prefilling=prefilling,
            decodes=Shape(decodes, decodes, decode_kv + decodes),
            decode_blocks=blocks,
            slo_rule=self._slo_rule,
        )

    def _queued(self, waiting: list[VllmSeq], now: float) -> list[VllmSeq]:
        """Those that wait, in their order, with what the prefix cache has of each."""
        waiting.sort(key=ORDER)
        kv = self._kv
        is_current = kv.is_current
        for seq in waiting:
            if seq.waiting and seq.hit is not None and is_current(seq.hit):
                continue  # as in the last view
            seq.draft, seq.waiting = None, True
            seq.length, seq.cached = seq.own.num_tokens, kv.renewed(seq).tokens
            seq.pending = seq.length - seq.cached
        kept_back = self._kept_back(now) if self._held else ()
        return [seq for seq in waiting if seq.id not in kept_back] if kept_back else waiting

    def _limits_but_for(self, places: int) -> Limits:
        """What is left to the policy beside requests that no view shows, of which so many have a place."""
        limits = self.limits
        if self.beside:
            limits = replace(limits, max_num_seqs=limits.max_num_seqs - len(self.beside))
        if places and limits.max_running is not None:
            limits = replace(limits, max_running=max(0, limits.max_running - places))
        return limits

    def _kept_back(self, now: float) -> Collection[str]:
        """Requests of tenants that have their share. Those that have it not go on to the policy, for good."""
        assert self._fair is not None
        seqs = self.seqs.values()
        waiting, running = [s for s in seqs if s.waiting and s.id not in self._held], [s for s in seqs if not s.waiting]
        view = View(NAME, now, waiting, running, 0, self.limits.kv_blocks, self.limits, self.latency)
        for request in self._fair.open([seq.request for seq in self._held.values()], [view], now):
            self._fair.placed(request.id)
            del self._held[request.id]
        return self._held.keys()

    @guarded
    def observe(self, view: View) -> bool:
        """Before a step: the policy hears what happened. Returns whether the step is left to vLLM, with room for every
        SLO."""
        if self._reports is not None:
            self._reports.look_at(view, self._held)
        events, self._events = self._events, []
        self.policy.observe(events)
        if self._room is None or self._held or not self._room.for_all(view):
            return False
        self.stood_aside += 1
        here = len(view.running)  # of all: what waits for a grammar or for KV may be in no View
        self._settled = SETTLED if here == len(self.seqs) and not view.prefilling else 0
        return True

    def goes_on_aside(self) -> bool:
        """Whether the step that begins is left to vLLM as those before, and counted so: only decodes run, each within
        its TPOT, and nothing came or went."""
        if not self._settled:
            return False
        self._settled -= 1
        self.stood_aside += 1
        return True

    def unsettle(self) -> None:
        """Something came that no View shows."""
        self._settled = 0

    @guarded
    def plan(self, view: View) -> Step | None:
        """The policy's plan, checked; None where it raises or plans the impossible. One fault of a policy then does not
        end every request of the engine, but is a step in vLLM's own order."""
        if not view.waiting and not view.running:
            return Step(view, Plan(), {}, {})
        plan = self.policy.plan(view)
        check(plan, view, self.name)
        if self.drafts.most:
            plan = spelled_out(plan, view)
            step = Step(view, plan, self.drafts.chunks(plan, view, self.seqs), self.drafts.depths(plan))
        else:
            step = Step(view, plan, _chunks(plan, view), {})
        seconds = self.clock() - view.now
        if self._reports is not None:
            self._reports.planned.append(seconds)
        if seconds > SLOW:
            self._slow += seconds
            self._count_fault("slow")
            if self._due("slow"):
                log.warning("policy %r took %.1f s to plan step %d", self.name, seconds, self.steps)
        return step

    def fault(self, place: str) -> None:
        """Count the exception being handled, and log it, each place once in QUIET seconds."""
        self._count_fault(place)
        if self._due(place):
            log.exception(
                "policy %r failed at step %d, in %s; vLLM goes on in its own order; faults so far: %d",
                self.name, self.steps, place, self.faults.total(),
            )  # fmt: skip

    def odd_command(self) -> None:
        """Count and log the exception being handled, which is of a gateway's making."""
        self.faults["command"] += 1
        if self._due("command"):
            log.exception("what a gateway asks for cannot be done")

    def _count_fault(self, place: str) -> None:
        now = self.clock() - self._slow  # else the slowest policy would be given up last
        self.faults[place] += 1
        self._recent.append(now)
        if not self.given_up and len(self._recent) == FAULTS and now - self._recent[0] <= WITHIN:
            self.given_up = True
            self._events.clear()
            if self._reports is not None:
                self._reports.views_end()
            log.error(
                "policy %r: %d faults in %.0f s: from now on this engine schedules in vLLM's own order, until it is "
                "started again", self.name, FAULTS, now - self._recent[0],
            )  # fmt: skip

    def _due(self, what: str) -> bool:
        """Whether to report this now: a fault may come back at every step."""
        now = self.clock()
        if now < self._reported.get(what, -inf) + QUIET:
            return False
        self._reported[what] = now
        return True

    @guarded
    def shift(self, plan: Plan) -> None:
        """Book a plan's demotions and promotions."""
        now = self.clock()
        for id in plan.demote:
            self.seqs[id].demoted = True
            self._happened(self.seqs[id], Demoted(now, id))
        for id in plan.promote:
            self.seqs[id].demoted = False
            self._happened(self.seqs[id], Promoted(now, id))

    @guarded
    def scheduled(self, now: float, output: Any, requests: Mapping[str, Any], depths: Mapping[str, int] | None) -> None:
        """Note the batch that vLLM made. output: vLLM's SchedulerOutput; requests: its requests by id; depths: tokens
        to draft of each (None: vLLM's own)."""
        seqs, sampling, entries, drafting = self.seqs, [], [], []
        most, decodes, kv = self.drafts.most, 0, 0
        drafts = most > 0 and not getattr(output, "skip_drafts", False)  # from vLLM 0.33 on
        for id, tokens in output.num_scheduled_tokens.items():
            own = requests[id]
            begun = own.num_computed_tokens - tokens
            entries.append((tokens, begun))
            if tokens == 1:
                decodes, kv = decodes + 1, kv + begun + 1
            seq = seqs.get(id)
            if not own.is_prefill_chunk:
                if drafts and (depth := most if depths is None else depths.get(id, 0)):
                    drafting.append((depth, 1))
                if seq is not None:
                    seq.coming += 1
                    sampling.append(seq)
            if seq is not None and seq.arriving:  # in no view yet
                self._arrive(seq, now, begun)
            elif seq is not None and seq.waiting:
                self._happened(seq, Started(now, id, resumed=seq.started, cached=begun))
                seq.starts_at(now, begun)
        self.come.difference_update(output.num_scheduled_tokens)
        self.steps += 1
        since = self._last if self._busy else now
        shape = NO_BATCH.with_entries(entries, drafting)
        self._flights.append(Flight(output, shape, Shape(decodes, decodes, kv), since, sampling))
        if self._gateways is not None and shape.seqs:
            seconds = self.latency.step_time(shape) if self._gateways.link.listeners else 0.0
            self._gateways.batch(now, shape, seconds, output.num_scheduled_tokens, self._kv.free(), seqs)

    def deviated(self, causes: Iterable[str], about: str) -> None:
        """The step was not carried out as planned. causes: words of `docs/vllm.md`'s table."""
        self.deviations.update(causes)
        if self._due("deviation"):
            log.warning(
                "vLLM did not carry out the plan of step %d: %s; causes so far: %s",
                self.steps, about, ", ".join(f"{cause} {n}" for cause, n in sorted(self.deviations.items())),
            )  # fmt: skip

    @guarded
    def completed(self, output: Any, outputs: Mapping[int, Any], now: float, unfinished: int) -> None:
        """A batch is done: learn its time, book its tokens. outputs: vLLM's EngineCoreOutputs by client."""
        while self._flights and (flight := self._flights.popleft()).output is not output:
            self._count_fault("unknown batch")  # its beginning was not noted for a fault, or its end
        for seq in flight.sampling:
            seq.coming -= 1
        done = None
        if flight.shape.seqs:
            seconds = now - max(flight.since, self._last)
            self._last = now
            done = flight.shape, seconds
            if seconds > 0.0:
                self.latency.update(Sample(flight.shape, seconds))
            self._lost_time.stepped(now, seconds, flight.shape, flight.decodes)
            self._to_observe(Stepped(now, NAME, flight.shape, seconds))
            if self._reports is not None:
                self._reports.batches.append((flight.shape.tokens, flight.shape.seqs, seconds))
        self._busy = flight.shape.seqs > 0 and unfinished > 0
        drafted = output.scheduled_spec_decode_tokens
        for core in outputs.values():
            for out in core.outputs:
                self._book(out, now, len(drafted.get(out.request_id, ())) if drafted else 0)
        self.report(idle=not self._busy, done=done)

    def report(self, *, idle: bool = False, done: tuple[Shape, float] | None = None) -> None:
        """Tell the API servers what happened since they were last told. A fault costs that, and nothing else: they
        learn of ends that they were not told from what is open later. The same to gateways, which notice a gap. done: a
        batch that is through, and its seconds."""
        try:
            now = self.clock()
            if self._gateways is not None:
                batches = [flight.output.num_scheduled_tokens for flight in self._flights if flight.shape.seqs]
                free = self._kv.free() if self._gateways.link.listeners or not self.seqs else 0
                self._gateways.step(now, done, free, self.seqs, self.leaving, batches)
            if self._reports is not None:
                self._reports.send(now, self._state, self.seqs, idle=idle)
        except Exception:
            self.faults["report"] += 1
            if self._due("report"):
                log.exception("step %d is not reported to vLLM's API servers: their metrics lack it", self.steps)

    def _state(self) -> dict[str, Any]:
        return {
            "policy": self.name,
            "steps": self.steps,
            "fallbacks": self.fallbacks,
            "stood_aside": self.stood_aside,
            "link_refused": 0 if self.link is None else self.link.refused,
            "deviations": dict(self.deviations),
            "faults": dict(self.faults),
            "given_up": self.given_up,
            "drafted": {"accepted": self.drafts.right, "rejected": self.drafts.tried - self.drafts.right},
            "step_seconds_off": self.latency.spread,
            "kv_free": self._kv.free(),
        }

    def close(self) -> None:
        if self.link is not None:
            self.link.close()

    def _book(self, out: Any, now: float, drafted: int) -> None:
        seq = self.seqs.get(out.request_id)
        if seq is None:
            return  # over already: refused or aborted meanwhile
        if seq.prefill_only and out.kv_transfer_params is not None:
            tokens = seq.own.num_prompt_tokens - 1  # the last one is run where it goes on
            self.hand_off(seq.id, "prefilled", max(1, tokens))
            return
        ids = out.new_token_ids
        if len(ids) == 1 and not drafted and seq.reported:  # most of all: in every step, for each that decodes
            seq.times[-1].append(now)
            seq._output += 1
            came = Tokens(now, seq.id, 1, "", tuple(ids))
            if not self.given_up:
                self._events.append(came)
            if self._gateways is not None:
                self._gateways.add_tokens(came)
        elif ids:
            seq.add_tokens([now] * len(ids))
            if not seq.reported:
                seq.reported = len(ids)
                if self._reports is not None:
                    self._reports.add_tokens(seq, len(ids), now)
            right = len(ids) - 1 if drafted else 0
            tried = min(drafted, right + 1)
            if drafted:
                self.drafts.verified(seq, tried, right)
            came = Tokens(now, seq.id, len(ids), token_ids=tuple(ids), tried=tried, accepted=tuple(range(right)))
            self._to_observe(came)
            if self._gateways is not None:
                self._gateways.add_tokens(came)
        if out.finish_reason is not None:
            self._end(seq.id, *OUTCOMES.get(str(out.finish_reason), ("completed", "stop")))


def _chunks(plan: Plan, view: View) -> dict[str, int]:
    """Tokens to run of each request: `spelled_out` without making a `Work` of each decode, in every step."""
    chunks = {}
    if plan.decode_all:
        chunks = {s.id: 1 for s in view.running if s.pending == 1}
        for id in (*plan.preempt, *plan.drop, *plan.handoff):
            chunks.pop(id, None)
    for work in plan.work:
        chunks[work.seq] = work.tokens
    return chunks
