"""Recording of the calling thread: each recorded rank has one, in the thread that runs its program."""

from __future__ import annotations

import functools
import inspect
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from types import CodeType
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from echelon.foresight.record.log.log import Log
from echelon.foresight.record.log.memory import Memory
from echelon.foresight.record.routing import Routing
from echelon.foresight.trace import Collective, Group, Kernel, Kind, Message

if TYPE_CHECKING:
    from echelon.foresight.record.log.placement import Placement
    from echelon.foresight.record.log.repeats import Repeats
    from echelon.foresight.record.ranks.threads import Threads
    from echelon.foresight.record.steps import Steps

Traffic: TypeAlias = tuple[tuple[int, int], ...]
"""(storage, bytes) of each tensor that a kernel reads or writes."""


class Recording(NamedTuple):
    """Log, memory, steps and known values of one rank."""

    rank: int
    log: Log
    memory: Memory
    routing: Routing
    steps: Steps
    placement: Placement | None = None
    """Known devices of the tensors. None: the host has no GPUs."""
    repeats: Repeats | None = None
    """Microbatches that may be repeated. None: all of them run."""
    threads: Threads | None = None
    """Threads that the program starts. None: they run as they are."""

    def kernel(
        self,
        name: str,
        kind: Kind,
        inputs: Iterable[Tensor],
        reads: Traffic,
        writes: Traffic,
        *,
        dtype: str,
        flops: int,
        shape: tuple[int, ...],
        launches: int,
        is_compiled: bool,
    ) -> None:
        """Writes a kernel into the log; see `Kernel`. Its phase is that of an operation with `inputs`."""
        phase, place, module = self.log.where(inputs)
        self.log.entries.append(
            Kernel(
                stream=self.log.stream,
                name=name,
                kind=kind,
                flops=flops,
                dtype=dtype,
                shape=shape,
                reads=reads,
                writes=writes,
                launches=launches,
                phase=phase,
                place=place,
                module=module,
                is_compiled=is_compiled,
            )
        )

    def collective(
        self,
        kind: str,
        group: Group,
        inputs: Sequence[Tensor],
        outputs: Sequence[Tensor],
        *,
        num_bytes: int,
        op: str = "",
        root: int = -1,
        blocking: bool,
    ) -> Collective:
        """Writes a collective of fake tensors into the log; see `Collective`. Returns the entry."""
        log, number = self.log, self.memory.number
        phase, place, module = log.where(inputs)
        if phase == "backward" and (owner := log.owner()) >= 0:
            module = owner
        entry = Collective(
            stream=log.stream,
            number=log.new_number(),
            kind=kind,
            group=log.group(group),
            num_bytes=num_bytes,
            dtype=name_of((inputs or outputs)[0].dtype) if inputs or outputs else "",
            op=op,
            root=root,
            blocking=blocking,
            reads=tuple((number(each), each.nbytes) for each in inputs),
            writes=tuple((number(each), each.nbytes) for each in outputs),
            phase=phase,
            place=place,
            module=module,
        )
        log.entries.append(entry)
        return entry

    def message(
        self, is_send: bool, peer: int, group: Group, tag: int, tensor: Tensor, *, batch: int, is_ordered: bool = True
    ) -> int:
        """Writes a message with a fake tensor into the log; see `Message`. Returns its number."""
        log = self.log
        phase, place, module = log.where([tensor])
        entry = Message(
            stream=log.stream,
            number=log.new_number(),
            is_send=is_send,
            peer=peer,
            group=log.group(group),
            tag=tag,
            num_bytes=tensor.nbytes,
            dtype=name_of(tensor.dtype),
            blocking=False,
            batch=batch,
            phase=phase,
            place=place,
            module=module,
            is_ordered=is_ordered,
        )
        log.entries.append(entry)
        return entry.number


def name_of(dtype: torch.dtype) -> str:
    """Returns the name of a dtype in a trace, such as "bfloat16"."""
    return str(dtype).removeprefix("torch.")


_thread = threading.local()


def recording_here() -> Recording | None:
    """Returns the recording of the calling thread. None in a thread of no recorded rank."""
    found: Recording | None = getattr(_thread, "recording", None)
    return found


@contextmanager
def recorded(recording: Recording) -> Iterator[None]:
    """Inside, the calling thread has this recording."""
    _thread.recording = recording
    try:
        yield
    finally:
        del _thread.recording


def in_place_of(
    original: Callable[..., Any], function: Callable[..., Any], here: Callable[[], Recording | None] = recording_here
) -> Callable[..., Any]:
    """Returns a function that threads of recorded ranks call in place of another one. Other threads call the original.

    Args:
        original: function that is replaced.
        function: gets the recording, the original and the arguments. Required ones come by position.
        here: returns the recording of the calling thread.
    """
    names = _required(original)

    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        if (recording := here()) is None:
            return original(*args, **kwargs)
        # One function replaces several, each with names of its own: `path` of os.mkdir is `name` of os.makedirs.
        named = [kwargs.pop(name) for name in names[len(args) :] if name in kwargs]
        return function(recording, original, *args, *named, **kwargs)

    return call


def in_ranks(function: Callable[..., Any]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Returns the `make` of a `Replacement` by which recorded ranks call `function`; see `in_place_of`."""
    return functools.partial(in_place_of, function=function)


def _required(original: Callable[..., Any]) -> tuple[str, ...]:
    """Returns the names of required arguments. Of functions in C none: replacements name them in the same way."""
    if not inspect.isfunction(original):
        return ()
    # Not by its signature: to make one for each of a hundred functions takes a tenth of a short recording.
    function = inspect.unwrap(original)
    code: CodeType = function.__code__
    return code.co_varnames[code.co_posonlyargcount : code.co_argcount - len(function.__defaults__ or ())]
