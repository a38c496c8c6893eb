"""ZeroOptimizer: what the plain optimizer does, with a part of its state."""

import copy

import pytest
import torch
from torch import nn

import echelon
from echelon import DDP, UnsupportedOp, ZeroOptimizer
from tests.helpers.grids import covering
from tests.helpers.models import assert_all_equal, batch, fill, loss_of, mlp, part

OPTIMIZERS = {
    "AdamW": (torch.optim.AdamW, {"lr": 0.05, "weight_decay": 0.1}),
    "amsgrad": (torch.optim.Adam, {"lr": 0.05, "amsgrad": True}),
    "SGD": (torch.optim.SGD, {"lr": 0.1}),
    "momentum": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
    "RMSprop": (torch.optim.RMSprop, {"lr": 0.01}),
    "Adagrad": (torch.optim.Adagrad, {"lr": 0.1}),
}


def channels_last():
    convolution = nn.Conv2d(4, 3, 2).to(memory_format=torch.channels_last)
    return fill(nn.Sequential(nn.Unflatten(1, (1, 2, 2)), nn.Conv2d(1, 4, 1), convolution, nn.Flatten()))


def groups_of(model, options):
    first, *others = model.parameters()
    return [{"params": [first], **options}, {"params": others, **options, "lr": options["lr"] / 2}]


def train(model, optimizer, inputs, steps=4):
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    for _ in range(steps):
        optimizer.zero_grad()
        loss_of(model(inputs)).backward()
        optimizer.step()
        scheduler.step()
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def train_sharded(group, make, name, bucket_mb):
    optimizer_class, options = OPTIMIZERS[name]
    model = DDP(make(), group)
    optimizer = ZeroOptimizer(optimizer_class, groups_of(model, options), group, bucket_mb, **options)
    return train(model, optimizer, part(batch(), group))


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize(("world_size", "bucket_mb"), covering([1, 3, 2], [25, 1e-5]))
def test_it_trains_as_the_plain_optimizer_does(name, world_size, bucket_mb):
    optimizer_class, options = OPTIMIZERS[name]
    for make in (mlp, channels_last):
        model = make()
        expected = train(model, optimizer_class(groups_of(model, options)), batch())
        results = echelon.simulate(train_sharded, world_size, (make, name, bucket_mb), late_sends=True).results
        assert_all_equal(results, expected)


def train_groups_of_iterators(group):
    model = DDP(mlp(), group)
    first, last = model.module[0], model.module[2:]
    groups = [{"params": first.parameters(), "lr": 0.1}, {"params": iter(last.parameters())}]
    optimizer = ZeroOptimizer(torch.optim.SGD, groups, group, lr=0.2)
    return train(model, optimizer, part(batch(), group))


def test_groups_may_have_iterators():
    """Parameters of `module.parameters()` in a group were left out without an error."""
    model = mlp()
    groups = [{"params": model[0].parameters(), "lr": 0.1}, {"params": model[2:].parameters()}]
    expected = train(model, torch.optim.SGD(groups, lr=0.2), batch())
    assert_all_equal(echelon.simulate(train_groups_of_iterators, 2).results, expected)


def test_it_trains_on_real_processes(pool):
    optimizer_class, options = OPTIMIZERS["AdamW"]
    model = mlp()
    expected = train(model, optimizer_class(groups_of(model, options)), batch())
    assert_all_equal(pool.run(train_sharded, 3, mlp, "AdamW", 1e-4), expected)


def bytes_of_state(group):
    model = nn.Linear(400, 100)
    optimizer = ZeroOptimizer(torch.optim.AdamW, model.parameters(), group)
    model(torch.ones(2, 400)).sum().backward()
    optimizer.step()
    moments = [t for state in optimizer._inner.state.values() for t in state.values() if t.dim()]
    gradients = [parameter.grad for parameter in model.parameters()]
    assert all(view.grad is None for _, view in optimizer._views)
    return sum(t.nbytes for t in [*moments, *gradients, *model.parameters()]), sum(
        p.numel() for p in model.parameters()
    )


@pytest.mark.parametrize("world_size", [1, 2, 4, 8])
def test_the_memory_is_8_bytes_and_an_nth_of_8_per_parameter(world_size):
    for num_bytes, count in echelon.simulate(bytes_of_state, world_size).results:
        assert num_bytes == pytest.approx((8 + 8 / world_size) * count, abs=8)


def bytes_of_loaded_state(group, state):
    optimizer = ZeroOptimizer(torch.optim.AdamW, mlp().parameters(), group)
    optimizer.load_state_dict(state)
    tensors = [t for state in optimizer._inner.state.values() for t in state.values() if t.dim()]
    return sum(t.untyped_storage().nbytes() for t in tensors), sum(t.nbytes for t in tensors)


def test_a_loaded_shard_does_not_keep_the_whole_state_in_memory():
    model = mlp()
    plain = torch.optim.AdamW(model.parameters())
    train(model, plain, batch(), 1)
    for held, needed in echelon.simulate(bytes_of_loaded_state, 3, (plain.state_dict(),)).results:
        assert 0 < held == needed


def some_without_gradient(group):
    model = mlp()
    optimizer = ZeroOptimizer(torch.optim.AdamW, model.parameters(), group, lr=0.1)
    list(model.parameters())[1].grad = torch.ones(8)
    optimizer.step()
    return [parameter.detach().clone() for parameter in model.parameters()]


def test_parameters_without_gradient_stay():
    expected = [parameter.detach().clone() for parameter in mlp().parameters()]
    for result in echelon.simulate(some_without_gradient, 3, late_sends=True).results:
        changed = [not torch.equal(a, b) for a, b in zip(result, expected, strict=True)]
        assert changed == [False, True, False, False, False, False]


def interrupted(group, make, state, dst):
    """Trains on from a state, saves it, and returns the weights and the state."""
    model = DDP(make(), group)
    optimizer = ZeroOptimizer(torch.optim.AdamW, model.parameters(), group, lr=0.05)
    weights = None
    if state is not None:
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        weights = train(model, optimizer, part(batch(), group), 2)
    else:
        train(model, optimizer, part(batch(), group), 2)
    return weights, {
        "model": {k: v.clone() for k, v in model.state_dict().items()},
        "optimizer": optimizer.state_dict(dst),
    }


@pytest.mark.parametrize("make", [mlp, channels_last])
def test_a_state_is_loaded_by_another_number_of_ranks_and_by_the_plain_optimizer(make):
    model = make()
    plain = torch.optim.AdamW(model.parameters(), lr=0.05)
    train(model, plain, batch(), 2)
    halfway = {key: value.clone() for key, value in model.state_dict().items()}
    expected = train(model, plain, batch(), 2)

    for _, state in echelon.simulate(interrupted, 3, (make, None, None), late_sends=True).results:
        for world_size in (1, 2, 4):
            for weights, _ in echelon.simulate(interrupted, world_size, (make, state, None), late_sends=True).results:
                assert_all_equal([weights], expected)
        model.load_state_dict(halfway)
        plain = torch.optim.AdamW(model.parameters(), lr=0.05)
        plain.load_state_dict(state["optimizer"])
        assert_all_equal([train(model, plain, batch(), 2)], expected)


def test_only_one_rank_gets_the_state_if_asked_for():
    states = [
        state["optimizer"]["state"]
        for _, state in echelon.simulate(interrupted, 3, (mlp, None, 1), late_sends=True).results
    ]
    assert [len(state) for state in states] == [0, 6, 0]


def refused(group, kind):
    model = mlp()
    optimizer = ZeroOptimizer(torch.optim.SGD, model.parameters(), group, lr=0.1)
    if kind == "moved":
        model.double()
        optimizer.step()
    elif kind == "more":
        optimizer.add_param_group({"params": [next(model.parameters())]})
    elif kind == "other shapes":
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(group.rank + 1))]})
    elif kind == "other class":
        ZeroOptimizer(torch.optim.SGD if group.rank else torch.optim.Adam, model.parameters(), group, lr=0.1)
    elif kind == "sparse":
        table = nn.Embedding(5, 4, sparse=True)
        optimizer = ZeroOptimizer(torch.optim.SGD, table.parameters(), group, lr=0.1)
        table(torch.tensor([1])).sum().backward()
        optimizer.step()
    elif kind == "not elementwise":
        ZeroOptimizer(torch.optim.LBFGS, model.parameters(), group)
    elif kind == "a kind of LBFGS":
        ZeroOptimizer(type("Mine", (torch.optim.LBFGS,), {}), model.parameters(), group)
    elif kind == "copied":
        copy.deepcopy(optimizer)
    elif kind == "gaps":
        ZeroOptimizer(torch.optim.SGD, [nn.Parameter(torch.ones(4, 4)[:, :2])], group)
    elif kind == "bucket":
        ZeroOptimizer(torch.optim.SGD, model.parameters(), group, bucket_mb=0)
    else:
        optimizer = ZeroOptimizer(torch.optim.AdamW, model.parameters(), group)
        optimizer.load_state_dict(torch.optim.AdamW(nn.Linear(2, 2).parameters()).state_dict())


@pytest.mark.parametrize(
    ("kind", "error", "message"),
    [
        ("moved", echelon.SizeMismatch, "make the optimizer"),
        ("more", ValueError, "more than one parameter group"),
        ("other shapes", echelon.CollectiveMismatch, "parameter 6 float32\\[1\\] where rank 1 has parameter 6 float32"),
        ("other class", echelon.CollectiveMismatch, "rank 0 has optimizer Adam where rank 1 has optimizer SGD"),
        ("sparse", UnsupportedOp, "gradient of parameter 0 is sparse"),
        ("not elementwise", UnsupportedOp, "LBFGS does not update each element by itself"),
        ("a kind of LBFGS", UnsupportedOp, "Mine does not update each element by itself"),
        ("copied", UnsupportedOp, "cannot be copied or pickled: save its state_dict()"),
        ("gaps", UnsupportedOp, "parameter 0 of shape \\(4, 2\\) has gaps in memory"),
        ("bucket", echelon.InvalidArgument, "bucket_mb=0"),
        ("other model", ValueError, "parameter group"),
    ],
)
def test_bad_input_is_refused(kind, error, message):
    with pytest.raises(error, match=message):
        echelon.simulate(refused, 2, (kind,))


def corner_cases(group, case):
    """Returns the weights after some steps; `group` None: of the plain optimizer."""

    def make(optimizer_class, params, **options):
        if group is None:
            return optimizer_class(params, **options)
        return ZeroOptimizer(optimizer_class, params, group, **options)

    if case == "fewer elements than ranks":
        model = fill(nn.Linear(1, 1))
        optimizer = make(torch.optim.AdamW, model.parameters(), lr=0.1)
        inputs = batch()[:, :1]
    else:
        model, inputs = mlp(), batch()
        optimizer = None
    if case == "groups added later":
        optimizer = make(torch.optim.AdamW, model[0].parameters(), lr=0.1)
    elif case == "frozen":
        model[2].requires_grad_(False)
        optimizer = make(torch.optim.AdamW, model.parameters(), lr=0.1)
    elif case == "tied":
        model = fill(nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)))
        model[2].weight = model[0].weight
        optimizer = make(torch.optim.Adam, model.parameters(), lr=0.1)
    elif case == "counts in its group":
        optimizer = make(CountsInItsGroup, model.parameters(), lr=0.1)
    elif optimizer is None:
        optimizer = make(torch.optim.AdamW, model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, 0.2, total_steps=6, cycle_momentum=case != "counts in its group"
    )

    def closure():
        optimizer.zero_grad()
        loss = loss_of(model(inputs))
        loss.backward()
        if case == "clipped":
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01)
        return loss

    for step in range(4):
        if case == "groups added later" and step == 2:
            optimizer.add_param_group({"params": list(model[2:].parameters()), "weight_decay": 0.3})
            scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
        if case == "closure":
            assert optimizer.step(closure).item() > 0
        else:
            closure()
            optimizer.step()
        scheduler.step()
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}, optimizer.state_dict()


class CountsInItsGroup(torch.optim.Optimizer):
    """Keeps the number of its steps in param_groups, as schedule-free optimizers do."""

    def __init__(self, params, lr):
        super().__init__(params, {"lr": lr, "count": 0})

    @torch.no_grad()
    def step(self):
        for each in self.param_groups:
            each["count"] += 1
            for parameter in each["params"]:
                parameter -= each["lr"] / each["count"] * parameter.grad


@pytest.mark.parametrize(
    "case",
    ["fewer elements than ranks", "groups added later", "frozen", "tied", "counts in its group", "closure", "clipped"],
)
@pytest.mark.parametrize("world_size", [1, 4])
def test_corner_cases_equal_the_plain_optimizer(case, world_size):
    weights, state = corner_cases(None, case)
    for got, packed in echelon.simulate(corner_cases, world_size, (case,)).results:
        assert_all_equal([got], weights)
        assert packed["param_groups"] == state["param_groups"]
        assert packed["state"].keys() == state["state"].keys()
        for number, values in state["state"].items():
            for name, value in values.items():
                torch.testing.assert_close(packed["state"][number][name], value)


def load_a_fresh_state(group):
    model = mlp()
    optimizer = ZeroOptimizer(torch.optim.AdamW, model.parameters(), group, lr=0.1)
    fresh = optimizer.state_dict()
    loss_of(model(batch())).backward()
    optimizer.step()
    optimizer.load_state_dict(fresh)
    return len(optimizer.state_dict()["state"])


def test_loading_a_state_forgets_the_old_one():
    assert echelon.simulate(load_a_fresh_state, 2).results == [0, 0]


def step_with_strides(group):
    """The gradient lies in memory in another order than the parameter."""
    parameter = torch.nn.Parameter(torch.zeros(3, 4))
    parameter.grad = torch.arange(12.0).view(4, 3).t()
    ZeroOptimizer(torch.optim.SGD, [parameter], group, lr=1.0).step()
    return parameter.detach()


def test_a_gradient_may_lie_in_memory_in_another_order():
    for got in echelon.simulate(step_with_strides, 2).results:
        assert torch.equal(got, -torch.arange(12.0).view(4, 3).t())


def parameters_with_strides(group):
    """Shards are ranges of memory, in which each rank has other elements."""
    parameter = torch.nn.Parameter(torch.zeros(4, 3).t() if group.rank else torch.zeros(3, 4))
    with pytest.raises(
        echelon.CollectiveMismatch, match=r"0 float32\[3, 4\] where .* float32\[3, 4\] with dims in memory as \[1, 0\]"
    ):
        ZeroOptimizer(torch.optim.SGD, [parameter], group, lr=1.0)


def test_parameters_lie_in_memory_in_one_order_on_all_ranks():
    echelon.simulate(parameters_with_strides, 2)
