"""The latency models that are fitted to whole steps, by their names in `latency: {kind: NAME}`."""

from __future__ import annotations

from collections.abc import Mapping

from rubato.core.registry import Registry
from rubato.latency import affine, bilinear, operation_count, roofline, table
from rubato.latency.fitted_model import FittedModel

_MODULES = (affine, roofline, operation_count, bilinear, table)
MODELS: Mapping[str, type[FittedModel]] = {module.Model.KIND: module.Model for module in _MODULES}
LATENCY_MODELS = Registry("latency model", "Model", MODELS, ("step_time", "largest_chunk", "fit", "update"))
