"""Private interfaces of torch about backward passes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from operator import attrgetter
from types import ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.autograd import forward_ad
from torch.autograd.function import BackwardCFunction

from echelon.replacements import Replacement

if TYPE_CHECKING:
    from torch.autograd.graph import GradientEdge

# The level of forward-mode AD, below 0 outside of it: a module and its attribute.
FORWARD_LEVEL: tuple[ModuleType, str] = forward_ad, "_current_level"
# Without a frame of Python, because every small operation asks.
forward_ad_level: Callable[[], int] = partial(attrgetter(FORWARD_LEVEL[1]), forward_ad)
# The public `increment_version` wraps it in Python.
count_changes: Callable[[tuple[torch.Tensor, ...]], None] = torch._C._increment_version


def is_dual(tensor: torch.Tensor) -> bool:
    """Whether a tensor has a tangent of forward-mode AD."""
    # Fast path: without an active level there are no tangents. The public `unpack_dual` takes 10 times as long.
    return forward_ad._current_level >= 0 and forward_ad.unpack_dual(tensor).tangent is not None  # type: ignore[no-untyped-call]


def at_end_of_backward(finish: Callable[[], None], abandon: Callable[[], None]) -> None:
    """Calls `finish` at the end of the current backward pass, or `abandon` if the pass fails.

    Call it from a hook of a backward pass, or from a `finish`: the new callback then runs after all earlier ones.
    Exceptions of `finish` propagate out of `backward()`.

    torch has no public way. A hook sees one tensor and cannot know which is the last, since an unused parameter has
    none. `register_multi_grad_hook` runs before the last gradient is accumulated, and for `torch.autograd.grad` too.
    Autograd's engine owns the callback; it drops the callback uncalled if the pass fails.
    """
    engine = torch.autograd.Variable._execution_engine
    engine.queue_callback(_End(finish, abandon))


class _End:
    _called = True  # until `__init__` has ended: an interrupt in it leaves nothing to abandon

    def __init__(self, finish: Callable[[], None], abandon: Callable[[], None]) -> None:
        self._finish = finish
        self._abandon = abandon
        self._called = False

    def __call__(self) -> None:
        self._called = True
        self._finish()

    def __del__(self) -> None:
        if not self._called:  # dropped by the engine: the backward pass has failed
            self._abandon()


def run_backward(
    roots: Sequence[tuple[GradientEdge, torch.Tensor]],
    *,
    inputs: Sequence[GradientEdge] = (),
    into_leaves: bool = False,
    keep_graph: bool = False,
) -> list[torch.Tensor | None]:
    """Runs backward from `roots` and returns the gradients of `inputs`, None for unreachable ones.

    Skips the argument checks of `torch.autograd.grad` and `.backward`, which take longer than the backward of a small
    layer.

    Args:
        roots: edges to start from, each with its gradient.
        inputs: edges to stop at; empty: at all leaves, which needs `into_leaves`.
        into_leaves: accumulate the gradients of leaves into their .grad, and return an empty list.
        keep_graph: keep the graph for another run.
    """
    edges, gradients = zip(*roots, strict=True)
    found = torch.autograd.Variable._execution_engine.run_backward(
        edges, gradients, keep_graph, False, tuple(inputs), allow_unreachable=True, accumulate_grad=into_leaves
    )
    return [] if into_leaves else list(found)


def is_in_backward() -> bool:
    """Whether this thread is computing a backward. torch has no public way."""
    return torch._C._current_graph_task_id() != -1


def is_at_end_of_backward() -> bool:
    """Whether this thread runs a callback at the end of a backward, after its last node. torch has no public way."""
    return is_in_backward() and torch._C._current_autograd_node() is None


def hooks_after_gradient(parameter: torch.nn.Parameter) -> list[Callable[[torch.Tensor], None]]:
    """Returns the hooks registered by `register_post_accumulate_grad_hook`. torch has no public way."""
    hooks: dict[int, Callable[[torch.Tensor], None]] | None = parameter._post_accumulate_grad_hooks
    return list((hooks or {}).values())


class Backward(NamedTuple):
    """Options of a backward."""

    is_whole: bool
    """Whether it goes to all leaves, and frees the graph."""
    makes_graph: bool
    """Whether gradients of its gradients can be computed, as with `create_graph=True` and in `torch.func.grad`."""
    roots: Sequence[object]
    """Tensors, or edges of the graph, from which it goes."""


def backward_with(mode: Callable[[Backward], AbstractContextManager[object]]) -> list[Replacement]:
    """Makes each backward run in a context, which `mode` returns.

    torch itself leaves function modes during a backward.
    """

    def running(original: Callable[..., Any]) -> Callable[..., Any]:
        def run(tensors: Any, *args: Any, **options: Any) -> Any:
            # args: gradients, whether the graph is kept, whether one is made, the inputs if not all leaves are meant.
            is_whole = not any(args[1:4]) and bool(options.get("accumulate_grad"))
            with mode(Backward(is_whole, makes_graph=bool(args[2]), roots=tensors)):
                return original(tensors, *args, **options)

        return run

    return [Replacement(torch.autograd, "_engine_run_backward", running)]


def register_first_hook(tensor: torch.Tensor, hook: Callable[[torch.Tensor], None]) -> None:
    """Registers a hook of a tensor's gradient that runs before all earlier hooks. torch has no public way."""
    handle = tensor.register_hook(hook)  # type: ignore[no-untyped-call]
    hooks: dict[int, Any] = tensor._backward_hooks  # type: ignore[assignment]
    # Inserted again, because torch's C++ calls the hooks in the order of their insertion.
    others = [(number, each) for number, each in hooks.items() if number != handle.id]
    hooks.clear()
    hooks[handle.id] = hook
    hooks.update(others)


def formula_of(node: BackwardCFunction) -> type[torch.autograd.Function]:
    """Returns the program's own class whose backward a node runs."""
    formula: type[torch.autograd.Function] = type(node)._forward_cls  # type: ignore[attr-defined]
    return formula


def next_node_number() -> int:
    """Returns the number of the next node of autograd's graph that this thread makes."""
    return int(torch.autograd._get_sequence_nr())  # type: ignore[attr-defined]


def node_number() -> int:
    """Returns the number of the node whose backward runs in this thread. -1 if there is none, as in callbacks."""
    node = torch._C._current_autograd_node()
    return -1 if node is None else int(node._sequence_nr())


def accumulated_leaf() -> torch.Tensor | None:
    """Returns the leaf whose gradient this thread accumulates, also in hooks after that. None if it does not."""
    return getattr(torch._C._current_autograd_node(), "variable", None)
