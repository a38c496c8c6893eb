"""The user's object: a model cut into stages over the ranks of a group, and the schedule that trains it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import nn

from echelon.data_parallel.broadcast import broadcast_tensors
from echelon.data_parallel.reducer import GradientReducer
from echelon.errors import ScheduleError, SizeMismatch, UnsupportedOp
from echelon.group import ProcessGroup
from echelon.pipeline.agreement import agreed_group, agreed_parts, check_runnable, choose_schedule
from echelon.pipeline.cut import Parts, StageMaker, keep
from echelon.pipeline.loss import LossScale, Reduction, num_samples
from echelon.pipeline.meter import Memory
from echelon.pipeline.microbatch import batch_size, merge, split, split_arguments, split_keywords
from echelon.pipeline.nested import Value
from echelon.pipeline.outcome import Span, StepOutput, tell
from echelon.pipeline.runtime import Batch, Runtime
from echelon.pipeline.schedule import Schedule
from echelon.pipeline.schedules.forward_only import forward_only
from echelon.pipeline.stage import Stage
from echelon.pipeline.weights import Weights
from echelon.trace import Timeline

LossFn = Callable[[Value, Value], torch.Tensor]


class Pipeline:
    """Trains a model whose stages lie on the ranks of a group.

    Gradients equal those of one process that runs the microbatches one after another, each loss weighted by its share
    of the samples, and are added into .grad. Every rank of the group makes the same Pipeline and calls the same
    methods.
    """

    def __init__(
        self,
        model: nn.Module | Sequence[StageMaker] | Parts,
        group: ProcessGroup,
        schedule: str | Schedule = "1f1b",
        num_microbatches: int | None = None,
        loss_fn: LossFn | None = None,
        *,
        num_chunks: int | None = None,
        data_parallel: ProcessGroup | None = None,
        at: Sequence[str] | None = None,
        example: Sequence[Value] | None = None,
        example_kwargs: Mapping[str, Value] | None = None,
        loss_reduction: Reduction = "mean",
        loss_weight: Callable[[Value], float] | None = None,
        recompute: bool | Collection[int] = False,
    ) -> None:
        """Cuts the model, keeps this rank's stages, and checks the schedule.

        Args:
            model: any nn.Module, cut as `split` says; what `split` made of one; or a list with one entry per stage: a
                module, a callable that makes it, or None where another rank holds it. In a list, a tuple that a stage
                returns becomes the next one's positional arguments.
            group: the ranks of the pipeline.
            schedule: a name that `schedules.build` knows, or a Schedule, for `group.world_size` ranks.
            num_microbatches: into how many parts each batch is cut; None: as many as the Schedule has.
            loss_fn: loss_fn(output, target), called for each microbatch where the last stage is.
            num_chunks: stages per rank, for a schedule given by name; None: as many as a list has entries for, else 1.
            data_parallel: the group over which equal stages average their gradients. They start from the parameters and
                buffers of its rank 0.
            at: names of the layers at which stages 1, 2, ... begin.
            example: positional inputs such as the model will get, as a tuple. Without `at`, one rank measures the
                layers with them and divides them evenly; `Pipeline.at` says what it chose.
            example_kwargs: keyword inputs, likewise.
            loss_reduction: "mean" if loss_fn averages over samples, "sum" if it adds them up.
            loss_weight: loss_weight(target), what a microbatch counts in the mean; None: its number of samples.
            recompute: True, or the stages, that keep nothing but their input from forward to backward and then run the
                forward again: less memory for a third more time.

        Raises:
            ScheduleError: an unknown name, a schedule with problems, or one for another number of ranks.
            PartitionError: the model cannot be cut that way.
            UnsupportedOp: the schedule has actions that cannot be run.
            CollectiveMismatch: the ranks of the group were not given the same schedule.
        """
        if loss_reduction not in ("mean", "sum"):
            raise UnsupportedOp(f'loss_reduction={loss_reduction!r}: use "mean" or "sum"')
        self.schedule = choose_schedule(schedule, group.world_size, num_microbatches, num_chunks, model, at)
        self.schedule.check()
        check_runnable(self.schedule)
        recomputed = range(self.num_stages) if recompute is True else sorted(recompute or ())
        self._group = agreed_group(group, self.schedule, [loss_reduction, f"recompute={list(recomputed)}"])
        parts = agreed_parts(model, self.schedule, self._group, data_parallel, at, example, example_kwargs)
        self.at = parts.at
        """The layers that stages 1, 2, ... begin with; none for a list of stages."""
        self.stages = keep(parts, self.schedule.placement, group.rank)
        self._weights = Weights(self.stages, self._group)
        self._loss_fn = loss_fn
        self._loss_reduction: Reduction = loss_reduction
        self._loss_weight = loss_weight
        self._data_parallel = data_parallel
        self._reducers: dict[int, GradientReducer] = {}
        self._synchronizes = True
        self._is_settled = False
        self._times: list[list[Span]] | None = None
        if data_parallel is not None:
            for stage in self.stages:
                self._replicate(stage, data_parallel)
        replicas = [reducer.group for reducer in self._reducers.values()]
        self._runtime = Runtime(
            self.stages, self._group, replicas if data_parallel is None else [data_parallel, *replicas], recomputed
        )
        self._runtime.load(self.schedule)

    def __repr__(self) -> str:
        cut = f" cut before {', '.join(self.at)}" if self.at else ""
        return f"<Pipeline of {self.num_stages} stages{cut}, here {self.stages}: {self.schedule!r}>"

    @property
    def num_stages(self) -> int:
        """The number of stages of the whole model."""
        return self.schedule.num_stages

    @property
    def num_microbatches(self) -> int:
        """The number of parts that each batch is cut into."""
        return self.schedule.num_microbatches

    @property
    def is_first(self) -> bool:
        """Whether this rank holds the first stage: it is the one whose inputs matter."""
        return self.schedule.placement[0] == self._group.rank

    @property
    def is_last(self) -> bool:
        """Whether this rank holds the last stage: it is the one whose target matters and that has the outputs."""
        return self.schedule.placement[-1] == self._group.rank

    @property
    def timeline(self) -> Timeline:
        """The last `step` as all ranks ran it, in seconds.

        Raises:
            ScheduleError: no step has been run.
        """
        if self._times is None:
            raise ScheduleError("there is no timeline yet: call step() first")
        return self.schedule.recorded(self._times)

    # Training and inference

    def step(self, *inputs: Value, target: Value = None, return_outputs: bool = False, **kwargs: Value) -> StepOutput:
        """Runs forward and backward of one batch and adds the gradients into .grad.

        Args:
            inputs: what the first stage takes; looked at on its rank only. Tensors are cut along dim 0, what is no
            tensor
                goes along whole.
            target: what loss_fn takes; looked at on the rank of the last stage only.
            return_outputs: keep the last stage's outputs.
            kwargs: keyword arguments of this rank's stages, cut likewise.

        Raises:
            SizeMismatch: there are fewer samples than microbatches, or inputs and target differ in their number.
            PeerFailed: another rank failed; the message has its error.
            Timeout: a rank did not send in time what another waited for.
        """
        batch = self._training_batch(inputs, target, kwargs, return_outputs)
        if not self._is_settled:
            self.schedule, self._is_settled = self._runtime.settle(self.schedule, batch), True
        times = self._runtime.run(self.schedule, batch, self._start_reduction)
        if self._synchronizes:
            with self._runtime.telling_others():
                for reducer in self._reducers.values():
                    reducer.finish()
        loss = self._tell(batch, times)
        return StepOutput(
            loss, merge([batch.outputs[index] for index in sorted(batch.outputs)]) if batch.outputs else None
        )

    def forward(self, *inputs: Value, **kwargs: Value) -> Value:
        """Runs inference, without gradients, and returns the outputs in batch order on the rank of the last stage.

        Batches of any size will do: with fewer samples than microbatches there are as many microbatches as samples.
        On other ranks it returns None. Modules stay in the mode that `train` or `eval` set.
        """
        samples = batch_size(inputs, "inputs") if self.is_first else None
        if self.is_first and not samples:
            raise SizeMismatch("at least 1 sample", f"{samples or 0}", "inputs of forward()", "pass a batch")
        told = self._group.broadcast_object(samples, src=self.schedule.placement[0])
        assert isinstance(told, int)
        count = min(self.num_microbatches, told)
        schedule = forward_only(self.schedule.placement, count)
        batch = Batch(
            inputs=split_arguments(inputs, count) if self.is_first else None,
            targets=None,
            kwargs=split_keywords(kwargs, count),
            loss_fn=None,
            scale=None,
            keeps_outputs=True,
        )
        with torch.no_grad():
            self._runtime.run(schedule, batch, lambda _: None)
        return merge([batch.outputs[index] for index in range(count)]) if self.is_last else None

    def __call__(self, *inputs: Value, **kwargs: Value) -> Value:
        """Runs `forward`."""
        return self.forward(*inputs, **kwargs)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Leaves gradients unsynchronised inside; the first step after it averages all that was added up."""
        before, self._synchronizes = self._synchronizes, False
        try:
            yield
        finally:
            self._synchronizes = before

    def clip_grad_norm_(self, max_norm: float) -> torch.Tensor:
        """Scales all gradients so that their 2-norm over all stages is at most `max_norm`; returns what it was.

        As torch.nn.utils.clip_grad_norm_ does in one process, up to rounding. Every rank must call it.
        """
        return self._weights.clip(max_norm)

    def train(self, mode: bool = True) -> Pipeline:
        """Puts this rank's stages into training mode."""
        for stage in self.stages:
            stage.module.train(mode)
        return self

    def eval(self) -> Pipeline:
        """Puts this rank's stages into evaluation mode."""
        return self.train(False)

    def memory(self) -> Memory:
        """Returns the bytes of activations that this rank held at most in the first step, and what was planned.

        Raises:
            ScheduleError: no step has been run.
        """
        return self._runtime.memory

    # Parameters

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yields this rank's parameters under their names in the unsplit model."""
        return self._weights.named_parameters()

    def parameters(self) -> Iterator[nn.Parameter]:
        """Yields this rank's parameters."""
        return (parameter for _, parameter in self.named_parameters())

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Returns this rank's part of the unsplit model's state dict."""
        return self._weights.state_dict()

    def load_state_dict(self, state_dict: Mapping[str, torch.Tensor]) -> None:
        """Loads this rank's part of a state dict of the unsplit model; the other stages' entries are passed over.

        Raises:
            KeyError: an entry of this rank's stages is missing.
        """
        self._weights.load_state_dict(state_dict)

    # Inside

    def _training_batch(
        self, inputs: tuple[Value, ...], target: Value, kwargs: Mapping[str, Value], keeps_outputs: bool
    ) -> Batch:
        count = self.num_microbatches
        num_inputs = num_targets = 0
        with self._runtime.telling_others():
            if self.is_first:
                num_inputs = num_samples(inputs, count, "inputs")
            if self.is_last:
                if self._loss_fn is None:
                    raise UnsupportedOp("step() needs a loss: give the Pipeline loss_fn=, or use forward()")
                num_targets = num_samples(target, count, "target")
            targets = split(target, count) if self.is_last else None
            return Batch(
                inputs=split_arguments(inputs, count) if self.is_first else None,
                targets=targets,
                kwargs=split_keywords(kwargs, count),
                loss_fn=self._loss_fn,
                scale=None
                if targets is None
                else LossScale(targets, self._loss_reduction, self._loss_weight, self._data_parallel),
                keeps_outputs=keeps_outputs,
                num_inputs=num_inputs,
                num_targets=num_targets,
            )

    def _replicate(self, stage: Stage, data_parallel: ProcessGroup) -> None:
        broadcast_tensors([*stage.module.parameters(), *stage.module.buffers()], data_parallel)
        trainable = [pair for pair in stage.module.named_parameters() if pair[1].requires_grad]
        self._reducers[stage.index] = GradientReducer(trainable, data_parallel)

    def _start_reduction(self, stage: int) -> None:
        if self._synchronizes and (reducer := self._reducers.get(stage)):
            reducer.start()

    def _tell(self, batch: Batch, times: list[Span]) -> torch.Tensor:
        """Gives every rank the loss, and when each step of every rank ran."""
        loss = None
        if self.is_last:
            loss = torch.stack([batch.losses[index] for index in range(self.num_microbatches)]).sum()
            if self._data_parallel is not None:
                self._data_parallel.all_reduce(loss)
        told = tell(self._group, self.schedule, times, batch.num_inputs, batch.num_targets, loss)
        self._times = told.times
        return told.loss
