"""Messages of values between ranks of which only some run: shapes that stages of a pipeline tell each other, and flags.

A sender that does not run is represented by the rank at the same place in a similar group, such as the first stage of
another pipeline. If there is none, the sender is started.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from typing import NamedTuple

from torch import Tensor

from echelon.backends.formats.wire import Tag
from echelon.backends.work import Work
from echelon.simulation.boundary import Activity, Boundary, VirtualWork


class Route(NamedTuple):
    """Route of messages from one rank of a group to another one."""

    ranks: tuple[int, ...]
    """World ranks of the group."""
    number: int
    """Number of the group among those of the same ranks."""
    src: int
    """Place of the sender in the group."""
    dst: int
    tag: int

    @property
    def form(self) -> Route:
        """Route that similar groups share."""
        return self._replace(ranks=tuple(rank - self.ranks[0] for rank in self.ranks))


class Line(ABC):
    """Line from a process that records one rank to the one that has the values of all ranks."""

    @abstractmethod
    def tell(self, route: Route, value: Tensor | None) -> None:
        """Hands on a value that the rank has sent."""

    @abstractmethod
    def ask(self, route: Route, number: int) -> Tensor | None:
        """Blocks until the value of a receive is known, and returns it."""


class Mail:
    """Values that recorded ranks have sent."""

    def __init__(self, start: Callable[[int], object], has_begun: Callable[[int], bool]) -> None:
        self._start = start
        self._has_begun = has_begun
        self._sent: defaultdict[Route, list[Tensor | None]] = defaultdict(list)
        self._similar: defaultdict[Route, dict[Route, None]] = defaultdict(dict)
        """Routes on which something was sent, by their form."""
        self._num_received: Counter[Route] = Counter()
        self._waiting: defaultdict[Route, list[Work[None]]] = defaultdict(list)
        self.line: Line | None = None
        """Line to the process that has the values of all ranks. None in that process itself."""

    def send(self, route: Route, value: Tensor | None) -> None:
        """Keeps a value for its receiver. None: a value that is not known."""
        if self.line is not None:
            self.line.tell(route, value)
        self._sent[route].append(value)
        self._similar[route.form][route] = None
        for work in self._waiting.pop(route, ()):
            work.complete()

    def next_of(self, route: Route) -> int:
        """Returns the number of a new receive."""
        self._num_received[route] += 1
        return self._num_received[route] - 1

    def receive(self, boundary: Boundary, timeout: float, route: Route, number: int) -> Tensor | None:
        """Blocks until the value of a receive is known, and returns it."""
        src = route.ranks[route.src]
        while not (found := self.find(route, number)):
            if self.line is not None:
                return self.line.ask(route, number)
            self._start(src)
            activity = Activity("receive from", src, Tag(step=route.tag))
            work: VirtualWork[None] = VirtualWork(boundary, activity, timeout, src, "recv", None)
            self._waiting[route].append(work)
            work.wait()
        return found[0]

    def sent(self, route: Route) -> Sequence[Tensor | None]:
        """Returns the values that were sent on a route."""
        return self._sent.get(route, ())

    def find(self, route: Route, number: int) -> Sequence[Tensor | None]:
        """Returns the value of a receive, or of a similar one if the sender has not begun. Empty if none is known."""
        # A sender that has begun will send the value itself.
        similar = () if self._has_begun(route.ranks[route.src]) else self._similar.get(route.form, ())
        for each in (route, *similar):
            if number < len(sent := self.sent(each)):
                return sent[number : number + 1]
        return ()
