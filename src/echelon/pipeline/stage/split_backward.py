"""Split backward of a stage: I, for the gradients of its input now, and W, for the gradients of its weights later.

The *path* is the set of nodes from which an input of the stage can be reached. A *junction* is a node of the path with
edges that leave it, towards weights alone.

I runs the path and nothing else: torch computes only nodes that lead to the requested tensors, so no weight's gradient.
At each junction, I keeps the incoming gradient. W starts from these gradients and computes the nodes off the path. It
repeats no product of I, and does not run the path beyond a junction.

Junctions without a weight in common are run one by one, straight into the weights' .grad. Junctions that share a weight
through views of it (experts that are slices of one weight) first compute the gradients on their edges that leave the
path. All of these then go on together: shared nodes are run once, and contributions are added in the order of a whole
backward. A weight that several operations take directly has no edge of its own for each, and is refused.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple, TypeAlias

import torch
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge, saved_tensors_hooks
from torch.overrides import TorchFunctionMode

from echelon._torch_private.autograd import run_backward
from echelon._torch_private.tensors import version_of
from echelon.errors import UnsupportedOp

Gradient: TypeAlias = torch.Tensor | None


class CannotSplit(UnsupportedOp):
    """Graph whose backward cannot be split. `weights` are the nodes of the weights concerned."""

    def __init__(self, reason: str, weights: Iterable[Node] = ()) -> None:
        self.reason = reason
        self.weights = tuple(weights)
        super().__init__(f"a module of this stage {reason}: use a schedule with whole backwards (B) for it")


class Root(NamedTuple):
    """Start of a backward: an edge of the graph and its gradient."""

    edge: GradientEdge
    gradient: torch.Tensor


class Branch(NamedTuple):
    """Junction: a node of the path, with its edges that leave the path."""

    node: Node
    side: tuple[GradientEdge, ...]


class Group(NamedTuple):
    """Junctions, and roots off the path, with weights in common; `leaves` are the nodes of these weights."""

    junctions: tuple[Branch, ...]
    roots: tuple[Root, ...]
    leaves: tuple[Node, ...]


class SplitGraph(NamedTuple):
    """Graph taken apart into the roots on the path and groups of junctions. Each weight is in one group."""

    roots: tuple[Root, ...]
    groups: tuple[Group, ...]


def edge_of(tensor: torch.Tensor) -> GradientEdge:
    """Returns the edge of the graph that the gradient of a tensor goes to."""
    node = tensor.grad_fn
    return get_gradient_edge(tensor) if node is None else GradientEdge(node, tensor.output_nr)


def split_graph(roots: Sequence[Root], inputs: Sequence[GradientEdge]) -> SplitGraph:
    """Takes a graph apart into its path and groups of junctions.

    Raises:
        CannotSplit: an edge that leaves the path ends at a node where other edges end too. To compute the gradient on
            this edge, torch would run the path from the junction to that node again.
    """
    ends = [edge.node for edge in inputs]
    children, parents = _graph(roots, ends)
    path = _reach(parents, ends)
    junctions = []
    for node in path:
        side = [GradientEdge(*edge) for edge in children.get(node, ()) if edge[0] not in path]
        if side:
            junctions.append(Branch(node, tuple(side)))
    # Outputs that depend on weights alone have no path to the input: W starts at them.
    aside = [root for root in roots if root.edge.node not in path]
    groups = _grouped(junctions, aside, children)
    for group in groups:
        _refuse_shared_ends(group, parents)
    return SplitGraph(tuple(root for root in roots if root.edge.node in path), groups)


_Children: TypeAlias = dict[Node, list[tuple[Node, int]]]
_Parents: TypeAlias = dict[Node, list[Node]]


def _graph(roots: Sequence[Root], ends: Iterable[Node]) -> tuple[_Children, _Parents]:
    """Returns the edges from each node, and the nodes with edges to each node, from the roots to the ends."""
    # The stage's inputs count as visited, so the walk does not go on into the graph before them.
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
    """Returns all nodes that can be reached, in a fixed order."""
    reached: dict[Node, None] = {}
    stack = list(starts)
    while stack:
        node = stack.pop()
        if node not in reached:
            reached[node] = None
            stack += edges.get(node, ())
    return reached


def _grouped(junctions: Sequence[Branch], aside: Sequence[Root], children: _Children) -> tuple[Group, ...]:
    """Groups junctions, and roots off the path, that lead to the same nodes."""
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
        return  # a group of one runs straight into its leaves, so shared ends are run once
    for node, side in group.junctions:
        for edge in side:
            if any(parent is not node for parent in parents[edge.node]):
                raise CannotSplit("is used in several places", group.leaves)


class _Box:
    """Saved tensor and its version at that time. The tensor is None after its release."""

    __slots__ = ("__weakref__", "tensor", "version")

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor: torch.Tensor | None = tensor
        # torch compares versions of the tensors that it saves itself, but not of tensors that hooks have packed.
        self.version = version_of(tensor)


class SavedTensors:
    """Saved tensors of a microbatch, from its forward to the end of its backward: counted, and released early.

    A graph releases its saved tensors when its backward has run, or all at once when it is dropped. Neither helps
    between I and W, since W needs some of them. So autograd saves each tensor in a box of this class. The box is
    emptied once I has read it, unless the node that read it will be run again by W.
    """

    def __init__(self) -> None:
        self._boxes: list[weakref.ref[_Box]] = []  # weak: the graph owns them, and frees them as it runs
        self._spent: list[_Box] = []
        self._keeps = True

    def saving(self) -> AbstractContextManager[None]:
        """Inside, collects the tensors that autograd saves."""
        return saved_tensors_hooks(self._pack, self._unpack)

    @contextmanager
    def dropping(self) -> Iterator[None]:
        """Inside, releases tensors that a backward has read, except by nodes between `enter` and `leave`."""
        self._keeps = False
        try:
            yield
        finally:
            self._empty_spent()
            self._keeps = True

    def enter(self) -> None:
        """Marks the start of a node that W will run again. Releases the tensors that earlier nodes have read."""
        self._empty_spent()
        self._keeps = True

    def leave(self) -> None:
        """Marks the end of this node."""
        self._keeps = False

    def tensors(self) -> list[torch.Tensor]:
        """Returns the tensors that were not released."""
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
                "a tensor saved for backward was read again after its release: a formula of this stage reads its saved "
                "tensors outside of its own call; use a schedule with whole backwards (B) for it"
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
    """Returns the bytes that tensors hold. Memory that several of them share counts once.

    Args:
        tensors: of any kind.
        but: addresses of memory that is not counted; see `address`.
    """
    sizes = {address(tensor): tensor.untyped_storage().nbytes() for tensor in tensors}
    return sum(size for start, size in sizes.items() if start not in but)


def address(tensor: torch.Tensor) -> int:
    """Returns the address at which a tensor's storage begins."""
    return tensor.untyped_storage().data_ptr()


_Gradients: TypeAlias = tuple[Gradient, ...]


class SplitBackward:
    """Split backward of one microbatch: `run_input` (I), then `run_weights` (W), each once."""

    def __init__(self, roots: Sequence[Root], inputs: Sequence[GradientEdge]) -> None:
        """Finds the junctions.

        Args:
            roots: the stage's outputs with their gradients.
            inputs: the stage's inputs that require a gradient.

        Raises:
            CannotSplit: an operation would have to run twice.
        """
        self._inputs = tuple(inputs)
        self._roots, self.groups = split_graph(roots, inputs)
        self._arrived: dict[Node, _Gradients] = {}

    @property
    def kept(self) -> Iterator[torch.Tensor]:
        """Gradients that are kept between I and W."""
        for gradients in self._arrived.values():
            yield from (gradient for gradient in gradients if gradient is not None)
        yield from (root.gradient for group in self.groups for root in group.roots)

    def run_input(self, saved: SavedTensors | None = None) -> list[Gradient]:
        """Runs I. Returns the gradients of the inputs; None for an input that nothing depends on.

        Args:
            saved: saved tensors. Those that `run_weights` will not read again are released.
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
            with nullcontext() if saved is None else saved.dropping():
                return run_backward(self._roots, inputs=self._inputs, keep_graph=True)  # W runs a part of it again
        finally:  # the hooks must not see W, which runs the same nodes
            for handle in handles:
                handle.remove()
            self._roots = ()

    def run_weights(self, *, into_leaves: bool = True) -> None:
        """Runs W: adds the gradients of the weights into .grad, and drops the graph.

        Args:
            into_leaves: False: compute the gradients, and discard them.
        """
        groups, self.groups = self.groups, ()
        for group in groups:
            leaves = [GradientEdge(leaf, 0) for leaf in group.leaves]
            if len(group.junctions) == 1 and not group.roots:
                self._run_again(group.junctions[0].node, leaves, into_leaves)
                continue
            gathered = list(group.roots)
            # In the order in which I came to the junctions, contributions to a weight are added as in a whole backward:
            # gradients are equal bit for bit.
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
        """Runs a junction again with the gradients that I kept, as far as `ends`."""
        arrived = self._arrived.pop(node, ())
        roots = [Root(GradientEdge(node, number), value) for number, value in enumerate(arrived) if value is not None]
        if not roots:
            return [None for _ in ends]
        # Hooks of the node's tensor have changed the kept gradients in I, and would change them again: a last prehook
        # puts the kept ones back.
        with_hooks_done = node.register_prehook(lambda _: arrived)
        try:
            return run_backward(roots, inputs=ends, into_leaves=into_leaves)
        finally:
            with_hooks_done.remove()


def _after(saved: SavedTensors) -> Callable[[object, object], None]:
    return lambda _inputs, _outputs: saved.leave()


# Operations that compute all of their gradients in one kernel, whichever are asked for: fused recurrent layers on the
# CPU (MkldnnRnnLayerBackward0) and on GPUs (CudnnRnnBackward0, MiopenRnnBackward0, LstmMpsBackward0).
_ALL_AT_ONCE = ("Rnn", "Lstm", "Gru")


class _ForwardsAgain(TorchFunctionMode):
    """Detector of forwards inside of a backward, as torch.utils.checkpoint runs them."""

    found = False

    def __torch_function__(
        self, func: Callable[..., Any], types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        # Gradients are off in a backward. Only a forward that is run again switches them on.
        self.found = self.found or torch.is_grad_enabled()
        return func(*args, **(kwargs or {}))


def try_halves(split: SplitBackward, saved: SavedTensors) -> bool:
    """Runs I and W once, and discards the weights' gradients. Returns whether I released memory that W does not need.

    Raises:
        CannotSplit: an operation would do its work in both halves, or refuses to run in halves.
    """
    for group in split.groups:
        for node, _ in group.junctions:
            # A formula in Python is called in both halves, and does not know which gradients are wanted.
            if isinstance(node, BackwardCFunction) or any(word in node.name() for word in _ALL_AT_ONCE):
                raise CannotSplit(f"computes all of its gradients at once ({node.name()})", group.leaves)
    forwards = _ForwardsAgain()
    before = num_bytes(saved.tensors())
    try:
        with torch.no_grad(), forwards:
            split.run_input(saved)
            released = num_bytes(saved.tensors()) < before
            split.run_weights(into_leaves=False)
    except RuntimeError as error:
        raise CannotSplit(f"refuses it ({str(error).splitlines()[0]})") from error
    if forwards.found:
        raise CannotSplit("runs its forward again in both halves, as torch.utils.checkpoint does")
    return released
