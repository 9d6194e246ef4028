"""JITServe: the requests that earn most tokens in SLO a second, in batches of like length, chosen anew every 50 steps.

For mixes of chat, requests with a deadline and sessions, where lengths are known badly: a baseline.
docs/policies/jitserve.md has the rest.

The rules are those of the authors' code (UIUC-MLSys/JITServe: `jitserve/scheduler`, and its changed vLLM V0), with what
its scripts set: a sliding window, three times as many candidates as seats, `penalty_factor` 100.

Density: the tokens that a request would earn over the seconds it would still run, which are the mean step times the
output to come, of which the 95 % quantile is predicted (`quantile`, refined as output comes out). A prompt's token
earns 1 and an output token 8, times (deadline / when it is predicted to be met) ** `penalty_factor` where that is less
than 1. A request with an e2e alone earns all at its end; any other its prompt by its TTFT, and its output by its TTFT
and the TPOT of all output. Requests of a session with an e2e alone earn together, over the sum of their seconds.
Grouped margin: every `schedule_interval` steps the densest `CANDIDATES` times `max_num_seqs` are sorted by length; the
`max_num_seqs` neighbours with the greatest sum of densities are the batch, and up to `SWAPS` running ones shorter or
longer than all of these give up their KV. Between choices vLLM's own rule, those that wait by density: decodes, prompts
begun, and who waits while there are seats; `SWAPS` fewer where the mean step is longer than the tightest TPOT here.

Ours: the mean step is one of the latency model's; best effort comes last, with turns (`policy_kit.turns`), and a
session's e2e is what its client states. KV that is given up is computed again: swapping it to the host is not here.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from math import inf
from typing import ClassVar

from rubato.core.interfaces import SeqView, View
from rubato.core.plan import Plan
from rubato.policy_kit.batch_builder import BatchBuilder, remaining_output, run_in_order
from rubato.policy_kit.prefill_jobs import tpot_of
from rubato.policy_kit.stateless import Stateless
from rubato.policy_kit.turns import Turns, add_decodes

SOURCE = "JITServe: SLO-aware LLM Serving with Imprecise Request Information (NSDI 2026, arXiv 2504.20068)"
OUTPUT_WEIGHT = 8.0  # of an output token; a prompt token weighs 1
CANDIDATES, SWAPS = 3, 3  # the scripts' `top_k_selection`; `max_swaps_per_iter`
INTERVALS = 10  # the mean step time is taken over this many intervals between choices
MIN_DEADLINE_SHARE = 1e-6  # least deadline, as a share of the predicted time


@dataclass
class Scheduler(Stateless):
    """Plans batches of the densest requests of like length.

    Args:
        max_num_seqs ([1, inf)): seats: requests that run at once (vLLM's name)
        budget ([1, inf)): tokens of a batch, decodes included
        penalty_factor ([0, inf)): the power by which what a late request earns falls (100 in the authors' scripts, 1 in
            their code)
        schedule_interval ([1, inf)): steps between choices
    """

    needs = frozenset({"chunked", "preempt", "mixed"})
    default_lengths: ClassVar[str] = "quantile"
    max_num_seqs: int = 32
    budget: int = 512
    penalty_factor: float = 100.0
    schedule_interval: int = 50
    _step: float = field(default=0.0, init=False)  # seconds, mean
    _steps: int = field(default=0, init=False)  # planned since the last choice
    _density: dict[str, float] = field(default_factory=dict, init=False)  # by id, as of the last choice or first sight
    _turns: Turns = field(default_factory=Turns, init=False)

    def __post_init__(self) -> None:
        if self.max_num_seqs < 1 or self.budget < 1 or self.schedule_interval < 1 or self.penalty_factor < 0.0:
            raise ValueError(
                f"max_num_seqs {self.max_num_seqs}, budget {self.budget}, schedule_interval {self.schedule_interval}, "
                f"penalty_factor {self.penalty_factor}: give at least 1 request, token and step, and 0 or more"
            )

    def plan(self, view: View) -> Plan:
        builder = BatchBuilder(view, self.budget)
        self._step = self._step or view.latency.step_time(view.decodes.plus(1, 0))
        self._steps += 1
        if self._steps >= self.schedule_interval:
            self._steps = 0
            self._density.clear()
            for seq in self._find_outside_window(view):
                builder.preempt(seq)
        self._run(builder)
        if not builder.work and not builder.decode:
            run_in_order(builder, [s for s in view.running if s not in builder.preempted])
        if builder.work or builder.decode:
            share = 1.0 / (INTERVALS * self.schedule_interval)
            self._step += share * (view.latency.step_time(builder.shape) - self._step)
        builder.fold_decodes()
        return builder.plan()  # no step repeats it: each counts towards the next choice and in the mean

    def _run(self, builder: BatchBuilder) -> None:
        """Adds decodes, running prompts and, unless a request lacked KV, waiting ones by density while seats last."""
        view, preempted_before = builder.view, len(builder.preempted)
        self._turns.give(builder)
        if builder.work or builder.preempted or not builder.decode_all():
            add_decodes(builder, [s for s in view.running if s.pending == 1])
        run_in_order(builder, [s for s in view.prefilling if s.id not in builder.work and s not in builder.preempted])
        free = self.max_num_seqs - (len(view.running) - len(builder.preempted))
        if self._step > min(map(tpot_of, view.running), default=inf):
            free -= SWAPS
        if not (view.running or view.moving):
            free = max(1, free)
        if not view.waiting or free < 1 or len(builder.preempted) > preempted_before:
            return
        queue = self._by_density(view, [s for s in view.waiting if s.id not in builder.work])
        for seq in queue[:free]:
            tokens = min(seq.pending, builder.tokens_left)
            if not tokens or builder.tokens_that_fit(seq) < tokens:
                return
            builder.add(seq, tokens)

    def _find_outside_window(self, view: View) -> list[SeqView]:
        """Returns running requests to preempt: those shorter or longer than all of the best window."""
        seats = min(self.max_num_seqs, view.limits.max_num_seqs)
        if view.count <= seats:
            return []
        dense = self._by_density(view, [*view.waiting, *view.running])[: CANDIDATES * seats]
        dense.sort(key=lambda s: s.length)
        sums = [0.0, *accumulate(self._density[s.id] for s in dense)]
        starts = range(len(dense) - seats + 1)
        first = max(starts, key=lambda i: sums[i + seats] - sums[i])
        shortest, longest = dense[first].length, dense[first + seats - 1].length
        return [s for s in view.running if not shortest <= s.length <= longest][:SWAPS]

    def _by_density(self, view: View, seqs: Sequence[SeqView]) -> list[SeqView]:
        """Sorts the densest first, best effort last."""
        if any(s.id not in self._density for s in seqs):
            self._weigh_requests(view)
        return sorted(seqs, key=lambda s: (s.best_effort, -self._density[s.id], s.request.arrival, s.id))

    def _weigh_requests(self, view: View) -> None:
        """Computes the density of every request without one. Requests of a session earn together."""
        groups: dict[object, list[SeqView]] = defaultdict(list)
        for seq in [*view.waiting, *view.running]:
            request = seq.request
            is_compound = request.session and _ends_once(seq)
            groups[(request.tenant, request.session) if is_compound else seq.id].append(seq)
        for peers in groups.values():
            if all(s.id in self._density for s in peers):
                continue
            seconds = self._step * sum(map(remaining_output, peers))
            density = sum(self._find_earnings(s, view.now, seconds) for s in peers) / seconds
            self._density.update((s.id, density) for s in peers)

    def _find_earnings(self, seq: SeqView, now: float, seconds: float) -> float:
        """Returns the weighted tokens that it earns if it ends `seconds` from now."""
        if seq.best_effort:
            return 0.0
        slo, request = seq.slo, seq.request
        prompt, output_left, end = request.prompt, remaining_output(seq), now + seconds
        tokens = seq.output + output_left
        if _ends_once(seq):
            return (prompt + OUTPUT_WEIGHT * tokens) * self._share_earned(slo.e2e, end - request.arrival)
        has_output = seq.first_token_at is not None
        pace = None if slo.tpot is None else (slo.ttft or 0.0) + slo.tpot * tokens
        output = (
            OUTPUT_WEIGHT * (output_left if has_output else tokens) * self._share_earned(pace, end - seq.stage_start)
        )
        return (
            output if has_output else output + prompt * self._share_earned(slo.ttft, now + self._step - seq.stage_start)
        )

    def _share_earned(self, bound: float | None, seconds: float) -> float:
        """Returns the share earned by work due within `bound` seconds that takes `seconds`."""
        ratio = 1.0 if bound is None or seconds <= bound else max(MIN_DEADLINE_SHARE, bound / seconds)
        share: float = ratio**self.penalty_factor
        return share


def _ends_once(seq: SeqView) -> bool:
    """Returns whether it has only an e2e, and so earns all its tokens at its end."""
    slo = seq.slo
    return slo.e2e is not None and slo.ttft is None and slo.tpot is None
