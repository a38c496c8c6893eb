"""Callers of operations and of communication: files of torch, or lines of the program itself."""

from __future__ import annotations

import functools
import os
import sys
from types import FrameType

import torch

from echelon.call_site import is_foreign, is_own

_TORCH = os.path.dirname(torch.__file__) + os.sep
_OF_GROUPS = tuple(
    os.path.join(os.sep, "echelon", each)
    for each in ("backends", "collectives", "foresight", "functional.py", "group", "interop", "_torch_private")
)
"""Folders and files of this package between a call of a group and its collective. Other ones call groups themselves."""
_CALLS = os.path.join("torch", "distributed", "distributed_c10d.py")
"""File of torch with the functions that a program calls."""
BETWEEN = (os.path.join("torch", "_ops.py"), os.path.join("torch", "utils", "_device.py"))
"""Files of torch between an operation and its caller."""
ENGINE = os.path.join("torch", "autograd", "graph.py")
"""File of torch that calls a backward."""
REPLICAS = os.path.join("torch", "nn", "parallel", "distributed.py")
"""File of DDP."""
_CHECKPOINT = os.path.join("torch", "utils", "checkpoint.py")
"""File of torch that repeats a forward in a backward."""
LOADING = os.path.join(os.sep, "torch", "utils", "data", "")
"""Folder of torch's loaders of data."""
_BEFORE_CALLS = (
    *BETWEEN,
    os.path.join("torch", "distributed", "c10d_logger.py"),
    os.path.join("torch", "overrides.py"),
    "contextlib.py",
)
"""Files between a function that communicates and its caller."""


def calling_file(between: tuple[str, ...] = BETWEEN) -> str:
    """Returns the file that calls an operation. Empty if there is none.

    Args:
        between: ends of paths of torch's own files between the operation and its caller.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and (is_own(path := frame.f_code.co_filename) or path.endswith(between)):
        frame = frame.f_back
    return "" if frame is None else path


def is_checkpointed() -> bool:
    """Whether torch.utils.checkpoint repeats a forward here, in the innermost backward."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and not (path := frame.f_code.co_filename).endswith(ENGINE):
        if path.endswith(_CHECKPOINT):
            return True
        frame = frame.f_back
    return False


def asked_by_program(depth: int) -> bool:
    """Whether code outside of torch and of this package asks, such as the program or an installed library.

    Args:
        depth: number of frames between this call and the one that asks.
    """
    frame: FrameType | None = sys._getframe(depth)
    while frame is not None and (path := frame.f_code.co_filename).endswith(BETWEEN):
        frame = frame.f_back
    return frame is not None and not is_of_torch(path)


@functools.cache
def is_of_torch(path: str) -> bool:
    """Whether a source file belongs to torch or to this package."""
    return path.startswith(_TORCH) or is_own(path)


def called_by_program() -> str:
    """Returns the name of the function by which a line of the program itself communicates. Empty if a library does."""
    name = ""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        path = frame.f_code.co_filename
        if is_own(path):
            if not any(each in path for each in _OF_GROUPS):
                return ""
            name = frame.f_code.co_name
        elif path.endswith(_CALLS):
            name = frame.f_code.co_name
        elif not path.endswith(_BEFORE_CALLS):
            return "" if is_foreign(path) else name
        frame = frame.f_back
    return ""
