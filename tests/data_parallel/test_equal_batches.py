"""Ranks that all train on the same batches are warned of, once; a fixed batch and batches of their own are not."""

import warnings

import pytest
import torch
from torch import nn

import echelon
from echelon.data import DataLoader
from echelon.data_parallel.equal_batches import EqualBatches
from echelon.data_parallel.summary import StepCounts, Summary

WARNING = r"all 2 ranks got the same batch in each of the first two steps"


def batches(group, kind):
    data = torch.arange(48.0).view(24, 2)
    if kind == "equal":
        return torch.utils.data.DataLoader(data, batch_size=4)
    if kind == "dealt":
        return DataLoader(data, batch_size=4, group=group)
    if kind == "fixed":
        return [data[:4]] * 4
    if kind == "equal at first":
        return [data[:4], *data.chunk(6)[2 * group.rank + 1 :]][:3]
    return [None] * 3


class Model(nn.Linear):
    def forward(self, x):
        return super().forward(torch.rand(4, 2) if x is None else x)


def train(group, kind, accumulate=False):
    ddp = echelon.DDP(Model(2, 2), group)
    optimizer = torch.optim.SGD(ddp.parameters(), 1e-3)
    for batch in batches(group, kind):
        optimizer.zero_grad()
        if accumulate:
            with ddp.no_sync():
                ddp(batch).sum().backward()
        ddp(batch).sum().backward()
        optimizer.step()


@pytest.mark.parametrize("accumulate", [False, True])
def test_equal_batches_are_warned_of_once_at_the_users_line(accumulate):
    with pytest.warns(UserWarning, match=WARNING) as caught:
        echelon.simulate(train, 2, ("equal", accumulate))
    assert len(caught) == 1
    assert caught[0].filename == __file__


@pytest.mark.parametrize("kind", ["dealt", "fixed", "equal at first", "none"])
def test_others_are_not(kind):
    with warnings.catch_warnings(action="error"):
        echelon.simulate(train, 2, (kind,))


class Graph:
    """Samples in an object that holds no tensor of a known kind."""


def inputs_of(kind, group, step):
    """Returns the inputs of each forward of a step."""
    time = torch.full((4,), step)
    if kind == "own samples, then the same noise":
        return [(own(group),), (torch.full((4, 2), float(step)),)]
    if kind == "samples in an object beside a time":
        return [(Graph(), time)]
    if kind == "own texts beside a time":
        return [([f"text {group.rank}"], time)]
    if kind == "the same texts beside a time":
        return [([f"text {step}"], time)]
    if kind == "a number of the step alone":
        return [(torch.tensor(step),)]
    return [(torch.empty(4, 2, dtype=torch.int4),)]


def own(group):
    return torch.rand(4, 2) + group.rank


class AnyInput(nn.Linear):
    def forward(self, *inputs):
        return super().forward(torch.rand(4, 2))


def train_on(group, kind, accumulate):
    ddp = echelon.DDP(AnyInput(2, 2), group)
    optimizer = torch.optim.SGD(ddp.parameters(), 1e-3)
    for step in range(3):
        optimizer.zero_grad()
        *first, last = inputs_of(kind, group, step)
        if accumulate:
            for inputs in first:
                with ddp.no_sync():
                    ddp(*inputs).sum().backward()
            first = []
        sum(ddp(*inputs).sum() for inputs in [*first, last]).backward()
        optimizer.step()


@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize(
    "kind",
    [
        "own samples, then the same noise",
        "samples in an object beside a time",
        "own texts beside a time",
        "a number of the step alone",
        "a dtype that torch cannot copy",
    ],
)
def test_inputs_that_are_equal_in_part_are_not(kind, accumulate):
    with warnings.catch_warnings(action="error"):
        echelon.simulate(train_on, 2, (kind, accumulate))


def test_equal_texts_are():
    with pytest.warns(UserWarning, match=WARNING):
        echelon.simulate(train_on, 2, ("the same texts beside a time", False))


def without_optimizer(group):
    ddp = echelon.DDP(nn.Linear(2, 2), group)
    watch, numbers = ddp._sync.reducer.equal_batches, []
    for step in range(4):
        batch = torch.full((4, 2), float(step))
        numbers.append(watch.number_of([batch]))
        ddp(batch).sum().backward()
    return [number > 0 for number in numbers]


def test_few_batches_are_read_of_a_program_without_optimizer():
    assert echelon.simulate(without_optimizer, 2).results[0] == [True, True, True, False]


def compiled(group):
    ddp = echelon.DDP(nn.Linear(2, 2), group)
    torch.compile(ddp, backend="eager")(own(group)).sum().backward()


def test_torchs_compiler_does_not_see_the_watch():
    """It warned of zlib.crc32, which it cannot trace."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        echelon.simulate(compiled, 2)
    assert not [str(each.message) for each in caught if "crc32" in str(each.message)]


def test_one_rank_is_not():
    with warnings.catch_warnings(action="error"):
        echelon.simulate(train, 1, ("equal",))


def joining(group):
    ddp = echelon.DDP(nn.Linear(2, 2), group)
    optimizer = torch.optim.SGD(ddp.parameters(), 1e-3)
    with ddp.join():
        for step in range(3 if group.rank else 1):
            optimizer.zero_grad()
            ddp(torch.full((4, 2), 3.0 * group.rank + step)).sum().backward()
            optimizer.step()


def test_the_last_rank_of_a_join_has_nobody_to_compare_with():
    with warnings.catch_warnings(action="error"):
        echelon.simulate(joining, 2)


def summary_of(*batches):
    """Returns the sums over ranks with these numbers of a batch; None: a rank that does not count."""
    rows = []
    for batch in batches:
        counts = StepCounts()
        counts.batch = batch or 0
        if batch is None:
            counts.exempt()
        rows.append(counts.summary([True], [], beside=False).numbers())
    return Summary.read([sum(column) for column in zip(*rows, strict=True)])


def test_sums_tell_whether_all_batches_are_equal():
    largest = (1 << 24) - 1
    assert summary_of(5, 5, 5).has_equal_batches()
    assert summary_of(5, None, 5).has_equal_batches()
    assert not any(summary_of(*each).has_equal_batches() for each in [(5, 6), (5, 0), (0, 0), (5, None), (1, 9, 5)])
    assert summary_of(*[largest] * 3).has_equal_batches()
    assert largest**2 * 32_768 < 2**63  # sums of 64 bits


def test_the_number_of_a_batch_is_within_its_bits():
    def numbers(group):
        watch = EqualBatches(group)
        return [watch.number_of([torch.full((3,), value)]) for value in (1.0, 1.0, 2.0)], watch.number_of([])

    (one, same, other), none = echelon.simulate(numbers, 2).results[0]
    assert one == same != other
    assert 0 < one < 1 << 24
    assert none == 0
