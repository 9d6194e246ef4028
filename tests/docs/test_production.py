"""What production needs: each row of the page is held against the code.

What is present or partial stands on tests, settings, metrics, files and options, by name; of what is absent, and of
what a partial row lacks, something is looked at that would be there if it were not so. That the sections exist is held
by the site's strict build.
"""

from __future__ import annotations

import ast
import re
import tomllib
from collections.abc import Callable, Iterator
from functools import cache

import pytest
import yaml
from prometheus_client import CollectorRegistry

from rubato import policies
from rubato.config.parts import TenantSettings
from rubato.config.schema import Config
from rubato.engines.vllm.settings import Settings
from rubato.latency import profiles
from rubato.serving.schemas import UNSUPPORTED
from rubato.serving.vllm_reports import PluginMetrics
from tests.docs.pages import PAGES, ROOT
from tests.docs.test_commands import subcommands

ROWS = re.findall(r"^\| (.+?) \| (present|partial|absent) \| (.+) \|$", PAGES["production.md"], re.MULTILINE)
STATES = {need: state for need, state, _ in ROWS}

# Of each need, what there is: KIND:NAME as `there` has it.
EVIDENCE = {
    "a GPU run": """
        page:measurements/model-drafter-h200.json
        test:engines/torch/test_model_drafter.py::greedy_output_is_the_same""",
    "prefill and decode on vLLM servers of their own": """
        src:fleet/server_kv.py src:engines/vllm/kv_transfer.py
        test:fleet/test_server_kv.py::a_prompt_is_prefilled_at_one_server_and_decoded_at_another
        test:vllm/test_kv_transfer.py::what_gateways_fold_is_what_the_scheduler_shows""",
    "several replicas in one server": """
        setting:replicas setting:router setting:fleet src:fleet/ray_host.py
        test:fleet/test_router.py::one_request_leaves_as_each_step_ends
        test:processes/test_fleet.py::a_killed_replica_costs_no_request""",
    "replicas across machines": """
        setting:fleet src:fleet/remote_view.py test:fleet/test_ray_host.py::stages_and_cancelling_across_processes
        test:fleet/test_ray_host.py::what_moves_kv_is_refused""",
    "SLOs from headers, body, tiers and tenants, with clamping": """
        setting:tiers setting:tenants setting:default_tier test:serving/test_request_slo.py::precedence
        test:serving/test_tenants.py::what_a_tenant_states_is_granted_within_its_tiers""",
    "the same in vLLM's server": """
        plugin:endpoint_plugins test:doors/test_contract.py::door_given_a_request_answers_right
        test:serving/test_vllm_middleware.py::strangers_state_nothing_past_their_tenant
        test:vllm/test_server.py::a_server_with_the_middleware""",
    "a guide to SLOs": """
        page:slos.md test:planning/test_feasibility.py::it_says_how_many_of_which_tier_and_why""",
    "keys, rate limits, fair shares": """
        tenant:keys tenant:requests_per_minute tenant:tokens_per_minute tenant:max_in_flight tenant:weight
        setting:fair_share test:doors/test_contract.py::door_given_a_request_answers_right
        test:doors/test_limits.py::tenant_beyond_its_limit_is_refused_until_there_is_room
        test:fleet/test_fair_share.py::weights_divide_the_tokens_of_those_who_all_want_more
        test:serving/test_vllm_middleware.py::limits_of_a_tenant
        test:vllm/test_link.py::a_flood_leaves_another_tenant_its_share""",
    "metrics and a dashboard of our server": """
        metric:rubato_requests_offered_total metric:rubato_slo_met_total page:grafana.json
        test:serving/test_metrics.py::counts
        test:serving/test_dashboard.py::every_metric_and_label_of_the_dashboard_is_exported""",
    "a live page of our server": """
        src:serving/board.py
        test:serving/test_board.py::all_that_was_offered_is_counted_and_each_request_has_its_place
        test:serving/board/test_browser.py::narrow_and_wide_light_and_dark""",
    "metrics of the plug-in": """
        plugin:stat_logger_plugins metric:rubato_plan_seconds metric:rubato_plan_deviations_total
        metric:rubato_given_up test:vllm/test_link.py::reports_are_the_events_of_the_engine""",
    "alert rules": """
        alert:RubatoDown alert:RubatoBurnFast alert:RubatoBurnSustained alert:RubatoBurnSlow alert:RubatoPlugInGaveUp
        test:serving/test_alerts.py::every_alert_has_a_unit_test_that_fires_and_one_that_does_not""",
    "probes, drain": """
        setting:drain_seconds test:serving/test_dashboard.py::a_draining_server_is_alive_but_not_ready
        test:processes/test_serving.py::sigterm_under_load_finishes_what_runs_and_refuses_the_rest""",
    "tracing of a request": """
        setting:otlp_traces_endpoint src:serving/tracing.py
        test:serving/test_tracing.py::request_is_one_span_with_its_times_verdict_and_parent
        test:serving/test_tracing.py::gateway_passes_on_its_span_as_the_parent_of_the_servers
        setting:event_log src:frontdoor/history.py
        test:serving/test_request_history.py::a_finished_request test:core/test_event_log.py::round_trip""",
    "logs without prompts": """
        setting:log test:serving/test_request_history.py::one_json_line_a_finished_request
        test:serving/test_request_history.py::no_text_of_a_client_is_kept
        test:core/test_event_log.py::prompts_and_outputs_stay_out_unless_asked_for""",
    "TLS": "setting:tls test:processes/test_tls.py::the_official_client_over_tls",
    "limits against hostile clients": """
        setting:max_connections setting:max_body_bytes setting:stall_seconds
        test:processes/test_abuse.py::clients_that_do_not_read_are_cut_off_and_hold_up_nobody
        test:vllm/test_hostile_requests.py::everybody_ends_once_and_no_step_is_vllms""",
    "Kubernetes manifests, container image": """
        page:deploy.md test:docs/test_deploy.py::manifests_are_valid_by_kubernetes_schemas
        test:docs/test_deploy.py::container_files_are_clean_by_hadolint
        test:docs/test_deploy.py::servers_are_the_pods_of_the_stateful_set""",
    "canary, upgrade, rollback of the plug-in": """
        page:vllm.md test:vllm/test_outputs.py::equal_batches_give_equal_tokens
        test:vllm/test_environment.py::every_package_of_vllm_is_there_as_before
        test:vllm/test_settings.py::any_other_version_is_an_error_that_says_which""",
    "falling back to vLLM's order": """
        metric:rubato_plan_fallbacks_total test:vllm/test_plans.py::a_policy_that_raises_costs_nobody_a_token
        test:vllm/test_plans.py::ten_faults_in_a_minute_are_the_last""",
    "asynchronous scheduling in vLLM": """
        test:vllm/test_plans.py::vllms_configuration_chooses_the_scheduler
        test:vllm/test_plans.py::while_a_batch_runs_the_next_token_is_due_after_those_in_flight""",
    "more than one vLLM version": "test:vllm/test_settings.py::versions_that_it_is_written_for",
    "speculative decoding, LoRA, pipeline or data parallelism in vLLM": """
        plugin-setting:uniform_drafts test:vllm/test_outputs.py::drafts_change_no_token
        test:vllm/test_features.py::lora test:vllm/test_features.py::data_parallel
        test:vllm/test_features.py::pipeline_parallel_and_asynchronous""",
    "prefix caching in vLLM": "test:vllm/test_plans.py::a_hit_that_was_planned_on_is_not_given_to_others_first",
    "speculative decoding in our engine": """
        policy:adaserve test:engines/torch/test_lossless.py::greedy_output_is_that_of_each_alone
        test:engines/torch/test_served_drafts.py::answers_are_the_same_with_a_drafter""",
    "a gateway of ours in front of vLLM servers that run": """
        src:fleet/server_replica.py plugin-setting:link
        test:fleet/test_server_fleet.py::servers_with_the_link_are_routed_to_as_replicas_here_are
        test:vllm/test_gateway_link.py::what_gateways_fold_is_what_the_scheduler_shows_after_every_step""",
    "a fleet of vLLM servers that is started, kept and scaled": """
        src:fleet/ray_servers.py
        test:fleet/test_ray_servers.py::what_killed_servers_served_goes_on_elsewhere
        test:fleet/test_ray_servers.py::an_autoscaler_adds_and_drains_servers
        test:fleet/test_ray_servers.py::a_node_is_killed_and_requests_finish_on_the_other""",
    "a lost replica comes back": """
        test:fleet/test_ray_servers.py::a_fleet_keeps_its_number_and_waits_longer_after_each_loss
        test:fleet/test_ray_servers.py::what_killed_servers_served_goes_on_elsewhere""",
    "batches over night": """
        test:serving/test_request_slo.py::openai_tiers_are_always_known_and_others_are_not
        test:policies/test_tables.py::edf_gives_best_effort_what_is_left""",
    "planning cost and size": """
        command:plan command:capacity command:profile profile:a100 profile:h200 profile:v100 profile:cpu
        test:planning/test_fleet_size.py::n_is_enough_and_one_fewer_is_not
        test:planning/test_fleet_size.py::what_it_costs""",
    "autoscaling": """
        setting:autoscale src:fleet/autoscalers.py
        test:fleet/test_autoscaling.py::replicas_follow_a_load_that_rises_and_falls
        test:engines/torch/test_served_replicas.py::a_replica_joins_while_requests_miss""",
}  # fmt: skip


def names() -> dict[str, set[str]]:
    """Of each kind that is a closed list, what there is."""
    metrics = {s.name for m in PluginMetrics(CollectorRegistry(), counts=True).registry.collect() for s in m.samples}
    families = PluginMetrics(CollectorRegistry(), counts=True).registry.collect()
    metrics |= {f"{m.name}_total" if m.type == "counter" else m.name for m in families}
    alerts = yaml.load((ROOT / "docs" / "alerts.yml").read_text(encoding="utf-8"), yaml.CSafeLoader)["groups"]
    entries = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["entry-points"]
    verbs = subcommands()
    return {
        "setting": set(Config.model_fields),
        "tenant": set(TenantSettings.model_fields),
        "plugin-setting": set(Settings.__dataclass_fields__),
        "plugin": {name.removeprefix("vllm.") for name, here in entries.items() if "rubato" in here},
        "metric": metrics,
        "alert": {rule["alert"] for group in alerts for rule in group["rules"] if "alert" in rule},
        "command": set(verbs),
        "option": {f"{verb}:{word}" for verb, sub in verbs.items() for word in sub._option_string_actions},
        "policy": set(policies.names()),
        "profile": {re.sub(r"^\d+x", "", word) for name in profiles.names() for word in name.split("-")},
    }


@cache
def functions_of(file: str) -> dict[str, ast.FunctionDef | ast.AsyncFunctionDef]:
    path = ROOT / "tests" / file
    tree = ast.parse(path.read_text(encoding="utf-8")) if path.is_file() else ast.Module([], [])
    return {one.name: one for one in tree.body if isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef)}


def there(item: str, known: dict[str, set[str]]) -> bool:
    """test: FILE::NAME, a test that does something and is not always skipped. src, page: a file."""
    kind, _, name = item.partition(":")
    if kind == "test":
        file, _, function = name.partition("::")
        found = functions_of(file).get(f"test_{function}")
        if found is None:
            return False
        off = {getattr(part, "attr", "") for mark in found.decorator_list for part in ast.walk(mark)} & {
            "skip",
            "xfail",
        }
        return not off and any(isinstance(part, ast.Assert | ast.Call) for part in ast.walk(found))
    if kind in ("src", "page"):
        return ((ROOT / "src" / "rubato" if kind == "src" else ROOT / "docs") / name).is_file()
    return name in known[kind]


# ------------------------------------------------------------------- what there is not


def sources(*folders: str) -> Iterator[tuple[str, str]]:
    for folder in folders or ("src", "packages"):
        for file in (ROOT / folder).rglob("*.py"):
            yield file.relative_to(ROOT).as_posix(), file.read_text(encoding="utf-8")


def imported(pattern: str, *folders: str) -> list[str]:
    """Files that import such a module."""
    found = re.compile(rf"^\s*(?:from|import) (?:{pattern})\b", re.MULTILINE)
    return [name for name, text in sources(*folders) if found.search(text)]


def said(pattern: str, *folders: str) -> list[str]:
    """Files that say so."""
    return [name for name, text in sources(*folders) if re.search(pattern, text)]


def fields(pattern: str) -> list[str]:
    """Settings of a server and of the plug-in that are named so."""
    return [name for name in (*Config.model_fields, *Settings.__dataclass_fields__) if re.search(pattern, name)]


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


def beyond_our_models() -> list[str]:
    """Architectures of our engine that are mixtures of experts, and modules for tensor parallelism."""
    family = r'"\w*(?:Moe|Mixtral|Deepseek)\w*ForCausalLM"'
    return said(family, "packages") + imported(r"torch\.distributed", "src/rubato/engines", "packages")


# Of each need, what would be there if it were met: of those that are absent, and of some that are partial.
LACKS: dict[str, Callable[[], list[str]]] = {
    "a GPU run": runs_on_gpus,
    "high availability": lambda: fields("standby|peer|leader|failover|state_file|redis"),
    "a lost replica comes back": lambda: fields("restart|respawn|revive") + said(r"\b(?:restart|respawn)_replica\b"),
    "Kubernetes manifests, container image": builds_and_clusters,
    "tensor parallelism, CUDA graphs, FP8, MLA in vLLM": lambda: said(
        r"tensor_parallel_size=|fp8|cudagraph(?!_mode ==)|enforce_eager=False", "tests/vllm"
    ),
    "tools, JSON mode": lambda: [name for name in ("tools", "response_format") if name not in UNSUPPORTED],
    "quantised weights, tensor parallelism, mixture of experts in our engine": beyond_our_models,
    "batches over night": lambda: said(r"""["']/v1/batches"""),
    "autoscaling": lambda: (
        [name for name in Settings.__dataclass_fields__ if "scal" in name] + said(r"[aA]utoscal", "src/rubato/engines")
    ),
}


def test_every_row_has_a_state() -> None:
    lines = re.findall(r"^\| (?!need|-)", PAGES["production.md"], re.MULTILINE)
    assert len(ROWS) == len(lines) == len(STATES) > 30
    assert set(STATES.values()) == {"present", "partial", "absent"}


@pytest.mark.parametrize(("need", "where"), [(need, where) for need, state, where in ROWS if state == "present"])
def test_what_is_present_is_a_section(need: str, where: str) -> None:
    assert re.search(r"\]\([a-z-]+\.md#[a-z-]+\)", where), need


def test_every_row_is_held_against_something() -> None:
    there_is = {need for need, state in STATES.items() if state != "absent"}
    assert not set(EVIDENCE) ^ there_is, "in EVIDENCE or said to be there, and not both"
    assert {need for need, state in STATES.items() if state == "absent"} <= set(LACKS)
    assert not [need for need in LACKS if STATES.get(need, "present") == "present"]


def test_what_is_said_to_be_there_is_there() -> None:
    known = names()
    gone = [f"{need}: {item}" for need, items in EVIDENCE.items() for item in items.split() if not there(item, known)]
    assert not gone, "\n".join(gone)


@pytest.mark.parametrize("need", LACKS)
def test_what_is_said_to_be_absent_is_absent(need: str) -> None:
    found = LACKS[need]()
    assert not found, f"{need}: {found}"


SERVING = ("deploy", "gateway", "http-api", "operate", "security", "server", "slos", "troubleshooting", "vllm")


@pytest.mark.parametrize("page", [f"{name}.md" for name in SERVING])
def test_metrics_rules_and_alerts_that_pages_name_exist(page: str) -> None:
    rules = (ROOT / "docs" / "alerts.yml").read_text(encoding="utf-8")
    metrics = set(re.findall(r"^\| `(rubato_\w+)`", PAGES["metrics.md"], re.MULTILINE))
    metrics |= {name + suffix for name in metrics for suffix in ("_bucket", "_sum", "_count")}
    named = set(re.findall(r"(?<![\w:./])rubato_(?!torch|epp)\w+", PAGES[page]))
    assert named <= metrics
    assert set(re.findall(r"tier:rubato[\w:]+", PAGES[page])) <= set(re.findall(r"record: (\S+)", rules))
    assert set(re.findall(r"\bRubato[A-Z]\w+", PAGES[page])) <= set(re.findall(r"alert: (\w+)", rules))
