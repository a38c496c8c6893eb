"""DistributedDataParallel behaves as the module that it wraps."""

import copy
import pickle

import pytest
import torch
from torch import nn

import echelon
from echelon import DDP
from tests.helpers.models import assert_all_equal, batch, fill, gradients, loss_of, mlp, part, single

WORLD_SIZES = (1, 2, 3, 4)


class WithBuffer(nn.Module):
    def __init__(self, value):
        super().__init__()
        self.weight = nn.Parameter(torch.full((4,), float(value)))
        self.register_buffer("seen", torch.tensor(value))
        self.register_buffer("scratch", torch.full((2, 2), float(value)).t(), persistent=False)

    def forward(self, x):
        return x * self.weight


def construct(group, src):
    module = WithBuffer(group.rank + 1)
    places = [tensor.data_ptr() for tensor in (module.weight, module.seen, module.scratch)]
    model = DDP(module, group)
    values = []
    for source in (0, src):
        if source:
            with torch.no_grad():
                module.weight.fill_(10.0 * group.rank)
                module.seen.fill_(10 * group.rank)
            model.broadcast_parameters(src=source)
        values.append((module.weight.tolist(), module.seen.item(), module.scratch.tolist()))
    assert places == [tensor.data_ptr() for tensor in (module.weight, module.seen, module.scratch)]
    return values


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_parameters_and_buffers_are_broadcast_in_place(run, world_size):
    src = world_size - 1
    for first, second in run(construct, world_size, src):
        assert first == ([1.0] * 4, 1, [[1.0, 1.0], [1.0, 1.0]])
        assert src == 0 or second == ([10.0 * src] * 4, 10 * src, [[1.0, 1.0], [1.0, 1.0]])


def forward_with_buffers(group, enabled):
    module = WithBuffer(0)
    model = DDP(module, group, buffers="broadcast" if enabled else "local")
    seen = []

    def forward():
        module.seen.fill_(group.rank + 5)
        model(torch.ones(4))
        seen.append(module.seen.item())

    forward()
    with model.no_sync():
        forward()
    with torch.no_grad():
        forward()
    model.eval()
    forward()
    model.train()
    forward()
    return seen


@pytest.mark.parametrize("enabled", [True, False])
def test_buffers_become_those_of_rank_0_before_each_training_forward(run, enabled):
    for rank, seen in enumerate(run(forward_with_buffers, 2, enabled)):
        own = rank + 5
        first = 5 if enabled else own
        assert seen == [first, own, own, own, first]


def frozen_statistics(group):
    """BatchNorm in eval mode keeps its buffers for backward; writing them between would be refused by autograd."""
    module = nn.Sequential(fill(nn.Linear(4, 4)), nn.BatchNorm1d(4))
    model = DDP(module, group)
    module[1].eval()
    (loss_of(model(part(batch(0), group))) + loss_of(model(part(batch(1), group)))).backward()
    return gradients(model)


def test_buffers_that_are_right_already_are_not_written(run):
    expected = nn.Sequential(fill(nn.Linear(4, 4)), nn.BatchNorm1d(4)).eval()
    (loss_of(expected(batch(0))) + loss_of(expected(batch(1)))).backward()
    assert_all_equal(run(frozen_statistics, 2), gradients(expected))


def as_the_module(group):
    module = WithBuffer(3)
    module.scale = 2.0
    module.layers = nn.ModuleList([mlp()])
    model = DDP(module, group)
    bare = WithBuffer(0)
    bare.layers = nn.ModuleList([mlp(seed=9)])
    bare.load_state_dict(model.state_dict())
    same = all(torch.equal(value, bare.state_dict()[name]) for name, value in module.state_dict().items())
    other = WithBuffer(8)
    other.layers = nn.ModuleList([mlp(seed=8)])
    model.load_state_dict(other.state_dict())
    model.scale = 5.0
    model.label = "new"
    model.eval()
    modes = [module.training, module.layers[0].training, model.training]
    model.train()
    with pytest.raises(AttributeError, match="'WithBuffer' object has no attribute 'absent'"):
        _ = model.absent
    with pytest.raises(echelon.InvalidArgument, match=r"assign=True replaces .*: leave it out"):
        model.load_state_dict(other.state_dict(), assign=True)
    return {
        "state": same,
        "loaded": module.seen.item() == 8 and model.weight is module.weight,
        "scale": (module.scale, module.label),
        "modes": (modes, module.training),
        "parameters": [name for name, _ in model.named_parameters()] == [name for name, _ in module.named_parameters()],
        "modules": list(model.modules()) == list(module.modules()),
        "buffers": [name for name, _ in model.named_buffers()],
        "submodule": model.get_submodule("layers.0") is module.layers[0],
        "parameter": model.get_parameter("layers.0.0.weight") is module.layers[0][0].weight,
    }


def test_it_behaves_as_the_module(run):
    for got in run(as_the_module, 2):
        assert got == {
            "state": True,
            "loaded": True,
            "scale": (5.0, "new"),
            "modes": ([False, False, False], True),
            "parameters": True,
            "modules": True,
            "buffers": ["seen", "scratch"],
            "submodule": True,
            "parameter": True,
        }


def added_by_methods(group):
    model = DDP(WithBuffer(1), group)
    model.register_parameter("scale", nn.Parameter(torch.full((4,), group.rank + 1.0)))
    model.add_module("head", fill(nn.Linear(4, 2)))
    model.register_module("tail", fill(nn.Linear(2, 2)))
    model.register_buffer("count", torch.tensor(group.rank))
    model.register_buffer("cache", torch.tensor(0), persistent=False)
    model.module.forward = lambda x: model.tail(model.head(x * model.scale * model.weight))
    model(torch.full((1, 4), group.rank + 1.0)).sum().backward()
    found = [model.get_parameter("scale"), model.get_buffer("count"), model.get_submodule("head")]
    return {
        "module": all(one is other for one, other in zip(found, (model.scale, model.count, model.head), strict=True)),
        "parameters": [name for name, _ in model.module.named_parameters()],
        "state": list(model.state_dict()),
        "values": (model.scale.tolist(), model.count.item()),
        "gradient": model.scale.grad.tolist(),
    }


def test_parameters_modules_and_buffers_added_by_methods_are_the_modules(run):
    """They were kept in the wrapper, where no optimizer, state_dict or forward found them."""
    first, second = run(added_by_methods, 2)
    assert first == second
    layers = ["head.weight", "head.bias", "tail.weight", "tail.bias"]
    assert first["module"]
    assert first["parameters"] == ["weight", "scale", *layers]
    assert first["state"] == ["weight", "scale", "seen", "count", *layers]
    assert first["values"] == ([1.0] * 4, 0)
    assert any(first["gradient"])


def deleted(group):
    model = DDP(WithBuffer(1), group)
    model.label = "new"
    del model.label, model.scratch
    with pytest.raises(AttributeError, match="absent"):
        del model.absent
    return hasattr(model.module, "label"), hasattr(model.module, "scratch"), hasattr(model.module, "weight")


def test_attributes_are_deleted_from_the_module(run):
    assert run(deleted, 2) == [(False, False, True)] * 2


def applied(group):
    """The wrapper has the module's weight, so a function that was called on both doubled it twice."""
    model = DDP(WithBuffer(1), group)

    @torch.no_grad()
    def double(module):
        module.weight.mul_(2)

    return model.apply(double) is model, model.weight.tolist()


def test_apply_calls_the_function_once_per_module(run):
    assert run(applied, 2) == [(True, [2.0] * 4)] * 2


def hooked(group):
    model, calls = DDP(WithBuffer(1), group), []
    model.register_state_dict_pre_hook(lambda *_: calls.append("saving"))
    model.register_state_dict_post_hook(lambda *_: calls.append("saved"))
    model.register_load_state_dict_pre_hook(lambda *_: calls.append("loading"))
    model.register_load_state_dict_post_hook(lambda *_: calls.append("loaded"))
    model.load_state_dict(model.state_dict())
    model.register_forward_pre_hook(lambda *_: calls.append("before"))
    model.register_forward_hook(lambda *_: calls.append("after"))
    model(torch.ones(4))
    return calls


def test_hooks_of_the_wrapper_are_called(run):
    assert run(hooked, 2) == [["saving", "saved", "loading", "loaded", "before", "after"]] * 2


def without_the_wrapper(group):
    module = mlp()
    model = DDP(module, group)
    clone = copy.deepcopy(model.module)
    loss_of(clone(part(batch(), group))).backward()
    del model
    loss_of(module(part(batch(), group))).backward()
    return gradients(module), gradients(clone)


def test_a_copy_and_a_module_whose_wrapper_is_gone_are_ordinary(run):
    for rank, (kept, copied) in enumerate(run(without_the_wrapper, 2)):
        expected = single(mlp(), batch().chunk(2)[rank])
        assert_all_equal([kept], expected)
        assert_all_equal([copied], expected)


def copied(group):
    model = DDP(mlp(), group)
    for copies in (copy.deepcopy, copy.copy, pickle.dumps):
        with pytest.raises(echelon.UnsupportedOp, match=r"take ddp\.module"):
            copies(model)
    return len(pickle.dumps(model.module)) > 0


def test_the_wrapper_itself_cannot_be_copied(run):
    assert run(copied, 2) == [True, True]


def empty_models(group):
    """As torch's own wrapper, which raises a RuntimeError."""
    for module in (nn.ReLU(), mlp().requires_grad_(False)):
        with pytest.raises(RuntimeError, match=f"no parameter of this {type(module).__name__} requires a gradient"):
            DDP(module, group)
    return group.all_reduce(torch.ones(1)).item()


def test_models_without_anything_to_train_are_refused(run):
    assert run(empty_models, 2) == [2.0, 2.0]
