"""Batches are cut into microbatches and put together again."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import echelon
from echelon.pipeline.stage.nested import batch_size, merge, split


@given(num_samples=st.integers(0, 20), num_microbatches=st.integers(1, 7))
def test_no_sample_is_lost_and_sizes_differ_by_one_at_most(num_samples, num_microbatches):
    batch = torch.arange(num_samples * 2).reshape(num_samples, 2)
    parts = split(batch, num_microbatches)
    sizes = [len(part) for part in parts]
    assert len(parts) == num_microbatches
    assert max(sizes) - min(sizes) <= 1
    assert sizes == sorted(sizes, reverse=True)
    assert torch.equal(merge(parts), batch)


def test_what_is_no_tensor_goes_along_whole():
    parts = split(({"x": torch.arange(3), "scale": torch.tensor(2.0)}, "text", None), 2)
    assert [part[0]["x"].tolist() for part in parts] == [[0, 1], [2]]
    assert [(part[0]["scale"].item(), *part[1:]) for part in parts] == [(2.0, "text", None)] * 2


def test_outputs_without_a_dim_are_stacked():
    assert merge([torch.tensor(1.0), torch.tensor(2.0)]).tolist() == [1.0, 2.0]


def test_tensors_of_a_batch_have_as_many_samples_each():
    assert batch_size((torch.ones(3), [torch.ones(3, 2), torch.tensor(1.0)]), "inputs") == 3
    assert batch_size(("none", 1), "inputs") is None
    with pytest.raises(echelon.SizeMismatch, match="inputs, dim 0"):
        batch_size((torch.ones(3), torch.ones(4)), "inputs")
