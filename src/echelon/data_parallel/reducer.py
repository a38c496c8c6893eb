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

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Literal, NamedTuple, TypeAlias

import torch

from echelon.backends.modes import normal_mode
from echelon.backends.work import Work
from echelon.cores import num_cores
from echelon.data_parallel.bucket_set import BucketMemory, BucketSet
from echelon.data_parallel.equal_batches import EqualBatches
from echelon.data_parallel.hooks import GradientHook
from echelon.data_parallel.layout import Layout
from echelon.data_parallel.summary import SampleWeights, StepCounts, Summary, mismatch
from echelon.errors import Closed, Failure, PeerFailed, Timeout, UnsupportedOp, failure_of
from echelon.group.group import ProcessGroup
from echelon.group.runner import Lateness
from echelon.purposes import BACKWARD, Purpose


def can_overlap(group: ProcessGroup) -> bool:
    """Whether a reduction can overlap with the computation without taking a core from it. Never blocks.

    A reduction that crosses no network occupies a core, so one must be idle: the cores of this process are compared
    with torch's threads of all local ranks. Ranks may disagree: neither data nor order of messages depends on it.
    """
    backend = group.backend
    if backend.crosses_network(group.ranks):
        return True
    hosts = backend.control.hosts
    num_local = hosts.count(hosts[backend.rank])
    return num_local * torch.get_num_threads() < num_cores()


Average: TypeAlias = Literal["ranks", "samples"]

DEFAULT_BUCKET_MB = 25.0


class BucketCollectives:
    """Collectives that reduce buckets: an all_reduce each, or the user's hook, in groups of their own."""

    def __init__(self, group: ProcessGroup, hook: GradientHook | None) -> None:
        """Makes the groups, so every rank must make the same ones in the same order."""
        self._hook = hook
        first = _of_its_own(group, "gradients")
        self.groups = [first] if first.is_native else [first, _of_its_own(group, "gradients in between")]
        """Groups in which buckets are reduced alternately. The first also carries summaries and announcements."""
        # A hook has a group of its own: it takes sequence numbers when it runs, in the lane, not when it is launched.
        # In a group that the caller's thread uses as well, ranks would number the calls differently.
        self._hook_group = _of_its_own(group, "hook")
        self._shown = group.name
        self.step = 0
        """Number of the present or next reduction, from 1 on."""
        self.count_step()

    def count_step(self) -> None:
        """Counts a reduction that has ended. Errors about the operations from now on name the next one."""
        self.step += 1
        purpose = Purpose(BACKWARD, self._shown, self.step)
        for group in (*self.groups, self._hook_group):
            group.backend.flight_recorder.serve(group.context, purpose)

    def launch(self, memory: BucketMemory, weight: float) -> Work[torch.Tensor] | Work[None]:
        """Starts to reduce a bucket. `weight` is the weight of this rank in the mean, for the hook."""
        hook, group = self._hook, self._hook_group
        if hook is None:
            groups = self.groups
            return groups[memory.number % len(groups)].all_reduce(memory.flat, "mean", async_op=True)
        bucket = memory.bucket(weight)
        call = f"{BACKWARD} of step {self.step}"
        description = f"{type(hook).__name__} of bucket {memory.number} in {call} of group {self._shown!r}"
        work = group.backend.lanes.start(lambda: hook.reduce(bucket, group), description, group.context)
        # A hook may call any collective, so a late one is looked up in the flight recorder instead of being known here.
        latest = partial(group.backend.flight_recorder.latest, group.context)
        work.lateness = Lateness(group.backend, group.ranks, group.timeout, latest)
        return work

    def revoke(self, works: Sequence[Work[torch.Tensor] | Work[None]], cause: Failure) -> Failure:
        """Fails all groups on all ranks, and returns the first cause. `works`: the buckets launched so far."""
        # First the group of the first failed bucket: its failure is the cause for the others, since `revoke` of a
        # backend returns the failure that the group already has.
        failed = [number for number, work in enumerate(works) if work.has_ended and work.exception()]
        begin = failed[0] % len(self.groups) if failed and self._hook is None else 0
        for group in (*self.groups[begin:], *self.groups[:begin], self._hook_group):
            cause = group.backend.control.revoke(group.context, group.ranks, cause)
        return cause


class Reduction:
    """Reduction under way: the gradients that each bucket still waits for, and the launched collectives."""

    __slots__ = ("awaited", "summary", "works")

    def __init__(self, layout: Layout) -> None:
        self.awaited = [set(bucket.members) for bucket in layout.buckets]
        self.works: list[Work[torch.Tensor] | Work[None]] = []
        """Works of the launched buckets, in the order of the layout."""
        self.summary: Work[torch.Tensor] | None = None


class Learned(NamedTuple):
    """Layout of buckets that follows from an earlier backward.

    Over three or more ranks, the order in which an all-reduce adds an element can depend on its place in the bucket. So
    a run that goes on needs the same buckets for the same bits.
    """

    order: list[str]
    """Names of the parameters in the order in which their gradients came."""
    in_one: bool
    """Whether there is one bucket per kind."""


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
            InvalidArgument: `bucket_mb` is not above 0.
        """
        self._bucket_mb = bucket_mb
        self._average = average
        self._hook = hook
        self.leaves_gradients = hook is not None and hook.leaves_gradients
        """Whether gradients stay local to each rank."""
        self._learns_order = learns_order
        self._collectives = BucketCollectives(group, hook)
        self.groups = self._collectives.groups
        """Groups in which buckets are reduced."""
        self.group = self.groups[0]
        """Group that also carries summaries and announcements."""
        self.is_needed = group.world_size > 1 or hook is not None
        """Whether gradients need any work: False for a single rank without a hook."""
        self.reduction: Reduction | None = None
        """Reduction that `ready` or `start` has begun and that is not finished. None otherwise."""
        self._failure = ""
        # With local gradients a rank may skip a step that the others make, if its gradients are infinite for instance.
        self.counts = StepCounts(counts_steps=not self.leaves_gradients)
        self.equal_batches = EqualBatches(group)
        """Counters of the forwards, optimizer steps and samples since the last reduction, for the caller to raise."""
        self._weights = SampleWeights(self.group) if average == "samples" and not self.leaves_gradients else None
        self.plan(parameters)

    def plan(self, parameters: Iterable[tuple[str, torch.nn.Parameter]]) -> None:
        """Plans the buckets for other parameters, from the next reduction on. Every rank must do the same.

        Blocks until all ranks have allocated the buckets' memory.

        Raises:
            UnsupportedOp: the shared memory could not be allocated.
        """
        dtype = None if self._hook is None else self._hook.dtype
        self.buckets = BucketSet(list(parameters), self.group, self._bucket_mb, dtype, self._learns_order)
        if self.is_needed:
            self.buckets.allocate()

    @property
    def layout(self) -> Layout:
        """Present layout of the buckets."""
        return self.buckets.layout

    @property
    def learned(self) -> Learned | None:
        """Order of the parameters that the layout follows. None before it is learned, or if it never is."""
        if not (self._learns_order and self.is_needed) or self.buckets.arrived is not None:
            return None
        return Learned([self.buckets.names[index] for index in self.buckets.order], self.buckets.is_one)

    def follow(self, learned: Learned) -> None:
        """Lays out the buckets as another reducer of the same parameters has learned to.

        Does nothing if the parameters are others. Every rank must do the same. Blocks until all ranks have allocated
        the new memory.
        """
        numbers = {name: index for index, name in enumerate(self.buckets.names)}
        if self._learns_order and self.is_needed and set(numbers) == set(learned.order):
            self.buckets.arrange([numbers[name] for name in learned.order], in_one=learned.in_one)

    @property
    def usual_samples(self) -> float:
        """Mean number of samples per rank in the last reduction, with `average="samples"`. Else, and before it, 0."""
        return 0.0 if self._weights is None else self._weights.usual

    @usual_samples.setter
    def usual_samples(self, number: float) -> None:
        if self._weights is not None:
            self._weights.usual = number

    @property
    def is_closed(self) -> bool:
        """Whether a reduction was abandoned, after which all others raise Closed."""
        return bool(self._failure)

    @property
    def step(self) -> int:
        """Number of the present or next reduction, from 1 on, as errors name it."""
        return self._collectives.step

    @property
    def num_launched(self) -> int:
        """Number of launched buckets in the current reduction."""
        return 0 if self.reduction is None else len(self.reduction.works)

    def ready(self, index: int, launch: bool = True) -> None:
        """Marks a parameter's gradient as complete, and launches full buckets.

        Never blocks, except in the first reduction with `average="samples"`.

        Args:
            index: the parameter's number, in the order given.
            launch: whether to launch full buckets now. False: `start` launches them.

        Raises:
            UnsupportedOp: its bucket is in flight already, or a gradient cannot be reduced (see `start`).
        """
        # Called for every gradient of a model, so it goes straight to the bucket's memory.
        if not self.is_needed:
            return
        reduction, buckets = self.reduction or self._begin(), self.buckets
        if buckets.arrived is not None:
            buckets.arrived.append(index)
        number, place = buckets.homes[index]
        awaited, works = reduction.awaited, reduction.works
        if number < len(works):
            raise UnsupportedOp(
                f"parameter {buckets.names[index]!r} got another gradient after the reduction of its bucket began: "
                "where one backward runs inside another (checkpoint with use_reentrant=True), use use_reentrant=False, "
                "or run backward under no_sync() and call sync_gradients() after it"
            )
        buckets.memories[number].store(place)
        awaited[number].discard(index)
        # In the layout's order only: a full bucket waits for the ones before it, because the n-th collective must be
        # the same bucket on every rank.
        while launch and len(works) < len(awaited) and not awaited[len(works)]:
            self._launch(reduction)

    def start(self) -> None:
        """Launches all buckets that are not in flight, then the summary. Blocks no more than `ready`.

        Raises:
            UnsupportedOp: a gradient is sparse, has a graph of its own, or another dtype than its parameter had.
            Closed: an earlier reduction was abandoned.
        """
        if not self.is_needed:
            return
        reduction = self.reduction or self._begin()
        while len(reduction.works) < len(reduction.awaited):
            self._launch(reduction)
        if reduction.summary is None:
            reduction.summary = self.group.all_reduce(self._own_summary(), async_op=True)

    def finish(self) -> None:
        """Calls `start`, blocks until all buckets are reduced, and sets the gradients.

        Raises:
            UnsupportedOp, Closed: as `start`.
            CollectiveMismatch: the ranks have run different numbers of forwards, or of optimizer steps, since the last
                reduction: one of them has skipped a backward. The gradients are useless then.
            UnsupportedOp: `average="samples"`, and no rank has any samples; or a gradient that was marked as complete
                is None now.
            CollectiveMismatch, PeerFailed, Timeout: as `ProcessGroup.all_reduce`.
        """
        if not self.is_needed:
            return
        self.start()
        reduction = self.reduction
        assert reduction is not None
        assert reduction.summary is not None
        try:
            for work in reduction.works:
                work.wait()
            summary = Summary.read(reduction.summary.wait().tolist())
        except BaseException as error:
            self.abandon(error)
            raise
        mine, batch = str(self.counts), self.counts.batch or 0  # before `forget` resets them
        self.reduction = None
        self.counts.forget()
        if not summary.agrees():
            raise mismatch(mine, self.group)
        if not self.leaves_gradients:
            self._check_not_removed(reduction)
        self.equal_batches.on_reduced(batch, summary)
        self._collectives.count_step()
        buckets = self.buckets
        if self._weights is not None:
            self._weights.rescale((memory.flat for memory in buckets.memories), summary)
        buckets.expose(buckets.has_gradients() if self.leaves_gradients else summary.num_having)
        if self._learns_order:
            order = summary.order() if buckets.arrived is not None else ()
            buckets.arrange(order, in_one=self._hook is None and not summary.num_beside)

    def reduce(self) -> None:
        """Reduces all gradients: `start`, then `finish`. Blocks. Not compared with forwards, so it needs none."""
        self.counts.exempt()
        # Hooks keep tensors from one reduction to the next. Made in inference mode, they could not be used outside it.
        with normal_mode():
            self.finish()

    def abandon(self, error: BaseException | None = None) -> None:
        """Cancels the current reduction on all ranks. Does nothing if there is none.

        This rank is out of step with the others then. They raise PeerFailed, now or when they reach this reduction.

        Args:
            error: the cause. A Timeout names the rank that was waited for, so that the others do not blame this one.
        """
        reduction = self.reduction
        if reduction is None:
            return
        rank, works = self.group.backend.rank, reduction.works
        reason = f"its backward failed with {len(works)} of {len(reduction.awaited)} buckets of gradients under way"
        cause: Failure = failure_of(error, rank) if isinstance(error, Timeout) else PeerFailed(rank, reason)
        cause = self._collectives.revoke(works, cause)
        self._failure = (
            f"an earlier reduction of gradients was given up because {cause}: end all ranks, or wrap the model anew on "
            "all of them"
        )
        self.reduction = None

    # Inside

    def _begin(self) -> Reduction:
        if self._failure:
            raise Closed(self._failure)
        if self._weights is not None:
            self._weights.expect(self.counts.num_samples)
        self.reduction = Reduction(self.layout)
        return self.reduction

    def _check_not_removed(self, reduction: Reduction) -> None:
        # A hook that updates a parameter and frees its gradient, as LOMO does, would use this rank's gradient alone.
        for index, (number, place) in enumerate(self.buckets.homes):
            if index not in reduction.awaited[number] and not self.buckets.memories[number].is_there(place):
                raise UnsupportedOp(
                    f"the gradient of parameter {self.buckets.names[index]!r} was set to None inside of backward, "
                    "where it was not reduced yet: use it after backward(), not in a hook of the parameter"
                )

    def _launch(self, reduction: Reduction) -> None:
        try:
            memory, num_samples = self.buckets.memories[len(reduction.works)], self.counts.num_samples
            memory.fill()
            if self._weights is not None:
                self._weights.weigh(memory.flat, num_samples)
            weight = 1.0 if self._average == "ranks" else float(num_samples)
            reduction.works.append(self._collectives.launch(memory, weight))
        except BaseException as error:
            self.abandon(error)
            raise

    def _own_summary(self) -> torch.Tensor:
        # Rank 0 alone reports the order: places are added up over ranks.
        arrived = self.buckets.arrived if self.group.rank == 0 else None
        summary = self.counts.summary(self.buckets.has_gradients(), arrived or [], beside=can_overlap(self.group))
        return torch.tensor(summary.numbers(), dtype=torch.int64, device="cpu")


def _of_its_own(group: ProcessGroup, what: str) -> ProcessGroup:
    """Returns a subgroup of all ranks, which numbers its collectives independently of `group`."""
    subgroup = group.subgroup(range(group.world_size), f"{group.name}/{what}")
    assert subgroup is not None
    return subgroup
