"""`rubato fit`: a latency model from a log of steps, and how well it predicts steps that it has not seen."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import yaml

from rubato import trace
from rubato.latency import affine, roofline
from rubato.latency.report import Report, error_report
from rubato.metrics import steps
from rubato.types import Sample

Model = affine.Model | roofline.Model
MODELS: Mapping[str, type[affine.Model] | type[roofline.Model]] = {"affine": affine.Model, "roofline": roofline.Model}
HELD_OUT = 0.2  # the last share of the steps


@dataclass(frozen=True)
class Fitted:
    """A model fitted on all steps; what one fitted on all but the last fifth gave on those, and on that fifth."""

    kind: str
    model: Model
    inside: Report
    held_out: Report

    def config(self) -> dict[str, object]:
        """As `latency:` in a server's configuration."""
        return {"latency": {"kind": self.kind, **coefficients(self.model)}}

    def text(self) -> str:
        """The report as YAML comments above the configuration: the whole is a YAML file."""
        lines = [
            f"# {self.kind}, in sample: {self.inside.format()}",
            f"# {self.kind}, held out (the last fifth): {self.held_out.format()}",
            yaml.safe_dump(self.config(), sort_keys=False, default_flow_style=None).rstrip(),
        ]
        return "\n".join(lines)

    def to_json(self) -> dict[str, Any]:
        return {**self.config(), "in_sample": asdict(self.inside), "held_out": asdict(self.held_out)}


def fit(samples: Sequence[Sample], kind: str = "affine") -> Fitted:
    """Raises ValueError when the steps cannot determine the model, saying what is lacking."""
    cut = round(len(samples) * (1 - HELD_OUT))
    trial, model = MODELS[kind](), MODELS[kind]()
    model.fit(samples)
    trial.fit(samples[:cut])
    return Fitted(kind, model, error_report(trial, samples[:cut]), error_report(trial, samples[cut:]))


def fit_log(path: str | Path, kind: str = "affine") -> Fitted:
    """The steps of an event log. Raises ValueError for a log without steps, or whose steps do not determine a model."""
    samples = steps(trace.read(path))
    if not samples:
        raise ValueError(f"{path} holds no steps: give the event log of a server under load (serve --trace)")
    return fit(samples, kind)


def coefficients(model: Model) -> dict[str, object]:
    """As a server's configuration takes them."""
    return {name: value for name, value in model.to_dict().items() if name != "model"}
