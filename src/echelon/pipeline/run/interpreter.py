"""Interpreter of one rank's part of a program, and the clocks that time its steps.

Strategy. The interpreter runs the instructions exactly in the order that was checked, and decides nothing itself.
Receives are posted a few steps before their value is needed. Sends are started and not waited for. Between two stages
of one rank, values are handed over directly. It blocks at a Receive until the message is there, and at the Flush until
all sends have left; `check_program` has proven that every rank gets past both.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch

from echelon.backends.memory import describe
from echelon.errors import EchelonError, UnsupportedOp
from echelon.group.group import ProcessGroup
from echelon.hint import Hint
from echelon.pipeline.plan.action import Action, Handover, Step, actions_of
from echelon.pipeline.plan.fuse import split_stages
from echelon.pipeline.plan.program import (
    Compute,
    Flush,
    Instruction,
    Post,
    Program,
    Receive,
    Recompute,
    Reduce,
    Send,
)
from echelon.pipeline.run.loss import Meter, check_loss, check_metrics, is_here, no_loss, refuse_if_not_finite
from echelon.pipeline.run.step import Batch
from echelon.pipeline.run.transfer import Buffers, PendingSends, Receiver, Sender, detached
from echelon.pipeline.stage.nested import Value, map_tensors, tensors_of
from echelon.pipeline.stage.replay import Seeded, is_casting, number_of, outside_autocast
from echelon.pipeline.stage.split_backward import Gradient
from echelon.pipeline.stage.stage import Forward, Made, Stage


class Clock(Protocol):
    """Clock of a rank's steps: marks moments, and converts the marks to seconds later."""

    mark: Callable[[], Any]
    """Marks the moment at which all work that this thread has started is done. Does not wait for it."""

    def seconds(self, spans: Sequence[tuple[Any, Any]]) -> list[tuple[float, float]]:
        """Returns pairs of marks in seconds of the backend's clock. Blocks until the last mark has passed."""


class HostClock:
    """Clock of work on the CPU, which is done when its call returns."""

    def __init__(self, now: Callable[[], float]) -> None:
        self.mark: Callable[[], Any] = now

    def seconds(self, spans: Sequence[tuple[Any, Any]]) -> list[tuple[float, float]]:  # noqa: D102
        return list(spans)


class Event(Protocol):
    """Part of torch.Event, made with enable_timing, that `EventClock` needs."""

    def record(self) -> None: ...  # noqa: D102
    def synchronize(self) -> None: ...  # noqa: D102
    def elapsed_time(self, end_event: Event, /) -> float: ...  # noqa: D102


class EventClock:
    """Clock of work on a device, by events in its stream.

    The CPU only queues a step, so its clock would measure the queueing. The device passes an event when it has done
    the work before it; nothing is synchronised until `seconds` is called.
    """

    def __init__(self, now: Callable[[], float], make_event: Callable[[], Event]) -> None:
        """Reads both clocks at one moment, for which it waits for the device."""
        self._make_event = make_event
        self.mark: Callable[[], Any] = self._mark
        self._first = self._mark()
        self._first.synchronize()
        self._begun = now()

    def _mark(self) -> Event:
        event = self._make_event()
        event.record()
        return event

    def seconds(self, spans: Sequence[tuple[Any, Any]]) -> list[tuple[float, float]]:  # noqa: D102
        if spans:
            spans[-1][1].synchronize()  # a stream passes its events in order
        return [(self._when(begin), self._when(end)) for begin, end in spans]

    def _when(self, event: Event) -> float:
        return self._begun + self._first.elapsed_time(event) / 1e3  # from milliseconds


def clock_for(tensors: Iterable[torch.Tensor], now: Callable[[], float]) -> Clock:
    """Returns a clock for work on these tensors: by events if one is on a device. `now` reads the backend's clock."""
    device = next((tensor.device for tensor in tensors if tensor.device.type not in ("cpu", "meta")), None)
    if device is None:
        return HostClock(now)
    return EventClock(now, partial(torch.Event, device, enable_timing=True))  # type: ignore[arg-type]


_NOTHING = nullcontext()


class Loaded(NamedTuple):
    """Checked program, with the state that is kept between its runs."""

    program: Program
    """Orders of all ranks."""
    receivers: Mapping[Handover, Receiver]
    senders: Mapping[Handover, Sender]
    split: frozenset[int]
    """Indices of the stages with a split backward (I and W)."""

    @staticmethod
    def of(checked: Program, group: ProcessGroup, buffers: Buffers) -> Loaded:
        """Prepares this rank's messages of a checked program."""
        order = checked.orders[group.rank]
        return Loaded(
            checked,
            {one.handover: Receiver(group, one.handover, one.peer, buffers) for one in order if type(one) is Receive},
            {one.handover: Sender(group, one.handover, one.peer) for one in order if type(one) is Send},
            split_stages(checked.schedule),
        )


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
        self._loaded, self._split = loaded, loaded.split
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
        self._here: dict[Handover, Value] = {}
        """Values that arrived for the next step, or were made for another stage of this rank."""
        self._made: dict[Handover, Value] = {}
        """Values that the last step made for other ranks."""
        self._sends = PendingSends(group)
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
        receivers, senders = self._loaded.receivers, self._loaded.senders
        self._is_casting = is_casting()
        with torch.set_grad_enabled(self._trains), self._sends:
            for instruction in self._order[self._num_run :]:
                if until_backward and _is_of_backward(instruction):
                    return
                self.current = instruction
                match instruction:
                    case Compute(step):
                        self._compute(step)
                    case Post(handover) if not receivers[handover].is_kept:
                        receivers[handover].post()
                    case Receive(handover):
                        self._here[handover] = receivers[handover].wait()
                    case Send(handover):
                        if works := senders[handover].send(self._made.pop(handover)):
                            self._sends.add(works)
                    case Recompute(stage, microbatch):
                        self._recompute(stage, microbatch)
                    case Reduce(stage):
                        self._on_stage_done(stage)
                    case Flush():
                        self._sends.flush()
                self._num_run += 1

    def withdraw(self) -> None:
        """Cancels the posted receives of instructions that will not run."""
        for receiver in self._loaded.receivers.values():
            receiver.withdraw()

    def _recompute(self, stage: int, microbatch: int) -> None:
        self._began = self._clock.mark() if self._began is None else self._began
        self._stages[stage].recompute(microbatch, splits=stage in self._split)
        if self._meter is not None:
            self._meter.recomputed(stage, microbatch)

    def _compute(self, step: Step) -> None:
        began, self._began = self._clock.mark() if self._began is None else self._began, None
        with self._group.backend.compute(step):
            for action in (step,) if type(step) is Action else actions_of(step):
                self.current = action
                if action.kind == "F":
                    self._forward(action)
                else:
                    # step() may be called inside of `with torch.autocast`. Backwards run as they would after it, in the
                    # forward's dtypes.
                    with outside_autocast() if self._is_casting else _NOTHING:
                        self._backward(action)
                if self._meter is not None:
                    self._meter.ran(action)
        # The mark comes before the result leaves, so that in a timeline no receiver starts before this step has ended.
        self._spans.append((began, self._clock.mark()))
        if self._sends.in_flight:  # they may have left during the step; then the background thread need not stay awake
            self._sends.look()

    def _forward(self, action: Action) -> None:
        index, _, microbatch = action
        batch, stage, is_last = self._batch, self._stages[index], index == self._num_stages - 1
        if index == 0:
            assert batch.inputs is not None
            value: Value = batch.inputs[microbatch]
        else:
            value = self._here.pop(Handover(index, microbatch, False))
        forward = forward_of(stage, value, microbatch, batch, self._numbers[index][microbatch], is_last=is_last)
        if not self._trains:
            made = forward.run()
        else:
            made = stage.forward(microbatch, forward, splits=index in self._split)
            if is_last and batch.loss_fn is not None:
                self._take_loss(microbatch, *made.roots)
        if not is_last:
            self._hand_over(Handover(index + 1, microbatch, False), made.output)
            return
        if batch.keeps_outputs:
            batch.outputs[microbatch] = detached(made.output)
        if batch.metrics is not None and batch.targets is not None:
            with torch.no_grad():
                found = check_metrics(batch.metrics(made.output, batch.targets[microbatch]), batch.measured)
            batch.measured[microbatch] = found

    def _backward(self, action: Action) -> None:
        index, kind, microbatch = action
        stage = self._stages[index]
        if kind == "W":
            stage.backward_weight(microbatch)
            return
        backward = stage.backward if kind == "B" else stage.backward_input
        found = backward(microbatch, self._gradients(index, microbatch))
        if index > 0:
            # Fast path: most stages have one input. A bare tensor has no structure to write and parse.
            alone = found[0] if len(found) == 1 and found[0] is not None else found
            self._hand_over(Handover(index - 1, microbatch, True), alone)

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

    def _gradients(self, index: int, microbatch: int) -> list[Gradient]:
        if index < self._num_stages - 1:
            found = self._here.pop(Handover(index, microbatch, True))
            return found if isinstance(found, list) else [found]  # type: ignore[list-item]
        if self._batch.loss_fn is None:
            return list(self._batch.grad_outputs[microbatch])
        assert self._batch.scale is not None
        # The scale enters as the gradient of the loss. The sum of the weights over replicas is waited for here: it was
        # in flight during the first forwards.
        return [torch.full_like(self._batch.losses[microbatch], self._batch.scale.gradient_factor(microbatch))]

    def _hand_over(self, handover: Handover, value: Value) -> None:
        """Keeps a value for the other stage if that is on this rank, else until the Send instruction."""
        if self._placement[handover.stage] != self._group.rank:
            self._made[handover] = value
        else:
            # As from another rank, activations enter the next stage without a graph: each stage has its own.
            self._here[handover] = value if handover.backward else detached(value)


def forward_of(stage: Stage, value: Value, microbatch: int, batch: Batch, number: int, *, is_last: bool) -> Forward:
    """Returns the forward of a stage for one microbatch, with the loss if it is the last; `number` is its seed."""
    loss_fn = batch.loss_fn if is_last else None
    target = None if loss_fn is None or batch.targets is None else batch.targets[microbatch]

    def make(value: Value, kwargs: Mapping[str, Value], target: Value) -> Made:
        with Seeded(number):
            output = _called(f"stage {stage.index}", stage.call, value, kwargs)
            if loss_fn is None:
                return Made(output, tensors_of(output))
            # loss_fn is not called for weight 0: its mean over nothing would be NaN.
            if batch.scale is not None and not batch.scale.counts(microbatch):
                return Made(output, [no_loss(output)])
            return Made(output, [check_loss(_called("loss_fn(output, target)", loss_fn, output, target))])

    return Forward(value, batch.kwargs[microbatch], target, make)


def _called(name: str, function: Callable[..., Any], *values: Any) -> Any:
    """Calls a stage or loss_fn. Its error gets a note of the shapes that it was given."""
    try:
        return function(*values)
    except Exception as error:
        if not isinstance(error, EchelonError):
            given = " and ".join(_shown(value) for value in values if not _is_empty(value))
            error.add_note(Hint(f"{name} was given {given}"))
        raise


def _is_empty(value: Any) -> bool:
    return isinstance(value, Mapping) and not value


def _shown(value: Value) -> str:
    """Returns a value with shapes and dtypes in place of its tensors, such as "(float32[2, 3], 1)"."""
    return str(map_tensors(lambda tensor: describe(tensor.shape, tensor.dtype), value)).replace("'", "")


def _is_of_backward(instruction: Instruction) -> bool:
    match instruction:
        case Receive(handover):
            return handover.backward
        case Compute(step):
            return any(action.kind != "F" for action in actions_of(step))
        case _:
            return isinstance(instruction, Recompute)
