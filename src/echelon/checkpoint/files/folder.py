"""Folder of checkpoints: which are complete, and whether they are whole."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import shlex
import warnings
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from echelon.checkpoint.files.blocks import CheckedFile, read_file
from echelon.checkpoint.files.fs import Disk, FileSystem
from echelon.checkpoint.files.manifest import MAX_MANIFEST, NAME, Manifest, decode, file_name, is_newer
from echelon.errors import CheckpointError, FileError, InvalidArgument

SIZE_LIMIT = "raise this process's limit on the size of a file, which `ulimit -f` shows"
"""Advice on a file that is too large."""
_STEP = re.compile(r"step-(\d{8,18})")


def step_name(step: int) -> str:
    """Returns the name of a step's folder."""
    return f"step-{step:08d}"


class Found(NamedTuple):
    """Folder that is named as a step."""

    step: int
    manifest: Manifest | None
    """None if it is damaged."""
    problem: str
    """One line about a damaged manifest, else empty."""
    is_newer: bool
    """Whether a newer version of Echelon wrote it."""


class Folder:
    """Folder of checkpoints, one for each step."""

    def __init__(self, path: str | os.PathLike[str], fs: FileSystem | None = None) -> None:
        """Nothing is read yet.

        Args:
            path: the folder.
            fs: its file system; None: this host's.
        """
        self.path = os.fsdecode(path)
        self.fs = fs or Disk()

    def __repr__(self) -> str:
        return f"<Folder of checkpoints {self.path!r}>"

    def names(self) -> list[str]:
        """Returns the names in the folder; none if it does not exist.

        Raises:
            InvalidArgument: it is the folder of one step.
            FileError: it is a file, or cannot be read.
        """
        try:
            names = self.fs.list_folder(self.path)
        except FileNotFoundError:
            return []
        except OSError as error:
            raise failed_to("read", self.path, error) from None
        around, _, own = self.path.rstrip("/").rpartition("/")
        # It would seem to have no checkpoint, and a run would begin anew.
        if NAME in names and (match := _STEP.fullmatch(own)):
            step = int(match[1])
            raise InvalidArgument(
                f"{self.path} is the checkpoint of step {step} alone: give the folder around it, {around or '.'}"
            )
        return names

    def found(self) -> Iterator[Found]:
        """Yields the folders that are named as steps, the newest first."""
        for step in self._named():
            yield self.look(step)

    def look(self, step: int) -> Found:
        """Returns a step with its manifest.

        Raises:
            FileError: the manifest cannot be read.
        """
        path = f"{self.path}/{step_name(step)}/{NAME}"
        data = b""
        try:
            with contextlib.closing(self.fs.open(path)) as file:
                if file.size > MAX_MANIFEST:  # a damaged one may be larger than memory
                    return Found(step, None, f"{path} has {file.size} bytes: it is damaged", is_newer=False)
            data = read_file(self.fs, path)
            manifest = decode(data)
        except (FileNotFoundError, NotADirectoryError):
            return Found(step, None, f"{path} is missing", is_newer=False)
        except CheckpointError as error:
            return Found(step, None, f"{path}: {error}", is_newer=is_newer(data))
        except OSError as error:
            raise failed_to("read", path, error) from None
        if manifest.step != step:
            return Found(step, None, f"{path} is of step {manifest.step}: it lies in a wrong folder", is_newer=False)
        return Found(step, manifest, "", is_newer=False)

    def steps(self) -> list[int]:
        """Returns the steps that can be loaded, in rising order.

        Raises:
            FileError: the folder is a file, or cannot be read.
        """
        return sorted(each.step for each in self.found() if each.manifest is not None)

    def newer_than(self, step: int) -> list[int]:
        """Returns the steps above one that `newest` would not pass over, in rising order. Reads no other manifests.

        Raises:
            FileError: the folder is a file, or it or a manifest cannot be read.
        """
        found = (self.look(each) for each in self._named() if each > step)
        return sorted(each.step for each in found if each.manifest is not None or each.is_newer)

    def newest(self) -> Manifest | None:
        """Returns the newest manifest; None if there is no checkpoint. Warns of damaged or linked ones that are newer.

        Raises:
            CheckpointError: all are damaged or links, or the newest is of a newer version of Echelon.
            FileError: the folder is a file, or cannot be read.
        """
        linked = self._linked()
        damaged: list[str] = []
        for each in self.found():
            if each.manifest is not None:
                damaged += [text for step, text in linked.items() if step > each.step]
                if damaged:
                    warnings.warn(f"step {each.step} is the newest that can be read: {damaged[0]}", stacklevel=2)
                return each.manifest
            if each.is_newer:  # not damaged: a run that went on from an older one would do its steps again
                raise CheckpointError(each.problem)
            damaged.append(each.problem)
        damaged += linked.values()
        if damaged:
            raise CheckpointError(f"{damaged[0]}; move {self.path} away to start anew")
        return None

    def manifest(self, step: int) -> Manifest:
        """Returns the manifest of a step.

        Raises:
            CheckpointError: there is none, or it is damaged.
            FileError: it cannot be read.
        """
        self.check_named(step)
        each = self.look(step)
        if each.manifest is None:
            raise CheckpointError(each.problem if each.is_newer else each.problem + self.advice(step))
        return each.manifest

    def check_named(self, step: int) -> None:
        """Raises CheckpointError if there is no checkpoint of a step, not even a damaged one."""
        if step not in self._named():
            steps = self.steps()
            none = "it has none: give a folder in which a job has saved"
            have = f"it has {', '.join(map(str, steps[-8:]))}" if steps else none
            raise CheckpointError(f"{self.path} has no checkpoint of step {step}: {have}")

    def advice(self, step: int) -> str:
        """Returns the end of a message about a damaged step: the newest older one that is complete, if there is one."""
        for older in self._named():
            # Files that are missing or too short count, too. A flipped bit is found when it is loaded.
            with contextlib.suppress(CheckpointError, FileError):
                if older < step and (manifest := self.look(older).manifest) is not None:
                    self.check_names(manifest)
                    return f"; to go on from the complete one before it, load step={older}"
        return ""

    def check_names(self, manifest: Manifest) -> None:
        """Looks for files that are missing, of another size, or not of the checkpoint.

        Raises:
            CheckpointError: there is one.
            FileError: the folder cannot be read.
        """
        folder = f"{self.path}/{step_name(manifest.step)}"
        unknown = self._unknown(manifest)
        # Readers of safetensors take every such file in a folder for a part of the model.
        if stray := next((name for name in unknown if name.endswith(".safetensors")), None):
            raise CheckpointError(f"{folder}/{stray} is not of this checkpoint: move it away")
        for number in range(len(manifest.files)):
            self.open_file(manifest, number).close()

    def open_file(self, manifest: Manifest, number: int) -> CheckedFile:
        """Opens a file of a checkpoint. The caller closes it.

        Raises:
            CheckpointError: it is missing, or has another size.
            FileError: it cannot be read.
        """
        folder = f"{self.path}/{step_name(manifest.step)}"
        layout = manifest.tensors.layouts[number]
        try:
            return CheckedFile(self.fs, folder, number, manifest.files[number], layout)
        except OSError as error:
            raise failed_to("read", f"{folder}/{file_name(number)}", error) from None

    def verify(self, step: int) -> list[str]:
        """Reads every byte of a step. Returns its problems, a line each; an empty list if it is whole.

        Raises:
            FileError: a file cannot be read.
        """
        each = self.look(step)
        if each.manifest is None:
            return [each.problem]
        folder = f"{self.path}/{step_name(step)}"
        problems = [f"{folder}/{name} is not of this checkpoint" for name in self._unknown(each.manifest)]
        for number in range(len(each.manifest.files)):
            try:
                file = self.open_file(each.manifest, number)
            except CheckpointError as error:
                problems.append(str(error))
                continue
            with contextlib.closing(file):
                try:
                    problems.extend(file.check())
                except OSError as error:
                    raise failed_to("read", f"{folder}/{file_name(number)}", error) from None
        return problems

    def _named(self) -> list[int]:
        """Returns the steps that folders are named as, the newest first."""
        steps = [int(match[1]) for name in self.names() if (match := _STEP.fullmatch(name))]
        # A set: a name with more zeros than ours is of the same step.
        return sorted({step for step in steps if self.fs.is_folder(f"{self.path}/{step_name(step)}")}, reverse=True)

    def _linked(self) -> dict[int, str]:
        """Returns the steps whose names are links or files, the newest first, with the advice on each of them."""
        steps = {int(match[1]) for name in self.names() if (match := _STEP.fullmatch(name))} - {*self._named()}
        advice = "is a link or a file, and no checkpoint: move the folder itself to this place"
        return {step: f"{self.path}/{step_name(step)} {advice}" for step in sorted(steps, reverse=True)}

    def _unknown(self, manifest: Manifest) -> list[str]:
        folder = f"{self.path}/{step_name(manifest.step)}"
        known = {NAME, *map(file_name, range(len(manifest.files)))}
        try:
            return sorted(set(self.fs.list_folder(folder)) - known)
        except OSError as error:
            raise failed_to("read", folder, error) from None


def how_to_go_back(path: str, newer: Sequence[int]) -> str:
    """Returns the advice to a run that goes on from an older step than the newest: [30] or [20, 30] are newer."""
    steps = " ".join(map(str, newer[:8])) + " ..." * (len(newer) > 8)
    command = f"echelon checkpoint remove {shlex.quote(path)} {steps}"
    return f"remove the newer ones with `{command}`, or save into another folder"


def failed_to(act: str, path: str, error: OSError) -> FileError:
    """Returns the error for a call of the file system that failed, with an advice: failed_to("read", ...)."""
    name = os.fsdecode(error.filename) if isinstance(error.filename, str | bytes) else path
    advice = {
        "NotADirectoryError": "it is a file, give a folder",
        "FileExistsError": "it is a file, give a folder",
        "PermissionError": "give a folder with the rights to it",
    }.get(type(error).__name__, "see to the disk")
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        advice = "free some space, or keep fewer checkpoints with keep="
    elif error.errno == errno.EROFS:
        advice = "give a folder on a disk that can be written"
    elif error.errno == errno.EFBIG:
        advice = SIZE_LIMIT
    reason = error.strerror or str(error)
    return FileError(f"cannot {act} {name}: {reason}; {advice}")
