"""Seconds that requests take from their prefill to their last token, in a batch of equals (SA, equations 14 to 16)."""

from __future__ import annotations

from rubato.core.interfaces import LatencyModel
from rubato.core.plan import Shape
from rubato.latency import bilinear


def prefill_seconds(model: LatencyModel, jobs: int, prompt: int) -> float:
    """Of a step that prefills `jobs` prompts of `prompt` tokens."""
    if isinstance(model, bilinear.Model):
        return model.online.factor * model.prefill(jobs, prompt)
    one = Shape.prefill(prompt)
    return model.step_time(Shape(*(jobs * part for part in one)))  # what a shape holds adds up


def decode_seconds(model: LatencyModel, jobs: int, prompt: int, output: int) -> float:
    """Of `output` steps in which `jobs` sequences decode, each with `prompt` tokens of KV before the first. Step times
    are taken at the first, a middle and the last step, with straight lines between them."""
    if isinstance(model, bilinear.Model):
        return model.online.factor * model.decode(jobs, prompt, output)
    half = (1 + output) // 2
    first, middle, last = (model.step_time(Shape.decodes(jobs, jobs * (prompt + at))) for at in (1, half, output))
    return half * (first + middle) / 2.0 + (output - half) * (middle + last) / 2.0 + (last - middle) / 2.0
