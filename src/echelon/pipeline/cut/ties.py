"""Parameters that are in several stages, such as an embedding that is also the head.

Every rank that holds such a stage has the parameter, and gets a part of its gradient. After each step the parts are
added up, so the same optimizer keeps the parameter the same everywhere.
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


class Place(NamedTuple):
    """Where a parameter is."""

    stage: int
    name: str
    """In the unsplit model."""


Tie: TypeAlias = tuple[Place, ...]
"""All places of one parameter, in the order of the stages."""


def find_ties(parts: Parts) -> list[Tie]:
    """Returns the parameters that are in several parts, as far as the parts are modules here."""
    places: dict[int, list[Place]] = {}
    for stage, module in enumerate(parts.modules):
        if isinstance(module, nn.Module):
            for name, parameter in module.named_parameters(remove_duplicate=False):
                places.setdefault(id(parameter), []).append(Place(stage, parts.prefixes[stage] + name))
    return [tuple(found) for found in places.values() if len({place.stage for place in found}) > 1]


def agree_on_ties(ties: Sequence[Tie], group: ProcessGroup) -> list[Tie]:
    """Returns what any rank knows to be tied: where a rank has not all stages of a list, it cannot see it itself."""
    mine = [json.dumps(tie) for tie in ties]
    merged: list[set[Place]] = []
    for theirs in group.all_gather_object(list[JsonLike](mine)):
        for text in theirs if isinstance(theirs, list) else ():
            together = {Place(stage, name) for stage, name in json.loads(str(text))}
            for other in [other for other in merged if other & together]:
                merged.remove(other)
                together |= other
            merged.append(together)
    return sorted(tuple(sorted(tie)) for tie in merged)


class _Held(NamedTuple):
    """A tied parameter that this rank holds."""

    parameter: nn.Parameter
    group: ProcessGroup | None
    """The ranks that hold it; None: this one alone."""


class TiedWeights:
    """The tied parameters of this rank."""

    def __init__(
        self, ties: Sequence[Tie], stages: Sequence[Stage], placement: Sequence[int], group: ProcessGroup
    ) -> None:
        """Makes them equal: they start as on the rank of the first stage. Every rank must call it.

        Args:
            ties: the same on all ranks.
            stages: this rank's.
            placement: the rank of each stage.
            group: the ranks of the pipeline.

        Raises:
            PartitionError: a stage has no such parameter.
        """
        self.names: dict[str, tuple[str, ...]] = {}
        """For each name of a tied parameter all its names."""
        self._held: list[_Held] = []
        self._counted_elsewhere: set[int] = set()
        mine = {stage.index: stage for stage in stages}
        for number, tie in enumerate(ties):
            names = tuple(place.name for place in tie)
            self.names |= dict.fromkeys(names, names)
            ranks = sorted({placement[place.stage] for place in tie})
            shared = group.subgroup(ranks, f"{group.name}/tied-{number}") if len(ranks) > 1 else None
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
        """All of them."""
        return [held.parameter for held in self._held]

    @property
    def groups(self) -> list[ProcessGroup]:
        """The groups whose ranks wait for this one."""
        return [held.group for held in self._held if held.group is not None]

    def is_counted_here(self, parameter: nn.Parameter) -> bool:
        """Whether this rank is the one to count it, in sums over all ranks."""
        return id(parameter) not in self._counted_elsewhere

    @contextmanager
    def adding_up(self) -> Iterator[None]:
        """Adds up, at the end, the gradients that all holders made inside; what was there before stays."""
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
    """Returns the parameter, after it was made one object in all stages of this rank."""
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
    """Returns the sum of the gradients of all ranks; None if none has one."""
    gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
    flat = torch.cat([gradient.detach().reshape(-1), gradient.new_tensor([float(parameter.grad is not None)])])
    group.all_reduce(flat)
    return flat[:-1].view(parameter.shape) if flat[-1] > 0 else None
