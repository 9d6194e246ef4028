"""vLLM's own parser takes the flags of the manifest in deploy/ (what else it says: tests/docs/test_deploy.py)."""

from __future__ import annotations

from pathlib import Path

import yaml
from vllm.utils.argparse_utils import FlexibleArgumentParser

try:
    from vllm.entrypoints.common.cli_args import make_arg_parser  # from 0.33 on
except ModuleNotFoundError:
    from vllm.entrypoints.launchers.cli_args import make_arg_parser

MANIFEST = Path(__file__).parents[2] / "deploy" / "kubernetes" / "base" / "vllm.yaml"


def test_vllm_takes_the_manifests_flags() -> None:
    objects = yaml.safe_load_all(MANIFEST.read_text(encoding="utf-8"))
    (pod,) = [found["spec"]["template"]["spec"] for found in objects if found["kind"] == "StatefulSet"]
    (container,) = pod["containers"]
    told = make_arg_parser(FlexibleArgumentParser()).parse_args(container["args"])
    assert told.model_tag == container["args"][0]
    assert (told.scheduler_cls, told.middleware) == ("rubato.vllm.Scheduler", ["rubato.vllm.Middleware"])
    assert told.additional_config["rubato"]["link"]["port"] == 5557
    assert told.shutdown_timeout < pod["terminationGracePeriodSeconds"]
