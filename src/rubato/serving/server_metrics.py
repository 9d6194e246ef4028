"""The further metrics of our server and of the gateway: vLLM's names where the meaning is the same, and gauges that are
read from the replicas at the scrape."""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import accumulate

from prometheus_client import CollectorRegistry, Counter, Histogram, disable_created_metrics, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.utils import floatToGoString

from rubato.core.events import Event, Finished, Placed, Preempted, Started, Stepped, Tokens
from rubato.core.interfaces import View
from rubato.frontdoor.choices import prompt_tokens
from rubato.frontdoor.history import RequestHistory
from rubato.frontdoor.metrics import SIZE_BUCKETS, TTFT_BUCKETS_S, SLOMetrics
from rubato.frontdoor.request_record import RequestRecord
from rubato.measure.replica_seconds import ReplicaSecondsMeter
from rubato.policy_kit.backlog import prefill_seconds

TOKEN_BUCKETS_S = (0.005, 0.01, 0.02, 0.03, 0.04, 0.05, 0.06, 0.08, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0)
E2E_BUCKETS_S = (0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 60.0, 120.0, 240.0, 480.0)
LOOP_DELAY_BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)


class Metrics(SLOMetrics):
    """Counts events and exports vLLM's metrics and ours, as a listener for `Cluster.listen`.

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
        """Returns the exposition, Prometheus text format."""
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
        """Yields gauges at the moment of a scrape (prometheus_client's collector protocol)."""
        yield from super().collect()
        views, in_flight = self._views(), self._in_flight()
        placed = sum(len(v.running) + len(v.waiting) for v in views)
        yield GaugeMetricFamily("rubato_requests_in_flight", "Requests offered and not ended", value=in_flight)
        yield GaugeMetricFamily(
            "rubato_requests_held", "Requests in flight that are at no replica yet", value=max(0, in_flight - placed)
        )
        yield GaugeMetricFamily("rubato_replicas", "Replicas that are not lost", value=len(views))
        yield self._replica_seconds(max((view.now for view in views), default=0.0))
        engine, model = ("model_name", "engine"), (self._model,)
        for name, about, labels, value in (
            ("vllm:num_requests_running", "Requests that hold KV", engine, lambda v: len(v.running)),
            ("vllm:num_requests_waiting", "Requests placed that hold no KV", engine, lambda v: len(v.waiting)),
            ("vllm:kv_cache_usage_perc", "KV blocks in use, 1 = all", engine, lambda v: 1.0 - v.kv_free / v.kv_total),
            ("rubato_kv_blocks_free", "KV blocks free", ("replica",), lambda v: v.kv_free),
            ("rubato_kv_blocks_total", "KV blocks", ("replica",), lambda v: v.kv_total),
        ):
            family = GaugeMetricFamily(name, about, labels=labels)
            for view in views:
                family.add_metric([*model[: len(labels) - 1], view.id], value(view))
            yield family
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

    def _replica_seconds(self, now: float) -> Metric:
        cost = self._cost.until(now)
        family = CounterMetricFamily(
            "rubato_replica_seconds", "Replicas times seconds: serving, idle, starting", labels=["use", "tier"]
        )
        by_tier: defaultdict[str, float] = defaultdict(float)
        for tier, seconds in cost.tiers.items():
            by_tier[self._tiers.label(tier)] += seconds
        for tier, seconds in by_tier.items():
            family.add_metric(["serving", tier], seconds)
        family.add_metric(["idle", ""], cost.idle)
        family.add_metric(["starting", ""], cost.starting)
        return family

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

    # ----------------------------------------------------------------- folds

    def _on_placed(self, event: Placed, record: RequestRecord) -> None:
        view = next((view for view in self._views() if view.id == event.replica), None)
        if view is not None and record.last_token_at is None:
            seconds = event.at - record.request.arrival + prefill_seconds(view, record.request.prompt)
            self._predicted_ttft.labels(self._tier(record)).observe(seconds)

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
