"""The embedded engine: PyTorch, of the distribution `rubato-llm-torch` (extra `torch`)."""

from __future__ import annotations

from rubato.core.extras import extra

with extra("torch", "engine torch"):
    from rubato_torch import Engine as Engine
