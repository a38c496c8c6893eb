"""Where the graph of a stage leaves the path between its outputs and its inputs, towards weights.

The *path* is the nodes from which an input of the stage can be reached. A *junction* is a node of the path with edges
that leave it; what those edges lead to, and nothing else, depends on weights alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple, TypeAlias

import torch
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

from echelon.errors import UnsupportedOp

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


class Junction(NamedTuple):
    """A node of the path, and its edges that leave it."""

    node: Node
    side: tuple[GradientEdge, ...]


class Group(NamedTuple):
    """Junctions, and roots outside of the path, that lead to weights in common; and the nodes of those weights."""

    junctions: tuple[Junction, ...]
    roots: tuple[Root, ...]
    leaves: tuple[Node, ...]


class Fork(NamedTuple):
    """A graph taken apart: the roots on the path, and all that leads to weights, each weight in one group."""

    roots: tuple[Root, ...]
    groups: tuple[Group, ...]


def edge_of(tensor: torch.Tensor) -> GradientEdge:
    """Returns the place in the graph that the gradient of a tensor goes to."""
    node = tensor.grad_fn
    return get_gradient_edge(tensor) if node is None else GradientEdge(node, tensor.output_nr)


def fork(roots: Sequence[Root], inputs: Sequence[GradientEdge]) -> Fork:
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
            junctions.append(Junction(node, tuple(side)))
    aside = [root for root in roots if root.edge.node not in path]
    groups = _grouped(junctions, aside, children)
    for group in groups:
        _refuse_shared_ends(group, parents)
    return Fork(tuple(root for root in roots if root.edge.node in path), groups)


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


def _grouped(junctions: Sequence[Junction], aside: Sequence[Root], children: _Children) -> tuple[Group, ...]:
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
    groups: dict[int, tuple[list[Junction], list[Root], list[Node]]] = {}
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
