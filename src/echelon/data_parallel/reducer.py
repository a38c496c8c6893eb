"""Reduces the gradients of parameters over a group, in buckets beside the computation.

Strategy. Buckets are launched by one thread, that of the caller, strictly in the order of the layout, whatever order
their gradients come in: so the n-th collective of the group is the same bucket on every rank. Each is an asynchronous
collective of a group of its own, which nobody else uses. Where collectives are messages, buckets take turns in two such
groups: the bytes of one travel while the ranks of the other wait for each other. Only `finish` blocks, until all are
done or failed. It ends because every rank launches every bucket in each reduction, those with gradients that this rank
does not have, too.

A summary travels behind the last bucket: which gradients each rank had, how many forwards led to them and of how many
samples, and how many optimizer steps came before. So ranks that pair different iterations are told, and what no rank
has stays None. It also tells whether any rank has a core left over to reduce beside backward: if none has, one bucket
of each kind holds all from then on.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from functools import partial
from typing import Literal, TypeAlias

import torch

from echelon.backends.memory import new_tensor
from echelon.backends.modes import normal_mode
from echelon.backends.work import Work
from echelon.data_parallel.bucket_set import BucketMemory, BucketSet
from echelon.data_parallel.hooks import GradientHook
from echelon.data_parallel.layout.buckets import Layout
from echelon.data_parallel.layout.summary import Summary
from echelon.errors import Closed, CollectiveMismatch, Failure, PeerFailed, Timeout, UnsupportedOp, failure_of
from echelon.group.group import ProcessGroup
from echelon.group.runner import Lateness

# Says whether a core is left over for reductions.


def can_overlap(group: ProcessGroup) -> bool:
    """Says whether a reduction can run beside the computation without taking time from it.

    Where all ranks share memory it takes a core while it runs, so there must be one that computes nothing. Ranks may
    come to different answers: what they send, and in which order, does not depend on it.
    """
    if not group.backend.shares_memory or len(set(group.hosts)) > 1:
        return True
    hosts = group.backend.hosts
    num_local = hosts.count(hosts[group.backend.rank])
    return num_local * torch.get_num_threads() < len(os.sched_getaffinity(0))


# What a rank has done since gradients were last reduced.


class StepCounts:
    """Counts forwards, optimizer steps and samples, so that ranks that pair different iterations are told."""

    def __init__(self, counts_steps: bool = True) -> None:
        """Begins at 0; steps stay there unless `counts_steps`."""
        self._counts = True
        self._counts_steps = counts_steps
        self._called_steps = self.num_forwards = self.num_samples = 0
        self.compiled_steps = new_tensor((), torch.int64).zero_()
        """To which compiled code adds 1 for each optimizer step."""

    @property
    def num_steps(self) -> int:
        """Steps of optimizers, compiled ones too."""
        return self._called_steps + int(self.compiled_steps) if self._counts_steps else 0

    def note_step(self) -> None:
        """Counts a step of an optimizer that is not compiled."""
        self._called_steps += 1

    def forget(self) -> None:
        """Begins anew."""
        self._counts = True
        self._called_steps = self.num_forwards = self.num_samples = 0
        self.compiled_steps.zero_()

    def exempt(self) -> None:
        """Leaves forwards and steps of this rank out of the next comparison."""
        self._counts = False

    def summary(self, having: list[bool], came: list[int], *, beside: bool) -> Summary:
        """Returns what the other ranks are told; of gradients, who has them and in which order they came."""
        num_forwards = self.num_forwards if self._counts else None
        return Summary.of(having, num_forwards, self.num_samples, came, self.num_steps, beside=beside)

    def __str__(self) -> str:
        return f"{self.num_forwards} forwards, {self.num_steps} optimizer steps" if self._counts else ""


def mismatch(mine: str, group: ProcessGroup) -> CollectiveMismatch:
    """Returns the error for ranks whose tallies differ. Every rank must ask for it.

    Args:
        mine: the tally of this rank, in words.
        group: the ranks.
    """
    told = [str(each) for each in group.all_gather_object(mine)]
    counts = "; ".join(f"rank {rank} {each}" for rank, each in zip(group.ranks, told, strict=True) if each)
    return CollectiveMismatch(
        f"the ranks did not do the same since gradients were last reduced ({counts}): a rank skipped a backward; "
        "run it on all ranks or on none, or call sync_gradients() in its place"
    )


# Weighs the gradients of each rank by its number of samples.
#
# Each rank multiplies its gradients by its number over the mean number of the reduction before, which all know, and
# what comes out is put right by the new one. So numbers stay in the range of the gradients, and ranks with equal
# numbers multiply nothing; the first reduction of all has to ask for the mean.


class SampleWeights:
    """Remembers how many samples ranks have on average; the same on every rank."""

    def __init__(self, group: ProcessGroup) -> None:
        self._group = group
        self._usual = 0.0
        """The mean over ranks in the last reduction; 0: there was none."""

    def expect(self, num_samples: int) -> None:
        """Called before a reduction, with the samples of this rank. Blocks the first time."""
        if not self._usual:
            told = self._group.all_reduce(torch.tensor(num_samples, dtype=torch.float64, device="cpu"), "mean")
            self._usual = told.item() or 1.0

    def weigh(self, gradients: torch.Tensor, num_samples: int) -> None:
        """Multiplies this rank's gradients by its weight."""
        _scale(gradients, num_samples / self._usual)

    def rescale(self, reduced: Iterable[torch.Tensor], summary: Summary) -> None:
        """Divides by the samples that there were on average instead of those that were expected.

        Raises:
            UnsupportedOp: ranks have gradients, and none has a sample.
        """
        if summary.num_samples:
            expected, self._usual = self._usual, summary.num_samples / self._group.world_size
            for gradients in reduced:
                _scale(gradients, expected / self._usual)
        elif any(summary.num_having):
            raise UnsupportedOp(
                "average='samples', and no rank has any: samples are the rows of the first tensor that is given to the "
                "model's forward; call the model so, or use average='ranks'"
            )


def _scale(gradients: torch.Tensor, factor: float) -> None:
    if factor == 0:
        gradients.zero_()  # the gradients of no samples may be NaN
    elif factor != 1:
        gradients.mul_(factor)


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
                order of the buckets from then on; and whether buckets can be reduced beside a backward: where no rank
                has a core left over for that, and there is no hook, one holds all, however large.

        Raises:
            ValueError: `bucket_mb` is not above 0.
        """
        self._bucket_mb = bucket_mb
        self._average = average
        self._hook = hook
        self._leaves_gradients = hook is not None and hook.leaves_gradients
        self._learns_order = learns_order
        self.group = _of_its_own(group, "gradients")
        self.groups = [self.group] if self.group.is_native else [self.group, _of_its_own(group, "gradients in between")]
        """In which buckets are reduced, in turns; in the first also whatever else ranks tell each other."""
        # What the hook sends is numbered when it runs, not when it is due.
        self._hook_group = _of_its_own(group, "hook")
        self._awaited: list[set[int]] | None = None
        self._launched: list[Work[torch.Tensor] | Work[None]] = []
        self._summary: Work[torch.Tensor] | None = None
        self._failure = ""
        self._tally = StepCounts(counts_steps=not self._leaves_gradients)
        self._weights = SampleWeights(self.group) if average == "samples" and not self._leaves_gradients else None
        self.plan(parameters)

    def plan(self, parameters: Iterable[tuple[str, torch.nn.Parameter]]) -> None:
        """Plans the buckets for other parameters, from the next reduction on. Every rank must do the same.

        Blocks until all ranks have allocated the buckets' memory.

        Raises:
            UnsupportedOp: there is no memory that ranks share.
        """
        dtype = None if self._hook is None else self._hook.dtype
        self._homes = BucketSet(list(parameters), self.group, self._bucket_mb, dtype, self._learns_order)
        if self.is_needed:
            self._homes.allocate()

    @property
    def layout(self) -> Layout:
        """The buckets as they are now."""
        return self._homes.layout

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
        self._tally.num_samples += num_samples

    def note_forward(self) -> None:
        """Counts a forward after which a reduction is to come."""
        self._tally.num_forwards += 1

    @property
    def compiled_steps(self) -> torch.Tensor:
        """A number to which code of torch.compile adds 1 where else `note_step` is called."""
        return self._tally.compiled_steps

    def note_step(self) -> None:
        """Counts a step of an optimizer of these parameters, but not one by gradients of this rank alone.

        A rank may leave such a step out, if its gradients are infinite for instance.
        """
        self._tally.note_step()

    def forget(self) -> None:
        """Begins counting forwards, steps and samples anew. Every rank must do the same."""
        self._tally.forget()

    def hide(self, index: int) -> None:
        """To be called before autograd adds to a gradient: takes it away if it is rounded from the wider memory.

        Raises:
            UnsupportedOp: the gradient cannot be reduced (see `start`).
        """
        self._homes.hide(index)

    def show(self) -> None:
        """To be called after a backward: gives back what was taken away and not added to."""
        self._homes.show()

    def keep(self, index: int) -> None:
        """Moves a gradient that is complete, but is not to be reduced yet, to where the reduction will find it.

        Raises:
            UnsupportedOp: the gradient cannot be reduced (see `start`).
        """
        self._homes.keep(index)

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
        if self._homes.arrived is not None:
            self._homes.arrived.append(index)
        home = self._homes.bucket_of(index)
        if home < self.num_launched:
            raise UnsupportedOp(
                f"parameter {self._homes.names[index]!r} got another gradient when its bucket was already on its way: "
                "where one backward runs inside another (checkpoint with use_reentrant=True), use use_reentrant=False, "
                "or run backward under no_sync() and call sync_gradients() after it"
            )
        self._homes.keep(index)
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
        except BaseException as error:
            self.abandon(error)
            raise
        mine = str(self._tally)
        self._awaited, self._launched, self._summary = None, [], None
        self.forget()
        if not summary.agrees():
            raise mismatch(mine, self.group)
        self._give(summary)
        if self._learns_order:
            order = summary.order() if self._homes.arrived is not None else ()
            self._homes.arrange(order, in_one=self._hook is None and not summary.num_beside)

    def reduce(self) -> None:
        """Reduces all gradients: `start`, then `finish`. Asked for, so it may take part without a forward."""
        self._tally.exempt()
        with normal_mode():  # what hooks keep from one reduction to the next is used outside of inference mode as well
            self.finish()

    def abandon(self, error: BaseException | None = None) -> None:
        """Gives up the reduction under way, if there is one, on all ranks: what would have finished it has failed.

        This rank is out of step with the others then; they get PeerFailed, now or when they come to this reduction.

        Args:
            error: why; a Timeout names the rank that was waited for, so that the others do not blame this one.
        """
        if self._awaited is None:
            return
        rank = self.group.backend.rank
        reason = f"its backward failed with {self.num_launched} of {len(self._awaited)} buckets of gradients under way"
        cause: Failure = failure_of(error, rank) if isinstance(error, Timeout) else PeerFailed(rank, reason)
        for group in self._failed_first():
            cause = group.backend.revoke(group.context, group.ranks, cause)
        self._failure = (
            f"an earlier reduction of gradients was given up because {cause}: end all ranks, or wrap the model anew on "
            "all of them"
        )
        self._awaited, self._launched, self._summary = None, [], None

    # Inside

    def _begin(self) -> list[set[int]]:
        if self._failure:
            raise Closed(self._failure)
        if self._awaited is None:
            if self._weights is not None:
                self._weights.expect(self._tally.num_samples)
            self._awaited = [set(bucket.members) for bucket in self.layout.buckets]
        return self._awaited

    def _launch(self) -> None:
        try:
            memory = self._homes.memories[self.num_launched]
            memory.fill()
            self._launched.append(self._reduce(memory))
        except BaseException as error:
            self.abandon(error)
            raise

    def _reduce(self, memory: BucketMemory) -> Work[torch.Tensor] | Work[None]:
        hook, group = self._hook, self._hook_group
        if self._weights is not None:
            self._weights.weigh(memory.flat, self._tally.num_samples)
        if hook is None:
            return self._group_of(memory.number).all_reduce(memory.flat, "mean", async_op=True)
        bucket = memory.bucket(1.0 if self._average == "ranks" else float(self._tally.num_samples))
        description = f"{type(hook).__name__} of bucket {memory.number} of group {group.name!r}"
        work = group.backend.start(lambda: hook.reduce(bucket, group), description, group.context)
        latest = partial(group.backend.flight_recorder.latest, group.context)
        work.lateness = Lateness(group.backend, group.ranks, group.timeout, latest)
        return work

    def _group_of(self, number: int) -> ProcessGroup:
        return self.groups[number % len(self.groups)]

    def _failed_first(self) -> list[ProcessGroup]:
        """Returns all groups, that of a bucket which has failed before others: why, is why the rest is given up."""
        failed = [number for number, work in enumerate(self._launched) if work.has_ended and work.exception()]
        begin = failed[0] % len(self.groups) if failed and self._hook is None else 0
        return [*self.groups[begin:], *self.groups[:begin], self._hook_group]

    def _own_summary(self) -> torch.Tensor:
        arrived = self._homes.arrived if self.group.rank == 0 else None
        beside = can_overlap(self.group)
        summary = self._tally.summary(self._homes.has_gradients(), arrived or [], beside=beside)
        return torch.tensor(summary.numbers(), dtype=torch.int64, device="cpu")

    def _give(self, summary: Summary) -> None:
        if self._weights is not None:
            self._weights.rescale((memory.flat for memory in self._homes.memories), summary)
        gets = self._homes.has_gradients() if self._leaves_gradients else summary.num_having
        for index, any_has in enumerate(gets):
            if any_has:
                self._homes.give(index)


def _of_its_own(group: ProcessGroup, what: str) -> ProcessGroup:
    """Returns a group of the same ranks with its own order of collectives."""
    subgroup = group.subgroup(range(group.world_size), f"{group.name}/{what}")
    assert subgroup is not None
    return subgroup
