"""One request through every policy that docs/policies.md says runs on Ray, as `rubato serve` builds it, all at once."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest
import ray

from rubato.config import schema as config
from rubato.core.clock import WallClock, run_strict
from rubato.core.events import Finished
from rubato.core.request import SLO, Request, Sampling, Stage
from rubato.fleet.cluster import Cluster
from rubato.serving import serve
from tests.docs.pages import PAGES
from tests.serving.test_every_policy import SCHEDULERS, configuration

SECONDS = 120.0  # after which a test is not merely slow


@pytest.fixture(scope="module")
def a_ray_cluster() -> Iterator[None]:
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, configure_logging=False)
    yield
    ray.shutdown()


def on_ray() -> dict[str, str]:
    """Policy -> its cell below Ray in the table of docs/policies.md."""
    section = PAGES["policies.md"].split("## The packaged policies\n")[1].split("\n## ")[0]
    rows = [line.removeprefix("| ").split(" | ") for line in section.splitlines() if "| `" in line]
    table = [row for row in rows if len(row) == 5]
    return {name.strip(" `"): cells[2] for names, *cells in table for name in names.split(",")}


def test_the_table_names_every_policy_but_the_router_alone() -> None:
    assert set(on_ray()) == set(SCHEDULERS) | {"polyserve"}


def smallest(policy: str) -> config.Config:
    replicas = 2 if "2 or more replicas" in on_ray()[policy] else 1
    return configuration(policy, replicas=replicas, fleet={"kind": "ray"})


@pytest.mark.full
@pytest.mark.usefixtures("a_ray_cluster")
@pytest.mark.parametrize("policy", [name for name, cell in on_ray().items() if cell.startswith("refused")])
def test_what_is_refused_is_refused(policy: str) -> None:
    with pytest.raises(ValueError, match=r"KV does not move between Ray actors yet"):
        serve.build(smallest(policy), WallClock())


@pytest.mark.full
@pytest.mark.usefixtures("a_ray_cluster")
def test_every_other_policy_serves_a_request() -> None:
    served = [name for name, cell in on_ray().items() if not cell.startswith("refused")]
    ends: dict[str, Finished] = {}

    async def one(policy: str) -> None:
        clock = WallClock()
        _, cluster = serve.build(smallest(policy), clock)
        try:
            await cluster.start()
            await finish(policy, cluster, clock)
        finally:
            await cluster.close()

    async def finish(policy: str, cluster: Cluster, clock: WallClock) -> None:
        cluster.listen(lambda event: ends.update({policy: event}) if isinstance(event, Finished) else None)
        request = Request("q", (Stage(20, SLO(ttft=60.0, tpot=0.09)),), clock.now(), sampling=Sampling(max_tokens=5))
        cluster.offer(request)
        await cluster.drain()

    async def all_of_them() -> None:
        await asyncio.wait_for(asyncio.gather(*map(one, served)), SECONDS)

    run_strict(all_of_them())
    found = {policy: (end.outcome, end.output) for policy, end in ends.items()}
    assert found == dict.fromkeys(served, ("completed", 5))
