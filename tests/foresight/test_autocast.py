"""Autocast of recorded ranks beside torch's own on fake tensors of CUDA, which need no GPU without autograd."""

from collections import namedtuple

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

from echelon._torch_private.tensors import fake_tensors
from echelon.foresight.record.run import record
from tests.foresight import programs

Given = namedtuple("Given", "half single vector image sample volume indices labels")

CALLS = {
    "softmax": lambda x: x.half.softmax(-1),
    "log_softmax": lambda x: F.log_softmax(x.half, -1),
    "sum": lambda x: (x.half.sum(), x.half.sum(0), x.half.cumsum(0), x.half.prod()),
    "exp": lambda x: (x.half.exp(), x.half.log(), x.half.rsqrt(), x.half**2, 2**x.half, 1 / x.half),
    "softplus": lambda x: F.softplus(x.half),
    "norm": lambda x: (x.half.norm(), torch.linalg.vector_norm(x.half), F.normalize(x.half)),
    "layer_norm": lambda x: (F.layer_norm(x.half, (8,)), F.rms_norm(x.half, (8,)), F.group_norm(x.image, 2)),
    "interpolate": lambda x: (F.interpolate(x.image, scale_factor=2), F.interpolate(x.image, (4, 4), mode="bilinear")),
    "pad": lambda x: (F.pad(x.image, (1, 1, 1, 1), mode="reflect"), F.pad(x.sample, (1, 1), mode="replicate")),
    "pool": lambda x: (F.max_pool2d(x.image, 2), F.avg_pool3d(x.volume, 2), F.adaptive_avg_pool3d(x.volume, 1)),
    "cross_entropy": lambda x: F.cross_entropy(x.half, x.labels),
    "mse_loss": lambda x: (
        F.mse_loss(x.half, x.half),
        F.l1_loss(x.half, x.half),
        F.kl_div(x.half, x.half, reduction="sum"),
    ),
    "matmul": lambda x: (x.single @ x.single, torch.einsum("ij,jk->ik", x.single, x.half), x.single.mv(x.vector)),
    "scatter_add": lambda x: (x.single.scatter_add(0, x.indices, x.half), x.half.scatter_add(0, x.indices, x.half)),
    "addcmul": lambda x: (x.single.addcmul(x.half, x.half), torch.atan2(x.half, x.single)),
    "cat": lambda x: (torch.cat([x.half, x.single]), torch.stack([x.half, x.half])),
    "cosine": lambda x: (F.cosine_similarity(x.half, x.half), torch.cdist(x.half, x.half)),
    "gelu": lambda x: (F.gelu(x.half), F.relu(x.half), x.half * x.single, x.half + 1),
    "double": lambda x: (x.single.double().softmax(-1), x.single.double().exp()),
    "asked": lambda x: (x.half.softmax(-1, dtype=torch.bfloat16), x.half.sum(dtype=torch.float64)),
}


def dtypes_of(call, device):
    given = Given(
        torch.ones(8, 8, device=device, dtype=torch.bfloat16),
        torch.ones(8, 8, device=device),
        torch.ones(8, device=device),
        torch.ones(2, 4, 8, 8, device=device, dtype=torch.bfloat16),
        torch.ones(4, 8, 8, device=device, dtype=torch.bfloat16),
        torch.ones(2, 4, 8, 8, 8, device=device, dtype=torch.bfloat16),
        torch.zeros(8, 8, device=device, dtype=torch.int64),
        torch.zeros(8, device=device, dtype=torch.int64),
    )
    found = call(given)
    return [each.dtype for each in found] if isinstance(found, tuple) else [found.dtype]


def on_cuda(call):
    """Result types by torch's own autocast of CUDA."""
    with fake_tensors():
        torch.set_autocast_dtype("cuda", torch.bfloat16)
        torch.set_autocast_enabled("cuda", True)
        try:
            return dtypes_of(call, "cuda")
        finally:
            torch.set_autocast_enabled(device_type="cuda", enabled=False)
            torch.clear_autocast_cache()
            torch.set_autocast_dtype("cuda", torch.float16)


@pytest.fixture(scope="module")
def recorded():
    """Result types of all calls, in one recording."""
    found = {}

    def program():
        device = programs.begin()
        with torch.autocast("cuda", torch.bfloat16):
            found.update({name: dtypes_of(call, device) for name, call in CALLS.items()})

    record(program, 1)
    return found


@pytest.mark.parametrize("name", CALLS)
def test_results_have_the_types_of_a_gpu(recorded, name):
    assert recorded[name] == on_cuda(CALLS[name])


def test_functions_inside_of_functions_are_treated_alike():
    def program():
        device = programs.begin()
        attention = nn.MultiheadAttention(64, 4, device=device)
        x = torch.ones(16, 2, 64, device=device)
        with torch.autocast("cuda", torch.bfloat16):
            attention(x, x, x)[0].sum().backward()
            low = x @ x.mT
            assert F.gaussian_nll_loss(low, low, low.abs()).dtype == torch.float32

    kernels = [each for each in record(program, 1)[0].entries if hasattr(each, "flops")]
    assert {each.dtype for each in kernels if "softmax" in each.name} == {"float32"}
    assert {each.dtype for each in kernels if each.kind == "matmul"} == {"bfloat16"}


def test_autocast_is_set_by_its_functions_as_well():
    found = []

    def program():
        x = torch.ones(8, 8, device=programs.begin())
        torch.set_autocast_enabled(True)
        found.append((x @ x).dtype)
        torch.set_autocast_gpu_dtype(torch.bfloat16)
        found.extend([(x @ x).dtype, torch.get_autocast_gpu_dtype()])
        torch.set_autocast_enabled("cuda", False)
        found.append((x @ x).dtype)
        with torch.autocast("cuda"):
            found.append((x @ x).dtype)

    record(program, 1)
    assert found == [torch.float16, torch.bfloat16, torch.bfloat16, torch.float32, torch.bfloat16]


def test_autocast_of_the_cpu_leaves_the_gpu_as_it_is():
    found = []

    def program():
        x = torch.ones(8, 8, device=programs.begin())
        with torch.autocast("cpu", torch.bfloat16):
            found.append((x @ x).dtype)
        with torch.autocast("cuda", torch.float16), torch.autocast("cpu", torch.bfloat16):
            found.append((x @ x).dtype)

    trace = record(program, 1)[0]
    assert found == [torch.float32, torch.float16]
    assert trace.assumptions[0].startswith("autocast of the CPU changes no operator")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_arguments_of_functions_of_the_program_are_converted(dtype):
    found = []

    class Function(torch.autograd.Function):
        @staticmethod
        @torch.amp.custom_fwd(device_type="cuda", cast_inputs=dtype)
        def forward(_, x):
            found.append(x.dtype)
            return x @ x

    def program():
        x = torch.ones(8, 8, device=programs.begin(), dtype=torch.float16)
        with torch.autocast("cuda"):
            found.append(Function.apply(x).dtype)

    record(program, 1)
    assert found == [dtype, dtype]


def test_autocast_is_as_before_after_a_recording():
    record(programs.begin, 1)
    x = torch.ones(1, 4, 8, 8, dtype=torch.bfloat16)
    with torch.autocast("cpu", torch.bfloat16):
        assert x.softmax(-1).dtype == torch.bfloat16
        assert F.pad(x, (1, 1, 1, 1), mode="reflect").dtype == torch.float32
