"""Nested tensors in recorded programs: sequences of different lengths, one after another."""

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

from echelon import foresee
from echelon.foresight.trace import Kernel

LENGTHS = 300, 500
WIDTH, HEADS = 64, 2


def kernels(program, *args, gpu="h100"):
    return [each for each in foresee(program, 1, args, gpu=gpu).traces[0].entries if isinstance(each, Kernel)]


def sequences(dtype, device):
    tensors = [torch.randn(each, WIDTH, device=device, dtype=dtype) for each in LENGTHS]
    return torch.nested.nested_tensor(tensors, layout=torch.jagged)


def transforms(dtype):
    make = {"dtype": dtype, "device": "cuda"}
    both, out = nn.Linear(WIDTH, 3 * WIDTH, **make), nn.Linear(WIDTH, WIDTH, **make)
    x = sequences(dtype, "cuda")
    assert x.size(0) == 2
    parts = (each.unflatten(-1, (HEADS, -1)).transpose(1, 2) for each in both(x).chunk(3, -1))
    y = F.scaled_dot_product_attention(*parts, is_causal=True).transpose(1, 2).flatten(-2)
    y = nn.LayerNorm(WIDTH, **make)(F.gelu(out(y)) + x)
    y.values().sum().backward()


@pytest.mark.parametrize(("dtype", "kernel"), [(torch.bfloat16, "flash"), (torch.float32, "efficient")])
def test_nested_tensors_attend_inside_of_each_sequence(dtype, kernel):
    found = kernels(transforms, dtype)
    # The products of all positions, without padding: two layers, and their gradients. The input has none.
    products = [each.flops for each in found if each.kind == "matmul"]
    rows = 2 * sum(LENGTHS) * WIDTH * WIDTH
    assert sorted(products) == [rows, rows, rows, 3 * rows, 3 * rows]
    attention = [each for each in found if each.kind == "attention"]
    assert [each.name for each in attention] == [f"_{kernel}_attention_forward", f"_{kernel}_attention_backward"]
    # Each sequence by its own length. A causal mask leaves half.
    pairs = sum(each * each for each in LENGTHS)
    assert [each.flops for each in attention] == [2 * pairs * WIDTH, 5 * pairs * WIDTH]


def is_projected():
    nn.Linear(WIDTH, WIDTH)(sequences(torch.float32, "cpu")).values().sum().backward()


def test_nested_tensors_take_the_products_of_processors():
    found = kernels(is_projected, gpu="cpu")
    assert [each.flops for each in found if each.kind == "matmul"] == [2 * sum(LENGTHS) * WIDTH * WIDTH] * 2


def pads():
    x = sequences(torch.float32, "cuda")
    assert x.to_padded_tensor(0.0).shape == (2, 500, WIDTH)
    assert [len(each) for each in x.unbind()] == list(LENGTHS)
    assert x.mean(1).shape == (2, WIDTH)
    x = torch.nested.nested_tensor_from_jagged(x.values(), torch.tensor([0, 100, 800], device="cuda"))
    assert [len(each) for each in x.unbind()] == [100, 700]


def test_lengths_of_nested_tensors_are_known():
    assert foresee(pads, 1).step_seconds > 0


def is_masked():
    x = sequences(torch.float32, "cuda").unsqueeze(1)
    F.scaled_dot_product_attention(x, x, x, attn_mask=torch.ones(500, 500, device="cuda"))


def test_masks_of_nested_tensors_are_refused_as_by_torch():
    with pytest.raises(ValueError, match="Masks are not yet supported"):
        foresee(is_masked, 1)
