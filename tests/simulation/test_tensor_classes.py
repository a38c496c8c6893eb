"""Tensors of classes of the program: one for all ranks, as in a module, or one for each, as in a script."""

import pytest
import torch

import echelon


class Shared(torch.Tensor):
    pass


def calls_with_own_class(group, is_shared=False):
    class OfRank(torch.Tensor):
        pass

    own_class = Shared if is_shared else OfRank

    def own(first):
        return torch.arange(first, first + 4.0).as_subclass(own_class)

    rank, peer = group.rank, 1 - group.rank
    changed = own(rank)
    group.all_reduce(changed)
    assert type(changed) is own_class
    got = [
        group.all_gather(own(rank)),
        group.reduce_scatter(own(rank)),
        group.all_to_all(own(rank)),
        group.scatter(own(0) if rank == 0 else None, src=0),
        group.gather(own(rank), dst=0),
        group.sendrecv(own(rank), dst=peer, src=peer),
    ]
    assert {type(each) for each in got if each is not None} == {torch.Tensor}
    group.broadcast(sent := own(rank), src=1)
    return [each.tolist() for each in (changed, sent, *got) if each is not None]


@pytest.mark.parametrize("options", [{}, {"collectives": "messages"}, {"order": "tcp"}, {"late_sends": True}], ids=str)
@pytest.mark.parametrize("is_shared", [False, True])
def test_results_of_simulated_ranks_are_plain_tensors(options, is_shared):
    check_results(echelon.simulate(calls_with_own_class, 2, args=(is_shared,), **options).results)


@pytest.mark.parametrize("backend", ["auto", "tcp"])
def test_results_of_processes_are_plain_tensors(pool, backend):
    check_results(pool.run(calls_with_own_class, 2, True, backend=backend))


def check_results(results):
    first, second = results
    assert first == [
        *([1.0, 3.0, 5.0, 7.0], [1.0, 2.0, 3.0, 4.0], [0.0, 1.0, 2.0, 3.0, 1.0, 2.0, 3.0, 4.0], [1.0, 3.0]),
        *([0.0, 1.0, 1.0, 2.0], [0.0, 1.0], [0.0, 1.0, 2.0, 3.0, 1.0, 2.0, 3.0, 4.0], [1.0, 2.0, 3.0, 4.0]),
    ]
    assert second[0] == first[0]
    assert second[3:] == [[5.0, 7.0], [2.0, 3.0, 3.0, 4.0], [2.0, 3.0], [0.0, 1.0, 2.0, 3.0]]
