"""The backward of a stage in two halves: I, for its input at once, and W, for its weights later.

I runs the path from the stage's outputs to its inputs and nothing else; torch computes only what leads to the tensors
asked for, so no weight's gradient. At each junction (see `junctions`) it keeps the gradient that came there. W starts
from what was kept and computes what leaves the path: no product of I again, and nothing of the path further on.

Junctions that lead to no weight in common are run one by one, straight into the weights' .grad. Those that do (a layer
applied twice) first compute what crosses the edges that leave the path; then all of it goes on at once, so that what
they share is run once, and contributions are added in the order of a whole backward.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, NamedTuple, TypeAlias

import torch
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge, saved_tensors_hooks
from torch.overrides import TorchFunctionMode

from echelon._torch_private import run_backward, version_of
from echelon.errors import UnsupportedOp

# Gives each use of a weight an edge of its own in the graph, for stages that use one in several places.


class SeparateUses(TorchFunctionMode):
    """Replaces some parameters, as arguments of torch functions, by a new view of them at each call.

    Gradients are the same; only, between a node that uses the weight and the weight, there is a node that belongs to
    this use.
    """

    def __init__(self, parameters: Collection[torch.nn.Parameter]) -> None:
        super().__init__()
        self._ids = {id(parameter) for parameter in parameters}

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if getattr(func, "__name__", "") in ("__get__", "__set__"):  # an attribute such as .grad is the weight's own
            return func(*args, **(kwargs or {}))
        named = {name: self._view(value) for name, value in (kwargs or {}).items()}
        return func(*map(self._view, args), **named)

    def _view(self, value: Any) -> Any:
        if isinstance(value, torch.nn.Parameter) and id(value) in self._ids:
            return value.view_as(value)
        if isinstance(value, tuple | list):
            return type(value)(map(self._view, value)) if any(id(item) in self._ids for item in value) else value
        return value


# Where the graph of a stage leaves the path between its outputs and its inputs, towards weights.
#
# The *path* is the nodes from which an input of the stage can be reached. A *junction* is a node of the path with
# edges that leave it; what those edges lead to, and nothing else, depends on weights alone.

Gradient: TypeAlias = torch.Tensor | None


class CannotSplit(UnsupportedOp):
    """A graph whose backward cannot be done in two halves. `weights` are the nodes of the weights concerned."""

    def __init__(self, reason: str, weights: Iterable[Node] = ()) -> None:
        self.reason = reason
        self.weights = tuple(weights)
        super().__init__(f"{reason}: use a schedule with whole backwards (B) for this stage")


class Root(NamedTuple):
    """Where a backward starts, and with which gradient."""

    edge: GradientEdge
    gradient: torch.Tensor


class Branch(NamedTuple):
    """A node of the path, and its edges that leave it."""

    node: Node
    side: tuple[GradientEdge, ...]


class Group(NamedTuple):
    """Junctions, and roots outside of the path, that lead to weights in common; and the nodes of those weights."""

    junctions: tuple[Branch, ...]
    roots: tuple[Root, ...]
    leaves: tuple[Node, ...]


class SplitGraph(NamedTuple):
    """A graph taken apart: the roots on the path, and all that leads to weights, each weight in one group."""

    roots: tuple[Root, ...]
    groups: tuple[Group, ...]


def edge_of(tensor: torch.Tensor) -> GradientEdge:
    """Returns the place in the graph that the gradient of a tensor goes to."""
    node = tensor.grad_fn
    return get_gradient_edge(tensor) if node is None else GradientEdge(node, tensor.output_nr)


def split_graph(roots: Sequence[Root], inputs: Sequence[GradientEdge]) -> SplitGraph:
    """Takes a graph apart.

    Raises:
        CannotSplit: an edge that leaves the path ends where other edges end, too. To compute what crosses it, torch
            would run the path from here to there once more.
    """
    ends = [edge.node for edge in inputs]
    children, parents = _graph(roots, ends)
    path = _reach(parents, ends)
    junctions = []
    for node in path:
        side = [GradientEdge(*edge) for edge in children.get(node, ()) if edge[0] not in path]
        if side:
            junctions.append(Branch(node, tuple(side)))
    aside = [root for root in roots if root.edge.node not in path]
    groups = _grouped(junctions, aside, children)
    for group in groups:
        _refuse_shared_ends(group, parents)
    return SplitGraph(tuple(root for root in roots if root.edge.node in path), groups)


_Children: TypeAlias = dict[Node, list[tuple[Node, int]]]
_Parents: TypeAlias = dict[Node, list[Node]]


def _graph(roots: Sequence[Root], ends: Iterable[Node]) -> tuple[_Children, _Parents]:
    """Walks a graph as far as its ends: for each node the edges to the next ones, and the nodes with edges to it."""
    children: _Children = {end: [] for end in ends}
    parents: _Parents = {}
    stack = [root.edge.node for root in roots]
    while stack:
        node = stack.pop()
        if node in children:
            continue
        children[node] = following = [(child, number) for child, number in node.next_functions if child is not None]
        for child, _ in following:
            if child in parents:
                parents[child].append(node)
            else:
                parents[child] = [node]
                stack.append(child)
    return children, parents


def _reach(edges: _Parents, starts: Iterable[Node]) -> dict[Node, None]:
    """Returns all that can be reached, in a fixed order."""
    reached: dict[Node, None] = {}
    stack = list(starts)
    while stack:
        node = stack.pop()
        if node not in reached:
            reached[node] = None
            stack += edges.get(node, ())
    return reached


def _grouped(junctions: Sequence[Branch], aside: Sequence[Root], children: _Children) -> tuple[Group, ...]:
    """Puts together what leads to the same nodes."""
    starts = [[edge.node for edge in junction.side] for junction in junctions] + [[root.edge.node] for root in aside]
    owner: dict[Node, int] = {}
    group_of = list(range(len(starts)))
    leaves: list[list[Node]] = [[] for _ in starts]
    for number, stack in enumerate(starts):
        while stack:
            node = stack.pop()
            if node in owner:
                _join(group_of, owner[node], number)
                continue
            owner[node] = number
            following = [child for child, _ in children[node]]
            if not following:
                leaves[number].append(node)
            stack += following
    groups: dict[int, tuple[list[Branch], list[Root], list[Node]]] = {}
    for number in range(len(starts)):
        found = groups.setdefault(group_of[number], ([], [], []))
        found[2].extend(leaves[number])
        if number < len(junctions):
            found[0].append(junctions[number])
        else:
            found[1].append(aside[number - len(junctions)])
    return tuple(Group(tuple(some), tuple(roots), tuple(ends)) for some, roots, ends in groups.values())


def _join(group_of: list[int], left: int, right: int) -> None:
    old, new = group_of[right], group_of[left]
    if old != new:
        group_of[:] = [new if group == old else group for group in group_of]


def _refuse_shared_ends(group: Group, parents: _Parents) -> None:
    if len(group.junctions) + len(group.roots) == 1:
        return  # it runs straight into its leaves, whatever its edges have in common
    for node, side in group.junctions:
        for edge in side:
            if any(parent is not node for parent in parents[edge.node]):
                raise CannotSplit("a weight is used in several places", group.leaves)


# What autograd saves for the backward of one microbatch: counted, and let go of where only I needed it.
#
# A graph frees what it saved when its backward has run, or all at once when it is dropped. Between the two halves of a
# backward neither helps: W needs a part of it. So every saved tensor is kept in a box of ours, which is emptied after
# I has looked into it, unless the node that looked will be run again by W.


class _Box:
    """A tensor and its version; None once it has been let go of."""

    __slots__ = ("__weakref__", "tensor", "version")

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor: torch.Tensor | None = tensor
        self.version = version_of(tensor)


class SavedTensors:
    """The saved tensors of a microbatch between its forward and the end of its backward."""

    def __init__(self) -> None:
        self._boxes: list[weakref.ref[_Box]] = []  # the graph owns them, and frees them as it runs
        self._spent: list[_Box] = []
        self._keeps = True

    def saving(self) -> AbstractContextManager[None]:
        """Collects what is saved inside."""
        return saved_tensors_hooks(self._pack, self._unpack)

    @contextmanager
    def dropping(self) -> Iterator[None]:
        """Inside, lets go of what a backward has used, but for the nodes between `enter` and `leave`."""
        self._keeps = False
        try:
            yield
        finally:
            self._empty_spent()
            self._keeps = True

    def enter(self) -> None:
        """Says that a node is run that will be run again. What earlier ones used has served."""
        self._empty_spent()
        self._keeps = True

    def leave(self) -> None:
        """Says that it has been run."""
        self._keeps = False

    def tensors(self) -> list[torch.Tensor]:
        """Returns what is held."""
        boxes = (reference() for reference in self._boxes)
        return [box.tensor for box in boxes if box is not None and box.tensor is not None]

    def _pack(self, tensor: torch.Tensor) -> _Box:
        box = _Box(tensor)
        self._boxes.append(weakref.ref(box))
        return box

    def _unpack(self, box: _Box) -> torch.Tensor:
        tensor = box.tensor
        if tensor is None:
            raise RuntimeError(
                "a tensor saved for backward was asked for again after it was let go of: a formula of this stage looks "
                "at what it saved outside of its own call; use a schedule with whole backwards (B) for it"
            )
        if version_of(tensor) != box.version:
            raise RuntimeError(
                f"a tensor of shape {list(tensor.shape)} that backward needs was changed in place after the forward "
                f"saved it (version {version_of(tensor)}, saved {box.version}): change a copy of it"
            )
        if not self._keeps:
            self._spent.append(box)
        return tensor

    def _empty_spent(self) -> None:
        for box in self._spent:
            box.tensor = None
        self._spent.clear()


def num_bytes(tensors: Iterable[torch.Tensor], but: Collection[int] = ()) -> int:
    """Returns the bytes that tensors hold, memory that several share once.

    Args:
        tensors: of any kind.
        but: addresses of memory that does not count, see `address`.
    """
    sizes = {address(tensor): tensor.untyped_storage().nbytes() for tensor in tensors}
    return sum(size for start, size in sizes.items() if start not in but)


def address(tensor: torch.Tensor) -> int:
    """Returns where the memory that a tensor is in begins."""
    return tensor.untyped_storage().data_ptr()


_Gradients: TypeAlias = tuple[Gradient, ...]


class SplitBackward:
    """The two halves of the backward of one microbatch: `run_input`, then `run_weights`, each once."""

    def __init__(self, roots: Sequence[Root], inputs: Sequence[GradientEdge]) -> None:
        """Finds the junctions.

        Args:
            roots: what the stage made, with its gradients.
            inputs: the stage's inputs that require a gradient.

        Raises:
            CannotSplit: something would have to be computed twice.
        """
        self._inputs = tuple(inputs)
        self._roots, self.groups = split_graph(roots, inputs)
        self._arrived: dict[Node, _Gradients] = {}

    @property
    def kept(self) -> Iterator[torch.Tensor]:
        """The gradients that stay between the two halves."""
        for gradients in self._arrived.values():
            yield from (gradient for gradient in gradients if gradient is not None)
        yield from (root.gradient for group in self.groups for root in group.roots)

    def run_input(self, saved: SavedTensors | None = None) -> list[Gradient]:
        """Returns the gradients of the inputs; None for one that nothing depends on.

        Args:
            saved: is told which nodes `run_weights` will run again.
        """
        handles = []
        for group in self.groups:
            for node, _ in group.junctions:
                handles.append(node.register_prehook(self._keeper(node, saved)))
                if saved is not None:
                    handles.append(node.register_hook(_after(saved)))
        try:
            if not self._roots:
                return [None for _ in self._inputs]
            return run_backward(self._roots, inputs=self._inputs, keep_graph=True)
        finally:
            for handle in handles:
                handle.remove()
            self._roots = ()

    def run_weights(self, before: Callable[[Group], None] | None = None, *, into_leaves: bool = True) -> None:
        """Adds the gradients of the weights into their .grad, and lets go of the graph.

        Args:
            before: called with each group before it is run.
            into_leaves: False: compute all the same, and throw it away.
        """
        groups, self.groups = self.groups, ()
        for group in groups:
            if before is not None:
                before(group)
            leaves = [GradientEdge(leaf, 0) for leaf in group.leaves]
            if len(group.junctions) == 1 and not group.roots:
                self._run_again(group.junctions[0].node, leaves, into_leaves)
                continue
            gathered = list(group.roots)
            order = list(self._arrived)
            for node, side in sorted(group.junctions, key=lambda junction: order.index(junction.node)):
                found = self._run_again(node, side, False)
                gathered += [Root(edge, value) for edge, value in zip(side, found, strict=True) if value is not None]
            if gathered:
                run_backward(gathered, inputs=leaves, into_leaves=into_leaves)

    def _keeper(self, node: Node, saved: SavedTensors | None) -> Callable[[_Gradients], None]:
        def keep(gradients: _Gradients) -> None:
            self._arrived[node] = gradients
            if saved is not None:
                saved.enter()

        return keep

    def _run_again(self, node: Node, ends: Sequence[GradientEdge], into_leaves: bool) -> list[Gradient]:
        """Runs a junction with what came to it, as far as `ends`."""
        arrived = self._arrived.pop(node, ())
        roots = [Root(GradientEdge(node, number), value) for number, value in enumerate(arrived) if value is not None]
        if not roots:
            return [None for _ in ends]
        # Hooks of the tensor that the node made have changed what arrived already, and would once more.
        with_hooks_done = node.register_prehook(lambda _: arrived)
        try:
            return run_backward(roots, inputs=ends, into_leaves=into_leaves)
        finally:
            with_hooks_done.remove()


def _after(saved: SavedTensors) -> Callable[[object, object], None]:
    return lambda _inputs, _outputs: saved.leave()
