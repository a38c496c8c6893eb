"""State of a rank's objects, as `save` stores it.

Strategy. Each rank describes its part: digests of values, checksums of buffers, param groups by name. One all-gather
of the descriptions follows. From them every rank derives the same data, and decides alike which values are stored once
and which by rank. A rank that cannot describe its part says so there, and all ranks raise.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, cast

from torch import Tensor, nn, optim

from echelon.arguments import named
from echelon.checkpoint.objects.encoding import Encoded, PerRank, Sample, checksum, encode, joined, samples
from echelon.checkpoint.objects.model import Coordinates, ModelTensors, is_sharded, ranges_of, spec_of, tensors_of
from echelon.checkpoint.objects.optimizer import OptimizerState, check_optimizer, kind_of, state_of
from echelon.checkpoint.objects.param_groups import ParamGroup, merge
from echelon.checkpoint.objects.random_states import process_state, states_of
from echelon.checkpoint.ranks.together import gather, rank_of
from echelon.checkpoint.state import Json, Piece, Spec, State
from echelon.data import DataLoader, DistributedSampler
from echelon.errors import CheckpointError, InvalidArgument, summarize
from echelon.group.group import JsonLike, ProcessGroup
from echelon.pipeline.run.pipeline import Pipeline

TAKEN = {"random", "hook"}
"""Names under which a checkpoint has the process's random states, and the state of a gradient hook."""


@dataclass
class Objects:
    """Arguments of `save` and `load`."""

    model: object = None
    optimizer: object = None
    scheduler: object = None
    scaler: object = None
    generators: object = None
    loader: object = None
    extra: dict[str, Any] | None = None
    others: dict[str, object] = field(default_factory=dict)
    """Scheduler, scaler, further models and optimizers, and objects with state_dict and load_state_dict, by keyword."""

    def __post_init__(self) -> None:
        self.others = {"scheduler": self.scheduler, "scaler": self.scaler, **self.others}

    @property
    def are_none(self) -> bool:
        """Whether there is no object."""
        given = self.model, self.optimizer, self.scheduler, self.scaler, self.generators, self.loader, self.extra
        return all(one is None for one in (*given, *self.others.values()))

    @property
    def models(self) -> dict[str, Any]:
        """Models by the prefix of their names."""
        found = {} if self.model is None else {"": self.model}
        return found | {f"{name}/": one for name, one in self.others.items() if isinstance(one, nn.Module | Pipeline)}

    @property
    def optimizers(self) -> dict[str, optim.Optimizer]:
        """Optimizers by their section."""
        found = {} if self.optimizer is None else {"optimizer": check_optimizer(self.optimizer, "optimizer")}
        return found | {name: one for name, one in self.others.items() if isinstance(one, optim.Optimizer)}

    @property
    def sections(self) -> dict[str, Any]:
        """Other objects with a state dict, by their keyword.

        Raises:
            InvalidArgument: one has no state_dict and load_state_dict, or an object has a name of the checkpoint's own.
        """
        found = {
            name: one
            for name, one in self.others.items()
            if not isinstance(one, nn.Module | Pipeline | optim.Optimizer) and one is not None
        }
        for name in sorted(TAKEN & set(self.others)):
            raise InvalidArgument(f"{name}= is a name of the checkpoint's own: pass it as my_{name}=")
        for name, one in found.items():
            check_stateful(one, name)
        return found

    def check(self) -> None:
        """Raises InvalidArgument if an object has no state, as far as it shows without a checkpoint."""
        check_extra(self.extra)
        _ = self.optimizers, self.sections
        if self.loader is not None:
            check_stateful(self.loader, "loader")
        if self.generators is not None:
            states_of(self.generators)


def check_stateful(one: object, name: str) -> None:
    """Raises InvalidArgument unless an object has state_dict and load_state_dict."""
    if not (callable(getattr(one, "state_dict", None)) and callable(getattr(one, "load_state_dict", None))):
        advice = "give it both, or store its values in extra="
        if name == "loader":
            advice = "pass an echelon.data.DataLoader, or the echelon.data.DistributedSampler of another loader"
        raise InvalidArgument(f"{name} is {named(one)}, without state_dict and load_state_dict: {advice}")


class Collected(NamedTuple):
    """State of this rank, and the values of the manifest that describe it."""

    state: State
    seed: int | None
    layout: dict[str, Json]
    not_finite: str | None
    """Parameters with NaN or infinity, as a text for a warning. None if no sample has any."""


@dataclass
class _Part:
    """This rank's part of a checkpoint, before the ranks have compared theirs."""

    place: Coordinates
    models: dict[str, ModelTensors] = field(default_factory=dict)
    optimizers: dict[str, OptimizerState] = field(default_factory=dict)
    kinds: dict[str, str] = field(default_factory=dict)
    """Names of the classes of optimizers and gradient hooks, by their section."""
    shared: dict[str, Encoded] = field(default_factory=dict)
    """Values that are stored once if they are equal on all ranks, else by rank."""
    own: dict[str, Encoded] = field(default_factory=dict)
    """Values that are stored by rank."""
    extra_state: dict[str, Encoded] = field(default_factory=dict)
    """Values of `Module.get_extra_state`, by their name in the state dict."""
    progress: dict[str, Json] = field(default_factory=dict)
    """Steps of pipelines, learned orders of gradients and usual numbers of samples, by the prefix of their model."""


def collect(objects: Objects, group: ProcessGroup | None) -> Collected:
    """Returns this rank's state. Blocks until all ranks have described theirs.

    Raises:
        InvalidArgument, UnsupportedOp: something cannot be stored; on all ranks.
        CheckpointError: another rank's part cannot be stored, or values that must be equal differ.
    """
    part, told = describe_or_fail(lambda: _describe(objects, Coordinates.of(group)), _told, group)
    _compare(part, told)
    _compare_replicas(told)
    data = _data(part, told)
    pipeline = part.models[""].pipeline if "" in part.models else None
    layout: dict[str, Json] = {"dp": part.place.num_dp, "pp": part.place.num_pp}
    if pipeline is not None:
        layout["schedule"] = pipeline.schedule.name
    seed = None if pipeline is None else pipeline.seed
    return Collected(_state(part, told, data, rank_of(group)), seed, layout, _not_finite(told))


def describe_or_fail(
    describe: Callable[[], Any], tell: Callable[[Any], dict[str, JsonLike]], group: ProcessGroup | None
) -> tuple[Any, list[dict[str, Any]]]:
    """Returns this rank's description, and the descriptions that all ranks told. Blocks.

    Raises:
        Exception: describing failed on this rank.
        CheckpointError: it failed on another.
    """
    failure: Exception | None = None
    try:
        mine = describe()
        text = tell(mine)
    except Exception as error:  # also of the user's state_dict(): the others must not wait for this rank
        failure, text = error, {"error": summarize(error)}
    told: list[dict[str, Any]] = gather(group, text)
    if failure is not None:
        raise failure
    for number, each in enumerate(told):
        if "error" in each:
            raise CheckpointError(f"rank {number} cannot take part in the checkpoint: {each['error']}")
    return mine, told


def _describe(objects: Objects, place: Coordinates) -> _Part:
    models = {prefix: tensors_of(one, place, prefix) for prefix, one in objects.models.items()}
    part = _Part(models[""].place if "" in models else place, models)
    names = {key: name for each in models.values() for key, name in each.names.items()}
    for section, optimizer in objects.optimizers.items():
        part.optimizers[section] = state_of(optimizer, names, section)
        part.kinds[section] = kind_of(optimizer)
    for section, one in objects.sections.items():
        part.shared[section] = encode(one.state_dict(), section)
    for key, value in check_extra(objects.extra).items():
        name = joined("extra", key)
        if isinstance(value, PerRank):
            part.own[name] = encode(value.value, name)
        else:
            part.shared[name] = encode(value, name)
    if objects.generators is not None:
        part.own["generators"] = encode(states_of(objects.generators), "generators")
    if objects.loader is not None:
        check_stateful(objects.loader, "loader")
        # The state of our own is that of all ranks, so any number of ranks loads it. Of others this is unknown.
        where = part.shared if isinstance(objects.loader, DataLoader | DistributedSampler) else part.own
        where["loader"] = encode(objects.loader.state_dict(), "loader")  # type: ignore[attr-defined]
    part.own["random"] = encode(process_state(), "random")
    for prefix, each in models.items():
        _describe_model(part, prefix, each)
    return part


def check_extra(extra: object) -> dict[str, Any]:
    """Returns `extra`, empty for None. Raises InvalidArgument unless it is a dict with text as keys."""
    if extra is None:
        return {}
    if not isinstance(extra, dict) or not all(isinstance(key, str) for key in extra):
        raise InvalidArgument(f"extra is {named(extra)}: pass a dict with text as keys, such as extra={{'epoch': 3}}")
    return extra


def _describe_model(part: _Part, prefix: str, model: ModelTensors) -> None:
    for name, module in model.extra_state.items():
        part.extra_state[name] = encode(module.get_extra_state(), name)
    if model.pipeline is not None:
        part.progress[prefix] = {"num_steps": model.pipeline.num_steps}
    if model.wrapped is not None:
        reducer, hook = model.wrapped.reducer, model.wrapped.hook
        progress: dict[str, Json] = {}
        if (learned := reducer.learned) is not None:
            progress |= {"order": list[Json](learned.order), "in_one": learned.in_one}
        if reducer.usual_samples:
            progress["usual_samples"] = reducer.usual_samples
        if progress:
            part.progress[prefix] = progress
        if hook is not None and (state := hook.state_dict()):
            part.own[f"{prefix}hook"] = encode(state, f"{prefix}hook")
            part.kinds[f"{prefix}hook"] = type(hook).__name__


def _told(part: _Part) -> dict[str, JsonLike]:
    """Returns this rank's description, as the other ranks get it."""
    found = _samples(part)
    told: dict[str, Any] = {
        "place": list(part.place),
        "shared": {name: encoded.digest() for name, encoded in part.shared.items()},
        "own": sorted(part.own),
        "extra_state": {name: [encoded.data, encoded.digest()] for name, encoded in part.extra_state.items()},
        "models": {prefix: list(model.tensors) for prefix, model in part.models.items()},
        "aliases": {other: name for model in part.models.values() for other, name in model.aliases.items()},
        "kinds": part.kinds,
        "groups": {
            section: [[list(each.names), each.options] for each in one.groups]
            for section, one in part.optimizers.items()
        },
        "values": {name: value for one in part.optimizers.values() for name, value in one.values.items()},
        "samples": {
            name: found[name].crc32
            for model in part.models.values()
            for name, tensor in model.tensors.items()
            if name in found and not (model.is_local or is_sharded(tensor))
        },
        "not_finite": {name: [each.not_finite, each.taken] for name, each in found.items() if each.not_finite},
        # Checksums of buffers alone: replicas need not have them equal, and they are small.
        "buffers": {
            name: checksum(model.tensors[name])
            for model in part.models.values()
            for name in model.buffers
            if not is_sharded(model.tensors[name])
        },
    }
    return told


def _samples(part: _Part) -> dict[str, Sample]:
    """Returns samples of this rank's parameters."""
    found = {
        name: cast("Any", tensor).to_local() if is_sharded(tensor) else tensor
        for model in part.models.values()
        for name, tensor in model.tensors.items()
        if name not in model.buffers  # a mask may be of infinities
    }
    return dict(zip(found, samples(found.values()), strict=True))


def _not_finite(told: Sequence[Mapping[str, Any]]) -> str | None:
    """Returns a text of the parameters that have NaN or infinity on some rank. None if there are none."""
    found: dict[str, tuple[int, int]] = {}
    for each in told:
        for name, (bad, taken) in each["not_finite"].items():
            found.setdefault(name, (bad, taken))
    if not found:
        return None
    first, (bad, taken) = next(iter(found.items()))
    more = f", and in {len(found) - 1} other parameters" if len(found) > 1 else ""
    return f"NaN or infinity in {first} ({bad} of {taken} values that were looked at){more}"


def _compare(part: _Part, told: Sequence[Mapping[str, Any]]) -> None:
    """Raises InvalidArgument if a rank stores other things than this one."""
    for what in ("models", "shared", "own", "kinds"):
        for rank, each in enumerate(told):
            if difference := sorted(set(each[what]) ^ set(told[0][what])):
                raise InvalidArgument(
                    f"ranks 0 and {rank} store different things, the first of them {difference[0]!r}: pass the same "
                    "arguments on every rank"
                )
    for name in part.shared:
        differing = [rank for rank, each in enumerate(told) if each["shared"][name] != told[0]["shared"][name]]
        if differing and name == "loader":
            raise InvalidArgument(
                f"the loader is at another sample on rank {differing[0]} than on rank 0: save when all ranks have "
                "taken the same number of batches"
            )
        if differing and name.startswith("extra/"):
            raise InvalidArgument(
                f"{name} differs between ranks 0 and {differing[0]}: make it equal, or wrap it: PerRank(value)"
            )


def _compare_replicas(told: Sequence[Mapping[str, Any]]) -> None:
    """Raises InvalidArgument if ranks have the same parameter with different values, which a checkpoint would mix."""
    first: dict[str, tuple[int, int]] = {}
    for rank, each in enumerate(told):
        for name, sample in each["samples"].items():
            before, found = first.setdefault(name, (rank, sample))
            if found != sample:
                raise InvalidArgument(
                    f"{name} differs between ranks {before} and {rank}, which should hold replicas: train them by "
                    "DistributedDataParallel, save a pipeline's as model=pipe, or give each rank a Store of its own: "
                    "group=group.subgroup([rank])"
                )


def _data(part: _Part, told: Sequence[Mapping[str, Any]]) -> dict[str, Json]:
    """Returns the values that are the same on all ranks."""
    united: dict[str, dict[str, Any]] = {"aliases": {}, "values": {}, "extra_state": {}, "buffers": {}}
    local: set[str] = set()
    for each in told:
        for what, found in united.items():
            for name, value in each[what].items():
                first = found.setdefault(name, value)
                if what == "buffers" and first != value:
                    local.add(name)
    groups: dict[str, Json] = {}
    for section in part.optimizers:
        by_rank = [[ParamGroup(tuple(names), options) for names, options in each["groups"][section]] for each in told]
        groups[section] = [{"params": list(each.names), "options": each.options} for each in merge(by_rank, section)]
    data: dict[str, Any] = {
        "places": [each["place"] for each in told],
        "models": {
            prefix: sorted({name for each in told for name in each["models"][prefix]}) for prefix in part.models
        },
        "aliases": united["aliases"],
        "local": sorted(local),
        "progress": dict(part.progress),
        "extra_state": {name: data for name, (data, _) in united["extra_state"].items()},
        "kinds": dict(part.kinds),
        "groups": groups,
        "values": united["values"],
        "shared": {
            name: encoded.data
            for name, encoded in part.shared.items()
            if all(each["shared"][name] == told[0]["shared"][name] for each in told)
        },
    }
    return data


class _Writer:
    """State that grows by tensors, each under one name."""

    def __init__(self) -> None:
        self.specs: dict[str, Spec] = {}
        self.pieces: list[Piece] = []

    def add(self, name: str, spec: Spec, pieces: Iterable[tuple[int, Tensor]]) -> None:
        if name in self.specs:
            raise InvalidArgument(f"two tensors of the checkpoint are called {name}: rename one of them")
        self.specs[name] = spec
        self.pieces += [Piece(name, start, values) for start, values in pieces]

    def add_encoded(self, encoded: Encoded, suffix: str = "") -> None:
        for name, tensor in encoded.tensors.items():
            self.add(name + suffix, spec_of(tensor), [(0, tensor)])

    def add_optimizer(self, state: OptimizerState, suffix: str) -> None:
        ranges: dict[str, list[tuple[int, Tensor]]] = {name: [] for name in state.specs}
        for piece in state.pieces:
            ranges[piece.name].append((piece.start, piece.values))
        for name, spec in state.specs.items():
            self.add(name + suffix, spec, ranges[name])


def _state(part: _Part, told: Sequence[Mapping[str, Any]], data: dict[str, Json], rank: int) -> State:
    """Returns the state under its names: values of a rank alone end with @ and the rank."""
    writer = _Writer()
    local = set(cast("list[str]", data["local"]))
    # The first replica's copy has no suffix: every other layout loads that one.
    copy = f"@{part.place.dp}" if part.place.dp else ""
    for model in part.models.values():
        for name, tensor in model.tensors.items():
            suffix = copy if model.is_local or name in local else ""
            writer.add(name + suffix, spec_of(tensor), ranges_of(tensor, name))
    # Replicas of an extra state need not be equal: the first rank's counts.
    for name, encoded in part.extra_state.items():
        first = next(each["extra_state"][name] for each in told if name in each["extra_state"])
        if first[1] == encoded.digest():
            writer.add_encoded(encoded)
    # Parameters that each replica has for itself have such a state.
    suffix = copy if any(model.is_local for model in part.models.values()) else ""
    for one in part.optimizers.values():
        writer.add_optimizer(one, suffix)
    own = dict(part.own)
    for name, encoded in part.shared.items():
        if name in cast("dict[str, Json]", data["shared"]):
            writer.add_encoded(encoded)
        else:
            own[name] = encoded
    for encoded in own.values():
        writer.add_encoded(encoded, f"@{rank}")
    return State(writer.specs, writer.pieces, data, {name: encoded.data for name, encoded in own.items()})
