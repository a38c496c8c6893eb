"""A pass of a loader that meets another call of the library is told, with the cure of each."""

import pytest
import torch
from torch import nn

import echelon
from echelon.data import DataLoader
from echelon.errors import CollectiveMismatch, EchelonError


def saving_on_one_rank(group, path):
    model, store = nn.Linear(2, 2), echelon.checkpoint.Store(path, group=group)
    for epoch in (1, 2):
        for _ in DataLoader(torch.arange(8.0), 2, group=group):
            pass
        if group.rank == 0:
            store.save(epoch, model=model)


def test_a_save_on_one_rank_meets_the_next_pass(run, tmp_path):
    """The save read what the loaders tell each other, and raised KeyError."""
    with pytest.raises(EchelonError) as caught:
        run(saving_on_one_rank, 2, str(tmp_path))
    text = str(caught.value)
    assert isinstance(caught.value, CollectiveMismatch), text
    assert "a pass of the loader" in text
    assert "call Store.save on every rank, outside of `if rank == 0`" in text


def leaving_early(group):
    ddp = echelon.DDP(nn.Linear(1, 1), group)
    for _ in range(2):
        for batch in DataLoader(torch.arange(8.0).view(8, 1), 2, group=group):
            ddp(batch).sum().backward()
            if group.rank == 1:
                break


def test_a_loop_that_one_rank_leaves_is_named(run):
    with pytest.raises(EchelonError, match="run each loop over the loader on every rank, to its end") as caught:
        run(leaving_early, 2)
    assert "all_gather_object" not in str(caught.value)
