"""Every unknown or impossible setting is an error that names it, and what would do."""

from __future__ import annotations

import tomllib
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest

import rubato
from rubato.config.build import drafter_of, fair_share_of, most_in_flight, simulation_limits, token_drafter_of
from rubato.config.schema import Config, ConfigError, load
from rubato.core.clock import VirtualClock
from rubato.core.plan import Limits
from rubato.core.request import SLO
from rubato.engines.simulated import Engine
from rubato.frontdoor.tenants import Quota, Tenant
from rubato.latency.roofline import Model as Roofline
from rubato.policies import PolicyError
from rubato.policy_kit.fair_share import FairShare
from rubato.serving.serve import build, tenants_of

YAML = """
model: some-model
engine: {kind: simulated, max_num_seqs: 4, noise: 0.1}
latency: {kind: roofline, k1: [0.0, 1.0e-3]}
policy: {name: edf, safety_margin: 0.2}
tiers:
  interactive: {ttft_ms: 1000, tpot_ms: 80}
  batch: {e2e_ms: 60000, on_decline: refuse}
default_tier: interactive
replicas: 2
"""


def test_overrides_win_over_a_file(tmp_path: Path) -> None:
    path = tmp_path / "rubato.yaml"
    path.write_text(YAML)
    config = load(
        path, ["policy.safety_margin=0.3", "tiers.batch.e2e_ms=5000", "max_in_flight=null", "router.per_request=9"]
    )
    assert config.policy.settings == {"safety_margin": 0.3}
    assert config.tiers["batch"].slo == SLO(e2e=5.0)
    assert config.tiers["interactive"].slo == SLO(1.0, 0.08)
    bounded = load(path, ["tiers.interactive.max_pause_ms=1000"]).tiers["interactive"]
    assert bounded.slo == SLO(1.0, 0.08, max_pause=1.0)
    assert config.max_in_flight is None
    assert config.router.settings == {"per_request": 9}
    assert load(path).router.name == load({}).router.name
    engines, cluster = build(load(path), VirtualClock())
    assert len(engines) == len(cluster.hosts) == 2
    assert all(isinstance(engine, Engine) for engine in engines)
    assert engines[0].limits.max_num_seqs == 4
    latencies = [host.latency for host in cluster.hosts.values()]  # type: ignore[attr-defined]
    assert all(isinstance(latency, Roofline) and latency.k1 == (0.0, 1e-3) for latency in latencies)
    assert latencies[0] is not latencies[1]


def test_short_form_means_the_long_one() -> None:
    assert load({}) == Config()
    assert load({"policy": "sarathi"}).policy.name == "sarathi"
    assert load({"policy": "sarathi"}, ["policy.chunk=64"]).policy.settings == {"chunk": 64}
    assert load({}, ["policy.name=vllm"]).policy.name == "vllm"
    assert load({}, ["engine.kind=simulated"]).engine.name == "simulated"


@pytest.mark.parametrize(
    ("tree", "says"),
    [
        ({"modle": "x"}, ["modle", "'model'"]),
        ({"port": 99999}, ["port", "65535"]),
        ({"port": "80"}, ["port", "'80'"]),
        ({"replicas": 0}, ["replicas", "got 0"]),
        ({"max_in_flight": 0}, ["max_in_flight"]),
        ({"drain_seconds": -1}, ["drain_seconds"]),
        ({"max_body_bytes": 0}, ["max_body_bytes"]),
        ({"tiers": {"a": {"ttft": 1}}}, ["tiers.a.ttft", "'ttft_ms'"]),
        ({"tiers": {"a": {"ttft_ms": 0}}}, ["tiers.a.ttft_ms", "got 0"]),
        ({"tiers": {"a": {"tpot_ms": 0.0009}}}, ["tiers.a.tpot_ms", "equal to 0.001"]),
        ({"tiers": {"a": {"e2e_ms": 1.7e308}}}, ["tiers.a.e2e_ms", "equal to 1000000000", "got 1.7e+308"]),
        ({"tiers": {"a": {"ttft_ms": 9, "max_pause_ms": 5}}}, ["tiers.a", "give tpot_ms too"]),
        ({"tiers": {"a": {"tpot_ms": 9, "max_pause_ms": 0}}}, ["tiers.a.max_pause_ms", "got 0"]),
        ({"tiers": {"a": {"on_decline": "refused"}}}, ["tiers.a.on_decline", "'refuse'"]),
        ({"tiers": {"a": 5}}, ["tiers.a"]),
        ({"tiers": {"über fast": {}}}, ["tiers", "über fast", "letters"]),
        ({"tiers": {"auto": {}}}, ["tiers", "auto", "default_tier"]),
        ({"tiers": {"gold": {}}, "default_tier": "glod"}, ["default_tier", "'gold'"]),
        ({"slo_rule": "dedline"}, ["slo_rule", "'deadline'"]),
        ({"policy": {"safety_margin": 1}}, ["policy", "name"]),
        ({"policy": 7}, ["policy"]),
        ({"engine": {"kind": 7}}, ["engine", "7"]),
        ({"tenants": {"a": {}}}, ["tenants.a", "keys_env"]),
        ({"tenants": {"a": {"kyes": ["k"]}}}, ["tenants.a.kyes", "'keys'"]),
        ({"tenants": {"a": {"keys": ["k"], "tiers": ["glod"]}}, "tiers": {"gold": {}}}, ["tenants.a.tiers", "'gold'"]),
        ({"tenants": {"a": {"keys": ["k"], "tiers": []}}}, ["tenants.a.tiers"]),
        ({"tenants": {"a": {"keys": ["k"], "weight": 0}}}, ["tenants.a.weight", "got 0"]),
        ({"tenants": {"a": {"keys": ["k"], "requests_per_minute": -1}}}, ["requests_per_minute", "got -1"]),
        ({"tenants": {"a b": {"keys": ["k"]}}}, ["tenants", "'a b'"]),
        ({"tenants": {"a" * 65: {"keys": ["k"]}}}, ["tenants", "64"]),
        ({"fair_share": {}}, ["fair_share", "tenants"]),
        ({"fair_share": {"widnow": 3}, "tenants": {"a": {"keys": ["k"]}}}, ["fair_share.widnow", "'window'"]),
        ({"log": {"format": "xml"}}, ["log.format", "'json'"]),
        ({"log": {"lvl": "info"}}, ["log.lvl", "'level'"]),
        ({"tls": {"cert": "c"}}, ["tls.key", "required"]),
        ({"stall_seconds": 0}, ["stall_seconds", "got 0"]),
        ({"event_log": "t", "step_log": "t"}, ["step_log", "event_log"]),
        ({"otlp_traces_endpoint": "10.0.0.9:4318"}, ["otlp_traces_endpoint", "give http://10.0.0.9:4318"]),
        ({"servers": ["10.0.0.7:8000"]}, ["servers.0.url", "give http://10.0.0.7:8000"]),
        ({"servers": ["http://10.0.0.7:8000/a?b=c"]}, ["servers.0.url", "give the address of a server"]),
        ({"servers": ["http://10.0.0.7/v1", "http://10.0.0.7"]}, ["servers: http://10.0.0.7 is named twice"]),
        ({"servers": ["http://a:b@10.0.0.7"]}, ["servers.0.url", "must not hold a user or a password", "key_env"]),
        ({"servers": [{"url": "http://10.0.0.7", "link": "10.0.0.7"}]}, ["servers.0.link", "tcp://10.0.0.7:5557"]),
        ({"host": "unix:/run/rubato.sock"}, ["host", "Unix domain sockets are not supported"]),
    ],
)
def test_impossible_setting_is_named(tree: dict[str, Any], says: list[str]) -> None:
    with pytest.raises(ConfigError) as error:
        load(tree)
    for word in says:
        assert word in str(error.value)


@pytest.mark.parametrize(
    "tree",
    [
        {"tenants": "hush-hush"},
        {"tenants": {"a": "hush-hush"}},
        {"tenants": {"a": ["hush-hush"]}},
        {"tenants": {"a": {"keys": "hush-hush"}}},
        {"tenants": {"a": {"keys": ["hush-hush "]}}},
        {"tenants": {"a": {"keys": [{"hush-hush": 1}]}}},
        {"tenants": {"a": {"keys": ["hüsh-hush"]}}},
        {"tenants": {"a": {"keys": ["hush-hush"], "tiers": "hush-hush"}}},
        {"tenants": {"a": {"keys": ["hush-hush"], "weight": "hush-hush"}}},
        {"servers": "http://hush-hush@h"},
        {"servers": ["http://u:hush-hush@h"]},
        {"servers": ["u:hush-hush@h:8000"]},
        {"servers": ["http://h:8000?key=hush-hush"]},
        {"servers": {"http://u:hush-hush@h": 1}},
        {"servers": [["http://u:hush-hush@h"]]},
        {"servers": [{"url": "http://u:hush-hush@h", "key_env": ["hush-hush"], "link": "tcp://u:hush-hush@h:1"}]},
        {"servers": [{"url": "http://h", "key_env": ["hush-hush"]}]},
        {"tls": "hush-hush"},
        {"tls": {"cert": "c", "key": "k", "key_password": ["hush-hush"]}},
    ],
)
def test_no_key_is_in_an_error(tree: dict[str, Any]) -> None:
    with pytest.raises(ConfigError) as error:
        load(tree)
    assert "hush" not in str(error.value)
    assert "hüsh" not in str(error.value)
    assert error.value.__cause__ is None


def test_no_key_is_in_what_a_yaml_error_says_nor_kept_in_memory(tmp_path: Path) -> None:
    path = tmp_path / "rubato.yaml"
    path.write_text("tenants:\n  a: {keys: [hush-hush, ]]\n")
    with pytest.raises(ConfigError, match=r"line 2, column 26") as error:
        load(path)
    assert "hush" not in str(error.value)
    with pytest.raises(ConfigError) as error:
        load({}, ["tenants.a.keys=[hush"])
    assert "hush" not in str(error.value)
    with pytest.raises(ConfigError, match="must be a string"):
        load({"tenants": {"a": {"keys": [123456]}}})
    settings = load(
        {"tenants": {"a": {"keys": ["hush-hush"]}}, "tls": {"cert": "c", "key": "k", "key_password": "hush"}}
    )
    assert "hush" not in repr(settings)
    assert settings.tenants["a"].digests() == (sha256(b"hush-hush").digest(),)


def test_the_fair_share_is_there_exactly_with_tenants() -> None:
    assert fair_share_of(load({})) is None
    tenants = {"a": {"keys": ["k1"], "weight": 3}, "b": {"keys": ["k2"]}}
    fair = fair_share_of(load({"tenants": tenants, "fair_share": {"window": 7}}))
    assert fair is not None
    assert (fair.weights, fair.window) == ({"a": 3.0, "b": 1.0}, 7)
    assert fair_share_of(load({"tenants": tenants})) == FairShare({"a": 3.0, "b": 1.0})


def test_settings_that_speak_of_a_tier_that_is_not_there(tmp_path: Path) -> None:
    path, override = tmp_path / "rubato.yaml", "policy={name: slos_serve, tier_values: {interactve: 4}}"
    path.write_text(YAML)
    with pytest.raises(ConfigError, match=r"policy: its settings name 'interactve', .*did you mean 'interactive'"):
        build(load(path, [override]), VirtualClock())
    build(load(path, [override.replace("interactve", "interactive")]), VirtualClock())


def test_tenants_as_the_server_takes_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "keys").write_text("# a comment\n one \n\ntwo\n")
    monkeypatch.setenv("THREE", "three,four five")
    tree = {
        "a": {"key_file": str(tmp_path / "keys"), "tiers": ["flex"], "max_in_flight": 3},
        "b": {"keys_env": "THREE"},
    }
    a, b = tenants_of(load({"tenants": tree}))
    assert a == Tenant("a", tuple(sha256(k).digest() for k in (b"one", b"two")), ("flex",), Quota(max_in_flight=3))
    assert b.digests == tuple(sha256(k).digest() for k in (b"three", b"four", b"five"))
    (tmp_path / "keys").write_text("# nothing\n")
    monkeypatch.setenv("THREE", " ")
    for tenant in ("a", "b"):
        with pytest.raises(ConfigError, match=f"tenants.{tenant}.key"):
            tenants_of(load({"tenants": {tenant: tree[tenant]}}))


SIMULATED = {"engine": {"kind": "simulated"}}


@pytest.mark.parametrize(
    ("tree", "says"),
    [
        ({"engine": {"kind": "simulated", "max_sqs": 4}}, ["max_sqs", "'max_num_seqs'"]),
        ({"engine": {"kind": "simulated", "noise": 2}}, ["noise"]),
        ({"engine": {"kind": "simulated", "block_size": 0}}, ["engine.block_size", "0"]),
        ({"engine": {"kind": "simulated", "max_num_seqs": "many"}}, ["engine.max_num_seqs", "many"]),
        ({**SIMULATED, "latency": {"kind": "affine", "hots": 1}}, ["hots", "'host'"]),
        ({**SIMULATED, "latency": {"kind": "affine", "host": -1}}, ["host", "-1"]),
        ({**SIMULATED, "policy": {"name": "edf", "safty_margin": 1.0}}, ["safty_margin", "'safety_margin'"]),
        ({**SIMULATED, "lengths": {"kind": "running_mean", "lest": 1}}, ["lest", "'least'"]),
    ],
)
def test_what_cannot_be_built_is_named(tree: dict[str, Any], says: list[str]) -> None:
    with pytest.raises((ConfigError, PolicyError)) as error:
        build(load(tree), VirtualClock())
    for word in says:
        assert word in str(error.value)


NOT_FINITE = [
    ("router", "{name: polyserve, tiers: [0.02, .nan]}", r"'polyserve': setting tiers is \[0.02, nan\]"),
    ("policy", "{name: slos_serve, tier_values: {interactive: .inf}}", "'slos_serve': setting tier_values is {'inter"),
    ("router", "{name: sa, temperature: .inf}", "'sa': setting temperature is inf"),
    ("latency", "{kind: affine, k: [.nan, 0.0]}", r"'affine': setting k is \[nan, 0.0\]"),
    ("latency", "{kind: table, seconds: [[.inf, 1.0], [1.0, 1.0]]}", "'table': setting seconds"),
    ("lengths", "{kind: running_mean, least: .nan}", "'running_mean': setting least is nan"),
    ("engine", "{kind: simulated, noise: .nan}", "'simulated': setting noise is nan"),
    ("engine", "{kind: simulated, link: {latency: .nan}}", "engine.link: setting latency is nan"),
    ("engine", "{kind: simulated, link: {bandwidth: .nan}}", "engine.link: setting bandwidth is nan"),
    ("engine", "{kind: simulated, drafter: {alpha: 0.5, spread: .nan}}", "engine.drafter: drafter: setting spread"),
    ("engine", "{kind: simulated, drafter: {alpha: 0.5, certainty: .nan}}", "engine.drafter: drafter: setting cert"),
    ("tiers", "{a: {ttft_ms: .nan}}", "tiers.a.ttft_ms: Input should be a finite number"),
    ("tenants", "{a: {keys: [k], weight: .inf}}", "tenants.a.weight: Input should be a finite number"),
    ("fair_share", "{window: .inf}", "fair_share.window"),
]


@pytest.mark.parametrize(("part", "text", "says"), NOT_FINITE)
@pytest.mark.parametrize("how", ["file", "override"])
def test_what_is_no_finite_number_is_refused(tmp_path: Path, how: str, part: str, text: str, says: str) -> None:
    path = tmp_path / "rubato.yaml"
    path.write_text("engine: {kind: simulated}\ntenants: {t: {keys: [k]}}\ntiers: {interactive: {}}\n")
    overrides = [f"{part}={text}"]
    if how == "file":
        kept = [line for line in path.read_text().splitlines() if not line.startswith(part)]
        path.write_text("\n".join([*kept, f"{part}: {text}"]))
        overrides = []
    with pytest.raises((ConfigError, PolicyError), match=says):
        build(load(path, overrides), VirtualClock())


def test_a_number_may_be_infinite_where_it_is_by_default() -> None:
    build(
        load({}, ["engine={kind: simulated, link: {bandwidth: .inf}, drafter: {certainty: .inf, alpha: 0.5}}"]),
        VirtualClock(),
    )


class Drafter:
    """Lacks what a drafter must have: `engine.drafter: tests.serving.test_config` finds it here."""

    def __init__(self, most: int = 1) -> None:
        self.most = most

    def draft(self) -> None: ...


@pytest.mark.parametrize(
    ("drafter", "says"),
    [
        (7, ["engine.drafter", "7", "name"]),
        ({"store_tokens": 5}, ["store_tokens", "suffix"]),
        ("opt-125m-a100-40g", ["opt-125m-a100-40g", "simulated", "suffix"]),
        ("sufix", ["sufix", "'suffix'"]),
        ("no.such.module", ["drafter module", "no.such.module"]),
        ("rubato.core.clock", ["drafter", "rubato.core.clock", "Drafter"]),
        ({"name": __name__, "mots": 1}, ["mots", "'most'"]),
        ({"name": __name__, "most": 1}, [__name__, "verified, forget"]),
    ],
)
def test_drafters_that_cannot_be_built(drafter: object, says: list[str]) -> None:
    with pytest.raises(ConfigError) as error:
        token_drafter_of(load({"engine": {"kind": "torch", "drafter": drafter}}))
    for word in says:
        assert word in str(error.value)


def test_a_policy_that_drafts_says_which_setting_is_missing() -> None:
    with pytest.raises(ConfigError, match=r"'vllm_spec' needs draft.*engine\.drafter: {alpha: 0\.7}"):
        build(load({**SIMULATED, "policy": "vllm_spec"}), VirtualClock())
    build(load({**SIMULATED, "policy": "vllm_spec"}, ["engine.drafter={alpha: 0.7}"]), VirtualClock())


def test_how_often_a_drafter_of_tokens_is_right_must_be_said_in_a_simulation() -> None:
    real = load({"engine": {"kind": "torch", "drafter": {"name": "suffix", "store_tokens": 9}}})
    for config in (real, load(SIMULATED, ["engine.drafter=my.drafter"])):
        with pytest.raises(ConfigError, match=r"drafts real tokens.*alpha: 0\.5.*engine\.drafter=null"):
            drafter_of(config)
    for free in ("{apps: {code: 0.9}}", "{store_tokens: 9}"):
        with pytest.raises(ConfigError, match=r"profile.* or alpha"):
            drafter_of(load(SIMULATED, [f"engine.drafter={free}"]))
    with pytest.raises(ConfigError, match="drafter has no setting 'alpa'"):
        drafter_of(load(SIMULATED, ["engine.drafter={alpha: 0.5, alpa: 1}"]))
    drafter = drafter_of(load({"engine": "torch"}, ["engine.drafter={alpha: 0.5}"]))
    assert drafter is not None
    assert (drafter.acceptance.alpha, drafter.latency) == (0.5, None)
    assert drafter_of(load({"engine": {"kind": "torch", "drafter": "suffix"}}, ["engine.drafter=null"])) is None


@pytest.mark.parametrize(
    ("text", "says"), [("- a", "top level"), ("5", "top level"), ("a: [", "not YAML"), ("1: 2", "top level")]
)
def test_files_that_are_no_settings(tmp_path: Path, text: str, says: str) -> None:
    path = tmp_path / "bad.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=says):
        load(path)
    with pytest.raises(ConfigError, match="cannot be read"):
        load(tmp_path / "none.yaml")


@pytest.mark.parametrize("override", ["port", "=5", "port=[", "policy.safty"])
def test_override_that_is_none_is_named(override: str) -> None:
    with pytest.raises(ConfigError, match="override"):
        load({}, [override])


def test_an_empty_file_is_all_defaults(tmp_path: Path) -> None:
    path = tmp_path / "empty.yaml"
    path.write_text("# nothing yet\n")
    assert load(path) == Config()


def test_the_version_is_the_changelogs() -> None:
    root = Path(__file__).parents[2]
    newest = (root / "CHANGELOG.md").read_text(encoding="utf-8").split("\n## ")[1].split()[0]
    assert tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["project"]["version"] == newest
    assert rubato.__version__ == newest


@pytest.mark.parametrize(
    ("settings", "most"),
    [
        ({}, 256),
        ({"engine": {"kind": "simulated", "max_num_seqs": 512}, "replicas": 2}, 4 * 2 * 512),
        ({"engine": {"kind": "simulated", "max_num_seqs": 2}}, 256),
        ({"max_in_flight": 3}, 3),
        ({"max_in_flight": None}, None),
    ],
)
def test_requests_in_flight_follow_from_the_batches_of_the_replicas(settings: dict[str, Any], most: int | None) -> None:
    config = load({"engine": "simulated", **settings})
    assert most_in_flight(config, Limits(**simulation_limits(config))) == most
