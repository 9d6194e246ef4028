"""What the figure `silicon` needs, made again: `python tools/silicon_points.py experiments/silicon_data`.

Points of vLLM serving dense models, with TTFT and TPOT as they were measured on real GPUs, out of
`systems/silicon_sample.csv` of NVIDIA's aiconfigurator-core 0.12.0 (Apache-2.0); a count of the others by why they are
left out; and a hardware profile for each model, GPU and number of GPUs among them. Needs the extra `aiconfigurator`.
"""

from __future__ import annotations

import argparse
import csv
import json
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from importlib import resources
from pathlib import Path

import orjson

from rubato.latency.profiles.kernel_profiles import MODELS, compose, name_of

SAMPLE = "systems/silicon_sample.csv"
COLUMNS = ("source", "profile", "isl", "osl", "concurrency", "ttft_ms", "tpot_ms")
GPUS = {"h100_sxm": "h100", "h200_sxm": "h200", "b200_sxm": "b200"}
# (model, precision) -> ours, and where its points are from. Those of Llama-3.1-70B are InferenceMAX's of October 2025,
# which published its scripts: vLLM with asynchronous scheduling, its version stated by an image only. The others are of
# vLLM 0.12.0; of some, what their concurrency counts is unclear (`experiments.silicon`).
MODELS_SERVED = {
    ("meta-llama/Llama-3.1-70B", "fp8"): ("llama-3.1-70b-fp8", "inferencemax"),
    ("meta-llama/Llama-3.1-70B", "fp4"): ("llama-3.1-70b-fp4", "inferencemax"),
    ("Qwen/Qwen3-32B", ""): ("qwen3-32b", "vllm-0.12"),
    ("Qwen/Qwen3-32B", "fp8"): ("qwen3-32b-fp8", "unclear"),
    ("nvidia/Llama-3.1-8B-Instruct-FP8", "fp8"): ("llama-3.1-8b-fp8", "unclear"),
}
FP8_KV = (("inferencemax", "h200"), ("inferencemax", "b200"))  # by InferenceMAX's scripts; elsewhere the model's type
MIXTURES = ("MiniMax-M2.5", "Qwen3-235B", "Kimi-K2.5", "gpt-oss")  # of experts


def left_out(row: Mapping[str, str]) -> str:
    """Why a point of vLLM is not used, "" if it is."""
    if any(name in row["model_path"] for name in MIXTURES):
        return "mixture of experts"
    if row["mode"] != "agg":
        return "prefill and decode at different servers"
    if (row["model_path"], row["precision"]) not in MODELS_SERVED or row["system"] not in GPUS:
        return "no kernel tables"
    return ""


def concurrency(row: Mapping[str, str]) -> int:
    """As its source says it; where it does not, the batch."""
    stated = re.search(r"silicon_concurrency=(\d+)", row["silicon_data_source"])
    return int(stated[1]) if stated else int(float(row["batch_size"]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder
    sample = (resources.files("aiconfigurator_core") / SAMPLE).read_text(encoding="utf-8")
    rows = list(csv.DictReader(sample.splitlines()))
    reasons = Counter(f"{row['backend']}: not vLLM" for row in rows if row["backend"] != "vllm")
    rows = [row for row in rows if row["backend"] == "vllm"]
    reasons.update(reason for row in rows if (reason := left_out(row)))
    rows = [row for row in rows if not left_out(row)]
    points, servers = [], set()
    for row in rows:
        model, source = MODELS_SERVED[row["model_path"], row["precision"]]
        server = (model, GPUS[row["system"]], int(float(row["tp_size"])))
        servers.add((source, *server))
        lengths = (int(row["isl"]), int(row["osl"]), concurrency(row))
        times = (round(float(row[f"silicon_{what}_ms"]), 3) for what in ("ttft", "tpot"))
        points.append((source, name_of(*server), *lengths, *times))
    with (folder / "points.csv").open("w", encoding="utf-8", newline="") as file:
        csv.writer(file, lineterminator="\n").writerows([COLUMNS, *sorted(points)])
    (folder / "left_out.json").write_text(json.dumps(dict(sorted(reasons.items())), indent=2) + "\n", encoding="utf-8")
    for source, model, gpu, gpus in sorted(servers):
        known = MODELS[model]
        if (source, gpu) in FP8_KV:
            known = replace(known, dims=replace(known.dims, kv_size=1))
        name = name_of(model, gpu, gpus)
        (folder / f"{name}.json").write_bytes(orjson.dumps(compose(name, known, gpu, gpus).to_json()))


if __name__ == "__main__":
    main()
