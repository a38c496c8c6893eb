"""State of the process inside the stages of a pipeline, which run within calls that other ranks interrupt."""

import os

import pytest
import torch
from torch import nn

import echelon
from echelon.pipeline import Pipeline


class Asking(nn.Module):
    """Layer that notes whose environment and random numbers it finds."""

    def __init__(self, rank, found):
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.rank, self.found = rank, found

    def forward(self, x):
        self.found.append((self.rank, int(os.environ["RANK"])))
        return self.linear(x)


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1", "gpipe"])
@pytest.mark.parametrize("network", [None, "1GbE"])
def test_stages_run_with_the_state_of_their_rank(schedule, network):
    found = []

    def main(group):
        model = nn.Sequential(*(Asking(rank, found) for rank in range(group.world_size)))
        pipe = Pipeline(model, group, schedule=schedule, num_microbatches=6, loss_fn=nn.functional.mse_loss)
        inputs = torch.ones(12, 8)
        for _ in range(2):
            pipe.step(inputs, target=inputs)

    echelon.simulate(main, 3, network=network)
    assert len(found) >= 2 * 6 * 3
    assert [(stage, rank) for stage, rank in found if stage != rank] == []
