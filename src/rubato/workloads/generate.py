"""Drawing a workload: arrivals, kinds, lengths, tiers, stages and acceptance, each from a random stream of its own.

Changing what one stream is used for never shifts another: another rate gives the same requests at other times, other
lengths the same kinds, and a longer run begins with the shorter one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import cache
from typing import Any

import numpy as np
import orjson

from rubato.core.request import SLO
from rubato.workloads.arrivals import ArrivalProcess, Poisson, offered
from rubato.workloads.lengths import Floats, Ints, of
from rubato.workloads.prompts import Count, with_texts
from rubato.workloads.request_kinds import FollowUp, Kind, MixChange, tiers_of
from rubato.workloads.workload import Arrival, OfferedStage, Workload, check_rate

_ARRIVALS, _KINDS, _LENGTHS = 0, 1, 2  # random streams; 3 is `texts.STREAM`
_TTFT, _ROUNDS, _STAGES, _ACCEPTANCE = 4, 5, 6, 7

Prefill = Callable[[int], float]
BEST_EFFORT = "best_effort"  # the tier of requests whose TTFT no idle replica can meet


def make(
    name: str,
    kinds: Sequence[Kind],
    rate: float,
    *,
    duration: float | None = None,
    count: int | None = None,
    seed: int = 0,
    count_tokens: Count | None = None,
    arrivals: ArrivalProcess | None = None,
    changes: Sequence[MixChange] = (),
    prefill: Prefill | None = None,
    texts: bool = True,
    max_model_len: int | None = None,
    profile: str = "",
) -> Workload:
    """Makes requests of a mix of kinds at `rate` requests/s, for `duration` seconds or `count` of them; Poisson by
    default.

    Args:
        changes: mixes that follow the first.
        prefill: returns the zero-load prefill seconds of so many prompt tokens. TTFTs given as slowdowns become seconds
            by it, and TTFTs that an idle replica cannot meet by it are not promised (a request left with none is best
            effort; `notes` count them).
        texts: whether texts of these lengths are made; prompt_tokens are then the text's, by `count_tokens` (a
            tokenizer's) or estimated.
        max_model_len: outputs are cut so that prompt + output fit (`notes` count them).

    Raises:
        ValueError: impossible arguments.
    """
    check_rate(rate)
    process = arrivals or Poisson()
    at = offered(process, rate, [seed, _ARRIVALS], count, duration)
    if not len(at):
        raise ValueError(f"workload {name!r} is empty: no request arrives in {duration} s at {rate} requests/s")
    mixes = [MixChange(tuple(kinds)), *changes]
    every = [kind for mix in mixes for kind in mix.kinds]
    tiers = tiers_of(every)
    notes: dict[str, Any] = {"kinds": [_described(kind) for kind in kinds], "arrivals": str(process)}
    if changes:
        notes["changes"] = [asdict(c) | {"kinds": [_described(kind) for kind in c.kinds]} for c in changes]
    which = _which(mixes, at, seed)
    rounds = _rounds(every, which, seed)
    stages = _lengths(every, which, rounds, seed)
    if max_model_len is not None:
        stages = [_cut(every, stages, max_model_len, notes)]
    rows = _arrivals(name, every, at, which, rounds, stages, SLOAssignment(prefill), seed)
    if unmet := sum(a.tier == BEST_EFFORT for a in rows):
        notes["best_effort"] = f"{unmet} requests: no idle replica could meet any of their TTFTs"
    tiers |= {a.tier: SLO() for a in rows if a.tier not in tiers}
    length = duration if duration is not None else float(at[-1])
    plain = orjson.loads(orjson.dumps(notes))  # as a file gives them back
    made = Workload(name, seed, rate, length, tiers, tuple(rows), True, plain, profile)
    return with_texts(made, count_tokens) if texts else made


def _described(kind: Kind) -> dict[str, Any]:
    """A kind for the notes, without what it leaves at its default."""
    default = Kind(kind.app, kind.slo, kind.prompt, kind.output)
    values = asdict(kind)
    return {key: value for key, value in values.items() if key in _ALWAYS or value != asdict(default)[key]}


_ALWAYS = ("app", "slo", "prompt", "output", "tier", "share")


def _which(mixes: Sequence[MixChange], at: Floats, seed: int) -> Ints:
    """For each request the index of its kind among all mixes' kinds, one mix after the other."""
    u = np.random.default_rng([seed, _KINDS]).random(len(at))
    which = np.zeros(len(at), np.int64)
    before = 0
    for mix in mixes:
        shares = np.cumsum([kind.share for kind in mix.kinds]) / sum(kind.share for kind in mix.kinds)
        drawn = before + np.minimum(np.searchsorted(shares, u, side="right"), len(shares) - 1)
        which = np.where((np.arange(len(at)) >= mix.request) & (at >= mix.at), drawn, which)
        before += len(mix.kinds)
    return which


class SLOAssignment:
    """SLOs of single requests; equal ones are one object."""

    def __init__(self, prefill: Prefill | None) -> None:
        self._prefill = prefill
        self._slo_of = cache(SLO)
        self.seconds = cache(self._seconds)

    def _seconds(self, prompt: int) -> float:
        """Zero-load prefill. Raises ValueError without a prefill function, or when it says what cannot be."""
        if self._prefill is None:
            raise ValueError("some TTFTs are multiples of the zero-load prefill time: give `prefill` (--prefill-ms)")
        seconds = self._prefill(prompt)
        if not seconds > 0.0:
            raise ValueError(f"prefill({prompt}) is {seconds} s: give a function that says positive seconds")
        return seconds

    def slo(self, of: Kind | FollowUp, prompt: int) -> SLO:
        """What a stage with this prompt is promised."""
        if of.ttft_slowdown is None:
            return of.slo
        return self._slo_of(of.ttft_slowdown * self.seconds(prompt), of.slo.tpot, of.slo.e2e)

    def draw_slo(self, kind: Kind, prompt: int, u: float) -> SLO | None:
        """With one of the kind's TTFTs, evenly among those that an idle replica can meet; None if it can meet none."""
        able = [t for t in kind.ttfts if self._prefill is None or t >= self.seconds(prompt)]
        return self._slo_of(able[int(u * len(able))], kind.slo.tpot, kind.slo.e2e) if able else None


def _rounds(kinds: Sequence[Kind], which: Ints, seed: int) -> Ints:
    """How often each request's first stage runs."""
    u = np.random.default_rng([seed, _ROUNDS]).random(len(which))
    rounds = np.ones(len(which), np.int64)
    for k, kind in enumerate(kinds):
        if kind.rounds is not None:
            rounds[which == k] = kind.rounds.at(u[which == k])
    return rounds


def _lengths(kinds: Sequence[Kind], which: Ints, rounds: Ints, seed: int) -> list[tuple[Ints, Ints]]:
    """Prompt and output tokens of every request's first stage, its second, ...; 0 where it has no such stage."""
    last = rounds + np.array([len(kind.then) for kind in kinds])[which]
    stages: list[tuple[Ints, Ints]] = []
    for slot in range(int(last.max())):
        u = np.random.default_rng([seed, _STAGES, slot] if slot else [seed, _LENGTHS]).random((len(which), 2))
        prompt, output = np.zeros(len(which), np.int64), np.zeros(len(which), np.int64)
        for k, kind in enumerate(kinds):
            for number, stage in enumerate(kind.stages):
                here = slot == rounds + number - 1 if number else slot < rounds
                rows = (which == k) & here
                prompt[rows] = np.maximum(0 if number else 1, of(stage.prompt).at(u[rows, 0]))
                output[rows] = np.maximum(1, of(stage.output).at(u[rows, 1]))
        stages.append((prompt, output))
    return stages


def _cut(
    kinds: Sequence[Kind], stages: Sequence[tuple[Ints, Ints]], max_model_len: int, notes: dict[str, Any]
) -> tuple[Ints, Ints]:
    """Lengths within the model's context. Raises ValueError where requests have several stages."""
    if max_model_len < 2 or any(kind.staged for kind in kinds):
        raise ValueError(f"max_model_len {max_model_len}: give 2 tokens or more, and only kinds of one stage")
    prompt = np.minimum(stages[0][0], max_model_len - 1)
    output = np.minimum(stages[0][1], max_model_len - prompt)
    cut = int(np.sum((prompt != stages[0][0]) | (output != stages[0][1])))
    notes["max_model_len"] = f"{cut} requests cut to {max_model_len} tokens of prompt and output"
    return prompt, output


def _arrivals(
    name: str, kinds: Sequence[Kind], at: Floats, which: Ints, rounds: Ints, stages: Sequence[tuple[Ints, Ints]],
    promises: SLOAssignment, seed: int,
) -> list[Arrival]:  # fmt: skip
    """The requests, one by one, from columns as Python numbers."""
    ttft, accepted = (np.random.default_rng([seed, purpose]).random(len(at)) for purpose in (_TTFT, _ACCEPTANCE))
    lengths = [list(zip(prompt.tolist(), output.tolist(), strict=True)) for prompt, output in stages]
    turns = rounds.tolist()
    rows: list[Arrival] = []
    for i, (when, k) in enumerate(zip(at.tolist(), which.tolist(), strict=True)):
        kind = kinds[k]
        (prompt, output), tier = lengths[0][i], kind.tier
        parts: tuple[OfferedStage, ...] = ()
        slo: SLO | None = None
        if kind.staged:
            parts = _parts(kind, turns[i], [column[i] for column in lengths], promises)
            prompt, output = sum(part.prompt for part in parts), sum(part.output for part in parts)
        elif kind.ttfts:
            slo = promises.draw_slo(kind, prompt, ttft[i])
            tier = tier if slo else BEST_EFFORT
        elif kind.ttft_slowdown is not None:
            slo = promises.slo(kind, prompt)
        low, high = kind.acceptance or (0.0, 0.0)
        acceptance = low + float(accepted[i]) * (high - low) if kind.acceptance else None
        rows.append(
            Arrival(
                f"{name}-{i}", when, tier, kind.app, prompt, output,
                slo=slo, parts=parts, tenant=kind.tenant, acceptance=acceptance,
            )
        )  # fmt: skip
    return rows


def _parts(
    kind: Kind, rounds: int, lengths: Sequence[tuple[int, int]], promises: SLOAssignment
) -> tuple[OfferedStage, ...]:
    """A request's stages: rounds of the first, then the others."""
    stages: list[OfferedStage] = []
    for stage, (prompt, output) in zip([kind] * rounds + list(kind.then), lengths, strict=False):
        slo = promises.slo(stage, prompt) if prompt else stage.slo
        stages.append(OfferedStage(prompt, output, slo, stage.ends, stage.pause if stages else 0.0))
    if not stages or stages[0].prompt < 1:
        raise ValueError(f"kind {kind.app!r}: a request of it has no prompt: give its first stage one, and one round")
    return tuple(stages)
