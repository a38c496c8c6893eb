"""A gradient that the program keeps has its values for ever, as in torch, unless a backward adds to it in place."""

from contextlib import nullcontext

import pytest
import torch
from torch import nn

from echelon import DDP
from echelon.data_parallel import AccumulateIn


class Branches(nn.Module):
    """Two layers, of which a forward uses those that it names."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(2, 1, bias=False)
        self.second = nn.Linear(2, 1, bias=False)

    def forward(self, x, names):
        return sum(getattr(self, name)(x) for name in names)


def gradients_of(model):
    return [model.first.weight.grad, model.second.weight.grad]


def values(kept):
    return [[None if each is None else each.tolist() for each in gradients] for gradients in kept]


def kept(group, options, num_before):
    model = DDP(Branches(), group, **options)
    history = []
    for step, names in enumerate((("first", "second"), ("first",), ("second",), ("first", "second")), start=1):
        model.zero_grad()
        for last in (False,) * num_before + (True,):
            with nullcontext() if last else model.no_sync():
                model(torch.full((1, 2), float(step)), names).sum().backward()
        history.append(gradients_of(model))
    return values(history)


OPTIONS = [{}, {"average": "samples"}, {"bucket_mb": 1e-6}, {"hook": AccumulateIn(torch.float64)}]


@pytest.mark.parametrize("num_before", [0, 1])
@pytest.mark.parametrize("options", OPTIONS, ids=["plain", "samples", "buckets", "wide"])
def test_kept_gradients_do_not_change(run, options, num_before):
    """Each backward wrote its gradients into the kept ones, and zeros into those of unused parameters."""
    each = 1 + num_before
    first, second, third, fourth = ([[1.0 * each * step] * 2] for step in (1, 2, 3, 4))
    for history in run(kept, 2, options, num_before):
        assert history == [[first, first], [second, None], [None, third], [fourth, fourth]]


def set_by_hand(group):
    """As PCGrad does, whose gradient of the step is made of the kept ones of its tasks."""
    model = DDP(Branches(), group)
    tasks = []
    for name in ("first", "second"):
        model.zero_grad()
        model(torch.full((1, 2), group.rank + 1.0), ("first", name)).sum().backward()
        tasks.append(model.first.weight.grad)
    with torch.no_grad():
        model.first.weight.grad = tasks[0] - tasks[1] + group.rank
    model.sync_gradients()
    return [each.tolist() for each in (*tasks, model.first.weight.grad)]


def test_kept_gradients_do_not_change_when_others_are_set_by_hand(run):
    assert run(set_by_hand, 2) == [[[[3.0, 3.0]], [[1.5, 1.5]], [[2.0, 2.0]]]] * 2


def kept_beside(group):
    model = DDP(Branches(), group)
    both = ("first", "second")
    model(torch.ones(1, 2), both).sum().backward()
    same, own = model.first.weight.grad, model.second.weight.grad
    model.second.weight.grad = None
    model(torch.ones(1, 2), both).sum().backward()
    model.zero_grad(set_to_none=False)
    model(torch.ones(1, 2), both).sum().backward()
    return model.first.weight.grad is same, same.tolist(), own.tolist()


def test_a_gradient_that_is_there_is_added_to_in_place(run):
    """As in torch: the kept one and the parameter's are the same tensor."""
    assert run(kept_beside, 2) == [(True, [[1.0, 1.0]], [[1.0, 1.0]])] * 2


def views(group):
    """Without a kept gradient all steps use the views of the beginning, which are not made anew."""
    model = DDP(Branches(), group)
    seen = []
    for _ in range(4):
        model.zero_grad()
        model(torch.ones(1, 2), ("first", "second")).sum().backward()
        seen.append([id(view) for memory in model._sync.reducer.buckets.memories for view in memory._views])
    return seen[1] == seen[2] == seen[3]  # the first backward may change the layout


def test_gradients_that_nobody_keeps_stay_where_they_are(run):
    assert run(views, 2) == [True, True]
