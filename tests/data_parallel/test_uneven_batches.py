"""One batch less on a rank, without join(): every rank that waits is told the cause and the cure."""

import re

import pytest
from torch import nn

import echelon
from echelon import DDP
from tests.helpers.models import backward, fill, mlp

CURE = (
    r"ran fewer steps \(batches\) than rank 0(:|,) use ddp\.join\(\), or give every rank the same number of batches, "
    r"as by drop_last=True or a DistributedSampler"
)


def one_batch_less(group, has_buffers, then):
    """The last rank leaves out the third step."""
    ddp = DDP(nn.Sequential(mlp(), fill(nn.BatchNorm1d(3))) if has_buffers else mlp(), group)
    for _ in range(3 - (group.rank == group.world_size - 1)):
        backward(ddp, group)
    if then == "barrier":
        group.barrier()


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("has_buffers", [False, True])
def test_a_rank_that_has_returned_ran_fewer_steps(world_size, has_buffers):
    with pytest.raises(echelon.DeadlockError) as caught:
        echelon.simulate(one_batch_less, world_size, (has_buffers, "return"))
    last = world_size - 1
    assert re.search(rf"which has returned: rank {last} {CURE}\n", str(caught.value))
    assert f"rank 0 waits for rank {last} in DDP's backward of step 3, at " in str(caught.value)
    assert f"rank {last} has returned, after DDP's backward of step 2 at " in str(caught.value)


@pytest.mark.parametrize("has_buffers", [False, True])
def test_a_rank_that_waits_elsewhere_probably_ran_fewer_steps(run, has_buffers):
    with pytest.raises((echelon.DeadlockError, echelon.CollectiveMismatch)) as caught:
        run(one_batch_less, 2, has_buffers, "barrier")
    first = str(caught.value).partition("  rank 0 waits")[0]
    assert re.search(rf"[:;] if rank 1 {CURE}(\n|;|$)", first, re.MULTILINE)
    assert "DDP's " in str(caught.value)
    assert "world/" not in str(caught.value)


def test_a_process_that_has_closed_its_group_ran_fewer_steps(pool):
    with pytest.raises(echelon.CollectiveMismatch) as caught:
        pool.run(_closes, 2)
    assert re.match(
        "DDP's backward of step 3 of group 'world' at .* on rank 0, but rank 1 has closed", str(caught.value)
    )
    assert re.search(rf"past DDP's backward of step 2 of group 'world' at .*: rank 1 {CURE}$", str(caught.value))


def _closes(group):
    one_batch_less(group, False, "close")
    group.close()


def recorded_groups(group):
    backward(DDP(mlp(), group), group)
    return {record.group for record in echelon.flight_recorder(group)}


def test_records_name_the_users_group():
    """They had the name of a group that the library makes for itself, world/gradients."""
    assert echelon.simulate(recorded_groups, 2).results == [{"world"}] * 2
