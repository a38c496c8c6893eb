"""Each simulated rank runs the code that torch.compile has compiled for it."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

import echelon

pytestmark = pytest.mark.filterwarnings("ignore:.*is deprecated:DeprecationWarning")
RANKS = 3


class Shifted(nn.Module):
    """Adds the number of the rank, which torch compiles as a constant."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))

    def forward(self, x):
        return self.weight * x + dist.get_rank()


def shifted(x):
    return x + dist.get_rank()


def compiles(how):
    dist.init_process_group("gloo")
    if how == "function":
        compiled = torch.compile(shifted, backend="eager")
    elif how == "module":
        compiled = torch.compile(Shifted(), backend="eager")
    else:
        compiled = Shifted()
        compiled.compile(backend="eager")
    results = [compiled(torch.zeros(2)).sum().item() for _ in range(2)]
    dist.barrier()
    return [*results, compiled(torch.zeros(2)).sum().item()]


@pytest.mark.parametrize("how", ["function", "module", "in place"])
def test_a_rank_computes_with_its_own_number(how):
    for _ in range(2):  # the second simulation finds the code of the first one
        assert echelon.simulate(compiles, RANKS, (how,)).results == [[2.0 * rank] * 3 for rank in range(RANKS)]


def test_more_ranks_than_torch_compiles_a_function_for():
    compiled = []

    def count(graph, _):
        compiled.append(graph)
        return graph.forward

    def program():
        dist.init_process_group("gloo")
        return torch.compile(shifted, backend=count)(torch.zeros(1)).item()

    assert echelon.simulate(program, 12).results == list(range(12))
    assert len(compiled) == 12


def test_torch_compiles_as_before_afterwards():
    before = torch.compile
    echelon.simulate(compiles, 2, ("function",))
    assert torch.compile is before
    compiled = torch.compile(lambda x: x + 1, backend="eager")
    assert compiled(torch.zeros(1)).item() == 1
