"""Metrics of a run as a CSV file, and for TensorBoard where it is installed."""

from __future__ import annotations

import csv
import importlib.util
import os
from typing import TYPE_CHECKING, Any, NoReturn, TextIO

from echelon.arguments import check_path, is_count, named, no_attribute, reading, refuse_others, writing
from echelon.errors import Closed, InvalidArgument
from echelon.group.group import ProcessGroup, check_group
from echelon.launch.init import current_group

_FILE = "metrics.csv"


_MEANT = dict.fromkeys(("log", "log_metrics", "add_scalar", "add_scalars"), " write add(step, loss=loss)")
"""Names that other libraries have for `add`."""


class MetricsWriter:
    """Writer of numbers by step, on rank 0: `metrics.csv` in a folder, and TensorBoard's event files beside it.

    Other ranks call the same methods, which do nothing there. A run that goes on adds to the file: the first `add`
    removes the rows of its own step and of later steps, which a checkpoint had not saved. TensorBoard is used if it
    is installed (`pip install tensorboard`).
    """

    @refuse_others(**dict.fromkeys(("logdir", "log_dir", "save_dir", "path", "dir", "project"), "folder"))
    def __init__(
        self, folder: str | os.PathLike[str], group: ProcessGroup | None = None, tensorboard: bool | None = None
    ) -> None:
        """Names the folder. It is made by the first `add`.

        Args:
            folder: the folder.
            group: the ranks. None: those of `echelon.init()`, or of the simulated rank.
            tensorboard: whether to write event files. None: if TensorBoard is installed.

        Raises:
            InvalidArgument: an argument has a wrong type, or TensorBoard is wanted and not installed.
        """
        found = current_group() if group is None else check_group(group)
        self._folder = os.path.abspath(check_path(folder))
        self._is_writer = found is None or found.rank == 0
        is_there = importlib.util.find_spec("tensorboard") is not None
        if tensorboard and not is_there:
            raise InvalidArgument("tensorboard=True, and TensorBoard is not installed: pip install tensorboard")
        self._uses_tensorboard = is_there if tensorboard is None else tensorboard
        self._file: TextIO | None = None
        self._names: tuple[str, ...] = ()
        self._events: Any = None
        self._is_closed = False

    def __repr__(self) -> str:
        return f"<MetricsWriter {self._folder!r}{', closed' if self._is_closed else ''}>"

    if not TYPE_CHECKING:  # type checkers report the name themselves

        def __getattr__(self, name: str) -> NoReturn:
            raise no_attribute("a MetricsWriter", name, ("add", "close"), _MEANT)

    @refuse_others(global_step="step")
    def add(self, step: int, **values: Any) -> None:
        """Writes the numbers of a step at once. Does nothing on other ranks than 0.

        Args:
            step: number of the step.
            values: numbers, or tensors with one element, by name. Each call has the same names.

        Raises:
            InvalidArgument: a value is no number, or the names are not those of the first call or of the file.
            FileError: the file cannot be written.
            Closed: after `close`.
        """
        if self._is_closed:
            raise Closed(f"this MetricsWriter of {self._folder} is closed: make another one, which adds to its file")
        if not is_count(step):
            raise InvalidArgument(f"step is {named(step)}: give a whole number of at least 0")
        # On all ranks: a value that is no number must not end rank 0 alone.
        numbers = {name: _number(name, value) for name, value in values.items()}
        if not self._is_writer:
            return
        if self._file is None:
            self._open(step, tuple(numbers))
        if set(numbers) != set(self._names):
            raise InvalidArgument(
                f"the metrics are {', '.join(numbers) or 'none'}, and those of {_FILE} {', '.join(self._names)}: give "
                "the same names at each call, or write others into another folder"
            )
        assert self._file is not None
        with writing(self._file.name):
            csv.writer(self._file).writerow([step, *(repr(numbers[name]) for name in self._names)])
            self._file.flush()  # a run that is killed has its rows
        if self._events is not None:
            for name, number in numbers.items():
                self._events.add_scalar(name, number, step)

    def close(self) -> None:
        """Closes the files. A second call does nothing."""
        self._is_closed = True
        if self._file is not None:
            self._file.close()
        if self._events is not None:
            self._events.close()

    def __enter__(self) -> MetricsWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _open(self, step: int, names: tuple[str, ...]) -> None:
        path = os.path.join(self._folder, _FILE)
        rows: list[list[str]] = []
        if os.path.exists(path):
            with reading(path), open(path, newline="", encoding="utf-8") as file:
                rows = list(csv.reader(file))
        self._names = tuple(rows[0][1:]) if rows else names
        # A full disk or a crash of the host may have cut a row short.
        whole = [row for row in rows[1:] if len(row) == 1 + len(self._names) and row[0].isdecimal()]
        kept = [row for row in whole if int(row[0]) < step]
        with writing(path):
            os.makedirs(self._folder, exist_ok=True)
            self._file = open(path, "w", newline="", encoding="utf-8")  # noqa: SIM115 # closed by `close`
            csv.writer(self._file).writerows([["step", *self._names], *kept])
        if self._uses_tensorboard:
            from torch.utils.tensorboard import SummaryWriter

            # It cannot remove events of later steps from the files of earlier runs, but hides them.
            self._events = SummaryWriter(self._folder, purge_step=step)


def _number(name: str, value: Any) -> float | int:
    try:
        number = value.item() if callable(getattr(value, "item", None)) else value
    except (RuntimeError, ValueError):  # of several elements
        number = value
    if isinstance(number, bool) or not isinstance(number, int | float):
        raise InvalidArgument(f"{name} is {named(value)}: give a number, or a tensor with one element")
    return number
