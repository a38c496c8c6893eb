"""Values of a manifest that all ranks share, checked before they are used."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from echelon.checkpoint.objects.model import Coordinates
from echelon.checkpoint.objects.param_groups import ParamGroup
from echelon.checkpoint.state import Json
from echelon.data_parallel.reducer import Learned
from echelon.errors import CheckpointError


@dataclass(frozen=True)
class Progress:
    """State of a model's wrapper."""

    num_steps: int | None = None
    """Steps of a pipeline."""
    learned: Learned | None = None
    """Learned order of gradients."""
    # A checkpoint without it is of a job that begins by learning it.
    usual_samples: float = 0.0


@dataclass(frozen=True)
class Contents:
    """Values of a manifest that all ranks share."""

    aliases: dict[str, str]
    """Name of a tied weight, by its other names."""
    models: dict[str, list[str]]
    """Names of the tensors of each model, by its prefix."""
    progress: dict[str, Progress]
    """By the prefix of the model."""
    kinds: dict[str, str]
    """Names of the classes of optimizers and gradient hooks, by their section."""
    groups: dict[str, list[ParamGroup]]
    """Param groups of each optimizer, by its section."""
    values: dict[str, Json]
    """Encoded values of optimizers, by the name under which a tensor would be stored."""
    shared: dict[str, Json]
    """Encoded values of other objects, by name."""
    extra_state: dict[str, Json]
    """Encoded values of `Module.get_extra_state`, by their name in the state dict."""
    places: list[Coordinates]
    """Of each rank that saved."""

    @property
    def num_dp(self) -> int:
        """Number of data-parallel ranks that saved."""
        return self.places[0].num_dp


def contents_of(step: int, data: Mapping[str, Any], num_ranks: int) -> Contents:
    """Returns the values that all ranks share.

    Args:
        step: the step, for errors.
        data: the values as the manifest has them.
        num_ranks: number of ranks that saved.

    Raises:
        CheckpointError: no program of this library can have written them.
    """

    def checked(name: str, test: Callable[[Any], bool]) -> Any:
        if not test(data.get(name)):
            raise CheckpointError(
                f"the manifest of step {step} has {name!r} in a form that no save writes: it is damaged"
            )
        return data[name]

    def section(name: str, test: Callable[[Any], bool] = lambda _: True) -> dict[str, Any]:
        found: dict[str, Any] = checked(name, lambda value: isinstance(value, dict) and all(map(test, value.values())))
        return found

    return Contents(
        aliases=section("aliases", _is_text),
        models=section("models", _are_names),
        progress={prefix: _progress(values) for prefix, values in section("progress", _is_progress).items()},
        kinds=section("kinds", _is_text),
        groups={
            name: [ParamGroup(tuple(each["params"]), each["options"]) for each in groups]
            for name, groups in section("groups", _are_groups).items()
        },
        values=section("values"),
        shared=section("shared"),
        extra_state=section("extra_state"),
        places=[Coordinates(*each) for each in checked("places", lambda value: _are_places(value, num_ranks))],
    )


def _progress(values: Mapping[str, Any]) -> Progress:
    order = values.get("order")
    learned = None if order is None else Learned(order, bool(values["in_one"]))
    return Progress(values.get("num_steps"), learned, values.get("usual_samples", 0.0))


def _is_progress(value: object) -> bool:
    if not isinstance(value, dict):
        return False
    is_learned = value.get("order") is None or (_are_names(value["order"]) and "in_one" in value)
    return _is_count(value.get("num_steps", 0)) and is_learned and _is_mean(value.get("usual_samples", 1.0))


def _are_groups(value: object) -> bool:
    return isinstance(value, list) and all(
        isinstance(one, dict) and _are_names(one.get("params")) and "options" in one for one in value
    )


def _are_places(value: object, num_ranks: int) -> bool:
    return isinstance(value, list) and len(value) == num_ranks and all(map(_is_place, value))


def _is_place(value: object) -> bool:
    return isinstance(value, Sequence) and len(value) == 4 and all(map(_is_count, value))


def _are_names(value: object) -> bool:
    return isinstance(value, list) and all(map(_is_text, value))


def _is_text(value: object) -> bool:
    return isinstance(value, str)


def _is_mean(value: object) -> bool:
    return type(value) is float and 0 < value < math.inf


def _is_count(value: object) -> bool:
    # True and False are ints, too.
    return type(value) is int and value >= 0
