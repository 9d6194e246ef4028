"""What is offered: which request arrives when, how long, under which SLOs. One seeded file for all."""

from rubato.workloads.file import WorkloadError, read, write
from rubato.workloads.workload import Arrival, Part, Workload

__all__ = ["Arrival", "Part", "Workload", "WorkloadError", "read", "write"]
