"""What `rubato judge` found on one load: estimates over seeds and ratios paired by seed, as JSON and as a table."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import ceil, inf, log
from typing import Any

from rubato.measure.confidence import ONE_SEED, Estimate, attainment_over_seeds, over_seeds
from rubato.measure.pictures import COLOURS
from rubato.measure.result import told_apart, with_interval
from rubato.measure.tables import Table, number, percent
from rubato.planning import feasibility
from rubato.planning.capacity import too_short
from rubato.planning.judge.loads import JudgedLoad
from rubato.planning.judge.search import ALWAYS, FIRST, INFEASIBLE
from rubato.simulation.run_spec import RunSpec
from rubato.workloads.resample import BLOCK_S

MIN_BLOCKS = 5  # of which a bootstrap says little

Value = Mapping[str, Any]  # what `judge.search.search` returns, read back from JSON


def result(load: JudgedLoad, specs: Sequence[RunSpec], values: Sequence[Value], notes: Sequence[str]) -> dict[str, Any]:
    """Returns a load's part of the JSON.

    Args:
        values: what was measured, by policy and seed.
        notes: says what did not run.
    """
    labels = [spec.choice.label for spec in specs]
    by_policy = {label: [value for value in values if value["policy"] == label] for label in labels}
    own = load.own
    infeasible = feasibility.assess(own, specs[0].hardware, specs[0].slo_rule)
    rows = [_row(label, by_policy) for label in labels]
    rows.sort(key=lambda row: -_height(by_policy[row["policy"]], FIRST))
    return {
        "profile": load.machine.name,
        "replicas": specs[0].replicas,
        "slo_rule": specs[0].slo_rule,
        "requests": len(own.arrivals),
        "seconds": own.duration,
        "rate": own.rate,
        "tiers": dict(Counter(one.tier for one in own.arrivals)),
        "slos": load.slos,
        "ttft_bound": load.source.ttft,
        "ttft_bound_says": load.bound,
        "times_own_rate": load.recorded,
        "infeasible": dict(infeasible.infeasible),
        "policies": rows,
        "searches": values,
        "notes": [
            *load.notes,
            *([f"without drafts, {infeasible.text}"] if infeasible.count and specs[0].drafter else []),
            *([infeasible.text] if infeasible.count and not specs[0].drafter else []),
            *_reasons(values),
            *notes,
            *_few(load, values),
        ],
    }


def _row(label: str, by_policy: Mapping[str, Sequence[Value]]) -> dict[str, Any]:
    own = by_policy[label]
    return {
        "policy": label,
        "capacity": {measure: _capacity(measure, label, by_policy) for measure in own[0]["capacity"]},
        "own_rate": {tier: _attained(own, tier) for tier in ("all", *own[0]["own_rate"]["offered"])},
        "own_rate_worst_tier": over_seeds([value["own_rate"]["worst"] for value in own]),
    }


def _capacity(measure: str, label: str, by_policy: Mapping[str, Sequence[Value]]) -> dict[str, Any]:
    """rate: requests/s of the fleet; times_own: in own rates of the load. without: by seed, why there is no capacity,
    and then both are None; a ratio also where a rate is 0."""
    rates_by_policy = {name: _rates(own, measure) for name, own in by_policy.items()}
    own = [value["rate"] for value in by_policy[label]]
    others = [name for name in by_policy if name != label]
    best = max(others, key=lambda name: _height(by_policy[name], measure), default=None)
    rates = rates_by_policy[label]
    capacities = {str(value["seed"]): value["capacity"][measure] for value in by_policy[label]}
    return {
        "without": {seed: why for seed, why in capacities.items() if isinstance(why, str)},
        "rate": None if rates is None else _not_negative(over_seeds(rates)),
        "times_own": None
        if rates is None
        else _not_negative(over_seeds([a / b for a, b in zip(rates, own, strict=True)])),
        "against_edf": None if label == "edf" else _ratio(rates, rates_by_policy["edf"]),
        "best_other": best,
        "against_best_other": None if best is None else _ratio(rates, rates_by_policy[best]),
    }


def _rates(own: Sequence[Value], measure: str) -> list[float] | None:
    capacities = [value["capacity"][measure] for value in own]
    return None if any(isinstance(one, str) for one in capacities) else capacities


def _height(own: Sequence[Value], measure: str) -> float:
    """For order: the mean rate (requests/s); above all where no rate is too much, below all where any is."""
    capacities = [value["capacity"][measure] for value in own]
    if INFEASIBLE in capacities:
        return -inf
    return inf if ALWAYS in capacities else sum(capacities) / len(capacities)


def _not_negative(load: Estimate) -> Estimate:
    return replace(load, low=max(0.0, load.low))


def _ratio(rates: Sequence[float] | None, others: Sequence[float] | None) -> Estimate | None:
    """The geometric mean of the ratios, seed by seed."""
    if rates is None or others is None or not all(rates) or not all(others):
        return None
    return over_seeds([log(a / b) for a, b in zip(rates, others, strict=True)]).exp()


def _attained(own: Sequence[Value], tier: str) -> Estimate:
    def counts(kind: str) -> list[int]:
        each: list[Mapping[str, int]] = [value["own_rate"][kind] for value in own]
        return [sum(one.values()) if tier == "all" else one.get(tier, 0) for one in each]

    met, offered = counts("met"), counts("offered")
    if len(own) < 2:
        return over_seeds([met[0] / offered[0]])
    return attainment_over_seeds(met, offered)


def _reasons(values: Sequence[Value]) -> list[str]:
    """A note for each measure and reason for which there is no capacity, and for what attains at no rate."""
    by_reason: dict[tuple[str, str], list[str]] = {}
    for value in values:
        for measure, capacity in value["capacity"].items():
            if capacity in (INFEASIBLE, ALWAYS) or capacity == 0.0:
                why = capacity or "attained at no rate tried (counts as 0)"
                by_reason.setdefault((measure, why), []).append(f"{value['policy']} under seed {value['seed']}")
    every = len(values)
    return [
        f"{measure!r} of {'all policies and seeds' if len(where) == every else ', '.join(where)} is {why}"
        for (measure, why), where in by_reason.items()
    ]


def _few(load: JudgedLoad, values: Sequence[Value]) -> list[str]:
    """Notes on runs that are too short, seeds that say little, one seed."""
    short = too_short(values)
    blocks = ceil(load.own.duration / BLOCK_S)
    few = (
        f"it lasts {load.own.duration:.0f} s, blocks of {BLOCK_S:g} s to draw from: {blocks} (fewer than "
        f"{MIN_BLOCKS}), so that seeds differ by little more than where they begin, and intervals are too narrow"
    )
    seeds = {value["seed"] for value in values}
    return [
        *([f"{short}; take a longer load"] if short else []),
        *([few] if blocks < MIN_BLOCKS and seeds != {0} else []),
        *([ONE_SEED] if len(seeds) < 2 else []),
    ]


# --------------------------------------------------------------------------- the table


def table(load: Mapping[str, Any]) -> Table:
    """A load's name, what was offered to what, and a row for each policy."""
    tiers = ", ".join(f"{tier} {count}" for tier, count in load["tiers"].items())
    head, *rows = _rows(load)
    return Table(
        tuple(head), tuple(map(tuple, rows)),
        f"{load['load']}: {load['requests']} requests in {load['seconds']:.0f} s, {load['rate']:.3g}/s ({tiers}); "
        f"{load['slos']}; rule {load['slo_rule']!r}; {load['ttft_bound_says']}. Replicas: {load['replicas']} of "
        f"{load['profile']}. {_unit(load)}, ratios of {FIRST!r}. Settings of policies are as given, not tuned",
    )  # fmt: skip


def contrast_sentence(load: Mapping[str, Any], reference: str) -> str:
    """A sentence: which policies hold more than the reference on a load, paired by seed; "" where nothing is told."""
    ratios = {row["policy"]: row["capacity"][FIRST]["against_edf"] for row in load["policies"]}
    known = {policy: ratio for policy, ratio in ratios.items() if ratio is not None and ratio.high < inf}
    shown = {policy: number(ratio, " ×") for policy, ratio in known.items()}
    return f"{load['load']}: {told_apart(known, reference, 'holds', shown, 1.0)}." if known else ""


def winner(load: Mapping[str, Any]) -> str | None:
    """Returns the policy that holds the largest rate on a load; None where none holds any, or where several hold every
    rate tried."""
    first, *others = load["policies"]  # the best comes first
    rate = first["capacity"][FIRST]["rate"]
    if rate is None:
        is_best = _is_unlimited(first["capacity"][FIRST]) and not any(
            _is_unlimited(row["capacity"][FIRST]) for row in others
        )
        return first["policy"] if is_best else None
    return first["policy"] if rate.value > 0.0 else None


def rows_of(load: Mapping[str, Any]) -> list[dict[str, Any]]:
    """One for each policy and measure; rates in requests/s of the fleet."""
    return [
        {"load": load["load"], "policy": row["policy"], "measure": measure}
        | with_interval("rate", capacity["rate"])
        | with_interval("times_own_rate", capacity["times_own"])
        | with_interval("against_reference", capacity["against_edf"])
        for row in load["policies"]
        for measure, capacity in row["capacity"].items()
    ]


def bars(load: Mapping[str, Any]) -> list[tuple[str, Estimate, str, str]]:
    """Each policy's rate by the first measure, for a picture; those without one are left out."""
    unit = "times_own" if load["times_own_rate"] else "rate"
    rates = [(row["policy"], row["capacity"][FIRST][unit]) for row in load["policies"]]
    return [(policy, rate, number(rate), COLOURS[0]) for policy, rate in rates if rate is not None]


def _unit(load: Mapping[str, Any]) -> str:
    return "Rates are multiples of the trace's own" if load["times_own_rate"] else "Rates are requests/s of the fleet"


def _rows(load: Mapping[str, Any]) -> list[list[str]]:
    measures = list(load["policies"][0]["capacity"])
    rows = [["policy", *measures, "attained at its own rate", "against edf", "against the best other"]]
    for row in load["policies"]:
        capacity = row["capacity"]
        rates = [_cell(capacity[measure], load["times_own_rate"]) for measure in measures]
        first = capacity[FIRST]
        best = _format(first["against_best_other"], "×")
        own = row["own_rate"]["all"]
        rows.append([
            row["policy"], *rates, percent(own) if own.high < inf else f"{100 * own.value:.1f} % (one seed)",
            _format(first["against_edf"], "×"), best if best == "-" else f"{best} ({first['best_other']})",
        ])  # fmt: skip
    return rows


def _cell(capacity: Mapping[str, Any], times_own: bool) -> str:
    if _is_unlimited(capacity):
        return "no limit"
    return _format(capacity["times_own"], "×") if times_own else _format(capacity["rate"])


def _is_unlimited(capacity: Mapping[str, Any]) -> bool:
    """Whether every rate tried was attained, under some seed at least."""
    return ALWAYS in capacity["without"].values() and INFEASIBLE not in capacity["without"].values()


def _format(estimate: Estimate | None, unit: str = "") -> str:
    return "-" if estimate is None else number(estimate, unit)
