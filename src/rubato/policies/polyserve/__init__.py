"""PolyServe: replicas binned by TPOT, each request to the fullest one that still keeps its promise.

For ten replicas or more whose requests differ in TPOT, with a latency model that is right. docs/policies/polyserve.md
has the rest.

Each TPOT tier has replicas of its own, taken from a pool that serves best effort, and given back when empty. A request
goes to the most loaded replica of its tier that can keep its SLO; if there is none, to one of a tighter tier, the
nearest first (lazy promotion); then its tier gets a replica from the pool; else it is held. Never a looser tier's.
A replica with only requests of looser tiers left admits none: their tier may claim it, else it goes back to the pool
when empty. All queues are the router's.

Two modes. co: a replica runs its tier's prompts in chunks beside decodes, so that a step keeps within the TPOT, or,
where decodes are ahead of their deadlines, ends before these. pd: prompts go to prefill replicas shared by all tiers,
nearest deadline first, each once a place to decode is kept for it, and their KV to that decode replica, or to another
if the next token would be late there.

Ours where the paper is silent: the order among tighter tiers, that a pending replica admits none, that a request which
could not be in time even alone is served as best effort, that a replica without decodes takes a prompt whole, the place
kept before the prefill, the margin of prompts behind others, the pool's last replica kept for prefill, and guests of
the loosest tier among best effort.
"""

from rubato.policies.polyserve.router import Router
from rubato.policies.polyserve.scheduler import Scheduler

__all__ = ["SOURCE", "Router", "Scheduler"]

SOURCE = "PolyServe, §4"
