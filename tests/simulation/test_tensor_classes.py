"""Tensors of a class that each simulated rank defines for itself, as a script does."""

import pytest
import torch

import echelon


def calls_with_own_class(group):
    class Own(torch.Tensor):
        pass

    def own(first):
        return torch.arange(first, first + 4.0).as_subclass(Own)

    rank, peer = group.rank, 1 - group.rank
    changed = own(rank)
    group.all_reduce(changed)
    assert type(changed) is Own
    got = [
        group.all_gather(own(rank)),
        group.reduce_scatter(own(rank)),
        group.all_to_all(own(rank)),
        group.scatter(own(0) if rank == 0 else None, src=0),
        group.sendrecv(own(rank), dst=peer, src=peer),
    ]
    assert {type(each) for each in got} <= {torch.Tensor, Own}  # no class of the other rank, as on processes
    group.broadcast(sent := own(rank), src=1)
    return [each.tolist() for each in (changed, sent, *got)]


@pytest.mark.parametrize("options", [{}, {"collectives": "messages"}, {"order": "tcp"}, {"late_sends": True}], ids=str)
def test_ranks_may_have_tensors_of_classes_of_their_own(options):
    first, second = echelon.simulate(calls_with_own_class, 2, **options).results
    assert first == [
        *([1.0, 3.0, 5.0, 7.0], [1.0, 2.0, 3.0, 4.0], [0.0, 1.0, 2.0, 3.0, 1.0, 2.0, 3.0, 4.0], [1.0, 3.0]),
        *([0.0, 1.0, 1.0, 2.0], [0.0, 1.0], [1.0, 2.0, 3.0, 4.0]),
    ]
    assert second[0] == first[0]
    assert second[3:] == [[5.0, 7.0], [2.0, 3.0, 3.0, 4.0], [2.0, 3.0], [0.0, 1.0, 2.0, 3.0]]
