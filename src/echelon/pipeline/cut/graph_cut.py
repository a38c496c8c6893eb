"""Cut of a traced model before certain layers: the operations of each stage, and the values that cross.

A value that a later stage needs travels through all stages in between. A value that depends on sizes alone, such as a
mask or the positions, does not travel: it is computed again where it is needed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from difflib import get_close_matches

import torch
from torch import fx

from echelon._torch_private.tensors import draws_random_numbers, writes_in_place
from echelon.errors import PartitionError
from echelon.pipeline.cut.tracing import Constant, Keyword, Positional, Trace, Weight
from echelon.pipeline.cut.written_memory import written_by


class GraphCut:
    """Trace with the operations and the values of every stage."""

    def __init__(self, trace: Trace, at: Sequence[str]) -> None:
        """Assigns each operation of a trace to a stage.

        Args:
            trace: the operations of the model.
            at: names of the layers before which stages 1, 2, ... begin.

        Raises:
            PartitionError: a name that is no layer, names that are not in the order in which the layers run, or a
                tensor that one stage would write to and another one use.
        """
        self.trace = trace
        starts = _starts(trace, at)
        written = written_by(trace)
        for use in written.uses:
            for start, name in zip(starts[1:], at, strict=True):
                if use.is_cut(start):
                    raise PartitionError(
                        f"{_name_of(use.written, trace)} is used before and after the beginning of {name}, and the "
                        "forward writes to it: each stage would have a copy of its own, so name other layers in at="
                    )
        self._last = len(starts) - 1
        self._stage_of = {node: sum(start <= number for start in starts) - 1 for number, node in enumerate(trace.body)}
        self._repeatable = set(_repeatable(trace, written.values))
        self.outputs = [value for value in trace.outputs if isinstance(value, fx.Node)]
        """Outputs of the model that are computed; a value may be there twice."""
        self.bodies = [self._body(stage) for stage in range(len(starts))]
        """Operations of every stage, in order."""
        self.entering = self._find_entering()
        """Inputs of every stage: of the first the positional inputs, of others the values from the stage before."""

    def results(self, stage: int) -> list[fx.Node]:
        """Returns the values that a stage returns."""
        return self.outputs if stage == self._last else self.entering[stage + 1]

    def used(self, stage: int) -> set[fx.Node]:
        """Returns all values that a stage needs for its operations and results."""
        return {needed for node in self.bodies[stage] for needed in node.all_input_nodes} | set(self.results(stage))

    def _body(self, stage: int) -> list[fx.Node]:
        """Returns the operations of a stage: first the ones of earlier stages that it repeats, then its own."""
        own = [node for node, home in self._stage_of.items() if home == stage]
        again: set[fx.Node] = set()
        # From the needed values back: a repeated operation needs its own inputs repeated.
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
        # The positional inputs count as made in stage 0: later stages get them through it.
        made = dict.fromkeys(inputs, 0) | {
            node: stage for node, stage in self._stage_of.items() if node not in self._repeatable
        }
        last_use: dict[fx.Node, int] = {}
        for stage, body in enumerate(self.bodies):
            for node in body:
                last_use |= dict.fromkeys(node.all_input_nodes, stage)
        last_use |= dict.fromkeys(self.outputs, self._last)
        # A value enters every stage after its own, up to the last one that uses it.
        return [
            inputs if stage == 0 else [node for node, home in made.items() if home < stage <= last_use.get(node, 0)]
            for stage in range(self._last + 1)
        ]


def boundaries(trace: Trace) -> list[str]:
    """Returns the layers before which the fewest values that need a gradient cross, in the order in which they run.

    In most models one value crosses between blocks. Inside of a block more do, since its residual is needed as well.
    """
    places = _first_operations(trace)
    crossing = _crossing(trace)
    written = written_by(trace).uses
    begins: dict[int, str] = {}
    for layer, place in places.items():
        if any(use.is_cut(place) for use in written):
            continue
        # Several layers may begin with one operation: the outermost names the place.
        if place > 0 and (place not in begins or layer.count(".") < begins[place].count(".")):
            begins[place] = layer
    # Nothing with a gradient crosses before the first weight: a stage that ends there would have nothing to train.
    fewest = min((crossing[place] for place in begins if crossing[place]), default=0)
    return [layer for place, layer in sorted(begins.items()) if crossing[place] == fewest]


def _crossing(trace: Trace) -> list[int]:
    """Returns, for each operation, the number of values with a gradient that are made before it and used from it on."""
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


def _name_of(node: fx.Node, trace: Trace) -> str:
    source = trace.sources.get(node)
    return source.name if isinstance(source, Weight | Keyword) else f"the tensor {node.name} of the model"


def _starts(trace: Trace, at: Sequence[str]) -> list[int]:
    """Returns the number of the first operation of every stage."""
    places = _first_operations(trace)
    starts = [0]
    for name in at:
        place = places[_full_name(name, places)]
        if place <= starts[-1]:
            raise PartitionError(
                f"at={list(at)}: the stage before {name} would be empty: name layers in the order "
                "in which they run, and not the first"
            )
        starts.append(place)
    return starts


def _first_operations(trace: Trace) -> dict[str, int]:
    """Returns the layers that run operations, in order, with the number of their first operation."""
    places: dict[str, int] = {}
    for number, node in enumerate(trace.body):
        for layer in trace.layers_of(node):
            places.setdefault(layer, number)
    return places


def _full_name(name: str, known: Mapping[str, int]) -> str:
    """Returns the full name of a layer from its name or the end of it."""
    if name in known:
        return name
    found = [layer for layer in known if layer.endswith(f".{name}")]
    if len(found) == 1:
        return found[0]
    if found:
        raise PartitionError(f"at= names {name!r}, but {', '.join(found[:4])} all end so: write the whole name")
    near = get_close_matches(name, [*known, *(layer.partition(".")[2] for layer in known)], 1, 0.8)
    meant = f"did you mean {near[0]}? There are" if near else "use names such as"
    raise PartitionError(f"at= names {name!r}, but no layer of that name runs: {meant} {_some(known)}")


def _some(known: Mapping[str, int]) -> str:
    """Returns a few names of layers for an error: the blocks of the model if there are any, else the most siblings."""
    blocks = [layer for layer in known if layer.rpartition(".")[2].isdecimal()]
    parents = [layer.rpartition(".")[0] for layer in blocks or known]
    # Blocks have blocks of their own, such as the experts of a layer: the outermost ones.
    most = min(parents, key=lambda each: (each.count(".") if blocks else 0, -parents.count(each)), default="")
    return ", ".join([layer for layer in blocks or known if layer.rpartition(".")[0] == most][:4])


def _repeatable(trace: Trace, written: set[fx.Node]) -> Iterator[fx.Node]:
    """Yields the operations whose results depend only on sizes, constants and buffers that are not written to."""
    fixed = {
        node
        for node, source in trace.sources.items()
        if isinstance(source, Constant) or (isinstance(source, Weight) and not source.is_parameter)
    } - written
    for node in trace.body:
        if _is_number(node) or node in written or not _is_pure(node, trace):
            continue  # numbers are not repeated: they cost nothing to send
        if all(needed in fixed or _is_number(needed) for needed in node.all_input_nodes):
            fixed.add(node)
            yield node


def _is_number(node: fx.Node) -> bool:
    return isinstance(node.meta.get("val"), bool | int | float | torch.SymInt | torch.SymFloat | torch.SymBool)


def _is_pure(node: fx.Node, trace: Trace) -> bool:
    """Whether an operation, with the operations inside of it, neither writes in place nor draws random numbers."""
    if node.op == "get_attr":
        # A graph inside of the graph, such as the body of `with torch.no_grad()`: as pure as its operations.
        inside = trace.modules.get(str(node.target))
        steps = inside.graph.nodes if isinstance(inside, fx.GraphModule) else ()
        return all(_is_pure(step, trace) for step in steps if step.op == "call_function")
    return not writes_in_place(node.target) and not draws_random_numbers(node.target)
