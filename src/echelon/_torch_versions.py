"""Versions of torch that Echelon works with, and the private names of torch that it needs.

A version that is too old, or that lacks a private name, is refused when Echelon first needs torch. A newer version than
the tested ones is accepted if it has all names.

Pure.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import re
import sys
import warnings
from collections.abc import Iterable

OLDEST = (2, 11)
"""Oldest supported version, as in pyproject.toml."""
TRIED = ("2.11.0", "2.12.1", "2.13.0", "2.14.1", "2.15.0")
"""Tested versions, as by `make compat TORCH=2.15.0`; CONTRIBUTING.md lists the tests."""

PRIVATE_NAMES = (
    "torch.Tensor._backward_hooks",
    "torch.Tensor._is_view",
    "torch.Tensor._make_subclass",
    "torch.Tensor._post_accumulate_grad_hooks",
    "torch.Tensor._version",
    "torch.Tensor._use_count",
    "torch.UntypedStorage._cdata",
    "torch._C.DisableTorchFunction",
    "torch._C._AutoDispatchBelowAutograd",
    "torch._C._ExcludeDispatchKeyGuard",
    "torch._C.Future.wait",
    "torch._C._DisableTorchDispatch",
    "torch._C._TorchDispatchModeKey.FAKE",
    "torch._C._current_autograd_node",
    "torch._C._current_graph_task_id",
    "torch._C._dispatch_has_kernel_for_dispatch_key",
    "torch._C._dispatch_keys",
    "torch._C._distributed_c10d._DistributedBackendOptions",
    "torch._C._distributed_c10d._register_work",
    "torch._C._distributed_c10d._resolve_process_group",
    "torch._C._distributed_c10d._set_thread_isolation_mode",
    "torch._C._distributed_c10d._unregister_all_process_groups",
    "torch._C._dynamo.eval_frame._FrameAction.SKIP",
    "torch._C._dynamo.eval_frame._FrameExecStrategy",
    "torch._C._dynamo.eval_frame.set_code_exec_strategy",
    "torch._C._functorch.peek_interpreter_stack",
    "torch._C._get_accelerator",
    "torch._C._get_dispatch_mode",
    "torch._C._get_fp32_precision_getter",
    "torch._C._increment_version",
    "torch._C._len_torch_dispatch_stack",
    "torch._C._set_fp32_precision_setter",
    "torch._C._set_throw_on_mutable_data_ptr",
    "torch._C._storage_Use_Count",
    "torch._library.custom_ops.OPDEFS",
    "torch._ops.HigherOrderOperator",
    "torch._ops.OpOverload",
    "torch._subclasses.fake_tensor.DataDependentOutputException",
    "torch._subclasses.fake_tensor.DynamicOutputShapeException",
    "torch._subclasses.fake_tensor.FakeTensor",
    "torch._subclasses.fake_tensor.FakeTensorMode",
    "torch._subclasses.fake_tensor.UnsupportedFakeTensorException",
    "torch._subclasses.fake_tensor.UnsupportedOperatorException",
    "torch._tensor_str.PRINT_OPTS",
    "torch.amp.autocast_mode._cast",
    "torch.autograd.Function._backward_cls._forward_cls",
    "torch.autograd.Variable._execution_engine.queue_callback",
    "torch.autograd.Variable._execution_engine.run_backward",
    "torch.autograd._engine_run_backward",
    "torch.autograd._get_sequence_nr",
    "torch.autograd.forward_ad._current_level",
    "torch.autograd.profiler.profile._prepare_trace",
    "torch.autograd.graph.Node._sequence_nr",
    "torch.distributed.ProcessGroup._allgather_base",
    "torch.distributed.ProcessGroup._register_backend",
    "torch.distributed.ProcessGroup._set_default_backend",
    "torch.distributed._verify_params_across_processes",
    "torch.distributed.distributed_c10d.GroupName",
    "torch.distributed.distributed_c10d._World",
    "torch.distributed.distributed_c10d._WorldMeta.WORLD.fget",
    "torch.distributed.distributed_c10d._check_p2p_op_list",
    "torch.distributed.distributed_c10d._new_process_group_helper",
    "torch.distributed.distributed_c10d._object_to_tensor",
    "torch.distributed.distributed_c10d._store_based_barrier",
    "torch.distributed.distributed_c10d._tensor_to_object",
    "torch.distributed.distributed_c10d._world.pg_backend_config",
    "torch.futures.Future._set_unwrap_func",
    "torch.library.Library._destroy",
    "torch.nested._internal.nested_int.NestedIntNode",
    "torch.nested._internal.nested_tensor.NestedTensor._get_max_seqlen",
    "torch.nested._internal.nested_tensor.NestedTensor._get_min_seqlen",
    "torch.nn.parallel.DistributedDataParallel._passing_sync_batchnorm_handle",
    "torch.nn.parallel.DistributedDataParallel._set_static_graph",
    "torch.nn.utils.clip_grad._clip_grads_with_norm_",
    "torch.nn.utils.clip_grad._get_total_norm",
    "torch.nn.utils.clip_grad._group_tensors_by_device_and_dtype",
    "torch.ops.aten.add.Tensor._schema.is_mutable",
    "torch.ops.aten.add.Tensor._schema.returns",
    "torch.optim.optimizer._default_to_fused_or_foreach",
    "torch.optim.optimizer._foreach_supported_types",
    "torch.optim.optimizer._get_capturable_supported_devices",
    "torch.optim.optimizer._get_foreach_kernels_supported_devices",
    "torch.optim.optimizer._group_tensors_by_device_and_dtype",
    "torch.overrides._get_current_function_mode_stack",
    "torch.overrides._pop_mode",
    "torch.overrides._push_mode",
    "torch.utils.data.dataloader._MultiProcessingDataLoaderIter",
    "torch.utils._device.DeviceContext",
    "torch.utils._device._device_constructors",
    "torch.utils._foreach_utils._foreach_supported_types",
    "torch.utils._foreach_utils._get_foreach_kernels_supported_devices",
    "torch.utils._python_dispatch.TorchDispatchMode._should_skip_dynamo",
    "torch.utils._python_dispatch._disable_current_modes",
    "torch.utils._pytree.TreeSpec",
    "torch.utils._pytree.tree_flatten",
    "torch.utils._pytree.tree_leaves",
    "torch.utils._pytree.tree_map",
    "torch.utils._pytree.tree_unflatten",
)
"""Private names that `_torch_private` uses. A name of instances is listed under its class, or one instance."""

GLOO_NAMES = (
    "torch.distributed.ProcessGroupGloo._Options._devices",
    "torch.distributed.ProcessGroupGloo._Options._timeout",
)
"""Further private names, present only in builds of torch with Gloo."""

FSDP1_NAMES = (
    "torch.distributed.fsdp._flat_param.FlatParamHandle._force_full_precision",
    "torch.distributed.fsdp._flat_param.FlatParamHandle._uses_param_mixed_precision",
    "torch.distributed.fsdp._init_utils._check_module_states_for_sync_module_states",
    "torch.distributed.fsdp._init_utils._get_compute_device",
)
"""Further private names, probed when a program is foreseen. Without them FSDP1 cannot be foreseen.

Their modules import DTensor and sympy: probed with the others, they would take each rank a third of its start.
"""

FSDP2_NAMES = ("torch.distributed.fsdp._fully_shard._fsdp_param_group.FSDPParamGroup._with_fqn",)
"""Further private names, probed when FSDP2 first communicates. Without them errors do not name its modules."""

REPEATS_NAMES = (
    "torch._C._autograd._top_saved_tensors_default_hooks",
    "torch.distributed.fsdp._fully_shard._fsdp_state._get_module_fsdp_state",
    "torch.distributed.pipelining.stage._PipelineStageBase",
)
"""Further private names, probed when a program is foreseen. Without them all of its microbatches are recorded."""

COMPILED_NAMES = ("torch._dynamo.eval_frame._callback_from_stance",)
"""Further private names, probed when a program is foreseen. Without them functions that were compiled before fail."""

FLEX_NAMES = (
    "torch.nn.attention.flex_attention._FLEX_ATTENTION_DISABLE_COMPILE_DEBUG",
    "torch.nn.attention.flex_attention._validate_device",
)
"""Further private names, probed when a program is foreseen. Without them flex_attention cannot be foreseen."""

FLASH_NAMES = (
    "torch.nn.attention._registry._FLASH_ATTENTION_ACTIVE",
    "torch.nn.attention._registry._FLASH_ATTENTION_IMPLS",
)
"""Further private names, probed when a program is foreseen. Without them newer flash attention has to be installed."""


class UnsupportedTorch(ImportError):
    """Unsupported version of torch."""


def lacking() -> tuple[str, ...]:
    """Returns the needed private names that the installed torch lacks. Imports torch."""
    # The module itself stays pure, so that `echelon plan` starts without torch.
    import torch.distributed

    has_gloo = torch.distributed.is_available() and torch.distributed.is_gloo_available()
    names = PRIVATE_NAMES + GLOO_NAMES if has_gloo else PRIVATE_NAMES
    return missing(names)


def missing(names: Iterable[str]) -> tuple[str, ...]:
    """Returns the names that the installed torch lacks. Imports their modules."""
    return tuple(name for name in names if not _exists(name))


def problem(version: str, lacking: tuple[str, ...]) -> str:
    """Returns why a version of torch, such as "2.13.0+cpu", cannot be used. Empty if it can."""
    if release(version) < OLDEST:
        return f"torch {version} is older than {'.'.join(map(str, OLDEST))}"
    if lacking:
        return f"torch {version} lacks {' and '.join(lacking)}"
    return ""


def fix() -> str:
    """Returns advice for an unsupported version: the command that installs a supported one."""
    major, minor = release(TRIED[-1])
    oldest = ".".join(map(str, OLDEST))
    return (
        f"install a version that Echelon works with ({', '.join(TRIED)} were tried): "
        f"pip install 'torch>={oldest},<{major}.{minor + 1}'"
    )


def release(version: str) -> tuple[int, int]:
    """Returns major and minor number of a version."""
    major, minor = version.split("+")[0].split(".")[:2]
    return int(major), int(minor)


def installed() -> str:
    """Returns the version of the installed torch, without importing it. Empty if there is none that can be read."""
    if "torch" in sys.modules:
        return str(getattr(sys.modules["torch"], "__version__", ""))
    # Not importlib.metadata: it takes 50 ms, as long as the import of this package.
    try:
        spec = importlib.util.find_spec("torch")
        places = (spec.submodule_search_locations if spec is not None else None) or ()
        for place in places:
            with open(os.path.join(place, "version.py"), encoding="utf-8") as file:
                found = re.search(r"^__version__ = ['\"](\d+\.\d+[^'\"]*)", file.read(), re.MULTILINE)
            return found[1] if found else ""
    except (OSError, ImportError, ValueError):
        pass
    return ""


def warn_if_old() -> None:
    """Warns by one line if the installed torch is too old. `require` refuses it once torch is needed."""
    version = installed()
    if version and (found := problem(version, ())):
        warnings.warn(f"{found}: {fix()}", stacklevel=3)


def require() -> None:
    """Imports torch and refuses an unsupported version.

    Raises:
        UnsupportedTorch: torch is too old, or lacks a private name.
    """
    import torch

    if found := problem(torch.__version__, lacking()):
        raise UnsupportedTorch(f"{found}: {fix()}")


def _exists(name: str) -> bool:
    """Whether a dotted name is a module or an attribute of one."""
    package, *parts = name.split(".")
    found: object = importlib.import_module(package)
    for part in parts:
        package += f".{part}"
        if hasattr(found, part):
            found = getattr(found, part)
            continue
        try:  # the module's name may be no attribute of its package even then
            found = importlib.import_module(package)
        except ImportError:
            return False
    return True
