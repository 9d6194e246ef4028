"""`rubato serve` with every registered policy and router, configured as its page of the manual says."""

from __future__ import annotations

from typing import Any

import httpx2
import pytest
import yaml

from rubato import policies
from rubato.config import schema as config
from rubato.core.clock import VirtualClock, run_virtual
from rubato.frontdoor.tenants import Tenants
from rubato.serving import serve
from rubato.serving.app import create_app
from tests.docs.pages import PAGES, fenced

SCHEDULERS = [name for name, part, *_ in policies.describe() if part == "scheduler"]
ROUTERS = [name for name, part, *_ in policies.describe() if part == "router"]


def example(policy: str) -> dict[str, Any]:
    """The configuration on the policy's page, {} where it has none."""
    page = f"{policy.replace('_', '-')}.md"
    found = [yaml.safe_load(text) for text in (fenced(page, "yaml") if page in PAGES else ())]
    return next((each for each in found if "policy" in each), {})


def configuration(policy: str, router: str = "auto", **more: Any) -> config.Config:
    """That of the page, on the simulated engine, with a drafter and replicas where the policy cannot do without."""
    said = {"policy": policy, "replicas": 2, **example(policy), **more}
    engine: dict[str, Any] = {"kind": "simulated", "max_num_seqs": 8}
    if "draft" in policies.load(policy).needs:
        engine["drafter"] = {"alpha": 0.7}
    if router != "auto":
        said["router"] = router
    return config.load({**said, "engine": engine, "latency": {"kind": "affine", "k": [1e-5, 0.0], "b": [0.01, 0.0]}})


def served(chosen: config.Config) -> dict[str, Any]:
    """The answer to one request, in virtual time, over the app that `rubato serve` would serve."""

    async def main() -> dict[str, Any]:
        clock = VirtualClock()
        engines, cluster = serve.build(chosen, clock)
        await cluster.start()
        try:
            tenants = Tenants(serve.tenants_of(chosen), serve.tiers_of(chosen))
            app = create_app(serve.service_of(chosen, clock, engines[0], cluster, tenants))
            transport = httpx2.ASGITransport(app)
            async with httpx2.AsyncClient(transport=transport, base_url="http://edge", timeout=None) as http:
                body = {"model": "simulated", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 5}
                answer = await http.post("/v1/chat/completions", json={**body, "slo": {"ttft_ms": 900, "tpot_ms": 90}})
                assert answer.status_code == 200, answer.text
                return dict(answer.json())
        finally:
            await cluster.close()

    return run_virtual(main())


@pytest.mark.parametrize("policy", SCHEDULERS)
def test_every_policy_is_served(policy: str) -> None:
    answer = served(configuration(policy))
    assert answer["usage"]["completion_tokens"] == 5
    assert answer["rubato"]["met"] is True


@pytest.mark.parametrize("router", ROUTERS)
def test_every_router_is_served(router: str) -> None:
    policy = router if router in SCHEDULERS else "edf" if router != "sa" else "vllm"
    answer = served(configuration(policy, router, **{k: v for k, v in example(router).items() if k == "lengths"}))
    assert answer["usage"]["completion_tokens"] == 5


def test_a_tier_that_is_not_there_is_refused_by_name() -> None:
    settings = {"name": "slos_serve", "tier_values": {"gild": 4}}
    chosen = config.load({"policy": settings, "engine": "simulated", "tiers": {"gold": {}}})
    with pytest.raises(config.ConfigError, match=r"its settings name 'gild', not among the tiers: did you mean .gold"):
        serve.build(chosen, VirtualClock())
