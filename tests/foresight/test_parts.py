"""Operators that read or change a part of a tensor move the bytes of that part."""

import pytest
import torch
from torch import nn

from echelon import foresee
from echelon.foresight.trace import Kernel

ROWS, WIDTH, CHOSEN = 1000, 8, 5
ROW = 4 * WIDTH
INDICES = 8 * CHOSEN


def update(name):
    """Changes the rows of a table that indices name, and returns the bytes that are read and written."""
    table, rows = torch.zeros(ROWS, WIDTH, device="cuda"), torch.ones(CHOSEN, WIDTH, device="cuda")
    index = torch.arange(CHOSEN, device="cuda")
    wide = index[:, None].expand(CHOSEN, WIDTH)
    match name:
        case "index_put_":
            table[index] = rows
        case "index_put_ of columns":
            table[:, index] = torch.ones(ROWS, CHOSEN, device="cuda")
            return INDICES + 4 * ROWS * CHOSEN, 4 * ROWS * CHOSEN
        case "index_put_ that adds":
            table.index_put_((index,), rows, accumulate=True)
            return INDICES + 2 * CHOSEN * ROW, CHOSEN * ROW
        case "index_copy_":
            table.index_copy_(0, index, rows)
        case "index_fill_":
            table.index_fill_(0, index, 1.0)
            return INDICES, CHOSEN * ROW
        case "index_add_":
            table.index_add_(0, index, rows)
            return INDICES + 2 * CHOSEN * ROW, CHOSEN * ROW
        case "scatter_":
            table.scatter_(0, wide, rows)
            return 8 * CHOSEN * WIDTH + CHOSEN * ROW, CHOSEN * ROW
        case "scatter_add_":
            table.scatter_add_(0, wide, rows)
            return 8 * CHOSEN * WIDTH + 2 * CHOSEN * ROW, CHOSEN * ROW
        case "embedding_renorm_":
            nn.functional.embedding(index, table, max_norm=1.0)
    return INDICES + CHOSEN * ROW, CHOSEN * ROW


@pytest.mark.parametrize(
    "name",
    [
        *("index_put_", "index_put_ of columns", "index_put_ that adds", "index_copy_", "index_fill_", "index_add_"),
        *("scatter_", "scatter_add_", "embedding_renorm_"),
    ],
)
def test_an_operator_in_place_moves_the_rows_that_it_changes(name):
    expected = []
    seen = foresee(lambda: expected.append(update(name)), 1, gpu="h100")
    (kernel,) = (
        each for each in seen.traces[0].entries if isinstance(each, Kernel) and each.name == name.split(maxsplit=1)[0]
    )
    read, written = expected[0]
    assert sum(size for _, size in kernel.writes) == written
    assert sum(size for _, size in kernel.reads) == read


def test_bags_of_embeddings_read_the_rows_of_their_indices():
    def program():
        bags = nn.EmbeddingBag(ROWS, WIDTH, mode="sum").cuda()
        bags(torch.zeros(3, CHOSEN, dtype=torch.int64, device="cuda"))

    seen = foresee(program, 1, gpu="h100")
    (kernel,) = (each for each in seen.traces[0].entries if isinstance(each, Kernel) and "embedding_bag" in each.name)
    read = sum(size for _, size in kernel.reads)
    assert 3 * CHOSEN * (ROW + 8) <= read <= 3 * CHOSEN * (ROW + 8) + 64


@pytest.mark.parametrize("dims", [(2,), (1, 2), (0, 1, 2)], ids=len)
def test_a_transform_passes_its_tensor_once_for_each_dimension(dims):
    def program():
        spectrum = torch.fft.rfftn(torch.ones(8, 16, 32, device="cuda"), dim=dims)
        torch.fft.irfftn(torch.fft.fftn(spectrum, dim=dims), dim=dims)

    seen = foresee(program, 1, gpu="h100")
    found = [each for each in seen.traces[0].entries if isinstance(each, Kernel) and "fft" in each.name]
    real, halves = 8 * 16 * 32 * 4, 8 * 16 * 17 * 8
    assert [each.num_bytes for each in found] == [
        len(dims) * size for size in (real + halves, 2 * halves, halves + real)
    ]
    assert [each.launches for each in found] == [len(dims)] * 3
