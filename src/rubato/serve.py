"""`rubato serve`: engine, cluster and HTTP server from one configuration, and how they come to an end.

SIGTERM or SIGINT: new requests are refused, running ones go on for up to `drain_seconds`, exit 0; a second signal cuts
that short. An engine beyond recovery: every request ends with an error, exit 1. An impossible configuration: exit 2.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import importlib
import inspect
import logging
import pkgutil
import signal
import socket
import sys
from collections.abc import Iterator, Mapping
from typing import Any, cast

import uvicorn
from fastapi import FastAPI

from rubato.clock import Clock, WallClock, unix_time
from rubato.cluster import Cluster, local_cluster
from rubato.config import Config, ConfigError, Named
from rubato.interfaces import Engine, LatencyModel, LengthPredictor
from rubato.lengths import Oracle, RunningMean
from rubato.policies import nearest
from rubato.server.app import Service, create_app
from rubato.server.slo_input import Tier, Tiers
from rubato.trace import TraceWriter
from rubato.types import Limits

FLUSH_SECONDS = 5.0  # for the last bytes to reach the clients
# What a simulated engine takes unless told otherwise: about a small model on one GPU.
REAL_ONLY = ("dtype", "device", "kv_gib", "threads", "noise", "seed")  # settings that a simulation does without
SIMULATED = {"max_seqs": 64, "max_tokens": 2048, "max_length": 8192, "kv_blocks": 4096, "block": 16}

log = logging.getLogger(__name__)


def serve(config: Config) -> int:
    """Serve until told to stop. Returns the process's exit status."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    return asyncio.run(_serve(config, WallClock()))


async def _serve(config: Config, clock: Clock) -> int:
    with contextlib.ExitStack() as stack:
        try:
            listening = stack.enter_context(_bind(config.host, config.port))
            engines, cluster = build(config, clock)
            if config.trace is not None:
                cluster.listen(stack.enter_context(TraceWriter(config.trace, content=config.trace_content)))
            await cluster.start()
        except (ValueError, OSError) as error:  # a setting, a model file, a port: the message says what would do
            print(f"rubato: {error}", file=sys.stderr)
            return 2
        try:
            app = create_app(_service(config, clock, engines[0], cluster))
            gc.collect()
            gc.freeze()  # the model's objects stay: a full collection over them would hold up every stream
            return await _until_told(config, app, cluster, listening)
        finally:
            await cluster.close()


async def _until_told(config: Config, app: FastAPI, cluster: Cluster, listening: socket.socket) -> int:
    settings = uvicorn.Config(
        app,
        http="httptools",
        loop="asyncio",
        lifespan="off",
        ws="none",
        access_log=False,
        log_config=None,
        log_level="warning",
        server_header=False,
        timeout_graceful_shutdown=int(FLUSH_SECONDS),
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
    print(f"rubato: serving at http://{host}:{port}", flush=True)

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
    try:
        bound.bind((host, port))
    except OSError as error:
        bound.close()
        raise ConfigError(f"cannot listen on {host}:{port} ({error.strerror}): set host or port") from error
    return bound


# --------------------------------------------------------------------------- from a configuration


def build(config: Config, clock: Clock) -> tuple[list[Engine], Cluster]:
    """The engines, and the cluster over them; nothing is started. Raises ConfigError, PolicyError or ValueError."""
    engines = [_engine(config, clock, replica) for replica in range(config.replicas)]
    cluster = local_cluster(
        engines,
        [latency_of(config) for _ in engines],
        clock,
        policy=config.policy.name,
        settings=config.policy.settings,
        router=config.router.name,
        router_settings=config.router.settings,
        lengths=lengths_of(config),
        max_in_flight=config.max_in_flight,
        rule=config.judge,
    )
    return engines, cluster


def _service(config: Config, clock: Clock, engine: Engine, cluster: Cluster) -> Service:
    """What the HTTP edge needs to know of a started cluster."""
    model = cast(Any, engine)  # a served engine also has a name and a tokenizer
    limits = engine.limits
    tiers = [Tier(name, tier.slo, tier.on_decline) for name, tier in config.tiers.items()]
    return Service(
        cluster=cluster,
        text=model.text,
        model=config.served_name or model.model_name,
        aliases=(model.model_name,),
        most_tokens=min(limits.max_length, limits.kv_blocks * limits.block),
        tiers=Tiers(tiers, config.default_tier),
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
    extra = list(SIMULATED) if "limits" in takes else []
    hidden = {"clock", "latency", "limits", "lengths"}
    known = [name for name in takes if name not in hidden] + extra
    return cast(Engine, _construct(f"engine {config.engine.name!r}", cls, settings, known))


def simulation_limits(config: Config) -> dict[str, int]:
    """The fields of `Limits` for a simulated engine: `SIMULATED`, changed by its settings. Raises ConfigError."""
    known = [*SIMULATED, *REAL_ONLY]
    for name in config.engine.settings:
        if name not in known and config.engine.name in ("torch", "simulated"):
            raise ConfigError(f"engine {config.engine.name!r} has no setting {name!r}{nearest(name, known)}")
    limits = {name: config.engine.settings.get(name, usual) for name, usual in SIMULATED.items()}
    for name, value in limits.items():
        if type(value) is not int or value < 1:
            raise ConfigError(f"engine.{name} is {value!r}: give a whole number, 1 or more")
    return limits


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
