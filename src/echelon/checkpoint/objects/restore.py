"""Loading of a checkpoint into a rank's objects.

Strategy. Each rank describes its objects: names, shapes, dtypes, param groups. One all-gather of the descriptions
follows, so all ranks find the same differences and raise the same error. Small values are read and decoded next. Only
then is the first tensor overwritten: in place, and through one copy at a time where memory is not flat.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from echelon.arguments import choices
from echelon.checkpoint.objects.collect import TAKEN, Objects, describe_or_fail
from echelon.checkpoint.objects.contents import Contents, Progress, contents_of
from echelon.checkpoint.objects.encoding import decode, tensor_names
from echelon.checkpoint.objects.model import Coordinates, ModelTensors, ranges_of, tensors_of
from echelon.checkpoint.objects.optimizer import Target, groups_of, is_cut, kind_of, restored, saved_states
from echelon.checkpoint.objects.param_groups import ParamGroup, match, merge
from echelon.checkpoint.objects.random_states import set_process_state, set_states
from echelon.checkpoint.ranks.loading import Checkpoint
from echelon.checkpoint.ranks.together import rank_of, together
from echelon.checkpoint.state import Json, Spec, Wanted
from echelon.data_parallel.zero import ZeroOptimizer
from echelon.errors import CheckpointError, InvalidArgument, summarize
from echelon.group.group import JsonLike, ProcessGroup
from echelon.pipeline.run.weights import give_memory
from echelon.wording import counted

_OTHER = "an object with a state_dict"


@dataclass
class _Live:
    """This rank's objects, under the names of the checkpoint."""

    objects: Objects
    source: Checkpoint
    contents: Contents
    place: Coordinates
    models: dict[str, ModelTensors]
    stored: dict[str, str]
    """Name in the checkpoint of each tensor that has one."""
    names: dict[int, str]
    """Name in the checkpoint of each parameter, by its id."""
    groups: dict[str, list[ParamGroup]]
    own_rank: int | None = None
    """Rank that saved the values for this rank. None if no rank did."""
    values: dict[str, Any] = field(default_factory=dict)
    """Decoded values, by name."""
    tensors: dict[str, Tensor] = field(default_factory=dict)
    """Small tensors that were read."""


def restore(
    source: Checkpoint,
    objects: Objects,
    group: ProcessGroup | None,
    *,
    strict: bool,
) -> None:
    """Loads a checkpoint into objects. Blocks; all ranks call it.

    Args:
        source: the checkpoint.
        objects: objects to fill.
        group: the ranks that load.
        strict: whether names must be the same on both sides.

    Raises:
        InvalidArgument: the objects are others than the saved ones; on all ranks, before anything has changed.
        CheckpointError: a file cannot be read, or the manifest has values that no save writes.
    """
    # Before any object changes: a value of another form would be noticed halfway.
    contents = contents_of(source.step, source.data, len(source.own))
    live, told = describe_or_fail(
        lambda: _describe(source, contents, objects, Coordinates.of(group)),
        lambda one: _told(one) | {"strict": strict},
        group,
    )
    _compare_calls(told)
    _compare_models(live, told, strict)
    matched = _match_groups(live, told, strict)
    live.own_rank = _own_rank(live, rank_of(group), [Coordinates(*each["place"]) for each in told])
    together(group, lambda: _read_values(live, strict))
    together(group, lambda: _apply(live, matched))
    for prefix, model in live.models.items():  # lays out buckets anew, which all ranks do together
        if model.wrapped is not None and (learned := _progress(live, prefix).learned) is not None:
            model.wrapped.reducer.follow(learned)


def _describe(source: Checkpoint, contents: Contents, objects: Objects, place: Coordinates) -> _Live:
    models = {prefix: tensors_of(one, place, prefix, takes_meta=True) for prefix, one in objects.models.items()}
    saved, stored = _Names(source.specs, contents.aliases), {}
    for model in models.values():
        others: dict[str, list[str]] = {}
        for other, name in model.aliases.items():
            others.setdefault(name, []).append(other)
        for name in model.tensors:
            if (found := saved.find(name, others.get(name, ()))) is not None:
                stored[name] = found
    named = {key: stored.get(name, name) for each in models.values() for key, name in each.names.items()}
    where = models[""].place if "" in models else place
    live = _Live(objects, source, contents, where, models, stored, named, {})
    for section, optimizer in objects.optimizers.items():
        live.groups[section] = groups_of(optimizer, named, section)
    objects.check()
    return live


class _Names:
    """Names of the models' tensors in a checkpoint."""

    def __init__(self, specs: Mapping[str, Spec], aliases: Mapping[str, str]) -> None:
        self._specs = specs
        self._aliases = aliases
        self._others: dict[str, list[str]] = {}
        for other, name in self._aliases.items():
            self._others.setdefault(name, []).append(other)

    def find(self, name: str, others: Iterable[str]) -> str | None:
        """Returns the stored name of a tensor that has several names."""
        for one in (name, *others):
            for candidate in (one, self._aliases.get(one, one)):
                if candidate in self._specs:
                    return candidate
        return None


def _told(live: _Live) -> dict[str, JsonLike]:
    """Returns this rank's description, as the other ranks get it."""
    found: dict[str, Any] = {
        "place": list(live.place),
        "models": list(live.models),
        "tensors": {
            name: [live.stored.get(name, ""), list(tensor.shape), str(tensor.dtype)]
            for model in live.models.values()
            for name, tensor in model.tensors.items()
        },
        "aliases": {other: name for model in live.models.values() for other, name in model.aliases.items()},
        "groups": {
            section: [[list(each.names), each.options] for each in groups] for section, groups in live.groups.items()
        },
    }
    return found


def _compare_calls(told: Sequence[Mapping[str, Any]]) -> None:
    """Raises InvalidArgument if ranks load into different objects, or with another `strict`."""
    for rank, each in enumerate(told):
        for what, first in (("models", told[0]["models"]), ("groups", list(told[0]["groups"]))):
            if difference := sorted(set(first) ^ set(each[what])):
                name = difference[0].removesuffix("/") or "model"
                raise InvalidArgument(f"ranks 0 and {rank} do not both load {name}: pass the same on all ranks")
        if each["strict"] != told[0]["strict"]:
            raise InvalidArgument(
                f"rank {rank} loads with strict={each['strict']} and rank 0 with strict={told[0]['strict']}: pass the "
                "same on all ranks"
            )


def _compare_models(live: _Live, told: Sequence[Mapping[str, Any]], strict: bool) -> None:
    """Raises InvalidArgument if the models differ from the saved ones."""
    saved = live.contents.models
    for prefix in sorted(set(live.models) - set(saved)):  # even without `strict`: all of its values would be missing
        raise _absent(live, prefix.removesuffix("/") or "model", "a model", or_not_strict=False)
    covered: set[str] = set()
    missing: dict[str, str] = {}
    changed: dict[str, str] = {}
    for each in told:
        for name, (stored, shape, dtype) in each["tensors"].items():
            if not stored:
                missing[name] = f"{name} is not in the checkpoint"
                continue
            covered.add(stored)
            spec = live.source.specs[stored]
            here, there = _described(shape, dtype), _described(spec.shape, str(spec.dtype))
            if here != there:
                changed[name] = f"{name} is {here} here and {there} in the checkpoint"
    names_saved = [name for prefix in live.models for name in saved[prefix]]
    missing |= {name: f"{name} is in the checkpoint only" for name in set(names_saved) - covered}
    problems = missing | changed if strict else changed
    if problems:
        # With few common names strict=False would leave most of the model as it is, without a word.
        names_here = {name for each in told for name in each["tensors"]}
        is_akin = 2 * len(covered) > min(len(names_saved), len(names_here))
        advice = "load into the model that was saved"
        if not is_akin:
            common = f"only {counted(len(covered), 'name')}" if covered else "no name"
            advice = f"{common} on both sides: {advice}"
        elif strict and not changed:
            advice += ", or pass strict=False to go by names"
        count = len(problems)
        listed = [problems[name] for name in sorted(problems)][:3] + [f"and {count - 3} more"] * (count > 3)
        raise InvalidArgument(
            f"the checkpoint of step {live.source.step} is of another model, with {counted(count, 'difference')}: "
            f"{'; '.join(listed)}: {advice}"
        )


def _described(shape: Sequence[int], dtype: str) -> str:
    return f"{dtype.removeprefix('torch.')}{list(shape)}"


def _match_groups(live: _Live, told: Sequence[Mapping[str, Any]], strict: bool) -> dict[str, list[Json]]:
    """Returns the saved options for each param group of this rank, by section. None: the group keeps its own."""
    kinds, found = live.contents.kinds, {}
    for section, mine in live.groups.items():
        if section not in kinds:
            if strict:
                raise _absent(live, section, "an optimizer")
            continue
        kind = kind_of(live.objects.optimizers[section])
        if kinds[section] and kind != kinds[section] and strict:  # an imported checkpoint has none
            raise InvalidArgument(
                f"the {section} is {kind} here and {kinds[section]} in the checkpoint: make the optimizer that was "
                "saved, or leave it out"
            )
        saved = live.contents.groups[section]
        by_rank = [[ParamGroup(tuple(names), options) for names, options in each["groups"][section]] for each in told]
        merged = merge(by_rank, section)
        indices = match(saved, merged, section, strict=strict)
        options: list[Json] = []
        for group in mine:
            names = set(group.names)
            index = next((index for each, index in zip(merged, indices, strict=True) if names & set(each.names)), None)
            options.append(None if index is None else saved[index].options)
        found[section] = options
        _check_shapes(live, section)
    return found


def _absent(live: _Live, name: str, kind: str, *, or_not_strict: bool = True) -> InvalidArgument:
    """Returns the error for an object that was not saved, or not under its name, with the names that were."""
    source, contents = live.source, live.contents
    saved = {prefix.removesuffix("/") or "model": "a model" for prefix in contents.models}
    saved |= dict.fromkeys(contents.groups, "an optimizer")
    others = {one for values in (contents.shared, *source.own) for one in values if "/" not in one} - TAKEN
    saved |= dict.fromkeys(sorted(others), _OTHER)
    if name in saved:
        text = f"{name} is {kind} here and {saved[name]} in the checkpoint of step {source.step}: pass what was saved, "
    elif saved:
        there = choices(name, saved, "it has")
        text = f"the checkpoint of step {source.step} has no {name}: {there}; pass it by the name of the save, "
    else:
        text = f"the checkpoint of step {source.step} has no {name} and no other object: save it first, "
    return InvalidArgument(text + ("leave it out, or pass strict=False" if or_not_strict else "or leave it out"))


def _check_shapes(live: _Live, section: str) -> None:
    """Raises InvalidArgument if the state of a parameter that is cut here cannot be cut."""
    optimizer = live.objects.optimizers[section]
    if not isinstance(optimizer, ZeroOptimizer):
        return
    names = [live.names[id(one)] for one in optimizer.whole_parameters]
    specs = live.source.specs
    saved = saved_states(names, specs, live.contents.values, section)
    for parameter, name in zip(optimizer.whole_parameters, names, strict=True):
        for key, stored in saved[name].tensors.items():
            spec = specs[stored]
            if spec.shape and not is_cut(key, spec, parameter):
                raise InvalidArgument(
                    f"{stored} has shape {spec.shape}, the parameter {tuple(parameter.shape)}, so ZeroOptimizer cannot "
                    "cut it: load it into the plain optimizer"
                )


def _own_rank(live: _Live, rank: int, places: list[Coordinates]) -> int | None:
    """Returns the rank that saved this rank's own values.

    In the same layout it is this rank. In another one with as many data-parallel ranks, it is the first rank of the
    same data-parallel rank.
    """
    contents = live.contents
    if contents.places == places:
        return rank
    if contents.num_dp != live.place.num_dp:
        return None
    return next((number for number, each in enumerate(contents.places) if each.dp == live.place.dp), None)


def _progress(live: _Live, prefix: str) -> Progress:
    return live.contents.progress.get(prefix, Progress())


def _read_values(live: _Live, strict: bool) -> None:
    """Reads and decodes all values that are no tensors of a model or optimizer."""
    found = _encoded_values(live, strict)
    names = [one + suffix for data, suffix in found.values() for one in tensor_names(data)]
    if unknown := sorted(set(names) - set(live.source.specs)):
        raise CheckpointError(f"step {live.source.step} has no tensor {unknown[0]}, to which its manifest refers")
    _read_small(live, names)
    for name, (data, suffix) in found.items():
        live.values[name] = _decoded(live, name, data, suffix)


def _encoded_values(live: _Live, strict: bool) -> dict[str, tuple[Json, str]]:
    """Returns the values for this rank's objects by name, each with the suffix of its tensors' names."""
    source, objects, contents = live.source, live.objects, live.contents
    shared = contents.shared
    own = source.own[live.own_rank] if live.own_rank is not None else {}
    by_rank = {name for each in source.own for name in each}
    wanted = [*objects.sections]
    wanted += [name for name in ("loader", "generators") if getattr(objects, name) is not None]
    if objects.extra is not None:
        wanted += sorted(name for name in {*shared, *by_rank} if name.startswith("extra/"))
    found: dict[str, tuple[Json, str]] = {}
    for name in wanted:
        if name in shared:
            found[name] = (shared[name], "")
        elif name in own:
            found[name] = (own[name], f"@{live.own_rank}")
        elif strict and name in by_rank:
            num_here = live.place.num_dp
            raise InvalidArgument(
                f"{name} was saved by each of {contents.num_dp} data-parallel ranks, and there are {num_here} here: "
                "leave it out and place it by the step, or pass strict=False"
            )
        elif strict:
            raise _absent(live, name, _OTHER)
    hooks = {f"{prefix}hook": each.wrapped.hook for prefix, each in live.models.items() if each.wrapped}
    # The state of a hook of another class says nothing to this one, which begins without.
    optional = [n for n, hook in hooks.items() if hook and contents.kinds.get(n) in (None, type(hook).__name__)]
    if objects.optimizer is not None:  # a run goes on; a model alone is loaded for use
        optional.append("random")
    found |= {name: (own[name], f"@{live.own_rank}") for name in optional if name in own}
    here = {name for each in live.models.values() for name in each.extra_state}
    return found | {name: (data, "") for name, data in contents.extra_state.items() if name in here}


def _decoded(live: _Live, name: str, data: Json, suffix: str) -> Any:
    try:
        return decode(data, lambda one: live.tensors[one + suffix])
    except (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError) as error:
        step = live.source.step
        raise CheckpointError(f"{name} of step {step} has a form that no save writes: {summarize(error)}") from None


def _read_small(live: _Live, names: Iterable[str]) -> None:
    for name in names:
        if name not in live.tensors:
            spec = live.source.specs[name]
            # Not on the default device: states of generators and arrays of NumPy are taken on the CPU alone.
            live.tensors[name] = torch.empty(spec.shape, dtype=spec.dtype, device="cpu")
    live.source.read([Wanted(name, 0, live.tensors[name].view(-1)) for name in names])


def _apply(live: _Live, matched: Mapping[str, list[Json]]) -> None:
    """Overwrites the objects."""
    objects = live.objects
    for name, one in objects.sections.items():
        if name in live.values:
            one.load_state_dict(live.values[name])
    if "loader" in live.values:
        objects.loader.load_state_dict(live.values["loader"])  # type: ignore[attr-defined]
    if "generators" in live.values:
        set_states(objects.generators, live.values["generators"])
    for prefix, model in live.models.items():
        _apply_model(live, prefix, model)
    for section, options in matched.items():
        _load_optimizer(live, section, options)
    if objects.extra is not None:
        _fill_extra(objects.extra, live.values)
    # Last, as methods of the user's objects above may draw numbers.
    if "random" in live.values:
        set_process_state(live.values["random"])


def _apply_model(live: _Live, prefix: str, model: ModelTensors) -> None:
    progress, values = _progress(live, prefix), live.values
    _fill(live.source, _model_targets(live, model))
    for name, module in model.extra_state.items():
        if name in values:
            module.set_extra_state(values[name])
    if model.pipeline is not None and progress.num_steps is not None:
        model.pipeline.num_steps = progress.num_steps
    if model.wrapped is not None:
        model.wrapped.reducer.usual_samples = progress.usual_samples
        if model.wrapped.hook is not None and f"{prefix}hook" in values:
            model.wrapped.hook.load_state_dict(values[f"{prefix}hook"])


def _fill_extra(extra: dict[str, Any], values: Mapping[str, Any]) -> None:
    for name, value in values.items():
        if name.startswith("extra/"):
            extra[name.removeprefix("extra/").replace("~1", "/").replace("~0", "~")] = value


def _model_targets(live: _Live, model: ModelTensors) -> Iterator[Target]:
    stored = {id(tensor) for name, tensor in model.tensors.items() if name in live.stored}
    nothing = torch.empty(0)  # on the default device
    for module in model.modules:
        named = (*module.named_parameters(), *module.named_buffers())
        give_memory(module, {name: nothing for name, tensor in named if id(tensor) in stored})
    for name, tensor in model.tensors.items():
        if name in live.stored:
            saved = _copy_of(live, live.stored[name], model.is_local or name in model.buffers)
            yield from (Target(saved, start, values) for start, values in ranges_of(tensor, name))


def _copy_of(live: _Live, name: str, is_local: bool) -> str:
    """Returns the name of this data-parallel rank's copy if there is one, else the name."""
    copy = f"{name}@{live.place.dp}"
    is_there = is_local and live.contents.num_dp == live.place.num_dp and copy in live.source.specs
    return copy if is_there and live.place.dp else name


def _load_optimizer(live: _Live, section: str, options: Sequence[Json]) -> None:
    optimizer, source = live.objects.optimizers[section], live.source
    _read_small(live, sorted(set().union(*map(tensor_names, options))))
    groups, number = [], 0
    for group, saved in zip(optimizer.param_groups, options, strict=True):
        new = {key: value for key, value in group.items() if key != "params"}
        if saved is not None:
            new |= _placed(decode(saved, lambda name: live.tensors[name].clone()), group)
        # torch pairs parameters by these numbers, in their order.
        groups.append({**new, "params": list(range(number, number + len(group["params"])))})
        number += len(group["params"])
    # Empty, so that torch converts no dtype; the states are filled below. Tensors that fit are used again.
    before = dict(optimizer.local_state if isinstance(optimizer, ZeroOptimizer) else optimizer.state)
    optimizer.load_state_dict({"state": {}, "param_groups": groups})
    states = optimizer.local_state if isinstance(optimizer, ZeroOptimizer) else optimizer.state
    states.update(before)
    names = [live.names[id(one)] for group in optimizer.param_groups for one in group["params"]]
    saved_ones = saved_states(names, source.specs, live.contents.values, section)
    _read_small(
        live, sorted({one for each in saved_ones.values() for v in each.values.values() for one in tensor_names(v)})
    )
    is_local = any(model.is_local for model in live.models.values())
    _fill(
        source,
        restored(
            optimizer,
            live.names,
            saved_ones,
            source.specs,
            lambda name: live.tensors[name].clone(),
            lambda name: _copy_of(live, name, is_local),
        ),
    )


def _placed(options: dict[str, Any], group: Mapping[str, Any]) -> dict[str, Any]:
    """Returns options whose tensors are on the device of the present ones."""
    return {
        key: value.to(group[key].device) if isinstance(value, Tensor) and isinstance(group.get(key), Tensor) else value
        for key, value in options.items()
    }


def _fill(source: Checkpoint, targets: Iterable[Target]) -> None:
    """Reads into targets: all of flat memory at once and in place, then each other one through a copy."""
    direct: list[Wanted] = []
    for target in targets:
        tensor = target.tensor
        if tensor.device.type == "cpu" and tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg():
            direct.append(Wanted(target.name, target.start, tensor.detach().view(-1)))
            continue
        copy = torch.empty(tensor.numel(), dtype=tensor.dtype, device="cpu")
        source.read([Wanted(target.name, target.start, copy)])
        with torch.no_grad():
            tensor.copy_(copy.view(tensor.shape))
        del copy  # before the next one is made
    # At once: a block of a file with several of them is read and checked once.
    source.read(direct)
