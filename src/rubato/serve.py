"""`rubato serve`: engine, cluster and HTTP server from one configuration, and how they come to an end.

SIGTERM or SIGINT: new requests are refused, running ones go on for up to `drain_seconds`, exit 0; a second signal cuts
that short. An engine beyond recovery: every request ends with an error, exit 1. An impossible configuration: exit 2.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import gc
import importlib
import inspect
import logging
import pkgutil
import signal
import socket
import ssl
import sys
from collections.abc import Iterator, Mapping
from dataclasses import fields
from typing import Any, cast

import uvicorn
from fastapi import FastAPI

from rubato import profiles
from rubato.clock import Clock, WallClock, unix_time
from rubato.cluster import Cluster, local_cluster
from rubato.config import Config, ConfigError, Named
from rubato.engines.simulated import Drafter, Link
from rubato.fairness import FairShare
from rubato.interfaces import Engine, LatencyModel, LengthPredictor
from rubato.latency.drafted import Drafted
from rubato.lengths import Oracle, RunningMean
from rubato.listeners import Listener
from rubato.policies import nearest
from rubato.server import logs
from rubato.server.app import Service, create_app
from rubato.server.patience import SEND_BUFFER, patient
from rubato.server.slo_input import Tier, Tiers
from rubato.server.tenants import Quota, Tenant, Tenants
from rubato.trace import TraceWriter
from rubato.types import Limits, Stepped

FLUSH_SECONDS = 5.0  # for the last bytes to reach the clients
# What a simulated engine takes unless told otherwise: about a small model on one GPU.
REAL_ONLY = ("dtype", "device", "kv_gib", "threads", "noise", "seed")  # settings that a simulation does without
SIMULATED = {"max_seqs": 64, "max_tokens": 2048, "max_length": 8192, "kv_blocks": 4096, "block": 16}

log = logging.getLogger(__name__)


def serve(config: Config) -> int:
    """Serve until told to stop. Returns the process's exit status."""
    logs.set_up(config.log.format, config.log.level)
    return asyncio.run(_serve(config, WallClock()))


async def _serve(config: Config, clock: Clock) -> int:
    with contextlib.ExitStack() as stack:
        try:
            listening = stack.enter_context(_bind(config.host, config.port))
            _check_tls(config)
            tenants = Tenants(tenants_of(config), tiers_of(config))
            engines, cluster = build(config, clock)
            listeners = _logs(config, stack)
            _say("starting", model=config.model, engine=config.engine.name, policy=config.policy.name)
            await cluster.start()
        except (ValueError, OSError) as error:  # a setting, a model file, a port: the message says what would do
            print(f"rubato: {error}", file=sys.stderr)
            return 2
        try:
            app = create_app(_service(config, clock, engines[0], cluster, tenants))
            for listener in listeners:
                app.state.books.listen(listener)
            gc.collect()
            gc.freeze()  # the model's objects stay: a full collection over them would hold up every stream
            return await _until_told(config, app, cluster, listening)
        finally:
            await cluster.close()


def _logs(config: Config, stack: contextlib.ExitStack) -> list[Listener]:
    """Writers of the event logs asked for, closed with the stack."""
    listeners: list[Listener] = []
    if config.trace is not None:
        listeners.append(stack.enter_context(TraceWriter(config.trace, content=config.trace_content)))
    if config.step_log is not None:
        steps = stack.enter_context(TraceWriter(config.step_log))
        listeners.append(lambda event: steps(event) if isinstance(event, Stepped) else None)
    return listeners


def _say(what: str, **fields: object) -> None:
    """A line about the server itself."""
    log.info(what, extra={"fields": fields})


async def _until_told(config: Config, app: FastAPI, cluster: Cluster, listening: socket.socket) -> int:
    settings = uvicorn.Config(
        app,
        http=patient(config.stall_seconds),
        loop="asyncio",
        lifespan="off",
        ws="none",
        access_log=False,
        log_config=None,
        log_level="warning",
        server_header=False,
        timeout_graceful_shutdown=int(FLUSH_SECONDS),
        **_tls(config),
    )
    server = _Server(settings)
    listening.listen(settings.backlog)  # a client that reads the line below may connect at once
    http = asyncio.create_task(server.serve(sockets=[listening]))
    told = asyncio.Event()
    again = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, lambda: (again if told.is_set() else told).set())
    host, port = listening.getsockname()[:2]
    url = f"{'http' if config.tls is None else 'https'}://{host}:{port}"
    print(f"rubato: serving at {url}", flush=True)
    _say("serving", url=url, tiers=sorted(config.tiers), tenants=sorted(config.tenants))

    await _first(told.wait(), cluster.dead.wait(), asyncio.shield(http))
    app.state.draining = True
    if not cluster.dead.is_set() and not http.done():
        log.info("draining %d requests, for at most %.0f s", cluster.in_flight, config.drain_seconds)
        await _first(cluster.drain(), again.wait(), cluster.dead.wait(), limit=config.drain_seconds)
    failed = cluster.dead.is_set() or http.done()
    await cluster.close()  # whatever is left ends with an error, which its client still gets
    server.should_exit = True
    await http
    if cluster.error is not None:
        log.error("exit: %s", cluster.error)
    _say("exit", status=1 if failed else 0, offered=cluster.offered, finished=cluster.finished)
    return 1 if failed else 0


async def _first(*waits: Any, limit: float | None = None) -> None:
    """Return when the first of these is done, or after `limit` seconds; the others are abandoned."""
    tasks = [asyncio.ensure_future(wait) for wait in waits]
    try:
        await asyncio.wait(tasks, timeout=limit, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class _Server(uvicorn.Server):
    """uvicorn would close its door at the first signal; here a signal means drain, and late callers get their 429."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def _bind(host: str, port: int) -> socket.socket:
    """A bound socket. Raises ConfigError: before the model is loaded, not after."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # With the protocol named asyncio sets TCP_NODELAY; without, the first token comes about 45 ms late at times.
    bound = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER)  # of each connection accepted
    try:
        bound.bind((host, port))
    except OSError as error:
        bound.close()
        raise ConfigError(f"cannot listen on {host}:{port} ({error.strerror}): set host or port") from error
    return bound


def _tls(config: Config) -> dict[str, Any]:
    """Under uvicorn's names."""
    if config.tls is None:
        return {}
    settings = {"ssl_certfile": config.tls.cert, "ssl_keyfile": config.tls.key}
    if config.tls.key_password is not None:
        settings["ssl_keyfile_password"] = config.tls.key_password.get_secret_value()
    return settings


def _check_tls(config: Config) -> None:
    """Raises ConfigError before the model is loaded, and asks no terminal for a password."""
    if config.tls is None:
        return
    password = config.tls.key_password.get_secret_value() if config.tls.key_password else ""
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(config.tls.cert, config.tls.key, lambda: password)
    except (OSError, ssl.SSLError) as error:
        why = error.reason if isinstance(error, ssl.SSLError) and error.reason else error.strerror or "unreadable"
        raise ConfigError(f"tls: {config.tls.cert} and {config.tls.key} cannot be used ({why})") from None


# --------------------------------------------------------------------------- from a configuration


def build(config: Config, clock: Clock) -> tuple[list[Engine], Cluster]:
    """The engines, and the cluster over them; nothing is started. Raises ConfigError, PolicyError or ValueError.

    With replicas elsewhere the one engine here is for its tokenizer and limits only: it never loads weights.
    """
    given: dict[str, Any] = {
        "policy": config.policy.name,
        "settings": config.policy.settings,
        "router": config.router.name,
        "router_settings": config.router.settings,
        "lengths": lengths_of(config),
        "max_in_flight": config.max_in_flight,
        "rule": config.judge,
        "prefix_cache": config.prefix_cache,
        "fair": fair_share_of(config),
    }
    if config.fleet.name == "ray":
        return [_engine(config, clock, 0)], _ray_cluster(config, clock, given)
    if config.fleet.name != "local" or config.fleet.settings:
        asked = f"{config.fleet.name!r} with {dict(config.fleet.settings)}"
        close = nearest(config.fleet.name, ["local", "ray"])
        raise ConfigError(f"fleet: {asked}: choose local, which has no settings, or ray{close}")
    engines = [_engine(config, clock, replica) for replica in range(config.replicas)]
    return engines, local_cluster(engines, [believed_of(config) for _ in engines], clock, **given)


def _ray_cluster(config: Config, clock: Clock, given: Mapping[str, Any]) -> Cluster:
    """`fleet: {kind: ray, address: auto, num_gpus: 1}`: the address of a Ray cluster that runs (default: one is started
    here), and Ray's options for each actor."""
    try:
        import ray

        from rubato.fleet.ray import ray_cluster
    except ImportError as error:
        raise ConfigError(f"fleet: ray is not installed ({error}): pip install 'rubato-llm[ray]'") from None
    resources = dict(config.fleet.settings)
    known = ["address", "num_cpus", "num_gpus", "resources", "runtime_env"]
    for name in resources:
        if name not in known:
            raise ConfigError(f"fleet 'ray' has no setting {name!r}{nearest(name, known)}")
    address = resources.pop("address", None)
    if not ray.is_initialized():
        ray.init(address=address, include_dashboard=None if address else False, configure_logging=False)
    open_ = config.model_copy(update={"tenants": {}, "tls": None})  # no secrets in other processes
    makers = [functools.partial(_made, open_, replica) for replica in range(config.replicas)]
    return ray_cluster(makers, clock, resources=resources, **given)


def _made(config: Config, replica: int, clock: Clock) -> tuple[Engine, LatencyModel]:
    """What one actor runs."""
    return _engine(config, clock, replica), believed_of(config)


def fair_share_of(config: Config) -> FairShare | None:
    """Between the tenants, if there are any."""
    if not config.tenants:
        return None
    weights = {name: tenant.weight for name, tenant in config.tenants.items()}
    return FairShare(weights, config.fair_share.window if config.fair_share else None)


def tiers_of(config: Config) -> Tiers:
    return Tiers([Tier(name, tier.slo, tier.on_decline) for name, tier in config.tiers.items()], config.default_tier)


def tenants_of(config: Config) -> list[Tenant]:
    """The tenants with their keys' digests. Raises ConfigError for a file or a variable that holds none."""
    found = []
    for name, tenant in config.tenants.items():
        try:
            digests = tenant.digests()
        except ConfigError as error:
            raise ConfigError(f"tenants.{name}.{error}") from None
        quota = Quota(tenant.requests_per_minute, tenant.tokens_per_minute, tenant.max_in_flight)
        found.append(Tenant(name, digests, tenant.tiers, quota, tenant.admin))
    return found


def _service(config: Config, clock: Clock, engine: Engine, cluster: Cluster, tenants: Tenants) -> Service:
    """What the HTTP edge needs to know of a started cluster."""
    model = cast(Any, engine)  # a served engine also has a name and a tokenizer
    limits = engine.limits
    return Service(
        cluster=cluster,
        text=model.text,
        model=config.served_name or model.model_name,
        aliases=(model.model_name,),
        most_tokens=min(limits.max_length, limits.kv_blocks * limits.block),
        most_choices=min(16, config.max_in_flight or 16),
        tiers=tiers_of(config),
        tenants=tenants,
        rule=config.judge,
        fair=bool(config.tenants),
        max_body_bytes=config.max_body_bytes,
        created_offset=unix_time() - clock.now(),
    )


def _engine(config: Config, clock: Clock, replica: int) -> Engine:
    """`engine.kind` is a module of `rubato.engines`, or anyone's, with a class `Engine`.

    Its constructor gets what it has parameters for: `model`, `clock`, `latency`, `limits` and `seed`, and the settings.
    """
    cls = _class("engine", "rubato.engines", config.engine.name, "Engine")
    settings = dict(config.engine.settings)
    takes = inspect.signature(cls).parameters
    if "limits" in takes:
        settings = {name: value for name, value in settings.items() if name not in SIMULATED}
        settings["limits"] = Limits(**simulation_limits(config))
    given: dict[str, Any] = {"clock": clock}
    if config.model is not None:
        given["model"] = config.model
    elif "model" in takes and takes["model"].default is inspect.Parameter.empty:
        raise ConfigError(f"model: engine {config.engine.name!r} needs one; set model to its path or name")
    if "latency" in takes:
        given["latency"] = latency_of(config)
    settings = {**{name: value for name, value in given.items() if name in takes}, **settings}
    if "seed" in takes:
        settings["seed"] = settings.get("seed", 0) + replica
    if "drafter" in takes:
        settings["drafter"] = drafter_of(config)
    if "link" in takes:
        settings["link"] = link_of(config)
    extra = list(SIMULATED) if "limits" in takes else []
    hidden = {"clock", "latency", "limits", "lengths"}
    known = [name for name in takes if name not in hidden] + extra
    return cast(Engine, _construct(f"engine {config.engine.name!r}", cls, settings, known))


def simulation_limits(config: Config) -> dict[str, int]:
    """The fields of `Limits` for a simulated engine: `SIMULATED`, changed by its settings. Raises ConfigError."""
    known = [*SIMULATED, *REAL_ONLY, "drafter", "link"]
    for name in config.engine.settings:
        if name not in known and config.engine.name in ("torch", "simulated"):
            raise ConfigError(f"engine {config.engine.name!r} has no setting {name!r}{nearest(name, known)}")
    limits = {name: config.engine.settings.get(name, usual) for name, usual in SIMULATED.items()}
    for name, value in limits.items():
        if type(value) is not int or value < 1:
            raise ConfigError(f"engine.{name} is {value!r}: give a whole number, 1 or more")
    return limits


def drafter_of(config: Config) -> Drafter | None:
    """`engine.drafter`, what drafts for a simulated engine: the name of a profile, or that with the settings of
    `Acceptance` beside it. Raises ConfigError."""
    asked = config.engine.settings.get("drafter")
    if asked is None:
        return None
    settings = dict(asked) if isinstance(asked, Mapping) else {"name": asked}
    name = settings.pop("name", None)
    if not isinstance(name, str):
        raise ConfigError(f"engine.drafter is {asked!r}: give the name of a profile, such as opt-125m-a100-40g")
    try:
        return profiles.drafter(name, **settings)
    except ValueError as error:
        raise ConfigError(f"engine.drafter: {error}") from error


def link_of(config: Config) -> Link:
    """`engine.link`, what moving KV to a simulated engine costs. Raises ConfigError."""
    asked = config.engine.settings.get("link", {})
    known = [f.name for f in fields(Link)]
    if not isinstance(asked, Mapping):
        raise ConfigError(f"engine.link is {asked!r}: give {', '.join(known)}")
    return cast(Link, _construct("engine.link", Link, asked, known))


def believed_of(config: Config) -> LatencyModel:
    """What a scheduler believes of its engine's step times."""
    model, drafter = latency_of(config), drafter_of(config)
    return model if drafter is None or drafter.latency is None else Drafted(model, drafter.latency)


def latency_of(config: Config) -> LatencyModel:
    """`latency.kind` is a module of `rubato.latency`, or anyone's, with a class `Model`; by default `affine`, which
    begins with a guess and learns from each step."""
    named = config.latency or Named(name="affine")
    cls = _class("latency", "rubato.latency", named.name, "Model")
    model = _construct(f"latency {named.name!r}", cls, named.settings, list(inspect.signature(cls).parameters))
    return cast(LatencyModel, model)


def lengths_of(config: Config, truth: Mapping[str, int] | None = None) -> LengthPredictor | None:
    """`lengths.kind`: running_mean, or a dotted module with a class `Lengths`; default: nothing is known.

    In simulation, where `truth` (request id -> output tokens) is given, also oracle.
    """
    if config.lengths is None:
        return None
    name, settings = config.lengths.name, dict(config.lengths.settings)
    if name == "oracle":
        if truth is None:
            raise ConfigError("lengths: the oracle knows simulated requests only; serve with running_mean")
        return cast(LengthPredictor, _construct("lengths 'oracle'", Oracle, {"truth": truth, **settings}, ["noise"]))
    cls: Any = RunningMean if name == "running_mean" else _class("lengths", "", name, "Lengths")
    known = [name for name in inspect.signature(cls).parameters if not name.startswith("_")]
    return cast(LengthPredictor, _construct(f"lengths {name!r}", cls, settings, known))


def _class(what: str, package: str, kind: str, name: str) -> Any:
    """The class `name` of module `kind`. Raises ConfigError for a module that is not there or has no such class."""
    known = ["oracle", "running_mean"]
    if package:
        path = importlib.import_module(package).__path__
        known = [module.name for module in pkgutil.iter_modules(path)]
    if kind not in known and "." not in kind:
        raise ConfigError(f"{what}: unknown kind {kind!r}{nearest(kind, known)}")
    dotted = kind if "." in kind else f"{package}.{kind}"
    try:
        module = importlib.import_module(dotted)
    except ImportError as error:
        raise ConfigError(f"{what}: {dotted} cannot be imported ({error})") from error
    if not hasattr(module, name):
        raise ConfigError(f"{what}: {dotted} has no class {name}")
    return getattr(module, name)


def _construct(what: str, cls: Any, settings: Mapping[str, Any], known: list[str]) -> object:
    for key in settings:
        if key not in inspect.signature(cls).parameters:
            raise ConfigError(f"{what} has no setting {key!r}{nearest(key, known)}")
    try:
        return cls(**settings)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{what}: {error}") from error
