"""`engine: {kind: vllm, ...}`: the command of a vLLM server with the plug-in, from a configuration."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any
from uuid import uuid4

from rubato.config.build import choice_of
from rubato.config.for_vllm import latency_in_vllm, lengths_in_vllm
from rubato.config.schema import Config, ConfigError
from rubato.core.did_you_mean import nearest
from rubato.engines.vllm.settings import settings_of
from rubato.fleet.server_actor import ServerCommand
from rubato.policies import load, router_for

KV_FLAG = "--kv-transfer-config"
KV_CONNECTOR = {"kv_connector": "NixlConnector", "kv_role": "kv_both"}
NIXL_VARIABLES = {"VLLM_NIXL_SIDE_CHANNEL_HOST": "{host}", "VLLM_NIXL_SIDE_CHANNEL_PORT": "{free_port}"}
API_KEY_VARIABLE = "VLLM_API_KEY"  # vLLM reads its API key from this environment variable
RESERVED_FLAGS = {  # vLLM's flags that follow from the configuration: what to do instead
    "--model": "set model",
    "--served-model-name": "set served_model_name",
    "--host": "Rubato chooses it",
    "--port": "Rubato chooses it",
    "--tensor-parallel-size": "set engine.tensor_parallel_size",
    "-tp": "set engine.tensor_parallel_size",
    "--scheduler-cls": "set policy",
    "--middleware": "Rubato adds its own",
    "--additional-config": "set engine.plugin",
    "--api-key": f"set {API_KEY_VARIABLE} in engine.env",
    "--data-parallel-size": "set replicas",
    "-dp": "set replicas",
}


@dataclass(frozen=True)
class VllmServers:
    """args: vLLM's own flags. tensor_parallel_size: GPUs of one server. python: the interpreter of vLLM's environment,
    on each node; with Rubato installed. env: environment variables. plugin: settings of the plug-in, but for the
    policy's. start_seconds: in which a server must serve. Raises ConfigError for what cannot be."""

    args: Sequence[str] = ()
    tensor_parallel_size: int = 1
    python: str = sys.executable
    env: Mapping[str, str] = field(default_factory=dict)
    plugin: Mapping[str, Any] = field(default_factory=dict)
    start_seconds: float = 900.0

    @classmethod
    def of(cls, settings: Mapping[str, Any]) -> VllmServers:
        known = [each.name for each in fields(cls)]
        for name in settings:
            if name not in known:
                raise ConfigError(f"engine 'vllm' has no setting {name!r}{nearest(name, known)}")
        return cls(**settings)

    def __post_init__(self) -> None:
        args = self.args
        if isinstance(args, str) or not isinstance(args, Sequence) or not all(isinstance(a, str) for a in args):
            raise ConfigError("engine.args: give a list of vLLM's flags, such as ['--max-model-len=4096']")
        for word in args:
            flag = word.partition("=")[0]
            if flag in RESERVED_FLAGS:
                raise ConfigError(f"engine.args: leave {flag} out: {RESERVED_FLAGS[flag]}")
        if type(self.tensor_parallel_size) is not int or self.tensor_parallel_size < 1:
            raise ConfigError(
                f"engine.tensor_parallel_size is {self.tensor_parallel_size!r}: give a number of GPUs, 1 or more"
            )
        if not isinstance(self.python, str) or not self.python:
            raise ConfigError(f"engine.python is {self.python!r}: give the path of an interpreter")
        if not isinstance(self.env, Mapping) or not all(isinstance(v, str) for v in self.env.values()):
            raise ConfigError("engine.env: give environment variables, each a string")
        if not isinstance(self.plugin, Mapping):
            raise ConfigError(f"engine.plugin is {self.plugin!r}: give settings of the plug-in, such as stand_aside")
        seconds = self.start_seconds
        if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not seconds > 0:
            raise ConfigError(f"engine.start_seconds is {seconds!r}: give a number of seconds above 0")


def vllm_command(config: Config) -> tuple[ServerCommand, str]:
    """The command that starts one vLLM server, and its API key: `engine.env`'s or a new one. Raises ConfigError."""
    servers = VllmServers.of(config.engine.settings)
    if config.model is None or config.model == "bundled":
        raise ConfigError(
            "model: engine 'vllm' needs a Hugging Face name or a folder (`bundled` is of engine torch): give it after "
            "`rubato serve`"
        )
    words = [
        servers.python, "-m", "vllm.entrypoints.openai.api_server",
        f"--model={config.model}", "--host={host}", "--port={port}",
        "--scheduler-cls=rubato.vllm.Scheduler", "--middleware=rubato.vllm.Middleware",
        "--disable-uvicorn-access-log",  # a line a request, through Ray to the driver, which has one of its own
        f"--additional-config={json.dumps({'rubato': plugin_settings(config, servers.plugin)})}",
    ]  # fmt: skip
    if servers.tensor_parallel_size > 1:
        words.append(f"--tensor-parallel-size={servers.tensor_parallel_size}")
    if config.served_model_name is not None:
        words.append(f"--served-model-name={config.served_model_name}")
    if not config.prefix_cache:
        words.append("--no-enable-prefix-caching")
    nixl: dict[str, str] = {}
    if moves_kv(config):
        nixl = NIXL_VARIABLES
        if not any(word.partition("=")[0] == KV_FLAG for word in servers.args):
            words.append(f"{KV_FLAG}={json.dumps(KV_CONNECTOR)}")
    key = servers.env.get(API_KEY_VARIABLE) or uuid4().hex
    command = ServerCommand(
        [*words, *servers.args], {**nixl, **servers.env, API_KEY_VARIABLE: key}, float(servers.start_seconds)
    )
    return command, key


def moves_kv(config: Config) -> bool:
    """Whether the policy or its router moves KV from server to server. Raises ConfigError and PolicyError."""
    choice = choice_of(config)
    scheduler = load(choice.policy, choice.settings)
    router = router_for(choice.policy, choice.router, choice.router_settings, choice.settings)
    return "kv_transfer" in scheduler.needs | router.needs


def plugin_settings(config: Config, more: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of the plug-in in each server (`engines.vllm.settings`). more: further settings, `engine.plugin`.
    Raises ConfigError."""
    name, latency = config.policy.name, config.latency
    if name.endswith(".py"):
        name = os.path.abspath(name)
    plugin: dict[str, Any] = {"policy": name, "settings": dict(config.policy.settings), "slo_rule": config.slo_rule}
    if latency is not None:
        plugin["latency"] = dict(latency_in_vllm(latency))
    if "lengths" in config.model_fields_set:
        plugin["lengths"] = lengths_in_vllm(config)
    if twice := [key for key in more if key in (*plugin, "link")]:
        raise ConfigError(f"engine.plugin: {twice[0]} follows from the rest of the configuration; leave it out here")
    plugin = {**plugin, **more, "link": {"host": "{host}"}}
    try:
        settings_of({"rubato": plugin})
    except ValueError as error:
        raise ConfigError(f"engine.plugin: {error}") from error
    return plugin
