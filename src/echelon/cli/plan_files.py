"""The files that `echelon plan` writes."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from echelon.errors import ScheduleError
from echelon.pipeline.schedule import Schedule
from echelon.trace import Timeline


class Files(NamedTuple):
    """Where to write what; None: nowhere."""

    svg: str | None
    png: str | None
    chrome: str | None
    csv: str | None

    def check(self, compare: bool) -> None:
        """Looks at the names, before any work is done.

        Raises:
            ScheduleError: a picture whose name says that it is something else, or a file for a comparison.
        """
        for option, path in self._asdict().items():
            if compare and path is not None:
                raise ScheduleError(f"--{option} {path}: --compare has many schedules; name the one to write")
        for path, suffix in ((self.svg, ".svg"), (self.png, ".png")):
            if path is not None and not path.lower().endswith(suffix):
                raise ScheduleError(f"--{suffix[1:]} {path}: give a name that ends in {suffix}, such as plan{suffix}")

    def write(self, schedule: Schedule, timeline: Timeline) -> list[str]:
        """Writes what was asked for, and returns the names of the files.

        Raises:
            FileError: a file cannot be written.
            EchelonError: a picture was asked for, and matplotlib is not installed.
        """
        wanted: list[tuple[str | None, Callable[[str], None]]] = [
            (self.svg, timeline.draw),
            (self.png, timeline.draw),
            (self.chrome, timeline.to_chrome),
            (self.csv, schedule.to_csv),
        ]
        written = []
        for path, write in wanted:
            if path is not None:
                write(path)
                written.append(path)
        return written
