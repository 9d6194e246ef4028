"""The parts that decide and record inside vLLM: the policy, its view, its events, its latency model.

No vLLM code is called here, so this works with each of vLLM's schedulers. A fault here is counted and logged, and never
reaches vLLM.
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
from rubato.engines.vllm.drafts import VllmDrafts
from rubato.engines.vllm.fleet_part import NO_IDS, FleetPart, is_movable
from rubato.engines.vllm.gateway_reports import GatewayReports
from rubato.engines.vllm.guards import guarded
from rubato.engines.vllm.kv_transfer import comes_with_kv, is_prefill_only
from rubato.engines.vllm.lost_time import VllmMissCauses
from rubato.engines.vllm.reports import REPLICA_NAME, Reports
from rubato.engines.vllm.room import STABLE_STEPS, SlackCheck
from rubato.engines.vllm.sequence import VllmSeq, request_of, request_of_gateway
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
FLEET_SUPPORTS = frozenset({"handoff", "recall"})  # with a gateway
LOG_PAUSE_S = 60.0  # between two log lines of one kind of fault or deviation
MAX_FAULTS, FAULT_WINDOW_S = 10, 60.0  # more faults in this window: vLLM schedules in its own order from then on

MAX_PLAN_S = 1.0  # a slower plan counts as a fault
OUTCOMES: Mapping[str, tuple[Outcome, str]] = {  # of vLLM's finish reasons; "stop" also of what else ends a text
    "length": ("completed", "length"),
    "abort": ("cancelled", "aborted"),
    "error": ("failed", "error"),
}

ORDER = attrgetter("order")


@dataclass(frozen=True, slots=True)
class InFlightBatch:
    """A batch between its plan and its completion. decodes: the part of its shape that decodes. sampling: requests that
    get at least one token."""

    output: Any  # vLLM's SchedulerOutput
    shape: Shape
    decodes: Shape
    since: float
    sampling: Sequence[VllmSeq]


@dataclass(frozen=True, slots=True)
class PlannedStep:
    """A checked plan in vLLM's terms. chunks: tokens to run of each request, including drafted ones to verify. depths:
    tokens to draft of each request."""

    view: View
    plan: Plan
    chunks: Mapping[str, int]
    depths: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class VllmView(View):
    """A View whose derived values are computed when it is made."""

    running_ids: Collection[str] = ()
    prefilling: Sequence[VllmSeq] = ()
    decodes: Shape = NO_BATCH
    decode_blocks: int = 0


class PolicyDriver(FleetPart):
    """One policy over one vLLM engine core.

    steps: batches scheduled. fallbacks: steps in vLLM's own order after a fault. stood_aside: steps in vLLM's own order
    because every SLO has slack. deviations: steps that vLLM did not carry out as planned, by cause (a step may have
    several). faults: errors of the policy, of its plans and in this class, by place. has_given_up: no step is planned
    any more.

    Args:
        fair: holds requests of tenants over their share back from the policy.
        trust_client_slos: clients may set SLOs themselves.
        link: to vLLM's API servers, and to gateways if the engine is one of a fleet.
        engine: number of the engine in its server.
        kv_lease: seconds that KV stays here for another engine (`kv_transfer`); None: no KV leaves.
    """

    def __init__(
        self,
        settings: Settings,
        limits: Limits,
        kv: KVView,
        num_spec_tokens: int = 0,
        *,
        fair: FairShare | None = None,
        trust_client_slos: bool = True,
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
            self.supports |= FLEET_SUPPORTS if kv_lease is None else FLEET_SUPPORTS | {"kv_transfer"}
        self.kv_lease = kv_lease
        self.arriving: set[str] = set()
        self.kv_arrived: set[str] = set()
        self.leaving: dict[str, VllmSeq] = {}
        self.hidden_ids = self.unplanned_ids = NO_IDS
        self.role = ANY
        self._untracked = 0  # requests here that no gateway can place elsewhere
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
        self.has_given_up = False
        self.drafts = VllmDrafts(
            num_spec_tokens,
            planned="draft" in self.policy.needs | optional(self.policy),
            uniform=settings.uniform_drafts,
        )
        # (a policy that plans drafts decides more than an order)
        plans_drafts = self.drafts.planned and num_spec_tokens > 0
        self._slack_check = (
            SlackCheck(1 + num_spec_tokens, kv.lookahead_tokens) if settings.stand_aside and not plans_drafts else None
        )
        self._stable_steps = 0  # steps that vLLM may schedule unchecked
        self._kv = kv
        self._fault_times: deque[float] = deque(maxlen=MAX_FAULTS)  # of the last faults, less the slow plans
        self._slow_plan_seconds = 0.0  # spent on plans that were too slow
        self.refused = 0  # requests
        self._logged_at: dict[str, float] = {}  # when each kind of fault, and a deviation, was last logged
        lengths = settings.lengths
        if lengths == "":
            lengths = default_lengths(settings.policy) or DEFAULT_LENGTHS
        self._lengths: LengthPredictor | None = None if lengths is None else PREDICTORS[lengths]()
        self._slo_rule = settings.slo_rule
        self._order = 0
        self._fair = fair
        self._over_share: dict[str, VllmSeq] = {}  # by `fair`
        self._trust_client_slos = trust_client_slos
        self._reports = Reports(link, engine) if link is not None and link.endpoint else None
        self._miss_causes = VllmMissCauses(self.latency)
        self._events: list[Event] = []
        self._batches: deque[InFlightBatch] = deque()
        self._last = -inf  # when the last batch completed
        self._view_asked_at = inf  # when a view was first asked for
        self._is_busy = False  # there was more to do then

    # ----------------------------------------------------------------- requests

    @guarded
    def offer(self, vllm_request: Any) -> str:
        """Takes a new request. Returns why it can never be served, or nothing; a refused request is not kept."""
        now = self.clock()
        arrival = now - max(0.0, self.unix() - vllm_request.arrival_time)
        gateway_request = (
            self._gateways.gateway_request_of(vllm_request.request_id) if self._gateways is not None else None
        )
        try:
            if gateway_request is None:
                request, ticket = request_of(vllm_request, arrival, trust_client_slos=self._trust_client_slos)
            else:
                request, ticket = request_of_gateway(vllm_request, gateway_request.contract), ""
        except ValueError as error:
            return f"rejected-invalid: {error}"
        self._order += 1
        seq = self.seqs[request.id] = VllmSeq(request, vllm_request, self._kv, self._order, self._lengths, ticket)
        if gateway_request is not None:
            seq.gateway_request, seq.demoted = gateway_request, gateway_request.contract.demoted
            seq.prefill_only = is_prefill_only(vllm_request)
        if self.kv_lease is not None and comes_with_kv(vllm_request):
            seq.arriving = True
            self.arriving.add(request.id)
        self._untracked += not is_movable(seq)
        self._record(seq, Offered(now, request.id, request))
        self._stable_steps = 0
        if self._slack_check is not None:
            self._slack_check.add_request(request)
        if self._fair is not None:
            self._fair.add_request(request, now)
            self._over_share[request.id] = seq
        most = vllm_request.num_prompt_tokens + vllm_request.max_tokens + self._kv.lookahead_tokens
        most = min(most, self.limits.max_model_len)
        if self._kv.is_exact and self.limits.blocks(most) > self.limits.kv_blocks:
            reason = f"rejected-exceeds-kv: {most} tokens, there is memory for {self.limits.kv_blocks} blocks"
            self._end(request.id, "refused", reason)
            return reason
        return ""

    @guarded
    def end(self, id: str, outcome: Outcome, reason: str) -> None:
        """Ends a request, whose KV is free. Does nothing for an unknown or ended one."""
        self._end(id, outcome, reason)

    def _end(self, id: str, outcome: Outcome, reason: str) -> None:
        seq = self._remove(id)
        if seq is None:
            return
        times = seq.times_of_stage()
        stages = [StageTimes(seq.request.arrival, times)]
        verdict = judge(seq.request, stages, outcome, self._slo_rule, reason=reason)
        if outcome == "completed" and not verdict.met:
            alone = is_infeasible(seq, seq.cached_at_start, self.latency, self.limits, self._slo_rule)
            verdict = replace(verdict, cause="infeasible" if alone else self._miss_causes.cause(seq))
        if outcome == "completed" and self._lengths is not None:
            self._lengths.learn(seq.request, len(times))
        if self._fair is not None:
            self._fair.record_end(id, outcome, len(times), self.clock())
        self._record(seq, Finished(self.clock(), id, outcome, reason, verdict, len(times), seq.best_effort))

    def _remove(self, id: str) -> VllmSeq | None:
        """Removes a request; None if it was not here."""
        seq = self.seqs.pop(id, None)
        if seq is not None:
            self._stable_steps = 0
            self.arriving.discard(id)
            self.kv_arrived.discard(id)
            self._over_share.pop(id, None)
            self._untracked -= not is_movable(seq)
        return seq

    def _record(self, seq: VllmSeq, event: Event) -> None:
        self._queue_for_policy(event)
        if self._reports is not None:
            self._reports.add(seq, event)
        if self._gateways is not None:
            self._gateways.add(seq, event, self.seqs)

    def _queue_for_policy(self, event: Event) -> None:
        """Queues an event for the policy, unless the policy was given up."""
        if not self.has_given_up:
            self._events.append(event)

    @guarded
    def refuse(self, id: str, reason: str) -> None:
        """Refuses a request. Under overload many are refused: the log has one line in LOG_PAUSE_S seconds."""
        self.refused += 1
        if self._should_log("refused"):
            log.warning("request %.100s refused: %s; refused so far: %d", id, reason, self.refused)  # ids are clients'
        self._end(id, "refused", reason)

    @guarded
    def aborted(self, id: str) -> None:
        """Ends a request that vLLM's front end aborted, because the client left or a stop string came. vLLM does not
        say which, so a request with stop strings that has begun counts as completed."""
        seq = self.seqs.get(id)
        if seq is not None and seq.first_token_at is not None and seq.request.sampling.stop:
            self._end(id, "completed", "stop")
        else:
            self._end(id, "cancelled", "aborted")

    @guarded
    def preempted(self, id: str) -> None:
        self._stable_steps = 0
        seq = self.seqs.get(id)
        self.kv_arrived.discard(id)
        if seq is not None:
            seq.waiting, seq.hit = True, None
            seq.waiting_since = self.clock()
            self._record(seq, Preempted(seq.waiting_since, id))

    # ----------------------------------------------------------------- one step

    def view(
        self, waiting: Iterable[Any], running: Iterable[Any], moving: Iterable[Any], places: int, kv_taken: int = 0
    ) -> View:
        """The policy's view. Requests that are not known here are left out.

        Args:
            waiting: vLLM's requests that can be scheduled and hold no KV.
            running: vLLM's requests that can be scheduled and hold KV, in order of start.
            moving: requests that hold KV and cannot be scheduled, or whose KV has not come.
            places: running places that these take.
            kv_taken: KV blocks that arrive in this step.
        """
        now, seqs = self.clock(), self.seqs
        if self.hidden_ids:
            seqs = {id: seq for id, seq in seqs.items() if id not in self.hidden_ids}
        self._view_asked_at = min(self._view_asked_at, now)
        if not self._batches:
            self.latency.idle(now - max(self._last, self._view_asked_at))
        queued = self._show_waiting([seq for r in waiting if (seq := seqs.get(r.request_id)) is not None], now)
        block, ahead, decodes, decode_kv, blocks = self.limits.block_size, self._kv.lookahead_tokens, 0, 0, 0
        holding, prefilling = [], []
        for vllm_request in running:
            seq = seqs.get(vllm_request.request_id)
            if seq is None:
                places += 1
                continue
            holding.append(seq)
            seq.show_holding_kv()
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
        others = [seq for r in moving if (seq := seqs.get(r.request_id)) is not None]
        for seq in others:
            seq.show_moving()
        others += self.leaving.values()
        limits = self._limits_without(places)
        return VllmView(
            id=REPLICA_NAME,
            now=now,
            waiting=queued,
            running=holding,
            moving=others,
            kv_free=max(0, self._kv.free() - kv_taken),
            kv_total=limits.kv_blocks,
            limits=limits,
            latency=self.latency,
            supports=self.supports - {"handoff"} if self._untracked and not self.hidden_ids else self.supports,
            role=self.role,
            running_ids={s.id for s in holding},
            prefilling=prefilling,
            decodes=Shape(decodes, decodes, decode_kv + decodes),
            decode_blocks=blocks,
            slo_rule=self._slo_rule,
        )

    def _show_waiting(self, waiting: list[VllmSeq], now: float) -> list[VllmSeq]:
        """The waiting sequences in their order, each with its prefix cache hit."""
        waiting.sort(key=ORDER)
        kv = self._kv
        is_current = kv.is_current
        for seq in waiting:
            if seq.waiting and seq.hit is not None and is_current(seq.hit):
                continue  # as in the last view
            seq.draft, seq.waiting = None, True
            seq.length, seq.cached = seq.vllm_request.num_tokens, kv.refresh_hit(seq).tokens
            seq.pending = seq.length - seq.cached
        over_share = self._ids_over_share(now) if self._over_share else ()
        return [seq for seq in waiting if seq.id not in over_share] if over_share else waiting

    def _limits_without(self, places: int) -> Limits:
        """The limits for the policy: less the unplanned requests and the `places` of requests in no view."""
        limits = self.limits
        if self.unplanned_ids:
            limits = replace(limits, max_num_seqs=limits.max_num_seqs - len(self.unplanned_ids))
        if places and limits.max_running is not None:
            limits = replace(limits, max_running=max(0, limits.max_running - places))
        return limits

    def _ids_over_share(self, now: float) -> Collection[str]:
        """Ids of requests of tenants over their share. All others go on to the policy, for good."""
        assert self._fair is not None
        seqs = self.seqs.values()
        waiting = [s for s in seqs if s.waiting and s.id not in self._over_share]
        running = [s for s in seqs if not s.waiting]
        view = View(REPLICA_NAME, now, waiting, running, 0, self.limits.kv_blocks, self.limits, self.latency)
        for request in self._fair.release([seq.request for seq in self._over_share.values()], [view], now):
            self._fair.record_placement(request.id)
            del self._over_share[request.id]
        return self._over_share.keys()

    @guarded
    def observe(self, view: View) -> bool:
        """Passes events to the policy, before each step. Returns whether vLLM schedules the step, because every SLO has
        slack."""
        if self._reports is not None:
            self._reports.add_view(view, self._over_share)
        events, self._events = self._events, []
        self.policy.observe(events)
        if self._slack_check is None or self._over_share or not self._slack_check.all_within_slo(view):
            return False
        self.stood_aside += 1
        here = len(view.running)  # a request that waits for a grammar or KV may be in no View
        self._stable_steps = STABLE_STEPS if here == len(self.seqs) and not view.prefilling else 0
        return True

    def keep_default(self) -> bool:
        """Whether vLLM schedules this step, as it did the last one: only decodes run, each within its TPOT, and no
        request came or went. Counts the step."""
        if not self._stable_steps:
            return False
        self._stable_steps -= 1
        self.stood_aside += 1
        return True

    def invalidate_slack(self) -> None:
        """Forces a slack check at the next step: a request came that no View shows."""
        self._stable_steps = 0

    @guarded
    def plan(self, view: View) -> PlannedStep | None:
        """The policy's checked plan; None if the policy raises or plans the impossible: vLLM then schedules the step in
        its own order."""
        if not view.waiting and not view.running:
            return PlannedStep(view, Plan(), {}, {})
        plan = self.policy.plan(view)
        check(plan, view, self.name)
        if self.drafts.max_tokens:
            plan = spelled_out(plan, view)
            step = PlannedStep(view, plan, self.drafts.chunks(plan, view, self.seqs), self.drafts.depths(plan))
        else:
            step = PlannedStep(view, plan, _chunks(plan, view), {})
        seconds = self.clock() - view.now
        if self._reports is not None:
            self._reports.planned.append(seconds)
        if seconds > MAX_PLAN_S:
            self._slow_plan_seconds += seconds
            self._count_fault("slow")
            if self._should_log("slow"):
                log.warning("policy %r took %.1f s to plan step %d", self.name, seconds, self.steps)
        return step

    def fault(self, place: str) -> None:
        """Counts the current exception, and logs it, each place once in LOG_PAUSE_S seconds."""
        self._count_fault(place)
        if self._should_log(place):
            log.exception(
                "policy %r failed at step %d, in %s; vLLM goes on in its own order; faults so far: %d",
                self.name, self.steps, place, self.faults.total(),
            )  # fmt: skip

    def record_bad_command(self) -> None:
        """Counts and logs the current exception, which a gateway's command has caused."""
        self.faults["command"] += 1
        if self._should_log("command"):
            log.exception("what a gateway asks for cannot be done")

    def _count_fault(self, place: str) -> None:
        now = self.clock() - self._slow_plan_seconds  # else the slowest policy would be given up last
        self.faults[place] += 1
        self._fault_times.append(now)
        are_many = len(self._fault_times) == MAX_FAULTS and now - self._fault_times[0] <= FAULT_WINDOW_S
        if are_many and not self.has_given_up:
            self.has_given_up = True
            self._events.clear()
            if self._reports is not None:
                self._reports.stop_views()
            log.error(
                "policy %r: %d faults in %.0f s: from now on this engine schedules in vLLM's own order, until it is "
                "started again", self.name, MAX_FAULTS, now - self._fault_times[0],
            )  # fmt: skip

    def _should_log(self, what: str) -> bool:
        """Whether to log this now: a fault may repeat at every step."""
        now = self.clock()
        if now < self._logged_at.get(what, -inf) + LOG_PAUSE_S:
            return False
        self._logged_at[what] = now
        return True

    @guarded
    def shift(self, plan: Plan) -> None:
        """Records a plan's demotions and promotions."""
        now = self.clock()
        for id in plan.demote:
            self.seqs[id].demoted = True
            self._record(self.seqs[id], Demoted(now, id))
        for id in plan.promote:
            self.seqs[id].demoted = False
            self._record(self.seqs[id], Promoted(now, id))

    @guarded
    def scheduled(self, now: float, output: Any, requests: Mapping[str, Any], depths: Mapping[str, int] | None) -> None:
        """Records the batch that vLLM made.

        Args:
            now: when vLLM began to schedule it (s).
            output: vLLM's SchedulerOutput.
            requests: vLLM's requests by id.
            depths: tokens to draft of each request; None: vLLM's own number.
        """
        seqs, sampling, entries, drafting = self.seqs, [], [], []
        most, decodes, kv = self.drafts.max_tokens, 0, 0
        drafts = most > 0 and not getattr(output, "skip_drafts", False)  # from vLLM 0.33 on
        for id, tokens in output.num_scheduled_tokens.items():
            vllm_request = requests[id]
            begun = vllm_request.num_computed_tokens - tokens
            entries.append((tokens, begun))
            if tokens == 1:
                decodes, kv = decodes + 1, kv + begun + 1
            seq = seqs.get(id)
            if not vllm_request.is_prefill_chunk:
                if drafts and (depth := most if depths is None else depths.get(id, 0)):
                    drafting.append((depth, 1))
                if seq is not None:
                    seq.expected_tokens += 1
                    sampling.append(seq)
            if seq is not None and seq.arriving:  # in no view yet
                self._arrive(seq, now, begun)
            elif seq is not None and seq.waiting:
                self._record(seq, Started(now, id, resumed=seq.started, cached=begun))
                seq.mark_started(now, begun)
        self.kv_arrived.difference_update(output.num_scheduled_tokens)
        self.steps += 1
        since = self._last if self._is_busy else now
        shape = NO_BATCH.with_entries(entries, drafting)
        self._batches.append(InFlightBatch(output, shape, Shape(decodes, decodes, kv), since, sampling))
        if self._gateways is not None and shape.seqs:
            seconds = self.latency.step_time(shape) if self._gateways.link.listeners else 0.0
            self._gateways.batch(now, shape, seconds, output.num_scheduled_tokens, self._kv.free(), seqs)

    def deviated(self, causes: Iterable[str], about: str) -> None:
        """Counts a step that vLLM did not carry out as planned. causes: words of `docs/vllm.md`'s table."""
        self.deviations.update(causes)
        if self._should_log("deviation"):
            log.warning(
                "vLLM did not carry out the plan of step %d: %s; causes so far: %s",
                self.steps, about, ", ".join(f"{cause} {n}" for cause, n in sorted(self.deviations.items())),
            )  # fmt: skip

    @guarded
    def completed(self, output: Any, outputs: Mapping[int, Any], now: float, unfinished: int) -> None:
        """Records the end of a batch: its time and its tokens. outputs: vLLM's EngineCoreOutputs by client."""
        while self._batches and (flight := self._batches.popleft()).output is not output:
            self._count_fault("unknown batch")  # its beginning was not noted for a fault, or its end
        for seq in flight.sampling:
            seq.expected_tokens -= 1
        done = None
        if flight.shape.seqs:
            seconds = now - max(flight.since, self._last)
            self._last = now
            done = flight.shape, seconds
            if seconds > 0.0:
                self.latency.update(Sample(flight.shape, seconds))
            self._miss_causes.add_step(now, seconds, flight.shape, flight.decodes)
            self._queue_for_policy(Stepped(now, REPLICA_NAME, flight.shape, seconds))
            if self._reports is not None:
                self._reports.batches.append((flight.shape.tokens, flight.shape.seqs, seconds))
        self._is_busy = flight.shape.seqs > 0 and unfinished > 0
        drafted = output.scheduled_spec_decode_tokens
        for core in outputs.values():
            for out in core.outputs:
                self._book(out, now, len(drafted.get(out.request_id, ())) if drafted else 0)
        self.report(idle=not self._is_busy, done=done)

    def report(self, *, idle: bool = False, done: tuple[Shape, float] | None = None) -> None:
        """Reports the latest events to API servers and gateways. A fault loses this report only: API servers learn of
        missed ends from later lists of open requests, and gateways notice the gap.

        Args:
            idle: nothing runs.
            done: a completed batch, and its seconds.
        """
        try:
            now = self.clock()
            if self._gateways is not None:
                batches = [flight.output.num_scheduled_tokens for flight in self._batches if flight.shape.seqs]
                free = self._kv.free() if self._gateways.link.listeners or not self.seqs else 0
                self._gateways.step(now, done, free, self.seqs, self.leaving, batches)
            if self._reports is not None:
                self._reports.send(now, self._state, self.seqs, idle=idle)
        except Exception:
            self.faults["report"] += 1
            if self._should_log("report"):
                log.exception("step %d is not reported to vLLM's API servers: their metrics lack it", self.steps)

    def _state(self) -> dict[str, Any]:
        return {
            "policy": self.name,
            "steps": self.steps,
            "fallbacks": self.fallbacks,
            "stood_aside": self.stood_aside,
            "link_refused": 0 if self.link is None else self.link.refusals,
            "deviations": dict(self.deviations),
            "faults": dict(self.faults),
            "given_up": self.has_given_up,
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
            tokens = seq.vllm_request.num_prompt_tokens - 1  # the last one is run where it goes on
            self.hand_off(seq.id, "prefilled", max(1, tokens))
            return
        ids = out.new_token_ids
        if len(ids) == 1 and not drafted and seq.reported_tokens:  # most of all: in every step, for each that decodes
            seq.times[-1].append(now)
            seq._output += 1
            came = Tokens(now, seq.id, 1, "", tuple(ids))
            if not self.has_given_up:
                self._events.append(came)
            if self._gateways is not None:
                self._gateways.add_tokens(came)
        elif ids:
            seq.add_tokens([now] * len(ids))
            if not seq.reported_tokens:
                seq.reported_tokens = len(ids)
                if self._reports is not None:
                    self._reports.add_tokens(seq, len(ids), now)
            right = len(ids) - 1 if drafted else 0
            tried = min(drafted, right + 1)
            if drafted:
                self.drafts.record_verified(seq, tried, right)
            came = Tokens(now, seq.id, len(ids), token_ids=tuple(ids), tried=tried, accepted=tuple(range(right)))
            self._queue_for_policy(came)
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
