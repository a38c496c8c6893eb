"""Collectives of a group on objects, with argument checks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import overload

from echelon.arguments import named
from echelon.backends.work import Work
from echelon.collectives.calls import objects
from echelon.collectives.calls.objects import JsonLike
from echelon.errors import InvalidArgument, SizeMismatch
from echelon.group.base import GroupBase, No, Seconds, Yes


class ObjectCollectives(GroupBase):
    """Collectives on objects. All ranks of a group must call them together.

    Objects are JSON-like: None, booleans, numbers, text, and lists and dicts of them, with text as keys. Tuples arrive
    as lists. Anything else is an UnsupportedOp. A passed object may be changed as soon as the call returns.
    """

    @overload
    def all_gather_object(self, value: JsonLike, async_op: No = ..., timeout: Seconds = ...) -> list[JsonLike]: ...
    @overload
    def all_gather_object(self, value: JsonLike, *, async_op: Yes, timeout: Seconds = ...) -> Work[list[JsonLike]]: ...
    def all_gather_object(
        self, value: JsonLike, async_op: bool = False, timeout: Seconds = None
    ) -> list[JsonLike] | Work[list[JsonLike]]:
        """Returns the values of all ranks, in rank order.

        Args:
            value: JSON-like.
            async_op, timeout: as in `all_reduce`.

        Raises:
            UnsupportedOp: `value` is not JSON-like.
            CollectiveMismatch, PeerFailed, DeadlockError, Timeout, Closed: as for the class.
        """
        self._runner.check_open()
        purpose = self.backend.flight_recorder.purpose_of_thread()
        return self._runner.call_packed(objects.all_gather_object(value, purpose), async_op, timeout)

    @overload
    def gather_object(
        self, value: JsonLike, dst: int, async_op: No = ..., timeout: Seconds = ...
    ) -> list[JsonLike] | None: ...
    @overload
    def gather_object(
        self, value: JsonLike, dst: int, *, async_op: Yes, timeout: Seconds = ...
    ) -> Work[list[JsonLike] | None]: ...
    def gather_object(
        self, value: JsonLike, dst: int, async_op: bool = False, timeout: Seconds = None
    ) -> list[JsonLike] | Work[list[JsonLike] | None] | None:
        """Returns the values of all ranks, in rank order, on rank `dst`, None on other ranks.

        Args:
            value: JSON-like.
            dst: Rank that gets the result.
            async_op, timeout: as in `all_reduce`.

        Raises:
            InvalidRank: `dst` is not a rank of the group.
            UnsupportedOp: `value` is not JSON-like.
            CollectiveMismatch, PeerFailed, DeadlockError, Timeout, Closed: as for the class.
        """
        self._runner.check_open()
        self._check_rank(dst, "dst")
        return self._runner.call_packed(objects.gather_object(value, dst), async_op, timeout)

    @overload
    def broadcast_object(
        self, value: JsonLike = ..., src: int = ..., async_op: No = ..., timeout: Seconds = ...
    ) -> JsonLike: ...
    @overload
    def broadcast_object(
        self, value: JsonLike = ..., src: int = ..., *, async_op: Yes, timeout: Seconds = ...
    ) -> Work[JsonLike]: ...
    def broadcast_object(
        self, value: JsonLike = None, src: int = 0, async_op: bool = False, timeout: Seconds = None
    ) -> JsonLike | Work[JsonLike]:
        """Returns the value of rank `src` on every rank.

        Args:
            value: JSON-like on rank `src`. Ignored on other ranks.
            src: Rank of the value.
            async_op, timeout: As in `all_reduce`.

        Raises:
            InvalidRank: `src` is not a rank of the group.
            UnsupportedOp: `value` is not JSON-like.
            CollectiveMismatch, PeerFailed, DeadlockError, Timeout, Closed: as for the class.
        """
        self._runner.check_open()
        self._check_rank(src, "src")
        return self._runner.call_packed(objects.broadcast_object(value, src, self.rank == src), async_op, timeout)

    @overload
    def scatter_object(
        self, values: Sequence[JsonLike] | None, src: int, async_op: No = ..., timeout: Seconds = ...
    ) -> JsonLike: ...
    @overload
    def scatter_object(
        self, values: Sequence[JsonLike] | None, src: int, *, async_op: Yes, timeout: Seconds = ...
    ) -> Work[JsonLike]: ...
    def scatter_object(
        self, values: Sequence[JsonLike] | None, src: int, async_op: bool = False, timeout: Seconds = None
    ) -> JsonLike | Work[JsonLike]:
        """Returns this rank's value from the list of rank `src`.

        Args:
            values: On rank `src`, one JSON-like value for each rank. Ignored on other ranks.
            src: Rank of the list.
            async_op, timeout: As in `all_reduce`.

        Raises:
            InvalidArgument: on rank `src`, `values` is no list.
            SizeMismatch: the list does not have one value per rank.
            InvalidRank: `src` is not a rank of the group.
            UnsupportedOp: a value is not JSON-like.
            CollectiveMismatch, PeerFailed, DeadlockError, Timeout, Closed: as for the class.
        """
        self._runner.check_open()
        self._check_rank(src, "src")
        if self.rank != src:
            values = None
        elif values is not None and not isinstance(values, list | tuple):
            raise InvalidArgument(f"scatter_object: values is {named(values)}: give a list with one for each rank")
        elif values is None or len(values) != self.world_size:
            got = "None" if values is None else len(values)
            raise SizeMismatch(
                f"{self.world_size} values", got, f"scatter_object on its src, rank {src}", "one for each"
            )
        return self._runner.call_packed(objects.scatter_object(values, src), async_op, timeout)
