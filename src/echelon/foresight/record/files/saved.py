"""Checkpoints of recorded ranks: their saves are skipped, and their loads find the shapes that were saved."""

from __future__ import annotations

import contextlib
import importlib
import io
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from echelon._torch_private.tensors import FakeTensor, real_tensors, tree_leaves
from echelon.checkpoint.ranks.saving import Handle
from echelon.checkpoint.store import Store
from echelon.errors import UnsupportedOp
from echelon.foresight.record.gpu.device import mapped
from echelon.foresight.record.here import Recording
from echelon.foresight.record.log.overlay import Scratch
from echelon.foresight.record.log.placement import is_gpu
from echelon.foresight.record.writer import in_writers, nothing, skip, unrecorded, with_new
from echelon.replacements import Replacement

_NOT_READ = "it cannot be read back: load one that exists before the script is foreseen, or none"
"""Advice for a checkpoint that is not there."""


class Checkpoint(NamedTuple):
    """Checkpoint that a rank has saved."""

    path: str
    """Path of the program, absolute."""
    rank: int
    moment: int
    """Number of collectives of all ranks that the rank had called before."""
    file: str
    """File of the recording that has its shapes. Empty if there is none."""
    saved_by: str
    """Function and line of the program that saved it."""


class Saved:
    """Checkpoints of all ranks, in the order in which they were recorded."""

    def __init__(self) -> None:
        self._by_path: dict[str, list[Checkpoint]] = {}
        self._new: list[Checkpoint] = []

    def add(self, checkpoints: Iterable[Checkpoint]) -> None:
        """Adds checkpoints."""
        for each in checkpoints:
            self._by_path.setdefault(each.path, []).append(each)
            self._new.append(each)

    def take_new(self) -> list[Checkpoint]:
        """Returns the checkpoints that were added since the last call."""
        new, self._new = self._new, []
        return new

    def before(self, path: str, rank: int, moment: int) -> str | None:
        """Returns the file of the last checkpoint that another rank saved to a path before a rank's moment.

        A collective of all ranks has to lie between. None if there is no such checkpoint.
        """
        # Most programs save nothing, and ask for files often.
        found = self._by_path and self._by_path.get(os.path.abspath(path))
        return next(
            (each.file for each in reversed(found or ()) if each.rank != rank and each.moment < moment and each.file),
            None,
        )

    def rename(self, old: str, new: str, rank: int, moment: int) -> None:
        """Adds the checkpoints of a rank at a path, or in a folder, under a new name."""
        old, new = os.path.abspath(old), os.path.abspath(new)
        found = [each[-1] for path, each in self._by_path.items() if path == old or path.startswith(old + os.sep)]
        self.add(
            each._replace(path=new + each.path.removeprefix(old), moment=moment) for each in found if each.rank == rank
        )

    def last(self, path: str, moment: int) -> Checkpoint | None:
        """Returns the last checkpoint that a rank saved to a path until a moment. None if there is none."""
        found = self._by_path.get(os.path.abspath(path), ())
        return next((each for each in reversed(found) if each.moment <= moment), None)


class _OnGpu:
    """File of safetensors, or a slice of one of its tensors, whose tensors go to a GPU.

    safetensors itself would write to the address of pinned memory, which a recorded tensor does not have.
    """

    def __init__(self, inner: Any, device: Any) -> None:
        self._inner, self._device = inner, device

    def __enter__(self) -> _OnGpu:
        self._inner.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._inner.__exit__(*error)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def __getitem__(self, index: Any) -> Tensor:
        part: Tensor = self._inner[index]
        return part.to(self._device)

    def get_tensor(self, name: str) -> Tensor:
        """Returns a tensor of the file."""
        tensor: Tensor = self._inner.get_tensor(name)
        return tensor.to(self._device)

    def get_slice(self, name: str) -> _OnGpu:
        """Returns a tensor of the file, of which an index reads a part."""
        return _OnGpu(self._inner.get_slice(name), self._device)


class CheckpointCalls:
    """Functions by which a recorded program saves checkpoints and finds them again."""

    def __init__(self, scratch: Scratch, saved: Saved) -> None:
        self._scratch = scratch
        self._saved = saved
        self._buffers: WeakKeyDictionary[io.BytesIO, str] = WeakKeyDictionary()
        """Files of the recording, by the buffer in memory that the program has saved to."""
        # The real functions, also while their names are replaced.
        self._torch_save, self._torch_load = torch.save, torch.load

    def replacements(self) -> Iterator[tuple[Callable[..., Any], Callable[..., Any]]]:
        """Yields the functions with their replacements."""
        yield with_new(torch.save, self._save, "torch.save", _itself)
        yield with_new(torch.load, self._load, "torch.load")
        dcp: Any = importlib.import_module("torch.distributed.checkpoint")
        for name, result in (("save", nothing), ("async_save", _done)):
            yield with_new(getattr(dcp, name), self._save_apart, f"torch.distributed.checkpoint.{name}", result)
        yield with_new(dcp.load, self._load_apart, "torch.distributed.checkpoint.load")
        yield with_new(torch.jit.save, skip, "torch.jit.save", nothing)
        yield with_new(torch.export.save, skip, "torch.export.save", nothing)
        yield with_new(torch.onnx.export, skip, "torch.onnx.export", nothing)
        try:
            safetensors: Any = importlib.import_module("safetensors.torch")
        except ImportError:
            pass
        else:
            yield with_new(safetensors.save_file, self._save, "safetensors.torch.save_file", _itself)
            state_of = nn.Module.state_dict
            yield with_new(safetensors.save_model, self._save, "safetensors.torch.save_model", state_of)
            yield with_new(safetensors.load_file, self._load, "safetensors.torch.load_file")
            yield with_new(safetensors.safe_open, self._open)
            arrays: Any = importlib.import_module("safetensors.numpy")
            yield with_new(arrays.save_file, skip, "safetensors.numpy.save_file", nothing)

    def of_classes(self) -> list[Replacement]:
        """Lets `Store.save` be skipped, and the methods of torch that write files in C++."""
        saved = in_writers(skip, "Store.save", lambda: Handle(0, lambda: None, lambda: True))
        jit: Any = torch.jit
        scripts = (jit.ScriptModule, jit.RecursiveScriptModule, jit.ScriptFunction)
        return [
            Replacement(Store, "save", saved),
            *(Replacement(each, "save", in_writers(skip, "torch.jit.save", nothing)) for each in scripts),
        ]

    def find(self, recording: Recording, path: str) -> str | None:
        """Returns the path in the recording's folder for a path of the program. None if the real path is used."""
        found = recording.log.overlay.find(path) or path
        with unrecorded():
            return found if self._scratch.has(found) else None

    def of_others(self, recording: Recording, path: str) -> str | None:
        """Returns the file of a checkpoint that another rank has saved to a path before. None if there is none."""
        return self._saved.before(path, recording.rank, recording.log.num_of_all)

    def _save(
        self,
        name: str,
        state_of: Callable[[Any], object],
        recording: Recording,
        _: Callable[..., None],
        /,
        obj: object,
        file: Any = None,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        """Does as `torch.save`, or a function like it: the file has shapes, and takes no space."""
        is_storage = isinstance(obj, torch.UntypedStorage | torch.TypedStorage)  # as a tensor with values is pickled
        if is_storage and self._path_of(recording, file) is None:
            self._torch_save(obj, file, *args, **kwargs)
            return
        recording.log.skip(name)
        path = self._path_of(recording, file)
        pickler = {"pickle_module": kwargs["pickle_module"]} if "pickle_module" in kwargs else {}
        with unrecorded():
            kept = self._scratch.path_for(path or "buffer")
            try:
                with torch.serialization.skip_data(materialize_fake_tensors=True):
                    self._torch_save(state_of(obj), kept, **pickler)
            except Exception:  # any class of the program may be one that cannot be saved so
                kept = ""
            if path is not None:
                self._keep(recording, path, kept, name)
            elif kept and isinstance(file, io.BytesIO):
                self._buffers[file] = kept

    def _path_of(self, recording: Recording, file: Any) -> str | None:
        """Returns the program's path of a file, or of a path. None for others, such as a buffer in memory."""
        if isinstance(file, str | os.PathLike):
            return os.fsdecode(file)
        name = getattr(file, "name", None)
        return recording.log.overlay.origin(name) if isinstance(name, str) else None

    def _keep(self, recording: Recording, path: str, file: str, name: str) -> None:
        """Keeps a file of the recording as a checkpoint that the program has saved to a path. Empty: it has none."""
        self._note(recording, path, file, name)
        own = self.find(recording, path)
        if own is not None and os.path.exists(own):
            os.remove(own)
        if not file:
            recording.log.overlay.drop(path)
            return
        if own is None:
            recording.log.overlay.put(path, own := self._scratch.path_for(path))
        # A link, because the program may remove its file before other ranks are recorded.
        os.link(file, own)

    def _note(self, recording: Recording, path: str, file: str, name: str) -> None:
        """Notes a checkpoint that a function of this name has saved."""
        log = recording.log
        saved_by = f"{name} at {log.line()}"
        self._saved.add([Checkpoint(os.path.abspath(path), recording.rank, log.num_of_all, file, saved_by)])

    def _save_apart(
        self,
        name: str,
        result: Callable[[], Any],
        recording: Recording,
        _: Callable[..., Any],
        __: object,
        /,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """Skips the save of a checkpoint in a form of its own."""
        recording.log.skip(name)
        if (path := _path_among(args, kwargs)) is not None:
            self._note(recording, path, "", name)
        return result()

    def _load(
        self, name: str, recording: Recording, original: Callable[..., Any], /, f: Any, *args: Any, **kwargs: Any
    ) -> Any:
        """Does as `torch.load`, or a function like it: a checkpoint that the program has saved is read as shapes."""
        is_path = isinstance(f, str | os.PathLike)
        found = self._checkpoint(recording, os.fsdecode(f), name) if is_path else None
        if isinstance(f, io.BytesIO):
            found = self._buffers.get(f)
            if found is None and not f.getbuffer():
                raise UnsupportedOp(
                    f"{name} of an empty buffer at {recording.log.line()}: torch.save into memory is skipped: load "
                    "from the same buffer, or save to a path"
                )
        if original is not self._torch_load:
            if found is None:
                return original(f, *args, **kwargs)
            # The arguments of safetensors mean nothing to torch.load.
            args, kwargs = (), {}
        location, *others = args or (kwargs.pop("map_location", None),)
        mapped(location)  # raises for a GPU that is not there
        # Recorded tensors are on the CPU for torch, those of a checkpoint of a GPU, too.
        if found is None:
            loaded = original(f, "cpu", *others, **kwargs)
        else:
            # By the file, since the name may end as one of safetensors. Its size is that of the tensors, which may be
            # more than can be mapped.
            with unrecorded(), open(found, "rb") as file:
                loaded = self._torch_load(file, "cpu", *others, **{**kwargs, "mmap": False})
        if recording.placement is not None and is_gpu(location):
            for each in tree_leaves(loaded):
                recording.placement.made(each, on_gpu=True)
        elif found is not None:
            with real_tensors():
                _take_numbers(loaded, None)
        elif is_path:
            with contextlib.suppress(Exception), unrecorded(), real_tensors():  # a file that cannot be mapped
                _take_numbers(loaded, self._torch_load(f, "cpu", *others, **{**kwargs, "mmap": True}))
        return loaded

    def _load_apart(
        self, name: str, recording: Recording, original: Callable[..., Any], /, *args: Any, **kwargs: Any
    ) -> Any:
        """Refuses to load a checkpoint in a form of its own, in which the program cannot have saved it."""
        path = _path_among(args, kwargs)
        if path is not None and self._checkpoint(recording, path, name) is not None:
            raise UnsupportedOp(f"{name} of {path} at {recording.log.line()}: the script wrote it, and {_NOT_READ}")
        return original(*args, **kwargs)

    def _open(self, recording: Recording, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Opens a file of safetensors, also for a GPU."""
        device = args[2] if len(args) > 2 else kwargs.get("device")
        is_for_gpu = type(device) is int or is_gpu(device)
        if is_for_gpu:
            args, kwargs = args[:2], {**kwargs, "device": "cpu"}
        file = self._load_apart("safetensors.safe_open", recording, original, *args, **kwargs)
        return _OnGpu(file, device) if is_for_gpu else file

    def _checkpoint(self, recording: Recording, path: str, name: str) -> str | None:
        """Returns the file of a checkpoint that the program has saved to a path. None if it has saved none.

        Raises:
            UnsupportedOp: the program has saved it, but it has no file.
        """
        found = self.find(recording, path) or self.of_others(recording, path)
        if found is not None or (saved := self._saved.last(path, recording.log.num_of_all)) is None:
            return found
        with unrecorded():
            if os.path.exists(path):
                return None
        if not saved.file:
            line = recording.log.line()
            raise UnsupportedOp(f"{name} of {path} at {line}: {saved.saved_by} was skipped, and {_NOT_READ}")
        return saved.file


def _take_numbers(loaded: Any, real: Any) -> None:
    """Puts real tensors without dimensions in place of fake ones, in nested dicts and lists.

    They are numbers on the host, such as the steps of an optimizer, which it reads in each step.

    Args:
        loaded: the dict or list that is changed. Others are left as they are.
        real: the same with real tensors. None: the numbers are 1.
    """
    if isinstance(loaded, dict | list):
        for key, value in loaded.items() if isinstance(loaded, dict) else enumerate(loaded):
            other = None if real is None else real[key]
            if isinstance(value, FakeTensor) and not value.dim():
                loaded[key] = torch.ones((), dtype=value.dtype) if other is None else other.clone()
            else:
                _take_numbers(value, other)


def _path_among(args: Sequence[Any], kwargs: Mapping[str, Any]) -> str | None:
    """Returns the path of a checkpoint among the arguments of a call. None if there is none."""
    for each in (*args, *kwargs.values()):
        path = getattr(each, "path", each)  # a reader and a writer of torch's checkpoints have a path
        if isinstance(path, str | os.PathLike):
            return os.fsdecode(path)
    return None


def _itself(state: object) -> object:
    return state


def _done() -> Any:
    from concurrent.futures import Future

    future: Future[None] = Future()
    future.set_result(None)
    return future
