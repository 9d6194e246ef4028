"""Checks that a plan or a router's dispatch can be carried out, and that an engine's results fit the plan."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import chain
from math import inf
from typing import get_args

from rubato.core.events import CLIENT_ERRORS
from rubato.core.interfaces import MIN_WAKE_S, Dispatch, SeqView, View, nothing_sent
from rubato.core.plan import Emitted, Plan, Recall, Role, Tree, Work, blocks_for
from rubato.core.request import SATURATED, Request

PLACES_ONLY = Dispatch()[1:-1]  # the fields of a dispatch that only places, without `place` and `why`


class PlanError(RuntimeError):
    """A policy's plan or dispatch is impossible. The message names policy, request and numbers."""


def check(plan: Plan, view: View, policy: str) -> None:
    """Checks that `plan` can be carried out on `view`.

    It names known sequences, each once, and no more tokens than are pending, stays within the engine's limits and free
    KV, and is not idle while there is work.

    Raises:
        PlanError: it cannot.
    """
    if _is_plainly_possible(plan, view):
        return
    for problem in chain(_malformed_plan(plan), _problems(plan, view)):
        raise PlanError(f"policy {policy!r}, replica {view.id!r}, t={view.now:.6f}: {problem}")


def _is_plainly_possible(plan: object, view: View) -> bool:
    """Returns whether a plan of the usual kind, all decodes and at most one other sequence, is possible. False decides
    nothing."""
    if type(plan) is not Plan or not plan.decode_all or len(plan.work) > 1 or plan.preempt or plan.drop or plan.handoff:
        return False
    limits = view.limits
    if plan.demote or plan.promote or plan.without_kv:
        return False
    tokens = seqs = view.decodes.seqs
    need = view.decode_blocks
    for work in plan.work:
        seq = view.known.get(work.seq)
        if seq is None or type(work.tokens) is not int or work.verify or work.draft is not None:
            return False
        runs = work.seq in view.running_ids
        if not 1 <= work.tokens <= seq.pending or (seq.pending == 1 and runs):
            return False
        if not runs and limits.max_running is not None and len(view.running) >= limits.max_running:
            return False
        tokens += work.tokens
        seqs += 1
        need += _new_blocks(seq, work.tokens, limits.block_size)
    return 0 < seqs <= limits.max_num_seqs and tokens <= limits.max_num_batched_tokens and need <= view.kv_free


def spelled_out(plan: Plan, view: View) -> Plan:
    """Returns the plan with `decode_all` written as work, in order of start, before its other work."""
    if not plan.decode_all:
        return plan
    gone = {*plan.preempt, *plan.drop}
    decodes = (Work(s.id, 1) for s in view.running if s.pending == 1 and s.id not in gone)
    return plan._replace(work=(*decodes, *plan.work), decode_all=False)


def _malformed_plan(plan: object) -> Iterable[str]:
    """Yields what has a wrong type. An iterator would be exhausted once carried out; a reason must be text for the
    client."""
    if not isinstance(plan, Plan):
        yield f"plan returned {type(plan).__name__}: return a Plan"
        return
    for name, value in (("preempt", plan.preempt), ("demote", plan.demote), ("promote", plan.promote)):
        if type(value) is not tuple and (isinstance(value, str) or not isinstance(value, Collection)):
            yield f"{name} is {type(value).__name__}: give a tuple of request ids"
    for work in plan.work:
        if type(work.tokens) is not int and not hasattr(work.tokens, "__index__"):
            yield f"work gives {work.seq!r} {work.tokens!r} tokens: give a whole number"
    if plan.drop and not (isinstance(plan.drop, Mapping) and all(isinstance(why, str) for why in plan.drop.values())):
        yield f"drop is {plan.drop!r:.200}: give a mapping with a text for each request id"


def _problems(plan: Plan, view: View) -> Iterable[str]:
    """Yields problems as sentences; the first is reported. Later checks assume that earlier ones passed."""
    known, running = view.known, view.running_ids
    yield from _misnamed(plan, known)
    for id in plan.preempt:
        if id not in running:
            yield f"preempt names {id!r}, which holds no KV"
    for id, reason in plan.handoff.items():
        yield from _handoff(id, reason, known[id], view.supports, id in running, id in plan.without_kv)
    for id, why in plan.drop.items():
        seq = known[id]
        begun = id in running or not nothing_sent(seq)
        if why.startswith(CLIENT_ERRORS):
            yield f"drop refuses {id!r} as {why!r}: whether a request is at fault is not for a policy to say"
        if seq.request.on_decline != "refuse" and (begun or why != SATURATED):
            yield (
                f"drop names {id!r}, whose client asked for best effort when its SLO cannot be met: demote it, or, "
                f"where too many wait, refuse it as {SATURATED!r} before it has begun"
            )
    for id in plan.demote:
        if known[id].best_effort:
            yield f"demote names {id!r}, which is best effort already"
    for id in plan.promote:
        if not known[id].demoted:
            yield f"promote names {id!r}, which was not demoted"
    yield from _work(plan, view, known, running)
    decodes = view.decodes.seqs if plan.decode_all else 0
    decided = plan.work or decodes or plan.preempt or plan.demote or plan.promote or plan.drop or plan.handoff
    if known and not decided and plan.wake_at is None and not view.moving:  # moving requests free KV in the end
        yield f"nothing planned though {len(known)} requests are here, and no wake_at: they would wait for ever"
    if plan.wake_at is not None and not decided and not view.now < plan.wake_at < inf:
        yield f"nothing planned and wake_at {plan.wake_at:.6f} is no time in the future: it would spin, or never wake"


def _misnamed(plan: Plan, known: Mapping[str, SeqView]) -> Iterable[str]:
    """Yields problems with the names of sequences: unknown ones, and those named twice or in fields that exclude each
    other.
    """
    groups: dict[str, Collection[str]] = {
        "work": [w.seq for w in plan.work],
        "preempt": plan.preempt,
        "demote": plan.demote,
        "promote": plan.promote,
        "drop": plan.drop,
        "handoff": plan.handoff,
    }
    for group, ids in groups.items():
        if not ids or (len(set(ids)) == len(ids) and known.keys() >= set(ids)):
            continue
        seen: set[str] = set()
        for id in ids:
            if id not in known:
                yield f"{group} names {id!r}, which is neither waiting nor running here"
            if id in seen:
                yield f"{group} names {id!r} twice"
            seen.add(id)
    for id in plan.handoff:
        if id in plan.preempt or id in plan.drop:
            yield f"handoff names {id!r}, which the same plan preempts or drops"
    for id in plan.without_kv:
        if id not in plan.handoff:
            yield f"without_kv names {id!r}, which handoff does not"


def _handoff(
    id: str, reason: str, seq: SeqView, supports: frozenset[str], runs: bool, without_kv: bool
) -> Iterable[str]:
    """Yields problems with one handed-off request."""
    if "handoff" not in supports:
        yield f"handoff names {id!r}, and this replica has no other to hand it to"
    if reason == "recalled":
        yield f"handoff calls {id!r} recalled, which is the router's word: give prefilled, declined or offloaded"
    if runs and not without_kv and "kv_transfer" not in supports:
        yield f"handoff names {id!r}, whose KV this engine cannot export: name it in without_kv, too"
    if reason == "prefilled" and (not runs or seq.pending != 1):
        yield f"handoff calls {id!r} prefilled, and it has {seq.pending} tokens pending"
    if reason == "prefilled" and without_kv:
        yield f"handoff calls {id!r} prefilled, and without_kv gives up its KV"


def _work(plan: Plan, view: View, known: Mapping[str, SeqView], running: Collection[str]) -> Iterable[str]:
    """Yields problems with the batch: its entries, its size, its KV."""
    limits, supports = view.limits, view.supports
    gone = {*plan.preempt, *plan.drop, *plan.without_kv}
    free = view.kv_free + sum(known[id].own_blocks for id in gone)
    stay = len(running) - sum(id in running for id in gone)
    gone.update(plan.handoff)  # what goes with its KV holds it, and its slot, until it has left
    tokens = seqs = need = 0
    if plan.decode_all:
        leaving = [known[id] for id in gone if id in running and known[id].pending == 1]
        tokens = seqs = view.decodes.seqs - len(leaving)
        need = view.decode_blocks - sum(_new_blocks(seq, 1, limits.block_size) for seq in leaving)
    for work in plan.work:
        seq = known[work.seq]
        if plan.decode_all and work.seq in running and seq.pending == 1:
            yield f"work names {work.seq!r} beside decode_all, which it is among"
        if work.seq in gone:
            yield f"work names {work.seq!r}, which the same plan preempts, drops or hands off"
        count, pending = work.tokens, seq.pending
        if not 1 <= count <= pending:
            yield f"work gives {work.seq!r} {count} tokens, and it has {pending} pending"
        if work.verify or work.draft is not None:
            if problem := _speculation(work, seq, pending, supports):
                yield problem
            count += len(work.verify)
        tokens += count
        need += _new_blocks(seq, count, limits.block_size)
    if tokens > limits.max_num_batched_tokens:
        yield f"{tokens} tokens in a batch, the engine takes {limits.max_num_batched_tokens}"
    seqs += len(plan.work)
    if seqs > limits.max_num_seqs:
        yield f"{seqs} sequences in a batch, the engine takes {limits.max_num_seqs}"
    started = sum(w.seq not in running for w in plan.work)
    if limits.max_running is not None and stay + started > limits.max_running:
        yield f"{started} started beside {stay} that run on, the engine holds {limits.max_running} at once"
    if need > free:
        yield f"{need} new KV blocks needed, {free} of {view.kv_total} free after the plan's own preemptions"


def check_dispatch(
    dispatch: Dispatch, held: Sequence[SeqView], fleet: Sequence[View], now: float, policy: str, *, placed: int,
    replicas: Collection[str],
) -> None:  # fmt: skip
    """Checks that `dispatch` can be carried out: held requests, each either placed or rejected, replicas of the fleet,
    KV not sent to its source, and not idle where nothing else would call the router again.

    Args:
        dispatch: to check.
        held: as passed to the router.
        fleet: as passed to the router.
        now: as passed to the router, in seconds.
        policy: name of the router, for the message.
        placed: number of requests on replicas, which will end or come back.
        replicas: the ids of the fleet.

    Raises:
        PlanError: the dispatch is impossible.
    """
    if _is_plain_placement(dispatch, held, replicas):
        return
    for problem in chain(_malformed_dispatch(dispatch), _dispatch_problems(dispatch, held, fleet, now, placed)):
        raise PlanError(f"policy {policy!r}, router, t={now:.6f}: {problem}")


def _fits(request: Request, view: View) -> bool:
    """Returns whether the replica could run the request alone."""
    most = request.prompt + request.sampling.max_tokens
    return most <= view.limits.max_model_len and view.limits.blocks(most) <= view.kv_total


def _is_plain_placement(dispatch: object, held: Sequence[SeqView], replicas: Collection[str]) -> bool:
    """Returns whether the dispatch only places, and correctly. False decides nothing."""
    if type(dispatch) is not Dispatch or type(dispatch.place) is not dict or dispatch[1:-1] != PLACES_ONLY:
        return False
    place, why = dispatch.place, dispatch.why
    if why and not (
        type(why) is dict and why.keys() <= place.keys() and all(type(w) is str and w for w in why.values())
    ):
        return False
    known = {seq.id for seq in held if seq.request.handoff is None}
    misplaced = [to for to in place.values() if type(to) is not str or to not in replicas]
    return bool(place) and place.keys() <= known and not misplaced


def _malformed_dispatch(dispatch: object) -> Iterable[str]:
    """Yields what has a wrong type, before the dispatch is used."""
    if not isinstance(dispatch, Dispatch):
        yield f"place returned {type(dispatch).__name__}: return a Dispatch"
        return
    for name in ("place", "reject", "recall", "why"):
        value = getattr(dispatch, name)
        if not isinstance(value, Mapping):
            yield f"{name} is {type(value).__name__}: give a mapping"
        elif not all(isinstance(v, str) and v for v in value.values()):
            yield f"{name} is {dict(value)!r}: give a text for each"
    if not isinstance(dispatch.assign, Mapping) or not all(isinstance(v, Role) for v in dispatch.assign.values()):
        yield f"assign is {dispatch.assign!r}: give a mapping with a Role for each replica"
    if isinstance(dispatch.demote, str) or not isinstance(dispatch.demote, Collection):
        yield f"demote is {dispatch.demote!r}: give a collection of request ids"
    if dispatch.wake_at is not None and not isinstance(dispatch.wake_at, int | float):
        yield f"wake_at is {dispatch.wake_at!r}: give seconds, or None"


def _dispatch_problems(
    dispatch: Dispatch, held: Sequence[SeqView], fleet: Sequence[View], now: float, placed: int
) -> Iterable[str]:
    """Yields problems as sentences; the first is reported. Later checks assume that earlier ones passed."""
    place, reject, demote, recall, wake_at, assign, why = dispatch
    seqs = {seq.id: seq for seq in held} if place or reject or demote else {}
    replicas = [view.id for view in fleet]
    unknown = "{} names {!r}, which is not among the {} held: it ended, or is placed already"
    for id, replica in place.items():
        if id not in seqs:
            yield unknown.format("place", id, len(held))
        if id in reject:
            yield f"place puts {id!r} on {replica!r}, and reject refuses it: choose one"
        if replica not in replicas:
            yield f"place puts {id!r} on {replica!r}, which is no replica: there are {', '.join(replicas)}"
        handoff = seqs[id].request.handoff
        if handoff is not None and handoff.cached and handoff.source == replica:
            yield (
                f"place puts {id!r} on {replica!r}, which had handed it off with its KV of {handoff.cached} tokens: "
                "place it on another, or hold it"
            )
    for id, why_not in reject.items():
        if id not in seqs:
            yield unknown.format("reject", id, len(held))
        if why_not.startswith(CLIENT_ERRORS) and all(_fits(seqs[id].request, view) for view in fleet):
            yield f"reject refuses {id!r} as {why_not!r}, a fault of the request that no replica finds in it"
    for id in demote:
        if id not in seqs:
            yield unknown.format("demote", id, len(held))
        if seqs[id].best_effort:
            yield f"demote names {id!r}, which is best effort already"
        if id in reject:
            yield f"demote names {id!r}, and reject refuses it: choose one"
    if demote and len(set(demote)) < len(demote):
        yield f"demote names a request twice: {', '.join(demote)}"
    for replica, kind in recall.items():
        if replica not in replicas:
            yield f"recall names {replica!r}, which is no replica: there are {', '.join(replicas)}"
        if kind not in get_args(Recall):
            yield f"recall asks {replica!r} for {kind!r}: give {' or '.join(get_args(Recall))}"
        if "recall" not in fleet[replicas.index(replica)].supports:
            yield f"recall names {replica!r}, which hands nothing back: let the router's `needs` say recall"
    for replica, role in assign.items():
        if replica not in replicas:
            yield f"assign names {replica!r}, which is no replica: there are {', '.join(replicas)}"
        view = fleet[replicas.index(replica)]
        coming = [s.id for s in view.moving if (h := s.request.handoff) and h.cached and h.source != replica]
        if coming and role.phase != view.role.phase:
            yield (
                f"assign turns {replica!r} from {view.role.phase} to {role.phase} while the KV of {coming[0]!r} is on "
                "its way there: wait until it has come"
            )
    for id in why:
        if id not in place:
            yield f"why explains {id!r}, which place does not name"
    if wake_at is not None and not now + MIN_WAKE_S <= wake_at < inf:
        yield f"wake_at {wake_at!r} is not {MIN_WAKE_S} s or more in the future: it would spin, or never wake"
    quiet = not (place or reject or placed) and not any(view.in_flight.seqs for view in fleet)
    if quiet and wake_at is None:
        yield (
            f"all of {len(held)} requests are held though the {len(fleet)} replicas have none, and no wake_at: they "
            "would wait for ever"
        )


def check_emitted(out: Emitted, seq: str, verify: Sequence[int], draft: Tree | None) -> None:
    """Checks that a sequence got the tokens of accepted nodes and one more: verified nodes of `draft`, each from the
    root on the child of the one before.

    Raises:
        RuntimeError: it got others.
    """
    if out.tokens != len(out.accepted) + 1:
        raise RuntimeError(
            f"engine emitted {out.tokens} tokens of {seq!r} with {len(out.accepted)} nodes accepted: give the "
            "tokens of these and one more"
        )
    before = -1
    for node in out.accepted:
        if draft is None or node not in verify or draft.parents[node] != before:
            raise RuntimeError(
                f"engine accepted nodes {out.accepted} of {seq!r}, of which {verify} were verified: give a "
                "path of these from the root on"
            )
        before = node


def _new_blocks(seq: SeqView, tokens: int, block: int) -> int:
    """Returns the KV blocks that a sequence lacks to run `tokens` more tokens."""
    return max(0, blocks_for(seq.cached + tokens, block) - seq.blocks)


def _speculation(work: Work, seq: SeqView, pending: int, supports: frozenset[str]) -> str:
    """Returns what is wrong with the verified nodes and the draft of a sequence's work; "" if nothing is."""
    id, tokens, verify, draft = work
    if "draft" not in supports:
        return f"work of {id!r} drafts or verifies, which this engine cannot"
    if tokens != pending:
        return f"work of {id!r} drafts or verifies beside {tokens} of {pending} pending tokens: give all"
    branches = draft is not None and draft[1] > 1
    if verify:
        tree = seq.draft.parents if seq.draft is not None else ()
        nodes = set(verify)
        if len(nodes) < len(verify) or min(nodes) < 0 or max(nodes) >= len(tree):
            return f"work verifies nodes {verify} of {id!r}, whose tree has {len(tree)}: name each once"
        parents = {tree[node] for node in verify}
        if not parents <= nodes | {-1}:
            return f"work verifies nodes {verify} of {id!r} without their parents"
        branches |= len(parents) < len(verify)
    if draft is not None and min(draft) < 1:
        return f"work drafts {draft} for {id!r}: give a depth and a width of 1 or more"
    if branches and "tree" not in supports:
        return f"work of {id!r} has a tree that branches, and this engine verifies chains only"
    return ""
