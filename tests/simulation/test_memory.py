"""Each rank's tensors are counted while they live, wherever they were made."""

import torch
from torch import nn

import echelon
from echelon.pipeline import Pipeline


def hold(group):
    """Rank r holds r + 1 tensors of 4000 bytes at once, and views of them."""
    held = [torch.ones(1000) for _ in range(group.rank + 1)]
    views = [tensor.view(10, 100)[2:] for tensor in held]
    del held, views
    group.barrier()
    return torch.ones(500)


def test_the_most_bytes_held_at_one_time_count():
    assert echelon.simulate(hold, 3, memory=True).peak_memory == (4000, 8000, 12000)


def test_memory_is_not_measured_unless_asked_for():
    assert echelon.simulate(hold, 2).peak_memory is None


def pass_on(group):
    if group.rank == 0:
        group.send(torch.ones(1000), 1)
        group.recv(1)
    else:
        got = group.recv(0)
        del got
        group.send(torch.ones(1), 0)


def test_a_message_is_the_receivers():
    assert echelon.simulate(pass_on, 2, memory=True).peak_memory == (4000, 4000)


def pipeline(group, schedule):
    torch.manual_seed(0)
    layers = nn.Sequential(*[nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(group.world_size)])
    pipe = Pipeline(layers, group, schedule, 16, nn.functional.mse_loss)
    batch = torch.ones(16 * 128, 8)
    pipe.step(batch, target=batch)


def test_1f1b_holds_less_than_gpipe():
    gpipe, one_f_one_b = (echelon.simulate(pipeline, 4, (name,), memory=True).peak_memory for name in ("gpipe", "1f1b"))
    assert all(less < more for less, more in zip(one_f_one_b[1:], gpipe[1:], strict=True))
    assert list(one_f_one_b[1:3]) == sorted(one_f_one_b[1:3], reverse=True)


def train(group):
    torch.manual_seed(0)
    ddp = echelon.DDP(nn.Linear(64, 64), group)
    ddp(torch.ones(4, 64)).sum().backward()
    return ddp.weight.grad


def test_counting_changes_no_result_and_sees_what_runs_beside():
    plain, counted = echelon.simulate(train, 3), echelon.simulate(train, 3, memory=True)
    assert all(torch.equal(left, right) for left, right in zip(plain.results, counted.results, strict=True))
    assert plain.trace == counted.trace
    parameters = 4 * (64 * 64 + 64)
    assert all(3 * parameters < peak < 8 * parameters for peak in counted.peak_memory)
