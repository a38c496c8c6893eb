"""Processes under a limit of memory that the kernel keeps, by a cgroup of their own."""

from __future__ import annotations

import contextlib
import os
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

_ROOT = Path("/sys/fs/cgroup")
_TRIES = 50


class Files(NamedTuple):
    """Names of a group's files, which differ between the two versions of cgroups."""

    limit: str
    swap: str
    most_swap: str
    """Value of `swap` that keeps a group without swap; empty: that of `limit`."""
    peak: str


V1 = Files("memory.limit_in_bytes", "memory.memsw.limit_in_bytes", "", "memory.max_usage_in_bytes")
V2 = Files("memory.max", "memory.swap.max", "0", "memory.peak")


class NoLimits(Exception):
    """This process may not make groups of the kernel."""


class Group(NamedTuple):
    """A group of processes."""

    path: Path
    files: Files

    def limit(self, num_bytes: int) -> None:
        """Sets the limit, and forbids swap."""
        (self.path / self.files.limit).write_text(str(num_bytes))
        with contextlib.suppress(FileNotFoundError):  # of a kernel without swap
            (self.path / self.files.swap).write_text(self.files.most_swap or str(num_bytes))

    @property
    def peak(self) -> int:
        """Most bytes so far: of processes, and of files that they were the first to read."""
        return int((self.path / self.files.peak).read_text())

    def start(self, command: Sequence[str], environ: Mapping[str, str]) -> subprocess.Popen[str]:
        """Starts a process in this group."""
        # A shell that joins the group and becomes the command: all of its memory counts.
        joining = ["sh", "-c", 'echo $$ > "$0" && exec "$@"', str(self.path / "cgroup.procs"), *command]
        return subprocess.Popen(joining, env={**os.environ, **environ}, stderr=subprocess.DEVNULL, text=True)


@contextlib.contextmanager
def group(name: str) -> Iterator[Group]:
    """Makes a group below or beside that of this process, and removes it in the end. Its processes must have ended.

    Raises:
        NoLimits: it cannot.
    """
    parent, files = _parent()
    made = Group(parent / f"echelon-{os.getpid()}-{name}", files)
    try:
        made.path.mkdir()
    except OSError as error:
        raise NoLimits(f"{made.path}: {error.strerror}") from None
    try:
        if not all((made.path / name).exists() for name in (files.limit, files.peak)):
            raise NoLimits(f"{made.path} has no {files.limit} and {files.peak}")
        yield made
    finally:
        for _ in range(_TRIES):  # a process that has ended leaves its group a little later
            with contextlib.suppress(OSError):
                made.path.rmdir()
                break
            time.sleep(0.1)


def _parent() -> tuple[Path, Files]:
    """Returns the group in which a new one may be made."""
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        number, controllers, path = line.split(":", 2)
        own = _ROOT / "memory" / path.lstrip("/")
        if "memory" in controllers.split(",") and (own / V1.limit).exists():
            return own, V1
        own = _ROOT / path.lstrip("/")
        # Below a group that has processes there are no limits, so the new group is beside that of this process.
        if number == "0" and (own / V2.limit).exists():
            return own.parent, V2
    raise NoLimits("no group of this process has a limit of memory")
