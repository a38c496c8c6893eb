"""Sharding decisions of DTensor, which simulated ranks share, and which are made once for equal tensors of a list.

DTensor decides for each operator how its result is sharded, and keeps the decision for its thread. Simulated ranks are
threads, so each would decide everything again: half of the time of a small model with tensor parallelism. A decision
depends on the operator, on the shapes and placements of its tensors, and on the shape of their mesh. Only the mesh
that it names differs between ranks. So each rank gets a copy with its own mesh.

An optimizer updates all parameters by operators on lists. DTensor decides for each element, and looks at all elements
each time: half of the time of a recorded step of Llama 3 70B. The decision for an element depends on no other one, and
a model of 80 equal blocks has ten kinds of parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from contextlib import suppress
from typing import Any

from echelon._torch_private.distributed import Shardings, shardings
from echelon._torch_private.tensors import facts_of, has_symbols, is_faking, real_tensors


class _OfOneRank(Exception):
    """A decision or its arguments may belong to one rank alone."""


class SharedShardings:
    """Decisions of one simulation."""

    def __init__(self) -> None:
        self._known: dict[Hashable, tuple[Any, Any]] = {}
        """Mesh and decision of the rank that came first, by the arguments."""
        self._shardings: Shardings | None = None

    def install(self) -> None:
        """Lets ranks share their decisions from now on, if DTensor has been imported."""
        if self._shardings is None and (found := shardings()) is not None:
            self._shardings = found
            found.decide_by(self._decider)

    def remove(self) -> None:
        """Lets DTensor decide by itself, and forgets all decisions."""
        if self._shardings is not None:
            self._shardings.restore()
            self._shardings = None
        self._known.clear()

    def _decider(self, decide: Callable[[Any], Any]) -> Callable[[Any], Any]:
        decide = _by_element(self._private, decide)

        def decide_once(schema: Any) -> Any:
            if not is_faking():
                return decided(schema)
            if has_symbols():  # while torch.compile traces
                return decide(schema)
            # Without modes, so that operations on fake tensors that DTensor makes to decide are not the program's.
            with real_tensors():
                return decided(schema)

        def decided(schema: Any) -> Any:
            meshes: list[Any] = []
            try:
                key = self._key(self._private.comparison_key(schema), meshes)
                known = self._known.get(key)
                (mesh,) = meshes
            except (_OfOneRank, TypeError, ValueError):  # an argument that cannot be a key, or no mesh
                return decide(schema)
            if known is not None:
                return self._moved(known[1], mesh, known[0])
            decision = decide(schema)
            with suppress(_OfOneRank):
                # A copy, since the rank may change its own.
                self._known[key] = mesh, self._moved(decision, mesh, mesh)
            return decision

        return decide_once

    @property
    def _private(self) -> Shardings:
        assert self._shardings is not None, "decisions are asked for between install and remove"
        return self._shardings

    def _key(self, value: Any, meshes: list[Any]) -> Hashable:
        """Returns arguments of an operator with the shape of the mesh in place of the mesh, which joins `meshes`."""
        if isinstance(value, self._private.spec):
            if not meshes:
                meshes.append(value.mesh)
            elif value.mesh is not meshes[0]:
                raise _OfOneRank
            mesh = value.mesh
            return mesh.device_type, mesh.shape, mesh.mesh_dim_names, self._private.without_mesh(value)
        if isinstance(value, tuple | list):
            return type(value), tuple(self._key(each, meshes) for each in value)
        # 1 and True are equal, and not the same argument.
        return type(value), value

    def _moved(self, value: Any, mesh: Any, source: Any) -> Any:
        """Returns a copy of a decision with `mesh` in place of `source`."""
        private = self._private
        if isinstance(value, private.spec):
            if value.mesh is not source or not all(type(each) in private.placements for each in value.placements):
                raise _OfOneRank
            return private.with_mesh(value, mesh)
        if isinstance(value, private.output):
            # Sizes of a shard, which can differ between ranks.
            if value.use_val_from_redistribute_schema:
                raise _OfOneRank
            parts = (self._moved(each, mesh, source) for each in (value.output_spec, value.redistribute_schema))
            return private.output(*parts, needs_redistribute=value.needs_redistribute)
        if isinstance(value, private.schema):
            args, kwargs = self._moved(value.args_schema, mesh, source), self._moved(value.kwargs_schema, mesh, source)
            return private.schema(value.op, args, kwargs, value.schema_info)
        if isinstance(value, dict):
            return {name: self._moved(each, mesh, source) for name, each in value.items()}
        if type(value) in (tuple, list):
            return type(value)(self._moved(each, mesh, source) for each in value)
        return value


_PREFIXES = ("_foreach_", "_fused_", "_amp_foreach_")
"""Names of operators that do the same to each element of their lists."""


def _by_element(private: Shardings, decide: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Returns DTensor's function `decide`, which is asked only about elements that differ."""

    def decide_by_element(schema: Any) -> Any:
        lists = _lists(private, schema)
        if not lists:
            return decide(schema)
        numbers: dict[Hashable, int] = {}
        try:
            keys = [tuple(_key(private, each) for each in element) for element in zip(*lists.values(), strict=True)]
            kinds = [numbers.setdefault(key, len(numbers)) for key in keys]
        except TypeError:  # an argument that cannot be a key
            return decide(schema)
        if len(numbers) == len(kinds):
            return decide(schema)
        decision = decide(_chosen(private, schema, lists, [kinds.index(kind) for kind in range(len(numbers))]))
        output, redistributed = decision.output_spec, decision.redistribute_schema
        if isinstance(output, tuple | list) and len(output) == len(numbers):
            output = type(output)(_copy(private, output[kind]) for kind in kinds)
        elif output is not None:
            return decide(schema)
        if redistributed is not None:
            redistributed = _chosen(private, redistributed, lists, kinds)
        return private.output(
            output,
            redistributed,
            needs_redistribute=decision.needs_redistribute,
            use_val_from_redistribute_schema=decision.use_val_from_redistribute_schema,
        )

    return decide_by_element


def _lists(private: Shardings, schema: Any) -> dict[int, Sequence[Any]]:
    """Returns the lists among the arguments of an operator, by position. Empty if its elements are not alone."""
    if not facts_of(schema.op).name.startswith(_PREFIXES):
        return {}
    lists: dict[int, Sequence[Any]] = {
        position: argument
        for position, argument in enumerate(schema.args_schema)
        if isinstance(argument, tuple | list) and argument
    }
    are_alone = len({len(each) for each in lists.values()}) == 1 and not any(
        isinstance(each, private.spec | tuple | list) for each in schema.kwargs_schema.values()
    )
    return lists if are_alone else {}


def _chosen(private: Shardings, schema: Any, lists: dict[int, Sequence[Any]], indices: Sequence[int]) -> Any:
    """Returns a copy of a schema with some elements of its lists."""
    args = tuple(
        type(argument)(_copy(private, argument[index]) for index in indices) if position in lists else argument
        for position, argument in enumerate(schema.args_schema)
    )
    return private.schema(schema.op, args, schema.kwargs_schema, schema.schema_info)


def _key(private: Shardings, value: Any) -> Hashable:
    if isinstance(value, private.spec):
        return value.mesh, private.without_mesh(value)
    # 1 and True are equal, and not the same argument.
    return type(value), value


def _copy(private: Shardings, value: Any) -> Any:
    # torch may change the attributes of a spec, so equal ones are not shared.
    return private.with_mesh(value, value.mesh) if isinstance(value, private.spec) else value
