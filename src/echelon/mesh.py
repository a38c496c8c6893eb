"""Mesh: a group's ranks as a grid with named axes, such as dp x pp."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Never, NoReturn

from echelon.arguments import choices, named, no_attribute, refuse_others
from echelon.errors import InvalidArgument, InvalidWorldSize
from echelon.group.group import ProcessGroup, check_group
from echelon.wording import counted

_OF_TORCH = {
    "size": "shape",
    "mesh_dim_names": "shape",
    "get_coordinate": "coordinates",
    "get_local_rank": " write mesh['dp'].rank, or mesh.coordinates['dp']",
    "ndim": " write len(mesh.shape)",
    "get_rank": " write mesh.group.rank",
}
"""Names that torch's mesh gives to attributes."""


class Mesh:
    """Grid of a group's ranks; `mesh["pp"]` is the group of the ranks along one axis.

    The last axis varies fastest: with dp=2, pp=2 the "pp" groups are ranks (0, 1) and (2, 3), the "dp" groups (0, 2)
    and (1, 3). Every rank of the group must make the same mesh.
    """

    @refuse_others(
        **dict.fromkeys(
            ("mesh_dim_names", "mesh_shape", "mesh"), " give each axis by its name: Mesh(group, dp=2, pp=2)"
        ),
        device_type=" ranks are on group.device: leave it out",
    )
    def __init__(self, group: ProcessGroup, *of_torch: Never, **axes: int) -> None:
        """Makes the groups of all axes. Collective: every rank of `group` calls it.

        Args:
            group: the ranks to arrange.
            of_torch: sizes and names as torch's mesh takes them. They are refused.
            axes: name and size of each axis, the slowest first.

        Raises:
            InvalidArgument: a size is not a whole number, or is given without its name.
            InvalidWorldSize: the product of the sizes is not the world size of the group.
        """
        check_group(group)
        if of_torch:
            raise InvalidArgument("give each axis by its name: Mesh(group, dp=2, pp=2)")
        for name, size in axes.items():
            if not isinstance(size, int) or isinstance(size, bool):
                raise InvalidArgument(
                    f"{name} is {named(size)}: give the size of an axis, a whole number of at least 1"
                )
        wrong = {name: size for name, size in axes.items() if size < 1}
        if not axes or wrong or math.prod(axes.values()) != group.world_size:
            product = " x ".join(f"{name}={size}" for name, size in axes.items()) or "no axes"
            count = "N" if not axes or wrong else math.prod(axes.values())
            ranks = counted(group.world_size, "rank")
            raise InvalidWorldSize(
                f"{product} does not make {ranks}: choose sizes of at least 1 whose product is "
                f"{group.world_size}, or start as many ranks: echelon run -n {count} script.py"
            )
        self.group = group
        self.shape = dict(axes)
        self.coordinates = dict(zip(axes, _coordinates(group.rank, list(axes.values())), strict=True))
        """This rank's index along each axis."""
        self._groups = {name: self._along(name) for name in axes}

    def __getitem__(self, axis: str) -> ProcessGroup:
        """Returns the group of the ranks that differ from this one along `axis` only."""
        if not isinstance(axis, str) or axis not in self._groups:
            raise KeyError(f"no axis {axis!r} in this mesh: {choices(axis, self._groups)}")
        return self._groups[axis]

    if not TYPE_CHECKING:  # type checkers report the name themselves

        def __getattr__(self, name: str) -> NoReturn:
            axes = self.__dict__.get("shape", ())
            meant = dict.fromkeys(
                (*axes, "get_group"), f" write mesh[{name if name in axes else next(iter(axes), 'dp')!r}]"
            )
            raise no_attribute("a Mesh", name, ("group", "shape", "coordinates"), meant | _OF_TORCH)

    def __repr__(self) -> str:
        axes = ", ".join(f"{name}={self.coordinates[name]} of {size}" for name, size in self.shape.items())
        return f"<Mesh {axes}>"

    def _along(self, axis: str) -> ProcessGroup:
        """Makes all groups along an axis and returns this rank's."""
        mine = None
        # Every rank makes every group, in the same order, since `subgroup` is collective.
        for ranks in _lines(list(self.shape.values()), list(self.shape).index(axis)):
            mine = self.group.subgroup(ranks, axis) or mine
        assert mine is not None
        return mine


def _coordinates(rank: int, sizes: list[int]) -> list[int]:
    coordinates = []
    for size in reversed(sizes):
        rank, place = divmod(rank, size)
        coordinates.append(place)
    return coordinates[::-1]


def _lines(sizes: list[int], axis: int) -> Iterator[list[int]]:
    """Yields the ranks of every line along `axis` of a grid whose last axis is fastest."""
    stride = math.prod(sizes[axis + 1 :])
    for rank in range(math.prod(sizes)):
        if _coordinates(rank, sizes)[axis] == 0:
            yield [rank + step * stride for step in range(sizes[axis])]
