"""Everything that Echelon uses of torch without torch promising to keep it, with the reason.

Each private name stands in `_torch_versions.PRIVATE_NAMES` too, by which versions of torch that lack one are refused.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist

from echelon._torch_versions import require

require()  # before the names below are imported: a version without one of them is refused with one line

from torch._C import _get_dispatch_mode, _len_torch_dispatch_stack, _TorchDispatchModeKey
from torch._C._distributed_c10d import _DistributedBackendOptions as DistributedBackendOptions
from torch._C._distributed_c10d import _register_work as register_work
from torch._C._distributed_c10d import _resolve_process_group
from torch._C._functorch import peek_interpreter_stack
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.distributed import PrefixStore  # type: ignore[attr-defined] # public, by its docs
from torch.distributed.distributed_c10d import GroupName
from torch.export import ExportedProgram
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_map, tree_unflatten

if TYPE_CHECKING:
    from torch.autograd.graph import GradientEdge
    from torch.distributed import Store  # type: ignore[attr-defined] # public, by its docs

T = TypeVar("T")

__all__ = [
    "DispatchMode",
    "DistributedBackendOptions",
    "TreeSpec",
    "all_gather_into",
    "at_end_of_backward",
    "backend_config",
    "draws_random_numbers",
    "fail_when_unwrapped",
    "fake_tensors",
    "guards_of",
    "hooks_after_gradient",
    "is_dual",
    "is_faking",
    "is_in_backward",
    "make_process_group",
    "operators_of",
    "register_work",
    "resolve_process_group",
    "run_backward",
    "storage_users",
    "tree_flatten",
    "tree_leaves",
    "tree_map",
    "tree_unflatten",
    "version_of",
    "wraps_new_tensors",
    "writes_in_place",
]
# DistributedBackendOptions: what torch.distributed hands to the function that makes a group of a registered backend.
# resolve_process_group, register_work: functional collectives are given the name of a group, and have their Work found
# again by the tensor that it writes.
# tree_...: what torch.export takes inputs and outputs apart with. Libraries register their own containers there.


class DispatchMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """What sees every operation of a thread, in backward too, if a subclass has `__torch_dispatch__`.

    Documented, but in a module whose name says that it is private. As it is, its first operation imports torch.compile,
    so that nothing of the mode is compiled; that takes more than a second, in the first step of whoever uses a mode.
    """

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False


def is_faking() -> bool:
    """Says whether FakeTensorMode is active in this thread: every new tensor is a fake one then.

    Nothing public tells. The depth of the stack of modes is asked for first, since it takes a third of the time.
    """
    return _len_torch_dispatch_stack() > 0 and _get_dispatch_mode(_TorchDispatchModeKey.FAKE) is not None


def wraps_new_tensors() -> bool:
    """Whether new tensors of this thread can be without memory: FakeTensorMode or a transform of torch.func is active.

    Inside of `torch.func.grad`, `jvp` and `functionalize` even `torch.empty` returns a wrapper.
    """
    return peek_interpreter_stack() is not None or is_faking()


def is_dual(tensor: torch.Tensor) -> bool:
    """Whether a tensor has a tangent of forward-mode AD. The public `unpack_dual` takes 10 times as long to say no."""
    return forward_ad._current_level >= 0 and _tangent(tensor) is not None


def _tangent(tensor: torch.Tensor) -> torch.Tensor | None:
    tangent: torch.Tensor | None = forward_ad.unpack_dual(tensor).tangent  # type: ignore[no-untyped-call]
    return tangent


def at_end_of_backward(finish: Callable[[], None], abandon: Callable[[], None]) -> None:
    """Calls `finish` when the backward pass that is running has computed everything, or `abandon` if it fails.

    To be called from a hook that runs in a backward pass, or from a `finish`, which then is followed by the others that
    were asked for before, and by this one. What `finish` raises comes out of `backward()`.

    torch has no public way: hooks see one tensor each and cannot know which is the last, because a parameter that was
    not used has none; `register_multi_grad_hook` runs before the last gradient is accumulated, and for
    `torch.autograd.grad` as well. The engine owns the callback; that it is dropped uncalled tells of a failure.
    """
    engine = torch.autograd.Variable._execution_engine
    engine.queue_callback(_End(finish, abandon))


class _End:
    def __init__(self, finish: Callable[[], None], abandon: Callable[[], None]) -> None:
        self._finish = finish
        self._abandon = abandon
        self._called = False

    def __call__(self) -> None:
        self._called = True
        self._finish()

    def __del__(self) -> None:
        if not self._called:
            self._abandon()


def run_backward(
    roots: Sequence[tuple[GradientEdge, torch.Tensor]],
    *,
    inputs: Sequence[GradientEdge] = (),
    into_leaves: bool = False,
    keep_graph: bool = False,
) -> list[torch.Tensor | None]:
    """Runs a graph from `roots`, each with its gradient.

    What `torch.autograd.grad` and `.backward` do after they have looked at their arguments, which takes them longer
    than the backward of a small layer.

    Args:
        roots: where to start.
        inputs: where to stop; none: at all leaves, then `into_leaves` must be set.
        into_leaves: add what arrives at leaves into their .grad, and return nothing.
        keep_graph: the graph, or a part of it, will be run again.
    """
    edges = tuple(edge for edge, _ in roots)
    gradients = tuple(gradient for _, gradient in roots)
    found = torch.autograd.Variable._execution_engine.run_backward(
        edges, gradients, keep_graph, False, tuple(inputs), allow_unreachable=True, accumulate_grad=into_leaves
    )
    return [] if into_leaves else list(found)


def is_in_backward() -> bool:
    """Returns whether this thread is computing a backward. torch tells only its own reducers."""
    return torch._C._current_graph_task_id() != -1


def storage_users(tensor: torch.Tensor) -> int:
    """Returns how many tensors, and other owners, share the memory of a tensor, this one included.

    torch has no public way: views of views, and what autograd saved, own the memory without the tensor that it was made
    for.
    """
    storage = tensor.untyped_storage()  # counts itself
    return int(torch._C._storage_Use_Count(storage._cdata)) - 1


def hooks_after_gradient(parameter: torch.nn.Parameter) -> list[Callable[[torch.Tensor], None]]:
    """Returns what `register_post_accumulate_grad_hook` was given; torch has no public way to ask for it."""
    hooks: dict[int, Callable[[torch.Tensor], None]] | None = parameter._post_accumulate_grad_hooks
    return list((hooks or {}).values())


def version_of(tensor: torch.Tensor) -> int:
    """Returns how often a tensor, or one that shares its memory, was changed in place.

    torch compares it for what it saves for backward by itself, but not for what goes through `saved_tensors_hooks`.
    """
    return tensor._version


def fake_tensors() -> AbstractContextManager[object]:
    """Returns a context in which new tensors have a shape, a dtype and a device, and no data.

    The meta device is no substitute: its tensors do not mix with those of the device that a model will run on.
    """
    return FakeTensorMode()


def guards_of(exported: ExportedProgram) -> torch.nn.Module | None:
    """Returns what, called with the inputs (flat), raises AssertionError unless they take the path that was exported.

    torch puts it into the module that an exported program becomes, under a private name; alone it cannot be had.
    """
    return dict(exported.module().named_children()).get("_guards_fn")


def writes_in_place(operation: object) -> bool:
    """Whether one of torch's operators changes its arguments. Only its schema says so, and that has no public name."""
    return isinstance(operation, torch._ops.OpOverload) and operation._schema.is_mutable


def draws_random_numbers(operation: object) -> bool:
    """Whether one of torch's operators draws from the generator of its device."""
    return isinstance(operation, torch._ops.OpOverload) and torch.Tag.nondeterministic_seeded in operation.tags


def all_gather_into(group: dist.ProcessGroup, out: torch.Tensor, tensor: torch.Tensor) -> dist.Work:
    """Has a group gather the tensors of all ranks into `out`, and returns what to wait for.

    By the name that it has in every torch that Echelon supports; the public one came with 2.13.
    """
    return group._allgather_base(out, tensor)


def resolve_process_group(group: str | dist.ProcessGroup) -> dist.ProcessGroup:
    """Returns the group of a name. torch 2.15 may give a functional collective the group itself."""
    return _resolve_process_group(GroupName(group)) if isinstance(group, str) else group


def backend_config(group: dist.ProcessGroup) -> str:
    """Returns the backends of a group by device type, such as "cpu:gloo,cuda:nccl". Empty if torch has none yet.

    The public `get_backend_config` raises TypeError for a group that torch is still making.
    """
    configs: Mapping[dist.ProcessGroup, str] = dist.distributed_c10d._world.pg_backend_config
    return str(configs.get(group, ""))


def operators_of(namespace: str) -> tuple[str, ...]:
    """Returns the names of all operators of a namespace, sorted; `dir(torch.ops...)` has those that were used."""
    known = [each.partition("::") for each in torch._C._dispatch_get_all_op_names()]
    return tuple(sorted(name for space, _, name in known if space == namespace))


def fail_when_unwrapped(future: torch.futures.Future[T], error: Exception) -> None:
    """Has a future that is not done yet raise an error to whoever asks for its value in Python.

    `set_exception` makes the exception itself the value as well, which torch's C++ then takes for one.
    """

    def fail(_: object) -> None:
        raise error

    future._set_unwrap_func(fail)


def make_process_group(
    engines: Mapping[str, str], store: Store, rank: int, size: int, timeout: timedelta, host: str
) -> dist.ProcessGroup:
    """Makes a process group for some ranks of a world, by these alone.

    torch's public `new_group` must be called by all ranks of the world, members or not. With its
    `use_local_synchronization` only members need to, but then its name is made of the number of groups that a process
    has, and ranks with different numbers of groups never meet.

    Args:
        engines: for each device type, "gloo", "nccl", "mpi" or "ucc".
        store: reached by all members, and used by nobody else.
        rank, size: among the members, and how many they are.
        timeout: for the members to connect.
        host: the address at which Gloo is to listen; empty: the one that torch chooses.
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
