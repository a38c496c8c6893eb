"""DistributedDataParallel: wraps a module so that every backward leaves the mean gradient on every rank.

Strategy. Hooks on the parameters tell when a gradient is complete, so it does not matter how the module was called. The
first hook of a backward, that on the module's output if it was called as a whole, asks the engine to be told of the end
of that backward (the outermost, where checkpoints run others inside); there `finish` blocks until all ranks have come.
Everything runs in the thread that called backward; the collectives run in the lane of the reducer's group, beside
backward, or behind it if they would only take the core from it. Hooks refer to the wrapper weakly: without it the
module is an ordinary one again.
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

# The parameters of a module as they were when a wrapper began to watch them.


class ParamSnapshot:
    """What there was to watch, to compare with what there is, and the hooks that watch it."""

    def __init__(self, module: torch.nn.Module) -> None:
        """Looks at the parameters that there are now."""
        self._module = module
        self.named = list(module.named_parameters())
        self.trainable = [(name, parameter) for name, parameter in self.named if parameter.requires_grad]
        self._requires_grad = [parameter.requires_grad for _, parameter in self.named]
        self.handles: list[RemovableHandle] = []
        """Of the hooks."""

    @property
    def parameters(self) -> list[torch.nn.Parameter]:
        """The parameters, frozen ones too."""
        return [parameter for _, parameter in self.named]

    def is_current(self) -> bool:
        """Says whether these are the module's parameters still, and the same of them are trained."""
        now = list(self._module.parameters())
        return len(now) == len(self.named) and all(
            parameter is known and parameter.requires_grad == trainable
            for parameter, (_, known), trainable in zip(now, self.named, self._requires_grad, strict=True)
        )

    def added_since(self, earlier: ParamSnapshot) -> list[torch.nn.Parameter]:
        """Returns the parameters that there were not earlier."""
        known = set(map(id, earlier.parameters))
        return [parameter for parameter in self.parameters if id(parameter) not in known]

    def release(self) -> None:
        """Takes the hooks off."""
        for handle in self.handles:
            handle.remove()
        self.handles = []


# Brings the buffers of a model together, such as the running statistics of BatchNorm.

Buffers: TypeAlias = Literal["broadcast", "average", "local"]


def synchronize_buffers(
    buffers: Sequence[torch.Tensor], how: Buffers, group: ProcessGroup, src: int, bucket_mb: float
) -> None:
    """Overwrites buffers by those of rank `src`, or by their mean if they are numbers with a fraction; or leaves them.

    Args:
        buffers: same number, shapes and dtypes on every rank.
        how: "broadcast", "average" or "local".
        group: the ranks.
        src: the rank whose buffers are broadcast.
        bucket_mb: mebibytes that travel at a time.

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
    """Trains the same module on every rank, each on its own part of the batch.

    After `backward()` each gradient is the mean over all ranks, bit-identical on all of them: what one process gets
    for the whole batch, if the loss is a mean and all parts have the same number of samples (or with
    `average="samples"`). Parameters stay the objects they are, so an optimizer may be made before or after. Those that
    no rank used keep the gradient None; those that only some used get the right mean. Every backward that reaches a
    parameter reduces, as long as this wrapper lives; a rank on which it reaches none calls `sync_gradients()` instead.
    A rank that runs a forward and skips its backward is told, as are the others; so is one that skips both and lets its
    optimizer make the step; that may be compiled, where the parameters are on the CPU. To call `module` itself is the
    same.

    Gradients are views of the buckets in which they travel, so they take no memory twice.

    It behaves as the module: attributes, state_dict and named_parameters are the module's, under the same names.

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
        """Makes all ranks start from the parameters and buffers of rank 0, written in place.

        Args:
            module: the model, on every rank the same but for its values.
            group: the ranks. Every rank of it must wrap the same modules in the same order.
            bucket_mb: mebibytes of gradients that are reduced at a time beside backward. Where all ranks share memory
                and none has a core left over, all are reduced at once behind it.
            buffers: before each training forward, buffers (such as the running statistics of BatchNorm) become those
                of rank 0 ("broadcast"), or their mean if they are numbers with a fraction ("average"), or stay
                ("local"). Not under `no_sync`.
            average: all ranks weigh the same ("ranks"), or as much as they have samples ("samples"): as the first
                tensor given to forward has rows, added up over the forwards since gradients were last reduced.
            hook: how a bucket is reduced: to send less, or less often. None: an all_reduce.

        Raises:
            CollectiveMismatch: on every rank, if names, shapes or dtypes of the model or the options differ.
            InvalidArgument: `module` is no instance of a module, `group` is no group, or an option is none.
            UnsupportedOp: a parameter or buffer that the group's backend cannot move, or that has no shape yet or no
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
        _check_trains(module)  # after the comparison, so that all ranks raise, or all hear of the difference
        self._reducer = GradientReducer((), group, bucket_mb=bucket_mb, average=average, hook=hook, learns_order=True)
        self._joining = Joining(self._reducer.group)
        self._watched: ParamSnapshot | None = None
        self.module = module  # last: from here on new attributes are the module's
        self.broadcast_parameters()
        self._watch()

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Inside the with block backward leaves each rank's own gradients; the next one outside reduces what adds up.

        What counts is where backward is called; forward may be called outside. Every rank must do the same.
        """
        before = self._synchronise
        self._synchronise = False
        try:
            yield
        finally:
            self._synchronise = before

    @contextmanager
    def join(self) -> Iterator[None]:
        """Inside the with block ranks may have different numbers of batches: put the loop over batches into it.

        A rank that leaves the block goes on reducing with the others, without gradients of its own, until all have
        left; then all take parameters and buffers of the first of those that left last. Gradients are still divided by
        the number of all ranks, or weigh by samples if `average` says so. Costs a round of one byte per forward and
        backward. Every rank must enter it. Not for a module that calls collectives itself, which ranks that have left
        would not call: give ranks without samples empty batches instead.

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
        """Replaces all gradients by their mean over all ranks, now; also under `no_sync`.

        For gradients that backward did not reduce: made under `no_sync`, or by hand.

        Raises:
            UnsupportedOp, Closed, CollectiveMismatch, PeerFailed, Timeout: as `GradientReducer.finish`.
        """
        self._joining.announce(Next.REDUCTION)
        self._is_prepared = False
        self._reducer.reduce()

    def broadcast_parameters(self, src: int = 0) -> None:
        """Overwrites parameters and buffers with those of rank `src`, in place.

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
        """Called by the hooks of the module, at the beginning of a forward that records a graph."""
        if self._watched is None or not self._watched.is_current():
            self._watch()
        # Once only, if a forward fails and is tried again: the other ranks do not know of that.
        if self.module.training and self._synchronise and not self._is_prepared:
            self._prepare_forward(first_active(self._joining.announce(Next.FORWARD)) or 0)
            self._is_prepared = True

    def on_forward(self, num_samples: int) -> None:
        """Called by the hooks of the module, for each forward that is to have a backward."""
        self._is_prepared = False
        self._reducer.note_samples(num_samples)
        if self._synchronise:
            self._reducer.note_forward()

    def on_backward(self) -> None:
        """Called by hooks in a backward pass."""
        if not self._is_armed:
            self._is_armed = True
            at_end_of_backward(self._on_end, self._on_failure)

    def before_gradient(self, index: int) -> None:
        """Called by the hooks of a parameter, before a gradient is added to it, if the hook accumulates itself."""
        self.on_backward()
        self._reducer.hide(index)

    def on_gradient(self, index: int) -> None:
        """Called by the hooks of a parameter, when a gradient was added to it."""
        if not self._synchronise:
            self._reducer.keep(index)
            return
        self.on_backward()
        if not self._reducer.is_under_way:
            self._joining.announce(Next.REDUCTION)
            self._runs_beside = can_overlap(self._reducer.group)
        self._reducer.ready(index, launch=self._runs_beside)

    @property
    def compiled_steps(self) -> torch.Tensor:
        """Counted up by compiled code, for each step of an optimizer of these parameters."""
        return self._reducer.compiled_steps

    def on_step(self) -> None:
        """Called after a step of an optimizer of these parameters."""
        self._reducer.note_step()

    def give_up(self) -> bool:
        """Called by another wrapper that is to have the same parameters: leaves them to it after a failure."""
        if self._reducer.is_closed:
            self._unwatch()
        return self._reducer.is_closed

    def _on_end(self) -> None:
        self._is_armed = False
        self._reducer.show()
        if self._reducer.is_under_way:  # torch.autograd.grad completes no parameter's gradient
            self._reducer.start()
            # Not at once: other models in this backward have to start, too, before one of them is waited for.
            at_end_of_backward(self._reducer.finish, self._reducer.abandon)

    def _on_failure(self) -> None:
        self._is_armed = False
        self._reducer.show()
        self._reducer.abandon()

    def _watch(self) -> None:
        """Plans buckets for the parameters that there are and that require gradients now, and hooks them."""
        self._unwatch()
        before, now = self._watched, ParamSnapshot(self.module)
        take_over(now.named)
        if before is not None and (late := now.added_since(before)):
            # Where gradients travel, so that a rank which alone has new ones is told.
            check_same_model(self.module, self._reducer.group, self._options)
            broadcast_tensors(late, self._reducer.group, bucket_mb=self._bucket_mb)
        self._watched = now
        self._reducer.plan(now.trainable)
        if self._reducer.is_needed:
            is_wide = self._hook is not None and self._hook.dtype is not None
            now.handles = watch_gradients([parameter for _, parameter in now.trainable], self, before=is_wide)
            now.handles += watch_forwards(self.module, self)

    def _unwatch(self) -> None:
        if self._watched is not None:
            self._watched.release()

    def _prepare_forward(self, src: int) -> None:
        """Does what the hook and the buffers need before a forward that is to be synchronised.

        Args:
            src: the rank whose buffers are broadcast.
        """
        if self._hook is not None:
            self._hook.before_forward(list(self.module.parameters()), self._reducer.group)
        buffers = list(self.module.buffers())
        synchronize_buffers(buffers, self._buffers_are, self._reducer.group, src, self._bucket_mb)

    def _shadow(self, step: Next, src: int) -> None:
        """Does what ranks with batches do, without any."""
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
