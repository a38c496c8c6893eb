"""What DistributedDataParallel does beyond the mean of every backward: options, hooks, joins, and ranks out of step."""

import copy
import io
import mmap

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import echelon
from echelon import DDP, CollectiveMismatch
from echelon.data_parallel.hooks import AccumulateIn, CompressTo, GradientHook, LocalSGD
from echelon.data_parallel.powersgd import PowerSGD
from tests.data_parallel.models import (
    TINY_MB,
    Branches,
    assert_all_equal,
    batch,
    fill,
    gradients,
    loss_of,
    mlp,
    part,
    single,
)


def skip_a_backward(group):
    """Rank 1 skips its first backward: its second meets the first of the others."""
    model = DDP(mlp(), group)
    for step in range(2):
        loss = loss_of(model(part(batch(step), group)))
        if group.rank == 1 and step == 0:
            continue
        try:
            loss.backward()
        except CollectiveMismatch as error:
            return str(error), group.all_reduce(torch.ones(1)).item()
    return "not told", None


@pytest.mark.parametrize("world_size", [2, 3])
def test_a_rank_that_skips_a_backward_is_told_and_so_are_the_others(run, world_size):
    for message, total in run(skip_a_backward, world_size):
        assert "rank 0 1, rank 1 2" in message
        assert "a rank skipped a backward" in message
        assert total == world_size


def all_checkpointed(group, use_reentrant):
    """Every parameter is inside a checkpoint, and one of them in two."""
    module = fill(nn.ModuleList([nn.Linear(4, 4) for _ in range(3)]))

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = module

        def forward(self, x):
            for layer in self.layers:
                x = torch.tanh(
                    checkpoint(layer, x, use_reentrant=use_reentrant) if use_reentrant is not None else layer(x)
                )
            return x

    model = DDP(Net(), group, bucket_mb=TINY_MB)
    for _ in range(2):
        model.zero_grad()
        loss_of(model(part(batch(), group).requires_grad_())).backward()
    return gradients(model)


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_a_model_that_is_checkpointed_all_over(run, use_reentrant):
    expected = echelon.simulate(all_checkpointed, 1, (None,)).results[0]
    assert_all_equal(run(all_checkpointed, 2, use_reentrant), expected)


def by_samples(group, counts, steps):
    model = DDP(mlp(), group, bucket_mb=TINY_MB, average="samples")
    for step in range(steps):
        inputs = batch(step).split(counts)[group.rank]
        loss = loss_of(model(inputs)) if len(inputs) else model(inputs).sum()
        loss.backward()
    return gradients(model)


@pytest.mark.parametrize("counts", [[12], [7, 5], [3, 8, 1], [6, 0, 6]])
def test_ranks_weigh_as_many_as_they_have_samples(run, counts):
    expected = mlp()
    for step in range(2):
        loss_of(expected(batch(step))).backward()
    assert_all_equal(run(by_samples, len(counts), counts, 2), gradients(expected))


class Counts(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))
        self.register_buffer("mean", torch.zeros(2))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))

    def forward(self, x):
        return x * self.weight


def buffers(group, mode):
    module = Counts()
    model = DDP(module, group, buffers=mode)
    module.mean.fill_(group.rank + 1.0)
    module.count.fill_(group.rank + 1)
    model(torch.ones(1)).sum().backward()
    return module.mean.tolist(), module.count.item()


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        ("broadcast", [([1.0, 1.0], 1)] * 3),
        ("average", [([2.0, 2.0], 1)] * 3),
        ("local", [([1.0, 1.0], 1), ([2.0, 2.0], 2), ([3.0, 3.0], 3)]),
    ],
)
def test_buffers_are_broadcast_averaged_or_left(run, mode, expected):
    assert run(buffers, 3, mode) == expected


def order_of_buckets(group):
    class Backwards(nn.Module):
        """Used in the order in which it is not defined."""

        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList([nn.Linear(4, 4, bias=False) for _ in range(4)])

        def forward(self, x):
            for index in (3, 1, 0, 2) if group.rank == 0 else (0, 1, 2, 3):
                x = self.layers[index](x)
            return x

    model = DDP(fill(Backwards()), group, bucket_mb=TINY_MB / 2)
    orders = []
    for _ in range(3):
        model.zero_grad(set_to_none=len(orders) == 1)
        loss_of(model(part(batch(), group))).backward()
        orders.append([bucket.members for bucket in model._reducer.layout.buckets])
    return orders, gradients(model)


def test_the_order_of_the_buckets_is_that_of_rank_0s_first_backward(run):
    ranks = run(order_of_buckets, 2)
    for orders, got in ranks:
        assert orders == [[(2,), (0,), (1,), (3,)]] * 3
        assert all(torch.equal(got[name], ranks[0][1][name]) for name in got)


def later_parameter(group):
    module = mlp()
    model = DDP(module, group, bucket_mb=TINY_MB)
    loss_of(model(part(batch(), group))).backward()
    model.zero_grad()
    module.append(fill(nn.Linear(3, 2), seed=group.rank))
    loss_of(model(part(batch(), group))).backward()
    return gradients(model)


def test_a_parameter_that_appears_later_is_taken_in(run):
    expected = mlp()
    expected.append(fill(nn.Linear(3, 2), seed=0))
    assert_all_equal(run(later_parameter, 2), single(expected, batch()))


def memory_of_gradients(group):
    model = DDP(mlp(), group)
    addresses = set()
    for set_to_none in (None, True, True, False, True):
        model.zero_grad(set_to_none=set_to_none)
        loss_of(model(part(batch(), group))).backward()
        if set_to_none is None:  # after this the order is learnt
            continue
        addresses.add(tuple(parameter.grad.data_ptr() for parameter in model.parameters()))
    storages = {p.grad.untyped_storage().data_ptr(): p.grad.untyped_storage().nbytes() for p in model.parameters()}
    return len(addresses), list(storages.values()), sum(parameter.nbytes for parameter in model.parameters())


def test_gradients_are_views_of_the_buckets_and_stay_in_place(run):
    for num_places, sizes, total in run(memory_of_gradients, 2):
        assert num_places == 1
        (size,) = sizes  # one storage for all of them
        assert total <= size <= total + mmap.PAGESIZE


def copies(group):
    model = DDP(mlp(), group)
    saved = io.BytesIO()
    torch.save(model.module, saved)
    saved.seek(0)
    for copied in (copy.deepcopy(model.module), torch.load(saved, weights_only=False)):
        if group.rank == 0:  # alone: the copy is an ordinary module
            loss_of(copied(batch())).backward()
    loss_of(model(part(batch(), group))).backward()
    return gradients(model)


def test_copies_of_the_module_are_ordinary_modules(run):
    assert_all_equal(run(copies, 2), single(mlp(), batch()))


# Hooks


def train_with(group, name, steps=30):
    hook = HOOKS[name]()
    model = DDP(mlp(), group, bucket_mb=TINY_MB, hook=hook)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    inputs, target = part(batch(), group), part(torch.sin(batch())[:, :3], group)
    for _ in range(steps):
        optimizer.zero_grad()
        nn.functional.mse_loss(model(inputs), target).backward()
        optimizer.step()
    if isinstance(hook, LocalSGD):
        hook.average(list(model.parameters()), group)
    with torch.no_grad():
        whole = nn.functional.mse_loss(model(batch()), torch.sin(batch())[:, :3]).item()
    return whole, {name: value.detach().clone() for name, value in model.module.named_parameters()}


def plain(steps=30):
    return echelon.simulate(train_with, 1, ("none", steps)).results[0]


HOOKS = {
    "none": lambda: None,
    "default": lambda: GradientHook(),
    "float16": lambda: CompressTo(torch.float16),
    "bfloat16": lambda: CompressTo(torch.bfloat16),
    "powersgd": lambda: PowerSGD(rank=1, start_after=2),
    "local": lambda: LocalSGD(5),
    "every step": lambda: LocalSGD(1),
    "powersgd at once": lambda: PowerSGD(rank=2),
    "float32": lambda: AccumulateIn(torch.float32),
}


@pytest.mark.parametrize("name", HOOKS)
def test_hooks_reach_the_loss_of_plain_training(run, name):
    expected, _ = plain()
    start, _ = plain(0)
    ranks = run(train_with, 3, name)
    for loss, weights in ranks:
        assert loss < start - 0.9 * (start - expected)
        assert all(torch.equal(weights[key], ranks[0][1][key]) for key in weights)


def test_a_period_of_1_is_plain_sgd(run):
    _, expected = plain(4)
    assert_all_equal([weights for _, weights in run(train_with, 2, "every step", 4)], expected)


def bytes_with(group, name):
    hook = HOOKS[name]()
    layer = fill(nn.Linear(64, 64, bias=False))
    model = DDP(layer, group, hook=hook)
    loss_of(model(torch.ones(1, 64))).backward()


@pytest.mark.parametrize(
    ("name", "share"),
    [("none", 1.0), ("float16", 0.5), ("powersgd at once", 4 / 64), ("local", 0.0)],
)
def test_hooks_send_less(name, share):
    sent = sum(echelon.simulate(bytes_with, 2, (name,)).bytes_sent.values())
    rest = sum(echelon.simulate(bytes_with, 2, ("local",)).bytes_sent.values())  # start, summary
    assert sent - rest == share * 2 * 64 * 64 * 4


def low_rank(group):
    """Gradients of rank 1 pass PowerSGD of rank 1 without loss; what is lost of others comes with the next ones."""
    hook = PowerSGD(rank=1)
    model = DDP(fill(nn.Linear(8, 8, bias=False)), group, hook=hook)
    (model(torch.ones(1, 8)) * torch.arange(8.0)).sum().backward()
    exact = model.weight.grad.clone()
    model.zero_grad()
    sums = torch.zeros(8, 8)
    truth = torch.randn(8, 8, generator=torch.Generator().manual_seed(3))
    for _ in range(40):
        model.zero_grad()
        (model.weight * truth).sum().backward()
        sums += model.weight.grad
    return exact, sums / 40, truth


def test_powersgd_loses_nothing_for_good(run):
    for exact, mean, truth in run(low_rank, 2):
        torch.testing.assert_close(exact, torch.arange(8.0).unsqueeze(1).expand(8, 8))
        assert (mean - truth).norm() < 0.15 * truth.norm()


def small_gradients(group, name, discards):
    """Each of 64 gradients is too small to change a sum in bfloat16."""
    layer = nn.Linear(1, 1, bias=False, dtype=torch.bfloat16)
    model = DDP(layer, group, hook=HOOKS[name]())
    with model.no_sync():
        if discards:
            model(torch.full((1, 1), 50.0, dtype=torch.bfloat16)).sum().backward()
            model.zero_grad(set_to_none=discards == "none")
        model(torch.ones(1, 1, dtype=torch.bfloat16)).sum().backward()
        for _ in range(64):
            model(torch.full((1, 1), 2.0**-9, dtype=torch.bfloat16)).sum().backward()
    model(torch.zeros(1, 1, dtype=torch.bfloat16)).sum().backward()
    return layer.weight.grad.item(), layer.weight.grad.dtype


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("discards", ["", "none", "zeros"])
def test_float32_accumulation_keeps_what_bfloat16_loses(run, world_size, discards):
    assert run(small_gradients, world_size, "none", discards) == [(1.0, torch.bfloat16)] * world_size
    kept = run(small_gradients, world_size, "float32", discards)
    assert kept == [(1.125, torch.bfloat16)] * world_size


# Joins


def train_uneven(group, num_batches, mode, average):
    module = nn.Sequential(fill(nn.Linear(4, 3)), nn.BatchNorm1d(3, momentum=0.5))
    model = DDP(module, group, bucket_mb=TINY_MB, buffers=mode, average=average)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with model.join():
        for step in range(num_batches[group.rank]):
            optimizer.zero_grad()
            with model.no_sync():
                loss_of(model(batch(step + 10)[:4])).backward()
            loss_of(model(batch(step)[group.rank : group.rank + 4])).backward()
            optimizer.step()
    group.barrier()
    return {name: value.clone() for name, value in model.state_dict().items()}


@pytest.mark.parametrize("num_batches", [[3, 1, 0], [0, 2, 2], [2, 2], [0, 0]])
@pytest.mark.parametrize("mode", ["broadcast", "local"])
def test_ranks_with_fewer_batches_join(run, num_batches, mode):
    ranks = run(train_uneven, len(num_batches), num_batches, mode, "ranks")
    for state in ranks:
        assert all(torch.equal(state[name], ranks[0][name]) for name in state)
    moved = not torch.equal(ranks[0]["0.weight"], fill(nn.Linear(4, 3)).weight)
    assert moved == (max(num_batches) > 0)


def last_step(group, num_batches, average):
    model = DDP(mlp(), group, average=average)
    with model.join():
        for step in range(num_batches[group.rank]):
            model.zero_grad()
            loss_of(model(batch(step))).backward()
    return gradients(model)


@pytest.mark.parametrize(("average", "share"), [("ranks", 1 / 3), ("samples", 1.0)])
def test_ranks_that_have_left_count_as_zeros_or_not_at_all(run, average, share):
    expected = {name: gradient * share for name, gradient in single(mlp(), batch(1)).items()}
    assert_all_equal(run(last_step, 3, [1, 2, 0], average), expected)


def uneven_forwards(group):
    model = DDP(mlp(), group)
    with model.join():
        loss = loss_of(model(batch()))
        if group.rank == 0:
            loss = loss + loss_of(model(batch(1)))
        loss.backward()


def test_different_numbers_of_forwards_are_told_while_joining(run):
    with pytest.raises(CollectiveMismatch, match="rank 0 forward, rank 1 reduction"):
        run(uneven_forwards, 2)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"buffers": "mean"}, ValueError, "buffers='mean': use one of 'broadcast', 'average', 'local'"),
        ({"average": "batches"}, ValueError, "average='batches': use one of 'ranks', 'samples'"),
    ],
)
def test_options_that_are_none_are_refused(options, error, message):
    with pytest.raises(error, match=message):
        echelon.simulate(lambda group: DDP(mlp(), group, **options), 2)


def test_hooks_refuse_bad_options():
    with pytest.raises(ValueError, match="compress to"):
        CompressTo(torch.float64)
    with pytest.raises(ValueError, match="period=0"):
        LocalSGD(0)
    with pytest.raises(ValueError, match="rank=0"):
        PowerSGD(rank=0)


def test_a_model_without_shapes_is_refused():
    with pytest.raises(echelon.UnsupportedOp, match="parameter 'weight' has no shape yet"):
        echelon.simulate(lambda group: DDP(nn.LazyLinear(3), group), 2)


def compiled(group):
    model = DDP(torch.compile(fill(Branches()), backend="eager"), group)
    loss_of(model(part(batch(), group), True)).backward()
    return {name.removeprefix("_orig_mod."): gradient for name, gradient in gradients(model).items()}


def test_a_compiled_module_trains(pool):
    expected = fill(Branches())
    loss_of(expected(batch(), True)).backward()
    assert_all_equal(pool.run(compiled, 2, timeout=60.0), gradients(expected))
