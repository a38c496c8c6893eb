"""torch loads no pickled tensor of float8 or uint16, so a function that returned one failed in the parent."""

import pickle

import pytest
import torch
from torch import nn

from echelon.launch.pickling import dumps
from tests.helpers import rank_functions

DTYPES = [
    dtype
    for dtype in vars(torch).values()
    if isinstance(dtype, torch.dtype)
    and dtype.itemsize
    and str(dtype).startswith(("torch.float", "torch.uint", "torch.bf"))
    and not str(dtype).endswith("_x2")
    and dtype not in {getattr(torch, f"uint{bits}", None) for bits in range(1, 8)}
]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_tensors_of_every_dtype_are_loaded(dtype):
    raw = torch.arange(1, 1 + 6 * dtype.itemsize, dtype=torch.uint8)
    matrix = raw.view(dtype).reshape(2, 3)
    values = [matrix, matrix.t(), matrix[0, 1], matrix[:, :0], matrix[:, 1], matrix[0, 0].expand(3)]
    for value, got in zip(values, pickle.loads(dumps(values)), strict=True):
        assert (got.dtype, got.shape) == (dtype, value.shape)
        assert torch.equal(as_bytes(got), as_bytes(value))


def as_bytes(tensor):
    return tensor.clone(memory_format=torch.contiguous_format).reshape(-1).view(torch.uint8)


def test_a_part_of_a_tensor_is_pickled_alone():
    assert len(dumps(torch.zeros(1 << 20, dtype=torch.uint16)[:2])) < 1000


def test_a_parameter_stays_one():
    parameter = nn.Parameter(torch.ones(2).to(torch.float8_e4m3fn))
    frozen = nn.Parameter(torch.ones(2, dtype=torch.uint16), requires_grad=False)
    got = pickle.loads(dumps([parameter, frozen]))
    assert [(type(each), each.requires_grad, each.dtype) for each in got] == [
        (nn.Parameter, True, torch.float8_e4m3fn),
        (nn.Parameter, False, torch.uint16),
    ]


def test_arguments_and_results_of_ranks_are_tensors_of_float8(pool):
    argument = torch.tensor([1.0, -0.5]).to(torch.float8_e5m2)
    for result in pool.run(rank_functions.same, 1, argument):
        assert result.dtype == argument.dtype
        assert result.tolist() == [1.0, -0.5]
