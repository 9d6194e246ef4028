"""vLLM's stat logger plug-in: reads what engines report each time that vLLM records its own stats."""

from __future__ import annotations

from typing import Any

from vllm.v1.metrics.loggers import AggregateStatLoggerBase

from rubato.serving.vllm_reports import EngineReports, reports_of


class StatLogger(AggregateStatLoggerBase):  # type: ignore[misc]
    """In vLLM's API server, where the scheduler is ours; elsewhere it does nothing."""

    def __init__(self, vllm_config: Any, engine_indexes: list[int]) -> None:
        scheduler = vllm_config.scheduler_config.scheduler_cls
        ours = "rubato" in (scheduler if isinstance(scheduler, str) else getattr(scheduler, "__module__", ""))
        self._reports: EngineReports | None = reports_of(vllm_config.parallel_config) if ours else None

    def record(self, *args: Any, **kwargs: Any) -> None:
        if self._reports is not None:
            self._reports.read()

    def log_engine_initialized(self) -> None:
        pass
