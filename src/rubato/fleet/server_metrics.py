"""Fits a latency model to a vLLM server's `/metrics` alone.

The page has no single steps, only counters: of steps and their tokens, and of the gaps between the tokens of a request,
each of which is one step. They give means over a window: seconds, tokens, decodes and KV tokens of a step. A model that
is linear in these holds for means as for steps, and is fitted to windows. The knee of `affine` and prefill attention
are not linear, and cannot be seen.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from rubato.core.clock import ARRIVAL, Clock
from rubato.fleet.server_probe import DEFAULT_LIMITS, metrics, with_cache
from rubato.fleet.upstream import Upstream
from rubato.latency import affine
from rubato.latency.fit import FOLDS, Fitted, report_of
from rubato.latency.least_squares import Array, nnls

SCRAPE_S = 1.0
WINDOW_SCRAPES = 5
MIN_WINDOWS = 15
MIN_STEPS = 10  # in a window
MIN_VARIATION = 2.0  # required ratio of the 95th to the 5th percentile of windows
MAX_CORRELATION = 0.99  # above it two causes cannot be told apart
MAX_MEDIAN_ERRORS = 5.0  # windows with a larger error are left out: the machine paused
MIN_DURATION_S = MIN_WINDOWS * WINDOW_SCRAPES * SCRAPE_S
METRIC_LINE = re.compile(r"^(vllm:\w{1,100})(?:\{.*\})?[ \t]+(\S{1,40})", re.MULTILINE)
TOKEN_GAP_METRICS = (  # since vLLM 0.11, and before
    "vllm:inter_token_latency_seconds",
    "vllm:time_per_output_token_seconds",
)  # since vLLM 0.11, and before
COMPUTED_TOKENS_METRIC = "vllm:prompt_tokens_cached_total"  # in versions whose steps count computed tokens
DRAFTS_METRIC = "vllm:spec_decode_num_drafts_total"


class Scrape(NamedTuple):
    """The counts of a page of metrics since the server's start, over all its engines.

    Args:
        at: when the page was read (s).
        kv: tokens in use, of one engine.
        engines: number of engines.
    """

    at: float
    steps: float
    tokens: float
    generated: float
    gaps: float
    gap_seconds: float
    drafts: float
    kv: float
    engines: int = 1


class MetricsWindow(NamedTuple):
    """The means of a window.

    Args:
        seconds: of a step.
        decodes: sequences that decode in a step.
        prompt: tokens of prompts in a step.
        kv: tokens in use.
    """

    seconds: float
    decodes: float
    prompt: float
    kv: float


async def scrape(server: Upstream, clock: Clock, seconds: float) -> list[Scrape]:
    """Reads a server's metrics for `seconds`, and returns the pages that have come.

    Raises:
        ValueError: the seconds are too few, or the server has no vLLM metrics.
    """
    if seconds < MIN_DURATION_S:
        raise ValueError(
            f"--duration {seconds:g}: the server has no link, and /metrics alone needs {MIN_DURATION_S:g} s or more, "
            "better 300"
        )
    pages: list[Scrape] = []
    until = clock.now() + seconds
    while (now := clock.now()) <= until:
        if page := await metrics(server, SCRAPE_S):
            pages.append(read_page(page, now))
        await clock.sleep_until(now + SCRAPE_S, ARRIVAL)
    return pages


def read_page(page: str, at: float) -> Scrape:
    """Returns the counts of a page, read at this time (s).

    Raises:
        ValueError: some counts are missing.
    """
    sums: dict[str, list[float]] = {}
    for name, value in METRIC_LINE.findall(page):
        sums.setdefault(name, []).append(float(value))
    gaps = next((name for name in TOKEN_GAP_METRICS if f"{name}_count" in sums), TOKEN_GAP_METRICS[0])
    needed = ("vllm:iteration_tokens_total_count", "vllm:iteration_tokens_total_sum", "vllm:generation_tokens_total")
    for name in (*needed, f"{gaps}_count", f"{gaps}_sum"):
        if name not in sums:
            raise ValueError(f"/metrics has no {name}: give a vLLM server (0.8 or newer), or `rubato fit LOG`")
    steps, tokens, generated, count, seconds = (
        sum(sums[name]) for name in (*needed, f"{gaps}_count", f"{gaps}_sum")
    )  # fmt: skip
    # Tokens of prompts that the prefix cache had: newer versions of vLLM leave them out of a step's.
    cached = 0.0 if COMPUTED_TOKENS_METRIC in sums else sum(sums.get("vllm:prefix_cache_hits_total", []))
    used = [share for share in sums.get("vllm:kv_cache_usage_perc", []) if math.isfinite(share)]
    limits = with_cache(DEFAULT_LIMITS, page)
    capacity = 0 if limits is DEFAULT_LIMITS else limits.kv_blocks * limits.block_size
    kv = capacity * sum(used) / len(used) if used else 0.0
    drafts, engines = sum(sums.get(DRAFTS_METRIC, [])), len(sums[needed[0]])
    return Scrape(at, steps, tokens - cached, generated, count, seconds, drafts, kv, engines)


def windows(scrapes: Sequence[Scrape]) -> list[MetricsWindow]:
    """Returns windows of at least `WINDOW_SCRAPES` scrapes and `MIN_STEPS` steps.

    Raises:
        ValueError: the server drafts, or was started again.
    """
    result: list[MetricsWindow] = []
    first = 0
    for last in range(1, len(scrapes)):
        if scrapes[last].steps < scrapes[last - 1].steps:
            raise ValueError("the server's counters went back, so it was started again: measure anew")
        if scrapes[last].drafts > scrapes[first].drafts:
            raise ValueError("the server drafts tokens, which /metrics does not tell from others: use Rubato's plug-in")
        enough = last - first >= WINDOW_SCRAPES and scrapes[last].steps >= scrapes[first].steps + MIN_STEPS
        if enough and scrapes[last].gaps > scrapes[first].gaps:
            result.append(_window(scrapes[first : last + 1]))
            first = last
    return result


def _window(part: Sequence[Scrape]) -> MetricsWindow:
    """Returns the means over the gaps between tokens, from the first page to the last.

    A prompt is in one gap of each request that decodes meanwhile, and of none where the server was idle: so prompt
    tokens of a mean gap are those of a second, times the gap.
    """
    first, last = part[0], part[-1]
    steps, generated = last.steps - first.steps, last.generated - first.generated
    seconds = (last.gap_seconds - first.gap_seconds) / (last.gaps - first.gaps)
    prompt = max(0.0, last.tokens - first.tokens - generated) / (last.at - first.at) / last.engines
    kv = sum((after.steps - before.steps) * (before.kv + after.kv) / 2 for before, after in pairwise(part)) / steps
    return MetricsWindow(seconds, generated / steps, prompt * seconds, kv)


def load_advice(url: str) -> str:
    """Returns what to do if the load of the server at this URL did not vary enough."""
    return (
        "offer little, then much, of long prompts and of short ones, with RATE half of the requests a second that the "
        f"server holds: rubato bench {url} --duration 300 --rate RATE --arrivals piecewise:0=1,100=4,200=8,300=0"
    )


def fit_scrapes(scrapes: Sequence[Scrape], url: str) -> Fitted:
    """Fits the model to windows of the server at this URL; every fifth window is held out.

    Raises:
        ValueError: there are too few windows, or their load did not vary enough.
    """
    rows = windows(scrapes)
    if len(rows) < MIN_WINDOWS:
        raise ValueError(
            f"/metrics of {url} gave {len(rows)} windows of {WINDOW_SCRAPES * SCRAPE_S:g} s with {MIN_STEPS} steps or "
            f"more, and {MIN_WINDOWS} are needed: keep it under load for longer; {load_advice(url)}"
        )
    table = np.array(rows)
    _check_varied(table, url)
    is_fitted = np.arange(len(table)) % FOLDS > 0
    trial, model = _fit(table[is_fitted]), _fit(table)
    notes = [
        f"from /metrics of {url} alone: its errors are of means over {WINDOW_SCRAPES * SCRAPE_S:g} s, of single steps "
        "larger, most of all of those with long prompts: the knee and prefill attention are not seen",
    ]
    if _is_correlated(table[:, 1], table[:, 3]):
        notes.append("sequences and KV tokens changed together: what each of them takes was not told apart")
    inside, held_out = (
        report_of(_predicted(trial, part), part[:, 0]) for part in (table[is_fitted], table[~is_fitted])
    )
    return Fitted("affine", model, inside, held_out, f"every fifth of {len(table)} windows", notes=tuple(notes))


def _check_varied(table: Array, url: str) -> None:
    for what, column in (("sequences", table[:, 1]), ("prompt tokens", table[:, 2])):
        low, high = np.quantile(column, [0.05, 0.95]).tolist()
        if not (high > 0.0 and high >= MIN_VARIATION * low):
            raise ValueError(
                f"the load did not vary enough: {what} a step were between {low:.1f} and {high:.1f} in nine of ten "
                f"windows, and the most is to be {MIN_VARIATION:g} times the least; {load_advice(url)}"
            )
    if _is_correlated(table[:, 1], table[:, 2]):
        raise ValueError(
            f"the load did not vary enough: sequences and prompt tokens of a step changed together; {load_advice(url)}"
        )


def _is_correlated(one: Array, other: Array) -> bool:
    """Returns whether the effects of two columns cannot be told apart."""
    return other.std() == 0.0 or abs(float(np.corrcoef(one, other)[0, 1])) > MAX_CORRELATION


def _columns(table: Array) -> Array:
    """Returns the factors of a constant, a token, a sequence and a KV token, a column each."""
    _, decodes, prompt, kv = table.T
    return np.column_stack([np.ones(len(table)), decodes + prompt, decodes, kv])


def _fit(table: Array) -> affine.Model:
    """Fits the relative error twice, the second time without windows that were far off at first."""
    selected = table
    for _ in range(2):
        b, k, per_seq, a = nnls(_columns(selected) / selected[:, :1], np.ones(len(selected))).tolist()
        model = affine.Model(k=(0.0, k), b=(0.0, b), host_per_seq=per_seq, a=a)
        error = np.abs(_predicted(model, table) / table[:, 0] - 1.0)
        selected = table[error <= MAX_MEDIAN_ERRORS * max(float(np.median(error)), 1e-3)]
    return model


def _predicted(model: affine.Model, table: Array) -> Array:
    predicted: Array = _columns(table) @ np.array([model.b[1], model.k[1], model.host_per_seq, model.a])
    return predicted
