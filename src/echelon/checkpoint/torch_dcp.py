"""Export to and import from torch.distributed.checkpoint (DCP).

The exported state dict is that of `torch.distributed.checkpoint.state_dict`: "model" by names, "optimizer" with "state"
by names and "param_groups". The metadata of DCP is a pickle, which runs code when it is read, so an import is never
done by itself.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor

from echelon.arguments import reading, writing
from echelon.checkpoint.hugging_face import make_empty_folder, read_all
from echelon.checkpoint.objects.contents import Contents, contents_of
from echelon.checkpoint.objects.encoding import Encoded, decode, encode, tensor_names
from echelon.checkpoint.objects.model import spec_of
from echelon.checkpoint.objects.optimizer import saved_states
from echelon.checkpoint.ranks.loading import Checkpoint
from echelon.checkpoint.state import Json, Piece, State
from echelon.errors import FileError

_SECTIONS = ("optimizer", "optim")
"""Names under which programs store their optimizer."""


def export_dcp(checkpoint: Checkpoint, folder: str) -> int:
    """Writes model and optimizer as a checkpoint of DCP. Returns the number of tensors. All of them are in memory.

    Raises:
        FileError: the folder has files or cannot be written to.
        CheckpointError: the checkpoint is damaged.
    """
    from torch.distributed.checkpoint.state_dict_saver import save  # takes a second

    contents = contents_of(checkpoint.step, checkpoint.data, len(checkpoint.own))
    whole: dict[str, Any] = {"step": checkpoint.step}
    if "" in contents.models:
        tensors = read_all(checkpoint, contents.models[""])
        whole["model"] = tensors | {name: tensors[to] for name, to in contents.aliases.items() if to in tensors}
    for section in contents.groups:
        whole[section] = _optimizer(checkpoint, contents, section)
    make_empty_folder(folder)
    with writing(folder), _one_process():
        save(whole, checkpoint_id=folder, no_dist=True)
    return len(checkpoint.specs)


def _optimizer(checkpoint: Checkpoint, contents: Contents, section: str) -> dict[str, Any]:
    groups = contents.groups[section]
    names = [name for group in groups for name in group.names]
    state: dict[str, dict[str, Any]] = {}
    for name, saved in saved_states(names, checkpoint.specs, contents.values, section).items():
        small = read_all(checkpoint, {one for value in saved.values.values() for one in tensor_names(value)})
        values = {key: decode(value, small.__getitem__) for key, value in saved.values.items()}
        read = read_all(checkpoint, saved.tensors.values())
        if found := values | {key: read[stored] for key, stored in saved.tensors.items()}:
            state[name] = found
    options = [decode(group.options, read_all(checkpoint, tensor_names(group.options)).__getitem__) for group in groups]
    return {
        "state": state,
        "param_groups": [{**each, "params": list(group.names)} for each, group in zip(options, groups, strict=True)],
    }


def check_dcp(folder: str) -> None:
    """Raises FileError unless a folder has the metadata of DCP. Does not read them."""
    if not os.path.isfile(os.path.join(folder, ".metadata")):
        raise FileError(
            f"cannot read {folder}: it has no .metadata; give a folder that torch.distributed.checkpoint wrote"
        )


def import_dcp(folder: str) -> State:
    """Reads a checkpoint of DCP. Unpickles its metadata, which can run any code: only for folders that you trust.

    Tensors under "model" are the model's, under "optimizer" or "optim" with "state" and "param_groups" the optimizer's.
    Without "model", all other tensors are the model's.

    Raises:
        FileError: the folder is no checkpoint of DCP.
    """
    nested = _read(folder)
    model = cast("dict[str, Any]", nested.get("model", nested))
    optimizer = next((nested[name] for name in _SECTIONS if isinstance(nested.get(name), dict)), None)
    tensors = {
        name: value for name, value in _flat(model) if name.partition(".")[0] not in _SECTIONS or "model" in nested
    }
    state = State({}, [], {}, {})
    for name, tensor in tensors.items():
        _add(state, name, tensor)
    groups: list[Json] = []
    values: dict[str, Json] = {}
    if optimizer is not None:
        groups = _add_groups(state, optimizer["param_groups"])
        _add_states(state, optimizer["state"], values)
    data: dict[str, Any] = {
        "places": [[0, 1, 0, 1]],
        "models": {"": sorted(tensors)},
        "aliases": {},
        "local": [],
        "progress": {},
        "extra_state": {},
        "kinds": {} if optimizer is None else {"optimizer": ""},  # DCP does not say of which class it was
        "groups": {} if optimizer is None else {"optimizer": groups},
        "values": values,
        "shared": {},
    }
    state.data.update(data)
    return state


def _add(state: State, name: str, tensor: Tensor) -> None:
    state.specs[name] = spec_of(tensor)
    state.pieces.append(Piece(name, 0, tensor))


def _add_encoded(state: State, encoded: Encoded) -> Json:
    for name, tensor in encoded.tensors.items():
        _add(state, name, tensor)
    return encoded.data


def _add_groups(state: State, groups: Any) -> list[Json]:
    found: list[Json] = []
    for number, group in enumerate(groups):
        options = {key: value for key, value in group.items() if key not in ("params", "param_names")}
        data = _add_encoded(state, encode(options, f"optimizer/groups/{number}"))
        found.append({"params": [str(name) for name in group["params"]], "options": data})
    return found


def _add_states(state: State, states: Mapping[str, Mapping[str, Any]], values: dict[str, Json]) -> None:
    for parameter, one in states.items():
        for key, value in one.items():
            name = f"optimizer/state/{parameter}/{key}"
            if isinstance(value, Tensor):
                _add(state, name, value)
            else:
                values[name] = _add_encoded(state, encode(value, name))


def _read(folder: str) -> dict[str, Any]:
    """Returns the state dict of a checkpoint of DCP, nested as it was saved."""
    from torch.distributed.checkpoint.filesystem import FileSystemReader
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata
    from torch.distributed.checkpoint.state_dict_loader import load

    check_dcp(folder)
    with reading(folder), _one_process():
        reader = FileSystemReader(folder)
        metadata = reader.read_metadata()
        # `load` fills tensors in place, and replaces other values.
        flat: dict[str, Any] = {
            name: torch.empty(each.size, dtype=each.properties.dtype)
            if isinstance(each, TensorStorageMetadata)
            else None
            for name, each in metadata.state_dict_metadata.items()
        }
        load(flat, storage_reader=reader, no_dist=True)
    nested: dict[str, Any] = {}
    paths = metadata.planner_data or {}
    for name, value in flat.items():
        _put(nested, tuple(paths.get(name, (name,))), value)
    return cast("dict[str, Any]", _with_lists(nested))


def _put(nested: dict[Any, Any], path: tuple[Any, ...], value: object) -> None:
    for part in path[:-1]:
        nested = nested.setdefault(part, {})
    nested[path[-1]] = value


def _with_lists(value: Any) -> Any:
    """Returns nested dicts with lists where the keys are 0, 1, 2, ..."""
    if not isinstance(value, dict):
        return value
    found = {key: _with_lists(item) for key, item in value.items()}
    if found and all(isinstance(key, int) for key in found):
        return [found[key] for key in sorted(found)]
    return found


def _flat(nested: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Tensor]]:
    for name, value in nested.items():
        if isinstance(value, Tensor):
            yield prefix + name, value
        elif isinstance(value, dict):
            yield from _flat(value, f"{prefix}{name}.")


@contextmanager
def _one_process() -> Iterator[None]:
    """Silences the warning of DCP that there is one process, which is meant here."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
        yield
