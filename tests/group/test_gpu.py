"""Tensors of a GPU: over NCCL in a world of one, and through the host's memory, two ranks on one GPU.

`make gpu` runs these; without CUDA they are skipped.
"""

from functools import partial

import pytest
import torch

import echelon
from echelon.group.staging import VARIABLE
from echelon.pipeline import Pipeline
from tests.helpers.collective_cases import ALL_DTYPES, Case, call, check, expected, ops_of
from tests.helpers.models import gradients
from tests.helpers.one_process import make_batch, make_model, train_alone

DEVICE = "cuda"
NCCL = "nccl"
REASON = f"torch {torch.__version__} sees no GPU with CUDA"

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason=REASON)]


def with_fallback(function, *args):
    """Runs a function as a rank whose environment allows the way through the host's memory."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(VARIABLE, "1")
        return function(*args)


def fallback(group, function, *args):
    return with_fallback(partial(function, group), *args)


@pytest.fixture(params=["nccl, 1 rank", "fallback, 1 rank", "fallback, 2 ranks", "fallback over gloo, 2 ranks"])
def run(request, pool):
    """Runs a function on ranks whose tensors are on the GPU, and returns their results."""
    if request.param.startswith("nccl"):
        return lambda function, *args: pool.run(function, 1, *args, backend=NCCL, timeout=60.0)
    world_size = 1 if "1 rank" in request.param else 2
    backend = "gloo" if "gloo" in request.param else "auto"
    return lambda function, *args: pool.run(fallback, world_size, function, *args, backend=backend, timeout=60.0)


def ones(group, shape=(3, 5), dtype=torch.float32):
    return torch.full(shape, group.rank + 1, dtype=dtype, device=DEVICE)


def total(group):
    return sum(range(1, group.world_size + 1))


def on_host(tensor):
    assert tensor.device.type == torch.device(DEVICE).type
    return tensor.cpu()


def sum_and_mean(group):
    given = ones(group)
    found = group.all_reduce(given)
    assert found is given
    return on_host(found), on_host(group.all_reduce(ones(group), "mean")), total(group), group.world_size


def test_sums_and_means(run):
    for added, mean, wanted, size in run(sum_and_mean):
        assert torch.equal(added, torch.full((3, 5), float(wanted)))
        assert torch.equal(mean, torch.full((3, 5), wanted / size))


def broadcast(group):
    return [on_host(group.broadcast(ones(group), src)) for src in range(group.world_size)]


def test_broadcast_from_every_rank(run):
    for found in run(broadcast):
        assert [each.unique().tolist() for each in found] == [[src + 1.0] for src in range(len(found))]


def wrong_root(group):
    with pytest.raises(echelon.InvalidRank):
        group.broadcast(ones(group), group.world_size)
    return on_host(group.all_reduce(ones(group))).unique().tolist(), total(group)


def test_a_root_that_is_no_rank_leaves_the_group_usable(run):
    for found, wanted in run(wrong_root):
        assert found == [wanted]


SHAPES = [(), (1,), (0,), (2, 0, 3), (1, 4096), (70_001,)]


def shapes(group):
    return [
        on_host(group.all_reduce(ones(group, shape))) for shape in ((), (1,), (0,), (2, 0, 3), (1, 4096), (70_001,))
    ]


def test_shapes_are_kept(run):
    for found in run(shapes):
        assert [tuple(each.shape) for each in found] == SHAPES


def half(group):
    return on_host(group.all_reduce(ones(group, dtype=torch.bfloat16))), total(group)


def test_bfloat16(run):
    for found, wanted in run(half):
        assert found.dtype == torch.bfloat16
        assert found.unique().tolist() == [wanted]


def with_gaps(group):
    room = torch.zeros(4, 6, 2, device=DEVICE)
    given = room[..., 1].t()
    given.fill_(group.rank + 1)
    group.all_reduce(given)
    gathered = group.all_gather(given)
    return room.cpu(), on_host(gathered), total(group)


def test_tensors_with_gaps_in_memory(run):
    for room, gathered, wanted in run(with_gaps):
        assert room[..., 0].unique().tolist() == [0.0]
        assert room[..., 1].unique().tolist() == [wanted]
        assert gathered.unique().tolist() == [wanted]


def on_a_side_stream(group):
    """What is queued before a collective is in it, and what is queued after it sees its result: no synchronisation."""
    results = []
    for async_op in (False, True):
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            large = torch.ones(2000, 2000, device=DEVICE)
            for _ in range(20):
                large = large @ large / 2000  # long enough that a copy which does not wait comes too early
            given = large[:10].contiguous() * (group.rank + 1)
            found = group.all_reduce(given, async_op=async_op)
            found = found.wait() if async_op else found
            results.append(found * 2)
        stream.synchronize()
    return [on_host(result).unique().tolist() for result in results], total(group)


def test_the_order_of_a_side_stream_is_kept(run):
    for found, wanted in run(on_a_side_stream):
        assert found == [[2.0 * wanted]] * 2


def make_calls(group, batch):
    for case in batch:
        found = call(case, group, lambda values: values.to(DEVICE))
        check(case, None if found is None else on_host(found), expected(case, group.world_size)[group.rank])
    return len(batch)


@pytest.mark.parametrize("name", ["all_reduce", "reduce", "reduce_scatter", "all_gather", "gather", "all_to_all"])
def test_every_collective_and_dtype(run, name):
    batch = [case for dtype in ALL_DTYPES for case in some_cases(name, dtype)]
    assert set(run(make_calls, batch)) == {len(batch)}


def some_cases(name, dtype):
    """Two calls, one on rows that differ in number."""

    for uneven in (False, True):
        yield Case(name, dtype, 5, (3,), ops_of(dtype)[0], "plain", uneven, uneven, 0, 3)


def refuse(group):
    with pytest.raises(echelon.UnsupportedOp, match=VARIABLE):
        group.all_reduce(ones(group))
    return group.all_reduce(torch.ones(1)).item()


@pytest.mark.parametrize("backend", ["auto", "tcp", "gloo"])
def test_without_the_switch_it_is_an_error_and_the_group_goes_on(pool, backend):
    assert pool.run(refuse, 2, backend=backend) == [2.0, 2.0]


def where(group):
    return str(group.device), torch.cuda.current_device()


def test_a_rank_over_nccl_has_a_gpu_of_its_own(pool):
    assert pool.run(where, 1, backend="nccl", timeout=60.0) == [("cuda:0", 0)]


def train(group):
    torch.manual_seed(0)
    model = torch.nn.Linear(8, 3).to(DEVICE)
    ddp = echelon.DistributedDataParallel(model, group)
    inputs = torch.arange(32.0, device=DEVICE).view(4, 8) / 32
    part = inputs.tensor_split(group.world_size)[group.rank]
    ddp(part).square().mean().backward()
    return on_host(model.weight.grad)


def test_data_parallelism_gives_the_gradient_of_one_process(run):
    torch.manual_seed(0)
    alone = torch.nn.Linear(8, 3)
    alone(torch.arange(32.0).view(4, 8) / 32).square().mean().backward()
    for gradient in run(train):
        torch.testing.assert_close(gradient, alone.weight.grad)


TWO_GPUS = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="two ranks over NCCL need a GPU each")


def talk(group):
    """Messages both ways at once, in different orders, behind what the stream still has to compute."""
    other = 1 - group.rank
    large = torch.ones(2000, 2000, device=group.device)
    for _ in range(20):
        large = large @ large / 2000
    sent = [group.isend(large[: 10 + tag].contiguous() * (tag + 1), other, tag) for tag in range(4)]
    order = range(4) if group.rank == 0 else reversed(range(4))
    came = {tag: group.recv(other, tag) * 2 for tag in order}
    for work in sent:
        work.wait()
    place = torch.zeros(3, device=group.device)
    swapped = group.sendrecv(torch.full((3,), group.rank + 1.0, device=group.device), other, other, 9, out=place)
    assert swapped is place
    return (
        [on_host(came[tag]).unique().tolist() for tag in range(4)],
        [len(came[tag]) for tag in range(4)],
        place.tolist(),
    )


@TWO_GPUS
def test_messages_over_nccl(pool):
    results = pool.run(talk, 2, backend=NCCL, timeout=60.0)
    for rank, (values, lengths, place) in enumerate(results):
        assert values == [[2.0], [4.0], [6.0], [8.0]]
        assert lengths == [10, 11, 12, 13]
        assert place == [2.0 - rank] * 3


def train_in_stages(group):
    model = make_model(4, torch.float32).to(group.device)
    pipe = Pipeline(model, group, "1f1b", 6, torch.nn.functional.mse_loss)
    inputs, target = (tensor.to(group.device) for tensor in make_batch(12, torch.float32))
    losses = [pipe.step(inputs, target=target).loss.item() for _ in range(2)]
    return losses, {name: on_host(value.grad) for name, value in pipe.named_parameters()}


@TWO_GPUS
def test_a_pipeline_over_nccl_gives_the_gradients_of_one_process(pool):
    results = pool.run(train_in_stages, 2, backend=NCCL, timeout=60.0)
    model = make_model(4, torch.float32)
    wanted = [train_alone(model, make_batch(12, torch.float32), 6).item() for _ in range(2)]
    expected = gradients(model)
    for losses, found in results:
        assert losses == pytest.approx(wanted, rel=1e-5)
        for name, gradient in found.items():
            torch.testing.assert_close(gradient, expected[name])
