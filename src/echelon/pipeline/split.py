"""Cuts a model into the stages of a pipeline, and keeps those of this rank."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import nn

from echelon.errors import PartitionError
from echelon.pipeline.partition import partition
from echelon.pipeline.stage import Stage

StageMaker = nn.Module | Callable[[], nn.Module] | None
"""An entry of a list of stages: the module, what makes it, or None where another rank holds it."""


def cut(
    model: nn.Sequential | Sequence[StageMaker], placement: Sequence[int], rank: int, at: Sequence[str] | None = None
) -> list[Stage]:
    """Returns the stages that `rank` holds.

    Args:
        model: an nn.Sequential, cut between its layers; or one entry per stage.
        placement: the rank of each stage.
        rank: this one.
        at: names of the layers of an nn.Sequential that begin a stage, all but the first; None: so that the stage with
        the
            most parameters has as few as possible.

    Raises:
        PartitionError: there are fewer layers than stages, a name is not a layer, or a parameter would be in two
        stages.
    """
    if isinstance(model, nn.Sequential):
        return _cut_sequential(model, placement, rank, at)
    if isinstance(model, nn.Module):
        raise PartitionError(
            f"a {type(model).__name__} cannot be cut: pass an nn.Sequential, or a list with one module per stage"
        )
    if at is not None:
        raise PartitionError("at= names layers of an nn.Sequential; a list of stages is cut already: leave it out")
    if len(model) != len(placement):
        raise PartitionError(
            f"{len(model)} stages were given, but the schedule has {len(placement)}: pass one entry per stage "
            "(num_ranks x num_chunks)"
        )
    return [
        Stage(index, _make(entry, index, rank), f"{index}.", spreads=True)
        for index, entry in enumerate(model)
        if placement[index] == rank
    ]


def _make(entry: StageMaker, index: int, rank: int) -> nn.Module:
    module = entry if entry is None or isinstance(entry, nn.Module) else entry()
    if not isinstance(module, nn.Module):
        raise PartitionError(
            f"stage {index} is held by rank {rank}, but its entry gives {type(module).__name__}: "
            "pass a module, or a callable that returns one"
        )
    return module


def _cut_sequential(model: nn.Sequential, placement: Sequence[int], rank: int, at: Sequence[str] | None) -> list[Stage]:
    names = [name for name, _ in model.named_modules(remove_duplicate=False) if name and "." not in name]
    if len(names) < len(placement):
        raise PartitionError(
            f"{len(names)} layers cannot make {len(placement)} stages: use at most {len(names)} stages, or more layers"
        )
    begins = _balanced(model, len(placement)) if at is None else _named(names, len(placement), at)
    ends = [*begins[1:], len(names)]
    modules = [nn.Sequential() for _ in placement]
    for module, begin, end in zip(modules, begins, ends, strict=True):
        for name in names[begin:end]:
            module.add_module(name, model.get_submodule(name))
    _refuse_tied(modules)
    return [Stage(index, modules[index]) for index in range(len(placement)) if placement[index] == rank]


def _balanced(model: nn.Sequential, num_stages: int) -> list[int]:
    """Returns where stages begin so that the largest has as few parameters as possible."""
    costs = [1 + sum(parameter.numel() for parameter in layer.parameters()) for layer in model]
    return [layers[0] for layers in partition(costs, num_stages).stages]


def _named(names: list[str], num_stages: int, at: Sequence[str]) -> list[int]:
    unknown = [name for name in at if name not in names]
    if unknown:
        raise PartitionError(f"at= names {', '.join(unknown)}, but the layers are {', '.join(names)}")
    begins = [0, *(names.index(name) for name in at)]
    if len(begins) != num_stages or begins != sorted(set(begins)):
        raise PartitionError(
            f"at={list(at)} makes {len(begins)} stages, but the schedule has {num_stages}: "
            f"name the first layers of stages 1 to {num_stages - 1}, in order"
        )
    return begins


def _refuse_tied(modules: Sequence[nn.Module]) -> None:
    """A parameter in two stages would get two gradients that nobody adds."""
    holder: dict[int, tuple[int, str]] = {}
    for index, module in enumerate(modules):
        for name, parameter in module.named_parameters():
            first, first_name = holder.setdefault(id(parameter), (index, name))
            if first != index:
                raise PartitionError(
                    f"{name} of stage {index} is the same parameter as {first_name} of stage {first}: "
                    "use one parameter each, or cut so that both are in one stage"
                )
