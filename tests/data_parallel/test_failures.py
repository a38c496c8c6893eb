"""Ranks that disagree, fail or ask for what cannot be are told, all of them, in one line."""

import itertools

import pytest
import torch
from torch import nn

import echelon
from echelon import DDP
from tests.helpers.models import TINY_MB, backward, batch, loss_of, mlp, part


def different_models(group, change):
    module = mlp()
    if group.rank == group.world_size - 1:
        if change == "shape":
            module[2] = nn.Linear(8, 5)
        elif change == "name":
            module.add_module("extra", nn.Linear(1, 1))
        elif change == "dtype":
            module[4].double()
        elif change == "strides":
            module[2].weight = nn.Parameter(module[2].weight.t().contiguous().t())
        elif change == "buffer":
            module.register_buffer("mask", torch.ones(2))
        elif change == "frozen":
            module[0].bias.requires_grad_(False)
    bucket_mb = 5 if change == "option" and group.rank == 0 else 25
    before = [parameter.clone() for parameter in module.parameters()]
    try:
        DDP(module, group, bucket_mb=bucket_mb)
    except echelon.CollectiveMismatch as error:
        untouched = all(torch.equal(a, b) for a, b in zip(before, module.parameters(), strict=True))
        return str(error), untouched, group.all_reduce(torch.ones(1)).item()
    return "no error", None, None


DIFFERENCES = {
    "shape": "parameter '2.weight' float32[6, 8] where rank {last} has parameter '2.weight' float32[5, 8]",
    "name": "nothing more where rank {last} has parameter 'extra.weight' float32[1, 1]",
    "dtype": "parameter '4.weight' float32[3, 6] where rank {last} has parameter '4.weight' float64[3, 6]",
    "strides": "parameter '2.weight' float32[6, 8] where rank {last} has parameter '2.weight' float32[6, 8] with",
    "buffer": "nothing more where rank {last} has buffer 'mask' float32[2]",
    "frozen": "parameter '0.bias' float32[8] where rank {last} has parameter '0.bias' float32[8], frozen",
    "option": "bucket_mb=5.0 where rank 1 has bucket_mb=25.0",
}


@pytest.mark.parametrize("change", DIFFERENCES)
@pytest.mark.parametrize("world_size", [2, 3])
def test_ranks_that_disagree_about_the_model_are_told(run, change, world_size):
    for message, untouched, total in run(different_models, world_size, change):
        assert DIFFERENCES[change].format(last=world_size - 1) in message
        assert "\n" not in message
        assert untouched
        assert total == world_size


def different_models_in_a_subgroup(group):
    part = group.subgroup([1, 2])
    if part is None:
        return ""
    with pytest.raises(echelon.CollectiveMismatch) as caught:
        DDP(mlp() if part.rank == 0 else nn.Linear(1, 1), part)
    return str(caught.value)


def test_a_difference_names_the_ranks_of_the_world(run):
    for message in run(different_models_in_a_subgroup, 3)[1:]:
        assert "the models differ: rank 1 has parameter '0.weight' float32[8, 4] where rank 2 has" in message


class FailsInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, fails):
        ctx.fails = fails
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        if ctx.fails:
            raise ValueError("no coffee left")
        return gradient, None


def fail_in_backward(group, num_ready, catches):
    module = mlp()
    model = DDP(module, group, bucket_mb=TINY_MB)
    x = part(batch(), group)
    layers = list(model.module)
    cut = len(layers) - num_ready
    hidden = nn.Sequential(*layers[:cut])(x)
    loss = loss_of(nn.Sequential(*layers[cut:])(FailsInBackward.apply(hidden, group.rank == 1)))
    if not catches:
        loss.backward()
        return None
    try:
        loss.backward()
    except (ValueError, echelon.PeerFailed) as error:
        first = error
    with pytest.raises(echelon.Closed, match="given up because rank 1 failed: its backward failed with") as caught:
        model.sync_gradients()
    assert "\n" not in str(caught.value)
    group.barrier()
    return type(first).__name__, str(first)


@pytest.mark.parametrize("num_ready", [1, 3])
def test_a_rank_that_fails_in_backward_tells_the_others(run, num_ready):
    """They do not wait for their timeout, and the group itself can be used to end in order."""
    outcomes = run(fail_in_backward, 3, num_ready, True)
    assert outcomes[1] == ("ValueError", "no coffee left")
    for kind, message in (outcomes[0], outcomes[2]):
        assert kind == "PeerFailed"
        assert "rank 1 failed: its backward failed with" in message


def test_its_own_exception_is_the_first_cause(run):
    with pytest.raises(ValueError, match="no coffee left"):
        run(fail_in_backward, 2, 1, False)


def refused(group, kind):
    module = nn.Embedding(5, 4, sparse=True) if kind == "sparse" else mlp()
    model = DDP(module, group)
    if kind == "converted":
        model.double()
    inputs = torch.tensor([1, 2]) if kind == "sparse" else batch()
    loss = loss_of(model(inputs.double() if kind == "converted" else inputs))
    with pytest.raises(echelon.UnsupportedOp) as caught:
        loss.backward(create_graph=kind == "graph")
    return str(caught.value)


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True")
@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("sparse", "the gradient of parameter 'weight' is sparse: make it dense"),
        ("graph", "the gradient of parameter '4.bias' has a graph (create_graph=True)"),
        ("converted", "the gradient of parameter '4.bias' is torch.float64, but it was planned for torch.float32"),
    ],
)
def test_what_cannot_be_reduced_is_refused(run, kind, message):
    for got in run(refused, 2, kind):
        assert message in got
        assert "\n" not in got


def bad_arguments(group):
    with pytest.raises(echelon.InvalidArgument, match=r"bucket_mb=0.*above 0"):
        DDP(mlp(), group, bucket_mb=0)
    model = DDP(mlp(), group)
    with pytest.raises(echelon.InvalidRank, match="src=7"):
        model.broadcast_parameters(src=7)
    return repr(model).splitlines()[1].strip()


@pytest.mark.parametrize("world_size", [1, 2])
def test_bad_arguments_are_refused(run, world_size):
    ranks = range(world_size)
    assert run(bad_arguments, world_size) == [f"rank {each} of {world_size}, 1 buckets of gradients" for each in ranks]


def different_switch(group):
    """Rank 0 trains a layer that rank 1 has frozen in the meantime."""
    module = mlp()
    model = DDP(module, group, bucket_mb=TINY_MB)
    module[4].weight.requires_grad_(group.rank == 0)
    try:
        for step in itertools.count():
            backward(model, group, step)
    except echelon.EchelonError as error:
        return type(error).__name__
    return "no error"


def test_ranks_that_freeze_different_parameters_are_told(run):
    assert set(run(different_switch, 2)) <= {"CollectiveMismatch", "PeerFailed"}


def grow_on_one_rank(group):
    module = mlp()
    model = DDP(module, group)
    try:
        backward(model, group)
        if group.rank == 1:
            module.append(nn.Linear(3, 2))
        backward(model, group)
    except echelon.EchelonError as error:
        return type(error).__name__
    return "no error"


def test_a_rank_that_alone_has_a_new_parameter_is_told_and_so_are_the_others(run):
    """It waited in one group, and they in another, for the timeout."""
    assert set(run(grow_on_one_rank, 3)) <= {"CollectiveMismatch", "PeerFailed"}
