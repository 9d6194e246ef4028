"""Moves requests between replicas: how a replica hands them off, and how it receives them with their KV.

A request that a plan hands off with its KV leaves this replica, which only keeps that KV until `release`. On the next
replica `reserve` and `arrive` replace `Replica.submit`. Requests that a router recalls (`recall`) are handed off
without KV before the next plan (`hand_back`).
"""

from __future__ import annotations

from dataclasses import replace

from rubato.core.events import Event, HandedOff, Transferred
from rubato.core.plan import Recall
from rubato.core.request import Cause, Handoff, HandoffReason, Request
from rubato.replica.sequence import Seq, Wait
from rubato.replica.state import ReplicaState, order_of, refusal_reason


def reserve(replica: ReplicaState, request: Request, now: float) -> list[Event] | None:
    """Reserves KV for a request that another replica handed off with its KV.

    A request that could never run is refused.

    Returns:
        the events; None while too little KV is free.
    """
    handoff = request.handoff
    assert handoff is not None, "what was not handed off is submitted"
    seq = replica.make_seq(request, now)
    if reason := refusal_reason(request, replica.limits):
        return [replica.judge_end(seq, now, "refused", reason)]
    most = replica.limits.max_running
    if most is not None and len(replica.running) + len(replica.migrating_out) + len(replica.migrating_in) >= most:
        return None
    if replica.limits.blocks(handoff.cached) > replica.kv.free:
        return None
    replica.kv.reserve(seq, handoff.cached)
    seq.cached = handoff.cached
    seq.waiting_since = handoff.at
    replica.seqs[request.id] = replica.migrating_in[request.id] = seq
    return []


def arrive(replica: ReplicaState, id: str, size: int, now: float) -> list[Event]:
    """Runs a reserved request, whose KV of `size` bytes has arrived."""
    seq = replica.migrating_in.pop(id)
    assert seq.request.handoff is not None
    replica.run_from_now(seq, now, "transfer")
    replica.show(seq)
    if replica.kv.by_block:
        replica.kv.name(seq, 0)
    replica.proceed(seq)
    return [Transferred(now, id, replica.id, seq.request.handoff.source, seq.cached, size)]


def release(replica: ReplicaState, id: str) -> bool:
    """Frees the KV of a request that was handed off, or reserved and will not come. Returns whether there was any."""
    seq = replica.migrating_out.pop(id, None)
    if seq is None:
        seq = replica.migrating_in.pop(id, None)
        if seq is None:
            return False
        del replica.seqs[id]
    replica.kv.release(seq)
    replica.gone_ids.append(id)
    return True


def recall(replica: ReplicaState, kind: Recall) -> bool:
    """Marks requests for `hand_back`: those without KV, or the best-effort ones, but none that moves or waits for a
    tool. Returns whether there are any."""
    present = [s for s in replica.seqs.values() if not (s.ended or s.waiting_for_tool or s.id in replica.migrating_in)]
    marked = [s for s in present if (s.best_effort if kind == "best_effort" else s.id not in replica.running)]
    replica.recalled += marked
    return bool(marked)


def hand_back(replica: ReplicaState, now: float) -> list[Event]:
    """Hands off recalled requests that are still here, in the order of the queue; never while a batch is in flight."""
    marked, replica.recalled = replica.recalled, []
    present = {s.id: s for s in marked if replica.seqs.get(s.id) is s and not s.waiting_for_tool}  # each once
    for seq in sorted(present.values(), key=order_of):
        replica.events.append(hand_off(replica, seq, "recalled", now, with_kv=False))
    return replica.take_events()


def hand_off(replica: ReplicaState, seq: Seq, reason: HandoffReason, now: float, *, with_kv: bool) -> Event:
    """Gives up a request, which continues on another replica."""
    runs = seq.id in replica.running
    if not runs:
        cause: Cause = "preemption" if seq.started else "queue"
        seq.waits.append(Wait(replica.steps.tick, now - seq.waiting_since, cause, False))
    delays = replica.delays(seq)
    replica.hide(seq)
    del replica.seqs[seq.id]
    replica.groups.leave(seq)
    cached = 0
    if runs and with_kv:
        replica.run_no_longer(seq)
        replica.migrating_out[seq.id] = seq
        cached = seq.cached
    else:
        if runs:
            replica.stop(seq)
        replica.gone_ids.append(seq.id)
    output = seq.total_output
    if replica.output_ids is not None and seq.token_ids is not None:
        seq.token_ids += replica.output_ids(len(seq.token_ids), output)
    handoff = Handoff.after(seq.request.handoff, replica.id, reason, now, cached)
    progress = seq.progress(delays) if output > 0 or seq.demoted or delays else None
    return HandedOff(now, seq.id, replace(seq.request, group="", progress=progress, handoff=handoff))
