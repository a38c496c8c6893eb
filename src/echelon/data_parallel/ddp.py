"""DistributedDataParallel: wraps a module so that every backward leaves the mean gradient on every rank.

Strategy. Hooks on the parameters, not on the module, tell when a gradient is complete, so it does not matter how the
module was called. The first hook of a backward asks the engine to be told of the end of that backward; there `finish`
blocks until all ranks have come. Everything runs in the thread that called backward; the collectives run in the lane of
the reducer's group. Hooks refer to the wrapper weakly: without it the module is an ordinary one again.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from echelon._torch_private import at_end_of_backward
from echelon.data_parallel.agreement import check_same_model
from echelon.data_parallel.broadcast import broadcast_tensors
from echelon.data_parallel.reducer import DEFAULT_BUCKET_MB, GradientReducer
from echelon.errors import UnsupportedOp
from echelon.group import ProcessGroup


class DistributedDataParallel(torch.nn.Module):
    """Trains the same module on every rank, each on its own part of the batch.

    After `backward()` each gradient is the mean over all ranks, bit-identical on all of them: what one process gets
    for the whole batch, if the loss is a mean and all parts have the same number of samples. Parameters stay the
    objects they are, so an optimizer may be made before or after. Those that no rank used keep the gradient None; those
    that only some used get the right mean. Every backward that reaches a parameter reduces, also if `module` itself was
    called, as long as this wrapper lives; a rank on which it reaches none calls `sync_gradients()` instead.

    It behaves as the module: attributes, state_dict and named_parameters are the module's, under the same names.

    Not supported, and refused: sparse gradients, `backward(create_graph=True)`.
    """

    module: torch.nn.Module

    def __init__(
        self,
        module: torch.nn.Module,
        group: ProcessGroup,
        bucket_mb: float = DEFAULT_BUCKET_MB,
        broadcast_buffers: bool = True,
    ) -> None:
        """Makes all ranks start from the parameters and buffers of rank 0, written in place.

        Args:
            module: the model, on every rank the same but for its values.
            group: the ranks. Every rank of it must wrap the same modules in the same order.
            bucket_mb: mebibytes of gradients that are reduced at a time.
            broadcast_buffers: before each training forward, buffers (such as the running statistics of BatchNorm)
                become those of rank 0. Not under `no_sync`, and not if `module` itself is called.

        Raises:
            CollectiveMismatch: on every rank, if names, shapes or dtypes of the model or the options differ.
            ValueError: `bucket_mb` is not above 0.
            UnsupportedOp: a parameter or buffer that the group's backend cannot move.
        """
        super().__init__()
        options = [f"bucket_mb={float(bucket_mb)}", f"broadcast_buffers={broadcast_buffers}"]
        check_same_model(module, group, options)
        self._group = group
        self._bucket_mb = float(bucket_mb)
        self._broadcast_buffers = broadcast_buffers
        self._synchronise = True
        self._named = list(module.named_parameters())
        self._reducer = GradientReducer((), group, bucket_mb=bucket_mb)
        self._watched: list[bool] = []
        self._handles: list[RemovableHandle] = []
        self.module = module  # last: from here on new attributes are the module's
        self.broadcast_parameters()
        self._watch()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the module; in training its buffers become those of rank 0 first."""
        if self._watched != [parameter.requires_grad for _, parameter in self._named]:
            self._watch()
        if self._broadcast_buffers and self._synchronise and self.module.training and torch.is_grad_enabled():
            broadcast_tensors(list(self.module.buffers()), self._group, bucket_mb=self._bucket_mb)
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

    def sync_gradients(self) -> None:
        """Replaces all gradients by their mean over all ranks, now; also under `no_sync`.

        For gradients that backward did not reduce: made under `no_sync`, or by hand.

        Raises:
            UnsupportedOp, Closed, CollectiveMismatch, PeerFailed, Timeout: as `GradientReducer.finish`.
        """
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

    def _watch(self) -> None:
        """Plans buckets for the parameters that require gradients now, and hooks them."""
        for handle in self._handles:
            handle.remove()
        trainable = [(name, parameter) for name, parameter in self._named if parameter.requires_grad]
        self._reducer.plan(trainable)
        self._watched = [parameter.requires_grad for _, parameter in self._named]
        self._handles = []
        if self._group.world_size > 1:
            self._handles = [
                parameter.register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]
                    _hook(weakref.ref(self), index)
                )
                for index, (_, parameter) in enumerate(trainable)
            ]

    def _on_gradient(self, index: int) -> None:
        if not self._synchronise:
            return
        if not self._reducer.is_under_way:
            at_end_of_backward(self._reducer.finish, self._reducer.abandon)
        self._reducer.ready(index)


DDP = DistributedDataParallel


def _hook(owner: weakref.ref[DistributedDataParallel], index: int) -> Callable[[torch.Tensor], None]:
    def on_gradient(_: torch.Tensor) -> None:
        wrapper = owner()
        if wrapper is not None:
            wrapper._on_gradient(index)

    return on_gradient
