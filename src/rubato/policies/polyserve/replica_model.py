"""PolyServe's account of a replica: its requests, forecast KV, queue and step times; predicts when a request placed
there would have its next token."""

from __future__ import annotations

from bisect import bisect_right, insort
from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, inf, nan
from typing import Any

from rubato.core.interfaces import SeqView, View
from rubato.policies.polyserve.scheduler import PREFILL_BATCH_TOKENS, first_prompt_due
from rubato.policy_kit.step_table import StepTable
from rubato.policy_kit.tier_fleet import PREFILL_GROUP, BookedReplica

# Relative delay that a queued prompt must survive: prompts with nearer deadlines overtake it, and steps take a little
# longer than predicted.
DELAY_MARGIN_SHARE = 0.1


TimedPrompt = tuple[float, int, int, float]  # due, pending tokens, cached tokens, seconds in chunks


@dataclass(slots=True)
class HeldRequest:
    """A request to be placed.

    Args:
        seq: the request
        tier: its own
        due: time of its next token, or by which a prompt that decodes elsewhere has to be through; inf: it cannot be in
            time any more
        pending: tokens to compute
        length: tokens so far
        remaining: output tokens to come, as predicted
        moves: whether it brings its KV
        transfer_seconds: that its KV is on its way
    """

    seq: SeqView
    tier: int
    due: float
    pending: int
    length: int
    remaining: float
    moves: bool
    transfer_seconds: float = 0.0

    @property
    def final_length(self) -> int:
        """Returns its tokens at its predicted end."""
        return int(self.length + self.remaining)


@dataclass(slots=True)
class WorkAhead:
    """The work before a prompt that comes to a replica now. It is kept until the replica's state (`key`) changes:
    requests that come within a step ask the same replicas, the fullest first.

    Args:
        key: state of the replica
        backlog: prompt tokens in no step yet
        kv: tokens of the decodes
        longest: tokens of the longest prompt here
        max_chunk: prompt tokens that a step has room for
        chunk: prompt tokens that keep a step within the TPOT
        decode_seconds: that decodes add to a step
        backlog_chunks: number of chunks of the backlog
        chunk_seconds: of a step with such a chunk
        first_due: time at which the first decode is due; NaN: not looked up yet
    """

    key: tuple[float, ...]
    backlog: int = 0
    kv: int = 0
    longest: int = 0
    max_chunk: int = 1
    chunk: int = 1
    decode_seconds: float = 0.0
    backlog_chunks: float = 0.0
    chunk_seconds: float = 0.0
    first_due: float = nan


class TierReplica(BookedReplica):
    """A replica that serves its tier's prompts beside decodes, or prefills.

    `draining`: it has requests of looser tiers only, and admits none. `prompts` are those to be prefilled here, with
    when they have to be through.
    """

    prompts: dict[str, HeldRequest]

    def __init__(self, view: View, index: int, tiers: int, steps: StepTable) -> None:
        super().__init__(view, index, tiers, steps)
        self.draining = False
        self.added_tokens = 0  # to this replica by this dispatch
        self.idle_since = inf  # without a prompt, if it prefills
        self._timed_by_id: dict[str, TimedPrompt] = {}  # the prompts, as last looked at
        self._line_key: tuple[int, float] = (0, 0.0)  # step and its end for which `_line` was made
        self._rooms: Sequence[float] = ()  # `_find_rooms` of that line; empty: not worked out
        self._ahead = WorkAhead(())

    def receives_kv(self) -> bool:
        """Returns whether KV is on its way here, even of a request that has left since; until it arrives the replica
        keeps its group."""
        return any((h := s.request.handoff) and h.cached and h.source != self.id for s in self.view.moving)

    def renew(self, now: float) -> int:
        """Returns the replica's current step, after predicting residents that outlived their predicted length again."""
        self.steps.renew(now)
        step = self.view.steps
        self.predict_overdue(step)
        return step

    def _find_load(self) -> float:
        """Returns the queued tokens of a prefill replica, a step of its decodes for any other."""
        if self.group == PREFILL_GROUP:
            return float(sum(prompt.pending for prompt in self.prompts.values()))
        return super()._find_load()

    def add_unknown(self, id: str, tier: int | None) -> None:
        """Adds a request that another router placed here, as overdue, so that its length is looked up next time."""
        self.idle_since = inf
        self.forecast.add(id, 1, 1.0, self.view.steps - 1)
        if tier is not None:
            self.residents[tier] += 1
        self._rank = None

    def queue(self, request: HeldRequest) -> None:
        line = self._line
        super().queue(request)
        self.idle_since = inf
        self._timed_by_id[request.seq.id] = timed = self._time_prompt(request.due, request.pending, request.length)
        self._rank = None
        if line is not None and request.pending > 1:  # with one token left it is in no line
            insort(line, timed)
            self._rooms = ()
        self._line = line

    def unqueue(self, id: str) -> Any:
        del self._timed_by_id[id]
        self._rank = None
        return super().unqueue(id)

    # ----------------------------------------------------------------- whether a request fits

    def next_token_at(
        self, request: HeldRequest, tpot: float, now: float, is_alone: bool = False, later: bool = False
    ) -> float | None:
        """Returns when a request's next token would be out beside the decodes here; None if that is too late, or a step
        would take longer than the TPOT, or the KV would not fit.

        Args:
            request: the request
            tpot: seconds that a step may take
            now: seconds
            is_alone: whether all that are here leave
            later: whether it comes with its KV, once another replica has prefilled it
        """
        step = self.renew(now)
        count = 1 if is_alone else len(self.forecast) + 1
        if count > self.view.limits.max_num_seqs:
            return None
        when = now
        if count > 1 and not (later or request.moves):
            when = self._prefilled_at(request, tpot, step, now)
            if when > request.due:  # checked before the KV, which takes longer
                return None
        if count > 1:
            peak = self.forecast.peak_with(request.length, request.remaining, step)
        else:
            peak = request.final_length
        if peak > self.capacity or self.steps.decodes(count, peak) > tpot:
            return None
        if later:
            return now
        if request.moves:
            if is_source(self, request.seq):
                return None
            when = self.joins_at(request, now)
        elif count == 1:
            when = now + self._wait(now) + self.steps.isolated_seconds(request.pending + self.added_tokens)
        return when if when <= request.due else None

    def can_keep(self, request: HeldRequest, tpot: float, now: float) -> bool:
        """Returns whether a resident that brings its KV has its next token in time, and steps and KV stay within
        limits. Its time is an upper bound, in which the resident counts twice."""
        peak = self.forecast.peak(self.renew(now))
        fits = peak <= self.capacity and self.steps.decodes(len(self.forecast), peak) <= tpot
        return fits and self.joins_at(request, now) <= request.due

    def joins_at(self, request: HeldRequest, now: float) -> float:
        """Returns when the next token of a request that brings its KV would be out; inf without room for the KV."""
        view = self.view
        if view.limits.blocks(request.length) > view.kv_free:
            return inf
        each = self.steps.decodes(len(self.forecast) + 1, self.forecast.now(view.steps) + request.length)
        wait = self._wait(now)
        late = request.transfer_seconds - wait  # after the step that runs: it then waits for the end of another one
        return now + wait + each + (max(0.0, late) if wait == 0.0 else each * max(0, ceil(late / each)))

    def _prefilled_at(self, request: HeldRequest, tpot: float, step: int, now: float) -> float:
        """Returns when a request's prompt would be through, behind those that are here, in chunks beside the decodes as
        their KV is now; inf if a step has no room for a chunk, or if it is late at the least. The time that decodes can
        lend (`Scheduler`) counts if it would be late without."""
        view, ahead, seqs = self.view, self._ahead, len(self.forecast)
        key = (step, busy_until := view.busy_until, view.pending, self.added_tokens, self.forecast.changes, tpot)
        if key != ahead.key:
            ahead = self._ahead = self._find_work_ahead(key, tpot, step, seqs)
        at, due, wanted = now + max(0.0, busy_until - now), request.due, ahead.backlog + request.pending
        # Seconds in steps as long as the engine takes them, if the decodes lend enough.
        whole = self.steps.isolated_seconds(wanted) + ceil(wanted / ahead.max_chunk) * ahead.decode_seconds
        # Most that ask a full replica are late in any case, as what is known of it tells without asking for chunks.
        chunks = request.pending / ahead.chunk + ahead.backlog_chunks if ahead.chunk else inf
        is_late = chunks == inf or at + ceil(chunks) * ahead.chunk_seconds > due
        if is_late and (self.added_tokens or at + whole > due or self._lead(ahead, tpot, at, now) <= tpot):
            return inf
        tokens, each = self.steps.chunk(tpot, seqs, ahead.kv, request.pending)
        if tokens < 1:
            return inf
        steps = request.pending / tokens
        if ahead.backlog:
            tokens, slower = self.steps.chunk(tpot, seqs, ahead.kv, ahead.longest or request.pending)
            steps += ahead.backlog / max(1, tokens)
            each = max(each, slower)
        seconds = ceil(steps) * each
        if at + seconds <= due or self.added_tokens or at + whole > due:  # the last: it is late however much is lent
            return at + seconds
        lead = self._lead(ahead, tpot, at, now)
        if lead <= tpot or (lead := min(lead, first_prompt_due(view) - tpot - at)) <= tpot:
            return at + seconds
        if whole <= lead:
            return at + whole
        return at + (lead + (1.0 - lead / whole) * seconds)

    def _lead(self, ahead: WorkAhead, tpot: float, at: float, now: float) -> float:
        """Returns the seconds that decodes can lend: from `at` until a TPOT before the first decode is due."""
        if not ahead.first_due >= now:  # decodes that were due before are late now
            ahead.first_due = self.view.first_decode_due
        return ahead.first_due + (tpot if at > now else 0.0) - tpot - at

    def _find_work_ahead(self, key: tuple[float, ...], tpot: float, step: int, seqs: int) -> WorkAhead:
        """Returns the work before a prompt that would come now."""
        steps, kv, backlog, longest = self.steps, self.forecast.now(step), self._backlog(), self._longest_prompt()
        max_chunk = self.view.limits.max_num_batched_tokens - seqs
        chunk, _ = steps.chunk(tpot, seqs, kv, 0)
        decode_seconds = steps.decodes(seqs, kv) - steps.decodes(1, 1)
        work = WorkAhead(key, backlog, kv, longest, max_chunk, chunk, decode_seconds)
        if backlog and longest:
            backlog_chunk, work.chunk_seconds = steps.chunk(tpot, seqs, kv, longest)
            work.backlog_chunks = backlog / max(1, backlog_chunk)
        return work

    def _longest_prompt(self) -> int:
        """Returns the tokens of the longest prompt here that is not done, 0 for none."""
        return max([s.length for s in (*self.view.prefilling, *self.view.waiting)], default=0)

    def prefills_in_time(self, request: HeldRequest, now: float) -> bool:
        """Returns whether a prompt and those behind it would be done in time in the queue here, nearest deadline first,
        with KV for all.

        Each runs in chunks, or in as few steps as possible if it would be late otherwise. All but the first have a
        margin: if the first had one, prompts that are in time only alone would be refused.
        """
        self.steps.renew(now)
        steps, busy_until = self.steps, self.view.busy_until
        line = self._waiting_line(busy_until)
        begin, elapsed, margin = max(now, busy_until), 0.0, 1.0
        own = self._time_prompt(request.due, request.pending, request.length)
        at = bisect_right(line, own)
        if self._least_seconds(own) > self._rooms[at] - begin / (1.0 + DELAY_MARGIN_SHARE):
            return False
        for due, tokens, cached, seconds in (*line[:at], own, *line[at:]):
            through = elapsed + seconds
            if begin + margin * through > due:
                through = elapsed + steps.isolated_seconds(tokens, cached)
                if begin + margin * through > due >= request.due:
                    return False
            elapsed, margin = through, 1.0 + DELAY_MARGIN_SHARE
        wanted = request.pending + sum([tokens for _, tokens, _, _ in line])
        return self.group is None or wanted <= self.view.kv_free * self.view.limits.block_size

    def _waiting_line(self, busy_until: float) -> Sequence[TimedPrompt]:
        """Returns the pending parts of the prompts here, by deadline; constant during a step."""
        key = (self.view.steps, busy_until)
        if self._line is None or key != self._line_key:
            known, timed_by_id, line = self.view.known, self._timed_by_id, []
            for id, other in self.prompts.items():
                if seq := known.get(id):
                    tokens = seq.pending - seq.in_flight
                    if tokens < 2:
                        continue
                    if tokens != timed_by_id[id][1]:
                        timed_by_id[id] = self._time_prompt(other.due, tokens, other.length)
                line.append(timed_by_id[id])
            self._line, self._line_key = sorted(line), key
            self._rooms = ()
        if not self._rooms:
            self._rooms = self._find_rooms(self._line)
        return self._line

    def _find_rooms(self, line: Sequence[TimedPrompt]) -> Sequence[float]:
        """Returns a bound for each place in the line: a prompt there cannot leave those behind it in time if its least
        seconds and the time at which the line begins, divided by the margin, are more; inf at the end. Each is counted
        as short as possible."""
        rooms, elapsed, least = [inf], sum(map(self._least_seconds, line)), inf
        for timed in reversed(line):
            least = min(least, timed[0] / (1.0 + DELAY_MARGIN_SHARE) - elapsed)
            elapsed -= self._least_seconds(timed)
            rooms.append(least)
        return rooms[::-1]

    def _least_seconds(self, timed: TimedPrompt) -> float:
        """Returns the seconds of these tokens in chunks, or in as few steps as possible if that is less."""
        _, tokens, cached, seconds = timed
        return min(seconds, self.steps.isolated_seconds(tokens, cached))

    def _time_prompt(self, due: float, tokens: int, length: int) -> TimedPrompt:
        return due, tokens, length - tokens, self.steps.in_chunks(tokens, length - tokens, PREFILL_BATCH_TOKENS)

    def _wait(self, now: float) -> float:
        """Returns the seconds until the step in flight ends."""
        return max(0.0, self.view.busy_until - now)

    def _backlog(self) -> int:
        """Returns the prompt tokens that are in no step yet, including this dispatch's placements."""
        view = self.view
        flight = view.in_flight
        return (
            max(0, view.pending - view.decodes.seqs - (flight.tokens - flight.seqs + flight.chunks)) + self.added_tokens
        )


def is_source(replica: TierReplica, seq: SeqView) -> bool:
    """Returns whether the request's KV is on this replica, from before it served another group."""
    handoff = seq.request.handoff
    return handoff is not None and seq.cached > 0 and handoff.source == replica.id
