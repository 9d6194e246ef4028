"""Jobs on a Ray cluster, where one machine is not enough: each is a task of one core.

The nodes need this release of Rubato, and the working folder at the same path: jobs name policies and traces by files.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from typing import Any

import rubato
from rubato.core.extras import extra

with extra("ray", "--ray"):
    import ray
    from ray.exceptions import RayTaskError

CONNECT_S = 10.0


@contextlib.contextmanager
def ray_pool(address: str, run: Callable[[Any], Any]) -> Iterator[Callable[[Sequence[Any]], list[Future[Any]]]]:
    """What starts `run` of each job on the cluster at this address: HOST:PORT, or `auto` for the one that this machine
    is part of. Jobs that still run when the block is left are ended. Raises ValueError where there is no cluster."""
    before = signal.getsignal(signal.SIGTERM)
    host, _, port = address.rpartition(":")
    try:
        if port.isdigit() and "/" not in address:  # Ray would try for minutes
            socket.create_connection((host, int(port)), CONNECT_S).close()
        ray.init(address=address, log_to_driver=False, logging_level=logging.WARNING)
    except (OSError, RuntimeError, ValueError) as error:
        raise ValueError(f"--ray {address}: no Ray cluster answers there ({error})") from error
    finally:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, before)  # Ray puts its own in its place
    try:
        task = ray.remote(num_cpus=1)(_run_on_node)
        yield lambda jobs: [_plain(task.remote(rubato.__version__, os.getcwd(), run, job).future()) for job in jobs]
    finally:
        ray.shutdown()


def _run_on_node(version: str, folder: str, run: Callable[[Any], Any], job: Any) -> Any:
    if rubato.__version__ != version:
        raise RuntimeError(f"a Ray node has Rubato {rubato.__version__}, this machine {version}: install the same")
    os.chdir(folder)
    return run(job)


def _plain(theirs: Future[Any]) -> Future[Any]:
    """A future that raises what the job raised: Ray's raises that with a traceback for its message."""
    ours: Future[Any] = Future()

    def pass_on(done: Future[Any]) -> None:
        error = done.exception()
        if error is None:
            ours.set_result(done.result())
        else:
            ours.set_exception(error.cause if isinstance(error, RayTaskError) else error)

    theirs.add_done_callback(pass_on)
    return ours
