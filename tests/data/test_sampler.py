"""Samples are dealt to the ranks exactly once an epoch, however a run is stopped, and on how many ranks it goes on."""

import copy
import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.data import DataLoader as TorchDataLoader
from torch.utils.data import IterableDataset, TensorDataset

import echelon
from echelon.checkpoint import Store
from echelon.data import DataLoader, DistributedSampler
from echelon.errors import CollectiveMismatch, InvalidArgument
from echelon.pipeline import Pipeline


def run_for(group, num_samples, batch_size, num_steps, state, kind="loader"):
    """Takes some batches, or all that are left of the epoch. Returns the samples, and the state after them."""
    dataset = TensorDataset(torch.arange(num_samples))
    if kind == "loader":
        place = loader = DataLoader(dataset, batch_size, shuffle=True, group=group)
    else:
        place = DistributedSampler(dataset, group)
        loader = TorchDataLoader(dataset, batch_size, sampler=place)
    if state is not None:
        place.load_state_dict(state)
    epoch, taken = place.epoch, []
    for (batch,) in itertools.islice(loader, num_steps):
        taken.append(batch.tolist())
    return epoch, taken, place.state_dict()


def samples_of(results):
    return [sample for _, taken, _ in results for batch in taken for sample in batch]


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    num_samples=st.integers(1, 40),
    before=st.integers(1, 5),
    after=st.integers(1, 5),
    batch_before=st.integers(1, 7),
    batch_after=st.integers(1, 7),
    data=st.data(),
    kind=st.sampled_from(["loader", "sampler"]),
)
def test_a_stopped_epoch_goes_on_at_any_number_of_ranks(
    num_samples, before, after, batch_before, batch_after, data, kind
):
    # All ranks make each step: in the last one of an epoch some may have no samples, and then cannot save.
    whole_steps = num_samples // (before * batch_before)
    num_steps = data.draw(st.integers(0, whole_steps + (num_samples % (before * batch_before) >= before)))
    first = echelon.simulate(run_for, before, (num_samples, batch_before, num_steps, None, kind)).results
    states = [state for _, _, state in first]
    assert states == [states[0]] * before
    rest = echelon.simulate(run_for, after, (num_samples, batch_after, None, states[0], kind)).results
    seen = samples_of(first)
    if rest[0][0] == 0:
        seen += samples_of(rest)
    else:  # the epoch was over, and this is the next one
        assert sorted(samples_of(rest)) == list(range(num_samples))
    assert sorted(seen) == list(range(num_samples))
    lengths = [sum(map(len, taken)) for _, taken, _ in rest]
    assert max(lengths) - min(lengths) <= 1


def passes(group, num_samples, kind):
    dataset = TensorDataset(torch.arange(num_samples))
    if kind == "loader":
        loader = DataLoader(dataset, 2, shuffle=True)
        return [[sample for (batch,) in loader for sample in batch.tolist()] for _ in range(3)]
    sampler = DistributedSampler(dataset)
    return [list(sampler) for _ in range(3)]


@pytest.mark.parametrize("kind", ["loader", "sampler"])
def test_each_epoch_has_all_samples_in_an_order_of_its_own(kind):
    epochs = list(zip(*echelon.simulate(passes, 3, (20, kind)).results, strict=True))
    assert all(sorted(itertools.chain(*epoch)) == list(range(20)) for epoch in epochs)
    assert len(set(map(str, epochs))) == 3


def global_batches(group, batch_size):
    loader = DataLoader(TensorDataset(torch.arange(17)), batch_size, shuffle=True)
    return [sorted(batch.tolist()) for (batch,) in loader]


def test_ranks_share_the_batches_of_one_process():
    """So that a run on four ranks has the steps of one process with four times the batch."""
    one = echelon.simulate(global_batches, 1, (8,)).results[0]
    four = echelon.simulate(global_batches, 4, (2,)).results
    together = [sorted(itertools.chain(*each)) for each in itertools.zip_longest(*four, fillvalue=[])]
    assert together == one


def train(group, join):
    """Trains on 13 samples, whose last step has one sample for three ranks."""
    torch.manual_seed(0)
    inputs = torch.randn(13, 3, dtype=torch.float64)
    model = nn.Linear(3, 1).double()
    ddp = echelon.DDP(model, group, average="samples")
    optimizer = torch.optim.SGD(ddp.parameters(), 0.1, momentum=0.9)
    loader = DataLoader(TensorDataset(inputs, inputs.sum(1, keepdim=True)), 12 // group.world_size, shuffle=True)
    for _ in range(2):
        with ddp.join(optimizer.step):
            for batch, target in loader:
                optimizer.zero_grad()
                (ddp(batch) - target).square().mean().backward()
                optimizer.step()
    return model.weight.detach().clone()


def test_with_sample_weights_and_join_uneven_ends_equal_one_process(run):
    expected = echelon.simulate(train, 1, (False,)).results[0]
    for weight in run(train, 3, True):
        torch.testing.assert_close(weight, expected, rtol=1e-12, atol=0)


def dropped(group):
    loader = DataLoader(TensorDataset(torch.arange(23)), 3, shuffle=True, drop_last=True)
    sampler = DistributedSampler(range(23), drop_last=True)
    return [len(batch) for (batch,) in loader], len(loader), len(list(sampler)), len(sampler)


def test_with_drop_last_all_ranks_have_as_many():
    assert echelon.simulate(dropped, 2).results == [([3, 3, 3], 3, 11, 11)] * 2


def with_workers(group, num_steps, state):
    loader = DataLoader(TensorDataset(torch.arange(24)), 2, shuffle=True, group=group, num_workers=1)
    if state is not None:
        loader.load_state_dict(state)
    before = torch.get_rng_state()
    taken = [batch.tolist() for (batch,) in itertools.islice(loader, num_steps)]
    assert torch.equal(torch.get_rng_state(), before), "a run that goes on would draw other random numbers"
    return 0, taken, loader.state_dict()


def test_the_place_is_that_of_the_program_and_not_of_the_workers():
    with echelon.init() as group:
        first = with_workers(group, 3, None)
        rest = with_workers(group, None, first[2])
    assert first[2]["position"] == 6
    assert sorted(samples_of([first, rest])) == list(range(24))


def test_a_sampler_that_workers_read_ahead_has_no_place():
    with echelon.init() as group:
        sampler = DistributedSampler(range(24), group)
        loader = TorchDataLoader(list(range(24)), 2, sampler=sampler, num_workers=1)
        for _ in loader:
            with pytest.raises(InvalidArgument, match=r"use echelon\.data\.DataLoader"):
                sampler.state_dict()
        assert len(list(loader)) == 12, "whole epochs are fine"
        sampler.set_epoch(5)
        assert sampler.state_dict()["epoch"] == 5


def early_end(group):
    loader = DataLoader(TensorDataset(torch.arange(8)), 2)
    first = [batch.tolist() for (batch,) in itertools.islice(loader, 1)]
    return first, [batch.tolist() for (batch,) in loader], loader.epoch


def train_with_a_scheduler(group, num_epochs, state, at):
    """Returns (epoch, batches, learning rate after it) of each epoch, and what was saved after `at` batches."""
    loader = DataLoader(TensorDataset(torch.arange(11)), 2, shuffle=True, group=group, drop_last=True)
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    if state is not None:
        for each, saved in zip((loader, optimizer, scheduler), state, strict=True):
            each.load_state_dict(saved)
    told, count, saved = [], 0, None
    for epoch in range(loader.epoch, num_epochs):
        num_batches = 0
        for _ in loader:
            assert loader.epoch == epoch
            optimizer.step()
            num_batches, count = num_batches + 1, count + 1
            if count == at:
                saved = tuple(copy.deepcopy(each.state_dict()) for each in (loader, optimizer, scheduler))
        scheduler.step()
        told.append((epoch, num_batches, scheduler.get_last_lr()))
    return told, saved


@pytest.mark.parametrize("ranks_after", [1, 2])
def test_after_the_last_batch_of_an_epoch_what_follows_its_loop_still_runs(ranks_after):
    """Resumed runs went on with the next epoch, so a scheduler was one step behind, and an epoch too many was run."""
    (whole, saved), _ = echelon.simulate(train_with_a_scheduler, 2, (4, None, 4)).results
    rest, _ = echelon.simulate(train_with_a_scheduler, ranks_after, (4, saved, None)).results[0]
    per_epoch = [2, 5][ranks_after == 1]
    assert [each[:2] for each in whole] == [(epoch, 2) for epoch in range(4)]
    assert [each[:2] for each in rest] == [(1, 0), (2, per_epoch), (3, per_epoch)]
    assert [each[2] for each in rest] == [each[2] for each in whole[1:]]


def test_a_loop_that_takes_all_batches_and_no_more_ends_its_epoch():
    def passes(group):
        loader = DataLoader(TensorDataset(torch.arange(6)), 2, group=group)
        counts = [sum(len(batch) for (batch,) in itertools.islice(loader, len(loader))) for _ in range(2)]
        kept = iter(loader)
        counts += [sum(len(next(kept)[0]) for _ in range(len(loader)))]
        assert loader.epoch == 2  # `kept` could still be asked
        counts += [sum(len(batch) for (batch,) in loader)]
        del kept
        return counts, loader.epoch

    assert echelon.simulate(passes, 1).results == [([6, 6, 6, 6], 4)]


def test_a_loop_that_ended_early_is_continued():
    assert echelon.simulate(early_end, 2).results == [([[0, 2]], [[4, 6]], 1), ([[1, 3]], [[5, 7]], 1)]


@pytest.mark.parametrize("case", ["length", "seed", "place"])
def test_ranks_that_would_take_other_samples_are_told(case):
    def begin(group):
        size = 8 + group.rank * (case == "length")
        loader = DataLoader(TensorDataset(torch.arange(size)), 2, seed=group.rank * (case == "seed"))
        if case == "place":
            loader.set_epoch(group.rank)
        next(iter(loader))

    with pytest.raises(CollectiveMismatch, match="give all ranks the same dataset and seed"):
        echelon.simulate(begin, 2)


def save_and_go_on(group, path, until):
    model = nn.Linear(1, 1)
    ddp = echelon.DDP(model, group)
    loader = DataLoader(TensorDataset(torch.arange(24)), 2, shuffle=True)
    store = Store(path)
    store.load(model=ddp, loader=loader)
    taken = []
    for (batch,) in itertools.islice(loader, until):
        taken += batch.tolist()
    store.save(len(taken) + 1, model=ddp, loader=loader)
    store.close()
    return taken


def test_a_checkpoint_goes_on_at_another_number_of_ranks(tmp_path):
    seen = [echelon.simulate(save_and_go_on, n, (str(tmp_path), 2)).results for n in (3, 2)]
    seen.append(echelon.simulate(save_and_go_on, 1, (str(tmp_path), None)).results)
    assert sorted(itertools.chain(*itertools.chain(*seen))) == list(range(24))


def with_dropout(group, path, until, generator):
    """Trains on torch's DataLoader, saves, and returns the dropout's masks."""
    sampler = DistributedSampler(range(16), group)
    loader = TorchDataLoader(list(range(16)), 2, sampler=sampler, generator=torch.Generator() if generator else None)
    torch.manual_seed(3)
    model = echelon.DDP(nn.Linear(1, 1), group)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    store = Store(path)
    store.load(model=model, optimizer=optimizer, loader=sampler)
    masks = [nn.functional.dropout(torch.ones(6)).tolist() for _ in itertools.islice(loader, until)]
    if until is not None:
        store.save(until, model=model, optimizer=optimizer, loader=sampler)
    store.close()
    return masks


@pytest.mark.parametrize("generator", [True, False])
def test_dropout_goes_on_beside_a_loader_with_a_generator_of_its_own(tmp_path, generator):
    whole = echelon.simulate(with_dropout, 2, (str(tmp_path / "whole"), None, generator)).results
    for until in (2, None):
        seen = echelon.simulate(with_dropout, 2, (str(tmp_path / "parts"), until, generator)).results
    # Without one, torch's loader draws from the generator of the dropout, as the documentation says.
    assert (seen == [masks[2:] for masks in whole]) == generator


def in_pipelines(group, num_replicas, path, until):
    mesh = echelon.Mesh(group, dp=num_replicas, pp=2)
    layers = nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1))
    pipe = Pipeline(layers, mesh["pp"], "1f1b", 2, nn.functional.mse_loss, data_parallel=mesh["dp"])
    loader = DataLoader(TensorDataset(torch.arange(16.0)[:, None]), 2, shuffle=True, group=mesh["dp"])
    store = Store(path)
    store.load(model=pipe, loader=loader)
    taken = []
    for (batch,) in itertools.islice(loader, until):
        pipe.step(batch, target=batch)
        taken += batch.flatten().tolist()
    store.save(len(taken) + num_replicas, model=pipe, loader=loader)
    store.close()
    return taken


def test_all_stages_of_a_replica_have_its_samples_and_another_number_of_replicas_goes_on(tmp_path):
    two = echelon.simulate(in_pipelines, 4, (2, str(tmp_path), 2)).results
    one = echelon.simulate(in_pipelines, 2, (1, str(tmp_path), None)).results
    assert two[0] == two[1]
    assert two[2] == two[3]
    assert one[0] == one[1]
    assert sorted(two[0] + two[2] + one[0]) == list(range(16))


def accumulate(group, num_steps, state, options):
    """Returns, for each step of two epochs, how many batches are left after it, and the last state."""
    loader = DataLoader(TensorDataset(torch.arange(11)), group=group, **options)
    if state is not None:
        loader.load_state_dict(state)
    steps = []
    for _ in range(loader.epoch, 2):
        for number, _ in enumerate(loader, 1):
            if number % 2 == 0 or loader.batches_left == 0:
                steps.append(loader.batches_left)
                if len(steps) == num_steps:
                    return steps, loader.state_dict()
        assert loader.batches_left == len(loader), "the next epoch is whole"
    return steps, None


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"batch_size": 1}, [[4, 2, 0], [3, 1, 0]]),  # one rank has 6 samples, and the other 5
        ({"batch_size": 1, "drop_last": True}, [[3, 1, 0], [3, 1, 0]]),
        ({"batch_size": 2}, [[1, 0], [1, 0]]),  # the last batch of rank 1 is smaller
        ({"batch_size": 1, "num_workers": 1}, [[4, 2, 0], [3, 1, 0]]),  # which prepare batches ahead
    ],
)
@pytest.mark.parametrize("stop", [1, 2, 3])
def test_a_resumed_epoch_tells_its_last_batch(options, expected, stop):
    """Its loop has fewer batches than len(loader), so a script that compared with that missed the last step."""
    whole = [each * 2 for each in expected]
    assert [steps for steps, _ in echelon.simulate(accumulate, 2, (None, None, options)).results] == whole
    first = echelon.simulate(accumulate, 2, (stop, None, options)).results
    second = echelon.simulate(accumulate, 2, (None, first[0][1], options)).results
    assert [before + after for (before, _), (after, _) in zip(first, second, strict=True)] == whole


class Stream(IterableDataset):
    def __iter__(self):
        return iter(range(3))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda group: DistributedSampler(Stream(), group), "without a length"),
        (lambda _: DistributedSampler(range(3)), r"call group = echelon\.init\(\) first"),
        (lambda _: DistributedSampler(range(3), 2), "group is 2"),
        (lambda _: DataLoader(range(3), group=None), "group is None"),
        (lambda group: DistributedSampler(range(3), group, seed=0.5), "seed is 0.5"),
        (lambda group: DataLoader(range(3), 0, group=group), "batch_size is 0"),
        (lambda group: DistributedSampler(range(3), group).set_epoch(-1), "epoch is -1"),
        (
            lambda group: DistributedSampler(range(3), group).load_state_dict(
                DistributedSampler(range(4), group).state_dict()
            ),
            "num_samples=4, and this one has 3",
        ),
        (
            lambda group: DistributedSampler(range(3), group).load_state_dict(
                {"num_samples": 3, "seed": 0, "shuffle": True}
            ),
            "load the result of state_dict",
        ),
    ],
)
def test_wrong_arguments(call, message):
    group = echelon.init()
    if "first" in message:
        group.close()
    with group, pytest.raises(InvalidArgument, match=message):
        call(group)


def test_the_text_form():
    with echelon.init() as group:
        assert repr(DistributedSampler(range(3), group)) == (
            "<DistributedSampler, rank 0 of 1: 0 of 3 samples of epoch 0 are taken>"
        )
