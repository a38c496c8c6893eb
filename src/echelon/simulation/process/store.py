"""Stores of torch.distributed for simulated ranks: the keys that ranks share, and waits in virtual time."""

from __future__ import annotations

import inspect
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from functools import partial
from typing import Any, Protocol, TypeAlias, cast

from torch.distributed import DistStoreError, QueueEmptyError
from torch.distributed import Store as TorchStore  # type: ignore[attr-defined] # public, by its docs

from echelon.errors import Timeout, UnsupportedOp
from echelon.replacements import Replacement


class Patience(Protocol):
    """Waits of simulated ranks."""

    def until(self, is_true: Callable[[], bool], what: str, seconds: float | None) -> None:
        """Blocks the calling rank until a condition holds.

        Args:
            is_true: The condition. It becomes true only by an act of another rank.
            what: What the rank does, for errors.
            seconds: Virtual seconds after which it gives up. None: never.

        Raises:
            Timeout: the time is up.
        """
        ...

    def let_others_run(self, polled: str) -> None:
        """Gives the other ranks a turn, so that a loop that polls ends.

        Args:
            polled: The call of the loop, for errors.
        """
        ...

    def changed(self) -> None:
        """Wakes all ranks whose condition may have become true."""
        ...


Contents: TypeAlias = dict[str, bytes]
Queues: TypeAlias = dict[str, deque[bytes]]

FOREVER = threading.TIMEOUT_MAX
"""Seconds."""
WORKERS = "init/"
"""Key of torch's own, by which ranks wait for each other as they open a store. `num_keys` counts it."""
DEFAULT_TIMEOUT = timedelta(seconds=300)
"""Timeout of torch's stores. A wait for this long is one for ever: nobody chose the time."""


class SimulatedStore(TorchStore):
    """Store whose keys all simulated ranks see. torch's C++ calls the methods too, through a PrefixStore."""

    def __init__(
        self,
        kind: type[TorchStore],
        contents: Contents,
        queues: Queues,
        patience: Patience,
        timeout: timedelta = DEFAULT_TIMEOUT,
        **attributes: object,
    ) -> None:
        """Makes a rank's store.

        Args:
            kind: class that the program has called. `isinstance` finds the store to be one.
            contents, queues: shared by the ranks.
            patience: its waits.
            timeout: with which it is opened. It does not end a wait: an error that explains the wait does so at once.
            attributes: public attributes of its kind, such as `port`.
        """
        super().__init__()
        super().set_timeout(timeout)
        self._kind = kind
        self._contents = contents
        self._queues = queues
        self._patience = patience
        self._opened_with = timeout
        self._attributes = attributes
        self._seen: dict[tuple[object, ...], object] = {}
        """Last result of each call that only reads, since the rank has added a key."""

    @property  # type: ignore[override] # a class beside this one
    def __class__(self) -> type[TorchStore]:
        """Class that the program has called."""
        return self._kind

    @__class__.setter
    def __class__(self, _: type[TorchStore]) -> None: ...

    def __getattr__(self, name: str) -> object:
        """Returns an attribute of this kind of store."""
        try:
            return self.__dict__["_attributes"][name]
        except KeyError:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}") from None

    def set(self, key: str, value: str | bytes) -> None:  # noqa: D102
        if key not in self._contents:  # others may wait for it: a loop that adds keys is not one that polls
            self._seen.clear()
        before, self._contents[key] = self._contents.get(key), _bytes(value)
        # Else two ranks that poll by add(key, 0) would wake each other for ever.
        if before != self._contents[key]:
            self._patience.changed()

    def _poll(self, result: object, name: str, *arguments: object) -> None:
        """Gives the other ranks a turn if a call has the result of the last time, as in a loop that polls."""
        call = name, *arguments
        if call in self._seen and self._seen[call] == result:
            shown = (repr(each.rpartition("/")[2] if isinstance(each, str) else each) for each in arguments)
            self._patience.let_others_run(f"a loop over Store.{name}({', '.join(shown)})")
        self._seen[call] = result

    def get(self, key: str) -> bytes:  # noqa: D102
        self.wait([key])
        self._poll(self._contents[key], "get", key)
        self.wait([key])  # another rank may have deleted it
        return self._contents[key]

    def add(self, key: str, amount: int) -> int:  # noqa: D102
        if amount == 0:  # torch's own barriers read a counter so
            self._poll(self._contents.get(key), "add", key, 0)
        value = int(self._contents.get(key, b"0")) + amount
        self.set(key, str(value))
        return value

    def append(self, key: str, value: str | bytes) -> None:  # noqa: D102
        self.set(key, self._contents.get(key, b"") + _bytes(value))

    def check(self, keys: Sequence[str]) -> bool:  # noqa: D102
        self._poll(self._has(keys), "check", *keys)
        return self._has(keys)

    def compare_set(self, key: str, expected: str | bytes, desired: str | bytes) -> bytes:  # noqa: D102
        self._poll(self._contents.get(key), "compare_set", key, expected, desired)
        if key in self._contents and self._contents[key] != _bytes(expected):
            return self._contents[key]
        # As torch's TCPStore: a key that nobody has set is set if nothing is expected of it.
        if key not in self._contents and _bytes(expected):
            return _bytes(expected)
        self.set(key, desired)
        return self._contents[key]

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:  # noqa: D102
        return [self.get(key) for key in keys]

    def multi_set(self, keys: Sequence[str], values: Sequence[str | bytes]) -> None:  # noqa: D102
        for key, value in zip(keys, values, strict=True):
            self.set(key, value)

    def delete_key(self, key: str) -> bool:  # noqa: D102
        self._poll(key in self._contents, "delete_key", key)
        if self._contents.pop(key, None) is None:
            return False
        self._patience.changed()
        return True

    def num_keys(self) -> int:  # noqa: D102
        self._poll(len(self._contents), "num_keys")
        return len(self._contents)

    def has_extended_api(self) -> bool:  # noqa: D102
        return True

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Blocks until all keys are set.

        Raises:
            torch.distributed.DistStoreError: not within `timeout`, or that of `set_timeout`, unless it is torch's
                default.
        """
        if self._has(keys):
            return
        missing = ", ".join(repr(key.rpartition("/")[2]) for key in keys if not self._has([key]))
        self._until(lambda: self._has(keys), f"Store.wait for {missing}, which no rank has set", keys, timeout)

    def _until(
        self, is_true: Callable[[], bool], what: str, keys: Sequence[str], timeout: timedelta | None = None
    ) -> None:
        if timeout is None and self.timeout != self._opened_with:
            timeout = cast("timedelta", self.timeout)
        limit = None if timeout is None or timeout >= DEFAULT_TIMEOUT else timeout.total_seconds()
        try:
            self._patience.until(is_true, what, limit)
        except Timeout as error:
            raise DistStoreError(f"wait timeout after {limit:g} s, keys: {list(keys)}") from error

    def queue_push(self, key: str, value: str | bytes) -> None:  # noqa: D102
        self._queues.setdefault(key, deque()).append(_bytes(value))
        self._patience.changed()

    def queue_pop(self, key: str, block: bool = True) -> bytes:
        """Returns the first value of a queue, and removes it. Blocks until there is one, unless `block` is False.

        Raises:
            torch.distributed.QueueEmptyError: there is none, and `block` is False.
            torch.distributed.DistStoreError: as `wait`.
        """
        if not self._queues.get(key):
            if not block:
                self._poll(None, "queue_pop", key)
            else:
                what = f"Store.queue_pop of {key!r}, to which no rank has pushed"
                self._until(lambda: bool(self._queues.get(key)), what, [key])
        if not self._queues.get(key):
            raise QueueEmptyError(f"queue {key} is empty")
        return self._queues[key].popleft()

    def queue_len(self, key: str) -> int:  # noqa: D102
        self._poll(len(self._queues.get(key, ())), "queue_len", key)
        return len(self._queues.get(key, ()))

    def clone(self) -> SimulatedStore:  # noqa: D102
        return SimulatedStore(
            self._kind, self._contents, self._queues, self._patience, self._opened_with, **self._attributes
        )

    def list_keys(self) -> list[str]:  # noqa: D102
        self._poll(list(self._contents), "list_keys")
        return [key for key in self._contents if key != WORKERS]

    # Names under which torch's C++ calls these three.
    deleteKey = delete_key  # noqa: N815
    getNumKeys = num_keys  # noqa: N815
    compareSet = compare_set  # noqa: N815

    def _has(self, keys: Sequence[str]) -> bool:
        return all(key in self._contents or self._queues.get(key) for key in keys)


def _bytes(value: str | bytes) -> bytes:
    return value.encode() if isinstance(value, str) else bytes(value)


def stores_opened_by(
    openers: Mapping[type[TorchStore], Callable[..., TorchStore]], is_rank: Callable[[], bool]
) -> list[Replacement]:
    """Gives a simulated rank that calls a class of stores the store of its opener.

    The class itself is changed: a program may have imported it by its name before.

    Args:
        openers: By class. Their parameters are those of the class.
        is_rank: Whether the calling thread is a rank. Others get torch's own stores.
    """
    return [Replacement(kind, "__new__", partial(_opening, kind, opener, is_rank)) for kind, opener in openers.items()]


def _opening(
    kind: type[TorchStore],
    opener: Callable[..., TorchStore],
    is_rank: Callable[[], bool],
    original: Callable[[type[TorchStore]], TorchStore],
) -> Any:
    def open_store(cls: type[TorchStore], *args: object, **kwargs: object) -> TorchStore:
        if not is_rank():
            return original(cls)
        if cls is not kind:
            raise UnsupportedOp(
                f"{cls.__name__}, which derives from {kind.__name__}: simulated ranks use the class itself"
            )
        try:
            inspect.signature(opener).bind(*args, **kwargs)
        except TypeError:
            return original(cls)  # torch's own `__init__`, which Python calls next, refuses the arguments
        return opener(*args, **kwargs)

    return staticmethod(open_store)
