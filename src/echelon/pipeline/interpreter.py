"""The interpreter: runs this rank's part of a program once, instruction by instruction, exactly as it was checked.

Strategy. Nothing is decided here but what the program says. What a step needs from another rank was posted a few steps
before; what it makes for another rank is sent without waiting; between two stages of one rank values are handed over
directly.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING

import torch

from echelon.errors import NotFinite, UnsupportedOp
from echelon.group import ProcessGroup
from echelon.pipeline.action import Action, actions_of
from echelon.pipeline.autocast import outside_autocast
from echelon.pipeline.junctions import Gradient
from echelon.pipeline.loss import check_loss, check_metrics
from echelon.pipeline.lowering import (
    Compute,
    Flush,
    Instruction,
    Post,
    Program,
    Receive,
    Recompute,
    Reduce,
    Send,
    Transfer,
)
from echelon.pipeline.meter import Meter
from echelon.pipeline.nested import Value, tensors_of
from echelon.pipeline.outbox import Outbox
from echelon.pipeline.randomness import keyed
from echelon.pipeline.stage import Forward, Made, Stage
from echelon.pipeline.transfer import Incoming, Ports, detached

if TYPE_CHECKING:
    from echelon.pipeline.runtime import Batch


class Interpreter:
    """One run of one rank's part of a program."""

    def __init__(
        self,
        program: Program,
        batch: Batch,
        stages: Mapping[int, Stage],
        group: ProcessGroup,
        ports: Ports,
        number: int,
        split: Collection[int],
        on_stage_done: Callable[[int], None],
        meter: Meter | None = None,
    ) -> None:
        """Prepares to run.

        Args:
            program: what all ranks do.
            batch: what to work on; losses and outputs are added to it.
            stages: this rank's, by their index.
            group: the ranks of the pipeline.
            ports: this rank's end of the program's transfers.
            number: of this run, the same on all ranks.
            split: the stages whose backward has two halves.
            on_stage_done: called with the index of a stage when its gradients are to be reduced.
            meter: is told of each action that has been run.
        """
        self.current: Instruction | None = None
        """What is being run."""
        self.times: list[tuple[float, float]] = []
        """When each step of this rank began and ended, by the backend's clock."""
        self._program = program
        self._batch = batch
        self._stages = stages
        self._group = group
        self._ports = ports
        self._number = number
        self._split = split
        self._on_stage_done = on_stage_done
        self._meter = meter
        self._trains = not program.schedule.forward_only
        self._num_stages = program.schedule.num_stages
        self._placement = program.schedule.placement
        self._incoming: dict[Transfer, Incoming] = {}
        self._here: dict[Transfer, Value] = {}
        """What arrived for the next step, or was made here for another stage of this rank."""
        self._made: dict[Transfer, Value] = {}
        """What the last step made for other ranks."""
        self._outbox = Outbox(group)
        self._now = group.backend.now
        self._num_run = 0
        self._began: float | None = None
        """When a step began whose forward is run again first."""

    def run(self, *, until_backward: bool = False) -> None:
        """Runs the instructions of this rank that were not run yet.

        Args:
            until_backward: only those before the first that belongs to a backward.
        """
        act: dict[type[Instruction], Callable[..., None]] = {
            Post: self._post,
            Receive: self._receive,
            Compute: self._compute,
            Send: self._send,
            Recompute: self._recompute,
            Reduce: self._reduce,
            Flush: self._flush,
        }
        with torch.set_grad_enabled(self._trains), self._outbox:
            for instruction in self._program.orders[self._group.rank][self._num_run :]:
                if until_backward and _is_of_backward(instruction):
                    return
                self.current = instruction
                act[type(instruction)](instruction)
                self._num_run += 1

    def _post(self, instruction: Post) -> None:
        transfer, peer = instruction.transfer, instruction.peer
        self._incoming[transfer] = self._ports.post(self._number, transfer, peer)

    def _receive(self, instruction: Receive) -> None:
        self._here[instruction.transfer] = self._incoming.pop(instruction.transfer).wait()

    def _send(self, instruction: Send) -> None:
        value = self._made.pop(instruction.transfer)
        self._outbox.add(self._ports.send(self._number, instruction.transfer, instruction.peer, value))

    def _flush(self, _: Flush) -> None:
        self._outbox.flush()

    def _reduce(self, instruction: Reduce) -> None:
        self._on_stage_done(instruction.stage)

    def _recompute(self, instruction: Recompute) -> None:
        stage, microbatch = instruction.stage, instruction.microbatch
        self._began = self._now() if self._began is None else self._began
        self._stages[stage].recompute(microbatch, splits=stage in self._split)
        if self._meter is not None:
            self._meter.recomputed(stage, microbatch)

    def _compute(self, instruction: Compute) -> None:
        step = instruction.step
        began, self._began = self._now() if self._began is None else self._began, None
        with self._group.backend.compute(step):
            for action in actions_of(step):
                self._act(action)
        self.times.append((began, self._now()))  # before what it made leaves: nobody who needs it can start earlier
        self._outbox.look()

    def _act(self, action: Action) -> None:
        stage, microbatch = self._stages[action.stage], action.microbatch
        if action.kind == "F":
            self._forward(action)
        elif action.kind == "W":
            with outside_autocast():
                stage.backward_weight(microbatch)
        else:
            backward = stage.backward if action.kind == "B" else stage.backward_input
            with outside_autocast():
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
        forward = forward_of(stage, self._input(action), microbatch, batch, is_last=is_last)
        if not self._trains:
            made = forward.make()
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
                batch.measured[microbatch] = check_metrics(batch.metrics(made.output, batch.targets[microbatch]))

    def _take_loss(self, microbatch: int, loss: torch.Tensor) -> None:
        assert self._batch.scale is not None
        if not loss.requires_grad:
            raise UnsupportedOp(
                f"the loss of microbatch {microbatch} depends on nothing that requires a gradient: use forward(), or "
                "unfreeze a parameter"
            )
        value = loss.item()
        if not math.isfinite(value):
            raise NotFinite(
                f"the loss of microbatch {microbatch} is {value}: look at its samples and at the learning rate; no "
                "gradient of it was added"
            )
        self._batch.losses[microbatch] = loss.detach() * self._batch.scale.factor(microbatch)

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


def forward_of(stage: Stage, value: Value, microbatch: int, batch: Batch, *, is_last: bool) -> Forward:
    """Returns what runs a stage for one microbatch, and after the last one the loss."""
    kwargs = batch.kwargs[microbatch]
    loss_fn, targets = (batch.loss_fn, batch.targets) if is_last else (None, None)

    def make() -> Made:
        with keyed(batch.key.step, stage.index, microbatch, replica=batch.key.replica, seed=batch.key.seed):
            output = stage.call(value, kwargs)
            if loss_fn is None or targets is None:
                return Made(output, [tensor for tensor in tensors_of(output) if tensor.requires_grad])
            return Made(output, [check_loss(loss_fn(output, targets[microbatch]))])

    return Forward(value, make)


def _is_of_backward(instruction: Instruction) -> bool:
    match instruction:
        case Receive(transfer):
            return transfer.backward
        case Compute(step):
            return any(action.kind != "F" for action in actions_of(step))
        case _:
            return isinstance(instruction, Recompute)
