"""Converts a configuration for a simulation: to the replica that it describes, and to the run."""

from __future__ import annotations

from functools import partial

from rubato.config.build import drafter_of, latency_of, lengths_of, link_of, simulation_limits, start_seconds_of
from rubato.config.schema import Config
from rubato.core.plan import Limits
from rubato.engines.simulated import step_noise
from rubato.fleet.cluster_options import PolicyChoice
from rubato.simulation.run_spec import Hardware, RunSpec, packaged_hardware


def hardware_of(
    config: Config, profile: str | None = None, kv_tokens: int | None = None, host_scale: float = 1.0, **options: int
) -> Hardware:
    """Returns the replica that a configuration describes.

    Args:
        config: the configuration.
        profile: a packaged profile to take in place of the configuration's engine; the settings of `engine` that the
            configuration has change it.
        kv_tokens: KV memory in tokens; None: the configuration's or the profile's.
        host_scale: what a step takes outside the device is so many times as long; with a profile only.
        options: limits in place of the configuration's.

    Raises:
        ValueError: no replica can be described so (ConfigError).
    """
    limits = simulation_limits(config)
    if profile:
        limits = {name: n for name, n in limits.items() if name in config.engine.settings}
        blocks = limits.pop("kv_blocks", None)
        if kv_tokens is None and blocks is not None:
            kv_tokens = blocks * limits.get("block_size", 16)
        return packaged_hardware(profile, kv_tokens, host_scale, **{**limits, **options})
    if kv_tokens is not None:
        limits["kv_blocks"] = kv_tokens // limits["block_size"]
    return Hardware("the configured replica", latency_of(config), Limits(**{**limits, **options}))


def run_spec_of(
    config: Config, machine: Hardware, choice: PolicyChoice, noise: step_noise.Noise = 0.0, slo_rule: str | None = None
) -> RunSpec:
    """Returns the run that a configuration describes, of replicas like `machine`.

    Args:
        config: the configuration.
        machine: each replica.
        choice: of the policy.
        noise: of step times.
        slo_rule: in place of the configuration's own.

    Raises:
        ValueError: no run can be described so (ConfigError).
    """
    step_noise.check(noise)
    return RunSpec(
        machine,
        choice,
        config.replicas,
        slo_rule or config.slo_rule,
        noise,
        None if config.lengths is None else partial(lengths_of, config),
        link=link_of(config),
        drafter=drafter_of(config),
        start_seconds=start_seconds_of(config),
    )
