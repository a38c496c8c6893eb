"""Start of a rank of `echelon run`, from which on it can say its place, without a group and without Echelon.

Python imports a module of this name before the program. The launcher puts this folder first in PYTHONPATH. The module
takes it out again, so that neither the program nor its children see it, and imports the module of this name that the
folder hides. It imports nothing of Echelon, which the program may not use.
"""

from __future__ import annotations

import contextlib
import faulthandler
import importlib
import os
import signal
import sys

# Programs and their libraries use SIGUSR1 and SIGUSR2, and the C library the first ones of real time.
ASK = signal.SIGRTMAX - 7
"""Signal that asks a rank for its place."""
ERROR_FILE = "ECHELON_ERROR_FILE"
"""Variable with the name of the file in which this rank reports failures."""
FOLDER = os.path.dirname(__file__)
"""Folder of this module."""
_LONGEST = 90
"""Bytes of a folder that leave no room for a socket: its whole name has up to 107, and its own name 18 of them."""


def place_file(error_file: str, pid: int) -> str:
    """Returns the name of the file for the stack of a process."""
    return f"{error_file}.place-{pid}"


def answer(error_file: str) -> None:
    """Lets this process answer its launcher from now on. Does nothing if the program uses the signal itself.

    Args:
        error_file: name of the file in which this rank reports failures.
    """
    path = place_file(error_file, os.getpid())
    if os.path.exists(path) or signal.getsignal(ASK) != signal.SIG_DFL:
        return
    # Best effort, as the report of a failure: the launcher's folder may be gone.
    with contextlib.suppress(OSError):
        # Stays open until the process ends: faulthandler writes to the number.
        file = os.open(f"{path}.new", os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        faulthandler.register(ASK, file, all_threads=False)
        os.rename(f"{path}.new", path)


def share_folder(folder: str) -> None:
    """Has multiprocessing keep the sockets of this rank and its children in the launcher's folder.

    A child that is killed, such as a DataLoader's worker, would leave a folder of its own.
    """
    from multiprocessing import process

    if len(os.fsencode(folder)) < _LONGEST:
        getattr(process.current_process(), "_config", {})["tempdir"] = folder


def _leave() -> None:
    """Takes this folder out of the paths, and imports the module that it has hidden."""
    sys.path[:] = [path for path in sys.path if path != FOLDER]
    rest = os.environ.pop("PYTHONPATH", "").partition(os.pathsep)[2]
    if rest:
        os.environ["PYTHONPATH"] = rest
    own = sys.modules.pop(__name__)
    try:
        importlib.import_module(__name__)
    except ModuleNotFoundError as error:
        if error.name != __name__:
            raise
        sys.modules[__name__] = own  # the import of this module needs one to return


if __name__ == "sitecustomize":
    if file := os.environ.get(ERROR_FILE):  # a child that was given these paths alone has no launcher
        answer(file)
        share_folder(os.path.dirname(file))
    _leave()
