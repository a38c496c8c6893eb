"""What happens to a tensor of a GPU where the backend has no path for it: an error, unless the user allows more.

ECHELON_ENABLE_GPU_FALLBACK=1 allows the way through the host's memory, with a warning at every call: it is slow, and
whoever measures should know.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping

from torch import Tensor

from echelon.errors import LaunchError, UnsupportedOp

logger = logging.getLogger("echelon")

VARIABLE = "ECHELON_ENABLE_GPU_FALLBACK"
ON = ("1", "true", "yes", "on")
OFF = ("0", "false", "off", "")


def fallback_is_on(environ: Mapping[str, str]) -> bool:
    """Says whether the way through the host's memory is allowed.

    Raises:
        LaunchError: the variable is neither on nor off.
    """
    text = environ.get(VARIABLE, "").strip().lower()
    if text not in (*ON, *OFF):
        raise LaunchError(
            f"{VARIABLE}={environ[VARIABLE]!r}: use one of {', '.join(ON)} to turn it on, or one of "
            f"{', '.join(filter(None, OFF))} or nothing to turn it off"
        )
    return text in ON


def check_away(tensor: Tensor, what: str, backend: str, environ: Mapping[str, str] = os.environ) -> None:
    """Warns that a call takes the way through the host's memory, if that is allowed.

    Args:
        tensor: on a device that the backend cannot handle.
        what: the collective.
        backend: its name.

    Raises:
        UnsupportedOp: it is not allowed.
        LaunchError: the variable is neither on nor off.
    """
    if not fallback_is_on(environ):
        raise UnsupportedOp(
            f'{what}: a tensor on {tensor.device}, for which backend={backend!r} has no path: use backend="nccl", or '
            f"set {VARIABLE}=1 to go through the host's memory, which is slow"
        )
    logger.warning(
        "%s: a tensor on %s goes through the host's memory, since backend=%r has no path for it; to make that an "
        'error set %s=0, to have a path use backend="nccl"',
        what,
        tensor.device,
        backend,
        VARIABLE,
    )
