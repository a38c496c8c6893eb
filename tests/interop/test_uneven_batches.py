"""One batch less on a rank of torch's DDP, without join(): the error names the cause and the cure."""

import contextlib
import re

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import echelon
from tests.helpers.models import batch, fill, loss_of, mlp

CURE = r"rank 1 ran fewer steps \(batches\) than rank 0(:|,) use ddp\.join\(\), or give every rank the same"


def one_batch_less(rank, has_buffers, then):
    """Rank 1 leaves out the third step."""
    ddp = DistributedDataParallel(nn.Sequential(mlp(), fill(nn.BatchNorm1d(3))) if has_buffers else mlp())
    for _ in range(3 - rank):
        loss = loss_of(ddp(batch()))
        loss.backward()
    if then == "another":
        dist.all_reduce(loss.detach())


def simulated(_, has_buffers, then):
    dist.init_process_group("gloo")
    one_batch_less(dist.get_rank(), has_buffers, then)
    dist.destroy_process_group()


@pytest.mark.parametrize("has_buffers", [False, True])
@pytest.mark.parametrize("then", ["another", "nothing"])
def test_simulated_ranks_tell_the_cause(has_buffers, then):
    with pytest.raises((echelon.DeadlockError, echelon.CollectiveMismatch)) as caught:
        echelon.simulate(simulated, 2, (has_buffers, then))
    assert re.search(CURE, str(caught.value))
    assert f"DDP's {'forward' if has_buffers else 'backward'}" in str(caught.value)


@pytest.mark.parametrize("has_buffers", [False, True])
def test_processes_tell_the_cause(in_world, has_buffers):
    with pytest.raises(echelon.CollectiveMismatch, match=f"DDP's {'for' if has_buffers else 'back'}ward.*{CURE}"):
        in_world(2, one_batch_less, has_buffers, "another")


def reduces_alone(rank, has_buffers):
    ddp = DistributedDataParallel(nn.Sequential(mlp(), fill(nn.BatchNorm1d(3))) if has_buffers else mlp())
    other = dist.new_group()
    for step in range(3):
        loss = loss_of(ddp(batch()))
        loss.backward()
        if rank == 0 and step == 1:
            dist.all_reduce(loss.detach(), group=other)


@pytest.mark.parametrize("has_buffers", [False, True])
def test_a_rank_that_reduces_alone_in_another_group_while_ddp_waits_is_told(in_world, has_buffers):
    """A wait in the C++ of torch's DDP was taken for work, so both waited for their timeouts."""
    call = "forward" if has_buffers else "backward"
    with pytest.raises(
        echelon.CollectiveMismatch, match=f"waits for (this )?rank.* DDP's {call}|DDP's {call}.* waits for"
    ):
        in_world(2, reduces_alone, has_buffers)


def catches_the_mismatch(rank):
    ddp = DistributedDataParallel(mlp())
    if rank == 0:
        loss_of(ddp(batch())).backward()
    else:
        with contextlib.suppress(echelon.CollectiveMismatch):
            dist.all_reduce(torch.ones(3))


def test_an_error_that_torchs_ddp_raises_keeps_its_type(in_world):
    """It was the RuntimeError of torch's C++, where no other rank raised one."""
    with pytest.raises(echelon.CollectiveMismatch, match="DDP's backward"):
        in_world(2, catches_the_mismatch)


class OwnCollective(torch.autograd.Function):
    """Function of a program that reduces its gradient itself."""

    @staticmethod
    def forward(_, values):
        return values.clone()

    @staticmethod
    def backward(_, gradient):
        total = gradient.clone()
        dist.all_reduce(total)
        return total


def reduces_itself(rank):
    if rank == 0:
        OwnCollective.apply(torch.ones(3, requires_grad=True)).sum().backward()
    else:
        dist.barrier()


def test_a_collective_of_another_backward_is_not_ddps(in_world):
    with pytest.raises(echelon.CollectiveMismatch) as caught:
        in_world(2, reduces_itself)
    assert "all_reduce(sum) of float32[3]" in str(caught.value)
    assert "DDP" not in str(caught.value)
