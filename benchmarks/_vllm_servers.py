"""The servers of `vllm_plugin.py`: stock vLLM, stock with its own ways to keep promises, and the plug-in."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shlex
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from _vllm_plugin_summary import STOCK
from vllm_env import ROOT

from rubato.fleet.cluster_options import PolicyChoice
from rubato.measure.http_client import TierField

HERE = Path(__file__).resolve().parent
MODEL = "served"  # the name of the model in requests
CONTEXT = 2048  # tokens that the model may hold
READY_S = 600.0  # that a server may take to load
GPU_SHARE = 0.9  # of its memory, for all servers together


@dataclass(frozen=True)
class Contender:
    """flags: of its server, beside those of all. slos: how requests state theirs. plugin: stock vLLM otherwise. tuned:
    what it is one of several values of; after the first seed the best one goes on."""

    label: str
    flags: tuple[str, ...] = ()
    slos: TierField = "none"
    plugin: bool = False
    tuned: str = ""

    def scheduler(self, timed: bool) -> tuple[str, ...]:
        if not timed and not self.plugin:
            return ()
        name = ("_vllm_timed.Timed" + "Rubato" * self.plugin) if timed else "rubato.vllm.Scheduler"
        return ("--scheduler-cls", name)

    @property
    def slug(self) -> str:
        return self.label.replace(", ", "-").replace(" ", "-").replace(":", "-")


@dataclass
class Server:
    """A contender's server, running. steps: lines of `_vllm_timed`, if it is timed. version: of vLLM."""

    contender: Contender
    url: str
    steps: Path
    process: subprocess.Popen[bytes]
    version: str
    order: tuple[str, ...] = ()  # tiers, the most urgent first


def contenders(args: argparse.Namespace) -> list[Contender]:
    made = [Contender(STOCK)]
    for tuned, flag, values, words in (
        ("budget", "--max-num-batched-tokens", args.budgets, "{} tokens"),
        ("queue", "--max-num-queued-reqs", args.queued_requests, "at most {} requests"),
        ("queue", "--max-num-queued-tokens", args.queued_tokens, "at most {} tokens queued"),
    ):
        for value in filter(None, values.split(",")):
            made.append(Contender(f"{STOCK}, {words.format(value)}", (f"{flag}={value}",), tuned=tuned))
    if args.priority:
        made.append(Contender(f"{STOCK}, priority", ("--scheduling-policy=priority",), "priority"))
    for choice in map(PolicyChoice.parse, filter(None, args.policy or ("edf", "slos_serve"))):
        said = {"rubato": {"policy": choice.policy, "settings": dict(choice.settings)}}
        made.append(Contender(choice.label, ("--additional-config", json.dumps(said)), "vllm-xargs", plugin=True))
    return made


def flags_of_all(args: argparse.Namespace, servers: int) -> list[str]:
    """Flags of every server, `servers` of which are side by side."""
    flags = [f"--max-model-len={CONTEXT}", f"--served-model-name={MODEL}", "--host=127.0.0.1"]
    if args.gpu:
        flags.append(f"--gpu-memory-utilization={GPU_SHARE / servers:.3f}")
    else:
        flags += ["--enforce-eager", "--max-num-seqs=64", f"--dtype={args.dtype}"]
    return [*flags, *shlex.split(args.flags)]


def variables(contender: Contender, steps: Path, gpu: bool) -> dict[str, str]:
    """Of a server's environment, beside what is there."""
    paths = [str(HERE), str(ROOT / "src"), *filter(None, [os.environ.get("PYTHONPATH")])]  # the code of this tree
    made = {
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_SERVER_DEV_MODE": "1",  # for /reset_prefix_cache
        "HF_HUB_OFFLINE": "1",
        "PYTHONPATH": os.pathsep.join(paths),
        "STEPS_FILE": str(steps),
    }
    if not gpu:
        made["VLLM_CPU_OMP_THREADS_BIND"] = ",".join(map(str, sorted(os.sched_getaffinity(0))))
        made["VLLM_CPU_KVCACHE_SPACE"] = "1"
    if not contender.plugin:
        made["VLLM_PLUGINS"] = ""  # Rubato's, installed beside it, would make vLLM keep more statistics
    return made


@contextlib.contextmanager
def serving(contender: Contender, python: Path, model: str, args: argparse.Namespace, servers: int) -> Iterator[Server]:
    """Its server from start to end, beside those of other contenders. Raises SystemExit with the end of its log."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    steps, logfile = args.out / f"{contender.slug}.steps", args.out / f"{contender.slug}.log"
    command = [str(python), "-m", "vllm.entrypoints.openai.api_server", "--model", model, "--port", str(port)]
    command += [*flags_of_all(args, servers), *contender.scheduler(args.step_times), *contender.flags]
    with logfile.open("w") as out:
        process = subprocess.Popen(
            command,
            stdout=out,
            stderr=subprocess.STDOUT,
            env={**os.environ, **variables(contender, steps, args.gpu)},
            start_new_session=True,
        )
    try:
        url = f"http://127.0.0.1:{port}"
        _wait(url, process, logfile)
        with urllib.request.urlopen(f"{url}/version") as page:
            version = json.load(page)["version"]
        yield Server(contender, url, steps, process, version)
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(30)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # the group that it was started as
        process.wait()


def _wait(url: str, process: subprocess.Popen[bytes], logfile: Path) -> None:
    begin = time.monotonic()
    while True:
        with contextlib.suppress(urllib.error.URLError, ConnectionError), urllib.request.urlopen(f"{url}/health"):
            return
        if process.poll() is not None or time.monotonic() - begin > READY_S:
            raise SystemExit(f"vLLM did not start:\n{logfile.read_text(errors='replace')[-3000:]}")
        time.sleep(0.5)


def forget(server: Server) -> None:
    """Empty its prefix cache: it has seen these prompts at another rate."""
    asked = urllib.request.Request(f"{server.url}/reset_prefix_cache", method="POST")
    with urllib.request.urlopen(asked) as answer:
        answer.read()


def plans(server: Server) -> dict[str, float]:
    """The plug-in's counts of steps not planned, or not carried out as planned."""
    counts: dict[str, float] = {}
    with urllib.request.urlopen(f"{server.url}/metrics") as page:
        for line in page.read().decode().splitlines():
            name = line.partition("{")[0]
            if name.startswith("rubato_plan_") and name.endswith("_total"):
                counts[name] = counts.get(name, 0.0) + float(line.rpartition(" ")[2])
    return counts


def machine_cpu() -> float:
    """CPU seconds that all processes of this machine have used (user, nice, system, irq, softirq, stolen)."""
    fields = Path("/proc/stat").read_text().split("\n", 1)[0].split()
    return sum(int(fields[i]) for i in (1, 2, 3, 6, 7, 8)) / os.sysconf("SC_CLK_TCK")


def group_cpu(group: int) -> float:
    """CPU seconds that the processes of this group have used."""
    used = 0
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            fields = stat.read_text().rsplit(")", 1)[1].split()
            if int(fields[2]) == group:
                used += int(fields[11]) + int(fields[12])
    return used / os.sysconf("SC_CLK_TCK")
