"""The seconds of requests from prefill to last token, in a batch of equal requests (SA, equations 14 to 16)."""

from __future__ import annotations

from rubato.core.interfaces import LatencyModel
from rubato.core.plan import Shape
from rubato.latency import bilinear


def prefill_seconds(model: LatencyModel, jobs: int, prompt: int) -> float:
    """Returns the seconds of a step that prefills `jobs` prompts of `prompt` tokens."""
    if isinstance(model, bilinear.Model):
        return model.online.factor * model.prefill(jobs, prompt)
    one = Shape.prefill(prompt)
    return model.step_time(Shape(*(jobs * part for part in one)))  # the features of shapes add up


def decode_seconds(model: LatencyModel, jobs: int, prompt: int, output: int) -> float:
    """Returns the seconds of `output` steps in which `jobs` sequences decode, each with `prompt` tokens of KV before
    the first. Step times are interpolated between the first, a middle and the last step."""
    if isinstance(model, bilinear.Model):
        return model.online.factor * model.decode(jobs, prompt, output)
    half = (1 + output) // 2
    first, middle, last = (model.step_time(Shape.decodes(jobs, jobs * (prompt + at))) for at in (1, half, output))
    return half * (first + middle) / 2.0 + (output - half) * (middle + last) / 2.0 + (last - middle) / 2.0
