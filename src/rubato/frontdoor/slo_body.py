"""The `slo` object of a body, and the errors of bodies that pydantic refuses."""

from __future__ import annotations

from difflib import get_close_matches
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from rubato.core.request import MAX_SLO_MS, MIN_SLO_MS, SLO
from rubato.frontdoor.errors import ApiError, invalid

MAX_STAGES = 64
MAX_UNKNOWN_FIELDS = 64  # each is compared with every known name
MAX_NAME_CHARACTERS = 64  # of a name that are compared


class Body(BaseModel):
    """Strict: "5" is not a number. Unknown fields are kept, so that `_refuse_unsupported` sees them."""

    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False, protected_namespaces=())


class SLODimensions(Body):
    model_config = ConfigDict(extra="forbid")

    @model_validator(mode="before")
    @classmethod
    def _few(cls, value: Any) -> Any:
        if isinstance(value, dict) and len(value) > MAX_UNKNOWN_FIELDS:
            raise ValueError(f"{len(value)} fields given: it has {', '.join(cls.model_fields)}")
        return value

    ttft_ms: float | None = Field(default=None, ge=MIN_SLO_MS, le=MAX_SLO_MS)
    tpot_ms: float | None = Field(default=None, ge=MIN_SLO_MS, le=MAX_SLO_MS)

    @property
    def slo(self) -> SLO:
        return SLO.from_ms(self.ttft_ms, self.tpot_ms)


class StageBody(SLODimensions):
    until: str | None = Field(default=None, min_length=1)


class SLOBody(SLODimensions):
    e2e_ms: float | None = Field(default=None, ge=MIN_SLO_MS, le=MAX_SLO_MS)
    stages: list[StageBody] | None = Field(default=None, min_length=1, max_length=MAX_STAGES, fail_fast=True)
    on_decline: Literal["best_effort", "refuse"] | None = None

    @property
    def slo(self) -> SLO:
        return SLO.from_ms(self.ttft_ms, self.tpot_ms, self.e2e_ms)


def bad_request(error: ValidationError, *, shown: bool) -> ApiError:
    """Returns the 400 of a validation error; with `shown` it repeats the value, which may be all of the body."""
    first = error.errors(include_url=False, include_input=shown)[0]
    if first["type"] == "json_invalid":
        return ApiError(400, f"The body is not valid JSON: {first['msg'].removeprefix('Invalid JSON: ')}.")
    if not first["loc"]:
        return ApiError(400, "The body must be a JSON object.")
    path = param_path(first["loc"])
    message = first["msg"].removeprefix("Value error, ")
    if first["type"] in ("model_type", "model_attributes_type"):
        message = "give an object"
    if first["type"] == "missing":
        return ApiError(400, f"{path}: this field is required.", param=path, code="missing_required_parameter")
    if first["type"] == "extra_forbidden":
        fields = StageBody.model_fields if "stages" in first["loc"] else SLOBody.model_fields
        near = get_close_matches(str(first["loc"][-1])[:MAX_NAME_CHARACTERS], fields, 1, cutoff=0.0)
        message = f"unknown field; did you mean {near[0]}?"
    elif first["type"] != "value_error" and isinstance(first.get("input"), int | float | str | bool):
        message = f"{message}, got {first['input']!r:.100}"
    return invalid(path, f"{message}.")


def param_path(loc: tuple[int | str, ...]) -> str:
    """Spells ("messages", 0, "content") as "messages[0].content"."""
    path = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in loc)
    return path.removeprefix(".")
