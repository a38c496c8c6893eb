"""Writes of a recorded program, which are skipped: tensors without values must not overwrite a checkpoint.

Functions of libraries are replaced wherever a module holds them, since programs import them by name. Threads that
neither belong to a recorded rank nor were started by one call the original functions.
"""

from __future__ import annotations

import builtins
import functools
import importlib
import io
import os
import shlex
import shutil
import sqlite3
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import numpy as np
import torch

from echelon.call_site import is_foreign
from echelon.checkpoint.saving import Handle
from echelon.checkpoint.store import Store
from echelon.foresight.record.here import Recording, recording_here
from echelon.foresight.record.overlay import Scratch

_CHANGES = (
    "mkfifo",
    "mknod",
    "rmdir",
    "remove",
    "unlink",
    "truncate",
    "chmod",
    "lchmod",
    "chown",
    "lchown",
    "chflags",
    "utime",
    "setxattr",
    "removexattr",
)
"""Functions of `os` that change a file or a folder, by its path."""
_RENAMES = ("rename", "replace", "renames")
_READS = ("stat", "lstat", "access", "scandir", "readlink", "chdir")
"""Functions of `os` that a program calls to find its own files."""
_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
_NAMELESS = getattr(os, "O_TMPFILE", -1)
_SHELLS = frozenset({"subprocess", "os"})
"""Modules between a program and the start of a process."""
_BUILT_IN = frozenset({"posix", "nt"})
"""Modules of `os` whose functions Python calls for its cache of bytecode."""


@contextmanager
def no_writes(*, allow_files: bool) -> Iterator[None]:
    """Inside, recorded programs write no checkpoints, and change no files.

    Args:
        allow_files: whether they may open files for writing, and change folders, nevertheless.
    """
    with ExitStack() as stack:
        stack.enter_context(patch.object(threading.Thread, "start", _inheriting(threading.Thread.start)))
        stack.enter_context(_replaced_everywhere(dict(_checkpoints())))
        stack.enter_context(patch.object(Store, "save", _skipping(Store.save, "Store.save", _saved)))
        if not allow_files:
            # Made first, removed last: by the real functions.
            scratch = Scratch(stack.enter_context(tempfile.TemporaryDirectory(prefix="echelon-foresee-")))
            files = _Files(scratch)
            stack.enter_context(_replaced_everywhere(dict(files.replacements())))
            stack.enter_context(patch.object(subprocess.Popen, "__init__", _ending_at_once(subprocess.Popen.__init__)))
            stack.enter_context(patch.object(np.memmap, "__new__", files.mapping(np.memmap.__new__)))
        yield


class _Files:
    """Functions of files, as a recorded program calls them."""

    def __init__(self, scratch: Scratch) -> None:
        self._scratch = scratch

    def replacements(self) -> Iterator[tuple[Callable[..., Any], Callable[..., Any]]]:
        """Yields functions with their replacements."""
        yield builtins.open, self._opening(builtins.open)
        yield os.open, self._opening_descriptor(os.open)
        yield io.FileIO, self._class_of_files()
        yield sqlite3.connect, self._connecting(sqlite3.connect)
        yield os.mkdir, self._making(os.mkdir, "os.mkdir")
        yield os.makedirs, self._making(os.makedirs, "os.makedirs")
        yield shutil.rmtree, self._changing(shutil.rmtree, "shutil.rmtree", drops=True)
        yield os.removedirs, self._changing(os.removedirs, "os.removedirs", drops=True)
        yield os.listdir, self._listing(os.listdir)
        yield os.system, _skipping(os.system, "os.system", lambda: 0)
        yield np.savetxt, self._saving_text(np.savetxt)
        yield os.link, _skipping(os.link, "os.link")
        yield os.symlink, _skipping(os.symlink, "os.symlink")
        yield tempfile.gettempdir, self._temporary_folder(tempfile.gettempdir)
        yield tempfile.NamedTemporaryFile, self._kept(tempfile.NamedTemporaryFile)
        for name in _CHANGES:
            if hasattr(os, name):
                drops = name in ("remove", "unlink", "rmdir")
                yield getattr(os, name), self._changing(getattr(os, name), f"os.{name}", drops=drops)
        for name in _RENAMES:
            yield getattr(os, name), self._renaming(getattr(os, name), f"os.{name}")
        for name in _READS:
            yield getattr(os, name), self._reading(getattr(os, name))

    def _find(self, recording: Recording, path: str) -> str | None:
        """Returns the path in the recording's folder for a path of the program. None if the real path is used."""
        found = recording.log.overlay.find(path) or path
        with _unrecorded():
            return found if self._scratch.has(found) else None

    def _target(self, recording: Recording, path: str, *, copies: bool) -> str:
        """Returns the path to write in place of a path of the program, and notes the write.

        Args:
            recording: recording of the program.
            path: path of the program.
            copies: whether the present content is needed.
        """
        found = self._find(recording, path)
        if found != path:
            recording.log.skip(f"a write of {path}")
        if found is None:
            found = self._scratch.path_for(path)
            if copies and os.path.isfile(path):
                shutil.copyfile(path, found)
            recording.log.overlay.put(path, found)
        return found

    def _opening(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def open(file: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
            recording = None if isinstance(file, int) or _has_opener(args, kwargs) else _writer()
            if recording is None or not isinstance(mode, str):
                return original(file, mode, *args, **kwargs)
            path = os.fsdecode(file)
            if _is_device(path):
                return original(file, mode, *args, **kwargs)
            with _unrecorded():
                if any(letter in mode for letter in "wax+"):
                    file = self._target(recording, path, copies="w" not in mode and "x" not in mode)
                else:
                    file = self._find(recording, path) or file
                return original(file, mode, *args, **kwargs)

        return open

    def _opening_descriptor(self, original: Callable[..., int]) -> Callable[..., int]:
        @functools.wraps(original)
        def open(path: Any, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
            recording = _writer()
            if recording is None or _is_device(os.fsdecode(path)):
                return original(path, flags, mode, dir_fd=dir_fd)
            name = os.fsdecode(path)
            # A file without a name is in no folder, though it is opened by the name of one.
            if not flags & _WRITING or flags & _NAMELESS == _NAMELESS:
                found = self._find(recording, name) if dir_fd is None else None
                return original(found or path, flags, mode, dir_fd=dir_fd)
            with _unrecorded():
                path = self._target(recording, name, copies=not flags & os.O_TRUNC)
                return original(path, flags | os.O_CREAT, mode)

        return open

    def _class_of_files(self) -> Any:
        original = io.FileIO

        class Files(type(original)):  # type: ignore[misc]
            """Metaclass by which files of the replaced class are instances, too."""

            def __instancecheck__(cls, instance: object) -> bool:
                return isinstance(instance, original)

            def __subclasscheck__(cls, subclass: type) -> bool:
                return issubclass(subclass, original)

        files = self

        class FileIO(original, metaclass=Files):  # type: ignore[misc, valid-type]
            """File without a buffer."""

            def __init__(self, file: Any, mode: str = "r", *args: Any, **kwargs: Any) -> None:
                recording = None if isinstance(file, int) or _has_opener(args, kwargs) else _writer()
                if recording is not None and any(letter in mode for letter in "wax+"):
                    with _unrecorded():
                        file = files._target(recording, os.fsdecode(file), copies="a" in mode or "r" in mode)
                super().__init__(file, mode, *args, **kwargs)

        return FileIO

    def _connecting(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Wraps `sqlite3.connect`: the program has a copy of the database."""

        @functools.wraps(original)
        def connect(database: Any, *args: Any, **kwargs: Any) -> Any:
            recording = _writer()
            name = os.fsdecode(database)
            if recording is None or name in ("", ":memory:") or "mode=ro" in name or "mode=memory" in name:
                return original(database, *args, **kwargs)
            if kwargs.get("uri") and name.startswith("file:"):
                name = name.removeprefix("file:").partition("?")[0]
            with _unrecorded():
                return original(self._target(recording, name, copies=True), *args, **kwargs)

        return connect

    def _saving_text(self, original: Callable[..., None]) -> Callable[..., None]:
        """Wraps `numpy.savetxt`, which holds a function that opens files of its own."""

        @functools.wraps(original)
        def save(fname: Any, *args: Any, **kwargs: Any) -> None:
            recording = None if hasattr(fname, "write") else _writer()
            if recording is not None:
                with _unrecorded():
                    fname = self._target(recording, os.fsdecode(fname), copies=False)
            original(fname, *args, **kwargs)

        return save

    def mapping(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Wraps the constructor of `numpy.memmap`: a file that is mapped for writing is copied where it is written."""

        @functools.wraps(original)
        def new(cls: Any, filename: Any, dtype: Any = np.uint8, mode: str = "r+", *args: Any, **kwargs: Any) -> Any:
            recording = None if hasattr(filename, "read") else _writer()
            if recording is not None and mode in ("r+", "readwrite"):
                path = os.fsdecode(filename)
                if self._find(recording, path) is None:
                    recording.log.skip(f"a write of {path}")
                    mode = "c"
            return original(cls, filename, dtype, mode, *args, **kwargs)

        return new

    def _making(self, original: Callable[..., None], name: str) -> Callable[..., None]:
        @functools.wraps(original)
        def make(path: Any, *args: Any, **kwargs: Any) -> None:
            recording = _writer()
            if recording is None:
                original(path, *args, **kwargs)
                return
            text = os.fsdecode(path)
            if kwargs.get("dir_fd") is None and (found := self._find(recording, text)) is not None:
                with _unrecorded():
                    original(found, *args, **kwargs)
                return
            recording.log.skip(name)
            with _unrecorded():
                if not os.path.isdir(text):
                    folder = self._scratch.path_for(text)
                    os.mkdir(folder)
                    recording.log.overlay.put(text, folder)

        return make

    def _changing(self, original: Callable[..., Any], name: str, *, drops: bool) -> Callable[..., Any]:
        @functools.wraps(original)
        def change(path: Any, *args: Any, **kwargs: Any) -> Any:
            recording = _writer()
            if recording is None:
                return original(path, *args, **kwargs)
            is_path = not isinstance(path, int) and kwargs.get("dir_fd") is None
            found = self._find(recording, os.fsdecode(path)) if is_path else None
            if found is None:
                recording.log.skip(name)
                return None
            with _unrecorded():
                result = original(found, *args, **kwargs)
            if drops:
                recording.log.overlay.drop(os.fsdecode(path))
            return result

        return change

    def _renaming(self, original: Callable[..., None], name: str) -> Callable[..., None]:
        @functools.wraps(original)
        def rename(src: Any, dst: Any, **kwargs: Any) -> None:
            recording = _writer()
            if recording is None:
                original(src, dst, **kwargs)
                return
            recording.log.skip(name)
            if kwargs.get("src_dir_fd") is None and kwargs.get("dst_dir_fd") is None:
                old, new = os.fsdecode(src), os.fsdecode(dst)
                if (found := self._find(recording, old)) is not None:
                    recording.log.overlay.drop(old)
                    recording.log.overlay.put(new, found)

        return rename

    def _temporary_folder(self, original: Callable[[], str]) -> Callable[[], str]:
        @functools.wraps(original)
        def gettempdir() -> str:
            return original() if _writer() is None else self._scratch.temporary

        return gettempdir

    def _kept(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Wraps a function that would remove its file by a name that exists only for the program."""

        @functools.wraps(original)
        def named(*args: Any, **kwargs: Any) -> Any:
            if _writer() is not None:
                args, kwargs = args[:7], {**kwargs, "delete": False}
            return original(*args, **kwargs)

        return named

    def _reading(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def read(path: Any = ".", *args: Any, **kwargs: Any) -> Any:
            recording = None if isinstance(path, int) or path is None else _writer()
            if recording is not None and recording.log.overlay.find(os.fsdecode(path)) is not None:
                path = self._find(recording, os.fsdecode(path)) or path
            return original(path, *args, **kwargs)

        return read

    def _listing(self, original: Callable[..., list[Any]]) -> Callable[..., list[Any]]:
        @functools.wraps(original)
        def listdir(path: Any = ".") -> list[Any]:
            recording = None if isinstance(path, int | bytes) else _writer()
            if recording is None:
                return original(path)
            folder = os.fspath(path or ".")
            names = original(self._find(recording, folder) or folder)
            written = recording.log.overlay.names_in(folder)
            return [*names, *(name for name in written if name not in names)]

        return listdir


def _has_opener(args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    return kwargs.get("opener") is not None or any(callable(each) for each in args[-1:])


def _is_device(path: str) -> bool:
    return path.startswith("/dev/") and not path.startswith("/dev/shm/")


def _ending_at_once(original: Callable[..., None]) -> Callable[..., None]:
    """Wraps the constructor of processes: one that the program itself starts ends at once, with no output."""

    @functools.wraps(original)
    def init(self: Any, args: Any, *rest: Any, **kwargs: Any) -> None:
        recording = _writer()
        frame = sys._getframe(1)
        while frame.f_globals.get("__name__") in _SHELLS and frame.f_back is not None:
            frame = frame.f_back
        # Libraries start processes to learn about the machine.
        if recording is None or is_foreign(frame.f_code.co_filename):
            original(self, args, *rest, **kwargs)
            return
        words = [args] if isinstance(args, str | bytes | os.PathLike) else list(args)
        recording.log.skip(f"the process {shlex.join(map(os.fsdecode, words))}")
        kwargs = {**kwargs, "shell": False, "executable": None, "cwd": None}
        original(self, [sys.executable, "-S", "-E", "-c", ""], *rest[:1], **kwargs)

    return init


def _checkpoints() -> Iterator[tuple[Callable[..., Any], Callable[..., Any]]]:
    """Yields functions that write tensors, with their replacements."""
    yield torch.save, _skipping(torch.save, "torch.save")
    yield torch.jit.save, _skipping(torch.jit.save, "torch.jit.save")
    yield torch.export.save, _skipping(torch.export.save, "torch.export.save")
    dcp: Any = importlib.import_module("torch.distributed.checkpoint")
    yield dcp.save, _skipping(dcp.save, "torch.distributed.checkpoint.save")
    yield dcp.async_save, _skipping(dcp.async_save, "torch.distributed.checkpoint.async_save", _done)
    try:
        safetensors: Any = importlib.import_module("safetensors.torch")
    except ImportError:
        return
    arrays: Any = importlib.import_module("safetensors.numpy")
    yield arrays.save_file, _skipping(arrays.save_file, "safetensors.numpy.save_file")
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
    if getattr(_own, "calls", False):
        return None
    return recording_here() or getattr(threading.current_thread(), _STARTED_BY, None)


@contextmanager
def _unrecorded() -> Iterator[None]:
    """Inside, the calling thread uses real files."""
    before = getattr(_own, "calls", False)
    _own.calls = True
    try:
        yield
    finally:
        _own.calls = before


_own = threading.local()
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
        return result()

    return skip


@contextmanager
def _replaced_everywhere(replacements: Mapping[Callable[..., Any], Callable[..., Any]]) -> Iterator[None]:
    """Inside, every module that holds one of these functions holds its replacement instead."""
    _exchange(replacements)
    try:
        yield
    finally:
        # Also in modules that have been imported meanwhile.
        _exchange({replacement: original for original, replacement in replacements.items()})


def _exchange(replacements: Mapping[Callable[..., Any], Callable[..., Any]]) -> None:
    by_id = {id(old): new for old, new in replacements.items()}
    for key, module in list(sys.modules.items()):
        if key in _BUILT_IN:
            continue
        names = getattr(module, "__dict__", None)
        if type(names) is dict and not by_id.keys().isdisjoint(map(id, names.values())):
            found = [(name, new) for name, value in names.items() if (new := by_id.get(id(value))) is not None]
            names.update(found)
