"""SLOs-Serve: requests admitted by a dynamic programme meet their SLOs to the end; others are best effort.

For loads beyond capacity some of the time, where what is begun is to be in time, and the latency model is right.
docs/policies/slos-serve.md has the rest.

New requests are decided at the next step: `admission.admit` chooses the set of the greatest value (greedily where
memory is short) with which all admitted ones meet their deadlines, fit in memory and in a batch. The admitted whose
prompt has not started are decided again with them, unless clients are to know at once (`promise`). A declined request
is handed on to another replica (`router`), else demoted to best effort, or refused if its client asked for that;
demoted, it is tried again as long as it could be in time. Until the next decision the scheduler keeps the grid of
batches on which they were admitted. Each step takes entries by deadline, one token of each decode and prefill in
chunks, as much as the batch's seconds hold (`batch`), then best effort. Where windows of ten tokens are judged, as in
the paper, decodes are paced by them as long as all can be kept, for which prompts and windows end no sooner than others
can keep theirs beside them (`BatchOrder.after`); else by their deadlines.

With step times as predicted by a model of tokens alone, lengths known, memory for all ends, and one prompt a request,
every admitted one meets the deadline SLO: `admission` has the argument. Models that see KV are asked with the most
that decodes will read together (`PeakKV`), and memory is counted so: where lengths differ much, or decodes wait,
admission is then no guarantee. The next prompt (a tool's return) is decided anew. When steps take longer than
predicted, a decode that is behind counts in the next tighter tier; a prompt that cannot be in time any more is
demoted, or refused. So that none starves, the oldest request that was not admitted counts as admitted once it is some
seconds behind.

Where the engine drafts (`speculation`), decodes verify as deep as makes them fastest, wherever all can spare the time
and half the memory is reserved: decodes that end sooner make room. Longer batches, with which decodes keep up only by
drafting, are tried if plain ones decline a request and leave prefill less than two thirds as much, or cannot hold a
TPOT at all. Such an admission counts on what drafts bring on average.
"""

from rubato.policies.slos_serve.router import Router
from rubato.policies.slos_serve.scheduler import Scheduler

__all__ = ["SOURCE", "Router", "Scheduler"]

SOURCE = "SLOs-Serve (arXiv 2504.08784)"
