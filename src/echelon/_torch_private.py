"""Everything that Echelon uses of torch without torch promising to keep it, with the reason."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.export import ExportedProgram
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_map, tree_unflatten

if TYPE_CHECKING:
    from torch.autograd.graph import GradientEdge

__all__ = [
    "TorchDispatchMode",
    "TreeSpec",
    "at_end_of_backward",
    "draws_random_numbers",
    "fake_tensors",
    "guards_of",
    "run_backward",
    "storage_users",
    "tree_flatten",
    "tree_leaves",
    "tree_map",
    "tree_unflatten",
    "version_of",
    "writes_in_place",
]
# TorchDispatchMode: the one way to see every tensor that a thread makes, in backward too. Documented, but in a module
# whose name says that it is private.
# tree_...: what torch.export takes inputs and outputs apart with. Libraries register their own containers there.


def at_end_of_backward(finish: Callable[[], None], abandon: Callable[[], None]) -> None:
    """Calls `finish` when the backward pass that is running has computed everything, or `abandon` if it fails.

    To be called from a hook that runs in a backward pass, or from a `finish`, which then is followed by the others that
    were asked for before, and by this one. What `finish` raises comes out of `backward()`.

    torch has no public way: hooks see one tensor each and cannot know which is the last, because a parameter that was
    not used has none; `register_multi_grad_hook` runs before the last gradient is accumulated, and for
    `torch.autograd.grad` as well. The engine owns the callback; that it is dropped uncalled tells of a failure.
    """
    engine = torch.autograd.Variable._execution_engine
    engine.queue_callback(_End(finish, abandon))


class _End:
    def __init__(self, finish: Callable[[], None], abandon: Callable[[], None]) -> None:
        self._finish = finish
        self._abandon = abandon
        self._called = False

    def __call__(self) -> None:
        self._called = True
        self._finish()

    def __del__(self) -> None:
        if not self._called:
            self._abandon()


def run_backward(
    roots: Sequence[tuple[GradientEdge, torch.Tensor]],
    *,
    inputs: Sequence[GradientEdge] = (),
    into_leaves: bool = False,
    keep_graph: bool = False,
) -> list[torch.Tensor | None]:
    """Runs a graph from `roots`, each with its gradient.

    What `torch.autograd.grad` and `.backward` do after they have looked at their arguments, which takes them longer
    than the backward of a small layer.

    Args:
        roots: where to start.
        inputs: where to stop; none: at all leaves, then `into_leaves` must be set.
        into_leaves: add what arrives at leaves into their .grad, and return nothing.
        keep_graph: the graph, or a part of it, will be run again.
    """
    edges = tuple(edge for edge, _ in roots)
    gradients = tuple(gradient for _, gradient in roots)
    found = torch.autograd.Variable._execution_engine.run_backward(
        edges, gradients, keep_graph, False, tuple(inputs), allow_unreachable=True, accumulate_grad=into_leaves
    )
    return [] if into_leaves else list(found)


def storage_users(tensor: torch.Tensor) -> int:
    """Returns how many tensors, and other owners, share the memory of a tensor, this one included.

    torch has no public way: views of views, and what autograd saved, own the memory without the tensor that it was made
    for.
    """
    storage = tensor.untyped_storage()  # counts itself
    return int(torch._C._storage_Use_Count(storage._cdata)) - 1


def version_of(tensor: torch.Tensor) -> int:
    """Returns how often a tensor, or one that shares its memory, was changed in place.

    torch compares it for what it saves for backward by itself, but not for what goes through `saved_tensors_hooks`.
    """
    return tensor._version


def fake_tensors() -> AbstractContextManager[object]:
    """Returns a context in which new tensors have a shape, a dtype and a device, and no data.

    The meta device is no substitute: its tensors do not mix with those of the device that a model will run on.
    """
    return FakeTensorMode()


def guards_of(exported: ExportedProgram) -> torch.nn.Module | None:
    """Returns what, called with the inputs (flat), raises AssertionError unless they take the path that was exported.

    torch puts it into the module that an exported program becomes, under a private name; alone it cannot be had.
    """
    return dict(exported.module().named_children()).get("_guards_fn")


def writes_in_place(operation: object) -> bool:
    """Whether one of torch's operators changes its arguments. Only its schema says so, and that has no public name."""
    return isinstance(operation, torch._ops.OpOverload) and operation._schema.is_mutable


def draws_random_numbers(operation: object) -> bool:
    """Whether one of torch's operators draws from the generator of its device."""
    return isinstance(operation, torch._ops.OpOverload) and torch.Tag.nondeterministic_seeded in operation.tags
