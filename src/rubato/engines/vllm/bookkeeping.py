"""The parts that decide and record inside vLLM: the policy, its view, its events, its latency model.

No vLLM code is called here, so that this is the same whichever of vLLM's schedulers carries the plans out.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Any

from rubato.core.capabilities import cure
from rubato.core.clock import WallClock, unix_time
from rubato.core.did_you_mean import nearest
from rubato.core.events import Demoted, Event, Finished, Offered, Preempted, Promoted, Started, Stepped, Tokens
from rubato.core.interfaces import LengthPredictor, Scheduler, View
from rubato.core.length_prediction import PREDICTORS
from rubato.core.plan import Limits, Plan, Sample, Shape
from rubato.core.request import Outcome
from rubato.core.slo import SLO_RULES, StageTimes, judge
from rubato.engines.vllm.sequence import VllmSeq, request_of
from rubato.latency import affine
from rubato.policies import PolicyError, load
from rubato.replica.plan_check import check, spelled_out

log = logging.getLogger("vllm.rubato")  # below vLLM's own logger, whose handler and level it gets
SUPPORTS = frozenset({"chunked", "preempt", "mixed"})
NAME = "vllm"  # of the one replica that an engine core is
QUIET = 60.0  # seconds in which a policy that fails again is not reported again


@dataclass(frozen=True, slots=True)
class Settings:
    """`--additional-config '{"rubato": {...}}'`. settings: the policy's own. latency: coefficients of `affine` to begin
    with (it learns from the first step on). lengths: what a policy may know of output lengths, one of
    `PREDICTORS` or nothing. slo_rule: how finished requests are judged, for policies that learn from it."""

    policy: str = "edf"
    settings: Mapping[str, Any] = field(default_factory=dict)
    latency: Mapping[str, Any] = field(default_factory=dict)
    lengths: str = ""
    slo_rule: str = "deadline"

    def __post_init__(self) -> None:
        for name, kind, words in (
            ("policy", str, "a policy's name"),
            ("settings", Mapping, "an object"),
            ("latency", Mapping, "an object"),
        ):
            if not isinstance(value := getattr(self, name), kind):
                raise ValueError(f"rubato.{name} is {value!r}: give {words}")
        known = [name for name, part in affine.Model.__dataclass_fields__.items() if part.init]
        for key in self.latency:
            if key not in known:
                raise ValueError(f"rubato.latency has no {key!r}{nearest(key, known)}")
        window = self.latency.get("window", 1)
        if type(window) is not int:
            raise ValueError(f"rubato.latency.window is {window!r}: give a whole number of steps")
        if self.slo_rule not in tuple(SLO_RULES):
            raise ValueError(f"rubato.slo_rule is {self.slo_rule!r}: choose one of {', '.join(SLO_RULES)}")
        if self.lengths and self.lengths not in tuple(PREDICTORS):
            raise ValueError(f"rubato.lengths is {self.lengths!r}: give {' or '.join(PREDICTORS)}, or leave it out")


def settings_of(additional: object) -> Settings:
    """From vLLM's `additional_config`. Raises ValueError that names an unknown key and the nearest known one."""
    given = additional.get("rubato", {}) if isinstance(additional, Mapping) else {}
    if not isinstance(given, Mapping):
        raise ValueError(f'additional_config["rubato"] is {given!r}: give an object, {{"policy": "edf"}}')
    known = list(Settings.__dataclass_fields__)
    for key in given:
        if key not in known:
            raise ValueError(f'additional_config["rubato"] has no {key!r}{nearest(key, known)}')
    return Settings(**given)


@dataclass(frozen=True, slots=True)
class Flight:
    """A batch between its plan and its completion."""

    output: Any  # vLLM's SchedulerOutput
    shape: Shape
    since: float


class PolicyDriver:
    """One policy over one vLLM engine core. steps, deviations, fallbacks: how many batches were scheduled, how many of
    them were not what the plan said, and how many steps were planned in vLLM's own order because the policy failed."""

    def __init__(self, settings: Settings, limits: Limits) -> None:
        self.name = settings.policy
        self.policy = load(settings.policy, settings.settings)
        missing = self.policy.needs - SUPPORTS
        if missing:
            words = ", ".join(sorted(missing))
            raise PolicyError(f"policy {self.name!r} needs {words}, which vLLM lacks for us: {cure(missing)}")
        self.limits = limits
        self.latency = affine.Model(**settings.latency)
        self.clock: Callable[[], float] = WallClock().now
        self.unix: Callable[[], float] = unix_time
        self.seqs: dict[str, VllmSeq] = {}
        self.steps = self.deviations = self.fallbacks = 0
        self._vllm_order: Scheduler = load("vllm", {"budget": limits.max_num_batched_tokens})
        self._reported = {"policy": -inf, "plan": -inf}  # when a failure, and a deviation, was last logged
        self._lengths: LengthPredictor | None = PREDICTORS[settings.lengths]() if settings.lengths else None
        self._slo_rule = settings.slo_rule
        self._order = 0
        self._events: list[Event] = []
        self._flights: deque[Flight] = deque()
        self._last = -inf  # when the last batch completed
        self._asked_since = inf  # when a view was first asked for
        self._busy = False  # whether there was more to do then

    # ----------------------------------------------------------------- requests

    def offer(self, own: Any, kv: Any) -> str:
        """A request arrived. Returns why it can never be served, or nothing; a refused one is not kept."""
        now = self.clock()
        arrival = now - max(0.0, self.unix() - own.arrival_time)
        try:
            request = request_of(own, arrival)
        except ValueError as error:
            return f"rejected-invalid: {error}"
        self._events.append(Offered(now, request.id, request))
        self._order += 1
        seq = VllmSeq(request, own, kv, self._order, self._lengths)
        self.seqs[request.id] = seq
        most = min(own.num_prompt_tokens + own.max_tokens, self.limits.max_model_len)
        if self.limits.blocks(most) > self.limits.kv_blocks:
            reason = f"rejected-exceeds-kv: {most} tokens, there is memory for {self.limits.kv_blocks} blocks"
            self.end(request.id, "refused", reason)
            return reason
        return ""

    def end(self, id: str, outcome: Outcome, reason: str) -> None:
        """A request is over, its KV is free; unknown or ended before: nothing."""
        seq = self.seqs.pop(id, None)
        if seq is None:
            return
        times = seq.times_of_stage()
        verdict = judge(seq.request, [StageTimes(seq.request.arrival, times)], outcome, self._slo_rule)
        if outcome == "completed" and self._lengths is not None:
            self._lengths.learn(seq.request, len(times))
        self._events.append(Finished(self.clock(), id, outcome, reason, verdict, len(times), seq.best_effort))

    def aborted(self, id: str) -> None:
        """vLLM's front end took a request back: because the client left, or because it saw a stop string in the text.
        It does not say which, so one that may end by a stop string and has begun is taken to have ended by it."""
        seq = self.seqs.get(id)
        if seq is not None and seq.first_token_at is not None and seq.request.sampling.stop:
            self.end(id, "completed", "stop")
        else:
            self.end(id, "cancelled", "aborted")

    def preempted(self, id: str) -> None:
        self._events.append(Preempted(self.clock(), id))

    # ----------------------------------------------------------------- one step

    def view(self, waiting: Sequence[str], running: Sequence[str], kv_free: int) -> View:
        """What the policy sees now. waiting, running: ids of those that can be scheduled, running in order of start."""
        now = self.clock()
        self._asked_since = min(self._asked_since, now)
        if not self._flights:
            self.latency.idle(now - max(self._last, self._asked_since))
        queued = sorted((self.seqs[id] for id in waiting), key=lambda s: s.order)
        for seq in queued:
            seq.waiting = True
            seq.hit = None
        holding = [self.seqs[id] for id in running]
        for seq in holding:
            seq.waiting = False
        return View(
            id=NAME,
            now=now,
            waiting=tuple(queued),  # not to be changed: should the policy fail, vLLM's order is planned on this view
            running=tuple(holding),
            kv_free=kv_free,
            kv_total=self.limits.kv_blocks,
            limits=self.limits,
            latency=self.latency,
            supports=SUPPORTS,
        )

    def decide(self, view: View) -> Plan:
        """The policy's plan, checked. Where the policy raises, or plans the impossible, the step is planned by `vllm`,
        our copy of vLLM's own order, so that one fault of a policy does not end every request of the engine."""
        events, self._events = self._events, []
        try:
            self.policy.observe(events)
            if not view.waiting and not view.running:
                return Plan()
            plan = self.policy.plan(view)
            check(plan, view, self.name)
            return spelled_out(plan, view)
        except Exception:
            self._report_failure(view)
        plan = self._vllm_order.plan(view)
        check(plan, view, "vllm")
        return spelled_out(plan, view)

    def _report_failure(self, view: View) -> None:
        """Count a step that the policy could not plan; log the exception being handled, once in QUIET seconds."""
        self.fallbacks += 1
        if not self._due("policy", view.now):
            return
        log.exception(
            "policy %r failed at step %d, which is scheduled in vLLM's own order instead; failures so far: %d",
            self.name, self.steps, self.fallbacks,
        )  # fmt: skip

    def _due(self, what: str, now: float) -> bool:
        """Whether to report this now: a fault may come back at every step."""
        if now < self._reported[what] + QUIET:
            return False
        self._reported[what] = now
        return True

    def shift(self, plan: Plan) -> None:
        """Book a plan's demotions and promotions."""
        now = self.clock()
        for id in plan.demote:
            self.seqs[id].demoted = True
            self._events.append(Demoted(now, id))
        for id in plan.promote:
            self.seqs[id].demoted = False
            self._events.append(Promoted(now, id))

    def scheduled(self, view: View, plan: Plan, output: Any) -> None:
        """Note what vLLM made of a plan. output: vLLM's SchedulerOutput."""
        now, counts = view.now, output.num_scheduled_tokens
        waiting = {s.id for s in view.waiting}
        shape = Shape()
        begun = {}
        for id, tokens in counts.items():
            seq = self.seqs[id]
            begun[id] = int(seq.own.num_computed_tokens) - tokens
            shape = shape.plus(tokens, begun[id])
            if id in waiting:
                self._events.append(Started(now, id, resumed=seq.started, cached=begun[id]))
                seq.started = True
        planned = {w.seq: w.tokens for w in plan.work}
        unlike = [id for id in waiting & counts.keys() & planned.keys() if self.seqs[id].look_up().tokens != begun[id]]
        if counts != planned or unlike:
            self.deviations += 1
            if self._due("plan", now):
                log.warning(
                    "vLLM did not carry out the plan of step %d: %s; such steps so far: %d",
                    self.steps, _difference(planned, counts), self.deviations,
                )  # fmt: skip
        self.steps += 1
        self._flights.append(Flight(output, shape, self._last if self._busy else now))

    def completed(self, output: Any, outputs: Mapping[int, Any], now: float, unfinished: int) -> None:
        """A batch is done: learn its time, book its tokens. outputs: vLLM's EngineCoreOutputs by client."""
        flight = self._flights.popleft()
        if flight.output is not output:
            raise RuntimeError("vLLM completed a batch out of order: steps could not be told apart")
        if flight.shape.seqs:
            seconds = now - max(flight.since, self._last)
            self.latency.update(Sample(flight.shape, seconds))
            self._events.append(Stepped(now, NAME, flight.shape, seconds))
            self._last = now
        self._busy = flight.shape.seqs > 0 and unfinished > 0
        for core in outputs.values():
            for out in core.outputs:
                self._book(out, now)

    def _book(self, out: Any, now: float) -> None:
        seq = self.seqs.get(out.request_id)
        if seq is None:
            return  # over already: refused or aborted meanwhile
        if out.new_token_ids:
            seq.got([now] * len(out.new_token_ids))
            self._events.append(Tokens(now, seq.id, len(out.new_token_ids), token_ids=tuple(out.new_token_ids)))
        if out.finish_reason is not None:
            self.end(seq.id, "completed", "length" if str(out.finish_reason) == "length" else "stop")


def _difference(planned: Mapping[str, int], counts: Mapping[str, int]) -> str:
    parts = [
        f"{id:.100} {planned.get(id, 0)} tokens planned, {counts.get(id, 0)} scheduled"
        for id in sorted(planned.keys() | counts.keys())
        if planned.get(id) != counts.get(id)
    ]
    return "; ".join(parts[:8]) or "a prefix cache hit of another length than the plan saw"
