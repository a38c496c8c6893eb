"""DistributedDataParallel: wraps a module so that every backward leaves the mean gradient on every rank.

Strategy. Hooks on the parameters report complete gradients, so it does not matter how the module was called. The first
hook of a backward queues a callback of the autograd engine for the end of that backward. If checkpoints run others
inside, it is the end of the outermost one. (The first hook is on the module's output if the module was called as a
whole.) In the callback `finish` blocks until all ranks have reduced. Everything runs in the thread that called
backward. The collectives run in the lane of the reducer's group, overlapped with backward, or after backward if they
would take its core. Hooks hold the wrapper weakly: once it is gone, the module is an ordinary one again.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple, Never, get_args

import torch

from echelon.arguments import check_bucket_mb, choices, named, no_attribute, refuse_others
from echelon.backends.admission import check_values
from echelon.data_parallel.broadcast import Buffers, broadcast_tensors, check_module, check_same_model
from echelon.data_parallel.gradient_sync import GradientSync, take_over
from echelon.data_parallel.hooks import GradientHook
from echelon.data_parallel.join import Next
from echelon.data_parallel.reducer import DEFAULT_BUCKET_MB, Average, GradientReducer
from echelon.data_parallel.sync_batchnorm import SyncBatchNorm, unsynchronized
from echelon.errors import InvalidArgument, UnsupportedOp
from echelon.group.group import ProcessGroup
from echelon.launch.init import CURRENT, given_or_current
from echelon.purposes import WRAP
from echelon.wording import counted

_MEANT = {
    "backward": " call loss.backward()",
    "step": " call optimizer.step()",
    "register_comm_hook": " give it as DDP(model, group, hook=)",
    "clip_grad_norm_": " call torch.nn.utils.clip_grad_norm_(ddp.parameters(), max_norm)",
}
"""Names that other wrappers give to attributes, with advice."""


def _of_module(name: str) -> Any:
    """Returns a method of `torch.nn.Module` that a wrapper calls on its module."""
    original = getattr(torch.nn.Module, name)

    @functools.wraps(original)
    def method(self: ModuleProxy, *args: Any, **kwargs: Any) -> Any:
        result = getattr(self.module, name)(*args, **kwargs)
        return self if result is self.module else result

    return method


class ModuleProxy(torch.nn.Module):
    """Module that delegates to `module`: attributes, state_dict and the names of parameters.

    Once `module` is set, new attributes become the module's, except for attributes that the wrapper already has. New
    parameters, buffers, submodules and hooks of `state_dict` always do.
    """

    module: torch.nn.Module

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the module.

        Raises:
            CollectiveMismatch, PeerFailed, Timeout: in training, while buffers are made equal or a hook averages.
        """
        return self.module(*args, **kwargs)

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, torch.nn.Parameter]]:
        """Yields the module's parameters under the module's names.

        Args:
            prefix, recurse, remove_duplicate: as of torch.nn.Module.named_parameters.
        """
        return self.module.named_parameters(prefix, recurse, remove_duplicate)

    def named_buffers(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Yields the module's buffers under the module's names.

        Args:
            prefix, recurse, remove_duplicate: as of torch.nn.Module.named_buffers.
        """
        return self.module.named_buffers(prefix, recurse, remove_duplicate)

    def named_modules(
        self, memo: set[torch.nn.Module] | None = None, prefix: str = "", remove_duplicate: bool = True
    ) -> Iterator[tuple[str, torch.nn.Module]]:
        """Yields the module and its submodules under the module's names.

        Args:
            memo, prefix, remove_duplicate: as of torch.nn.Module.named_modules.
        """
        yield from self.module.named_modules(memo, prefix, remove_duplicate)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Returns the module's own state_dict, which the bare module can load."""
        return self.module.state_dict(*args, **kwargs)

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Loads a state_dict of the bare module, on this rank only.

        Load the same on every rank, or call broadcast_parameters() afterwards.

        Args:
            state_dict: tensors by the module's own names.
            strict: whether missing and unknown names are an error.
            assign: not supported.

        Returns:
            The missing and the unexpected names, as torch.nn.Module.load_state_dict does.

        Raises:
            InvalidArgument: assign=True, which would replace the parameters that have the hooks; or all names begin
                with "module.", as those of torch's wrapper.
        """
        if assign:
            raise InvalidArgument(
                "assign=True replaces the parameters, whose gradients are reduced: leave it out, or load into the "
                "module first and wrap it then"
            )
        if state_dict and all(name.startswith("module.") for name in state_dict) and not hasattr(self.module, "module"):
            raise InvalidArgument(
                "all names of the state_dict begin with 'module.', as torch's wrapper writes them: call "
                "torch.nn.modules.utils.consume_prefix_in_state_dict_if_present(state_dict, 'module.') first"
            )
        return self.module.load_state_dict(state_dict, strict)

    # torch's own methods would keep the value or the hook in the wrapper, where nobody reads it.
    register_parameter = _of_module("register_parameter")
    register_buffer = _of_module("register_buffer")
    add_module = _of_module("add_module")  # `register_module` calls it
    get_buffer = _of_module("get_buffer")
    register_state_dict_pre_hook = _of_module("register_state_dict_pre_hook")
    register_state_dict_post_hook = _of_module("register_state_dict_post_hook")
    register_load_state_dict_pre_hook = _of_module("register_load_state_dict_pre_hook")
    register_load_state_dict_post_hook = _of_module("register_load_state_dict_post_hook")
    apply = _of_module("apply")  # torch's own would call the function on the module twice

    def __getattr__(self, name: str) -> Any:
        # Before `module` is set, and for `module` itself, delegation would recurse for ever.
        own = self.__dict__.get("_modules", {})
        if name == "module" or "module" not in own:
            return super().__getattr__(name)
        if name in _MEANT and not hasattr(own["module"], name):
            raise no_attribute("a DistributedDataParallel", name, (), _MEANT)
        return getattr(own["module"], name)

    def __setattr__(self, name: str, value: Any) -> None:
        # A new value for something that the module reads must reach the module.
        own = name in self.__dict__ or any(name in cls.__dict__ for cls in type(self).__mro__)
        if own or name == "module" or "module" not in self.__dict__.get("_modules", {}):
            super().__setattr__(name, value)
        elif (
            name in self.module._parameters
            and isinstance(value, torch.Tensor)
            and not isinstance(value, torch.nn.Parameter)
        ):
            # torch.func.functional_call, which looks for its parameters in the wrapper, ends here.
            raise UnsupportedOp(
                f"{name} is a parameter of the wrapped module: assign a torch.nn.Parameter, or give ddp.module to "
                "torch.func.functional_call"
            )
        else:
            setattr(self.module, name, value)

    def __delattr__(self, name: str) -> None:
        if name in self.__dict__ or name in self.__dict__["_modules"]:
            super().__delattr__(name)
        else:
            delattr(self.module, name)

    def __getstate__(self) -> Any:
        raise UnsupportedOp("a wrapper belongs to its group and cannot be copied or pickled: take ddp.module instead")


class DistributedDataParallel(ModuleProxy):
    """Data-parallel wrapper: trains the same module on every rank, each on its own part of the batch.

    After `backward()` each gradient is the mean over all ranks, bit-identical on all of them. It equals the gradient of
    one process on the whole batch, if the loss is a mean and all parts have the same number of samples (or with
    `average="samples"`). An optimizer may be made before `DDP(model)` or after it, with the same bits, since parameters
    stay the same objects. Parameters that no rank used keep the gradient None; parameters that only some ranks used get
    the right mean.

    Every backward that reaches a parameter reduces, as long as this wrapper lives. A rank on which it reaches none
    calls `sync_gradients()` instead. All ranks raise CollectiveMismatch if one runs a forward and skips its backward,
    or skips both and lets its optimizer make the step. The step may be compiled, if the parameters are on the CPU.
    Calling `module` directly has the same effect as calling the wrapper.

    Gradients are views of the buckets in which they travel, so there is no second copy.

    Attributes, state_dict and named_parameters are the module's own, under the same names.

    Not supported, and refused: sparse gradients, `backward(create_graph=True)`.
    """

    @refuse_others()
    def __init__(
        self,
        module: torch.nn.Module,
        group: ProcessGroup = CURRENT,
        bucket_mb: float = DEFAULT_BUCKET_MB,
        buffers: Buffers = "broadcast",
        average: Average = "ranks",
        hook: GradientHook | None = None,
        **of_torch: Never,
    ) -> None:
        """Copies the parameters and buffers of rank 0 to all ranks, in place. Blocks until it is done.

        Args:
            module: the model, the same on every rank except for its values.
            group: the ranks. Every rank of it must wrap the same modules in the same order. Default: the group
                of `echelon.init()`, or of the simulated rank.
            bucket_mb: mebibytes of gradients that are reduced at a time, overlapped with backward. If all ranks are
                on one machine and none has an idle core, all gradients are reduced at once after backward.
            buffers: how buffers, such as the running statistics of BatchNorm, are made equal before each training
                forward. "broadcast" copies those of rank 0, "average" takes the mean of floating-point and complex
                ones, "local" leaves them. Not under `no_sync`.
            average: weights of the ranks in the mean. "ranks": equal. "samples": the number of samples, which is the
                number of rows of forward's first tensor, added up over the forwards since the last reduction.
            hook: how a bucket is reduced: to send less, or less often. None: an all_reduce.
            of_torch: arguments of torch's wrapper alone. They are refused, each with the reason.

        Raises:
            CollectiveMismatch: on every rank, if names, shapes, dtypes or orders in memory of the model differ, or the
                options.
            InvalidArgument: `module` is no module instance or torch's own wrapper, there is no group, or an option has
                an unknown value.
            UnsupportedOp: a parameter or buffer that the group's backend cannot send, or that has no shape yet or no
                memory of its own, such as a DTensor; a parameter that another living wrapper reduces, which has not
                failed; or no parameter requires a gradient.
        """
        super().__init__()
        _refuse(of_torch)
        group = given_or_current(group)
        check_module(module)
        if isinstance(module, torch.nn.parallel.DistributedDataParallel):
            raise InvalidArgument(
                "module is torch's DistributedDataParallel, which reduces gradients, too: pass the module itself, as "
                "DDP(ddp.module, group)"
            )
        _check_choice("buffers", buffers, get_args(Buffers))
        _check_choice("average", average, get_args(Average))
        if not isinstance(hook, GradientHook | None):
            raise InvalidArgument(f"hook is {named(hook)}: pass a GradientHook, such as CompressTo(torch.bfloat16)")
        options = [f"bucket_mb={check_bucket_mb(bucket_mb)}", f"buffers={buffers}", f"average={average}"]
        options += [f"hook={hook!r}"]
        self._group = group
        self._bucket_mb = float(bucket_mb)
        if average == "samples":
            _check_weighs_samples(module)
        _check_tensors(module)
        take_over(module.named_parameters())
        problem = unsynchronized(module) if group.world_size > 1 else ""
        with group.backend.flight_recorder.within(WRAP):
            check_same_model(module, group, [*options, problem or "no unsynchronized layers"])
        # After the comparison: either all ranks have nothing to train and raise, or all raise CollectiveMismatch. A
        # rank that raised alone would leave the others waiting in the comparison.
        if problem:
            raise UnsupportedOp(problem)
        _check_trains(module)
        self._sync = GradientSync(
            module, group, bucket_mb=self._bucket_mb, buffers=buffers, average=average, hook=hook, options=options
        )
        self.module = module  # last: ModuleProxy passes attributes that are set from here on to the module
        with group.backend.flight_recorder.within(WRAP):
            self.broadcast_parameters()
            self._sync.watch()

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Inside, backward accumulates local gradients. The next backward outside reduces their sum.

        The place of the call of backward counts; forward may be called outside. Every rank must do the same.
        """
        sync = self._sync
        before, sync.is_on = sync.is_on, False
        try:
            yield
        finally:
            sync.is_on = before

    @contextmanager
    @refuse_others(joinables=" pass the function that updates the parameters: join(update)")
    def join(self, update: Callable[[], object] | None = None) -> Iterator[None]:
        """Inside, ranks may have different numbers of batches: put the loop over batches into the with block.

        The exit blocks until all ranks have left: meanwhile this rank takes part in the others' reductions, without
        gradients of its own. Then all ranks copy parameters and buffers from the lowest rank among the last to leave.
        Gradients are still divided by the number of all ranks, or weighted by samples with `average="samples"`. Costs
        an all_gather of one byte per forward and backward. Every rank must enter the block. Not for a module that calls
        collectives itself, which ranks without batches would not call: give them empty batches instead. For the same
        reason, save checkpoints after the block.

        Args:
            update: steps optimizer and scheduler. A rank without batches calls it after each reduction of the others,
                with their gradients, so that the states of optimizers and schedulers stay equal. None: this rank then
                takes fewer steps than the others.

        Raises:
            CollectiveMismatch: ranks run different numbers of forwards per backward.
            UnsupportedOp: there is a SyncBatchNorm in training, which calls collectives.
        """
        _check_calls_no_collectives(self.module)
        if update is not None and not callable(update):
            raise InvalidArgument(f"update is {named(update)}: give a function without arguments, or leave it out")
        sync = self._sync
        if sync.num_missed_updates:
            warnings.warn(
                f"rank {self._group.rank} had no batch in {counted(sync.num_missed_updates, 'step')} of earlier join() "
                "blocks, so its optimizer and scheduler differ from those of other ranks: pass the function that steps "
                "them: ddp.join(update)",
                stacklevel=3,
            )
        with sync.joining.on():
            yield
            for step, src in sync.joining.others():
                sync.shadow(step, src)
                if step != Next.REDUCTION:
                    continue
                if update is None:
                    sync.num_missed_updates += 1
                else:
                    update()
            if sync.hook is not None:
                sync.hook.at_end(list(self.module.parameters()), sync.reducer.group)
            self.broadcast_parameters(sync.joining.last_active)
            sync.reducer.counts.forget()

    @refuse_others(timeout=" the group has it: set group.timeout")
    def sync_gradients(self) -> None:
        """Replaces all gradients by their mean over all ranks. Blocks until it is done. Works under `no_sync`, too.

        For gradients that backward did not reduce: accumulated under `no_sync`, or set by hand.

        Raises:
            UnsupportedOp, Closed, CollectiveMismatch, PeerFailed, Timeout: as `GradientReducer.finish`.
        """
        self._sync.reduce()

    @refuse_others(root="src", root_rank="src", timeout=" the group has it: set group.timeout")
    def broadcast_parameters(self, src: int = 0) -> None:
        """Copies the parameters and buffers of rank `src` to all ranks, in place. Blocks until it is done.

        Args:
            src: rank of the group whose values all ranks get.

        Raises:
            InvalidRank: `src` is not a rank of the group.
            CollectiveMismatch, PeerFailed, Timeout: as `ProcessGroup.broadcast`.
        """
        tensors = [*self.module.parameters(), *self.module.buffers()]
        broadcast_tensors(tensors, self._group, src, self._bucket_mb)

    def extra_repr(self) -> str:
        """Returns the rank and the number of buckets."""
        buckets = len(self._sync.reducer.layout.buckets)
        return f"rank {self._group.rank} of {self._group.world_size}, {buckets} buckets of gradients"


DDP = DistributedDataParallel


class Unwrapped(NamedTuple):
    """Parts of a wrapper, for checkpoints."""

    module: torch.nn.Module
    group: ProcessGroup
    hook: GradientHook | None
    reducer: GradientReducer
    has_unused: bool
    """Whether it has gradients from backwards under `no_sync` that no optimizer step has used."""


def unwrap(wrapper: DistributedDataParallel) -> Unwrapped:
    """Returns the parts of a wrapper. Not a method: it would hide an attribute of the module of this name."""
    sync = wrapper._sync
    has_unused = sync.has_unused and any(each.grad is not None for each in wrapper.module.parameters())
    return Unwrapped(wrapper.module, wrapper._group, sync.hook, sync.reducer, has_unused)


_OF_TORCH = {
    "device_ids": "put the model on its device first: model.to(group.device)",
    "output_device": "outputs stay where the model makes them: leave it out",
    "find_unused_parameters": "unused parameters are found at no cost: leave it out",
    "static_graph": "the graph may change: leave it out",
    "gradient_as_bucket_view": "gradients always are views of their buckets: leave it out",
    "broadcast_buffers": "buffers='broadcast' or 'local' says that",
    "process_group": "pass the group as the second argument",
    "bucket_cap_mb": "it is called bucket_mb here",
    "init_sync": "parameters are always copied from rank 0: leave it out",
}


def _refuse(arguments: Mapping[str, object]) -> None:
    for name in arguments:
        own = ("bucket_mb", "buffers", "average", "hook")
        raise InvalidArgument(f"{name} is no argument here: {_OF_TORCH.get(name) or choices(name, own)}")


def _check_choice(name: str, value: object, known: tuple[str, ...]) -> None:
    if value not in known:
        raise InvalidArgument(f"{name}={value!r}: {choices(repr(value), map(repr, known))}")


def _check_tensors(module: torch.nn.Module) -> None:
    for name, parameter in module.named_parameters():
        if isinstance(parameter, torch.nn.parameter.UninitializedParameter):
            raise UnsupportedOp(f"parameter {name!r} has no shape yet: run one forward of the model, then wrap it")
    tensors: list[tuple[str, torch.Tensor]] = [
        (f"parameter {name!r}", parameter) for name, parameter in module.named_parameters()
    ]
    tensors += [(f"buffer {name!r}", buffer) for name, buffer in module.named_buffers()]
    for name, tensor in tensors:
        if tensor.is_meta:
            raise UnsupportedOp(
                f"{name} is on the meta device and has no values: call model.to_empty(device='cpu') and initialise "
                "it, then wrap it"
            )
        check_values(tensor, f"DistributedDataParallel, {name},")


def _check_trains(module: torch.nn.Module) -> None:
    if not any(parameter.requires_grad for parameter in module.parameters()):
        raise UnsupportedOp(
            f"no parameter of this {type(module).__name__} requires a gradient, so there is nothing to reduce: use the "
            "module as it is, or wrap it once one does"
        )


def _check_weighs_samples(module: torch.nn.Module) -> None:
    for name, layer in module.named_modules():
        if isinstance(layer, torch.nn.SyncBatchNorm) and not isinstance(layer, SyncBatchNorm):
            raise UnsupportedOp(
                f"{name!r} is torch's SyncBatchNorm, which adds up gradients of other ranks before average='samples' "
                "weighs them: use echelon.SyncBatchNorm.convert(model), or the default average"
            )


def _check_calls_no_collectives(module: torch.nn.Module) -> None:
    for name, layer in module.named_modules():
        if isinstance(layer, torch.nn.SyncBatchNorm) and layer.training:
            raise UnsupportedOp(
                f"{name!r} is a SyncBatchNorm, whose collectives ranks that have left join() would not call: give "
                "ranks without samples empty batches instead of join(), or use BatchNorm"
            )
