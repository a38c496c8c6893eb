"""Autograd goes through the collectives: gradients equal those of one process that has all ranks' tensors."""

import pytest
import torch

import echelon
from echelon import functional

OPS = ("sum", "mean", "product", "min", "max")


def inputs_of(world_size, uneven=False, ties=False):
    generator = torch.Generator().manual_seed(3)
    tensors = []
    for rank in range(world_size):
        rows = 5 + rank * uneven
        values = torch.randn(rows, 2, generator=generator, dtype=torch.float64)
        tensors.append(values.round() if ties else values)
    return tensors


def reference(name, tensors, op):
    """What the collective gives on every rank, by torch operations in one process."""
    size = len(tensors)
    stacked = torch.stack(tensors) if len({len(tensor) for tensor in tensors}) == 1 else None
    if name in ("all_reduce", "reduce", "reduce_scatter"):
        total = {"sum": torch.sum, "mean": torch.mean, "product": torch.prod, "min": torch.amin, "max": torch.amax}[op](
            stacked, 0
        )
        if name == "all_reduce":
            return [total] * size
        if name == "reduce":
            return [total if rank == size - 1 else total.new_empty(0) for rank in range(size)]
        return list(total.tensor_split(size))
    if name == "broadcast":
        return [tensors[-1]] * size
    if name == "all_gather":
        return [torch.cat(tensors)] * size
    if name == "gather":
        return [torch.cat(tensors) if rank == size - 1 else tensors[rank][:0] for rank in range(size)]
    if name == "scatter":
        return list(tensors[-1].tensor_split(size))
    parts = [tensor.tensor_split(size) for tensor in tensors]
    return [torch.cat([part[rank] for part in parts]) for rank in range(size)]


def call(name, tensor, group, op):
    if name in ("all_reduce", "reduce_scatter"):
        return getattr(functional, name)(tensor, group, op)
    if name == "reduce":
        return functional.reduce(tensor, group.world_size - 1, group, op)
    if name in ("broadcast", "gather", "scatter"):
        return getattr(functional, name)(tensor, group.world_size - 1, group)
    return getattr(functional, name)(tensor, group)


def weights_like(tensor, seed):
    return torch.randn(tensor.shape, generator=torch.Generator().manual_seed(seed), dtype=tensor.dtype)


def run_one(group, name, op, uneven, ties):
    tensor = inputs_of(group.world_size, uneven, ties)[group.rank].requires_grad_()
    out = call(name, tensor, group, op)
    (gradient,) = torch.autograd.grad(
        (out * weights_like(out, group.rank) * out).sum(), tensor, create_graph=op in ("sum", "mean")
    )
    second = None
    if gradient.requires_grad:
        (second,) = torch.autograd.grad((gradient * weights_like(gradient, 99)).sum(), tensor)
    return out.detach(), gradient.detach(), second


CASES = [
    *[("all_reduce", op, False, False) for op in ("sum", "mean", "product", "min", "max")],
    *[("all_reduce", op, False, True) for op in ("min", "max")],
    *[(name, op, False, False) for name in ("reduce", "reduce_scatter") for op in ("sum", "mean")],
    *[(name, "sum", False, False) for name in ("broadcast", "scatter", "all_to_all")],
    *[(name, "sum", uneven, False) for name in ("all_gather", "gather") for uneven in (False, True)],
]


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize(("name", "op", "uneven", "ties"), CASES)
def test_gradients_equal_those_of_one_process(world_size, name, op, uneven, ties):
    tensors = [tensor.requires_grad_() for tensor in inputs_of(world_size, uneven, ties)]
    outs = reference(name, tensors, op)
    loss = sum((out * weights_like(out, rank) * out).sum() for rank, out in enumerate(outs))
    gradients = torch.autograd.grad(loss, tensors, create_graph=True, materialize_grads=True)
    seconds = torch.autograd.grad(
        sum((gradient * weights_like(gradient, 99)).sum() for gradient in gradients), tensors, materialize_grads=True
    )
    results = echelon.simulate(run_one, world_size, (name, op, uneven, ties), timeout=5.0, late_sends=True).results
    for rank, (out, gradient, second) in enumerate(results):
        torch.testing.assert_close(out, outs[rank].detach())
        torch.testing.assert_close(gradient, gradients[rank].detach())
        if op in ("sum", "mean"):
            torch.testing.assert_close(second, seconds[rank])


def run_on_processes(group):
    return run_one(group, "all_gather", "sum", True, False)


def test_gradients_flow_between_processes(pool):
    expected = echelon.simulate(run_on_processes, 2, timeout=5.0, late_sends=True).results
    for got, want in zip(pool.run(run_on_processes, 2), expected, strict=True):
        for ours, theirs in zip(got, want, strict=True):
            assert torch.equal(ours, theirs)


def zeros_and_products(group):
    tensor = torch.tensor([0.0, 2.0, 0.0] if group.rank == 0 else [3.0, 4.0, 0.0], requires_grad=True)
    functional.all_reduce(tensor, group, "product").sum().backward()
    return tensor.grad.tolist()


def test_the_gradient_of_a_product_with_zeros_is_that_of_the_others():
    """Dividing the product by one's own value would give NaN."""
    assert echelon.simulate(zeros_and_products, 2).results == [[6.0, 8.0, 0.0], [0.0, 4.0, 0.0]]


@pytest.mark.parametrize(
    ("act", "words"),
    [
        (lambda group: functional.all_reduce(torch.ones(1), group, "bor"), "use sum, mean, product"),
        (lambda group: functional.reduce(torch.ones(1), 0, group, "band"), "use sum, mean, product"),
        (lambda group: functional.reduce_scatter(torch.ones(1), group, "bxor"), "use sum, mean, product"),
        (lambda group: functional.reduce_scatter(torch.tensor(1.0), group), "at least 1 dim"),
        (lambda group: functional.scatter(torch.tensor(1.0), 0, group), "at least 1 dim"),
        (lambda group: functional.send(torch.tensor(1.0), 0, group), "requires no gradient: use group.send"),
        (lambda group: functional.sendrecv(torch.ones(1), 0, 0, group), "requires no gradient: use group.sendrecv"),
    ],
)
def test_what_has_no_gradient_is_refused(act, words):
    with pytest.raises(echelon.EchelonError, match=words):
        echelon.simulate(act, 1)


class Whole(torch.autograd.Function):
    """A program of all ranks as one function of all their inputs, to be checked by differences."""

    @staticmethod
    def forward(ctx, act, *inputs):
        ctx.act, ctx.inputs = act, inputs
        results = echelon.simulate(run_forward, len(inputs), (act, inputs), timeout=5.0, late_sends=True).results
        ctx.shapes = [tuple(result.shape) for result in results]
        return tuple(results)

    @staticmethod
    def backward(ctx, *gradients):
        results = echelon.simulate(
            run_backward, len(ctx.inputs), (ctx.act, ctx.inputs, gradients), timeout=5.0, late_sends=True
        ).results
        return None, *results


def run_forward(group, act, inputs):
    return act(inputs[group.rank].detach().requires_grad_(), group).detach()


def run_backward(group, act, inputs, gradients):
    tensor = inputs[group.rank].detach().requires_grad_()
    act(tensor, group).backward(gradients[group.rank])
    return tensor.grad


def exchange_uneven(tensor, group):
    """Rank r sends r + 1 rows to rank 0, and the rest to the last one."""
    first = min(group.rank + 1, len(tensor))
    sends = [0] * group.world_size
    sends[0] += first
    sends[-1] += len(tensor) - first
    return functional.all_to_all(tensor, group, in_splits=sends)


def pass_on(tensor, group):
    """A chain: each rank multiplies what it gets, the last one has the result."""
    value = tensor if group.rank == 0 else functional.recv(group.rank - 1, group, tag=3) * tensor
    return value if group.rank == group.world_size - 1 else functional.send(value, group.rank + 1, group, tag=3)


def shift(tensor, group):
    right, left = (group.rank + 1) % group.world_size, (group.rank - 1) % group.world_size
    return functional.sendrecv(functional.sendrecv(tensor.sin(), right, left, group), right, left, group) * tensor


CHECKED = {
    **{f"all_reduce {op}": (lambda t, g, op=op: functional.all_reduce(t, g, op), False) for op in OPS},
    **{f"reduce {op}": (lambda t, g, op=op: functional.reduce(t, g.world_size - 1, g, op), False) for op in OPS},
    **{f"reduce_scatter {op}": (lambda t, g, op=op: functional.reduce_scatter(t, g, op), False) for op in OPS},
    "broadcast": (lambda t, g: functional.broadcast(t, g.world_size - 1, g), False),
    "scatter": (lambda t, g: functional.scatter(t, g.world_size - 1, g), False),
    "all_gather": (functional.all_gather, False),
    "all_gather uneven": (functional.all_gather, True),
    "gather uneven": (lambda t, g: functional.gather(t, 0, g), True),
    "all_to_all": (functional.all_to_all, False),
    "all_to_all uneven": (exchange_uneven, True),
    "all_gather of no dims": (lambda t, g: functional.all_gather(t.sum(), g), True),
    "send and recv": (pass_on, False),
    "sendrecv": (shift, False),
}


@pytest.mark.parametrize("world_size", [pytest.param(2, marks=pytest.mark.slow), 3])
@pytest.mark.parametrize("name", CHECKED)
def test_gradients_equal_differences(name, world_size):
    act, uneven = CHECKED[name]
    inputs = [
        torch.rand(2 + rank * uneven, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(rank)) + 0.5
        for rank in range(world_size)
    ]
    for tensor in inputs:
        tensor.requires_grad_()
    assert torch.autograd.gradcheck(lambda *tensors: Whole.apply(act, *tensors), inputs, fast_mode=True)


def cube_elsewhere(group):
    tensor = torch.tensor([2.0 + group.rank], requires_grad=True)
    out = functional.send(tensor, 1, group) if group.rank == 0 else functional.recv(0, group) ** 3
    out.sum().backward()
    return tensor.grad


def test_gradients_of_messages_come_back(pool):
    for gradients in (echelon.simulate(cube_elsewhere, 2).results, pool.run(cube_elsewhere, 2)):
        assert gradients[0].tolist() == [12.0]
        assert gradients[1] is None


def no_gradients(group):
    with torch.no_grad():
        if group.rank == 0:
            return functional.send(torch.ones(2), 1, group).requires_grad
        return functional.recv(0, group).requires_grad


def test_messages_without_autograd_need_no_backward():
    assert echelon.simulate(no_gradients, 2).results == [False, False]
