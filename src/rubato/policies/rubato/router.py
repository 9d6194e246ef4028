"""Places requests: on replicas that are alike, or divided by TPOT while recent requests gain by it."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import inf, nextafter
from typing import ClassVar

from rubato.core.events import Event
from rubato.core.interfaces import Dispatch, SeqView, View
from rubato.policies import least_loaded, rubato_pd
from rubato.policies.rubato.division import Recent, divide_by_tpot, gain_of_prompts, work
from rubato.policies.rubato.replica_load import ReplicaLoad
from rubato.policies.rubato.supply import SLACK_SHARE
from rubato.policy_kit.batch_builder import remaining_output
from rubato.policy_kit.refusals import fleet_refusal, refusable
from rubato.policy_kit.step_table import StepTable

MODES = ("co", "pd", "auto")
STEP_TIMES = frozenset({"step_times"})
MIN_REPLICAS_TO_DIVIDE = 4  # mode auto divides no smaller fleet: one replica is too large a part of it
RECENT_REQUESTS = 256  # replicas are divided by these; reconsidered when a quarter of them is new
# Gain of prompts (`gain_of_prompts`) above which mode auto divides; `SLACK_SHARE` more to divide,
# `SLACK_SHARE` less to stay divided. Capacity of 4 alike over 4 divided replicas, with the gain: slos-serve-mixed (1.2)
# 1.3 times, the 70B model of the gate (1.5) 1.2 to 1.8 times, uniform-4096-1024 with TPOTs doubled (1.6) as much, half
# as long again (1.4) 0.75 times; mooncake-conversation with TPOTs a quarter longer (2.7) 0.7 times.
MIN_GAIN = 1.65


@dataclass
class Router:
    """Places each request on replicas that are alike, divided by TPOT, or apart by role; with one replica, there.

    Args:
        mode (auto, co, pd): all alike or divided by TPOT as that pays, from four replicas on; divided from the start;
            prefill and decode apart, as by `rubato_pd`
    """

    needs: ClassVar[frozenset[str]] = frozenset()
    default_lengths: ClassVar[str] = "conditional_mean"
    mode: str = "auto"
    _apart: rubato_pd.Router | None = field(init=False, repr=False, default=None)
    _alike: least_loaded.Router = field(init=False, repr=False, default_factory=least_loaded.Router)
    _recent: deque[Recent] = field(init=False, repr=False, default_factory=lambda: deque(maxlen=RECENT_REQUESTS))
    _requests_since_decision: int = field(init=False, repr=False, default=0)
    _tpots: dict[str, float] = field(init=False, repr=False, default_factory=dict)  # by replica; {}: all are alike
    _unplaced: set[str] = field(init=False, repr=False, default_factory=set)
    _tables: dict[tuple[int, int], StepTable] = field(init=False, repr=False, default_factory=dict)

    def __post_init__(self) -> None:
        if self.mode not in MODES:
            raise ValueError(f"mode is {self.mode!r}: give {', '.join(MODES)}")
        if self.mode == "co":
            self.needs = STEP_TIMES  # type: ignore[misc]  # of this one alone
        if self.mode == "pd":
            self._apart = rubato_pd.Router()
            self.needs = self._apart.needs  # type: ignore[misc]
            self.roles = self._apart.roles  # so that it assigns roles in this mode alone

    def observe(self, events: Sequence[Event]) -> None:
        if self._apart is not None:
            self._apart.observe(events)

    def place(self, held: Sequence[SeqView], fleet: Sequence[View], now: float) -> Dispatch:
        if self._apart is not None:
            return self._apart.place(held, fleet, now)
        if all(view.supports >= STEP_TIMES for view in fleet):
            self._reconsider_division(held, fleet)
        else:
            self._tpots = {}
        if self._tpots:
            dispatch = self._place_by_tpot(held, fleet, now)
        else:
            dispatch = self._alike.place(held, fleet, now)
        self._unplaced = {seq.id for seq in held} - dispatch.place.keys()
        return dispatch

    def _reconsider_division(self, held: Sequence[SeqView], fleet: Sequence[View]) -> None:
        """Decides whether and how replicas are divided: now and then, and when a replica joined or left. Requests that
        are placed stay where they are."""
        steps = self._steps(fleet[0])
        for seq in held:
            slo = seq.slo
            if seq.id not in self._unplaced:
                self._requests_since_decision += 1
                if not seq.best_effort and (slo.tpot is not None or slo.e2e is None):  # which TPOT an e2e takes varies
                    self._recent.append(Recent(slo.tpot or inf, work(seq, steps)))
        divides = self.mode == "co" or bool(self._tpots)
        if 4 * self._requests_since_decision < RECENT_REQUESTS and not (
            divides and self._tpots.keys() != {view.id for view in fleet}
        ):
            return
        self._requests_since_decision = 0
        if self.mode == "auto":
            gain = gain_of_prompts([each.tpot for each in self._recent], fleet)
            min_gain = MIN_GAIN * (1.0 - SLACK_SHARE if self._tpots else 1.0 + SLACK_SHARE)
            if len(fleet) < MIN_REPLICAS_TO_DIVIDE or gain < min_gain:
                self._tpots = {}
                return
        tpots = divide_by_tpot(self._recent, steps.decodes(1, 1), len(fleet))
        before = sorted(fleet, key=lambda view: self._tpots.get(view.id, inf))  # stable: few get another TPOT
        self._tpots = {view.id: tpot for view, tpot in zip(before, tpots, strict=True)}

    def _place_by_tpot(self, held: Sequence[SeqView], fleet: Sequence[View], now: float) -> Dispatch:
        """Places each request once a replica can keep its SLO and those of the requests there. A request that could not
        be in time even alone becomes best effort, or is refused."""
        replicas = [ReplicaLoad(view, self._tpots[view.id], self._steps(view)) for view in fleet]
        place: dict[str, str] = {}
        why: dict[str, str] = {}
        reject: dict[str, str] = {}
        demote: list[str] = []
        wake_at = inf
        for seq in sorted(held, key=placement_order):
            latest = seq.due - min([r.steps.isolated_seconds(seq.pending) for r in replicas])
            is_late = not seq.best_effort and latest < now
            if is_late and refusable(seq):
                reject[seq.id] = fleet_refusal(seq, fleet)
                continue
            if is_late:
                demote.append(seq.id)
            is_promised = not (is_late or seq.best_effort)
            choice = find_keeping(seq, replicas, now) if is_promised else find_with_time(replicas)
            if choice is not None:
                replica, why[seq.id] = choice
                replica.add(seq)
                place[seq.id] = replica.view.id
            elif seq.best_effort:
                break  # the others are younger
            elif not is_late:
                wake_at = min(wake_at, latest)
        return Dispatch(place, reject, demote, wake_at=nextafter(wake_at, inf) if wake_at < inf else None, why=why)

    def _steps(self, view: View) -> StepTable:
        """Returns a replica's step times. Replicas with one latency model share a table, since filling it takes a
        thousand calls."""
        most = view.limits.max_num_batched_tokens
        table = self._tables.get((id(view.latency), most))
        if table is None:
            table = self._tables[id(view.latency), most] = StepTable(view.latency, most)
        table.renew(view.now)
        return table


def placement_order(seq: SeqView) -> tuple[bool, float]:
    """Returns a sort key: nearest deadline first, then best effort, oldest first."""
    return seq.best_effort, seq.request.arrival if seq.best_effort else seq.due


def find_keeping(seq: SeqView, replicas: Sequence[ReplicaLoad], now: float) -> tuple[ReplicaLoad, str] | None:
    """Returns a replica that keeps a request's SLO, and the reason: one with the nearest TPOT that is no looser, then
    the least loaded. A request without a TTFT, or with a TPOT that no replica keeps, goes to the first in that order in
    any case."""
    slo, tpot = seq.slo, tpot_of(seq, now)
    order = sorted(replicas, key=lambda r: (-r.tpot, r.load))
    order = [r for r in order if r.tpot <= tpot * (1.0 + 1e-9)] or order[::-1]
    for replica in order:
        if replica.can_keep(seq, tpot, now):
            return replica, "keeps its TPOT" if replica.tpot == inf else f"for TPOTs from {1e3 * replica.tpot:g} ms"
    if slo.ttft is None or not any(r.steps.decodes(1, seq.length) <= tpot for r in replicas):
        return order[0], "the nearest TPOT"
    return None


def find_with_time(replicas: Sequence[ReplicaLoad]) -> tuple[ReplicaLoad, str] | None:
    """Returns a replica for best effort: an idle one, or one with the loosest TPOT where no prompt waits. If there is
    no other best effort, a replica with waiting prompts will do."""
    loosest = max([replica.tpot for replica in replicas])
    for replica in sorted(replicas, key=lambda r: (r.count > 0, r.count + r.others)):
        if not replica.other_prompts and (not replica.count or (replica.tpot == loosest and not replica.prompts)):
            return replica, "best effort: no prompt waits"
    if not any(replica.others for replica in replicas):
        return max(replicas, key=lambda r: (r.tpot, -r.count)), "best effort: the only one"
    return None


def tpot_of(seq: SeqView, now: float) -> float:
    """Returns the seconds that each token may take: its TPOT, or the even share of its e2e; inf without either."""
    slo = seq.slo
    if slo.e2e is None:
        return slo.tpot or inf
    end = seq.request.arrival + slo.e2e + seq.tool_seconds
    return min(slo.tpot or inf, max(0.0, end - now) / (remaining_output(seq) + 1.0))
