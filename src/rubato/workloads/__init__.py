"""Workloads: which request arrives when, how long, under which SLO. One seeded file for all."""

from rubato.workloads.workload import Arrival, OfferedStage, Workload
from rubato.workloads.workload_file import WorkloadError, read, write

__all__ = ["Arrival", "OfferedStage", "Workload", "WorkloadError", "read", "write"]
