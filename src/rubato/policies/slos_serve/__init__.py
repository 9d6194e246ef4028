"""SLOs-Serve: whom it admits is in time to the end, chosen by a dynamic programme; all others are best effort.

What is planned when. New requests are decided at the next step (or when there are `threshold` of them, or after
`timeout`): `admission.admit` chooses the set of the greatest value that leaves all admitted ones in time, by deadlines
(`token_budget`), memory (`demand.memory`: prompt and whole output) and places in a batch. Who is declined is demoted to
best effort, or refused if its client asked for that; it is looked at again as long as it could still be in time.
Between admissions the scheduler keeps who was promised and the grid of batches that the promise was made on: how many
batches of how many seconds. Each step takes whoever is due first, one token of each decode and prefill in chunks, as
much as the batch's seconds hold (`batch`), then decodes and prefills without a deadline, then best effort.

What is promised. With step times as predicted by a model of tokens alone (roofline), lengths known, and requests of one
prompt with TTFT and TPOTs, every admitted one meets the deadline SLO: `token_budget` has the argument. In the paper
decode tokens count in a batch as soon as they are eligible, here when they are due, which admits more. Models that see
KV are asked with what decodes will read together at most if all go on (`demand.Machine`): where lengths differ much, or
some decodes wait, such a promise is no certainty. Where a decode of a long context costs as much as many tokens of a
prompt, those count less (`demand.lightness`), and a prompt due before all decodes could be done once has a short batch
before them if they are ahead (`dynamic_program.short`). Decodes that are ahead take turns where batches do not hold all
of them (`batch_order`). A promise is for a stage with a prompt and the decode-only stages after it, at their tightest
TPOT; the next prompt (a tool's return) is decided anew, its KV kept while there is room.

When steps take longer than predicted, a decode that is behind counts in the next tighter tier until it is on time
again; a prompt that cannot be done by its deadline any more is demoted, or refused. So that nobody starves, the oldest
request without a promise that is more than `patience` seconds behind is counted as if it had one.

Where the engine drafts (`drafts`), decodes verify as deep as makes them fastest, wherever all can spare the time and
half the memory is promised: who has ended sooner makes room. Longer batches, which decodes keep up with
only by drafting, are tried where plain ones decline somebody and leave prefill less than two thirds of what these do,
or cannot hold a TPOT at all. Such a promise is on what drafts bring on average (`pessimism`: less), and certain only
where all of them are right.

Several replicas. `Router` lands requests in turn and hands one on while the replica could not promise it beside the
promised ones there: a scheduler like the replica's own is asked, with what the replica shows.
"""

from rubato.policies.slos_serve.router import Router
from rubato.policies.slos_serve.scheduler import Scheduler

__all__ = ["SOURCE", "Router", "Scheduler"]

SOURCE = "SLOs-Serve (arXiv 2504.08784)"
