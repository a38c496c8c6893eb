"""A model as the operations that it computes, in their order, each with the layer that it belongs to.

`torch.export` runs the model once, on tensors without data, with every size left open, and writes down what it does. So
any model will do whose path depends on its inputs' sizes and not on their values. It is traced twice, for training and
for evaluation, because dropout and normalisation are other operations then.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple, TypeAlias

import torch
from torch import fx, nn
from torch.export import Dim, ExportedProgram, export

from echelon._torch_private import TreeSpec, fake_tensors, guards_of, tree_flatten, tree_leaves, tree_map
from echelon.errors import PartitionError

logger = logging.getLogger("echelon")

TENSOR: Final = "a tensor"
"""Stands for one."""

_CHECKS = (torch.ops.aten._assert_tensor_metadata.default,)
"""What export adds to check dtypes, which autocast may change."""


class Weight(NamedTuple):
    """A parameter or a buffer of the model."""

    name: str
    is_parameter: bool


class Constant(NamedTuple):
    """A tensor that the model made itself."""

    value: torch.Tensor


class Positional(NamedTuple):
    """A tensor of the positional inputs: their leaf with this number."""

    leaf: int


class Keyword(NamedTuple):
    """A tensor of a keyword argument: its leaf with this number."""

    name: str
    leaf: int


Source: TypeAlias = Weight | Constant | Positional | Keyword
"""Where a placeholder of the graph gets its value."""


@dataclass(frozen=True)
class Trace:
    """What a model does in one mode.

    Args:
        sources: For each placeholder of the graph, where its value comes from.
        body: The operations in their order.
        outputs: What the model returns, flat: nodes, and plain data.
        output_spec: How to put the outputs together.
        inputs_spec: How the positional inputs were put together.
        plain_inputs: For each leaf of the positional inputs that is no tensor, what it was.
        keywords: The keyword arguments it was traced with; of tensors only where they are.
        guards: Says whether inputs take the path that was traced; see `echelon._torch_private.guards_of`.
        modules: What the graph calls by name: operations inside of operations.
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

    def layers_of(self, node: fx.Node) -> tuple[str, ...]:
        """Returns the names of the modules that were running, the outermost first."""
        stack = node.meta.get("nn_module_stack", {})
        paths = (str(path).partition("@")[0] for path, _ in stack.values())
        return tuple(path.removeprefix(_PREFIX) for path in paths if path.startswith(_PREFIX))


class Traces(NamedTuple):
    """What a model does in both modes."""

    training: Trace
    evaluation: Trace


def trace(model: nn.Module, example: Sequence[object], example_kwargs: Mapping[str, object]) -> Traces:
    """Traces a model, in training and in evaluation mode; the model is as before.

    Args:
        model: any module; parameters on the meta device will do.
        example: positional inputs. What they hold does not matter, but sizes of 1 other than the number of samples are
            taken to be always 1.
        example_kwargs: keyword inputs.

    Raises:
        PartitionError: it cannot be traced, or works for one number of samples only.
    """
    modes = {module: module.training for module in model.modules()}
    traced = _on_a_device(model)
    try:
        return Traces(*(_trace(traced.train(mode), tuple(example), dict(example_kwargs)) for mode in (True, False)))
    finally:
        for module, training in modes.items():
            module.training = training


class _Outputs:
    """What the model returned, without its tensors."""

    def __init__(self) -> None:
        self.leaves: list[object] = []
        self.spec: TreeSpec | None = None


class _Flat(nn.Module):
    """Calls the model, and returns what is computed of its outputs only."""

    def __init__(self, model: nn.Module, outputs: _Outputs) -> None:
        super().__init__()
        self.model = model
        self.outputs = outputs

    def forward(self, inputs: tuple[object, ...], kwargs: dict[str, object]) -> tuple[object, ...]:
        leaves, self.outputs.spec = tree_flatten(self.model(*inputs, **kwargs))
        self.outputs.leaves = [TENSOR if _is_computed(leaf) else _plain(leaf) for leaf in leaves]
        return tuple(leaf for leaf in leaves if _is_computed(leaf))


_PREFIX = "model."


def _trace(model: nn.Module, example: tuple[object, ...], example_kwargs: dict[str, object]) -> Trace:
    outputs = _Outputs()
    inputs = tree_map(_fresh, (example, example_kwargs))
    assert isinstance(inputs, tuple)
    try:
        exported = export(_Flat(model, outputs), inputs, dynamic_shapes=tree_map(_open_sizes, inputs), strict=False)
    except Exception as error:  # torch raises all sorts
        raise PartitionError(
            f"a {type(model).__name__} cannot be traced with this example ({_first_line(error)}): "
            "mend that, or pass a list with one module per stage"
        ) from error
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
    computed = iter(result)
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
    )


def _is_known(size: int | torch.SymInt) -> bool:
    """Whether a size is a number; a SymInt may be one, too."""
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
            source = next(users)
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
    """Returns a module whose parameters are where its inputs will be: the meta device mixes with no other."""
    tensors = [*model.parameters(), *model.buffers()]
    if not any(tensor.is_meta for tensor in tensors):
        return model
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
    """Returns a tensor of its own, so that one given twice is traced as two, with samples enough to be many."""
    if not isinstance(leaf, torch.Tensor):
        return leaf
    tensor = torch.zeros_like(leaf, device="cpu") if leaf.is_meta else leaf.detach().clone()
    return torch.cat([tensor, tensor]) if tensor.dim() and len(tensor) == 1 else tensor


def _without_data(leaf: object) -> object:
    return TENSOR if isinstance(leaf, torch.Tensor) else leaf


def _open_sizes(leaf: object) -> object:
    return dict.fromkeys(range(leaf.dim()), Dim.AUTO) if isinstance(leaf, torch.Tensor) else None


def _is_computed(leaf: object) -> bool:
    return isinstance(leaf, torch.Tensor | torch.SymInt | torch.SymFloat | torch.SymBool)


def _plain(leaf: object) -> object:
    if leaf is None or isinstance(leaf, bool | int | float | str):
        return leaf
    logger.warning("the outputs of the model hold a %s, which a pipeline leaves out (None)", type(leaf).__name__)
    return None


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0][:200]}"
