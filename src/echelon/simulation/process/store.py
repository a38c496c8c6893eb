"""Stores of torch.distributed for simulated ranks: the keys that ranks share, and waits in virtual time."""

from __future__ import annotations

import inspect
import threading
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias, cast

from torch.distributed import (  # type: ignore[attr-defined] # public, by its docs
    DistStoreError,
    FileStore,
    QueueEmptyError,
    TCPStore,
)
from torch.distributed import Store as TorchStore  # type: ignore[attr-defined] # likewise

from echelon._torch_private.tensors import real_tensors
from echelon.call_site import calling_place, source_of
from echelon.errors import Timeout, UnsupportedOp
from echelon.replacements import Replacement
from echelon.simulation.boundary import StoreWait

if TYPE_CHECKING:
    from echelon.simulation.backend import VirtualBackend
    from echelon.simulation.world import World


Contents: TypeAlias = dict[str, bytes]
Queues: TypeAlias = dict[str, deque[bytes]]

FOREVER = threading.TIMEOUT_MAX
"""Seconds."""
WORKERS = "init/"
"""Key of torch's own, by which ranks wait for each other as they open a store. `num_keys` counts it."""
_FIRST_PORT = 49152
"""Ports above it are given to stores that ask for any port. No rank listens there."""
DEFAULT_TIMEOUT = timedelta(seconds=300)
"""Timeout of torch's stores. A wait for this long is one for ever: nobody chose the time."""


class SimulatedStore(TorchStore):
    """Store whose keys all simulated ranks see. torch's C++ calls the methods too, through a PrefixStore."""

    def __init__(
        self,
        kind: type[TorchStore],
        contents: Contents,
        queues: Queues,
        stores: Stores,
        timeout: timedelta = DEFAULT_TIMEOUT,
        **attributes: object,
    ) -> None:
        """Makes a rank's store.

        Args:
            kind: class that the program has called. `isinstance` finds the store to be one.
            contents, queues: shared by the ranks.
            stores: all stores of the simulation, whose waits are its own.
            timeout: with which it is opened. It does not end a wait: an error that explains the wait does so at once.
            attributes: public attributes of its kind, such as `port`.
        """
        super().__init__()
        super().set_timeout(timeout)
        self._kind = kind
        self._contents = contents
        self._queues = queues
        self._stores = stores
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
            self._stores.changed()

    def _poll(self, result: object, name: str, *arguments: object) -> None:
        """Gives the other ranks a turn if a call has the result of the last time, as in a loop that polls."""
        call = name, *arguments
        if call in self._seen and self._seen[call] == result:
            shown = (repr(each.rpartition("/")[2] if isinstance(each, str) else each) for each in arguments)
            self._stores.let_others_run(f"a loop over Store.{name}({', '.join(shown)})")
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
        self._stores.changed()
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
            self._stores.until(is_true, what, limit)
        except Timeout as error:
            raise DistStoreError(f"wait timeout after {limit:g} s, keys: {list(keys)}") from error

    def queue_push(self, key: str, value: str | bytes) -> None:  # noqa: D102
        self._queues.setdefault(key, deque()).append(_bytes(value))
        self._stores.changed()

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
            self._kind, self._contents, self._queues, self._stores, self._opened_with, **self._attributes
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


class Stores:
    """Stores that the ranks of a simulation open, and waits for an act of another rank in virtual time."""

    def __init__(self, world: World, backend_here: Callable[[], VirtualBackend], *, have_all_ranks: bool) -> None:
        """Starts without stores.

        Args:
            world: the simulated world.
            backend_here: returns the backend of the calling rank.
            have_all_ranks: whether all ranks run. Otherwise none waits for the others to open a store.
        """
        self._world = world
        self._backend_here = backend_here
        self._have_all_ranks = have_all_ranks
        self._contents: defaultdict[object, Contents] = defaultdict(dict)
        self._queues: defaultdict[object, Queues] = defaultdict(dict)
        self._num_opened: defaultdict[object, int] = defaultdict(int)
        """Number of the last store that a rank has opened, by rank and port."""
        self._num_served: defaultdict[int, int] = defaultdict(int)
        """Number of the last store that a rank serves, by port."""
        self._clients: dict[tuple[int, int], str] = {}
        """First rank that has opened a store without serving it, and where, by the store's port and number."""
        self._num_chosen_ports = 0
        self._waiting: list[StoreWait] = []
        # torch's C++ keeps only its own half of a store, which calls methods of this one.
        self._opened: list[SimulatedStore] = []

    def replacements(self) -> list[Replacement]:
        """Gives a rank that calls a class of stores a simulated one. Other threads get torch's own stores.

        The class itself is changed: a program may have imported it by its name before.
        """
        openers: dict[type[TorchStore], Callable[..., TorchStore]] = {TCPStore: self._tcp, FileStore: self._file}
        is_rank = self._world.scheduler.is_running_here
        return [
            Replacement(kind, "__new__", partial(_opening, kind, opener, is_rank)) for kind, opener in openers.items()
        ]

    def clear(self) -> None:
        """Forgets all stores."""
        self._contents.clear()
        self._queues.clear()
        self._opened.clear()

    def unserved(self) -> str:
        """Returns which store no rank serves. Empty if there is none."""
        lost = (text for (port, number), text in self._clients.items() if number > self._num_served[port])
        return next((f"{text}, which no rank serves: open it with is_master=True on one rank" for text in lost), "")

    def barrier(self, _: int, store: Any, name: str, count: int, *__: object, **___: object) -> None:
        """Blocks until `count` ranks have called it, as torch's own does at the begin of a group."""
        if not self._have_all_ranks:
            return
        if store.add(f"barrier of {name}", 1) == count:
            store.set(f"end of the barrier of {name}", "1")
        store.wait([f"end of the barrier of {name}"])

    def until(self, is_true: Callable[[], bool], what: str, seconds: float | None) -> None:
        """Blocks the calling rank until a condition holds.

        Args:
            is_true: The condition. It becomes true only by an act of another rank.
            what: What the rank does, for errors.
            seconds: Virtual seconds after which it gives up. None: never.

        Raises:
            Timeout: the time is up.
        """
        clock = self._world.clock
        # For the whole wait: other keys may change meanwhile, each of which ends a Work.
        end = None if seconds is None else clock.now + seconds
        while not is_true():
            work = self._work(what)
            self._waiting.append(work)
            with real_tensors():  # a wait is refused where tensors have no values
                work.wait(None if end is None else max(0.0, end - clock.now))

    def let_others_run(self, what: str, polled: object = None) -> None:
        """Gives the other ranks a turn, so that a loop that polls ends.

        Args:
            what: The call of the loop, for errors.
            polled: What the loop polls. None: the call itself.
        """
        self._backend_here().boundary.poll(self._work(what), what if polled is None else polled)  # type: ignore[arg-type]

    def changed(self) -> None:
        """Wakes all ranks whose condition may have become true."""
        waiting, self._waiting = self._waiting, []
        for work in waiting:
            work.complete()
        self._world.clock.wake_pollers()

    def _work(self, what: str) -> StoreWait:
        backend = self._backend_here()
        return StoreWait(backend.boundary, what, backend.timeout)

    def _tcp(
        self,
        host_name: str,
        port: int,
        world_size: int | None = None,
        is_master: bool = False,
        timeout: timedelta = DEFAULT_TIMEOUT,
        wait_for_workers: bool = True,
        multi_tenant: bool = False,  # noqa: ARG002
        master_listen_fd: int | None = None,  # noqa: ARG002
        use_libuv: bool = True,  # noqa: ARG002
    ) -> SimulatedStore:
        # By the port alone: ranks may use different names for the host.
        rank, port = self._backend_here().rank, int(port) or self._free_port()
        waits = world_size is not None and wait_for_workers
        # A program may serve one port after another: the second store of each rank is a new one, except for clients.
        is_new = is_master or waits
        number = self._num_opened[rank, port] + 1 if is_new else max(self._num_served[port], 1)
        self._num_opened[rank, port] = max(self._num_opened[rank, port], number)
        if is_master:
            self._num_served[port] = number
        elif self._have_all_ranks:
            opener = f"rank {rank} opened TCPStore({host_name!r}, {port}) at {source_of(calling_place())}"
            self._clients.setdefault((port, number), opener)
        opened = port, number
        store = self._open(TCPStore, opened, timeout, host=host_name, port=port, libuvBackend=True)
        if world_size is not None and waits and self._have_all_ranks:
            store.add(WORKERS, 1)
            what = f"TCPStore({host_name!r}, {port}), which {world_size} ranks must open"
            self.until(lambda: int(self._contents[opened][WORKERS]) >= world_size, what, None)
        return store

    def _free_port(self) -> int:
        self._num_chosen_ports += 1
        return _FIRST_PORT + self._num_chosen_ports

    def _file(self, file_name: str, world_size: int = -1) -> SimulatedStore:  # noqa: ARG002
        store = self._open(FileStore, ("file", str(file_name)), path=str(file_name))
        store.add(WORKERS, 1)
        return store

    def _open(
        self, kind: type[TorchStore], key: object, timeout: timedelta = DEFAULT_TIMEOUT, **attributes: object
    ) -> SimulatedStore:
        store = SimulatedStore(kind, self._contents[key], self._queues[key], self, timeout, **attributes)
        self._opened.append(store)
        return store


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
