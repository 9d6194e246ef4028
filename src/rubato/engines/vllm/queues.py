"""vLLM's queues as a step needs them: which requests can be scheduled now, and which the plan leaves out."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.request_queue import SchedulingPolicy, create_request_queue
from vllm.v1.request import RequestStatus

from rubato.engines.vllm.kv_view import KVView
from rubato.engines.vllm.policy_driver import PolicyDriver
from rubato.engines.vllm.step_parts import Schedulable


class Queues:
    """Reads and sets the queues of one of vLLM's schedulers.

    `unseen_ids` has requests that a View cannot show: vLLM schedules them by its own rule. `kv_arrived` has requests
    with KV from another engine that have not started.

    Args:
        overlaps: batches run while others are scheduled.
    """

    def __init__(self, scheduler: Any, driver: PolicyDriver, kv: KVView, *, overlaps: bool) -> None:
        self.unseen_ids: set[str] = set()
        self.kv_arrived: list[Any] = []
        self._kv_pulls: list[Any] = []  # requests whose KV this step asks for
        self._plain_queue: list[Any] = []  # vLLM's queue when it last held nothing but requests that can start
        self._scheduler, self._driver, self._kv, self._overlaps = scheduler, driver, kv, overlaps

    def schedulable(self) -> Schedulable:
        """Returns the requests that can be scheduled now: fewer in a paused engine, and none that waits for a
        grammar."""
        scheduler, requests = self._scheduler, self._driver.requests
        waiting: list[Any] = []
        running: list[Any] = []
        moving: list[Any] = []
        self.kv_arrived, self._kv_pulls, kv_taken = [], [], 0
        if scheduler.pause_state != PauseState.PAUSED_ALL:
            for request in list(scheduler.kv_holding_waiting):
                id = request.request_id
                if not self._is_ready(request):
                    moving.append(request)
                elif id in requests.kv_arrived or (self._comes_with_kv(id) and request.num_computed_tokens):
                    self.kv_arrived.append(request)
                elif not self._comes_with_kv(id):
                    waiting.append(request)
                else:  # the transfer has failed
                    scheduler.kv_holding_waiting.remove_requests([request])
                    scheduler.waiting.prepend_request(request)
                    requests.kv_missed(id)
            if not self._overlaps:
                running = scheduler.running
            for request in scheduler.running if self._overlaps else ():
                (running if self._has_tokens_to_run(request) else moving).append(request)
        if scheduler.pause_state == PauseState.UNPAUSED:
            queued = self._startable()
            waiting = [*waiting, *queued] if waiting else queued
            if requests.arriving:
                coming = [r for r in waiting if self._comes_with_kv(r.request_id)]
                kv_taken = self._choose_pulls(coming)
                moving += [r for r in coming if self._comes_with_kv(r.request_id)]
                waiting = [r for r in waiting if not self._comes_with_kv(r.request_id)]
        # In the V2 runner a streamed input that waits for its next part keeps its slot, and a request whose KV has come
        # has none yet.
        slots_taken = len(scheduler.running) + scheduler.num_waiting_for_streaming_input
        slots_left = max(0, scheduler.max_num_active_reqs - slots_taken)
        moving += self.kv_arrived[slots_left:]
        del self.kv_arrived[slots_left:]
        places = slots_taken - len(running)
        return Schedulable(waiting, [*running, *self.kv_arrived], moving, places, kv_taken)

    def _startable(self) -> list[Any]:
        """Returns the requests of vLLM's queue that can start: the same list while all can and the queue stays as it
        is."""
        queue, plain = list(self._scheduler.waiting), (RequestStatus.WAITING, RequestStatus.PREEMPTED)
        if queue != self._plain_queue:
            if any(r.status not in plain or r.num_stale_output_tokens for r in queue):
                return [r for r in queue if self._is_ready(r)]
            self._plain_queue = queue
        return self._plain_queue

    def _comes_with_kv(self, id: str) -> bool:
        """Returns whether a request in view waits for its KV from another engine."""
        return id in self._driver.requests.arriving and id not in self._driver.commands.hidden_ids

    def _choose_pulls(self, coming: Iterable[Any]) -> int:
        """Chooses the requests whose KV this step asks for, in order, as far as memory goes. Returns the blocks that
        they take."""
        requests, free, blocks_taken = self._driver.requests, self._kv.free(), 0
        for request in coming:
            if not self._kv.comes_later(requests.seqs[request.request_id]):
                requests.kv_missed(request.request_id)
                continue
            needed = self._driver.limits.blocks(request.num_tokens)
            if blocks_taken + needed > free:
                break
            blocks_taken += needed
            self._kv_pulls.append(request)
        return blocks_taken

    def _is_ready(self, request: Any) -> bool:
        """Returns whether a waiting request can be started; with the side effects of vLLM's own check."""
        if request.status != RequestStatus.WAITING and not self._scheduler._handle_blocked_waiting_request(request):
            return False
        return not request.num_stale_output_tokens

    def _has_tokens_to_run(self, request: Any) -> bool:
        """Returns whether vLLM would schedule a running request: its next token may be in flight still (pipeline
        parallel), or surely be its last (asynchronous scheduling)."""
        placeholders, computed = request.num_output_placeholders, request.num_computed_tokens
        if placeholders:
            if computed + 2 - placeholders >= request.num_prompt_tokens + request.max_tokens:
                return False
            if self._scheduler.current_step + 1 < request.next_decode_eligible_step:
                return False
        if computed + 1 >= self._scheduler.max_model_len:
            return False
        return bool(request.num_tokens + placeholders > computed)

    def set_aside(self, starting: Sequence[Any]) -> tuple[Any, Any]:
        """Leaves three kinds of requests in vLLM's queues: those that start, in this order, then those that no View
        shows, and those whose KV is asked for. Returns the queues with all others."""
        scheduler = self._scheduler
        queues = scheduler.waiting, scheduler.kv_holding_waiting
        self.unseen_ids.intersection_update(scheduler.requests)
        unseen = self.unseen_ids.union(self._driver.commands.unplanned_ids)
        for name, aside in zip(("waiting", "kv_holding_waiting"), queues, strict=True):
            remaining = create_request_queue(SchedulingPolicy.FCFS)
            if aside:
                holding = name == "kv_holding_waiting"
                remaining.extend(r for r in starting if scheduler._holds_kv_blocks(r) == holding)
                if unseen:
                    remaining.extend(r for r in aside if r.request_id in unseen)
                if not holding:  # last, since vLLM starts none behind one for which memory lacks after all
                    pulls = (r for r in self._kv_pulls if r.request_id in scheduler.requests and not r.is_finished())
                    remaining.extend(pulls)
                if remaining:
                    aside.remove_requests(remaining)
            setattr(scheduler, name, remaining)
        return queues

    def put_back(self, *queues: Any) -> None:
        """Puts the queues back that `set_aside` returned, with the requests that vLLM has left in its own in front."""
        for name, aside in zip(("waiting", "kv_holding_waiting"), queues, strict=True):
            for request in reversed(getattr(self._scheduler, name)):  # left, or preempted, by vLLM
                aside.prepend_request(request)
            setattr(self._scheduler, name, aside)
