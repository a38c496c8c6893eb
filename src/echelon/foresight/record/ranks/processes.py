"""Ranks recorded in child processes, one in each, as many at once as there are cores.

Strategy. A child is forked while no rank runs, so it has all values that earlier ranks have sent. It records one rank
and hands the trace to its parent. Values of messages go through the parent: it keeps them, answers the child that waits
for one, and starts the sender. A child that waits does not count as computing. Children wait for the parent alone, and
the parent for any of them. If all wait, or one fails, the children are ended, and the caller records the ranks itself:
so errors are the same as in one process. So are traces, because the caller compares the values that ranks contribute to
collectives, which have to be equal.
"""

from __future__ import annotations

import importlib
import marshal
import signal
import sys
import tempfile
import threading
from collections import defaultdict, deque
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import fields
from multiprocessing.connection import Connection, Pipe, wait

# The originals, since they are replaced for simulated ranks and recorded programs.
from os import _exit, dup2, fork, fstat, kill, pread, waitpid
from typing import Any, NamedTuple, TypeAlias, get_args

import torch
from torch import Tensor

from echelon._torch_private.tensors import real_tensors
from echelon.backends.memory import as_bytes
from echelon.foresight.record.files.saved import Checkpoint
from echelon.foresight.record.here import name_of
from echelon.foresight.record.ranks.mail import Line, Mail, Route
from echelon.foresight.trace import Allocate, Entry, Group, Trace
from echelon.simulation.process.random_state import cores_of_thread
from echelon.simulation.script.output import pass_on

Facts: TypeAlias = Mapping[tuple[Any, ...], str]
"""Digest of a rank's contribution to each collective of real values."""


class Recorded(NamedTuple):
    """Rank that a child has recorded."""

    trace: Trace
    facts: Facts
    saved: Sequence[Checkpoint]
    """Checkpoints that it has saved."""


class _Child(NamedTuple):
    rank: int
    pid: int


class Children:
    """Child processes of one recording, one for each of some ranks."""

    def __init__(
        self, mail: Mail, has_begun: Callable[[int], bool], record: Callable[[int], Recorded], cores: Collection[int]
    ) -> None:
        """Forks no child yet.

        Args:
            mail: values that ranks have sent.
            has_begun: whether a rank was recorded before.
            record: records one rank, in a child.
            cores: processors on which children run.
        """
        self._mail = mail
        self._has_begun = has_begun
        self._record = record
        self._cores = cores
        self._left: deque[int] = deque()
        """Ranks without a child yet."""
        self._begun: set[int] = set()
        self._children: dict[Connection, _Child] = {}
        self._waiting: dict[Connection, tuple[Route, int]] = {}
        """Receives that children wait for."""
        self._sent: defaultdict[Route, list[Tensor | None]] = defaultdict(list)
        """Values that children have sent."""
        self._printed: dict[int, Sequence[bytes]] = {}

    def run(self, ranks: Sequence[int]) -> dict[int, Recorded] | None:
        """Records ranks, and senders that they wait for. None if one cannot be recorded in a process of its own.

        Children's output is printed at the end, in the order of their ranks. It is dropped if there is no result.
        """
        self._left.extend(ranks)
        self._begun.update(ranks)
        found: dict[int, Recorded] = {}
        try:
            while self._left or self._children:
                while self._left and len(self._children) - len(self._waiting) < len(self._cores):
                    self._fork(self._left.popleft())
                if len(self._children) == len(self._waiting):
                    return None
                for line in wait([line for line in self._children if line not in self._waiting]):
                    assert isinstance(line, Connection)
                    self._take(line, found)
        except (EOFError, OSError):  # a child has failed
            return None
        finally:
            self._end()
        for route, values in self._sent.items():
            for value in values:
                self._mail.send(route, value)
        for _, printed in sorted(self._printed.items()):
            for stream, text in zip((sys.stdout, sys.stderr), printed, strict=True):
                if stream is not None:
                    pass_on(stream, text)
        return found

    def _take(self, line: Connection, found: dict[int, Recorded]) -> None:
        """Handles a message from a child."""
        kind, *rest = marshal.loads(line.recv_bytes())
        if kind == "sent":
            route = Route(*rest[0])
            self._sent[route].append(_unpacked_tensor(rest[1]))
            for other, (awaited, number) in list(self._waiting.items()):
                if awaited == route:
                    self._answer(other, route, number)
        elif kind == "receive":
            self._answer(line, Route(*rest[0]), rest[1])
        elif kind == "modules":
            _import(rest[0])
        else:
            child = self._children.pop(line)
            saved = [Checkpoint(*each) for each in rest[2]]
            found[child.rank] = Recorded(unpacked(rest[0]), dict(rest[1]), saved)
            self._printed[child.rank] = rest[3]
            line.close()
            waitpid(child.pid, 0)

    def _answer(self, line: Connection, route: Route, number: int) -> None:
        """Answers a child that waits for a value, if it is known. Otherwise queues the value's sender for recording."""
        known = self._mail.sent(route) or self._sent[route]
        if number < len(known):
            self._waiting.pop(line, None)
            line.send_bytes(marshal.dumps(_packed_tensor(known[number])))
            return
        self._waiting[line] = route, number
        src = route.ranks[route.src]
        if src not in self._begun and not self._has_begun(src):
            self._begun.add(src)
            # Before the others, because a child waits for it.
            self._left.appendleft(src)

    def _fork(self, rank: int) -> None:
        near, far = Pipe()
        _flush()  # else the child would write it, too
        if not (pid := fork()):
            self._be_child(rank, far)
        far.close()
        # The line now ends with the child.
        self._children[near] = _Child(rank, pid)

    def _be_child(self, rank: int, line: Connection) -> None:
        """Records a rank, hands its trace to the parent, and ends the process."""
        status = 1
        try:
            # Otherwise another child would not notice that the parent has ended.
            for other in self._children:
                other.close()
            self._mail.line = to_parent = _LineToParent(line)
            with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as errors, cores_of_thread(self._cores):
                dup2(out.fileno(), 1)
                dup2(errors.fileno(), 2)
                found = self._record(rank)
                to_parent.tell_modules()
                _flush()
                printed = [pread(file.fileno(), fstat(file.fileno()).st_size, 0) for file in (out, errors)]
                saved = [tuple(each) for each in found.saved]
                told = ("trace", packed(found.trace), list(found.facts.items()), saved, printed)
                line.send_bytes(marshal.dumps(told))
            status = 0
        finally:
            # Without the parent's exit functions, and without its `finally` blocks.
            _exit(status)

    def _end(self) -> None:
        """Ends the remaining children."""
        for line, child in self._children.items():
            line.close()
            with suppress(ProcessLookupError):
                kill(child.pid, signal.SIGKILL)
            with suppress(ChildProcessError):
                waitpid(child.pid, 0)
        self._children.clear()


class _LineToParent(Line):
    def __init__(self, line: Connection) -> None:
        self._line = line
        self._before = frozenset(sys.modules)

    def tell_modules(self) -> None:
        """Tells the modules of torch that the program has imported, so that later children need not import them."""
        if news := [name for name in sys.modules if name.startswith("torch.") and name not in self._before]:
            self._before = frozenset(sys.modules)
            self._line.send_bytes(marshal.dumps(("modules", news)))

    def tell(self, route: Route, value: Tensor | None) -> None:
        self._line.send_bytes(marshal.dumps(("sent", tuple(route), _packed_tensor(value))))

    def ask(self, route: Route, number: int) -> Tensor | None:
        self.tell_modules()
        self._line.send_bytes(marshal.dumps(("receive", tuple(route), number)))
        return _unpacked_tensor(marshal.loads(self._line.recv_bytes()))


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:  # as in a program without a terminal
            stream.flush()


def _import(names: Sequence[str]) -> None:
    for name in names:
        if name not in sys.modules:
            with suppress(ImportError):  # some modules of torch are not files
                importlib.import_module(name)


_KINDS: tuple[type[Entry], ...] = get_args(Entry)
_NUMBERS = {kind: number for number, kind in enumerate(_KINDS)}


def packed(trace: Trace) -> bytes:
    """Returns a trace as bytes.

    Raises:
        ValueError: steps of its schedule are not plain values.
    """
    values = {field.name: getattr(trace, field.name) for field in fields(trace)}
    for name in ("entries", "earlier"):
        values[name] = [(_NUMBERS[type(entry)], *entry) for entry in values[name]]
    values["live"] = [tuple(entry) for entry in trace.live]
    values["groups"] = [tuple(group) for group in trace.groups]
    # With the change to tuples it takes two thirds of the time of pickle.
    return marshal.dumps(values)


def unpacked(data: bytes) -> Trace:
    """Returns the trace of bytes that `packed` has made. Only for bytes of our own processes."""
    values = marshal.loads(data)
    for name in ("entries", "earlier"):
        values[name] = tuple(_KINDS[number]._make(rest) for number, *rest in values[name])
    values["live"] = tuple(map(Allocate._make, values["live"]))
    values["groups"] = tuple(map(Group._make, values["groups"]))
    return Trace(**values)


def _packed_tensor(value: Tensor | None) -> tuple[str, tuple[int, ...], bytes] | None:
    if value is None:
        return None
    with real_tensors():
        content = as_bytes(value.detach().contiguous()).numpy().tobytes()
    return name_of(value.dtype), tuple(value.shape), content


def _unpacked_tensor(values: tuple[str, tuple[int, ...], bytes] | None) -> Tensor | None:
    if values is None:
        return None
    dtype, shape, content = values
    with real_tensors():
        found = torch.empty(shape, dtype=getattr(torch, dtype))
        as_bytes(found).copy_(torch.frombuffer(bytearray(content), dtype=torch.uint8))
    return found


def has_device_threads() -> bool:
    """Whether torch has threads of its own for backward passes, one per accelerator, which a forked child lacks."""
    return torch.accelerator.is_available()


def can_fork() -> bool:
    """Whether this process has one thread, and can be forked."""
    return threading.active_count() == 1
