"""Checks that all ranks have built the same model, before any of its tensors travels."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence

import torch

from echelon.arguments import named
from echelon.backends.memory import describe
from echelon.errors import CollectiveMismatch, InvalidArgument
from echelon.group import JsonLike, ProcessGroup


def check_same_model(module: torch.nn.Module, group: ProcessGroup, options: Iterable[str]) -> None:
    """Compares names, shapes and dtypes of parameters and buffers over all ranks, in their order.

    Args:
        module: the model; its values do not matter.
        group: the ranks.
        options: further lines that must be equal on all ranks.

    Raises:
        CollectiveMismatch: on every rank, with the first difference.
    """
    check_same_lines([*options, *outline(module)], group)


def check_same_lines(lines: Sequence[str], group: ProcessGroup) -> None:
    """Compares what describes the models of all ranks, line by line.

    Raises:
        CollectiveMismatch: on every rank, with the first difference.
    """
    if group.world_size == 1:
        return
    digest = hashlib.blake2b("\n".join(lines).encode(), digest_size=16).hexdigest()
    if len(set(map(str, group.all_gather_object(digest)))) == 1:
        return
    by_rank = [_strings(value) for value in group.all_gather_object(list[JsonLike](lines))]
    raise CollectiveMismatch(first_difference(by_rank, group.ranks))


def outline(module: torch.nn.Module) -> list[str]:
    """Returns a line for each parameter and each buffer."""
    parameters = [
        f"parameter {name!r} {describe(tensor.shape, tensor.dtype)}{'' if tensor.requires_grad else ', frozen'}"
        for name, tensor in module.named_parameters()
    ]
    return parameters + [
        f"buffer {name!r} {describe(tensor.shape, tensor.dtype)}" for name, tensor in module.named_buffers()
    ]


def first_difference(by_rank: Sequence[Sequence[str]], ranks: Sequence[int]) -> str:
    """Returns a sentence about the first line in which a rank differs from the first rank.

    Args:
        by_rank: the lines of each rank; not all equal.
        ranks: what the ranks are called.
    """
    for number in range(max(map(len, by_rank))):
        found = [lines[number] if number < len(lines) else "nothing more" for lines in by_rank]
        for rank, line in zip(ranks, found, strict=True):
            if line != found[0]:
                return (
                    f"the models differ: rank {ranks[0]} has {found[0]} where rank {rank} has {line}: "
                    "build the same model with the same options on every rank"
                )
    raise AssertionError("all ranks are equal")


def _strings(value: JsonLike) -> list[str]:
    return [str(line) for line in value] if isinstance(value, list) else []


def check_module(module: object) -> None:
    """Raises InvalidArgument unless `module` is an instance of a module."""
    if isinstance(module, torch.nn.Module):
        return
    if isinstance(module, type):
        raise InvalidArgument(f"module is {named(module)}: pass an instance of it, such as {module.__name__}(...)")
    raise InvalidArgument(f"module is {named(module)}: pass the model, a torch.nn.Module")
