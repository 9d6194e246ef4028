"""Prometheus metrics: a fold over events, plus gauges read from the replicas at the scrape.

vLLM's names where the meaning is the same. Attainment is `rubato_slo_met_total` over `rubato_requests_offered_total`: a
request that was refused, failed or cut short was offered too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram, disable_created_metrics, generate_latest
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.metrics_core import Metric

from rubato.interfaces import View
from rubato.types import Demoted, Event, Finished, Offered, Preempted, Promoted, Request, Started, Stepped, Tokens

MOST_TENANTS = 100  # label values; a client names its tenant, and must not be able to grow the server's memory
OTHER = "other"

TTFT = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0)
PER_TOKEN = (0.005, 0.01, 0.02, 0.03, 0.04, 0.05, 0.06, 0.08, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0)
E2E = (0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 60.0, 120.0, 240.0, 480.0)
STEP = (0.001, 0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0, 2.0, 5.0)
SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)


@dataclass(slots=True)
class _Open:
    """What a request in flight needs remembered."""

    request: Request
    replica_wait: float | None  # arrival, until its first work
    last: float | None = None  # time of its last token


class Metrics:
    """A listener for `Cluster.listen`. `views` gives the replicas as they are now, `in_flight` the cluster's count."""

    def __init__(self, model: str, views: Callable[[], Sequence[View]], in_flight: Callable[[], int]) -> None:
        disable_created_metrics()  # type: ignore[no-untyped-call]  # a sample of its own per series, of no use to anyone here
        self.registry = CollectorRegistry()
        self._open: dict[str, _Open] = {}
        self._tenants: set[str] = set()
        self._model = model
        self._build_own()
        self._build_vllm(model)
        self.registry.register(_Gauges(model, views, in_flight))
        self._folds: dict[type[Event], Callable[[Any], None]] = {
            Offered: self._offered,
            Started: self._started,
            Tokens: self._token,
            Preempted: lambda event: self._preemptions.inc(),
            Demoted: lambda event: self._demotions.inc(),
            Promoted: lambda event: self._promotions.inc(),
            Finished: self._finished,
            Stepped: self._stepped,
        }

    def __call__(self, event: Event) -> None:
        fold = self._folds.get(type(event))
        if fold is not None:
            fold(event)

    def text(self) -> bytes:
        """The exposition, Prometheus text format."""
        return generate_latest(self.registry)

    # ----------------------------------------------------------------- what there is

    def _build_own(self) -> None:
        to = self.registry
        self._n_offered = Counter("rubato_requests_offered", "Requests offered", ["tier", "tenant"], registry=to)
        self._n_finished = Counter("rubato_requests_finished", "Requests ended", ["tier", "outcome"], registry=to)
        self._met = Counter("rubato_slo_met", "Requests whose every SLO was met", ["tier"], registry=to)
        self._missed = Counter(
            "rubato_slo_missed", "Requests with a missed SLO, by cause", ["tier", "cause"], registry=to
        )
        self._demotions = Counter("rubato_demotions", "Requests demoted to best effort", registry=to)
        self._promotions = Counter("rubato_promotions", "Requests promoted back to their SLO", registry=to)
        self._step = Histogram("rubato_step_seconds", "Step time", ["replica"], buckets=STEP, registry=to)
        self._seqs = Histogram("rubato_step_seqs", "Sequences in a batch", ["replica"], buckets=SIZES, registry=to)
        self._tokens = Histogram("rubato_step_tokens", "Tokens in a batch", ["replica"], buckets=SIZES, registry=to)

    def _build_vllm(self, model: str) -> None:
        def counter(name: str, about: str) -> Counter:
            return Counter(f"vllm:{name}", about, ["model_name"], registry=self.registry).labels(model)

        def histogram(name: str, about: str, buckets: Sequence[float]) -> Histogram:
            family = Histogram(f"vllm:{name}", about, ["model_name"], buckets=buckets, registry=self.registry)
            return family.labels(model)

        self._prompt_tokens = counter("prompt_tokens", "Prompt tokens of requests that began")
        self._generated = counter("generation_tokens", "Output tokens")
        self._preemptions = counter("num_preemptions", "Preemptions")
        self._success = Counter(
            "vllm:request_success", "Requests completed", ["model_name", "finished_reason"], registry=self.registry
        )
        self._ttft = histogram("time_to_first_token_seconds", "From arrival to the first token", TTFT)
        self._itl = histogram("inter_token_latency_seconds", "From a token to the next", PER_TOKEN)
        self._tpot = histogram("request_time_per_output_token_seconds", "Mean over a request", PER_TOKEN)
        self._e2e = histogram("e2e_request_latency_seconds", "From arrival to the last token", E2E)
        self._queue = histogram("request_queue_time_seconds", "From arrival to the first work", E2E)
        self._prompt_size = histogram("request_prompt_tokens", "Prompt tokens of a request", SIZES)
        self._output_size = histogram("request_generation_tokens", "Output tokens of a request", SIZES)

    # ----------------------------------------------------------------- folds

    def _offered(self, event: Offered) -> None:
        request = event.request
        self._open[event.id] = _Open(request, request.arrival)
        self._n_offered.labels(request.tier, self._tenant(request.tenant)).inc()

    def _started(self, event: Started) -> None:
        state = self._open[event.id]
        if state.replica_wait is not None:
            prompt = sum(stage.prompt for stage in state.request.stages)
            self._queue.observe(event.at - state.replica_wait)
            self._prompt_tokens.inc(prompt)
            self._prompt_size.observe(prompt)
            state.replica_wait = None

    def _token(self, event: Tokens) -> None:
        if not event.tokens:  # text that was held back, of tokens counted before
            return
        self._generated.inc(event.tokens)
        state = self._open[event.id]
        if state.last is None:
            self._ttft.observe(event.at - state.request.arrival)
        else:
            self._itl.observe(event.at - state.last)
        state.last = event.at

    def _finished(self, event: Finished) -> None:
        tier = self._open.pop(event.id).request.tier
        verdict = event.verdict
        self._n_finished.labels(tier, event.outcome).inc()
        if verdict.met:
            self._met.labels(tier).inc()
        else:
            self._missed.labels(tier, verdict.cause or "unknown").inc()
        if event.outcome != "completed":
            return
        self._success.labels(self._model, event.reason).inc()
        self._output_size.observe(event.output)
        if verdict.tpot is not None:
            self._tpot.observe(verdict.tpot)
        if verdict.e2e is not None:
            self._e2e.observe(verdict.e2e)

    def _stepped(self, event: Stepped) -> None:
        self._step.labels(event.id).observe(event.seconds)
        self._seqs.labels(event.id).observe(event.shape.seqs)
        self._tokens.labels(event.id).observe(event.shape.tokens)

    def _tenant(self, name: str) -> str:
        name = name[:64]
        if name not in self._tenants:
            if len(self._tenants) >= MOST_TENANTS:
                return OTHER
            self._tenants.add(name)
        return name


class _Gauges:
    """How things stand at the moment of a scrape (prometheus_client's collector protocol)."""

    def __init__(self, model: str, views: Callable[[], Sequence[View]], in_flight: Callable[[], int]) -> None:
        self._model, self._views, self._in_flight = model, views, in_flight

    def collect(self) -> Iterator[Metric]:
        views = self._views()
        yield GaugeMetricFamily("rubato_requests_in_flight", "Offered and not ended", value=self._in_flight())
        yield self._gauge("num_requests_running", "Holding KV", ((v, len(v.running)) for v in views))
        yield self._gauge("num_requests_waiting", "Placed, holding no KV", ((v, len(v.waiting)) for v in views))
        usage = ((v, 1.0 - v.kv_free / v.kv_total) for v in views)
        yield self._gauge("kv_cache_usage_perc", "KV blocks in use, 1 = all", usage)
        free = GaugeMetricFamily("rubato_kv_blocks_free", "KV blocks free", labels=["replica"])
        total = GaugeMetricFamily("rubato_kv_blocks_total", "KV blocks", labels=["replica"])
        for view in views:
            free.add_metric([view.id], view.kv_free)
            total.add_metric([view.id], view.kv_total)
        yield free
        yield total

    def _gauge(self, name: str, about: str, values: Iterable[tuple[View, float]]) -> Metric:
        family = GaugeMetricFamily(f"vllm:{name}", about, labels=["model_name", "engine"])
        for view, value in values:
            family.add_metric([self._model, view.id], value)
        return family
