"""What the link costs a step of vLLM's scheduler: with no gateway, with one that listens, is slow, stalled or dead, and
with an API server.

    .venv-vllm/bin/python benchmarks/vllm_link.py [--json FILE] [--steps 1500]

vLLM's real scheduler under `edf`, a formula for a model, so many requests that decode. Timed on the wall is what the
plug-in does for them in a step: reports with their encoding, and taking in commands. A step of the harness
takes no time of a model, so that the link's thread competes for Python's lock at every one.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import zmq

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
os.environ.update(VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_CPU_KVCACHE_SPACE="1", VLLM_PLUGINS="", HF_HUB_OFFLINE="1")
os.environ.update(VLLM_CONFIGURE_LOGGING="0", VLLM_NO_USAGE_STATS="1")

from rubato.engines.vllm.link import FOLDER, Reader
from rubato.wire.messages import PROTOCOL, Hello, encode
from tests.vllm.harness import Harness, harness

API_SERVER = "an API server"
LISTENERS = ("none", "listens", "slow", "stalled", "dead", API_SERVER)
RUNNING = (16, 64, 256)


class Gateway(threading.Thread):
    """Says hello, and then reads as its kind does."""

    def __init__(self, port: int, kind: str) -> None:
        super().__init__(daemon=True)
        self.kind, self.heard, self.ending = kind, 0, False
        self._socket: Any = zmq.Context.instance().socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.RCVHWM, 10_000 if kind == "listens" else 1)
        self._socket.connect(f"tcp://127.0.0.1:{port}")
        self._socket.send(encode(Hello(PROTOCOL, kind)))
        self._socket.recv()

    def run(self) -> None:
        if self.kind == "dead":
            self._socket.close(linger=0)
            return
        while not self.ending and self.kind != "stalled":
            if self._socket.poll(100):
                self._socket.recv()
                self.heard += 1
                time.sleep(0.1 if self.kind == "slow" else 0.0)
        while not self.ending:
            time.sleep(0.1)
        self._socket.close(linger=0)


class ApiServer(threading.Thread):
    """Reads as one does, at each of vLLM's records of stats."""

    def __init__(self, folder: str) -> None:
        super().__init__(daemon=True)
        self.heard, self.ending = 0, False
        self._reader = Reader(folder, [0], 0)

    def run(self) -> None:
        while not self.ending:
            self.heard += sum(1 for _ in self._reader.messages())
            time.sleep(0.02)
        self._reader.close()


def timed(made: Harness) -> list[float]:
    """Seconds that each step spends for its listeners, from now on."""
    driver, spent = made.scheduler.rubato, [0.0]

    def counted(name: str, of: Any) -> None:
        method = getattr(of, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            began = time.perf_counter()
            try:
                return method(*args, **kwargs)
            finally:
                spent[-1] += time.perf_counter() - began

        setattr(of, name, call)

    counted("apply", driver.commands)
    for of, names in (
        (driver.reporting.gateways, ("batch", "step", "add", "add_tokens")),
        (driver.reporting.api_servers, ("add_view", "send", "add", "add_tokens")),
    ):
        for name in names if of is not None else ():
            counted(name, of)
    return spent


def run(model: Path, running: int, kind: str, steps: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as base:
        folder = f"{base}/link"
        if kind == API_SERVER:
            os.environ[FOLDER] = folder
        rubato: dict[str, Any] = {} if kind == API_SERVER else {"link": {}}
        made = harness(model, "edf", blocks=running * 20, tokens=2048, seqs=running, watched=False, rubato=rubato)
        os.environ.pop(FOLDER, None)
        gateway: Gateway | ApiServer | None = None
        if kind == API_SERVER:
            gateway = ApiServer(folder)
        elif kind != "none":
            gateway = Gateway(made.scheduler.rubato.reporting.link.port, kind)
        if gateway is not None:
            gateway.start()
            time.sleep(0.3)
        return _figures(made, gateway, running, kind, steps)


def _figures(made: Harness, gateway: Gateway | ApiServer | None, running: int, kind: str, steps: int) -> dict[str, Any]:
    gc.collect()
    gc.freeze()  # as vLLM does once it has started: a full collection over all its modules takes 350 ms
    spent, number = timed(made), 0
    while len(spent) < steps:
        while len(made.scheduler.running) + len(made.scheduler.waiting) < running:
            made.add(f"r{number}", [3] * 20, 50 + number * 37 % 200)  # they do not end together
            number += 1
        made.step()
        spent.append(0.0)
    times = np.array(spent[50:-1]) * 1e6
    if gateway is not None:
        gateway.ending = True
    made.scheduler.rubato.reporting.close()
    p50, p99, most = np.percentile(times, [50, 99, 100])
    heard = gateway.heard if gateway is not None else 0
    figures = {"p50, us": p50, "p99, us": p99, "longest, us": most}
    figures = {name: round(float(value), 1) for name, value in figures.items()}
    return {"running": running, "listener": kind, **figures, "messages heard": heard}


def tiny_model(folder: Path) -> Path:
    """A Llama of which only the configuration matters here."""
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 256, "hidden_size": 64,
        "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1,
        "max_position_embeddings": 8192, "torch_dtype": "float32",
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--steps", type=int, default=1500)
    args = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        model = tiny_model(Path(folder))
        for running in RUNNING:
            for kind in LISTENERS:
                rows.append(run(model, running, kind, args.steps))
                print(rows[-1], flush=True)
    if args.json:
        args.json.write_text(json.dumps({"rows": rows, "steps": args.steps}, indent=1))


if __name__ == "__main__":
    main()
