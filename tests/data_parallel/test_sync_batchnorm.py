"""SyncBatchNorm: N ranks normalise as one process does on the whole batch."""

import contextlib

import pytest
import torch
from torch import nn

import echelon
from echelon import DDP, SyncBatchNorm
from echelon.pipeline import Pipeline
from tests.helpers.grids import covering
from tests.helpers.models import fill

COUNTS = [[10], [5, 5], [7, 3], [1, 8, 1], [0, 6, 4]]
OPTIONS = [{}, {"momentum": None}, {"affine": False}, {"bias": False}, {"track_running_stats": False}]
LAYERS = {1: nn.BatchNorm1d, 2: nn.BatchNorm2d, 3: nn.BatchNorm3d}
SHAPES = {1: (3,), 2: (3, 2, 4), 3: (3, 2, 1, 2)}


def values(dims, samples=10, dtype=torch.float64):
    generator = torch.Generator().manual_seed(dims)
    return (torch.randn(samples, *SHAPES[dims], generator=generator, dtype=torch.float64) * 3 + 100).to(dtype)


def layer_of(dims, bias=True, **options):
    layer = fill(LAYERS[dims](3, dtype=torch.float64, **options))
    if not bias:  # an option of the layer in newer torch
        layer.bias = None
    return layer


def run_layer(layer, x, steps):
    """Returns outputs, gradients of input and parameters, and buffers, after some steps."""
    results = []
    for step in range(steps):
        inputs = (x + step).requires_grad_()
        output = layer(inputs)
        output.pow(3).sum().backward()
        results.append((output.detach(), inputs.grad))
    parameters = [parameter.grad for parameter in layer.parameters()]
    return results, parameters, [buffer.clone() for buffer in layer.buffers()]


def on_rank(group, dims, counts, options):
    layer = SyncBatchNorm.convert(layer_of(dims, **options), group)
    assert type(layer) is SyncBatchNorm
    return run_layer(layer, values(dims).split(counts)[group.rank], 2)


@pytest.mark.parametrize(
    ("dims", "counts", "options"), [*covering([1, 2], COUNTS, OPTIONS), *covering([3], COUNTS[::-1], OPTIONS)]
)
def test_it_equals_the_layer_of_one_process(dims, counts, options):
    expected, for_parameters, buffers = run_layer(layer_of(dims, **options), values(dims), 2)
    ranks = echelon.simulate(on_rank, len(counts), (dims, counts, options), late_sends=True).results
    for step in range(2):
        for kind in (0, 1):
            got = torch.cat([results[step][kind] for results, _, _ in ranks])
            torch.testing.assert_close(got, expected[step][kind], rtol=1e-7, atol=1e-7)
    for index, gradient in enumerate(for_parameters):
        torch.testing.assert_close(sum(parameters[index] for _, parameters, _ in ranks), gradient)
    for _, _, own in ranks:
        assert [str(buffer.dtype) for buffer in own] == [str(buffer.dtype) for buffer in buffers]
        for got, wanted, first in zip(own, buffers, ranks[0][2], strict=True):
            torch.testing.assert_close(got, wanted)
            assert torch.equal(got, first)


def test_a_layer_under_two_names_is_converted_under_both():
    """Under the second name it stayed the layer of one rank."""
    layer, block = nn.BatchNorm1d(3), nn.Sequential(nn.BatchNorm1d(3))
    model = nn.ModuleDict({"first": layer, "second": layer, "block": block, "again": block})
    (converted,) = echelon.simulate(lambda group: SyncBatchNorm.convert(model, group), 1).results
    assert converted is model
    assert type(model["first"]) is type(block[0]) is SyncBatchNorm
    assert model["first"] is model["second"]
    assert model["again"] is model["block"] is block
    assert model["first"].weight is layer.weight


def half(group, dtype):
    layer = SyncBatchNorm(3, group, dtype=dtype)
    return layer(values(2, dtype=torch.float64).to(dtype).split([4, 6])[group.rank])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_added_in_float32(dtype):
    got = torch.cat(echelon.simulate(half, 2, (dtype,)).results)
    assert got.dtype == dtype
    expected = nn.BatchNorm2d(3)(values(2).to(dtype).float())
    torch.testing.assert_close(got.float(), expected, rtol=0.02, atol=0.02)


def evaluate(group, tracks):
    layer = SyncBatchNorm(3, group, track_running_stats=tracks)
    if group.rank == 0:  # alone: nothing is sent
        layer.eval()
        return layer(values(1).float())
    return None


@pytest.mark.parametrize("tracks", [True, False])
def test_in_evaluation_nothing_is_sent(tracks):
    simulation = echelon.simulate(evaluate, 2, (tracks,))
    expected = nn.BatchNorm1d(3, track_running_stats=tracks).eval()(values(1).float())
    torch.testing.assert_close(simulation.results[0], expected)
    assert not simulation.bytes_sent


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4), nn.ReLU())
        self.head = nn.Linear(4, 2)
        self.last = nn.BatchNorm1d(2)

    def forward(self, x):
        return self.last(self.head(self.body(x).mean((2, 3))))


def train_with_ddp(group):
    model = fill(Net().double())
    ids = [id(parameter) for parameter in model.parameters()]
    names = list(model.state_dict())
    ddp = DDP(SyncBatchNorm.convert(model, group), group)
    assert [id(parameter) for parameter in ddp.parameters()] == ids
    assert list(ddp.state_dict()) == names
    ddp(values(2).chunk(group.world_size)[group.rank]).square().sum().backward()
    return {name: parameter.grad for name, parameter in ddp.named_parameters()}


UNEVEN = [(9, 1), (6, 4, 0), (2, 3, 5), (5, 5)]


def train_by_samples(group, sizes):
    ddp = DDP(SyncBatchNorm.convert(fill(Net().double()), group), group, average="samples")
    mine = values(2).split(sizes)[group.rank]
    (ddp(mine).square().sum() / max(len(mine), 1)).backward()
    return {name: parameter.grad for name, parameter in ddp.named_parameters()}


@pytest.mark.parametrize("sizes", UNEVEN, ids=str)
def test_ranks_count_by_their_samples_before_and_after_the_layer(sizes):
    model = fill(Net().double())
    batch = values(2)
    (model(batch).square().sum() / len(batch)).backward()
    for gradients in echelon.simulate(train_by_samples, len(sizes), args=(sizes,)).results:
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(gradients[name], parameter.grad, rtol=1e-9, atol=1e-12)


def accumulate_by_samples(group, sizes):
    ddp = DDP(SyncBatchNorm.convert(fill(Net().double()), group), group, average="samples")
    try:
        for _ in range(2):
            ddp.zero_grad()
            for number, each in enumerate(sizes):
                mine = values(2)[: sum(each)].split(each)[group.rank]
                loss = ddp(mine).square().sum() / max(len(mine), 1)
                with ddp.no_sync() if number < len(sizes) - 1 else contextlib.nullcontext():
                    loss.backward()
    except echelon.UnsupportedOp as error:
        return str(error)
    return {name: parameter.grad for name, parameter in ddp.named_parameters()}


def test_samples_of_batches_that_accumulate_count_if_the_shares_of_ranks_stay():
    model = fill(Net().double())
    for size in (8, 4):
        batch = values(2)[:size]
        (model(batch).square().sum() / size).backward()
    for gradients in echelon.simulate(accumulate_by_samples, 2, args=([(6, 2), (3, 1)],)).results:
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(gradients[name], parameter.grad, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("later", [(2, 4), (6, 0)])
def test_shares_of_ranks_that_change_while_batches_accumulate_are_refused(later):
    """The layer weighed ranks by their samples of one batch, and DDP by those of all: gradients were wrong."""
    for text in echelon.simulate(accumulate_by_samples, 2, args=([(6, 2), later],)).results:
        assert text.startswith(
            f"the ranks have 6 and 2 samples in one forward and {later[0]} and {later[1]} in a later"
        )


def train_once_converted(group, sizes):
    """A layer that is converted once DDP has the module, whose parameters stay the same."""
    ddp = DDP(fill(Net().double()), group, average="samples")
    SyncBatchNorm.convert(ddp.module, group)
    mine = values(2).split(sizes)[group.rank]
    (ddp(mine).square().sum() / max(len(mine), 1)).backward()
    return {name: parameter.grad for name, parameter in ddp.named_parameters()}


def train_without_ddp(group, sizes):
    """The layer after DDP has gone: the program weighs losses, and adds up gradients."""
    model = SyncBatchNorm.convert(fill(Net().double()), group)
    mine = values(2).split(sizes)[group.rank]
    ddp = DDP(model, group, average="samples")
    (ddp(mine).square().sum() / max(len(mine), 1)).backward()
    del ddp
    model.zero_grad()
    (model(mine).square().sum() / 10).backward()
    return {name: group.all_reduce(parameter.grad) for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("main", [train_once_converted, train_without_ddp])
def test_samples_count_in_a_layer_of_ddp_as_long_as_ddp_is_there(main):
    model = fill(Net().double())
    (model(values(2)).square().sum() / 10).backward()
    for gradients in echelon.simulate(main, 2, args=((9, 1),)).results:
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(gradients[name], parameter.grad, rtol=1e-9, atol=1e-12)


def test_torchs_own_layer_cannot_count_samples():
    model = nn.Sequential(nn.Linear(3, 3), nn.SyncBatchNorm(3))
    with pytest.raises(echelon.UnsupportedOp, match=r"'1' is torch's SyncBatchNorm, .* use echelon.SyncBatchNorm.conv"):
        echelon.simulate(lambda group: DDP(model, group, average="samples"), 1)


def wrap_torchs_own(group, wrap):
    wrap(nn.Sequential(nn.Linear(3, 3), nn.SyncBatchNorm(3)), group)


class Activated(nn.SyncBatchNorm):
    """Layer of a library that is built on torch's."""

    def forward(self, x):
        return super().forward(x).relu()


def wrap_a_frozen_one(group):
    frozen = nn.Sequential(nn.Linear(3, 3), Activated(3)).requires_grad_(False).eval()
    DDP(nn.Sequential(frozen, nn.Linear(3, 1)), group)


def test_a_layer_that_is_built_on_torchs_keeps_what_it_adds():
    model = nn.Sequential(nn.Linear(3, 3), Activated(3))
    with pytest.raises(echelon.UnsupportedOp, match=r"build its class on echelon\.SyncBatchNorm"):
        echelon.simulate(lambda group: DDP(SyncBatchNorm.convert(model, group), group), 2)
    assert type(model[1]) is Activated
    echelon.simulate(wrap_a_frozen_one, 2)


def replicas(model, group):
    mesh = echelon.Mesh(group, dp=2, pp=1)
    Pipeline(model, mesh["pp"], "gpipe", 1, nn.functional.mse_loss, data_parallel=mesh["dp"])


@pytest.mark.parametrize("wrap", [DDP, replicas])
def test_torchs_own_layer_is_refused_without_torch_distributed(wrap):
    """It took the statistics of each rank alone, without an error."""
    with pytest.raises(echelon.UnsupportedOp, match=r"'1' is torch's SyncBatchNorm, .* each rank alone"):
        echelon.simulate(wrap_torchs_own, 2, (wrap,))


def test_a_layer_of_torchs_on_one_rank_is_told_to_all():
    def main(group):
        layer = (nn.BatchNorm1d, nn.SyncBatchNorm)[group.rank]
        with pytest.raises(echelon.CollectiveMismatch, match=r"rank 1 has '1' is torch's SyncBatchNorm"):
            DDP(nn.Sequential(nn.Linear(3, 3), layer(3)), group)

    echelon.simulate(main, 2)


@pytest.mark.parametrize("layer", [nn.BatchNorm1d, nn.SyncBatchNorm])
def test_torchs_name_of_the_conversion_makes_this_layer(layer):
    def convert(group):
        model = SyncBatchNorm.convert_sync_batchnorm(nn.Sequential(layer(3)))
        return type(model[0]), SyncBatchNorm.convert_sync_batchnorm(layer(3), group)._group is group

    assert echelon.simulate(convert, 2).results == [(SyncBatchNorm, True)] * 2


def train_and_average(group):
    model = SyncBatchNorm.convert(nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)), group)
    ddp = DDP(model, group, average="samples")
    ddp(torch.ones(group.rank + 1, 3)).sum().backward()
    average = torch.optim.swa_utils.AveragedModel(model)
    copied = average.module[1]
    average(torch.full((1, 3), float(group.rank)))
    return copied._group is group, copied.samples is None, copied.weight is model[1].weight, copied.running_mean


def test_a_model_with_this_layer_can_be_averaged():
    """`copy.deepcopy` refused the group."""
    first, second = echelon.simulate(train_and_average, 2).results
    assert first[:3] == second[:3] == (True, True, False)
    assert torch.equal(first[3], second[3]), "the copy synchronizes, too"


def test_a_converted_model_trains_under_ddp(pool):
    model = fill(Net().double())
    model(values(2)).square().sum().backward()
    for gradients in pool.run(train_with_ddp, 2):
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(gradients[name] * 2, parameter.grad, rtol=1e-6, atol=1e-9)


def refused(group, shape):
    SyncBatchNorm(3, group)(torch.ones(shape))


@pytest.mark.parametrize(
    ("world_size", "shape", "error", "message"),
    [
        (2, (4, 2), echelon.SizeMismatch, "expected \\(samples, 3, ...\\)"),
        (2, (3,), echelon.SizeMismatch, "SyncBatchNorm"),
        (1, (1, 3), echelon.InvalidArgument, r"got 1 value per feature .* give larger batches, or call eval\(\)"),
        (2, (0, 3), echelon.InvalidArgument, "got 0 values per feature"),
    ],
)
def test_bad_input_is_refused(world_size, shape, error, message):
    with pytest.raises(error, match=message):
        echelon.simulate(refused, world_size, (shape,))
