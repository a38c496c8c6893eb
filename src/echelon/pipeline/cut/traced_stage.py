"""Stages of a traced model as modules, which run one after another, each with its own part of the weights.

A stage has the weights that its operations use, under their names in the unsplit model. If a weight has several names,
the stage has the names that belong to layers that run in it.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import fx, nn

from echelon._torch_private.tensors import TreeSpec, tree_flatten, tree_leaves, tree_unflatten
from echelon.backends.modes import normal_mode
from echelon.errors import ScheduleError, SizeMismatch, UnsupportedOp
from echelon.pipeline.cut.graph_cut import GraphCut
from echelon.pipeline.cut.tracing import TENSOR, Constant, Keyword, Trace, Traces, Weight


@dataclass(frozen=True)
class StageGraph:
    """Operations of a stage in one mode, as code.

    Args:
        trace: Trace of the whole model.
        run: Function of the stage, the entering values, and the leaves of keyword arguments in `keywords`.
        num_values: Number of entering values; for the first stage, of tensors among them.
        keywords: Leaves of keyword arguments that the stage takes.
        constants: Tensors that the model made itself, by their name in the stage.
        modules: Modules that the graph calls by name, by their name in the stage.
        operations: Names of the operations, for comparison.
    """

    trace: Trace
    run: Callable[..., tuple[object, ...]]
    num_values: int
    keywords: tuple[Keyword, ...]
    constants: Mapping[str, torch.Tensor]
    modules: Mapping[str, nn.Module]
    operations: tuple[str, ...]


def _stage_graph(cut: GraphCut, stage: int, names: Mapping[str, str], mode: str) -> StageGraph:
    """Returns the operations of a stage as code.

    Args:
        cut: the trace and its cut.
        stage: index of the stage.
        names: name in the stage of each parameter and buffer that it uses.
        mode: prefix of the names of constants and modules: both modes are in one stage.
    """
    graph = fx.Graph()
    new: dict[fx.Node, fx.Node] = {}
    used = cut.used(stage)
    sources = {node: source for node, source in cut.trace.sources.items() if node in used}
    keywords = [node for node, source in sources.items() if isinstance(source, Keyword)]
    for node in (*cut.entering[stage], *keywords):
        new[node] = graph.placeholder(node.name)
    constants: dict[str, torch.Tensor] = {}
    modules: dict[str, nn.Module] = {}
    for node, source in sources.items():
        if isinstance(source, Weight):
            new[node] = graph.get_attr(names[source.name])
        elif isinstance(source, Constant):
            constants[f"{mode}_{node.name}"] = source.value
            new[node] = graph.get_attr(f"{mode}_{node.name}")
    for node in cut.bodies[stage]:
        new[node] = graph.node_copy(node, new.__getitem__)
        if node.op == "get_attr":
            new[node].target = f"{mode}_{node.target}"
            modules[f"{mode}_{node.target}"] = cut.trace.modules[str(node.target)]
    graph.output(tuple(new[node] for node in cut.results(stage)))
    return StageGraph(
        trace=cut.trace,
        run=_compiled(graph),
        num_values=len(cut.entering[stage]),
        keywords=tuple(source for node in keywords if isinstance(source := sources[node], Keyword)),
        constants=constants,
        modules=modules,
        operations=tuple(str(node.target) for node in cut.bodies[stage]),
    )


def _compiled(graph: fx.Graph) -> Callable[..., tuple[object, ...]]:
    code = graph.python_code("self")  # self is the stage, whose weights the code reads by name in each call
    names = dict(code.globals)
    exec(compile(code.src, "<a stage of a traced model>", "exec"), names)
    return names["forward"]  # type: ignore[no-any-return]


class TracedStage(nn.Module):
    """Module of one stage of a traced model.

    The first stage takes the model's inputs, and the last returns the model's outputs. In between, a stage takes the
    values that cross as positional arguments. It returns a single value as it is, and several as a tuple.

    Until `train` or `eval` is called, it is in the mode of the model, and the modes of single layers count.
    """

    def __init__(
        self,
        model: nn.Module,
        training: StageGraph,
        evaluation: StageGraph,
        given: StageGraph,
        stage: int,
        num_stages: int,
    ) -> None:
        """Makes a stage without its weights, in the mode of the model.

        Args:
            model: the model that was traced.
            training, evaluation: operations of the stage in these modes.
            given: operations with the modes that the layers of the model had.
            stage: index of the stage.
            num_stages: number of stages of the model.
        """
        super().__init__()
        self._model = weakref.ref(model)  # it holds the weights of all stages
        self.training = self._model_was_training = model.training
        self._programs = {True: training, False: evaluation}
        self._given: StageGraph | None = given
        self._stage = stage
        self._is_last = stage == num_stages - 1
        for one in (training, evaluation, given):
            for name, constant in one.constants.items():
                with normal_mode():  # an ordinary tensor, even if the stage is built in inference mode
                    self.register_buffer(name, constant.detach().clone(), persistent=False)
            # Not as submodules: they have no weights, and their operations belong to the stage.
            self.__dict__.update(one.modules)

    @property
    def operations(self) -> tuple[str, ...]:
        """Names of the operations in training. Stages with equal names and equal weight shapes take equally long."""
        return self._programs[True].operations

    def train(self, mode: bool = True) -> TracedStage:
        """Puts all layers into training mode, or into evaluation mode."""
        self._given = None
        return super().train(mode)

    def forward(self, *values: object, **kwargs: object) -> object:
        """Runs the stage.

        Raises:
            SizeMismatch: the inputs do not fit the trace: other structures, other plain values, or sizes that take
                another path.
            ScheduleError: the stage before is in another mode (training or evaluation).
            UnsupportedOp: the model was put into another mode, and the stage was not.
        """
        model = self._model()
        if model is not None and model.training not in (self._model_was_training, self.training):
            mode, method = ("training", "train") if model.training else ("evaluation", "eval")
            raise UnsupportedOp(
                f"the model was put into {mode} mode after it was cut, which its stages do not see: call {method}() of "
                "the Pipeline, or of each part that split() returned"
            )
        one = self._given or self._programs[self.training]
        leaves = _keyword_leaves(one, kwargs, self._stage)
        entering = _tensors_of_inputs(one.trace, values, kwargs) if self._stage == 0 else values
        if len(entering) != one.num_values:
            raise ScheduleError(
                f"stage {self._stage} got {len(entering)} values from the stage before and takes {one.num_values} "
                f"in {'training' if self.training else 'evaluation'}: call train() or eval() on all ranks"
            )
        results = one.run(self, *entering, *leaves)
        if self._is_last:
            computed = iter(results)
            whole = [next(computed) if isinstance(leaf, fx.Node) else leaf for leaf in one.trace.outputs]
            return tree_unflatten(whole, one.trace.output_spec)
        return results[0] if len(results) == 1 else results


def _keyword_leaves(one: StageGraph, kwargs: Mapping[str, object], stage: int) -> list[object]:
    known = one.trace.keywords
    if unknown := sorted(set(kwargs) - set(known)):
        raise SizeMismatch(
            f"the keyword arguments of example_kwargs= ({', '.join(sorted(known)) or 'none'})",
            f"{', '.join(unknown)}, too",
            f"stage {stage}",
            f"give the Pipeline example_kwargs= with {', '.join(unknown)}; the target of loss_fn is target=",
        )
    leaves = []
    for keyword in one.keywords:
        if keyword.name not in kwargs:
            raise SizeMismatch(
                f"the keyword argument {keyword.name}",
                "none",
                f"stage {stage}",
                "pass it on every rank whose stages use it",
            )
        leaves.append(tree_leaves(kwargs[keyword.name])[keyword.leaf])
    # Keyword arguments that the stage does not use are checked too: a mistake is found on every rank that has them.
    for name, value in kwargs.items():
        expected, got = tree_leaves(known[name]), tree_leaves(value)
        _compare_leaves(expected, got, f"{name}=")
    return leaves


def _tensors_of_inputs(trace: Trace, values: Sequence[object], kwargs: Mapping[str, object]) -> list[torch.Tensor]:
    leaves, spec = tree_flatten(tuple(values))
    if spec != trace.inputs_spec:
        expected, got = (_outline(one) for one in (trace.inputs_spec, spec))
        more = len(values) > len(expected)
        advice = "the target is passed as target=" if more else "pass inputs nested like example="
        raise SizeMismatch(f"{_text(expected)}, as example=", _text(got), "inputs", advice)
    _compare_leaves([trace.plain_inputs.get(index, TENSOR) for index in range(len(leaves))], leaves, "inputs")
    # Guards take all inputs of the trace, so they can be checked only on a rank that has all keyword arguments.
    if trace.guards is not None and all(name in kwargs for name in trace.keywords):
        keyword_leaves = [leaf for name in trace.keywords for leaf in tree_leaves(kwargs[name])]
        try:
            trace.guards(*leaves, *keyword_leaves)
        except AssertionError as error:
            # torch says "Guard failed: " and the condition, which names the inputs and their sizes.
            condition = str(error).removeprefix("Guard failed: ")
            raise SizeMismatch(
                f"{condition}, as when the model was traced",
                "other sizes",
                "inputs",
                "with these the model takes another path; use such inputs as example=, or cut it by hand, as a list",
            ) from error
    return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]


_LEAF = "value"


def _outline(spec: TreeSpec) -> tuple[object, ...]:
    outline = tree_unflatten([_LEAF] * spec.num_leaves, spec)
    assert isinstance(outline, tuple)
    return outline


def _text(outline: tuple[object, ...]) -> str:
    return str(outline).replace(repr(_LEAF), _LEAF)


def _compare_leaves(expected: Sequence[object], got: Sequence[object], what: str) -> None:
    """Checks leaves against the trace: tensors in the same places, and equal plain values (constants there)."""
    shown = [TENSOR if isinstance(leaf, torch.Tensor) else leaf for leaf in got]
    if shown != list(expected):
        raise SizeMismatch(
            list(expected), shown, what, "plain values are fixed by example=: pass the same one, or trace with this one"
        )


def build_stages(model: nn.Module, traces: Traces, at: Sequence[str]) -> list[nn.Module]:
    """Returns one module per stage. They share the parameters of `model`.

    Args:
        model: the model that was traced.
        traces: its operations.
        at: names of the layers before which stages 1, 2, ... begin.

    Raises:
        PartitionError: a name that is no layer, or names that are not in the order in which the layers run.
    """
    modes = {"training": traces.training, "evaluation": traces.evaluation}
    if not any(traces.given is trace for trace in modes.values()):
        modes["given"] = traces.given
    cuts = {mode: GraphCut(trace, at) for mode, trace in modes.items()}
    weights = _Weights(model)
    names = weights.hand_out(list(cuts.values()), len(at) + 1)
    stages: list[nn.Module] = []
    for index, mine in enumerate(names):
        called = weights.calling(mine)
        graphs = {mode: _stage_graph(cut, index, called, mode) for mode, cut in cuts.items()}
        given = next(graph for graph in graphs.values() if graph.trace is traces.given)
        stage = TracedStage(model, graphs["training"], graphs["evaluation"], given, index, len(names))
        for name in mine:
            weights.put(stage, name)
        stages.append(stage)
    return stages


class _Weights:
    """Parameters and buffers of a model under all their names."""

    def __init__(self, model: nn.Module) -> None:
        self._tensors: dict[str, torch.Tensor] = dict(model.named_parameters(remove_duplicate=False))
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

    def _nearest(self, name: str, tensor: torch.Tensor, taken: Sequence[Sequence[str]], cut: GraphCut) -> int:
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
