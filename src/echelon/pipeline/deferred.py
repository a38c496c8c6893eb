"""The backward of a stage in two halves: I, for its input at once, and W, for its weights later.

I runs the path from the stage's outputs to its inputs and nothing else; torch computes only what leads to the tensors
asked for, so no weight's gradient. At each junction (see `junctions`) it keeps the gradient that came there. W starts
from what was kept and computes what leaves the path: no product of I again, and nothing of the path further on.

Junctions that lead to no weight in common are run one by one, straight into the weights' .grad. Those that do (a layer
applied twice) first compute what crosses the edges that leave the path; then all of it goes on at once, so that what
they share is run once, and contributions are added in the order of a whole backward.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TypeAlias

import torch
from torch.autograd.graph import GradientEdge, Node

from echelon._torch_private import run_backward
from echelon.pipeline.junctions import Gradient, Group, Root, fork
from echelon.pipeline.saved import SavedTensors

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
        self._roots, self.groups = fork(roots, inputs)
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
