"""`rubato fit`: a latency model from a log or a table of steps, and how well it predicts steps it has not seen."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from rubato.core import event_log
from rubato.core.interfaces import LatencyModel
from rubato.core.plan import Sample
from rubato.core.timeline import steps
from rubato.latency import operation_count, profiles, step_samples
from rubato.latency.fitted_model import FittedModel
from rubato.latency.least_squares import Array
from rubato.latency.model_kinds import MODELS
from rubato.latency.profiles.aiconfigurator import GPUS

HELD_OUT_SHARE = 0.2  # the last share of a log's steps
MIN_STEP_SHARE = 0.1  # of what is predicted, that a replayed step takes at least
FOLDS = 5  # of a table's, every fifth


@dataclass(frozen=True, slots=True)
class FitReport:
    """How well a fitted model predicts steps.

    Args:
        r2: share of the variance of seconds explained (nan when all steps took equally long).
        p50, p95: quantiles of |predicted − measured| / measured.
        n: number of steps.
    """

    r2: float
    p50: float
    p95: float
    n: int

    def format(self) -> str:
        return f"R² {self.r2:.4f}, relative error p50 {self.p50:.2%} p95 {self.p95:.2%}, {self.n} steps"


def error_report(model: LatencyModel, samples: Sequence[Sample]) -> FitReport:
    """Raises ValueError when there is nothing to compare with."""
    if not samples:
        raise ValueError("no samples: give at least one measured step to judge a latency model by")
    measured = np.array([s.seconds for s in samples])
    return report_of(np.array([model.step_time(s.shape) for s in samples]), measured)


def report_of(predicted: Array, measured: Array) -> FitReport:
    """Both in seconds, measured above 0."""
    error = np.abs(predicted - measured) / measured
    around = float(((measured - measured.mean()) ** 2).sum())
    r2 = 1.0 - float(((measured - predicted) ** 2).sum()) / around if around > 0.0 else float("nan")
    p50, p95 = np.quantile(error, [0.5, 0.95]).tolist()
    return FitReport(r2, p50, p95, len(measured))


def residuals(model: LatencyModel, samples: Sequence[Sample]) -> list[float]:
    """1 + (measured - predicted) / predicted of each step, in seconds; of a step shorter than the median one, over the
    median: a pause of the machine takes as long whatever it falls into, and is to be replayed in other steps."""
    both = [(sample.seconds, model.step_time(sample.shape)) for sample in samples]
    usual = float(np.median([predicted for _, predicted in both]))
    return [max(MIN_STEP_SHARE, 1.0 + (measured - predicted) / max(predicted, usual)) for measured, predicted in both]


def residuals_text(fitted: Fitted, source: str) -> str:
    """Formats residuals as `--noise replay:FILE` reads them: one a line.

    Args:
        source: what was measured.
    """
    head = f"# {source}: seconds of each step over those predicted ({fitted.kind}, fitted on them), in order"
    return "\n".join([head, *(f"{residual:.4g}" for residual in fitted.residuals), ""])


@dataclass(frozen=True)
class Fitted:
    """A model fitted on all steps, with the errors of one fitted on four fifths of them: on these steps, and on the
    fifth that was held out.

    Args:
        held_out_name: which steps were held out.
        outside: errors on steps of another distribution, by tag, none of which it has seen.
        residuals: measured over predicted times of the steps it was fitted on, in their order.
        notes: what it cannot know.
    """

    kind: str
    model: FittedModel
    inside: FitReport
    held_out: FitReport
    held_out_name: str = "the last fifth"
    outside: Mapping[str, FitReport] = field(default_factory=dict)
    residuals: Sequence[float] = ()
    notes: Sequence[str] = ()

    def config(self) -> dict[str, object]:
        """As `latency:` in a server's configuration."""
        return {"latency": {"kind": self.kind, **coefficients(self.model)}}

    def text(self) -> str:
        """The report as YAML comments above the configuration: the whole is a YAML file."""
        lines = [
            f"# {self.kind}, in sample: {self.inside.format()}",
            f"# {self.kind}, held out ({self.held_out_name}): {self.held_out.format()}",
            *(f"# {note}" for note in self.notes),
            *(f"# {self.kind}, out of distribution, {tag}: {report.format()}" for tag, report in self.outside.items()),
            yaml.safe_dump(self.config(), sort_keys=False, default_flow_style=None).rstrip(),
        ]
        return "\n".join(lines)

    def to_json(self) -> dict[str, Any]:
        outside = {tag: asdict(report) for tag, report in self.outside.items()}
        return {
            **self.config(),
            "in_sample": asdict(self.inside),
            "held_out": asdict(self.held_out),
            "out_of_distribution": outside,
            "notes": list(self.notes),
        }


def fit(samples: Sequence[Sample], kind: str = "affine", of: profiles.Profile | None = None) -> Fitted:
    """Fits a latency model of `kind` to steps; the last fifth is held out.

    Args:
        of: the profile whose model and GPU `operation_count` counts for.

    Raises:
        ValueError: the steps cannot determine the model, saying what is lacking.
    """
    cut = round(len(samples) * (1 - HELD_OUT_SHARE))
    trial, model = blank(kind, of), blank(kind, of)
    model.fit(samples)
    trial.fit(samples[:cut])
    inside, outside = error_report(trial, samples[:cut]), error_report(trial, samples[cut:])
    return Fitted(kind, model, inside, outside, residuals=residuals(model, samples))


def fit_groups(
    groups: Mapping[str, Sequence[Sample]],
    kind: str = "affine",
    train: Sequence[str] = (),
    test: Sequence[str] = (),
    of: profiles.Profile | None = None,
) -> Fitted:
    """Fit on the groups whose tag contains one of `train` (none given: on all), every fifth step held out; test on each
    of the others whose tag contains one of `test` (none given: on all others), and on them together.

    Raises ValueError when there are no such groups, or their steps cannot determine the model.
    """
    fit_tags = [tag for tag in groups if not train or any(part in tag for part in train)]
    others = [tag for tag in groups if tag not in fit_tags and (not test or any(part in tag for part in test))]
    for what, parts, found in (("fit on", train, fit_tags), ("test on", test, others)):
        if parts and not found:
            raise ValueError(f"no steps to {what}: no tag contains {' or '.join(parts)}; tags are {', '.join(groups)}")
    samples = [sample for tag in fit_tags for sample in groups[tag]]
    fit_samples = [s for i, s in enumerate(samples) if i % FOLDS]
    trial, model = blank(kind, of), blank(kind, of)
    model.fit(samples)
    trial.fit(fit_samples)
    outside = {tag: error_report(trial, groups[tag]) for tag in others}
    if len(others) > 1:
        outside["all of these"] = error_report(trial, [sample for tag in others for sample in groups[tag]])
    inside, left_out_error = error_report(trial, fit_samples), error_report(trial, samples[::FOLDS])
    return Fitted(kind, model, inside, left_out_error, "every fifth", outside, residuals(model, samples))


def fit_file(
    path: str | Path, kind: str = "affine", train: Sequence[str] = (), test: Sequence[str] = (), of: str | None = None
) -> Fitted:
    """The steps of an event log, or of a CSV table (its name ends in .csv; `rubato.latency.step_samples`). Raises
    ValueError for a file without steps, or whose steps do not determine a model."""
    profile = None if of is None else profiles.load(of)
    if str(path).endswith(".csv"):
        return fit_groups(step_samples.read(path), kind, train, test, profile)
    if train or test:
        raise ValueError(f"{path} is an event log, whose steps have no tags: --train and --test are for a .csv table")
    samples = steps(event_log.read(path))
    if not samples:
        raise ValueError(f"{path} holds no steps: give the event log of a server under load (serve --trace)")
    return fit(samples, kind, profile)


def blank(kind: str, of: profiles.Profile | None = None) -> FittedModel:
    """A model to fit. `operation_count` counts for the model and the GPU of a profile."""
    if kind != "operation_count" or of is None:
        return MODELS[kind]()
    if of.dims is None or of.gpu not in GPUS:
        raise ValueError(
            f"profile {of.name!r} does not say what `operation_count` counts from: the model's dimensions and its GPU"
        )
    card = GPUS[of.gpu]
    return operation_count.Model(dims=of.dims, gpus=of.gpus, compute=card.compute, memory=card.bandwidth)


def coefficients(model: FittedModel) -> dict[str, object]:
    """As a server's configuration takes them."""
    return {name: value for name, value in model.to_dict().items() if name != "model"}
