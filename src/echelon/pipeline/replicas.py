"""The gradients of a pipeline's stages, kept equal on all ranks that hold the same weights.

Strategy. The gradients of a stage are averaged over its replicas beside the computation, from when its last backward
is done; tied weights, whose gradients are complete only when all stages are, at the end. Every rank makes and runs the
same reductions in the same order, so none waits for ever; a step that fails ends them on all ranks (see `Runtime`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from echelon.data_parallel.broadcast import broadcast_tensors
from echelon.data_parallel.reducer import GradientReducer
from echelon.group import ProcessGroup
from echelon.pipeline.stage import Stage
from echelon.pipeline.ties import TiedWeights


class Replicas:
    """Averages gradients over data-parallel ranks, and adds up those of tied weights."""

    def __init__(self, stages: Sequence[Stage], ties: TiedWeights, data_parallel: ProcessGroup | None) -> None:
        """Gives all replicas the parameters and buffers of rank 0, and plans the reductions.

        Args:
            stages: this rank's.
            ties: their tied weights.
            data_parallel: the ranks that hold equal stages.
        """
        self._ties = ties
        self._data_parallel = data_parallel
        self._reducers: dict[int, GradientReducer] = {}
        self._of_ties: GradientReducer | None = None
        self._synchronizes = True
        if data_parallel is None or data_parallel.world_size == 1:
            return
        tied = set(map(id, ties.parameters))
        for stage in stages:
            tensors = [*stage.module.parameters(), *stage.module.buffers()]
            broadcast_tensors([tensor for tensor in tensors if not tensor.is_meta], data_parallel)
            trainable = [
                (name, parameter)
                for name, parameter in stage.module.named_parameters()
                if parameter.requires_grad and id(parameter) not in tied
            ]
            self._reducers[stage.index] = GradientReducer(trainable, data_parallel)
        trainable = [(f"tied {i}", one) for i, one in enumerate(ties.parameters) if one.requires_grad]
        if trainable:
            self._of_ties = GradientReducer(trainable, data_parallel)

    @property
    def groups(self) -> list[ProcessGroup]:
        """The groups whose ranks wait for this one."""
        reducers = [*self._reducers.values(), *([] if self._of_ties is None else [self._of_ties])]
        own = [] if self._data_parallel is None else [self._data_parallel]
        return own + [group for reducer in reducers for group in reducer.groups] + self._ties.groups

    def start(self, stage: int) -> None:
        """Starts to average the gradients of a stage, unless inside of `no_sync`."""
        if self._synchronizes and (reducer := self._reducers.get(stage)):
            reducer.start()

    @contextmanager
    def synchronizing(self) -> Iterator[None]:
        """Makes all gradients complete at the end."""
        with self._ties.adding_up():
            yield
        if self._synchronizes:
            for reducer in self._reducers.values():
                reducer.finish()
            if self._of_ties is not None:
                self._of_ties.reduce()

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Leaves gradients as they are on this replica inside; the first step after it averages all of them."""
        before, self._synchronizes = self._synchronizes, False
        try:
            yield
        finally:
            self._synchronizes = before
