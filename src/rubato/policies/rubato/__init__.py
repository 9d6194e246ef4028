"""Ours: one queue for the fleet, steps planned by deadline, admitted requests kept in time.

For tiers with TTFTs and TPOTs, or deadlines for whole answers, near and beyond capacity, on one replica or many, with
a length predictor that learns. The default. docs/policies/rubato.md says what it does and where it loses.
"""

from rubato.policies.rubato.router import Router
from rubato.policies.rubato.scheduler import Scheduler

__all__ = ["SOURCE", "Router", "Scheduler"]

SOURCE = "ours; EDF (Liu and Layland 1973), Moore and Hodgson (1968), bins by TPOT from PolyServe"
