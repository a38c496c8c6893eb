"""What DistributedDataParallel does beyond the mean of every backward: options, hooks, joins, and ranks out of step."""

import copy
import io
import mmap
import shutil
import warnings

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import echelon
from echelon import DDP, CollectiveMismatch
from echelon.data_parallel.reducer import can_overlap
from tests.helpers.models import (
    TINY_MB,
    Branches,
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
        assert "rank 0: 1 forward and 0 optimizer steps; rank 1: 2 forwards and 0 optimizer steps" in message
        assert "a rank skipped a backward" in message
        assert total == world_size


def skip_an_iteration(group, what):
    """Rank 1 leaves out the forward and the backward of one iteration, or that iteration altogether."""
    model = DDP(mlp(), group)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    done = []
    for step in range(4):
        skips = group.rank == 1 and step == 1
        if skips and what == "all":
            continue
        optimizer.zero_grad()
        try:
            if not skips:
                backward(model, group, step)
        except echelon.EchelonError as error:
            return done, str(error)
        optimizer.step()
        done.append(model.module[0].weight.sum().item())
    return done, ""


@pytest.mark.parametrize("backend", ["simulated", "tcp", "shm"])
def test_a_rank_that_skips_forward_and_backward_is_told_and_so_are_the_others(pool, backend):
    """Its next iteration was paired with the others' present one; the optimizer's step tells them apart."""
    if backend == "simulated":
        ranks = echelon.simulate(skip_an_iteration, 3, ("most",)).results
    else:
        ranks = pool.run(skip_an_iteration, 3, "most", backend=backend)
    one, two = "1 forward and 1 optimizer step", "1 forward and 2 optimizer steps"
    for rank, (done, message) in enumerate(ranks):
        assert len(done) == (2 if rank == 1 else 1)
        assert done[0] == ranks[0][0][0]
        assert f"(rank 0: {one}; rank 1: {two}; rank 2: {one})" in message


def test_a_rank_that_draws_another_batch_keeps_the_weights_of_the_others(pool):
    """Skipped altogether, an iteration is nobody's: the others hear at the end that the rank has no more."""
    (ours, message), (theirs, nothing) = pool.run(skip_an_iteration, 2, "all")
    assert ours == theirs
    assert len(ours) == 3
    assert "rank 1" in message
    assert nothing == ""


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
        bias = model.module[4].bias  # a loss of no samples is undefined, and makes its gradient so
        (loss_of(model(inputs)) * (1 + 0 * bias.sum())).backward()
    return gradients(model)


@pytest.mark.parametrize("counts", [[12], [7, 5], [3, 8, 1], [6, 0, 6]])
def test_ranks_weigh_as_many_as_they_have_samples(run, counts):
    expected = mlp()
    for step in range(2):
        loss_of(expected(batch(step))).backward()
    assert_all_equal(run(by_samples, len(counts), counts, 2), gradients(expected))


def samples_that_change(group):
    model = DDP(mlp(), group, bucket_mb=TINY_MB, average="samples")
    for step, counts in enumerate(([7, 5], [1, 2], [4, 5])):
        inputs = batch(step)[: sum(counts)].split(counts)[group.rank]
        loss_of(model(inputs)).backward()
    return gradients(model)


def test_the_mean_number_of_samples_may_change_from_step_to_step(run):
    """Ranks weigh by the mean of the step before, which all of them know."""
    expected = mlp()
    for step, count in enumerate((12, 3, 9)):
        loss_of(expected(batch(step)[:count])).backward()
    assert_all_equal(run(samples_that_change, 2), gradients(expected))


def samples_by_keyword(group):
    model = DDP(mlp(), group, average="samples")
    loss_of(model(input=batch().split([9, 3])[group.rank])).backward()
    return gradients(model)


def test_samples_count_that_are_given_by_keyword(run):
    expected = mlp()
    loss_of(expected(batch())).backward()
    assert_all_equal(run(samples_by_keyword, 2), gradients(expected))


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


def buffers_of_two_forwards(group):
    """Buffers that a rank changes between two forwards of one backward."""
    module = Counts()
    model = DDP(module, group, buffers="broadcast")
    losses = []
    for number in (1.0, 10.0):
        module.mean.fill_(number * (group.rank + 1))
        losses.append(model(torch.ones(1)).sum())
    sum(losses).backward()
    return module.mean.tolist()


def test_buffers_are_made_equal_before_each_forward(run):
    assert run(buffers_of_two_forwards, 2) == [[10.0, 10.0]] * 2


def bits_of_buffers(group):
    """A buffer of undefined numbers and zeros of either sign, the same on every rank or not."""
    module = Counts()
    model = DDP(module, group, buffers="broadcast")
    module.mean.copy_(torch.tensor([torch.nan, -0.0 if group.rank == 0 else 0.0]))
    loss = (model(torch.ones(1)) * module.mean).sum()
    model(torch.ones(1))  # writes no buffer that is right already, so the graph stays good
    loss.backward(retain_graph=True)
    return torch.signbit(module.mean[1]).item()


def test_buffers_are_those_of_rank_0_bit_by_bit(run):
    assert run(bits_of_buffers, 2) == [True, True]


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
        backward(model, group)
        orders.append([bucket.members for bucket in model._sync.reducer.layout.buckets])
    return orders, gradients(model), can_overlap(group)


def test_the_order_of_the_buckets_is_that_of_rank_0s_first_backward(run):
    ranks = run(order_of_buckets, 2)
    for orders, got, has_time in ranks:
        assert orders == [[(2,), (0,), (1,), (3,)] if has_time else [(2, 0, 1, 3)]] * 3
        assert all(torch.equal(got[name], ranks[0][1][name]) for name in got)


def later_parameter(group):
    module = mlp()
    model = DDP(module, group, bucket_mb=TINY_MB)
    backward(model, group)
    model.zero_grad()
    module.append(fill(nn.Linear(3, 2), seed=group.rank))
    backward(model, group)
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
        backward(model, group)
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
    backward(model, group)
    return gradients(model)


def test_copies_of_the_module_are_ordinary_modules(run):
    assert_all_equal(run(copies, 2), single(mlp(), batch()))


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


def test_without_a_group_it_is_the_current_one():
    def train(group):
        model = echelon.SyncBatchNorm.convert(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)))
        ddp, zero = DDP(model), echelon.ZeroOptimizer(torch.optim.SGD, model.parameters(), lr=0.1)
        return [each._group is group for each in (model[1], ddp, zero)]

    assert echelon.simulate(train, 2).results == [[True] * 3] * 2


@pytest.mark.parametrize("wrap", [DDP, lambda model: echelon.ZeroOptimizer(torch.optim.SGD, model.parameters())])
def test_without_any_group_it_says_where_one_comes_from(wrap):
    with pytest.raises(echelon.InvalidArgument, match=r"there is no group yet: call group = echelon\.init\(\) first"):
        wrap(mlp())


def test_a_model_without_shapes_is_refused():
    with pytest.raises(echelon.UnsupportedOp, match="parameter 'weight' has no shape yet"):
        echelon.simulate(lambda group: DDP(nn.LazyLinear(3), group), 2)


def compiled(group, backend, outside):
    """Takes several steps, so that what was compiled is used again; `outside`: the wrapper itself is compiled."""
    module = fill(Branches())
    model = DDP(module if outside else torch.compile(module, backend=backend), group)
    called = torch.compile(model, backend=backend) if outside else model
    for step in range(3):
        model.zero_grad()
        loss_of(called(part(batch(step), group), True)).backward()
    return {name.removeprefix("_orig_mod."): gradient for name, gradient in gradients(model).items()}


COMPILERS = ["aot_eager", *(pytest.param(name, marks=pytest.mark.slow) for name in ("eager", "inductor"))]


@pytest.mark.parametrize("backend", COMPILERS)
@pytest.mark.parametrize("outside", [False, True])
def test_a_compiled_module_trains(pool, backend, outside):
    if backend == "inductor" and shutil.which("g++") is None:
        pytest.skip("torch.compile needs g++")
    expected = fill(Branches())
    loss_of(expected(batch(2), True)).backward()
    assert_all_equal(pool.run(compiled, 2, backend, outside, timeout=120.0), gradients(expected))


def compiled_with_buffers(group):
    """Returns the warnings of a compiled wrapper whose forward communicates."""
    model = torch.compile(DDP(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)), group), backend="eager")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in range(3):
            model(torch.full((4, 4), float(step + group.rank))).sum().backward()
    return [str(each.message) for each in caught]


def test_torchs_compiler_does_not_see_the_communication_of_a_forward(pool):
    """It warned of get_ident and of the C library, which it cannot trace, and compiled parts of this package."""
    assert pool.run(compiled_with_buffers, 2, timeout=120.0) == [[], []]
