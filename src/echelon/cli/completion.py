"""Completion of values in a shell: names of schedules, collectives, algorithms, devices, networks and backends.

A shell starts a process for each TAB, so the names come from modules without torch.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Annotated, Any, TypeAlias, get_args

import typer
from typer.models import ParameterInfo

from echelon.bench.request import OPERATIONS as MEASURED
from echelon.collectives.plans.algorithms import OPERATIONS, algorithms_of
from echelon.foresight.play.devices import DEVICES
from echelon.launch.backends import NAMES as BACKENDS
from echelon.pipeline import schedules

# A test compares them with the table, whose package imports torch.
NETWORKS = (
    "1GbE",
    "10GbE",
    "25GbE",
    "100GbE",
    "loopback",
    "shared-memory",
    "nvlink-like",
    "infiniband-200g",
    "infiniband-400g",
    "infiniband-800g",
)
"""Names of the simulation's networks."""

_Names: TypeAlias = Callable[[typer.Context], Iterable[str]]


def _planned(_: typer.Context) -> Iterable[str]:
    return [*schedules.names(), *(operation.replace("_", "-") for operation in OPERATIONS)]


def _operations(context: typer.Context) -> Iterable[str]:
    return MEASURED if context.info_name == "bench" else _planned(context)


def _algorithms(context: typer.Context) -> Iterable[str]:
    """Returns the algorithms of the operation on the command line, or all if it comes later."""
    # Arguments stay in `args` while the last option lacks its value.
    words = [str(word).replace("-", "_") for word in (context.params.get("operation"), *context.args)]
    found = [word for word in words if word in OPERATIONS] or OPERATIONS
    return dict.fromkeys(algorithm.name for operation in found for algorithm in algorithms_of(operation))


def _backends(context: typer.Context) -> Iterable[str]:
    return ("tcp", "simulated") if context.info_name == "tune" else BACKENDS


_OF_PARAMETERS: Mapping[str, _Names] = {
    "schedule": _planned,
    "operation": _operations,
    "algorithm": _algorithms,
    "gpu": lambda _: DEVICES,
    "network": lambda _: NETWORKS,
    "local_network": lambda _: NETWORKS,
    "backend": _backends,
}
"""Names that complete the value of a parameter of any command."""


def completed(signature: inspect.Signature) -> inspect.Signature:
    """Returns the signature of a command with completion for the parameters whose values have names."""
    return signature.replace(parameters=[_completed(each) for each in signature.parameters.values()])


def _completed(parameter: inspect.Parameter) -> inspect.Parameter:
    names = _OF_PARAMETERS.get(parameter.name)
    if names is None:
        return parameter

    def complete(ctx: typer.Context, incomplete: str) -> list[str]:
        return [name for name in names(ctx) if name.startswith(incomplete)]

    kind, *notes = get_args(parameter.annotation)
    notes = [copy.copy(note) for note in notes]  # options of several commands share one
    for note in notes:
        if isinstance(note, ParameterInfo):
            note.autocompletion = complete
    annotation: Any = Annotated[(kind, *notes)]
    return parameter.replace(annotation=annotation)
