"""Collectives of a group on lists of tensors, with argument checks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar, cast, overload

from torch import Tensor

from echelon.arguments import named
from echelon.backends.host_copies import HostCopy
from echelon.backends.memory import check_dense, check_writable
from echelon.backends.work import Work
from echelon.collectives.calls import coalesced
from echelon.collectives.calls.coalesced import Packed
from echelon.errors import InvalidArgument, SizeMismatch
from echelon.group.base import GroupBase, No, Seconds, Yes
from echelon.group.staging import Around, nothing, to_host

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

        Raises:
            InvalidArgument: `tensors` is no list.
            CollectiveMismatch, PeerFailed, DeadlockError, Timeout, Closed, UnsupportedOp: as for the class.
        """
        copies = self._check_all(tensors, "all_reduce_coalesced", in_place=True)
        packs = coalesced.all_reduce_coalesced(copies.tensors, op)
        return self._call_all(packs, lambda: copies.copy_back_into(tensors), async_op, timeout, tensors)

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

        Raises:
            InvalidRank: `dst` is not a rank of the group.
            InvalidArgument: `tensors` is no list.
            CollectiveMismatch, PeerFailed, DeadlockError, Timeout, Closed, UnsupportedOp: as for the class.
        """
        self._check_rank(dst, "dst")
        is_dst = self.rank == dst
        copies = self._check_all(tensors, "reduce_coalesced", in_place=is_dst)
        packs = coalesced.reduce_coalesced(copies.tensors, dst, op, is_dst)
        finish = (lambda: copies.copy_back_into(tensors)) if is_dst else (lambda: list(tensors))
        return self._call_all(packs, finish, async_op, timeout, tensors if is_dst else ())

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
            InvalidArgument: `tensors` is no list.
            CollectiveMismatch, PeerFailed, DeadlockError, Timeout, Closed, UnsupportedOp: as for the class.
        """
        copies = self._check_all(tensors, "reduce_scatter_coalesced")
        for number, tensor in enumerate(tensors):
            if tensor.dim() == 0:
                what = f"reduce_scatter_coalesced, tensor {number}"
                raise SizeMismatch("a tensor with at least 1 dim", "a zero-dim tensor", what, "reshape it")
        results: list[Tensor] = []
        packs = coalesced.reduce_scatter_coalesced(copies.tensors, op, self.rank, self.world_size, results)
        return self._call_all(packs, lambda: copies.copy_back(results), async_op, timeout)

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

        Raises:
            InvalidArgument: `tensors` is no list.
            CollectiveMismatch, PeerFailed, DeadlockError, Timeout, Closed, UnsupportedOp: as for the class.
        """
        copies = self._check_all(tensors, "all_gather_coalesced")
        pack = coalesced.all_gather_coalesced(copies.tensors)
        around = Around(nothing, lambda came: copies.copy_back(pack.unpack(came)))
        return self._runner.call_packed(pack, async_op, timeout, (), around)

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

        Raises:
            InvalidRank: `dst` is not a rank of the group.
            InvalidArgument: `tensors` is no list.
            CollectiveMismatch, PeerFailed, DeadlockError, Timeout, Closed, UnsupportedOp: as for the class.
        """
        self._check_rank(dst, "dst")
        copies = self._check_all(tensors, "gather_coalesced")

        pack = coalesced.gather_coalesced(copies.tensors, dst)

        def after(came: Tensor | None) -> list[Tensor] | None:
            return None if came is None else copies.copy_back(pack.unpack(came))

        return self._runner.call_packed(pack, async_op, timeout, (), Around(nothing, after))

    def _check_all(self, tensors: Sequence[Tensor], what: str, *, in_place: bool = False) -> Copies:
        """Checks all tensors of a call. Returns them, with host copies of tensors that the backend cannot move."""
        self._runner.check_open()
        if not isinstance(tensors, list | tuple):  # a generator would be empty after this check
            raise InvalidArgument(f"{what} takes a list of tensors, but they are {named(tensors)}: pass a list")
        away = []
        for number, tensor in enumerate(tensors):
            name = f"{what}, tensor {number}"
            if not check_dense(tensor, self.backend.devices, name):
                away.append(number)
            if in_place:
                check_writable(tensor, name)
        # The fallback is logged once for all tensors.
        return Copies(
            tensors,
            {
                number: to_host(self.backend, tensors[number], what, warns=number == away[0], number=number)
                for number in away
            },
        )

    def _call_all(
        self,
        packs: Sequence[Packed],
        result: Callable[[], T],
        async_op: bool,
        timeout: Seconds,
        changes: Sequence[Tensor] = (),
    ) -> T | Work[T]:
        """Runs collectives one after another. The last one returns the result, or raises the first error of any."""
        works: list[Work[T]] = []

        def before() -> None:
            # Also marks their errors as seen: the caller has only the last work, which raises them in their stead.
            for error in [work.exception() for work in works]:
                if error is not None:
                    raise error

        for pack in packs:

            def after(came: Tensor, pack: Packed = pack) -> T:
                pack.unpack(came)
                return result()

            outcome = self._runner.call_packed(pack, async_op, timeout, changes, Around(before, after))
            if isinstance(outcome, Work):
                works.append(outcome)
        return cast("T | Work[T]", outcome)


class Copies:
    """Tensors of one call, with host copies of the tensors that the backend cannot move."""

    def __init__(self, tensors: Sequence[Tensor], away: Mapping[int, HostCopy]) -> None:
        """Waits for the host copies of some tensors, by their index."""
        for copy in away.values():
            copy.wait()
        self._away = away
        self.tensors = [away[number].tensor if number in away else tensor for number, tensor in enumerate(tensors)]
        """The tensors, or their host copies."""

    def copy_back(self, results: Sequence[Tensor]) -> list[Tensor]:
        """Returns the results on the devices of the original tensors, as new tensors where a copy is needed."""
        return [
            self._away[number].copy_back(result, None) if number in self._away else result
            for number, result in enumerate(results)
        ]

    def copy_back_into(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Copies the values of the host copies back into the original tensors, and returns the tensors."""
        for number, copy in self._away.items():
            copy.copy_back(copy.tensor, tensors[number])
        return list(tensors)
