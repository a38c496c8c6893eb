"""Cutting a model into the stages of a pipeline: at named layers, by measured time, or as a list of modules."""

from __future__ import annotations

import inspect
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

import torch
from torch import nn
from torch.func import functional_call

from echelon.arguments import named, refuse_others
from echelon.errors import PartitionError
from echelon.long_work import told_by_rank_0
from echelon.pipeline.cut.graph_cut import boundaries
from echelon.pipeline.cut.traced_stage import TracedStage, build_stages
from echelon.pipeline.cut.tracing import Traces, trace
from echelon.pipeline.plan.partition import partition
from echelon.pipeline.stage.nested import Value, map_tensors, tensors_of
from echelon.pipeline.stage.replay import keyed
from echelon.pipeline.stage.stage import Stage, enter
from echelon.wording import counted

StageMaker: TypeAlias = nn.Module | Callable[[], nn.Module] | None
"""Entry of a list of stages: the module, a callable that makes it, or None where another rank holds it."""


class Example(NamedTuple):
    """Example inputs, such as a model will get."""

    args: tuple[object, ...]
    kwargs: Mapping[str, object]


@dataclass(frozen=True)
class Parts:
    """Model cut into parts that run one after another.

    Args:
        modules: The parts. The output of a part is the input of the next one.
        at: Names of the layers that parts 1, 2, ... begin with; empty for a list.
        prefixes: Prefix of each part's parameter names in the unsplit model.
        spreads: Whether a tuple that a part returns becomes the positional arguments of the next one.
        costs: With a measured cut, the time of each part's forward and backward, in seconds.
        left_out: Types of the model's outputs that parts cannot send on, such as caches. They are None.
    """

    modules: tuple[StageMaker, ...]
    at: tuple[str, ...] = ()
    prefixes: tuple[str, ...] = field(default=())
    spreads: bool = True
    costs: tuple[float, ...] | None = None
    left_out: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.modules)

    def __str__(self) -> str:
        begins = ("the first layer", *self.at) if self.at else tuple(map(str, range(len(self))))
        whole = sum(self.costs or ())
        shares = [f", {cost * 1e3:.3g} ms ({cost / whole:.0%})" for cost in self.costs or ()] or [""] * len(self)
        return "\n".join(
            f"stage {index}: from {begin} on{share}"
            for index, (begin, share) in enumerate(zip(begins, shares, strict=True))
        )


@refuse_others(split_spec="at", split_points="at", mb_args="example", mb_kwargs="example_kwargs", chunks="num_stages")
def split(
    model: nn.Module | Sequence[StageMaker] | Parts,
    num_stages: int | None = None,
    *,
    at: Sequence[str] | None = None,
    example: Sequence[object] | None = None,
    example_kwargs: Mapping[str, object] | None = None,
) -> Parts:
    """Cuts a model and returns its parts, which share the model's parameters under the same names.

    An nn.Sequential is cut between its layers. Any other module is traced with `example` first; see
    `echelon.pipeline.cut.tracing`. A list is cut already.

    Args:
        model: the model, a list of stages, or Parts.
        num_stages: number of parts. None: from `at`, or the length of the list.
        at: names, or ends of names, of the layers that parts 1, 2, ... begin with. None: the layers are measured with
            `example` and divided so that the slowest part is as fast as possible. An nn.Sequential without example is
            divided so that the largest part has as few parameters as possible.
        example: positional inputs such as the model will get, as a tuple. It fixes sizes of 1, and values that are no
            tensors. It does not fix the number of samples, or other sizes.
        example_kwargs: keyword inputs, likewise.

    Raises:
        PartitionError: the model cannot be cut so.
    """
    if at is not None:
        at = _names(at)
        num_stages = _agreeing(num_stages, len(at) + 1, f"at={at}")
    inputs = example_of(example, example_kwargs)
    if isinstance(model, Parts):
        _refuse_hints("parts are cut already", at, inputs)
        _agreeing(num_stages, len(model), "the split model")
        return model
    if not isinstance(model, nn.Module):
        _refuse_hints("a list of stages is cut already", at, inputs)
        return _of_list(model, num_stages)
    if num_stages is not None and (not isinstance(num_stages, int) or num_stages < 1):
        raise PartitionError(f"num_stages={num_stages!r}: give a whole number of at least 1")
    if num_stages is None:
        raise PartitionError(
            "the number of parts is missing: name the layers that parts begin with (at=), or give num_stages"
        )
    return divide(model, num_stages, at, inputs, trace_of(model, at, inputs))


def _names(at: object) -> list[str]:
    if isinstance(at, str) or not isinstance(at, Sequence) or not all(isinstance(name, str) for name in at):
        raise PartitionError(f"at={at!r}: give a list of names of layers, such as at=['h.4', 'h.8']")
    return list(at)


def _agreeing(num_stages: int | None, number: int, what: str) -> int:
    if num_stages not in (None, number):
        raise PartitionError(
            f"{what} makes {number} stages, but the schedule has {num_stages}: make both equal "
            "(stages are num_ranks x num_chunks)"
        )
    return number


def example_of(example: object, example_kwargs: object) -> Example | None:
    """Returns the arguments of `split` as one value. None if there are none.

    Raises:
        PartitionError: they are of the wrong type.
    """
    if example is None and example_kwargs is None:
        return None
    if example is not None and (isinstance(example, str) or not isinstance(example, tuple | list)):
        raise PartitionError(
            f"example is {named(example)}: give the positional inputs as a tuple, such as example=(inputs,)"
        )
    if example_kwargs is not None and not isinstance(example_kwargs, Mapping):
        raise PartitionError(f"example_kwargs is {named(example_kwargs)}: give a dict of keyword inputs")
    return Example(tuple(example or ()), dict(example_kwargs or {}))


def _refuse_hints(why: str, at: Sequence[str] | None, inputs: Example | None) -> None:
    if at is not None or inputs is not None:
        raise PartitionError(f"at= and example= say how to cut a model; {why}: leave them out")


def keep(parts: Parts, placement: Sequence[int], rank: int) -> list[Stage]:
    """Returns the stages that a rank holds. Callable entries are called, on this rank only.

    Args:
        parts: all parts of the model.
        placement: the rank of each stage.
        rank: this rank.

    Raises:
        PartitionError: a part is not a module.
    """
    return [
        Stage(index, _made(entry, index, rank), parts.prefixes[index], spreads=parts.spreads)
        for index, entry in enumerate(parts.modules)
        if placement[index] == rank
    ]


def _made(entry: StageMaker, index: int, rank: int) -> nn.Module:
    module = entry if entry is None or isinstance(entry, nn.Module) else entry()
    if not isinstance(module, nn.Module):
        raise PartitionError(
            f"stage {index} is held by rank {rank}, but its entry gives {type(module).__name__}: "
            "pass a module, or a callable that returns one"
        )
    return module


def _of_list(model: object, num_stages: int | None) -> Parts:
    if isinstance(model, str) or not isinstance(model, Sequence):
        advice = "pass an nn.Module, or a list with one module per stage"
        if isinstance(model, type) and issubclass(model, nn.Module):
            advice = f"pass an instance of it, such as {model.__name__}(...)"
        elif isinstance(model, Iterator):
            advice = "pass a list of the stages, as list(stages)"
        raise PartitionError(f"model is {named(model)}: {advice}")
    for index, entry in enumerate(model):
        if not (entry is None or isinstance(entry, nn.Module) or callable(entry)):
            raise PartitionError(
                f"entry {index} of the list of stages is {entry!r}: give a module, a callable that makes one, or None "
                "where another rank holds it"
            )
        if isinstance(entry, type) and not _takes_nothing(entry):
            raise PartitionError(
                f"entry {index} of the list of stages is {named(entry)}, which needs arguments: give an instance of "
                "it, or a callable that makes one"
            )
    if num_stages not in (None, len(model)):
        raise PartitionError(
            f"{len(model)} stages were given, but the schedule has {num_stages}: pass one entry per stage "
            "(num_ranks x num_chunks)"
        )
    # The names of an nn.Sequential of these stages.
    return Parts(tuple(model), prefixes=tuple(f"{index}." for index in range(len(model))))


def _takes_nothing(entry: type) -> bool:
    """Whether a class can be called without arguments. True if that is not known."""
    try:
        inspect.signature(entry).bind()
    except TypeError:
        return False
    except ValueError:  # a class written in C
        pass
    return True


def _layers(model: nn.Sequential) -> list[tuple[str, nn.Module]]:
    """Returns the layers with their names. A layer that is there twice has two entries."""
    return [(name, layer) for name, layer in model.named_modules(remove_duplicate=False) if name and "." not in name]


def _of_sequential(model: nn.Sequential, num_stages: int, at: Sequence[str] | None, inputs: Example | None) -> Parts:
    layers = _layers(model)
    names = [name for name, _ in layers]
    if len(names) < num_stages:
        raise PartitionError(
            f"cannot cut {counted(len(names), 'layer')} into {num_stages} stages: use at most "
            f"{counted(len(names), 'stage')}, or more layers"
        )
    costs = None
    if at is not None:
        begins = [0, *map(names.index, at)]
        if begins != sorted(set(begins)):
            raise PartitionError(f"at={list(at)}: name layers in their order, and not the first ({names[0]})")
    elif inputs is not None:
        # nn.Sequential passes a tuple on as one argument.
        cut = partition(_measure([layer for _, layer in layers], inputs, spreads=False), num_stages)
        begins, costs = [stage[0] for stage in cut.stages], cut.costs
    else:
        # Plus 1, so that layers without parameters count as well.
        sizes = [1 + sum(parameter.numel() for parameter in layer.parameters()) for _, layer in layers]
        begins = [stage[0] for stage in partition(sizes, num_stages).stages]
    # Layers keep their names in the parts, so that a part's state dict is a part of the model's.
    modules = [nn.Sequential() for _ in begins]
    for module, begin, end in zip(modules, begins, [*begins[1:], len(names)], strict=True):
        for name, layer in layers[begin:end]:
            module.add_module(name, layer)
    return Parts(
        tuple(modules), tuple(names[begin] for begin in begins[1:]), ("",) * len(begins), False, _seconds(costs)
    )


def trace_of(model: nn.Module, at: Sequence[str] | None, inputs: Example | None) -> Traces | None:
    """Traces a model that is cut inside of its layers. It takes seconds. None for a cut between layers of a Sequential.

    Raises:
        PartitionError: the model cannot be traced.
    """
    # A name inside of a layer needs a trace, like a cut inside of any other module.
    if isinstance(model, nn.Sequential) and (at is None or set(at) <= {name for name, _ in _layers(model)}):
        return None
    if inputs is None and isinstance(model, nn.Sequential):
        raise PartitionError(
            f"at={at}, but the layers are {', '.join(name for name, _ in _layers(model))}: name some of them, or pass "
            "example=(inputs,) to cut inside of one"
        )
    if inputs is None:
        raise PartitionError(
            f"the module {type(model).__name__} must be run once to be cut: pass example=(inputs,) like those of "
            "training, or an nn.Sequential, or a list with one module per stage"
        )
    with told_by_rank_0(f"tracing the {type(model).__name__}"):
        return trace(model, inputs.args, inputs.kwargs)


def divide(
    model: nn.Module, num_stages: int, at: Sequence[str] | None, inputs: Example | None, traces: Traces | None
) -> Parts:
    """Cuts a model into parts, as `split`.

    Args:
        model, num_stages, at, inputs: as in `split`.
        traces: result of `trace_of`.

    Raises:
        PartitionError: the model cannot be cut so.
    """
    if traces is None:
        assert isinstance(model, nn.Sequential)
        return _of_sequential(model, num_stages, at, inputs)
    assert inputs is not None
    costs = None
    if at is None:
        candidates = boundaries(traces.training)
        if len(candidates) + 1 < num_stages:
            raise PartitionError(
                f"{len(candidates)} layers of the {type(model).__name__} can begin a stage, which does not make "
                f"{num_stages} stages: use at most {len(candidates) + 1}, or name layers with at="
            )
        # A part for each candidate is measured. Neighbouring parts are then joined to stages of even time.
        parts = build_stages(model, traces, candidates)
        cut = partition(_measure(parts, inputs, spreads=True), num_stages)
        at, costs = [candidates[stage[0] - 1] for stage in cut.stages[1:]], cut.costs
    stages = build_stages(model, traces, at)
    left_out = sorted(traces.training.left_out | traces.evaluation.left_out | traces.given.left_out)
    return Parts(tuple(stages), tuple(at), ("",) * len(stages), True, _seconds(costs), tuple(left_out))


def _seconds(costs: Sequence[object] | None) -> tuple[float, ...] | None:
    return None if costs is None else tuple(float(cost) for cost in costs)  # type: ignore[arg-type]


_REPEATS = 3


class _Run(NamedTuple):
    seconds: float
    output: Value


def _measure(parts: Sequence[nn.Module], example: Example, *, spreads: bool) -> list[float]:
    """Returns the seconds of one forward and backward of each part, the fastest of a few runs.

    Parts with the same operations and shapes get the same time (their median), so that chance does not tell them
    apart. The model is unchanged: weights are copied, a part at a time. Weights on the meta device are made up.

    Args:
        parts: parts of the model, which run one after another.
        example: positional arguments of the first part, and keyword arguments of all.
        spreads: whether a tuple that a part returns becomes the positional arguments of the next one.

    Raises:
        PartitionError: a part cannot be run with the example.
    """
    value: Value = map_tensors(_materialised, tuple(example.args))
    kwargs = {name: map_tensors(_materialised, item) for name, item in example.kwargs.items()}
    times: list[float] = []
    kinds: list[str] = []
    # keyed: the caller's random generators stay as they are.
    with keyed(), told_by_rank_0(f"timing {len(parts)} parts of the model"):
        for index, part in enumerate(parts):
            arguments = value if isinstance(value, tuple) and (spreads or index == 0) else (value,)
            try:
                run = _best(part, arguments, kwargs)
            except Exception as error:  # a model may raise anything
                raise PartitionError(
                    f"part {index} of the model cannot be run with this example: {type(error).__name__}: {error}"
                ) from error
            times.append(run.seconds)
            kinds.append(_kind(part, arguments))
            value = run.output
    return [
        statistics.median(time for time, other in zip(times, kinds, strict=True) if other == kind) for kind in kinds
    ]


def _best(part: nn.Module, arguments: tuple[Value, ...], kwargs: Mapping[str, Value]) -> _Run:
    runs = [_timed(part, arguments, kwargs) for _ in range(1 + _REPEATS)]  # the first run is slow, and does not count
    return _Run(min(run.seconds for run in runs[1:]), runs[0].output)


def _timed(part: nn.Module, arguments: tuple[Value, ...], kwargs: Mapping[str, Value]) -> _Run:
    tensors = {**dict(part.named_parameters()), **dict(part.named_buffers())}
    copies = {name: _materialised(tensor) for name, tensor in tensors.items()}
    # Entered as in a stage, since a part may write to its input in place.
    leaves = tuple(enter(map_tensors(_materialised, argument)).value for argument in arguments)
    with torch.enable_grad():
        _synchronize(copies)
        begin = time.perf_counter()
        output = functional_call(part, copies, leaves, dict(kwargs))
        roots = [tensor for tensor in tensors_of(output) if tensor.requires_grad]
        if roots:
            torch.autograd.backward(roots, [torch.ones_like(root) for root in roots])
        _synchronize(copies)
    return _Run(time.perf_counter() - begin, map_tensors(_materialised, output))


def _materialised(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a copy that is a leaf. A tensor on the meta device gets memory with small random numbers."""
    if not tensor.is_meta:
        return tensor.detach().clone().requires_grad_(tensor.requires_grad)
    values = torch.zeros(tensor.shape, dtype=tensor.dtype)
    if tensor.is_floating_point():
        values.normal_(std=0.02)
    return values.requires_grad_(tensor.requires_grad)


def _kind(part: nn.Module, arguments: tuple[Value, ...]) -> str:
    what = part.operations if isinstance(part, TracedStage) else repr(part)
    shapes = [(tensor.shape, tensor.dtype) for tensor in (*part.parameters(), *tensors_of(arguments))]
    return repr((what, shapes))


def _synchronize(tensors: Mapping[str, torch.Tensor]) -> None:
    # A device only queues the work: without this, the clock would measure the queueing.
    if any(tensor.device.type not in ("cpu", "meta") for tensor in tensors.values()):
        torch.accelerator.synchronize()
