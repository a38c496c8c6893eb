"""Sharding decisions of DTensor, which simulated ranks share.

DTensor decides for each operator how its result is sharded, and keeps the decision for its thread. Simulated ranks are
threads, so each would decide everything again: half of the time of a small model with tensor parallelism. A decision
depends on the operator, on the shapes and placements of its tensors, and on the shape of their mesh. Only the mesh
that it names differs between ranks. So each rank gets a copy with its own mesh.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from contextlib import suppress
from typing import Any

from echelon._torch_private.distributed import Shardings, shardings
from echelon._torch_private.tensors import has_symbols, is_faking, real_tensors
from echelon.simulation.process.sharding_of_lists import decider_by_element


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
        decide = decider_by_element(self._private, decide)

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
