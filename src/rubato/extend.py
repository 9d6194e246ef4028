"""What engines, step-time models, autoscalers, and policies that draft or hand off are written with."""

from rubato.core.interfaces import Autoscaler, Engine, LatencyModel, LengthPredictor, Scaling
from rubato.core.plan import Limits, Role, Sample, Shape, Tree
from rubato.core.request import Sampling, Stage
from rubato.latency.bilinear import Model as BilinearModel
from rubato.policies import load_router

__all__ = [
    "Autoscaler",
    "BilinearModel",
    "Engine",
    "LatencyModel",
    "LengthPredictor",
    "Limits",
    "Role",
    "Sample",
    "Sampling",
    "Scaling",
    "Shape",
    "Stage",
    "Tree",
    "load_router",
]
