"""The OpenAI-compatible HTTP edge: schemas, SLO input, streaming, errors and metrics over a `Cluster`."""

from __future__ import annotations

from rubato.core.extras import extra

with extra("serve", "the server"):
    import fastapi  # noqa: F401
    import httptools  # noqa: F401
    import prometheus_client  # noqa: F401
    import uvicorn  # noqa: F401
