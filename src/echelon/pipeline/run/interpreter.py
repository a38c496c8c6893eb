"""The interpreter: runs this rank's part of a program once, instruction by instruction, exactly as it was checked.

Strategy. Nothing is decided here but what the program says. What a step needs from another rank was posted a few steps
before; what it makes for another rank is sent without waiting; between two stages of one rank values are handed over
directly.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Generic, NamedTuple, Protocol, TypeVar

import torch

from echelon.errors import UnsupportedOp
from echelon.group.group import ProcessGroup
from echelon.pipeline.plan import program
from echelon.pipeline.plan.action import Action, actions_of
from echelon.pipeline.plan.program import Instruction, Program, Transfer
from echelon.pipeline.run.loss import Meter, check_loss, check_metrics, is_here, no_loss, refuse_if_not_finite
from echelon.pipeline.run.step import Batch
from echelon.pipeline.run.transfer import PendingReceive, PendingSends, Transfers, detached
from echelon.pipeline.stage.nested import Value, tensors_of
from echelon.pipeline.stage.replay import Seeded, is_casting, number_of, outside_autocast
from echelon.pipeline.stage.split_backward import Gradient
from echelon.pipeline.stage.stage import Forward, Made, Stage

# When a rank's steps began and ended: by the backend's clock, or, where they run on a device, by events in its stream.
#
# On a device the CPU only queues a step; what it would measure is how long that takes. An event is passed when the
# device comes to it, so nothing is synchronised until somebody asks for the times.

M = TypeVar("M")


class Clock(ABC, Generic[M]):
    """Marks moments, and tells later when they were."""

    @abstractmethod
    def mark(self) -> M:
        """Marks the moment at which everything is done that this thread has started so far."""

    @abstractmethod
    def seconds(self, spans: Sequence[tuple[M, M]]) -> list[tuple[float, float]]:
        """Returns when pairs of moments were, by the backend's clock, once all of them are past."""


class HostClock(Clock[float]):
    """What is started is done when the call returns."""

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now

    def mark(self) -> float:  # noqa: D102
        return self._now()

    def seconds(self, spans: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:  # noqa: D102
        return list(spans)


class Event(Protocol):
    """What is needed of a torch.Event that can tell the time."""

    def record(self) -> None: ...  # noqa: D102
    def synchronize(self) -> None: ...  # noqa: D102
    def elapsed_time(self, end_event: Event, /) -> float: ...  # noqa: D102


class EventClock(Clock[Event]):
    """What is started is done when the device comes to an event behind it."""

    def __init__(self, now: Callable[[], float], make_event: Callable[[], Event]) -> None:
        """Reads both clocks at once, for which it waits for the device."""
        self._make_event = make_event
        self._first = self.mark()
        self._first.synchronize()
        self._begun = now()

    def mark(self) -> Event:  # noqa: D102
        event = self._make_event()
        event.record()
        return event

    def seconds(self, spans: Sequence[tuple[Event, Event]]) -> list[tuple[float, float]]:  # noqa: D102
        if spans:
            spans[-1][1].synchronize()
        return [(self._when(begin), self._when(end)) for begin, end in spans]

    def _when(self, event: Event) -> float:
        return self._begun + self._first.elapsed_time(event) / 1e3


def clock_for(tensors: Iterable[torch.Tensor], now: Callable[[], float]) -> Clock[object]:
    """Returns a clock for work on these tensors; `now` is the backend's."""
    device = next((tensor.device for tensor in tensors if tensor.device.type not in ("cpu", "meta")), None)
    if device is None:
        return HostClock(now)  # type: ignore[return-value]
    return EventClock(now, partial(torch.Event, device, enable_timing=True))  # type: ignore[return-value, arg-type]


_NOTHING = nullcontext()


class Loaded(NamedTuple):
    """A program that was checked, and what is kept from one run to the next."""

    program: Program
    """What all ranks do."""
    ports: Transfers
    """This rank's end of its transfers."""
    split: frozenset[int]
    """The stages whose backward has two halves."""


class Interpreter:
    """One run of one rank's part of a program."""

    def __init__(
        self,
        loaded: Loaded,
        batch: Batch,
        stages: Mapping[int, Stage],
        group: ProcessGroup,
        on_stage_done: Callable[[int], None],
        meter: Meter | None = None,
    ) -> None:
        """Prepares to run.

        Args:
            loaded: what to run.
            batch: what to work on; losses and outputs are added to it.
            stages: this rank's, by their index.
            group: the ranks of the pipeline.
            on_stage_done: called with the index of a stage when its gradients are to be reduced.
            meter: is told of each action that has been run.
        """
        self.current: Instruction | Action | None = None
        """What is being run."""
        schedule = loaded.program.schedule
        self._order = loaded.program.orders[group.rank]
        self._ports, self._split = loaded.ports, loaded.split
        self._batch = batch
        self._stages = stages
        self._group = group
        self._on_stage_done = on_stage_done
        self._meter = meter
        self._trains = not schedule.forward_only
        self._num_stages = schedule.num_stages
        self._numbers = {
            index: [number_of(batch.key, index, microbatch) for microbatch in range(len(batch.kwargs))]
            for index in stages
        }
        """Of each stage and microbatch what its random numbers are made from; at once, while the code of it is warm."""
        self._is_casting = False
        """Whether a backward has to leave autocast."""
        self._placement = schedule.placement
        self._incoming: dict[Transfer, PendingReceive] = {}
        self._here: dict[Transfer, Value] = {}
        """What arrived for the next step, or was made here for another stage of this rank."""
        self._made: dict[Transfer, Value] = {}
        """What the last step made for other ranks."""
        self._outbox = PendingSends(group)
        firsts = (next(stage.module.parameters(), None) for stage in stages.values())  # the others are where they are
        self._clock = clock_for((first for first in firsts if first is not None), group.backend.now)
        self._spans: list[tuple[object, object]] = []
        self._num_run = 0
        self._began: object = None
        """When a step began whose forward is run again first."""

    @property
    def times(self) -> list[tuple[float, float]]:
        """When each step of this rank began and ended, by the backend's clock."""
        return self._clock.seconds(self._spans)

    def run(self, *, until_backward: bool = False) -> None:
        """Runs the instructions of this rank that were not run yet.

        Args:
            until_backward: only those before the first that belongs to a backward.
        """
        act: dict[type[Instruction], Callable[..., None]] = {
            program.Post: self._post,
            program.Receive: self._receive,
            program.Compute: self._compute,
            program.Send: self._send,
            program.Recompute: self._recompute,
            program.Reduce: self._reduce,
            program.Flush: self._flush,
        }
        self._is_casting = is_casting()
        with torch.set_grad_enabled(self._trains), self._outbox:
            for instruction in self._order[self._num_run :]:
                if until_backward and _is_of_backward(instruction):
                    return
                self.current = instruction
                act[type(instruction)](instruction)
                self._num_run += 1

    def withdraw(self) -> None:
        """Takes back the receives that were posted for instructions that will not be run."""
        for incoming in self._incoming.values():
            incoming.withdraw()
        self._incoming.clear()

    def _post(self, instruction: program.Post) -> None:
        transfer, peer = instruction.transfer, instruction.peer
        self._incoming[transfer] = self._ports.post(transfer, peer)

    def _receive(self, instruction: program.Receive) -> None:
        self._here[instruction.transfer] = self._incoming.pop(instruction.transfer).wait()

    def _send(self, instruction: program.Send) -> None:
        value = self._made.pop(instruction.transfer)
        self._outbox.add(self._ports.send(instruction.transfer, instruction.peer, value))

    def _flush(self, _: program.Flush) -> None:
        self._outbox.flush()

    def _reduce(self, instruction: program.Reduce) -> None:
        self._on_stage_done(instruction.stage)

    def _recompute(self, instruction: program.Recompute) -> None:
        stage, microbatch = instruction.stage, instruction.microbatch
        self._began = self._clock.mark() if self._began is None else self._began
        self._stages[stage].recompute(microbatch, splits=stage in self._split)
        if self._meter is not None:
            self._meter.recomputed(stage, microbatch)

    def _compute(self, instruction: program.Compute) -> None:
        step = instruction.step
        began, self._began = self._clock.mark() if self._began is None else self._began, None
        with self._group.backend.compute(step):
            for action in actions_of(step):
                self.current = action
                self._act(action)
        self._spans.append((began, self._clock.mark()))  # before what it made leaves: who needs it starts later
        self._outbox.look()

    def _act(self, action: Action) -> None:
        stage, microbatch = self._stages[action.stage], action.microbatch
        if action.kind == "F":
            self._forward(action)
        elif action.kind == "W":
            with outside_autocast() if self._is_casting else _NOTHING:
                stage.backward_weight(microbatch)
        else:
            backward = stage.backward if action.kind == "B" else stage.backward_input
            with outside_autocast() if self._is_casting else _NOTHING:
                found = backward(microbatch, self._gradients(action))
            if action.stage > 0:
                # Mostly it is one tensor; alone, it travels without a structure to take apart.
                alone = found[0] if len(found) == 1 and found[0] is not None else found
                self._hand_over(Transfer(action.stage - 1, microbatch, True), alone)
        if self._meter is not None:
            self._meter.ran(action)

    def _forward(self, action: Action) -> None:
        index, _, microbatch = action
        batch, stage, is_last = self._batch, self._stages[index], index == self._num_stages - 1
        number = self._numbers[index][microbatch]
        forward = forward_of(stage, self._input(action), microbatch, batch, number, is_last=is_last)
        if not self._trains:
            made = forward.run()
        else:
            made = stage.forward(microbatch, forward, splits=index in self._split)
            if is_last and batch.loss_fn is not None:
                self._take_loss(microbatch, *made.roots)
        if not is_last:
            self._hand_over(Transfer(index + 1, microbatch, False), made.output)
            return
        if batch.keeps_outputs:
            batch.outputs[microbatch] = detached(made.output)
        if batch.metrics is not None and batch.targets is not None:
            with torch.no_grad():
                found = check_metrics(batch.metrics(made.output, batch.targets[microbatch]), batch.measured)
            batch.measured[microbatch] = found

    def _take_loss(self, microbatch: int, loss: torch.Tensor) -> None:
        assert self._batch.scale is not None
        if not loss.requires_grad:
            raise UnsupportedOp(
                f"the loss of microbatch {microbatch} depends on nothing that requires a gradient: use forward(), or "
                "unfreeze a parameter"
            )
        if is_here(loss):  # those on a device are read at the end of the step, all at once
            refuse_if_not_finite(microbatch, loss.item(), "no gradient of it was added")
        self._batch.losses[microbatch] = loss.detach()

    def _input(self, action: Action) -> Value:
        if action.stage == 0:
            assert self._batch.inputs is not None
            return self._batch.inputs[action.microbatch]
        return self._here.pop(Transfer(action.stage, action.microbatch, False))

    def _gradients(self, action: Action) -> list[Gradient]:
        if action.stage < self._num_stages - 1:
            found = self._here.pop(Transfer(action.stage, action.microbatch, True))
            return found if isinstance(found, list) else [found]  # type: ignore[list-item]
        if self._batch.loss_fn is None:
            return list(self._batch.grad_outputs[action.microbatch])
        assert self._batch.scale is not None
        loss = self._batch.losses[action.microbatch]
        return [torch.full_like(loss, self._batch.scale.gradient_factor(action.microbatch))]

    def _hand_over(self, transfer: Transfer, value: Value) -> None:
        """Keeps what was made for the stage that it is for, on this rank, or until it is sent."""
        if self._placement[transfer.stage] != self._group.rank:
            self._made[transfer] = value
        else:
            self._here[transfer] = value if transfer.backward else detached(value)


def forward_of(stage: Stage, value: Value, microbatch: int, batch: Batch, number: int, *, is_last: bool) -> Forward:
    """Returns what runs a stage for one microbatch, and after the last one the loss; `number` is for random numbers."""
    loss_fn = batch.loss_fn if is_last else None
    target = None if loss_fn is None or batch.targets is None else batch.targets[microbatch]

    def make(value: Value, kwargs: Mapping[str, Value], target: Value) -> Made:
        with Seeded(number):
            output = stage.call(value, kwargs)
            if loss_fn is None:
                return Made(output, [tensor for tensor in tensors_of(output) if tensor.requires_grad])
            if batch.scale is not None and not batch.scale.counts(microbatch):
                return Made(output, [no_loss(output)])
            return Made(output, [check_loss(loss_fn(output, target))])

    return Forward(value, batch.kwargs[microbatch], target, make)


def _is_of_backward(instruction: Instruction) -> bool:
    match instruction:
        case program.Receive(transfer):
            return transfer.backward
        case program.Compute(step):
            return any(action.kind != "F" for action in actions_of(step))
        case _:
            return isinstance(instruction, program.Recompute)
