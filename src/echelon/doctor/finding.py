"""Findings of checks: outcome and fix. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Status(StrEnum):
    """Severity of a finding."""

    OK = "ok"
    WARNING = "warning"
    """A run would start, but it may be slow, or fail in some cases."""
    ERROR = "error"
    """A run would not start."""


@dataclass(frozen=True)
class Finding:
    """Outcome of one check, with a fix unless its status is OK."""

    check: str
    status: Status
    found: str
    fix: str = ""

    def __post_init__(self) -> None:
        assert bool(self.fix) == (self.status is not Status.OK), self


def ok(check: str, found: str) -> Finding:
    """Returns a finding without a problem."""
    return Finding(check, Status.OK, found)


def warning(check: str, found: str, fix: str) -> Finding:
    """Returns a problem that does not stop a run."""
    return Finding(check, Status.WARNING, found, fix)


def error(check: str, found: str, fix: str) -> Finding:
    """Returns a problem that stops a run."""
    return Finding(check, Status.ERROR, found, fix)
