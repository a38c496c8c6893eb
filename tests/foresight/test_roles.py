"""Few ranks are recorded, and all that differ among them."""

import pytest

from echelon.foresight.roles import Roles
from echelon.foresight.trace import Group, Kernel, Trace


def trace(rank, world_size, flops):
    kernel = Kernel(0, "mm", "matmul", flops, "float32", (1, 2, 2, 2), (), (), 1, "forward", 0, -1)
    groups = (Group(tuple(range(world_size)), "", 0),)
    return Trace(rank, world_size, (kernel,) * 20_000, (), groups, ("train.py:1",), (), is_step=True)


@pytest.mark.parametrize(
    ("special", "most"),
    [((), 3), ((0,), 4), ((63,), 5), ((0, 63), 7), ((0, 1, 2, 3), 12), (tuple(range(32)), 12)],
)
def test_ranks_that_differ_are_found_by_few_records(special, most):
    roles = Roles(64)
    while ranks := roles.next_ranks():
        roles.add({rank: trace(rank, 64, 1 + (rank in special)) for rank in ranks})
    for rank, role in enumerate(roles.classes):
        assert (role in special) == (rank in special)
    assert len(roles.traces) <= most
