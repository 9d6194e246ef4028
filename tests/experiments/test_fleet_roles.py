"""Replica-seconds by role."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from experiments._fleet_roles import FleetRoles, label
from rubato.core.events import Assigned, Preempted
from rubato.core.plan import Role
from tests.conftest import few

POOL, TIGHT, PREFILL = Role(kind="best_effort"), Role("decode", "0.02", kind="tier"), Role("prefill")


def test_by_hand() -> None:
    """a: pool to 3 s, the tier to 5 s, pool again; b: prefill from 4 s on."""
    roles = FleetRoles()
    for at, replica, role in ((0.0, "a", POOL), (3.0, "a", TIGHT), (4.0, "b", PREFILL), (5.0, "a", POOL)):
        roles(Assigned(at, replica, role))
    roles(Preempted(4.5, "x"))
    assert roles.seconds(0.0, 10.0) == {"best_effort": 8.0, "tier 0.02": 2.0, "prefill": 6.0}
    assert roles.seconds(3.5, 4.5) == {"tier 0.02": 1.0, "prefill": 0.5}
    assert roles.count(2.9) == {"best_effort": 1}
    assert roles.count(3.0) == {"tier 0.02": 1}
    assert roles.count(9.0) == {"best_effort": 1, "prefill": 1}
    with pytest.raises(ValueError, match="give the earlier one first"):
        roles.seconds(2.0, 1.0)


@few
@given(st.lists(st.tuples(st.integers(0, 20), st.sampled_from("ab"), st.sampled_from([POOL, TIGHT, PREFILL]))))
def test_the_parts_are_the_whole(changes: list[tuple[int, str, Role]]) -> None:
    """All replica-seconds are counted once, and those of a role are its count summed over the seconds."""
    roles = FleetRoles()
    changes.sort(key=lambda change: change[0])
    for at, replica, role in changes:
        roles(Assigned(float(at), replica, role))
    first = {replica: at for at, replica, _ in reversed(changes)}
    found = roles.seconds(0.0, 20.0)
    assert sum(found.values()) == sum(20 - at for at in first.values())
    for role in map(label, (POOL, TIGHT, PREFILL)):
        assert found.get(role, 0.0) == sum(roles.count(float(t)).get(role, 0) for t in range(20))
