"""Which replica each request goes to: all replicas alike, or divided by TPOT while the requests of late gain by it."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import inf, nextafter
from typing import ClassVar

from rubato.core.events import Event
from rubato.core.interfaces import Dispatch, SeqView, View
from rubato.policies import least_loaded, rubato_pd
from rubato.policies.rubato.division import Recent, divided, prompts_gain, work
from rubato.policies.rubato.replica_load import Replica
from rubato.policies.rubato.supply import SLACK
from rubato.policy_kit.batch_builder import remaining_output
from rubato.policy_kit.refusals import fleet_refusal, refusable
from rubato.policy_kit.step_table import StepTable

MODES = ("co", "pd", "auto")
STEP_TIMES = frozenset({"step_times"})
FEWEST_REPLICAS = 4  # replicas from which on mode auto divides them: each is too large a part of a smaller fleet
SEEN_REQUESTS = 256  # requests of late by which replicas are divided; it is decided anew when a quarter of them is new
# How many times as much of their time prompts must get (`prompts_gain`) for mode auto to divide, `SLACK` more, or
# not to join again, `SLACK` less. On 4 replicas each alike holds, of what bins hold: slos-serve-mixed (1.2) 1.3 times,
# the 70B model of the gate (1.5) 1.2 to 1.8 times, uniform-4096-1024 with TPOTs doubled (1.6) as much, half as long
# again (1.4) 0.75 times; mooncake-conversation with TPOTs a quarter longer (2.7) 0.7 times.
GAIN = 1.65


@dataclass
class Router:
    """Places each request on replicas that are alike, divided by TPOT, or apart by role.

    Args:
        mode (auto, co, pd): all alike or divided by TPOT as that pays, from four replicas on; divided from the start;
            prefill and decode apart, as by `rubato_pd`
    """

    needs: ClassVar[frozenset[str]] = frozenset()
    default_lengths: ClassVar[str] = "conditional_mean"
    mode: str = "auto"
    _apart: rubato_pd.Router | None = field(init=False, repr=False, default=None)
    _alike: least_loaded.Router = field(init=False, repr=False, default_factory=least_loaded.Router)
    _recent: deque[Recent] = field(init=False, repr=False, default_factory=lambda: deque(maxlen=SEEN_REQUESTS))
    _fresh: int = field(init=False, repr=False, default=0)  # requests since the last decision
    _tpots: dict[str, float] = field(init=False, repr=False, default_factory=dict)  # by replica; {}: all are alike
    _held: set[str] = field(init=False, repr=False, default_factory=set)
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
            self._look_back(held, fleet)
        else:
            self._tpots = {}
        if self._tpots:
            dispatch = self._place_by_tpot(held, fleet, now)
        else:
            dispatch = self._alike.place(held, fleet, now)
        self._held = {seq.id for seq in held} - dispatch.place.keys()
        return dispatch

    def _look_back(self, held: Sequence[SeqView], fleet: Sequence[View]) -> None:
        """Whether replicas are to be divided, and how: anew now and then, and when one came or went. It decides where
        requests go from now on; what a replica has, it keeps."""
        steps = self._steps(fleet[0])
        for seq in held:
            slo = seq.request.stages[seq.stage].slo
            if seq.id not in self._held:
                self._fresh += 1
                if not seq.best_effort and (slo.tpot is not None or slo.e2e is None):  # which TPOT an e2e takes varies
                    self._recent.append(Recent(slo.tpot or inf, work(seq, steps)))
        divides = self.mode == "co" or bool(self._tpots)
        if 4 * self._fresh < SEEN_REQUESTS and not (divides and self._tpots.keys() != {view.id for view in fleet}):
            return
        self._fresh = 0
        if self.mode == "auto":
            gain = prompts_gain([each.tpot for each in self._recent], fleet)
            if len(fleet) < FEWEST_REPLICAS or gain < GAIN * (1.0 - SLACK if self._tpots else 1.0 + SLACK):
                self._tpots = {}
                return
        tpots = divided(self._recent, steps.decodes(1, 1), len(fleet))
        before = sorted(fleet, key=lambda view: self._tpots.get(view.id, inf))  # stable: few get another TPOT
        self._tpots = {view.id: tpot for view, tpot in zip(before, tpots, strict=True)}

    def _place_by_tpot(self, held: Sequence[SeqView], fleet: Sequence[View], now: float) -> Dispatch:
        """Each as soon as a replica can keep its promise and those given. What could not be in time even alone is best
        effort from then on, or refused."""
        replicas = [Replica(view, self._tpots[view.id], self._steps(view)) for view in fleet]
        place: dict[str, str] = {}
        why: dict[str, str] = {}
        reject: dict[str, str] = {}
        demote: list[str] = []
        wake_at = inf
        for seq in sorted(held, key=in_turn):
            latest = seq.due - min([r.steps.alone(seq.pending) for r in replicas])
            late = not seq.best_effort and latest < now
            if late and refusable(seq):
                reject[seq.id] = fleet_refusal(seq, fleet)
                continue
            if late:
                demote.append(seq.id)
            found = with_time(replicas) if late or seq.best_effort else keeping(seq, replicas, now)
            if found is not None:
                replica, why[seq.id] = found
                replica.add(seq)
                place[seq.id] = replica.view.id
            elif seq.best_effort:
                break  # the others are younger
            elif not late:
                wake_at = min(wake_at, latest)
        return Dispatch(place, reject, demote, wake_at=nextafter(wake_at, inf) if wake_at < inf else None, why=why)

    def _steps(self, view: View) -> StepTable:
        """Its step times: one table for all with the same latency model, which takes a thousand questions to fill."""
        most = view.limits.max_num_batched_tokens
        table = self._tables.get((id(view.latency), most))
        if table is None:
            table = self._tables[id(view.latency), most] = StepTable(view.latency, most)
        table.renew(view.now)
        return table


def in_turn(seq: SeqView) -> tuple[bool, float]:
    """A key to sort by: nearest deadline first, best effort last, the oldest first."""
    return seq.best_effort, seq.request.arrival if seq.best_effort else seq.due


def keeping(seq: SeqView, replicas: Sequence[Replica], now: float) -> tuple[Replica, str] | None:
    """Where its promise is kept, and why there: of the replicas for TPOTs no looser than its own the nearest, and of
    these the least loaded. One without a TTFT goes to that, whatever it keeps, and so does one whose TPOT none can."""
    slo, tpot = seq.request.stages[seq.stage].slo, tpot_of(seq, now)
    order = sorted(replicas, key=lambda r: (-r.tpot, r.load))
    order = [r for r in order if r.tpot <= tpot * (1.0 + 1e-9)] or order[::-1]
    for replica in order:
        if replica.keeps(seq, tpot, now):
            return replica, "keeps its TPOT" if replica.tpot == inf else f"for TPOTs from {1e3 * replica.tpot:g} ms"
    if slo.ttft is None or not any(r.steps.decodes(1, seq.length) <= tpot for r in replicas):
        return order[0], "the nearest TPOT"
    return None


def with_time(replicas: Sequence[Replica]) -> tuple[Replica, str] | None:
    """For best effort: an idle replica, or one for the loosest TPOT: where no prompt waits, or one does if there is no
    other best effort anywhere."""
    loosest = max([replica.tpot for replica in replicas])
    for replica in sorted(replicas, key=lambda r: (r.count > 0, r.count + r.others)):
        if not replica.other_prompts and (not replica.count or (replica.tpot == loosest and not replica.prompts)):
            return replica, "best effort: no prompt waits"
    if not any(replica.others for replica in replicas):
        return max(replicas, key=lambda r: (r.tpot, -r.count)), "best effort: the only one"
    return None


def tpot_of(seq: SeqView, now: float) -> float:
    """Seconds in which its tokens are wanted: its TPOT, or what its e2e leaves for each; inf for one without."""
    slo = seq.request.stages[seq.stage].slo
    if slo.e2e is None:
        return slo.tpot or inf
    end = seq.request.arrival + slo.e2e + seq.tool_seconds
    return min(slo.tpot or inf, max(0.0, end - now) / (remaining_output(seq) + 1.0))
