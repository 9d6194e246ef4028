"""Workloads: which request arrives when, how long, under which SLO. One seeded file for all.

Also public: `rubato.workloads.scenarios`, the papers' workloads by name.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from rubato.workloads.workload import Arrival, OfferedStage, Workload

if TYPE_CHECKING:
    from rubato.workloads.generate import make as make_workload
    from rubato.workloads.lengths import fixed, log_normal
    from rubato.workloads.request_kinds import FollowUp, Kind, MixChange, chat, code, summary
    from rubato.workloads.workload_file import WorkloadError, read, write

_LATER = {  # imported when first asked for: a file is read by pydantic, a workload drawn by NumPy
    "FollowUp": ("request_kinds", "FollowUp"),
    "Kind": ("request_kinds", "Kind"),
    "MixChange": ("request_kinds", "MixChange"),
    "WorkloadError": ("workload_file", "WorkloadError"),
    "chat": ("request_kinds", "chat"),
    "code": ("request_kinds", "code"),
    "fixed": ("lengths", "fixed"),
    "log_normal": ("lengths", "log_normal"),
    "make_workload": ("generate", "make"),
    "read": ("workload_file", "read"),
    "summary": ("request_kinds", "summary"),
    "write": ("workload_file", "write"),
}

__all__ = [
    "Arrival",
    "FollowUp",
    "Kind",
    "MixChange",
    "OfferedStage",
    "Workload",
    "WorkloadError",
    "chat",
    "code",
    "fixed",
    "log_normal",
    "make_workload",
    "read",
    "summary",
    "write",
]


def __getattr__(name: str) -> Any:
    if name not in _LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module, attribute = _LATER[name]
    return getattr(importlib.import_module(f"{__name__}.{module}"), attribute)
