"""Checkpoints of recorded ranks: their saves are skipped, and their loads find the shapes that were saved."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from torch import nn

from echelon.checkpoint.saving import Handle
from echelon.checkpoint.store import Store
from echelon.errors import UnsupportedOp
from echelon.foresight.record.here import Recording, in_place_of
from echelon.foresight.record.overlay import Scratch
from echelon.foresight.record.writer import skipping, unrecorded, writer

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


class CheckpointCalls:
    """Functions by which a recorded program saves checkpoints and finds them again."""

    def __init__(self, scratch: Scratch, saved: Saved) -> None:
        self._scratch = scratch
        self._saved = saved

    def replacements(self) -> Iterator[tuple[Callable[..., Any], Callable[..., Any]]]:
        """Yields the functions with their replacements."""
        yield torch.save, self._saving(torch.save, "torch.save")
        yield torch.load, self._loading(torch.load, "torch.load")
        dcp: Any = importlib.import_module("torch.distributed.checkpoint")
        for name, result in (("save", lambda: None), ("async_save", _done)):
            original = getattr(dcp, name)
            yield original, self._saving_apart(original, f"torch.distributed.checkpoint.{name}", result)
        yield dcp.load, self._loading_apart(dcp.load, "torch.distributed.checkpoint.load")
        yield torch.jit.save, skipping(torch.jit.save, "torch.jit.save")
        yield torch.export.save, skipping(torch.export.save, "torch.export.save")
        try:
            safetensors: Any = importlib.import_module("safetensors.torch")
        except ImportError:
            pass
        else:
            yield safetensors.save_file, self._saving(safetensors.save_file, "safetensors.torch.save_file")
            saved_model = self._saving(safetensors.save_model, "safetensors.torch.save_model", nn.Module.state_dict)
            yield safetensors.save_model, saved_model
            yield safetensors.load_file, self._loading(safetensors.load_file, "safetensors.torch.load_file")
            yield safetensors.safe_open, self._loading_apart(safetensors.safe_open, "safetensors.safe_open")
            arrays: Any = importlib.import_module("safetensors.numpy")
            yield arrays.save_file, skipping(arrays.save_file, "safetensors.numpy.save_file")

    def of_store(self) -> AbstractContextManager[object]:
        """Returns a context in which `Store.save` is skipped."""
        return patch.object(Store, "save", skipping(Store.save, "Store.save", _handle))

    def find(self, recording: Recording, path: str) -> str | None:
        """Returns the path in the recording's folder for a path of the program. None if the real path is used."""
        found = recording.log.overlay.find(path) or path
        with unrecorded():
            return found if self._scratch.has(found) else None

    def of_others(self, recording: Recording, path: str) -> str | None:
        """Returns the file of a checkpoint that another rank has saved to a path before. None if there is none."""
        return self._saved.before(path, recording.rank, recording.log.num_of_all)

    def _saving(
        self, original: Callable[..., None], name: str, state_of: Callable[[Any], object] = lambda state: state
    ) -> Callable[..., None]:
        """Wraps `torch.save`, or a function like it: the file has shapes, and takes no space."""
        torch_save = torch.save

        @in_place_of(original, writer, 2)
        def save(recording: Recording, obj: object, file: Any = None, *_: Any, **kwargs: Any) -> None:
            recording.log.skip(name)
            path = self._path_of(recording, file)
            if path is None:
                return
            pickler = {"pickle_module": kwargs["pickle_module"]} if "pickle_module" in kwargs else {}
            with unrecorded():
                kept = self._scratch.path_for(path)
                try:
                    with torch.serialization.skip_data(materialize_fake_tensors=True):
                        torch_save(state_of(obj), kept, **pickler)
                except Exception:  # any class of the program may be one that cannot be saved so
                    kept = ""
                self._keep(recording, path, kept, name)

        return save

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

    def _saving_apart(self, original: Callable[..., Any], name: str, result: Callable[[], Any]) -> Callable[..., Any]:
        """Wraps a function that saves a checkpoint in a form of its own, which is skipped."""

        @in_place_of(original, writer, 1)
        def save(recording: Recording, _: object, *args: Any, **kwargs: Any) -> Any:
            recording.log.skip(name)
            if (path := _path_among(args, kwargs)) is not None:
                self._note(recording, path, "", name)
            return result()

        return save

    def _loading(self, original: Callable[..., Any], name: str) -> Callable[..., Any]:
        """Wraps `torch.load`, or a function like it: a checkpoint that the program has saved is read as shapes."""
        torch_load = torch.load

        @in_place_of(original, writer, 1)
        def load(recording: Recording, f: Any, *args: Any, **kwargs: Any) -> Any:
            is_path = isinstance(f, str | os.PathLike)
            found = self._checkpoint(recording, os.fsdecode(f), name) if is_path else None
            if found is None:
                return original(f, *args, **kwargs)
            if original is not torch_load:
                args, kwargs = (), {}
            # By the file, since the name may end as one of safetensors. Its size is that of the tensors, which may be
            # more than can be mapped.
            with unrecorded(), open(found, "rb") as file:
                return torch_load(file, *args, **{**kwargs, "mmap": False})

        return load

    def _loading_apart(self, original: Callable[..., Any], name: str) -> Callable[..., Any]:
        """Wraps a function that loads a checkpoint in a form of its own, which the program cannot have saved."""

        @in_place_of(original, writer)
        def load(recording: Recording, *args: Any, **kwargs: Any) -> Any:
            path = _path_among(args, kwargs)
            if path is not None and self._checkpoint(recording, path, name) is not None:
                raise UnsupportedOp(f"{name} of {path} at {recording.log.line()}: the script wrote it, and {_NOT_READ}")
            return original(*args, **kwargs)

        return load

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


def _path_among(args: Sequence[Any], kwargs: Mapping[str, Any]) -> str | None:
    """Returns the path of a checkpoint among the arguments of a call. None if there is none."""
    for each in (*args, *kwargs.values()):
        path = getattr(each, "path", each)  # a reader and a writer of torch's checkpoints have a path
        if isinstance(path, str | os.PathLike):
            return os.fsdecode(path)
    return None


def _done() -> Any:
    from concurrent.futures import Future

    future: Future[None] = Future()
    future.set_result(None)
    return future


def _handle() -> Handle:
    return Handle(0, lambda: None, lambda: True)
