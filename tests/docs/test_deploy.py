"""Container files and manifests in deploy/: they are valid by their own tools, and say what the code, the image and the
manual say. Nothing here builds an image or asks a cluster."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import threading
import tomllib
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from fastapi import FastAPI
from fastapi.routing import APIRoute

import rubato.vllm
from rubato import policies
from rubato.cli.main import parser as rubato_parser
from rubato.config.schema import Config, load
from rubato.engines.vllm.settings import TESTED_VERSIONS, LinkSettings, Settings, check_version, settings_of
from rubato.serving.app_state import add_operations
from rubato.serving.shutdown import CLOSE_TIMEOUT_S
from rubato.wire.link_keys import TOKEN_ENV
from tests.docs.pages import PAGES, ROOT, blocks, fenced
from tests.docs.test_commands import subcommands

DEPLOY = ROOT / "deploy"
BASE, FOUR = DEPLOY / "kubernetes" / "base", DEPLOY / "kubernetes" / "four-servers"
DOCKERFILES = sorted(DEPLOY.glob("*.Dockerfile"))
MANIFESTS = [BASE / "vllm.yaml", BASE / "gateway.yaml", DEPLOY / "kuberay" / "rayservers.yaml"]
KUBERNETES = ("1.30", "1.37")  # the schemas of the oldest and the newest release that they are held against
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
BY_TAG = {"vllm/vllm-openai:v0.32.0": "no digest of this release has been verified"}
VLLM = f"{TESTED_VERSIONS[0][0]}.{TESTED_VERSIONS[0][1]}.0"


def documents(file: Path) -> list[Any]:
    return [found for found in yaml.safe_load_all(file.read_text(encoding="utf-8")) if found]


def named(file: Path, kind: str) -> Any:
    (found,) = [document for document in documents(file) if document["kind"] == kind]
    return found


def pods(document: Any) -> Iterator[Any]:
    """The pod templates of an object, those of a RayCluster included."""
    if document["kind"] in ("Deployment", "StatefulSet"):
        yield document["spec"]["template"]
    if document["kind"] == "RayCluster":
        yield document["spec"]["headGroupSpec"]["template"]
        yield from (group["template"] for group in document["spec"]["workerGroupSpecs"])


def containers() -> Iterator[tuple[Path, Any, Any]]:
    """File, pod template and container."""
    for file in MANIFESTS:
        for document in documents(file):
            for pod in pods(document):
                yield from ((file, pod, one) for one in pod["spec"]["containers"])


def container(name: str) -> tuple[Any, Any]:
    ((pod, found),) = [
        (pod, one) for file, pod, one in containers() if one["name"] == name and file.parent == BASE
    ]  # fmt: skip
    return pod, found


# ------------------------------------------------------------------- by their own tools


@pytest.mark.parametrize("release", KUBERNETES)
@pytest.mark.parametrize("file", MANIFESTS, ids=lambda file: file.stem)
def test_manifests_are_valid_by_kubernetes_schemas(file: Path, release: str) -> None:
    """Strictly: a field that is not in the schema is an error. Of a RayCluster only its pods, as pods."""
    validate = pytest.importorskip("kubernetes_validate").validate
    for document in documents(file):
        if document["kind"] == "RayCluster":
            assert document["apiVersion"] == "ray.io/v1"
            for pod in pods(document):
                validate({"apiVersion": "v1", "kind": "Pod", **pod}, release, strict=True)
        else:
            validate(document, release, strict=True)


@pytest.mark.parametrize("folder", [BASE, FOUR], ids=lambda folder: folder.name)
def test_kustomize_makes_valid_objects_of_them(folder: Path) -> None:
    validate = pytest.importorskip("kubernetes_validate").validate
    if shutil.which("kubectl") is None:
        pytest.skip("kubectl, which has kustomize in it, is not installed")
    made = subprocess.run(["kubectl", "kustomize", str(folder)], capture_output=True, text=True, check=False)
    assert made.returncode == 0, made.stderr
    objects = list(yaml.safe_load_all(made.stdout))
    for document in objects:
        validate(document, KUBERNETES[-1], strict=True)
    (config,) = [document for document in objects if document["kind"] == "ConfigMap"]
    assert config["data"]["rubato.yaml"] == (folder / "rubato.yaml").read_text(encoding="utf-8")
    (servers,) = [document for document in objects if document["kind"] == "StatefulSet"]
    assert servers["spec"]["replicas"] == len(load(folder / "rubato.yaml").servers)
    (gateway,) = [document for document in objects if document["kind"] == "Deployment"]
    assert gateway["spec"]["template"]["spec"]["volumes"][0]["configMap"]["name"] == config["metadata"]["name"]


@pytest.mark.parametrize("file", DOCKERFILES, ids=lambda file: file.name)
def test_container_files_are_clean_by_hadolint(file: Path) -> None:
    found = shutil.which("hadolint", path=str(Path(sys.executable).parent)) or shutil.which("hadolint")
    if found is None:
        pytest.skip("hadolint is not installed: it is in the extra dev")
    run = subprocess.run([found, "--no-color", str(file)], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout + run.stderr


# ------------------------------------------------------------------- container files


def test_container_files_copy_what_there_is_and_what_is_let_in() -> None:
    let_in = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    for file in DOCKERFILES:
        text = file.read_text(encoding="utf-8")
        copied = {
            name for line in re.findall(r"^COPY (?!--from)(.*)", text, re.MULTILINE) for name in line.split()[:-1]
        }
        assert copied <= let_in
        assert all((ROOT / name).exists() for name in copied)
        wanted = {"pyproject.toml", "src", PROJECT["readme"], *PROJECT["license-files"]}
        assert wanted <= copied, "the package is built from them"


def test_images_are_of_the_versions_that_the_code_is_for() -> None:
    text = {file.name: file.read_text(encoding="utf-8") for file in DOCKERFILES}
    assert f"\nFROM vllm/vllm-openai:v{VLLM}\n" in text["vllm.Dockerfile"]
    check_version(VLLM)
    oldest = PROJECT["requires-python"].removeprefix(">=")
    assert all(f"FROM python:{oldest}-slim" in each for each in text.values())
    tags = {"rubato-gateway": PROJECT["version"]} | dict.fromkeys(
        ("rubato-vllm", "rubato-vllm-ray"), f"{PROJECT['version']}-{VLLM}"
    )
    (kustomization,) = documents(BASE / "kustomization.yaml")
    set_by_kustomize = {image["name"]: image["newTag"] for image in kustomization["images"]}
    used = {one["image"] for _, _, one in containers()}
    used |= {one["image"] for _, pod, _ in containers() for one in pod["spec"].get("initContainers", ())}
    assert used == {*set_by_kustomize, f"rubato-vllm-ray:{tags['rubato-vllm-ray']}"}
    assert set_by_kustomize == {name: tags[name] for name in set_by_kustomize}
    everywhere = "\n".join([*text.values(), PAGES["deploy.md"]])
    said = re.findall(r"\b(rubato-(?:gateway|vllm(?:-ray)?)):(\d+\.\d[\w.-]*\w)", everywhere)
    assert len(said) >= 4
    assert not [name for name, tag in said if tags[name] != tag]
    (ray,) = re.findall(r"^ray==(\S+)", (ROOT / "requirements" / "dev.txt").read_text(encoding="utf-8"), re.MULTILINE)
    assert named(DEPLOY / "kuberay" / "rayservers.yaml", "RayCluster")["spec"]["rayVersion"] == ray


def test_base_images_are_named_by_digest() -> None:
    """But for BY_TAG; and one image has one digest in all files."""
    bases = [line.split()[1] for file in DOCKERFILES for line in file.read_text().splitlines() if line[:5] == "FROM "]
    digests = {name: digest for name, _, digest in (base.partition("@") for base in bases)}
    assert {base for base in bases if "@" not in base} == BY_TAG.keys()
    assert all(re.fullmatch(r"sha256:[0-9a-f]{64}", digests[name]) for name in digests if name not in BY_TAG)
    assert {base for base in bases if "@" in base} == {f"{name}@{digests[name]}" for name in digests if digests[name]}


# ------------------------------------------------------------------- what the gateway is told


@pytest.mark.parametrize("folder", [BASE, FOUR], ids=lambda folder: folder.name)
def test_servers_are_the_pods_of_the_stateful_set(folder: Path) -> None:
    config = load(folder / "rubato.yaml")
    servers, service = named(BASE / "vllm.yaml", "StatefulSet"), named(BASE / "vllm.yaml", "Service")
    name = servers["metadata"]["name"]
    assert servers["spec"]["serviceName"] == service["metadata"]["name"]
    assert service["spec"]["clusterIP"] == "None"
    http, link = 8000, link_settings().port
    hosts = [f"{name}-{at}.{service['metadata']['name']}" for at in range(replicas(folder))]
    assert [(one.url, one.link) for one in config.servers] == [
        (f"http://{host}:{http}", f"tcp://{host}:{link}") for host in hosts
    ]
    assert {port["name"]: port["port"] for port in service["spec"]["ports"]} == {"http": http, "link": link}
    _, vllm = container("vllm")
    assert {port["name"]: port["containerPort"] for port in vllm["ports"]} == {"http": http, "link": link}
    assert f"--port={http}" in vllm["args"]


def replicas(folder: Path) -> int:
    (kustomization,) = documents(folder / "kustomization.yaml")
    stated = {one["name"]: one["count"] for one in kustomization.get("replicas", ())}
    servers = named(BASE / "vllm.yaml", "StatefulSet")
    return int(stated.get(servers["metadata"]["name"], servers["spec"]["replicas"]))


def plugin_settings() -> Settings:
    _, vllm = container("vllm")
    (given,) = [arg.partition("=")[2] for arg in vllm["args"] if arg.startswith("--additional-config=")]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(TOKEN_ENV, "a secret")
        return settings_of(json.loads(given))


def link_settings() -> LinkSettings:
    link = plugin_settings().link
    assert link is not None
    return link


@pytest.mark.parametrize("folder", [BASE, FOUR], ids=lambda folder: folder.name)
def test_the_gateways_configuration_is_one_that_it_takes(folder: Path) -> None:
    config = load(folder / "rubato.yaml")
    assert config.policy.name == plugin_settings().policy, "they must agree, or the gateway does not start"
    policies.load(config.policy.name, config.policy.settings)
    policies.router_for(config.policy.name, config.router.name, config.router.settings)
    pod, gateway = container("gateway")
    assert [port["containerPort"] for port in gateway["ports"]] == [config.port]
    assert config.host == "0.0.0.0"
    grace = pod["spec"]["terminationGracePeriodSeconds"]
    before = float(gateway["lifecycle"]["preStop"]["exec"]["command"][1])
    assert grace > before + config.drain_seconds + CLOSE_TIMEOUT_S
    assert all(tenant.keys_env and not tenant.keys for tenant in config.tenants.values()), "keys are in a Secret"
    assert "keys" in json.dumps(gateway["envFrom"])
    assert any(tenant.admin for tenant in config.tenants.values())


def test_the_link_is_opened_with_the_token_and_to_the_gateway_alone() -> None:
    assert link_settings().host == "0.0.0.0"
    for name in ("vllm", "gateway"):
        _, one = container(name)
        assert {"name": TOKEN_ENV, "valueFrom": {"secretKeyRef": {"name": "rubato-link", "key": "token"}}} in one["env"]
    closed = named(BASE / "vllm.yaml", "NetworkPolicy")["spec"]
    vllm, _ = container("vllm")
    gateway, _ = container("gateway")
    assert closed["podSelector"]["matchLabels"].items() <= vllm["metadata"]["labels"].items()
    (rule,) = closed["ingress"]
    (peer,) = rule["from"]
    assert peer["podSelector"]["matchLabels"].items() <= gateway["metadata"]["labels"].items()
    assert {port["port"] for port in rule["ports"]} == {8000, link_settings().port}


# ------------------------------------------------------------------- what is started


def test_commands_are_understood() -> None:
    lines = [[*one.get("command", ()), *one.get("args", ())] for _, _, one in containers()]
    ours = [words[words[0] == "rubato" :] for words in lines if words and words[0] in ("rubato", "gateway")]
    assert sorted(words[0] for words in ours) == ["gateway", "serve"]
    for words in ours:
        options = set(subcommands()[words[0]]._option_string_actions)
        if words[0] == "serve" and "--ray-address" not in options:  # servers on Ray are to come
            given = {word for word in words if word.startswith("--")}
            assert given - {"--engine", "--tensor-parallel-size", "--ray-address"} <= options
        else:
            rubato_parser().parse_args(words)
    text = (DEPLOY / "gateway.Dockerfile").read_text(encoding="utf-8")
    (entry,) = re.findall(r"^ENTRYPOINT (.*)", text, re.MULTILINE)
    (command,) = re.findall(r"^CMD (.*)", text, re.MULTILINE)
    assert json.loads(entry) == ["rubato"]
    rubato_parser().parse_args(json.loads(command))
    _, gateway = container("gateway")
    assert gateway["args"] == json.loads(command)


def test_the_plug_ins_names_are_there() -> None:
    pod, vllm = container("vllm")
    for flag in ("--scheduler-cls", "--middleware"):
        (name,) = [arg.partition("=")[2] for arg in vllm["args"] if arg.startswith(f"{flag}=")]
        package, _, attribute = name.rpartition(".")
        assert package == rubato.vllm.__name__
        assert attribute in rubato.vllm.__all__
    (timeout,) = [int(arg.partition("=")[2]) for arg in vllm["args"] if arg.startswith("--shutdown-timeout=")]
    assert pod["spec"]["terminationGracePeriodSeconds"] >= timeout + 30


def test_the_gateway_waits_for_its_servers(tmp_path: Path) -> None:
    """The init container's own words, over a server that is there at the second look."""
    pod, _ = container("gateway")
    (waiting,) = pod["spec"]["initContainers"]
    asked: list[str] = []

    class Health(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            self.send_response(200 if len(asked) > 1 else 503)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Health)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        config = tmp_path / "rubato.yaml"
        config.write_text(f"servers: ['http://127.0.0.1:{server.server_port}/']\n")
        program, flag, script, path = waiting["command"]
        assert (program, flag) == ("python", "-c")
        assert path == container("gateway")[1]["args"][-1]
        hurried = script.replace("time.sleep(2)", "time.sleep(0.01)")
        assert hurried != script
        run = subprocess.run(
            [sys.executable, "-c", hurried, str(config)], capture_output=True, text=True, check=False, timeout=60
        )
        assert run.returncode == 0, run.stderr
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
    assert asked == ["/health", "/health"]
    assert "waiting for" in run.stdout


# ------------------------------------------------------------------- probes, and who they run as


def test_probes_ask_for_what_the_app_has() -> None:
    app, state = (
        FastAPI(),
        SimpleNamespace(service=None, metrics=SimpleNamespace(loop_delay=None)),
    )  # enough for routes to be added, not to be asked
    add_operations(app, state)  # type: ignore[arg-type]
    ours = {route.path for route in app.routes if isinstance(route, APIRoute)}
    probed = [(one, kind) for _, _, one in containers() for kind in one if kind.endswith("Probe")]
    assert len(probed) == 9
    for one, kind in probed:
        asked = one[kind]["httpGet"]
        assert asked["port"] in {port["name"] for port in one["ports"]}
        of_vllm = one["name"] == "vllm"
        assert asked["path"] == ("/ready" if kind == "readinessProbe" and not of_vllm else "/health")
        assert of_vllm or asked["path"] in ours


def test_pods_are_within_the_restricted_security_standard() -> None:
    """Kubernetes' own list, for each container and init container; and nothing is told of the cluster's API."""
    seen = 0
    for _, pod, _ in containers():
        spec = pod["spec"]
        assert spec["securityContext"]["runAsNonRoot"] is True
        assert spec["securityContext"]["runAsUser"] > 0
        assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert spec["automountServiceAccountToken"] is False
        assert not {"hostNetwork", "hostPID", "hostIPC"} & spec.keys()
        assert all(
            len(volume.keys() & {"emptyDir", "configMap", "persistentVolumeClaim"}) for volume in spec["volumes"]
        )
        for one in [*spec["containers"], *spec.get("initContainers", ())]:
            assert one["securityContext"]["allowPrivilegeEscalation"] is False
            assert one["securityContext"]["capabilities"] == {"drop": ["ALL"]}
            assert one["securityContext"].keys() <= {
                "allowPrivilegeEscalation",
                "capabilities",
                "readOnlyRootFilesystem",
            }
            assert one["resources"].keys() == {"requests", "limits"}
            seen += 1
    assert seen == 6
    assert "secret" not in {document["kind"].lower() for file in MANIFESTS for document in documents(file)}


def test_the_gateways_root_is_read_only_and_its_user_is_the_images() -> None:
    pod, one = container("gateway")
    assert one["securityContext"]["readOnlyRootFilesystem"] is True
    (user,) = re.findall(r"^USER (\d+):(\d+)$", (DEPLOY / "gateway.Dockerfile").read_text(), re.MULTILINE)
    assert user == (str(pod["spec"]["securityContext"]["runAsUser"]), str(pod["spec"]["securityContext"]["runAsGroup"]))


def bytes_of(quantity: str) -> int:
    return int(quantity[:-2]) << {"Mi": 20, "Gi": 30}[quantity[-2:]]


@pytest.mark.parametrize("folder", [BASE, FOUR, DEPLOY / "kuberay"], ids=lambda folder: folder.name)
def test_bodies_of_all_connections_fit_into_the_gateways_memory(folder: Path) -> None:
    """Each is reckoned at 6 times its size; 512 MiB are the process's own."""
    if folder.name == "kuberay":
        (one,) = [one for file, _, one in containers() if file.parent == folder and one["name"] == "gateway"]
        stated = dict(word.split("=") for word in one["command"] if "=" in word)
        most, each = int(stated["max_connections"]), int(stated["max_body_bytes"])
    else:
        _, one = container("gateway")
        config = load(folder / "rubato.yaml")
        assert config.max_connections is not None
        most, each = config.max_connections, config.max_body_bytes
    assert most * 6 * each + (512 << 20) <= bytes_of(one["resources"]["limits"]["memory"])


# ------------------------------------------------------------------- who may speak to whom


def policies_of(file: Path, pod: Any) -> list[Any]:
    """The network policies of the file that select this pod."""
    labels = pod.get("metadata", {}).get("labels", {"ray.io/cluster": "rubato-ray"})  # of a RayCluster by the operator
    return [
        document["spec"]
        for document in documents(file)
        if document["kind"] == "NetworkPolicy"
        and document["spec"]["podSelector"]["matchLabels"].items() <= labels.items()
    ]


def test_each_pod_has_a_network_policy_for_both_directions() -> None:
    """What it may call is a resolver, pods by their labels, and the Internet without private addresses and metadata."""
    for file, pod, _ in containers():
        (policy,) = policies_of(file, pod)
        assert policy["policyTypes"] == ["Ingress", "Egress"]
        for rule in policy["egress"]:
            if "to" not in rule:
                assert {port["port"] for port in rule["ports"]} == {53}
            for peer in rule.get("to", ()):
                block = peer.get("ipBlock")
                assert peer.keys() in ({"podSelector"}, {"ipBlock"})
                assert (
                    block is None or block["cidr"] == "::/0" or {"169.254.0.0/16", "10.0.0.0/8"} <= {*block["except"]}
                )
                assert block is None or [port["port"] for port in rule["ports"]] == [443]


def test_a_gateway_without_tenants_is_open_to_labelled_pods_alone_and_says_so() -> None:
    file = DEPLOY / "kuberay" / "rayservers.yaml"
    ((pod, one),) = [(pod, one) for path, pod, one in containers() if path == file and one["name"] == "gateway"]
    assert "0.0.0.0" in one["command"]
    assert "--config" not in one["command"], "with tenants the policy may be wider"
    ((rule,),) = [policy["ingress"] for policy in policies_of(file, pod)]
    assert all(peer["podSelector"]["matchLabels"] for peer in rule["from"])
    assert "whoever reaches it is an admin" in file.read_text(encoding="utf-8")


# ------------------------------------------------------------------- the page


def test_the_pages_example_is_the_overlays() -> None:
    assert (FOUR / "rubato.yaml").read_text(encoding="utf-8") in fenced("deploy.md", "yaml")


def test_secrets_and_folders_of_the_page_are_those_of_the_manifests() -> None:
    text = "\n".join(blocks("deploy.md"))
    assert set(re.findall(r"-k (\S+)", text)) <= {
        path.parent.relative_to(ROOT).as_posix() for path in DEPLOY.rglob("kustomization.yaml")
    }
    keys = {tenant.keys_env for tenant in load(FOUR / "rubato.yaml").tenants.values()}
    assert set(re.findall(r"--from-literal=(\w+_KEYS)=", text)) == keys
    assert "create secret generic rubato-link --from-literal=token=" in text.replace("\\\n    ", "")
    assert isinstance(load(BASE / "rubato.yaml"), Config)
