"""What holds of a replica's books at any time, by looking at every sequence and every block."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rubato.core.plan import blocks_for
from rubato.fleet.cluster import Cluster
from rubato.fleet.local_host import LocalHost
from rubato.replica.kv_blocks import KVBlocks
from rubato.replica.kv_ledger import KVByBlock, KVCounts
from rubato.replica.sequence import Seq
from rubato.replica.state import ReplicaState


def check(replica: ReplicaState) -> None:
    """Raise AssertionError unless the counts are what looking at every sequence gives, KV is conserved and the queues
    agree with each other."""
    seqs = replica.seqs.values()
    _check_kv(replica.kv, [*replica.running.values(), *replica.migrating_out.values(), *replica.migrating_in.values()])
    held = [s for s in seqs if s.waits_for_group]
    calling = [s for s in seqs if s.waiting_for_tool]
    ids = [s.id for s in [*replica.waiting, *held, *calling]] + [*replica.running, *replica.migrating_in]
    assert sorted(ids) == sorted(replica.seqs), "waiting, held, calling, running and arriving are not a partition"
    assert not held or len(held) < len(replica.seqs), "all wait for the first of their group, which is not here"
    running = [s for s in replica.running.values() if not s.ended]
    assert sorted(replica.present) == sorted(s.id for s in [*replica.waiting, *running]), "what a plan can be about"
    assert replica.pending == sum(s.pending for s in replica.present.values()), "pending tokens"
    decodes = [s for s in replica.running.values() if s.decoding]
    assert replica.pool.count == len(decodes), "those that decode"
    assert replica.pool.kv == sum(s.cached for s in decodes), "their KV"
    full = sum(s.cached % replica.limits.block_size == 0 for s in decodes)
    assert replica.pool.blocks() == full, "the blocks they need"
    for seq in seqs:
        assert seq.cached <= seq.length, "more cached than there is"


def check_cluster(cluster: Cluster) -> None:
    """Raise AssertionError unless each request offered is in flight or has ended, and `check` holds of replicas."""
    assert cluster.offered == cluster.finished + cluster.in_flight
    for host in cluster.hosts.values():
        if isinstance(host, LocalHost) and host.replica is not None:
            check(host.replica)


def _check_kv(kv: KVCounts | KVByBlock, holding: Sequence[Seq]) -> None:
    if isinstance(kv, KVCounts):
        held = sum(kv.blocks_of(s) for s in holding)
        assert kv._run is not None or kv._free == kv.total - held, "KV blocks are not held as booked"
        return
    check_blocks(kv._blocks, [s.block_ids for s in holding])
    for seq in holding:
        assert blocks_for(seq.cached, kv.block_size) <= len(seq.block_ids), "KV cached beyond its blocks"


def check_blocks(kv: KVBlocks, held: Iterable[Sequence[int]]) -> None:
    """Raise AssertionError unless every block is held as often as is booked, or free, once."""
    users = [0] * kv.total
    for blocks in held:
        for b in blocks:
            users[b] += 1
    assert users == kv._users, "KV blocks are not held as booked"
    free = [*kv._free, *kv._idle]
    assert sorted(free) == [b for b, n in enumerate(users) if not n], "a KV block is lost or free while held"
    assert {b: k for k, b in kv._named.items()} == kv._key, "names and blocks disagree"
    assert all(b in kv._key for b in kv._idle), "an idle block has no name"
