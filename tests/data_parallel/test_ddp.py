"""DistributedDataParallel: N ranks leave the gradients of one process on the whole batch."""

import os
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import echelon
from echelon import DDP
from echelon.data_parallel import AccumulateIn
from echelon.data_parallel.reducer import can_overlap
from tests.helpers.models import (
    TINY_MB,
    Branches,
    Shared,
    assert_all_equal,
    backward,
    batch,
    fill,
    gradients,
    loss_of,
    mlp,
    part,
    single,
)

WORLD_SIZES = (1, 2, 3, 4)


def one_backward(group, bucket_mb):
    model = DDP(mlp(seed=group.rank), group, bucket_mb=bucket_mb)
    backward(model, group)
    return gradients(model)


@pytest.mark.parametrize("world_size", WORLD_SIZES)
@pytest.mark.parametrize("bucket_mb", [25, TINY_MB])
def test_gradients_are_those_of_one_process(run, world_size, bucket_mb):
    assert_all_equal(run(one_backward, world_size, bucket_mb), single(mlp(), batch()))


def call_the_module_itself(group):
    model = DDP(mlp(), group)
    backward(model.module, group)
    return gradients(model)


def test_calling_the_module_itself_synchronises_as_well(run):
    """An earlier system skipped the reduction silently."""
    assert_all_equal(run(call_the_module_itself, 2), single(mlp(), batch()))


def branch_on_some_ranks(group, branching, set_to_none):
    model = DDP(fill(Branches()), group, bucket_mb=TINY_MB)
    results = []
    for _ in range(2):
        model.zero_grad(set_to_none=set_to_none)
        loss_of(model(part(batch(), group), group.rank in branching)).backward()
        results.append(gradients(model))
    return results


@pytest.mark.parametrize(("world_size", "branching"), [(1, []), (2, [0]), (3, [1]), (4, [0, 3]), (4, []), (2, [0, 1])])
@pytest.mark.parametrize("set_to_none", [True, False])
def test_unused_parameters(run, world_size, branching, set_to_none):
    """Unused on some ranks: the right mean on all. Unused on all: None, or zeros after zero_grad, as in one process."""
    ranks = run(branch_on_some_ranks, world_size, branching, set_to_none)
    expected = fill(Branches())
    for step in range(2):
        expected.zero_grad(set_to_none=set_to_none)
        for rank, inputs in enumerate(batch().chunk(world_size)):
            (loss_of(expected(inputs, rank in branching)) / world_size).backward()
        assert_all_equal([results[step] for results in ranks], gradients(expected))
        assert expected.idle.weight.grad is None


def no_parameter_on_rank_1(group):
    model = DDP(mlp(), group, bucket_mb=TINY_MB)
    if group.rank == 1:
        model.sync_gradients()
    else:
        loss_of(model(batch())).backward()
    return gradients(model)


def test_a_rank_without_a_backward_joins_by_sync_gradients(run):
    half = mlp()
    (loss_of(half(batch())) / 2).backward()
    assert_all_equal(run(no_parameter_on_rank_1, 2), gradients(half))


def accumulate(group, num_local):
    model = DDP(mlp(), group, bucket_mb=TINY_MB)
    local = []
    with model.no_sync():
        with model.no_sync():
            pass
        for step in range(num_local):
            backward(model, group, step)
        local.append(gradients(model))
    backward(model, group, num_local)
    return gradients(model), local[0]


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_no_sync_accumulates_and_the_next_backward_reduces_all(run, world_size):
    ranks = run(accumulate, world_size, 2)
    expected = mlp()
    for step in range(3):
        loss_of(expected(batch(step))).backward()
    assert_all_equal([reduced for reduced, _ in ranks], gradients(expected))
    for rank, (_, local) in enumerate(ranks):
        alone = mlp()
        for step in range(2):
            loss_of(alone(batch(step).chunk(world_size)[rank])).backward()
        assert_all_equal([local], gradients(alone))


def accumulate_unused(group):
    model = DDP(fill(Branches()), group)
    with model.no_sync():
        loss_of(model(part(batch(0), group), group.rank == 0)).backward()
    loss_of(model(part(batch(1), group), False)).backward()
    return gradients(model)


def test_what_only_no_sync_used_is_reduced_as_well(run):
    expected = fill(Branches())
    for rank in range(2):
        (loss_of(expected(batch(0).chunk(2)[rank], rank == 0)) / 2).backward()
        (loss_of(expected(batch(1).chunk(2)[rank], False)) / 2).backward()
    assert_all_equal(run(accumulate_unused, 2), gradients(expected))


def two_backwards(group, retain_graph):
    model = DDP(mlp(), group, bucket_mb=TINY_MB)
    loss = loss_of(model(part(batch(), group)))
    loss.backward(retain_graph=retain_graph)
    first = gradients(model)
    (loss if retain_graph else loss_of(model(part(batch(), group)))).backward()
    return first, gradients(model)


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("retain_graph", [False, True])
def test_two_backwards_without_zero_grad_give_twice_the_gradient(run, world_size, retain_graph):
    """An earlier system gave 1.25 times."""
    ranks = run(two_backwards, world_size, retain_graph)
    assert_all_equal([second for _, second in ranks], {name: 2 * grad for name, grad in ranks[0][0].items()})


def several_forwards(group):
    model = DDP(mlp(), group, bucket_mb=TINY_MB)
    losses = [loss_of(model(part(batch(seed), group))) for seed in range(3)]
    sum(losses).backward()
    return gradients(model)


def test_several_forwards_before_one_backward(run):
    expected = mlp()
    sum(loss_of(expected(batch(seed))) for seed in range(3)).backward()
    assert_all_equal(run(several_forwards, 2), gradients(expected))


def shared_parameter(group):
    model = DDP(fill(Shared()), group, bucket_mb=TINY_MB)
    backward(model, group)
    return gradients(model), model.second.weight is model.first.weight


def test_a_shared_parameter_is_reduced_once(run):
    ranks = run(shared_parameter, 3)
    assert_all_equal([got for got, _ in ranks], single(fill(Shared()), batch()))
    assert all(still for _, still in ranks)


def frozen_then_not(group):
    module = mlp()
    module[0].weight.requires_grad_(False)
    model = DDP(module, group, bucket_mb=TINY_MB)
    results = []
    for trainable in (False, True):
        model.zero_grad()
        module[0].weight.requires_grad_(trainable)
        backward(model, group)
        results.append(gradients(model))
    return results


def test_a_frozen_parameter_has_no_gradient_until_it_is_released(run):
    ranks = run(frozen_then_not, 2)
    expected = single(mlp(), batch())
    assert_all_equal([later for _, later in ranks], expected)
    assert_all_equal([first for first, _ in ranks], expected | {"0.weight": None})


class Mixed(nn.Module):
    """Parameters of four dtypes, one laid out channels last."""

    def __init__(self):
        super().__init__()
        self.matrix = nn.Parameter(torch.zeros(4, 3))
        self.scale = nn.Parameter(torch.zeros(3, dtype=torch.bfloat16))
        self.shift = nn.Parameter(torch.zeros(3, dtype=torch.float16))
        self.weight = nn.Parameter(torch.zeros(3, dtype=torch.float64))
        self.image = nn.Parameter(torch.zeros(2, 3, 2, 2).to(memory_format=torch.channels_last))

    def forward(self, x):
        hidden = x @ self.matrix * self.scale.float() + self.shift.float() + self.image.sum((0, 2, 3))
        return hidden * self.weight


def mixed_dtypes(group):
    model = DDP(fill(Mixed()), group)
    results = []
    for set_to_none in (True, False):
        model.zero_grad(set_to_none=set_to_none)
        backward(model, group)
        results.append(gradients(model))
    return results, repr(model), model.image.grad.is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_mixed_dtypes_keep_their_dtype(run, world_size):
    """Each rank rounds its part to the parameter's dtype, as autograd does; the mean is rounded once more."""
    parts = [single(fill(Mixed()), inputs) for inputs in batch().chunk(world_size)]
    expected = {
        name: (sum(got[name].double() for got in parts) / world_size).to(value.dtype)
        for name, value in parts[0].items()
    }
    for results, description, channels_last in run(mixed_dtypes, world_size):
        for got in results:
            assert_all_equal([got], expected)
            assert torch.equal(got["shift"], expected["shift"])
            assert torch.equal(got["scale"], expected["scale"])
        assert "4 buckets" in description
        assert channels_last


def train(group, optimizer_first, set_to_none):
    module = mlp(seed=group.rank)
    before = list(module.parameters())
    if optimizer_first:
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
    model = DDP(module, group, bucket_mb=TINY_MB)
    if not optimizer_first:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(5):
        optimizer.zero_grad(set_to_none=set_to_none)
        backward(model, group, step)
        optimizer.step()
    assert all(now is then for now, then in zip(model.parameters(), before, strict=True))
    return {name: value.detach().clone() for name, value in module.named_parameters()}


OPTIMIZERS = pytest.mark.parametrize(("optimizer_first", "set_to_none"), [(True, True), (False, True), (True, False)])


@OPTIMIZERS
def test_training_equals_that_of_one_process(run, optimizer_first, set_to_none):
    """An earlier system replaced the parameters, so that the optimizer updated stale ones and nothing was learnt."""
    check_training(run(train, 2, optimizer_first, set_to_none))


@pytest.mark.parametrize("world_size", [1, 3, 4])
@OPTIMIZERS
def test_training_on_other_numbers_of_ranks(world_size, optimizer_first, set_to_none):
    check_training(echelon.simulate(train, world_size, (optimizer_first, set_to_none), late_sends=True).results)


def check_training(ranks):
    expected = mlp()
    optimizer = torch.optim.SGD(expected.parameters(), lr=0.1, momentum=0.9)
    for step in range(5):
        optimizer.zero_grad()
        loss_of(expected(batch(step))).backward()
        optimizer.step()
    assert_all_equal(ranks, {name: value.detach() for name, value in expected.named_parameters()})
    assert not torch.allclose(ranks[0]["0.weight"], mlp()[0].weight, atol=1e-3)


def gradient_penalty(group):
    model = DDP(mlp(), group, bucket_mb=TINY_MB)
    x = part(batch(), group).requires_grad_()
    (slope,) = torch.autograd.grad(loss_of(model(x)) * len(x), x, create_graph=True)
    assert all(parameter.grad is None for parameter in model.parameters())
    slope.square().sum(1).mean().backward()
    return gradients(model)


def test_a_gradient_of_gradients_is_reduced(run):
    expected = mlp()
    x = batch().requires_grad_()
    (slope,) = torch.autograd.grad(loss_of(expected(x)) * len(x), x, create_graph=True)
    slope.square().sum(1).mean().backward()
    assert_all_equal(run(gradient_penalty, 2), gradients(expected))


class Checkpointed(nn.Module):
    def __init__(self, use_reentrant):
        super().__init__()
        self.use_reentrant = use_reentrant
        self.blocks = nn.ModuleList([nn.Linear(4, 4) for _ in range(3)])
        self.last = nn.Linear(4, 2)

    def forward(self, x):
        for block in self.blocks:
            x = torch.tanh(
                block(x) if self.use_reentrant is None else checkpoint(block, x, use_reentrant=self.use_reentrant)
            )
        return self.last(x)


def checkpointed(group, use_reentrant):
    model = DDP(fill(Checkpointed(use_reentrant)), group, bucket_mb=TINY_MB)
    loss_of(model(part(batch(), group).requires_grad_())).backward()
    return gradients(model)


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_activation_checkpointing(run, use_reentrant):
    assert_all_equal(run(checkpointed, 2, use_reentrant), single(fill(Checkpointed(None)), batch()))


def two_models(group):
    """The model whose forward came last is the first in backward: which one that is differs between the ranks."""
    left, right = (DDP(fill(nn.Linear(4, 4), seed), group) for seed in (1, 2))
    x = part(batch(), group)
    losses = [loss_of(model(x)) for model in ((left, right) if group.rank == 0 else (right, left))]
    (losses[0] + losses[1]).backward()
    return gradients(left), gradients(right)


def test_two_models_of_one_group_never_mix(run):
    """Equal shapes, so that swapped buckets would go unnoticed: each model has its own order of collectives."""
    ranks = run(two_models, 2)
    for index, seed in enumerate((1, 2)):
        assert_all_equal([got[index] for got in ranks], single(fill(nn.Linear(4, 4), seed), batch()))


def launch_early(group):
    module = mlp()
    launched = []
    last = module[0].weight  # autograd comes to it last
    last.register_post_accumulate_grad_hook(lambda _: launched.append(model._sync.reducer.num_launched))
    model = DDP(module, group, bucket_mb=TINY_MB)
    backward(model, group)
    return launched, len(model._sync.reducer.layout.buckets), can_overlap(group)


def test_buckets_are_on_their_way_before_backward_ends():
    """An earlier system's overlapped path was the synchronous one."""
    assert echelon.simulate(launch_early, 2).results == [([2], 3, True)] * 2


def launch_over_a_network(group):
    group.backend.crosses_network = lambda _: True  # the sockets of these ranks are on loopback
    return launch_early(group)


def test_buckets_are_on_their_way_over_a_network_even_if_no_core_is_idle(pool):
    assert pool.run(launch_over_a_network, 2, backend="tcp") == [([2], 3, True)] * 2


def launch_with_cores(group, num_threads):
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        return launch_early(group)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("backend", ["shm", "tcp"])
def test_inside_of_a_machine_they_are_if_there_is_an_idle_core(pool, backend):
    num_cores = len(os.sched_getaffinity(0))
    assert pool.run(launch_with_cores, 2, num_cores, backend=backend) == [([0], 1, False)] * 2
    if num_cores > 2:
        assert pool.run(launch_with_cores, 2, 1, backend=backend) == [([2], 3, True)] * 2


@pytest.mark.parametrize(("num_cores", "expected"), [(3, False), (4, False), (5, True)])
def test_a_core_is_idle_if_there_are_more_than_threads_of_local_ranks(monkeypatch, num_cores, expected):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(num_cores)))
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    control = SimpleNamespace(hosts=(0, 0, 1))
    backend = SimpleNamespace(crosses_network=lambda ranks: 2 in ranks, control=control, rank=1)
    assert can_overlap(SimpleNamespace(backend=backend, ranks=(0, 1))) == expected
    assert can_overlap(SimpleNamespace(backend=backend, ranks=(0, 1, 2)))


def reduce_with_idle_cores(group, num_steps):
    model = DDP(mlp(), group, bucket_mb=TINY_MB)
    steps = []
    for step in range(num_steps):
        model.zero_grad(set_to_none=step % 2 == 0)
        backward(model, group)
        steps.append((len(model._sync.reducer.layout.buckets), gradients(model)))
    backward(model, group)
    return steps, gradients(model)


def test_all_is_one_bucket_while_no_rank_has_an_idle_core(monkeypatch):
    """Which is known after each reduction, on all ranks alike; gradients move with it, and go on being added to."""
    idle = [(), (), (1,), (), (0, 1), ()]
    asked = {0: iter(idle), 1: iter(idle)}
    monkeypatch.setattr(
        "echelon.data_parallel.reducer.can_overlap", lambda group: group.rank in next(asked[group.rank])
    )
    ranks = echelon.simulate(reduce_with_idle_cores, 2, (5,)).results
    alone = single(mlp(), batch())
    for steps, added_up in ranks:
        assert [num_buckets for num_buckets, _ in steps] == [1, 1, 3, 1, 3]
        assert_all_equal([got for _, got in steps], alone)
        assert_all_equal([added_up], {name: 2 * gradient for name, gradient in alone.items()})


def gradients_by_hand(group):
    model = DDP(mlp(), group)
    loss = loss_of(model(part(batch(), group)))
    names, parameters = zip(*model.named_parameters(), strict=True)
    for parameter, gradient in zip(parameters, torch.autograd.grad(loss, parameters), strict=True):
        parameter.grad = gradient
    model.sync_gradients()
    assert names[0] == "0.weight"
    once = gradients(model)
    model.sync_gradients()
    return once, gradients(model)


def test_sync_gradients_reduces_what_is_there(run):
    ranks = run(gradients_by_hand, 2)
    assert_all_equal([once for once, _ in ranks], single(mlp(), batch()))
    assert_all_equal([twice for _, twice in ranks], ranks[0][0])


def other_memory_for_gradients(group, hook, set_to_none):
    model = DDP(mlp(), group, bucket_mb=TINY_MB, hook=hook)
    for step in range(3):
        model.zero_grad(set_to_none)
        with model.no_sync():
            backward(model, group, step)
        for parameter in model.parameters():
            parameter.grad.data = 2 * parameter.grad.data
        backward(model, group, step)
        for parameter in model.parameters():
            parameter.grad.data = parameter.grad.data / 3
    return gradients(model)


@pytest.mark.parametrize("hook", [None, AccumulateIn(torch.float64)])
@pytest.mark.parametrize("set_to_none", [False, True])
def test_gradients_that_the_program_gives_other_memory_are_reduced(run, hook, set_to_none):
    """`.grad.data = ...` took a gradient out of its bucket for good: from then on it stayed local."""
    assert_all_equal(run(other_memory_for_gradients, 2, hook, set_to_none), single(mlp(), batch(2)))


def other_memory_format(group):
    model = DDP(fill(nn.Sequential(nn.Conv2d(2, 3, 2), nn.Flatten())), group)
    for step in range(3):
        if step == 1:
            model.to(memory_format=torch.channels_last)
        model.zero_grad()
        loss_of(model(part(images(step), group))).backward()
    return gradients(model)


def images(seed):
    return torch.randn(4, 2, 3, 3, generator=torch.Generator().manual_seed(seed))


def test_a_model_that_changes_its_memory_format_later_is_reduced(run):
    expected = single(fill(nn.Sequential(nn.Conv2d(2, 3, 2), nn.Flatten())), images(2))
    assert_all_equal(run(other_memory_format, 2), expected)
