"""Reduces the gradients of parameters over a group, in buckets and beside the computation.

Strategy. Buckets are launched by one thread, that of the caller, strictly in the order of the layout, whatever order
their gradients come in: so the n-th collective of the group is the same bucket on every rank. Each is an asynchronous
collective of a group of its own, which nobody else uses; only `finish` blocks, until all of them are done or failed. It
ends because every rank launches every bucket in each reduction, those with gradients that this rank does not have, too.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from echelon.backends.base import Work
from echelon.data_parallel.broadcast import kind_of
from echelon.data_parallel.buckets import Bucket, bucket_layout
from echelon.errors import Closed, PeerFailed, UnsupportedOp
from echelon.group import ProcessGroup

DEFAULT_BUCKET_MB = 25.0


class GradientReducer:
    """Replaces each parameter's gradient by the mean over all ranks. Every rank must do the same.

    `reduce` does it at once. To overlap it with backward call `ready` for each gradient that is complete, which
    launches the buckets that are full, and `finish` at the end; or `start`, something else, and `finish`.

    A gradient that is None on some ranks counts as zeros there; one that is None on all stays None. Gradients are
    written in place, and half precision is added in float32. After a reduction all ranks hold identical bits.

    As it is a mean, what was reduced before and is added to stays what it is: steps without zero_grad add up. Who wants
    a sum multiplies what is added by the number of ranks.
    """

    def __init__(
        self,
        parameters: Iterable[tuple[str, torch.nn.Parameter]],
        group: ProcessGroup,
        *,
        bucket_mb: float = DEFAULT_BUCKET_MB,
    ) -> None:
        """Plans the buckets; nothing is sent.

        Args:
            parameters: name and parameter; the same ones in the same order on every rank, each once.
            group: the ranks to reduce over. A subgroup of it is made, so every rank must make the same reducers.
            bucket_mb: mebibytes at which a bucket is full; the same on every rank.

        Raises:
            ValueError: `bucket_mb` is not above 0.
        """
        self._bucket_mb = bucket_mb
        self.group = _of_its_own(group)
        self._awaited: list[set[int]] | None = None
        self._launched: list[Work[torch.Tensor]] = []
        self._failure = ""
        self.plan(parameters)

    def plan(self, parameters: Iterable[tuple[str, torch.nn.Parameter]]) -> None:
        """Plans the buckets for other parameters, from the next reduction on. Every rank must do the same."""
        named = list(parameters)
        self._names = [name for name, _ in named]
        self._parameters = [parameter for _, parameter in named]
        self._dtypes = [parameter.dtype for parameter in self._parameters]
        sizes = [parameter.numel() * parameter.element_size() for parameter in self._parameters]
        self.layout = bucket_layout(sizes, [kind_of(parameter) for parameter in self._parameters], self._bucket_mb)
        self._homes = self.layout.homes()

    @property
    def is_under_way(self) -> bool:
        """Whether a reduction has begun, by `ready` or `start`, that has not been finished."""
        return self._awaited is not None

    @property
    def num_launched(self) -> int:
        """The number of buckets on their way in the reduction under way."""
        return len(self._launched)

    def ready(self, index: int) -> None:
        """Says that the gradient of a parameter is complete. Launches the buckets that are full. Never blocks.

        Args:
            index: the parameter's number, in the order given.

        Raises:
            UnsupportedOp: its bucket is on its way already, or a gradient cannot be reduced (see `start`).
        """
        if self.group.world_size == 1:
            return
        awaited = self._begin()
        home = self._homes[index]
        if home < self.num_launched:
            raise UnsupportedOp(
                f"parameter {self._names[index]!r} got another gradient when its bucket was already on its way: where "
                "one backward runs inside another (checkpoint with use_reentrant=True), use use_reentrant=False, or "
                "run backward under no_sync() and call sync_gradients() after it"
            )
        awaited[home].discard(index)
        while self.num_launched < len(awaited) and not awaited[self.num_launched]:
            self._launch()

    def start(self) -> None:
        """Launches all buckets that are not on their way. Never blocks.

        Raises:
            UnsupportedOp: a gradient is sparse, has a graph of its own, or another dtype than its parameter had.
            Closed: an earlier reduction was abandoned.
        """
        if self.group.world_size == 1:
            return
        awaited = self._begin()
        while self.num_launched < len(awaited):
            self._launch()

    def finish(self) -> None:
        """Starts what `start` would, waits until all is reduced, and writes the gradients.

        Raises:
            UnsupportedOp, Closed: as `start`.
            CollectiveMismatch, PeerFailed, Timeout: as `ProcessGroup.all_reduce`.
        """
        self.start()
        try:
            for bucket, work in zip(self.layout.buckets, self._launched, strict=self.group.world_size > 1):
                self._write(bucket, work.wait())
        except BaseException:
            self.abandon()
            raise
        self._awaited, self._launched = None, []

    def reduce(self) -> None:
        """Reduces all gradients: `start`, then `finish`."""
        self.finish()

    def abandon(self) -> None:
        """Gives up the reduction under way, if there is one, on all ranks: what would have finished it has failed.

        This rank is out of step with the others then; they get PeerFailed, now or when they come to this reduction.
        """
        if self._awaited is None:
            return
        reason = f"its backward failed with {self.num_launched} of {len(self._awaited)} buckets of gradients under way"
        mine = PeerFailed(self.group.backend.rank, reason)
        first = self.group.backend.revoke(self.group.context, self.group.ranks, mine)
        self._failure = (
            f"an earlier reduction of gradients was given up because {first}: end all ranks, or wrap the model anew on "
            "all of them"
        )
        self._awaited, self._launched = None, []

    def _begin(self) -> list[set[int]]:
        if self._failure:
            raise Closed(self._failure)
        if self._awaited is None:
            self._awaited = [set(bucket.members) for bucket in self.layout.buckets]
        return self._awaited

    def _launch(self) -> None:
        try:
            flat = self._pack(self.layout.buckets[self.num_launched])
            self._launched.append(self.group.all_reduce(flat, "mean", async_op=True))
        except BaseException:
            self.abandon()
            raise

    def _pack(self, bucket: Bucket) -> torch.Tensor:
        """Returns the gradients in a row, then for each of them a 1, or a 0 if this rank has none."""
        pieces, counts = [], []
        for index in bucket.members:
            gradient = self._gradient(index)
            counts.append(float(gradient is not None))
            values = torch.zeros_like(self._parameters[index]) if gradient is None else gradient
            pieces.append(values.detach().reshape(-1))
        return torch.cat([*pieces, pieces[0].new_tensor(counts)])

    def _write(self, bucket: Bucket, flat: torch.Tensor) -> None:
        parameters = [self._parameters[index] for index in bucket.members]
        *pieces, counts = torch.split(flat, [*(parameter.numel() for parameter in parameters), len(parameters)])
        with torch.no_grad():
            for parameter, piece, count in zip(parameters, pieces, counts.tolist(), strict=True):
                if count == 0:
                    continue
                if parameter.grad is None:
                    parameter.grad = torch.empty_like(parameter, requires_grad=False)
                parameter.grad.copy_(piece.view(parameter.shape))

    def _gradient(self, index: int) -> torch.Tensor | None:
        gradient = self._parameters[index].grad
        if gradient is not None and (problem := _problem(gradient, self._dtypes[index])):
            raise UnsupportedOp(f"the gradient of parameter {self._names[index]!r} {problem}")
        return gradient


def _problem(gradient: torch.Tensor, dtype: torch.dtype) -> str:
    """Says why a gradient cannot be reduced, and what to do; nothing if it can."""
    if gradient.layout != torch.strided:
        return "is sparse: make it dense, such as by nn.Embedding(..., sparse=False)"
    if gradient.requires_grad:
        return (
            "has a graph (create_graph=True), which reducing it would cut: use torch.autograd.grad, then set .grad "
            "and call sync_gradients()"
        )
    if gradient.dtype != dtype:
        return f"is {gradient.dtype}, but it was planned for {dtype}: convert the model first, then wrap it"
    return ""


def _of_its_own(group: ProcessGroup) -> ProcessGroup:
    """Returns a group of the same ranks with its own order of collectives."""
    subgroup = group.subgroup(range(group.world_size), f"{group.name}/gradients")
    assert subgroup is not None
    return subgroup
