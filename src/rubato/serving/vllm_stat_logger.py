"""vLLM's stat logger plug-in: reads the engines' reports each time vLLM records its own stats."""

from __future__ import annotations

import logging
from typing import Any

from vllm.v1.metrics.loggers import AggregateStatLoggerBase

from rubato.serving.vllm_reports import EngineReports, reports_of

log = logging.getLogger("vllm.rubato")


class StatLogger(AggregateStatLoggerBase):  # type: ignore[misc]
    """Reads reports in vLLM's API server if the scheduler is ours; else does nothing."""

    def __init__(self, vllm_config: Any, engine_indexes: list[int]) -> None:
        scheduler = vllm_config.scheduler_config.scheduler_cls
        ours = "rubato" in (scheduler if isinstance(scheduler, str) else getattr(scheduler, "__module__", ""))
        self._reports: EngineReports | None = reports_of(vllm_config.parallel_config) if ours else None

    def record(self, *args: Any, **kwargs: Any) -> None:
        if self._reports is not None:
            try:
                self._reports.read()
            except Exception:  # it would end vLLM's server
                log.exception("what the engines report is not read any more: our metrics stand still")
                self._reports = None

    def log_engine_initialized(self) -> None:
        pass
