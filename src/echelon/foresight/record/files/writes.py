"""Writes of a recorded program, which are skipped: tensors without values must not overwrite a checkpoint.

Functions of libraries are replaced wherever a module holds them, since programs import them by name.
"""

from __future__ import annotations

import builtins
import functools
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
from types import ModuleType
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch

from echelon.call_site import is_foreign
from echelon.foresight.record.files.saved import CheckpointCalls, Saved
from echelon.foresight.record.here import Recording
from echelon.foresight.record.log.overlay import Scratch
from echelon.foresight.record.writer import in_writers, inherit, nothing, skip, unrecorded, with_new, writer
from echelon.replacements import Replacement, replaced
from echelon.temporary import temporary_folder

_CHANGES = (
    "mkfifo",
    "mknod",
    "rmdir",
    "truncate",
    "chmod",
    "chown",
    "lchown",
    "fchmod",
    "fchown",
    "utime",
    "setxattr",
    "removexattr",
)
"""Functions of `os` that change a file or a folder, by its path, and neither remove nor rename a file."""
_RENAMES = ("rename", "replace", "renames")
_READS = ("stat", "lstat", "statvfs", "access", "readlink", "chdir")
"""Functions of `os` that a program calls to find its own files."""
_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
_SHELLS = frozenset({"subprocess", "os"})
"""Modules between a program and the start of a process."""
_BUILT_IN = "posix"
"""Module of `os` whose functions Python calls for its cache of bytecode."""


@contextmanager
def no_writes(saved: Saved, *, allow_files: bool) -> Iterator[None]:
    """Inside, recorded programs write no checkpoints, and change no files.

    Args:
        saved: checkpoints of all ranks, which gets further ones.
        allow_files: whether they may open files for writing, and change folders, nevertheless.
    """
    with ExitStack() as stack:
        stack.enter_context(replaced([Replacement(threading.Thread, "start", in_writers(inherit))]))
        # Made first, removed last: by the real functions.
        scratch = Scratch(stack.enter_context(temporary_folder("echelon-foresee-")))
        checkpoints = CheckpointCalls(scratch, saved)
        files = _Files(scratch, saved, checkpoints, allow_files)
        others = () if allow_files else files.replacements()
        # All at once: to look through all modules takes as long as to record a small step.
        stack.enter_context(_replaced_everywhere(dict([*checkpoints.replacements(), *files.of_checkpoints(), *others])))
        stack.enter_context(replaced(checkpoints.of_classes()))
        if not allow_files:
            of_classes = [
                Replacement(subprocess.Popen, "__init__", _ending_at_once),
                Replacement(np.memmap, "__new__", in_writers(files.map)),
                Replacement(
                    torch.UntypedStorage, "from_file", lambda original: staticmethod(in_writers(files.share)(original))
                ),
                *(
                    Replacement(each, "export_chrome_trace", in_writers(skip, "export_chrome_trace", nothing))
                    for each in (torch.autograd.profiler.profile, torch.profiler.profile)
                ),
            ]
            stack.enter_context(replaced(of_classes))
        yield


class _Files:
    """Functions of files, as a recorded program calls them."""

    def __init__(self, scratch: Scratch, saved: Saved, checkpoints: CheckpointCalls, allows: bool) -> None:
        """Takes the folder of the recording, the checkpoints, and whether the program may change files."""
        self._scratch = scratch
        self._saved = saved
        self._checkpoints = checkpoints
        self._allows = allows

    def of_checkpoints(self) -> Iterator[tuple[Callable[..., Any], Callable[..., Any]]]:
        """Yields functions by which a program finds its checkpoints again, with their replacements."""
        yield with_new(builtins.open, self._open)
        for name in ("remove", "unlink"):
            yield with_new(getattr(os, name), self._change, f"os.{name}", True)
        for name in _RENAMES:
            yield with_new(getattr(os, name), self._rename, f"os.{name}")
        for name in _READS:
            yield with_new(getattr(os, name), self._read)
        yield with_new(os.scandir, self._scan)

    def replacements(self) -> Iterator[tuple[Callable[..., Any], Callable[..., Any]]]:
        """Yields the other functions with their replacements."""
        yield with_new(os.open, self._open_descriptor)
        yield io.FileIO, self._class_of_files()
        yield with_new(sqlite3.connect, self._connect)
        yield with_new(os.mkdir, self._make, "os.mkdir")
        yield with_new(os.makedirs, self._make, "os.makedirs")
        yield with_new(shutil.rmtree, self._change, "shutil.rmtree", True)
        yield with_new(os.removedirs, self._change, "os.removedirs", True)
        yield with_new(os.listdir, self._list)
        yield with_new(os.system, skip, "os.system", lambda: 0)
        yield with_new(np.savetxt, self._save_text)
        yield with_new(os.link, skip, "os.link", nothing)
        yield with_new(os.symlink, skip, "os.symlink", nothing)
        yield with_new(tempfile.gettempdir, lambda *_: self._scratch.temporary)
        yield with_new(tempfile.NamedTemporaryFile, _keep)
        for name in _CHANGES:
            yield with_new(getattr(os, name), self._change, f"os.{name}", name == "rmdir")

    def _target(self, recording: Recording, path: str, *, copies: bool) -> str:
        """Returns the path to write in place of a path of the program, and notes the write.

        Args:
            recording: recording of the program.
            path: path of the program.
            copies: whether the present content is needed.
        """
        found = self._checkpoints.find(recording, path)
        if found != path:
            recording.log.skip(f"a write of {path}")
        if found is None:
            found = self._scratch.path_for(path)
            if copies and os.path.isfile(path):
                shutil.copyfile(path, found)
            recording.log.overlay.put(path, found)
        return found

    def _open(
        self, recording: Recording, original: Callable[..., Any], file: Any, mode: str = "r", *args: Any, **kwargs: Any
    ) -> Any:
        if isinstance(file, int) or _has_opener(args, kwargs) or not isinstance(mode, str):
            return original(file, mode, *args, **kwargs)
        path, writes = os.fsdecode(file), _writes(mode)
        if _is_device(path) or (writes and self._allows):
            return original(file, mode, *args, **kwargs)
        with unrecorded():
            if writes:
                file = self._target(recording, path, copies="w" not in mode and "x" not in mode)
            else:
                file = self._checkpoints.find(recording, path) or self._checkpoints.of_others(recording, path) or file
            return original(file, mode, *args, **kwargs)

    def _open_descriptor(
        self,
        recording: Recording,
        original: Callable[..., int],
        path: Any,
        flags: int,
        mode: int = 0o777,
        *,
        dir_fd: int | None = None,
    ) -> int:
        name = os.fsdecode(path)
        if _is_device(name):
            return original(path, flags, mode, dir_fd=dir_fd)
        # A file without a name is in no folder, though it is opened by the name of one.
        if not flags & _WRITING or flags & os.O_TMPFILE == os.O_TMPFILE:
            found = self._checkpoints.find(recording, name) if dir_fd is None else None
            return original(found or path, flags, mode, dir_fd=dir_fd)
        with unrecorded():
            path = self._target(recording, name, copies=not flags & os.O_TRUNC)
            # The copy need not exist, though the program's file does.
            return original(path, flags | os.O_CREAT, mode)

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
                recording = None if isinstance(file, int) or _has_opener(args, kwargs) else writer()
                if recording is not None and _writes(mode):
                    with unrecorded():
                        file = files._target(recording, os.fsdecode(file), copies="a" in mode or "r" in mode)
                super().__init__(file, mode, *args, **kwargs)

        return FileIO

    def _connect(
        self, recording: Recording, original: Callable[..., Any], database: Any, *args: Any, **kwargs: Any
    ) -> Any:
        """Opens a copy of a database."""
        name = os.fsdecode(database)
        if name in ("", ":memory:") or "mode=ro" in name or "mode=memory" in name:
            return original(database, *args, **kwargs)
        if kwargs.get("uri") and name.startswith("file:"):
            name = name.removeprefix("file:").partition("?")[0]
        with unrecorded():
            return original(self._target(recording, name, copies=True), *args, **kwargs)

    def _save_text(
        self, recording: Recording, original: Callable[..., None], fname: Any, *args: Any, **kwargs: Any
    ) -> None:
        """Does as `numpy.savetxt`, which holds a function that opens files of its own."""
        if not hasattr(fname, "write"):
            with unrecorded():
                fname = self._target(recording, os.fsdecode(fname), copies=False)
        original(fname, *args, **kwargs)

    def map(
        self,
        recording: Recording,
        original: Callable[..., Any],
        cls: Any,
        filename: Any,
        dtype: Any = np.uint8,
        mode: str = "r+",
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """Makes a `numpy.memmap`. A file that is mapped for writing is copied where it is written."""
        if not hasattr(filename, "read") and mode in ("r+", "readwrite"):
            path = os.fsdecode(filename)
            if self._checkpoints.find(recording, path) is None:
                recording.log.skip(f"a write of {path}")
                mode = "c"
        return original(cls, filename, dtype, mode, *args, **kwargs)

    def share(
        self, recording: Recording, original: Callable[..., Any], filename: Any, shared: bool = False, nbytes: int = 0
    ) -> Any:
        """Makes a storage of a file. A shared file is copied where it is written, a shorter one at once."""
        path = os.fsdecode(filename)
        found = self._checkpoints.find(recording, path)
        if shared and found is None:
            with unrecorded():
                if os.path.isfile(path) and os.path.getsize(path) >= nbytes:
                    recording.log.skip(f"a write of {path}")
                    shared = False
                else:
                    found = self._target(recording, path, copies=True)
        return original(found or path, shared, nbytes)

    def _make(
        self, name: str, recording: Recording, original: Callable[..., None], /, path: Any, *args: Any, **kwargs: Any
    ) -> None:
        text = os.path.abspath(os.fsdecode(path))
        found = self._checkpoints.find(recording, text) if kwargs.get("dir_fd") is None else None
        with unrecorded():
            if found is not None or os.path.exists(text):  # for a real folder this is an error, or does nothing
                original(found or text, *args, **kwargs)
                return
            top = text
            while not os.path.isdir(os.path.dirname(top)):
                top = os.path.dirname(top)
            folder = self._scratch.path_for(top)
            os.makedirs(folder + text.removeprefix(top))
        recording.log.skip(name)
        recording.log.overlay.put(top, folder)

    def _change(
        self,
        name: str,
        drops: bool,
        recording: Recording,
        original: Callable[..., Any],
        /,
        path: Any,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        is_path = not isinstance(path, int) and kwargs.get("dir_fd") is None
        found = self._checkpoints.find(recording, os.fsdecode(path)) if is_path else None
        if found is None:
            if self._allows:
                return original(path, *args, **kwargs)
            recording.log.skip(name)
            return None
        with unrecorded():
            result = original(found, *args, **kwargs)
        if drops:
            recording.log.overlay.drop(os.fsdecode(path))
        return result

    def _rename(
        self, name: str, recording: Recording, original: Callable[..., None], /, src: Any, dst: Any, **kwargs: Any
    ) -> None:
        is_path = kwargs.get("src_dir_fd") is None and kwargs.get("dst_dir_fd") is None
        old, new = os.fsdecode(src), os.fsdecode(dst)
        found = self._checkpoints.find(recording, old) if is_path else None
        if found is None and self._allows:
            original(src, dst, **kwargs)
            return
        recording.log.skip(name)
        if found is not None:
            recording.log.overlay.drop(old)
            recording.log.overlay.put(new, found)
            self._saved.rename(old, new, recording.rank, recording.log.num_of_all)

    def _read(
        self, recording: Recording, original: Callable[..., Any], path: Any = ".", *args: Any, **kwargs: Any
    ) -> Any:
        if not isinstance(path, int) and path is not None:
            name = os.fsdecode(path)
            if recording.log.overlay.find(name) is not None:
                path = self._checkpoints.find(recording, name) or path
            else:
                path = self._checkpoints.of_others(recording, name) or path
        return original(path, *args, **kwargs)

    def _scan(self, recording: Recording, original: Callable[..., Any], path: Any = ".") -> Any:
        """Lists a folder as `os.scandir`, which `glob` calls, with files that the program has written there."""
        is_text = not isinstance(path, int | bytes) and path is not None
        folder = os.fspath(path) if is_text else ""
        written = recording.log.overlay.names_in(folder) if is_text else []
        entries = self._read(recording, original, path)
        is_own = is_text and self._checkpoints.find(recording, folder) is not None  # its real path is another one
        if not written and not is_own:
            return entries
        with entries:
            found: dict[str, Any] = {each.name: _Entry(folder, each.name) if is_own else each for each in entries}
        return _Scan([*found.values(), *(_Entry(folder, each) for each in written if each not in found)])

    def _list(self, recording: Recording, original: Callable[..., list[Any]], path: Any = ".") -> list[Any]:
        if isinstance(path, int | bytes):
            return original(path)
        folder = os.fspath(path or ".")
        names = original(self._checkpoints.find(recording, folder) or folder)
        written = recording.log.overlay.names_in(folder)
        return [*names, *(name for name in written if name not in names)]


class _Entry:
    """Entry of a folder, as of `os.scandir`, that exists for the program alone."""

    def __init__(self, folder: str, name: str) -> None:
        self.name = name
        self.path = os.path.join(folder, name)

    def __fspath__(self) -> str:
        return self.path

    def is_dir(self, *, follow_symlinks: bool = True) -> bool:  # noqa: ARG002 # it is none
        return os.path.isdir(self.path)

    def is_file(self, *, follow_symlinks: bool = True) -> bool:  # noqa: ARG002
        return os.path.isfile(self.path)

    def is_symlink(self) -> bool:
        return False

    def is_junction(self) -> bool:
        return False

    def stat(self, *, follow_symlinks: bool = True) -> os.stat_result:
        return os.stat(self.path, follow_symlinks=follow_symlinks)

    def inode(self) -> int:
        return self.stat().st_ino


class _Scan:
    """Iterator over the entries of a folder, which is closed as that of `os.scandir`."""

    def __init__(self, entries: Sequence[Any]) -> None:
        self._entries = iter(entries)

    def __iter__(self) -> Iterator[Any]:
        return self._entries

    def __next__(self) -> Any:
        return next(self._entries)

    def __enter__(self) -> _Scan:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._entries = iter(())


def _keep(_: Recording, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Makes a file that is kept: it would be removed by a name that exists only for the program."""
    # `delete` is the eighth argument.
    return original(*args[:7], **{**kwargs, "delete": False})


def _writes(mode: str) -> bool:
    return any(letter in mode for letter in "wax+")


def _has_opener(args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    # The opener is the last argument of `open`.
    return kwargs.get("opener") is not None or any(callable(each) for each in args[-1:])


def _is_device(path: str) -> bool:
    # Files in /dev/shm are ordinary files in memory.
    return path.startswith("/dev/") and not path.startswith("/dev/shm/")


def _ending_at_once(original: Callable[..., None]) -> Callable[..., None]:
    """Wraps the constructor of processes: one that the program itself starts ends at once, with no output."""

    @functools.wraps(original)
    def init(self: Any, args: Any, *rest: Any, **kwargs: Any) -> None:
        recording = writer()
        frame = sys._getframe(1)
        while frame.f_globals.get("__name__") in _SHELLS and frame.f_back is not None:
            frame = frame.f_back
        # Libraries start processes to learn about the machine.
        if recording is None or is_foreign(frame.f_code.co_filename):
            original(self, args, *rest, **kwargs)
            return
        words = [args] if isinstance(args, str | bytes | os.PathLike) else list(args)
        recording.log.skip(f"the process {shlex.join(map(os.fsdecode, words))}")
        # The working folder may be one that exists for the program alone.
        kwargs = {**kwargs, "shell": False, "executable": None, "cwd": None}
        # A real process, since the program may wait for its end and read its pipes.
        # Further arguments say how to start the program that was meant.
        original(self, [sys.executable, "-S", "-E", "-c", ""], *rest[:1], **kwargs)

    return init


@contextmanager
def _replaced_everywhere(replacements: Mapping[Callable[..., Any], Callable[..., Any]]) -> Iterator[None]:
    """Inside, every module that holds one of these functions holds its replacement instead."""
    without = _modules_without(frozenset(replacements))
    by_id = {id(old): new for old, new in replacements.items()}
    changed = []
    for module, names in _modules_except(without):
        if _exchange(by_id, names):
            changed.append(names)
        elif isinstance(module, ModuleType) and is_foreign(str(names.get("__file__"))):
            without[module] = len(names)
    try:
        yield
    finally:
        by_id = {id(replacement): original for original, replacement in replacements.items()}
        # Also in modules that have been imported meanwhile, and in those that a rank's own have taken the place of.
        for names in [*changed, *(names for _, names in _modules_except(without))]:
            _exchange(by_id, names)


@functools.cache
def _modules_without(functions: frozenset[Callable[..., Any]]) -> WeakKeyDictionary[ModuleType, int]:  # noqa: ARG001
    """Returns modules of installed packages that hold none of the functions, with the number of names in each.

    To look through all names of thousands of modules takes 30 ms. A module that gives a name of its own to such a
    function, after an earlier recording, is not found if it had the name before.
    """
    return WeakKeyDictionary()


def _modules_except(without: WeakKeyDictionary[ModuleType, int]) -> Iterator[tuple[object, dict[str, Any]]]:
    """Yields modules and their names, except modules that hold none of the functions. One may have got names since."""
    for key, module in list(sys.modules.items()):
        names = getattr(module, "__dict__", None)
        if key != _BUILT_IN and type(names) is dict:
            num_without = without.get(module) if isinstance(module, ModuleType) else None
            if num_without != len(names):
                yield module, names


def _exchange(by_id: Mapping[int, Any], names: dict[str, Any]) -> bool:
    """Replaces functions in a module. Returns whether it had one."""
    if by_id.keys().isdisjoint(map(id, names.values())):
        return False
    names.update([(name, new) for name, value in names.items() if (new := by_id.get(id(value))) is not None])
    return True
