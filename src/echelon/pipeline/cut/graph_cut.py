"""Which operations of a traced model each stage runs, when it is cut before certain layers.

A value that a later stage needs travels through all stages between. What can be made again from sizes alone, such as a
mask or the positions, is made again where it is needed and does not travel.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import fx

from echelon._torch_private import draws_random_numbers, writes_in_place
from echelon.errors import PartitionError
from echelon.pipeline.cut.tracing import Constant, Positional, Trace, Weight


class GraphCut:
    """A trace, and the operations and values of every stage."""

    def __init__(self, trace: Trace, at: Sequence[str]) -> None:
        """Cuts.

        Args:
            trace: what the model does.
            at: names of the layers before which stages 1, 2, ... begin.

        Raises:
            PartitionError: a name that is no layer, or names that are not in the order in which the layers run.
        """
        self.trace = trace
        starts = _starts(trace, at)
        self._last = len(starts) - 1
        self._stage_of = {node: sum(start <= number for start in starts) - 1 for number, node in enumerate(trace.body)}
        self._repeatable = set(_repeatable(trace))
        self.outputs = [value for value in trace.outputs if isinstance(value, fx.Node)]
        """What of the model's outputs is computed; a value may be there twice."""
        self.bodies = [self._body(stage) for stage in range(len(starts))]
        """The operations of every stage, in order."""
        self.entering = self._find_entering()
        """What every stage takes: the first the positional inputs, others what comes from the stage before."""

    def results(self, stage: int) -> list[fx.Node]:
        """Returns what a stage returns."""
        return self.outputs if stage == self._last else self.entering[stage + 1]

    def used(self, stage: int) -> set[fx.Node]:
        """Returns all values that a stage needs for its operations and results."""
        return {needed for node in self.bodies[stage] for needed in node.all_input_nodes} | set(self.results(stage))

    def _body(self, stage: int) -> list[fx.Node]:
        """The operations of a stage: its own, and before them those of earlier stages that it does again."""
        own = [node for node, home in self._stage_of.items() if home == stage]
        again: set[fx.Node] = set()
        missing = [needed for node in own for needed in node.all_input_nodes]
        missing += self.outputs if stage == self._last else []
        while missing:
            node = missing.pop()
            if node in self._repeatable and self._stage_of[node] < stage and node not in again:
                again.add(node)
                missing += node.all_input_nodes
        return [node for node in self._stage_of if node in again] + own

    def _find_entering(self) -> list[list[fx.Node]]:
        inputs = [node for node, source in self.trace.sources.items() if isinstance(source, Positional)]
        made = dict.fromkeys(inputs, 0) | {
            node: stage for node, stage in self._stage_of.items() if node not in self._repeatable
        }
        last_use: dict[fx.Node, int] = {}
        for stage, body in enumerate(self.bodies):
            for node in body:
                last_use |= dict.fromkeys(node.all_input_nodes, stage)
        last_use |= dict.fromkeys(self.outputs, self._last)
        return [
            inputs if stage == 0 else [node for node, home in made.items() if home < stage <= last_use.get(node, 0)]
            for stage in range(self._last + 1)
        ]


def boundaries(trace: Trace) -> list[str]:
    """Returns the layers before which the fewest values that need a gradient cross, in the order in which they run.

    In most models one crosses: between the blocks, and not inside of them, where what they add to is needed as well.
    """
    places = _first_operations(trace)
    crossing = _crossing(trace)
    begins: dict[int, str] = {}
    for layer, place in places.items():
        if place > 0 and (place not in begins or layer.count(".") < begins[place].count(".")):
            begins[place] = layer
    fewest = min((crossing[place] for place in begins if crossing[place]), default=0)
    return [layer for place, layer in sorted(begins.items()) if crossing[place] == fewest]


def _crossing(trace: Trace) -> list[int]:
    """For each operation, how many values with a gradient are made before it and used by it or after it."""
    active: dict[fx.Node, int] = {}
    last_use: dict[fx.Node, int] = {}
    for number, node in enumerate(trace.body):
        needed = node.all_input_nodes
        last_use |= dict.fromkeys(needed, number)
        from_weight = any(
            isinstance(source := trace.sources.get(one), Weight) and source.is_parameter for one in needed
        )
        if (from_weight or any(one in active for one in needed)) and _is_float(node.meta.get("val")):
            active[node] = number
    last_use |= dict.fromkeys((value for value in trace.outputs if isinstance(value, fx.Node)), len(trace.body))
    crossing = [0] * (len(trace.body) + 1)
    for node, number in active.items():
        for place in range(number + 1, last_use.get(node, number) + 1):
            crossing[place] += 1
    return crossing


def _is_float(value: object) -> bool:
    if isinstance(value, tuple | list):
        return any(map(_is_float, value))
    return isinstance(value, torch.Tensor) and (value.is_floating_point() or value.is_complex())


def _starts(trace: Trace, at: Sequence[str]) -> list[int]:
    """Returns the number of the first operation of every stage."""
    places = _first_operations(trace)
    starts = [0]
    for name in at:
        place = places[_full_name(name, places)]
        if place <= starts[-1]:
            raise PartitionError(
                f"at={list(at)}: nothing runs before {name} that is not in an earlier stage: name layers in the order "
                "in which they run, and not the first"
            )
        starts.append(place)
    return starts


def _first_operations(trace: Trace) -> dict[str, int]:
    """Returns the layers that run something, in the order in which they begin, and where that is."""
    places: dict[str, int] = {}
    for number, node in enumerate(trace.body):
        for layer in trace.layers_of(node):
            places.setdefault(layer, number)
    return places


def _full_name(name: str, known: Mapping[str, int]) -> str:
    """Returns the one layer that is called so, or whose name ends so."""
    if name in known:
        return name
    found = [layer for layer in known if layer.endswith(f".{name}")]
    if len(found) == 1:
        return found[0]
    if found:
        raise PartitionError(f"at= names {name!r}, but {', '.join(found[:4])} all end so: write the whole name")
    raise PartitionError(f"at= names {name!r}, but no layer that runs is called so: use names as {_some(known)}")


def _some(known: Mapping[str, int]) -> str:
    """A few layers, those whose names have the most neighbours first: blocks that follow each other."""
    parents = [layer.rpartition(".")[0] for layer in known]
    most = max(parents, key=parents.count, default="")
    return ", ".join([layer for layer in known if layer.rpartition(".")[0] == most][:4])


def _repeatable(trace: Trace) -> Iterator[fx.Node]:
    """Yields the operations whose results depend on nothing but sizes, constants and buffers that never change."""
    written = {needed for node in trace.body if writes_in_place(node.target) for needed in node.all_input_nodes}
    fixed = {
        node
        for node, source in trace.sources.items()
        if isinstance(source, Constant) or (isinstance(source, Weight) and not source.is_parameter)
    } - written
    for node in trace.body:
        if _is_number(node) or node in written or not _is_pure(node, trace):
            continue  # numbers travel: they cost nothing
        if all(needed in fixed or _is_number(needed) for needed in node.all_input_nodes):
            fixed.add(node)
            yield node


def _is_number(node: fx.Node) -> bool:
    return isinstance(node.meta.get("val"), bool | int | float | torch.SymInt | torch.SymFloat | torch.SymBool)


def _is_pure(node: fx.Node, trace: Trace) -> bool:
    """Whether an operation, and those inside of it, neither write nor draw random numbers."""
    if node.op == "get_attr":
        inside = trace.modules.get(str(node.target))
        steps = inside.graph.nodes if isinstance(inside, fx.GraphModule) else ()
        return all(_is_pure(step, trace) for step in steps if step.op == "call_function")
    return not writes_in_place(node.target) and not draws_random_numbers(node.target)
