"""CPU time of a step of vLLM's scheduler: stock and with the plug-in, in turns, without a model.

    python benchmarks/vllm_step_overhead.py [--python PATH] [--policy edf] [--running 8,64,256] [--waiting 0,400]

What is measured: the CPU time of this thread in `schedule` and `update_from_output`, step by step in turns in one
process, with a token at once for each request of the batch and a clock that goes `STEP` seconds a step. All that run
decode, with an SLO each; as many may run as do, so those that wait stay, and no step but those in which all that run
get a token counts: a policy may let decodes that are ahead sit out, and a smaller batch costs vLLM less. Of those that
wait a third have a TTFT of 2 s, a third of 10 s, a third none. Prefix caching is on, as it is by default. The plug-in
plans each step, and, as by default, only those in which not every SLO has room.
--python: an interpreter that has vLLM. --asynchronous: vLLM's AsyncScheduler with two batches in flight. Reported: CPU
ms as the median over steps, for each part; what is added, in ms and times stock's step, as the median over rounds, with
the middle half of the rounds.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from statistics import median, quantiles
from typing import Any, NoReturn

from vllm_env import ensure_env, interpreter

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

PROMPT, BLOCK = 512, 16
WARM, STEPS, ROUNDS = 10, 60, 5  # steps before the clock, steps of a round under it
STEP = 0.02
SLOS: list[dict[str, Any]] = [
    {"slo_ttft_ms": 2000, "slo_tpot_ms": 100, "slo_tier": "chat"},
    {"slo_ttft_ms": 10_000, "slo_tpot_ms": 200, "slo_tier": "code"},
    {},
]


class Side:
    """One scheduler with its load."""

    def __init__(
        self, model: str, policy: str, running: int, waiting: int, *, asynchronous: bool, stand_aside: bool
    ) -> None:
        from tests.vllm.harness import harness

        most = 2 * (WARM + ROUNDS * STEPS) + 64
        self.made = harness(
            model, policy, blocks=running * (PROMPT + most) // BLOCK + 1000, block=BLOCK, tokens=2048, seqs=running,
            prefix=True, asynchronous=asynchronous, change=_change, watched=False,
            rubato={"stand_aside": stand_aside},
        )  # fmt: skip
        self.made.pace = STEP
        self.spent: list[tuple[float, float] | None] = []  # of each step, None for one in which a decode sat out
        rng = random.Random(1)
        for i in range(running):
            self._add(f"r{i}", rng, most, {**SLOS[i % 2], "slo_ttft_ms": 600_000})
        while any(r.num_output_tokens < 1 for r in self.made.scheduler.requests.values()):
            self.made.step()
        for i in range(waiting):
            self._add(f"w{i}", rng, most, SLOS[i % 3])
        self._time()
        for _ in range(WARM):
            self.step()
        self.spent.clear()

    def _add(self, id: str, rng: random.Random, most: int, slo: dict[str, Any]) -> None:
        self.made.add(id, [rng.randrange(250) for _ in range(PROMPT)], most, **slo)

    def _time(self) -> None:
        scheduler = self.made.scheduler
        schedule, update = scheduler.schedule, scheduler.update_from_output
        self._planned = self._booked = 0.0

        def timed_schedule(*args: Any) -> Any:
            begin = time.thread_time()
            output = schedule(*args)
            self._planned = time.thread_time() - begin
            return output

        def timed_update(*args: Any) -> Any:
            begin = time.thread_time()
            outputs = update(*args)
            self._booked = time.thread_time() - begin
            return outputs

        scheduler.schedule, scheduler.update_from_output = timed_schedule, timed_update

    def step(self) -> None:
        counts = self.made.step()
        is_full = len(counts) == self.made.scheduler.scheduler_config.max_num_seqs
        self.spent.append((self._planned, self._booked) if is_full else None)


def _change(config: Any) -> None:
    config.model_config.max_model_len = 4096
    config.scheduler_config.max_num_active_seqs = config.scheduler_config.max_num_seqs


def measured(model: str, policy: str, running: int, waiting: int, *, asynchronous: bool) -> dict[str, Any]:
    ways = {"stock": ("", False), "plans": (policy, False), "stands aside": (policy, True)}
    sides = {
        label: Side(model, name, running, waiting, asynchronous=asynchronous, stand_aside=aside)
        for label, (name, aside) in ways.items()
    }
    rounds: list[dict[str, float]] = []
    for _ in range(ROUNDS):
        for _ in range(STEPS):
            for side in sides.values():
                side.step()
        rounds.append({k: median(1e3 * sum(one) for one in side.spent[-STEPS:] if one) for k, side in sides.items()})
    row: dict[str, Any] = {"running": running, "waiting": waiting}
    for label, side in sides.items():
        full = [one for one in side.spent if one]
        row[label] = {
            "schedule": 1e3 * median(a for a, _ in full),
            "update": 1e3 * median(b for _, b in full),
            "steps in which all ran": len(full) / len(side.spent),
        }
        if label != "stock":
            guard, added = side.made.scheduler.rubato.guard, [each[label] - each["stock"] for each in rounds]
            times = [each[label] / each["stock"] - 1.0 for each in rounds]
            row[label] |= {
                "added": median(added),
                "added, middle half of rounds": quantiles(added, n=4)[::2],
                "added, times stock": median(times),
                "times stock, middle half of rounds": quantiles(times, n=4)[::2],
                "steps left to vLLM": guard.stood_aside / guard.steps,
            }
    return row


def told(rows: Sequence[dict[str, Any]], policy: str) -> str:
    lines = [
        f"| running | waiting | stock: schedule + update, ms | `{policy}`: ms added | times stock | where it may stand "
        "aside: ms added | times stock | steps left to vLLM |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        cells = [f"{row['stock']['schedule']:.2f} + {row['stock']['update']:.2f}"]
        for label in ("plans", "stands aside"):
            one = row[label]
            for name, middle in (("added", "added, "), ("added, times stock", "times stock, ")):
                low, high = one[f"{middle}middle half of rounds"]
                cells.append(f"{one[name]:.2f} [{low:.2f}, {high:.2f}]")
        cells.append(f"{row['stands aside']['steps left to vLLM']:.0%}")
        lines.append(f"| {row['running']} | {row['waiting']} | {' | '.join(cells)} |")
    return "\n".join(lines)


def under(python: Path, words: Sequence[str]) -> NoReturn:
    """Run this script with that interpreter in place of this one. Raises SystemExit where it has no vLLM."""
    if subprocess.run([python, "-c", "import vllm"], capture_output=True).returncode:
        raise SystemExit(f"{python} does not import vLLM: give --python an interpreter that does")
    os.execv(python, [str(python), sys.argv[0], *words])


def main() -> None:
    chosen = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    chosen.add_argument(
        "--python", type=interpreter, help="vLLM's interpreter (default: .venv-vllm's, built if need be)"
    )
    parser = argparse.ArgumentParser(
        parents=[chosen], description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--policy", default="edf")
    parser.add_argument("--running", default="8,64,256")
    parser.add_argument("--waiting", default="0,400")
    parser.add_argument("--asynchronous", action="store_true")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if args.python is not None or find_spec("vllm") is None:
        under(args.python or ensure_env(), chosen.parse_known_args()[1])
    from transformers import LlamaConfig

    with tempfile.TemporaryDirectory() as model:
        shape = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2}
        make: Any = LlamaConfig
        config = make(vocab_size=256, max_position_embeddings=4096, architectures=["LlamaForCausalLM"], **shape)
        config.save_pretrained(model)
        rows = []
        for running in map(int, args.running.split(",")):
            for waiting in map(int, args.waiting.split(",")):
                rows.append(measured(model, args.policy, running, waiting, asynchronous=args.asynchronous))
                print(json.dumps(rows[-1]), flush=True)
    print("\n" + told(rows, args.policy))
    if args.json:
        about = {"policy": args.policy, "asynchronous": args.asynchronous, "machine": platform.processor()}
        args.json.write_text(json.dumps({**about, "rows": rows}, indent=2) + "\n")


if __name__ == "__main__":
    main()
