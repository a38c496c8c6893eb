"""Private interfaces of torch that Echelon uses, each with the reason.

Each private name is also in `_torch_versions.PRIVATE_NAMES`: a version of torch that lacks one is refused.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from datetime import timedelta
from functools import cache, partial
from importlib import import_module
from operator import attrgetter
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist

from echelon._torch_versions import FSDP2_NAMES, missing, require

require()  # before the names below are imported: a version without one of them is refused with one line

from torch._C import _get_dispatch_mode, _len_torch_dispatch_stack, _TorchDispatchModeKey
from torch._C._distributed_c10d import _DistributedBackendOptions as DistributedBackendOptions
from torch._C._distributed_c10d import _register_work as register_work
from torch._C._distributed_c10d import _resolve_process_group, _unregister_all_process_groups
from torch._C._dynamo.eval_frame import _FrameAction, _FrameExecStrategy, set_code_exec_strategy
from torch._C._functorch import peek_interpreter_stack
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.autograd import forward_ad
from torch.distributed import PrefixStore  # type: ignore[attr-defined] # public, by its docs
from torch.distributed.distributed_c10d import GroupName
from torch.export import ExportedProgram
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_map, tree_unflatten

if TYPE_CHECKING:
    from torch.autograd.graph import GradientEdge
    from torch.distributed import Store  # type: ignore[attr-defined] # public, by its docs

F = TypeVar("F", bound=Callable[..., Any])
T = TypeVar("T")

# Only names of torch that are passed on.
__all__ = [
    "DistributedBackendOptions",
    "FakeTensor",
    "TreeSpec",
    "register_work",
    "tree_flatten",
    "tree_leaves",
    "tree_map",
    "tree_unflatten",
]
# DistributedBackendOptions: argument of the function that makes a group of a registered backend.
# FakeTensor: tensor with a shape, a dtype and a device, but no data.
# resolve_process_group, register_work: functional collectives get the name of a group, and torch finds their Work by
# the tensor that it writes.
# tree_...: torch.export flattens inputs and outputs with them. Libraries register their own containers there.

COMPILED, RECOMPUTED = "_orig_mod", "_checkpoint_wrapped_module"
"""Attributes in which wrappers hold their module, of torch.compile and of activation checkpoints. In the names of
parameters and buffers they are left out: a checkpoint has the names of the plain model."""

# Without a frame of Python each, because every small operation asks: the depth of the stack of dispatch modes; the
# innermost transform of torch.func, or None; and the level of forward-mode AD, below 0 outside of it.
dispatch_depth: Callable[[], int] = _len_torch_dispatch_stack
transform_stack: Callable[[], object] = peek_interpreter_stack
forward_ad_level: Callable[[], int] = partial(attrgetter("_current_level"), forward_ad)


class DispatchMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Base of modes whose `__torch_dispatch__` sees every operation of a thread, in backward too.

    Documented, but in a private module. torch's own class imports torch.compile at the first operation, to keep the
    mode out of compiled code; that takes more than a second in the first step.
    """

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False


def is_faking() -> bool:
    """Whether FakeTensorMode is active in this thread, so that every new tensor is fake. torch has no public way."""
    # The depth of the stack first: it takes a third of the time.
    return _len_torch_dispatch_stack() > 0 and _get_dispatch_mode(_TorchDispatchModeKey.FAKE) is not None


def wraps_new_tensors() -> bool:
    """Whether new tensors of this thread can be without memory, in FakeTensorMode or a transform of torch.func.

    Inside of `torch.func.grad`, `jvp` and `functionalize` even `torch.empty` returns a wrapper.
    """
    return peek_interpreter_stack() is not None or is_faking()


def is_dual(tensor: torch.Tensor) -> bool:
    """Whether a tensor has a tangent of forward-mode AD."""
    # Fast path: without an active level there are no tangents. The public `unpack_dual` takes 10 times as long.
    return forward_ad._current_level >= 0 and forward_ad.unpack_dual(tensor).tangent is not None  # type: ignore[no-untyped-call]


def at_end_of_backward(finish: Callable[[], None], abandon: Callable[[], None]) -> None:
    """Calls `finish` at the end of the current backward pass, or `abandon` if the pass fails.

    Call it from a hook of a backward pass, or from a `finish`: the new callback then runs after all earlier ones.
    Exceptions of `finish` propagate out of `backward()`.

    torch has no public way. A hook sees one tensor and cannot know which is the last, since an unused parameter has
    none. `register_multi_grad_hook` runs before the last gradient is accumulated, and for `torch.autograd.grad` too.
    Autograd's engine owns the callback; it drops the callback uncalled if the pass fails.
    """
    engine = torch.autograd.Variable._execution_engine
    engine.queue_callback(_End(finish, abandon))


class _End:
    _called = True  # until `__init__` has ended: an interrupt in it leaves nothing to abandon

    def __init__(self, finish: Callable[[], None], abandon: Callable[[], None]) -> None:
        self._finish = finish
        self._abandon = abandon
        self._called = False

    def __call__(self) -> None:
        self._called = True
        self._finish()

    def __del__(self) -> None:
        if not self._called:  # dropped by the engine: the backward pass has failed
            self._abandon()


def run_backward(
    roots: Sequence[tuple[GradientEdge, torch.Tensor]],
    *,
    inputs: Sequence[GradientEdge] = (),
    into_leaves: bool = False,
    keep_graph: bool = False,
) -> list[torch.Tensor | None]:
    """Runs backward from `roots` and returns the gradients of `inputs`, None for unreachable ones.

    Skips the argument checks of `torch.autograd.grad` and `.backward`, which take longer than the backward of a small
    layer.

    Args:
        roots: edges to start from, each with its gradient.
        inputs: edges to stop at; empty: at all leaves, which needs `into_leaves`.
        into_leaves: accumulate the gradients of leaves into their .grad, and return an empty list.
        keep_graph: keep the graph for another run.
    """
    edges, gradients = zip(*roots, strict=True)
    found = torch.autograd.Variable._execution_engine.run_backward(
        edges, gradients, keep_graph, False, tuple(inputs), allow_unreachable=True, accumulate_grad=into_leaves
    )
    return [] if into_leaves else list(found)


def never_compiled(function: F) -> F:
    """Decorator of a function that torch.compile does not compile, nor any function that it calls.

    `torch.compiler.disable` does the same in each call, and imports torch's compiler, which takes a second.
    """
    strategy = _FrameExecStrategy(_FrameAction.SKIP, _FrameAction.SKIP)
    set_code_exec_strategy(function.__code__, strategy)
    return function


def hooks_of_all_modules() -> dict[str, Any]:
    """Returns torch's hooks for every module, such as of `register_module_forward_hook`, by their private names."""
    return {name: value for name, value in vars(torch.nn.modules.module).items() if name.startswith("_global_")}


def is_in_backward() -> bool:
    """Whether this thread is computing a backward. torch has no public way."""
    return torch._C._current_graph_task_id() != -1


def is_at_end_of_backward() -> bool:
    """Whether this thread runs a callback at the end of a backward, after its last node. torch has no public way."""
    return is_in_backward() and torch._C._current_autograd_node() is None


def storage_users(tensor: torch.Tensor) -> int:
    """Returns the number of owners of a tensor's memory: tensors, this one included, and others.

    torch has no public way: views of views and tensors saved by autograd own the memory without the original tensor.
    """
    storage = tensor.untyped_storage()  # counts itself
    return int(torch._C._storage_Use_Count(storage._cdata)) - 1


def hooks_after_gradient(parameter: torch.nn.Parameter) -> list[Callable[[torch.Tensor], None]]:
    """Returns the hooks registered by `register_post_accumulate_grad_hook`. torch has no public way."""
    hooks: dict[int, Callable[[torch.Tensor], None]] | None = parameter._post_accumulate_grad_hooks
    return list((hooks or {}).values())


def version_of(tensor: torch.Tensor) -> int:
    """Returns the version counter: in-place changes of a tensor and of its views.

    torch compares it for tensors that it saves for backward, but not for those in `saved_tensors_hooks`.
    """
    return tensor._version


def fake_tensors() -> AbstractContextManager[object]:
    """Returns a context in which new tensors have a shape, a dtype and a device, but no data.

    The meta device is no substitute: its tensors do not mix with those of the device that a model will run on.
    """
    return FakeTensorMode()


def recorded_tensors() -> AbstractContextManager[object]:
    """Returns a context as `fake_tensors`, in which tensors with data may be mixed with fake ones."""
    return FakeTensorMode(allow_non_fake_inputs=True)


@contextmanager
def real_tensors() -> Iterator[None]:
    """Inside, no mode of torch is active in this thread, so that new tensors have data."""
    with _disable_current_modes(), torch._C.DisableTorchFunction():
        yield


def known_value(tensor: torch.Tensor) -> torch.Tensor | None:
    """Returns the value of a fake tensor of one element, where torch knows it, as of `torch.tensor(1)`. Else None."""
    value: torch.Tensor | None = getattr(tensor, "constant", None)
    return value


def set_known_value(tensor: torch.Tensor, value: torch.Tensor) -> None:
    """Sets the value of a fake tensor that has a known one."""
    tensor.constant = value  # type: ignore[attr-defined] # of FakeTensor


def move_fake(tensor: torch.Tensor, moved: torch.Tensor) -> None:
    """Gives a fake tensor the memory, the dtype and the device of another one, as `tensor.data = moved` does."""
    if moved is not tensor:
        tensor.data = moved
        tensor.fake_device = moved.fake_device  # type: ignore[attr-defined] # of FakeTensor


@contextmanager
def devices_as_on_gpu() -> Iterator[None]:
    """Inside, torch finds an accelerator, "cuda", and FSDP1 computes on the CPU in its place.

    Both are found by private functions. FSDP1 compares the device that it has found with that of its tensors.
    """
    init: Any = importlib.import_module("torch.distributed.fsdp._init_utils")
    find, find_accelerator = init._get_compute_device, torch._C._get_accelerator

    def compute_device(*args: Any, **kwargs: Any) -> torch.device:
        device: torch.device = find(*args, **kwargs)
        return torch.device("cpu") if device.type == "cuda" else device

    init._get_compute_device = compute_device
    torch._C._get_accelerator = lambda *_: torch.device("cuda")
    try:
        yield
    finally:
        init._get_compute_device, torch._C._get_accelerator = find, find_accelerator


@contextmanager
def objects_packed_by(wrap: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Iterator[None]:
    """Inside, collectives of Python objects turn them into tensors, and back, by wrappers of torch's own functions."""
    module: Any = dist.distributed_c10d
    pack, unpack = module._object_to_tensor, module._tensor_to_object
    module._object_to_tensor, module._tensor_to_object = wrap(pack), wrap(unpack)
    try:
        yield
    finally:
        module._object_to_tensor, module._tensor_to_object = pack, unpack


@contextmanager
def ddp_checks_by(wrap: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Iterator[None]:
    """Inside, DDP compares the shapes of parameters between ranks by a wrapper of its own function in C++."""
    module: Any = dist
    original = module._verify_params_across_processes
    module._verify_params_across_processes = wrap(original)
    try:
        yield
    finally:
        module._verify_params_across_processes = original


@contextmanager
def backward_with(mode: Callable[[], AbstractContextManager[object]]) -> Iterator[None]:
    """Inside, each backward runs in a context. torch leaves modes of functions for the time of a backward."""
    original = torch.autograd._engine_run_backward  # type: ignore[attr-defined]

    def run(*args: Any, **kwargs: Any) -> Any:
        with mode():
            return original(*args, **kwargs)

    torch.autograd._engine_run_backward = run  # type: ignore[attr-defined]
    try:
        yield
    finally:
        torch.autograd._engine_run_backward = original  # type: ignore[attr-defined]


@contextmanager
def optimizers_as_on_gpu() -> Iterator[None]:
    """Inside, optimizers and gradient clipping handle many parameters at once by default, as for tensors of a GPU.

    torch asks private functions which devices and types of tensors can be handled so.
    """
    name = "_get_foreach_kernels_supported_devices"
    optimizers: Any = importlib.import_module("torch.optim.optimizer")  # no attribute of its package
    original, types = optimizers._get_foreach_kernels_supported_devices, optimizers._foreach_supported_types
    modules = torch.utils._foreach_utils, optimizers
    for module in modules:
        setattr(module, name, lambda: [*original(), "cpu"])
    types.append(FakeTensor)
    try:
        yield
    finally:
        types.remove(FakeTensor)
        for module in modules:
            setattr(module, name, original)


def storage_address(storage: torch.UntypedStorage) -> int:
    """Returns a number that no other living storage has. Fake storages have no `data_ptr`."""
    return int(storage._cdata)


def next_node_number() -> int:
    """Returns the number of the next node of autograd's graph that this thread makes."""
    return int(torch.autograd._get_sequence_nr())  # type: ignore[attr-defined]


def node_number() -> int:
    """Returns the number of the node whose backward runs in this thread. -1 if there is none, as in callbacks."""
    node = torch._C._current_autograd_node()
    return -1 if node is None else int(node._sequence_nr())


def node_name() -> str:
    """Returns the name of the node whose backward runs in this thread. Empty if there is none."""
    node = torch._C._current_autograd_node()
    return "" if node is None else node.name()


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the tensor of this rank inside of a DTensor, without autograd. Other tensors are returned as they are."""
    return getattr(tensor, "_local_tensor", tensor)


class OperatorFacts(NamedTuple):
    """Facts of an operator's schema."""

    namespace: str
    name: str
    """Name without namespace and overload, such as "mm"."""
    writes: tuple[int | str, ...]
    """Arguments that it changes: their positions, or names of arguments that have to be named."""
    may_return_view: bool


def facts_of(operator: Any) -> OperatorFacts:
    """Returns the facts of one of torch's operators."""
    schema = operator._schema
    namespace, _, name = schema.name.partition("::")
    writes = tuple(
        argument.name if argument.kwarg_only else position
        for position, argument in enumerate(schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    )
    may_return_view = any(each.alias_info is not None for each in schema.returns)
    return OperatorFacts(namespace, name, writes, may_return_view)


def guards_of(exported: ExportedProgram) -> torch.nn.Module | None:
    """Returns the guards of an exported program, to be called with the flat inputs. None if it has none.

    They raise AssertionError unless the inputs take the exported path. torch makes them only as a child of the unlifted
    module, under a private name.
    """
    return dict(exported.module().named_children()).get("_guards_fn")


def writes_in_place(operation: object) -> bool:
    """Whether one of torch's operators changes its arguments. Only its schema knows, which has no public name."""
    return isinstance(operation, torch._ops.OpOverload) and operation._schema.is_mutable


def draws_random_numbers(operation: object) -> bool:
    """Whether one of torch's operators draws random numbers from its device's generator."""
    return isinstance(operation, torch._ops.OpOverload) and torch.Tag.nondeterministic_seeded in operation.tags


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


@contextmanager
def groups_made_by(
    wrap: Callable[[Callable[..., Any]], Callable[..., Any]], barrier: Callable[..., None]
) -> Iterator[None]:
    """Inside, torch makes every process group by a wrapper of its own function.

    `init_process_group`, `new_group` and DeviceMesh all call that function, which has no public name. `barrier`
    replaces the barrier over the store that some settings add.
    """
    module = dist.distributed_c10d
    make, store_barrier = module._new_process_group_helper, module._store_based_barrier
    module._new_process_group_helper, module._store_based_barrier = wrap(make), barrier
    try:
        yield
    finally:
        module._new_process_group_helper, module._store_based_barrier = make, store_barrier


@contextmanager
def futures_that_wait_by(wait_first: Callable[[torch.futures.Future[Any]], None]) -> Iterator[None]:
    """Inside, `wait_first` is called with an unfinished future before Python code waits for it.

    C++ makes futures of a private class, such as those of DDP's buckets, on which a wait blocks in C++.
    """
    native: Any = torch._C.Future
    original = native.wait

    def wait(self: torch.futures.Future[Any]) -> Any:
        if not self.done():
            wait_first(self)
        return original(self)

    native.wait = wait
    try:
        yield
    finally:
        native.wait = original


@contextmanager
def profilers_that_ask(begin: Callable[[], None], end: Callable[[], None]) -> Iterator[None]:
    """Inside, every profiler of torch calls `begin` before its session starts, and `end` after it has ended.

    `torch.profiler` starts the sessions of `torch.autograd.profiler` by a private method, for which there is no hook.
    """
    profiler: Any = torch.autograd.profiler.profile
    prepare, leave = profiler._prepare_trace, profiler.__exit__

    def prepare_trace(self: Any) -> Any:
        begin()
        return prepare(self)

    def exit_session(self: Any, *error: Any) -> Any:
        try:
            return leave(self, *error)
        finally:
            if self.enabled:
                end()

    profiler._prepare_trace, profiler.__exit__ = prepare_trace, exit_session
    try:
        yield
    finally:
        profiler._prepare_trace, profiler.__exit__ = prepare, leave


@contextmanager
def groups_of_each_thread() -> Iterator[None]:
    """Inside, functional collectives find by its name only a group that the calling thread has made.

    torch has no public way: its C++ keeps one registry for the process, or one for each thread.
    """
    isolate = torch._C._distributed_c10d._set_thread_isolation_mode  # type: ignore[attr-defined] # missing in its stub
    isolate(True)
    try:
        yield
    finally:
        isolate(False)


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

    def comparison_key(self, schema: Any) -> Any:
        """Returns the arguments of an operator on which its decision depends. None if this torch has no such key."""
        return getattr(schema, "_comparison_key", None)

    def without_mesh(self, spec: Any) -> tuple[Any, ...]:
        """Returns the attributes of a spec but its mesh."""
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


def operators_of(namespace: str) -> tuple[str, ...]:
    """Returns the names of all operators of a namespace, sorted. `dir(torch.ops...)` lists only used ones."""
    known = [each.partition("::") for each in torch._C._dispatch_get_all_op_names()]
    return tuple(sorted(name for space, _, name in known if space == namespace))


def module_of_parameters(group: object) -> str:
    """Returns the name of the module whose parameters FSDP2 gathers and reduces as one group. Empty for the root.

    torch itself tells it to the profiler alone.
    """
    return _label_of_parameters(group).partition("(")[2].partition(")")[0] if _has_labels() else ""


@cache
def _has_labels() -> bool:
    return not missing(FSDP2_NAMES)


def _label_of_parameters(group: object) -> str:
    from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup  # late: it takes half a second

    try:
        return group._with_fqn("") if isinstance(group, FSDPParamGroup) else ""
    except AttributeError:  # it is being made
        return ""


def destroy_library(library: torch.library.Library) -> None:
    """Removes the operators of a library from torch.

    torch itself does so once the library is collected. It never is if the function of an operator refers to it.
    """
    library._destroy()  # type: ignore[no-untyped-call]


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
