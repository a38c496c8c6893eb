"""A tensor that a traced model writes to stays in one stage: each stage would have a copy of its own."""

import pytest
import torch
from torch import nn

from echelon import PartitionError
from echelon.pipeline import split
from echelon.pipeline.cut.graph_cut import boundaries
from echelon.pipeline.cut.tracing import trace

X = torch.ones(2, 4)


class Counting(nn.Module):
    """Three layers with a counter; two functions use it before the second one and after it."""

    def __init__(self, before, after):
        super().__init__()
        self.first, self.second, self.third = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)
        self.register_buffer("count", torch.zeros(2))
        self.before, self.after = before, after

    def forward(self, x):
        x = self.before(self.count, self.first(x))
        return self.third(self.after(self.count, self.second(x)))


def adds(count, x):
    count.add_(1)
    return x


def adds_to_a_view(count, x):
    count[0] += 1
    return x


def adds_without_gradients(count, x):
    with torch.no_grad():
        count.view(1, 2).add_(1)
    return x


def reads(count, x):
    return x * count.sum()


def ignores(_, x):
    return x


@pytest.mark.parametrize(
    ("before", "after"),
    [(adds_to_a_view, reads), (reads, adds), (adds, adds_without_gradients), (adds_without_gradients, adds_to_a_view)],
)
def test_a_stage_does_not_use_a_buffer_that_another_writes_to(before, after):
    model = Counting(before, after)
    with pytest.raises(PartitionError, match="count is used before and after the beginning of second"):
        split(model, at=["second"], example=(X,))
    assert boundaries(trace(model, (X,), {}).training) == ["third"]


@pytest.mark.parametrize("write", [adds, adds_to_a_view, adds_without_gradients])
def test_a_buffer_may_be_written_in_the_stage_that_uses_it(write):
    model = Counting(ignores, lambda count, x: reads(count, write(count, x)))
    first, last = split(model, at=["second"], example=(X,)).modules
    for count in (1, 2):
        assert torch.equal(last(first(X)), model.third(model.second(model.first(X)) * last.count.sum()))
        assert last.count[0] == count


class Marking(Counting):
    """The counter is an argument of the model."""

    def forward(self, x, counted):
        x = self.before(counted, self.first(x))
        return self.third(self.after(counted, self.second(x)))


def test_a_stage_does_not_use_a_keyword_argument_that_another_writes_to():
    with pytest.raises(PartitionError, match="counted is used before and after the beginning of second"):
        split(
            Marking(adds_to_a_view, reads),
            at=["second"],
            example=(X,),
            example_kwargs={"counted": torch.zeros(3)},
        )


class Viewing(Counting):
    """The counter is computed, and one of the functions gets a view of it."""

    def forward(self, x):
        count = self.first(x)
        view = count[:, :2]
        x = self.before(view, self.second(x))
        return self.third(self.after(count, x) + view.sum())


@pytest.mark.parametrize(("before", "after"), [(adds, reads), (reads, adds_to_a_view)])
def test_a_stage_does_not_get_a_view_beside_what_it_is_a_view_of(before, after):
    with pytest.raises(PartitionError, match="is used before and after the beginning of second"):
        split(Viewing(before, after), at=["second"], example=(X,))
    split(Viewing(reads, reads), at=["second"], example=(X,))


def fills_a_row(mask):
    mask[0] = 1


def fills_a_view(mask):
    mask.view(-1).fill_(1)


def fills_columns(mask):
    mask[:, :2] = mask[:, :2].masked_fill(torch.ones(4, 2, dtype=torch.bool), 3.0)


def fills_without_gradients(mask):
    with torch.no_grad():
        mask[0].fill_(2)


class Masked(nn.Module):
    """Layers that multiply by a mask, which the forward makes of zeros and fills."""

    def __init__(self, fill):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.fill = fill

    def forward(self, x):
        mask = torch.zeros(4, 4)
        self.fill(mask)
        for layer in self.layers:
            x = x + layer(x) @ mask
        return x


@pytest.mark.parametrize("fill", [fills_a_row, fills_a_view, fills_columns, fills_without_gradients])
def test_a_mask_that_is_filled_through_a_view_reaches_later_stages(fill):
    """A later stage repeated the zeros without what was written to them."""
    model = Masked(fill)
    first, last = split(model, at=["layers.2"], example=(X,)).modules
    assert torch.equal(last(*first(X)), model(X))
