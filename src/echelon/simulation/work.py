"""One operation of a simulated rank, and what errors say of it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple, Protocol, TypeVar

from echelon.backends.delivery import ANY
from echelon.backends.tag import Tag
from echelon.backends.work import Driver, Received, Work
from echelon.simulation.world import is_plain

T = TypeVar("T")


class Rank(Driver, Protocol):
    """What makes an operation progress: its backend."""

    timeout: float

    def poll(self, work: Work[object]) -> bool:
        """Lets the others go on with what can happen now; says whether `work` is completed then."""
        ...

    def took(self, src: int, tag: Tag) -> None:
        """Says that the program has what a message brought."""
        ...


class Passage(NamedTuple):
    """What a send or receive does: made for each message, put into words for few."""

    doing: str
    peer: int
    tag: Tag

    def __str__(self) -> str:
        tag = str(self.tag) if self.tag.sequence else f"tag {self.tag.step}"
        peer = "any rank" if self.peer == ANY else f"rank {self.peer}"
        return f"{self.doing} {peer}, {tag}"


class VirtualWork(Work[T]):
    """An operation of a simulated rank. To look whether it is done lets the others go on first."""

    __slots__ = ("backend", "operation", "peer", "tag")

    def __init__(self, backend: Rank, description: object, peer: int, operation: str, tag: Tag | None) -> None:
        super().__init__(backend, description, backend.timeout)
        self.backend = backend
        self.peer = peer
        """The rank that this waits for, or ANY."""
        self.operation = operation
        """What the program calls it; empty for a plain send or receive."""
        self.tag = tag
        """Of a receive that is no part of a collective."""

    def is_completed(self) -> bool:
        """Says whether the operation has ended, after all that could happen before has happened."""
        return self._completed or self.backend.poll(self)  # type: ignore[arg-type]

    def wait(self, timeout: float | None = None) -> T:
        """Blocks until the operation ends and returns its result; see `Work.wait`."""
        result = super().wait(timeout)
        if self.tag is not None:
            self.backend.took(self.source_of(result), self.tag)
            self.tag = None
        return result

    def source_of(self, result: T) -> int:  # noqa: ARG002
        """Returns the rank that a message came from."""
        return self.peer


class FromAny(VirtualWork[Received]):
    """A receive from whoever sends first."""

    __slots__ = ("_sources",)

    def __init__(self, backend: Rank, operation: str, tag: Tag, sources: Mapping[int, int]) -> None:
        plain = tag if is_plain(tag) else None
        super().__init__(backend, Passage("receive from", ANY, tag), ANY, operation, plain)
        self._sources = sources

    def source_of(self, result: Received) -> int:  # noqa: D102
        return next(src for src, number in self._sources.items() if number == result.src)
