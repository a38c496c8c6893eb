"""Source of PyTorch's own tests of torch.distributed, at the version of the installed torch."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import torch

ADDRESS = "https://github.com/pytorch/pytorch"
FOLDER = "test/distributed"
_HELPERS = "test/inductor"
"""Folder of modules that some of the tests import."""
SECONDS = 600.0
"""Most seconds for a download."""


class Unreachable(Exception):
    """The source cannot be downloaded from here."""


def fetched(into: Path) -> Path:
    """Returns a source tree with the tests, after downloading them if they are not there yet.

    Args:
        into: Folder for the downloaded trees, one for each version.

    Raises:
        Unreachable: git is missing, or cannot reach the address.
    """
    tag = f"v{torch.__version__.partition('+')[0]}"
    tree = into / tag
    if (tree / FOLDER).is_dir():
        return tree
    # Elsewhere until it is whole: a tree with a part of the tests would be taken for all of them.
    draft = into / f"{tag}.part"
    shutil.rmtree(draft, ignore_errors=True)
    into.mkdir(parents=True, exist_ok=True)
    # Without history, and only the blobs of the folder: a few megabytes of several hundred.
    for command in (
        [
            "git",
            "clone",
            "--quiet",
            "--depth=1",
            f"--branch={tag}",
            "--filter=blob:none",
            "--sparse",
            ADDRESS,
            str(draft),
        ],
        ["git", "-C", str(draft), "sparse-checkout", "set", FOLDER, _HELPERS],
    ):
        try:
            done = subprocess.run(
                command,
                env=os.environ | {"GIT_TERMINAL_PROMPT": "0"},
                capture_output=True,
                text=True,
                timeout=SECONDS,
                check=False,
            )
        except FileNotFoundError:
            raise Unreachable("git is not installed") from None
        except subprocess.TimeoutExpired:
            raise Unreachable(f"{ADDRESS} did not answer within {SECONDS:g} s") from None
        if done.returncode:
            told = [line for line in done.stderr.splitlines() if line.startswith("fatal")]
            raise Unreachable(told[0] if told else "git failed")
    return draft.rename(tree)
