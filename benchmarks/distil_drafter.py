"""Make a draft model of the bundled one: some of its layers, trained to say what the whole model says.

    python benchmarks/distil_drafter.py FOLDER [--layers 0,29] [--seconds 150] [--samples 40] [--device cuda]

The draft model is a copy of these layers; embedding, final norm and head are the target's and stay as they are. It
learns on what the target itself says, sampled at temperature 1 for `--samples` seconds: its answers to chats, code and
summaries of our own (`rubato.workloads.prompts`, as the live benchmarks send, with another seed), a part of them to no
prompt at all. Loss: cross-entropy against the target's whole distribution at each token of an answer (Hinton et al.
2015). Beside: agreement of the two models' likeliest tokens on answers that were held out.

FOLDER becomes a Hugging Face checkpoint for `drafter: {name: model, checkpoint: FOLDER}`; `layers.st` in it
holds the trained layers alone, and --assemble FILE makes a checkpoint of such a file without training.
"""

from __future__ import annotations

import argparse
import json
import shutil
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from speculation_speed import OWN
from transformers import AutoModelForCausalLM

from rubato.workloads.prompts import fresh_text
from rubato_torch import bundled_model
from rubato_torch.tokenizer import Text

NEW = 128  # tokens of an answer
SEED = 90_000
HELD_OUT = 0.03
RATE, WARM_UP = 1e-3, 0.05


def answers(target: Any, text: Text, seconds: float, batch: int, device: str) -> list[tuple[torch.Tensor, int]]:
    """Rows of tokens (rows, prompt + answer), left-padded with token 0, and where their answers begin."""
    rng, seen, began = np.random.default_rng(SEED), set[str](), time.monotonic()
    found: list[tuple[torch.Tensor, int]] = []
    names = [*OWN, ""]  # "": no prompt
    while time.monotonic() - began < seconds:
        name = names[len(found) % len(names)]
        prompts: list[tuple[int, ...]] = [(1,)] * batch
        if name:
            prompts = [
                text.chat([{"role": "user", "content": fresh_text(name, OWN[name], rng, seen)}]) for _ in range(batch)
            ]
        width = max(map(len, prompts))
        ids = torch.tensor([[0] * (width - len(p)) + list(p) for p in prompts], device=device)
        mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts], device=device)
        with torch.inference_mode():
            out = target.generate(
                ids, attention_mask=mask, do_sample=True, temperature=1.0, top_k=0, max_new_tokens=NEW,
                min_new_tokens=NEW, pad_token_id=0,
            )  # fmt: skip
        found.append((torch.cat((mask, torch.ones_like(out[:, width:])), 1).mul(out + 1).cpu(), width))
    return found


def rows_of(
    data: list[tuple[torch.Tensor, int]], at: int, few: slice, device: str
) -> tuple[torch.Tensor, torch.Tensor, int]:
    """(ids, mask, first column of the answer) of some rows; stored with 1 added, 0 = padding."""
    stored, width = data[at]
    rows = stored[few].to(device)
    return (rows - 1).clamp(min=0), (rows > 0).long(), width


def of_both(target: Any, draft: Any, ids: torch.Tensor, mask: torch.Tensor, width: int) -> tuple[Any, Any]:
    """Logits of the two models where an answer's tokens are predicted."""
    where = (mask.cumsum(-1) - 1).clamp(min=0)
    with torch.no_grad():
        want = target(ids, attention_mask=mask, position_ids=where).logits[:, width - 1 : -1].float()
    got = draft(ids, attention_mask=mask, position_ids=where).logits[:, width - 1 : -1].float()
    return want, got


def trained(
    target: Any, draft: Any, data: list[tuple[torch.Tensor, int]], args: argparse.Namespace
) -> dict[str, float]:
    held = max(1, int(HELD_OUT * len(data[0][0])))
    parts = [p for name, p in draft.named_parameters() if p.requires_grad]
    optimiser = torch.optim.AdamW(parts, lr=RATE, betas=(0.9, 0.95), weight_decay=0.01)
    rng, began, step, loss = np.random.default_rng(1), time.monotonic(), 0, 0.0

    def agreement() -> float:
        right = count = 0
        with torch.no_grad():
            for at in range(min(8, len(data))):
                want, got = of_both(target, draft, *rows_of(data, at, slice(0, held), args.device))
                right += int((want.argmax(-1) == got.argmax(-1)).sum())
                count += want.shape[0] * want.shape[1]
        return right / count

    before = agreement()
    while (gone := (time.monotonic() - began) / args.seconds) < 1.0:
        rate = RATE * min(1.0, gone / WARM_UP + 0.01) * (1.0 - gone)
        for group in optimiser.param_groups:
            group["lr"] = rate
        at = int(rng.integers(len(data)))
        first = int(rng.integers(held, max(held + 1, len(data[at][0]) - args.rows + 1)))
        with torch.autocast(args.device, torch.bfloat16):
            want, got = of_both(target, draft, *rows_of(data, at, slice(first, first + args.rows), args.device))
        each = -(want.softmax(-1) * got.log_softmax(-1)).sum(-1)
        optimiser.zero_grad()
        each.mean().backward()
        torch.nn.utils.clip_grad_norm_(parts, 1.0)
        optimiser.step()
        step += 1
        loss = 0.98 * loss + 0.02 * float(each.detach().mean())
        if step % 100 == 0:
            print(f"  step {step}, {100 * gone:.0f} %: loss {loss / (1 - 0.98**step):.3f}", flush=True)
    return {"agreement before": round(before, 4), "agreement after": round(agreement(), 4), "steps": step}


def of_layers(target: Any, layers: list[int]) -> Any:
    """A copy of some layers, trainable in float32, around the target's own embedding, norm and head."""
    import copy

    config = copy.deepcopy(target.config)
    config.num_hidden_layers = len(layers)
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[: len(layers)]
    draft = type(target)(config).float()
    for name in ("embed_tokens", "norm"):
        getattr(draft.model, name).load_state_dict(getattr(target.model, name).state_dict())
    for i, layer in enumerate(layers):
        draft.model.layers[i].load_state_dict(target.model.layers[layer].state_dict())
    draft.tie_weights()
    for name, part in draft.named_parameters():
        part.requires_grad = ".layers." in name
    return draft


def save(folder: Path, source: Path, layers: dict[str, torch.Tensor]) -> None:
    """A checkpoint of these layers with the target's embedding, norm and tokenizer."""
    folder.mkdir(parents=True, exist_ok=True)
    save_file(layers, folder / "layers.st")  # not *.safetensors: it would be read beside the whole
    shared = {k: v for k, v in load_file(source / "model.safetensors").items() if ".layers." not in k}
    save_file({**shared, **layers}, folder / "model.safetensors")
    count = 1 + max(int(name.split(".")[2]) for name in layers)
    config = json.loads((source / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "num_hidden_layers": count}))
    shutil.copy(source / "tokenizer.json", folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--layers", default="0,29")
    parser.add_argument("--seconds", type=float, default=150.0)
    parser.add_argument("--samples", type=float, default=40.0)
    parser.add_argument("--batch", type=int, default=512, help="answers sampled at once")
    parser.add_argument("--rows", type=int, default=48, help="answers of a training step")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--assemble", type=Path)
    args = parser.parse_args()
    source = bundled_model.ensure()
    if args.assemble:
        save(args.folder, source, load_file(args.assemble))
        return
    torch.manual_seed(0)
    dtype = torch.bfloat16 if args.device == "cuda" else torch.float32
    target = AutoModelForCausalLM.from_pretrained(source, dtype=dtype).to(args.device).eval()
    data = answers(target, Text(source), args.samples, args.batch, args.device)
    print(f"{sum(NEW * len(rows) for rows, _ in data)} tokens of answers, {len(data)} batches", flush=True)
    draft = of_layers(target, [int(layer) for layer in args.layers.split(",")]).to(args.device)
    print(trained(target, draft, data, args), flush=True)
    state = {n: p.detach().bfloat16().cpu().contiguous() for n, p in draft.named_parameters() if ".layers." in n}
    save(args.folder, source, state)


if __name__ == "__main__":
    main()
