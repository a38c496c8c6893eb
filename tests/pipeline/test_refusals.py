"""What cannot be is refused in one line, on every rank."""

import pytest
import torch
from torch import nn

import echelon
from echelon.pipeline import Pipeline, schedules
from tests.helpers.one_process import make_batch, make_model


def fail_with(group, case):
    model, kwargs, samples = make_model(2), {}, 4
    schedule, count = "1f1b", 2
    if case == "unknown schedule":
        schedule = "2f2b"
    elif case == "too few layers":
        model = nn.Sequential(nn.Linear(6, 6))
    elif case == "not cuttable":
        model = nn.Linear(6, 6)
    elif case == "a number":
        model = 3
    elif case == "numbers":
        model = [1, 2]
    elif case == "no layers":
        model = nn.Sequential()
    elif case == "no such replicas":
        kwargs = {"data_parallel": 3}
    elif case == "replicas of itself":
        kwargs = {"data_parallel": group}
    elif case == "recompute no stage":
        kwargs = {"recompute": [2]}
    elif case == "recompute a mask":
        kwargs = {"recompute": [True, False]}
    elif case == "recompute a tensor":
        kwargs = {"recompute": torch.tensor(0)}
    elif case == "recompute some":
        kwargs = {"recompute": "all"}
    elif case == "no such schedule":
        schedule = 7
    elif case == "no microbatches":
        count = 0
    elif case == "half a microbatch":
        count = 2.5
    elif case == "chunks":
        schedule, kwargs = "zb-v", {"num_chunks": 3}
    elif case == "no function":
        kwargs = {"metrics": 3}
    elif case == "no such reduction":
        kwargs = {"loss_reduction": "max"}
    elif case == "frozen":
        model = make_model(2).requires_grad_(False)
    elif case == "no gradients":
        with torch.no_grad():
            return told(model, group, schedule, count, samples, kwargs)
    elif case == "on meta":
        model = make_model(2).to("meta")
    elif case == "wrong names":
        kwargs = {"at": ["nine"]}
    elif case == "no names":
        kwargs = {"at": 1}
    elif case == "other ranks":
        schedule, count = schedules.build("1f1b", num_ranks=3, num_microbatches=2), None
    elif case == "few samples":
        samples = 1
    elif case == "disagree":
        schedule = "gpipe" if group.rank else "1f1b"
    return told(model, group, schedule, count, samples, kwargs)


def told(model, group, schedule, count, samples, kwargs):
    try:
        pipe = Pipeline(model, group, schedule, count, nn.functional.mse_loss, **kwargs)
        inputs, target = make_batch(samples)
        pipe.step(inputs if pipe.is_first else None, target=target if pipe.is_last else None)
    except echelon.EchelonError as error:
        return type(error).__name__, str(error)
    return "no error", ""


@pytest.mark.parametrize(
    ("case", "kind", "words"),
    [
        ("unknown schedule", "ScheduleError", "1f1b"),
        ("too few layers", "PartitionError", "cannot cut 1 layer into 2 stages"),
        ("not cuttable", "PartitionError", "pass example=(inputs,)"),
        ("a number", "PartitionError", "pass an nn.Module"),
        ("numbers", "PartitionError", "entry 0 of the list of stages is 1"),
        ("no layers", "PartitionError", "cannot cut 0 layers into 2 stages"),
        ("no such replicas", "InvalidArgument", "data_parallel is 3 (int): pass the group that"),
        ("replicas of itself", "UnsupportedOp", "ranks [0, 1] are in the pipeline's group and in data_parallel"),
        ("recompute no stage", "UnsupportedOp", "recompute=[2]: give True, or a list of stages from 0 to 1"),
        ("recompute a mask", "UnsupportedOp", "recompute=[True, False]: give True, or a list of stages"),
        ("recompute a tensor", "UnsupportedOp", "recompute=tensor(0): give True, or a list of stages"),
        ("recompute some", "UnsupportedOp", "recompute='all': give True"),
        ("no such schedule", "ScheduleError", "give a name"),
        ("no microbatches", "ScheduleError", "num_microbatches=0"),
        ("half a microbatch", "ScheduleError", "num_microbatches=2.5"),
        ("chunks", "ScheduleError", "num_chunks=3"),
        ("no function", "UnsupportedOp", "metrics is 3 (int)"),
        ("no such reduction", "UnsupportedOp", 'use "mean" or "sum"'),
        ("wrong names", "PartitionError", "nine"),
        ("no names", "PartitionError", "at=1: give a list of names of layers"),
        ("other ranks", "ScheduleError", "for 3 ranks, the group has 2"),
        ("disagree", "CollectiveMismatch", "pass the same arguments"),
    ],
)
def test_bad_input_gets_one_line_on_every_rank(case, kind, words):
    for got, message in echelon.simulate(fail_with, 2, (case,), timeout=20.0).results:
        assert (got, words in message, message.count("\n")) == (kind, True, 0), message


@pytest.mark.parametrize(
    ("case", "kind", "words"),
    [
        ("frozen", "UnsupportedOp", "depends on nothing that requires a gradient"),
        ("no gradients", "UnsupportedOp", "step() was called inside of torch.no_grad()"),
        ("on meta", "UnsupportedOp", "weight is on the meta device"),
    ],
)
def test_a_step_that_cannot_be_is_refused_on_every_rank(case, kind, words):
    results = echelon.simulate(fail_with, 2, (case,), timeout=20.0).results
    assert kind in [got for got, _ in results]
    for got, message in results:
        assert got in (kind, "PeerFailed")
        assert words in message


def step_in_a_hook(group, by_hand):
    mesh = echelon.Mesh(group, dp=2, pp=2)
    other = nn.Linear(1, 1)
    inputs, target = make_batch(4)
    try:
        pipe = Pipeline(make_model(2), mesh["pp"], "1f1b", 2, nn.functional.mse_loss, data_parallel=mesh["dp"])
        for parameter in pipe.parameters():
            optimizer = torch.optim.SGD([parameter if pipe.is_first else next(other.parameters())], lr=0.1)
            parameter.register_post_accumulate_grad_hook(lambda _, optimizer=optimizer: optimizer.step())
        group.barrier()
        if by_hand:
            out = pipe.forward(inputs, train=True)
            pipe.backward(None if out is None else torch.ones_like(out))
        else:
            pipe.step(inputs, target=target)
    except echelon.EchelonError as error:
        return type(error).__name__, str(error)
    return "no error", ""


@pytest.mark.parametrize("by_hand", [False, True])
def test_an_optimizer_step_inside_of_a_step_is_refused(run, by_hand):
    """It took the gradient of one microbatch of one replica, so the replicas went apart without an error."""
    told = [result for result in run(step_in_a_hook, 4, by_hand) if result[0] != "no error"]
    assert len(told) == 4 or by_hand  # where the backward of the last stage may have ended
    assert "UnsupportedOp" in [kind for kind, _ in told]
    for kind, message in told:
        assert kind in ("UnsupportedOp", "PeerFailed")
        assert "a step of SGD began inside of pipe.step()" in message


class Weighted(nn.Module):
    """Loss with a weight that is learnt."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))

    def forward(self, output, target):
        return nn.functional.mse_loss(output, target) * self.weight


def learn_in_the_loss(group, is_trained):
    mesh = echelon.Mesh(group, dp=2, pp=1)
    loss_fn = Weighted().requires_grad_(is_trained)
    try:
        pipe = Pipeline(make_model(1), mesh["pp"], "1f1b", 2, loss_fn, data_parallel=mesh["dp"])
        inputs, target = make_batch(4)
        pipe.step(inputs, target=target)
    except echelon.EchelonError as error:
        return str(error)
    return "no error"


def test_a_loss_that_learns_is_refused_if_there_are_replicas():
    """Each replica had another gradient of the loss's parameter, and went on with another value."""
    for text in echelon.simulate(learn_in_the_loss, 2, (True,), timeout=20.0).results:
        assert text.startswith("loss_fn (Weighted) trains a parameter of its own, 'weight', whose gradients")
    assert echelon.simulate(learn_in_the_loss, 2, (False,), timeout=20.0).results == ["no error", "no error"]


def complex_loss(group):
    pipe = Pipeline(make_model(2), group, "1f1b", 2, lambda output, _: output.sum() * 1j)
    inputs, target = make_batch(4)
    try:
        pipe.step(inputs, target=target)
    except echelon.EchelonError as error:
        return str(error)
    return "no error"


def test_a_complex_loss_is_refused():
    results = echelon.simulate(complex_loss, 2, timeout=20.0).results
    assert all("returned torch.complex128: make it real" in message for message in results)


def test_fewer_samples_than_microbatches_is_told_to_all_ranks(run):
    for kind, message in run(fail_with, 3, "few samples"):
        assert kind in ("SizeMismatch", "PeerFailed")
        assert "at least 2 samples for 2 microbatches" in message


def more_targets_than_inputs(group):
    pipe = Pipeline(make_model(3), group, "1f1b", 3, sum_of_squares_of_means)
    inputs, target = make_batch(5)
    try:
        pipe.step(inputs, target=target[:4])
    except echelon.SizeMismatch as error:
        return str(error)
    return "no error"


def sum_of_squares_of_means(output, target):
    return (output.mean() - target.mean()).square()


@pytest.mark.parametrize("world_size", [1, 3])
def test_inputs_and_target_of_different_length_are_refused_on_every_rank(run, world_size):
    """The ranks of the first and the last stage see one of the two each; the loss here would broadcast silently."""
    for message in run(more_targets_than_inputs, world_size):
        assert "target of step(): expected 5 samples, as the inputs, got 4" in message


def weigh_nothing(group):
    pipe = Pipeline(make_model(1), group, "1f1b", 2, nn.functional.mse_loss, loss_weight=lambda _: 0.0)
    inputs, target = make_batch(4)
    pipe.step(inputs, target=target)


def test_weights_that_add_up_to_nothing_are_refused():
    with pytest.raises(echelon.SizeMismatch, match="weights that add up to more than 0"):
        echelon.simulate(weigh_nothing, 1)


def replicas_with_strides(group):
    """Gradients of replicas are averaged in the order of their memory."""
    stage = nn.Linear(3, 4)
    if group.rank:
        stage.weight = nn.Parameter(torch.zeros(3, 4).t())
    with pytest.raises(echelon.CollectiveMismatch, match=r"'weight' float32\[4, 3\] with dims in memory as \[1, 0\]"):
        Pipeline([stage], echelon.Mesh(group, dp=2, pp=1)["pp"], "gpipe", 2, data_parallel=group)


def test_weights_of_replicas_lie_in_memory_in_one_order():
    echelon.simulate(replicas_with_strides, 2)
