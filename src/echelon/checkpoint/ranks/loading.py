"""Loading of checkpoints: the ranges of tensors that a rank wants, each byte checked."""

from __future__ import annotations

import contextlib
import os
from bisect import bisect_right
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from echelon.arguments import check_path, is_count, shown
from echelon.checkpoint.files.blocks import Read
from echelon.checkpoint.files.claim import settle_before_reading
from echelon.checkpoint.files.folder import Folder, failed_to, step_name
from echelon.checkpoint.files.fs import FileSystem
from echelon.checkpoint.files.layout import Part
from echelon.checkpoint.files.manifest import Manifest, file_name
from echelon.checkpoint.ranks.image import bytes_of, dtype_of
from echelon.checkpoint.ranks.together import gather, rank_of, together
from echelon.checkpoint.state import Spec, Wanted
from echelon.errors import CheckpointError, InvalidArgument, SizeMismatch
from echelon.group import ProcessGroup


class Checkpoint:
    """Checkpoint that is complete, open to be read."""

    def __init__(self, folder: Folder, manifest: Manifest) -> None:
        self._folder = folder
        self._manifest = manifest
        self.step: int = manifest.step
        self.seed: int | None = manifest.seed
        self.versions: dict[str, Any] = manifest.versions
        self.layout: dict[str, Any] = manifest.layout
        self.data: dict[str, Any] = manifest.data
        self.own: list[dict[str, Any]] = manifest.own
        self.specs = {
            name: Spec(entry.shape, dtype_of(entry.dtype)) for name, entry in manifest.tensors.entries.items()
        }
        """Every tensor by name."""

    def __repr__(self) -> str:
        return f"<Checkpoint of step {self.step} in {self._folder.path!r}, {len(self.specs)} tensors>"

    def read(self, wanted: Iterable[Wanted]) -> None:
        """Reads ranges of tensors into memory. Each block of a file that has some of them is checked.

        A target on another device takes host memory of its size while it is read.

        Raises:
            InvalidArgument: there is no such tensor.
            SizeMismatch: a target has another dtype, or is no range of the tensor.
            CheckpointError: a file is missing or damaged. Some targets may have been written.
            FileError: a file cannot be read.
        """
        by_file: dict[int, list[Read]] = {}
        for each in wanted:
            self._check(each)
            if each.out.device.type == "cpu":
                self._locate(each, by_file)  # read below: a block that several targets share is read and checked once
            else:  # one at a time, since each takes host memory
                out = torch.empty(each.out.shape, dtype=each.out.dtype, device="cpu")
                self._read(self._locate(each._replace(out=out), {}))
                each.out.copy_(out)
        self._read(by_file)

    def _check(self, wanted: Wanted) -> None:
        name, start, out = wanted
        where = f"{name} of step {self.step}"
        if name not in self.specs:
            raise InvalidArgument(f"step {self.step} has no tensor {name}: ask for one that was saved")
        spec, numel = self.specs[name], self._manifest.tensors.entries[name].numel
        if out.dtype != spec.dtype or not out.is_contiguous():
            raise SizeMismatch(f"contiguous {spec.dtype}", out.dtype, where)
        if not 0 <= start <= start + out.numel() <= numel:
            raise SizeMismatch(f"elements 0 to {numel}", f"{start} to {start + out.numel()}", where)

    def _locate(self, wanted: Wanted, by_file: dict[int, list[Read]]) -> dict[int, list[Read]]:
        """Adds to `by_file` where the bytes of a range are."""
        name, start, out = wanted
        tensors = self._manifest.tensors
        places, stop, size = tensors.pieces[name], start + out.numel(), tensors.entries[name].itemsize
        if start == stop:
            return by_file
        # torch's tensors offer no buffer, arrays of NumPy do.
        memory = memoryview(bytes_of(out).numpy().data)
        for place in places[bisect_right(places, start, key=lambda place: place.start) - 1 :]:
            if place.start >= stop:
                break
            first, last = max(place.start, start), min(place.stop, stop)
            begin = (
                tensors.layouts[place.file].begins[Part(name, place.start, place.stop)] + (first - place.start) * size
            )
            by_file.setdefault(place.file, []).append(
                Read(begin, memory[(first - start) * size : (last - start) * size])
            )
        return by_file

    def _read(self, by_file: dict[int, list[Read]]) -> None:
        for number in sorted(by_file):
            with (
                _advising(self._folder, self.step),
                contextlib.closing(self._folder.open_file(self._manifest, number)) as file,
            ):
                try:
                    file.read(by_file[number])
                except OSError as error:
                    path = f"{self._folder.path}/{step_name(self.step)}/{file_name(number)}"
                    raise failed_to("read", path, error) from None


@contextlib.contextmanager
def _advising(folder: Folder, step: int) -> Iterator[None]:
    """Adds to a CheckpointError about a step how to go on."""
    try:
        yield
    except CheckpointError as error:
        raise CheckpointError(f"{error}{folder.advice(step)}") from None


def open_checkpoint(
    path: str | os.PathLike[str],
    group: ProcessGroup | None = None,
    step: int | None = None,
    fs: FileSystem | None = None,
) -> Checkpoint | None:
    """Opens a checkpoint on all ranks. None if there is none. Collective.

    If an earlier job has ended while its checkpoint was written, its writers are waited for, for a minute.

    Args:
        path: folder of the checkpoints.
        group: the ranks that load; None: this one alone.
        step: the step; None: the newest complete one.
        fs: the file system; None: this host's.

    Raises:
        InvalidArgument: `step` is no number of at least 0, or differs between ranks.
        CheckpointError: there is no such step, it is damaged or of a newer version, or ranks see different files.
        FileError: the folder cannot be read.
    """
    if step is not None and not is_count(step):
        raise InvalidArgument(f"step={shown(step)}: give the number of a step, or None for the newest")
    folder = Folder(os.path.abspath(check_path(path)), fs)
    rank = rank_of(group)

    def choose() -> Manifest | None:
        if rank:
            return None
        settle_before_reading(folder.fs, folder.path)
        manifest = folder.newest() if step is None else folder.manifest(step)
        if manifest is not None:
            with _advising(folder, manifest.step):
                folder.check_names(manifest)
        return manifest

    # Rank 0 alone chooses: a save that ends meanwhile would be the newest for some ranks only.
    manifest = together(group, choose, folder.path)
    # Checksums of one file: ranks that see other folders may have the same step in both.
    mine = None if manifest is None else [manifest.step, [file.crcs for file in manifest.files][:1]]
    told = gather(group, [step, mine])
    for number, (asked, _) in enumerate(told):
        if asked != told[0][0]:
            raise InvalidArgument(
                f"rank {number} loads step={asked} and rank 0 step={told[0][0]}: pass the same on all ranks"
            )
    chosen = told[0][1]
    if chosen is None:
        return None

    def look() -> Manifest:
        found = manifest or folder.manifest(chosen[0])
        if [list(file.crcs) for file in found.files][:1] != [list(crcs) for crcs in chosen[1]]:
            raise CheckpointError(f"{folder.path} has another step {found.step} than on rank 0: use a shared folder")
        return found

    return Checkpoint(folder, together(group, look, folder.path))
