"""The user's object: a group of ranks and everything they can say to each other.

Strategy. Every collective takes the next sequence number of its group when it is called, so ranks that make the same
calls in the same order meet, whatever runs beside. Blocking ones run in the caller's thread, asynchronous ones in the
group's own lane. When a collective fails on one rank, the group is revoked on all: no rank waits for one that has given
up.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Sequence
from typing import Literal, TypeAlias, TypeVar, cast, overload

import torch
from torch import Tensor

from echelon.backends.base import Backend, Tag, Work
from echelon.backends.memory import check_tensor
from echelon.collectives import operations
from echelon.collectives.operations import Operation, write_out
from echelon.collectives.run import Channel
from echelon.errors import (
    Closed,
    CollectiveMismatch,
    InvalidRank,
    PeerFailed,
    SelfSend,
    SizeMismatch,
    Timeout,
    UnsupportedOp,
)

T = TypeVar("T")
Seconds: TypeAlias = float | None
No: TypeAlias = Literal[False]
Yes: TypeAlias = Literal[True]
JsonLike = None | bool | int | float | str | list["JsonLike"] | dict[str, "JsonLike"]
"""What the object collectives carry."""

_WORLD_CONTEXT = 1
_MAX_TAG = 2**32 - 1


class ProcessGroup:
    """Ranks that communicate. All of them must call the same collectives in the same order.

    Ranks are those of this group, 0 to world_size - 1; ranks that errors name are those of the whole world. Collectives
    take tensors of any strides and any dtype that can be sent, and hold no reference after they are done. Every call
    that can block takes `timeout` in seconds (None: the group's own).

    All collectives raise CollectiveMismatch if ranks call different ones, PeerFailed if a rank has gone, Timeout,
    Closed after `close`, and UnsupportedOp for a tensor that the backend cannot move.
    """

    def __init__(
        self,
        backend: Backend,
        ranks: Sequence[int] | None = None,
        *,
        context: int = _WORLD_CONTEXT,
        timeout: Seconds = None,
        name: str = "world",
    ) -> None:
        """Makes the group of all ranks of a backend; for parts of it use `subgroup`.

        Args:
            backend: what moves the bytes.
            ranks: the backend's rank of each member; None: all.
            context: what keeps messages of different groups apart.
            timeout: seconds that a blocking call waits by default; None: the backend's.
            name: shown in errors.
        """
        self.backend = backend
        self.ranks = tuple(range(backend.world_size) if ranks is None else ranks)
        self.rank = self.ranks.index(backend.rank)
        self.timeout = backend.timeout if timeout is None else timeout
        self.name = name
        self.context = context
        """What keeps this group's messages apart from those of others; the same number on every member."""
        self._sequences = itertools.count(1)
        self._num_subgroups = 0
        self._owns_backend = ranks is None
        self._closed = False

    @property
    def world_size(self) -> int:
        """The number of ranks in this group."""
        return len(self.ranks)

    def __repr__(self) -> str:
        state = ", closed" if self._closed else ""
        return f"<ProcessGroup {self.name!r}: rank {self.rank} of {self.world_size} over {self.backend.name}{state}>"

    # Collectives

    @overload
    def all_reduce(self, tensor: Tensor, op: str = ..., async_op: No = ..., timeout: Seconds = ...) -> Tensor: ...
    @overload
    def all_reduce(self, tensor: Tensor, op: str = ..., *, async_op: Yes, timeout: Seconds = ...) -> Work[Tensor]: ...
    def all_reduce(
        self, tensor: Tensor, op: str = "sum", async_op: bool = False, timeout: Seconds = None
    ) -> Tensor | Work[Tensor]:
        """Combines `tensor` over all ranks, in place, and returns it. Bit-identical on all ranks.

        Args:
            tensor: same shape and dtype on every rank. float16 and bfloat16 are accumulated in float32.
            op: sum, mean, product, min, max, band, bor or bxor.
            async_op: return a Work at once; `tensor` belongs to it until it is done.
            timeout: seconds for the whole operation.
        """
        self._check(tensor, "all_reduce")
        return self._call(operations.all_reduce(tensor, op), async_op, timeout)

    @overload
    def reduce(self, tensor: Tensor, dst: int, op: str = ..., async_op: No = ..., timeout: Seconds = ...) -> Tensor: ...
    @overload
    def reduce(
        self, tensor: Tensor, dst: int, op: str = ..., *, async_op: Yes, timeout: Seconds = ...
    ) -> Work[Tensor]: ...
    def reduce(
        self, tensor: Tensor, dst: int, op: str = "sum", async_op: bool = False, timeout: Seconds = None
    ) -> Tensor | Work[Tensor]:
        """Combines `tensor` over all ranks, in place on rank `dst`, and returns it; on others it stays as it is.

        Args:
            tensor, op, async_op, timeout: as in `all_reduce`.
            dst: the rank that gets the result.
        """
        self._check(tensor, "reduce")
        self._check_rank(dst, "dst")
        return self._call(operations.reduce(tensor, dst, op), async_op, timeout)

    @overload
    def broadcast(self, tensor: Tensor, src: int = ..., async_op: No = ..., timeout: Seconds = ...) -> Tensor: ...
    @overload
    def broadcast(self, tensor: Tensor, src: int = ..., *, async_op: Yes, timeout: Seconds = ...) -> Work[Tensor]: ...
    def broadcast(
        self, tensor: Tensor, src: int = 0, async_op: bool = False, timeout: Seconds = None
    ) -> Tensor | Work[Tensor]:
        """Overwrites `tensor` on every rank with that of rank `src`, in place, and returns it.

        Args:
            tensor: same shape and dtype on every rank.
            src: the rank whose tensor it is.
            async_op, timeout: as in `all_reduce`.
        """
        self._check(tensor, "broadcast")
        self._check_rank(src, "src")
        return self._call(operations.broadcast(tensor, src), async_op, timeout)

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
            tensor: same dtype and same dims but the first on every rank; a zero-dim tensor counts as one row.
            out: written and returned; None: a new tensor.
            async_op, timeout: as in `all_reduce`.

        Raises:
            SizeMismatch: `out` has not the shape or dtype of the result.
        """
        self._check(tensor, "all_gather")
        return self._call(operations.all_gather(tensor), async_op, timeout, out)

    @overload
    def gather(self, tensor: Tensor, dst: int, async_op: No = ..., timeout: Seconds = ...) -> Tensor | None: ...
    @overload
    def gather(self, tensor: Tensor, dst: int, *, async_op: Yes, timeout: Seconds = ...) -> Work[Tensor | None]: ...
    def gather(
        self, tensor: Tensor, dst: int, async_op: bool = False, timeout: Seconds = None
    ) -> Tensor | Work[Tensor | None] | None:
        """Returns what `all_gather` does on rank `dst`, and None on the others.

        Args:
            tensor: as in `all_gather`.
            dst: the rank that gets the result.
            async_op, timeout: as in `all_reduce`.
        """
        self._check(tensor, "gather")
        self._check_rank(dst, "dst")
        return self._call(operations.gather(tensor, dst), async_op, timeout)

    @overload
    def scatter(self, tensor: Tensor | None, src: int, async_op: No = ..., timeout: Seconds = ...) -> Tensor: ...
    @overload
    def scatter(self, tensor: Tensor | None, src: int, *, async_op: Yes, timeout: Seconds = ...) -> Work[Tensor]: ...
    def scatter(
        self, tensor: Tensor | None, src: int, async_op: bool = False, timeout: Seconds = None
    ) -> Tensor | Work[Tensor]:
        """Returns this rank's part of the tensor of rank `src`; shape and dtype travel along.

        Args:
            tensor: on rank `src`, at least one dim; dim 0 is split as torch.tensor_split does. Not looked at on others.
            src: the rank whose tensor it is.
            async_op, timeout: as in `all_reduce`.

        Raises:
            SizeMismatch: rank `src` has no tensor, or one without dims.
        """
        self._check_rank(src, "src")
        if self.rank == src:
            if tensor is None or tensor.dim() == 0:
                got = "None" if tensor is None else "a zero-dim tensor"
                raise SizeMismatch(
                    "a tensor with at least 1 dim", got, f"scatter on its src, rank {src}", "pass what to split there"
                )
            self._check(tensor, "scatter")
        return self._call(operations.scatter(tensor, src), async_op, timeout)

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
        """Combines `tensor` over all ranks and returns this rank's part of the result; `tensor` is unchanged.

        Args:
            tensor: same shape and dtype on every rank, at least one dim. Dim 0 is split as torch.tensor_split does: if
                it does not divide, the first ranks get one row more.
            op: as in `all_reduce`.
            out: written and returned; None: a new tensor.
            async_op, timeout: as in `all_reduce`.

        Raises:
            SizeMismatch: `out` has not the shape or dtype of this rank's part, or `tensor` has no dims.
        """
        self._check(tensor, "reduce_scatter")
        if tensor.dim() == 0:
            raise SizeMismatch("a tensor with at least 1 dim", "a zero-dim tensor", "reduce_scatter", "reshape it")
        return self._call(operations.reduce_scatter(tensor, op), async_op, timeout, out)

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
        """Sends part r of `tensor` to every rank r and returns the parts that came, concatenated along dim 0.

        Args:
            tensor: same dtype and same dims but the first on every rank.
            out: written and returned; None: a new tensor.
            in_splits: rows for each rank; None: dim 0 is split as torch.tensor_split does.
            out_splits: rows expected from each rank; None: as many as come.
            async_op, timeout: as in `all_reduce`.

        Raises:
            SizeMismatch: `in_splits` are not one per rank that add up to dim 0, or `out` does not fit.
            CollectiveMismatch: other numbers of rows came than `out_splits` says.
        """
        self._check(tensor, "all_to_all")
        rows = len(tensor) if tensor.dim() else 1
        if in_splits is not None and (
            len(in_splits) != self.world_size or sum(in_splits) != rows or min(in_splits) < 0
        ):
            raise SizeMismatch(
                f"{self.world_size} numbers that add up to {rows}", list(in_splits), "all_to_all(in_splits=)"
            )
        return self._call(operations.all_to_all(tensor, in_splits, out_splits), async_op, timeout, out)

    def barrier(self, timeout: Seconds = None) -> None:
        """Returns when every rank has called it."""
        self._call(operations.barrier(), False, timeout)

    def all_gather_object(self, value: JsonLike, timeout: Seconds = None) -> list[JsonLike]:
        """Returns the values of all ranks, in rank order. Values are JSON-like; nothing is pickled."""
        data = _encode(value)
        sizes = self.all_gather(torch.tensor([data.numel()], device="cpu"), timeout=timeout)
        parts = torch.split(self.all_gather(data, timeout=timeout), sizes.tolist())
        return [_decode(part) for part in parts]

    def broadcast_object(self, value: JsonLike = None, src: int = 0, timeout: Seconds = None) -> JsonLike:
        """Returns the value of rank `src` on every rank; what other ranks pass does not matter."""
        self._check_rank(src, "src")
        mine = value if self.rank == src else None
        return self.all_gather_object(mine, timeout)[src]

    # Point to point

    def send(self, tensor: Tensor, dst: int, tag: int = 0, timeout: Seconds = None) -> None:
        """Sends a tensor to rank `dst`; returns when `tensor` may be changed again, not when it was received."""
        with self.backend.attend():
            self.isend(tensor, dst, tag).wait(self.timeout if timeout is None else timeout)

    def recv(self, src: int, tag: int = 0, out: Tensor | None = None, timeout: Seconds = None) -> Tensor:
        """Returns the next tensor that rank `src` sends with this tag; its shape and dtype travel along.

        Args:
            src: the sender.
            tag: 0 to 2**32 - 1.
            out: written and returned; None: a new tensor.
            timeout: seconds. After a Timeout `out` will not be written any more.

        Raises:
            SizeMismatch: the tensor does not fit `out`; it is dropped, and the group stays usable.
        """
        with self.backend.attend():
            work = self.irecv(src, tag, out)
            try:
                return work.wait(self.timeout if timeout is None else timeout)
            except Timeout:
                self.backend.cancel(work)
                raise

    def isend(self, tensor: Tensor, dst: int, tag: int = 0) -> Work[None]:
        """Starts to send a tensor to rank `dst`; it must not change until the Work is done."""
        self._check(tensor, "send")
        return self.backend.isend(tensor.detach().contiguous(), self._peer(dst, "dst"), self._tag(tag))

    def irecv(self, src: int, tag: int = 0, out: Tensor | None = None) -> Work[Tensor]:
        """Starts to receive a tensor from rank `src`; the Work's result is the tensor. `out` must be contiguous."""
        self._check_open()
        return self.backend.irecv(self._peer(src, "src"), self._tag(tag), out=out)

    # Groups

    def subgroup(self, ranks: Sequence[int], name: str | None = None) -> ProcessGroup | None:
        """Returns the group of some of the ranks; None on the others. Every rank of this group must call it.

        Args:
            ranks: ranks of this group, in the order that they are to have in the new one.
            name: shown in errors; None: made from this group's.

        Raises:
            InvalidRank: a rank that is not in this group, or twice in the list.
        """
        self._check_open()
        members = list(ranks)
        for rank in members:
            self._check_rank(rank, "ranks")
        if len(set(members)) != len(members) or not members:
            raise InvalidRank(members, self.world_size, "ranks")
        self._num_subgroups += 1
        context = _context_of(self.context, self._num_subgroups)
        if self.rank not in members:
            return None
        name = name or f"{self.name}/{self._num_subgroups}"
        return ProcessGroup(
            self.backend,
            [self.ranks[rank] for rank in members],
            context=context,
            timeout=self.timeout,
            name=name,
        )

    def close(self) -> None:
        """Finishes what was sent and frees the connections, if this is the whole world's group. May be called twice."""
        self._closed = True
        if self._owns_backend:
            self.backend.close()

    def abort(self, reason: str, origin: int | None = None) -> None:
        """Gives up: every rank of the world that waits for this one gets PeerFailed with `reason`, and so later."""
        self._closed = True
        self.backend.abort(reason, origin)

    def __enter__(self) -> ProcessGroup:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        if error is None:
            self.close()
        else:
            self.abort(f"{type(error).__name__}: {error}", error.rank if isinstance(error, PeerFailed) else None)

    # Inside

    def _call(
        self, operation: Operation[T], async_op: bool, timeout: Seconds, out: Tensor | None = None
    ) -> T | Work[T]:
        """Runs a collective here or in the group's lane; where it cannot be finished, it fails on all ranks."""
        self._check_open()
        sequence = next(self._sequences)
        seconds = self.timeout if timeout is None else timeout
        note = f"{operation.note}, #{sequence}"

        def attempt() -> T:
            deadline = self.backend.now() + seconds
            channel = Channel(self.backend, self.ranks, self.rank, self.context, sequence, note, deadline)
            with torch.no_grad():
                try:
                    result = operation.act(channel)
                except Exception as error:
                    told = self._give_up(error, f"rank {self.backend.rank} in {note} of group {self.name!r}")
                    if told is error:
                        raise
                    raise told from error
                return result if out is None else cast("T", write_out(out, cast("Tensor", result), note))

        if async_op:
            return self.backend.start(attempt, f"{note} of group {self.name!r}", self.context)
        return attempt()

    def _give_up(self, error: Exception, operation: str) -> Exception:
        """Ends the group's collectives on all ranks, and returns the error with the operation's name in it."""
        if isinstance(error, Closed):
            return error
        if isinstance(error, PeerFailed):
            first = self.backend.revoke(self.context, self.ranks, error)
            return PeerFailed(first.rank, first.reason, operation)
        told: Exception = error
        if isinstance(error, Timeout):
            told = Timeout(f"{operation}: {error}")
        elif isinstance(error, CollectiveMismatch | SizeMismatch):
            told = CollectiveMismatch(f"{operation}: {error}")
        failure = PeerFailed(self.backend.rank, f"{type(told).__name__}: {told}")
        self.backend.revoke(self.context, self.ranks, failure)
        return told

    def _check(self, tensor: Tensor, what: str) -> None:
        self._check_open()
        if isinstance(tensor, Tensor) and tensor.layout == torch.strided:
            if tensor.is_conj() or tensor.is_neg():
                raise UnsupportedOp(f"{what} takes plain tensors: call .resolve_conj().resolve_neg() first")
            if tensor.device.type in self.backend.devices:
                return
        check_tensor(tensor, self.backend.devices, what)

    def _check_open(self) -> None:
        if self._closed:
            raise Closed(
                f"group {self.name!r} of rank {self.backend.rank} is closed: make a new one with echelon.init()"
            )

    def _check_rank(self, rank: int, what: str) -> None:
        if not isinstance(rank, int) or not 0 <= rank < self.world_size:
            raise InvalidRank(rank, self.world_size, what)

    def _peer(self, rank: int, what: str) -> int:
        self._check_rank(rank, what)
        if rank == self.rank:
            raise SelfSend(rank)
        return self.ranks[rank]

    def _tag(self, tag: int) -> Tag:
        if not 0 <= tag <= _MAX_TAG:
            raise SizeMismatch(f"a tag from 0 to {_MAX_TAG}", tag, advice="choose another")
        return Tag(self.context, 0, tag)


def _context_of(parent: int, number: int) -> int:
    """Returns the context of a group's n-th subgroup: the same on every rank, and unlike any other's."""
    digest = hashlib.blake2b(f"{parent}/{number}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") | 1 << 63


def _encode(value: JsonLike) -> Tensor:
    with torch.device("cpu"):  # whatever the caller's default is
        return torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)


def _decode(data: Tensor) -> JsonLike:
    value: JsonLike = json.loads(bytes(data.numpy()))
    return value
