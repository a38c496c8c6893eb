"""Memory that the backward of attention takes on a GPU while it computes."""

from functools import partial
from itertools import takewhile

import pytest
import torch
from torch.nn.attention.varlen import varlen_attn
from torch.nn.functional import scaled_dot_product_attention

from echelon import foresee
from echelon.foresight.trace import Allocate, Free, Kernel


def attention(device, heads=(4, 4), queries=128, width=64, dtype=torch.bfloat16, *, masked=False):
    """One call of two sequences, forward and backward."""
    query, key, value = (
        torch.empty(2, each, length, width, device=device, dtype=dtype, requires_grad=True)
        for each, length in ((heads[0], queries), (heads[1], 256), (heads[1], 256))
    )
    mask = torch.empty(queries, 256, device=device, dtype=dtype) if masked else None
    scaled_dot_product_attention(query, key, value, mask, enable_gqa=heads[0] != heads[1]).sum().backward()


def held(seen):
    """Bytes that are neither inputs nor results of the backward of attention, in the order of their allocation."""
    entries = seen.traces[0].entries
    (place,) = (
        place
        for place, each in enumerate(entries)
        if isinstance(each, Kernel) and each.kind == "attention" and "backward" in each.name
    )
    after = next(each for each in range(place - 1, -1, -1) if isinstance(entries[each], Kernel))
    ends = takewhile(lambda each: isinstance(each, Free), entries[place + 1 :])
    freed = {each.storage for each in ends} - {storage for storage, _ in entries[place].writes}
    new = [each for each in entries[after:place] if isinstance(each, Allocate)]
    return [each.num_bytes for each in new if each.storage in freed]


SUMS = 4 * 2 * 4 * 128
"""Bytes of a number of float32 for each query and head."""


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, [SUMS, 64 * SUMS]),
        ({"queries": 100}, [SUMS, 64 * SUMS]),  # rounded up
        ({"width": 40}, [SUMS, 64 * SUMS]),
        ({"width": 256}, [SUMS, 256 * SUMS]),
        ({"heads": (4, 2)}, [SUMS, 64 * SUMS, *[2 * 2 * 4 * 256 * 64] * 2]),
        ({"masked": True}, [SUMS, 64 * SUMS]),
        ({"masked": True, "queries": 160}, [SUMS * 160 // 128, 64 * SUMS * 192 // 128]),
        ({"dtype": torch.float32}, [SUMS, 64 * SUMS]),
    ],
    ids=str,
)
def test_backward_holds_it_while_it_computes(options, expected):
    assert held(foresee(partial(attention, "cuda", **options), 1)) == expected


def test_documents_of_different_lengths_count_all_of_their_queries():
    def program():
        query = torch.empty(1024, 4, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        ends = torch.tensor([0, 640, 1024], dtype=torch.int32, device="cuda")
        varlen_attn(query, query, query, ends, ends, 640, 640).sum().backward()

    assert held(foresee(program, 1)) == [4 * 4 * 1024, 4 * 4 * 1024 * 64]


def test_the_peak_of_a_step_counts_it():
    few, many = (foresee(partial(attention, "cuda", heads, 4096), 1).live_memory[0] for heads in ((8, 8), (8, 4)))
    # Fewer heads save keys and values, and their gradients. Gradients for each head of queries are more than that.
    saved = 4 * 2 * 2 * 4 * 256 * 64
    assert many - few == 2 * 2 * 2 * 8 * 256 * 64 - saved


def test_a_processor_holds_none():
    assert held(foresee(partial(attention, "cpu"), 1, gpu="cpu")) == []
