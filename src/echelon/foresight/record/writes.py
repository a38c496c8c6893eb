"""Writes of a recorded program, which are skipped: tensors without values must not overwrite a checkpoint.

Functions of libraries are replaced wherever a module holds them, since programs import them by name. Threads of no
recorded rank, and not started by one, call the original ones.
"""

from __future__ import annotations

import builtins
import functools
import importlib
import io
import os
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch

from echelon.checkpoint.saving import Handle
from echelon.checkpoint.store import Store
from echelon.foresight.record.here import Recording, recording_here

_CHANGES = (
    "mkdir",
    "makedirs",
    "remove",
    "unlink",
    "rmdir",
    "rename",
    "renames",
    "replace",
    "link",
    "symlink",
    "truncate",
)
"""Functions of `os` that change folders."""


class _Sink:
    """Mixin of a file that is not there: it takes all that is written, and keeps none."""

    name = ""

    def __init__(self, path: object) -> None:
        super().__init__()
        self.name = str(path)

    def write(self, data: Any) -> int:
        """Takes data. Returns its length."""
        return len(data)

    def fileno(self) -> int:
        """Raises OSError: there is no file."""
        raise io.UnsupportedOperation("fileno")


class _Text(_Sink, io.StringIO):
    """Text file that is not there."""


class _Bytes(_Sink, io.BytesIO):
    """Binary file that is not there."""


@contextmanager
def no_writes(*, allow_files: bool) -> Iterator[None]:
    """Inside, recorded programs write no checkpoints, and change no files.

    Args:
        allow_files: whether they may open files for writing, and change folders, all the same.
    """
    with ExitStack() as stack:
        stack.enter_context(patch.object(threading.Thread, "start", _inheriting(threading.Thread.start)))
        stack.enter_context(_replaced_everywhere(dict(_checkpoints())))
        stack.enter_context(patch.object(Store, "save", _skipping(Store.save, "Store.save", _saved)))
        if not allow_files:
            for module in (builtins, io):
                stack.enter_context(patch.object(module, "open", _opening(builtins.open)))
            stack.enter_context(patch.object(os, "listdir", _listing(os.listdir)))
            for name in _CHANGES:
                if hasattr(os, name):
                    stack.enter_context(patch.object(os, name, _skipping(getattr(os, name), f"os.{name}")))
        yield


def _checkpoints() -> Iterator[tuple[Callable[..., Any], Callable[..., Any]]]:
    """Yields functions that write tensors, with their replacements."""
    yield torch.save, _skipping(torch.save, "torch.save")
    dcp: Any = importlib.import_module("torch.distributed.checkpoint")
    yield dcp.save, _skipping(dcp.save, "torch.distributed.checkpoint.save")
    yield dcp.async_save, _skipping(dcp.async_save, "torch.distributed.checkpoint.async_save", _done)
    try:
        safetensors: Any = importlib.import_module("safetensors.torch")
    except ImportError:
        return
    for name in ("save_file", "save_model"):
        yield getattr(safetensors, name), _skipping(getattr(safetensors, name), f"safetensors.torch.{name}")


def _saved() -> Handle:
    return Handle(0, lambda: None, lambda: True)


def _done() -> Any:
    from concurrent.futures import Future

    future: Future[None] = Future()
    future.set_result(None)
    return future


def _writer() -> Recording | None:
    """Returns the recording of the calling thread, or of the one that started it."""
    return recording_here() or getattr(threading.current_thread(), _STARTED_BY, None)


_STARTED_BY = "_started_by_recording"


def _inheriting(original: Callable[[threading.Thread], None]) -> Callable[[threading.Thread], None]:
    @functools.wraps(original)
    def start(thread: threading.Thread) -> None:
        if (recording := _writer()) is not None:
            setattr(thread, _STARTED_BY, recording)
        original(thread)

    return start


def _skipping(original: Callable[..., Any], name: str, result: Callable[[], Any] = lambda: None) -> Callable[..., Any]:
    @functools.wraps(original)
    def skip(*args: Any, **kwargs: Any) -> Any:
        recording = _writer()
        if recording is None:
            return original(*args, **kwargs)
        recording.log.skip(name)
        if name in ("os.mkdir", "os.makedirs"):
            recording.log.folders.add(os.path.abspath(args[0] if args else kwargs["name"]))
        return result()

    return skip


def _listing(original: Callable[..., list[Any]]) -> Callable[..., list[Any]]:
    """Wraps `os.listdir`: a folder that was not made is empty."""

    @functools.wraps(original)
    def listdir(path: Any = ".") -> list[Any]:
        recording = None if isinstance(path, int) else _writer()
        if recording is None or os.path.abspath(path or ".") not in recording.log.folders or os.path.isdir(path):
            return original(path)
        return []

    return listdir


def _opening(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def open(file: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
        recording = _writer() if any(letter in mode for letter in "wax+") else None
        if recording is None or isinstance(file, int) or str(file) == os.devnull:
            return original(file, mode, *args, **kwargs)
        recording.log.skip(f"a write of {os.fspath(file)}")
        return _Bytes(file) if "b" in mode else _Text(file)

    return open


@contextmanager
def _replaced_everywhere(replacements: Mapping[Callable[..., Any], Callable[..., Any]]) -> Iterator[None]:
    """Inside, every module that holds one of some functions holds its replacement."""
    _exchange(replacements)
    try:
        yield
    finally:
        # Also in modules that have been imported meanwhile.
        _exchange({replacement: original for original, replacement in replacements.items()})


def _exchange(replacements: Mapping[Callable[..., Any], Callable[..., Any]]) -> None:
    by_id = {id(old): new for old, new in replacements.items()}
    for module in list(sys.modules.values()):
        names = getattr(module, "__dict__", None)
        if type(names) is dict:
            found = [(name, new) for name, value in names.items() if (new := by_id.get(id(value))) is not None]
            names.update(found)
