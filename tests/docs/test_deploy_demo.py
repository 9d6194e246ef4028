"""The demo in containers and on kind (deploy/compose, deploy/kind) says what the code says. Nothing is started here."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from rubato.config.schema import load
from rubato.demo import demo_load, simulated_server
from rubato.demo.demo_load import KINDS, SERVERS
from tests.docs.test_deploy import DEPLOY, KUBERNETES, named, pods

COMPOSE, KIND = DEPLOY / "compose", DEPLOY / "kind"
SERVICES: dict[str, Any] = yaml.safe_load((COMPOSE / "docker-compose.yml").read_text(encoding="utf-8"))["services"]
PARSERS = {"rubato.demo.demo_load": demo_load.parser(), "rubato.demo.simulated_server": simulated_server.parser()}


def parsed(entrypoint: list[str], arguments: list[str]) -> Any:
    """The arguments of `python -m MODULE`, as that module reads them."""
    python, dash_m, module = entrypoint
    assert (python, dash_m) == ("python", "-m")
    return PARSERS[module].parse_args(arguments)


@pytest.mark.parametrize("folder", [COMPOSE, KIND], ids=lambda folder: folder.name)
def test_gateway_promises_what_the_load_asks_for(folder: Path) -> None:
    config = load(folder / "rubato.yaml")
    assert {name: tier.slo for name, tier in config.tiers.items()} == {kind.tier: kind.slo for kind in KINDS}
    assert len(config.servers) == SERVERS


def test_compose_starts_the_servers_that_its_gateway_and_prometheus_know() -> None:
    servers = [name for name in SERVICES if name.startswith("server-")]
    config = load(COMPOSE / "rubato.yaml")
    for name, known in zip(servers, config.servers, strict=True):
        told = parsed(SERVICES[name]["entrypoint"], SERVICES[name]["command"])
        assert (known.url, known.link) == (f"http://{name}:{told.port}", f"tcp://{name}:{told.link}")
        assert (told.host, told.policy) == ("0.0.0.0", config.policy.name)
    assert set(SERVICES["gateway"]["depends_on"]) == set(servers)
    jobs = yaml.safe_load((COMPOSE / "prometheus.yml").read_text(encoding="utf-8"))["scrape_configs"]
    targets = {target for job in jobs for static in job["static_configs"] for target in static["targets"]}
    assert targets == {f"gateway:{config.port}", *(known.url.removeprefix("http://") for known in config.servers)}


def test_compose_loads_its_gateway_and_publishes_nothing_to_other_machines() -> None:
    told = parsed(SERVICES["load"]["entrypoint"], SERVICES["load"]["command"])
    assert (told.url, told.servers) == ("http://gateway:8000", SERVERS)

    published = [port for service in SERVICES.values() for port in service.get("ports", [])]
    assert len(published) == 3
    assert all(port.startswith("127.0.0.1:") for port in published)


def test_compose_mounts_files_that_there_are() -> None:
    mounts = [mount.split(":") for service in SERVICES.values() for mount in service.get("volumes", [])]
    assert len(mounts) == 6
    assert [source for source, _, mode in mounts if not (COMPOSE / source).is_file() or mode != "ro"] == []


def test_kind_has_simulated_servers_in_the_place_of_vllm() -> None:
    validate = pytest.importorskip("kubernetes_validate").validate
    if shutil.which("kubectl") is None:
        pytest.skip("kubectl, which has kustomize in it, is not installed")
    made = subprocess.run(["kubectl", "kustomize", str(KIND)], capture_output=True, text=True, check=False)
    assert made.returncode == 0, made.stderr
    objects = [found for found in yaml.safe_load_all(made.stdout) if found]
    for document in objects:
        validate(document, KUBERNETES[-1], strict=True)
    every = [one for document in objects for pod in pods(document) for one in pod["spec"]["containers"]]
    assert {one["image"] for one in every} == {"rubato-gateway:0.1.0"}
    assert not [one for one in every if "nvidia.com/gpu" in str(one["resources"])]
    (servers,) = [document for document in objects if document["kind"] == "StatefulSet"]
    config = load(KIND / "rubato.yaml")
    assert servers["spec"]["replicas"] == len(config.servers)
    (own,) = servers["spec"]["template"]["spec"]["containers"]
    told = parsed(own["command"], own["args"])
    name = servers["metadata"]["name"]
    expected = [
        (f"http://{name}-{i}.{name}:{told.port}", f"tcp://{name}-{i}.{name}:{told.link}") for i in range(SERVERS)
    ]
    assert [(server.url, server.link) for server in config.servers] == expected


def test_kind_maps_the_gateways_node_port_to_this_machine() -> None:
    (node,) = named(KIND / "cluster.yaml", "Cluster")["nodes"]
    (mapping,) = node["extraPortMappings"]
    assert mapping["listenAddress"] == "127.0.0.1"
    assert f"/spec/ports/0/nodePort, value: {mapping['containerPort']}" in (KIND / "kustomization.yaml").read_text()
