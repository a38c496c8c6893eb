"""Reduces the gradients of parameters over a group, in buckets and beside the computation.

Strategy. Buckets are launched by one thread, that of the caller, strictly in the order of the layout, whatever order
their gradients come in: so the n-th collective of the group is the same bucket on every rank. Each is an asynchronous
collective of a group of its own, which nobody else uses; only `finish` blocks, until all of them are done or failed. It
ends because every rank launches every bucket in each reduction, those with gradients that this rank does not have, too.

A summary travels behind the last bucket: which gradients each rank had, how many forwards led to them and of how many
samples, and how many optimizer steps came before. So ranks that pair different iterations are told, and what no rank
has stays None.

Where ranks weigh by samples, each multiplies its gradients by its number over the mean number of the reduction before,
which all know from that summary, and what comes out is put right by the new one. So numbers stay in the range of the
gradients, and ranks with equal numbers multiply nothing; the first reduction of all has to ask for the mean.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Literal, TypeAlias

import torch

from echelon.backends.work import Work
from echelon.data_parallel.broadcast import kind_of
from echelon.data_parallel.bucket_memory import BucketMemory
from echelon.data_parallel.buckets import bucket_layout
from echelon.data_parallel.hooks import GradientHook
from echelon.data_parallel.summary import Summary
from echelon.errors import Closed, CollectiveMismatch, PeerFailed, UnsupportedOp
from echelon.group import ProcessGroup

Average: TypeAlias = Literal["ranks", "samples"]

DEFAULT_BUCKET_MB = 25.0


class GradientReducer:
    """Replaces each parameter's gradient by the mean over all ranks. Every rank must do the same.

    `reduce` does it at once. To overlap it with backward call `ready` for each gradient that is complete, which
    launches the buckets that are full, and `finish` at the end; or `start`, something else, and `finish`.

    A gradient that is None on some ranks counts as zeros there; one that is None on all stays None. Gradients become
    views of the buckets' memory, and half precision is added in float32. After a reduction all ranks hold identical
    bits.

    As it is a mean, what was reduced before and is added to stays what it is: steps without zero_grad add up. Who wants
    a sum multiplies what is added by the number of ranks.
    """

    def __init__(
        self,
        parameters: Iterable[tuple[str, torch.nn.Parameter]],
        group: ProcessGroup,
        *,
        bucket_mb: float = DEFAULT_BUCKET_MB,
        average: Average = "ranks",
        hook: GradientHook | None = None,
        learns_order: bool = False,
    ) -> None:
        """Plans the buckets and allocates their memory, together with the other ranks.

        Args:
            parameters: name and parameter; the same ones in the same order on every rank, each once.
            group: the ranks to reduce over. A subgroup of it is made, so every rank must make the same reducers.
            bucket_mb: mebibytes at which a bucket is full; the same on every rank.
            average: whether all ranks weigh the same, or as much as the samples noted before each reduction.
            hook: what reduces a bucket; None: an all_reduce.
            learns_order: whether the first backward shows in which order gradients come (rank 0's counts), which is the
                order of the buckets from then on.

        Raises:
            ValueError: `bucket_mb` is not above 0.
        """
        self._bucket_mb = bucket_mb
        self._average = average
        self._hook = hook
        self._leaves_gradients = hook is not None and hook.leaves_gradients
        self._weighs_gradients = average == "samples" and not self._leaves_gradients
        self._learns_order = learns_order
        self.group = _of_its_own(group, "gradients")
        self._hook_group = _of_its_own(
            group, "hook"
        )  # what the hook sends is numbered when it runs, not when it is due
        self._awaited: list[set[int]] | None = None
        self._launched: list[Work[torch.Tensor] | Work[None]] = []
        self._summary: Work[torch.Tensor] | None = None
        self._failure = ""
        self._num_forwards: int | None = 0
        self._num_steps = 0
        self._num_samples = 0
        self._usual_samples: float | None = None
        """Where gradients weigh by samples: the mean over ranks in the last reduction; the same on every rank."""
        self._memories: list[BucketMemory] = []
        self.plan(parameters)

    def plan(self, parameters: Iterable[tuple[str, torch.nn.Parameter]]) -> None:
        """Plans the buckets for other parameters, from the next reduction on. Every rank must do the same.

        Blocks until all ranks have allocated the buckets' memory.

        Raises:
            UnsupportedOp: there is no memory that ranks share.
        """
        named = list(parameters)
        self._names = [name for name, _ in named]
        self._parameters = [parameter for _, parameter in named]
        self._dtypes = [parameter.dtype for parameter in self._parameters]
        self._came: list[int] | None = [] if self._learns_order else None
        self._lay_out(self._default_order())
        if self.is_needed:
            self._memories = [self._allocate(number) for number in range(len(self.layout.buckets))]

    @property
    def is_under_way(self) -> bool:
        """Whether a reduction has begun, by `ready` or `start`, that has not been finished."""
        return self._awaited is not None

    @property
    def is_closed(self) -> bool:
        """Whether a reduction was abandoned, so that there can be no other."""
        return bool(self._failure)

    @property
    def num_launched(self) -> int:
        """The number of buckets on their way in the reduction under way."""
        return len(self._launched)

    @property
    def is_needed(self) -> bool:
        """Whether there is anything to do for gradients as they come."""
        return self.group.world_size > 1 or self._hook is not None

    def note_samples(self, num_samples: int) -> None:
        """Counts samples whose gradients the next reduction is to include."""
        self._num_samples += num_samples

    def note_forward(self) -> None:
        """Counts a forward after which a reduction is to come."""
        self._num_forwards = (self._num_forwards or 0) + 1

    def note_step(self) -> None:
        """Counts a step of an optimizer of these parameters, but not one by gradients of this rank alone.

        A rank may leave such a step out, if its gradients are infinite for instance.
        """
        self._num_steps += not self._leaves_gradients

    def forget(self) -> None:
        """Begins counting forwards, steps and samples anew. Every rank must do the same."""
        self._num_forwards = self._num_steps = self._num_samples = 0

    def hide(self, index: int) -> None:
        """To be called before autograd adds to a gradient: takes it away if it is rounded from the wider memory.

        Raises:
            UnsupportedOp: the gradient cannot be reduced (see `start`).
        """
        home, place = self._homes[index]
        self._memories[home].hide(place)

    def show(self) -> None:
        """To be called after a backward: gives back what was taken away and not added to."""
        for memory in self._memories:
            memory.show()

    def keep(self, index: int) -> None:
        """Moves a gradient that is complete, but is not to be reduced yet, to where the reduction will find it.

        Raises:
            UnsupportedOp: the gradient cannot be reduced (see `start`).
        """
        home, place = self._homes[index]
        self._memories[home].take(place)

    def ready(self, index: int, launch: bool = True) -> None:
        """Says that the gradient of a parameter is complete. Launches the buckets that are full.

        Never blocks, but in the first reduction of ranks that weigh by samples.

        Args:
            index: the parameter's number, in the order given.
            launch: False: nothing is launched before `start`.

        Raises:
            UnsupportedOp: its bucket is on its way already, or a gradient cannot be reduced (see `start`).
        """
        if not self.is_needed:
            return
        awaited = self._begin()
        if self._came is not None:
            self._came.append(index)
        home, _ = self._homes[index]
        if home < self.num_launched:
            raise UnsupportedOp(
                f"parameter {self._names[index]!r} got another gradient when its bucket was already on its way: where "
                "one backward runs inside another (checkpoint with use_reentrant=True), use use_reentrant=False, or "
                "run backward under no_sync() and call sync_gradients() after it"
            )
        self.keep(index)
        awaited[home].discard(index)
        while launch and self.num_launched < len(awaited) and not awaited[self.num_launched]:
            self._launch()

    def start(self) -> None:
        """Launches all buckets that are not on their way. Blocks no more than `ready`.

        Raises:
            UnsupportedOp: a gradient is sparse, has a graph of its own, or another dtype than its parameter had.
            Closed: an earlier reduction was abandoned.
        """
        if not self.is_needed:
            return
        self._begin()
        while self.num_launched < len(self.layout.buckets):
            self._launch()
        if self._summary is None:
            self._summary = self.group.all_reduce(self._own_summary(), async_op=True)

    def finish(self) -> None:
        """Starts what `start` would, waits until all is reduced, and sets the gradients.

        Raises:
            UnsupportedOp, Closed: as `start`.
            CollectiveMismatch: the ranks have run different numbers of forwards, or of optimizer steps, since the last
                reduction: one of them has skipped a backward. The gradients are of no use then.
            UnsupportedOp: ranks weigh by samples, and none has any.
            CollectiveMismatch, PeerFailed, Timeout: as `ProcessGroup.all_reduce`.
        """
        if not self.is_needed:
            return
        self.start()
        assert self._summary is not None
        try:
            for work in self._launched:
                work.wait()
            summary = Summary.read(self._summary.wait().tolist())
        except BaseException:
            self.abandon()
            raise
        mine = None if self._num_forwards is None else (self._num_forwards, self._num_steps)
        self._awaited, self._launched, self._summary = None, [], None
        self.forget()
        if not summary.agrees():
            raise self._mismatch(mine)
        self._give(summary)
        if self._came is not None and (order := summary.order()):
            self._learn_order(order)

    def reduce(self) -> None:
        """Reduces all gradients: `start`, then `finish`. Asked for, so it may take part without a forward."""
        self._num_forwards = None
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
        self.group.backend.revoke(self._hook_group.context, self.group.ranks, first)
        self._failure = (
            f"an earlier reduction of gradients was given up because {first}: end all ranks, or wrap the model anew on "
            "all of them"
        )
        self._awaited, self._launched, self._summary = None, [], None

    # Inside

    def _lay_out(self, order: Iterable[int]) -> None:
        sizes = [parameter.numel() * parameter.element_size() for parameter in self._parameters]
        kinds = [kind_of(parameter) for parameter in self._parameters]
        self.layout = bucket_layout(sizes, kinds, self._bucket_mb, order=list(order))
        self._homes = self.layout.homes()
        self._memories = []

    def _default_order(self) -> list[int]:
        return list(reversed(range(len(self._parameters))))

    def _learn_order(self, order: list[int]) -> None:
        """Plans the buckets in the order in which rank 0 got its gradients; the others follow as they would."""
        seen = set(order)
        before, memories = self.layout, self._memories
        self._came = None
        self._lay_out([*order, *(index for index in self._default_order() if index not in seen)])
        if self.layout == before:
            self._memories = memories
            return
        del memories
        for number, bucket in enumerate(self.layout.buckets):  # one by one, as the memory of the old ones becomes free
            self._memories.append(self._allocate(number))
            for place in range(len(bucket.members)):
                self._memories[number].take(place)

    def _begin(self) -> list[set[int]]:
        if self._failure:
            raise Closed(self._failure)
        if self._awaited is None:
            if self._weighs_gradients and self._usual_samples is None:
                told = self.group.all_reduce(torch.tensor(self._num_samples, dtype=torch.float64, device="cpu"), "mean")
                self._usual_samples = told.item() or 1.0
            self._awaited = [set(bucket.members) for bucket in self.layout.buckets]
        return self._awaited

    def _allocate(self, number: int) -> BucketMemory:
        members = self.layout.buckets[number].members
        return BucketMemory(
            number,
            [self._names[member] for member in members],
            [self._parameters[member] for member in members],
            self.group,
            self._dtypes[members[0]],
            None if self._hook is None else self._hook.dtype,
        )

    def _launch(self) -> None:
        try:
            memory = self._memories[self.num_launched]
            memory.fill()
            self._launched.append(self._reduce(memory))
        except BaseException:
            self.abandon()
            raise

    def _reduce(self, memory: BucketMemory) -> Work[torch.Tensor] | Work[None]:
        hook, group = self._hook, self._hook_group
        if self._usual_samples is not None:
            _scale(memory.flat, self._num_samples / self._usual_samples)
        if hook is None:
            return self.group.all_reduce(memory.flat, "mean", async_op=True)
        bucket = memory.bucket(1.0 if self._average == "ranks" else float(self._num_samples))
        description = f"{type(hook).__name__} of bucket {memory.number} of group {group.name!r}"
        return group.backend.start(lambda: hook.reduce(bucket, group), description, group.context)

    def _own_summary(self) -> torch.Tensor:
        having = [self._memories[home].has_gradient[place] for home, place in self._homes]
        came = self._came if self.group.rank == 0 and self._came is not None else []
        summary = Summary.of(having, self._num_forwards, self._num_samples, came, self._num_steps)
        return torch.tensor(summary.numbers(), dtype=torch.int64, device="cpu")

    def _give(self, summary: Summary) -> None:
        if self._usual_samples is not None:
            self._put_right(summary, self._usual_samples)
        for (home, place), num_having in zip(self._homes, summary.num_having, strict=True):
            memory = self._memories[home]
            if memory.has_gradient[place] if self._leaves_gradients else num_having:
                memory.give(place)

    def _put_right(self, summary: Summary, expected: float) -> None:
        """Divides by the samples that there were on average instead of those that were expected."""
        if summary.num_samples:
            self._usual_samples = summary.num_samples / self.group.world_size
            for memory in self._memories:
                _scale(memory.flat, expected / self._usual_samples)
        elif any(summary.num_having):
            raise UnsupportedOp(
                "average='samples', and no rank has any: samples are the rows of the first tensor that is given to the "
                "model's forward; call the model so, or use average='ranks'"
            )

    def _mismatch(self, mine: tuple[int, int] | None) -> CollectiveMismatch:
        told = [str(each) for each in self.group.all_gather_object(_in_words(mine))]
        counts = "; ".join(f"rank {rank} {each}" for rank, each in zip(self.group.ranks, told, strict=True) if each)
        return CollectiveMismatch(
            f"the ranks did not do the same since gradients were last reduced ({counts}): a rank skipped a backward; "
            "run it on all ranks or on none, or call sync_gradients() in its place"
        )


def _in_words(counts: tuple[int, int] | None) -> str:
    return "" if counts is None else f"{counts[0]} forwards, {counts[1]} optimizer steps"


def has_time_beside(group: ProcessGroup) -> bool:
    """Says whether a reduction can run beside the computation without taking time from it.

    Where all ranks share memory it takes a core while it runs, so there must be one that computes nothing. Ranks may
    come to different answers: what they send, and in which order, does not depend on it.
    """
    if not group.backend.shares_memory or len(set(group.hosts)) > 1:
        return True
    hosts = group.backend.hosts
    num_local = hosts.count(hosts[group.backend.rank])
    return num_local * torch.get_num_threads() < len(os.sched_getaffinity(0))


def _scale(gradients: torch.Tensor, factor: float) -> None:
    if factor == 0:
        gradients.zero_()  # the gradients of no samples may be NaN
    elif factor != 1:
        gradients.mul_(factor)


def _of_its_own(group: ProcessGroup, what: str) -> ProcessGroup:
    """Returns a group of the same ranks with its own order of collectives."""
    subgroup = group.subgroup(range(group.world_size), f"{group.name}/{what}")
    assert subgroup is not None
    return subgroup
