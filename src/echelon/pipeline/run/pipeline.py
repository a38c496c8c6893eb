"""Pipeline, the user's object: a model cut into stages over the ranks of a group, and trained by a schedule."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import TYPE_CHECKING, NoReturn

import torch
from torch import nn

from echelon.arguments import no_attribute, refuse_others
from echelon.data_parallel.excerpt import UNKNOWN
from echelon.data_parallel.idle_optimizer import OF_STAGES, IdleOptimizer
from echelon.data_parallel.missing_zero_grad import MissingZeroGrad
from echelon.errors import InvalidArgument, ScheduleError, SizeMismatch, UnsupportedOp
from echelon.group.group import ProcessGroup
from echelon.pipeline.cut.cut import Parts, StageMaker, keep
from echelon.pipeline.cut.ties import TiedWeights, agree_on_ties, find_ties
from echelon.pipeline.plan.cost import Costs
from echelon.pipeline.plan.fuse import split_stages
from echelon.pipeline.plan.schedule import Schedule
from echelon.pipeline.plan.simulate import measured_costs
from echelon.pipeline.run.agreement import (
    agreed_group,
    agreed_parts,
    check_arguments,
    check_groups,
    choose_schedule,
    own_group,
    refuse_stages,
    stages_to_recompute,
)
from echelon.pipeline.run.loss import (
    Activations,
    Memory,
    Metrics,
    Objective,
    Reduction,
    check_finite,
    is_here,
    memory_costs,
    num_samples,
)
from echelon.pipeline.run.manual_step import ManualStep
from echelon.pipeline.run.runtime import Runtime
from echelon.pipeline.run.samples import Deals, check_same_inputs
from echelon.pipeline.run.step import Batch, Span, StepOutput, tell, tell_metrics
from echelon.pipeline.run.weights import Replicas, UnevenSteps, Weights
from echelon.pipeline.schedules.forward_only import forward_only
from echelon.pipeline.stage.nested import (
    Value,
    batch_size,
    check_tensors,
    merge,
    split,
    split_arguments,
    split_keywords,
)
from echelon.pipeline.stage.replay import Key
from echelon.pipeline.stage.stage import Stage
from echelon.timeline.timeline import Timeline

LossFn = Callable[[Value, Value], torch.Tensor]
_CLIP = getattr(inspect.unwrap(nn.utils.clip_grad_norm_), "__code__", None)
"""Code of torch's function, without its wrapper."""
_MEANT = {
    "zero_grad": " call optimizer.zero_grad()",
    "train_batch": "step",
    "eval_batch": "forward",
    "module": "stages",
    **dict.fromkeys(("modules", "children", "named_modules"), " write pipe.stages, of which each has its module"),
    **dict.fromkeys(("plan", "simulate", "draw"), " write pipe.schedule.simulate()"),
    **dict.fromkeys(("to", "cuda", "cpu"), " move the model before it is cut: model.to(group.device)"),
    **dict.fromkeys(("half", "bfloat16", "float"), " convert the model before it is cut, or use torch.autocast"),
}
"""Names that nn.Module and other pipelines have for attributes."""


class Pipeline:
    """Model cut into stages over the ranks of a group, with training steps and inference.

    Gradients equal those of one process that runs the microbatches one after another, each loss weighted by its share
    of the samples, and are added into .grad. Every rank of the group makes the same Pipeline and calls the same
    methods.
    """

    @refuse_others(
        **dict.fromkeys(("loss", "criterion"), "loss_fn"),
        **dict.fromkeys(("split_spec", "split_points"), "at"),
        mesh="group",
        chunks=" num_microbatches is the number of parts of a batch, num_chunks that of stages per rank",
        num_stages=" it is the number of ranks times num_chunks, so give that",
        checkpoint="recompute",
        optimizer=" make it from pipe.parameters(), and call its step() after pipe.step()",
        device=" move the model first: model.to(group.device)",
    )
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
        metrics: Metrics | None = None,
        seed: int = 0,
        recompute: bool | Collection[int] = False,
    ) -> None:
        """Cuts the model, keeps this rank's stages, and checks the schedule.

        Args:
            model: any nn.Module, cut as `split` says; the Parts that `split` returned; or a list with one entry per
                stage: a module, a callable that makes it, or None where another rank holds it. In a list, a tuple that
                a stage returns becomes the positional arguments of the next stage.
            group: the ranks of the pipeline.
            schedule: a name that `schedules.build` knows, or a Schedule, for `group.world_size` ranks.
            num_microbatches: number of parts that each batch is cut into. None: as many as the Schedule has.
            loss_fn: loss_fn(output, target), called for each microbatch where the last stage is.
            num_chunks: stages per rank, for a schedule given by name. None: as many as a list has entries for, else as
                `schedules.build`.
            data_parallel: the group over which equal stages average their gradients. They start from the parameters and
                buffers of its rank 0.
            at: names of the layers at which stages 1, 2, ... begin.
            example: positional inputs such as the model will get, as a tuple. Without `at`, one rank measures the
                layers with them and divides them evenly; `Pipeline.at` has the layers that it chose. If all ranks give
                it, stages with split backwards (I and W) are tried with it, stages of a list as well. Else the first
                step tries them.
            example_kwargs: keyword inputs, likewise.
            loss_reduction: "mean" if loss_fn averages over samples, "sum" if it adds them up.
            loss_weight: loss_weight(target), the weight of a microbatch in the mean, such as its number of tokens that
                loss_fn does not ignore. None: its number of samples. loss_fn is not called for weight 0.
            metrics: metrics(output, target), a dict of numbers, called like loss_fn and without gradients. `step`
                returns them on every rank, averaged (or added up) over the batch like the loss.
            seed: seed of the random numbers that stages draw, such as dropout's; see `echelon.pipeline.keyed`.
            recompute: True, or the indices of some stages: they keep only their input from forward to backward, and run
                the forward again before it. That takes less memory and a third more time.

        Raises:
            ScheduleError: the schedule's name is unknown, it has problems, or it is for another number of ranks.
            PartitionError: the model cannot be cut that way.
            InvalidArgument: `group` or `data_parallel` is not a group.
            UnsupportedOp: another argument is of the wrong type, the schedule has no backward, or (on all ranks) FSDP
                has sharded the parameters of a stage.
            CollectiveMismatch: the ranks of the group were given different schedules, or replicas different stages.
        """
        check_groups(group, data_parallel)  # checks of one rank alone, before the first exchange
        check_arguments(model, loss_fn, loss_weight, metrics, loss_reduction, seed, data_parallel)
        self.schedule = choose_schedule(schedule, group.world_size, num_microbatches, num_chunks, model, at)
        recomputed = stages_to_recompute(recompute, self.num_stages)
        self._group = agreed_group(group, self.schedule, [loss_reduction, f"recompute={recomputed}, seed={seed}"])
        # Groups of its own: a step that fails revokes them, and the caller's groups stay usable.
        self._data_parallel = None if data_parallel is None else own_group(data_parallel)
        self._objective = Objective(loss_fn, loss_reduction, loss_weight, metrics)
        self._seed = seed
        self.num_steps = 0
        """Number of training steps so far; random numbers depend on it. Set it to resume another run."""
        self._num_inferences = 0
        self._deals = Deals(self._group)
        self._times: list[list[Span]] | None = None
        self._activations: list[Activations] = []
        self._hold(agreed_parts(model, self.schedule, self._group, self._data_parallel, at, example, example_kwargs))
        self._runtime = Runtime(self.stages, self._group, self._replicas.groups, recomputed)
        self._runtime.load(self.schedule)
        self._by_hand = ManualStep(self._runtime, self._replicas)
        self._is_settled = False
        weights = self._weights  # not `self`, which the watch would keep alive
        self._idle_optimizer = IdleOptimizer(
            lambda: (each for _, each in weights.named_parameters()),
            f"rank {group.rank}: {OF_STAGES}",
            MissingZeroGrad(group.rank),
        )
        self._uneven_steps = UnevenSteps(self._group)
        self._settle_early(example, example_kwargs)

    if not TYPE_CHECKING:  # type checkers report the name themselves

        def __getattr__(self, name: str) -> NoReturn:
            raise no_attribute("a Pipeline", name, dir(type(self)), _MEANT)

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
    def group(self) -> ProcessGroup:
        """Ranks of the pipeline, in a group of its own: a step that fails revokes it."""
        return self._group

    @property
    def data_parallel(self) -> ProcessGroup | None:
        """Ranks that hold equal stages, likewise. None if there are no replicas."""
        return self._data_parallel

    @property
    def seed(self) -> int:
        """Seed of the random numbers that stages draw."""
        return self._seed

    @property
    def tied_names(self) -> Mapping[str, tuple[str, ...]]:
        """All names of each weight that several stages share, by each of the names. The same on all ranks."""
        return self._weights.tied_names

    @property
    def is_first(self) -> bool:
        """Whether this rank holds the first stage. Inputs are used on this rank only."""
        return self.schedule.placement[0] == self._group.rank

    @property
    def is_last(self) -> bool:
        """Whether this rank holds the last stage. Targets are used, and outputs returned, on this rank only."""
        return self.schedule.placement[-1] == self._group.rank

    @property
    def timeline(self) -> Timeline:
        """Timeline of the last `step` on all ranks, in seconds.

        Its memory is that of activations in bytes, with their sizes from the first step. As in `memory`, the batch
        does not count.

        Raises:
            ScheduleError: no step has been run.
        """
        if self._times is None:
            raise ScheduleError("there is no timeline yet: call step() first")
        # In bytes for the strip of memory alone: peak activations count stages, as those of a plan do.
        in_bytes = self.schedule.recorded(self._times, memory_costs(self._activations))
        counted = self.schedule.recorded(self._times)
        return replace(counted, unit="s", memory=in_bytes.memory, memory_unit="B")

    # Training and inference

    def step(self, *inputs: Value, target: Value = None, return_outputs: bool = False, **kwargs: Value) -> StepOutput:
        """Runs forward and backward of one batch, and adds the gradients into .grad. Waits for all ranks.

        Args:
            inputs: positional arguments of the first stage; used on its rank only. Other ranks pass the same or
                nothing. Tensors are cut along dim 0, other values go to every microbatch whole.
            target: target argument of loss_fn, cut likewise; used on the rank of the last stage only, as the inputs.
            return_outputs: keep the last stage's outputs.
            kwargs: keyword arguments of this rank's stages, cut likewise.

        Raises:
            SizeMismatch: there are fewer samples than microbatches, or inputs, target and keyword arguments differ in
                their number.
            CollectiveMismatch: the ranks got different samples.
            InvalidArgument: the inputs or the target are missing, or a stage of this rank does not take a keyword
                argument.
            UnsupportedOp: there is no loss_fn, gradients are off, an optimizer steps inside, or a tensor has no memory.
            NotFinite: the loss of a microbatch is NaN or infinite.
            PeerFailed: another rank failed; the message has its error.
            Timeout: a message between ranks did not come in time.
        """
        self._by_hand.forget()
        self._idle_optimizer.check()
        batch = self._training_batch(inputs, target, kwargs, return_outputs)
        if not self._idle_optimizer.has_warned:  # else the cause is known
            batch.stepped = self._uneven_steps.seen()
        self._settle(batch)
        with self._runtime.failures.told(), self._replicas.synchronizing():
            times = self._runtime.run(self.schedule, batch, self._replicas.start)
        self.num_steps += 1  # after the batch, whose random numbers it keys
        loss = self._tell(batch, times)
        metrics = None if self._objective.metrics is None else self._tell_metrics(batch)
        return StepOutput(loss, _merged(batch) if batch.outputs else None, metrics)

    def forward(self, *inputs: Value, train: bool = False, **kwargs: Value) -> Value:
        """Runs the batch forward. Returns the outputs in batch order on the rank of the last stage; None on others.

        Without gradients, batches of any size are accepted: with fewer samples than microbatches, there are as many
        microbatches as samples. Modules stay in the mode that `train` or `eval` set.

        Args:
            inputs: positional arguments of the first stage, as for `step`.
            train: keep the graph for `backward`. The outputs are then leaves: compute a loss from them, and pass their
                .grad to `backward`. The next call of `step` or `forward` drops a graph whose backward was not run.
            kwargs: keyword arguments of this rank's stages.

        Raises:
            SizeMismatch: there are no samples, or with `train` fewer than microbatches.
            CollectiveMismatch: this rank and that of the first stage got different samples.
            UnsupportedOp: a tensor has no memory of its own.
            PeerFailed, Timeout: as for `step`.
        """
        self._by_hand.forget()
        with self._runtime.failures.told():
            self._require_memory()
            self._check_inputs(inputs, kwargs, "forward()")
            samples = batch_size((inputs, kwargs), "inputs of forward()") if self.is_first else None
            if self.is_first and (not samples or (train and samples < self.num_microbatches)):
                least = self.num_microbatches if train else 1
                raise SizeMismatch(
                    f"at least {least} samples", f"{samples or 0}", "inputs of forward()", "pass a larger batch"
                )
            evidence, first = self._deals.evidence(inputs), self.schedule.placement[0]
            # Reading values of a device waits for it: only the first forward does.
            mine = evidence.inputs() if evidence.is_on_host or not self._num_inferences else UNKNOWN
        # Only the first stage sees the inputs, and all ranks must run the same number of microbatches.
        told = self._group.broadcast_object([samples, mine], src=first)
        assert isinstance(told, list)
        of_all, of_first = told
        assert isinstance(of_all, int)
        assert isinstance(of_first, int)
        with self._runtime.failures.told():
            check_same_inputs(evidence, mine, of_first, first, self._group)
        count = min(self.num_microbatches, of_all)
        if train:
            _require_gradients("forward(train=True)")
            batch = self._batch(inputs, kwargs, count, self.num_steps)
            self.num_steps += 1
            return self._by_hand.forward(self.schedule.placement, batch)
        # Numbers below 0: inference draws other random numbers than training, and does not move those of later steps.
        self._num_inferences += 1
        batch = self._batch(inputs, kwargs, count, -self._num_inferences)
        with torch.no_grad():
            self._runtime.run(forward_only(self.schedule.placement, count), batch, lambda _: None)
        return _merged(batch) if self.is_last else None

    def backward(self, grad_outputs: Value = None) -> None:
        """Runs the backward of the last `forward(train=True)`, and adds the gradients into .grad.

        Data-parallel ranks average the gradients, as in `step`.

        Args:
            grad_outputs: gradients of the outputs, in any container: one for each tensor that requires a gradient. None
                for a tensor that nothing depends on. Used on the rank of the last stage only.

        Raises:
            ScheduleError: no such forward was run before.
            SizeMismatch: a gradient has another shape or dtype than its output, or their numbers differ.
            PeerFailed, Timeout: as for `step`.
        """
        self._by_hand.backward(grad_outputs)

    def __call__(self, *inputs: Value, **kwargs: Value) -> Value:
        """Runs `forward`, for inference."""
        return self.forward(*inputs, train=False, **kwargs)

    def no_sync(self) -> AbstractContextManager[None]:
        """Inside, gradients stay local to the replica. The first step after it averages all accumulated gradients."""
        return self._replicas.no_sync()

    @refuse_others(max_grad_norm="max_norm", foreach=" it is chosen by the device: leave it out")
    def clip_grad_norm_(
        self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
    ) -> torch.Tensor:
        """Scales all gradients so that their norm over all stages is at most `max_norm`. Returns the norm before.

        Equals torch.nn.utils.clip_grad_norm_ in one process, up to rounding. Tied weights count once. Every rank must
        call it; it waits for all of them.

        Args:
            max_norm: the largest norm that is left, at least 0.
            norm_type: p of the p-norm, above 0; math.inf for the largest absolute value.
            error_if_nonfinite: raise NotFinite, in place of scaling by a norm that is NaN or infinite.

        Raises:
            InvalidArgument: `max_norm` is not a number of at least 0, or `norm_type` is no number.
            UnsupportedOp: norm_type is not above 0, or (on all ranks) a gradient is not dense or has no memory of its
                own, such as a DTensor. Nothing was scaled.
            NotFinite: with `error_if_nonfinite`, on all ranks: the norm is NaN or infinite. Nothing was scaled.
        """
        return self._weights.clip(max_norm, norm_type, error_if_nonfinite)

    def train(self, mode: bool = True) -> Pipeline:
        """Puts this rank's stages into training mode. Returns the pipeline.

        Args:
            mode: False for evaluation mode.
        """
        for stage in self.stages:
            stage.module.train(mode)
        return self

    def eval(self) -> Pipeline:
        """Puts this rank's stages into evaluation mode. Returns the pipeline."""
        return self.train(False)

    def memory(self) -> Memory:
        """Returns the peak of this rank's activations in the first step, in bytes, beside the planned peak.

        Parameters, buffers and the batch do not count: the first stage's inputs are views of the batch.

        Raises:
            ScheduleError: no step has been run.
        """
        return self._runtime.memory

    def costs(self) -> Costs:
        """Returns the costs of all stages as measured, on every rank: for `recommend`, `search` and `simulate`.

        Times are seconds, medians over the microbatches of the last `step`. Memory is bytes, of the first step. The
        transfer is the longest between two ranks; only transfers that a rank waited for count. A schedule with I and W,
        such as "zb-h1", measures them apart. Of a whole backward, half counts as I and half as W, that of stage 0
        as W, and activations as held until W. A forward that was run again counts as part of I. Data-parallel replicas
        measure each their own.

        Raises:
            ScheduleError: no step has been run, or a stage ran in overlapped steps alone.
        """
        return measured_costs(self.timeline, memory_costs(self._activations))

    # Parameters

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yields this rank's parameters under their names in the unsplit model."""
        return self._weights.named_parameters()

    def parameters(self) -> Iterator[nn.Parameter]:
        """Yields this rank's parameters.

        Raises:
            UnsupportedOp: torch.nn.utils.clip_grad_norm_ asks for them, though other ranks hold other stages.
        """
        # Its norm would be that of this rank's stages alone, and each rank would scale by another.
        if self._group.world_size > 1 and sys._getframe(1).f_code is _CLIP:
            raise UnsupportedOp(
                "torch.nn.utils.clip_grad_norm_ would take the norm of this rank's stages alone: call "
                "pipe.clip_grad_norm_(max_norm), which takes that of all stages"
            )
        yield from (parameter for _, parameter in self.named_parameters())

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Returns this rank's part of the unsplit model's state dict."""
        return self._weights.state_dict()

    def load_state_dict(self, state_dict: Mapping[str, torch.Tensor]) -> None:
        """Loads this rank's part of a state dict of the unsplit model. Ignores the entries of other stages.

        The state dict may come from any number of stages. Tensors on the meta device get memory; parameters stay the
        same objects.

        Raises:
            InvalidArgument: `state_dict` is no dict.
            KeyError: an entry of this rank's stages is missing.
            SizeMismatch: an entry has another shape than its parameter; nothing was loaded.
        """
        self._weights.load_state_dict(state_dict)

    # Inside

    def _hold(self, parts: Parts) -> None:
        """Keeps this rank's stages. Ties and replicas of their weights start equal."""
        self.at = parts.at
        """Names of the layers that stages 1, 2, ... begin with; empty for a list of stages."""
        self.stages = keep(parts, self.schedule.placement, self._group.rank)
        refuse_stages(self.stages, self._group, self._data_parallel)
        ties = agree_on_ties(find_ties(parts), self._group)
        tied = TiedWeights(ties, self.stages, self.schedule.placement, self._group)
        self._weights = Weights(self.stages, tied, self._group)
        self._has_memory = False
        self._replicas = Replicas(self.stages, tied, self._data_parallel)

    def _settle_early(self, example: Sequence[Value] | None, kwargs: Mapping[str, Value] | None) -> None:
        """Tries split backwards with the example, if all ranks have one and their stages have values."""
        # At build a trial costs no step its time. It needs values: a model on the meta device is tried in its first
        # step.
        if split_stages(self.schedule):
            is_ready = example is not None and self._weights.have_memory
            if all(self._group.all_gather_object(is_ready)):
                with self._runtime.failures.told():
                    self._check_inputs(tuple(example or ()), kwargs or {}, "example")
                self._settle(self._batch(tuple(example or ()), kwargs or {}, 1, 0))

    def _settle(self, batch: Batch) -> None:
        """Plans again, once, if the backward of a stage cannot be split."""
        if not self._is_settled:
            self.schedule, self._is_settled = self._runtime.settle(self.schedule, batch), True

    def _batch(self, inputs: tuple[Value, ...], kwargs: Mapping[str, Value], count: int, step: int) -> Batch:
        replica = 0 if self._data_parallel is None else self._data_parallel.rank
        return Batch(
            inputs=split_arguments(inputs, count) if self.is_first else None,
            targets=None,
            kwargs=split_keywords(kwargs, count),
            loss_fn=None,
            scale=None,
            keeps_outputs=True,
            key=Key(self._seed, step, replica),
        )

    def _training_batch(
        self, inputs: tuple[Value, ...], target: Value, kwargs: Mapping[str, Value], keeps_outputs: bool
    ) -> Batch:
        # A mistake on one rank is raised there and revokes the step, so that the other ranks do not wait for its
        # messages.
        with self._runtime.failures.told():
            _require_gradients("step()")
            self._require_memory()
            self._check_inputs(inputs, kwargs, "step()")
            if self.is_last:
                check_tensors(target, "target of step()")
            count = self.num_microbatches
            batch = self._batch(inputs, kwargs, count, self.num_steps)
            batch.keeps_outputs = keeps_outputs
            batch.evidence = self._deals.evidence(inputs, target)
            batch.num_kwargs = batch_size(kwargs, "keyword arguments of step()") or 0
            if self.is_first:
                if type(self.stages[0].module).forward is nn.Sequential.forward and len(inputs) > 1:
                    advice = "the target is passed as target="
                    raise SizeMismatch("1, as an nn.Sequential takes", len(inputs), "inputs of step()", advice)
                batch.num_inputs = num_samples(inputs, count, "inputs")
            if self.is_last:
                if self._objective.loss_fn is None:
                    raise UnsupportedOp("step() needs a loss: give the Pipeline loss_fn=, or use forward()")
                batch.num_targets = num_samples(target, count, "target")
                batch.loss_fn, batch.metrics = self._objective.loss_fn, self._objective.metrics
                batch.targets = split(target, count)
                batch.scale = self._objective.scale(batch.targets, self._data_parallel)
            return batch

    def _check_inputs(self, inputs: tuple[Value, ...], kwargs: Mapping[str, Value], what: str) -> None:
        if self.is_first:
            check_tensors(inputs, f"inputs of {what}")
        check_tensors(dict(kwargs), f"keyword arguments of {what}")
        for stage in self.stages if kwargs else ():
            _check_keywords(stage, kwargs)

    def _require_memory(self) -> None:
        if not self._has_memory:
            self._weights.require_memory()
            self._has_memory = True

    def _tell(self, batch: Batch, times: list[Span]) -> torch.Tensor:
        """Returns the loss on every rank, and keeps the times of all ranks for `timeline`."""
        loss = None
        if self.is_last:
            with self._runtime.failures.told():
                unread = {microbatch: loss for microbatch, loss in batch.losses.items() if not is_here(loss)}
                check_finite(unread, "gradients of it were added: set them to None before you go on")
                assert batch.scale is not None
                losses = [batch.losses[index] * batch.scale.factor(index) for index in range(self.num_microbatches)]
                loss = torch.stack(losses).sum()
                if self._data_parallel is not None:
                    self._data_parallel.all_reduce(loss)  # a sum: factors are shares of the batch of all replicas
        told = tell(self._group, self.schedule, times, batch, loss, self._runtime.activations)
        self._times, self._activations = told.times, told.activations
        self._uneven_steps.compare(told.stepped, self.parameters())
        self._weights.watch_clipping()
        return told.loss

    def _tell_metrics(self, batch: Batch) -> dict[str, float]:
        with self._runtime.failures.told():
            return tell_metrics(self._group, self._data_parallel, self.schedule.placement[-1], batch)


def _merged(batch: Batch) -> Value:
    """Merges the outputs of all microbatches in batch order, without a graph."""
    with torch.no_grad():
        return merge([batch.outputs[index] for index in range(len(batch.outputs))])


def _check_keywords(stage: Stage, kwargs: Mapping[str, Value]) -> None:
    """Raises InvalidArgument for a keyword that the stage's forward does not take."""
    forward = stage.module.forward
    known = _keywords_of(getattr(forward, "__func__", forward))
    unknown = [] if known is None else [name for name in kwargs if name not in known]
    if unknown and not stage.module._forward_pre_hooks:  # which may take it
        raise InvalidArgument(
            f"{unknown[0]} is no argument of stage {stage.index}'s forward ({type(stage.module).__name__}): leave it "
            "out; the target of loss_fn is passed as target="
        )


@functools.lru_cache(256)  # each step asks
def _keywords_of(function: Callable[..., object]) -> frozenset[str] | None:
    """Returns the arguments of a function. None: it takes any keyword."""
    parameters = inspect.signature(function).parameters
    takes_any = any(each.kind == each.VAR_KEYWORD for each in parameters.values())
    return None if takes_any else frozenset(parameters)


def _require_gradients(what: str) -> None:
    if torch.is_inference_mode_enabled() or not torch.is_grad_enabled():
        raise UnsupportedOp(
            f"{what} was called inside of torch.no_grad() or torch.inference_mode(): call it outside, or use forward()"
        )
