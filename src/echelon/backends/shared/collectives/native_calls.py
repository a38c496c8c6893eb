"""Small collectives of one group that repeat an earlier one: the native library runs them from the method on.

Strategy. The runner of the group's collectives reports each collective that it has run for at least the second time.
`learn` gives its arguments, and the way in which it runs, to the library (`native/calls.c`). From then on the group's
method calls `run`, which finds the arguments and does all of the call: checks of the tensor, number, signature,
meeting, record. Where ranks are late it returns the operation that it has begun. The runner then goes on with the
function that has run before: the sync block knows that the operation was announced.

The library compares texts by address, so all that it was given is kept here until it forgets all calls.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary, ref

import torch
from torch import Tensor

from echelon._native import Calls, Flights, KnownCall, Prepared, Target, core
from echelon._torch_private.autograd import FORWARD_LEVEL, count_changes
from echelon._torch_private.tensors import dispatch_depth, transform_stack
from echelon.backends.collective import KnownCalls, Run
from echelon.backends.messages import NativeMessage
from echelon.backends.shared.collectives.sync_block import SyncBlock, encoded
from echelon.call_site import kind_of
from echelon.operation_records import FlightRecorder, KnownOperation

# The library looks through them one by one.
_MAX_KNOWN = 48
_HAS_LOCK: bool = getattr(sys, "_is_gil_enabled", lambda: True)()
"""Whether this Python has a global lock, on which the library relies."""


class Way(NamedTuple):
    """Way in which the native library runs a collective: see `struct known_call`."""

    act: int
    target: int = Target.NONE
    reduction: int = 0
    num_shown: int = 0
    begin: int = 0
    is_published: bool = False
    source: int = 0
    plan: bytes = b""
    changes_tensor: bool = False
    makes_result: bool = False
    """Whether the result goes into `out`, or into a new tensor."""


class NativeCalls(KnownCalls):
    """Collectives and messages of one group that the native library makes by itself, and their numbers."""

    def __init__(self) -> None:
        self.numbers = Calls()
        self.run = self.send = self.receive = _never
        self._ways: WeakKeyDictionary[Run, Callable[[], Way | None]] = WeakKeyDictionary()
        self._kept: list[tuple[object, ...]] = []
        self._learnt: set[tuple[object, ...]] = set()
        self._board: SyncBlock | None = None
        self._rings: tuple[Flights, Flights] | None = None
        # Messages that the library may have begun with when they were forgotten last stay until the next time.
        self._messages: list[tuple[object, ...]] = []
        self._retired: list[tuple[object, ...]] = []

    def open(self, board: SyncBlock) -> None:
        """Begins to run calls on a sync block."""
        self._board = board
        if self.numbers.flights and _HAS_LOCK:
            self.numbers.board = board.address

    def record_into(self, recorder: FlightRecorder, context: int) -> None:  # noqa: D102
        if (rings := recorder.rings(context)) is None:
            return
        _use_interpreter(core)
        # Kept, because the library writes there.
        self._rings = rings
        self.numbers.flights, self.numbers.latest = (ring.address for ring in rings)
        numbers = ctypes.addressof(self.numbers)
        self.run = core.run_known_of(numbers)
        if _HAS_LOCK:
            self.send, self.receive = core.send_known_of(numbers), core.receive_known_of(numbers)

    def expect(self, run: Run, find_way: Callable[[], Way | None]) -> None:
        """Registers a function that returns the way in which a prepared collective runs. None if it has none yet."""
        self._ways[run] = find_way

    def learn(  # noqa: D102
        self,
        run: Run,
        call: KnownOperation,
        checksum: int,
        key: tuple[str, int, str],
        tensor: Tensor | None,
        out: Any,
        result: Any,
    ) -> bool:
        # A call that takes another way for its own reasons, such as a timeout, is not learnt again and again.
        known_by = ref(run), key[2], None if out is None else out.shape
        if known_by in self._learnt:
            return False
        find_way = self._ways.get(run)
        way = None if find_way is None else find_way()
        if way is None or (out is not None and not way.makes_result) or not self.numbers.board:
            return False
        makes_result = way.makes_result and out is None
        # The receiver of a scatter has no tensor to make one like.
        if makes_result and tensor is None:
            return False
        if len(self._kept) >= _MAX_KNOWN:
            self.forget()
        kind, root, op = key
        text = encoded(call.operation)
        plan = ctypes.create_string_buffer(way.plan) if way.plan else None
        shape = result.shape if makes_result else None
        known = KnownCall(
            text=_address_of(text),
            text_bytes=len(text),
            checksum=checksum,
            act=way.act,
            target=way.target,
            reduction=way.reduction,
            num_shown=way.num_shown,
            begin=way.begin,
            is_published=way.is_published,
            source=way.source,
            plan=0 if plan is None else ctypes.addressof(plan),
            changes_tensor=way.changes_tensor,
            changes_out=out is not None,
            result_shape=id(shape) if makes_result else 0,
            object=id(call),
        )
        address = ctypes.addressof(known)
        has_learnt: bool = core.learn(ctypes.addressof(self.numbers), address, kind, root, op, tensor, out)
        if has_learnt:
            self._learnt.add(known_by)
            # Not `run`: a cycle would keep the group's memory mapped after the group.
            self._kept.append((known, call, text, plan, kind, op, shape))
        return has_learnt

    def learn_message(self, peer: int, tag: int, native: NativeMessage, call: KnownOperation) -> None:  # noqa: D102
        if len(self._messages) >= _MAX_KNOWN:
            self.forget_messages()
        message = ctypes.create_string_buffer(native.message, len(native.message))
        acquire, release = native.lock.acquire, native.lock.release
        like = torch.empty(0, dtype=native.dtype, device="cpu")
        prepared = Prepared(
            next=self.numbers.messages,
            message=ctypes.addressof(message),
            peer=peer,
            tag=tag,
            is_send=native.is_send,
            spin=native.spin,
            count=ctypes.addressof(native.count),
            acquire=id(acquire),
            release=id(release),
            progress=id(native.progress),
            receiver=0 if native.receiver is None else id(native.receiver),
            queues=(ctypes.c_uint64 * 4)(*map(id, native.queues)),
            like=id(like),
            shape=id(native.shape),
            object=id(call),
        )
        self._messages.append((prepared, message, acquire, release, like, native, call))
        self.numbers.messages = ctypes.addressof(prepared)

    def forget_messages(self) -> None:
        """Forgets all messages: they take Python's way once more."""
        self.numbers.messages = 0
        # A group that closes forgets them twice.
        if self._messages:
            self._retired, self._messages = self._messages, []

    def forget(self) -> None:
        """Forgets all collectives: they take the runner's way once more."""
        self.numbers.first = 0
        if self._board is not None:
            self._board.forget_notes()
        self._kept.clear()
        self._learnt.clear()


def _never(*_: object) -> bool:
    return False


def _address_of(text: bytes) -> int:
    address = ctypes.cast(ctypes.c_char_p(text), ctypes.c_void_p).value
    assert address is not None
    return address


def _use_interpreter(library: SimpleNamespace) -> None:
    """Gives the library the functions that it asks before a call."""
    library.use_interpreter(
        dispatch_depth,
        transform_stack,
        torch.is_inference_mode_enabled,
        count_changes,
        torch.Tensor.new_empty,
        sys._getframe,
        kind_of,
        *FORWARD_LEVEL,
        "co_filename",
        "is_closed",
        "delivery",
        None,
        False,
    )
