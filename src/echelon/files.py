"""Files named by the user: checks of paths, and errors of opening them as one line with advice. Pure."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

from echelon.arguments import named
from echelon.errors import FileError, InvalidArgument


def check_path(path: object) -> str:
    """Returns a path as text. Raises InvalidArgument if it is not a path."""
    if not isinstance(path, str | os.PathLike):
        raise InvalidArgument(f"path is {named(path)}: give the name of a file, such as 'plan.svg'")
    name = os.fsdecode(path)
    if "\0" in name:
        raise InvalidArgument(f"path is {name!r}, with a null character: give the name of a file, such as 'plan.svg'")
    return name


@contextmanager
def writing(path: str | os.PathLike[str]) -> Iterator[None]:
    """Checks an output path, and maps errors of writing it inside the with block to FileError.

    Raises:
        InvalidArgument: `path` is not a path.
        FileError: it is a path of Windows, its folder is missing, or it cannot be written to.
    """
    name = check_path(path)
    # Legal as a name, but the file would lie in the current folder.
    if "\\" in os.path.basename(name) and not os.path.lexists(name):
        raise FileError(f"cannot write {name}: it is a path of Windows; separate folders with /, as in plans/plan.svg")
    try:
        yield
    except OSError as error:
        raise FileError(f"cannot write {name}: {_reason(name, error)}") from None


@contextmanager
def reading(path: str | os.PathLike[str]) -> Iterator[None]:
    """Maps errors of reading a file inside the with block to FileError.

    Raises:
        InvalidArgument: `path` is not a path.
        FileError: there is no such file, or it cannot be read.
    """
    name = check_path(path)
    try:
        yield
    except FileNotFoundError:
        folder = os.path.dirname(os.path.abspath(name))
        raise FileError(f"cannot read {name}: there is no such file in {folder}; give the path of one") from None
    except OSError as error:
        raise FileError(f"cannot read {name}: {error.strerror}; give a file that can be read") from None


def _reason(name: str, error: OSError) -> str:
    folder = os.path.dirname(name)
    if isinstance(error, FileNotFoundError) and folder and not os.path.isdir(folder):
        return f"the folder {folder} does not exist; make it first: mkdir -p {folder}"
    return f"{error.strerror}; give a place that can be written to"
