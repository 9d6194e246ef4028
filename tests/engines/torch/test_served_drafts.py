"""A server whose configuration has a drafter answers as one without, and counts what was accepted."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx2
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from rubato.config.build import believed_latency_of, token_drafter_of  # noqa: E402
from rubato.config.schema import ConfigError, load  # noqa: E402
from rubato.core.clock import VirtualClock, WallClock  # noqa: E402
from rubato.core.events import Event, Tokens  # noqa: E402
from rubato.frontdoor.tenants import Tenants, tiers_of  # noqa: E402
from rubato.latency.affine import Model  # noqa: E402
from rubato.latency.with_drafter import WithDrafter, WithLearntDrafter  # noqa: E402
from rubato.serving.app import create_app  # noqa: E402
from rubato.serving.serve import build, service_of  # noqa: E402
from rubato_torch.drafters.suffix import SuffixDrafter  # noqa: E402

MODEL = {
    "engine": {"kind": "torch", "dtype": "float32", "device": "cpu", "kv_gib": 0.001, "block_size": 4, "threads": 1}
}
PROMPT = "abcabcabcabcabc"
ASKED: list[dict[str, Any]] = [
    {},
    {"prompt": [PROMPT, "to be or not to be", "x"]},
    {"stop": ["b", "~"]},
    {"logprobs": 3},
    {"n": 2},
    {"n": 2, "temperature": 0.7, "seed": 5},
    {"stream": True, "logprobs": 1},
]


class Drafter(SuffixDrafter):
    """Anyone's: `engine.drafter: {name: THIS MODULE, most: 3}`."""

    def __init__(self, most: int) -> None:
        super().__init__()
        self.most = most


def answers(folder: Path, **settings: Any) -> tuple[list[Any], list[Event], str]:
    """What a server says to all of `ASKED` at once, its events and its metrics."""
    drafter = settings.pop("drafter", None)
    engine = {**MODEL["engine"], **({"drafter": drafter} if drafter else {})}
    config = load({"model": str(folder), **settings, "engine": engine})

    async def main() -> tuple[list[Any], list[Event], str]:
        clock = WallClock()
        engines, cluster = build(config, clock)
        await cluster.start()
        events: list[Event] = []
        try:
            app = create_app(service_of(config, clock, engines[0], cluster, Tenants((), tiers_of(config))))
            cluster.listen(events.append)
            async with httpx2.AsyncClient(transport=httpx2.ASGITransport(app), base_url="http://edge") as http:

                async def ask(more: dict[str, Any]) -> Any:
                    body = {"model": folder.name, "prompt": PROMPT, "max_tokens": 24, "temperature": 0, **more}
                    answer = await http.post("/v1/completions", json=body, timeout=60)
                    assert answer.status_code == 200, answer.text
                    return said(answer.text)

                found = await asyncio.gather(*map(ask, ASKED))
                return found, events, (await http.get("/metrics")).text
        finally:
            await cluster.close()

    return asyncio.run(main())


def said(answer: str) -> dict[int, list[Any]]:
    """Text, end and log probabilities (to 4 places) of each choice; a stream's chunks joined."""
    parts = re.findall(r"^data: (\{.*)$", answer, re.MULTILINE) or [answer]
    choices: dict[int, list[Any]] = {}
    for choice in (choice for part in parts for choice in json.loads(part)["choices"]):
        whole = choices.setdefault(choice["index"], ["", None, []])
        whole[0] += choice["text"]
        whole[1] = choice["finish_reason"] or whole[1]
        whole[2] += [round(p, 4) for p in (choice["logprobs"] or {}).get("token_logprobs", ())]
    return choices


def test_answers_are_the_same_with_a_drafter(twin: Callable[[str], Path]) -> None:
    folder = twin("llama")
    plain, _, metrics = answers(folder, policy="vllm")
    assert 'rubato_draft_tokens_total{outcome="accepted"} 0.0' in metrics
    for policy, drafter in (
        ("vllm_spec", "suffix"),
        ({"kind": "adaserve", "verify_tokens": 64}, "suffix"),
        ("slos_serve", {"name": "suffix", "store_tokens": 1000}),
        ("vllm_spec", {"name": "model", "layers": [0, 1, 2]}),
        ("adaserve", {"name": "model", "checkpoint": str(folder)}),
    ):
        found, events, metrics = answers(folder, policy=policy, drafter=drafter)
        assert found == plain
        tested = [event for event in events if isinstance(event, Tokens) and event.tried]
        accepted = sum(len(event.accepted) for event in tested)
        assert accepted > 0 or policy == "slos_serve"  # drafts where that is faster, by the step times here and now
        assert f'rubato_draft_tokens_total{{outcome="accepted"}} {float(accepted)}' in metrics
        rejected = sum(event.tried for event in tested) - accepted
        assert f'rubato_draft_tokens_total{{outcome="rejected"}} {float(rejected)}' in metrics


def test_each_replica_has_a_drafter_of_its_own(twin: Callable[[str], Path]) -> None:
    config = load({"model": str(twin("llama")), **MODEL, "replicas": 2}, ["engine.drafter=suffix"])
    engines, _ = build(config, WallClock())
    assert all({"draft", "tree"} <= engine.supports for engine in engines)
    first, second = (engine._drafter for engine in engines)  # type: ignore[attr-defined]
    assert first is not second


def test_a_drafter_of_anyones_gets_its_settings() -> None:
    drafter = token_drafter_of(load({"engine": {"kind": "torch", "drafter": {"name": __name__, "most": 3}}}))
    assert type(drafter).__name__ == "Drafter"
    assert drafter.most == 3  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"policy": "vllm_spec"}, ["'vllm_spec' needs draft", "engine.drafter: suffix"]),
        ({"engine.drafter": {"name": "suffix", "store_tkens": 5}}, ["store_tkens", "'store_tokens'"]),
        ({"engine.drafter": {"name": "suffix", "alpha": 0.5}}, ["'alpha'", "store_tokens"]),
        ({"engine.drafter": {"kind": "suffix", "store_tokens": "many"}}, ["store_tokens", "many", "whole number"]),
    ],
)
def test_what_is_wrong_with_a_drafter(twin: Callable[[str], Path], settings: dict[str, Any], says: list[str]) -> None:
    changed = [f"{name}={json.dumps(value)}" for name, value in settings.items()]
    with pytest.raises(ConfigError) as error:
        build(load({"model": str(twin("llama")), **MODEL}, changed), VirtualClock())
    for word in says:
        assert word in str(error.value)


def test_schedulers_learn_the_time_of_drafts_beside_that_of_the_step() -> None:
    assert believed_latency_of(load({"engine": "torch"})) == Model()
    assert believed_latency_of(load({"engine": {"kind": "torch", "drafter": "suffix"}})) == WithLearntDrafter(Model())
    assert isinstance(
        believed_latency_of(load({"engine": "simulated"}, ["engine.drafter=opt-125m-a100-40g"])), WithDrafter
    )
