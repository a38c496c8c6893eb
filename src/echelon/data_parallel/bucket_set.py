"""The memory of one bucket: gradients in a row, and a view of it for each parameter that can be its .grad."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from echelon._torch_private import version_of
from echelon.backends.admission import check_values, has_values
from echelon.backends.memory import new_tensor
from echelon.data_parallel.broadcast import kind_of
from echelon.data_parallel.hooks import GradientBucket
from echelon.data_parallel.layout.buckets import bucket_layout
from echelon.errors import UnsupportedOp
from echelon.group.group import ProcessGroup

# The home of each parameter's gradient: a place in the memory of one bucket.


class BucketSet:
    """All buckets with their memory, laid out in the order in which gradients come once that is known.

    Where buckets are reduced one behind the other and nothing runs beside, there is one of each kind: ranks then wait
    for each other once.
    """

    def __init__(
        self,
        parameters: Sequence[tuple[str, torch.nn.Parameter]],
        group: ProcessGroup,
        bucket_mb: float,
        dtype: torch.dtype | None,
        learns_order: bool,
    ) -> None:
        """Lays out the buckets in the reverse order of the parameters; they have no memory before `allocate`.

        Args:
            parameters: name and parameter; the same ones in the same order on every rank, each once.
            group: the ranks that reduce them.
            bucket_mb: mebibytes at which a bucket is full.
            dtype: of the memory, where it is wider than that of the parameters.
            learns_order: whether `arrived` is kept for `learn`.

        Raises:
            UnsupportedOp: a parameter has no memory of its own.
            ValueError: `bucket_mb` is not above 0.
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
        """The parameters in the order in which their gradients came, each once or more; None: of no interest."""
        self.memories: list[BucketMemory] = []
        """In the order of the buckets; none before `allocate`."""
        self._order = self._default_order()
        self._is_one = False
        """Whether there is one bucket of each kind."""
        self._lay_out()

    def allocate(self) -> None:
        """Allocates the memory of all buckets. Blocks until all ranks have.

        Raises:
            UnsupportedOp: there is no memory that ranks share.
        """
        self.memories = [self._memory(number) for number in range(len(self.layout.buckets))]

    def bucket_of(self, index: int) -> int:
        """Returns the number of the bucket in which a parameter's gradient lies."""
        return self._homes[index][0]

    def keep(self, index: int) -> None:
        """Moves a gradient that is complete to its home.

        Raises:
            UnsupportedOp: the gradient cannot be reduced.
        """
        home, place = self._homes[index]
        self.memories[home].take(place)

    def hide(self, index: int) -> None:
        """Takes a gradient away that is rounded from wider memory, as autograd is about to add to it.

        Raises:
            UnsupportedOp: the gradient cannot be reduced.
        """
        home, place = self._homes[index]
        self.memories[home].hide(place)

    def show(self) -> None:
        """Gives back what was taken away and not added to."""
        for memory in self.memories:
            memory.show()

    def has_gradients(self) -> list[bool]:
        """Returns, of each parameter, whether its bucket was filled with a gradient of this rank."""
        return [self.memories[home].has_gradient[place] for home, place in self._homes]

    def give(self, index: int) -> None:
        """Makes what a parameter's home holds its gradient."""
        home, place = self._homes[index]
        self.memories[home].give(place)

    def arrange(self, order: Sequence[int], *, in_one: bool) -> None:
        """Lays out the buckets anew, unless they are so already. Every rank must do the same.

        Args:
            order: in which gradients came, the others as before; none: all as before.
            in_one: whether there is one bucket of each kind.

        Raises:
            UnsupportedOp: there is no memory that ranks share.
        """
        if in_one == self._is_one and not order:
            return
        if order:
            seen = set(order)
            self._order = [*order, *(index for index in self._default_order() if index not in seen)]
            self.arrived = None
        self._is_one = in_one
        before, memories = self.layout, self.memories
        self._lay_out()
        if self.layout == before:
            self.memories = memories
            return
        del memories
        for number, bucket in enumerate(self.layout.buckets):  # one by one, as the memory of the old ones becomes free
            self.memories.append(self._memory(number))
            for place in range(len(bucket.members)):
                self.memories[number].take(place)

    def _lay_out(self) -> None:
        sizes = [parameter.numel() * parameter.element_size() for parameter in self._parameters]
        kinds = [kind_of(parameter) for parameter in self._parameters]
        # More buckets cost more than the end of a large one, unless that goes over a link.
        tapers = not self._group.is_native
        if self._is_one:
            self.layout = bucket_layout(sizes, kinds, math.inf, math.inf, self._order, tapers=False)
        else:
            self.layout = bucket_layout(sizes, kinds, self._bucket_mb, order=self._order, tapers=tapers)
        self._homes = self.layout.homes()
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
    """Holds the gradients of the parameters of one bucket.

    In the parameters' own dtype a parameter's gradient *is* its view from its first backward on: there is no second
    copy. In a wider dtype the memory is where gradients are accumulated, and .grad holds what comes out, rounded.
    Autograd must not add to what is rounded, so `hide` takes it away before; what the user has changed counts as it is.
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
        """Allocates the memory, where the ranks of `group` share it, if they can. Every rank must do the same.

        Args:
            number: which bucket.
            names: of the parameters, for errors.
            parameters: of one dtype and device.
            group: the ranks that reduce it.
            planned: the parameters' dtype.
            dtype: of the memory, if it is wider than that; None: the parameters'.
        """
        self.number = number
        self._names = names
        self._parameters = parameters
        self._dtype = planned
        dtype = planned if dtype is None else torch.promote_types(planned, dtype)
        self._is_wide = dtype != planned
        sizes = [parameter.numel() for parameter in parameters]
        device = parameters[0].device
        if device.type == "cpu" and group.world_size > 1:
            self.flat = group.empty(sum(sizes), dtype)
        else:
            self.flat = new_tensor((sum(sizes),), dtype, device)
        self._views = [
            _like(piece, parameter) for piece, parameter in zip(torch.split(self.flat, sizes), parameters, strict=True)
        ]
        self.has_gradient = [False] * len(parameters)
        """Of each parameter: whether this rank has a gradient for the reduction. Set by `fill`."""
        self._shown: list[Tensor | None] = [None] * len(parameters)
        """In a wider dtype: the rounded gradient that .grad was set to."""
        self._versions = [0] * len(parameters)
        """And how often that had been written then."""
        self._is_hidden = [False] * len(parameters)
        """In a wider dtype: whether .grad was taken away until something is added to it."""

    def take(self, index: int) -> None:
        """Moves the gradient of a parameter, which is new or was added to, into the memory.

        Raises:
            UnsupportedOp: the gradient is sparse or has no memory of its own, has a graph of its own, or another dtype
                than the parameter had.
        """
        parameter, view = self._parameters[index], self._views[index]
        gradient = parameter.grad
        if gradient is None or gradient is view:
            return
        if problem := _problem(gradient, self._dtype):
            raise UnsupportedOp(f"the gradient of parameter {self._names[index]!r} {problem}")
        with torch.no_grad():
            if self._is_hidden[index]:
                view.add_(gradient)
            else:
                view.copy_(gradient)
        self.give(index)

    def hide(self, index: int) -> None:
        """Takes a gradient away that is rounded, as autograd is about to add to it.

        Raises:
            UnsupportedOp: as `take`.
        """
        parameter = self._parameters[index]
        if not self._is_wide or parameter.grad is None:
            return
        if not self._is_shown(index):
            self.take(index)
        parameter.grad, self._is_hidden[index] = None, True

    def show(self) -> None:
        """Gives back what was hidden, after a backward that added nothing to it: one of torch.autograd.grad."""
        for index, is_hidden in enumerate(self._is_hidden):
            if is_hidden:
                self.give(index)

    def fill(self) -> None:
        """Takes every gradient that there is, and zeros for the others.

        Raises:
            UnsupportedOp: as `take`.
        """
        for index, (parameter, view) in enumerate(zip(self._parameters, self._views, strict=True)):
            gradient = parameter.grad
            self.has_gradient[index] = gradient is not None or self._is_hidden[index]
            if not self.has_gradient[index]:
                view.zero_()
            elif not self._is_shown(index):
                self.take(index)

    def give(self, index: int) -> None:
        """Makes what the memory holds for a parameter its .grad."""
        parameter, view = self._parameters[index], self._views[index]
        if not self._is_wide:
            parameter.grad = view
            return
        rounded = view.to(self._dtype)
        parameter.grad = self._shown[index] = rounded
        self._versions[index] = version_of(rounded)
        self._is_hidden[index] = False

    def bucket(self, weight: float) -> GradientBucket:
        """Returns the bucket as a hook sees it, with the weight of this rank."""
        return GradientBucket(self.number, self.flat, self._views, self._names, weight)

    def _is_shown(self, index: int) -> bool:
        """Says whether .grad is what this memory holds, rounded, and nobody has changed it."""
        gradient = self._parameters[index].grad
        if gradient is None or gradient is not self._shown[index]:
            return False
        return version_of(gradient) == self._versions[index]


def _like(piece: Tensor, parameter: Tensor) -> Tensor:
    """Returns a piece of the memory in the shape of a parameter, laid out as the parameter if that has no gaps."""
    strides = torch.empty_like(parameter, device="meta").stride()
    return piece.as_strided(parameter.shape, strides, piece.storage_offset())


def _problem(gradient: Tensor, dtype: torch.dtype) -> str:
    """Says why a gradient cannot be reduced, and what to do; nothing if it can."""
    if gradient.layout != torch.strided:
        return "is sparse: make it dense, such as by nn.Embedding(..., sparse=False)"
    if not has_values(gradient):
        return f"is a {type(gradient).__name__} without memory of its own: set .grad to a plain tensor"
    if gradient.requires_grad:
        return (
            "has a graph (create_graph=True), which reducing it would cut: use torch.autograd.grad, then set .grad "
            "and call sync_gradients()"
        )
    if gradient.dtype != dtype:
        return f"is {gradient.dtype}, but it was planned for {dtype}: convert the model first, then wrap it"
    return ""
