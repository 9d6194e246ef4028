"""`rubato serve`: starts engine, cluster and HTTP server from one configuration, and shuts them down.

After SIGTERM or SIGINT new requests are refused and running ones go on for up to `drain_seconds`; then the exit status
is 0. A second signal ends the drain. If an engine cannot recover, every request ends with an error and the status is 1.
An impossible configuration exits with 2. If something hangs, the process exits with 1 within 10 s of the drain's end
(`shutdown`).
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import gc
import ipaddress
import logging
import socket
import ssl
import sys
from collections.abc import Callable, Coroutine, Iterator
from itertools import count
from typing import TYPE_CHECKING, Any, cast

import uvicorn
from fastapi import FastAPI

from rubato.config.build import autoscaler_of, believed_latency_of, check_names, engine_of, lengths_of, most_in_flight
from rubato.config.schema import Config, ConfigError
from rubato.core.clock import Clock, WallClock, watch_timers
from rubato.core.did_you_mean import nearest
from rubato.core.event_log import EventLogWriter
from rubato.core.events import Stepped
from rubato.core.extras import MissingExtra, extra
from rubato.core.interfaces import Engine, LatencyModel
from rubato.core.server_url import host_in_url
from rubato.fleet.build import local_cluster
from rubato.fleet.cluster import Cluster
from rubato.fleet.cluster_options import ClusterOptions
from rubato.fleet.event_bus import Listener
from rubato.frontdoor.tenants import Tenants, tenants_of, tiers_of
from rubato.serving import logs
from rubato.serving.app import Service, create_app
from rubato.serving.connections import Connections, ListeningSocket, connection_limit, limit_accept_error_logs
from rubato.serving.server_fleets import (
    AppMaker,
    app_settings,
    cluster_options,
    gateway_of,
    servers_on_ray,
    started_ray,
)
from rubato.serving.shutdown import CLOSE_TIMEOUT_S, LOG_DRAIN_S, Shutdown
from rubato.serving.stalled_clients import SEND_BUFFER_BYTES, stall_guard

if TYPE_CHECKING:
    from rubato.serving.tracing import RequestTracer

FLUSH_TIMEOUT_S = 5.0  # for the last bytes to reach the clients
LOOP_CHECK_S = 0.1  # between two checks of how late the event loop runs its timers
THREAD_TIMEOUT_S = 2.0  # for threads and the interpreter to end after the last request

log = logging.getLogger(__name__)


def serve(config: Config, on_serving: Callable[[str], None] = lambda url: None) -> int:
    """Serves until a signal. Calls `on_serving` with the URL once clients may connect. Returns the exit status."""
    return run_logged(config, functools.partial(_serve, on_serving=on_serving))


def run_logged(config: Config, main: Callable[[Config, Clock, logs.LogWriter], Coroutine[Any, Any, int]]) -> int:
    """Runs `main` with the configured log, and writes out the log at the end. Returns the result of `main`."""
    writer = logs.set_up(config.log.format, config.log.level)
    try:
        return asyncio.run(main(config, WallClock(), writer))
    finally:
        writer.drain(LOG_DRAIN_S)


async def _serve(
    config: Config, clock: Clock, writer: logs.LogWriter, *, on_serving: Callable[[str], None]
) -> int:  # fmt: skip
    with contextlib.ExitStack() as at_last, contextlib.ExitStack() as stack:
        try:
            listening = stack.enter_context(_bind(config))
            tls = tls_settings(config)
            tenants = Tenants(tenants_of(config), tiers_of(config))
            cluster, app_of = await _cluster_and_app(config, clock)
            if config.fleet.name == "ray" or config.engine.name == "vllm":
                import ray

                stack.callback(ray.shutdown)  # ends the Ray that was started here, or leaves the one that was joined
            shutdown = Shutdown(config.drain_seconds, writer)  # after Ray, which would hear the signals instead
            at_last.callback(shutdown.end_within, THREAD_TIMEOUT_S)
            listeners = event_logs(config, stack)
            tracer = tracer_of(config, clock, stack)
            own = {"model": config.model, "engine": config.engine.name}
            what = {"servers": len(config.servers)} if config.servers else own
            log_event("starting", policy=config.policy.name, **what)
            if not await start_cluster(cluster, shutdown):
                return 0
        except (ValueError, OSError) as error:  # a setting, a model file, a port: the message says what would do
            print(f"rubato: {error}", file=sys.stderr)
            return 2
        try:
            app = app_of(tenants, lambda: writer.dropped)
            for listener in listeners:
                cluster.listen(listener)
            if tracer is not None:
                tracer.trace_requests(app, cluster)
            gc.collect()
            gc.freeze()  # the model's objects stay: a full collection over them would hold up every stream
            return await _serve_until_signal(config, tls, app, cluster, listening, shutdown, on_serving)
        finally:
            await cluster.close()


async def start_cluster(cluster: Cluster, shutdown: Shutdown) -> bool:
    """Starts the cluster. Returns False if a signal came first. Raises as `Cluster.start`."""
    start = asyncio.ensure_future(cluster.start())
    await wait_first(shutdown.first_signal.wait(), asyncio.shield(start))
    if start.done():
        await start
        return True
    start.cancel()
    await asyncio.gather(start, return_exceptions=True)
    log_event("exit", status=0, offered=0, finished=0)
    return False


def event_logs(config: Config, stack: contextlib.ExitStack) -> list[Listener]:
    """Returns writers of the configured event logs, closed with the stack."""
    listeners: list[Listener] = []
    if config.event_log is not None:
        listeners.append(stack.enter_context(EventLogWriter(config.event_log, content=config.event_log_content)))
    if config.step_log is not None:
        steps = stack.enter_context(EventLogWriter(config.step_log))
        listeners.append(lambda event: steps(event) if isinstance(event, Stepped) else None)
    return listeners


def tracer_of(config: Config, clock: Clock, stack: contextlib.ExitStack) -> RequestTracer | None:
    """Returns the tracer of the requests, closed with the stack; None without a collector. Raises ConfigError."""
    if config.otlp_traces_endpoint is None:
        return None
    try:
        with extra("otel", "otlp_traces_endpoint"):
            from rubato.serving.tracing import exporting_tracer
    except MissingExtra as error:
        raise ConfigError(str(error)) from None
    tracer, close = exporting_tracer(config.otlp_traces_endpoint, clock)
    stack.callback(close)
    return tracer


def _warn_if_open_to_all(config: Config, host: str) -> None:
    """Warns where no key is needed and `host`, the address bound, is not loopback."""
    if not config.tenants and not ipaddress.ip_address(host).is_loopback:
        log.warning(
            "no tenants are configured: any client that reaches %s may use the model and see every "
            "request and /metrics; configure tenants, or set host to 127.0.0.1",
            host,
        )


def log_event(what: str, **fields: object) -> None:
    """Logs an event of the server itself."""
    log.info(what, extra={"fields": fields})


async def _serve_until_signal(
    config: Config, tls: dict[str, Any], app: FastAPI, cluster: Cluster, listening: ListeningSocket, shutdown: Shutdown,
    on_serving: Callable[[str], None],
) -> int:  # fmt: skip
    settings = uvicorn.Config(
        app,
        http=stall_guard(config.stall_seconds, listening.connections),
        loop="asyncio",
        lifespan="off",
        ws="none",
        access_log=False,
        log_config=None,
        log_level="warning",
        server_header=False,
        timeout_graceful_shutdown=int(FLUSH_TIMEOUT_S),
        **tls,
    )
    server = _Server(settings)
    listening.listen(settings.backlog)  # a client that reads the line below may connect at once
    http = asyncio.create_task(server.serve(sockets=[listening]))
    watch = asyncio.create_task(watch_timers(LOOP_CHECK_S, app.state.loop_delay.observe))
    limit_accept_error_logs(asyncio.get_running_loop())
    host, port = listening.getsockname()[:2]
    url = f"{'https' if tls else 'http'}://{host_in_url(host)}:{port}"
    print(f"rubato: serving at {url}\n", end="", flush=True)  # in one piece: Ray prints what its actors do
    log_event("serving", url=url, tiers=sorted(config.tiers), tenants=sorted(config.tenants))
    _warn_if_open_to_all(config, host)
    on_serving(url)
    await wait_first(shutdown.first_signal.wait(), cluster.dead.wait(), asyncio.shield(http))
    app.state.is_draining = True
    is_dead = await drain_and_close(cluster, shutdown, None if http.done() else config.drain_seconds)
    has_failed = is_dead or http.done()
    server.should_exit = True
    await http
    watch.cancel()
    if cluster.error is not None:
        log.error("exit: %s", cluster.error)
    return exit_status(cluster, has_failed)


async def drain_and_close(cluster: Cluster, shutdown: Shutdown, seconds: float | None) -> bool:
    """Lets the requests in flight go on until a second signal, and closes the cluster: those that are left end with an
    error, which their clients still get.

    Args:
        cluster: to close.
        shutdown: has had its first signal, unless the cluster is dead.
        seconds: for the requests at most; None: they end at once.

    Returns:
        Whether the cluster was dead.
    """
    if seconds is not None and not cluster.dead.is_set():
        log.info("draining %d requests, for at most %.0f s", cluster.in_flight, seconds)
        await wait_first(cluster.drain(), shutdown.second_signal.wait(), cluster.dead.wait(), limit=seconds)
    shutdown.end_within(CLOSE_TIMEOUT_S)
    is_dead = cluster.dead.is_set()
    await cluster.close()
    return is_dead


def exit_status(cluster: Cluster, has_failed: bool) -> int:
    """Logs the end of the server. Returns the process's exit status."""
    log_event("exit", status=int(has_failed), offered=cluster.offered, finished=cluster.finished)
    return int(has_failed)


async def wait_first(*waits: Any, limit: float | None = None) -> None:
    """Waits for the first of `waits`, `limit` seconds at most, and cancels the others."""
    tasks = [asyncio.ensure_future(wait) for wait in waits]
    try:
        await asyncio.wait(tasks, timeout=limit, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class _Server(uvicorn.Server):
    """Ignores signals: uvicorn would stop listening, while a drain still answers late requests 429."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def _bind(config: Config) -> ListeningSocket:
    """Binds the socket, before the model is loaded. Raises ConfigError."""
    host, port = config.host, config.port
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # a gateway opens a connection to a server for each request
    descriptors_each = 2 if config.servers or config.engine.name == "vllm" else 1
    listening = ListeningSocket(family, Connections(connection_limit(config.max_connections, descriptors_each)))
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)  # of each connection accepted
    try:
        listening.bind((host, port))
    except OSError as error:
        listening.close()
        why = f"cannot listen on {host_in_url(host)}:{port} ({error.strerror})"
        raise ConfigError(f"{why}: give another --port, such as 0 for any free one, or --host") from error
    return listening


def tls_settings(config: Config) -> dict[str, Any]:
    """Returns the TLS settings under uvicorn's names, checked before the model is loaded. Raises ConfigError."""
    if config.tls is None:
        return {}
    password = config.tls.key_password.get_secret_value() if config.tls.key_password else ""
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(config.tls.cert, config.tls.key, lambda: password)
    except (OSError, ssl.SSLError) as error:
        why = error.reason if isinstance(error, ssl.SSLError) and error.reason else error.strerror or "unreadable"
        raise ConfigError(f"tls: {config.tls.cert} and {config.tls.key} cannot be used ({why})") from None
    return {"ssl_certfile": config.tls.cert, "ssl_keyfile": config.tls.key, "ssl_keyfile_password": password or None}


# --------------------------------------------------------------------------- from a configuration


async def _cluster_and_app(config: Config, clock: Clock) -> tuple[Cluster, AppMaker]:
    """Returns the cluster, and a function that makes the app over it once it has started. Raises as `build`."""
    if config.servers:
        return await gateway_of(config, clock)
    if config.engine.name == "vllm":
        return servers_on_ray(config, clock)
    engines, cluster = build(config, clock)

    def app(tenants: Tenants, dropped: Callable[[], int]) -> FastAPI:
        return create_app(service_of(config, clock, engines[0], cluster, tenants, dropped))

    return cluster, app


def build(config: Config, clock: Clock) -> tuple[list[Engine], Cluster]:
    """Makes the engines and the cluster over them, without starting them. Raises as `engines_of`."""
    engines, options = engines_of(config, clock)
    if config.fleet.name == "ray":
        return engines, _ray_cluster(config, clock, options)
    latencies = [believed_latency_of(config) for _ in engines]
    numbers = count(config.replicas)
    extra = None if options.autoscaler is None else lambda: _engine_and_model(config, next(numbers), clock)
    timeout = config.step_timeout_seconds
    return engines, local_cluster(engines, latencies, clock, options, extra=extra, step_timeout=timeout)


def engines_of(config: Config, clock: Clock) -> tuple[list[Engine], ClusterOptions]:
    """Returns the engines, which load nothing yet, and the options of a cluster over them. With replicas in other
    processes there is one engine, for its tokenizer and limits; it never loads weights.

    Raises ConfigError, PolicyError or ValueError.
    """
    check_names(config)
    lengths = lengths_of(config)
    remote = config.fleet.name == "ray"
    if not remote and (config.fleet.name != "local" or config.fleet.settings):
        asked = f"{config.fleet.name!r} with {dict(config.fleet.settings)}"
        close = nearest(config.fleet.name, ["local", "ray"])
        raise ConfigError(f"fleet: {asked}: choose local, which has no settings, or ray{close}")
    if remote and config.autoscale is not None:
        raise ConfigError("autoscale: adds replicas in this process only; with fleet 'ray' leave it out")
    engines = [engine_of(config, clock, replica) for replica in range(1 if remote else config.replicas)]
    return engines, cluster_options(config, lengths, most_in_flight(config, engines[0].limits), autoscaler_of(config))


def _ray_cluster(config: Config, clock: Clock, options: ClusterOptions) -> Cluster:
    resources = started_ray(config)
    from rubato.fleet.ray_host import ray_cluster

    open_ = config.model_copy(update={"tenants": {}, "tls": None})  # no secrets in other processes
    makers = [functools.partial(_engine_and_model, open_, replica) for replica in range(config.replicas)]
    return ray_cluster(makers, clock, options, resources=resources, step_timeout=config.step_timeout_seconds)


def _engine_and_model(config: Config, replica: int, clock: Clock) -> tuple[Engine, LatencyModel]:
    """Returns the engine and the latency model of one actor, or of one added replica."""
    return engine_of(config, clock, replica), believed_latency_of(config)


def service_of(
    config: Config, clock: Clock, engine: Engine, cluster: Cluster, tenants: Tenants,
    log_lines_dropped: Callable[[], int] = int,
) -> Service:  # fmt: skip
    """Returns the settings of the app over a started cluster."""
    model = cast(Any, engine)  # a served engine also has a name and a tokenizer
    limits = engine.limits
    return Service(
        cluster=cluster,
        text=model.text,
        model=config.served_model_name or model.model_name,
        aliases=(model.model_name,),
        max_model_len=min(limits.max_model_len, limits.kv_blocks * limits.block_size),
        max_choices=min(config.max_choices, most_in_flight(config, limits) or config.max_choices),
        **app_settings(config, clock, tenants, log_lines_dropped),
    )
