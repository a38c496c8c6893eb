"""ZeroOptimizer: each rank keeps the optimizer's state of its shard of the parameters only.

Strategy (ZeRO stage 1, Rajbhandari et al., 2020, arXiv:1910.02054). All parameters of one dtype form a row that is cut
into one shard per rank. The inner optimizer works on views of the shard's parameters and gradients, so it updates them
in place. Then the shards are gathered, a bucket at a time. Parameters and gradients stay whole on every rank.

State for a checkpoint: tensors with one value per element of a piece are sharded as the parameter is, so they are
gathered whole and cut again. Other values, such as the number of steps, are equal on all ranks that have a piece of the
parameter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn, cast, overload

import torch
from torch import Tensor

from echelon.arguments import check_bucket_mb, named, no_attribute, refuse_others
from echelon.backends.admission import check_values, has_values
from echelon.data_parallel.broadcast import check_same_lines, described, kind_of
from echelon.data_parallel.layout import MEBIBYTE, Piece, pieces_between, shard_layout
from echelon.errors import InvalidArgument, SizeMismatch, UnsupportedOp
from echelon.group.group import JsonLike, ProcessGroup
from echelon.launch.init import CURRENT, given_or_current
from echelon.purposes import SHARD, SHARDED_STEP


class _Entry(NamedTuple):
    """Description of one value in the state of a parameter, as the ranks exchange it."""

    name: str
    dtype: str
    """Dtype of a tensor. Empty for a value that is no tensor."""
    is_sharded: bool
    value: JsonLike


def gather_state(
    states: Iterable[tuple[Piece, Mapping[str, Any]]],
    parameters: Sequence[Tensor],
    group: ProcessGroup,
    dst: int | None = None,
) -> dict[int, dict[str, Any]]:
    """Gathers the states of all ranks' pieces into states of whole parameters. Blocks; every rank must call it.

    Args:
        states: this rank's pieces and the state of each.
        parameters: all parameters, whole; their values do not matter.
        group: the ranks that have the pieces.
        dst: the only rank that gets the result, while the others get an empty dict. None: every rank gets it.

    Returns:
        The state of each parameter that has one, by the parameter's number. Tensors are new.
    """
    mine = {piece.parameter: dict(state) for piece, state in states if state}
    told = group.all_gather_object({str(number): _describe(state) for number, state in mine.items()})
    owners = [cast("dict[str, list[Any]]", each) for each in told]
    gathered: dict[int, dict[str, Any]] = {}
    # In the order of the parameters on every rank, so that the collectives match. Each decision below depends on the
    # gathered descriptions only.
    for number, parameter in enumerate(parameters):
        having = [rank for rank, owned in enumerate(owners) if str(number) in owned]
        if not having:
            continue
        own = mine.get(number, {})
        entries = [_Entry(*entry) for entry in owners[having[0]][str(number)]]
        whole = {entry.name: _collect(entry, own, having[0], parameter, group, dst) for entry in entries}
        if dst is None or dst == group.rank:
            gathered[number] = whole
    return gathered


def cut_state(whole: Mapping[str, Any], piece: Piece, parameter: Tensor) -> dict[str, Any]:
    """Returns the state of one piece, in new tensors, cut from the state of its whole parameter.

    Raises:
        InvalidArgument: the state belongs to a parameter of another shape.
    """
    state: dict[str, Any] = {}
    for name, value in whole.items():
        if not isinstance(value, Tensor):
            state[name] = value
        # "step" by name: a scalar parameter's step has the parameter's shape, but is a count and keeps its dtype.
        elif name == "step" or value.dim() == 0 < parameter.dim():
            state[name] = value.detach().clone()
        elif value.shape == parameter.shape:
            # The dtype and the order in memory of the parameter here, which may differ from the saved ones.
            dtype = parameter.dtype if parameter.is_floating_point() else value.dtype
            moved = torch.empty_like(parameter, dtype=dtype, requires_grad=False).copy_(value.detach())
            state[name] = in_memory_order(moved)[piece.start : piece.stop].clone()
        else:
            raise InvalidArgument(
                f"state {name!r} of parameter {piece.parameter} has shape {tuple(value.shape)}, the parameter "
                f"{tuple(parameter.shape)}: load the state of the same model"
            )
    return state


def in_memory_order(tensor: Tensor) -> Tensor:
    """Returns a one-dimensional view of a tensor without gaps, in the order of its memory."""
    return tensor.detach().as_strided((tensor.numel(),), (1,))


def _describe(state: Mapping[str, Any]) -> list[JsonLike]:
    entries: list[JsonLike] = []
    for name, value in state.items():
        if isinstance(value, Tensor):
            entries.append([name, str(value.dtype).removeprefix("torch."), value.dim() > 0, None])
        else:
            entries.append([name, "", False, value])
    return entries


def _collect(
    entry: _Entry, own: Mapping[str, Any], first: int, parameter: Tensor, group: ProcessGroup, dst: int | None
) -> Any:
    """Gathers one value from all ranks. `first` is the lowest rank that has it."""
    if not entry.dtype:
        return entry.value
    dtype = cast("torch.dtype", getattr(torch, entry.dtype))
    gives = entry.name in own and (entry.is_sharded or group.rank == first)
    # A value that is not sharded is sent by one rank only; the others send 0 elements.
    part = own[entry.name].reshape(-1) if gives else torch.empty(0, dtype=dtype, device=parameter.device)
    came = group.all_gather(part) if dst is None else group.gather(part, dst)
    if came is None:
        return None
    if not entry.is_sharded:
        return came[0]
    whole = torch.empty_like(parameter, dtype=dtype, requires_grad=False)
    in_memory_order(whole).copy_(came)
    return whole


_NOT_ELEMENTWISE = ("Adafactor", "LBFGS", "Muon", "SparseAdam")
"""Torch's optimizers whose update of an element needs other elements of its parameter."""


class Shard(NamedTuple):
    """Piece of a parameter whose state this rank keeps."""

    parameter: Tensor
    """The whole parameter."""
    piece: Piece
    view: torch.nn.Parameter
    """Elements of the piece, in the order of the parameter's memory."""


_MEANT = {
    "consolidate_state_dict": " save it by echelon.checkpoint.Store, which any number of ranks loads",
    "backward": " call loss.backward()",
    **dict.fromkeys(
        ("clip_grad_norm_", "clip_master_grads"), " call torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)"
    ),
}
"""Names that other sharded optimizers give to attributes, with advice."""


class ZeroOptimizer(torch.optim.Optimizer):
    """Optimizer whose state is sharded over the ranks of a group: the same result with 1/world_size of the state.

    `param_groups` holds the whole parameters, so learning rate schedulers, `zero_grad` and clipping work as usual.
    Options that they change apply from the next step. Every rank must make the same calls of `step`, `state_dict`,
    `load_state_dict` and `add_param_group`, with gradients that are equal on all ranks, as DistributedDataParallel
    leaves them (LocalSGD does not).

    For elementwise optimizers: SGD, Adam, AdamW, RMSprop, Adagrad and the like. With AdamW in float32 a rank keeps
    8 + 8 / world_size bytes per parameter: value, gradient, and its shard of two moments.
    """

    if not TYPE_CHECKING:  # type checkers report the name themselves

        def __getattr__(self, name: str) -> NoReturn:
            raise no_attribute("a ZeroOptimizer", name, dir(type(self)) if name[:1] != "_" else (), _MEANT)

    def __getstate__(self) -> dict[str, Any]:
        # torch's would leave out the shards, and the copy would fail in its first step.
        raise UnsupportedOp(
            "a ZeroOptimizer belongs to its group and cannot be copied or pickled: save its state_dict(), which every "
            "rank calls"
        )

    @refuse_others(
        process_group="group",
        learning_rate="lr",
        parameters_as_bucket_view=" buckets are used always: leave it out",
        overlap_with_ddp=" gradients are taken as DDP leaves them: leave it out",
    )
    def __init__(
        self,
        optimizer_class: type[torch.optim.Optimizer],
        params: Iterable[Any],
        group: ProcessGroup = CURRENT,
        bucket_mb: float = 25.0,
        **options: Any,
    ) -> None:
        """Compares the parameters over all ranks and plans the shards. Blocks.

        Args:
            optimizer_class: class of the optimizer, such as torch.optim.AdamW.
            params: parameters, or dicts of "params" and options, as any optimizer takes; the same on every rank.
            group: the ranks that share the state. Default: that of `echelon.init()`, or of the simulated rank.
            bucket_mb: mebibytes of parameters per message, and of temporary memory.
            options: options of the optimizer, such as lr.

        Raises:
            CollectiveMismatch: on every rank, if optimizers, or shapes, dtypes or orders in memory of parameters,
                differ.
            UnsupportedOp: the optimizer is not elementwise, or a parameter has gaps in memory or no memory of its own.
            InvalidArgument: `optimizer_class` is no class of optimizers, `params` are no parameters, there is no
                group, or `bucket_mb` no size.
            ValueError: the optimizer itself refuses an option.
        """
        group = given_or_current(group)
        if not isinstance(optimizer_class, type) or not issubclass(optimizer_class, torch.optim.Optimizer):
            raise InvalidArgument(
                f"optimizer_class is {named(optimizer_class)}: pass a class, its parameters and its options, such as "
                "ZeroOptimizer(torch.optim.AdamW, model.parameters(), group, lr=1e-3)"
            )
        check_bucket_mb(bucket_mb)
        if any(base.__name__ in _NOT_ELEMENTWISE for base in optimizer_class.__mro__):
            raise UnsupportedOp(
                f"{optimizer_class.__name__} does not update each element by itself, so its state cannot be cut "
                "anywhere: use the plain optimizer, or AdamW or SGD here"
            )
        if isinstance(params, Tensor) or not isinstance(params, Iterable):
            raise InvalidArgument(f"params is {named(params)}: pass the parameters, such as model.parameters()")
        params = list(map(_listed, params))
        _check_values(params)
        whole = optimizer_class(params, **options)  # checks the options and fills in the defaults; keeps no state
        self._name = optimizer_class.__name__
        self._group = group
        self._is_planned = False
        super().__init__(whole.param_groups, whole.defaults)
        self._is_planned = True
        self._bucket_bytes = int(bucket_mb * MEBIBYTE)
        self._parameters: list[Tensor] = []
        self._rows: list[_Row] = []
        self._views: list[tuple[Piece, torch.nn.Parameter]] = []
        self._inner = optimizer_class(self._cut(self.param_groups), **options)

    @overload
    def step(self, closure: None = None) -> None: ...
    @overload
    def step(self, closure: Callable[[], float]) -> float: ...
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Updates this rank's shard, then gathers the parameters on every rank. Blocks.

        Args:
            closure: function that evaluates the model again and returns the loss.

        Raises:
            SizeMismatch: a parameter's memory was replaced, such as by model.to().
            UnsupportedOp: a gradient is sparse, or has no memory of its own.
            CollectiveMismatch, PeerFailed, Timeout: as `ProcessGroup.all_gather`.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._check_gradients()
        # Schedulers change the options in the outer groups.
        for outer, inner in zip(self.param_groups, self._inner.param_groups, strict=True):
            inner.update(_options(outer))
        for piece, view in self._views:
            view.grad = self._gradient_of(piece, view)
        self._inner.step()
        for outer, inner in zip(self.param_groups, self._inner.param_groups, strict=True):
            outer.update(_options(inner))  # some optimizers count their steps there
        # The views of gradients would keep their memory alive after zero_grad.
        for _, view in self._views:
            view.grad = None
        with torch.no_grad(), self._group.backend.flight_recorder.within(SHARDED_STEP):
            for row in self._rows:
                self._gather(row)
        return loss

    def state_dict(self, dst: int | None = None) -> dict[str, Any]:
        """Returns the whole state, in the plain optimizer's format. Blocks; every rank must call it.

        Args:
            dst: the only rank that gets the state, while the others get an empty one. None: every rank gets it.

        Raises:
            InvalidRank: `dst` is not a rank of the group.
            CollectiveMismatch, PeerFailed, Timeout: as `ProcessGroup.all_gather`.
        """
        packed = super().state_dict()
        states = [(piece, self._inner.state.get(view, {})) for piece, view in self._views]
        packed["state"] = gather_state(states, self._parameters, self._group, dst)
        return packed

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads this rank's shard of a whole state. Does not block.

        The state may come from this optimizer, on any number of ranks, or from the plain optimizer.

        Args:
            state_dict: a whole state, as `state_dict` returns it.

        Raises:
            ValueError: it belongs to other parameters.
        """
        super().load_state_dict({**state_dict, "state": {}})
        self._inner.state.clear()
        places = {id(view): (piece, view) for piece, view in self._views}
        for inner in self._inner.param_groups:
            for view in inner["params"]:
                piece, _ = places[id(view)]
                if whole := state_dict["state"].get(piece.parameter):
                    self._inner.state[view] = cut_state(whole, piece, self._parameters[piece.parameter])

    @property
    def group(self) -> ProcessGroup:
        """Ranks that share the state."""
        return self._group

    @property
    def kind(self) -> str:
        """Name of the optimizer's class."""
        return self._name

    @property
    def whole_parameters(self) -> Sequence[Tensor]:
        """All parameters, in the order of their numbers in pieces."""
        return self._parameters

    @property
    def shards(self) -> list[Shard]:
        """Pieces whose state this rank keeps: `local_state[shard.view]`."""
        return [Shard(self._parameters[piece.parameter], piece, view) for piece, view in self._views]

    @property
    def local_state(self) -> MutableMapping[Any, dict[str, Any]]:
        """State of this rank's shards, by their view. It may be changed."""
        return self._inner.state

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds parameters, which are cut into shards of their own. Blocks; every rank must do the same.

        Args:
            param_group: a dict with "params" and options, as of any optimizer; the same on every rank.

        Raises:
            CollectiveMismatch, UnsupportedOp: as when the optimizer is made.
            ValueError: the optimizer itself refuses the group, for a parameter that it already has for instance.
        """
        super().add_param_group(param_group)
        if self._is_planned:  # the constructor of the base class calls this before there is anything to add to
            for each in self._cut(self.param_groups[-1:]):
                self._inner.add_param_group(each)

    # Inside

    def _cut(self, param_groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Plans shards for the parameters of new groups. Returns the groups with this rank's views as parameters."""
        first = len(self._parameters)
        new: list[Tensor] = [parameter for each in param_groups for parameter in each["params"]]
        for number, one in enumerate(new, start=first):
            check_values(one, f"ZeroOptimizer, parameter {number},")
        lines = [f"parameter {number} {described(one)}" for number, one in enumerate(new, start=first)]
        with self._group.backend.flight_recorder.within(SHARD):
            check_same_lines([f"optimizer {self._name}", *lines], self._group)
        rows = _rows_of(new, first, self._group.world_size)
        self._parameters += new
        self._rows += rows
        views = [
            (piece, torch.nn.Parameter(_piece_of(self._parameters[piece.parameter], piece)))
            for row in rows
            for piece in row.of_rank(self._group.rank)
        ]
        self._views += views
        cut = []
        for each in param_groups:
            numbers = range(first, first + len(each["params"]))
            cut.append({**_options(each), "params": [view for piece, view in views if piece.parameter in numbers]})
            first = numbers.stop
        return cut

    def _gather(self, row: _Row) -> None:
        """Gathers the parameters of one row, in buckets."""
        group = self._group
        lengths = [row.bounds[rank + 1] - row.bounds[rank] for rank in range(group.world_size)]
        # A bucket takes an equal stretch of every rank's shard, so all ranks send in every message.
        step = max(1, self._bucket_bytes // (row.element_size * group.world_size))
        for begin in range(0, max(lengths), step):
            parts = [
                pieces_between(row.sizes, *_clip(row.bounds[rank], row.bounds[rank + 1], begin, step))
                for rank in range(group.world_size)
            ]
            mine = [_piece_of(self._parameters[row.numbers[piece.parameter]], piece) for piece in parts[group.rank]]
            like = self._parameters[row.numbers[0]].detach()
            out = like.new_empty(sum(len(piece) for part in parts for piece in part))
            came = group.all_gather(torch.cat(mine) if mine else like.new_empty(0), out=out)
            self._keep(row, parts, came)

    def _keep(self, row: _Row, parts: list[tuple[Piece, ...]], came: Tensor) -> None:
        position = 0
        for rank, pieces in enumerate(parts):
            for piece in pieces:
                values = came[position : position + len(piece)]
                position += len(piece)
                if rank != self._group.rank:
                    _piece_of(self._parameters[row.numbers[piece.parameter]], piece).copy_(values)

    def _check_gradients(self) -> None:
        """Checks the gradients of all shards, so that every rank raises the same error, and none waits for another."""
        for number, parameter in enumerate(self._parameters):
            if parameter.grad is not None and parameter.grad.layout != torch.strided:
                raise UnsupportedOp(
                    f"the gradient of parameter {number} is sparse, and shards are cut from dense ones: make it dense, "
                    "such as by nn.Embedding(..., sparse=False)"
                )
            if parameter.grad is not None and not has_values(parameter.grad):
                check_values(parameter.grad, f"ZeroOptimizer.step, the gradient of parameter {number},")

    def _gradient_of(self, piece: Piece, view: Tensor) -> Tensor | None:
        parameter = self._parameters[piece.parameter]
        # An update of the old memory would be lost without an error.
        if view.data_ptr() != _piece_of(parameter, piece).data_ptr():
            raise SizeMismatch(
                "the memory that the parameters had when the optimizer was made",
                "other memory",
                "ZeroOptimizer.step",
                "move or convert the model first, then make the optimizer",
            )
        gradient = parameter.grad
        if gradient is None:
            return None
        # Pieces are ranges of memory: parameter and gradient must have their elements in the same order there.
        if gradient.stride() != parameter.stride():
            gradient = torch.empty_like(parameter).copy_(gradient)
        return _piece_of(gradient, piece)


class _Row:
    """Row of parameters of one dtype and device, cut into shards."""

    def __init__(self, numbers: list[int], parameters: list[Tensor], num_shards: int) -> None:
        self.numbers = numbers
        self.sizes = [parameter.numel() for parameter in parameters]
        self.element_size = parameters[0].element_size()
        self._shards = shard_layout(self.sizes, num_shards)
        self.bounds = [0]
        for shard in self._shards:
            self.bounds.append(self.bounds[-1] + sum(map(len, shard)))

    def of_rank(self, rank: int) -> list[Piece]:
        """Returns the pieces of one shard, with the optimizer's numbers of the parameters."""
        return [Piece(self.numbers[each.parameter], each.start, each.stop) for each in self._shards[rank]]


def _rows_of(parameters: list[Tensor], first: int, num_shards: int) -> list[_Row]:
    """Sorts parameters into rows by dtype and device. The number of the first parameter is `first`."""
    by_kind: dict[str, list[int]] = {}
    for number, parameter in enumerate(parameters, start=first):
        if not _is_dense(parameter):
            raise UnsupportedOp(
                f"parameter {number} of shape {tuple(parameter.shape)} has gaps in memory, or elements twice: "
                "use its .contiguous() copy as the parameter"
            )
        by_kind.setdefault(kind_of(parameter), []).append(number)
    return [
        _Row(numbers, [parameters[number - first] for number in numbers], num_shards) for numbers in by_kind.values()
    ]


def _piece_of(tensor: Tensor, piece: Piece) -> Tensor:
    return in_memory_order(tensor)[piece.start : piece.stop]


def _is_dense(tensor: Tensor) -> bool:
    """Whether the elements fill a range of memory without gaps or overlaps, in any order of dims."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1 and stride != expected:
            return False
        expected *= size
    return True


def _options(param_group: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in param_group.items() if name not in ("params", "param_names")}


def _clip(first: int, last: int, begin: int, step: int) -> tuple[int, int]:
    return min(first + begin, last), min(first + begin + step, last)


def _listed(params: Any) -> Any:
    """Returns a parameter group with a list of its parameters, instead of an iterator that ends with its first use."""
    if isinstance(params, dict) and isinstance(params.get("params"), Iterator):
        return {**params, "params": list(params["params"])}
    return params


def _check_values(params: list[Any]) -> None:
    members = (member for each in params for member in (each["params"] if isinstance(each, dict) else [each]))
    for number, parameter in enumerate(members):
        if isinstance(parameter, Tensor) and parameter.is_meta:
            raise UnsupportedOp(
                f"parameter {number} is on the meta device and has no values: call model.to_empty(device='cpu') and "
                "initialise it, then make the optimizer"
            )
