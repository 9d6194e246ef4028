"""Accounts for a batch while a scheduler builds it: tokens, sequences, KV blocks, predicted seconds."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from math import inf

from rubato.core.interfaces import SeqView, View
from rubato.core.plan import NO_BATCH, Plan, Shape, Work, blocks_for
from rubato.core.request import NOTHING, HandoffReason

UNLIMITED_STEPS = 1 << 30


class BatchBuilder:
    """Builds a plan on a view, never beyond the engine's limits or the free KV.

    Args:
        view: to plan on.
        budget: tokens the batch may have; None: the engine's limit.
        steps: draft steps at its end, counted from the start on in `shape`; 0: those of the deepest draft that was
            added.
    """

    def __init__(self, view: View, budget: int | None = None, steps: int = 0) -> None:
        limits = view.limits
        self.view = view
        most_tokens = limits.max_num_batched_tokens
        self.tokens_left = most_tokens if budget is None else min(most_tokens, budget)
        self.seqs_left = limits.max_num_seqs
        self._block = limits.block_size
        self.kv_left = view.kv_free
        self.running = view.running_ids
        most = limits.max_running
        self.slots_left = len(view.waiting) if most is None else most - len(self.running)
        self.work: dict[str, Work] = {}
        self.preempted: list[SeqView] = []
        self.decode = False
        self._left_out: Sequence[SeqView] = ()  # running decodes without a token, although `decode` is set
        self._decodes: Shape | None = None
        self._steps = steps
        self._base: Shape | None = None  # the batch without those added since: few policies ask for its shape
        self._added: list[tuple[int, int]] = []
        self._drafts: list[tuple[int, int]] = []  # added since

    @property
    def shape(self) -> Shape:
        """Returns the shape of the batch so far."""
        shape = self._base
        if shape is None:
            shape = (self.decodes if self.decode else NO_BATCH)._replace(spec_steps=self._steps)
            for seq in self._left_out:
                shape = shape.minus(1, seq.cached)
        if self._added or self._drafts:
            shape = shape.with_entries(self._added, self._drafts)
            self._added.clear()
            self._drafts.clear()
        self._base = shape
        return shape

    @property
    def seqs(self) -> int:
        """Returns the number of sequences in the batch."""
        return self.view.limits.max_num_seqs - self.seqs_left

    @property
    def decodes(self) -> Shape:
        """Returns the view's decodes, computed once: the view may have to look at every sequence."""
        if self._decodes is None:  # not `cached_property`, whose lock costs more than all else here
            self._decodes = self.view.decodes
        return self._decodes

    def decode_all(self, but: Sequence[SeqView] = ()) -> bool:
        """Adds one token of every running decode except `but`; call it before anything else is added. Returns False,
        and adds nothing, if not all fit. With `but`, call `fold_decodes` at the end: a plan's `decode_all` cannot leave
        any out."""
        seqs, need = self.decodes.seqs - len(but), self.view.decode_blocks
        for seq in but:
            need -= max(0, self._more_blocks(seq, 1))
        if seqs > min(self.seqs_left, self.tokens_left) or need > self.kv_left:
            return False
        self.decode, self._left_out = seqs > 0, but if seqs > 0 else ()
        self.tokens_left -= seqs
        self.seqs_left -= seqs
        self.kv_left -= need
        self._base = None
        return True

    def repeat_steps(self) -> int:
        """Returns `Plan.repeat_steps` of a policy that gives each decode a token, spends a fixed budget's rest on
        prefill, and starts what fits, in order.

        Its plan repeats for ever while none prefills (what does not fit now will not: KV only shrinks), and when all
        prompts finish now, or the only one uses all the rest; else while one uses all the rest.
        """
        if not self.decode or self.preempted:
            return 0
        if not self.work:
            return UNLIMITED_STEPS
        seqs = self.view.known
        are_alone = len(self.work) == len(self.view.waiting) + len(self.view.prefilling)
        if len(self.work) == 1:
            [work] = self.work.values()
            pending = seqs[work.seq].pending
            if are_alone and (work.tokens == pending or not self.tokens_left):
                return UNLIMITED_STEPS
            return 0 if self.tokens_left else pending // work.tokens - 1
        if are_alone and all(work.tokens == seqs[id].pending for id, work in self.work.items()):
            return UNLIMITED_STEPS
        return 0

    def tokens_that_fit(self, seq: SeqView) -> int:
        """Returns how many tokens of `seq`, which is not in the batch yet, still fit."""
        if self.seqs_left == 0 or self.lacks_slot(seq):
            return 0
        by_kv = (seq.blocks + self.kv_left) * self._block - seq.cached
        return max(0, min(seq.pending, self.tokens_left, by_kv))

    def is_full(self, step_limit: float) -> bool:
        """Returns whether no token more fits within `step_limit` seconds."""
        if self.tokens_left == 0 or self.seqs_left == 0:
            return True
        return step_limit < inf and self.view.latency.step_time(self.shape.plus(1, 0)) > step_limit

    def lacks_slot(self, seq: SeqView) -> bool:
        """Returns whether the engine has no slot left for this sequence to start."""
        return self.slots_left < 1 and seq.id not in self.running

    def lacks(self, seq: SeqView, tokens: int) -> bool:
        """Returns whether another sequence must be preempted first, for KV or for a slot."""
        return self.missing_blocks(seq, tokens) > 0 or self.lacks_slot(seq)

    def missing_blocks(self, seq: SeqView, tokens: int) -> int:
        """Returns how many KV blocks are missing for `tokens` of it; below 0, how many would be left."""
        return self._more_blocks(seq, tokens) - self.kv_left

    def verifiable(self, seq: SeqView, drafted: int) -> int:
        """Returns how many of its drafted tokens fit in addition to its pending ones; call `tokens_that_fit` first."""
        most = max(0, min(drafted, self.tokens_left - seq.pending))
        while most and self.missing_blocks(seq, seq.pending + most) > 0:
            most -= 1
        return most

    def add(
        self, seq: SeqView, tokens: int, verify: tuple[int, ...] = (), draft: tuple[int, int] | None = None
    ) -> None:
        """Puts work into the batch; call `tokens_that_fit` or `verifiable` first.

        Args:
            seq: a sequence that is not in the batch yet
            tokens: number of its pending tokens
            verify: nodes of its draft, with their parents; only with all pending tokens
            draft: (depth, width) of its next draft (`Work`)
        """
        self._put(seq, tokens, verify, draft, self._more_blocks(seq, tokens + len(verify)))

    def _put(
        self, seq: SeqView, tokens: int, verify: tuple[int, ...], draft: tuple[int, int] | None, blocks: int
    ) -> None:
        """Does the work of `add`; `blocks` are the missing ones (`_more_blocks`)."""
        id, count = seq.id, tokens + len(verify)
        self.work[id] = Work(id, tokens, verify, draft)
        self.slots_left -= id not in self.running
        self.tokens_left -= count
        self.seqs_left -= 1
        if blocks > 0:
            self.kv_left -= blocks
        self._added.append((count, seq.cached))
        if draft is not None:
            self._drafts.append(draft)

    def add_decodes(self, seqs: Sequence[SeqView], drafts: Mapping[str, tuple[int, int]] = NOTHING) -> bool:
        """Adds one token of each sequence at once if all run and fit; else returns False and adds nothing. `drafts`
        holds what to draft at the end of the step, by id (`Work.draft`)."""
        count, block, ids = len(seqs), self.view.limits.block_size, [s.id for s in seqs]
        if count > min(self.seqs_left, self.tokens_left) or not all(map(self.running.__contains__, ids)):
            return False
        cached = [s.cached for s in seqs]
        # A new block is needed only when the last is full, or when a drafter writes ahead of the tokens.
        ahead = "draft" in self.view.supports
        each = [c // block + 1 - s.blocks for c, s in zip(cached, seqs, strict=True) if ahead or c % block == 0]
        blocks = sum([lacking for lacking in each if lacking > 0])
        if blocks > self.kv_left:
            return False
        shape = self.shape
        self._base = shape._replace(
            tokens=shape.tokens + count, seqs=shape.seqs + count, kv=shape.kv + sum(cached) + count
        )
        if drafts:
            self.work.update((s.id, Work(s.id, 1, (), drafts.get(s.id))) for s in seqs)
            self._drafts += [drafts[s.id] for s in seqs if s.id in drafts]
        else:
            self.work.update([(id, Work(id, 1)) for id in ids])
        self.tokens_left -= count
        self.seqs_left -= count
        self.kv_left -= blocks
        return True

    def fold_decodes(self) -> None:
        """Replaces single decodes by `decode_all` if every running decode is in the batch with one token: such a plan
        is executed faster. Call it last, before `plan`."""
        if self.decode:
            self._fold_left_out()
            return
        running, prefilling = self.running, {s.id for s in self.view.prefilling}
        each = {
            id for id, (_, tokens, verify, draft) in self.work.items()
            if tokens == 1 and not verify and draft is None and id in running and id not in prefilling
        }  # fmt: skip
        if each and len(each) == self.decodes.seqs:
            self.decode = True
            self.work = {id: work for id, work in self.work.items() if id not in each}

    def _fold_left_out(self) -> None:
        """Makes the plan agree with itself where `decode_all` left some out: if each of these has got a single token
        after all, `decode_all` covers them, too; else the others get work one by one in its place."""
        singles = {id for id in [s.id for s in self._left_out] if self.work.get(id) == Work(id, 1)}
        if len(singles) == len(self._left_out):
            self.work = {id: work for id, work in self.work.items() if id not in singles}
            return
        left_out = {s.id for s in self._left_out}.union([s.id for s in self.preempted])
        decodes = [s.id for s in self.view.running if s.pending == 1 and s.id not in left_out]
        self.decode, self.work = False, {id: Work(id, 1) for id in decodes} | self.work

    def remove(self, seq: SeqView) -> None:
        """Takes the work of a sequence out of the batch again."""
        shape, work = self.shape, self.work.pop(seq.id)
        count = work.tokens + len(work.verify)
        self.slots_left += seq.id not in self.running
        self.tokens_left += count
        self.seqs_left += 1
        self.kv_left += max(0, self._more_blocks(seq, count))
        self._base = shape.minus(count, seq.cached)
        if work.draft is not None:
            self._base = self._base._replace(spec_steps=self._steps, draft_tokens=0)
            self._drafts = [w.draft for w in self.work.values() if w.draft is not None]

    def preempt(self, seq: SeqView) -> None:
        """Preempts a running sequence: frees its KV, and its place in this batch if it has one."""
        if seq.id in self.work:
            self.remove(seq)
        self.kv_left += seq.own_blocks
        self.slots_left += 1
        self.preempted.append(seq)

    def plan(
        self, *, demote: Iterable[str] = (), promote: Iterable[str] = (), drop: dict[str, str] | None = None,
        wake_at: float | None = None, handoff: Mapping[str, HandoffReason] | None = None, repeat_steps: int = 0,
    ) -> Plan:  # fmt: skip
        """Returns the plan. The parameters are fields of `Plan`."""
        return Plan(
            work=tuple(self.work.values()),
            preempt=tuple([s.id for s in self.preempted]),
            demote=tuple(demote),
            promote=tuple(promote),
            drop=drop or NOTHING,
            wake_at=wake_at,
            decode_all=self.decode,
            repeat_steps=repeat_steps,
            handoff=handoff or NOTHING,
        )

    def _more_blocks(self, seq: SeqView, tokens: int) -> int:
        """Returns the KV blocks that it needs for `tokens` beyond those it has; below 0, how many it has too many."""
        return blocks_for(seq.cached + tokens, self._block) - seq.blocks


def make_room(builder: BatchBuilder, seq: SeqView, tokens: int, victims: Iterable[SeqView]) -> bool:
    """Preempts `victims` in order until `seq` has a slot and KV for `tokens`, none if all would not be enough. Returns
    whether it has them now."""
    if not builder.lacks(seq, tokens):
        return True
    preemptable, lacking = [], builder.missing_blocks(seq, tokens)
    for victim in victims:
        if victim is not seq and victim not in builder.preempted and (own := victim.own_blocks):
            preemptable.append(victim)
            lacking -= own
            if lacking <= 0:  # each victim leaves a slot, too
                break
    else:
        return False
    for one in preemptable:
        if builder.lacks(seq, tokens):  # less, once a victim was taken out of the batch
            builder.preempt(one)
    return True


def decode_first(view: View, budget: int | None, reserve_kv: bool = False) -> BatchBuilder:
    """Builds a batch of running requests (`run_all`), then waiting ones (`waiting_that_fit`)."""
    builder = run_all(view, budget)
    admit_in_order(builder, waiting_that_fit(view, reserve_kv))
    return builder


def run_all(view: View, budget: int | None = None) -> BatchBuilder:
    """Builds a batch of every decode, then running prefills in order of start. As in vLLM, a request that lacks KV
    takes it from the one started last."""
    builder = BatchBuilder(view, budget)
    if not builder.decode_all() or not _run_chunks(builder):
        builder = BatchBuilder(view, budget)
        decodes = [s for s in view.running if s.pending == 1]
        run_in_order(builder, [*decodes, *view.prefilling])
    return builder


def decodes_only(view: View) -> Plan:
    """Plans a decode replica's step: every decode. A request that needs a prefill gives up its KV and is handed
    back."""
    back: dict[str, HandoffReason] = {s.id: "declined" for s in view.waiting}
    prefilling = view.prefilling
    if not prefilling:
        builder = run_all(view)
        return builder.plan(handoff=back, repeat_steps=0 if back else builder.repeat_steps())
    builder = BatchBuilder(view)
    for seq in prefilling:
        builder.preempt(seq)
    run_in_order(builder, [s for s in view.running if s.pending == 1])
    return builder.plan(handoff=back)


def decodes_or_prefills(view: View) -> BatchBuilder:
    """Builds a batch of decodes only; without any, of the running prefills, which lack KV (`run_in_order`)."""
    builder = BatchBuilder(view)
    if not builder.decode_all() or not builder.decode:
        run_in_order(builder, view.running)
    return builder


def resume_prefills(builder: BatchBuilder) -> Sequence[SeqView]:
    """Adds running prefills in order of start, as far as tokens and free KV go. Returns all of them."""
    prefilling = builder.view.prefilling
    for seq in prefilling:
        if tokens := builder.tokens_that_fit(seq):
            builder.add(seq, tokens)
    return prefilling


def _run_chunks(builder: BatchBuilder) -> bool:
    """Adds running prefills in order of start, as far as tokens go; returns False if one lacks KV."""
    for seq in builder.view.prefilling:
        tokens = min(seq.pending, builder.tokens_left) if builder.seqs_left else 0
        if tokens == 0:
            return True
        blocks = builder._more_blocks(seq, tokens)
        if blocks > builder.kv_left:
            return False
        builder._put(seq, tokens, (), None, blocks)
    return True


def run_in_order(
    builder: BatchBuilder,
    running: Iterable[SeqView],
    verify: Callable[[SeqView], Sequence[int]] | None = None,
    draft: tuple[int, int] | None = None,
) -> None:
    """Adds running requests by vLLM's rule: each gets its pending tokens, in order of start; one that lacks KV takes it
    from the one started last (itself in the end).

    Args:
        builder: of the batch.
        running: in order of start.
        verify: returns the drafted nodes of a request, parents before their children; the first for which the budget
            leaves room are verified.
        draft: (depth, width) of a tree for each request that samples.
    """
    order = list(running)
    at = 0
    while at < len(order):
        seq = order[at]
        at += 1
        nodes, pending = verify(seq) if verify is not None else (), seq.pending
        tokens = min(pending + len(nodes), builder.tokens_left) if builder.seqs_left else 0
        if tokens == 0:
            continue
        more = builder._more_blocks(seq, tokens)
        while more > builder.kv_left:
            last = order.pop()
            builder.preempt(last)
            if last is seq:
                return
        if tokens < pending:
            builder._put(seq, tokens, (), None, more)
        else:
            builder._put(seq, pending, tuple(nodes[: tokens - pending]), draft, more)


def admit_in_order(builder: BatchBuilder, waiting: Iterable[SeqView], draft: tuple[int, int] | None = None) -> None:
    """Admits waiting requests in chunks, first come, first served, up to the first that does not fit. A step that
    preempted admits none, since it would take the KV just freed. `draft` is the (depth, width) of a tree for requests
    that sample."""
    if builder.preempted:
        return
    for seq in waiting:
        pending = seq.pending
        tokens = min(pending, builder.tokens_left)
        if tokens == 0 or builder.seqs_left == 0 or builder.lacks_slot(seq):
            return
        blocks = builder._more_blocks(seq, tokens)
        if blocks > builder.kv_left:
            return
        builder._put(seq, tokens, (), draft if tokens == pending else None, blocks)


def waiting_that_fit(view: View, reserve_kv: bool) -> Iterable[SeqView]:
    """Returns waiting requests in order. With `reserve_kv`, only while there is KV for each to its end in addition to
    all others' needs: with exact predictions none is preempted then."""
    return _waiting_with_kv_to_end(view) if reserve_kv else view.waiting


def _waiting_with_kv_to_end(view: View) -> Iterator[SeqView]:
    free = unreserved_blocks(view)
    alone = not (view.running or view.moving)  # then it starts whatever is predicted
    for seq in view.waiting:
        free -= blocks_at_end(seq, view.limits.block_size)
        if free < 0 and not alone:
            return
        yield seq
        alone = False


def unreserved_blocks(view: View) -> int:
    """Returns the KV blocks left if all running requests took what they need to their ends; below 0 if too few."""
    block = view.limits.block_size
    return view.kv_total - sum(blocks_at_end(s, block) for s in view.running) - sum(s.blocks for s in view.moving)


def blocks_at_end(seq: SeqView, block: int, left: float | None = None) -> int:
    """Returns the KV blocks that a request has at its end: all prompts and all output. `left` is the output to come, if
    the caller knows it."""
    stages, length = seq.request.stages, seq.length
    if len(stages) > 1:
        length += sum([stage.prompt for stage in stages[seq.stage + 1 :]])
    return blocks_for(int(length + (remaining_output(seq) if left is None else left) + 0.999), block)


def remaining_output(seq: SeqView) -> float:
    """Returns the output tokens still to come: as predicted, else up to `max_tokens`."""
    predicted = seq.predicted
    if predicted is not None:
        return predicted
    stages = seq.request.stages
    prompts = stages[0].prompt if len(stages) == 1 else sum(stage.prompt for stage in stages[: seq.stage + 1])
    return max(1, seq.request.sampling.max_tokens - (seq.length - prompts))
