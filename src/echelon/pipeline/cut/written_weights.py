"""Weights, keyword arguments and views that a traced model writes to in its forward."""

from __future__ import annotations

import operator
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


def written_weights(trace: Trace) -> list[Use]:
    """Returns the parameters, buffers, constants, keyword arguments and views that a trace writes to."""
    memory: _Memory = {node: {node} for node in trace.sources}
    writes = list(_writes(trace.body, memory, trace.modules))
    written = set().union(*writes)
    # Other values pass from stage to stage, with all changes.
    weights = [node for node, source in trace.sources.items() if not isinstance(source, Positional)]
    uses: dict[fx.Node, list[int]] = {weight: [] for weight in weights if weight in written}
    last_use: dict[fx.Node, int] = {}
    for number, (node, to) in enumerate(zip(trace.body, writes, strict=True)):
        last_use |= dict.fromkeys(node.all_input_nodes, number)
        for weight in to.union(node.all_input_nodes).intersection(uses):
            uses[weight].append(number)
    for value in trace.outputs:
        if isinstance(value, fx.Node):
            last_use[value] = len(trace.body)
            uses.get(value, []).append(len(trace.body))
    found = [Use(weight, numbers[0], numbers[-1]) for weight, numbers in uses.items()]
    for root in written.difference(uses):
        views = [node for node, shared in memory.items() if root in shared]
        last_write = max(number for number, to in enumerate(writes) if root in to)
        found += _apart(trace, views, last_use, last_write)
    return found


def _apart(trace: Trace, views: Iterable[fx.Node], last_use: Mapping[fx.Node, int], last_write: int) -> Iterator[Use]:
    """Yields the uses of two views of one memory, which are no views any more if both pass to another stage."""
    made = {node: number for number, node in enumerate(trace.body)}
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
