"""The few claims with which a paper's page opens, in short words: what a reader wants to know first.

`claims.yaml` has every claim in full; `docs/papers.md` shows the first of each paper.
"""

from __future__ import annotations

from typing import NamedTuple


class Headline(NamedTuple):
    """A claim of a figure, and what it counts in a dozen words."""

    figure: str
    claim: str
    words: str


# by page; what papers say comes before what we measured beside it
HEADLINES: dict[str, tuple[Headline, ...]] = {
    "slos-serve": (
        Headline("slos-serve-capacity", "six", "capacity over the better of vLLM and Sarathi, mean of six scenarios"),
        Headline("slos-serve-capacity", "five", "the same of the five scenarios whose gains the paper prints"),
        Headline("slos-serve-capacity", "six-distserve", "capacity over DistServe, mean of six scenarios"),
        Headline("slos-serve-ablation", "mean-admission", "capacity gained by admission"),
        Headline("slos-serve-ablation", "mean-drafts", "capacity gained by speculative drafts"),
        Headline("slos-serve-scaling", "coder-4", "Coder: capacity of four replicas over one"),
        Headline("slos-serve-planning", "within-10-ms", "planning calls within 10 ms"),
        Headline("slos-serve-capacity", "mean-edf", "capacity over tuned `edf`, not in the paper"),
    ),
    "polyserve": (
        Headline("polyserve-goodput", "co-over-baselines", "goodput over the best tuned baseline, co-located"),
        Headline("polyserve-goodput", "pd-over-baselines", "the same, prefill and decode apart"),
        Headline("polyserve-flip", "co-over-baselines", "the same while tiers turn round, co-located"),
        Headline("polyserve-flip", "pd-over-baselines", "the same while tiers turn round, prefill and decode apart"),
        Headline("polyserve-router", "co-20", "requests routed in a CPU second (the paper's router is C++)"),
        Headline("polyserve-goodput", "chosen-each", "goodput with each tier kept, in the mode chosen beforehand"),
    ),
    "ascendra": (
        Headline("ascendra-capacity", "mistral-over-default", "Mistral: capacity over the better of vLLM and Sarathi"),
        Headline("ascendra-capacity", "llama-over-default", "the same, Llama-3.1-8B"),
        Headline("ascendra-capacity", "qwen-over-default", "the same, Qwen-14B"),
        Headline("ascendra-parts", "overload-with-drops", "requests in SLO in overload, all systems dropping"),
        Headline("ascendra-model", "median-mistral", "median error of its model of step times"),
        Headline("ascendra-capacity", "mistral-over-tuned", "Mistral: capacity over the better baseline when tuned"),
        Headline("ascendra-capacity", "mistral-over-edf", "Mistral: capacity over `edf`, not in the paper"),
    ),
    "sa": (
        Headline("sa-gain", "g-best-of-12", "draws of 12 runs whose best has 1.465 × the G of order of arrival"),
        Headline("sa-gain", "g-exact-40-4", "G over order of arrival, lengths known to 2.5 %, 40 requests"),
        Headline("sa-appendix", "attained-5-times", "single runs with 5 times as many requests in SLO"),
        Headline("sa-appendix", "latency-31-6", "single runs with 31.6 % less latency"),
        Headline("sa-search", "ms-10-table", "search time for 10 requests"),
        Headline("sa-gain", "g-best-of-12-random", "draws that reach 1.465 by random orders"),
        Headline("sa-gain", "g-10-1", "mean G over order of arrival, 10 requests, lengths drawn"),
    ),
    "adaserve": (
        Headline("adaserve-rate", "llama-violations", "Llama-70B: times fewer violations than the best baseline"),
        Headline("adaserve-rate", "qwen-violations", "the same, Qwen-32B"),
        Headline("adaserve-rate", "llama-goodput", "Llama-70B: goodput over the best baseline's"),
        Headline("adaserve-rate", "qwen-goodput", "the same, Qwen-32B"),
        Headline("adaserve-urgent", "llama-goodput", "Llama-70B, 10 to 90 % urgent requests: goodput, at most"),
        Headline("adaserve-rate", "llama-selection", "points that SLO-customised selection, its core, adds"),
        Headline("adaserve-rate", "llama-violations-tuned", "Llama-70B: times fewer violations than all, tuned"),
        Headline("adaserve-rate", "llama-violations-by-tpot", "the same by the paper's judge: TPOT, no TTFT"),
    ),
    "rubato": (
        Headline("rubato-robust", "ratio", "attained over the best other of each load, 25 loads"),
        Headline("rubato-robust", "near-best", "loads within 2 % of the best other"),
        Headline("rubato-robust", "over-edf", "attained more than `edf`"),
        Headline("rubato-robust", "over-vllm", "attained more than `vllm`"),
        Headline("rubato-robust", "broken", "promises broken"),
        Headline("rubato-replica", "scenarios-90", "one replica: requests/s over the best other, tuned"),
        Headline("rubato-fleet", "fleet-90", "a fleet: requests/s over the best other, tuned"),
        Headline("rubato-sessions", "fleet-sessions", "agents' sessions on four replicas: attained more than the best"),
    ),
    "simulator": (
        Headline("silicon", "tpot-median", "TPOT against measured GPUs, median error"),
        Headline("silicon", "ttft-median", "TTFT against measured GPUs, fewest clients, median error"),
        Headline("simulator-fidelity", "cells-that-hold", "policies and loads whose live runs the simulation meets"),
        Headline("simulator-speed", "sarathi-speed", "requests simulated in a CPU second, 20 replicas"),
        Headline("simulator-speed", "memory", "peak memory for 300,000 requests"),
    ),
}
