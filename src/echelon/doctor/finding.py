"""What a check found, and what to do about it. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Status(StrEnum):
    """How bad it is."""

    OK = "ok"
    WARNING = "warning"
    """A run would start, but it may be slow, or fail in some cases."""
    ERROR = "error"
    """A run would not start."""


@dataclass(frozen=True)
class Finding:
    """The outcome of one check: what was found, and, unless all is well, what to do."""

    check: str
    status: Status
    found: str
    fix: str = ""

    def __post_init__(self) -> None:
        assert bool(self.fix) == (self.status is not Status.OK), self


def ok(check: str, found: str) -> Finding:
    """Returns that all is well."""
    return Finding(check, Status.OK, found)


def warning(check: str, found: str, fix: str) -> Finding:
    """Returns what does not stop a run."""
    return Finding(check, Status.WARNING, found, fix)


def error(check: str, found: str, fix: str) -> Finding:
    """Returns what stops a run."""
    return Finding(check, Status.ERROR, found, fix)
