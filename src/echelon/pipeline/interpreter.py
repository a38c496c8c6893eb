"""The interpreter: runs this rank's part of a program once, instruction by instruction, exactly as it was checked.

Strategy. Nothing is decided here but what the program says. What a step needs from another rank was posted a few steps
before; what it makes for another rank is sent without waiting; between two stages of one rank values are handed over
directly.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import NamedTuple

import torch

from echelon.errors import UnsupportedOp
from echelon.group import ProcessGroup
from echelon.pipeline import lowering
from echelon.pipeline.action import Action, actions_of
from echelon.pipeline.autocast import is_casting, outside_autocast
from echelon.pipeline.batch import Batch
from echelon.pipeline.clock import clock_for
from echelon.pipeline.junctions import Gradient
from echelon.pipeline.loss import check_loss, check_metrics, is_here, no_loss, refuse_if_not_finite
from echelon.pipeline.lowering import Instruction, Program, Transfer
from echelon.pipeline.meter import Meter
from echelon.pipeline.nested import Value, tensors_of
from echelon.pipeline.outbox import Outbox
from echelon.pipeline.randomness import Seeded, number_of
from echelon.pipeline.stage import Forward, Made, Stage
from echelon.pipeline.transfer import Incoming, Ports, detached

_NOTHING = nullcontext()


class Loaded(NamedTuple):
    """A program that was checked, and what is kept from one run to the next."""

    program: Program
    """What all ranks do."""
    ports: Ports
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
        self._incoming: dict[Transfer, Incoming] = {}
        self._here: dict[Transfer, Value] = {}
        """What arrived for the next step, or was made here for another stage of this rank."""
        self._made: dict[Transfer, Value] = {}
        """What the last step made for other ranks."""
        self._outbox = Outbox(group)
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
            lowering.Post: self._post,
            lowering.Receive: self._receive,
            lowering.Compute: self._compute,
            lowering.Send: self._send,
            lowering.Recompute: self._recompute,
            lowering.Reduce: self._reduce,
            lowering.Flush: self._flush,
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

    def _post(self, instruction: lowering.Post) -> None:
        transfer, peer = instruction.transfer, instruction.peer
        self._incoming[transfer] = self._ports.post(transfer, peer)

    def _receive(self, instruction: lowering.Receive) -> None:
        self._here[instruction.transfer] = self._incoming.pop(instruction.transfer).wait()

    def _send(self, instruction: lowering.Send) -> None:
        value = self._made.pop(instruction.transfer)
        self._outbox.add(self._ports.send(instruction.transfer, instruction.peer, value))

    def _flush(self, _: lowering.Flush) -> None:
        self._outbox.flush()

    def _reduce(self, instruction: lowering.Reduce) -> None:
        self._on_stage_done(instruction.stage)

    def _recompute(self, instruction: lowering.Recompute) -> None:
        stage, microbatch = instruction.stage, instruction.microbatch
        self._began = self._clock.mark() if self._began is None else self._began
        self._stages[stage].recompute(microbatch, splits=stage in self._split)
        if self._meter is not None:
            self._meter.recomputed(stage, microbatch)

    def _compute(self, instruction: lowering.Compute) -> None:
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
        case lowering.Receive(transfer):
            return transfer.backward
        case lowering.Compute(step):
            return any(action.kind != "F" for action in actions_of(step))
        case _:
            return isinstance(instruction, lowering.Recompute)
