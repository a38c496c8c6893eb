"""Checkpoints that recorded ranks have saved, for the ranks that are recorded later and load them."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import NamedTuple


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
