"""Commit of a checkpoint, and the removal of old ones and of leftovers.

A checkpoint is written into a folder with a hidden name. When all files, the manifest and the folder are on disk, one
rename gives it its name. Every removal begins with the opposite rename. So a folder named as a step is always whole.
"""

from __future__ import annotations

import contextlib
import re

from echelon.checkpoint.files.folder import Folder, failed_to, step_name
from echelon.checkpoint.files.fs import ASIDE, FileSystem
from echelon.checkpoint.files.manifest import NAME, decode, file_name
from echelon.errors import CheckpointError

_LEFTOVER = re.compile(r"\.step-(\d{8,18})\.[0-9a-f]{16}(\.old|\.writers)?")
# The files of writers' records have no suffix. A world of more than 99,999 ranks has six digits.
_OURS = re.compile(r"manifest\.json|rank-\d{5,6}(\.safetensors)?")
"""Names of files that a save may have left."""


def draft_of(folder: str, step: int, run: str) -> str:
    """Returns the folder in which a step is written. `run`: 16 hexadecimal digits, of one start of a job."""
    return f"{folder}/.{step_name(step)}.{run}"


def writers_of(draft: str) -> str:
    """Returns the folder with the records of a draft's writers."""
    return draft + ".writers"


def record_of(folder: str, rank: int) -> str:
    """Returns the record of a rank's writer in such a folder."""
    return f"{folder}/rank-{rank:05d}"


def is_records(name: str) -> bool:
    """Whether a name is that of a folder with the records of writers."""
    match = _LEFTOVER.fullmatch(name)
    return match is not None and match[2] == ".writers"


def prepare(fs: FileSystem, folder: str) -> None:
    """Makes a folder of checkpoints, and its parents, if it does not exist.

    Raises:
        OSError: it is a file, or there are no rights to it.
    """
    missing = []
    path = folder.rstrip("/") or "/"
    while path and not fs.is_folder(path):
        try:
            fs.list_folder(path)  # a link to a folder
            break
        except FileNotFoundError:
            missing.append(path)
            path = path.rpartition("/")[0] or ("/" if path.startswith("/") else "")
    for each in reversed(missing):
        # A folder is on disk when the names in its parent are.
        fs.make_folder(each)
        fs.sync_folder(each.rpartition("/")[0] or ("/" if each.startswith("/") else "."))


def set_aside(fs: FileSystem, folder: str) -> dict[str, str]:
    """Returns the checkpoints that a crash has left without a name, by the name that each had.

    One that replaces a step is renamed three times where the file system cannot exchange names.
    """
    names = set(fs.list_folder(folder))
    asides = {
        f"step-{match[1]}": match[0] for name in names if (match := _LEFTOVER.fullmatch(name)) and match[2] == ASIDE
    }
    return {name: aside for name, aside in asides.items() if name not in names}


def bring_back(fs: FileSystem, folder: str) -> None:
    """Gives the checkpoints that a crash has left without a name theirs back.

    Raises:
        OSError: one cannot be renamed.
    """
    for name, aside in set_aside(fs, folder).items():
        fs.rename(f"{folder}/{aside}", f"{folder}/{name}")
        fs.sync_folder(folder)


def clear(fs: FileSystem, folder: str) -> None:
    """Removes drafts that a save has left. Files with other names stay, and so do their folders.

    Raises:
        OSError: one cannot be removed.
    """
    bring_back(fs, folder)
    for name in fs.list_folder(folder):
        if _LEFTOVER.fullmatch(name) and fs.is_folder(f"{folder}/{name}"):
            remove_draft(fs, f"{folder}/{name}")


def remove_draft(fs: FileSystem, path: str) -> None:
    """Removes a draft. Files with other names stay, and so does the folder then.

    Raises:
        OSError: it cannot be removed.
    """
    names = fs.list_folder(path)
    for name in names:
        if _OURS.fullmatch(name):
            fs.remove(f"{path}/{name}")
    if all(_OURS.fullmatch(name) for name in names):
        fs.remove_folder(path)


def commit(fs: FileSystem, folder: str, step: int, run: str, manifest: bytes) -> None:
    """Turns a draft, whose files are on disk, into the checkpoint of a step.

    An earlier checkpoint of the same step is replaced.

    Raises:
        CheckpointError: a folder of the step's name is there that is no checkpoint, or a rank's file is not seen here.
        OSError: the file system failed. If the checkpoint was there before, it still is.
    """
    draft, path = draft_of(folder, step, run), f"{folder}/{step_name(step)}"
    # A manifest that cannot be read, or files that others cannot, are not to be committed.
    for number, stored in enumerate(decode(manifest).files):
        _check_seen(fs, f"{draft}/{file_name(number)}", stored.size)
    with contextlib.closing(fs.create(f"{draft}/{NAME}")) as file:
        file.write(manifest)
        file.sync()
    fs.sync_folder(draft)
    if step_name(step) not in fs.list_folder(folder):
        fs.rename(draft, path)
        fs.sync_folder(folder)
        return
    if not fs.is_folder(path) or NAME not in fs.list_folder(path):
        raise CheckpointError(f"{path} exists and is no checkpoint: move it away, or use another folder")
    fs.exchange(draft, path)
    fs.sync_folder(folder)
    remove_draft(fs, draft)


def _check_seen(fs: FileSystem, path: str, size: int) -> None:
    try:
        file = fs.open(path)
    except FileNotFoundError:
        raise CheckpointError(f"rank 0 does not see {path}: save into a folder that all hosts share") from None
    seen = file.size
    file.close()
    if seen != size:
        raise CheckpointError(
            f"rank 0 sees {seen} of the {size} bytes of {path}: save into a folder that all hosts share"
        )


def remove_old(fs: FileSystem, folder: str, step: int, run: str, keep: int | None) -> None:
    """Removes all but the newest checkpoints after the commit of a step.

    Damaged ones stay, and are not counted. A folder in which somebody has put another file stays, too.

    Args:
        fs: the file system.
        folder: folder of the checkpoints.
        step: the step that was committed, which stays.
        run: name of this start of the job.
        keep: number of checkpoints that stay; None: all.

    Raises:
        FileError: one cannot be removed.
    """
    if keep is None:
        return
    others = [each.step for each in Folder(folder, fs).found() if each.manifest is not None and each.step != step]
    for old in others[keep - 1 :]:  # the newest come first, and the new step is one of those to keep
        with contextlib.suppress(CheckpointError):
            remove_step(fs, folder, old, run)


def remove_step(fs: FileSystem, folder: str, step: int, run: str) -> None:
    """Removes the checkpoint of a step, whole or damaged.

    Raises:
        CheckpointError: somebody has put another file into its folder.
        FileError: it cannot be removed.
    """
    path, draft = f"{folder}/{step_name(step)}", draft_of(folder, step, run)
    try:
        if others := sorted(name for name in fs.list_folder(path) if not _OURS.fullmatch(name)):
            raise CheckpointError(f"{path} has {others[0]}, which is of no checkpoint: move it away first")
        fs.rename(path, draft)
        # Before its files go: a crash would leave a checkpoint that has lost some.
        fs.sync_folder(folder)
        remove_draft(fs, draft)
    except OSError as error:
        raise failed_to("remove", path, error) from None
