"""The parameters of the stages that one rank holds, under the names of the unsplit model."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from numbers import Real
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

from echelon.arguments import shown
from echelon.backends.admission import check_values
from echelon.data_parallel.broadcast import broadcast_tensors
from echelon.data_parallel.reducer import GradientReducer
from echelon.errors import InvalidArgument, NotFinite, SizeMismatch, UnsupportedOp
from echelon.group.group import ProcessGroup
from echelon.pipeline.cut.ties import TiedWeights
from echelon.pipeline.stage.stage import Stage

# Warning about an optimizer that was made of other parameters than those of this rank's stages.
#
# Such an optimizer, made of a model of which the rank trains a copy or stages built anew, steps without an error and
# changes nothing. It is recognised by a step in which no parameter had a gradient, so a second model that trains
# beside the pipeline raises no alarm.


class IdleOptimizer:
    """Watches the steps of all optimizers until one has updated a parameter of this rank, or the warning is out."""

    def __init__(self, rank: int, parameters: Callable[[], Iterable[tuple[str, nn.Parameter]]]) -> None:
        """Begins to watch.

        Args:
            rank: named in the warning.
            parameters: returns the parameters of this rank's stages by name; asked each time, as they may be replaced.
        """
        self._rank = rank
        self._parameters = parameters
        self._is_done = False
        self._idle = ""
        """The class of an optimizer that made a step without a gradient."""
        watch = weakref.ref(self)

        def after_step(optimizer: Optimizer, *_: Any) -> None:
            if not torch.compiler.is_compiling() and (watching := watch()):
                watching._note(optimizer)

        self._stop = weakref.finalize(self, register_optimizer_step_post_hook(after_step).remove)

    def check(self) -> None:
        """Warns if an optimizer has made a step without gradients while this rank's parameters have some."""
        if self._idle and not self._is_done and any(each.grad is not None for _, each in self._parameters()):
            self._is_done = True
            warnings.warn(
                f"rank {self._rank}: a step of {self._idle} changed no parameter of this rank's stages, and none of "
                "its own had a gradient: give the optimizer pipe.parameters(), not those of another model",
                stacklevel=3,
            )
        if self._is_done:
            self._stop()  # here, as torch goes through its hooks while `_note` runs; from now on a step costs nothing

    def _note(self, optimizer: Optimizer) -> None:
        if self._is_done:
            return
        stepped = [each for group in optimizer.param_groups for each in group["params"]]
        own = {id(parameter) for _, parameter in self._parameters()}
        if any(id(each) in own for each in stepped):
            self._is_done = True
        elif all(each.grad is None for each in stepped):
            self._idle = type(optimizer).__name__


# The gradients of a pipeline's stages, kept equal on all ranks that hold the same weights.
#
# Strategy. The gradients of a stage are averaged over its replicas beside the computation, from when its last backward
# is done; tied weights, whose gradients are complete only when all stages are, at the end. Every rank makes and runs
# the same reductions in the same order, so none waits for ever; a step that fails ends them on all ranks (see
# `Runtime`).


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


class Weights:
    """Names, saves, loads and clips what the stages of this rank hold."""

    def __init__(self, stages: Sequence[Stage], ties: TiedWeights, group: ProcessGroup) -> None:
        """Looks at the stages; nothing is copied.

        Args:
            stages: this rank's.
            ties: their tied weights.
            group: the ranks of the pipeline.
        """
        self._stages = stages
        self._ties = ties
        self._group = group

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yields this rank's parameters, each once, under their names in the unsplit model."""
        seen: set[int] = set()
        for stage in self._stages:
            for name, parameter in stage.module.named_parameters():
                if id(parameter) not in seen:
                    seen.add(id(parameter))
                    yield stage.prefix + name, parameter

    @property
    def have_memory(self) -> bool:
        """Whether none is on the meta device."""
        modules = [stage.module for stage in self._stages]
        return not any(tensor.is_meta for module in modules for tensor in (*module.parameters(), *module.buffers()))

    def require_memory(self) -> None:
        """Refuses to run what has no values.

        Raises:
            UnsupportedOp: a parameter or a buffer is on the meta device.
        """
        for stage in self._stages:
            for name, tensor in (*stage.module.named_parameters(), *stage.module.named_buffers()):
                if tensor.is_meta:
                    raise UnsupportedOp(
                        f"{stage.prefix}{name} is on the meta device, without values: call load_state_dict() first; a "
                        "buffer that is not saved has to be set by hand"
                    )

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Returns this rank's part of the unsplit model's state dict."""
        return {
            stage.prefix + name: value for stage in self._stages for name, value in stage.module.state_dict().items()
        }

    def load_state_dict(self, state_dict: Mapping[str, torch.Tensor]) -> None:
        """Loads this rank's part of a state dict of the unsplit model; the other stages' entries are passed over.

        Raises:
            KeyError: an entry of this rank's stages is missing.
            SizeMismatch: a parameter has another shape there; nothing was loaded.
        """
        found = {name: self._find(name, state_dict) for name in self.state_dict()}
        missing = sorted(name for name, value in found.items() if value is None)
        if missing:
            raise KeyError(
                f"the state dict has no {', '.join(missing)}: give that of the whole model, or of these stages"
            )
        for name, parameter in self.named_parameters():
            value = found.get(name)
            if isinstance(value, torch.Tensor) and value.shape != parameter.shape:
                raise SizeMismatch(
                    list(parameter.shape), list(value.shape), f"shape of {name}", "load a state dict of the same model"
                )
        for stage in self._stages:
            own = {name: found[stage.prefix + name] for name in stage.module.state_dict()}
            _give_memory(stage.module, own)
            stage.module.load_state_dict(own)

    def clip(self, max_norm: float, norm_type: float, error_if_nonfinite: bool) -> torch.Tensor:
        """Scales all gradients so that their norm over all stages is at most `max_norm`; returns what it was.

        Raises:
            InvalidArgument: `max_norm` is not a number of at least 0, or `norm_type` is no number.
            UnsupportedOp: there is no such norm, or on all ranks, a gradient has no memory of its own; nothing was
                scaled.
            NotFinite: the norm is not, and that is to be an error; nothing was scaled.
        """
        # A limit below 0 would turn all gradients round, and nan would spread to them.
        if not isinstance(max_norm, Real) or not float(max_norm) >= 0:
            raise InvalidArgument(f"max_norm={shown(max_norm)}: give a number of at least 0, such as 1.0")
        if not isinstance(norm_type, Real | str):
            raise InvalidArgument(f"norm_type={shown(norm_type)}: give a number above 0, or inf")
        norm = self._norm(float(norm_type))
        if error_if_nonfinite and not norm.isfinite():
            raise NotFinite(
                f"the norm of all gradients is {norm.item()}: leave this step out, or lower the learning rate; nothing "
                "was scaled"
            )
        factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)  # one that is no number spreads, as in torch
        if factor != 1.0:
            with torch.no_grad():
                for _, parameter in self.named_parameters():
                    if parameter.grad is not None:
                        parameter.grad.mul_(factor.item())
        return norm

    def _norm(self, norm_type: float) -> torch.Tensor:
        """Returns the norm of all gradients, those of tied weights counted once."""
        if not norm_type > 0:
            raise UnsupportedOp(f"norm_type={norm_type}: give a number above 0, or inf")
        problem = self._gradient_problem()
        norms = [
            torch.linalg.vector_norm(_precise(parameter.grad.detach()), norm_type).cpu()
            for _, parameter in self.named_parameters()
            if problem is None and parameter.grad is not None and self._ties.is_counted_here(parameter)
        ]
        mine = torch.stack(norms) if norms else torch.zeros(1, dtype=torch.float64, device="cpu")
        is_largest = norm_type == float("inf")
        part = mine.max() if is_largest else mine.pow(norm_type).sum()
        told = torch.stack([part, torch.tensor(float(problem is not None), dtype=part.dtype, device="cpu")])
        total, num_problems = self._group.all_reduce(told, op="max" if is_largest else "sum").unbind()
        if problem is not None:
            raise problem
        if num_problems:
            raise UnsupportedOp(
                "clip_grad_norm_: another rank has a gradient without memory of its own, such as a DTensor, and says "
                "which: nothing was scaled"
            )
        return total if is_largest else total.pow(1.0 / norm_type)

    def _gradient_problem(self) -> UnsupportedOp | None:
        """Returns the error for a gradient whose norm cannot be taken here; all ranks are to raise one then."""
        for name, parameter in self.named_parameters():
            if parameter.grad is not None:
                try:
                    check_values(parameter.grad, f"clip_grad_norm_, the gradient of {name},")
                except UnsupportedOp as error:
                    return error
        return None

    def _find(self, name: str, state_dict: Mapping[str, torch.Tensor]) -> torch.Tensor | None:
        """Returns an entry, of a tied weight by any of its names: some formats save only one."""
        names = (name, *self._ties.names.get(name, ()))
        return next((state_dict[one] for one in names if one in state_dict), None)


def _precise(gradient: torch.Tensor) -> torch.Tensor:
    return gradient.to(torch.complex128 if gradient.is_complex() else torch.float64)


def _give_memory(module: nn.Module, values: Mapping[str, torch.Tensor | None]) -> None:
    """Gives what is on the meta device memory where its value is; parameters stay the objects that they are."""
    for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
        value = values.get(name)
        if tensor.is_meta and value is not None:
            empty = torch.empty_like(tensor, device=value.device)
            if isinstance(tensor, nn.Parameter):
                empty = nn.Parameter(empty, requires_grad=tensor.requires_grad)
            torch.utils.swap_tensors(tensor, empty)  # type: ignore[no-untyped-call]
