"""Collectives of a group on tensors, with argument checks."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import cast, overload

import torch
from torch import Tensor

from echelon.backends.collective import Collective
from echelon.backends.work import Work
from echelon.errors import InvalidArgument, SizeMismatch, UnsupportedOp
from echelon.group.base import GroupBase, No, Seconds, Yes


class Collectives(GroupBase):
    """Collectives on tensors. All ranks of a group must call them together, in the same order."""

    @overload
    def all_reduce(self, tensor: Tensor, op: str = ..., async_op: No = ..., timeout: Seconds = ...) -> Tensor: ...
    @overload
    def all_reduce(self, tensor: Tensor, op: str = ..., *, async_op: Yes, timeout: Seconds = ...) -> Work[Tensor]: ...
    def all_reduce(
        self, tensor: Tensor, op: str = "sum", async_op: bool = False, timeout: Seconds = None
    ) -> Tensor | Work[Tensor]:
        """Combines `tensor` over all ranks, in place, and returns it. Bit-identical on all ranks.

        Args:
            tensor: Same shape and dtype on every rank. float16 and bfloat16 are accumulated in float32.
            op: "sum", "mean", "product", "min", "max", "band", "bor" or "bxor". "avg" is another name of "mean".
                torch.distributed.ReduceOp.SUM and its like are taken, too.
            async_op: Return a Work at once. `tensor` must not be used until the Work is done.
            timeout: Seconds for the whole operation.

        Raises:
            CollectiveMismatch, PeerFailed, DeadlockError, Timeout, Closed, UnsupportedOp: as for the class.
        """
        if timeout is None and async_op is False and (done := self._run_known("all_reduce", -1, op, tensor, None)):
            return tensor if done is True else self._runner.go_on(done, tensor, None)
        return self._runner.call("all_reduce", tensor, op, async_op=async_op, timeout=timeout, writes=True)

    @overload
    def reduce(self, tensor: Tensor, dst: int, op: str = ..., async_op: No = ..., timeout: Seconds = ...) -> Tensor: ...
    @overload
    def reduce(
        self, tensor: Tensor, dst: int, op: str = ..., *, async_op: Yes, timeout: Seconds = ...
    ) -> Work[Tensor]: ...
    def reduce(
        self, tensor: Tensor, dst: int, op: str = "sum", async_op: bool = False, timeout: Seconds = None
    ) -> Tensor | Work[Tensor]:
        """Combines `tensor` over all ranks, in place on rank `dst`, and returns it. Unchanged on other ranks.

        Args:
            tensor, op, async_op, timeout: As in `all_reduce`.
            dst: Rank that gets the result.

        Raises:
            InvalidRank: `dst` is not a rank of the group.
            CollectiveMismatch, PeerFailed, DeadlockError, Timeout, Closed, UnsupportedOp: as for the class.
        """
        if timeout is None and async_op is False and (done := self._run_known("reduce", dst, op, tensor, None)):
            return tensor if done is True else self._runner.go_on(done, tensor, None)
        self._check_rank(dst, "dst")
        is_dst = self.rank == dst
        return self._runner.call("reduce", tensor, op, dst, async_op=async_op, timeout=timeout, writes=is_dst)

    @overload
    def broadcast(self, tensor: Tensor, src: int = ..., async_op: No = ..., timeout: Seconds = ...) -> Tensor: ...
    @overload
    def broadcast(self, tensor: Tensor, src: int = ..., *, async_op: Yes, timeout: Seconds = ...) -> Work[Tensor]: ...
    def broadcast(
        self, tensor: Tensor, src: int = 0, async_op: bool = False, timeout: Seconds = None
    ) -> Tensor | Work[Tensor]:
        """Overwrites `tensor` on every rank with the tensor of rank `src`, in place, and returns it.

        Args:
            tensor: Same shape and dtype on every rank.
            src: Rank that sends its tensor.
            async_op, timeout: As in `all_reduce`.

        Raises:
            InvalidRank: `src` is not a rank of the group.
            CollectiveMismatch, PeerFailed, DeadlockError, Timeout, Closed, UnsupportedOp: as for the class.
        """
        if timeout is None and async_op is False and (done := self._run_known("broadcast", src, "", tensor, None)):
            return tensor if done is True else self._runner.go_on(done, tensor, None)
        self._check_rank(src, "src")
        is_src = self.rank == src
        # Rank src announces a change as well, so that a program that must not overwrite the tensor fails on all ranks.
        # Except for an inference tensor, which rank src only reads: outside of inference mode its change is an error.
        changes = not (is_src and isinstance(tensor, Tensor) and tensor.is_inference())
        return self._runner.call(
            "broadcast", tensor, "", src, async_op=async_op, timeout=timeout, writes=not is_src, changes=changes
        )

    @overload
    def all_gather(
        self, tensor: Tensor, out: Tensor | None = ..., async_op: No = ..., timeout: Seconds = ...
    ) -> Tensor: ...
    @overload
    def all_gather(
        self, tensor: Tensor, out: Tensor | None = ..., *, async_op: Yes, timeout: Seconds = ...
    ) -> Work[Tensor]: ...
    def all_gather(
        self, tensor: Tensor, out: Tensor | None = None, async_op: bool = False, timeout: Seconds = None
    ) -> Tensor | Work[Tensor]:
        """Returns the tensors of all ranks, concatenated along dim 0 in rank order.

        Args:
            tensor: Same dtype, and same dims except the first, on every rank. A zero-dim tensor counts as one row.
            out: Overwritten and returned. None: a new tensor.
            async_op, timeout: As in `all_reduce`.

        Raises:
            SizeMismatch: `out` does not have the shape and dtype of the result.
            CollectiveMismatch, PeerFailed, DeadlockError, Timeout, Closed, UnsupportedOp: as for the class.
        """
        if timeout is None and async_op is False and (done := self._run_known("all_gather", -1, "", tensor, out)):
            return cast("Tensor", out) if done is True else self._runner.go_on(done, tensor, out)
        return self._runner.call("all_gather", tensor, out=out, async_op=async_op, timeout=timeout)

    @overload
    def gather(
        self, tensor: Tensor, dst: int, out: Tensor | None = ..., async_op: No = ..., timeout: Seconds = ...
    ) -> Tensor | None: ...
    @overload
    def gather(
        self, tensor: Tensor, dst: int, out: Tensor | None = ..., *, async_op: Yes, timeout: Seconds = ...
    ) -> Work[Tensor | None]: ...
    def gather(
        self,
        tensor: Tensor,
        dst: int,
        out: Tensor | None = None,
        async_op: bool = False,
        timeout: Seconds = None,
    ) -> Tensor | Work[Tensor | None] | None:
        """Returns the result of `all_gather` on rank `dst`, None on other ranks.

        Args:
            tensor: As in `all_gather`.
            dst: Rank that gets the result.
            out: Overwritten and returned on rank `dst`, ignored on other ranks. None: a new tensor.
            async_op, timeout: As in `all_reduce`.

        Raises:
            SizeMismatch: `out` does not have the shape and dtype of the result.
            InvalidRank: `dst` is not a rank of the group.
            CollectiveMismatch, PeerFailed, DeadlockError, Timeout, Closed, UnsupportedOp: as for the class.
        """
        # All ranks may pass `out`, as programs that are the same on every rank do.
        out = out if self.rank == dst else None
        if timeout is None and async_op is False and (done := self._run_known("gather", dst, "", tensor, out)):
            return out if done is True else self._runner.go_on(done, tensor, out)
        self._check_rank(dst, "dst")
        return self._runner.call("gather", tensor, "", dst, out=out, async_op=async_op, timeout=timeout)

    @overload
    def scatter(
        self, tensor: Tensor | None, src: int, out: Tensor | None = ..., async_op: No = ..., timeout: Seconds = ...
    ) -> Tensor: ...
    @overload
    def scatter(
        self, tensor: Tensor | None, src: int, out: Tensor | None = ..., *, async_op: Yes, timeout: Seconds = ...
    ) -> Work[Tensor]: ...
    def scatter(
        self,
        tensor: Tensor | None,
        src: int,
        out: Tensor | None = None,
        async_op: bool = False,
        timeout: Seconds = None,
    ) -> Tensor | Work[Tensor]:
        """Returns this rank's part of the tensor of rank `src`. Shape and dtype come with the message.

        Args:
            tensor: On rank `src`, at least one dim. Dim 0 is split as torch.tensor_split does. Ignored on other ranks.
            src: Rank that sends its tensor. Others get their parts on the CPU, or over NCCL on its tensor's device.
            out: Overwritten and returned. None: a new tensor.
            async_op, timeout: As in `all_reduce`.

        Raises:
            SizeMismatch: rank `src` gave no tensor, or one without dims, or `out` does not have the shape and dtype of
                the part.
            InvalidRank: `src` is not a rank of the group.
            CollectiveMismatch, PeerFailed, DeadlockError, Timeout, Closed, UnsupportedOp: as for the class.
        """
        if self.rank != src:
            tensor = None
        if timeout is None and async_op is False and (done := self._run_known("scatter", src, "", tensor, out)):
            return cast("Tensor", out) if done is True else self._runner.go_on(done, tensor, out)
        self._check_rank(src, "src")
        if self.rank == src:
            if isinstance(tensor, list | tuple):  # torch's scatter takes one tensor for each rank
                raise UnsupportedOp(
                    f"scatter takes one tensor, which it splits along dim 0, not a {type(tensor).__name__}: pass "
                    "torch.cat of them, or torch.stack for one row each"
                )
            if tensor is None or (isinstance(tensor, Tensor) and tensor.dim() == 0):
                got = "None" if tensor is None else "a zero-dim tensor"
                raise SizeMismatch(
                    "a tensor with at least 1 dim",
                    got,
                    f"scatter on its src, rank {src}",
                    "pass the tensor to split there",
                )
        return self._runner.call("scatter", tensor, "", src, out=out, async_op=async_op, timeout=timeout)

    @overload
    def reduce_scatter(
        self, tensor: Tensor, op: str = ..., out: Tensor | None = ..., async_op: No = ..., timeout: Seconds = ...
    ) -> Tensor: ...
    @overload
    def reduce_scatter(
        self, tensor: Tensor, op: str = ..., out: Tensor | None = ..., *, async_op: Yes, timeout: Seconds = ...
    ) -> Work[Tensor]: ...
    def reduce_scatter(
        self,
        tensor: Tensor,
        op: str = "sum",
        out: Tensor | None = None,
        async_op: bool = False,
        timeout: Seconds = None,
    ) -> Tensor | Work[Tensor]:
        """Combines `tensor` over all ranks and returns this rank's part of the result. `tensor` is unchanged.

        Args:
            tensor: Same shape and dtype on every rank, at least one dim. Dim 0 is split as torch.tensor_split does: if
                it does not divide, the first ranks get one row more.
            op: As in `all_reduce`.
            out: Overwritten and returned. None: a new tensor.
            async_op, timeout: As in `all_reduce`.

        Raises:
            SizeMismatch: `out` does not have the shape and dtype of this rank's part, or `tensor` has no dims.
            CollectiveMismatch, PeerFailed, DeadlockError, Timeout, Closed, UnsupportedOp: as for the class.
        """
        if timeout is None and async_op is False and (done := self._run_known("reduce_scatter", -1, op, tensor, out)):
            return cast("Tensor", out) if done is True else self._runner.go_on(done, tensor, out)
        if isinstance(tensor, Tensor) and tensor.dim() == 0:
            raise SizeMismatch("a tensor with at least 1 dim", "a zero-dim tensor", "reduce_scatter", "reshape it")
        return self._runner.call("reduce_scatter", tensor, op, out=out, async_op=async_op, timeout=timeout)

    @overload
    def all_to_all(
        self,
        tensor: Tensor,
        out: Tensor | None = ...,
        in_splits: Sequence[int] | None = ...,
        out_splits: Sequence[int] | None = ...,
        async_op: No = ...,
        timeout: Seconds = ...,
    ) -> Tensor: ...
    @overload
    def all_to_all(
        self,
        tensor: Tensor,
        out: Tensor | None = ...,
        in_splits: Sequence[int] | None = ...,
        out_splits: Sequence[int] | None = ...,
        *,
        async_op: Yes,
        timeout: Seconds = ...,
    ) -> Work[Tensor]: ...
    def all_to_all(
        self,
        tensor: Tensor,
        out: Tensor | None = None,
        in_splits: Sequence[int] | None = None,
        out_splits: Sequence[int] | None = None,
        async_op: bool = False,
        timeout: Seconds = None,
    ) -> Tensor | Work[Tensor]:
        """Sends part r of `tensor` to every rank r and returns the received parts, concatenated along dim 0.

        Args:
            tensor: Same dtype, and same dims except the first, on every rank.
            out: Overwritten and returned. None: a new tensor.
            in_splits: Rows for each rank. None: dim 0 is split as torch.tensor_split does.
            out_splits: Rows expected from each rank. None: any number.
            async_op, timeout: As in `all_reduce`.

        Raises:
            InvalidArgument: splits that are no list of whole numbers.
            SizeMismatch: `in_splits` is not one number per rank that add up to dim 0, or `out` does not fit.
            CollectiveMismatch: the received numbers of rows differ from `out_splits`.
            CollectiveMismatch, PeerFailed, DeadlockError, Timeout, Closed, UnsupportedOp: as for the class.
        """
        has_splits = in_splits is not None or out_splits is not None
        runs_here = timeout is None and async_op is False and not has_splits
        if runs_here and (done := self._run_known("all_to_all", -1, "", tensor, out)):
            return cast("Tensor", out) if done is True else self._runner.go_on(done, tensor, out)
        sends, expected = check_splits(in_splits, "in_splits"), check_splits(out_splits, "out_splits")
        if sends is not None and isinstance(tensor, Tensor):
            num_rows = len(tensor) if tensor.dim() else 1
            if len(sends) != self.world_size or sum(sends) != num_rows or min(sends) < 0:
                raise SizeMismatch(
                    f"{self.world_size} numbers that add up to {num_rows}", list(sends), "all_to_all(in_splits=)"
                )
        return self._runner.call(
            "all_to_all", tensor, "", -1, sends, expected, out=out, async_op=async_op, timeout=timeout
        )

    def empty(self, shape: int | Sequence[int], dtype: torch.dtype | None = None, timeout: Seconds = None) -> Tensor:
        """Returns a new CPU tensor, in memory that the group's ranks share if they are on one host, else in ordinary.

        Large collectives on tensors that all ranks got from one such call copy nothing twice: each rank reads and
        writes the other ranks' tensors in place. So while such a collective is in flight, and after it has failed,
        values may change in any of these tensors. The memory is released when nothing refers to the tensor any more.

        A forked child sees the tensor too. Writes of the child stay in the child, but bytes that it has not written may
        change with the parent's. A child that reads later needs a `clone()`.

        Args:
            shape: The same on every rank.
            dtype: The same on every rank. None: torch's default.
            timeout: As in `all_reduce`.

        Raises:
            UnsupportedOp: there is not enough memory.
            InvalidArgument: `shape` is no number or list of numbers from 0 to 2^63 - 1.
            CollectiveMismatch, PeerFailed, Timeout, Closed: as for the class.
        """
        self._runner.check_open()
        size = (shape,) if isinstance(shape, int) else tuple(shape) if isinstance(shape, Sequence) else (shape,)
        if not all(isinstance(length, int) and 0 <= length < 1 << 63 for length in size):
            raise InvalidArgument(f"empty: shape={shape!r}: give whole numbers from 0 to 2^63 - 1, such as (2, 3)")
        if not isinstance(dtype, torch.dtype | None):
            raise InvalidArgument(f"empty: dtype={dtype!r}: give a dtype of torch, such as torch.float32")
        collective = Collective("empty", torch.Size(size), torch.get_default_dtype() if dtype is None else dtype)
        return cast("Tensor", self._runner.start(self._runner.prepare(collective), None, None, False, timeout))

    @overload
    def barrier(self, async_op: No = ..., timeout: Seconds = ...) -> None: ...
    @overload
    def barrier(self, *, async_op: Yes, timeout: Seconds = ...) -> Work[None]: ...
    def barrier(self, async_op: bool = False, timeout: Seconds = None) -> Work[None] | None:
        """Blocks until every rank has called it. Returns None, or a Work with `async_op`.

        Asynchronous collectives that this rank started before in this group have ended then, too.

        Args:
            async_op, timeout: As in `all_reduce`.

        Raises:
            CollectiveMismatch, PeerFailed, DeadlockError, Timeout, Closed, UnsupportedOp: as for the class.
        """
        if self._runner.under_way and async_op is False:
            # Behind them in the group's lane.
            work = self._runner.call("barrier", None, async_op=True, timeout=timeout)
            return cast("None", work.wait(threading.TIMEOUT_MAX))
        if timeout is None and async_op is False and (done := self._run_known("barrier", -1, "", None, None)):
            return None if done is True else self._runner.go_on(done, None, None)
        return self._runner.call("barrier", None, async_op=async_op, timeout=timeout)


def check_splits(splits: object, what: str) -> tuple[int, ...] | None:
    """Returns `splits` as a tuple, or None. Raises InvalidArgument unless they are a list of whole numbers."""
    if splits is None:
        return None
    if not isinstance(splits, Sequence) or not all(isinstance(rows, int) for rows in splits):
        raise InvalidArgument(f"all_to_all: {what}={splits!r}: give a list with a number of rows for each rank")
    return tuple(map(int, splits))  # a bool is an int to Python, but not to torch
