"""Call sites: file and line of the user's own code, not of a library's."""

from __future__ import annotations

import functools
import linecache
import os
import re
import sys
import sysconfig
import warnings
from collections.abc import Iterator
from types import CodeType, FrameType
from typing import TypeAlias

from echelon.purposes import BACKWARD, FORWARD, OF_MODULE

Place: TypeAlias = tuple[CodeType, int, str]
"""Code object, index of an instruction in it, and the module for which FSDP2 communicates there, mostly empty.

The line is computed on demand, since that is slower.
"""

_FOREIGN = (
    os.path.dirname(os.path.abspath(__file__)) + os.sep,
    sysconfig.get_path("stdlib") + os.sep,
    sysconfig.get_path("purelib") + os.sep,
    "<",
)
"""Path prefixes of foreign code: this package, the standard library, installed packages, frozen modules."""
_PACKAGES = tuple(f"{os.sep}{name}{os.sep}" for name in ("site-packages", "dist-packages"))
"""Folders of installed packages, which may also lie in another environment than this one."""
_IDLE = {
    "_worker": os.path.join("concurrent", "futures", "thread.py"),
    "_feed": os.path.join("multiprocessing", "queues.py"),
}
"""Functions of the standard library, with their files, in which a thread waits for work of other threads."""
_FSDP2 = os.path.join("torch", "distributed", "fsdp", "_fully_shard", "_fsdp_param_group.py")
_FSDP2_MODULE = _FSDP2.removesuffix(".py").replace(os.sep, ".")
"""File of torch whose methods communicate for the parameters of one module."""
_OF_DDP = {
    os.path.join("torch", "autograd", "graph.py"): BACKWARD,
    os.path.join("torch", "nn", "parallel", "distributed.py"): FORWARD,
}
"""Files of torch from which the C++ of its DDP communicates, with the user's call. Other C++ has a frame in between."""
IMPORT = "<frozen importlib._bootstrap>"
"""File of the frames in which a module is imported."""
OF_FSDP2 = 2
"""Kind of that file, see `kind_of`."""


# All three are cached, because they are asked for each frame of each operation.
@functools.cache
def kind_of(path: str) -> int:
    """Returns 0 for a source file of the user, `OF_FSDP2` for the one of FSDP2 that communicates, 1 for other ones."""
    return OF_FSDP2 if path.endswith(_FSDP2) else int(is_foreign(path))


@functools.cache
def is_own(path: str) -> bool:
    """Whether a source file belongs to this package."""
    return path.startswith(_FOREIGN[0])


@functools.cache
def is_foreign(path: str) -> bool:
    """Whether a source file belongs to this package, the standard library or an installed package."""
    return path.startswith(_FOREIGN) or any(folder in path for folder in _PACKAGES)


def ddp_call() -> str:
    """Returns the call of torch's DDP that has called this package. Empty if another one has.

    A hook of `register_comm_hook` is a part of DDP's backward.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and is_own(frame.f_code.co_filename):
        frame = frame.f_back
    call = "" if frame is None else _ddp_call_of(frame.f_code.co_filename)
    # The C++ of a backward calls hooks of tensors, too. DDP's alone has a bucket as an argument.
    while not call and frame is not None:
        outer = frame.f_back
        if outer is not None and _ddp_call_of(outer.f_code.co_filename) == BACKWARD:
            return BACKWARD if _has_bucket(frame) else ""
        frame = outer
    return call


def _has_bucket(frame: FrameType) -> bool:
    given = frame.f_code.co_varnames[: frame.f_code.co_argcount]
    return any(type(frame.f_locals.get(name)).__name__ == "GradBucket" for name in given)


def is_in_ddp(ident: int) -> bool:
    """Whether a thread may be in the C++ of torch's DDP: in its forward or backward, with no other Python inside."""
    frame = sys._current_frames().get(ident)
    return frame is not None and bool(_ddp_call_of(frame.f_code.co_filename))


@functools.cache
def _ddp_call_of(path: str) -> str:
    return next((call for end, call in _OF_DDP.items() if path.endswith(end)), "")


def with_line(operation: object) -> str:
    """Returns an operation as text, with the line in the user's code from which this thread has called it."""
    line = line_of(calling_place())
    return f"{operation}{line and f' at {line}'}"


def outwards(frame: FrameType | None) -> Iterator[FrameType]:
    """Yields a frame, its caller, and so on."""
    # Slower than a loop, which functions have that are called with each operation.
    while frame is not None:
        yield frame
        frame = frame.f_back


def calling_place(depth: int = 1) -> Place | None:
    """Returns the innermost call site in the user's code that led here. None if there is none.

    Args:
        depth: number of frames to skip, all known to be this package's.
    """
    # Not `inspect.stack`, which reads source files.
    return _place_in(sys._getframe(depth))


def warn(message: str) -> None:
    """Warns at the line in the user's code that led here, however many frames of libraries are in between."""
    place = calling_place(2)
    if place is None:
        warnings.warn(message, stacklevel=2)
    else:
        warnings.warn_explicit(message, UserWarning, place[0].co_filename, _line(place))


def is_in_import_of_library() -> bool:
    """Whether this call comes from the import of a library's module, which a line of the user's code has begun."""
    frame: FrameType | None = sys._getframe(1)
    has_import = False
    # An import of a module of the user ends at the lines of that module.
    while frame is not None and kind_of(path := frame.f_code.co_filename):
        has_import = has_import or path == IMPORT
        frame = frame.f_back
    return has_import and frame is not None


def place_of_thread(ident: int | None) -> Place | None:
    """Returns the innermost call site in the user's code of a running thread. None if there is none."""
    return _place_in(None if ident is None else sys._current_frames().get(ident))


def may_run_in_other_threads(ident: int) -> bool:
    """Whether the user's code runs in another thread than this one, or may begin to, as in one of threading.Timer."""
    return any(each != ident and _may_run_code(frame) for each, frame in sys._current_frames().items())


def _may_run_code(frame: FrameType | None) -> bool:
    """Whether a thread runs the user's code, or waits in the standard library, which may call it later."""
    is_of_package = False
    for each in outwards(frame):
        path = each.f_code.co_filename
        if not kind_of(path):
            return True
        # Packages have threads of their own, such as that of a progress bar. They call no code of the user.
        is_of_package = is_of_package or _is_of_package(path) or path.endswith(_IDLE.get(each.f_code.co_name, "\0"))
    return not is_of_package


@functools.cache
def _is_of_package(path: str) -> bool:
    return is_own(path) or any(folder in path for folder in _PACKAGES)


def _place_in(frame: FrameType | None) -> Place | None:
    """Returns the innermost call site in the user's code, from a frame outwards. None if there is none."""
    module = ""
    while frame is not None:
        kind = kind_of(frame.f_code.co_filename)
        if not kind:
            return frame.f_code, frame.f_lasti, module
        if kind == OF_FSDP2 and not module:
            module = sharded_module(frame)
        frame = frame.f_back
    return None


def sharded_module(frame: FrameType) -> str:
    """Returns the module for which FSDP2 communicates in a frame of `OF_FSDP2`. Empty if that is not known."""
    # Late: parts without torch have call sites, too.
    from echelon._torch_private.distributed import module_of_parameters

    return module_of_parameters(frame.f_locals.get("self"))


def sharded_call() -> str:
    """Returns the module for which torch's FSDP2 has called this package. Empty if another caller has."""
    if _FSDP2_MODULE not in sys.modules:
        return ""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and (kind := kind_of(frame.f_code.co_filename)):
        if kind == OF_FSDP2:
            return sharded_module(frame)
        frame = frame.f_back
    return ""


def line_of(place: Place | None) -> str:
    """Returns "file:line" of a call site, the file as the program names it. Empty for None.

    For a call of FSDP2 also the module, as in "train.py:20 (FSDP of module layers.2)".
    """
    return "" if place is None else f"{place[0].co_filename}:{_line(place)}{_module(place)}"


def source_of(place: Place | None) -> str:
    """Returns "file:line: source text", with the module as `line_of`. Empty for None."""
    return "" if place is None else source_line(place[0].co_filename, _line(place)) + _module(place)


def source_line(path: str, line: int) -> str:
    """Returns "file:line: source text" of a line. Only the file and the line if the source cannot be read."""
    text = linecache.getline(path, line).strip()
    return f"{path}:{line}{text and f': {text}'}"


def shortened(text: str) -> str:
    """Returns a text with the files below the working folder named as from there."""
    try:
        folder = os.path.join(os.getcwd(), "")
    except FileNotFoundError:  # it was removed
        return text
    # Every path begins with the root, and a path may have the working folder's inside.
    return text if folder == os.sep else re.sub(rf"(?<![\w./-]){re.escape(folder)}", "", text)


def _line(place: Place) -> int:
    code, instruction, _ = place
    # A generated instruction has no line of its own. Then the line of the function has to do.
    return next((line for start, end, line in code.co_lines() if start <= instruction < end), 0) or code.co_firstlineno


def _module(place: Place) -> str:
    return f" {OF_MODULE}{place[2]})" if place[2] else ""
