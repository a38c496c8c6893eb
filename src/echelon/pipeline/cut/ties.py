"""Tied weights: parameters that are in several stages, such as an embedding that is also the head.

Every rank with such a stage holds the parameter, and computes a part of its gradient. At the end of each step the parts
are summed over these ranks, so that the same optimizer keeps the parameter equal on all of them.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple, TypeAlias

import torch
from torch import nn

from echelon.data_parallel.broadcast import broadcast_tensors
from echelon.errors import PartitionError
from echelon.group.group import JsonLike, ProcessGroup
from echelon.pipeline.cut.cut import Parts
from echelon.pipeline.stage.stage import Stage
from echelon.purposes import TIED, Purpose


class ParameterPlace(NamedTuple):
    """Place of a parameter: a stage, and a name."""

    stage: int
    name: str
    """Name in the unsplit model."""


Tie: TypeAlias = tuple[ParameterPlace, ...]
"""All places of one parameter, ordered by stage."""


def find_ties(parts: Parts) -> list[Tie]:
    """Returns the parameters that are in several parts. Sees only parts that are modules on this rank.

    Raises:
        PartitionError: a BatchNorm in training is in several parts.
    """
    places: dict[int, list[ParameterPlace]] = {}
    counting: dict[int, int] = {}
    for stage, module in enumerate(parts.modules):
        if isinstance(module, nn.Module):
            for name, layer in module.named_modules():
                counts = isinstance(layer, _WITH_STATISTICS) and layer.training and layer.running_mean is not None
                if counts and (first := counting.setdefault(id(layer), stage)) != stage:
                    raise PartitionError(
                        f"{parts.prefixes[stage]}{name} ({type(layer).__name__}) is in stages {first} and {stage}, "
                        "which would each count running statistics of their own: give each stage a layer of its own"
                    )
            for name, parameter in module.named_parameters(remove_duplicate=False):
                places.setdefault(id(parameter), []).append(ParameterPlace(stage, parts.prefixes[stage] + name))
    return [tuple(found) for found in places.values() if len({place.stage for place in found}) > 1]


def agree_on_ties(ties: Sequence[Tie], group: ProcessGroup) -> list[Tie]:
    """Merges the ties that the ranks have found, and returns them on every rank. Waits for all ranks.

    A rank that does not have all stages of a list cannot see all ties itself.
    """
    mine = [json.dumps(tie) for tie in ties]
    merged: list[set[ParameterPlace]] = []
    for theirs in group.all_gather_object(list[JsonLike](mine)):
        for text in theirs if isinstance(theirs, list) else ():
            # Ties with a place in common are one: two ranks may each know a part of it.
            together = {ParameterPlace(stage, name) for stage, name in json.loads(str(text))}
            for other in [other for other in merged if other & together]:
                merged.remove(other)
                together |= other
            merged.append(together)
    return sorted(tuple(sorted(tie)) for tie in merged)  # in one order everywhere: ranks then make groups of them


_WITH_STATISTICS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)


class _Held(NamedTuple):
    """Tied parameter that this rank holds."""

    parameter: nn.Parameter
    group: ProcessGroup | None
    """Ranks that hold it. None if this rank alone does."""


class TiedWeights:
    """Tied parameters of this rank, and the sums of their gradients."""

    def __init__(
        self, ties: Sequence[Tie], stages: Sequence[Stage], placement: Sequence[int], group: ProcessGroup
    ) -> None:
        """Makes them equal by broadcasts from the rank of their first stage. Every rank must call it.

        Args:
            ties: ties of all ranks, the same everywhere.
            stages: this rank's stages.
            placement: the rank of each stage.
            group: the ranks of the pipeline.

        Raises:
            PartitionError: a stage has no parameter of this name.
        """
        self.names: dict[str, tuple[str, ...]] = {}
        """All names of a tied parameter, by each of them."""
        self._held: list[_Held] = []
        self._counted_elsewhere: set[int] = set()
        mine = {stage.index: stage for stage in stages}
        for number, tie in enumerate(ties):
            names = tuple(place.name for place in tie)
            self.names |= dict.fromkeys(names, names)
            ranks = sorted({placement[place.stage] for place in tie})
            # Every rank of the pipeline has to make the group, members or not.
            shared = group.subgroup(ranks, f"{group.name}/tied-{number}") if len(ranks) > 1 else None
            if shared is not None:
                shared.backend.flight_recorder.serve(shared.context, Purpose(TIED, group.name))
            if group.rank in ranks:
                parameter = _joined([(mine[place.stage], place.name) for place in tie if place.stage in mine])
                self._held.append(_Held(parameter, shared))
                first = placement[tie[0].stage]
                if shared is not None and not parameter.is_meta:
                    broadcast_tensors([parameter], shared, src=ranks.index(first))
                if group.rank != first:
                    self._counted_elsewhere.add(id(parameter))

    @property
    def parameters(self) -> list[nn.Parameter]:
        """Tied parameters that this rank holds."""
        return [held.parameter for held in self._held]

    @property
    def groups(self) -> list[ProcessGroup]:
        """Groups whose ranks wait for this one in a step; a failure revokes them."""
        return [held.group for held in self._held if held.group is not None]

    def is_counted_here(self, parameter: nn.Parameter) -> bool:
        """Whether sums over all ranks count the parameter here: true on one of its ranks."""
        return id(parameter) not in self._counted_elsewhere

    @contextmanager
    def adding_up(self) -> Iterator[None]:
        """At its end, sums the gradients that were made inside over the ranks of each parameter. Waits for them."""
        # Gradients of earlier steps were summed already. They are put aside and added to the sum, so they count once.
        shared = [(held.parameter, held.group) for held in self._held if held.group is not None]
        before = [parameter.grad for parameter, _ in shared]
        for parameter, _ in shared:
            parameter.grad = None
        try:
            yield
            for parameter, group in shared:
                parameter.grad = _sum(parameter, group)
        finally:
            for (parameter, _), earlier in zip(shared, before, strict=True):
                if earlier is not None:
                    parameter.grad = earlier if parameter.grad is None else earlier.add_(parameter.grad)


def _joined(places: Sequence[tuple[Stage, str]]) -> nn.Parameter:
    """Returns the tied parameter, as one object in all stages of this rank."""
    found: nn.Parameter | None = None
    for stage, name in places:
        path, _, last = name.removeprefix(stage.prefix).rpartition(".")
        try:
            owner = stage.module.get_submodule(path)
            parameter = dict(owner.named_parameters(recurse=False))[last]
        except (AttributeError, KeyError) as error:
            raise PartitionError(
                f"another rank has a parameter in two stages and calls it {name} in stage {stage.index}, which has "
                "none of this name: give all ranks the same stages"
            ) from error
        if found is None:
            found = parameter
        elif parameter is not found:
            setattr(owner, last, found)
    assert found is not None
    return found


def _sum(parameter: nn.Parameter, group: ProcessGroup) -> torch.Tensor | None:
    """Returns the sum of the gradients of all ranks. None if no rank has a gradient."""
    gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
    # One element more counts the ranks with a gradient, which takes no message of its own.
    flat = torch.cat([gradient.detach().reshape(-1), gradient.new_tensor([float(parameter.grad is not None)])])
    group.all_reduce(flat)
    return flat[:-1].view(parameter.shape) if flat[-1] != 0 else None
