"""DistServe: prefill and decode on replicas of their own, KV moved between them.

For a load whose shares of prefill and decode stay as they are, where KV moves between replicas: a baseline.

Reproduced: a prompt goes to the prefill replica with the least to do, which runs whole prompts first come first served,
as many together as a batch takes; its KV then waits there until a decode replica has the memory (the paper's pull), and
the decode replica with the most of it free takes it. Decode replicas run decodes alone, all of them in each step.
Not reproduced: the search for parallelism and placement; replicas are given. Where KV lacks, the paper swaps; here the
decode started last gives its KV up and goes back to a prefill replica with what it has, as does a request whose next
stage brings a new prompt: one prefill more, but KV moves one way only, so that the pools never wait for each other.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rubato.core.interfaces import Dispatch, SeqView, View
from rubato.core.plan import Plan, Role
from rubato.core.request import Request
from rubato.policy_kit.batch_builder import BatchBuilder, blocks_at_end, decodes_only, resume_prefills
from rubato.policy_kit.pools import split
from rubato.policy_kit.stateless import Stateless

SOURCE = "DistServe (OSDI 2024), as SLOs-Serve runs it as a baseline at 1:1, 2:1 and 1:2"


@dataclass
class Scheduler(Stateless):
    """Plans whole prompts on a prefill replica, and all decodes on a decode replica.

    Args:
        budget: tokens of a prefill batch; 0: as many as the engine takes
    """

    needs = frozenset({"preempt", "handoff", "kv_transfer"})
    budget: int = 0

    def __post_init__(self) -> None:
        if self.budget < 0:
            raise ValueError(
                f"budget is {self.budget}: give the tokens of a prefill batch, or 0 for the engine's limit"
            )

    def plan(self, view: View) -> Plan:
        if view.role.phase == "prefill":
            return self._prefill(view)
        if view.role.phase == "decode":
            return decodes_only(view)
        raise ValueError(
            f"replica {view.id!r} has no phase: distserve's scheduler works under a router that divides them"
        )

    def _prefill(self, view: View) -> Plan:
        builder = BatchBuilder(view, self.budget or None)
        resumed = resume_prefills(builder)  # a prompt longer than a batch; all of its KV was there when it began
        arrived = sorted(view.waiting, key=lambda s: s.request.arrival)  # one back for another prefill goes first
        for seq in arrived if not resumed else ():
            fits = seq.pending <= builder.tokens_left or not builder.work  # longer than a batch it has one for itself
            if not fits or builder.tokens_left == 0 or builder.seqs_left == 0 or builder.lacks(seq, seq.pending):
                break
            builder.add(seq, min(seq.pending, builder.tokens_left))
        return builder.plan(handoff={s.id: "prefilled" for s in view.running if s.pending == 1})


@dataclass
class Router(Stateless):
    """Places prompts on prefill replicas, and their KV on decode replicas.

    Args:
        prefill: with `decode`, the ratio of the two pools, at least one replica each
        decode: see `prefill`
        watermark: share of a decode replica's KV kept free when it takes a request beside others
        reserve_kv: a decode replica takes a request only when it has KV for all of it, at its longest, beside what the
            requests there need to their ends
    """

    prefill: int = 1
    decode: int = 1
    watermark: float = 0.01
    reserve_kv: bool = False

    def __post_init__(self) -> None:
        if self.prefill < 1 or self.decode < 1 or not 0.0 <= self.watermark < 1.0:
            raise ValueError(
                f"prefill {self.prefill}, decode {self.decode}, watermark {self.watermark}: give at least 1 of both "
                "and a share in [0, 1)"
            )

    def roles(self, replicas: Sequence[str]) -> Mapping[str, Role]:
        """Gives the first replicas the prefill role, in the ratio of the settings, rounded."""
        return split("distserve", replicas, self.prefill, self.decode)

    def place(self, held: Sequence[SeqView], fleet: Sequence[View], now: float) -> Dispatch:
        prefills = [v for v in fleet if v.role.phase == "prefill"]
        decodes = [v for v in fleet if v.role.phase == "decode"]
        assign: dict[str, Role] = {}
        for view in fleet:
            if view.role.phase == "both":  # it has come meanwhile, in the place of one that was lost
                lacks_prefill = not prefills or 0 < len(prefills) * self.decode < len(decodes) * self.prefill
                (prefills if lacks_prefill else decodes).append(view)
                assign[view.id] = Role("prefill" if lacks_prefill else "decode")
        place: dict[str, str] = {}
        reject: dict[str, str] = {}
        load = {v.id: v.pending for v in prefills}
        free = {v.id: self._free(v) for v in decodes}
        full = False
        for seq in held:
            request = seq.request
            if not prefills or not decodes:
                reject[seq.id] = f"rejected-no-replica: none is left to {'decode' if prefills else 'prefill'}"
            elif not any(_could_hold(v, request) for v in decodes):
                reject[seq.id] = "rejected-exceeds-kv"
            elif not seq.cached:
                to = min(load, key=lambda id: load[id])
                place[seq.id] = to
                load[to] += seq.pending
            elif not full:  # first come, first served: a small one does not pass one that waits for memory
                tokens = _longest(request) if self.reserve_kv else seq.cached
                taker = self._find_taker(decodes, free, request, tokens)
                if taker is None:
                    full = True
                else:
                    place[seq.id] = taker.id
                    free[taker.id] -= taker.limits.blocks(tokens)
        return Dispatch(place, reject, assign=assign)

    def _free(self, view: View) -> int:
        """Returns the KV blocks free for arriving requests."""
        if not self.reserve_kv:
            return view.kv_free
        return view.kv_total - sum(
            blocks_at_end(s, view.limits.block_size) for s in [*view.running, *view.waiting, *view.moving]
        )

    def _find_taker(
        self, decodes: Sequence[View], free: Mapping[str, int], request: Request, tokens: int
    ) -> View | None:
        """Returns the decode replica with the largest free share of KV, None if that is not enough."""
        takers = []
        for view in decodes:
            is_idle = free[view.id] == view.kv_total
            spare = 0 if is_idle else int(self.watermark * view.kv_total)
            has_seat = view.limits.max_running is None or len(view.running) < view.limits.max_running
            if has_seat and _could_hold(view, request) and view.limits.blocks(tokens) + spare <= free[view.id]:
                takers.append(view)
        return max(takers, key=lambda v: free[v.id] / v.kv_total, default=None)


def _could_hold(view: View, request: Request) -> bool:
    most = _longest(request)
    return most <= view.limits.max_model_len and view.limits.blocks(most) <= view.kv_total


def _longest(request: Request) -> int:
    return request.prompt + request.sampling.max_tokens
