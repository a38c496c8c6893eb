"""DistributedDataParallel: wraps a module so that every backward leaves the mean gradient on every rank.

Strategy. Hooks on the parameters tell when a gradient is complete, so it does not matter how the module was called. The
first hook of a backward, that on the module's output if it was called as a whole, asks the engine to be told of the end
of that backward (the outermost, where checkpoints run others inside); there `finish` blocks until all ranks have come.
Everything runs in the thread that called backward; the collectives run in the lane of the reducer's group. Hooks refer
to the wrapper weakly: without it the module is an ordinary one again.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Literal, TypeAlias, get_args

import torch
from torch.utils.hooks import RemovableHandle

from echelon._torch_private import at_end_of_backward
from echelon.data_parallel.agreement import check_same_model
from echelon.data_parallel.broadcast import average_tensors, broadcast_tensors
from echelon.data_parallel.forwards import watch_forwards
from echelon.data_parallel.hooks import GradientHook
from echelon.data_parallel.join import Next, announce, first_active
from echelon.data_parallel.reducer import DEFAULT_BUCKET_MB, Average, GradientReducer
from echelon.errors import UnsupportedOp
from echelon.group import ProcessGroup

Buffers: TypeAlias = Literal["broadcast", "average", "local"]


class DistributedDataParallel(torch.nn.Module):
    """Trains the same module on every rank, each on its own part of the batch.

    After `backward()` each gradient is the mean over all ranks, bit-identical on all of them: what one process gets
    for the whole batch, if the loss is a mean and all parts have the same number of samples (or with
    `average="samples"`). Parameters stay the objects they are, so an optimizer may be made before or after. Those that
    no rank used keep the gradient None; those that only some used get the right mean. Every backward that reaches a
    parameter reduces, also if `module` itself was called, as long as this wrapper lives; a rank on which it reaches
    none calls `sync_gradients()` instead. A rank that runs a forward and skips its backward is told, as are the others.

    Gradients are views of the buckets in which they travel, so they take no memory twice.

    It behaves as the module: attributes, state_dict and named_parameters are the module's, under the same names.

    Not supported, and refused: sparse gradients, `backward(create_graph=True)`.
    """

    module: torch.nn.Module

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
            bucket_mb: mebibytes of gradients that are reduced at a time.
            buffers: before each training forward, buffers (such as the running statistics of BatchNorm) become those
                of rank 0 ("broadcast"), or their mean if they are numbers with a fraction ("average"), or stay
                ("local"). Not under `no_sync`, and not if `module` itself is called.
            average: all ranks weigh the same ("ranks"), or as much as they have samples ("samples"): as the first
                tensor given to forward has rows, over the forwards since gradients were last reduced.
            hook: how a bucket is reduced: to send less, or less often. None: an all_reduce.

        Raises:
            CollectiveMismatch: on every rank, if names, shapes or dtypes of the model or the options differ.
            ValueError: an option that is none.
            UnsupportedOp: a parameter or buffer that the group's backend cannot move, or that has no shape yet.
        """
        super().__init__()
        _check_choice("buffers", buffers, get_args(Buffers))
        _check_choice("average", average, get_args(Average))
        options = [f"bucket_mb={float(bucket_mb)}", f"buffers={buffers}", f"average={average}"]
        self._options = [*options, f"hook={type(hook).__name__}"]
        self._group = group
        self._bucket_mb = float(bucket_mb)
        self._buffers_are = buffers
        self._hook = hook
        self._synchronise = True
        self._joins = False
        self._last_active = 0
        self._is_armed = False
        self._named: list[tuple[str, torch.nn.Parameter]] = []
        self._watched: list[bool] = []
        self._handles: list[RemovableHandle] = []
        _check_has_shapes(module)
        check_same_model(module, group, self._options)
        self._reducer = GradientReducer((), group, bucket_mb=bucket_mb, average=average, hook=hook, learns_order=True)
        self.module = module  # last: from here on new attributes are the module's
        self.broadcast_parameters()
        self._watch()
        if self._reducer.is_needed:
            watch_forwards(module, self)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the module; in training its buffers are synchronised first."""
        if not self._is_watched():
            self._watch()
        if self.module.training and torch.is_grad_enabled():
            self._reducer.hide()
            if self._synchronise:
                self._prepare_forward(first_active(self._announce(Next.FORWARD)) or 0)
        return self.module(*args, **kwargs)

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
        backward. Every rank must enter it.

        Raises:
            CollectiveMismatch: ranks run different numbers of forwards per backward; or, in SyncBatchNorm and the like,
                the module itself calls collectives, which those that have left do not.
        """
        self._joins = True
        try:
            yield
            while (src := first_active(steps := self._announce(Next.NOTHING))) is not None:
                self._shadow(steps[src], src)
            self.broadcast_parameters(self._last_active)
        finally:
            self._joins = False

    def sync_gradients(self) -> None:
        """Replaces all gradients by their mean over all ranks, now; also under `no_sync`.

        For gradients that backward did not reduce: made under `no_sync`, or by hand.

        Raises:
            UnsupportedOp, Closed, CollectiveMismatch, PeerFailed, Timeout: as `GradientReducer.finish`.
        """
        self._announce(Next.REDUCTION)
        self._reducer.reduce()

    def broadcast_parameters(self, src: int = 0) -> None:
        """Overwrites parameters and buffers with those of rank `src`, in place.

        Raises:
            InvalidRank: `src` is not a rank of the group.
            CollectiveMismatch, PeerFailed, Timeout: as `ProcessGroup.broadcast`.
        """
        tensors = [*self.module.parameters(), *self.module.buffers()]
        broadcast_tensors(tensors, self._group, src, self._bucket_mb)

    # As the module itself

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, torch.nn.Parameter]]:
        """Yields the module's parameters under the module's names."""
        return self.module.named_parameters(prefix, recurse, remove_duplicate)

    def named_buffers(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Yields the module's buffers under the module's names."""
        return self.module.named_buffers(prefix, recurse, remove_duplicate)

    def named_modules(
        self, memo: set[torch.nn.Module] | None = None, prefix: str = "", remove_duplicate: bool = True
    ) -> Iterator[tuple[str, torch.nn.Module]]:
        """Yields the module and its submodules under the module's names."""
        yield from self.module.named_modules(memo, prefix, remove_duplicate)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Returns the module's own state_dict, which the bare module can load."""
        return self.module.state_dict(*args, **kwargs)

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Loads a state_dict of the bare module, on this rank; the same on every rank, or broadcast_parameters() after.

        Raises:
            ValueError: assign=True, which would replace the parameters that are being watched.
        """
        if assign:
            raise ValueError("assign=True replaces the parameters: load into the module first, then wrap it")
        return self.module.load_state_dict(state_dict, strict)

    def __getattr__(self, name: str) -> Any:
        own = self.__dict__.get("_modules", {})
        if name == "module" or "module" not in own:
            return super().__getattr__(name)
        return getattr(own["module"], name)

    def __setattr__(self, name: str, value: Any) -> None:
        # A new value for something that the module reads must reach the module.
        own = name in self.__dict__ or any(name in cls.__dict__ for cls in type(self).__mro__)
        if own or name == "module" or "module" not in self.__dict__.get("_modules", {}):
            super().__setattr__(name, value)
        else:
            setattr(self.module, name, value)

    def extra_repr(self) -> str:
        """Returns the rank and the number of buckets."""
        buckets = len(self._reducer.layout.buckets)
        return f"rank {self._group.rank} of {self._group.world_size}, {buckets} buckets of gradients"

    def __getstate__(self) -> Any:
        raise UnsupportedOp("a wrapper belongs to its group and cannot be copied or pickled: take ddp.module instead")

    # Inside

    def on_forward(self, num_samples: int) -> None:
        """Called by the hooks of the module, at the beginning of a forward that records a graph."""
        if self._synchronise:
            self._reducer.note_forward(num_samples)

    def on_backward(self) -> None:
        """Called by the hooks of what the module returned, in a backward pass."""
        if self._synchronise and not self._is_armed:
            self._is_armed = True
            at_end_of_backward(self._on_end, self._on_failure)

    def _on_gradient(self, index: int) -> None:
        if not self._synchronise:
            self._reducer.keep(index)
            return
        self.on_backward()
        if not self._reducer.is_under_way:
            self._announce(Next.REDUCTION)
        self._reducer.ready(index)

    def _on_end(self) -> None:
        self._is_armed = False
        if self._reducer.is_under_way:  # torch.autograd.grad completes no parameter's gradient
            self._reducer.start()
            # Not at once: other models in this backward have to start, too, before one of them is waited for.
            at_end_of_backward(self._reducer.finish, self._reducer.abandon)

    def _on_failure(self) -> None:
        self._is_armed = False
        self._reducer.abandon()

    def _is_watched(self) -> bool:
        now = list(self.module.parameters())
        return len(now) == len(self._named) and all(
            parameter is known and parameter.requires_grad == trainable
            for parameter, (_, known), trainable in zip(now, self._named, self._watched, strict=True)
        )

    def _watch(self) -> None:
        """Plans buckets for the parameters that there are and that require gradients now, and hooks them."""
        for handle in self._handles:
            handle.remove()
        known = {id(parameter) for _, parameter in self._named}
        named = list(self.module.named_parameters())
        if self._named and (late := [parameter for _, parameter in named if id(parameter) not in known]):
            check_same_model(self.module, self._group, self._options)
            broadcast_tensors(late, self._group, bucket_mb=self._bucket_mb)
        self._named = named
        self._watched = [parameter.requires_grad for _, parameter in named]
        trainable = [(name, parameter) for name, parameter in named if parameter.requires_grad]
        self._reducer.plan(trainable)
        self._handles = []
        if self._reducer.is_needed:
            self._handles = [
                parameter.register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]
                    _hook(weakref.ref(self), index)
                )
                for index, (_, parameter) in enumerate(trainable)
            ]

    def _prepare_forward(self, src: int) -> None:
        """Does what the hook and the buffers need before a forward that is to be synchronised.

        Args:
            src: the rank whose buffers are broadcast.
        """
        if self._hook is not None:
            self._hook.before_forward([parameter for _, parameter in self._named], self._reducer.group)
        buffers = list(self.module.buffers())
        if self._buffers_are == "average":
            fractional = [buffer for buffer in buffers if buffer.is_floating_point() or buffer.is_complex()]
            average_tensors(fractional, self._group, self._bucket_mb)
            buffers = [buffer for buffer in buffers if not (buffer.is_floating_point() or buffer.is_complex())]
        if self._buffers_are != "local":
            broadcast_tensors(buffers, self._group, src, self._bucket_mb)

    def _announce(self, step: Next) -> list[Next]:
        """Tells the other ranks what is next, if ranks may leave early; returns what they do."""
        if not self._joins:
            return []
        steps = announce(step, self._reducer.group)
        active = first_active(steps)
        self._last_active = self._last_active if active is None else active
        return steps

    def _shadow(self, step: Next, src: int) -> None:
        """Does what ranks with batches do, without any."""
        if step == Next.REDUCTION:
            for _, parameter in self._named:
                parameter.grad = None
            self._reducer.reduce()
            return
        self._prepare_forward(src)


DDP = DistributedDataParallel


def _hook(owner: weakref.ref[DistributedDataParallel], index: int) -> Callable[[torch.Tensor], None]:
    def on_gradient(_: torch.Tensor) -> None:
        wrapper = owner()
        if wrapper is not None:
            wrapper._on_gradient(index)

    return on_gradient


def _check_choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ValueError(f"{name}={value!r}: use one of {', '.join(map(repr, choices))}")


def _check_has_shapes(module: torch.nn.Module) -> None:
    for name, parameter in module.named_parameters():
        if isinstance(parameter, torch.nn.parameter.UninitializedParameter):
            raise UnsupportedOp(f"parameter {name!r} has no shape yet: run one forward of the model, then wrap it")
