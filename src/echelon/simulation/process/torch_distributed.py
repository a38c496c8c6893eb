"""torch.distributed on simulated ranks: its default group and its globals, for unmodified programs.

Strategy. torch keeps its own functions; a few private ones below them are replaced while a simulation runs. So it does
not matter by which name a program imported `init_process_group`. Every backend name leads to Echelon's backend for
torch (`echelon.interop`), over the simulated group of the calling rank. Each rank has its own registry of groups.
"""

from __future__ import annotations

import functools
import inspect
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d

from echelon._torch_private.distributed import (
    GROUP_GLOBALS,
    GroupRegistry,
    defaults_without_group,
    forget_groups_of_thread,
    futures_that_wait_by,
    group_registry,
    groups_made_by,
    groups_of_each_thread,
    shardings,
)
from echelon._torch_private.modules import clipping_by, profilers_that_ask
from echelon.arguments import choices
from echelon.call_site import Place, calling_place, source_of
from echelon.errors import CollectiveMismatch, DeadlockError, InvalidArgument, LaunchError, UnsupportedOp
from echelon.group.group import ProcessGroup
from echelon.replacements import Replacement, replaced
from echelon.simulation.backend import VirtualBackend, VirtualLanes
from echelon.simulation.process.calls import NEEDS_CUDA
from echelon.simulation.process.environment import Attribute
from echelon.simulation.process.pools import pools_in_lanes
from echelon.simulation.process.sharding import SharedShardings
from echelon.simulation.process.store import FOREVER, Stores
from echelon.wording import listed

if TYPE_CHECKING:
    from echelon.simulation.world import World

_NCCL_TIMEOUT = timedelta(minutes=10)
"""torch's default for NCCL."""


class _Division(NamedTuple):
    """Call of `new_group` on one rank."""

    ranks: tuple[int, ...]
    rank: int
    place: Place | None


class TorchDistributed:
    """torch.distributed of one simulation."""

    def __init__(
        self, world: World, backend: str | None = None, note_group: Callable[[Any, str, Any], None] = lambda *_: None
    ) -> None:
        """Makes torch.distributed for a world.

        Args:
            world: the simulated world.
            backend: the backend where only some ranks run. None: all ranks run.
            note_group: called with each new group of torch, the backend that the program asks for, in lower case,
                and its `device_id`.
        """
        self._world = world
        self._backend = backend
        self._note_group = note_group
        self._asked: dict[int, str] = {}
        """Backend of the default group, as the program asked for it, by rank."""
        self._groups: dict[int, ProcessGroup] = {}
        # No method: a cycle would keep every simulation until Python's collector runs.
        self._backend_here = partial(_backend_of_rank, world, self._groups)
        self._stores = Stores(world, self._backend_here, have_all_ranks=backend is None)
        self._divisions: list[_Division] = []
        """Calls of `new_group` that every rank makes, as the first rank made them."""
        self._num_divisions: defaultdict[int, int] = defaultdict(int)
        """Number of such calls, by rank."""
        self._shardings = SharedShardings()

    def attributes(self) -> list[Attribute]:
        """Returns torch's globals that each rank has for itself."""
        registry, *others = GROUP_GLOBALS
        found = [Attribute(distributed_c10d, name) for name in others if hasattr(distributed_c10d, name)]
        return [Attribute(distributed_c10d, registry, lambda _: GroupRegistry()), *found]

    @contextmanager
    def rank(self, group: ProcessGroup) -> Iterator[None]:
        """Inside, torch.distributed of the calling thread is that of the rank of `group`."""
        self._groups[group.rank] = group
        # A mode of this thread: backward runs here, so hooks and collectives of a backward belong to this rank.
        torch.autograd.set_multithreading_enabled(False)
        try:
            yield
        finally:
            forget_groups_of_thread()

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Inside, torch.distributed works for the simulated ranks."""
        # A decision keeps its mesh, and a mesh its groups. A process that a rank forks frees what other threads had.
        # There the destructor of a group of Gloo would join threads that a fork does not copy, and never return.
        if (found := shardings()) is not None:
            found.forget_thread()
        try:
            with groups_of_each_thread(), replaced(self._replacements()):
                yield
        finally:
            self._shardings.remove()
            self._groups.clear()
            self._stores.clear()

    def _replacements(self) -> list[Replacement]:
        return [
            *defaults_without_group(),
            *groups_made_by(self._with_simulated_backend, self._stores.barrier),
            *futures_that_wait_by(self._wait_for, self._look_at),
            *self._stores.replacements(),
            *pools_in_lanes(self._lanes_here),
            *_one_profiler(self._world.scheduler.rank_here),
            *clipping_by(_explained),
            # Without NCCL torch warns that it has none.
            Replacement(distributed_c10d, "default_pg_nccl_timeout", lambda timeout: timeout or _NCCL_TIMEOUT),
        ]

    # Groups

    def _with_simulated_backend(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Wraps torch's function that makes every group."""
        signature = inspect.signature(original)

        def new_group(*args: Any, **kwargs: Any) -> Any:
            call = signature.bind(*args, **kwargs).arguments
            asked = str(call["backend"]).lower()
            if asked == "fake":  # torch's own group without communication
                return original(*args, **kwargs)
            _check_backend(asked)
            # Registers the backend. Late, since most simulations have no use for torch.distributed.
            from echelon.interop import torch_distributed as interop

            # Here, since a program may import DTensor only now.
            self._shardings.install()
            group, ranks = self._here(), call["global_ranks_in_group"]
            if ranks:
                self._check_division(tuple(ranks), call["group_name"])
            elif dist.is_initialized():
                raise InvalidArgument("new_group([]): name the ranks of the group, or leave them out for all")
            else:
                if call["group_size"] == -1:  # MPI's ranks are known to MPI alone
                    call["group_size"], call["group_rank"] = group.world_size, group.rank
                _check_world(group, call["group_rank"], call["group_size"])
            if (device := call.get("device_id")) is not None and self._backend is None:
                raise UnsupportedOp(f"device_id={device}: {NEEDS_CUDA}")
            call["backend"] = self._backend or interop.NAME
            call.update({name: None for name in ("backend_options", "pg_options", "device_id") if name in call})
            made, store = original(**call)
            if isinstance(made, dist.ProcessGroup):
                if self._backend is None and isinstance(made, interop.EchelonProcessGroup):
                    self._world.rendezvous.add(made.group.context)
                name = _name_for_cpu(asked)
                registry = group_registry()
                registry.pg_map[made] = (name, store)
                registry.pg_backend_config[made] = f"cpu:{name}"
                if not ranks:
                    self._asked[group.rank] = asked
                elif asked == _name_for_cpu(of_all := self._asked.get(group.rank, asked)):
                    asked = of_all  # torch gives a later group the name of the first one
                self._note_group(made, asked, device)
            return made, store

        return new_group

    def _check_division(self, ranks: tuple[int, ...], name: str) -> None:
        """Compares a call of `new_group` with that of the other ranks.

        Raises:
            CollectiveMismatch: another rank has called it for other ranks in its place.
        """
        # With use_local_synchronization only members call. The name is then no number, but a hash of the ranks.
        if not name.isdigit():
            return
        rank, place = self._here().rank, calling_place()
        number = self._num_divisions[rank]
        self._num_divisions[rank] += 1
        if number == len(self._divisions):
            self._divisions.append(_Division(ranks, rank, place))
        first = self._divisions[number]
        if first.ranks != ranks:
            raise CollectiveMismatch(
                f"new_group({list(ranks)}) on rank {rank} at {source_of(place)}, but new_group({list(first.ranks)}) on "
                f"rank {first.rank} at {source_of(first.place)}, call {number + 1} of each: every rank must call "
                "new_group for the same ranks in the same order, also for groups that it is not in"
            )

    def missing_divisions(self) -> str:
        """Returns which ranks have called `new_group` less often than others. Empty if there are none."""
        number = min((self._num_divisions[rank] for rank in self._groups), default=0)
        if number == len(self._divisions):
            return ""
        first = self._divisions[number]
        late = [rank for rank in sorted(self._groups) if self._num_divisions[rank] == number]
        return (
            f"{listed(late)} did not call new_group({list(first.ranks)}), which rank {first.rank} called at "
            f"{source_of(first.place)}: every rank must call it, also if it is not in the group"
        )

    def mistake(self) -> str:
        """Returns a mistake that may be the cause of a deadlock. Empty if none is known."""
        return self.missing_divisions() or self._stores.unserved()

    def missed(self) -> CollectiveMismatch | DeadlockError | None:
        """Returns the error for a call that no rank waited for: a `new_group` left out, a store that nobody serves."""
        if self._world.faults.faults:
            return None
        if missing := self.missing_divisions():
            return CollectiveMismatch(missing)
        return DeadlockError(unserved) if (unserved := self._stores.unserved()) else None

    def _here(self) -> ProcessGroup:
        """Returns the group of all ranks, on the calling rank.

        Raises:
            UnsupportedOp: the calling thread is no rank.
        """
        return self._groups[self._world.scheduler.current().rank]

    # Waits of futures

    def _wait_for(self, future: torch.futures.Future[Any]) -> None:
        """Blocks the calling rank until a future is done. Returns at once in threads that are no rank's."""
        if self._world.scheduler.is_running_here():
            backend = self._backend_here()
            work = backend.lanes.wait_of("wait for a future")
            future.add_done_callback(lambda _: work.complete())
            work.wait(FOREVER)

    def _look_at(self, future: torch.futures.Future[Any]) -> None:
        """Gives the other ranks a turn, so that a loop that polls a future ends."""
        if self._world.scheduler.is_running_here():
            self._stores.let_others_run("a loop over Future.done()", id(future))

    def _lanes_here(self) -> VirtualLanes | None:
        return self._backend_here().lanes if self._world.scheduler.is_running_here() else None


def _backend_of_rank(world: World, groups: Mapping[int, ProcessGroup]) -> VirtualBackend:
    """Returns the backend of the calling rank."""
    backend = groups[world.scheduler.current().rank].backend
    assert isinstance(backend, VirtualBackend)
    return backend


def _check_backend(asked: str) -> None:
    """Raises InvalidArgument for a backend that torch does not know, such as "glooo" or "cpu:glooo"."""
    known = {*dist.Backend.backend_list, "echelon"} - {"undefined"}
    for part in asked.split(","):
        name = part.rpartition(":")[2].strip()
        if name not in known | {"undefined"}:
            raise InvalidArgument(f"backend {name!r} of torch.distributed: {choices(name, sorted(known))}")


def _check_world(group: ProcessGroup, rank: int, world_size: int) -> None:
    if (rank, world_size) != (group.rank, group.world_size):
        raise LaunchError(
            f"init_process_group for rank {rank} of {world_size} on simulated rank {group.rank} of {group.world_size}: "
            "leave rank and world_size out, or take them from RANK and WORLD_SIZE"
        )


def _name_for_cpu(backend: str) -> str:
    """Returns the name that `dist.get_backend` gives for a user's backend, such as "gloo" for "cpu:gloo,cuda:nccl"."""
    if ":" in backend:
        names = dict(pair.split(":") for pair in backend.split(","))
        return names.get("cpu") or next(iter(names.values()))
    return "gloo" if backend == "undefined" else backend


def _one_profiler(rank_here: Callable[[], int | None]) -> list[Replacement]:
    """Raises UnsupportedOp on a rank that starts torch's profiler while another rank uses it.

    torch counts on a single session, and the second end of one ends the process.

    Args:
        rank_here: Returns the rank of the calling thread. None in threads that are no rank's.
    """
    owner: int | None = None

    def begin() -> None:
        nonlocal owner
        rank = rank_here()
        if owner is not None and rank is not None and owner != rank:
            raise UnsupportedOp(
                f"torch's profiler on rank {rank}, while rank {owner} uses it: simulated ranks share one process, "
                "which has one session of it: profile a single rank, as in `if rank == 0:`"
            )
        owner = rank

    def end() -> None:
        nonlocal owner
        if owner == rank_here():
            owner = None

    return profilers_that_ask(begin, end)


def _explained(original: Callable[..., Any]) -> Callable[..., Any]:
    """Lets clipping that fails say in one line which meshes its gradients have. torch's own error is several pages."""

    @functools.wraps(original)
    def clip(tensors: Tensor | Iterable[Tensor], *args: Any, **options: Any) -> Any:
        tensors = [tensors] if isinstance(tensors, Tensor) else list(tensors)
        try:
            return original(tensors, *args, **options)
        except Exception:
            kinds = Counter(getattr(each, "device_mesh", None) for each in tensors)
            if len(kinds) < 2:
                raise
            groups = ", ".join(f"{number} {_of_mesh(mesh)}" for mesh, number in kinds.items())
            raise RuntimeError(
                f"clipping mixes gradients of several device meshes, or of one and none: {groups}: torch refuses that; "
                "call clip_grad_norm_ once for the parameters of each"
            ) from None

    return clip


def _of_mesh(mesh: Any) -> str:
    if mesh is None:
        return "that are plain tensors"
    names = mesh.mesh_dim_names or ("",) * mesh.ndim
    sizes = ", ".join(f"{name}={size}" if name else str(size) for name, size in zip(names, mesh.shape, strict=True))
    return f"on the mesh ({sizes})"
