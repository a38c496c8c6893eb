"""Everything that Echelon uses of torch without torch promising to keep it, with the reason."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from torch.utils._python_dispatch import TorchDispatchMode

if TYPE_CHECKING:
    from torch.autograd.graph import GradientEdge

__all__ = ["TorchDispatchMode", "at_end_of_backward", "run_backward", "storage_users", "version_of"]
# TorchDispatchMode: the one way to see every tensor that a thread makes, in backward too. Documented, but in a module
# whose name says that it is private.


def at_end_of_backward(finish: Callable[[], None], abandon: Callable[[], None]) -> None:
    """Calls `finish` when the backward pass that is running has computed everything, or `abandon` if it fails.

    To be called from a hook that runs in a backward pass. What `finish` raises comes out of `backward()`.

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
