"""The models that are fitted to whole steps, by name: their module's, as in a server's `latency: {kind: NAME}`."""

from __future__ import annotations

from collections.abc import Mapping

from rubato.latency import affine, bilinear, operation_count, roofline, table

Model = affine.Model | roofline.Model | operation_count.Model | bilinear.Model | table.Model
MODELS: Mapping[str, type[Model]] = {
    "affine": affine.Model,
    "roofline": roofline.Model,
    "opcount": operation_count.Model,
    "bilinear": bilinear.Model,
    "table": table.Model,
}
