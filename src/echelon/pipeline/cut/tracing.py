"""Trace of a model: its operations in their order, each with the layer that it belongs to.

`torch.export` runs the model once, on tensors without data, with every size left open, and records its operations. So
the model's path may depend on the sizes of its inputs, but not on their values. It is traced twice, for training and
for evaluation, because dropout and normalisation are different operations then. If some of its layers are in another
mode than the others, such as a frozen BatchNorm, it is traced once more as it is.
"""

from __future__ import annotations

import copy
import logging
import os
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Final, NamedTuple, TypeAlias

import torch
from torch import fx, nn
from torch.export import Dim, ExportedProgram

from echelon._torch_private.tensors import (
    FakeTensor,
    TreeSpec,
    fake_tensors,
    guards_of,
    real_tensors,
    tree_flatten,
    tree_leaves,
    tree_map,
)
from echelon.call_site import is_foreign, is_own
from echelon.errors import PartitionError
from echelon.pipeline.cut.trace_checks import ForwardChecks, refuse_backward_hooks

TENSOR: Final = "a tensor"
"""Placeholder for a tensor."""

_CHECKS = (torch.ops.aten._assert_tensor_metadata.default,)
"""Checks of dtypes that export adds. They are left out, since autocast may change dtypes."""


class Weight(NamedTuple):
    """Parameter or buffer of the model."""

    name: str
    is_parameter: bool


class Constant(NamedTuple):
    """Tensor that the model made itself."""

    value: torch.Tensor


class Positional(NamedTuple):
    """Tensor of the positional inputs, by the number of its leaf."""

    leaf: int


class Keyword(NamedTuple):
    """Tensor of a keyword argument, by the number of its leaf."""

    name: str
    leaf: int


Source: TypeAlias = Weight | Constant | Positional | Keyword
"""Source of the value of a placeholder in the graph."""


@dataclass(frozen=True)
class Trace:
    """Operations of a model in one mode.

    Args:
        sources: Source of the value of each placeholder.
        body: Operations in their order.
        outputs: Outputs of the model, flat: nodes and plain values.
        output_spec: Structure of the outputs.
        inputs_spec: Structure of the positional inputs.
        plain_inputs: Leaves of the positional inputs that are no tensors, by number.
        keywords: Keyword arguments of the example, with TENSOR in place of each tensor.
        guards: Check that inputs take the path that was traced; see `_torch_private.tensors.guards_of`.
        modules: Modules that the graph calls by name: graphs inside of the graph.
        left_out: Types of outputs that are neither tensors nor plain values. None stands in their place.
    """

    sources: Mapping[fx.Node, Source]
    body: tuple[fx.Node, ...]
    outputs: tuple[object, ...]
    output_spec: TreeSpec
    inputs_spec: TreeSpec
    plain_inputs: Mapping[int, object]
    keywords: Mapping[str, object]
    guards: nn.Module | None
    modules: Mapping[str, nn.Module]
    left_out: frozenset[str]

    def layers_of(self, node: fx.Node) -> tuple[str, ...]:
        """Returns the names of the modules that an operation ran in, the outermost first."""
        stack = node.meta.get("nn_module_stack", {})
        paths = (str(path).partition("@")[0] for path, _ in stack.values())
        return tuple(path.removeprefix(_PREFIX) for path in paths if path.startswith(_PREFIX))


class Traces(NamedTuple):
    """Traces of a model in training mode, in evaluation mode, and with the modes that its layers had."""

    training: Trace
    evaluation: Trace
    given: Trace
    """One of the two others, unless some layers are in training mode and some in evaluation mode."""


def trace(model: nn.Module, example: Sequence[object], example_kwargs: Mapping[str, object]) -> Traces:
    """Traces a model in training mode, in evaluation mode, and as it is. The model is unchanged afterwards.

    Args:
        model: any module; its parameters may be on the meta device.
        example: positional inputs. Their values do not matter. A size of 1, other than the number of samples, is taken
            to be always 1.
        example_kwargs: keyword inputs.

    Raises:
        PartitionError: the model cannot be traced, works for one number of samples only, or has a backward that a
            trace would leave out.
    """
    refuse_backward_hooks(model)
    traced = _on_a_device(model)
    modes = {module: module.training for module in traced.modules()}
    given = None
    traces = []
    try:
        for mode in (True, False):
            traced.train(mode)
            traces.append(_trace(traced, tuple(example), dict(example_kwargs)))
            if all(module.training == training for module, training in modes.items()):
                given = traces[-1]
        if given is None:
            _set_modes(modes)
            given = _trace(traced, tuple(example), dict(example_kwargs))
    finally:
        _set_modes(modes)
    training, evaluation = traces
    return Traces(training, evaluation, given)


def _set_modes(modes: Mapping[nn.Module, bool]) -> None:
    for module, training in modes.items():
        module.training = training


class _StoppedError(BaseException):
    """Error of the model itself. Not an Exception: for some of these torch prints the graph, and writes to its log."""


class _Outputs:
    """Structure and plain values of the model's outputs, kept aside while the model is exported."""

    def __init__(self) -> None:
        self.leaves: list[object] = []
        self.left_out: set[str] = set()
        self.spec: TreeSpec | None = None


class _Flat(nn.Module):
    """Wrapper of a model that returns a flat tuple of its computed outputs only."""

    def __init__(self, model: nn.Module, outputs: _Outputs, checks: ForwardChecks) -> None:
        super().__init__()
        self.model = model
        self.outputs = outputs
        self.checks = checks

    def forward(self, inputs: tuple[object, ...], kwargs: dict[str, object]) -> tuple[object, ...]:
        try:
            with self.checks.watching():
                result = self.model(*inputs, **kwargs)
        except Exception as error:
            raise _StoppedError(error) from error
        self.checks.check_output(result)
        leaves, self.outputs.spec = tree_flatten(result)
        self.outputs.left_out |= {
            type(leaf).__name__ for leaf in leaves if not _is_computed(leaf) and not _is_plain(leaf)
        }
        self.outputs.leaves = [TENSOR if _is_computed(leaf) else leaf if _is_plain(leaf) else None for leaf in leaves]
        return tuple(leaf for leaf in leaves if _is_computed(leaf))


_PREFIX = "model."  # of all names in the graph: the wrapper holds the model in this attribute


def _trace(model: nn.Module, example: tuple[object, ...], example_kwargs: dict[str, object]) -> Trace:
    outputs, checks = _Outputs(), ForwardChecks(model)
    inputs = tree_map(_fresh, (example, example_kwargs))
    assert isinstance(inputs, tuple)
    try:
        with _silent(), torch.enable_grad():  # the graph of the gradients is checked
            exported = torch.export.export(  # by its full name, under which a forecast replaces it
                _Flat(model, outputs, checks), inputs, dynamic_shapes=tree_map(_open_sizes, inputs), strict=False
            )
    except (Exception, _StoppedError) as error:  # export raises errors of many types
        raise _error(model, error.args[0] if isinstance(error, _StoppedError) else error) from error
    checks.refuse([name.removeprefix(_PREFIX) for name in exported.constants])
    return _read(exported, outputs, example, example_kwargs)


def _read(
    exported: ExportedProgram, given: _Outputs, example: tuple[object, ...], example_kwargs: Mapping[str, object]
) -> Trace:
    leaves, inputs_spec = tree_flatten(example)
    sources = dict(_sources(exported, len(leaves), example_kwargs))
    for node, source in sources.items():
        value = node.meta["val"]
        if isinstance(source, Positional | Keyword) and value.dim() and _is_known(value.shape[0]):
            raise PartitionError(
                f"the model works for {value.shape[0]} samples only, as traced: do not write the number of samples "
                "into it, or pass a list with one module per stage"
            )
    (result,) = (node.args[0] for node in exported.graph.nodes if node.op == "output")
    assert isinstance(result, Sequence)
    computed = iter(result)  # the plain outputs did not pass through the graph
    assert given.spec is not None
    return Trace(
        sources=sources,
        body=tuple(
            node
            for node in exported.graph.nodes
            if node.op in ("call_function", "get_attr") and node.target not in _CHECKS
        ),
        outputs=tuple(next(computed) if leaf is TENSOR else leaf for leaf in given.leaves),
        output_spec=given.spec,
        inputs_spec=inputs_spec,
        plain_inputs={index: leaf for index, leaf in enumerate(leaves) if not isinstance(leaf, torch.Tensor)},
        keywords={name: tree_map(_without_data, value) for name, value in example_kwargs.items()},
        guards=guards_of(exported),
        modules=dict(exported.graph_module.named_children()),
        left_out=frozenset(given.left_out),
    )


def _is_known(size: int | torch.SymInt) -> bool:
    """Whether a size is a fixed number. A SymInt may be one too."""
    return str(size).isdecimal()


def _sources(
    exported: ExportedProgram, num_positional: int, example_kwargs: Mapping[str, object]
) -> Iterator[tuple[fx.Node, Source]]:
    keywords = [
        Keyword(name, leaf) for name, value in example_kwargs.items() for leaf in range(len(tree_leaves(value)))
    ]
    users: Iterator[Source] = iter([*(Positional(leaf) for leaf in range(num_positional)), *keywords])
    placeholders = [node for node in exported.graph.nodes if node.op == "placeholder"]
    for node, spec in zip(placeholders, exported.graph_signature.input_specs, strict=True):
        kind, target = spec.kind.name, spec.target
        if kind == "USER_INPUT":
            source = next(users)  # plain values have placeholders as well, which nothing reads
            if isinstance(node.meta.get("val"), torch.Tensor):
                yield node, source
        elif kind in ("PARAMETER", "BUFFER") and target is not None:
            yield node, Weight(target.removeprefix(_PREFIX), kind == "PARAMETER")
        elif kind == "CONSTANT_TENSOR" and target is not None:
            yield node, Constant(exported.constants[target])
        else:
            raise PartitionError(
                f"the model holds {spec.arg}, which is no tensor: pass a list with one module per stage"
            )


def _on_a_device(model: nn.Module) -> nn.Module:
    """Returns the model. If it is on the meta device, which mixes with no other, a fake copy on the inputs' device."""
    tensors = [*model.parameters(), *model.buffers()]
    if not any(tensor.is_meta for tensor in tensors):
        return model
    # Fake tensors have a device but no data, so a model of any size can be traced.
    stand_in = copy.deepcopy(model)
    with fake_tensors():
        for module in stand_in.modules():
            for name, parameter in list(module.named_parameters(recurse=False)):
                setattr(module, name, nn.Parameter(_empty(parameter), requires_grad=parameter.requires_grad))
            for name, buffer in list(module.named_buffers(recurse=False)):
                setattr(module, name, _empty(buffer))
    return stand_in


def _empty(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu" if tensor.is_meta else tensor.device)


def _fresh(leaf: object) -> object:
    """Returns a copy of a tensor for export, with at least two samples."""
    if not isinstance(leaf, torch.Tensor):
        return leaf
    has_data = not leaf.is_meta and not isinstance(leaf, FakeTensor)
    # A copy, because one tensor that is given twice would be traced as one input. Export takes a size of 1 to be always
    # 1, so a single sample is doubled to leave their number open. A forecast does not see the copy of a fake tensor.
    with nullcontext() if has_data else real_tensors():
        tensor = leaf.detach().clone() if has_data else torch.zeros(leaf.shape, dtype=leaf.dtype)
        return torch.cat([tensor, tensor]) if tensor.dim() and len(tensor) == 1 else tensor


def _without_data(leaf: object) -> object:
    return TENSOR if isinstance(leaf, torch.Tensor) else leaf


def _open_sizes(leaf: object) -> object:
    # AUTO leaves a size open unless the model fixes it; `_read` then refuses a fixed number of samples in one line.
    return dict.fromkeys(range(leaf.dim()), Dim.AUTO) if isinstance(leaf, torch.Tensor) else None


def _is_computed(leaf: object) -> bool:
    return isinstance(leaf, torch.Tensor | torch.SymInt | torch.SymFloat | torch.SymBool)


def _is_plain(leaf: object) -> bool:
    return leaf is None or isinstance(leaf, bool | int | float | str)


@contextmanager
def _silent() -> Iterator[None]:
    """Keeps torch from logging problems of the model that are raised as well, some with their traceback."""
    loggers = [logging.getLogger(name) for name in _LOGGERS]
    before = [logger.disabled for logger in loggers]
    for logger in loggers:
        logger.disabled = True
    try:
        yield
    finally:
        for logger, is_disabled in zip(loggers, before, strict=True):
            logger.disabled = is_disabled


def _error(model: nn.Module, error: BaseException) -> PartitionError:
    """Returns the error for a model that cannot be traced, with the line of its code."""
    what, place = f"the module {type(model).__name__} cannot be traced", _place_of(error)
    # By its name: it is in a module of torch for experiments.
    if type(error).__name__ == "GuardOnDataDependentSymNode":
        return PartitionError(
            f"{what}: its path depends on the values of a tensor{place}: compute with torch.where instead, or pass a "
            "list with one module per stage"
        )
    return PartitionError(
        f"{what} with this example ({_first_line(error)}){place}: fix that, or pass a list with one module per stage"
    )


def _place_of(error: BaseException) -> str:
    """Returns " at file:line" of the innermost line of the user that led to an error, else of another library.

    Empty if all lines are torch's.
    """
    frames = [frame for frame in reversed(traceback.extract_tb(error.__traceback__)) if not is_own(frame.filename)]
    of_user = [frame for frame in frames if not is_foreign(frame.filename)]
    of_library = [frame for frame in frames if not frame.filename.startswith((_TORCH, "<"))]
    return next((f" at {frame.filename}:{frame.lineno}" for frame in [*of_user, *of_library]), "")


_LOGGERS = "torch._subclasses.fake_tensor", "torch.fx.experimental.symbolic_shapes"
_TORCH = os.path.dirname(torch.__file__) + os.sep


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0][:200]}"
