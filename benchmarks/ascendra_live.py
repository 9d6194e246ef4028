"""Ascendra and baselines, live: two replicas of the bundled model over HTTP, one core each, in a server of their own.

    python benchmarks/ascendra_live.py [--seeds 3] [--seconds 40] [--json FILE]

One LP and one HP under `ascendra`; `vllm`, `sarathi` and `prefill_first` round robin on two equal replicas, `edf` on
the least loaded. Prompts and outputs have the lengths of `ascendra-sharegpt4-mistral` times `SCALE`; the TTFT and the
TPOT are as many times what this machine takes unloaded as the paper's are of an A100's (7.6 times the prefill of a
median prompt, 10 times a decode step). The latency model is `operation_count`, fitted in a warm-up and learning on.

The rate at which `vllm` attains 90 % is tried on the real server; `OVERLOAD` times it is offered: the same requests at
the same times to each policy, in an order that turns with every seed. At last `ascendra` serves `LONG` seconds at 0.8
of that rate, and `operation_count` learns its steps anew from a cold start, replica by replica: its error, beside by
how much two steps differ that should take the same time. Keep the machine quiet.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from slos_serve_live import found

from rubato.core import event_log
from rubato.core.events import Event, Stepped
from rubato.core.plan import Sample, Shape
from rubato.core.request import SLO
from rubato.core.timeline import steps
from rubato.demo import runs as demo
from rubato.demo.progress import PhaseProgress
from rubato.fleet.cluster_options import PolicyChoice
from rubato.latency import operation_count
from rubato.latency.fit import coefficients
from rubato.latency.model_dims import Dims
from rubato.measure.confidence import over_seeds
from rubato.measure.records import BenchResult
from rubato.measure.server_process import served
from rubato.simulation.run_spec import packaged_hardware
from rubato.workloads import Workload, scenarios
from rubato.workloads.request_kinds import Kind
from rubato_torch import bundled_model

SYSTEMS = {
    "ascendra": "ascendra@ascendra:groups=1L1H",
    "vllm": "vllm@round_robin",
    "sarathi": "sarathi@round_robin",
    "prefill_first": "prefill_first@round_robin",
    "edf": "edf@least_loaded",
}
SCALE = 0.1  # of all lengths: the bundled model takes 2,048 tokens
PROMPT, OUTPUT = (lengths.scaled(SCALE) for lengths in scenarios.SHAREGPT4)
MEDIAN = 1730  # tokens, of the paper's prompts
OVERLOAD = 1.2
TRY_SECONDS = 30.0
LONG, AFTER = 390.0, 300.0  # seconds of the last run, and those after which errors count


def multiples() -> tuple[float, float]:
    """TTFT in unloaded prefills of a median prompt, TPOT in unloaded decode steps: the paper's, on its A100."""
    scenario = scenarios.get("ascendra-sharegpt4-mistral")
    model = packaged_hardware(scenario.profile).model
    (kind,) = scenario.kinds
    assert kind.slo.ttft is not None
    assert kind.slo.tpot is not None
    return (
        kind.slo.ttft / model.step_time(Shape().plus(MEDIAN, 0)),
        kind.slo.tpot / model.step_time(Shape(1, 1, MEDIAN)),
    )


def cpu_core(model: Path) -> operation_count.Model:
    """For one core: two rates that are about right, and coefficients to be learnt."""
    given = json.loads((model / "config.json").read_text())
    heads = given["num_attention_heads"]
    dims = Dims(
        given["num_hidden_layers"], given["hidden_size"], heads, given["num_key_value_heads"],
        given.get("head_dim") or given["hidden_size"] // heads, given["intermediate_size"], given["vocab_size"],
        tied=given["tie_word_embeddings"],
    )  # fmt: skip
    return operation_count.Model(dims=dims, compute=1e11, memory=1e10)


@dataclass(frozen=True)
class Stage(demo.DemoStage):
    """The demo's, with one kind of request and two replicas of one core each."""

    def kinds(self, slos: Mapping[str, SLO], scale: float) -> list[Kind]:
        return [Kind("chat", slos["chat"], PROMPT, OUTPUT)]

    def serve(
        self, choice: PolicyChoice, model: operation_count.Model, load: Workload, log: Path | None = None
    ) -> BenchResult:
        """One load, in a server of its own."""
        config: dict[str, object] = {
            "model": self.model,
            "served_model_name": "demo",
            "engine": {
                "kind": "torch",
                "kv_gib": 0.5,
                "max_num_seqs": 64,
                "max_num_batched_tokens": 1024,
                "threads": 1,
            },
            "replicas": 2,
            "policy": {"name": choice.policy, **choice.settings},
            "router": {"name": choice.router, **choice.router_settings},
            "latency": {"kind": "operation_count", **coefficients(model)},
            "lengths": {"name": "running_mean"},
            "max_in_flight": 2048,
            "prefix_cache": False,  # a repeated prompt must not be cheaper for the policy measured last
            "slo_rule": "mean",
            "tiers": demo.tier_settings(load.tiers),
        }
        if log is not None:
            config["event_log"] = str(log)
        with served(config, self.out / f"{choice.policy}.log") as (url, _):
            return self._bench(url, load, choice.policy, "slo", warmup=6)

    def warm_up_model(self) -> tuple[operation_count.Model, SLO]:
        """The latency model, fitted to bursts on two replicas; and the SLO."""
        blank = cpu_core(Path(self.model))
        log = self.out / "measure.events.jsonl"
        load = self.load(6.0, 20.0, {"chat": SLO()}, 1.0, "measure")
        self.serve(PolicyChoice.parse("sarathi:budget=256@round_robin"), blank, load, log)
        model = dataclasses.replace(blank)
        model.fit(steps(event_log.read(log)))
        ttft, tpot = multiples()
        prefill, decode = model.step_time(Shape().plus(round(SCALE * MEDIAN), 0)), model.step_time(Shape(1, 1, 150))
        print(f"prefill of a median prompt {1e3 * prefill:.0f} ms, decode step {1e3 * decode:.1f} ms, both on one core")
        return model, SLO(ttft=ttft * prefill, tpot=tpot * decode)


def errors(events: Iterable[Event], cold: operation_count.Model) -> dict[str, Any]:
    """Of each replica's steps: relative errors of a model that learns them from a cold start, and what differs between
    two decode steps in a row of the same sequences."""
    of: dict[str, list[Stepped]] = {}
    for event in events:
        if isinstance(event, Stepped):
            of.setdefault(event.id, []).append(event)
    found: dict[str, Any] = {}
    for replica, own in of.items():
        model, begin = dataclasses.replace(cold), own[0].at
        late: list[float] = []
        early: list[float] = []
        alike: list[float] = []
        for i, step in enumerate(own):
            error = abs(model.step_time(step.shape) / step.seconds - 1.0)
            (late if step.at - begin >= AFTER else early).append(error)
            model.update(Sample(step.shape, step.seconds))
            before = own[i - 1].shape if i else None
            if before and not before.chunks and not step.shape.chunks and before.tokens == step.shape.tokens:
                alike.append(abs(own[i - 1].seconds / step.seconds - 1.0))
        found[replica] = {
            "steps": len(own), "late": len(late), "alike": len(alike),
            "first_p50": float(np.median(early)), "spread_p50": float(np.median(alike)),
            **{f"late_{name}": float(np.quantile(late, q)) for name, q in (("p50", 0.5), ("p90", 0.9)) if late},
        }  # fmt: skip
    return found


def row(name: str, seed: int, run: BenchResult) -> dict[str, Any]:
    firsts = [r.verdict.ttft for r in run.records if r.verdict.ttft is not None]
    return {
        "system": name, "seed": seed, "offered": len(run.records),
        "met": sum(r.verdict.met for r in run.records),
        "ttft_p50": float(np.quantile(firsts, 0.5)), "ttft_p90": float(np.quantile(firsts, 0.9)),
        "completed": sum(r.outcome == "completed" for r in run.records), "problems": list(run.problems),
    }  # fmt: skip


def told(rows: Sequence[Mapping[str, Any]]) -> str:
    lines = ["| system | in SLO | TTFT P50, P90, s | in SLO less ascendra's, points |", "|---" * 4 + "|"]
    of = {name: sorted((r for r in rows if r["system"] == name), key=lambda r: r["seed"]) for name in SYSTEMS}
    for name, own in of.items():
        shares = [100 * r["met"] / r["offered"] for r in own]
        share = over_seeds(shares)
        over = over_seeds([s - 100 * a["met"] / a["offered"] for s, a in zip(shares, of["ascendra"], strict=True)])
        each = ", ".join(f"{r['met']}/{r['offered']}" for r in own)
        p50, p90 = (np.mean([r[key] for r in own]) for key in ("ttft_p50", "ttft_p90"))
        lines.append(
            f"| `{name}` | {share.value:.0f} % [{share.low:.0f}, {share.high:.0f}] ({each}) | {p50:.2f}, {p90:.2f} "
            f"| {over.value:+.0f} [{over.low:+.0f}, {over.high:+.0f}] |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=40.0, help="of load for each system")
    parser.add_argument("--rate", type=float, help="requests/s that vllm holds (default: found)")
    parser.add_argument(
        "--long", type=float, default=LONG, help="seconds of the run for operation_count's error; 0 = none"
    )
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    choices = {name: PolicyChoice.parse(choice) for name, choice in SYSTEMS.items()}
    kept: dict[str, Any] = {"seconds": args.seconds, "rows": []}
    with tempfile.TemporaryDirectory() as folder:
        stage = Stage(Path(folder), str(bundled_model.ensure()), 0, PhaseProgress("each policy"))
        model, slo = stage.warm_up_model()
        print(f"SLO: TTFT {1e3 * slo.ttft:.0f} ms, TPOT {1e3 * slo.tpot:.0f} ms", flush=True)  # type: ignore[operator]

        def run(name: str, rate: float, seconds: float, seed: int, log: Path | None = None) -> BenchResult:
            load = dataclasses.replace(stage, seed=seed).load(rate, seconds, {"chat": slo}, 1.0, "ascendra")
            return stage.serve(choices[name], model, load, log)

        def attained_at(rate: float) -> float:
            share = demo.attained_share(run("vllm", rate, TRY_SECONDS, 0))
            print(f"  vllm at {rate:.2f}/s: {100 * share:.0f} %", flush=True)
            return share

        rate = args.rate or found(attained_at, 2.0, "vllm")
        print(f"vllm holds {rate:.2f}/s", flush=True)
        kept.update(holds=rate, slo=dataclasses.asdict(slo), model=model.to_dict())
        for seed in range(1, args.seeds + 1):
            for turn in range(len(choices)):
                name = list(choices)[(turn + seed) % len(choices)]
                kept["rows"].append(row(name, seed, run(name, OVERLOAD * rate, args.seconds, seed)))
                print(json.dumps(kept["rows"][-1]), flush=True)
        if kept["rows"]:
            print("\n" + told(kept["rows"]), flush=True)
        if args.long:
            log = Path(folder) / "long.events.jsonl"
            run("ascendra", 0.8 * rate, args.long, 9, log)
            kept["operation_count"] = errors(event_log.read(log), cpu_core(Path(stage.model)))
            print(json.dumps(kept["operation_count"], indent=2))
    if args.json:
        args.json.write_text(json.dumps(kept, indent=2) + "\n")


if __name__ == "__main__":
    main()
