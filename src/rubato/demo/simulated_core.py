"""The engine core of a simulated server: a replica with a policy and a simulated engine, which reports its steps.

It reports to gateways as the plug-in inside vLLM does, in the messages of `wire.messages`. `simulated_server` carries
the messages; tests carry them within one process.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rubato import __version__ as rubato_version
from rubato.core.clock import Clock
from rubato.core.events import Event, Finished, HandedOff, Offered, Stepped
from rubato.core.interfaces import LatencyModel
from rubato.core.plan import Limits
from rubato.core.replica_options import DEFAULT_OPTIONS, ReplicaOptions
from rubato.core.request import Request, without_texts
from rubato.engines.simulated import Engine
from rubato.engines.simulated.step_noise import Noise
from rubato.fleet.local_host import LocalHost
from rubato.latency import affine
from rubato.policies import load
from rubato.replica.replica import Replica
from rubato.wire.messages import (
    Assign,
    Command,
    Contract,
    CoreAbout,
    Demote,
    Expect,
    HandOffRow,
    PresentRow,
    Recall,
    Report,
    Row,
    Snapshot,
    State,
    event_row,
    offered_row,
)

PROFILE = "llama-3.1-70b-4xa100"  # default profile of step times
MAX_NUM_SEQS, MAX_NUM_BATCHED_TOKENS = 256, 2048  # vLLM's defaults for its API server on such GPUs
VLLM_VERSION = "0.32.0"  # the version whose behaviour is simulated
MAX_CONTRACTS = 20_000


class SimulatedCore:
    """Runs requests under `policy` and calls `on_report` with each report.

    Args:
        latency: the seconds that each step takes.
        believed: what the scheduler and gateways predict them by; it learns from each step.
        limits: of a batch, a sequence and the KV memory.
        settings: of the policy.
        noise: of the step times (`engines.simulated.step_noise`).
        kv_lease_s: seconds for which KV is kept for another core; None: it is not handed over.

    Raises ValueError for settings that the policy refuses, and for a policy that this engine cannot run.
    """

    def __init__(
        self, latency: LatencyModel, believed: affine.Model, limits: Limits, clock: Clock, policy: str,
        options: ReplicaOptions = DEFAULT_OPTIONS, *, seed: int = 0, noise: Noise = 0.0,
        settings: Mapping[str, Any] | None = None, kv_lease_s: float | None = None,
    ) -> None:  # fmt: skip
        self.clock, self.policy, self.limits = clock, policy, limits
        self.believed = believed
        self.kv_lease_s = kv_lease_s
        self.host = LocalHost(
            "simulated", Engine(latency, limits, clock, seed=seed, noise=noise), load(policy, settings or {}),
            believed, clock, emit=self._emit, lost=self._raise, policy=policy, options=options,
            kv_transfer=kv_lease_s is not None,
        )  # fmt: skip
        self.listeners: dict[str, Callable[[Event], None]] = {}
        self.on_report: Callable[[Report], None] = lambda report: None
        self.read_commands: Callable[[], None] = lambda: None  # apply the commands of gateways
        self._contracts: dict[str, Contract] = {}
        self._rows: list[Row] = []
        self._ended_steps: list[Stepped] = []
        self._reported_kv: dict[str, tuple[int, int]] = {}
        self._number = 0
        self._is_report_due = False
        self._is_batch_reported = False

    async def start(self) -> None:
        await self.host.start()

    @property
    def is_idle(self) -> bool:
        replica = self.host.replica
        return replica is not None and replica.idle

    # ----------------------------------------------------------------- what gateways say

    def describe(self) -> CoreAbout:
        """The core's description for a gateway that connects."""
        supports, latency = tuple(sorted(self.host.supports)), self.believed.to_dict()
        return CoreAbout(
            self.policy, supports, self.limits, latency, self.kv_lease_s, "simulated", VLLM_VERSION, rubato_version
        )

    def apply_command(self, command: Command) -> None:
        match command:
            case Expect(answer, contract):
                self._contracts[answer] = contract
                while len(self._contracts) > MAX_CONTRACTS:  # whose requests have not come
                    del self._contracts[next(iter(self._contracts))]
            case Assign():
                self.host.assign(command.role)
            case Recall(kind):
                self.host.recall(kind)
            case Demote(answer):
                if (found := self._contracts.get(answer)) is not None:
                    self._contracts[answer] = found._replace(demoted=True)

    def has_contract(self, answer: str) -> bool:
        """Whether a gateway has sent the SLOs of this response's requests."""
        return answer in self._contracts

    def take_contract(self, answer: str) -> Contract | None:
        self.read_commands()
        return self._contracts.pop(answer, None)

    # ----------------------------------------------------------------- requests

    def submit(self, request: Request, listener: Callable[[Event], None]) -> None:
        """Queue a request; `listener` gets its events, the last of which is one Finished or HandedOff."""
        self.listeners[request.id] = listener
        self._emit(Offered(self.clock.now(), request.id, request))
        self.host.submit(request)

    def abort(self, id: str) -> None:
        """Abort a request whose client has left."""
        if id in self._replica.migrating_in:
            self.host.release(id)
        else:
            self.host.cancel(id, "aborted")
        self.listeners.pop(id, None)

    @property
    def _replica(self) -> Replica:
        assert self.host.replica is not None, "start() comes first"
        return self.host.replica

    def _emit(self, event: Event) -> None:
        if isinstance(event, Stepped):
            self._ended_steps.append(event)
        elif isinstance(event, Offered):
            self._rows.append(offered_row(event, event.id))
        elif isinstance(event, HandedOff):
            assert event.request.handoff is not None
            self._rows.append(HandOffRow(event.id, event.request.handoff.reason, event.at, 0))
        else:
            self._rows.append(event_row(event))
        if not isinstance(event, Stepped | Offered):
            listener = self.listeners.get(event.id)
            if isinstance(event, Finished | HandedOff):
                self.listeners.pop(event.id, None)
            if listener is not None:
                listener(event)
        self._report_soon()

    def _raise(self, id: str, error: BaseException, requests: Sequence[Request]) -> None:
        raise error

    # ----------------------------------------------------------------- reports

    def kv_free(self) -> int:
        """Free KV blocks."""
        return self._replica.kv.free

    def snapshot(self) -> Snapshot:
        """All requests of this core in order of arrival, and the running batch."""
        tokens = self._tokens_in_flight()
        return Snapshot(self._number, self.clock.now(), self.kv_free(), self._present(), [tokens] if tokens else [])

    def _present(self) -> list[PresentRow]:
        rows, replica = [], self._replica
        for seq in sorted([*replica.waiting, *replica.running.values()], key=lambda s: s.order):
            where: State = "running" if seq.id in replica.running else "waiting"
            state = (where, seq.started, seq.demoted, seq.cached, seq.blocks)
            rows.append(PresentRow(without_texts(seq.request), seq.id, *state, tuple(seq.times_of_stage())))
        return rows

    def _tokens_in_flight(self) -> dict[str, int]:
        return {s.id: s.in_flight for s in self._replica.running.values() if s.in_flight}

    def _report_soon(self) -> None:
        if not self._is_report_due:
            self._is_report_due = True
            asyncio.get_running_loop().call_soon(self._report)

    def _report(self) -> None:
        """Report the step that has ended and the batch that runs now."""
        self._is_report_due = False
        tokens, at, fields = self._tokens_in_flight(), self.clock.now(), dict[str, Any]()
        rows, self._rows = self._rows, []
        if self._ended_steps:
            (ended_step,), self._ended_steps = self._ended_steps, []
            fields["done"], at = (ended_step.shape, ended_step.seconds), ended_step.at
            self._is_batch_reported = False
        if tokens and not self._is_batch_reported:
            self._is_batch_reported = True
            fields |= {"shape": self._replica.shape, "busy": self._replica.busy_until, "tokens": tokens}
        self._number += 1
        self.on_report(Report(self._number, at, self.kv_free(), rows, held=self._kv_changes(), **fields))

    def _kv_changes(self) -> dict[str, tuple[int, int]]:
        """Tokens and KV blocks, by request, where they differ from the last report."""
        replica = self._replica
        rows = {s.id: (s.cached, s.blocks) for s in (*replica.running.values(), *replica.migrating_in.values())}
        changed = {id: row for id, row in rows.items() if self._reported_kv.get(id) != row}
        self._reported_kv = rows
        return changed
