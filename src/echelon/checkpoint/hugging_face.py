"""Export of a checkpoint's model to a folder that `from_pretrained` of Hugging Face's transformers loads."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch

from echelon.arguments import reading, writing
from echelon.checkpoint.files.layout import Entry, Part, layout_file
from echelon.checkpoint.objects.encoding import decode, tensor_names
from echelon.checkpoint.ranks.image import bytes_of, dtype_of, entry_of
from echelon.checkpoint.ranks.loading import Checkpoint
from echelon.checkpoint.state import Json, Wanted
from echelon.errors import FileError, InvalidArgument

SHARD = 5 * 10**9
"""Bytes of tensors in a file: the limit of transformers."""


class Exported(NamedTuple):
    """Result of an export."""

    num_tensors: int
    files: list[str]


def export_hf(checkpoint: Checkpoint, folder: str, config: str | None = None, *, shard: int = SHARD) -> Exported:
    """Writes the model's weights and its config. One tensor is in memory at a time.

    Args:
        checkpoint: the checkpoint of a model of transformers, in any layout.
        folder: a new or empty folder.
        config: config.json or a folder that has one. None: the dict "config" in the checkpoint's extra.
        shard: bytes of a file.

    Raises:
        InvalidArgument: there is no model in the checkpoint, or no config.
        FileError: the folder has files or cannot be written to, or the config cannot be read.
        CheckpointError: the checkpoint is damaged.
    """
    settings = _config(checkpoint, config)
    names: list[str] = checkpoint.data.get("models", {}).get("", [])
    if not names:
        raise InvalidArgument(f"the checkpoint of step {checkpoint.step} has no model: export one that was saved")
    stored = {name: name for name in names}
    if settings.get("tie_word_embeddings") is False:
        # transformers looks for both names, unless it ties the weights itself.
        stored |= checkpoint.data["aliases"]
    make_empty_folder(folder)
    parts = _shards(checkpoint, stored, shard)
    files: list[str] = []
    index: dict[str, str] = {}
    for number, shard_names in enumerate(parts, start=1):
        file = "model.safetensors" if len(parts) == 1 else f"model-{number:05d}-of-{len(parts):05d}.safetensors"
        _write(checkpoint, {name: stored[name] for name in shard_names}, os.path.join(folder, file))
        index |= dict.fromkeys(shard_names, file)
        files.append(file)
    if len(parts) > 1:
        size = sum(_bytes(checkpoint, name) for name in stored.values())
        # transformers reads the metadata of every index.
        text = json.dumps({"metadata": {"total_size": size}, "weight_map": index}, indent=2)
        _write_text(os.path.join(folder, "model.safetensors.index.json"), text)
    _write_text(os.path.join(folder, "config.json"), json.dumps(settings, indent=2))
    return Exported(len(stored), files)


def make_empty_folder(folder: str) -> None:
    """Makes a folder. Raises FileError if there are files in it, or it cannot be made."""
    with writing(folder):
        os.makedirs(folder, exist_ok=True)
        has_files = bool(os.listdir(folder))
    if has_files:
        raise FileError(f"cannot write {folder}: it has files already; give a new folder")


def _config(checkpoint: Checkpoint, config: str | None) -> dict[str, Any]:
    if config is not None:
        path = os.path.join(config, "config.json") if os.path.isdir(config) else config
        with reading(path), open(path, encoding="utf-8") as file:
            text = file.read()
        try:
            found = json.loads(text)
        except ValueError as error:
            raise FileError(f"cannot read {path}: {error}; give a config.json") from None
    else:
        saved: Json = checkpoint.data.get("shared", {}).get("extra/config")
        found = decode(saved, read_all(checkpoint, tensor_names(saved)).__getitem__)
    if not isinstance(found, dict):
        raise InvalidArgument(
            "there is no config of the model: give --config FILE, or save it: extra={'config': model.config.to_dict()}"
        )
    return found


def _shards(checkpoint: Checkpoint, stored: Mapping[str, str], limit: int) -> list[list[str]]:
    """Returns the names of each file, in order. A file has more bytes than the limit only for a single tensor."""
    found: list[list[str]] = [[]]
    size = 0
    for name in sorted(stored):
        more = _bytes(checkpoint, stored[name])
        if found[-1] and size + more > limit:
            found.append([])
            size = 0
        found[-1].append(name)
        size += more
    return found


def _bytes(checkpoint: Checkpoint, name: str) -> int:
    return _entry(checkpoint, name).numel * _entry(checkpoint, name).itemsize


def _entry(checkpoint: Checkpoint, name: str) -> Entry:
    return entry_of(name, checkpoint.specs[name])


def _write(checkpoint: Checkpoint, stored: Mapping[str, str], path: str) -> None:
    entries = {name: _entry(checkpoint, one) for name, one in stored.items()}
    layout = layout_file(entries, (Part(name, 0, entry.numel) for name, entry in entries.items()))
    with writing(path), open(path, "wb") as file:
        file.write(layout.header)
        for placed in layout.placed:
            tensor = read_flat(checkpoint, stored[placed.part.name])
            file.write(bytes_of(tensor).numpy().data)


def read_flat(checkpoint: Checkpoint, name: str) -> torch.Tensor:
    """Reads one tensor, flat."""
    entry = _entry(checkpoint, name)
    tensor = torch.empty(entry.numel, dtype=dtype_of(entry.dtype), device="cpu")
    checkpoint.read([Wanted(name, 0, tensor)])
    return tensor


def read_all(checkpoint: Checkpoint, names: Iterable[str]) -> dict[str, torch.Tensor]:
    """Reads tensors in their shapes."""
    return {name: read_flat(checkpoint, name).view(checkpoint.specs[name].shape) for name in names}


def _write_text(path: str, text: str) -> None:
    with writing(path), open(path, "w", encoding="utf-8") as file:
        file.write(text + "\n")
