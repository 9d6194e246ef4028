"""What status.md says is missing is missing, and the metrics, rules and alerts that pages name exist."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

import pytest

from rubato.config.schema import Config
from rubato.engines.vllm.settings import Settings
from rubato.serving.schemas import UNSUPPORTED
from tests.docs.pages import PAGES, ROOT

ROWS = re.findall(
    r"^\| ([^|]+?) \|", PAGES["status.md"].split("## What does not work, or is untested\n")[1], re.MULTILINE
)
SERVING = ("deploy", "gateway", "http-api", "operate", "security", "server", "slos", "troubleshooting", "vllm")


def sources(*folders: str) -> Iterator[tuple[str, str]]:
    for folder in folders or ("src", "packages"):
        for file in (ROOT / folder).rglob("*.py"):
            yield file.relative_to(ROOT).as_posix(), file.read_text(encoding="utf-8")


def said(pattern: str, *folders: str) -> list[str]:
    """Files that say so."""
    return [name for name, text in sources(*folders) if re.search(pattern, text)]


def fields(pattern: str) -> list[str]:
    """Settings of a server and of the plug-in that are named so."""
    return [name for name in (*Config.model_fields, *Settings.model_fields) if re.search(pattern, name)]


def builds_and_clusters() -> list[str]:
    """What CI runs, and targets, that build an image or start a cluster."""
    files = [ROOT / "Makefile", *(ROOT / ".ci").iterdir(), *(ROOT / ".github" / "workflows").iterdir()]
    tools = (
        r"\b(?:docker|podman|buildah) build\b|\b(?:kind|k3d|minikube) (?:create|start)\b|\bkubectl (?:apply|create)\b"
    )
    return [file.relative_to(ROOT).as_posix() for file in files if re.search(tools, file.read_text(encoding="utf-8"))]


def runs_on_gpus() -> list[str]:
    """Measured results of serving that name CUDA or a GPU's maker."""
    kept = {file.name: file.read_text(encoding="utf-8") for file in (ROOT / "docs" / "measurements").glob("*.json")}
    on_gpus = [name for name, text in kept.items() if re.search(r"cuda|nvidia", text, re.I)]
    return [name for name in on_gpus if re.search(r"tokens/s|requests/s|attained", kept[name])]


# Of a row of "What does not work", what would be there if it did.
LACKS: dict[str, Callable[[], list[str]]] = {
    "tools, JSON mode, images on our own server": lambda: [
        name for name in ("tools", "response_format") if name not in UNSUPPORTED
    ],
    "tensor parallelism, CUDA graphs, FP8, MLA under the plug-in": lambda: said(
        r"tensor_parallel_size=|fp8|cudagraph(?!_mode ==)|enforce_eager=False", "tests/vllm"
    ),
    "quantised weights, tensor parallelism, mixtures of experts in the embedded engine": lambda: said(
        r'"\w*(?:Moe|Mixtral|Deepseek)\w*ForCausalLM"|import torch\.distributed', "packages"
    ),
    "high availability": lambda: fields("standby|peer|leader|failover|state_file|redis"),
    "a batch API": lambda: said(r"""["']/v1/batches"""),
}


@pytest.mark.parametrize("need", LACKS)
def test_need_on_the_page_of_status_is_not_met(need: str) -> None:
    assert need in ROWS
    assert LACKS[need]() == []


@pytest.mark.parametrize("find", [builds_and_clusters, runs_on_gpus])
def test_what_never_ran_has_no_result(find: Callable[[], list[str]]) -> None:
    assert find() == []


@pytest.mark.parametrize("page", [f"{name}.md" for name in SERVING])
def test_metrics_rules_and_alerts_that_pages_name_exist(page: str) -> None:
    rules = (ROOT / "docs" / "alerts.yml").read_text(encoding="utf-8")
    metrics = set(re.findall(r"^\| `(rubato_\w+)`", PAGES["metrics.md"], re.MULTILINE))
    metrics |= {name + suffix for name in metrics for suffix in ("_bucket", "_sum", "_count")}
    named = set(re.findall(r"(?<![\w:./])rubato_(?!torch|epp)\w+", PAGES[page]))
    assert named <= metrics
    assert set(re.findall(r"tier:rubato[\w:]+", PAGES[page])) <= set(re.findall(r"record: (\S+)", rules))
    assert set(re.findall(r"\bRubato[A-Z]\w+", PAGES[page])) <= set(re.findall(r"alert: (\w+)", rules))
