"""A replica, three tiers and a policy that the experiments' tests share: small enough to simulate in milliseconds."""

from __future__ import annotations

from rubato.core.plan import Limits
from rubato.core.request import SLO
from rubato.fleet.cluster_options import PolicyChoice
from rubato.latency.affine import Model
from rubato.planning.request_source import MixSource
from rubato.simulation.run_spec import Hardware, RunSpec
from rubato.workloads.request_kinds import chat, code, summary

LIMITS = Limits(max_num_seqs=16, max_num_batched_tokens=512, max_model_len=4096, kv_blocks=512, block_size=16)
MACHINE = Hardware("test", Model(k=(1e-5, 2e-4), b=(0.01, 0.002), a=2e-7), LIMITS, gpus=2)
KINDS = (
    chat(SLO(0.3, 0.03), output=(5, 15), share=0.4),
    code(SLO(0.4, 0.04), output=(5, 15), share=0.3),
    summary(SLO(0.8, 0.06), output=(5, 15), share=0.3),
)


def mix(count: int = 60) -> MixSource:
    return MixSource(KINDS, count=count)


def spec(policy: str = "sarathi", **changes: object) -> RunSpec:
    return RunSpec(MACHINE, PolicyChoice.parse(policy), **changes)  # type: ignore[arg-type]
