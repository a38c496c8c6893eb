"""Runtime of one rank: programs that are made and checked once, and run many times, and failures that end them."""

from __future__ import annotations

import traceback
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from echelon.call_site import is_foreign
from echelon.errors import (
    Closed,
    CollectiveMismatch,
    Failure,
    PeerFailed,
    ScheduleError,
    Timeout,
    UnsupportedOp,
    failure_of,
)
from echelon.group.group import ProcessGroup
from echelon.pipeline.plan.action import Action, Handover
from echelon.pipeline.plan.fuse import fused, split_stages
from echelon.pipeline.plan.program import Program, check_program, lower
from echelon.pipeline.plan.schedule import Schedule
from echelon.pipeline.run.interpreter import Interpreter, Loaded, forward_of
from echelon.pipeline.run.loss import Activations, Memory, Meter
from echelon.pipeline.run.step import Batch
from echelon.pipeline.run.transfer import Buffers, Receiver, Sender
from echelon.pipeline.stage.nested import Value, tensors_of
from echelon.pipeline.stage.replay import number_of
from echelon.pipeline.stage.split_backward import address
from echelon.pipeline.stage.stage import Finding, Stage

_MOST_BYTES = 900
"""Limit of the reason that is sent to other ranks; the note of a message holds some more."""
_WORDS = {"F": "forward", "B": "backward", "I": "input gradient", "W": "weight gradient"}


class Failures:
    """Failure handling of a pipeline on one rank: the first failure is sent to all ranks, and ends the pipeline.

    A failed step leaves some gradients added and others not, and messages that nobody will receive. So later calls are
    refused at once: a new pipeline has to start from weights that were saved before.

    Strategy. A rank that fails revokes the groups of the replicas and of the pipeline: their pending and future
    operations fail on every rank with the first cause that is known, so no rank waits for this one.
    """

    def __init__(self, group: ProcessGroup, replicas: Sequence[ProcessGroup], forget: Callable[[], None]) -> None:
        """Makes the failure handling of this rank.

        Args:
            group: the ranks of the pipeline.
            replicas: other groups whose ranks wait for this one in a step.
            forget: drops the state of an unfinished step.
        """
        self._group = group
        self._replicas = replicas
        self._forget = forget
        self._first: Failure | None = None

    @contextmanager
    def told(self, current: Callable[[], object] = lambda: None) -> Iterator[None]:
        """Inside, an exception revokes the pipeline on all ranks, so that none waits for this one. It is raised again.

        Args:
            current: returns the running instruction or action, for the message.

        Raises:
            Closed: at once, if an earlier failure has ended the pipeline.
            PeerFailed: another rank failed; has the first cause.
        """
        if self._first is not None:
            raise Closed(
                f"this pipeline ended in an earlier step ({_first_line(self._first)}): make a new Pipeline, and load "
                "weights that were saved before"
            ) from self._first
        try:
            yield
        except BaseException as error:
            self._forget()
            place = _place(current())
            if place and not isinstance(error, PeerFailed):
                error.add_note(f"on rank {self._group.backend.rank}{place}")
            mine = PeerFailed(self._group.backend.rank, _reason(error, place))
            if isinstance(error, Timeout):  # a rank that it waited for may be the cause
                mine = failure_of(error, self._group.backend.rank)
            # A mismatch keeps its type on the other ranks, which have the same disagreement.
            self._first = self._revoke(error if isinstance(error, PeerFailed | CollectiveMismatch) else mine)
            # This rank may have noticed a consequence of the failure. It raises the first cause.
            if isinstance(error, PeerFailed):
                raise self._first.noticed_by(error.operation) from error
            raise

    def _revoke(self, failure: Failure) -> Failure:
        """Revokes the groups of the replicas and of the pipeline. Returns the first cause that is known."""
        for group in (*self._replicas, self._group):
            failure = group.backend.control.revoke(group.context, group.ranks, failure)
        return failure


def _place(current: object) -> str:
    """Returns the place of a failure, as the end of a sentence."""
    if isinstance(current, Action):
        return f" in {current}, {_WORDS[current.kind]} of microbatch {current.microbatch} in stage {current.stage}"
    return "" if current is None else f" in {current}"


def _reason(error: BaseException, place: str) -> str:
    """Returns type, place and message of an error, its innermost line, and as many lines of the program as fit."""
    text = f"{type(error).__name__}{place}: {error}".removesuffix(": ")  # a KeyboardInterrupt says nothing
    # From the innermost frame outwards. Ten lines of torch and of the pipeline would hide the one of the program.
    for number, frame in enumerate(reversed(traceback.extract_tb(error.__traceback__))):
        if number and is_foreign(frame.filename):
            continue
        line = f"\n  from {frame.filename}:{frame.lineno}, in {frame.name}: {frame.line}"
        if len((text + line).encode()) > _MOST_BYTES:
            break
        text += line
    return text


def _first_line(failure: Failure) -> str:
    return str(failure).splitlines()[0]


class Runtime:
    """Runner of schedules on the stages of one rank."""

    def __init__(
        self,
        stages: Sequence[Stage],
        group: ProcessGroup,
        replicas: Sequence[ProcessGroup],
        recomputed: Collection[int] = (),
    ) -> None:
        """Prepares to run.

        Args:
            stages: this rank's stages.
            group: the ranks of the pipeline; a group of its own for its messages.
            replicas: other groups whose ranks wait for this one in a step.
            recomputed: indices of the stages, on all ranks, that keep only their input and run their forward again.
        """
        self._stages = {stage.index: stage for stage in stages}
        self._group = group
        self.failures = Failures(group, replicas, self.forget)
        """Failure handling, for callers that run user code outside of a step too."""
        self._recomputed = frozenset(recomputed)
        for stage in stages:
            stage.recomputes = stage.index in self._recomputed
        self._loaded: dict[Schedule, Loaded] = {}
        self._latest: tuple[Schedule, Loaded] | None = None
        self.buffers = Buffers()
        """Memory that receives are written into."""
        self._memory: Memory | None = None
        self._activations: Mapping[int, Activations] = {}
        self._meter: Meter | None = None

    def load(self, schedule: Schedule) -> Program:
        """Makes the program of a schedule and checks it. `run` does so if it was not done before.

        Raises:
            ScheduleError: the schedule or its program has problems.
        """
        return self._load(schedule).program

    def settle(self, schedule: Schedule, batch: Batch) -> Schedule:
        """Tries the split backward of each stage. Plans again, on all ranks, with B for stages that cannot split it.

        Every rank must call it. It runs the first microbatch through all stages, and leaves their state as it was.

        Args:
            schedule: the schedule that is to run.
            batch: at least one microbatch on the rank of the first stage, with its target if the loss takes one.

        Returns:
            A schedule that can run: the given one, if it has no I and W or all its stages can be split.
        """
        if not split_stages(schedule):
            return schedule
        findings = dict(self._probe(schedule, batch))
        reasons = {index: finding.refusal for index, finding in findings.items() if finding.refusal}
        with self.failures.told():
            told = self._group.all_gather_object(list(reasons))
        # Each rank probes only its own stages, and all must plan the same schedule.
        refused = [stage for stages in told if isinstance(stages, list) for stage in stages if isinstance(stage, int)]
        with self.failures.told():  # a rank with warnings as errors fails here alone
            for stage, reason in reasons.items():
                warnings.warn(
                    f"stage {stage} does its backward as a whole (B instead of I and W in {schedule.name}): {reason}",
                    stacklevel=4,
                )
        settled = fused(schedule, refused)
        settled.check()
        self.load(settled)
        return settled

    def run(self, schedule: Schedule, batch: Batch, on_stage_done: Callable[[int], None]) -> list[tuple[float, float]]:
        """Runs this rank's order once. Returns begin and end of its steps, in seconds of the backend's clock.

        Args:
            schedule: a schedule that was checked.
            batch: the batch; losses, outputs and metrics are added to it.
            on_stage_done: called with the index of a stage after its last backward.

        Raises:
            UnsupportedOp: an optimizer with parameters of a stage makes a step inside.
            PeerFailed: another rank failed in this step, or is gone.
            Timeout: a message from another rank did not come in time.
            NotFinite: the loss of a microbatch is NaN or infinite.
        """
        one = self.begin(schedule, batch, on_stage_done, until_backward=False)
        return one.times

    def begin(
        self, schedule: Schedule, batch: Batch, on_stage_done: Callable[[int], None], *, until_backward: bool = True
    ) -> Interpreter:
        """Runs this rank's order up to its first backward; `finish` runs the rest.

        Args:
            schedule, batch, on_stage_done: as for `run`.
            until_backward: stop before the first backward; False: run the whole order.

        Raises:
            PeerFailed, Timeout, NotFinite: as for `run`.
        """
        loaded = self._load(schedule)
        # Only the first training step is metered: hooks on saved tensors take some microseconds per layer.
        self._meter = self._meter_of(batch) if self._memory is None and not schedule.forward_only else None
        one = Interpreter(loaded, batch, self._stages, self._group, on_stage_done, self._meter)
        with self.failures.told(lambda: one.current), _early_steps_refused(self._stages):
            one.run(until_backward=until_backward)
        if not until_backward:
            self._end(schedule)
        return one

    def finish(self, schedule: Schedule, one: Interpreter) -> None:
        """Runs the rest of the order after `begin`.

        Raises:
            PeerFailed, Timeout, NotFinite: as for `run`.
        """
        with self.failures.told(lambda: one.current), _early_steps_refused(self._stages):
            one.run()
        self._end(schedule)

    def forget(self) -> None:
        """Drops the state of microbatches whose backward was not finished."""
        for stage in self._stages.values():
            stage.forget()

    def _end(self, schedule: Schedule) -> None:
        self.buffers.forget_unused()  # shapes change between steps, such as lengths of sequences
        if self._meter is not None:
            self._memory = self._meter.memory(schedule, self._group.rank)
            self._activations = self._meter.of_stage
            for stage in self._stages.values():
                stage.is_metered = False

    @property
    def memory(self) -> Memory:
        """Peak of this rank's activations in the first training step.

        Raises:
            ScheduleError: no training step has been run.
        """
        if self._memory is None:
            raise ScheduleError("memory is measured in the first step: call step() first")
        return self._memory

    @property
    def activations(self) -> list[Activations]:
        """Activations of this rank's stages, as the first training step measured them."""
        return [self._activations.get(index, Activations()) for index in sorted(self._stages)]

    def _load(self, schedule: Schedule) -> Loaded:
        # Fast path: hashing a schedule walks all its actions, and most steps run the schedule of the step before.
        if self._latest is not None and self._latest[0] is schedule:
            return self._latest[1]
        loaded = self._loaded.get(schedule)
        if loaded is None:
            schedule.check()
            program = lower(schedule, () if schedule.forward_only else self._recomputed)
            check_program(program)
            loaded = self._loaded[schedule] = Loaded.of(program, self._group, self.buffers)
        self._latest = schedule, loaded
        return loaded

    def _probe(self, schedule: Schedule, batch: Batch) -> Iterator[tuple[int, Finding]]:
        """Probes each stage of this rank with the first microbatch, which passes from stage to stage."""
        # Ends and buffers of its own: the trial leaves no expected shapes to the program.
        group, buffers, placement, me = self._group, Buffers(), schedule.placement, self._group.rank
        value: Value = None
        for index in [stage for stage, rank in enumerate(placement) if rank == me]:
            with self.failures.told(partial("the trial of I and W in stage {}".format, index)):
                if index == 0:
                    assert batch.inputs is not None
                    value = batch.inputs[0]
                elif placement[index - 1] != me:
                    receiver = Receiver(group, Handover(index, 0, False), placement[index - 1], buffers)
                    receiver.post()
                    value = receiver.wait()
                stage, is_last = self._stages[index], index == len(placement) - 1
                number = number_of(batch.key, index, 0)
                finding = stage.probe(forward_of(stage, value, 0, batch, number, is_last=is_last))
                value = finding.output
                if not is_last and placement[index + 1] != me:
                    for work in Sender(group, Handover(index + 1, 0, False), placement[index + 1]).send(value):
                        work.wait(group.timeout)
            yield index, finding

    def _meter_of(self, batch: Batch) -> Meter:
        """Returns a meter that does not count parameters, buffers and the user's tensors."""
        tensors: list[torch.Tensor] = tensors_of([batch.inputs, batch.targets, batch.kwargs])
        for stage in self._stages.values():
            stage.is_metered = True
            tensors += [*stage.module.parameters(), *stage.module.buffers()]
        return Meter(self._stages, frozenset(map(address, tensors)))


# An optimizer must not step inside of a step of the pipeline, where gradients are not complete.
_running: list[Mapping[int, Stage]] = []
"""Stages, by number, of the pipelines of this process that run now: of several ones, if ranks are simulated."""


@contextmanager
def _early_steps_refused(stages: Mapping[int, Stage]) -> Iterator[None]:
    """Inside, an optimizer with a parameter of a stage raises UnsupportedOp. Hooks of parameters may call one.

    Its gradient would be that of the microbatches so far, not averaged over replicas, and the next microbatches would
    go backward through other weights than forward.
    """
    _running.append(stages)
    try:
        yield
    finally:
        # By identity: another one may be equal.
        del _running[next(at for at, each in enumerate(_running) if each is stages)]


def _before_step(optimizer: Optimizer, *_: Any) -> None:
    if torch.compiler.is_compiling() or not _running:
        return
    running = {
        id(parameter) for stages in _running for stage in stages.values() for parameter in stage.module.parameters()
    }
    if any(id(each) in running for group in optimizer.param_groups for each in group["params"]):
        raise UnsupportedOp(
            f"a step of {type(optimizer).__name__} began inside of pipe.step(), where gradients are not complete: "
            "call optimizer.step() after it, not in a hook of a parameter"
        )


# Once, and for good: torch iterates over its global hooks, so one that comes or goes meanwhile is an error.
register_optimizer_step_pre_hook(_before_step)
