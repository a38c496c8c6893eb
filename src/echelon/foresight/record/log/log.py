"""Log of one rank's step: entries in the order of the host, and tables of their lines, modules and groups."""

from __future__ import annotations

import os
import weakref
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from types import CodeType
from typing import NamedTuple

import torch

from echelon._torch_private.autograd import is_in_backward, next_node_number, node_number
from echelon.call_site import calling_place, is_in_import_of_library, line_of
from echelon.foresight.record.log.calls import Call, Calls
from echelon.foresight.record.log.gpus import Gpus
from echelon.foresight.record.log.overlay import Overlay
from echelon.foresight.record.log.phases import Phases
from echelon.foresight.record.log.segments import Counters
from echelon.foresight.trace import Allocate, Entry, Group, MemoryKind, Phase


class Numbering:
    """Function that returns 1, 2, 3 and so on. `next` can be set."""

    __slots__ = ("next",)

    def __init__(self) -> None:
        self.next = 1

    def __call__(self) -> int:
        """Returns the next number."""
        self.next += 1
        return self.next - 1


class Index(dict[str, int]):
    """Numbers of texts, in the order of their first use."""

    def of(self, text: str) -> int:
        """Returns the number of a text."""
        return self.setdefault(text, len(self))


class _Mark(NamedTuple):
    """Module whose nodes of autograd's graph begin at a number."""

    number: int
    module: int
    is_compiled: bool


_NO_MODULE = _Mark(-1, -1, is_compiled=False)


class Where(NamedTuple):
    """Phase, line and module of an entry."""

    phase: Phase
    place: int
    module: int


class Log:
    """Entries of one rank, and its present stream and module."""

    def __init__(self, calls: Calls, num_gpus: int = 0) -> None:
        self.gpus = Gpus(num_gpus, self.line)
        self.phases = Phases()
        self.entries: list[Entry] = []
        self.calls = calls
        self.computed: list[tuple[int, int, object]] = []
        """(first entry, entry after the last one, step) of the steps of a schedule, such as those of a pipeline."""
        self.stream = 0
        """Number of the stream that is current."""
        self.groups: dict[Group, int] = {}
        self.name_of_all = ""
        """Mesh dimension that has all ranks, such as "dp": the name of the default group."""
        self.places, self.modules = Index(), Index()
        self.kinds: dict[int, MemoryKind] = {}
        """Kind of storages whose holder is known by now. It replaces the kind in `Allocate`."""
        self.assumptions, self.skipped = Index(), Index()
        self.overlay = Overlay()
        """Files that the program believes it has written."""
        self.pending: dict[int, int] = {}
        """Functional collectives that nothing waits for yet: their numbers, by the storage of the result."""
        self.new_storage, self.new_event, self.new_number, self._new_batch = (Numbering() for _ in range(4))
        self.new_stream = Numbering()
        self.num_exchanged = 0
        """Collectives and messages so far whose real values ranks have exchanged."""
        self.num_of_all = 0
        """Number of collectives of all ranks so far. A call that consists of two counts twice, on every rank."""
        self._batch, self._num_left_in_batch = -1, 0
        self._num_groups: Counter[tuple[int, ...]] = Counter()
        self._place_of: dict[tuple[CodeType, int], int] = {}
        self._marks: list[_Mark] = [_Mark(0, -1, is_compiled=False)]
        """A mark whenever a module is entered or left."""
        self.compiled: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()
        """Modules that the program compiles."""
        self.owner: Callable[[], int] = lambda: -1
        """Returns the module for whose parameters a backward communicates, -1 if it is not known; see `modules`."""
        self._compiled_depth = 0
        """Number of nested calls of compiled code."""
        self.is_inferring = False
        """Whether the program is inside of `torch.inference_mode`."""
        # Now: the program may change it.
        self._folder = os.path.join(os.getcwd(), "")

    # Calls

    def call(self, kind: str) -> AbstractContextManager[Call]:
        """Begins a call of the program into its recording; see `Calls.call`."""
        return self.calls.call(kind, len(self.entries))

    # Places

    def place(self) -> int:
        """Returns the number of the line of the program that is running. -1 if there is none."""
        found = calling_place(2)
        if found is None:
            return -1
        line = found[:2]
        number = self._place_of.get(line)
        if number is None:
            # Without FSDP2's module, which entries have in a field of their own.
            number = self._place_of[line] = self.places.of(line_of((*line, "")).removeprefix(self._folder))
        return number

    def line(self) -> str:
        """Returns the line of the program that is running, as "train.py:42"."""
        return self.line_of(self.place())

    def line_of(self, place: int) -> str:
        """Returns the line of the program that has a number."""
        return "an unknown line" if place < 0 else list(self.places)[place]

    # Modules

    def enter(self, module: int) -> None:
        """Notes that nodes of the graph belong to a module from now on. -1: to none."""
        number = next_node_number()
        if self._marks[-1].number == number:
            # No node of the graph was made since the last mark.
            self._marks.pop()
        self._marks.append(_Mark(number, module, self._compiled_depth > 0))

    @contextmanager
    def compiling(self) -> Iterator[None]:
        """Inside, operations and the nodes of their backward are compiled."""
        self._compiled_depth += 1
        self.enter(self._marks[-1].module)
        try:
            yield
        finally:
            self._compiled_depth -= 1
            self.enter(self._marks[-1].module)

    def module(self) -> int:
        """Returns the number of the module whose forward runs, or whose node of the graph runs backward."""
        return self._mark().module

    def is_compiled(self) -> bool:
        """Whether compiled code runs, or the backward of compiled code."""
        return self._mark().is_compiled

    def _mark(self) -> _Mark:
        if is_in_backward() and not self.phases.is_repeated():
            number = node_number()
            if number < 0:
                return _NO_MODULE
            # Numbers of modules are below 1 << 60: the last mark at this node counts.
            return self._marks[max(0, bisect_right(self._marks, (number, 1 << 60)) - 1)]
        return self._marks[-1]

    def forget_graph(self) -> None:
        """Drops the modules of nodes, at the end of a step."""
        del self._marks[:-1]

    def where(self, inputs: Iterable[torch.Tensor] = ()) -> Where:
        """Returns phase, line and module of an operation."""
        phase = self.phases.of(inputs, self._marks[-1].module >= 0)
        return Where(phase, self.place(), self.module())

    # Steps of a schedule

    @contextmanager
    def computing(self, step: object) -> Iterator[None]:
        """Inside, the rank computes a step of its schedule."""
        begin = len(self.entries)
        yield
        self.computed.append((begin, len(self.entries), step))

    def drop(self, num_entries: int) -> list[tuple[int, int, object]]:
        """Drops the first entries. Returns the steps that they computed."""
        del self.entries[:num_entries]
        dropped = [each for each in self.computed if each[0] < num_entries]
        self.computed = [
            (begin - num_entries, end - num_entries, step) for begin, end, step in self.computed if begin >= num_entries
        ]
        return dropped

    # Numbers

    @property
    def counters(self) -> Counters:
        """Numbers that are given next."""
        return Counters(self.new_storage.next, self.new_event.next, self.new_number.next, self._new_batch.next)

    @counters.setter
    def counters(self, counters: Counters) -> None:
        self.new_storage.next, self.new_event.next, self.new_number.next, self._new_batch.next = counters

    # Batches of messages

    def begin_batch(self, size: int) -> None:
        """Notes that the next `size` messages begin together."""
        self._batch, self._num_left_in_batch = self._new_batch(), size

    def next_of_batch(self) -> int:
        """Returns the batch of the next message. -1 if it stands alone."""
        if not self._num_left_in_batch:
            return -1
        self._num_left_in_batch -= 1
        return self._batch

    # Tables

    def new_group(self, ranks: tuple[int, ...]) -> int:
        """Returns the number of a new group among all groups of the same ranks."""
        self._num_groups[ranks] += 1
        return self._num_groups[ranks] - 1

    def named_groups(self, world_size: int) -> tuple[Group, ...]:
        """Returns the table of groups. The default group has the name of the mesh dimension that it serves."""
        name = self.name_of_all
        taken = {group.name for group in self.groups if len(group.ranks) == world_size}
        if not name or name in taken:
            return tuple(self.groups)
        return tuple(
            group._replace(name=name) if len(group.ranks) == world_size and not (group.name or group.number) else group
            for group in self.groups
        )

    def group(self, group: Group) -> int:
        """Returns the number of a group in the table of groups."""
        return self.groups.setdefault(group, len(self.groups))

    def assume(self, what: str) -> None:
        """Notes an assumption or an approximation, at the line of the program that is running."""
        self.assumptions.of(f"{what} at {self.line()}")

    def skip(self, what: str) -> None:
        """Notes a write that was skipped, at the line of the program that is running.

        Probes of libraries while the program imports them are not noted.
        """
        if is_in_import_of_library():
            return
        self.skipped.of(f"{what} at {self.line()}")

    def with_kinds(self, entries: Iterable[Entry]) -> list[Entry]:
        """Returns entries, with the kinds of storages that are known by now."""
        kinds = self.kinds
        return [
            entry._replace(kind=kinds[entry.storage])
            if isinstance(entry, Allocate) and entry.storage in kinds
            else entry
            for entry in entries
        ]
