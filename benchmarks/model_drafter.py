"""A model as drafter on the embedded engine: whether outputs stay as they are, what its steps take, and how it serves.

    python benchmarks/model_drafter.py [--parts lossless,steps,speed,serve] [--device cuda] [--drafter NAME=SETTING ...]
        [--random TARGET,DRAFT] [--json FILE]

Drafters, by default: `suffix`; `layers`, the target's layers 0 and 29 as they are; `self`, the target's checkpoint once
more, which shows the mechanics at their best and the cost at its worst. --drafter distilled=FOLDER adds a checkpoint,
--drafter skip=0:11:29 layers of the target.

- lossless: mixed requests, random plans of chains and trees, sequences that lose their KV: float32 outputs against
  those of each request alone without drafts, on this device and in the file `--truth`, made on another by --make-truth.
- steps: seconds of a step with 1, 8 and 32 sequences of some 300 tokens, in the engine's own dtype: plain, with drafts
  that are not verified, and verified whole; of these the drafter's, and accepted tokens a verification.
- speed: tokens/s of so many clients one after the other, against those without drafts in the same round (as in
  `speculation_speed.py`, the latency model learning what drafting takes), and accepted tokens a verification by class.
- serve: requests of our own as `adaserve_live.py` offers them, at 0.6 and 1.0 of what 8 clients are served without
  drafts: attained, tokens/s while all ran, and accepted tokens a verification, by system.

--random 3b,1b: for `steps`, a random target of the shape of Llama-3.2-3B and a random draft model of that of 1B, in
place of the bundled model and its drafters: their products take what real ones do, and nothing is ever accepted.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from adaserve_live import TPOT, offers, requests, unloaded
from speculation_speed import PLAIN, Served, drawn, prompts, served, show, size

from rubato.core.clock import WallClock
from rubato.core.events import Event, Finished, Tokens
from rubato.core.plan import Batch, Entry, StepResult
from rubato.core.replica_options import ReplicaOptions
from rubato.core.request import SLO, Request, Sampling, Stage
from rubato.fleet.build import local_cluster
from rubato.fleet.cluster import Cluster
from rubato.fleet.cluster_options import ClusterOptions, PolicyChoice
from rubato.latency import affine
from rubato.latency.with_drafter import WithLearntDrafter
from rubato_torch import Engine, bundled_model
from rubato_torch.drafters import Drafter
from rubato_torch.drafters.suffix import SuffixDrafter
from rubato_torch.model_drafter import ModelDrafter
from rubato_torch.tokenizer import Text

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from tests.engines.byte_tokenizer import write_tokenizer
from tests.engines.driver import Driver, started_behind_replica
from tests.engines.torch.harness import Harness, mixed_requests

Make = Callable[[], Drafter | None]
SIZES = {
    "3b": {"hidden_size": 3072, "intermediate_size": 8192, "num_hidden_layers": 28, "num_attention_heads": 24},
    "1b": {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32},
    "tiny": {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4},
}
VOCAB = 128256
TREES = ((4, 1), (4, 3))
PROMPT, STEPS, WARM = 256, 20, 4
LOADS, SECONDS, AT_ONCE = (0.6, 1.0), 12.0, 8


def random_folder(size: str, to: Path, device: str) -> Path:
    """A Llama of this shape with random weights in bfloat16, and a tokenizer of bytes."""
    from safetensors.torch import save_file

    to.mkdir(parents=True)
    shape = SIZES[size]
    hidden, heads = shape["hidden_size"], shape["num_attention_heads"]
    dim, kv = hidden // heads, max(1, heads // 3 if size == "3b" else heads // 4)
    config = {
        "architectures": ["LlamaForCausalLM"], **shape, "num_key_value_heads": kv, "head_dim": dim,
        "vocab_size": VOCAB, "max_position_embeddings": 2048, "tie_word_embeddings": True,
        "rms_norm_eps": 1e-5, "rope_theta": 5e5,
    }  # fmt: skip
    (to / "config.json").write_text(json.dumps(config))
    write_tokenizer(to)

    def drawn(*size: int) -> torch.Tensor:
        return (torch.randn(size, device=device, dtype=torch.bfloat16) * 0.02).cpu()

    tensors = {"model.embed_tokens.weight": drawn(VOCAB, hidden), "model.norm.weight": torch.ones(hidden).bfloat16()}
    for i in range(shape["num_hidden_layers"]):
        at, inner = f"model.layers.{i}", shape["intermediate_size"]
        for name, rows, columns in (
            ("self_attn.q_proj", hidden, hidden), ("self_attn.k_proj", kv * dim, hidden),
            ("self_attn.v_proj", kv * dim, hidden), ("self_attn.o_proj", hidden, hidden),
            ("mlp.gate_proj", inner, hidden), ("mlp.up_proj", inner, hidden), ("mlp.down_proj", hidden, inner),
        ):  # fmt: skip
            tensors[f"{at}.{name}.weight"] = drawn(rows, columns)
        for norm in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{at}.{norm}.weight"] = torch.ones(hidden).bfloat16()
    save_file(tensors, to / "model.safetensors")
    return to


# ------------------------------------------------------------------------ lossless


def alone(folder: Path, device: str) -> tuple[Sequence[Request], dict[str, list[int]]]:
    """Some requests, and each one's greedy output in float32, by itself."""
    with Driver(Engine(folder, dtype="float32", device=device, kv_gib=0.2)) as drive:
        asked = mixed_requests(drive.engine.text, 12, Sampling(max_tokens=32, ignore_eos=True))  # type: ignore[attr-defined]
        for request in asked:
            drive.add_request(request)
            drive.run()
        return asked, drive.ids


def lossless(folder: Path, device: str, drafters: dict[str, Make], truth: Path | None) -> dict[str, Any]:
    asked, expected = alone(folder, device)
    found: dict[str, Any] = {}
    if truth is not None and truth.is_file():
        other = json.loads(truth.read_text())
        found["alone, as on the other device"] = (
            f"{sum(other[id] == ids for id, ids in expected.items())} of {len(asked)}"
        )
    for dtype in ("float32", "bfloat16"):
        for name, make in drafters.items():
            engine = Engine(folder, dtype=dtype, device=device, kv_gib=0.2, max_num_seqs=16, drafter=make())
            replica, loop = started_behind_replica(engine, True)
            run = Harness(engine, replica, loop, random.Random(4))
            run.run(asked, 0.03)
            loop.run_until_complete(engine.close())
            loop.close()
            same = sum(run.served[id].ids == ids for id, ids in expected.items())
            found[f"{dtype}, {name}"] = {
                "same": same, "requests": len(asked), "accepted": run.accepted, "trees": run.branched,
                "preempted": run.preempted, "steps": run.steps,
            }  # fmt: skip
            print(f"  {dtype:9} {name:10}", found[f"{dtype}, {name}"], flush=True)
    return found


# ------------------------------------------------------------------------ steps


class Stepper:
    """An engine with so many sequences, driven step by step: all verify what was drafted, or nothing."""

    def __init__(self, engine: Engine, count: int) -> None:
        self.engine, self.loop = engine, asyncio.new_event_loop()
        self.loop.run_until_complete(engine.start())
        rng, self.cached, self.trees = random.Random(1), dict[str, int](), dict[str, Any]()
        each = engine.limits.kv_blocks // count
        self.blocks = {f"s{i}": tuple(range(i * each, (i + 1) * each)) for i in range(count)}
        for id in self.blocks:
            ids = tuple(rng.randrange(200) for _ in range(PROMPT))
            most = Sampling(max_tokens=1000, ignore_eos=True, temperature=0.0)
            engine.add(Request(id, (Stage(PROMPT, token_ids=ids),), 0.0, sampling=most))
            self._run([Entry(id, 0, PROMPT, self.blocks[id], True)])

    def _run(self, entries: Sequence[Entry]) -> StepResult:
        result = self.loop.run_until_complete(self.engine.execute(Batch(tuple(entries))))
        for e in entries:
            out = result.emitted[e.seq]
            self.cached[e.seq] = e.start + e.count - len(e.verify) + len(out.accepted)
            self.trees[e.seq] = out.draft
        return result

    def step(self, draft: tuple[int, int] | None, verify: bool) -> StepResult:
        entries = []
        for id, blocks in self.blocks.items():
            tree = self.trees[id]
            nodes = tuple(range(len(tree.parents))) if verify and tree is not None else ()
            entries.append(Entry(id, self.cached[id], 1 + len(nodes), blocks, True, nodes, draft))
        return self._run(entries)

    def close(self) -> None:
        self.loop.run_until_complete(self.engine.close())
        self.loop.close()


def timed(stepper: Stepper, draft: tuple[int, int] | None, verify: bool) -> dict[str, float]:
    for _ in range(WARM):
        stepper.step(draft, verify)
    results = [stepper.step(draft, verify) for _ in range(STEPS)]
    found = {"step, ms": 1e3 * statistics.median(r.seconds for r in results)}
    if draft is not None:
        found["of it drafting, ms"] = 1e3 * statistics.median(r.drafting for r in results)
        found["drafting, share"] = sum(r.drafting for r in results) / sum(r.seconds for r in results)
    if verify:
        count = sum(len(r.emitted) for r in results)
        found["accepted"] = sum(len(out.accepted) for r in results for out in r.emitted.values()) / count
    return {name: round(value, 3) for name, value in found.items()}


def steps(folder: Path, device: str, drafters: dict[str, Make], counts: Sequence[int], kv_gib: float) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, make in drafters.items():
        for count in counts:
            stepper = Stepper(Engine(folder, device=device, kv_gib=kv_gib, drafter=make()), count)
            runs: list[tuple[str, tuple[int, int] | None, bool]] = [("plain", None, False)] if name == "none" else []
            for depth, width in TREES if name != "none" else ():
                runs.append((f"drafts {depth}x{width}", (depth, width), False))
                runs.append((f"drafts and verifies {depth}x{width}", (depth, width), True))
            for what, draft, verify in runs:
                found[f"{name}, {count} sequences, {what}"] = got = timed(stepper, draft, verify)
                print(f"  {name:10} {count:3} {what:25}", got, flush=True)
            stepper.close()
    return found


# ------------------------------------------------------------------------ serve


async def started(policy: str, drafter: Drafter | None, device: str) -> Cluster:
    choice = PolicyChoice.parse(policy)
    engine = Engine(
        bundled_model.ensure(), device=device, kv_gib=0.7, max_num_seqs=AT_ONCE, max_model_len=2048, drafter=drafter
    )
    latency = affine.Model() if drafter is None else WithLearntDrafter(affine.Model())
    cluster = local_cluster([engine], [latency], WallClock(), ClusterOptions(choice, ReplicaOptions(slo_rule="mean")))
    await cluster.start()
    return cluster


async def replayed(cluster: Cluster, offered: Sequence[tuple[float, Request]], run: str) -> dict[str, Any]:
    """The requests, each sent when it is due: which met their SLO, and what came out."""
    clock, found, done, met = WallClock(), Served(), asyncio.Event(), list[bool]()

    def heard(event: Event) -> None:
        if isinstance(event, Tokens):
            found.note(event)
        elif isinstance(event, Finished):
            met.append(event.verdict.met)
            if len(met) == len(offered):
                done.set()

    began = clock.now()
    for after, request in offered:
        await asyncio.sleep(max(0.0, began + after - clock.now()))
        cluster.offer(replace(request, id=f"{run}-{request.id}", arrival=clock.now()), heard)
    await asyncio.wait_for(done.wait(), 60.0)
    verified = sum(found.verified.values())
    return {
        "attained, percent": round(100 * sum(met) / len(met), 1),
        "requests": len(met),
        "tokens/s": round(sum(found.tokens.values()) / (clock.now() - began), 1),
        "accepted": round(sum(found.accepted.values()) / verified, 3) if verified else 0.0,
        "verifications": verified,
    }


async def speed(
    device: str, drafters: dict[str, Make], counts: Sequence[int], rounds: int, policies: Sequence[str]
) -> list[dict[str, Any]]:
    clusters = {PLAIN: await started(PLAIN, None, device)}
    for name, make in drafters.items():
        for policy in policies if name != "none" else ():
            clusters[f"{policy}, {name}"] = await started(policy, make(), device)
    text, systems, rows = Text(bundled_model.ensure()), list(clusters), list[dict[str, Any]]()
    sources = prompts(None, 5)
    for cluster in clusters.values():
        await served(cluster, drawn(sources, text, 6, "warm")[0], 2)  # latency models begin with a guess
    for clients in counts:
        for turn in range(rounds):
            asked, classes = drawn(sources, text, size(clients), f"{clients}-{turn}")
            for name in [systems[(turn + i) % len(systems)] for i in range(len(systems))]:
                found = await served(clusters[name], asked, clients)
                rows.append({"clients": clients, "round": turn, "system": name, **found.figures(classes)})
        show(rows, clients, systems)
    for cluster in clusters.values():
        await cluster.close()
    return rows


async def serve(device: str, drafters: dict[str, Make], seeds: int, seconds: float) -> dict[str, Any]:
    import adaserve_live

    adaserve_live.SECONDS = seconds
    systems: dict[str, tuple[str, Make]] = {"edf": ("edf", lambda: None)}
    for name, make in drafters.items():
        if name != "none":
            systems |= {f"{policy}, {name}": (policy, make) for policy in ("adaserve", "vllm_spec:n=4")}
    plain = await started("vllm:budget=1024", None, device)
    text = Text(bundled_model.ensure())
    await unloaded(plain, text, 4, 1)
    capacity, _ = await unloaded(plain, text, 8, 2)
    _, tpot = await unloaded(plain, text, 1, 3)
    await plain.close()
    slos = {name: SLO(ttft=2.0, tpot=times * tpot) for name, times in TPOT.items()}
    print(f"  unloaded {1e3 * tpot:.2f} ms a token; 8 clients are served {capacity:.2f} requests/s", flush=True)
    found: dict[str, Any] = {"unloaded TPOT, ms": round(1e3 * tpot, 2), "capacity, requests/s": round(capacity, 2)}
    for name, (policy, make) in systems.items():
        cluster = await started(policy, make(), device)
        await unloaded(cluster, text, 4, 1)  # latency models begin with a guess
        for load in LOADS:
            for seed in range(seeds):
                offered = requests(offers(None, load * capacity, seed), text, slos)
                got = await replayed(cluster, offered, f"{load}-{seed}")
                found[f"{name}, load {load}, seed {seed}"] = got
                print(f"  {name:28} {load} {seed}", got, flush=True)
        await cluster.close()
    return found


# ------------------------------------------------------------------------ all


def made(named: str, folder: Path) -> tuple[str, Make]:
    name, _, setting = named.partition("=")
    if name == "none":
        return name, lambda: None
    if name == "suffix":
        return name, SuffixDrafter
    if name == "self":
        return name, lambda: ModelDrafter(checkpoint=folder)
    if setting and set(setting) <= set("0123456789:"):
        return name, lambda: ModelDrafter(layers=[int(layer) for layer in setting.split(":")])
    return name, lambda: ModelDrafter(checkpoint=Path(setting))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", default="lossless,steps,serve")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--drafter", action="append", default=[])
    parser.add_argument("--only", action="store_true", help="no drafters but those given, and none")
    parser.add_argument("--counts", default="1,8,32", help="sequences of `steps`, clients of `speed`")
    parser.add_argument("--policies", default="adaserve;vllm_spec:n=4", help="of `speed`")
    parser.add_argument("--random", help="two names of SIZES: of the target and of the draft model")
    parser.add_argument("--seeds", type=int, default=1, help="of `serve`, rounds of `speed`")
    parser.add_argument("--seconds", type=float, default=SECONDS)
    parser.add_argument("--truth", type=Path)
    parser.add_argument("--make-truth", type=Path)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if args.device == "auto":
        args.device = "cuda" if torch.cuda.is_available() else "cpu"
    counts = [int(count) for count in args.counts.split(",")]
    found: dict[str, Any] = {"device": torch.cuda.get_device_name() if args.device == "cuda" else "cpu"}
    began = time.monotonic()
    if args.random:
        target, draft = args.random.split(",")
        to = Path(tempfile.mkdtemp(dir="/dev/shm" if Path("/dev/shm").is_dir() else None))
        try:
            folder = random_folder(target, to / "target", args.device)
            other = random_folder(draft, to / "draft", args.device)
            print(f"made {target} and {draft}: {time.monotonic() - began:.0f} s", flush=True)
            makes: dict[str, Make] = {"none": lambda: None, f"random {draft}": lambda: ModelDrafter(checkpoint=other)}
            found[f"steps, random {target}"] = steps(folder, args.device, makes, counts, 8.0 if target == "3b" else 0.2)
        finally:
            shutil.rmtree(to)
    else:
        folder = bundled_model.ensure()
        default = [] if args.only else ["suffix", "layers=0:29", "self"]
        makes = dict(made(named, folder) for named in ("none", *default, *args.drafter))
        if args.make_truth:
            args.make_truth.write_text(json.dumps(alone(folder, args.device)[1]))
            return
        for part in args.parts.split(","):
            print(f"{part} ({time.monotonic() - began:.0f} s)", flush=True)
            if part == "lossless":
                found[part] = lossless(folder, args.device, makes, args.truth)
            elif part == "steps":
                found[part] = steps(folder, args.device, makes, counts, 0.7)
            elif part == "speed":
                found[part] = asyncio.run(speed(args.device, makes, counts, args.seeds, args.policies.split(";")))
            else:
                found[part] = asyncio.run(serve(args.device, makes, args.seeds, args.seconds))
    print(f"done ({time.monotonic() - began:.0f} s)", flush=True)
    if args.json:
        args.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
