"""Unmodified programs of torch.distributed give the same bits on simulated ranks as on real processes."""

import gc
import importlib.util
import shutil
import sys
import weakref
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import echelon
from tests.helpers.torch_programs.common import batches, mlp
from tests.helpers.torch_programs.processes import FAMILIES, names_of, run_as_rank, simulate, simulate_as_rank

pytestmark = pytest.mark.filterwarnings("ignore")  # of torch, about its own names

QUICK = {
    "data_parallel": ("ddp_own_hook", "ddp_static_graph", "zero"),
    "sharded": ("fsdp1", "fsdp2"),
    "tensor_parallel": ("sequence_parallel",),
    "pipelines": ("interleaved_zero_bubble",),
    "checkpoints": ("saved_beside",),
    "collectives": ("functional_collectives", "state_of_the_process"),
}
HEAVY = ("compiled", "libraries")
"""Families that leave much behind in their process: compiled code, and globals of libraries."""
PACKAGES = {
    "accelerate": "accelerate",
    "transformers_trainer": "accelerate",  # and transformers, which the tests need anyway
    "transformers_language_model": "accelerate",
    "lightning_fabric": "lightning",
    "lightning_trainer": "lightning",
}
"""The package that a program needs, and that is not always there."""


def cases(chosen):
    return [(family, name) for family in FAMILIES for name in names_of(family) if chosen(family, name)]


def is_quick(family, name):
    return name in QUICK.get(family, ())


every = pytest.mark.parametrize(("family", "name"), cases(lambda *_: True))


@pytest.fixture
def environ(tmp_path):
    """Variables that keep torch's compiler from leaving processes and files behind."""
    return {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path), "TORCHINDUCTOR_COMPILE_THREADS": "1"}


@pytest.fixture
def simulated(pool, environ):
    """Runs a program on simulated ranks, and returns their results."""

    def run(family, name, world_size):
        if family in HEAVY:
            return pool.run(simulate_as_rank, 1, family, name, world_size, environ, timeout=300.0)[0]
        return simulate(family, name, world_size)

    return run


@pytest.fixture
def processes(pool, environ):
    """Runs a program on processes over Echelon, and returns the results of the ranks."""

    def run(family, name, world_size):
        return pool.run(run_as_rank, world_size, family, name, environ, timeout=200.0 if family in HEAVY else 50.0)

    return run


def check_needs(family, name):
    package = PACKAGES.get(name)
    if package is not None and importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed: pip install -c constraints.txt 'echelon[interop]'")
    if family == "compiled" and shutil.which("g++") is None:
        pytest.skip("torch.compile needs g++")


def check_equal_everywhere(results):
    first = results[0].everywhere
    assert [result.everywhere for result in results] == [first] * len(results)


@pytest.mark.parametrize(("family", "name"), cases(is_quick))
def test_two_ranks_compute_as_two_processes(simulated, processes, family, name):
    results = simulated(family, name, 2)
    assert results == processes(family, name, 2)
    check_equal_everywhere(results)


@pytest.mark.slow
@pytest.mark.timeout(500)
@pytest.mark.parametrize("world_size", [2, 4])
@every
def test_ranks_compute_as_processes(simulated, processes, family, name, world_size):
    check_needs(family, name)
    results = simulated(family, name, world_size)
    assert results == processes(family, name, world_size)
    check_equal_everywhere(results)


@pytest.mark.slow
@pytest.mark.timeout(500)
@every
def test_sixteen_ranks_agree(simulated, family, name):
    check_needs(family, name)
    results = simulated(family, name, 16)
    assert len(results) == 16
    check_equal_everywhere(results)
    assert any(result.own is not None or result.everywhere is not None for result in results)


def test_callbacks_of_several_buckets_may_communicate():
    """Over Gloo and Echelon they may begin in another order on each rank, over NCCL in the order of the buckets."""
    # Here, where their warnings are ignored.
    from torch.distributed.algorithms.ddp_comm_hooks import ddp_zero_hook, default_hooks
    from torch.distributed.optim import ZeroRedundancyOptimizer

    def program(overlaps):
        dist.init_process_group("nccl")
        torch.manual_seed(0)
        model = DistributedDataParallel(mlp(), bucket_cap_mb=0.0005)
        if overlaps:
            optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, overlap_with_ddp=True, lr=0.1)
            hook = ddp_zero_hook.hook_with_zero_step_interleaved(default_hooks.allreduce_hook, model, optimizer)
            model.register_comm_hook(None, hook)
        else:
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        losses = []
        for step, inputs in enumerate(batches(dist.get_rank(), 5)):
            loss = model(inputs).square().mean()
            loss.backward()
            if not overlaps and step >= 2:  # the hook needs two steps to learn the buckets
                optimizer.step()
            model.zero_grad()
            losses.append(loss.item())
        dist.destroy_process_group()
        return losses

    assert echelon.simulate(program, 2, args=(True,)).results == echelon.simulate(program, 2, args=(False,)).results


def test_every_family_has_a_quick_program():
    assert set(QUICK) | set(HEAVY) == set(FAMILIES)
    assert all(set(names) <= set(names_of(family)) for family, names in QUICK.items())
    assert set(PACKAGES) == set(names_of("libraries"))


def crossed(call):
    """Ranks 0 and 1 enter two collectives in different order. In one of them rank 0 only sends."""
    dist.init_process_group("gloo")
    rank, pair, x = dist.get_rank(), dist.new_group([0, 1]), torch.ones(4)
    if rank == 1:
        dist.all_reduce(x)
        call(x, pair)
    else:
        if rank == 0:
            call(x, pair)
        dist.all_reduce(x)


SENT_BY_RANK_0 = {
    "broadcast": lambda x, pair: dist.broadcast(x, 0, group=pair),
    "reduce": lambda x, pair: dist.reduce(x, 1, group=pair),
    "scatter": lambda x, pair: dist.scatter(x, [x, x] if dist.get_rank() == 0 else None, 0, group=pair),
    "gather": lambda x, pair: dist.gather(x, [x.clone(), x.clone()] if dist.get_rank() else None, 1, group=pair),
    "wait": lambda x, pair: dist.broadcast(x, 0, group=pair, async_op=True).wait(),
}


@pytest.mark.parametrize("kind", SENT_BY_RANK_0)
def test_a_rank_that_only_sends_waits_as_over_gloo(kind):
    """Such programs passed, and hung over Gloo."""
    with pytest.raises(echelon.DeadlockError, match=r"rank 0 -> rank 1 -> rank 0|rank 1 -> rank 0 -> rank 1"):
        echelon.simulate(partial(crossed, SENT_BY_RANK_0[kind]), 3)


def test_an_asynchronous_broadcast_that_is_waited_for_late_goes_on():
    def main():
        dist.init_process_group("gloo")
        x, y = torch.full((4,), float(dist.get_rank())), torch.ones(4)
        if dist.get_rank() == 0:
            work = dist.broadcast(x, 0, async_op=True)
            dist.send(y, 1)
            work.wait()
        else:
            dist.recv(y, 0)
            dist.broadcast(x, 0)
        return x[0].item()

    assert echelon.simulate(main, 2).results == [0.0, 0.0]


LATE = ("torch.distributed.nn.functional", "torch.distributed.fsdp.sharded_grad_scaler")
"""Modules of torch with arguments whose default is the default group at the module's import."""


@pytest.fixture
def not_imported(monkeypatch):
    for name in LATE:
        module = importlib.import_module(name)
        package, _, own = name.rpartition(".")
        monkeypatch.setattr(sys.modules[package], own, module)  # the imports of the ranks replace it
        monkeypatch.delitem(sys.modules, name)


def importing_late():
    dist.init_process_group("gloo")
    differentiable, amp = map(importlib.import_module, LATE)
    x = torch.full((2,), 1.0 + dist.get_rank(), requires_grad=True)
    total = differentiable.all_reduce(x)
    (total * (1 + dist.get_rank())).sum().backward()
    scaler = amp.ShardedGradScaler(device="cpu")
    return total.tolist(), x.grad.tolist(), scaler.process_group, dist.group.WORLD is not None


def test_ranks_may_import_modules_of_torch_after_the_group_began(not_imported):
    """The defaults of their arguments were the group of the rank that was the first to import them."""
    for world_size in (1, 2, 3):
        total = float(sum(range(1, world_size + 1)))
        expected = ([total] * 2, [total] * 2, None, True)
        assert echelon.simulate(importing_late, world_size).results == [expected] * world_size


class Held:
    """A variable of a program, such as the iterator of a loader whose workers end with it."""


def asking_for_the_group():
    held = Held()
    dist.is_initialized()
    return weakref.ref(held)


def test_a_question_for_the_group_keeps_nothing_of_its_caller():
    """All variables of all callers stayed until Python collected garbage, and each loader then took 5 s to end."""
    gc.disable()
    try:
        assert echelon.simulate(lambda: asking_for_the_group()() is None, 2).results == [True, True]
    finally:
        gc.enable()
