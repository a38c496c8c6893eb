"""A run that is stopped after any step and goes on equals the undisturbed one, bit for bit."""

import random

import numpy as np
import pytest
import torch
from torch import nn

import echelon
from echelon.checkpoint import PerRank, Store
from echelon.data_parallel import LocalSGD, PowerSGD
from echelon.data_parallel.ddp import unwrap
from tests.helpers.checkpoint_layouts import LAYOUTS, batch, build, make_net, whole_state
from tests.helpers.models import fill

STEPS = 5
QUICK = {"dp 3", "zb-v 2", "zero 2 pp 2"}


def run_to(group, name, path, first, last):
    """Goes on after `first` and saves after `last`. Returns the losses and the state."""
    run = build(group, LAYOUTS[name], offset=float(first))
    store = Store(path)
    everything = {"model": run.model, "optimizer": run.optimizer, "scheduler": run.scheduler}
    if first:
        assert store.load(**everything) == first
    losses = [run.step(number) for number in range(first, last)]
    store.save(last, **everything)
    store.close()
    return losses, whole_state(run)


def simulated(name, path, first, last, seed=0):
    return echelon.simulate(run_to, LAYOUTS[name].world_size, (name, path, first, last), seed=seed).results


def assert_same_end(got, expected, stop):
    for (losses, state), (all_losses, end) in zip(got, expected, strict=True):
        assert losses == all_losses[stop:]
        assert sorted(state) == sorted(end)
        for name, value in end.items():
            assert torch.equal(state[name], value), name


@pytest.mark.parametrize("name", [pytest.param(one, marks=() if one in QUICK else pytest.mark.slow) for one in LAYOUTS])
def test_it_ends_like_the_undisturbed_run(name, tmp_path):
    expected = simulated(name, str(tmp_path / "whole"), 0, STEPS)
    for stop in (2,) if name in QUICK else range(1, STEPS):
        path = str(tmp_path / f"stopped after {stop}")
        simulated(name, path, 0, stop)
        # With another seed, whose random states the checkpoint replaces.
        assert_same_end(simulated(name, path, stop, STEPS, seed=7), expected, stop)


class Samples:
    """Loader whose place is its state."""

    def __init__(self, rank):
        self.place = 10 * rank

    def state_dict(self):
        return {"place": self.place}

    def load_state_dict(self, state):
        self.place = state["place"]

    def __next__(self):
        self.place += 1
        return batch(self.place)


def with_companions(group, hook_name, path, first, last):
    """Trains with all that a run can depend on."""
    hook = {"power": PowerSGD(1, start_after=1), "local": LocalSGD(2), "none": None}[hook_name]
    ddp = echelon.DDP(make_net(offset=float(first)), group, bucket_mb=1e-4, hook=hook)
    optimizer = torch.optim.SGD(ddp.parameters(), 0.05, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 2, 3])
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=2)
    generators = {
        "torch": torch.Generator().manual_seed(group.rank),
        "numpy": np.random.default_rng(group.rank),
        "list": [random.Random(group.rank), np.random.RandomState(group.rank)],
    }
    loader, extra = Samples(group.rank), {}
    store = Store(path, group=group)
    companions = {"model": ddp, "optimizer": optimizer, "scheduler": scheduler, "scaler": scaler}
    companions |= {"generators": generators, "loader": loader}
    if first:
        assert store.load(**companions, extra=extra) == first
        assert extra["rank"] == group.rank
        assert extra["best"] == (first, float("inf"))
        assert torch.equal(extra["table"], torch.arange(first))
    losses = []
    for _ in range(first, last):
        inputs, target = next(loader)
        noise = torch.rand((), generator=generators["torch"]).item() + generators["numpy"].random()
        noise += generators["list"][0].random() + generators["list"][1].rand()
        noise += random.random() + np.random.rand() + torch.rand(()).item()
        loss = nn.functional.cross_entropy(ddp(inputs), target) * noise
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        scheduler.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    extra = {"rank": PerRank(group.rank), "best": (last, float("inf")), "table": torch.arange(last)}
    store.save(last, **companions, extra=extra)
    store.close()
    state = {name: value.clone() for name, value in ddp.state_dict().items()}
    state |= {f"momentum {index}": one["momentum_buffer"] for index, one in optimizer.state_dict()["state"].items()}
    return losses, state | {"scale": torch.tensor(scaler.get_scale())}


@pytest.mark.parametrize("hook", ["power", "local", "none"])
def test_companions_go_on_too(hook, tmp_path):
    def simulated(path, first, last, seed=0):
        return echelon.simulate(with_companions, 3, (hook, path, first, last), seed=seed, order="tcp").results

    expected = simulated(str(tmp_path / "whole"), 0, STEPS)
    simulated(str(tmp_path / "stopped"), 0, 3)
    assert_same_end(simulated(str(tmp_path / "stopped"), 3, STEPS, seed=7), expected, 3)


def with_another_hook(group, path):
    """Loads a run with PowerSGD into other hooks. Returns whether the weights came, and the state of each hook."""
    hooks = [PowerSGD(1, start_after=1), LocalSGD(2), PowerSGD(1, start_after=1)]
    ddps = [echelon.DDP(make_net(offset=float(number)), group, hook=hook) for number, hook in enumerate(hooks)]
    store, saved = Store(path), ddps[0]
    optimizer = torch.optim.SGD(saved.parameters(), 0.05)
    for number in range(2):
        inputs, target = batch(2 * group.rank + number)
        nn.functional.cross_entropy(saved(inputs), target).backward()
        optimizer.step()
        optimizer.zero_grad()
    store.save(2, model=saved)
    found = []
    for ddp, hook in zip(ddps[1:], hooks[1:], strict=True):
        assert store.load(model=ddp) == 2
        same = [torch.equal(value, saved.state_dict()[name]) for name, value in ddp.state_dict().items()]
        found.append((all(same), sorted(hook.state_dict())))
    return found, sorted(hooks[0].state_dict())


def test_a_hook_of_another_class_begins_without_state(tmp_path):
    for found, names in echelon.simulate(with_another_hook, 2, (str(tmp_path),)).results:
        assert found == [(True, ["steps", "weight"]), (True, names)]
        assert names != ["steps", "weight"]


class OtherOrder(nn.Module):
    """Module that runs its layers in another order than it has them. Buckets follow the first once it is learned."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(90 + 7 * index, 90 + 7 * ((index + 5) % 8)) for index in range(8))
        fill(self)

    def forward(self, inputs):
        for index in (3, 0, 5, 2, 7, 4, 1, 6):
            inputs = self.layers[index](inputs).tanh()
        return inputs


def learned_order(group, path):
    """Returns the layout of the buckets after a step, or after the load of a checkpoint."""
    ddp = echelon.DDP(OtherOrder(), group, bucket_mb=0.05)
    store = Store(path)
    if store.load(model=ddp) is None:
        ddp(torch.ones(3, 111)).sum().backward()
        store.save(1, model=ddp)
    reducer = unwrap(ddp).reducer
    return reducer.learned, str(reducer.layout)


def test_buckets_go_on_in_the_learned_order(tmp_path):
    """Over messages the order of additions can depend on the place in the bucket, so bits can."""
    learned = echelon.simulate(learned_order, 3, (str(tmp_path),), order="tcp").results
    assert learned[0][0].order[0].startswith("layers.6")
    assert echelon.simulate(learned_order, 3, (str(tmp_path),), order="tcp").results == learned


def on_processes(group, name, path, first, last):
    torch.manual_seed(group.rank + 17 * first)
    return run_to(group, name, path, first, last)


@pytest.mark.parametrize("name", ["zero 2", pytest.param("1f1b 3", marks=pytest.mark.slow)])
def test_processes_go_on_where_others_have_stopped(name, pool, tmp_path):
    world_size = LAYOUTS[name].world_size
    expected = pool.run(on_processes, world_size, name, str(tmp_path / "whole"), 0, STEPS)
    pool.run(on_processes, world_size, name, str(tmp_path / "stopped"), 0, 2)
    assert_same_end(pool.run(on_processes, world_size, name, str(tmp_path / "stopped"), 2, STEPS), expected, 2)


def load_at_once(group, path):
    """Loads after saves that are not waited for. Returns the steps."""
    store, model, found = Store(path), make_net(), []
    for step in (1, 2, 3):
        store.save(step, model=model, wait=False)
        found.append(store.load(model=model))
    store.close()
    return found


def test_a_load_takes_the_save_that_is_under_way(run, tmp_path):
    """It took the step before."""
    assert run(load_at_once, 2, str(tmp_path)) == [[1, 2, 3]] * 2


def with_uneven_batches(group, path, first, last):
    """Trains on batches of several sizes, by the weights of their samples. Returns the parameters after each step."""
    torch.manual_seed(first)  # of dropout; a checkpoint replaces it
    ddp = echelon.DDP(make_net(), group, average="samples", bucket_mb=1e-4)
    optimizer = torch.optim.SGD(ddp.parameters(), 0.05, momentum=0.9)
    store = Store(path, group=group)
    if first:
        assert store.load(model=ddp, optimizer=optimizer) == first
    seen = []
    for step in range(first, last):
        inputs, target = batch(10 * group.rank + step)
        size = (5, 5, 2 + group.rank, 2)[step % 4]
        nn.functional.cross_entropy(ddp(inputs[:size]), target[:size]).backward()
        optimizer.step()
        optimizer.zero_grad()
        seen.append(torch.cat([p.detach().flatten() for p in ddp.parameters()]))
    store.save(last, model=ddp, optimizer=optimizer)
    store.close()
    return seen


@pytest.mark.parametrize("stop", [1, 2, 3, 4])
def test_weights_by_samples_are_those_of_the_undisturbed_run(run, stop, tmp_path):
    """Gradients are scaled by the mean of the step before, which a resumed run did not know."""
    expected = run(with_uneven_batches, 3, str(tmp_path / "whole"), 0, 6)
    run(with_uneven_batches, 3, str(tmp_path / "stopped"), 0, stop)
    for got, all_steps in zip(run(with_uneven_batches, 3, str(tmp_path / "stopped"), stop, 6), expected, strict=True):
        assert all(map(torch.equal, got, all_steps[stop:]))
