"""The five latency models on tables of serving iterations, in and out of distribution: the tables of docs/latency.md.

    python benchmarks/latency_models.py TABLE.csv --of llama-3.1-8b-h200

TABLE.csv holds steps tagged GPU|lengths|token budget|requests per second (`rubato.latency.step_samples`). Splits: every
fifth step held out; fitted on one workload's lengths, tested on the others'; on the lower rate, tested on the higher;
on the small token budget, tested on the large one. `components` is not fitted: it is the packaged profile without
factors and host; the host's time per sequence, which decides how far its decode table is evened out, is added to both
sides.
"""

from __future__ import annotations

import argparse
import json
import sys
import timeit
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from rubato.core.interfaces import LatencyModel
from rubato.core.plan import Sample, Shape
from rubato.latency import profiles, step_samples
from rubato.latency.fit import FitReport, blank, error_report, fit_groups
from rubato.latency.model_kinds import MODELS

Groups = Mapping[str, Sequence[Sample]]


def splits(groups: Groups) -> dict[str, tuple[list[str], list[str]]]:
    """name -> (tags to fit on, tags to test on; none: held out)."""

    def by(field: int, keep: Callable[[str, list[str]], bool]) -> tuple[list[str], list[str]]:
        values = sorted({tag.split("|")[field] for tag in groups}, key=lambda v: (not v[0].isdigit(), v.zfill(8)))
        chosen = [tag for tag in groups if keep(tag.split("|")[field], values)]
        return chosen, [tag for tag in groups if tag not in chosen]

    return {
        "every fifth held out": (list(groups), []),
        "uniform → Azure": by(1, lambda v, _: v == "uniform"),
        "Azure → uniform": by(1, lambda v, _: v != "uniform"),
        "low → high rate": by(3, lambda v, all_: v == all_[0]),
        "budget 512 → 2048": by(2, lambda v, all_: v == all_[0]),
    }


def compared(groups: Groups, of: str) -> dict[str, dict[str, FitReport]]:
    """split -> model -> its errors."""
    profile = profiles.load(of)
    factors: dict[str, Any] = dict.fromkeys(profile.factors, 1.0)
    plain = profiles.load(of, host=0.0, **factors).model()
    per = profile.host_term.host_per_seq if profile.host_term else 0.0
    found: dict[str, dict[str, FitReport]] = {}
    for name, (train, test) in splits(groups).items():
        rows: dict[str, FitReport] = {}
        for kind in MODELS:
            fitted = fit_groups(groups, kind, train, test, profile)
            rows[kind] = (
                fitted.held_out if not test else (fitted.outside.get("all of these") or fitted.outside[test[0]])
            )
        tags = test or list(groups)
        steps = [Sample(s.shape, s.seconds + per * s.shape.seqs) for tag in tags for s in groups[tag]]
        rows["components"] = error_report(plain, steps)
        found[name] = rows
    return found


def speeds(groups: Groups, of: str) -> dict[str, tuple[float, float]]:
    """model -> microseconds of step_time, of a decode-only batch and of one with a chunk."""
    profile = profiles.load(of)
    decodes = Shape()
    for i in range(64):
        decodes = decodes.plus(1, 1000 + i)
    samples = [s for steps in groups.values() for s in steps]
    found: dict[str, tuple[float, float]] = {}
    for kind in (*MODELS, "components"):
        model: LatencyModel = profile.model() if kind == "components" else blank(kind, profile)
        if kind != "components":
            model.fit(samples[::7])
        shapes = (decodes, decodes.plus(512, 700))
        one, two = (min(timeit.repeat(partial(model.step_time, s), number=20_000, repeat=5)) * 50 for s in shapes)
        found[kind] = (one, two)
    return found


def text(found: Mapping[str, Mapping[str, FitReport]]) -> str:
    kinds = list(next(iter(found.values())))
    lines = [f"| split | {' | '.join(kinds)} |", "|---" * (len(kinds) + 1) + "|"]
    for name, rows in found.items():
        cells = [f"{r.p50:.1%} / {r.p95:.1%} ({r.r2:.3f})" for r in rows.values()]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("table", help="CSV of tagged steps")
    parser.add_argument("--of", required=True, metavar="PROFILE", help="the profile of the model and GPU in it")
    parser.add_argument("--json", metavar="FILE", help="also write the numbers here")
    args = parser.parse_args(argv)
    warnings.simplefilter("ignore")  # a table outside its range is what is measured here
    groups = step_samples.read(args.table)
    found, fast = compared(groups, args.of), speeds(groups, args.of)
    print(f"p50 / p95 relative error (R²), {args.of}\n")
    print(text(found))
    print(
        "\nstep_time, µs, decodes alone and with a chunk: "
        + ", ".join(f"{k} {a:.2f} {b:.2f}" for k, (a, b) in fast.items())
    )
    if args.json:
        data = {s: {k: [r.p50, r.p95, r.r2] for k, r in rows.items()} for s, rows in found.items()}
        Path(args.json).write_text(json.dumps({"errors": data, "microseconds": fast}, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
