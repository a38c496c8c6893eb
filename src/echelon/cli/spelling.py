"""Spelling of arguments in errors: `hosts=[3, 1]` of Python is `--hosts 3,1` on the command line. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping

_VALUE = r"""'[^']*'|"[^"]*"|\[[^\]]*\]|\([^)]*\)|[^\s,:;)]*"""


def as_typed(text: str, options: Mapping[str, str]) -> str:
    """Returns the text of an error with each argument of Python as it is typed on the command line.

    Args:
        text: an error of a function that the command has called, such as "hosts=[3, 1] have 4 ranks".
        options: options of the command by the names of the arguments.
    """
    names = "|".join(map(re.escape, options))
    # Not in a call, as in Kill(rank=1). Without "=" an argument stands at the beginning alone: "forward has 2 values".
    argument = rf"(?<![\w.(-])({names})=({_VALUE})|\A({names})(?= has )"
    return re.sub(argument, lambda found: _typed(options[found[1] or found[3]], found[2] or ""), text)


def _typed(option: str, value: str) -> str:
    if value[:1] in ("[", "("):
        value = ",".join(part.strip() for part in value[1:-1].split(","))
    elif value[:1] in ("'", '"'):
        value = value[1:-1]
    return f"{option} {value}".rstrip()
