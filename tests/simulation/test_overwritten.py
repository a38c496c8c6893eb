"""A simulation tells of a tensor that is changed while it is sent, which a real network would send changed."""

import pytest
import torch

import echelon
from echelon.simulation import Network

SLOW = Network(latency=1.0, bandwidth=1e6)


def change_too_early(group):
    if group.rank == 0:
        values = torch.ones(4)
        work = group.isend(values, 1)
        values[3] = 7
        work.wait()
    else:
        group.recv(0)


def test_a_tensor_that_is_changed_before_its_send_is_done_is_told_of():
    expected = r"rank 0 changed a tensor before its send to rank 1 was done, at 1\.\d+ s in float32\[4\]: wait for"
    with pytest.raises(echelon.UnsupportedOp, match=expected):
        echelon.simulate(change_too_early, 2, network=SLOW)


def change_in_time(group):
    values = torch.full((4,), float("nan"))  # is not equal to itself, but its bits are
    if group.rank == 0:
        group.isend(values, 1).wait()
        return values.zero_()
    return group.recv(0)


def test_one_that_is_changed_afterwards_is_not():
    assert echelon.simulate(change_in_time, 2, network=SLOW).results[1].isnan().all()


def change_what_came(group):
    if group.rank == 0:
        values = torch.ones(4)
        group.send(values, 1)
        assert values.tolist() == [1.0] * 4
    else:
        group.recv(0).zero_()


def test_the_receiver_may_change_what_it_got():
    for seed in range(4):
        echelon.simulate(change_what_came, 2, seed=seed, network=SLOW)
