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
        busy_until: when its step in flight ends
        backlog: prompt tokens in no step yet
        kv: tokens of the decodes
        longest: tokens of the longest prompt here, 0 without a backlog
        chunk: prompt tokens that keep a step within the TPOT
        backlog_chunks: number of chunks of the backlog
        chunk_seconds: of a step with such a chunk
        first_due: time at which the first decode is due; NaN: not looked up yet
    """

    key: tuple[float, ...]
    busy_until: float = 0.0
    backlog: int = 0
    kv: int = 0
    longest: int = 0
    chunk: int = 1
    backlog_chunks: float = 0.0
    chunk_seconds: float = 0.0
    first_due: float = nan

    def least_seconds(self, pending: int) -> float:
        """Returns a lower bound of the seconds in chunks of this work and a prompt's tokens; 0 without a backlog."""
        return ceil(pending / self.chunk + self.backlog_chunks) * self.chunk_seconds if self.chunk else inf


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
        count, when = 1 if is_alone else len(self.forecast) + 1, now
        if 1 < count <= self.seats and not (later or request.moves):
            when = self._prefilled_at(request, tpot, now)
            if when > request.due:  # checked before the KV, which takes longer
                return None
        step = self.renew(now)
        peak = self.forecast.peak_with(request.length, request.remaining, step) if count > 1 else request.final_length
        if count > self.seats or peak > self.capacity or self.steps.decodes(count, peak) > tpot:
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

    def _prefilled_at(self, request: HeldRequest, tpot: float, now: float) -> float:
        """Returns when a request's prompt would be through, behind those that are here, in chunks beside the decodes as
        their KV is now; inf if a step has no room for a chunk, or if it is late. The time that decodes can lend
        (`Scheduler`) counts if it would be late without: from the end of the step in flight until a TPOT before the
        first of them, or of the prompts here, is due."""
        ahead, due, pending = self._look_ahead(tpot, now), request.due, request.pending
        begin, seconds = now + max(0.0, ahead.busy_until - now), inf
        # Most that ask a full replica are late in any case, as what is known of it tells without asking for chunks.
        if begin + ahead.least_seconds(pending) <= due:
            seconds = self._seconds_in_chunks(ahead, tpot, pending)
        if begin + seconds <= due or self.added_tokens:
            return begin + seconds
        if not ahead.first_due >= now:  # not looked up yet (NaN), or due before: those are late now, and lend nothing
            ahead.first_due = self.view.first_decode_due
        # Until a TPOT before the first decode is due; in a step in flight it gets a token, and is due a TPOT later.
        lead = ahead.first_due + (tpot if begin > now else 0.0) - tpot - begin
        if lead <= tpot or begin + (whole := self._seconds_in_whole(ahead, pending)) > due:
            return inf
        lead = min(lead, first_prompt_due(self.view) - tpot - begin)
        seconds = self._seconds_in_chunks(ahead, tpot, pending)
        if lead <= tpot or seconds == inf:
            return inf
        # What does not fit in the lead goes on in chunks.
        return begin + (whole if whole <= lead else lead + (1.0 - lead / whole) * seconds)

    def _seconds_in_whole(self, ahead: WorkAhead, pending: int) -> float:
        """Returns the seconds of a prompt's pending tokens and the work ahead in as few steps as possible, beside the
        decodes."""
        seqs, wanted = len(self.forecast), ahead.backlog + pending
        decode_seconds = self.steps.decodes(seqs, ahead.kv) - self.steps.decodes(1, 1)
        rounds = ceil(wanted / (self.view.limits.max_num_batched_tokens - seqs))
        return self.steps.isolated_seconds(wanted) + rounds * decode_seconds

    def _seconds_in_chunks(self, ahead: WorkAhead, tpot: float, pending: int) -> float:
        """Returns the seconds of a prompt's pending tokens behind the work ahead, in chunks that keep each step within
        the TPOT; inf if a step has no room for one."""
        seqs = len(self.forecast)
        tokens, each = self.steps.chunk(tpot, seqs, ahead.kv, pending)
        if tokens < 1:
            return inf
        steps = pending / tokens
        if ahead.backlog:
            tokens, slower = self.steps.chunk(tpot, seqs, ahead.kv, ahead.longest or pending)
            steps += ahead.backlog / max(1, tokens)
            each = max(each, slower)
        return ceil(steps) * each

    def _look_ahead(self, tpot: float, now: float) -> WorkAhead:
        """Returns the work before a prompt that comes now, as last worked out unless the replica's state is another."""
        self.steps.renew(now)
        view, forecast = self.view, self.forecast
        key = (view.steps, view.busy_until, view.pending, self.added_tokens, forecast.changes, tpot)
        if key == self._ahead.key:
            return self._ahead
        self.predict_overdue(view.steps)
        seqs, kv, backlog = len(forecast), forecast.now(view.steps), self._backlog()
        self._ahead = work = WorkAhead((*key[:4], forecast.changes, tpot), key[1], backlog, kv)
        if backlog and (prompts := (*view.prefilling, *view.waiting)):
            work.longest = max([s.length for s in prompts])
            work.chunk, _ = self.steps.chunk(tpot, seqs, kv, 0)
            backlog_chunk, work.chunk_seconds = self.steps.chunk(tpot, seqs, kv, work.longest)
            work.backlog_chunks = backlog / max(1, backlog_chunk)
        return work

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
        """Returns, for each place in the line, the most seconds that a prompt there may take so that all behind it are
        in time, if the line began at time 0; inf at the end. It is an upper bound: each counts with its least seconds.
        For a line that begins later, the caller subtracts that time divided by the margin."""
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
        view, flight = self.view, self.view.in_flight
        in_steps = view.decodes.seqs + flight.tokens - flight.seqs + flight.chunks
        return max(0, view.pending - in_steps) + self.added_tokens


def is_source(replica: TierReplica, seq: SeqView) -> bool:
    """Returns whether the request's KV is on this replica, from before it served another group."""
    handoff = seq.request.handoff
    return handoff is not None and seq.cached > 0 and handoff.source == replica.id
