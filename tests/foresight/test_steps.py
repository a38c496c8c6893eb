"""Steps of programs with several optimizers."""

from collections import Counter

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import echelon
from echelon.foresight.record import steps
from echelon.foresight.record.run import record
from echelon.foresight.trace import Kernel

SIZE = 64


def layer():
    return nn.Linear(SIZE, SIZE, bias=False).cuda()


def update(model, optimizer, microbatches=1):
    for _ in range(microbatches):
        model(torch.ones(SIZE, SIZE, device="cuda")).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def updates(trace):
    """Returns the forwards of a step by their module, each of which is one update."""
    return Counter(
        trace.modules[entry.module]
        for entry in trace.entries
        if isinstance(entry, Kernel) and entry.flops and entry.phase == "forward"
    )


class Critic(nn.Linear):
    pass


class Generator(nn.Linear):
    pass


def adversarial(num_critic, order="", *, iterations=4, microbatches=1):
    critic, generator = (kind(SIZE, SIZE, bias=False).cuda() for kind in (Critic, Generator))
    of_critic, of_generator = (torch.optim.SGD(model.parameters()) for model in (critic, generator))
    for number in range(num_critic * iterations):
        if order == "generator first" and number % num_critic == 0:
            update(generator, of_generator)
        update(critic, of_critic, microbatches)
        is_last = (number + 1) % num_critic == 0
        if is_last if not order else order == "at once" and number % num_critic == 0:
            update(generator, of_generator)


@pytest.mark.parametrize("order", ["", "generator first", "at once"])
@pytest.mark.parametrize("num_critic", [1, 2, 5])
def test_a_step_ends_when_optimizers_have_stepped_that_step_at_different_rates(num_critic, order):
    seen = echelon.foresee(adversarial, 1, (num_critic, order))
    assert updates(seen.traces[0]) == {"Critic": num_critic, "Generator": 1}
    assert not seen.assumptions


def test_a_step_is_that_of_the_named_function():
    def program():
        critic, generator = (kind(SIZE, SIZE, bias=False).cuda() for kind in (Critic, Generator))
        of_critic, of_generator = (torch.optim.Adam(model.parameters()) for model in (critic, generator))

        def iteration():
            for _ in range(3):
                update(critic, of_critic)
            update(generator, of_generator)

        for _ in range(4):
            iteration()

    seen, named = (echelon.foresee(program, 1, until=until) for until in (None, "iteration"))
    assert seen.step_seconds == pytest.approx(named.step_seconds)
    assert seen.live_memory == named.live_memory


def test_microbatches_of_several_updates_are_repeated():
    full, fast = (record(lambda: adversarial(3, microbatches=6), 1, full=full)[0] for full in (True, False))
    assert updates(full) == {"Critic": 18, "Generator": 1}
    assert fast == full


def unused(iterations, kind=torch.optim.SGD, shared=False, microbatches=1):
    model, other = layer(), layer()
    optimizer = torch.optim.SGD(model.parameters())
    aside = kind(model.parameters() if shared else other.parameters())
    for _ in range(iterations):
        update(model, optimizer, microbatches)
    return aside


@pytest.mark.parametrize("iterations", [2, 5, 100])
@pytest.mark.parametrize("microbatches", [1, 6])
def test_an_optimizer_that_never_steps_is_left_out(iterations, microbatches):
    trace = record(lambda: unused(iterations, microbatches=microbatches), 1)[0]
    assert trace.is_step
    assert updates(trace) == {"Linear": microbatches}
    (text,) = trace.assumptions
    assert text.startswith("the optimizer made at tests/foresight/test_steps.py:")
    assert text.endswith(
        "does not step: if it does later, name a function whose return ends a step by --until FUNCTION"
    )


def test_an_optimizer_is_waited_for_a_bounded_time():
    done = []

    def program():
        model, other = layer(), layer()
        optimizer, _aside = (torch.optim.SGD(each.parameters()) for each in (model, other))
        while True:
            done.append(1)
            update(model, optimizer)

    assert updates(record(program, 1)[0]) == {"Linear": 1}
    assert len(done) == steps.MOST_ROUNDS + 2


def test_an_optimizer_whose_parameters_another_one_updates_is_not_waited_for():
    """Sharpness-aware optimizers keep one, and a program may go on with another one later."""
    trace = record(lambda: unused(3, torch.optim.LBFGS, shared=True), 1)[0]
    assert updates(trace) == {"Linear": 1}
    assert not trace.assumptions


class Wrapper(torch.optim.Optimizer):
    """Optimizer that steps by another one, of parameters of its own, as one of mixed precision."""

    def __init__(self, params):
        self.masters = [each.detach().clone().requires_grad_() for each in params]
        self.inner = torch.optim.SGD(self.masters, momentum=0.9)
        super().__init__(params, {})

    def step(self):
        for each, group in zip(self.masters, self.param_groups[0]["params"], strict=True):
            each.grad = group.grad
        self.inner.step()


def test_an_optimizer_that_another_one_steps_has_stepped():
    done = []

    def program():
        model = layer()
        optimizer = Wrapper(list(model.parameters()))
        while True:
            done.append(1)
            update(model, optimizer)

    trace = record(program, 1)[0]
    assert updates(trace) == {"Linear": 1}
    assert len(done) == 2
    assert sum(each.num_bytes for each in trace.live if each.kind == "optimizer") == SIZE * SIZE * 4


def test_optimizers_of_single_parameters_step_in_backward():
    def program():
        model = nn.Sequential(layer(), layer())
        optimizers = {each: torch.optim.SGD([each]) for each in model.parameters()}
        for each in model.parameters():
            each.register_post_accumulate_grad_hook(lambda each: optimizers[each].step())
        while True:
            model(torch.ones(SIZE, SIZE, device="cuda")).sum().backward()
            model.zero_grad()

    trace = record(program, 1)[0]
    assert sum(updates(trace).values()) == 2
    assert not trace.assumptions


def of_static_graph(is_static):
    dist.init_process_group("nccl")
    device = torch.device("cuda", dist.get_rank())
    torch.cuda.set_device(device)
    model = nn.Sequential(*(nn.Linear(2048, 2048, bias=False) for _ in range(4))).to(device)
    ddp = DistributedDataParallel(model, device_ids=[device.index], static_graph=is_static == "by argument")
    if is_static == "later":
        ddp._set_static_graph()
    optimizer = torch.optim.SGD(ddp.parameters())
    for _ in range(5):
        ddp(torch.ones(4096, 2048, device=device)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    dist.destroy_process_group()


@pytest.mark.parametrize("is_static", ["by argument", "later"])
def test_a_static_graph_is_foreseen_from_the_step_on_that_overlaps_its_reductions(is_static):
    """torch reduces all gradients after the backward in the first two steps."""
    usual, static = (echelon.foresee(of_static_graph, 2, (each,)) for each in ("", is_static))
    assert static.step_seconds == pytest.approx(usual.step_seconds, rel=0.01)
    assert static.assumptions == usual.assumptions


def test_a_number_of_steps_is_kept_with_a_static_graph():
    early = echelon.foresee(of_static_graph, 2, ("by argument",), steps=2)
    assert any("static graph" in each and "steps=3" in each for each in early.assumptions)
    later = echelon.foresee(of_static_graph, 2, ("by argument",), steps=3)
    assert later.step_seconds < early.step_seconds
    assert not any("static graph" in each for each in later.assumptions)


@pytest.mark.parametrize("sizes", [(64, 128, 128), (64, 64, 64)])
def test_a_step_that_is_unlike_the_one_before_says_so(sizes):
    """As of a curriculum whose sequences grow."""

    def program():
        model = layer()
        optimizer = torch.optim.SGD(model.parameters())
        model(torch.ones(512, SIZE, device="cuda"))  # as an evaluation before the first step
        for each in sizes:
            model(torch.ones(each, SIZE, device="cuda")).sum().backward()
            optimizer.step()

    def assumptions(**options):
        return [each for each in echelon.foresee(program, 1, **options).assumptions if "alike" in each]

    found = assumptions()
    assert len(found) == (sizes[0] != sizes[1])
    assert all("have 2 times the FLOPs of the one before (--steps 3 " in each for each in found)
    assert not assumptions(steps=3)


class Preconditioned(torch.optim.SGD):
    """Makes a preconditioner in each second step."""

    num_steps = 0

    def step(self, closure=None):
        self.num_steps += 1
        if self.num_steps % 2 == 0:
            for each in self.param_groups[0]["params"]:
                each.grad @ each.grad
        return super().step(closure)


def test_an_optimizer_that_computes_more_than_in_the_step_before_says_so():
    def program():
        model = torch.nn.Linear(SIZE, SIZE, bias=False, device="cuda")
        optimizer = Preconditioned(model.parameters())
        while True:
            model(torch.ones(SIZE, SIZE, device="cuda")).sum().backward()
            optimizer.step()

    assert "optimizer of this one have 2 times the FLOPs" in "".join(echelon.foresee(program, 1).assumptions)


def keeps(size):
    layer = torch.nn.Linear(512, 512, device="cuda")
    optimizer = torch.optim.SGD(layer.parameters())
    kept = []
    while True:
        kept.append(layer(torch.ones(size, 512, device="cuda")))
        kept[-1].sum().backward()
        optimizer.step()


@pytest.mark.parametrize("size", [256, 1024])
def test_a_step_that_leaves_memory_is_an_assumption(size):
    """Later steps need more. Small tensors, such as losses, are not worth a line."""
    found = [each for each in echelon.foresee(keeps, 1, (size,)).assumptions if "this step leaves 2 MiB more" in each]
    assert bool(found) == (size == 1024)
