"""Weights and keyword arguments that a traced model writes to in its forward, also through views of them."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple, TypeAlias

from torch import fx, nn

from echelon._torch_private.tensors import tree_leaves, used_memory
from echelon.pipeline.cut.tracing import Positional, Trace


class Use(NamedTuple):
    """Operations that use a weight or a keyword argument which the model writes to."""

    written: fx.Node
    first: int
    """Number of the first one."""
    last: int
    """Number of the last one. The number of all operations if the model returns it."""

    def is_cut(self, place: int) -> bool:
        """Whether a stage that begins with an operation would use a copy, to which the earlier stage does not write."""
        return self.first < place <= self.last


def written_weights(trace: Trace) -> list[Use]:
    """Returns the parameters, buffers, constants and keyword arguments that a trace writes to."""
    # Positional inputs pass from stage to stage, with all changes.
    weights = [node for node, source in trace.sources.items() if not isinstance(source, Positional)]
    writes = list(_writes(trace.body, {weight: {weight} for weight in weights}, trace.modules))
    written = set().union(*writes)
    uses: dict[fx.Node, list[int]] = {weight: [] for weight in weights if weight in written}
    for number, (node, to) in enumerate(zip(trace.body, writes, strict=True)):
        for weight in to.union(written.intersection(node.all_input_nodes)):
            uses[weight].append(number)
    for weight in written.intersection(each for each in trace.outputs if isinstance(each, fx.Node)):
        uses[weight].append(len(trace.body))
    return [Use(weight, numbers[0], numbers[-1]) for weight, numbers in uses.items()]


_Memory: TypeAlias = dict[fx.Node, set[fx.Node]]
"""Weights whose memory a value may share, by the value."""


def _writes(nodes: Iterable[fx.Node], memory: _Memory, modules: Mapping[str, nn.Module]) -> Iterator[set[fx.Node]]:
    """Yields the weights that each operation writes to. Adds the memory of its result to `memory`."""
    for node in nodes:
        shared, written = set[fx.Node](), set[fx.Node]()
        graphs = [modules.get(str(each.target)) for each in node.all_input_nodes if each.op == "get_attr"]
        for graph in graphs:
            if isinstance(graph, fx.GraphModule):  # such as the body of `with torch.no_grad()`
                inside = _memory_inside(node, graph, memory)
                calls = [each for each in graph.graph.nodes if each.op == "call_function"]
                written |= set().union(*_writes(calls, inside, dict(graph.named_children())))
                shared |= _of(graph.graph.output_node().args, inside)
        for argument in used_memory(node.target):
            value = node.args[argument.position] if argument.position < len(node.args) else None
            weights = _of(node.kwargs.get(argument.name, value), memory)
            shared |= weights
            written |= weights if argument.is_written else set()
        memory[node] = _of(node.args[0], memory) if node.target is operator.getitem else shared
        yield written


def _memory_inside(node: fx.Node, graph: fx.GraphModule, memory: _Memory) -> _Memory:
    """Returns the memory of the inputs of a graph, which are the last operands of the operation that runs it."""
    inputs = [each for each in graph.graph.nodes if each.op == "placeholder"]
    operands = tree_leaves(node.args)
    return {name: _of(value, memory) for name, value in zip(reversed(inputs), reversed(operands), strict=False)}


def _of(values: object, memory: _Memory) -> set[fx.Node]:
    return set().union(*(memory.get(each, ()) for each in tree_leaves(values) if isinstance(each, fx.Node)))
