"""Ours for a fleet: one queue, prefill and decode on separate replicas; `rubato` uses this router in mode pd.

For eight replicas or more between which KV moves, when requests differ in TPOT.

Each replica prefills for the others, or decodes for one TPOT tier, or serves best effort, and changes as requests come.
The replicas' scheduler is `rubato`'s, which runs `prefill_step` where prompts are computed for others.
docs/policies/rubato.md says what it does, when to use it and where it loses.
"""

from rubato.policies.rubato_pd.router import Router

__all__ = ["SOURCE", "Router"]

SOURCE = "ours; EDF (Liu and Layland 1973), bins by TPOT from PolyServe"
