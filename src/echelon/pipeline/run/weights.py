"""Parameters of the stages of one rank: state dicts, clipping, reduction over replicas, and watches on optimizers."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial, reduce
from numbers import Real

import torch
from torch import nn

from echelon._torch_private.tensors import version_of
from echelon.arguments import named, shown
from echelon.backends.admission import check_values, stands_for_device
from echelon.data_parallel.broadcast import broadcast_tensors, check_same_lines, described
from echelon.data_parallel.reducer import GradientReducer
from echelon.errors import InvalidArgument, NotFinite, SizeMismatch, UnsupportedOp
from echelon.group.group import ProcessGroup
from echelon.pipeline.cut.ties import TiedWeights
from echelon.pipeline.run.clipped_alone import ClippedAlone
from echelon.pipeline.stage.stage import Stage

_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
"""Types of a norm of gradients."""


class UnevenSteps:
    """Watch for an optimizer's step that some ranks make and others skip, as torch's GradScaler does at an overflow.

    The stages would go on with parameters of different steps. An optimizer writes to parameters in place, which counts
    in their versions. A rank whose parameters had no gradients, such as one with a frozen stage, has nothing to step.
    """

    _NOTHING, _SKIPPED, _MADE = range(3)

    def __init__(self, group: ProcessGroup) -> None:
        """Begins to watch. `group`: the ranks of the pipeline."""
        self._group = group
        self._before: list[tuple[nn.Parameter, int]] = []
        """Parameters that had gradients after the last step of the pipeline, with their versions then."""
        self._has_warned = False

    def seen(self) -> int:
        """Returns a code for the steps of this rank's optimizers since the last step of the pipeline, for `compare`."""
        if not self._before:
            return self._NOTHING
        return self._MADE if any(version_of(each) != version for each, version in self._before) else self._SKIPPED

    def compare(self, of_ranks: Sequence[int], parameters: Iterable[nn.Parameter]) -> None:
        """Warns once if other ranks have made a step that this one has skipped. Call it after a step of the pipeline.

        Args:
            of_ranks: the result of `seen` on each rank.
            parameters: this rank's parameters.
        """
        rank = self._group.rank
        if of_ranks[rank] == self._SKIPPED and self._MADE in of_ranks and not self._has_warned:
            self._has_warned = True
            here, there = self._group.ranks[rank], self._group.ranks[of_ranks.index(self._MADE)]
            warnings.warn(
                f"the optimizer of rank {there} made a step that rank {here} skipped, so their stages do not fit any "
                "more: in float16, use echelon.amp.GradScaler(group), whose ranks skip the same steps; if intended, "
                f"freeze the parameters of rank {here}",
                stacklevel=3,
            )
        self._before = [
            (each, version_of(each)) for each in parameters if each.grad is not None and not each.is_inference()
        ]


class _Planned:
    """Reducer of some parameters over replicas, and the parameters that it was planned for."""

    def __init__(self, named: Callable[[], list[tuple[str, nn.Parameter]]], data_parallel: ProcessGroup) -> None:
        """Makes the reducer. Blocks until all replicas have.

        Args:
            named: returns the present parameters by name, frozen ones too.
            data_parallel: the replicas.
        """
        self._named = named
        self._data_parallel = data_parallel
        self._known: set[int] = set()
        self._reduced: list[nn.Parameter] = []
        self.reducer = GradientReducer((), data_parallel)
        self.update()

    def update(self) -> None:
        """Broadcasts new parameters from rank 0, and plans the reducer anew if there is more to reduce.

        Blocks if so; every replica must do the same.

        Raises:
            CollectiveMismatch: names, shapes, dtypes or orders in memory differ between replicas.
        """
        # One on the meta device counts as new once it has memory.
        named = [(name, parameter) for name, parameter in self._named() if not parameter.is_meta]
        if late := [parameter for _, parameter in named if id(parameter) not in self._known]:
            lines = [f"parameter {name!r} {described(parameter)}" for name, parameter in named]
            check_same_lines(lines, self._data_parallel)
            broadcast_tensors(late, self._data_parallel)
            self._known = {id(parameter) for _, parameter in named}
        before = set(map(id, self._reduced))
        if any(parameter.requires_grad and id(parameter) not in before for _, parameter in named):
            trained = [(name, one) for name, one in named if one.requires_grad or id(one) in before]
            self._reduced = [parameter for _, parameter in trained]
            self.reducer.plan(trained)


def _untied(stage: Stage, tied: Collection[int]) -> list[tuple[str, nn.Parameter]]:
    return [(name, parameter) for name, parameter in stage.module.named_parameters() if id(parameter) not in tied]


class Replicas:
    """Reductions that keep gradients equal on all ranks with the same weights: replicas, and ties.

    Strategy. The gradients of a stage are averaged over its replicas, overlapped with the computation of other stages,
    once its last backward is done. Gradients of tied weights are complete only when all stages are: they are reduced at
    the end. Every rank makes and runs the same reductions in the same order, so none waits for ever. A step that fails
    revokes them on all ranks (see `Runtime`).

    Each step first looks for parameters that are new, or were frozen until then. A parameter that has been trained is
    reduced for good: frozen again, it may still have gradients that no reduction has reached.
    """

    def __init__(self, stages: Sequence[Stage], ties: TiedWeights, data_parallel: ProcessGroup | None) -> None:
        """Broadcasts the parameters and buffers of rank 0 to all replicas, and plans the reductions.

        Args:
            stages: this rank's stages.
            ties: their tied weights.
            data_parallel: the ranks that hold equal stages; None: there are no replicas.
        """
        self._ties = ties
        self._data_parallel = data_parallel
        self._reducers: dict[int, GradientReducer] = {}
        self._of_ties: GradientReducer | None = None
        self._planned: list[_Planned] = []
        self._synchronizes = True
        if data_parallel is None or data_parallel.world_size == 1:
            return
        # Tied weights get a reducer of their own: a stage's reduction starts before their gradients are complete.
        tied = set(map(id, ties.parameters))
        for stage in stages:
            broadcast_tensors([buffer for buffer in stage.module.buffers() if not buffer.is_meta], data_parallel)
            self._planned.append(_Planned(partial(_untied, stage, tied), data_parallel))
            self._reducers[stage.index] = self._planned[-1].reducer
        if ties.parameters:
            self._planned.append(
                _Planned(lambda: [(f"tied {i}", one) for i, one in enumerate(ties.parameters)], data_parallel)
            )
            self._of_ties = self._planned[-1].reducer

    @property
    def groups(self) -> list[ProcessGroup]:
        """Groups whose ranks wait for this one in a step; a failure revokes them."""
        reducers = [*self._reducers.values(), *([] if self._of_ties is None else [self._of_ties])]
        own = [] if self._data_parallel is None else [self._data_parallel]
        return own + [group for reducer in reducers for group in reducer.groups] + self._ties.groups

    def start(self, stage: int) -> None:
        """Starts to average the gradients of a stage over its replicas, unless inside of `no_sync`. Does not wait."""
        if self._synchronizes and (reducer := self._reducers.get(stage)):
            reducer.start()

    @contextmanager
    def synchronizing(self) -> Iterator[None]:
        """Takes in parameters that are new or no longer frozen. At its end, waits until all gradients are reduced."""
        for planned in self._planned:
            planned.update()
        with self._ties.adding_up():
            yield
        # Ties first: a replica adds up its own gradients before they are averaged over replicas.
        if self._synchronizes:
            for reducer in self._reducers.values():
                reducer.finish()
            if self._of_ties is not None:
                self._of_ties.reduce()

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Inside, gradients stay local to the replica. The first step after it averages all accumulated gradients."""
        before, self._synchronizes = self._synchronizes, False
        try:
            yield
        finally:
            self._synchronizes = before


class Weights:
    """Parameters of this rank's stages, under the names of the unsplit model: saved, loaded and clipped."""

    def __init__(self, stages: Sequence[Stage], ties: TiedWeights, group: ProcessGroup) -> None:
        """Takes the stages; nothing is copied.

        Args:
            stages: this rank's stages.
            ties: their tied weights.
            group: the ranks of the pipeline.
        """
        self._stages = stages
        self._ties = ties
        self._group = group
        self._clipped_alone = ClippedAlone(group.ranks[group.rank], stages) if group.world_size > 1 else None

    def watch_clipping(self) -> None:
        """Warns, in the next step of an optimizer, if gradients were clipped by the norm of these stages alone."""
        if self._clipped_alone is not None:
            self._clipped_alone.on_step()

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yields this rank's parameters, each once, under their names in the unsplit model."""
        seen: set[int] = set()
        for stage in self._stages:
            for name, parameter in stage.module.named_parameters():
                if id(parameter) not in seen:
                    seen.add(id(parameter))
                    yield stage.prefix + name, parameter

    @property
    def tied_names(self) -> Mapping[str, tuple[str, ...]]:
        """All names of each tied weight, by each of them."""
        return self._ties.names

    @property
    def have_memory(self) -> bool:
        """Whether no parameter or buffer is on the meta device."""
        modules = [stage.module for stage in self._stages]
        return not any(tensor.is_meta for module in modules for tensor in (*module.parameters(), *module.buffers()))

    def require_memory(self) -> None:
        """Checks that all parameters and buffers have values.

        Raises:
            UnsupportedOp: a parameter or a buffer is on the meta device.
        """
        for stage in self._stages:
            for name, tensor in (*stage.module.named_parameters(), *stage.module.named_buffers()):
                if tensor.is_meta:
                    raise UnsupportedOp(
                        f"{stage.prefix}{name} is on the meta device, without values: call load_state_dict() first; "
                        "for a buffer that is not saved, make its module outside of the meta device"
                    )

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Returns this rank's part of the unsplit model's state dict."""
        return {
            stage.prefix + name: value for stage in self._stages for name, value in stage.module.state_dict().items()
        }

    def load_state_dict(self, state_dict: Mapping[str, torch.Tensor]) -> None:
        """Loads this rank's part of a state dict of the unsplit model. Ignores the entries of other stages.

        Raises:
            InvalidArgument: `state_dict` is no dict.
            KeyError: an entry of this rank's stages is missing.
            SizeMismatch: an entry has another shape than its parameter; nothing was loaded.
        """
        if not isinstance(state_dict, Mapping):
            raise InvalidArgument(f"state_dict is {named(state_dict)}: give a dict of tensors by name")
        # All names and shapes are checked before the first tensor changes, so a refused state dict leaves no mixture.
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
            give_memory(stage.module, own)
            stage.module.load_state_dict(own)

    def clip(self, max_norm: float, norm_type: float, error_if_nonfinite: bool) -> torch.Tensor:
        """Scales all gradients so that their norm over all stages is at most `max_norm`. Returns the norm before.

        Raises:
            InvalidArgument: `max_norm` is not a number of at least 0, or `norm_type` is no number.
            UnsupportedOp: norm_type is not above 0, or (on all ranks) a gradient has no memory of its own. Nothing was
                scaled.
            NotFinite: with `error_if_nonfinite`: the norm is NaN or infinite. Nothing was scaled.
        """
        # A limit below 0 would turn all gradients round, and nan would spread to them.
        if not isinstance(max_norm, Real) or not float(max_norm) >= 0:
            raise InvalidArgument(f"max_norm={shown(max_norm)}: give a number of at least 0, such as 1.0")
        if not isinstance(norm_type, Real | str):
            raise InvalidArgument(f"norm_type={shown(norm_type)}: give a number above 0, or inf")
        max_norm, (norm, dtype) = float(max_norm), self._norm(float(norm_type))
        if self._clipped_alone is not None:
            self._clipped_alone.end()
        if error_if_nonfinite and not norm.isfinite():
            raise NotFinite(
                f"the norm of all gradients is {norm.item()}: leave this step out, or lower the learning rate; nothing "
                "was scaled"
            )
        # 1e-6 as in torch.nn.utils.clip_grad_norm_.
        factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)  # NaN spreads to all gradients, as in torch
        if factor != 1.0:
            with torch.no_grad():
                for _, parameter in self.named_parameters():
                    if parameter.grad is not None:
                        parameter.grad.mul_(factor.item())
        return norm.to(dtype)

    def _norm(self, norm_type: float) -> tuple[torch.Tensor, torch.dtype]:
        """Returns the norm of all gradients on every rank, and their common dtype; a tied weight counts once."""
        if not norm_type > 0:
            raise UnsupportedOp(f"norm_type={norm_type}: give a number above 0, or inf")
        problem = self._gradient_problem()
        gradients = [
            parameter.grad.detach()
            for _, parameter in self.named_parameters()
            if problem is None and parameter.grad is not None and self._ties.is_counted_here(parameter)
        ]
        norms = [torch.linalg.vector_norm(_precise(gradient), norm_type).cpu() for gradient in gradients]
        mine = torch.stack(norms) if norms else torch.zeros(1, dtype=torch.float64, device="cpu")
        is_largest = norm_type == float("inf")
        part = mine.max() if is_largest else mine.pow(norm_type).sum()
        # Problems travel with the norm, since a rank that raised alone would leave the others in the all_reduce.
        own = [any(gradient.dtype.to_real() == dtype for gradient in gradients) for dtype in _DTYPES]
        told = torch.cat([part[None], torch.tensor([problem is not None, *own], dtype=part.dtype, device="cpu")])
        total, num_problems, *of_dtypes = self._group.all_reduce(told, op="max" if is_largest else "sum").unbind()
        if problem is not None:
            raise problem
        is_known = not stands_for_device(told)
        if is_known and num_problems:
            raise UnsupportedOp(
                "clip_grad_norm_: another rank has a gradient without memory of its own, such as a DTensor, and says "
                "which: nothing was scaled"
            )
        having = [dtype for dtype, number in zip(_DTYPES, of_dtypes if is_known else own, strict=True) if number]
        dtype = reduce(torch.promote_types, having) if having else torch.get_default_dtype()
        return total if is_largest else total.pow(1.0 / norm_type), dtype

    def _gradient_problem(self) -> UnsupportedOp | None:
        """Returns the error for the first gradient without memory of its own. None if there is none."""
        for name, parameter in self.named_parameters():
            if parameter.grad is not None:
                try:
                    check_values(parameter.grad, f"clip_grad_norm_, the gradient of {name},")
                except UnsupportedOp as error:
                    return error
        return None

    def _find(self, name: str, state_dict: Mapping[str, torch.Tensor]) -> torch.Tensor | None:
        """Returns an entry. A tied weight is found by any of its names: some formats save only one."""
        names = (name, *self._ties.names.get(name, ()))
        return next((state_dict[one] for one in names if one in state_dict), None)


def _precise(gradient: torch.Tensor) -> torch.Tensor:
    return gradient.to(torch.complex128 if gradient.is_complex() else torch.float64)


def give_memory(module: nn.Module, values: Mapping[str, torch.Tensor | None]) -> None:
    """Gives tensors on the meta device memory on the device of their value. Parameters stay the same objects."""
    for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
        value = values.get(name)
        if tensor.is_meta and value is not None:
            empty = torch.empty_like(tensor, device=value.device)
            if isinstance(tensor, nn.Parameter):
                empty = nn.Parameter(empty, requires_grad=tensor.requires_grad)
            # Swapped in place: an optimizer may already hold the parameter.
            torch.utils.swap_tensors(tensor, empty)  # type: ignore[no-untyped-call]
