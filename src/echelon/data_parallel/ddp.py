"""DistributedDataParallel: wraps a module so that every backward leaves the mean gradient on every rank.

Strategy. Hooks on the parameters report complete gradients, so it does not matter how the module was called. The first
hook of a backward queues a callback of the autograd engine for the end of that backward. If checkpoints run others
inside, it is the end of the outermost one. (The first hook is on the module's output if the module was called as a
whole.) In the callback `finish` blocks until all ranks have reduced. Everything runs in the thread that called
backward. The collectives run in the lane of the reducer's group, overlapped with backward, or after backward if they
would take its core. Hooks hold the wrapper weakly: once it is gone, the module is an ordinary one again.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Literal, TypeAlias, get_args

import torch
from torch.utils.hooks import RemovableHandle

from echelon._torch_private import at_end_of_backward
from echelon.arguments import check_bucket_mb, choices, named
from echelon.backends.admission import check_values
from echelon.data_parallel.broadcast import average_tensors, broadcast_tensors, check_module, check_same_model
from echelon.data_parallel.forwards import Joining, Next, first_active, watch_forwards
from echelon.data_parallel.gradients import take_over, watch_gradients
from echelon.data_parallel.hooks import GradientHook
from echelon.data_parallel.module_proxy import ModuleProxy
from echelon.data_parallel.reducer import DEFAULT_BUCKET_MB, Average, GradientReducer, can_overlap
from echelon.errors import InvalidArgument, UnsupportedOp
from echelon.group.group import ProcessGroup, check_group


class ParamSnapshot:
    """Snapshot of a module's parameters, and the hooks on them."""

    def __init__(self, module: torch.nn.Module) -> None:
        """Records the present parameters and which of them require gradients."""
        self._module = module
        self.named = list(module.named_parameters())
        self.trainable = [(name, parameter) for name, parameter in self.named if parameter.requires_grad]
        self._requires_grad = [parameter.requires_grad for _, parameter in self.named]
        self.handles: list[RemovableHandle] = []
        """Handles of the hooks, for `release`."""

    @property
    def parameters(self) -> list[torch.nn.Parameter]:
        """All parameters, frozen ones too."""
        return [parameter for _, parameter in self.named]

    def is_current(self) -> bool:
        """Whether the module still has the same parameters, and trains the same ones."""
        # Runs before every forward, so it compares identities and flags only, and skips the names.
        now = list(self._module.parameters())
        return len(now) == len(self.named) and all(
            parameter is known and parameter.requires_grad == trainable
            for parameter, (_, known), trainable in zip(now, self.named, self._requires_grad, strict=True)
        )

    def added_since(self, earlier: ParamSnapshot) -> list[torch.nn.Parameter]:
        """Returns the parameters that the earlier snapshot lacks."""
        known = set(map(id, earlier.parameters))
        return [parameter for parameter in self.parameters if id(parameter) not in known]

    def release(self) -> None:
        """Removes the hooks."""
        for handle in self.handles:
            handle.remove()
        self.handles = []


Buffers: TypeAlias = Literal["broadcast", "average", "local"]


def synchronize_buffers(
    buffers: Sequence[torch.Tensor], how: Buffers, group: ProcessGroup, src: int, bucket_mb: float
) -> None:
    """Makes buffers, such as BatchNorm's running statistics, equal on all ranks. Blocks, unless `how` is "local".

    "broadcast" copies the buffers of rank `src`. "average" takes the mean of floating-point and complex buffers, and
    copies the others from rank `src`. "local" leaves all of them.

    Args:
        buffers: same number, shapes and dtypes on every rank.
        how: "broadcast", "average" or "local".
        group: the ranks.
        src: the rank whose buffers are broadcast.
        bucket_mb: mebibytes per message.

    Raises:
        CollectiveMismatch, PeerFailed, Timeout: as `ProcessGroup.broadcast`.
    """
    if how == "average":
        average_tensors([buffer for buffer in buffers if _has_fraction(buffer)], group, bucket_mb)
        buffers = [buffer for buffer in buffers if not _has_fraction(buffer)]
    if how != "local":
        broadcast_tensors(buffers, group, src, bucket_mb)


def _has_fraction(buffer: torch.Tensor) -> bool:
    return buffer.is_floating_point() or buffer.is_complex()


class DistributedDataParallel(ModuleProxy):
    """Data-parallel wrapper: trains the same module on every rank, each on its own part of the batch.

    After `backward()` each gradient is the mean over all ranks, bit-identical on all of them. It equals the gradient of
    one process on the whole batch, if the loss is a mean and all parts have the same number of samples (or with
    `average="samples"`). Parameters stay the objects they are, so an optimizer may be made before or after. Parameters
    that no rank used keep the gradient None; parameters that only some ranks used get the right mean.

    Every backward that reaches a parameter reduces, as long as this wrapper lives. A rank on which it reaches none
    calls `sync_gradients()` instead. All ranks raise CollectiveMismatch if one runs a forward and skips its backward,
    or skips both and lets its optimizer make the step. The step may be compiled, if the parameters are on the CPU.
    Calling `module` directly has the same effect as calling the wrapper.

    Gradients are views of the buckets in which they travel, so there is no second copy.

    Attributes, state_dict and named_parameters are the module's own, under the same names.

    Not supported, and refused: sparse gradients, `backward(create_graph=True)`.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        group: ProcessGroup,
        bucket_mb: float = DEFAULT_BUCKET_MB,
        buffers: Buffers = "broadcast",
        average: Average = "ranks",
        hook: GradientHook | None = None,
    ) -> None:
        """Copies the parameters and buffers of rank 0 to all ranks, in place. Blocks until it is done.

        Args:
            module: the model, the same on every rank except for its values.
            group: the ranks. Every rank of it must wrap the same modules in the same order.
            bucket_mb: mebibytes of gradients that are reduced at a time, overlapped with backward. If all ranks share
                memory and none has an idle core, all gradients are reduced at once after backward.
            buffers: how buffers, such as the running statistics of BatchNorm, are made equal before each training
                forward. "broadcast" copies those of rank 0, "average" takes the mean of floating-point and complex
                ones, "local" leaves them. Not under `no_sync`.
            average: weights of the ranks in the mean. "ranks": equal. "samples": the number of samples, which is the
                number of rows of forward's first tensor, added up over the forwards since the last reduction.
            hook: how a bucket is reduced: to send less, or less often. None: an all_reduce.

        Raises:
            CollectiveMismatch: on every rank, if names, shapes or dtypes of the model or the options differ.
            InvalidArgument: `module` is no module instance, `group` is no group, or an option has an unknown value.
            UnsupportedOp: a parameter or buffer that the group's backend cannot send, or that has no shape yet or no
                memory of its own, such as a DTensor; a parameter that another living wrapper reduces, which has not
                failed; or no parameter requires a gradient.
        """
        super().__init__()
        check_group(group)
        check_module(module)
        _check_choice("buffers", buffers, get_args(Buffers))
        _check_choice("average", average, get_args(Average))
        if not isinstance(hook, GradientHook | None):
            raise InvalidArgument(f"hook is {named(hook)}: pass a GradientHook, such as CompressTo(torch.bfloat16)")
        options = [f"bucket_mb={check_bucket_mb(bucket_mb)}", f"buffers={buffers}", f"average={average}"]
        self._options = [*options, f"hook={hook!r}"]
        self._group = group
        self._bucket_mb = float(bucket_mb)
        self._buffers_are = buffers
        self._hook = hook
        self._synchronise = True
        self._runs_beside = True
        self._is_armed = False
        self._is_prepared = False
        _check_tensors(module)
        take_over(module.named_parameters())
        check_same_model(module, group, self._options)
        # After the comparison: either all ranks have nothing to train and raise, or all raise CollectiveMismatch. A
        # rank that raised alone would leave the others waiting in the comparison.
        _check_trains(module)
        self._reducer = GradientReducer((), group, bucket_mb=bucket_mb, average=average, hook=hook, learns_order=True)
        self._joining = Joining(self._reducer.group)
        self._watched: ParamSnapshot | None = None
        self.module = module  # last: ModuleProxy passes attributes that are set from here on to the module
        self.broadcast_parameters()
        self._watch()

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Inside, backward accumulates local gradients. The next backward outside reduces their sum.

        The place of the call of backward counts; forward may be called outside. Every rank must do the same.
        """
        before = self._synchronise
        self._synchronise = False
        try:
            yield
        finally:
            self._synchronise = before

    @contextmanager
    def join(self) -> Iterator[None]:
        """Inside, ranks may have different numbers of batches: put the loop over batches into the with block.

        The exit blocks until all ranks have left: meanwhile this rank takes part in the others' reductions, without
        gradients of its own. Then all ranks copy parameters and buffers from the lowest rank among the last to leave.
        Gradients are still divided by the number of all ranks, or weighted by samples with `average="samples"`. Costs
        an all_gather of one byte per forward and backward. Every rank must enter the block. Not for a module that calls
        collectives itself, which ranks without batches would not call: give them empty batches instead.

        Raises:
            CollectiveMismatch: ranks run different numbers of forwards per backward.
            UnsupportedOp: there is a SyncBatchNorm in training, which calls collectives.
        """
        _check_calls_no_collectives(self.module)
        with self._joining.on():
            yield
            for step, src in self._joining.others():
                self._shadow(step, src)
            if self._hook is not None:
                self._hook.at_end(list(self.module.parameters()), self._reducer.group)
            self.broadcast_parameters(self._joining.last_active)
            self._reducer.forget()

    def sync_gradients(self) -> None:
        """Replaces all gradients by their mean over all ranks. Blocks until it is done. Works under `no_sync`, too.

        For gradients that backward did not reduce: accumulated under `no_sync`, or set by hand.

        Raises:
            UnsupportedOp, Closed, CollectiveMismatch, PeerFailed, Timeout: as `GradientReducer.finish`.
        """
        self._joining.announce(Next.REDUCTION)
        self._is_prepared = False
        self._reducer.reduce()

    def broadcast_parameters(self, src: int = 0) -> None:
        """Copies the parameters and buffers of rank `src` to all ranks, in place. Blocks until it is done.

        Raises:
            InvalidRank: `src` is not a rank of the group.
            CollectiveMismatch, PeerFailed, Timeout: as `ProcessGroup.broadcast`.
        """
        tensors = [*self.module.parameters(), *self.module.buffers()]
        broadcast_tensors(tensors, self._group, src, self._bucket_mb)

    def extra_repr(self) -> str:
        """Returns the rank and the number of buckets."""
        buckets = len(self._reducer.layout.buckets)
        return f"rank {self._group.rank} of {self._group.world_size}, {buckets} buckets of gradients"

    # Inside

    def before_forward(self) -> None:
        """Called by the module's hooks at the start of a forward that records a graph. May block."""
        if self._watched is None or not self._watched.is_current():
            self._watch()
        # Once per forward that ends well: the other ranks do not know that one failed and is retried, so a second
        # round of collectives would find no partner.
        if self.module.training and self._synchronise and not self._is_prepared:
            self._prepare_forward(first_active(self._joining.announce(Next.FORWARD)) or 0)
            self._is_prepared = True

    def on_forward(self, num_samples: int) -> None:
        """Called by the module's hooks for each forward that needs a backward."""
        self._is_prepared = False
        self._reducer.note_samples(num_samples)
        if self._synchronise:
            self._reducer.note_forward()

    def on_backward(self) -> None:
        """Called by hooks in a backward pass, many times."""
        if not self._is_armed:
            self._is_armed = True
            at_end_of_backward(self._on_end, self._on_failure)

    def before_gradient(self, index: int) -> None:
        """Called by a parameter's hook before autograd adds a gradient. Only with a hook that has a `dtype`."""
        self.on_backward()
        self._reducer.hide(index)

    def on_gradient(self, index: int) -> None:
        """Called by a parameter's hook after autograd added a gradient. Launches full buckets."""
        if not self._synchronise:
            self._reducer.keep(index)
            return
        self.on_backward()
        if not self._reducer.is_under_way:
            self._joining.announce(Next.REDUCTION)
            # Asked anew for each backward: the number of torch's threads may have changed.
            self._runs_beside = can_overlap(self._reducer.group)
        self._reducer.ready(index, launch=self._runs_beside)

    @property
    def compiled_steps(self) -> torch.Tensor:
        """Counter to which compiled code adds 1 for each step of an optimizer of these parameters."""
        return self._reducer.compiled_steps

    def on_step(self) -> None:
        """Called after a step of an optimizer of these parameters."""
        self._reducer.note_step()

    def give_up(self) -> bool:
        """Releases the parameters if this wrapper has failed, so that another may wrap them. True if it did."""
        if self._reducer.is_closed:
            self._unwatch()
        return self._reducer.is_closed

    def _on_end(self) -> None:
        self._is_armed = False
        self._reducer.show()
        # No reduction has begun after torch.autograd.grad, which sets no parameter's .grad.
        if self._reducer.is_under_way:
            self._reducer.start()
            # `finish` blocks, so it goes to the end of the queue: other models in this backward start their buckets
            # first. Ranks may come to two models in different orders, and would wait for each other.
            at_end_of_backward(self._reducer.finish, self._reducer.abandon)

    def _on_failure(self) -> None:
        self._is_armed = False
        self._reducer.show()
        self._reducer.abandon()

    def _watch(self) -> None:
        """Plans buckets for the parameters that require gradients now, and hooks them. Blocks until all ranks have."""
        self._unwatch()
        before, now = self._watched, ParamSnapshot(self.module)
        take_over(now.named)
        if before is not None and (late := now.added_since(before)):
            # In the reducer's group: if only this rank has new parameters, the others are in a reduction there, so
            # the calls meet and raise CollectiveMismatch.
            check_same_model(self.module, self._reducer.group, self._options)
            broadcast_tensors(late, self._reducer.group, bucket_mb=self._bucket_mb)
        self._watched = now
        self._reducer.plan(now.trainable)
        if self._reducer.is_needed:
            # The second hook per parameter is only for rounded gradients, which autograd must not add to.
            is_wide = self._hook is not None and self._hook.dtype is not None
            now.handles = watch_gradients([parameter for _, parameter in now.trainable], self, before=is_wide)
            now.handles += watch_forwards(self.module, self)

    def _unwatch(self) -> None:
        if self._watched is not None:
            self._watched.release()

    def _prepare_forward(self, src: int) -> None:
        """Runs the hook's `before_forward`, then synchronises the buffers. Blocks.

        Args:
            src: the rank whose buffers are broadcast.
        """
        if self._hook is not None:
            self._hook.before_forward(list(self.module.parameters()), self._reducer.group)
        buffers = list(self.module.buffers())
        synchronize_buffers(buffers, self._buffers_are, self._reducer.group, src, self._bucket_mb)

    def _shadow(self, step: Next, src: int) -> None:
        """Takes part in a step of the ranks that still have batches, without gradients of its own."""
        if step == Next.REDUCTION:
            for parameter in self.module.parameters():
                parameter.grad = None
            self._reducer.reduce()
            return
        self._prepare_forward(src)


DDP = DistributedDataParallel


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


def _check_calls_no_collectives(module: torch.nn.Module) -> None:
    for name, layer in module.named_modules():
        if isinstance(layer, torch.nn.SyncBatchNorm) and layer.training:
            raise UnsupportedOp(
                f"{name!r} is a SyncBatchNorm, whose collectives ranks that have left join() would not call: give "
                "ranks without samples empty batches instead of join(), or use BatchNorm"
            )
