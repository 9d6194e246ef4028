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


@dataclass(slots=True)
class HeldRequest:
    """A request to be placed. tier: its own. due: of its next token; of a prompt to be prefilled elsewhere than its
    decodes, of that; inf for one that cannot be in time any more. moves: it brings its KV. way: seconds that this
    takes."""

    seq: SeqView
    tier: int
    due: float
    pending: int
    length: int
    remaining: float
    moves: bool
    way: float = 0.0

    @property
    def most(self) -> int:
        """Its tokens at its predicted end."""
        return int(self.length + self.remaining)


@dataclass(slots=True)
class WorkAhead:
    """The work before a prompt that comes to a replica now. It stays the same until the replica's state (`of`) changes:
    requests that come within a step ask the same replicas, the fullest first.

    backlog: prompt tokens in no step yet. kv: tokens of the decodes. longest: tokens of the longest prompt here. most:
    prompt tokens of a step; tokens: those that keep it within the TPOT. beside: seconds that decodes add to a step.
    steps, seconds: chunks of the backlog, and seconds of one. first_due: of the first decode, NaN while not asked."""

    of: tuple[float, ...]
    backlog: int = 0
    kv: int = 0
    longest: int = 0
    most: int = 1
    tokens: int = 1
    beside: float = 0.0
    steps: float = 0.0
    seconds: float = 0.0
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
        self.added = 0  # tokens that this dispatch places here
        self.idle_since = inf  # without a prompt, if it prefills
        self._times: dict[str, tuple[float, int, int, float]] = {}  # of each of these (`_timed`), when last looked at
        self._line_of: tuple[int, float] = (0, 0.0)  # the step by which `_line` was made
        self._rooms: Sequence[float] = ()  # of it
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
        self._times[request.seq.id] = timed = self._timed(request.due, request.pending, request.length)
        self._rank = None
        if line is not None and request.pending > 1:  # with one token left it is in no line
            insort(line, timed)
            self._rooms = ()
        self._line = line

    def unqueue(self, id: str) -> Any:
        del self._times[id]
        self._rank = None
        return super().unqueue(id)

    # ----------------------------------------------------------------- whether a request fits

    def next_token_at(
        self, request: HeldRequest, tpot: float, now: float, is_alone: bool = False, later: bool = False
    ) -> float | None:
        """Returns when its next token would be out beside decodes; None if that is too late, or a step or the KV would
        come to be too much. is_alone: all that are here leave. later: it comes with its KV once it is prefilled."""
        step = self.renew(now)
        count = 1 if is_alone else len(self.forecast) + 1
        if count > self.view.limits.max_num_seqs:
            return None
        when = now
        if count > 1 and not (later or request.moves):
            when = self._prefilled_at(request, tpot, step, now)
            if when > request.due:  # seen first, since the KV to come takes longer to look at
                return None
        if count > 1:
            peak = self.forecast.peak_with(request.length, request.remaining, step)
        else:
            peak = request.most
        if peak > self.capacity or self.steps.decodes(count, peak) > tpot:
            return None
        if later:
            return now
        if request.moves:
            if is_source(self, request.seq):
                return None
            when = self.joins_at(request, now)
        elif count == 1:
            when = now + self._wait(now) + self.steps.isolated_seconds(request.pending + self.added)
        return when if when <= request.due else None

    def can_keep(self, request: HeldRequest, tpot: float, now: float) -> bool:
        """Returns whether a resident that brings its KV has its next token in time, and steps and KV stay within
        limits. The resident counts twice in the time."""
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
        late = request.way - wait  # behind the step that runs: then it waits for the end of another
        return now + wait + each + (max(0.0, late) if wait == 0.0 else each * max(0, ceil(late / each)))

    def _prefilled_at(self, request: HeldRequest, tpot: float, step: int, now: float) -> float:
        """Returns when its prompt would be through, behind those that are here, in chunks beside the decodes as their
        KV is now; what decodes lend (`Scheduler`) is asked for if it would be late without. inf if a step has no room
        for a chunk, or if the least that it can take is too much."""
        view, ahead, seqs = self.view, self._ahead, len(self.forecast)
        of = (step, busy_until := view.busy_until, view.pending, self.added, self.forecast.changes, tpot)
        if of != ahead.of:
            ahead = self._ahead = self._work_ahead(of, tpot, step, seqs)
        at, due, wanted = now + max(0.0, busy_until - now), request.due, ahead.backlog + request.pending
        whole = self.steps.isolated_seconds(wanted) + ceil(wanted / ahead.most) * ahead.beside
        # Most that ask a full replica are late in any case, which is seen by what is known of it.
        late = not ahead.tokens or at + ceil(request.pending / ahead.tokens + ahead.steps) * ahead.seconds > due
        if late and (self.added or at + whole > due or self._lead(ahead, tpot, at, now) <= tpot):
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
        if at + seconds <= due or self.added or at + whole > due:  # the last: however much is lent
            return at + seconds
        lead = self._lead(ahead, tpot, at, now)
        if lead <= tpot or (lead := min(lead, first_prompt_due(view) - tpot - at)) <= tpot:
            return at + seconds
        if whole <= lead:
            return at + whole
        return at + (lead + (1.0 - lead / whole) * seconds)

    def _lead(self, ahead: WorkAhead, tpot: float, at: float, now: float) -> float:
        """Returns the seconds from `at` until a TPOT before the first decode is due: what decodes can lend."""
        if not ahead.first_due >= now:  # decodes that were due before are late now
            ahead.first_due = self.view.first_decode_due
        return ahead.first_due + (tpot if at > now else 0.0) - tpot - at

    def _work_ahead(self, of: tuple[float, ...], tpot: float, step: int, seqs: int) -> WorkAhead:
        """Looks at the work before a prompt that would come now."""
        steps, kv, backlog, longest = self.steps, self.forecast.now(step), self._backlog(), self._longest_prompt()
        most = self.view.limits.max_num_batched_tokens - seqs
        tokens, _ = steps.chunk(tpot, seqs, kv, 0)
        beside = steps.decodes(seqs, kv) - steps.decodes(1, 1)
        work = WorkAhead(of, backlog, kv, longest, most, tokens, beside)
        if backlog and longest:
            chunk, work.seconds = steps.chunk(tpot, seqs, kv, longest)
            work.steps = backlog / max(1, chunk)
        return work

    def _longest_prompt(self) -> int:
        """Returns the tokens of the longest prompt here that is not done, 0 for none."""
        return max([s.length for s in (*self.view.prefilling, *self.view.waiting)], default=0)

    def prefills_in_time(self, request: HeldRequest, now: float) -> bool:
        """Returns whether a prompt and those behind it would be done in time in the queue here, nearest deadline first,
        with KV for all. Each runs in dynamic chunks, or in as few steps as possible if it would be late otherwise. All
        but the first have a margin: with one, prompts that are in time only alone would be refused."""
        self.steps.renew(now)
        steps, busy_until = self.steps, self.view.busy_until
        line = self._waiting_line(busy_until)
        begin, elapsed, margin = max(now, busy_until), 0.0, 1.0
        own = self._timed(request.due, request.pending, request.length)
        at = bisect_right(line, own)
        if self._least(own) > self._rooms[at] - begin / (1.0 + DELAY_MARGIN_SHARE):
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

    def _waiting_line(self, busy_until: float) -> Sequence[tuple[float, int, int, float]]:
        """Returns the pending parts of the prompts here (`_timed`), by deadline; constant during a step."""
        of = (self.view.steps, busy_until)
        if self._line is None or of != self._line_of:
            known, times, line = self.view.known, self._times, []
            for id, other in self.prompts.items():
                if seq := known.get(id):
                    tokens = seq.pending - seq.in_flight
                    if tokens < 2:
                        continue
                    if tokens != times[id][1]:
                        times[id] = self._timed(other.due, tokens, other.length)
                line.append(times[id])
            self._line, self._line_of = sorted(line), of
            self._rooms = ()
        if not self._rooms:
            self._rooms = self._room_before(self._line)
        return self._line

    def _room_before(self, line: Sequence[tuple[float, int, int, float]]) -> Sequence[float]:
        """For each place in the line: up to when, divided by the margin, one that takes less would leave those behind
        it in time, were each as short as possible; inf at the end."""
        rooms, elapsed, least = [inf], sum(map(self._least, line)), inf
        for timed in reversed(line):
            least = min(least, timed[0] / (1.0 + DELAY_MARGIN_SHARE) - elapsed)
            elapsed -= self._least(timed)
            rooms.append(least)
        return rooms[::-1]

    def _least(self, timed: tuple[float, int, int, float]) -> float:
        """Returns the seconds of these tokens in chunks, or in as few steps as possible if that is less."""
        _, tokens, cached, seconds = timed
        return min(seconds, self.steps.isolated_seconds(tokens, cached))

    def _timed(self, due: float, tokens: int, length: int) -> tuple[float, int, int, float]:
        """Returns (due, pending tokens, cached tokens, seconds in chunks) of a prompt."""
        return due, tokens, length - tokens, self.steps.in_chunks(tokens, length - tokens, PREFILL_BATCH_TOKENS)

    def _wait(self, now: float) -> float:
        """Returns the seconds until the step in flight ends."""
        return max(0.0, self.view.busy_until - now)

    def _backlog(self) -> int:
        """Returns the prompt tokens that are in no step yet, including this dispatch's placements."""
        view = self.view
        flight = view.in_flight
        return max(0, view.pending - view.decodes.seqs - (flight.tokens - flight.seqs + flight.chunks)) + self.added


def is_source(replica: TierReplica, seq: SeqView) -> bool:
    """Returns whether the request's KV is on this replica, from before it served another group."""
    handoff = seq.request.handoff
    return handoff is not None and seq.cached > 0 and handoff.source == replica.id
