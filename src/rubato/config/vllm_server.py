"""`engine: {kind: vllm, ...}`: the command of a vLLM server with the plug-in, from a configuration."""

from __future__ import annotations

import json
import sys
from collections.abc import Collection, Mapping, Sequence
from typing import Annotated, Any, ClassVar
from uuid import uuid4

from pydantic import Field, field_validator

from rubato.config.build import choice_of
from rubato.config.for_vllm import settings_inside_vllm
from rubato.config.schema import Config, ConfigError
from rubato.core.strict_settings import StrictSettings
from rubato.engines.vllm.settings import Settings
from rubato.fleet.server_actor import ServerCommand

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


class VllmServers(StrictSettings):
    """Settings of engine `vllm`.

    Args:
        args: vLLM's own flags.
        tensor_parallel_size: GPUs of one server.
        python: the interpreter of vLLM's environment, on each node; with Rubato installed.
        env: environment variables.
        plugin: settings of the plug-in, but for the policy's.
        start_seconds: in which a server must serve.
    """

    SECRET: ClassVar[Collection[str]] = ("args", "env")
    args: Annotated[tuple[str, ...], Field(strict=False)] = ()
    tensor_parallel_size: int = Field(default=1, ge=1)
    python: str = Field(default=sys.executable, min_length=1)
    env: Mapping[str, str] = {}
    plugin: Mapping[str, Any] = {}
    start_seconds: float = Field(default=900.0, gt=0)

    @field_validator("args")
    @classmethod
    def _check_flags(cls, args: Sequence[str]) -> Sequence[str]:
        for flag in (word.partition("=")[0] for word in args):
            if flag in RESERVED_FLAGS:
                raise ValueError(f"leave {flag} out: {RESERVED_FLAGS[flag]}")
        return args


def vllm_command(config: Config) -> tuple[ServerCommand, str]:
    """Returns a vLLM server's command and API key, `engine.env`'s or a new one. Raises ConfigError."""
    servers = VllmServers.of(config.engine.settings, "engine.")
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
    """Returns whether the policy or its router moves KV from server to server. Raises ConfigError and PolicyError."""
    scheduler, router = choice_of(config).build()
    return "kv_transfer" in scheduler.needs | router.needs


def plugin_settings(config: Config, more: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the settings of the plug-in in each server (`engines.vllm.settings`), with those of `engine.plugin`
    (`more`). Raises ConfigError."""
    plugin = settings_inside_vllm(config)
    if twice := [key for key in more if key in (*plugin, "link")]:
        raise ConfigError(f"engine.plugin: {twice[0]} follows from the rest of the configuration; leave it out here")
    Settings.of({**plugin, **more}, "engine.plugin.")
    return {**plugin, **more, "link": {"host": "{host}"}}
