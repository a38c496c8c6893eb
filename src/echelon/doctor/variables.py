"""Checks of the environment variables that a run reads."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping

from echelon import _native, operation_records
from echelon.collectives.plans.algorithms.registry import OPERATIONS
from echelon.collectives.plans.select import parse, variable_of
from echelon.collectives.plans.tuning import from_text
from echelon.doctor.checks import Finding, error, ok, warning
from echelon.errors import EchelonError
from echelon.group import staging
from echelon.launch import environment, interface, report, status_line, tuned

_OWN = "ECHELON_"
# A test compares it with all names in the source, so a new variable cannot be forgotten here.
KNOWN = frozenset(
    (
        "ECHELON_BACKEND",
        "ECHELON_RUN_ID",
        "ECHELON_SECRET",
        _native.VARIABLE,
        operation_records.VARIABLE,
        staging.VARIABLE,
        interface.VARIABLE,
        report.ERROR_FILE,
        status_line.VARIABLE,
        tuned.VARIABLE,
        *map(variable_of, OPERATIONS),
    )
)
"""All ECHELON_ variables that are read."""


def check_variables(environ: Mapping[str, str]) -> list[Finding]:
    """Checks all variables that a run reads, and finds unknown ECHELON_ variables, which may be misspelt."""
    found = [*_wrong(environ), *_unknown(environ)]
    if found:
        return found
    # Names alone, without values: one of them is the secret.
    names = [name for name in sorted(environ) if name in KNOWN or name in environment.REQUIRED]
    return [ok("variables", ", ".join(names) + " as they should be" if names else "none set")]


def _wrong(environ: Mapping[str, str]) -> Iterator[Finding]:
    # Read as a run reads them, so that the doctor and the run say the same.
    for read in (_read_launcher, _read_backend, staging.fallback_is_on, _read_table, _read_algorithms):
        try:
            read(environ)
        except EchelonError as problem:
            # Error texts have their advice behind the first colon.
            what, _, fix = str(problem).partition(": ")
            yield error("variables", what, fix or "correct it")


def _read_launcher(environ: Mapping[str, str]) -> None:
    if launched := environment.read(environ):
        launched.check_secret()


def _read_backend(environ: Mapping[str, str]) -> None:
    environment.read_backend(environ, "auto")


def _read_table(environ: Mapping[str, str]) -> None:
    source, text = tuned.find(environ)
    if text:
        from_text(text, source)


def _read_algorithms(environ: Mapping[str, str]) -> None:
    for operation in OPERATIONS:
        if name := environ.get(variable_of(operation)):
            parse(operation, name)


def _unknown(environ: Mapping[str, str]) -> Iterator[Finding]:
    for name in sorted(environ):
        if name.startswith(_OWN) and name not in KNOWN:
            near = difflib.get_close_matches(name, KNOWN, n=1)
            fix = f"rename it to {near[0]}, or unset it" if near else "unset it"
            yield warning("variables", f"{name} is not read by anything", fix)
