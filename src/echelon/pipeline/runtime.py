"""The interpreter: runs this rank's order of a schedule, step by step, exactly as it was checked.

Strategy. Nothing is decided here but what the order says. What a step needs from another rank was posted a few steps
before; what it makes for another rank is sent without waiting; between two stages of one rank values are handed over
directly. A step that fails ends the step of all ranks: they are told why, and none waits for what will not come.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

from echelon.backends.base import Work
from echelon.errors import PeerFailed, UnsupportedOp
from echelon.group import ProcessGroup
from echelon.pipeline.action import Action, Overlapped, Step
from echelon.pipeline.loss import LossScale, check_loss
from echelon.pipeline.nested import Value, map_tensors
from echelon.pipeline.schedule import Schedule
from echelon.pipeline.stage import Stage
from echelon.pipeline.transfer import Incoming, Route, detached, start_transfer

_LOOKAHEAD = 3
"""How many steps before it is needed a receive is posted."""


@dataclass
class Batch:
    """What one step works on, cut into microbatches, and what comes of it."""

    inputs: Sequence[tuple[Value, ...]] | None
    """For each microbatch the positional arguments of the first stage, where that is."""
    targets: Sequence[Value] | None
    """For each microbatch the target, where the last stage is."""
    kwargs: Sequence[Mapping[str, Value]]
    """For each microbatch the keyword arguments of all stages of this rank."""
    loss_fn: Callable[[Value, Value], torch.Tensor] | None
    scale: LossScale | None
    keeps_outputs: bool = False
    num_inputs: int = 0
    """Samples in `inputs`."""
    num_targets: int = 0
    """Samples in `targets`."""
    losses: dict[int, torch.Tensor] = field(default_factory=dict)
    outputs: dict[int, Value] = field(default_factory=dict)


class Runtime:
    """Runs schedules on the stages of one rank."""

    def __init__(self, stages: Sequence[Stage], group: ProcessGroup, replicas: Sequence[ProcessGroup]) -> None:
        """Prepares to run.

        Args:
            stages: this rank's.
            group: the ranks of the pipeline; its transfers and nothing else use it.
            replicas: groups whose ranks wait for this one in a step as well.
        """
        self._stages = {stage.index: stage for stage in stages}
        self._group = group
        self._replicas = replicas
        self._steps = 0

    def run(self, schedule: Schedule, batch: Batch, on_stage_done: Callable[[int], None]) -> list[tuple[float, float]]:
        """Runs this rank's order once and returns when each of its steps began and ended, by the backend's clock.

        Args:
            schedule: a schedule that was checked.
            batch: what to work on; losses and outputs are added to it.
            on_stage_done: called with the index of a stage after its last backward.

        Raises:
            PeerFailed: another rank failed in this step, or is gone.
            Timeout: what another rank was to send did not come.
        """
        self._steps += 1
        pass_ = _Pass(schedule, batch, self._stages, self._group, self._steps)
        with self.telling_others(lambda: pass_.current):
            return list(pass_.run(on_stage_done))

    @contextmanager
    def telling_others(self, current: Callable[[], Step | None] = lambda: None) -> Iterator[None]:
        """Tells the other ranks of an exception inside, so that none waits for this one; then lets it pass."""
        try:
            yield
        except BaseException as error:
            for stage in self._stages.values():
                stage.forget()
            where = f" in {current()}" if current() is not None else ""
            mine = PeerFailed(self._group.backend.rank, f"{type(error).__name__}{where}: {error}")
            first = self._revoke(error if isinstance(error, PeerFailed) else mine)
            if isinstance(error, PeerFailed):
                raise PeerFailed(first.rank, first.reason, error.operation) from error
            raise

    def _revoke(self, failure: PeerFailed) -> PeerFailed:
        """Ends what the ranks of the pipeline wait for, and its replicas; returns the first cause that is known."""
        for group in (*self._replicas, self._group):
            failure = group.backend.revoke(group.context, group.ranks, failure)
        return failure


class _Pass:
    """One run of one order."""

    def __init__(
        self, schedule: Schedule, batch: Batch, stages: Mapping[int, Stage], group: ProcessGroup, number: int
    ) -> None:
        self.current: Step | None = None
        self._schedule = schedule
        self._batch = batch
        self._stages = stages
        self._group = group
        self._number = number
        self._last_stage = schedule.num_stages - 1
        self._results: dict[Route, Value] = {}
        self._local: dict[Route, Value] = {}
        self._incoming: dict[Route, Incoming] = {}
        self._sends: list[Work[None]] = []
        self._loss_roots: dict[int, torch.Tensor] = {}

    def run(self, on_stage_done: Callable[[int], None]) -> Iterator[tuple[float, float]]:
        """Yields when each step began and ended."""
        now = self._group.backend.now
        order = self._schedule.orders[self._group.rank]
        actions = [actions_of(step) for step in order]
        last = {action.stage: index for index, step in enumerate(actions) for action in step if action.kind != "F"}
        for index, step in enumerate(order):
            self.current = step
            self._post(actions[index : index + _LOOKAHEAD])
            values = [self._fetch(action) for action in actions[index]]
            began = now()
            with self._group.backend.compute(step):
                for action, value in zip(actions[index], values, strict=True):
                    self._execute(action, value)
            ended = now()  # before what it made leaves: nobody who needs it can start earlier
            self._send_results()
            yield began, ended
            self._forget_sent()
            for action in actions[index]:
                if action.kind != "F" and last[action.stage] == index:
                    on_stage_done(action.stage)
        for work in self._sends:
            work.wait(self._group.timeout)

    def _forget_sent(self) -> None:
        """Lets go of what has been sent; raises the error of a send that failed."""
        for work in self._sends:
            if work.is_completed():
                work.result()
        self._sends = [work for work in self._sends if not work.is_completed()]

    def _execute(self, action: Action, value: Value) -> None:
        if action.kind == "F":
            self._forward(action, value)
        elif action.kind == "B":
            self._backward(action, value)
        else:
            raise UnsupportedOp(
                f"{action}: this runtime runs forward (F) and whole backward (B) actions; use one of the schedules "
                "gpipe, 1f1b, interleaved-1f1b, looped-bfs"
            )

    # Forward

    def _forward(self, action: Action, value: Value) -> None:
        stage, microbatch, batch = self._stages[action.stage], action.microbatch, self._batch
        kwargs = batch.kwargs[microbatch]
        output = stage.forward(microbatch, value, kwargs, keeps_graph=not self._schedule.forward_only)
        if action.stage != self._last_stage:
            self._results[Route(self._number, action.stage + 1, microbatch, False)] = output
            return
        if batch.keeps_outputs:
            batch.outputs[microbatch] = map_tensors(torch.Tensor.detach, output)
        if batch.loss_fn is not None and batch.targets is not None and batch.scale is not None:
            with torch.set_grad_enabled(not self._schedule.forward_only):
                loss = check_loss(batch.loss_fn(output, batch.targets[microbatch]))
                self._loss_roots[microbatch] = loss
            batch.losses[microbatch] = loss.detach() * batch.scale.factor(microbatch)

    # Backward

    def _backward(self, action: Action, value: Value) -> None:
        stage, microbatch = self._stages[action.stage], action.microbatch
        if action.stage == self._last_stage:
            assert self._batch.scale is not None
            loss = self._loss_roots.pop(microbatch)
            gradients = stage.backward_from(microbatch, loss * self._batch.scale.gradient_factor(microbatch))
        else:
            assert isinstance(value, list)
            gradients = stage.backward(microbatch, value)
        if action.stage > 0:
            self._results[Route(self._number, action.stage - 1, microbatch, True)] = gradients

    # Between stages

    def _send_results(self) -> None:
        """Hands what was made to the stages it is for, on this rank or on others."""
        for route, value in self._results.items():
            rank = self._schedule.placement[route.stage]
            if rank == self._group.rank:
                self._local[route] = value if route.backward else detached(value)
            else:
                self._sends += start_transfer(self._group, rank, route, value)
        self._results.clear()

    def _post(self, upcoming: Sequence[Sequence[Action]]) -> None:
        for step in upcoming:
            for action in step:
                route, src = self._needs(action)
                if route is not None and src != self._group.rank and route not in self._incoming:
                    self._incoming[route] = Incoming(self._group, src, route)

    def _fetch(self, action: Action) -> Value:
        """Returns what the action needs: the input of its stage, or the gradients of its outputs."""
        route, src = self._needs(action)
        if route is None:
            return self._first_input(action) if action.kind == "F" else None
        if src == self._group.rank:
            return self._local.pop(route)
        return self._incoming.pop(route).wait()

    def _needs(self, action: Action) -> tuple[Route | None, int]:
        """Returns the transfer that an action needs, and the rank it comes from; None if it needs none."""
        backward = action.kind != "F"
        source = action.stage + 1 if backward else action.stage - 1
        if not 0 <= source <= self._last_stage:
            return None, self._group.rank
        return Route(self._number, action.stage, action.microbatch, backward), self._schedule.placement[source]

    def _first_input(self, action: Action) -> Value:
        assert self._batch.inputs is not None
        return self._batch.inputs[action.microbatch]


def actions_of(step: Step) -> tuple[Action, ...]:
    """Returns the one action of a step, or the two of an overlapped one."""
    return tuple(step) if isinstance(step, Overlapped) else (step,)
