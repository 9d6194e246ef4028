"""Decides and records each step inside vLLM: the policy, its view, its plan and its latency model.

No vLLM code is called here, so this works with each of vLLM's schedulers. A fault here is counted and logged, and never
reaches vLLM.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from math import inf
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from rubato.core.capabilities import cure
from rubato.core.clock import WallClock
from rubato.core.events import Demoted, Promoted, Stepped, Tokens
from rubato.core.interfaces import View
from rubato.core.length_prediction import DEFAULT_LENGTHS, PREDICTORS
from rubato.core.plan import Limits, Plan, Sample, Shape
from rubato.engines.vllm.core_link import CoreLink
from rubato.engines.vllm.drafts import VllmDrafts
from rubato.engines.vllm.due_columns import DueColumns
from rubato.engines.vllm.gateway_commands import GatewayCommands
from rubato.engines.vllm.guards import Guard, guarded
from rubato.engines.vllm.open_requests import OpenRequests
from rubato.engines.vllm.reporting import Reporting
from rubato.engines.vllm.reports import REPLICA_NAME
from rubato.engines.vllm.sequence import VllmSeq
from rubato.engines.vllm.settings import Settings
from rubato.engines.vllm.slack import SlackCheck
from rubato.engines.vllm.step_parts import (
    InFlightBatch,
    PlannedStep,
    Schedulable,
    VllmView,
    chunks_of,
    runs_all_decodes,
)
from rubato.latency import affine
from rubato.policies import PolicyError, default_lengths, load, optional
from rubato.policy_kit.fair_share import FairShare
from rubato.replica.plan_check import check, spelled_out
from rubato.wire.messages import CoreAbout

if TYPE_CHECKING:
    from rubato.engines.vllm.kv_view import HitEnds, KVView

SUPPORTS = frozenset({"chunked", "preempt", "mixed"})
FLEET_SUPPORTS = frozenset({"handoff", "recall"})  # with a gateway
ORDER = attrgetter("order")


class PolicyDriver:
    """Drives one vLLM engine core by one policy.

    `requests` owns the open requests, `commands` the core's part in a fleet, `reporting` what is passed on, `guard` the
    counts of steps and faults; `slack` tells whether vLLM's own order keeps every SLO.

    Args:
        fair: holds requests of tenants over their share back from the policy.
        trust_client_slos: clients may set SLOs themselves.
        link: to vLLM's API servers, and to gateways if the engine is one of a fleet.
        engine: number of the engine in its server.
        kv_lease: seconds that KV stays here for another engine (`kv_transfer`); None: no KV leaves.
    """

    def __init__(
        self, settings: Settings, limits: Limits, kv: KVView, num_spec_tokens: int = 0, *,
        fair: FairShare | None = None, trust_client_slos: bool = True, link: CoreLink | None = None, engine: int = 0,
        kv_lease: float | None = None,
    ) -> None:  # fmt: skip
        self.name = settings.policy
        self.policy = load(settings.policy, settings.settings)
        self.supports = SUPPORTS | {"draft"} if num_spec_tokens else SUPPORTS
        self.reporting = Reporting(link, engine)
        if self.reporting.gateways is not None:
            self.supports |= FLEET_SUPPORTS if kv_lease is None else FLEET_SUPPORTS | {"kv_transfer"}
        if missing := self.policy.needs - self.supports:
            words = ", ".join(sorted(missing))
            drafter = "" if num_spec_tokens else "--speculative-config"
            raise PolicyError(f"policy {self.name!r} needs {words}, which vLLM lacks for us: {cure(missing, drafter)}")
        self.limits, self._kv, self._slo_rule = limits, kv, settings.slo_rule
        self.latency = affine.Model(**settings.latency)
        self.clock = WallClock()
        self.guard = Guard(self.name, self.clock, self.reporting.stop_policy)
        planned = "draft" in self.policy.needs | optional(self.policy)
        self.drafts = VllmDrafts(num_spec_tokens, planned=planned, uniform=settings.uniform_drafts)
        may_stand_aside = settings.stand_aside and not (planned and num_spec_tokens)  # drafts are more than an order
        self.slack = SlackCheck(1 + num_spec_tokens, kv.lookahead_tokens, is_on=may_stand_aside)
        lengths = settings.lengths
        if lengths == "":
            lengths = default_lengths(settings.policy) or DEFAULT_LENGTHS
        self.requests = OpenRequests(
            limits, kv, self.latency, self.clock, self.guard, self.reporting, self.slack,
            lengths=None if lengths is None else PREDICTORS[lengths](), slo_rule=settings.slo_rule, fair=fair,
            trust_client_slos=trust_client_slos, kv_lease=kv_lease,
        )  # fmt: skip
        self.commands = GatewayCommands(self.requests, self.reporting, self.clock, self.guard, self.slack)
        self._batches: deque[InFlightBatch] = deque()
        self._last = -inf  # when the last batch completed
        self._view_asked_at = inf  # when a view was first asked for
        self._planned: PlannedStep | None = None  # the last plan
        self._is_busy = False  # there was more to do then
        # The last view's running requests: the state that they were found in, vLLM's, and ours.
        self._found: tuple[int, list[Any], Sequence[VllmSeq], Collection[str], DueColumns] | None = None
        # The last view's waiting requests: the state that they were shown in, vLLM's queue (so that no other list gets
        # its place in memory), what tells whether their hits are current, and the sequences.
        self._shown: tuple[tuple[int, int, bool], Sequence[Any], HitEnds, tuple[VllmSeq, ...]] | None = None

    def open_link(self, *, model: str, vllm: str, rubato: str) -> None:
        """Starts the link: the engine is ready. It tells the model's name, and the versions of vLLM and Rubato."""
        link, gateways = self.reporting.link, self.reporting.gateways
        if link is None:
            return

        def about() -> CoreAbout:
            latency, supports = self.latency.to_dict(), tuple(sorted(self.supports))
            return CoreAbout(self.name, supports, self.limits, latency, self.requests.kv_lease, model, vllm, rubato)

        if gateways is not None:
            gateways.begin(self.clock.now(), self._kv.free())
        link.start(about, self.clock.now)

    # ----------------------------------------------------------------- one step

    def view(self, schedulable: Schedulable) -> VllmView:
        """Returns the policy's view. Requests that are not known here are left out."""
        waiting, running, moving, places, kv_taken = schedulable
        now, seqs, hidden = self.clock.now(), self.requests.seqs, self.commands.hidden_ids
        if hidden:
            seqs = {id: seq for id, seq in seqs.items() if id not in hidden}
        self._view_asked_at = min(self._view_asked_at, now)
        if not self._batches:
            self.latency.idle(now - max(self._last, self._view_asked_at))
        queued = self._show_waiting(waiting, seqs, now)
        holding, running_ids, due_columns = self._find_running(running, seqs, now)
        places += len(running) - len(holding)
        prefilling, decodes, decode_kv, blocks = self._count_running(holding)
        due_columns.begin_view()
        self.drafts.show(holding)
        others = [seq for r in moving if (seq := seqs.get(r.request_id)) is not None]
        for seq in others:
            seq.show_moving()
        others += self.requests.leaving.values()
        limits = self._limits_without(places)
        return VllmView(
            id=REPLICA_NAME, now=now, waiting=queued, running=holding, moving=others,
            kv_free=max(0, self._kv.free() - kv_taken), kv_total=limits.kv_blocks, limits=limits, latency=self.latency,
            supports=self.supports - {"handoff"} if self.requests.untracked and not hidden else self.supports,
            role=self.commands.role, running_ids=running_ids, prefilling=prefilling,
            decodes=Shape.decodes(decodes, decode_kv + decodes), decode_blocks=blocks, slo_rule=self._slo_rule,
            due_columns=due_columns,
        )  # fmt: skip

    def _find_running(
        self, running: Sequence[Any], known: Mapping[str, VllmSeq], now: float
    ) -> tuple[Sequence[VllmSeq], Collection[str], DueColumns]:
        """Returns the running sequences in order of start, their ids and due times: looked up again only if something
        but tokens came or went, since most steps run the same requests."""
        changes = self.requests.changes if known is self.requests.seqs else -1
        if self._found is not None and changes == self._found[0] and running == self._found[1]:
            return self._found[2:]
        holding = [seq for r in running if (seq := known.get(r.request_id)) is not None]
        for seq in holding:
            seq.waiting = False
            if seq.arriving:
                self.requests.take_kv(seq, now, seq.vllm_request.num_computed_tokens)
        ids = {seq.id for seq in holding}
        due_columns = DueColumns(holding)
        self._found = None if changes < 0 else (changes, list(running), holding, ids, due_columns)
        return holding, ids, due_columns

    def _count_running(self, holding: Sequence[VllmSeq]) -> tuple[list[VllmSeq], int, int, int]:
        """Returns those that prefill of the running sequences, and of those that decode the number, the tokens in KV,
        and the blocks that their next tokens need."""
        block, ahead, decodes, decode_kv, blocks = self.limits.block_size, self._kv.lookahead_tokens, 0, 0, 0
        prefilling = []
        for seq in holding:  # without calls of ours: for each decode in every step
            vllm_request = seq.vllm_request
            cached = vllm_request.num_computed_tokens
            if vllm_request.num_tokens + vllm_request.num_output_placeholders - cached != 1:
                prefilling.append(seq)
                continue
            decodes += 1
            decode_kv += cached
            if ahead:
                blocks += max(0, cached // block + 1 - seq.blocks)
            elif cached % block == 0:  # else there is room in its last block
                blocks += seq.blocks * block <= cached
        return prefilling, decodes, decode_kv, blocks

    def _show_waiting(self, queue: Sequence[Any], known: Mapping[str, VllmSeq], now: float) -> Sequence[VllmSeq]:
        """Returns the waiting sequences in their order, each with its prefix cache hit: the same tuple while nothing
        but time passes for any of them."""
        kv, state = self._kv, (id(queue), self.requests.changes, known is self.requests.seqs)
        if self._shown is not None and state == self._shown[0] and kv.are_current(self._shown[2]):
            return self._shown[3]
        waiting = sorted([seq for r in queue if (seq := known.get(r.request_id)) is not None], key=ORDER)
        is_current = kv.is_current
        for seq in waiting:
            if seq.waiting and seq.hit is not None and is_current(seq.hit):
                continue  # as in the last view
            seq.show_waiting(kv.refresh_hit(seq).tokens)
        over_share = self.requests.ids_over_share(now, self.latency)
        shown = tuple([seq for seq in waiting if seq.id not in over_share])
        ends = None if over_share or known is not self.requests.seqs else kv.hit_ends([kv.look_up(s) for s in shown])
        self._shown = None if ends is None else (state, queue, ends, shown)
        return shown

    def _limits_without(self, places: int) -> Limits:
        """Returns the limits for the policy: less the unplanned requests and the `places` of requests in no view."""
        limits = self.limits
        if unplanned := len(self.commands.unplanned_ids):
            limits = replace(limits, max_num_seqs=limits.max_num_seqs - unplanned)
        if places and limits.max_running is not None:
            limits = replace(limits, max_running=max(0, limits.max_running - places))
        return limits

    @guarded
    def observe(self, view: View) -> bool:
        """Passes events to the policy, before each step. Returns whether vLLM schedules the step, because every SLO has
        slack."""
        over_share = self.requests.over_share
        if self.reporting.api_servers is not None:
            self.reporting.api_servers.add_view(view, over_share)
        self.policy.observe(self.reporting.take_policy_events())
        if over_share or not self.slack.all_within_slo(view):
            return False
        self.guard.stood_aside += 1
        self.slack.set_stable_steps(view, len(self.requests.seqs))
        return True

    def keep_default(self) -> bool:
        """Returns whether vLLM schedules this step, as it did the last one: only decodes run, each within its TPOT, and
        no request came or went. Counts the step."""
        is_kept = self.slack.take_stable_step()
        self.guard.stood_aside += is_kept
        return is_kept

    @guarded
    def plan(self, view: VllmView) -> PlannedStep | None:
        """Returns the policy's checked plan; None if the policy raises or plans the impossible: vLLM then schedules the
        step in its own order."""
        if not view.waiting and not view.running:
            return PlannedStep(view, Plan(), {}, {})
        plan = self.policy.plan(view)
        check(plan, view, self.name)
        if self.drafts.max_tokens:
            plan = spelled_out(plan, view)
            chunks = self.drafts.chunks(plan, view, self.requests.seqs)
            step = PlannedStep(view, plan, chunks, self.drafts.depths(plan))
        else:
            step = self._planned = PlannedStep(view, plan, chunks_of(plan, view), {})
        seconds = self.clock.now() - view.now
        if self.reporting.api_servers is not None:
            self.reporting.api_servers.planned.append(seconds)
        self.guard.record_plan(seconds)
        return step

    @guarded
    def shift(self, plan: Plan) -> None:
        """Records a plan's demotions and promotions."""
        if not (plan.demote or plan.promote):
            return
        now, seqs = self.clock.now(), self.requests.seqs
        for id in plan.demote:
            seqs[id].demoted = True
            self.requests.record(seqs[id], Demoted(now, id))
        for id in plan.promote:
            seqs[id].demoted = False
            self.requests.record(seqs[id], Promoted(now, id))

    # ----------------------------------------------------------------- what vLLM did

    @guarded
    def scheduled(self, now: float, output: Any, requests: Mapping[str, Any], depths: Mapping[str, int] | None) -> None:
        """Records the batch that vLLM made.

        Args:
            now: when vLLM began to schedule it (s).
            output: vLLM's SchedulerOutput.
            requests: vLLM's requests by id.
            depths: tokens to draft of each request; None: vLLM's own number.
        """
        sampling: list[VllmSeq] = []
        seqs, entries, drafting = self.requests.seqs, list[tuple[int, int]](), list[tuple[int, int]]()
        most, decodes, kv, step = self.drafts.max_tokens, 0, 0, self._planned
        self._planned = None
        first_due = step.view.due_columns.first_unmissed() if step is not None else -inf
        if step is not None and runs_all_decodes(step) and step.chunks == output.num_scheduled_tokens:
            view = step.view
            for seq in (sampling := [seqs[id] for id in step.chunks]):
                seq.expected_tokens += 1
            self._begin(now, output, view.decodes, view.decodes, sampling, first_due)
            return
        drafts = most > 0 and not getattr(output, "skip_drafts", False)  # from vLLM 0.33 on
        for id, tokens in output.num_scheduled_tokens.items():
            vllm_request, known = requests[id], seqs.get(id)
            begun = vllm_request.num_computed_tokens - tokens
            if tokens == 1:
                decodes, kv = decodes + 1, kv + begun + 1
            else:
                entries.append((tokens, begun))
            if not vllm_request.is_prefill_chunk:
                if drafts and (depth := most if depths is None else depths.get(id, 0)):
                    drafting.append((depth, 1))
                if known is not None:
                    known.expected_tokens += 1
                    sampling.append(known)
            if known is not None and known.arriving:  # in no view yet
                self.requests.take_kv(known, now, begun)
            elif known is not None and known.waiting:
                self.requests.start(known, now, begun)
        of_decodes = Shape.decodes(decodes, kv)
        self._begin(now, output, of_decodes.with_entries(entries, drafting), of_decodes, sampling, first_due)

    def _begin(
        self, now: float, output: Any, shape: Shape, decodes: Shape, sampling: Sequence[VllmSeq], first_due: float
    ) -> None:
        """Records a batch that begins. The arguments are those of `InFlightBatch`."""
        self.guard.steps += 1
        self.requests.kv_arrived.difference_update(output.num_scheduled_tokens)
        since = self._last if self._is_busy else now
        self._batches.append(InFlightBatch(output, shape, decodes, since, sampling, first_due))
        gateways = self.reporting.gateways
        if gateways is not None and shape.seqs:
            seconds = self.latency.step_time(shape) if gateways.link.listeners else 0.0
            gateways.batch(now, shape, seconds, output.num_scheduled_tokens, self._kv.free(), self.requests.seqs)

    @guarded
    def completed(self, output: Any, outputs: Mapping[int, Any], now: float, unfinished: int) -> None:
        """Records the end of a batch: its time and its tokens.

        Args:
            output: vLLM's SchedulerOutput.
            outputs: vLLM's EngineCoreOutputs by client.
            now: when the batch ended (s).
            unfinished: number of vLLM's requests that have not ended.
        """
        while self._batches and (flight := self._batches.popleft()).output is not output:
            self.guard.count_fault("unknown batch")  # its beginning was not noted for a fault, or its end
        for sampled in flight.sampling:
            sampled.expected_tokens -= 1
        done = None
        if flight.shape.seqs:
            seconds = now - max(flight.since, self._last)
            self._last = now
            done = flight.shape, seconds
            if seconds > 0.0:
                self.latency.update(Sample(flight.shape, seconds))
            self.requests.miss_causes.add_step(now, seconds, flight.shape, flight.decodes)
            self.reporting.queue_for_policy(Stepped(now, REPLICA_NAME, flight.shape, seconds))
            if self.reporting.api_servers is not None:
                self.reporting.api_servers.batches.append((flight.shape.tokens, flight.shape.seqs, seconds))
        self._is_busy = flight.shape.seqs > 0 and unfinished > 0
        drafted, seqs, gateways = output.scheduled_spec_decode_tokens, self.requests.seqs, self.reporting.gateways
        is_read = not getattr(self.policy, "can_skip_tokens", False) or (
            gateways is not None and gateways.link.listeners
        )
        all_in_time = now <= flight.first_due
        for core in outputs.values():
            for out in core.outputs:
                seq, ids = seqs.get(out.request_id), out.new_token_ids
                if seq is None or len(ids) != 1 or drafted or not seq.reported_tokens or seq.prefill_only:
                    self._book(out, now, len(drafted.get(out.request_id, ())) if drafted else 0)
                    continue
                place = seq._output
                if all_in_time and place == seq._checked:
                    seq.times[-1].append(now)
                    seq._output = seq._checked = place + 1
                else:
                    seq.add_decoded(now)
                if is_read:
                    self.reporting.record_tokens(Tokens(now, seq.id, 1, "", tuple(ids)))
                if out.finish_reason is not None:
                    self.requests.finish(seq.id, out.finish_reason)
        self.report(idle=not self._is_busy, done=done)

    def _book(self, out: Any, now: float, drafted: int) -> None:
        """Records the output of one request in a batch; so many tokens of it were drafted."""
        seq = self.requests.seqs.get(out.request_id)
        if seq is None:
            return  # over already: refused or aborted meanwhile
        if seq.prefill_only and out.kv_transfer_params is not None:
            tokens = seq.vllm_request.num_prompt_tokens - 1  # the last one is run where it goes on
            self.requests.hand_off(seq.id, "prefilled", max(1, tokens))
            return
        ids = out.new_token_ids
        if ids:
            seq.add_tokens([now] * len(ids))
            if not seq.reported_tokens:
                seq.reported_tokens = len(ids)
                if self.reporting.api_servers is not None:
                    self.reporting.api_servers.add_tokens(seq, len(ids), now)
            right = len(ids) - 1 if drafted else 0
            tried = min(drafted, right + 1)
            if drafted:
                self.drafts.record_verified(seq, tried, right)
            accepted = tuple(range(right))
            self.reporting.record_tokens(Tokens(now, seq.id, len(ids), "", tuple(ids), tried=tried, accepted=accepted))
        if out.finish_reason is not None:
            self.requests.finish(seq.id, out.finish_reason)

    def report(self, *, idle: bool = False, done: tuple[Shape, float] | None = None) -> None:
        """Reports the latest events to API servers and gateways. A fault loses this report only: API servers learn of
        missed ends from later lists of open requests, and gateways notice the gap.

        Args:
            idle: nothing runs.
            done: a completed batch, and its seconds.
        """
        try:
            now, seqs, gateways = self.clock.now(), self.requests.seqs, self.reporting.gateways
            if gateways is not None:
                batches = [flight.output.num_scheduled_tokens for flight in self._batches if flight.shape.seqs]
                free = self._kv.free() if gateways.link.listeners or not seqs else 0
                gateways.step(now, done, free, seqs, self.requests.leaving, batches)
            if self.reporting.api_servers is not None:
                self.reporting.api_servers.send(now, self._state, seqs, idle=idle)
        except Exception:
            message = "step %d is not reported to vLLM's API servers: their metrics lack it"
            self.guard.record_harmless_fault("report", message, self.guard.steps)

    def _state(self) -> dict[str, Any]:
        guard, link, drafts = self.guard, self.reporting.link, self.drafts
        return {
            "policy": self.name,
            "steps": guard.steps,
            "fallbacks": guard.fallbacks,
            "stood_aside": guard.stood_aside,
            "link_refused": 0 if link is None else link.refusals,
            "deviations": dict(guard.deviations),
            "faults": dict(guard.faults),
            "given_up": guard.has_given_up,
            "drafted": {"accepted": drafts.right, "rejected": drafts.tried - drafts.right},
            "step_seconds_off": self.latency.spread,
            "kv_free": self._kv.free(),
        }
