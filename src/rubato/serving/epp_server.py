"""`rubato epp`: runs the endpoint picker as a gRPC server with the health service of its protocol.

Exit statuses and signals are those of `rubato serve`. On SIGTERM it reports that it is not ready, refuses new requests,
and serves those in flight for up to `drain_seconds`.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
from envoy_data_plane.envoy.service.ext_proc.v3 import ProcessingRequest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from rubato.config.schema import Config, ConfigError
from rubato.core.clock import Clock
from rubato.core.server_url import host_in_url
from rubato.serving import logs
from rubato.serving.epp import Picker, picker_of
from rubato.serving.epp_messages import SERVICE, ProtocolError
from rubato.serving.serve import (
    FLUSH_TIMEOUT_S,
    THREAD_TIMEOUT_S,
    drain_and_close,
    event_logs,
    exit_status,
    log_event,
    run_logged,
    start_cluster,
    wait_first,
)
from rubato.serving.shutdown import Shutdown

LIVENESS, READINESS = "liveness", "readiness"
MAX_STREAMS = 4096  # requests at once; more are refused, RESOURCE_EXHAUSTED


class Health(health_pb2_grpc.HealthServicer):  # type: ignore[misc]  # no stubs
    """Serves gRPC's health checking protocol: `liveness` serves while the process answers; `readiness`, the picker's
    service and the nameless one serve while it can place a request."""

    def __init__(self, picker: Picker) -> None:
        self._picker = picker

    async def Check(self, request: Any, context: Any) -> Any:
        """Answers a health check; NOT_FOUND for an unknown service."""
        answer = health_pb2.HealthCheckResponse
        if request.service not in ("", LIVENESS, READINESS, SERVICE):
            await context.abort(grpc.StatusCode.NOT_FOUND, f"there is no service {request.service!r} here")
        serves = request.service == LIVENESS or self._picker.is_ready
        return answer(status=answer.SERVING if serves else answer.NOT_SERVING)


def server_of(picker: Picker) -> Any:
    """Returns a `grpc.aio.Server` with both services and no port yet, made on the running event loop."""

    async def process(messages: AsyncIterator[ProcessingRequest | None], context: Any) -> None:
        try:
            await picker.process(_check_messages(messages), context.write)
        except ProtocolError as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))

    # No port sharing: two pickers would each count only their part.
    server = grpc.aio.server(options=[("grpc.so_reuseport", 0)], maximum_concurrent_rpcs=MAX_STREAMS)
    method = grpc.stream_stream_rpc_method_handler(process, _parse_message, bytes)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, {"Process": method}),))
    health_pb2_grpc.add_HealthServicer_to_server(Health(picker), server)
    return server


def _parse_message(raw: bytes) -> ProcessingRequest | None:
    """Returns the message; None for other bytes, of which gRPC would log a traceback."""
    try:
        return ProcessingRequest.parse(raw)
    except Exception:  # the parser may raise anything
        return None


async def _check_messages(messages: AsyncIterator[ProcessingRequest | None]) -> AsyncIterator[ProcessingRequest]:
    async for message in messages:
        if message is None:
            raise ProtocolError("a message cannot be read: this is the service of Envoy's external processing")
        yield message


def bind(server: Any, config: Config) -> int:
    """Binds the configuration's `host` and `port`, with its `tls`. Returns the port. Raises ConfigError."""
    address = f"{host_in_url(config.host)}:{config.port}"
    try:
        if config.tls is None:
            return int(server.add_insecure_port(address))
        if config.tls.key_password is not None:
            raise ConfigError("tls: an endpoint picker takes no key_password: give the key without one")
        pair = Path(config.tls.key).read_bytes(), Path(config.tls.cert).read_bytes()
        return int(server.add_secure_port(address, grpc.ssl_server_credentials([pair])))
    except RuntimeError as error:
        raise ConfigError(f"cannot listen on {address} ({error}): give another --listen") from error


def serve(config: Config) -> int:
    """Picks endpoints until a signal. Returns the process's exit status."""
    return run_logged(config, _serve)


async def _serve(config: Config, clock: Clock, writer: logs.LogWriter) -> int:
    with contextlib.ExitStack() as at_last, contextlib.ExitStack() as stack:
        try:
            picker = await picker_of(config, clock)
            shutdown = Shutdown(config.drain_seconds, writer)
            at_last.callback(shutdown.end_within, THREAD_TIMEOUT_S)
            for listener in event_logs(config, stack):
                picker.cluster.listen(listener)
            log_event("starting", policy=config.policy.name, servers=len(config.servers))
            server = server_of(picker)
            port = bind(server, config)
            if not await start_cluster(picker.cluster, shutdown):
                return 0
        except (ValueError, OSError) as error:  # a setting, a server, a port: the message says what would do
            print(f"rubato: {error}", file=sys.stderr)
            return 2
        try:
            await server.start()
            where = f"{host_in_url(config.host)}:{port}"
            print(f"rubato: picking endpoints at {where}\n", end="", flush=True)
            log_event("serving", address=where, tiers=sorted(config.tiers))
            return await _pick_until_signal(config, picker, server, shutdown)
        finally:
            await picker.cluster.close()


async def _pick_until_signal(config: Config, picker: Picker, server: Any, shutdown: Shutdown) -> int:
    await wait_first(shutdown.first_signal.wait(), picker.cluster.dead.wait())
    picker.is_draining = True
    has_failed = await drain_and_close(picker.cluster, shutdown, config.drain_seconds)
    await server.stop(FLUSH_TIMEOUT_S)
    return exit_status(picker.cluster, has_failed)
