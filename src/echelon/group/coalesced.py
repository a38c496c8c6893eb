"""Collectives of a group on lists of tensors, with argument checks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import ParamSpec, TypeVar, overload

from torch import Tensor

from echelon.arguments import named
from echelon.backends.memory import check_dense, check_writable, wrong_device
from echelon.backends.work import Work
from echelon.collectives.calls import coalesced
from echelon.collectives.calls.operations import Operation
from echelon.errors import InvalidArgument, SizeMismatch
from echelon.group.base import GroupBase, No, Seconds, Yes
from echelon.group.staging import Copies

P = ParamSpec("P")
T = TypeVar("T")


class CoalescedCollectives(GroupBase):
    """Collectives on lists of tensors. All ranks of a group must call them together.

    Each result equals that of the collective of the same name for every tensor by itself. Reductions send as many
    messages as for one tensor per dtype, gathers as for one tensor. The n-th tensors of all ranks must match. dtypes
    may be mixed. A list may be empty, on all ranks.
    """

    @overload
    def all_reduce_coalesced(
        self, tensors: Sequence[Tensor], op: str = ..., async_op: No = ..., timeout: Seconds = ...
    ) -> list[Tensor]: ...
    @overload
    def all_reduce_coalesced(
        self, tensors: Sequence[Tensor], op: str = ..., *, async_op: Yes, timeout: Seconds = ...
    ) -> Work[list[Tensor]]: ...
    def all_reduce_coalesced(
        self, tensors: Sequence[Tensor], op: str = "sum", async_op: bool = False, timeout: Seconds = None
    ) -> list[Tensor] | Work[list[Tensor]]:
        """Combines every tensor over all ranks, in place, and returns them.

        Args:
            tensors: The same shapes and dtypes on every rank.
            op, async_op, timeout: As in `all_reduce`. The timeout applies to each dtype.
        """
        copies = self._check_all(tensors, "all_reduce_coalesced", in_place=True)
        operations = coalesced.all_reduce_coalesced(copies.tensors, op)
        return self._call_all(operations, lambda: copies.copy_back_into(tensors), copies, async_op, timeout, tensors)

    @overload
    def reduce_coalesced(
        self, tensors: Sequence[Tensor], dst: int, op: str = ..., async_op: No = ..., timeout: Seconds = ...
    ) -> list[Tensor]: ...
    @overload
    def reduce_coalesced(
        self, tensors: Sequence[Tensor], dst: int, op: str = ..., *, async_op: Yes, timeout: Seconds = ...
    ) -> Work[list[Tensor]]: ...
    def reduce_coalesced(
        self, tensors: Sequence[Tensor], dst: int, op: str = "sum", async_op: bool = False, timeout: Seconds = None
    ) -> list[Tensor] | Work[list[Tensor]]:
        """Combines every tensor over all ranks, in place on rank `dst`, and returns them. Unchanged on other ranks.

        Args:
            tensors, op, async_op, timeout: As in `all_reduce_coalesced`.
            dst: Rank that gets the results.
        """
        self._check_rank(dst, "dst")
        is_dst = self.rank == dst
        copies = self._check_all(tensors, "reduce_coalesced", in_place=is_dst)
        operations = coalesced.reduce_coalesced(copies.tensors, dst, op, is_dst)
        finish = (lambda: copies.copy_back_into(tensors)) if is_dst else (lambda: list(tensors))
        return self._call_all(operations, finish, copies, async_op, timeout, tensors if is_dst else ())

    @overload
    def reduce_scatter_coalesced(
        self, tensors: Sequence[Tensor], op: str = ..., async_op: No = ..., timeout: Seconds = ...
    ) -> list[Tensor]: ...
    @overload
    def reduce_scatter_coalesced(
        self, tensors: Sequence[Tensor], op: str = ..., *, async_op: Yes, timeout: Seconds = ...
    ) -> Work[list[Tensor]]: ...
    def reduce_scatter_coalesced(
        self, tensors: Sequence[Tensor], op: str = "sum", async_op: bool = False, timeout: Seconds = None
    ) -> list[Tensor] | Work[list[Tensor]]:
        """Combines every tensor over all ranks and returns this rank's part of each. The tensors are unchanged.

        Args:
            tensors: The same shapes and dtypes on every rank, at least one dim each. Split as in `reduce_scatter`.
            op, async_op, timeout: As in `all_reduce_coalesced`.

        Raises:
            SizeMismatch: a tensor has no dims.
        """
        copies = self._check_all(tensors, "reduce_scatter_coalesced")
        for number, tensor in enumerate(tensors):
            if tensor.dim() == 0:
                what = f"reduce_scatter_coalesced, tensor {number}"
                raise SizeMismatch("a tensor with at least 1 dim", "a zero-dim tensor", what, "reshape it")
        results: list[Tensor] = []
        operations = coalesced.reduce_scatter_coalesced(copies.tensors, op, self.rank, self.world_size, results)
        return self._call_all(operations, lambda: copies.copy_back(results), copies, async_op, timeout)

    @overload
    def all_gather_coalesced(
        self, tensors: Sequence[Tensor], async_op: No = ..., timeout: Seconds = ...
    ) -> list[Tensor]: ...
    @overload
    def all_gather_coalesced(
        self, tensors: Sequence[Tensor], *, async_op: Yes, timeout: Seconds = ...
    ) -> Work[list[Tensor]]: ...
    def all_gather_coalesced(
        self, tensors: Sequence[Tensor], async_op: bool = False, timeout: Seconds = None
    ) -> list[Tensor] | Work[list[Tensor]]:
        """Returns each tensor concatenated over all ranks, along dim 0 in rank order.

        Args:
            tensors: The same dtypes, and the same dims except the first, on every rank; see `all_gather`.
            async_op, timeout: As in `all_reduce`.
        """
        copies = self._check_all(tensors, "all_gather_coalesced")
        operation = coalesced.all_gather_coalesced(copies.tensors)
        return self._call(copies.around(operation, copies.copy_back), async_op, timeout)

    @overload
    def gather_coalesced(
        self, tensors: Sequence[Tensor], dst: int, async_op: No = ..., timeout: Seconds = ...
    ) -> list[Tensor] | None: ...
    @overload
    def gather_coalesced(
        self, tensors: Sequence[Tensor], dst: int, *, async_op: Yes, timeout: Seconds = ...
    ) -> Work[list[Tensor] | None]: ...
    def gather_coalesced(
        self, tensors: Sequence[Tensor], dst: int, async_op: bool = False, timeout: Seconds = None
    ) -> list[Tensor] | Work[list[Tensor] | None] | None:
        """Returns the result of `all_gather_coalesced` on rank `dst`, None on other ranks.

        Args:
            tensors, async_op, timeout: As in `all_gather_coalesced`.
            dst: Rank that gets the results.
        """
        self._check_rank(dst, "dst")
        copies = self._check_all(tensors, "gather_coalesced")

        def finish(found: list[Tensor] | None) -> list[Tensor] | None:
            return None if found is None else copies.copy_back(found)

        return self._call(copies.around(coalesced.gather_coalesced(copies.tensors, dst), finish), async_op, timeout)

    def _check_all(self, tensors: Sequence[Tensor], what: str, *, in_place: bool = False) -> Copies:
        """Checks all tensors of a call. Returns them, with host copies of tensors that the backend cannot move."""
        self._check_open()
        if not isinstance(tensors, list | tuple):  # a generator would be empty after this check
            raise InvalidArgument(f"{what} takes a list of tensors, but they are {named(tensors)}: pass a list")
        away = []
        for number, tensor in enumerate(tensors):
            name = f"{what}, tensor {number}"
            if not check_dense(tensor, self.backend.devices, name):
                away.append(number)
            if in_place:
                check_writable(tensor, name)
        if not away:
            return Copies(tensors, {})
        landings = {away[0]: self._land(tensors[away[0]], what)}  # logs the fallback, once for all tensors
        for number in away[1:]:
            if not self.backend.host_copies.handles(tensors[number]):
                raise wrong_device(tensors[number], self.backend.devices, f"{what}, tensor {number}")
            landings[number] = self.backend.host_copies.to_host(tensors[number])
        return Copies(tensors, landings)

    def _call_all(
        self,
        operations: Sequence[Operation[None]],
        result: Callable[[], T],
        copies: Copies,
        async_op: bool,
        timeout: Seconds,
        changes: Sequence[Tensor] = (),
    ) -> T | Work[T]:
        """Runs operations one after another. The last one returns the result, or raises the first error of any."""
        errors: list[Exception] = []
        works: list[Work[T]] = []

        def before() -> None:
            for work in works:
                # Marks its error as seen: the caller has only the last work, which raises the error in its stead.
                work.exception()
            if errors:
                raise errors[0]

        def noticing(run: Callable[P, None]) -> Callable[P, T]:
            def notice(*args: P.args, **kwargs: P.kwargs) -> T:
                before()
                try:
                    run(*args, **kwargs)
                except Exception as error:
                    errors.append(error)
                    raise
                return result()

            return notice

        for operation in operations:
            arrived = copies.around(operation, lambda _: None)
            act, native = noticing(arrived.act), noticing(arrived.native)
            whole = Operation(operation.note, act, native, operation.num_bytes)
            outcome = self._call(whole, async_op, timeout, changes=changes)
            if isinstance(outcome, Work):
                works.append(outcome)
        return outcome
