"""Gradient reducer: averages the gradients of parameters over a group, in buckets, overlapped with backward.

Strategy. One thread, the caller's, launches buckets strictly in the order of the layout, in whichever order their
gradients come. So the n-th collective of the group is the same bucket on every rank. Each is an asynchronous collective
of a subgroup that only the reducer uses. Where collectives are messages, buckets alternate between two such groups: the
bytes of one travel while the ranks of the other wait for each other. Only `finish` blocks, until all buckets are done
or failed. It ends because every rank launches every bucket in each reduction, with zeros for gradients that it lacks.

A summary follows the last bucket: which gradients each rank had, after how many forwards, of how many samples, and the
number of optimizer steps before. So ranks detect that they pair different iterations, and gradients that no rank has
stay None. The summary also counts ranks with an idle core for reductions overlapped with backward. If there is none,
one bucket per kind holds all gradients from then on.
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


def can_overlap(group: ProcessGroup) -> bool:
    """Whether a reduction can overlap with the computation without taking a core from it. Never blocks.

    A reduction in shared memory occupies a core, so one must be idle: the cores of this process are compared with
    torch's threads of all local ranks. Ranks may disagree, because neither data nor order of messages depends on it.
    """
    if not group.backend.shares_memory or len(set(group.hosts)) > 1:
        return True
    hosts = group.backend.hosts
    num_local = hosts.count(hosts[group.backend.rank])
    return num_local * torch.get_num_threads() < len(os.sched_getaffinity(0))


class StepCounts:
    """Counters of this rank's forwards, optimizer steps and samples since the last reduction.

    Ranks compare them in the summary, to detect that they pair different iterations.
    """

    def __init__(self, counts_steps: bool = True) -> None:
        """Starts at 0. The number of steps stays 0 without `counts_steps`."""
        self._counts = True
        self._counts_steps = counts_steps
        self._called_steps = self.num_forwards = self.num_samples = 0
        # A tensor, because code of torch.compile can add to one, and cannot call `note_step`.
        self.compiled_steps = new_tensor((), torch.int64).zero_()
        """Counter to which compiled code adds 1 for each optimizer step."""

    @property
    def num_steps(self) -> int:
        """Number of optimizer steps, compiled ones included."""
        return self._called_steps + int(self.compiled_steps) if self._counts_steps else 0

    def note_step(self) -> None:
        """Counts a step of an uncompiled optimizer."""
        self._called_steps += 1

    def forget(self) -> None:
        """Resets all counters to 0."""
        self._counts = True
        self._called_steps = self.num_forwards = self.num_samples = 0
        self.compiled_steps.zero_()

    def exempt(self) -> None:
        """Excludes forwards and steps of this rank from the next comparison."""
        self._counts = False

    def summary(self, having: list[bool], came: list[int], *, beside: bool) -> Summary:
        """Returns this rank's summary for the other ranks.

        Args:
            having: per parameter, whether this rank has a gradient.
            came: parameters in the order in which their gradients came; empty if this rank does not report it.
            beside: whether this rank has an idle core for reductions.
        """
        num_forwards = self.num_forwards if self._counts else None
        return Summary.of(having, num_forwards, self.num_samples, came, self.num_steps, beside=beside)

    def __str__(self) -> str:
        return f"{self.num_forwards} forwards, {self.num_steps} optimizer steps" if self._counts else ""


def mismatch(mine: str, group: ProcessGroup) -> CollectiveMismatch:
    """Returns the error for ranks whose counts differ. Blocks; every rank must call it.

    Args:
        mine: the counts of this rank, in words.
        group: the ranks.
    """
    # The summary holds sums only, so the error costs a collective of its own to name each rank's counts.
    told = [str(each) for each in group.all_gather_object(mine)]
    counts = "; ".join(f"rank {rank} {each}" for rank, each in zip(group.ranks, told, strict=True) if each)
    return CollectiveMismatch(
        f"the ranks did not do the same since gradients were last reduced ({counts}): a rank skipped a backward; "
        "run it on all ranks or on none, or call sync_gradients() in its place"
    )


class SampleWeights:
    """Weights of the ranks by their numbers of samples, for `average="samples"`.

    A rank multiplies its gradients by its number of samples over the mean number of the previous reduction, which all
    ranks know. The result is rescaled by the actual mean. So values stay in the range of the gradients, and ranks with
    equal numbers multiply nothing. Only the first reduction needs a collective to learn the mean.
    """

    def __init__(self, group: ProcessGroup) -> None:
        self._group = group
        self._usual = 0.0
        """Mean number of samples per rank in the last reduction. 0 before the first. The same on every rank."""

    def expect(self, num_samples: int) -> None:
        """Prepares a reduction with this rank's number of samples. Blocks the first time."""
        if not self._usual:
            told = self._group.all_reduce(torch.tensor(num_samples, dtype=torch.float64, device="cpu"), "mean")
            self._usual = told.item() or 1.0

    def weigh(self, gradients: torch.Tensor, num_samples: int) -> None:
        """Multiplies this rank's gradients by its weight."""
        _scale(gradients, num_samples / self._usual)

    def rescale(self, reduced: Iterable[torch.Tensor], summary: Summary) -> None:
        """Rescales from the predicted mean number of samples to the actual one.

        Raises:
            UnsupportedOp: ranks have gradients, but none has a sample.
        """
        if summary.num_samples:
            expected, self._usual = self._usual, summary.num_samples / self._group.world_size
            for gradients in reduced:
                _scale(gradients, expected / self._usual)
        elif any(summary.num_having):
            raise UnsupportedOp(
                "average='samples', but no rank has samples: samples are the rows of the first tensor given to the "
                "model's forward; call the model so, or use average='ranks'"
            )


def _scale(gradients: torch.Tensor, factor: float) -> None:
    if factor == 0:
        gradients.zero_()  # the gradients of no samples may be NaN, and 0 times NaN is NaN
    elif factor != 1:
        gradients.mul_(factor)


Average: TypeAlias = Literal["ranks", "samples"]

DEFAULT_BUCKET_MB = 25.0


class GradientReducer:
    """Reducer that replaces each parameter's gradient by the mean over all ranks. Every rank must make the same calls.

    `reduce` does it in one blocking call. To overlap it with backward, call `ready` for each complete gradient, which
    launches full buckets, and `finish` at the end; or call `start`, compute something else, and call `finish`.

    A gradient that is None on some ranks counts as zeros there. A gradient that is None on all ranks stays None.
    Gradients become views of the buckets' memory. Half precision is added in float32. After a reduction all ranks hold
    identical bits.

    Steps without zero_grad add up: the mean of equal gradients is the same gradient, so the part that an earlier step
    reduced stays unchanged. For a sum over ranks, multiply the new gradients by the number of ranks.
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
        """Plans the buckets and allocates their memory. Blocks until all ranks have.

        Args:
            parameters: name and parameter; the same ones in the same order on every rank, each once.
            group: the ranks to reduce over. The reducer makes subgroups, so every rank must make the same reducers.
            bucket_mb: mebibytes at which a bucket is full; the same on every rank.
            average: weights of the ranks: "ranks" equal, "samples" the samples noted before each reduction.
            hook: hook that reduces a bucket. None: an all_reduce.
            learns_order: whether the layout adapts after a reduction: to the order in which rank 0's gradients came
                in its first backward, and to one bucket per kind, of any size, if no rank has an idle core and there is
                no hook.

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
        """Groups in which buckets are reduced alternately. The first also carries summaries and announcements."""
        # A hook has a group of its own: it takes sequence numbers when it runs, in the lane, not when it is launched.
        # In a group that the caller's thread uses as well, ranks would number the calls differently.
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
            UnsupportedOp: the shared memory could not be allocated.
        """
        dtype = None if self._hook is None else self._hook.dtype
        self._homes = BucketSet(list(parameters), self.group, self._bucket_mb, dtype, self._learns_order)
        if self.is_needed:
            self._homes.allocate()

    @property
    def layout(self) -> Layout:
        """Present layout of the buckets."""
        return self._homes.layout

    @property
    def is_under_way(self) -> bool:
        """Whether `ready` or `start` has begun a reduction that is not finished."""
        return self._awaited is not None

    @property
    def is_closed(self) -> bool:
        """Whether a reduction was abandoned, after which all others raise Closed."""
        return bool(self._failure)

    @property
    def num_launched(self) -> int:
        """Number of launched buckets in the current reduction."""
        return len(self._launched)

    @property
    def is_needed(self) -> bool:
        """Whether gradients need any work: False for a single rank without a hook."""
        return self.group.world_size > 1 or self._hook is not None

    def note_samples(self, num_samples: int) -> None:
        """Counts samples whose gradients the next reduction includes."""
        self._tally.num_samples += num_samples

    def note_forward(self) -> None:
        """Counts a forward that needs a reduction."""
        self._tally.num_forwards += 1

    @property
    def compiled_steps(self) -> torch.Tensor:
        """Counter to which code of torch.compile adds 1 instead of a call of `note_step`."""
        return self._tally.compiled_steps

    def note_step(self) -> None:
        """Counts a step of an optimizer of these parameters. Ignored if the hook leaves gradients local.

        With local gradients a rank may skip a step that the others make, if its gradients are infinite for instance.
        """
        self._tally.note_step()

    def forget(self) -> None:
        """Resets the counts of forwards, steps and samples. Every rank must do the same."""
        self._tally.forget()

    def hide(self, index: int) -> None:
        """Removes a .grad that was rounded from wider memory. Call it before autograd adds to the gradient.

        Raises:
            UnsupportedOp: the gradient cannot be reduced (see `start`).
        """
        self._homes.hide(index)

    def show(self) -> None:
        """Restores gradients hidden by `hide` that the backward did not touch. Call it after a backward."""
        self._homes.show()

    def keep(self, index: int) -> None:
        """Moves a complete gradient into its bucket without reducing it, as under `no_sync`.

        Raises:
            UnsupportedOp: the gradient cannot be reduced (see `start`).
        """
        self._homes.keep(index)

    def ready(self, index: int, launch: bool = True) -> None:
        """Marks a parameter's gradient as complete, and launches full buckets.

        Never blocks, except in the first reduction with `average="samples"`.

        Args:
            index: the parameter's number, in the order given.
            launch: whether to launch full buckets now. False: `start` launches them.

        Raises:
            UnsupportedOp: its bucket is in flight already, or a gradient cannot be reduced (see `start`).
        """
        if not self.is_needed:
            return
        awaited = self._begin()
        if self._homes.arrived is not None:
            self._homes.arrived.append(index)
        home = self._homes.bucket_of(index)
        if home < self.num_launched:
            raise UnsupportedOp(
                f"parameter {self._homes.names[index]!r} got another gradient after the reduction of its bucket began: "
                "where one backward runs inside another (checkpoint with use_reentrant=True), use use_reentrant=False, "
                "or run backward under no_sync() and call sync_gradients() after it"
            )
        self._homes.keep(index)
        awaited[home].discard(index)
        # In the layout's order only: a full bucket waits for the ones before it, because the n-th collective must be
        # the same bucket on every rank.
        while launch and self.num_launched < len(awaited) and not awaited[self.num_launched]:
            self._launch()

    def start(self) -> None:
        """Launches all buckets that are not in flight, then the summary. Blocks no more than `ready`.

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
        """Calls `start`, blocks until all buckets are reduced, and sets the gradients.

        Raises:
            UnsupportedOp, Closed: as `start`.
            CollectiveMismatch: the ranks have run different numbers of forwards, or of optimizer steps, since the last
                reduction: one of them has skipped a backward. The gradients are useless then.
            UnsupportedOp: `average="samples"`, and no rank has any samples.
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
        mine = str(self._tally)  # before `forget` resets it: the error names these counts
        self._awaited, self._launched, self._summary = None, [], None
        self.forget()
        if not summary.agrees():
            raise mismatch(mine, self.group)
        self._give(summary)
        if self._learns_order:
            order = summary.order() if self._homes.arrived is not None else ()
            self._homes.arrange(order, in_one=self._hook is None and not summary.num_beside)

    def reduce(self) -> None:
        """Reduces all gradients: `start`, then `finish`. Blocks. Not compared with forwards, so it needs none."""
        self._tally.exempt()
        # Hooks keep tensors from one reduction to the next. Made in inference mode, they could not be used outside it.
        with normal_mode():
            self.finish()

    def abandon(self, error: BaseException | None = None) -> None:
        """Cancels the current reduction on all ranks. Does nothing if there is none.

        This rank is out of step with the others then. They raise PeerFailed, now or when they reach this reduction.

        Args:
            error: the cause. A Timeout names the rank that was waited for, so that the others do not blame this one.
        """
        if self._awaited is None:
            return
        rank = self.group.backend.rank
        reason = f"its backward failed with {self.num_launched} of {len(self._awaited)} buckets of gradients under way"
        # The first cause wins: `revoke` returns the failure that the group already has, which the later groups take.
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
        # A hook may call any collective, so a late one is looked up in the flight recorder instead of being known here.
        latest = partial(group.backend.flight_recorder.latest, group.context)
        work.lateness = Lateness(group.backend, group.ranks, group.timeout, latest)
        return work

    def _group_of(self, number: int) -> ProcessGroup:
        return self.groups[number % len(self.groups)]

    def _failed_first(self) -> list[ProcessGroup]:
        """Returns all groups, first the group of the first failed bucket: its failure is the cause for the others."""
        failed = [number for number, work in enumerate(self._launched) if work.has_ended and work.exception()]
        begin = failed[0] % len(self.groups) if failed and self._hook is None else 0
        return [*self.groups[begin:], *self.groups[:begin], self._hook_group]

    def _own_summary(self) -> torch.Tensor:
        # Rank 0 alone reports the order: places are added up over ranks.
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
    """Returns a subgroup of all ranks, which numbers its collectives independently of `group`."""
    subgroup = group.subgroup(range(group.world_size), f"{group.name}/{what}")
    assert subgroup is not None
    return subgroup
