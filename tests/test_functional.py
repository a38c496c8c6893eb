"""Autograd goes through the collectives: gradients equal those of one process that has all ranks' tensors."""

import pytest
import torch

import echelon
from echelon import functional


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
    results = echelon.simulate(run_one, world_size, (name, op, uneven, ties), timeout=5.0).results
    for rank, (out, gradient, second) in enumerate(results):
        torch.testing.assert_close(out, outs[rank].detach())
        torch.testing.assert_close(gradient, gradients[rank].detach())
        if op in ("sum", "mean"):
            torch.testing.assert_close(second, seconds[rank])


def run_on_processes(group):
    return run_one(group, "all_gather", "sum", True, False)


def test_gradients_flow_between_processes(pool):
    expected = echelon.simulate(run_on_processes, 2, timeout=5.0).results
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
        (lambda group: functional.reduce(torch.ones(1), 0, group, "max"), "does sum and mean"),
        (lambda group: functional.reduce_scatter(torch.ones(1), group, "max"), "does sum and mean"),
        (lambda group: functional.reduce_scatter(torch.tensor(1.0), group), "at least 1 dim"),
        (lambda group: functional.all_gather(torch.tensor(1.0), group), "at least 1 dim"),
    ],
)
def test_what_has_no_gradient_is_refused(act, words):
    with pytest.raises(echelon.EchelonError, match=words):
        echelon.simulate(act, 1)
