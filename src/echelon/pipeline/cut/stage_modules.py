"""Modules of the stages of a traced model, which run one after another, each with its own part of the weights.

A stage has the weights that its operations use, under their names in the unsplit model. If a weight has several names,
the stage has the names that belong to layers that run in it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import Tensor, nn

from echelon.pipeline.cut.graph_cut import GraphCut
from echelon.pipeline.cut.traced_stage import TracedStage, program
from echelon.pipeline.cut.tracing import Traces, Weight


def build_stages(model: nn.Module, traces: Traces, at: Sequence[str]) -> list[nn.Module]:
    """Returns one module per stage. They share the parameters of `model`.

    Args:
        model: the model that was traced.
        traces: its operations.
        at: names of the layers before which stages 1, 2, ... begin.

    Raises:
        PartitionError: a name that is no layer, or names that are not in the order in which the layers run.
    """
    training, evaluation = (GraphCut(trace, at) for trace in traces)
    weights = _Weights(model)
    names = weights.hand_out((training, evaluation), len(at) + 1)
    stages: list[nn.Module] = []
    for index, mine in enumerate(names):
        called = weights.calling(mine)
        stage = TracedStage(
            program(training, index, called, "training"),
            program(evaluation, index, called, "evaluation"),
            index,
            len(names),
        )
        for name in mine:
            weights.put(stage, name)
        stages.append(stage)
    return stages


class _Weights:
    """Parameters and buffers of a model under all their names."""

    def __init__(self, model: nn.Module) -> None:
        self._tensors: dict[str, Tensor] = dict(model.named_parameters(remove_duplicate=False))
        self._tensors |= dict(model.named_buffers(remove_duplicate=False))
        self._saved = set(model.state_dict())
        self._names: dict[int, list[str]] = {}
        for name, tensor in self._tensors.items():
            self._names.setdefault(id(tensor), []).append(name)

    def hand_out(self, cuts: Sequence[GraphCut], num_stages: int) -> list[list[str]]:
        """Returns the names of the weights of every stage."""
        taken = [list(dict.fromkeys(self._taken(cuts, stage))) for stage in range(num_stages)]
        # Weights that no operation uses get a stage too, so that the stages' state dicts make up that of the model.
        for name, tensor in self._tensors.items():
            if not any(name in names for names in taken):
                taken[self._nearest(name, tensor, taken, cuts[0])].append(name)
        return taken

    def calling(self, names: Sequence[str]) -> dict[str, str]:
        """Returns the name that a stage uses for each weight, by every name that the weight has in the model."""
        called: dict[str, str] = {}
        for name in reversed(names):  # of several names in the stage, the first stays
            called |= dict.fromkeys(self._names[id(self._tensors[name])], name)
        return called

    def put(self, stage: nn.Module, name: str) -> None:
        """Registers a weight in a stage, under its name in the unsplit model."""
        *path, last = name.split(".")
        for part in path:
            children = dict(stage.named_children())
            if part not in children:
                stage.add_module(part, nn.Module())
            stage = stage.get_submodule(part)
        tensor = self._tensors[name]
        if isinstance(tensor, nn.Parameter):
            stage.register_parameter(last, tensor)
        else:
            stage.register_buffer(last, tensor, persistent=name in self._saved)

    def _taken(self, cuts: Sequence[GraphCut], stage: int) -> Iterator[str]:
        """Yields the names of the weights that a stage uses, in training or evaluation."""
        for cut in cuts:
            layers: dict[str, set[str]] = {}
            for node in cut.bodies[stage]:
                for needed in node.all_input_nodes:
                    if isinstance(source := cut.trace.sources.get(needed), Weight):
                        layers.setdefault(source.name, set()).update(cut.trace.layers_of(node))
            # A model may return a weight itself, which no operation of the stage uses.
            for node in cut.results(stage):
                if isinstance(source := cut.trace.sources.get(node), Weight):
                    layers.setdefault(source.name, set())
            for name, running in layers.items():
                names = self._names[id(self._tensors[name])]
                yield from [one for one in names if one.rpartition(".")[0] in running] or names[:1]

    def _nearest(self, name: str, tensor: Tensor, taken: Sequence[Sequence[str]], cut: GraphCut) -> int:
        """Places an unused weight: with an alias of it, else with its layer, else with the nearest layer around it."""
        for stage, names in enumerate(taken):
            if any(self._tensors[one] is tensor for one in names):
                return stage
        first: dict[str, int] = {}
        for stage, body in enumerate(cut.bodies):
            for node in body:
                for layer in cut.trace.layers_of(node):
                    first.setdefault(layer, stage)
        layer = name.rpartition(".")[0]
        while layer and layer not in first:
            layer = layer.rpartition(".")[0]
        return first.get(layer, 0)
