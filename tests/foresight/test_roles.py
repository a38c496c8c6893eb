"""Few ranks are recorded, and all that differ among them."""

from dataclasses import replace
from typing import NamedTuple

import pytest

from echelon.foresight.roles import Roles, digest
from echelon.foresight.trace import Collective, Group, Kernel, Message, Trace


def trace(rank, world_size, flops):
    kernel = Kernel(0, "mm", "matmul", flops, "float32", (1, 2, 2, 2), (), (), 1, "forward", 0, -1)
    groups = (Group(tuple(range(world_size)), "", 0),)
    return Trace(rank, world_size, (kernel,) * 20_000, (), groups, ("train.py:1",), (), is_step=True)


@pytest.mark.parametrize(
    ("special", "most"),
    [((), 3), ((0,), 5), ((63,), 5), ((0, 63), 8), ((0, 1, 2, 3), 12), (tuple(range(32)), 16)],
)
def test_ranks_that_differ_are_found_by_few_records(special, most):
    roles = Roles(64)
    while ranks := roles.next_ranks():
        roles.add({rank: trace(rank, 64, 1 + (rank in special)) for rank in ranks})
    for rank, role in enumerate(roles.classes):
        assert (role in special) == (rank in special)
    assert len(roles.traces) <= most


@pytest.mark.parametrize(
    ("is_special", "most"),
    [
        (lambda _: False, 4),
        (lambda rank: rank == 0, 7),
        (lambda rank: rank % 8 == 0, 10),
        (lambda rank: rank % 8 == 7, 10),
        (lambda rank: rank % 2 == 1, 15),
    ],
)
def test_ranks_that_differ_on_each_host_are_found(is_special, most):
    """A program may ask for LOCAL_RANK, and rank 63 is no first rank of a host."""
    for seed in range(4):
        roles = Roles(64, seed, ranks_of_host=8)
        while ranks := roles.next_ranks():
            roles.add({rank: short_trace(rank, 1 + is_special(rank)) for rank in ranks})
        for rank, role in enumerate(roles.classes):
            assert is_special(role) == is_special(rank)
        assert len(roles.traces) <= most


def short_trace(rank, flops):
    long = trace(rank, 64, flops)
    return replace(long, entries=long.entries[:1])


def test_ranks_with_another_root_have_another_role():
    def digest_with(root):
        broadcast = Collective(0, 1, "broadcast", 0, 8, "float32", "", root, True, (), (), "forward", 0, -1)
        return digest(replace(trace(3, 4, 1), entries=(broadcast,)))

    assert len({digest_with(root) for root in range(4)}) == 4


PP, DP, TP = 8, 16, 8


class Point(NamedTuple):
    stage: int
    dp: int
    tp: int


def point(rank):
    return Point(rank // (DP * TP), rank // TP % DP, rank % TP)


def grid_trace(rank, is_odd):
    """Trace of a rank of a grid of pipelines, data and tensor parallelism, which sends to the next stage."""
    at = point(rank)
    along = (
        range(rank % (DP * TP), PP * DP * TP, DP * TP),
        range(at.stage * DP * TP + at.tp, (at.stage + 1) * DP * TP, TP),
        range(rank - at.tp, rank - at.tp + TP),
    )
    groups = tuple(Group(tuple(ranks), name) for ranks, name in zip(along, ("pp", "dp", "tp"), strict=True))
    peers = [(each, each > rank) for each in (rank - DP * TP, rank + DP * TP) if each in along[0]]
    messages = [Message(0, 1, sends, peer, 0, 0, 8, "float32", False, -1, "forward", 0, -1) for peer, sends in peers]
    flops = 1 + 2 * at.stage + is_odd(at)
    kernel = Kernel(0, "mm", "matmul", flops, "float32", (1, 2, 2, 2), (), (), 1, "forward", 0, -1)
    return Trace(rank, PP * DP * TP, (kernel, *messages) * 700, (), groups, ("train.py:1",), (), is_step=True)


GRIDS = {
    "stages": (lambda at: at.stage < 0, 15),
    "a rank that prints": (lambda at: at == (7, 0, 0), 20),
    "the last rank": (lambda at: at == (7, 15, 7), 18),
    "a stage that is uneven": (lambda at: at.stage == 7 and at.dp >= 5, 24),
    "tensor parallel ranks": (lambda at: at.tp >= 4, 40),
}


@pytest.mark.parametrize(("is_odd", "most"), GRIDS.values(), ids=GRIDS)
def test_ranks_of_a_grid_are_found_by_few_records(is_odd, most):
    roles = Roles(PP * DP * TP)
    while ranks := roles.next_ranks():
        roles.add({rank: grid_trace(rank, is_odd) for rank in ranks})
    for rank, role in enumerate(roles.classes):
        assert (point(rank).stage, is_odd(point(rank))) == (point(role).stage, is_odd(point(role)))
    assert len(roles.traces) <= most
