"""Finds work that is done twice: operations on the same values in two parts of a program.

Every tensor gets a number that says how it came about: the operation, and the numbers of what it was made from. Two
operations are the same work if they have the same name and the same numbers. Views cost nothing, and pointwise
operations little beside a product: they may be repeated.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from typing import Any, NamedTuple

import torch

from echelon._torch_private import DispatchMode, version_of

_CHEAP = ("_prelu_kernel_backward",)
"""Pointwise, but torch does not say so."""


class Repeated(NamedTuple):
    """An operation that was done before, and the label there was when it was done again."""

    name: str
    label: object


class RepeatedWork(DispatchMode):  # type: ignore[no-untyped-call]
    """Watches all operations of this thread, in backward, too. Keeps every tensor it sees until it is dropped."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found: list[Repeated] = []
        """What repeats something of an earlier part."""
        self.label: object = None
        """Goes into `found`."""
        self._earlier: set[Hashable] = set()
        self._now: set[Hashable] = set()
        self._numbers: dict[Hashable, int] = {}
        self._alive: list[torch.Tensor] = []

    def next_part(self) -> None:
        """Begins another part."""
        self._earlier |= self._now
        self._now = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        work = (str(func), self._describe(args), self._describe(kwargs or {}))
        result = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        is_cheap = func.is_view or torch.Tag.pointwise in func.tags or name in _CHEAP
        if not is_cheap and any(True for _ in _tensors(args)):
            if work in self._earlier:
                self.found.append(Repeated(name, self.label))
            self._now.add(work)
        for index, tensor in enumerate(_tensors(result)):
            self._alive.append(tensor)
            self._numbers.setdefault(_place(tensor), self._number((work, index)))
        return result

    def _describe(self, value: Any) -> Hashable:
        if isinstance(value, torch.Tensor):
            self._alive.append(value)
            place = _place(value)
            return ("tensor", self._numbers.setdefault(place, self._number(place)))
        if isinstance(value, list | tuple):
            return tuple(self._describe(item) for item in value)
        if isinstance(value, dict):
            return tuple((name, self._describe(item)) for name, item in value.items())
        return str(value)

    def _number(self, what: Hashable) -> int:
        return self._numbers.setdefault(("number", what), len(self._numbers))


def _place(tensor: torch.Tensor) -> Hashable:
    """What two Python objects have in common that are one tensor."""
    return (tensor.data_ptr(), tuple(tensor.shape), tuple(tensor.stride()), tensor.dtype, version_of(tensor))


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, tuple | list):
        for item in value:
            yield from _tensors(item)
