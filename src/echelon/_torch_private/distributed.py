"""Private interfaces of torch.distributed: process groups, futures, DTensor and FSDP2."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from functools import cache, partial
from importlib import import_module
from inspect import CO_OPTIMIZED
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import _DistributedBackendOptions as DistributedBackendOptions
from torch._C._distributed_c10d import _register_work as register_work
from torch._C._distributed_c10d import _resolve_process_group, _unregister_all_process_groups
from torch.distributed import PrefixStore  # type: ignore[attr-defined] # public, by its docs
from torch.distributed.distributed_c10d import GroupName
from torch.nn.parallel import DistributedDataParallel

from echelon._torch_versions import FSDP2_NAMES, missing
from echelon.replacements import Replacement

if TYPE_CHECKING:
    from torch.distributed import Store  # type: ignore[attr-defined] # public, by its docs

T = TypeVar("T")

# Names of torch that are only re-exported.
__all__ = ["DistributedBackendOptions", "register_work"]
# DistributedBackendOptions: argument of the function that makes a group of a registered backend.
# register_work: functional collectives get the name of a group, and torch finds their Work by the tensor that it
# writes.


def objects_packed_by(wrap: Callable[[Callable[..., Any]], Callable[..., Any]]) -> list[Replacement]:
    """Lets collectives of Python objects turn them into tensors, and back, by wrappers of torch's own functions."""
    module = dist.distributed_c10d
    return [Replacement(module, "_object_to_tensor", wrap), Replacement(module, "_tensor_to_object", wrap)]


def batches_noted(note: Callable[[int], None]) -> list[Replacement]:
    """Lets `batch_isend_irecv` first call `note` with the number of its messages.

    A replacement of the public function would not be found by programs that have imported it by its name.
    """

    def noting(check: Callable[[Any], None]) -> Callable[[Any], None]:
        def noted(operations: Any) -> None:
            check(operations)
            note(len(operations))

        return noted

    return [Replacement(dist.distributed_c10d, "_check_p2p_op_list", noting)]


def chunks_noted(note: Callable[[torch.nn.Module, int], None]) -> list[Replacement]:
    """Lets stages of torch's pipelines call `note` with their module and the microbatches of a step.

    They do so before each forward. torch tells a schedule's number of microbatches nowhere else.
    """

    def noting(forward: Callable[..., Any]) -> Callable[..., Any]:
        def noted(self: Any, *args: Any, **kwargs: Any) -> Any:
            if self.chunks is not None:
                note(self.submod, self.chunks)
            return forward(self, *args, **kwargs)

        return noted

    stage = import_module("torch.distributed.pipelining.stage")._PipelineStageBase
    return [Replacement(stage, "forward_one_chunk", noting)]


def ddp_checks_by(wrap: Callable[[Callable[..., Any]], Callable[..., Any]]) -> list[Replacement]:
    """Lets DDP compare the shapes of parameters between ranks by a wrapper of its own function in C++."""
    return [Replacement(dist, "_verify_params_across_processes", wrap)]


def static_graph_by(wrap: Callable[[Callable[..., Any]], Callable[..., Any]]) -> list[Replacement]:
    """Lets DDP take its graph as static by a wrapper of its own method, which `static_graph=True` calls, too."""
    return [Replacement(DistributedDataParallel, "_set_static_graph", wrap)]


def all_gather_into(group: dist.ProcessGroup, out: torch.Tensor, tensor: torch.Tensor) -> dist.Work:
    """Starts an all-gather of `tensor` into `out` and returns its Work."""
    # The name in every supported torch; the public one came with 2.13.
    return group._allgather_base(out, tensor)


def resolve_process_group(group: str | dist.ProcessGroup) -> dist.ProcessGroup:
    """Returns the group of a name. torch 2.15 may pass a functional collective the group itself."""
    return _resolve_process_group(GroupName(group)) if isinstance(group, str) else group


def backend_config(group: dist.ProcessGroup) -> str:
    """Returns the backends of a group by device type, such as "cpu:gloo,cuda:nccl". Empty if torch has none yet.

    The public `get_backend_config` raises TypeError for a group that torch is still making.
    """
    configs: Mapping[dist.ProcessGroup, str] = dist.distributed_c10d._world.pg_backend_config
    return str(configs.get(group, ""))


class GroupRegistry(dist.distributed_c10d._World):
    """Registry of process groups that is independent of the process's own, which keeps most of its state in globals.

    torch's functions find the registry as `distributed_c10d._world`, for which there is no public name.
    """

    def __init__(self) -> None:
        super().__init__()
        self._maps: dict[str, Any] = {}
        self._count = 0

    # One definition for each of torch's properties, since their setters differ.
    pg_map = property(lambda self: self._maps.setdefault("pg_map", {}))
    pg_names = property(lambda self: self._maps.setdefault("pg_names", {}))
    pg_group_ranks = property(lambda self: self._maps.setdefault("pg_group_ranks", {}))
    pg_backend_config = property(lambda self: self._maps.setdefault("pg_backend_config", {}))
    tags_to_pg = property(lambda self: self._maps.setdefault("tags_to_pg", {}))
    pg_to_tag = property(lambda self: self._maps.setdefault("pg_to_tag", {}))

    @property
    def group_count(self) -> int:
        """Number of groups made so far."""
        return self._count

    @group_count.setter
    def group_count(self, value: int) -> None:
        self._count = value


def group_registry() -> Any:
    """Returns the registry of process groups that torch's functions use now. Their global is `GROUP_GLOBALS[0]`."""
    return dist.distributed_c10d._world


GROUP_GLOBALS = ("_world", "_backend", "_default_pg_init_method")
"""Names of `distributed_c10d`'s globals about the process groups. Some versions of torch lack the later two."""


def groups_made_by(
    wrap: Callable[[Callable[..., Any]], Callable[..., Any]], barrier: Callable[..., None]
) -> list[Replacement]:
    """Lets torch make every process group by a wrapper of its own function.

    `init_process_group`, `new_group` and DeviceMesh all call that function, which has no public name. `barrier`
    replaces the barrier over the store that some settings add.
    """
    module = dist.distributed_c10d
    return [
        Replacement(module, "_new_process_group_helper", wrap),
        Replacement(module, "_store_based_barrier", lambda _: barrier),
    ]


def is_done(future: torch.futures.Future[Any]) -> bool:
    """Whether a future is done. Never lets other simulated ranks go on."""
    return _is_done(future)


_NativeFuture: Any = torch._C.Future
_is_done: Callable[[Any], bool] = _NativeFuture.done


def futures_that_wait_by(
    wait_first: Callable[[torch.futures.Future[Any]], None], look_first: Callable[[torch.futures.Future[Any]], None]
) -> list[Replacement]:
    """Lets Python code that asks an unfinished future call `wait_first` or `look_first` before.

    C++ makes futures of a private class, such as those of DDP's buckets, on which a wait blocks in C++.

    Args:
        wait_first: called with the future by a wait for it.
        look_first: likewise, by `done`.
    """

    def asking_first(
        ask: Callable[[torch.futures.Future[Any]], None], original: Callable[..., Any]
    ) -> Callable[[torch.futures.Future[Any]], Any]:
        def call(self: torch.futures.Future[Any]) -> Any:
            if not _is_done(self):
                ask(self)
            return original(self)

        return call

    return [
        Replacement(_NativeFuture, "wait", partial(asking_first, wait_first)),
        Replacement(_NativeFuture, "done", partial(asking_first, look_first)),
    ]


@contextmanager
def groups_of_each_thread() -> Iterator[None]:
    """Inside, functional collectives find a group by its name only if the calling thread has made it.

    torch has no public way: its C++ keeps one registry for the process, or one for each thread.
    """
    isolate = torch._C._distributed_c10d._set_thread_isolation_mode  # type: ignore[attr-defined] # missing in its stub
    isolate(True)
    try:
        yield
    finally:
        isolate(False)


def defaults_without_group() -> list[Replacement]:
    """Lets a module of torch that is imported get None for `group.WORLD`, which means the default group.

    torch.distributed.nn evaluates `def all_reduce(tensor, group=group.WORLD)` at its import. Simulated ranks share the
    module, so all of them would get the group of the rank that imports it first.
    """

    def without_group(original: property) -> property:
        def world(cls: object) -> Any:
            # Not its own frame: that would refer to itself, and keep all variables of all callers until the next run of
            # the garbage collector. torch asks for the default group in each pass of a DataLoader.
            frame = sys._getframe(1)
            is_function = frame.f_code.co_flags & CO_OPTIMIZED  # bodies of modules and classes are not optimised
            if not is_function and frame.f_globals.get("__name__", "").startswith("torch."):
                return None
            assert original.fget is not None
            return original.fget(cls)

        return property(world, original.fset)

    # The class of `group`, since `WORLD` is a property of a class.
    return [Replacement(dist.distributed_c10d._WorldMeta, "WORLD", without_group)]


def forget_groups_of_thread() -> None:
    """Empties the registry of the calling thread, inside of `groups_of_each_thread`."""
    _unregister_all_process_groups()


class Shardings:
    """Sharding decisions of DTensor, which torch makes for each operator, thread and mesh.

    All of it is private, and looked up by its name: without it, simulated ranks only take longer. A check at the start
    would import DTensor.
    """

    def __init__(self, propagator: Any) -> None:
        module = import_module("torch.distributed.tensor")
        of_specs, of_operators, of_placements = (
            import_module(f"torch.distributed.tensor.{name}")
            for name in ("_dtensor_spec", "_op_schema", "placement_types")
        )
        self._propagator = propagator
        self._cache = propagator.propagate_op_sharding
        self.spec = of_specs.DTensorSpec
        self.schema, self.output = of_operators.OpSchema, of_operators.OutputSharding
        strided = getattr(of_placements, "_StridedShard", module.Shard)
        self.placements = frozenset({module.Partial, module.Replicate, module.Shard, strided})
        """Placements without state of their own."""

    def decide_by(self, wrap: Callable[[Callable[[Any], Any]], Callable[[Any], Any]]) -> None:
        """Makes DTensor decide by a wrapper of its own function, until `restore`."""
        decide = wrap(self._propagator.propagate_op_sharding_non_cached)
        self._propagator.propagate_op_sharding_non_cached = decide
        self._propagator.propagate_op_sharding = type(self._cache)(decide)  # the cache of each thread

    def restore(self) -> None:
        """Makes DTensor decide by its own functions."""
        del self._propagator.propagate_op_sharding_non_cached  # of the instance, which hid the method
        self._propagator.propagate_op_sharding = self._cache

    def forget_thread(self) -> None:
        """Empties the caches of the calling thread: torch's own and that of its C++."""
        cache = getattr(self._propagator.propagate_op_sharding, "cache", None)
        for owner, name in ((cache, "cache_clear"), (torch._C, "_clear_DTensor_sharding_propagator_cache")):
            getattr(owner, name, lambda: None)()

    def comparison_key(self, schema: Any) -> Any:
        """Returns the arguments of an operator on which its decision depends. None if this torch has no such key."""
        return getattr(schema, "_comparison_key", None)

    def without_mesh(self, spec: Any) -> tuple[Any, ...]:
        """Returns the attributes of a spec, except its mesh."""
        return tuple(value for name, value in vars(spec).items() if name not in ("mesh", "_hash"))

    def with_mesh(self, spec: Any, mesh: Any) -> Any:
        """Returns a copy of a spec with another mesh."""
        # By its attributes: its own `__init__` checks them all again.
        copy = object.__new__(type(spec))
        vars(copy).update(vars(spec), mesh=mesh, _hash=None)
        return copy


def shardings() -> Shardings | None:
    """Returns DTensor's decisions. None if it is not imported, or this torch decides in another way."""
    module = sys.modules.get("torch.distributed.tensor")
    dispatcher = getattr(getattr(module, "DTensor", None), "_op_dispatcher", None)
    propagator = getattr(dispatcher, "sharding_propagator", None)
    known = hasattr(propagator, "propagate_op_sharding") and hasattr(propagator, "propagate_op_sharding_non_cached")
    return Shardings(propagator) if known else None


def module_of_parameters(group: object) -> str:
    """Returns the module whose parameters FSDP2 gathers and reduces as one group, such as "module layers.2".

    torch itself tells its name only to the profiler. The root has none, and no module has one before the root has run:
    then the class is returned. Empty for other objects.
    """
    name = _label_of_parameters(group).partition("(")[2].partition(")")[0] if _has_labels() else ""
    if name:
        return f"module {name}"
    # fully_shard makes a class of the same name with this prefix.
    classes = [type(module).__name__.removeprefix("FSDP") for module in modules_of_parameters(group)]
    return classes[0] if classes else ""


def modules_of_parameters(group: object) -> tuple[torch.nn.Module, ...]:
    """Returns the modules whose parameters FSDP2 gathers and reduces as one group. Empty for other objects."""
    return tuple(getattr(group, "modules", ())) if type(group).__name__ == "FSDPParamGroup" else ()


@cache
def _has_labels() -> bool:
    return not missing(FSDP2_NAMES)


def _label_of_parameters(group: object) -> str:
    from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup  # late: it takes half a second

    try:
        return group._with_fqn("") if isinstance(group, FSDPParamGroup) else ""
    except AttributeError:  # it is being made
        return ""


def fail_when_unwrapped(future: torch.futures.Future[T], error: Exception) -> None:
    """Makes an unfinished future raise `error` when Python asks for its value.

    `set_exception` would store the exception as the value, which torch's C++ takes for a result.
    """

    def fail(_: object) -> None:
        raise error

    future._set_unwrap_func(fail)


def make_process_group(
    engines: Mapping[str, str], store: Store, rank: int, size: int, timeout: timedelta, host: str
) -> dist.ProcessGroup:
    """Makes a torch process group. Called by its members only; blocks until they connect.

    torch's public `new_group` must be called by all ranks of the world, members or not. With its
    `use_local_synchronization` only members call it, but the group's name then contains the number of groups of the
    process: ranks with different numbers of groups never meet.

    Args:
        engines: c10d backend for each device type: "gloo", "nccl", "mpi" or "ucc".
        store: reached by all members, used for nothing else.
        rank, size: this rank among the members, and their number.
        timeout: time for the members to connect.
        host: address at which Gloo listens; empty: torch's choice.
    """
    group = dist.ProcessGroup(store, rank, size)
    for number, (device, engine) in enumerate(engines.items()):
        kind = getattr(dist.ProcessGroup.BackendType, engine.upper())
        if number == 0:
            group._set_default_backend(kind)
        part = PrefixStore(f"{device}/", store)
        group._register_backend(torch.device(device), kind, _engine(engine, part, rank, size, timeout, host))
    return group


def _engine(name: str, store: Store, rank: int, size: int, timeout: timedelta, host: str) -> Any:
    c10d: Any = dist.distributed_c10d
    match name:
        case "gloo":
            options = c10d.ProcessGroupGloo._Options()
            make = c10d.ProcessGroupGloo
            options._devices = [make.create_device(hostname=host) if host else make.create_default_device()]
            options._timeout = timeout
            return make(store, rank, size, options)
        case "nccl":
            options = c10d.ProcessGroupNCCL.Options()
            options._timeout = timeout
            return c10d.ProcessGroupNCCL(store, rank, size, options)
        case "ucc":
            return c10d.ProcessGroupUCC(store, rank, size, timeout=timeout)
    return c10d.ProcessGroupMPI.create([])
