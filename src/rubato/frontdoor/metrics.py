"""Prometheus metrics: a fold over events, plus gauges read from the replicas at the scrape.

`SLOMetrics` are Rubato's own (`rubato_...`), in our server and in vLLM's with the plug-in. `Metrics` adds vLLM's names
where the meaning is the same; vLLM's server has its own. Attainment is `rubato_slo_met_total{dimension="all"}` over
`rubato_requests_offered_total`, which includes requests that were refused, failed or cut short. For one dimension it is
over `rubato_slo_promised_total`, where a TPOT is the mean over the request, whatever rule judges it.

A client's mistake, a 400, is no missed SLO: it counts in `rubato_client_errors_total` alone. Some are found only at a
server, so a request counts as offered when its first work begins, or at its end.

Labels are tiers, tenants, replicas and fixed words, all bounded: tiers beyond the first hundred are `other`.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram, disable_created_metrics, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.utils import floatToGoString

from rubato.core.events import (
    Demoted,
    Event,
    Finished,
    Offered,
    Placed,
    Preempted,
    Promoted,
    Started,
    Stepped,
    Tokens,
    Verdict,
)
from rubato.core.interfaces import View
from rubato.core.request import SLO, Request
from rubato.core.slo import TOLERANCE_S
from rubato.frontdoor.choices import prompt_tokens
from rubato.frontdoor.history import RequestHistory
from rubato.frontdoor.request_record import RequestRecord
from rubato.measure.replica_seconds import ReplicaSecondsMeter
from rubato.policy_kit.backlog import prefill_seconds

MAX_REASONS = 32  # label values; a policy may refuse with any text
MAX_LABEL_NAMES = 100  # of tiers, and of tenants
OTHER_LABEL = "other"
CLIENT_STATUSES = (400, 401, 403, 404, 413)

TTFT_BUCKETS_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0)
TOKEN_BUCKETS_S = (0.005, 0.01, 0.02, 0.03, 0.04, 0.05, 0.06, 0.08, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0)
E2E_BUCKETS_S = (0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 60.0, 120.0, 240.0, 480.0)
STEP_BUCKETS_S = (0.001, 0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0, 2.0, 5.0)
LOOP_DELAY_BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
PAUSE_BUCKETS_S = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0)
MARGIN_BUCKETS_S = (-30.0, -10.0, -5.0, -2.0, -1.0, -0.5, -0.2, -0.1, 0.0, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0)
SIZE_BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)


class SLOMetrics:
    """A listener that counts requests, met and missed SLOs with causes, and steps, and then folds each event into
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
        """Update the counters that are exported next (prometheus_client's collector protocol)."""
        for tenant in list(self._new_tokens):
            self._export_tokens(tenant)
        return iter(())

    def _export_tokens(self, tenant: str) -> int:
        """Export a tenant's new tokens, and return them: a counter's lock at each would cost more than all else."""
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
        self._promised = counter("slo_promised", "Requests offered with an SLO in this dimension", "tier", "dimension")
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
        """The labels of a request's tier and tenant."""
        return self._tiers.label(request.tier), self._tenants.label(request.tenant)

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
            self._promised.labels(tier, dimension).inc()

    def client_error(self, status: int) -> None:
        """Count a response to a client's mistake."""
        self._client_errors.labels(str(status)).inc()

    def _on_placed(self, event: Placed, record: RequestRecord) -> None:
        if event.ttft is not None:
            self._predicted_ttft.labels(self._tiers.label(record.request.tier)).observe(event.ttft)

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
            self._measured_ttft.labels(self._tiers.label(request.tier)).observe(first - request.arrival)
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
    """Labels for the first `most` names; further names share one label."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._known: set[str] = set()

    def label(self, name: str) -> str:
        if name in self._known or len(self._known) < self._most:
            self._known.add(name)
            return name
        return OTHER_LABEL


class Metrics(SLOMetrics):
    """A listener for `Cluster.listen`.

    Args:
        model: label of vLLM's metrics.
        views: the current views of the replicas.
        in_flight: the cluster's count of requests.
        errors: how often each listener has failed, by name.
        log_lines_dropped: counts them so far.
        requests: as in `SLOMetrics`.
    """

    def __init__(
        self,
        model: str,
        views: Callable[[], Sequence[View]],
        in_flight: Callable[[], int],
        errors: Callable[[], Mapping[str, int]] = dict,
        log_lines_dropped: Callable[[], int] = int,
        requests: RequestHistory | None = None,
    ) -> None:
        disable_created_metrics()  # type: ignore[no-untyped-call]  # a sample of its own per series, of no use here
        super().__init__(CollectorRegistry(), requests)
        self._model = model
        self._views, self._in_flight, self._errors = views, in_flight, errors
        self._log_lines_dropped = log_lines_dropped
        views_at_start = views()
        self._cost = ReplicaSecondsMeter(
            (view.id for view in views_at_start), max((view.now for view in views_at_start), default=0.0)
        )
        self._build_vllm(model)
        self.loop_delay = Histogram(
            "rubato_loop_delay_seconds",
            "How late the event loop runs its timers, which delays each chunk",
            buckets=LOOP_DELAY_BUCKETS_S,
            registry=self.registry,
        )
        self._gaps = [0] * (len(TOKEN_BUCKETS_S) + 1)  # between tokens, by bucket
        self._gap_seconds = 0.0
        self._counts[Preempted] = lambda event, record: self._preemptions.inc()

    def __call__(self, event: Event) -> None:
        super().__call__(event)
        if type(event) is not Tokens:
            self._cost(event)

    def text(self) -> bytes:
        """The exposition, Prometheus text format."""
        return generate_latest(self.registry)

    # ----------------------------------------------------------------- metrics

    def _build_vllm(self, model: str) -> None:
        def counter(name: str, about: str) -> Counter:
            return Counter(f"vllm:{name}", about, ["model_name"], registry=self.registry).labels(model)

        def histogram(name: str, about: str, buckets: Sequence[float]) -> Histogram:
            family = Histogram(f"vllm:{name}", about, ["model_name"], buckets=buckets, registry=self.registry)
            return family.labels(model)

        self._prompt_tokens = counter("prompt_tokens", "Prompt tokens of requests that began and ended")
        self._generation_tokens = counter("generation_tokens", "Output tokens")
        self._cache_queries = counter("prefix_cache_queries", "Prompt tokens looked up in the prefix cache")
        self._cache_hits = counter("prefix_cache_hits", "Prompt tokens found in the prefix cache")
        self._preemptions = counter("num_preemptions", "Preemptions")
        self._success = Counter(
            "vllm:request_success", "Requests completed", ["model_name", "finished_reason"], registry=self.registry
        )
        self._ttft = histogram("time_to_first_token_seconds", "From arrival to the first token", TTFT_BUCKETS_S)
        self._tpot = histogram(
            "request_time_per_output_token_seconds", "Mean time per output token of a request", TOKEN_BUCKETS_S
        )
        self._e2e = histogram("e2e_request_latency_seconds", "From arrival to the last token", E2E_BUCKETS_S)
        self._prefill = histogram(
            "request_prefill_time_seconds", "From the first work to the first token", E2E_BUCKETS_S
        )
        self._decode = histogram("request_decode_time_seconds", "From the first token to the last", E2E_BUCKETS_S)
        self._iteration = histogram("iteration_tokens_total", "Tokens in a step", SIZE_BUCKETS)
        self._queue = histogram("request_queue_time_seconds", "From arrival to the first work", E2E_BUCKETS_S)
        self._prompt_size = histogram("request_prompt_tokens", "Prompt tokens of a request", SIZE_BUCKETS)
        self._output_size = histogram("request_generation_tokens", "Output tokens of a request", SIZE_BUCKETS)

    def collect(self) -> Iterator[Metric]:
        """Gauges at the moment of a scrape (prometheus_client's collector protocol)."""
        yield from super().collect()
        views = self._views()
        in_flight = self._in_flight()
        placed = sum(len(v.running) + len(v.waiting) for v in views)
        yield GaugeMetricFamily("rubato_requests_in_flight", "Requests offered and not ended", value=in_flight)
        yield GaugeMetricFamily(
            "rubato_requests_held", "Requests in flight that are at no replica yet", value=max(0, in_flight - placed)
        )
        yield GaugeMetricFamily("rubato_replicas", "Replicas that are not lost", value=len(views))
        cost = self._cost.until(max((view.now for view in views), default=0.0))
        spent = CounterMetricFamily(
            "rubato_replica_seconds", "Replicas times seconds: serving, idle, starting", labels=["use", "tier"]
        )
        by_tier: dict[str, float] = {}
        for tier, seconds in cost.tiers.items():
            label = self._tiers.label(tier)
            by_tier[label] = by_tier.get(label, 0.0) + seconds
        for tier, seconds in by_tier.items():
            spent.add_metric(["serving", tier], seconds)
        spent.add_metric(["idle", ""], cost.idle)
        spent.add_metric(["starting", ""], cost.starting)
        yield spent
        yield self._gauge("num_requests_running", "Requests that hold KV", ((v, len(v.running)) for v in views))
        yield self._gauge(
            "num_requests_waiting", "Requests placed that hold no KV", ((v, len(v.waiting)) for v in views)
        )
        usage = ((v, 1.0 - v.kv_free / v.kv_total) for v in views)
        yield self._gauge("kv_cache_usage_perc", "KV blocks in use, 1 = all", usage)
        free = GaugeMetricFamily("rubato_kv_blocks_free", "KV blocks free", labels=["replica"])
        total = GaugeMetricFamily("rubato_kv_blocks_total", "KV blocks", labels=["replica"])
        for view in views:
            free.add_metric([view.id], view.kv_free)
            total.add_metric([view.id], view.kv_total)
        yield free
        yield total
        yield self._gap_histogram()
        failed = CounterMetricFamily(
            "rubato_listener_errors",
            "Events that a part of the server failed on, such as the event log",
            labels=["listener"],
        )
        for name, count in self._errors().items():
            failed.add_metric([name], count)
        yield failed
        dropped = self._log_lines_dropped()
        yield CounterMetricFamily(
            "rubato_log_lines_dropped", "Log lines dropped, since their reader was too slow", value=dropped
        )

    def _export_tokens(self, tenant: str) -> int:
        self._generation_tokens.inc(tokens := super()._export_tokens(tenant))
        return tokens

    def _gap_histogram(self) -> Metric:
        buckets = zip([*map(floatToGoString, TOKEN_BUCKETS_S), "+Inf"], accumulate(self._gaps), strict=True)
        family = HistogramMetricFamily(
            "vllm:inter_token_latency_seconds", "From one token to the next", labels=["model_name"]
        )
        family.add_metric([self._model], list(buckets), self._gap_seconds)
        return family

    def _gauge(self, name: str, about: str, values: Iterable[tuple[View, float]]) -> Metric:
        family = GaugeMetricFamily(f"vllm:{name}", about, labels=["model_name", "engine"])
        for view, value in values:
            family.add_metric([self._model, view.id], value)
        return family

    # ----------------------------------------------------------------- folds

    def _on_placed(self, event: Placed, record: RequestRecord) -> None:
        view = next((view for view in self._views() if view.id == event.replica), None)
        if view is not None and record.last_token_at is None:
            seconds = event.at - record.request.arrival + prefill_seconds(view, record.request.prompt)
            self._predicted_ttft.labels(self._tiers.label(record.request.tier)).observe(seconds)

    def _on_started(self, event: Started, record: RequestRecord) -> None:
        if record.began_at is None:
            self._queue.observe(event.at - record.request.arrival)
            self._cache_queries.inc(record.request.prompt)
            self._cache_hits.inc(event.cached)
        super()._on_started(event, record)

    def _on_tokens(self, event: Tokens, record: RequestRecord) -> None:
        if not event.tokens:
            return
        last = record.last_token_at
        for at in event.times or (event.at,):
            if last is None:
                self._ttft.observe(at - record.request.arrival)
                if record.began_at is not None:
                    self._prefill.observe(at - record.began_at)
            else:
                gap = at - last
                self._gaps[bisect_left(TOKEN_BUCKETS_S, gap)] += 1
                self._gap_seconds += gap
            last = at
        super()._on_tokens(event, record)

    def _on_finished(self, event: Finished, record: RequestRecord) -> None:
        super()._on_finished(event, record)
        verdict, last = event.verdict, record.last_token_at
        if record.began_at is not None:
            prompt = prompt_tokens(record.request, event)
            self._prompt_tokens.inc(prompt)
            self._prompt_size.observe(prompt)
        if event.outcome == "completed":
            self._success.labels(self._model, event.reason).inc()
            self._output_size.observe(event.output)
            if record.first_token_at is not None and last is not None:
                self._decode.observe(last - record.first_token_at)
            if verdict.tpot is not None:
                self._tpot.observe(verdict.tpot)
            if verdict.e2e is not None:
                self._e2e.observe(verdict.e2e)

    def _on_stepped(self, event: Stepped, record: RequestRecord | None) -> None:
        super()._on_stepped(event, record)
        self._iteration.observe(event.shape.tokens)


def _promised_times(request: Request) -> dict[str, float]:
    """Dimension -> seconds; a TPOT only where all stages have the same, since it is measured over the request."""
    slo = request.stages[0].slo
    same = all(stage.slo.tpot == slo.tpot for stage in request.stages)
    return SLO(slo.ttft, slo.tpot if same else None, slo.e2e).promised


def _is_kept(verdict: Verdict, dimension: str, seconds: float) -> bool:
    measured = getattr(verdict, dimension)
    return (dimension == "tpot" and verdict.ttft is not None) if measured is None else measured <= seconds + TOLERANCE_S
