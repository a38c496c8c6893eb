"""Models, optimizers and wrappers of every kind: saved in one form and loaded in another."""

import contextlib
import copy
from functools import partial

import numpy as np
import pytest
import torch
from torch import nn

import echelon
from echelon.checkpoint import Store
from echelon.errors import UnsupportedOp
from echelon.pipeline import Pipeline
from tests.helpers.models import fill
from tests.helpers.torch_groups import as_default_group, mesh_of_one


def make(value=None):
    model = fill(nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 3)))
    if value is not None:
        for tensor in model.state_dict().values():
            tensor.fill_(value)
    return model


def step_of(model, optimizer, seed=0):
    def closure():
        optimizer.zero_grad()
        inputs = torch.randn(5, 3, generator=torch.Generator().manual_seed(seed))
        loss = model(inputs).square().sum()
        loss.backward()
        return loss

    return optimizer.step(closure)


def assert_same_state(got, expected):
    if isinstance(expected, dict):
        assert list(got) == list(expected)
        for key, value in expected.items():
            assert_same_state(got[key], value)
    elif isinstance(expected, list | tuple):
        assert type(got) is type(expected)
        assert len(got) == len(expected)
        for one, other in zip(got, expected, strict=True):
            assert_same_state(one, other)
    elif isinstance(expected, torch.Tensor):
        assert got.dtype == expected.dtype
        assert torch.equal(got, expected)
    else:
        assert got == expected


OPTIMIZERS = {
    "SGD": {"momentum": 0.9, "nesterov": True},
    "Adam": {"amsgrad": True, "lr": torch.tensor(0.01)},
    "AdamW": {"foreach": True},
    "Adafactor": {},
    "Adagrad": {},
    "Adadelta": {},
    "Adamax": {},
    "ASGD": {},
    "LBFGS": {"max_iter": 3},
    "NAdam": {},
    "RAdam": {},
    "RMSprop": {"momentum": 0.5, "centered": True},
    "Rprop": {},
}


@pytest.mark.parametrize(
    "name", [pytest.param(one, marks=() if one in ("Adam", "LBFGS") else pytest.mark.slow) for one in OPTIMIZERS]
)
def test_any_optimizer_goes_on(name, tmp_path):
    def made(value=None):
        model = make(value)
        return model, getattr(torch.optim, name)(model.parameters(), **{"lr": 0.02} | OPTIMIZERS[name])

    model, optimizer = made()
    step_of(model, optimizer)
    store = Store(tmp_path)
    store.save(1, model=model, optimizer=optimizer)
    other, its_optimizer = made(0.5)
    step_of(other, its_optimizer)  # a state that has to be replaced
    store.load(model=other, optimizer=its_optimizer)
    assert_same_state(its_optimizer.state_dict(), optimizer.state_dict())
    assert step_of(model, optimizer, 1) == step_of(other, its_optimizer, 1)
    assert_same_state(dict(other.state_dict()), dict(model.state_dict()))


def test_parameters_without_state_have_none_afterwards(tmp_path):
    model = make()
    optimizer = torch.optim.AdamW(model.parameters())
    Store(tmp_path).save(0, model=model, optimizer=optimizer)
    step_of(model, optimizer)
    Store(tmp_path).load(model=model, optimizer=optimizer)
    assert not optimizer.state_dict()["state"]


def test_keys_of_the_same_text_keep_their_tensors(tmp_path):
    saved = {1: torch.zeros(2), "1": torch.ones(2), "1'": torch.full((2,), 2.0), None: 3}
    Store(tmp_path).save(0, extra={"by_key": saved})
    Store(tmp_path).load(extra=(extra := {}))
    assert {key: repr(value) for key, value in extra["by_key"].items()} == {
        key: repr(value) for key, value in saved.items()
    }


def test_numbers_of_numpy_come_back_as_those_of_python(tmp_path):
    Store(tmp_path).save(0, extra={"numbers": [np.bool_(True), np.float32(1.5), np.int8(3), np.str_("a")]})
    Store(tmp_path).load(extra=(extra := {}))
    assert [(type(one), one) for one in extra["numbers"]] == [(bool, True), (float, 1.5), (int, 3), (str, "a")]


def test_the_default_device_is_not_that_of_states(tmp_path):
    model, other, extra = make(), make(0.5), {}
    optimizer, its_optimizer = (torch.optim.AdamW(each.parameters()) for each in (model, other))
    step_of(model, optimizer)
    store = Store(tmp_path)
    with torch.device("meta"):
        store.save(0, model=model, optimizer=optimizer, extra={"table": torch.ones(2, device="cpu")})
        store.load(model=other, optimizer=its_optimizer, extra=extra)
    assert extra["table"].tolist() == [1.0, 1.0]
    assert_same_state(its_optimizer.state_dict(), optimizer.state_dict())


def test_state_in_another_dtype_than_the_parameter(tmp_path):
    model = nn.Linear(3, 3, dtype=torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters())
    for parameter in model.parameters():
        optimizer.state[parameter] = {"step": torch.tensor(1.0), "exp_avg": torch.rand(parameter.shape)}
    Store(tmp_path).save(0, model=model, optimizer=optimizer)
    other = torch.optim.AdamW(model.parameters())
    Store(tmp_path).load(model=model, optimizer=other)
    assert_same_state(other.state_dict()["state"], optimizer.state_dict()["state"])


class WithExtraState(nn.Module):
    """Module with a counter that is no tensor, and one that is not saved."""

    def __init__(self, count=0):
        super().__init__()
        self.count, self.table = count, torch.full((2,), float(count))
        self.register_buffer("cache", torch.zeros(1), persistent=False)
        self.weight = nn.Parameter(torch.zeros(3))

    def get_extra_state(self):
        return {"count": self.count, "table": self.table}

    def set_extra_state(self, state):
        self.count, self.table = state["count"], state["table"]


def test_extra_state_of_modules(tmp_path):
    model = nn.Sequential(WithExtraState(3), WithExtraState(4))
    store = Store(tmp_path)
    store.save(0, model=model)
    other = nn.Sequential(WithExtraState(), WithExtraState())
    store.load(model=other)
    assert [one.count for one in other] == [3, 4]
    assert torch.equal(other[1].table, torch.full((2,), 4.0))


def test_compiled_wrapped_and_plain_modules_have_the_same_names(tmp_path):
    compiled = partial(torch.compile, backend="eager")
    forms = {
        "plain": make,
        "compiled": lambda value: compiled(make(value)),
        "partly": lambda value: nn.Sequential(*make(value)[:2], compiled(make(value)[2])),
        "ddp": lambda value: echelon.DDP(make(value), echelon.init()),
        "compiled ddp": lambda value: compiled(echelon.DDP(make(value), echelon.init())),
    }
    for number, (name, saved) in enumerate(forms.items()):
        source = saved(0.25 + number)
        Store(tmp_path).save(number, model=source)
        for other in forms.values():
            target = other(7.0)
            assert Store(tmp_path).load(model=target, step=number) == number
            for value in target.state_dict().values():
                assert value.eq(int(0.25 + number) if value.dtype == torch.int64 else 0.25 + number).all(), name


def test_several_models_and_optimizers(tmp_path):
    models = [make(value) for value in (1.0, 2.0)]
    optimizers = [torch.optim.AdamW(model.parameters()) for model in models]
    for model, optimizer in zip(models, optimizers, strict=True):
        step_of(model, optimizer)
    ema = copy.deepcopy(models[0])
    store = Store(tmp_path)
    store.save(1, model=models[0], optimizer=optimizers[0], critic=models[1], critic_optimizer=optimizers[1], ema=ema)
    others = [make(5.0) for _ in range(3)]
    its = [torch.optim.AdamW(model.parameters()) for model in others]
    store.load(model=others[0], optimizer=its[0], critic=others[1], critic_optimizer=its[1], ema=others[2])
    for got, expected in zip(others, (*models, ema), strict=True):
        assert_same_state(dict(got.state_dict()), dict(expected.state_dict()))
    for got, expected in zip(its, optimizers, strict=False):
        assert_same_state(got.state_dict(), expected.state_dict())
    alone = make(5.0)
    store.load(critic=alone)
    assert_same_state(dict(alone.state_dict()), dict(models[1].state_dict()))


def test_transposed_parameters_and_the_shards_of_them(tmp_path):
    def run(group, zero, path):
        model = make()
        model[0].weight = nn.Parameter(model[0].weight.detach().t().contiguous().t())
        model = nn.Sequential(model, nn.Conv2d(2, 2, 2).to(memory_format=torch.channels_last))
        fill(model)
        optimizer = torch.optim.AdamW
        made = echelon.ZeroOptimizer(optimizer, model.parameters(), group) if zero else optimizer(model.parameters())
        store = Store(path, group=group)
        if store.load(model=model, optimizer=made) is None:
            for number, parameter in enumerate(model.parameters()):
                parameter.grad = torch.arange(parameter.numel()).view(parameter.shape).float() + number
            made.step()
            store.save(1, model=model, optimizer=made)
        assert not model[0][0].weight.is_contiguous()
        return dict(model.state_dict()), made.state_dict()["state"]

    for zero, ranks in ((True, 3), (False, 1)):
        path = str(tmp_path / str(zero))
        expected = echelon.simulate(run, ranks, (zero, path)).results[0]
        for other, others in ((True, 2), (False, 1), (True, 3)):
            assert_same_state(echelon.simulate(run, others, (other, path)).results[0], expected)


def test_a_pipeline_on_the_meta_device_gets_memory(tmp_path):
    model = make()
    Store(tmp_path).save(1, model=model)

    def load(group):
        with torch.device("meta"):
            empty = make()
        pipe = Pipeline(empty, group, "gpipe", 2, nn.functional.mse_loss, at=["2"])
        assert Store(tmp_path).load(model=pipe) == 1
        pipe.step(torch.ones(4, 3), target=torch.ones(4, 3))
        return {name: value for name, value in pipe.state_dict().items() if name.startswith(("0.", "2."))}

    first, second = echelon.simulate(load, 2).results
    expected = {name: value for name, value in model.state_dict().items() if not name.startswith("1.")}
    assert_same_state(first | second, expected)


def test_untied_weights_of_a_tied_checkpoint(tmp_path):
    tied = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    tied[1].weight = tied[0].weight
    Store(tmp_path).save(1, model=tied)
    other = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    Store(tmp_path).load(model=other)
    assert torch.equal(other[0].weight, tied[0].weight)
    assert torch.equal(other[1].weight, tied[0].weight)


# torch's own sharding


def sharded_as_rank(rank, world_size, path):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 3))
    fill(model)
    fully_shard(model, mesh=init_device_mesh("cpu", (world_size,)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    store = Store(path)
    if store.load(model=model, optimizer=optimizer) is None:
        model(torch.ones(2, 3)).sum().backward()
        optimizer.step()
        store.save(1, model=model, optimizer=optimizer)
    whole = {name: value.full_tensor() for name, value in model.state_dict().items()}
    for number, state in optimizer.state_dict()["state"].items():
        for key, value in state.items():
            whole[f"{number}.{key}"] = value.full_tensor() if hasattr(value, "full_tensor") else value
    return whole


def in_torch_group(group, function, path):
    rendezvous = f"{path}/ranks of {group.world_size}"
    return as_default_group(group, rendezvous, "echelon", function, group.world_size, f"{path}/run")


def test_models_of_fully_shard_are_stored_by_their_shards(tmp_path):
    expected = echelon.simulate(in_torch_group, 2, (sharded_as_rank, str(tmp_path))).results[0]
    for got in echelon.simulate(in_torch_group, 3, (sharded_as_rank, str(tmp_path))).results:
        assert_same_state(got, expected)
    plain = fill(nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 3)))
    optimizer = torch.optim.AdamW(plain.parameters())
    Store(tmp_path / "run").load(model=plain, optimizer=optimizer)
    found = dict(plain.state_dict())
    for number, state in optimizer.state_dict()["state"].items():
        found |= {f"{number}.{key}": value for key, value in state.items()}
    assert_same_state(found, expected)


def cut_as_rank(rank, world_size, path):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh, model = init_device_mesh("cpu", (world_size,)), nn.Module()
    values = torch.arange(42.0).view(2, 7, 3)
    for dim in range(3):
        model.register_parameter(f"cut{dim}", nn.Parameter(distribute_tensor(values.clone(), mesh, [Shard(dim)])))
    store = Store(path)
    with torch.no_grad():
        if world_size == 2:
            store.save(1, model=model)
        for parameter in model.parameters():
            parameter.zero_()
    store.load(model=model)
    return [torch.equal(parameter.full_tensor(), values) for parameter in model.parameters()]


def test_dtensors_cut_along_any_dim(tmp_path):
    for world_size in (2, 3):
        assert echelon.simulate(in_torch_group, world_size, (cut_as_rank, str(tmp_path))).results == (
            [[True] * 3] * world_size
        )
    plain = nn.ParameterDict({f"cut{dim}": torch.zeros(2, 7, 3) for dim in range(3)})
    Store(tmp_path / "run").load(model=plain)
    assert all(torch.equal(one, torch.arange(42.0).view(2, 7, 3)) for one in plain.values())


def test_dtensors_that_are_to_be_added_up_are_refused(tmp_path):
    with mesh_of_one() as mesh:
        from torch.distributed.tensor import DTensor, Partial

        model = nn.Module()
        model.weight = nn.Parameter(DTensor.from_local(torch.ones(3), mesh, [Partial()]))
        with pytest.raises(
            UnsupportedOp, match="weight is a DTensor placed as Partial, and a checkpoint takes Shard and"
        ):
            Store(tmp_path).save(2, model=model)


def test_tensors_with_gaps_in_memory(tmp_path):
    """Flat ones, too: they are no bytes in a row."""

    def make_with(values):
        model = nn.Linear(2, 2)
        model.register_buffer("gaps", values[::2])
        model.register_buffer("rows", values.reshape(4, 5)[:, 1:3].t())
        return model

    model = make_with(torch.rand(20))
    for wait in (True, False):
        with contextlib.closing(Store(tmp_path / str(wait))) as store:
            store.save(1, model=model, extra={"gaps": torch.arange(20)[1::3]}, wait=wait).wait()
            other, extra = make_with(torch.zeros(20)), {}
            store.load(model=other, extra=extra)
        assert_same_state(other.state_dict(), model.state_dict())
        assert_same_state(extra, {"gaps": torch.arange(20)[1::3]})


def test_an_expanded_tensor_is_refused_when_it_is_saved(tmp_path):
    model = nn.Linear(2, 2)
    model.register_buffer("scale", torch.ones(1).expand(5))
    with pytest.raises(UnsupportedOp, match=r"^scale has elements that share memory, so it cannot be filled by a load"):
        Store(tmp_path).save(1, model=model)
