"""Interpreter of one rank's part of a program, and the clocks that time its steps.

Strategy. The interpreter runs the instructions exactly in the order that was checked, and decides nothing itself.
Receives are posted a few steps before their value is needed. Sends are started and not waited for. Between two stages
of one rank, values are handed over directly. It blocks at a Receive until the message is there, and at the Flush until
all sends have left; `check_program` has proven that every rank gets past both.
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

M = TypeVar("M")


class Clock(ABC, Generic[M]):
    """Clock of a rank's steps: marks moments, and converts the marks to seconds later."""

    @abstractmethod
    def mark(self) -> M:
        """Marks the moment at which all work that this thread has started is done. Does not wait for it."""

    @abstractmethod
    def seconds(self, spans: Sequence[tuple[M, M]]) -> list[tuple[float, float]]:
        """Returns pairs of marks in seconds of the backend's clock. Blocks until the last mark has passed."""


class HostClock(Clock[float]):
    """Clock of work on the CPU, which is done when its call returns."""

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now

    def mark(self) -> float:  # noqa: D102
        return self._now()

    def seconds(self, spans: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:  # noqa: D102
        return list(spans)


class Event(Protocol):
    """Part of torch.Event, made with enable_timing, that `EventClock` needs."""

    def record(self) -> None: ...  # noqa: D102
    def synchronize(self) -> None: ...  # noqa: D102
    def elapsed_time(self, end_event: Event, /) -> float: ...  # noqa: D102


class EventClock(Clock[Event]):
    """Clock of work on a device, by events in its stream.

    The CPU only queues a step, so its clock would measure the queueing. The device passes an event when it has done
    the work before it; nothing is synchronised until `seconds` is called.
    """

    def __init__(self, now: Callable[[], float], make_event: Callable[[], Event]) -> None:
        """Reads both clocks at one moment, for which it waits for the device."""
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
            spans[-1][1].synchronize()  # a stream passes its events in order
        return [(self._when(begin), self._when(end)) for begin, end in spans]

    def _when(self, event: Event) -> float:
        return self._begun + self._first.elapsed_time(event) / 1e3  # from milliseconds


def clock_for(tensors: Iterable[torch.Tensor], now: Callable[[], float]) -> Clock[object]:
    """Returns a clock for work on these tensors: by events if one is on a device. `now` reads the backend's clock."""
    device = next((tensor.device for tensor in tensors if tensor.device.type not in ("cpu", "meta")), None)
    if device is None:
        return HostClock(now)  # type: ignore[return-value]
    return EventClock(now, partial(torch.Event, device, enable_timing=True))  # type: ignore[return-value, arg-type]


_NOTHING = nullcontext()


class Loaded(NamedTuple):
    """Checked program, with the state that is kept between its runs."""

    program: Program
    """Orders of all ranks."""
    ports: Transfers
    """This rank's end of the program's transfers."""
    split: frozenset[int]
    """Indices of the stages with a split backward (I and W)."""


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
            loaded: the program.
            batch: the batch; losses, outputs and metrics are added to it.
            stages: this rank's stages by index.
            group: the ranks of the pipeline.
            on_stage_done: called with the index of a stage when all its gradients are there and can be reduced.
            meter: called after each action.
        """
        self.current: Instruction | Action | None = None
        """The instruction or action that is running, for error messages."""
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
        # All seeds before the first action: in a loop their code is warm, between actions it is cold. With
        # `_is_casting` read once a run, `Seeded` and losses scaled at the end, a tiny 1F1B's action took 392 us instead
        # of 418 (benchmarks/pipeline).
        self._numbers = {
            index: [number_of(batch.key, index, microbatch) for microbatch in range(len(batch.kwargs))]
            for index in stages
        }
        self._is_casting = False
        """Whether autocast is on around the run, so that backwards have to leave it."""
        self._placement = schedule.placement
        self._incoming: dict[Transfer, PendingReceive] = {}
        self._here: dict[Transfer, Value] = {}
        """Values that arrived for the next step, or were made for another stage of this rank."""
        self._made: dict[Transfer, Value] = {}
        """Values that the last step made for other ranks."""
        self._outbox = PendingSends(group)
        firsts = (next(stage.module.parameters(), None) for stage in stages.values())  # a stage is on one device
        self._clock = clock_for((first for first in firsts if first is not None), group.backend.now)
        self._spans: list[tuple[object, object]] = []
        self._num_run = 0
        self._began: object = None
        """Start of a step whose forward is run again first, as part of it; None outside of such a step."""

    @property
    def times(self) -> list[tuple[float, float]]:
        """Begin and end of each step of this rank, in seconds of the backend's clock. Waits for the device."""
        return self._clock.seconds(self._spans)

    def run(self, *, until_backward: bool = False) -> None:
        """Runs the instructions that were not run yet.

        Args:
            until_backward: stop before the first instruction of a backward.
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
        """Cancels the posted receives of instructions that will not run."""
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
        # The mark comes before the result leaves, so that in a timeline no receiver starts before this step has ended.
        self._spans.append((began, self._clock.mark()))
        self._outbox.look()  # sends may have left during the step; then the background thread need not stay awake

    def _act(self, action: Action) -> None:
        stage, microbatch = self._stages[action.stage], action.microbatch
        # step() may be called inside of `with torch.autocast`. Backwards run as they would after it, in the forward's
        # dtypes.
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
                # Fast path: most stages have one input. A bare tensor has no structure to write and parse.
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
        if is_here(loss):  # one on a device is read at the end of the step: here the CPU would wait for the device
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
        # The scale enters as the gradient of the loss. The sum of the weights over replicas is waited for here: it was
        # in flight during the first forwards.
        loss = self._batch.losses[action.microbatch]
        return [torch.full_like(loss, self._batch.scale.gradient_factor(action.microbatch))]

    def _hand_over(self, transfer: Transfer, value: Value) -> None:
        """Keeps a value for the other stage if that is on this rank, else until the Send instruction."""
        if self._placement[transfer.stage] != self._group.rank:
            self._made[transfer] = value
        else:
            # As from another rank, activations enter the next stage without a graph: each stage has its own.
            self._here[transfer] = value if transfer.backward else detached(value)


def forward_of(stage: Stage, value: Value, microbatch: int, batch: Batch, number: int, *, is_last: bool) -> Forward:
    """Returns the forward of a stage for one microbatch, with the loss if it is the last; `number` is its seed."""
    loss_fn = batch.loss_fn if is_last else None
    target = None if loss_fn is None or batch.targets is None else batch.targets[microbatch]

    def make(value: Value, kwargs: Mapping[str, Value], target: Value) -> Made:
        with Seeded(number):
            output = stage.call(value, kwargs)
            if loss_fn is None:
                return Made(output, [tensor for tensor in tensors_of(output) if tensor.requires_grad])
            # loss_fn is not called for weight 0: its mean over nothing would be NaN.
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
