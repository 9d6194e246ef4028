"""`rubato gateway --demo`: four simulated servers, the gateway over them and a load, each in a process of its own.

The servers' HTTP and the link to their engine cores are real; the steps take what a GPU's take, by a hardware profile.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rubato.config.build import choice_of
from rubato.config.parts import ServerSettings
from rubato.config.schema import Config
from rubato.core.clock import WallClock
from rubato.demo import simulated_server
from rubato.demo.demo_load import KINDS, MAX_LOAD, MIN_LOAD, PERIOD_S, SERVERS, fleet_capacity
from rubato.demo.simulated_core import PROFILE
from rubato.fleet.cluster_options import PolicyChoice

STOCK_ORDER = {"policy": "vllm", "router": "least_loaded"}  # servers without the plug-in, and the router over them
WITH_SLOS = """Around the middle of each cycle the load is above capacity. Batch requests wait then, so that
  the others are on time, and catch up when the load falls."""
WITHOUT_SLOS = """Around the middle of each cycle the load is above capacity. All requests wait then in the order in
  which they came, and most are late."""


@dataclass(frozen=True)
class DemoServer:
    """A simulated server that listens on a port.

    Args:
        pid: id of its process.
    """

    url: str
    pid: int


def settings(*, has_link: bool) -> dict[str, Any]:
    """Default settings of the gateway: the demo's tiers, no log line a request, no wait at the end."""
    return {
        "tiers": {kind.tier: {f"{name}_ms": 1000.0 * s for name, s in kind.slo.bounds.items()} for kind in KINDS},
        "log.level": "warning" if has_link else "error", "drain_seconds": 0.0,
    }  # fmt: skip


def run(config: Config, *, has_link: bool, seed: int = 0) -> int:
    """Run until Ctrl-C and return the exit status.

    Args:
        config: of the gateway, without servers.
        has_link: whether the servers have the plug-in.

    Raises:
        ValueError: for a policy that the servers cannot run.
        RuntimeError: where a server does not start; its message is on stderr.
    """
    choice = choice_of(config)
    simulated_server.core_of(simulated_server.parser().parse_args(_policy_options(choice)), WallClock())
    with contextlib.ExitStack() as stack:
        starting = [stack.enter_context(_child(_server_command(choice, has_link, number))) for number in range(SERVERS)]
        from rubato.serving.serve import serve  # while they start

        servers = [_await_server(process) for process in starting]

        def on_serving(url: str) -> None:
            print(start_message(url, servers, choice, has_link), flush=True)
            asked = ["--url", url, "--seed", str(seed), "--end-with-stdin"]
            stack.enter_context(_child(["rubato.demo.demo_load", *asked]))

        urls = tuple(ServerSettings(url=server.url) for server in servers)
        return serve(config.model_copy(update={"servers": urls}), on_serving)


def start_message(url: str, servers: Sequence[DemoServer], choice: PolicyChoice, has_link: bool) -> str:
    """The text printed at the start: what runs, and what to try."""
    how = f"policy {choice.label}" if has_link else "without the plug-in, in stock vLLM's order"
    rows = [f"{server.url}, process {server.pid}" for server in servers]
    tiers = [f"{kind.tier:8} {_promise(kind.slo.bounds)}" for kind in KINDS]
    margin = "\n" + 13 * " "
    sustained = f"{fleet_capacity():.1f} requests/s"
    other = "rubato gateway --demo --without-slos" if has_link else "rubato gateway --demo"
    return f"""
  board      {url}
  servers    {len(servers)} simulated, {PROFILE}, {how}{margin}{margin.join(rows)}
  tiers      {margin.join(tiers)}
  load       from {MIN_LOAD:g} to {MAX_LOAD:g} times capacity ({sustained}) and back, every {PERIOD_S:g} s

  {WITH_SLOS if has_link else WITHOUT_SLOS}

  Try: kill -9 {servers[-1].pid}   (a server is lost; its requests go on at the others)
       {other}   (the same requests {"in stock vLLM's order" if has_link else "by their SLOs"})

  Ctrl-C ends everything.
"""


def _promise(promised: Mapping[str, float]) -> str:
    return ", ".join(f"{name.upper()} {1000 * s:g} ms" for name, s in promised.items()) or "best effort"


# --------------------------------------------------------------------------- processes


def _policy_options(choice: PolicyChoice) -> list[str]:
    return ["--policy", PolicyChoice(choice.policy, choice.settings).label]


def _server_command(choice: PolicyChoice, has_link: bool, number: int) -> list[str]:
    link = [] if has_link else ["--link", "-1"]
    options = [*_policy_options(choice), "--seed", str(number), "--end-with-stdin", *link]
    return ["rubato.demo.simulated_server", *options]


@contextlib.contextmanager
def _child(command: Sequence[str]) -> Iterator[subprocess.Popen[bytes]]:
    """Run a module with its arguments as a process, and kill it on leaving: it has no state worth an orderly end.

    The process also ends with this one; a terminal's Ctrl-C does not reach it.
    """
    process = subprocess.Popen(
        [sys.executable, "-m", *command], stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        yield process
    finally:
        process.kill()
        process.wait()
        process.stdin.close()
        process.stdout.close()


def _await_server(process: subprocess.Popen[bytes]) -> DemoServer:
    assert process.stdout is not None
    if not (line := process.stdout.readline()):
        raise RuntimeError("a simulated server did not start: its message stands above")
    return DemoServer(json.loads(line)["url"], process.pid)
