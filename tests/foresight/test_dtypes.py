"""Mistakes of types and devices that torch finds when a kernel computes, and a forecast has to find without."""

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

from echelon import foresee
from tests.helpers.grids import covering

HALF = torch.bfloat16
WRONG = {
    "linear": lambda device: nn.Linear(8, 8).to(device, HALF)(torch.randn(4, 8, device=device)),
    "linear without bias": lambda device: nn.Linear(8, 8, bias=False).to(device)(
        torch.randn(4, 8, device=device).to(HALF)
    ),
    "linear of integers": lambda device: nn.Linear(8, 8).to(device)(torch.ones(4, 8, dtype=torch.int64, device=device)),
    "matrix and vector": lambda device: torch.randn(4, 4, device=device) @ torch.randn(4, device=device).to(HALF),
    "convolution": lambda device: nn.Conv2d(3, 4, 3, bias=False).to(device, HALF)(
        torch.randn(1, 3, 8, 8, device=device)
    ),
    "layer norm": lambda device: nn.LayerNorm(8).to(device, HALF)(torch.randn(4, 8, device=device)),
    "group norm": lambda device: nn.GroupNorm(2, 8).to(device, HALF)(torch.randn(4, 8, 3, device=device)),
    "batch norm": lambda device: nn.BatchNorm1d(8).to(device, HALF)(torch.randn(4, 8, device=device)),
    "attention": lambda device: F.scaled_dot_product_attention(
        torch.randn(1, 2, 4, 8, device=device),
        torch.randn(1, 2, 4, 8, device=device).to(HALF),
        torch.randn(1, 2, 4, 8, device=device),
    ),
    "heads": lambda device: F.scaled_dot_product_attention(
        *(torch.randn(1, heads, 4, 8, device=device) for heads in (4, 2, 2))
    ),
    "mask": lambda device: F.scaled_dot_product_attention(
        *(torch.randn(1, 2, 4, 8, device=device) for _ in range(3)),
        attn_mask=torch.ones(4, 4, dtype=torch.int64, device=device),
    ),
    "classes": lambda device: F.cross_entropy(
        torch.randn(4, 8, device=device), torch.ones(4, dtype=torch.int32, device=device)
    ),
    "weights of classes": lambda device: F.cross_entropy(
        torch.randn(4, 8, device=device),
        torch.ones(4, dtype=torch.int64, device=device),
        torch.ones(8, device=device).to(HALF),
    ),
    "cross entropy": lambda device: F.binary_cross_entropy(
        torch.rand(4, 8, device=device), torch.ones(4, 8, dtype=torch.int64, device=device)
    ),
    "rows that are added": lambda device: torch.zeros(4, 8, device=device).index_add_(
        0, torch.arange(4, device=device), torch.ones(4, 8, device=device).to(HALF)
    ),
    "rows that are written": lambda device: torch.zeros(4, 8, device=device).index_put_(
        (torch.arange(4, device=device),), torch.ones(4, 8, device=device).to(HALF)
    ),
    "array": lambda device: torch.randn(4, device=device, requires_grad=True).numpy(),
}


@pytest.mark.parametrize(("name", "gpu"), covering(WRONG, ["h100", "cpu"]))
def test_types_that_torch_refuses_are_refused(name, gpu):
    with pytest.raises(RuntimeError):
        WRONG[name]("cpu")
    network = "shared-memory" if gpu == "cpu" else "infiniband-400g"
    with pytest.raises(RuntimeError, match=r"dtype|int64|heads|requires grad"):
        foresee(lambda: WRONG[name]("cpu" if gpu == "cpu" else "cuda"), 1, gpu=gpu, network=network)


def test_types_that_torch_takes_are_taken():
    def program(device):
        half = torch.randn(4, 8, device=device).to(HALF)
        nn.BatchNorm1d(8).to(device)(half)  # the type of parameters under mixed precision
        with torch.autocast(device, HALF):
            nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8)).to(device)(half)
            F.cross_entropy(nn.Linear(8, 8).to(device)(half), torch.ones(4, dtype=torch.int64, device=device))
        F.scaled_dot_product_attention(*(torch.randn(1, n, 4, 8, device=device) for n in (4, 2, 2)), enable_gqa=True)
        half.float().cpu().numpy()

    program("cpu")
    assert foresee(lambda: program("cuda"), 1, gpu="h100").step_seconds > 0


def test_a_norm_of_16_bits_with_weights_of_32_is_for_processors():
    def program(device):
        nn.LayerNorm(8).to(device)(torch.randn(4, 8, device=device).to(HALF))

    program("cpu")
    foresee(lambda: program("cpu"), 1, gpu="cpu", network="shared-memory")
    with pytest.raises(RuntimeError, match="native_layer_norm: expected tensors of one dtype, but got bfloat16 and f"):
        foresee(lambda: program("cuda"), 1, gpu="h100")


def test_a_tensor_of_the_gpu_is_no_array():
    with pytest.raises(TypeError, match="can't convert cuda:0 device type tensor to numpy"):
        foresee(lambda: torch.randn(4, device="cuda").numpy(), 1, gpu="h100")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, HALF])
def test_grouped_products_have_any_type(dtype):
    def program():
        rows, weights = (torch.randn(*shape, device="cuda").to(dtype) for shape in ((16, 16), (2, 16, 32)))
        ends = torch.tensor([8, 16], dtype=torch.int32, device="cuda")
        result = F.grouped_mm(rows.requires_grad_(), weights.requires_grad_(), offs=ends)
        assert result.dtype == dtype
        assert result.shape == (16, 32)
        result.square().sum().backward()
        assert weights.grad.dtype == dtype

    seen = foresee(program, 1, gpu="h100")
    assert seen.mfu > 0
