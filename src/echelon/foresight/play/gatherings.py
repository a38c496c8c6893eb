"""Collectives and messages that roles join, from the arrival of the first member on. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Generic, NamedTuple, Protocol, TypeVar

from echelon.foresight.play.counterparts import Channel, Meeting
from echelon.foresight.play.job import Job, Price
from echelon.foresight.play.links import Link
from echelon.foresight.trace import Communication, Trace


class Gathering(Protocol):
    """A collective or message, of one role or of several that meet."""

    missing: set[int]
    """Members that have not arrived. Empty if the role meets nobody."""
    price: Price
    """That of the slowest member so far, which holds up all."""
    shares: list[tuple[Link, float]]
    """Shares of links that all members take."""


_G = TypeVar("_G", bound=Gathering)


class Joined(NamedTuple, Generic[_G]):
    """Gathering that a role has joined."""

    gathering: _G
    price: Price
    """That of this role."""
    is_alone: bool
    """Whether the role meets nobody."""


class Gatherings(Generic[_G]):
    """Gatherings of one job that wait for members.

    Args:
        job: the job.
        make: makes a gathering of its missing members and the price of the first.
    """

    def __init__(self, job: Job, make: Callable[[set[int], Price], _G]) -> None:
        self._job = job
        self._make = make
        self._waiting: dict[tuple[Meeting | Channel, int], _G] = {}

    def join(self, trace: Trace, entry: Communication) -> Joined[_G]:
        """Lets a role join the gathering of its call: to be called once for each entry, in order."""
        encounter = self._job.counterparts.encounter(trace.rank, entry)
        price = self._job.price(trace, entry)
        found = None if encounter is None else self._waiting.get(encounter.key)
        if found is None:
            found = self._make(set() if encounter is None else set(encounter.members), price)
        elif found.price.cost.seconds < price.cost.seconds:
            # Groups of one form may lie on the hosts in different ways.
            found.price = price
        found.shares.extend(price.shares)
        if encounter is not None:
            found.missing.discard(encounter.member)
            self._waiting[encounter.key] = found
            if not found.missing:
                del self._waiting[encounter.key]
        return Joined(found, price, encounter is None)

    def waiting(self) -> Iterable[_G]:
        """Returns the gatherings that wait for members."""
        return self._waiting.values()
