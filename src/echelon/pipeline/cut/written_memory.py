"""Memory that a traced model writes to in its forward: of weights, keyword arguments and views."""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple, TypeAlias

from torch import fx, nn

from echelon._torch_private.tensors import tree_leaves, used_memory
from echelon.pipeline.cut.tracing import Positional, Trace


class Use(NamedTuple):
    """Operations that use a tensor which the model writes to."""

    written: fx.Node
    first: int
    """Number of the first one."""
    last: int
    """Number of the last one. The number of all operations if the model returns it."""

    def is_cut(self, place: int) -> bool:
        """Whether a stage that begins with an operation would use a copy, to which the earlier stage does not write."""
        return self.first < place <= self.last


class Written(NamedTuple):
    """Memory that a traced model writes to."""

    uses: list[Use]
    """Uses that no cut may part: of parameters, buffers, constants, keyword arguments and views."""
    values: set[fx.Node]
    """Inputs and results of operations that lie in this memory."""


def written_by(trace: Trace) -> Written:
    """Returns the memory that a traced model writes to, also through views."""
    memory: _Memory = {node: {node} for node in trace.sources}
    last_write: dict[fx.Node, int] = {}
    uses: dict[fx.Node, list[int]] = {}
    last_use: dict[fx.Node, int] = {}
    for number, (node, to) in enumerate(zip(trace.body, _writes(trace.body, memory, trace.modules), strict=True)):
        last_use |= dict.fromkeys(node.all_input_nodes, number)
        last_write |= dict.fromkeys(to, number)
        for used in to.union(node.all_input_nodes):
            uses.setdefault(used, []).append(number)
    for value in trace.outputs:
        if isinstance(value, fx.Node):
            last_use[value] = len(trace.body)
            uses.setdefault(value, []).append(len(trace.body))
    views: defaultdict[fx.Node, list[fx.Node]] = defaultdict(list)
    for node, shared in memory.items():
        for root in shared.intersection(last_write):
            views[root].append(node)
    made = {node: number for number, node in enumerate(trace.body)}
    found: list[Use] = []
    for root in last_write:
        # Positional inputs and results pass from stage to stage, with all changes. Others have a copy in each stage.
        if root in made or isinstance(trace.sources[root], Positional):
            found += _apart(views[root], made, last_use, last_write[root])
        else:
            found.append(Use(root, uses[root][0], uses[root][-1]))
    return Written(found, set().union(*views.values()))


def _apart(
    views: Iterable[fx.Node], made: Mapping[fx.Node, int], last_use: Mapping[fx.Node, int], last_write: int
) -> Iterator[Use]:
    """Yields the uses of two views of one memory, which are no views any more if both pass to another stage."""
    longest = -1
    for view in sorted(views, key=lambda node: made.get(node, -1)):
        first, end = made.get(view, -1), last_use.get(view, -1)
        if first < (last := min(longest, end, last_write)):
            yield Use(view, first, last)
        longest = max(longest, end)


_Memory: TypeAlias = dict[fx.Node, set[fx.Node]]
"""Weights and earlier values whose memory a value may share, by the value. Itself if its memory is new."""


def _writes(nodes: Iterable[fx.Node], memory: _Memory, modules: Mapping[str, nn.Module]) -> Iterator[set[fx.Node]]:
    """Yields the keys of `memory` that each operation writes to. Adds the memory of its result to `memory`."""
    for node in nodes:
        shared, written = set[fx.Node](), set[fx.Node]()
        graphs = [modules.get(str(each.target)) for each in node.all_input_nodes if each.op == "get_attr"]
        for graph in graphs:
            if isinstance(graph, fx.GraphModule):  # such as the body of `with torch.no_grad()`
                inside = _memory_inside(node, graph, memory)
                calls = [each for each in graph.graph.nodes if each.op == "call_function"]
                written |= set().union(*_writes(calls, inside, dict(graph.named_children())))
                shared |= _of(graph.graph.output_node().args, inside)
        shared, written = ({each for each in some if each.graph is node.graph} for some in (shared, written))
        for argument in used_memory(node.target):
            value = node.args[argument.position] if argument.position < len(node.args) else None
            weights = _of(node.kwargs.get(argument.name, value), memory)
            shared |= weights
            written |= weights if argument.is_written else set()
        if node.target is operator.getitem:
            shared = _of(node.args[0], memory) - {node.args[0]}
        memory[node] = shared or {node}
        yield written


def _memory_inside(node: fx.Node, graph: fx.GraphModule, memory: _Memory) -> _Memory:
    """Returns the memory of the inputs of a graph, which are the last operands of the operation that runs it."""
    inputs = [each for each in graph.graph.nodes if each.op == "placeholder"]
    operands = tree_leaves(node.args)
    return {name: _of(value, memory) for name, value in zip(reversed(inputs), reversed(operands), strict=False)}


def _of(values: object, memory: _Memory) -> set[fx.Node]:
    return set().union(*(memory.get(each, ()) for each in tree_leaves(values) if isinstance(each, fx.Node)))
