"""RMSNorm and dropout of recorded ranks: one kernel each way, as torch has on a GPU."""

from functools import partial
from threading import Event, Thread

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import SequenceParallel, parallelize_module
from torch.utils.checkpoint import checkpoint

from echelon.foresight.play.fusion import fuse
from echelon.foresight.record.run import record
from echelon.foresight.trace import Allocate, Kernel
from tests.foresight import programs

ROWS, WIDTH = 64, 4096
FUSED = ["_fused_rms_norm", "_fused_rms_norm_backward"]


def normed(*, dtype=torch.bfloat16, weight=torch.bfloat16, autocast=False, wrap=lambda module: module):
    """One step of a layer, with a copy before it, so that the layer's input needs a gradient."""
    device = programs.begin()
    norm = nn.RMSNorm(WIDTH, device=device, dtype=weight)
    call = wrap(norm)
    optimizer = torch.optim.SGD(norm.parameters(), 0.1)
    x = torch.ones(ROWS, WIDTH, device=device, dtype=dtype, requires_grad=True)
    with torch.autocast("cuda", torch.bfloat16, enabled=autocast):
        y = call(x)
    y.backward(torch.ones_like(y))
    optimizer.step()


def kernels(program, world_size=1):
    return [each for each in record(program, world_size)[0].entries if isinstance(each, Kernel)]


def names(program):
    return [each.name for each in kernels(program) if "rms" in each.name or each.name in ("pow", "rsqrt")]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_one_kernel_each_way(dtype):
    found = {each.name: each for each in kernels(partial(normed, dtype=dtype, weight=dtype)) if "rms" in each.name}
    assert list(found) == FUSED
    matrix, row, scales = ROWS * WIDTH * dtype.itemsize, WIDTH * dtype.itemsize, 4 * ROWS
    forward, backward = found.values()
    assert sum(size for _, size in forward.reads) == matrix + row
    assert sum(size for _, size in forward.writes) == matrix + scales
    assert sum(size for _, size in backward.reads) == 2 * matrix + row + scales
    assert sum(size for _, size in backward.writes) == matrix + row
    assert {(each.launches, each.dtype) for each in found.values()} == {(1, str(dtype).removeprefix("torch."))}


def test_nothing_in_float32_is_kept():
    sizes = [each.num_bytes for each in record(normed, 1)[0].entries if isinstance(each, Allocate)]
    assert max(sizes) == 2 * ROWS * WIDTH


@pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight:UserWarning")  # as on a GPU
def test_the_formula_where_torch_has_no_kernel():
    assert names(normed) == FUSED
    found = names(partial(normed, weight=torch.float32))
    assert "rsqrt" in found
    assert not set(found) & set(FUSED)


def test_autocast_computes_it_in_float32():
    found = [each for each in kernels(partial(normed, weight=torch.float32, autocast=True)) if "rms" in each.name]
    assert [(each.name, each.dtype) for each in found] == [(name, "float32") for name in FUSED]


def test_checkpointing_computes_it_again():
    def wrap(norm):
        return partial(checkpoint, norm, use_reentrant=False)

    assert names(partial(normed, wrap=wrap)) == [FUSED[0], *FUSED]


def test_a_compiled_one_joins_its_neighbours():
    def program():
        device = programs.begin()
        layer = nn.Sequential(nn.SiLU(), nn.RMSNorm(WIDTH, device=device), nn.SiLU())
        torch.compile(layer)(torch.ones(ROWS, WIDTH, device=device)).sum().backward()

    trace = fuse(record(program, 1)[0])
    assert not [each for each in trace.entries if isinstance(each, Kernel) and "rms" in each.name]


def penalized():
    device = programs.begin()
    norm = nn.RMSNorm(WIDTH, device=device)
    x = torch.ones(ROWS, WIDTH, device=device, requires_grad=True)
    (gradient,) = torch.autograd.grad(norm(x).sum(), x, create_graph=True)
    gradient.square().sum().backward()
    assert x.grad.shape == x.shape
    assert norm.weight.grad.shape == norm.weight.shape


def test_gradients_of_gradients_take_the_formula():
    assert {"_fused_rms_norm", "rsqrt"} <= set(names(penalized))


def of(function, *shape, **options):
    """A program that calls a function with a tensor of a GPU."""

    def program():
        function(torch.ones(*shape, device=programs.begin(), **options))

    return program


def test_an_input_with_gaps_is_copied_each_way():
    def program(x):
        nn.functional.rms_norm(x.transpose(0, 1), (8,)).sum().backward()

    found = [each.name for each in kernels(of(program, 4, 2, 8, requires_grad=True))]
    assert found.index("clone") < found.index(FUSED[0])
    assert found.count("clone") == 3  # the input twice, and the gradient


@pytest.mark.parametrize(("shape", "weight"), [((5,), None), ((4,), 5), ((2, 4, 4), None), ((), None)])
def test_shapes_that_do_not_fit_are_refused_by_torch(shape, weight):
    given = None if weight is None else torch.ones(weight)
    with pytest.raises((RuntimeError, ValueError), match=r"normalized_shape|must have at least 3 dimensions"):
        record(of(lambda x: nn.functional.rms_norm(x, shape, given), 2, 4), 1)


def test_transforms_of_functions_take_the_formula():
    def program(x):
        torch.func.grad(lambda y: nn.functional.rms_norm(y, (4,)).sum())(x)

    found = names(of(program, 3, 4))
    assert "rsqrt" in found
    assert not set(found) & set(FUSED)


def sequence_parallel():
    device = programs.begin()
    mesh = init_device_mesh("cuda", (2,))
    norm = parallelize_module(nn.RMSNorm(WIDTH, device=device), mesh, SequenceParallel())
    optimizer = torch.optim.SGD(norm.parameters(), 0.1)
    x = DTensor.from_local(torch.ones(2, ROWS, WIDTH, device=device, requires_grad=True), mesh, [Shard(1)])
    norm(x).sum().backward()
    optimizer.step()


def test_a_sharded_one_has_the_same_kernels_for_its_rows():
    found = [each for each in kernels(sequence_parallel, 2) if "rms" in each.name]
    assert [each.name for each in found] == FUSED
    assert sum(size for _, size in found[0].reads) == 4 * (2 * ROWS * WIDTH + WIDTH)


def dropped(*, p, train=True):
    device = programs.begin()
    layer = nn.Dropout(p).train(train)
    x = torch.ones(ROWS, WIDTH, device=device, dtype=torch.bfloat16, requires_grad=True)
    y = layer(x) * 1
    y.backward(torch.ones_like(y))


def test_dropout_keeps_a_mask_of_bytes():
    trace = record(partial(dropped, p=0.1), 1)[0]
    found = [each for each in trace.entries if isinstance(each, Kernel) and "drop" in each.name]
    assert [each.name for each in found] == ["native_dropout", "native_dropout_backward"]
    assert sum(size for _, size in found[0].writes) == 3 * ROWS * WIDTH
    assert ROWS * WIDTH in [each.num_bytes for each in trace.entries if isinstance(each, Allocate)]


@pytest.mark.parametrize(("p", "train"), [(0.1, False), (0.0, True), (1.0, True)])
def test_dropout_of_nothing_or_all_has_no_mask(p, train):
    assert not [each.name for each in kernels(partial(dropped, p=p, train=train)) if "native_dropout" in each.name]


def test_outside_of_recorded_ranks_it_computes():
    """Another thread of the program's process, and the same one afterwards, get values and gradients."""

    def results():
        x = torch.arange(12.0).reshape(3, 4).requires_grad_()
        torch.manual_seed(3)
        y = nn.functional.rms_norm(x, (4,), torch.ones(4), 1e-6)
        z = nn.functional.dropout(y, 0.5)
        z.square().sum().backward()
        return y.detach(), z.detach(), x.grad

    expected, during = results(), []
    is_recording, has_computed = Event(), Event()

    def beside():
        is_recording.wait()
        during.append(results())
        has_computed.set()

    def program():
        normed()
        is_recording.set()
        has_computed.wait(60)

    thread = Thread(target=beside)
    thread.start()
    record(program, 1)
    thread.join()
    for found in (*during, results()):
        assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True))
    assert during
