"""The home of each parameter's gradient: a place in the memory of one bucket."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from echelon.backends.admission import check_values
from echelon.data_parallel.broadcast import kind_of
from echelon.data_parallel.bucket_memory import BucketMemory
from echelon.data_parallel.buckets import bucket_layout
from echelon.group import ProcessGroup


class Homes:
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
