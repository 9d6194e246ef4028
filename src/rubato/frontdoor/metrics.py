"""Prometheus metrics of requests and their SLOs, counted from events.

`SLOMetrics` are Rubato's own (`rubato_...`), in our server and in vLLM's with the plug-in. Attainment is
`rubato_slo_met_total{dimension="all"}` over `rubato_requests_offered_total`, which includes requests that were refused,
failed or cut short. For one dimension it is over `rubato_slo_promised_total`, where a TPOT is the mean over the
request, whatever rule judges it.

A client's mistake, a 400, is no missed SLO: it counts in `rubato_client_errors_total` alone. Some are found only at a
server, so a request counts as offered when its first work begins, or at its end.

Labels are tiers, tenants, replicas and fixed words, all bounded: tiers beyond the first hundred are `other`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.metrics_core import Metric

from rubato.core.events import Demoted, Event, Finished, Offered, Placed, Promoted, Started, Stepped, Tokens, Verdict
from rubato.core.request import SLO, Request
from rubato.core.slo import TOLERANCE_S
from rubato.frontdoor.choices import prompt_tokens
from rubato.frontdoor.history import RequestHistory
from rubato.frontdoor.request_record import RequestRecord

MAX_REASONS = 32  # label values; a policy may refuse with any text
MAX_LABEL_NAMES = 100  # of tiers, and of tenants
OTHER_LABEL = "other"
CLIENT_STATUSES = (400, 401, 403, 404, 413)

TTFT_BUCKETS_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0)
STEP_BUCKETS_S = (0.001, 0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0, 2.0, 5.0)
PAUSE_BUCKETS_S = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0)
MARGIN_BUCKETS_S = (-30.0, -10.0, -5.0, -2.0, -1.0, -0.5, -0.2, -0.1, 0.0, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0)
SIZE_BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)


class SLOMetrics:
    """Counts requests, met and missed SLOs with causes, and steps, as a listener, and then folds each event into
    `requests`. It keeps nothing of a request itself.

    Args:
        registry: where the metrics are exported.
        requests: the record of each request, from before the event that is counted.
    """

    def __init__(self, registry: CollectorRegistry, requests: RequestHistory | None = None) -> None:
        self.registry = registry
        self.requests = requests or RequestHistory()
        self._tiers, self._tenants = _BoundedLabels(MAX_LABEL_NAMES), _BoundedLabels(MAX_LABEL_NAMES)
        self._reasons = _BoundedLabels(MAX_REASONS)
        self._records = self.requests.in_flight
        self._new_tokens: defaultdict[str, int] = defaultdict(int)  # of output, by tenant, not exported yet
        registry.register(self)  # first: `collect` updates the counters registered after it
        self._build_own()
        self._counts: dict[type[Event], Callable[[Any, Any], None]] = {
            Offered: self._on_offered,
            Placed: self._on_placed,
            Started: self._on_started,
            Tokens: self._on_tokens,
            Demoted: lambda event, record: self._demotions.inc(),
            Promoted: lambda event, record: self._promotions.inc(),
            Finished: self._on_finished,
            Stepped: self._on_stepped,
        }

    def __call__(self, event: Event) -> None:
        try:
            count = self._counts.get(type(event))
            if count is not None:
                count(event, self._records.get(event.id))
        finally:
            self.requests(event)

    # ----------------------------------------------------------------- metrics

    def collect(self) -> Iterator[Metric]:
        """Updates the counters that are exported next (prometheus_client's collector protocol)."""
        for tenant in list(self._new_tokens):
            self._export_tokens(tenant)
        return iter(())

    def _export_tokens(self, tenant: str) -> int:
        """Exports a tenant's new tokens, and returns them: a counter's lock at each would cost more than all else."""
        tokens = self._new_tokens.pop(tenant, 0)
        self._tenant_tokens.labels(self._tenants.label(tenant), "output").inc(tokens)
        return tokens

    def counter(self, name: str, about: str, *labels: str) -> Counter:
        return Counter(f"rubato_{name}", about, labels, registry=self.registry)

    def histogram(self, name: str, about: str, label: str, buckets: Sequence[float]) -> Histogram:
        return Histogram(f"rubato_{name}", about, [label], buckets=buckets, registry=self.registry)

    def _build_own(self) -> None:
        counter, histogram = self.counter, self.histogram
        self._n_offered = counter("requests_offered", "Requests offered, whatever became of them", "tier", "tenant")
        self._n_finished = counter(
            "requests_finished", "Requests ended: completed, refused, failed, cancelled", "tier", "tenant", "outcome"
        )
        self._slo_promised = counter(
            "slo_promised", "Requests offered with an SLO in this dimension", "tier", "dimension"
        )
        self._met = counter("slo_met", "Requests that kept it; all: the whole SLO", "tier", "tenant", "dimension")
        self._missed = counter("slo_missed", "Requests that missed their SLO, by cause", "tier", "tenant", "cause")
        self._unjudged = counter(
            "slo_unjudged", "Requests neither met nor missed: a TTFT or TPOT was not measured", "tier"
        )
        self._client_errors = counter(
            "client_errors", "Responses that were the client's mistake: any 4xx but 429", "code"
        )
        for status in CLIENT_STATUSES:
            self._client_errors.labels(str(status))  # shown as 0: a counter that begins at 1 has no rate
        self._refused = counter("requests_refused", "Requests refused, by reason", "tier", "reason")
        self._tenant_tokens = counter(
            "tenant_tokens", "Tokens of output, and of the prompts of ended requests", "tenant", "kind"
        )
        self._draft_tokens = counter(
            "draft_tokens", "Drafted tokens that were verified; none behind a rejected one", "outcome"
        )
        self._accepted, self._rejected = (self._draft_tokens.labels(outcome) for outcome in ("accepted", "rejected"))
        self._predicted_ttft = histogram(
            "predicted_ttft_seconds", "TTFT expected when a request is placed", "tier", TTFT_BUCKETS_S
        )
        self._measured_ttft = histogram("ttft_seconds", "From arrival to the first token", "tier", TTFT_BUCKETS_S)
        self._margin = histogram(
            "slo_margin_seconds", "Time to spare at the tightest token; negative if late", "tier", MARGIN_BUCKETS_S
        )
        self._pause = histogram(
            "pause_seconds", "Longest time between two tokens of a request", "tier", PAUSE_BUCKETS_S
        )
        self._demotions = counter("demotions", "Requests given up: served as best effort")
        self._promotions = counter("promotions", "Requests promoted back to their SLO")
        self._step = histogram("step_seconds", "Step time", "replica", STEP_BUCKETS_S)
        self._seqs = histogram("step_seqs", "Sequences in a batch", "replica", SIZE_BUCKETS)
        self._tokens = histogram("step_tokens", "Tokens in a batch", "replica", SIZE_BUCKETS)

    # ----------------------------------------------------------------- folds

    def _labels(self, request: Request) -> tuple[str, str]:
        """Returns the labels of a request's tier and tenant."""
        return self._tiers.label(request.tier), self._tenants.label(request.tenant)

    def _tier(self, record: RequestRecord) -> str:
        return self._tiers.label(record.request.tier)

    def _on_offered(self, event: Offered, record: RequestRecord | None) -> None:
        tier, tenant = self._labels(event.request)
        self._tenant_tokens.labels(tenant, "output")  # shown as 0: a counter that begins at 1 has no rate
        self._n_offered.labels(tier, tenant)
        self._met.labels(tier, tenant, "all")
        self._unjudged.labels(tier)
        for outcome in ("completed", "failed"):
            self._n_finished.labels(tier, tenant, outcome)

    def _count_offered(self, request: Request) -> None:
        tier, tenant = self._labels(request)
        self._n_offered.labels(tier, tenant).inc()
        for dimension in _promised_times(request):
            self._slo_promised.labels(tier, dimension).inc()

    def client_error(self, status: int) -> None:
        """Counts a response to a client's mistake."""
        self._client_errors.labels(str(status)).inc()

    def _on_placed(self, event: Placed, record: RequestRecord) -> None:
        if event.ttft is not None:
            self._predicted_ttft.labels(self._tier(record)).observe(event.ttft)

    def _on_started(self, event: Started, record: RequestRecord) -> None:
        if record.began_at is None:
            self._count_offered(record.request)

    def _on_tokens(self, event: Tokens, record: RequestRecord) -> None:
        if not event.tokens:  # withheld text of tokens that were counted before
            return
        request = record.request
        self._new_tokens[request.tenant] += event.tokens
        if record.last_token_at is None:
            first = event.times[0] if event.times else event.at
            self._measured_ttft.labels(self._tier(record)).observe(first - request.arrival)
        if event.tried:
            self._accepted.inc(event.tokens - 1)
            self._rejected.inc(event.tried - (event.tokens - 1))

    def _on_finished(self, event: Finished, record: RequestRecord) -> None:
        request, verdict, has_tokens = record.request, event.verdict, record.last_token_at is not None
        if not has_tokens and event.outcome == "completed":  # an untimed response had no token events
            self._new_tokens[request.tenant] += event.output
        self._export_tokens(request.tenant)
        if event.is_client_error:
            return
        tier, tenant = self._labels(request)
        if record.began_at is None:
            self._count_offered(request)
        if record.began_at is not None or has_tokens:
            self._tenant_tokens.labels(tenant, "prompt").inc(prompt_tokens(request, event))
        self._n_finished.labels(tier, tenant, event.outcome).inc()
        if verdict.met:
            self._met.labels(tier, tenant, "all").inc()
        elif verdict.unjudged:
            self._unjudged.labels(tier).inc()
        else:
            self._missed.labels(tier, tenant, verdict.cause or "unknown").inc()
        if event.outcome == "refused":
            kind = event.reason.partition(":")[0][:64]  # the rest is about one request
            self._refused.labels(tier, self._reasons.label(kind)).inc()
        if verdict.margin is not None:
            self._margin.labels(tier).observe(verdict.margin)
        if verdict.pause is not None:
            self._pause.labels(tier).observe(verdict.pause)
        if event.outcome == "completed":
            for dimension, seconds in _promised_times(request).items():
                if _is_kept(verdict, dimension, seconds):
                    self._met.labels(tier, tenant, dimension).inc()

    def _on_stepped(self, event: Stepped, record: RequestRecord | None) -> None:
        self._step.labels(event.id).observe(event.seconds)
        self._seqs.labels(event.id).observe(event.shape.seqs)
        self._tokens.labels(event.id).observe(event.shape.tokens)


class _BoundedLabels:
    """Makes labels of the first `max_names` names; further names share one label."""

    def __init__(self, max_names: int) -> None:
        self._max_names = max_names
        self._names: set[str] = set()

    def label(self, name: str) -> str:
        if name in self._names or len(self._names) < self._max_names:
            self._names.add(name)
            return name
        return OTHER_LABEL


def _promised_times(request: Request) -> dict[str, float]:
    """Returns seconds by dimension; a TPOT, measured over the request, only where all stages have the same."""
    slo = request.stages[0].slo
    same = all(stage.slo.tpot == slo.tpot for stage in request.stages)
    return SLO(slo.ttft, slo.tpot if same else None, slo.e2e).bounds


def _is_kept(verdict: Verdict, dimension: str, seconds: float) -> bool:
    measured = getattr(verdict, dimension)
    return (dimension == "tpot" and verdict.ttft is not None) if measured is None else measured <= seconds + TOLERANCE_S
