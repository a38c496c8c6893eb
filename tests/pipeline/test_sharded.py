"""Stages that FSDP has sharded are refused on all ranks: I and W would leave wrong gradients without an error."""

import pytest
import torch
from torch import nn

import echelon
from echelon.pipeline import Pipeline
from tests.helpers.torch_groups import mesh_of_one


def hold_sharded(group, schedule, part):
    """Makes a pipeline whose second stage is sharded, as a whole or a part of it."""
    from torch.distributed.fsdp import fully_shard  # takes a second

    stages = [nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), nn.Tanh())]
    with mesh_of_one() as mesh:
        if group.rank == 1:
            fully_shard(stages[1].get_submodule(part), mesh=mesh)
        with pytest.raises(echelon.UnsupportedOp) as caught:
            Pipeline(stages, group, schedule, 2, nn.functional.mse_loss)
    return str(caught.value), group.all_reduce(torch.ones(1)).item()


@pytest.mark.parametrize(
    ("schedule", "part", "expected"),
    [("zb-h1", "0", "stage 1, module '0' is sharded by FSDP"), ("1f1b", "", "stage 1 is sharded by FSDP")],
)
def test_a_sharded_stage_is_refused_on_all_ranks(pool, schedule, part, expected):
    for message, total in pool.run(hold_sharded, 2, schedule, part):
        assert message.startswith(expected)
        assert message.endswith(
            "pass the plain stage, with data_parallel= for replicas and ZeroOptimizer to shard their optimizer's state"
        )
        assert total == 2.0


class Wrapped(nn.Linear):
    """Stands for a module of FSDP, which needs a world of torch.distributed."""


def hold_wrapped(group):
    stages = [nn.Linear(4, 4), Wrapped(4, 4) if group.rank == 1 else None]
    Pipeline(stages, group, "1f1b", 2, nn.functional.mse_loss)


def test_it_is_refused_on_simulated_ranks(monkeypatch):
    import torch.distributed.fsdp  # takes a second

    monkeypatch.setattr(torch.distributed.fsdp, "FullyShardedDataParallel", Wrapped)
    with pytest.raises(echelon.UnsupportedOp, match="stage 1 is sharded by FSDP"):
        echelon.simulate(hold_wrapped, 2)
