"""SLOs-Serve: requests admitted by a dynamic programme meet their SLOs to the end; others are best effort.

docs/slos-serve.md says when to use it, what it gains and where it differs from the paper.

Admission. New requests are decided at the next step (or when there are `decision_threshold` of them, or after
`decision_interval`): `admission.admit` chooses the set of the greatest value with which all admitted ones meet their
deadlines (`token_budget`), fit in memory (`batch_builder.blocks_at_end`: prompt and whole output) and in a batch. A
declined request is demoted to best effort, or refused if its client asked for that; it is tried again as long as it
could still be in time. Between admissions the scheduler keeps the admitted requests and the grid of batches on which
they were admitted: how many batches of how many seconds. Each step takes entries by deadline, one token of each decode
and prefill in chunks, as much as the batch's seconds hold (`batch`), then decodes and prefills without a deadline, then
best effort.

What admission guarantees. With step times as predicted by a model of tokens alone (roofline), lengths known, and
requests of one prompt with TTFT and TPOTs, every admitted one meets the deadline SLO: `token_budget` has the argument.
In the paper decode tokens count in a batch as soon as they are eligible, here when they are due, which admits more.
Models that see KV are asked with the most that decodes will read together if all go on (`demand.peak_kv_tokens`): where
lengths differ much, or some decodes wait, admission is then no guarantee. Where a decode of a long context costs as
much as many tokens of a prompt, the prompt's count less (`demand.prefill_token_weight`), and a prompt due before all
decodes could each have a token gets a short batch first if they are ahead (`grid_building.short`). Decodes that are
ahead take turns where batches do not hold all of them (`batch_order`). Admission is for a stage with a prompt and the
decode-only stages after it, at their tightest TPOT; the next prompt (a tool's return) is decided anew, its KV kept
while there is room.

When steps take longer than predicted, a decode that is behind counts in the next tighter tier until it is on time
again; a prompt that cannot be done by its deadline any more is demoted, or refused. So that none starves, the oldest
request that was not admitted counts as admitted once it is some seconds behind (`starvation`).

Where the engine drafts (`speculation`), decodes verify as deep as makes them fastest, wherever all can spare the time
and half the memory is reserved: decodes that end sooner make room. Longer batches, with which decodes keep up only by
drafting, are tried if plain ones decline a request and leave prefill less than two thirds as much, or cannot hold a
TPOT at all. Such an admission counts on what drafts bring on average, and is certain only where all of them are right.

Several replicas. `Router` offers a request to replicas in turn until one could admit it beside those admitted there: a
scheduler like the replica's own is asked, with what the replica shows.
"""

from rubato.policies.slos_serve.router import Router
from rubato.policies.slos_serve.scheduler import Scheduler

__all__ = ["SOURCE", "Router", "Scheduler"]

SOURCE = "SLOs-Serve (arXiv 2504.08784)"
