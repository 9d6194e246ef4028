"""PolyServe's account of a replica: its requests, forecast KV, queue and step times; predicts when a request placed
there would have its next token."""

from __future__ import annotations

from bisect import bisect_right, insort
from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, inf

from rubato.core.interfaces import SeqView, View
from rubato.policies.polyserve.scheduler import PREFILL_BATCH_TOKENS, first_prompt_due
from rubato.policy_kit.batch_builder import remaining_output
from rubato.policy_kit.kv_forecast import KVForecast
from rubato.policy_kit.step_table import StepTable

PREFILL_GROUP = -1  # the group of the prefill replicas; tiers are counted from 0

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


class TierReplica:
    """group: the tier it serves, `PREFILL_GROUP`, or None in the pool. draining: it has requests of looser tiers only,
    and admits none. residents: how many of each tier, those whose prompt is under way elsewhere included. prompts:
    those to be prefilled here, by id, with when they have to be through. load: None when it is to be worked out
    again."""

    def __init__(self, view: View, index: int, tiers: int, steps: StepTable) -> None:
        self.id = view.id
        self.index = index
        self.view = view
        self.group: int | None = None
        self.draining = False
        self.residents = [0] * tiers
        self.forecast = KVForecast()
        self.prompts: dict[str, HeldRequest] = {}
        self._times: dict[str, tuple[float, int, int, float]] = {}  # of each of these (`_timed`), when last looked at
        self.added = 0  # tokens that this dispatch places here
        self.idle_since = inf  # without a prompt, if it prefills
        self.capacity = view.kv_total * view.limits.block_size
        self.steps = steps
        self.load: float | None = None
        self._line: list[tuple[float, int, int, float]] | None = None
        self._line_of: tuple[int, float] = (0, 0.0)  # the step by which it was made
        self._rooms: Sequence[float] = ()  # of it
        self._longest, self._longest_of = 0, (-1, 0)

    @property
    def empty(self) -> bool:
        return not (len(self.forecast) or self.prompts)

    def receives_kv(self) -> bool:
        """Returns whether KV is on its way here, even of a request that has left since; until it arrives the replica
        keeps its group."""
        return any((h := s.request.handoff) and h.cached and h.source != self.id for s in self.view.moving)

    def renew(self, now: float) -> int:
        """Returns the replica's current step, after predicting residents that outlived their predicted length again."""
        self.steps.renew(now)
        step = self.view.steps
        if late := self.forecast.overdue(step):
            known = self.view.known
            for id in late:
                seq = known.get(id)
                self.forecast.add(id, seq.length if seq else 1, remaining_output(seq) if seq else 1.0, step)
        return step

    def weigh(self) -> float:
        """Returns its load, by which replicas are sorted: its longest predicted iteration; for a prefill replica, the
        queued tokens."""
        if self.load is None:
            count = len(self.forecast)
            if self.group == PREFILL_GROUP:
                self.load = float(sum(prompt.pending for prompt in self.prompts.values()))
            else:
                self.load = self.steps.decodes(count, self.forecast.peak(self.view.steps)) if count else 0.0
        return self.load

    def add(self, request: HeldRequest) -> None:
        """Adds a request that is to decode here."""
        self.forecast.add(request.seq.id, request.length, request.remaining, self.view.steps)
        self.residents[request.tier] += 1
        self.load = None

    def add_unknown(self, id: str, tier: int | None) -> None:
        """Adds a request that another router placed here, as overdue, so that its length is looked up next time. `tier`
        is None if it is not among `residents`."""
        self.idle_since = inf
        self.forecast.add(id, 1, 1.0, self.view.steps - 1)
        if tier is not None:
            self.residents[tier] += 1
        self.load = None

    def drop(self, id: str, tier: int | None) -> None:
        """Removes a request. `tier` is None if it is not among `residents`."""
        self.forecast.drop(id)
        if tier is not None:
            self.residents[tier] -= 1
        self.load = None

    def queue(self, request: HeldRequest) -> None:
        """Queues a prompt to be prefilled here."""
        self.idle_since = inf
        self.prompts[request.seq.id] = request
        self._times[request.seq.id] = timed = self._timed(request.due, request.pending, request.length)
        self.load = None
        if self._line is not None and request.pending > 1:  # with one token left it is in no line
            insort(self._line, timed)
            self._rooms = ()

    def unqueue(self, id: str) -> None:
        """Removes a prompt that is done, or goes elsewhere."""
        del self.prompts[id], self._times[id]
        self.load = self._line = None

    # ----------------------------------------------------------------- whether a request fits

    def next_token_at(
        self, request: HeldRequest, tpot: float, now: float, is_alone: bool = False, later: bool = False
    ) -> float | None:
        """When its next token would be out beside decodes; None if that is too late, or a step or the KV would come to
        be too much. alone: all that are here leave. later: it comes with its KV once it is prefilled."""
        step = self.renew(now)
        limits = self.view.limits
        count = 1 if is_alone else len(self.forecast) + 1
        if count > limits.max_num_seqs:
            return None
        if count > 1:
            peak = self.forecast.peak_with(request.length, request.remaining, step)
        else:
            peak = request.most
        seconds = self.steps.decodes(count, peak)
        if peak > self.capacity or seconds > tpot:
            return None
        if later:
            return now
        when = now + self._wait(now)
        if request.moves:
            if is_source(self, request.seq):
                return None
            when = self.joins_at(request, now)
        elif count == 1:
            when += self.steps.isolated_seconds(request.pending + self.added)
        else:
            when += self._prefilled_in(request, tpot, count - 1, now, when)
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

    def _prefilled_in(self, request: HeldRequest, tpot: float, seqs: int, now: float, at: float) -> float:
        """Seconds from `at` until its prompt is through, behind those that are here, in chunks beside so many decodes
        as their KV is now; what decodes lend (`Scheduler`) is asked for if it would be late without. inf if a step has
        no room for a chunk."""
        kv = self.forecast.now(self.view.steps)
        backlog, view = self._backlog(), self.view
        tokens, each = self.steps.chunk(tpot, seqs, kv, request.pending)
        if tokens < 1:
            return inf
        steps = request.pending / tokens
        if backlog:
            tokens, slower = self.steps.chunk(tpot, seqs, kv, self._longest_prompt() or request.pending)
            steps += backlog / max(1, tokens)
            each = max(each, slower)
        wanted, seconds = backlog + request.pending, ceil(steps) * each
        if at + seconds <= request.due or self.added:
            return seconds
        most = view.limits.max_num_batched_tokens - seqs
        beside = self.steps.decodes(seqs, kv) - self.steps.decodes(1, 1)
        whole = self.steps.isolated_seconds(wanted) + ceil(wanted / most) * beside
        if at + whole > request.due:  # however much is lent: seen before that is asked, which takes long
            return seconds
        lead = view.first_decode_due + (tpot if at > now else 0.0) - tpot - at
        if lead <= tpot or (lead := min(lead, first_prompt_due(view) - tpot - at)) <= tpot:
            return seconds
        if whole <= lead:
            return whole
        return lead + (1.0 - lead / whole) * seconds

    def _longest_prompt(self) -> int:
        """Returns the tokens of the longest prompt here that is not done, 0 for none; computed when they change."""
        of = (self.view.steps, self.view.pending)
        if of != self._longest_of:
            self._longest = max([s.length for s in (*self.view.prefilling, *self.view.waiting)], default=0)
            self._longest_of = of
        return self._longest

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
