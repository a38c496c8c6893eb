"""Memory of the gradient buckets: one flat tensor per bucket, with a view per parameter that can be its .grad."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from echelon._torch_private.tensors import version_of
from echelon.backends.admission import check_values, has_values
from echelon.backends.memory import new_tensor
from echelon.data_parallel.broadcast import kind_of
from echelon.data_parallel.hooks import GradientBucket
from echelon.data_parallel.layout import bucket_layout
from echelon.errors import UnsupportedOp
from echelon.group.group import ProcessGroup


class BucketSet:
    """All buckets of a reducer with their memory. A parameter's home is its place in one bucket.

    Buckets follow the order in which gradients come, once it is known. If reductions cannot overlap with backward,
    there is one bucket per kind, so ranks wait for each other once.
    """

    def __init__(
        self,
        parameters: Sequence[tuple[str, torch.nn.Parameter]],
        group: ProcessGroup,
        bucket_mb: float,
        dtype: torch.dtype | None,
        learns_order: bool,
    ) -> None:
        """Lays out the buckets in the reverse order of the parameters. `allocate` gives them memory.

        Args:
            parameters: name and parameter; the same ones in the same order on every rank, each once.
            group: the ranks that reduce them.
            bucket_mb: mebibytes at which a bucket is full.
            dtype: dtype of the memory, if it is wider than the parameters' dtype.
            learns_order: whether to record `arrived`, for `arrange`.

        Raises:
            UnsupportedOp: a parameter has no memory of its own.
            InvalidArgument: `bucket_mb` is not above 0.
        """
        for name, parameter in parameters:
            check_values(parameter, f"GradientReducer, parameter {name!r},")
        self._group = group
        self._bucket_mb = bucket_mb
        self._dtype = dtype
        self.names = [name for name, _ in parameters]
        self._parameters = [parameter for _, parameter in parameters]
        self._dtypes = [parameter.dtype for parameter in self._parameters]
        self.arrived: list[int] | None = [] if learns_order else None
        """Parameters in the order in which their gradients came, each once or more. None if not needed."""
        self.memories: list[BucketMemory] = []
        """Memory of each bucket, in the layout's order. Empty before `allocate`."""
        self.order = self._default_order()
        """Numbers of the parameters in the order of their gradients, which the layout follows."""
        self.is_one = False
        """Whether there is one bucket per kind."""
        self._lay_out()

    def allocate(self) -> None:
        """Allocates the memory of all buckets. Blocks until all ranks have.

        Raises:
            UnsupportedOp: the shared memory could not be allocated.
        """
        self.memories = [self._memory(number) for number in range(len(self.layout.buckets))]

    def store(self, index: int) -> None:
        """Moves a complete gradient into its bucket and makes .grad a view of it, as under `no_sync`.

        Raises:
            UnsupportedOp: the gradient cannot be reduced.
        """
        number, place = self.homes[index]
        self.memories[number].store(place)

    def detach_rounded(self, index: int) -> None:
        """Removes a .grad that was rounded from wider memory. Call it before autograd adds to the gradient.

        Raises:
            UnsupportedOp: the gradient cannot be reduced.
        """
        number, place = self.homes[index]
        self.memories[number].detach_rounded(place)

    def restore_rounded(self) -> None:
        """Restores detached gradients that the backward did not touch, as torch.autograd.grad leaves all of them."""
        for memory in self.memories:
            memory.restore_rounded()

    def has_gradients(self) -> list[bool]:
        """Returns, per parameter, whether this rank put a gradient into its bucket."""
        return [self.memories[number].has_gradient[place] for number, place in self.homes]

    def expose(self, which: Sequence[bool | int]) -> None:
        """Sets the .grad of each parameter for which `which` is true from its bucket."""
        for (number, place), is_wanted in zip(self.homes, which, strict=True):
            if is_wanted:
                self.memories[number].expose(place)

    def arrange(self, order: Sequence[int], *, in_one: bool) -> None:
        """Lays out the buckets anew if the layout changes. Every rank must call it with the same arguments.

        Blocks, if it does, until all ranks have allocated the new memory.

        Args:
            order: parameters in the order in which their gradients came; the others follow. Empty: no change.
            in_one: whether to make one bucket per kind.

        Raises:
            UnsupportedOp: the shared memory could not be allocated.
        """
        if in_one == self.is_one and not order:
            return
        if order:
            seen = set(order)
            self.order = [*order, *(index for index in self._default_order() if index not in seen)]
            self.arrived = None
        self.is_one = in_one
        before, memories = self.layout, self.memories
        self._lay_out()
        if self.layout == before:
            self.memories = memories
            return
        # Bucket by bucket: each `store` moves gradients out of old memory, which is freed with its last view. Without
        # the `del`, old and new buckets would all be alive at once.
        del memories
        for number, bucket in enumerate(self.layout.buckets):
            self.memories.append(self._memory(number))
            for place in range(len(bucket.members)):
                self.memories[number].store(place)

    def _lay_out(self) -> None:
        sizes = [parameter.numel() * parameter.element_size() for parameter in self._parameters]
        kinds = [kind_of(parameter) for parameter in self._parameters]
        # Smaller buckets towards the end hide the tail of a transfer over a link. In shared memory there is no such
        # tail, and each further bucket costs a meeting of all ranks.
        tapers = not self._group.is_native
        if self.is_one:
            self.layout = bucket_layout(sizes, kinds, math.inf, math.inf, self.order, tapers=False)
        else:
            self.layout = bucket_layout(sizes, kinds, self._bucket_mb, order=self.order, tapers=tapers)
        self.homes = self.layout.homes()
        self.memories = []

    def _default_order(self) -> list[int]:
        return list(reversed(range(len(self._parameters))))

    def _memory(self, number: int) -> BucketMemory:
        members = self.layout.buckets[number].members
        return BucketMemory(
            number,
            [self.names[member] for member in members],
            [self._parameters[member] for member in members],
            self._group,
            self._dtypes[members[0]],
            self._dtype,
        )


class BucketMemory:
    """Memory of one bucket: the gradients of its parameters in a row.

    In the parameters' own dtype, .grad *is* the view of this memory from the first backward on: there is no second
    copy. In a wider dtype, gradients are accumulated here and .grad is a rounded copy. Autograd must not add to a
    rounded copy, so `detach_rounded` removes it before. A .grad that the user changed replaces the accumulated value.

    A program may keep a .grad, as `history.append(p.grad)` does, and set .grad to None. Before the memory is written,
    the kept view gets memory of its own, and a new view takes its place here.
    """

    def __init__(
        self,
        number: int,
        names: Sequence[str],
        parameters: Sequence[torch.nn.Parameter],
        group: ProcessGroup,
        planned: torch.dtype,
        dtype: torch.dtype | None = None,
    ) -> None:
        """Allocates the memory, shared between the ranks of `group` if possible. Every rank must do the same.

        Blocks, for a CPU tensor, until all ranks have.

        Args:
            number: number of the bucket in the layout.
            names: names of the parameters, for errors.
            parameters: parameters of one dtype and device.
            group: the ranks that reduce it.
            planned: the parameters' dtype.
            dtype: dtype of the memory, if it is wider than `planned`. None: `planned`.
        """
        self.number = number
        self._names = names
        self._parameters = parameters
        self._dtype = planned
        dtype = planned if dtype is None else torch.promote_types(planned, dtype)
        self._is_wide = dtype != planned
        ends = list(accumulate(parameter.numel() for parameter in parameters))
        device = parameters[0].device
        # `group.empty` is memory that local ranks share, so a reduction copies nothing into a staging buffer. A GPU's
        # memory is not, and one rank alone has nobody to share it with.
        if device.type == "cpu" and group.world_size > 1:
            self.flat = group.empty(ends[-1], dtype)
        else:
            self.flat = new_tensor((ends[-1],), dtype, device)
        self._storage = self.flat.untyped_storage()
        self._pieces = [slice(start, end) for start, end in pairwise([0, *ends])]
        self._views = [self._new_view(index) for index in range(len(parameters))]
        view = self._views[0]  # a local variable has it in `store` and `fill`, too
        self._num_own_references = self._num_references(0)
        """References to a view whose .grad is another tensor. Measured, as it depends on the version of Python."""
        del view
        self._offsets = [view.storage_offset() for view in self._views]
        self.has_gradient = [False] * len(parameters)
        """Per parameter, whether this rank has a gradient for the reduction. Set by `fill`."""
        self._rounded: list[Tensor | None] = [None] * len(parameters)
        """Wider dtype only: the rounded gradient that .grad was set to."""
        self._versions = [0] * len(parameters)
        """Wider dtype only: autograd's version of each tensor in `_rounded` at that time."""
        self._rounded_storages: list[torch.UntypedStorage | None] = [None] * len(parameters)
        """Wider dtype only: the storage of each tensor in `_rounded` at that time."""
        self._is_detached = [False] * len(parameters)
        """Wider dtype only: whether .grad was removed by `detach_rounded` and not set since."""

    def store(self, index: int) -> None:
        """Moves a parameter's new or changed gradient into the memory, then sets .grad from it.

        Raises:
            UnsupportedOp: the gradient is sparse, has no memory of its own, has a graph, or has another dtype than the
                parameter had.
        """
        gradient, view = self._parameters[index].grad, self._view(index)
        # Fast path: with zero_grad(set_to_none=False) autograd adds to the view in place, so there is nothing to copy.
        if gradient is None or gradient is view:
            return
        if not has_values(gradient) or gradient.requires_grad or gradient.dtype != self._dtype:
            raise UnsupportedOp(f"the gradient of parameter {self._names[index]!r} {_problem(gradient, self._dtype)}")
        if self._num_references(index) > self._num_own_references:
            view = self._replace_kept(index)
        with torch.no_grad():
            # Detached: .grad is only the part that this backward computed. Otherwise it is the whole gradient.
            if self._is_detached[index]:
                view.add_(gradient)
            else:
                view.copy_(gradient)
        self.expose(index)

    def detach_rounded(self, index: int) -> None:
        """Removes a rounded .grad before autograd adds to it. Does nothing without a wider dtype.

        Raises:
            UnsupportedOp: as `store`.
        """
        parameter = self._parameters[index]
        if not self._is_wide or parameter.grad is None:
            return
        # The user changed .grad, by clipping for instance: that value is the one to add to.
        if not self._is_rounded(index):
            self.store(index)
        parameter.grad, self._is_detached[index] = None, True

    def restore_rounded(self) -> None:
        """Restores detached gradients that were not set since."""
        for index, is_detached in enumerate(self._is_detached):
            if is_detached:
                self.expose(index)

    def fill(self) -> None:
        """Brings the memory up to date: all gradients of this rank, and zeros for parameters without one.

        Raises:
            UnsupportedOp: as `store`.
        """
        for index, parameter in enumerate(self._parameters):
            gradient, view = parameter.grad, self._view(index)
            self.has_gradient[index] = self.is_there(index)
            if self.has_gradient[index]:
                if gradient is not view and not self._is_rounded(index):
                    del view  # it would count as kept
                    self.store(index)
                continue
            if self._num_references(index) > self._num_own_references:
                view = self._replace_kept(index)
            view.zero_()

    def is_there(self, index: int) -> bool:
        """Whether a parameter has a gradient now."""
        return self._parameters[index].grad is not None or self._is_detached[index]

    def expose(self, index: int) -> None:
        """Sets a parameter's .grad: the view itself, or a rounded copy of it if the memory is wider."""
        parameter, view = self._parameters[index], self._views[index]
        if not self._is_wide:
            parameter.grad = view
            return
        rounded = view.to(self._dtype)
        parameter.grad = self._rounded[index] = rounded
        self._versions[index] = version_of(rounded)
        self._rounded_storages[index] = rounded.untyped_storage()
        self._is_detached[index] = False

    def bucket(self, weight: float) -> GradientBucket:
        """Returns the argument of `GradientHook.reduce`. `weight` is the weight of this rank in the mean."""
        return GradientBucket(self.number, self.flat, self._views, self._names, weight, tuple(self.has_gradient))

    def _is_rounded(self, index: int) -> bool:
        """Whether .grad is still the rounded copy that `expose` set, with its values unchanged."""
        gradient = self._parameters[index].grad
        if gradient is None or gradient is not self._rounded[index]:
            return False
        # The same object is not enough: the user may have written to it in place, which raises autograd's version, or
        # given it other memory by `.grad.data = ...`, which does not.
        has_memory = gradient.untyped_storage() is self._rounded_storages[index]
        return has_memory and version_of(gradient) == self._versions[index]

    def _view(self, index: int) -> Tensor:
        """Returns the view of a gradient's place in the memory. It is made anew if the user gave it other memory."""
        view = self._views[index]
        # `.grad.data = ...`, and with it `module.to(...)`, moves the view itself away from the bucket.
        if view.untyped_storage() is not self._storage or view.storage_offset() != self._offsets[index]:
            view = self._views[index] = self._new_view(index)
        return view

    def _replace_kept(self, index: int) -> Tensor:
        """Gives a view that the program kept memory of its own, with its values. Returns a new view."""
        kept = self._views[index]
        kept.data = kept.detach().clone()
        return self._view(index)

    def _num_references(self, index: int) -> int:
        return sys.getrefcount(self._views[index])

    def _new_view(self, index: int) -> Tensor:
        return _like(self.flat[self._pieces[index]], self._parameters[index])


def _like(piece: Tensor, parameter: Tensor) -> Tensor:
    """Returns a piece of the memory with a parameter's shape, and its strides unless they leave gaps."""
    # The strides that empty_like chooses are those that autograd gives a new gradient; "meta" allocates nothing.
    strides = torch.empty_like(parameter, device="meta").stride()
    return piece.as_strided(parameter.shape, strides, piece.storage_offset())


def _problem(gradient: Tensor, dtype: torch.dtype) -> str:
    """Returns the reason why a gradient cannot be reduced, and the fix."""
    if gradient.layout != torch.strided:
        return "is sparse: make it dense, such as by nn.Embedding(..., sparse=False)"
    if not has_values(gradient):
        return f"is a {type(gradient).__name__} without memory of its own: set .grad to a plain tensor"
    if gradient.requires_grad:
        return (
            "has a graph (create_graph=True), which reducing it would cut: use torch.autograd.grad, then set .grad "
            "and call sync_gradients()"
        )
    return f"is {gradient.dtype}, but it was planned for {dtype}: convert the model first, then wrap it"
