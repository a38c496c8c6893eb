"""Agreement on the table of algorithms: all ranks of a job use the table that rank 0 finds.

Rank 0 reads the file and broadcasts its text, or that there is none, before the first group exists. So it does not
matter which other hosts have such a file, and no two ranks use different tables.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from echelon.backends.base import Backend
from echelon.collectives.plans.select import STATIC, Table
from echelon.collectives.plans.tuning import from_text
from echelon.errors import LaunchError
from echelon.group.group import ProcessGroup
from echelon.operation_records import TUNED_TABLE

VARIABLE = "ECHELON_TUNED"
"""Environment variable with the path of the file, or "off". Not set: `default_path`, if it exists."""
_OFF = ("off", "0", "false", "no")
# The file comes from outside, and all ranks receive it.
_MOST_BYTES = 1 << 20
_CONTEXT = 2
"""Context of the messages that carry the table. The world's group has 1."""


def default_path(environ: Mapping[str, str]) -> Path:
    """Returns the default path of the table, which `echelon tune` writes and jobs read."""
    config = environ.get("XDG_CONFIG_HOME") or os.path.join(environ.get("HOME") or os.path.expanduser("~"), ".config")
    return Path(config) / "echelon" / "tuned.json"


def agreed_table(backend: Backend, timeout: float, environ: Mapping[str, str] = os.environ) -> Table:
    """Returns the table of the job. Blocks; all ranks call it once, before anything else is sent.

    Args:
        backend: backend that connects all ranks.
        timeout: seconds for the ranks to agree.
        environ: rank 0's environment variables, for `VARIABLE`. Other ranks' do not matter.

    Raises:
        LaunchError, PlanError: on every rank, if rank 0 cannot read its file, or the file is no table.
    """
    # Rank 0's error is broadcast like a table, so that all ranks raise it and none waits for the broadcast.
    source = text = problem = ""
    if backend.rank == 0:
        try:
            source, text = find(environ)
        except LaunchError as error:
            problem = str(error)
    if backend.world_size > 1:
        group = ProcessGroup(backend, range(backend.world_size), context=_CONTEXT, timeout=timeout, name=TUNED_TABLE)
        told = group.broadcast_object([source, text, problem], src=0)
        assert isinstance(told, list)
        source, text, problem = map(str, told)
    if problem:
        raise LaunchError(problem)
    return from_text(text, source) if text else STATIC


def find(environ: Mapping[str, str]) -> tuple[str, str]:
    """Returns the path of the table and its text. Two empty texts if there is none.

    Raises:
        LaunchError: the file that `VARIABLE` names cannot be read.
    """
    given = environ.get(VARIABLE, "")
    # `echelon tune` writes to the default path, so every later job would use it: this turns it off for one.
    if given.lower() in _OFF:
        return "", ""
    path = Path(given) if given else default_path(environ)
    try:
        if path.stat().st_size > _MOST_BYTES:
            raise LaunchError(f"{path} has more than {_MOST_BYTES} bytes and is no table of algorithms: remove it")
        return str(path), path.read_text(encoding="utf-8")
    except FileNotFoundError:
        if not given:
            return "", ""
        raise LaunchError(f"{VARIABLE}={given}: there is no such file; run `echelon tune --output {given}`") from None
    except (OSError, UnicodeDecodeError) as error:
        raise LaunchError(f"cannot read {path}: {error}; correct it, or set {VARIABLE}=off") from None
