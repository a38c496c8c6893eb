"""Saving of checkpoints by all ranks of a group.

Strategy. All ranks gather a digest of the tensors' ranges. If it is new they gather the ranges, too, and each computes
the same assignment of elements to ranks. Rank 0 makes the draft. Then each rank writes its file, all gather the files'
checksums, and rank 0 commits; or each rank copies its part into shared memory and starts a writer process. Failures
are gathered after each of these steps, so all ranks raise, and none waits for one that has raised. The outcome of
writer processes is gathered at the next call.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Mapping
from importlib.metadata import version
from typing import Any

from echelon.arguments import check_path, is_count, shown
from echelon.checkpoint.files.blocks import write_file
from echelon.checkpoint.files.claim import claim
from echelon.checkpoint.files.commit import clear, commit, draft_of, record_of, remove_draft, remove_old, writers_of
from echelon.checkpoint.files.folder import Folder, failed_to, how_to_go_back
from echelon.checkpoint.files.fs import Disk, FileSystem
from echelon.checkpoint.files.lock import FileLock, is_held
from echelon.checkpoint.files.manifest import FORMAT, Manifest, StoredFile, content_of, encode, file_name
from echelon.checkpoint.ranks.background import BackgroundWriter, SharedBuffer
from echelon.checkpoint.ranks.image import blocks, fill
from echelon.checkpoint.ranks.plan import Plan, agree
from echelon.checkpoint.ranks.together import gather, raise_first, rank_of, together
from echelon.checkpoint.ranks.writer import failure
from echelon.checkpoint.state import Json, State
from echelon.errors import CheckpointError, EchelonError, FileError, InvalidArgument
from echelon.group import ProcessGroup
from echelon.launch.report import note_checkpoint

_MAX_STEP = 10**18  # names of folders have at most 18 digits
_Outcome = dict[str, Any]


class Handle:
    """Save that may be under way. Made by `Store.save`."""

    def __init__(self, step: int, finish: Callable[[], object], is_done: Callable[[], bool]) -> None:
        """`finish` waits for the save; `is_done`: whether it has ended."""
        self.step = step
        self._finish = finish
        self._is_done = is_done
        self._error: EchelonError | None = None
        self._has_ended = False

    def __repr__(self) -> str:
        state = "failed" if self._error else "ended" if self._has_ended else "under way"
        return f"<save of step {self.step}, {state}>"

    def wait(self) -> None:
        """Waits until the checkpoint is committed. All ranks must call it together.

        Raises:
            FileError: a file could not be written on some rank. All ranks raise it.
            CheckpointError: the save failed for another reason. All ranks raise it.
        """
        if not self._has_ended:
            self._finish()
        if self._error is not None:
            raise self._error

    def done(self) -> bool:
        """Whether the save has ended, committed or failed. `wait` returns at once then, or raises."""
        return self._has_ended or self._is_done()

    def _end(self, error: EchelonError | None) -> None:
        self._has_ended, self._error = True, error


class Saver:
    """Writer of a job's checkpoints into one folder. All ranks of the group call the same methods together."""

    def __init__(
        self,
        path: str | os.PathLike[str],
        group: ProcessGroup | None = None,
        keep: int | None = None,
        fs: FileSystem | None = None,
    ) -> None:
        """Nothing is written yet.

        Args:
            path: folder of the checkpoints. It is made with the first.
            group: the ranks that save; None: this one alone.
            keep: number of checkpoints that stay; None: all.
            fs: the file system of saves with wait=True; None: this host's.

        Raises:
            InvalidArgument: `path` is no path, or `keep` no number above 0.
        """
        self.path = os.path.abspath(check_path(path))
        if keep is not None and not is_count(keep, 1):
            raise InvalidArgument(f"keep={shown(keep)}: give a number of checkpoints above 0, or None to keep all")
        self._group = group
        self._rank = rank_of(group)
        self._keep = keep
        self._fs = fs or Disk()
        self._versions = {"format": FORMAT, "echelon": version("echelon"), "torch": version("torch")}
        # Not of `random`, whose state is the program's.
        self._run = os.urandom(8).hex()
        self._lock: FileLock | None = None
        self._plan: Plan | None = None
        self._buffer = SharedBuffer()
        self._writer: Callable[[], _Outcome] | None = None
        """Waits for this rank's writer and returns its outcome."""
        self._pending: Handle | None = None

    def __repr__(self) -> str:
        return f"<Saver of {self.path!r}, rank {self._rank}>"

    def save(
        self,
        step: int,
        state: State,
        *,
        wait: bool = True,
        seed: int | None = None,
        layout: Mapping[str, Json] | None = None,
        since: int | None = None,
    ) -> Handle:
        """Saves a checkpoint. Waits for the last save, if it is under way.

        Args:
            step: number of the step. A checkpoint of the same step is replaced.
            state: tensors and values of this rank.
            wait: whether to return after the commit; False: after a copy of the tensors.
            seed: the program's seed, noted in the manifest.
            layout: the program's layout, noted in the manifest.
            since: the step that the program has loaded or saved last, for the advice about newer ones. None: neither.

        Raises:
            FileError: a file cannot be written on some rank, or could not in the last save. All ranks raise it.
            CheckpointError: this or the last save failed for another reason. All ranks raise it.
            InvalidArgument: ranks save different steps or tensors, or `step` is no number of at least 0, or older than
                a checkpoint of the folder. All ranks raise it.
            UnsupportedOp: a dtype that cannot be stored.
        """
        if not is_count(step) or step >= _MAX_STEP:
            raise InvalidArgument(f"step={shown(step)}: give a number from 0 on, below {_MAX_STEP:.0e}")
        self.finish()
        self._plan, self._run, own = agree(self._group, {"step": step, "wait": wait}, state, self._run, self._plan)
        together(self._group, lambda: self._begin(step, step if since is None else min(step, since)), self.path)
        sizes = {"world_size": len(own), **(layout or {})}
        manifest = Manifest(step, seed, self._versions, sizes, self._plan.tensors, state.data, own, ())
        if not wait and not self._is_simulated():
            return self._start(manifest, self._plan, state)
        handle = Handle(step, self.finish, lambda: True)
        error: EchelonError | None = None
        try:
            self._write(manifest, self._plan, state)
        except (FileError, CheckpointError) as caught:
            error = caught
        if error is not None and wait:
            raise error
        handle._end(error)
        # A simulated rank has no process beside it. A failure is told when that of a process would be.
        self._pending = None if wait else handle
        return handle

    def finish(self) -> None:
        """Waits for the save that is under way, if there is one.

        Raises:
            FileError: a file could not be written on some rank. All ranks raise it.
            CheckpointError: the save failed for another reason. All ranks raise it.
        """
        handle, writer = self._pending, self._writer
        if handle is None:
            return
        if writer is not None:
            # It may be interrupted by Ctrl-C. So the save counts as pending until its outcome is known.
            outcomes = gather(self._group, writer())
            # Rank 0's writer reports the failures of others, too, in other words: theirs come first.
            error: EchelonError | None = None
            try:
                raise_first([None, *outcomes[1:]], self._group)
                raise_first(outcomes[:1], self._group)
            except (FileError, CheckpointError) as caught:
                error = caught
            handle._end(error)
        self._pending = self._writer = None
        handle.wait()

    def close(self) -> None:
        """Waits for the save that is under way, and gives the folder and the memory free. All ranks call it together.

        Raises:
            FileError: as `finish`.
            CheckpointError: as `finish`.
        """
        try:
            self.finish()
        finally:
            self._buffer.close()
            if self._lock is not None:
                self._lock.close()
                self._lock = None

    def _is_simulated(self) -> bool:
        return self._group is not None and self._group.backend.name == "simulated"

    def _begin(self, step: int, since: int) -> None:
        """Makes the draft of a step, on rank 0. All steps after `since` are of another run, if one is newer.

        Raises:
            InvalidArgument: the folder has a newer step, or is that of one step.
        """
        if self._rank:
            return
        folder = Folder(self.path, self._fs)
        folder.names()  # raises for a folder that is to get no lock
        if self._lock is None:
            self._lock = claim(self._fs, self.path)
        else:
            clear(self._fs, self.path)  # a save that failed may have left its draft, as on a full disk
        if newer := folder.newer_than(step):
            # Given free, so that they can be removed while this program waits.
            self._lock.close()
            self._lock = None
            raise InvalidArgument(
                f"step {step} is older than step {newer[-1]} in {self.path}, which the next load() would choose: "
                f"{how_to_go_back(self.path, folder.newer_than(since))}"
            )
        self._fs.make_folder(draft_of(self.path, step, self._run))

    def _write(self, manifest: Manifest, plan: Plan, state: State) -> None:
        """Writes this rank's file, and commits on rank 0."""
        draft = draft_of(self.path, manifest.step, self._run)
        path = f"{draft}/{file_name(self._rank)}"
        error: Exception | None = None
        outcome: _Outcome = {}
        try:
            size, crcs = write_file(self._fs, path, blocks(plan.tensors.layouts[self._rank], plan.copies, state.pieces))
            outcome = {"size": size, "crc32": crcs}
        except OSError as caught:
            error = failed_to("write", path, caught)
        except Exception as caught:  # as of a GPU: the others must not wait for this rank
            error = caught
        if error is not None:
            outcome = failure(error)
        outcomes = gather(self._group, outcome)
        if any("error" in each for each in outcomes):
            if self._rank == 0:
                with contextlib.suppress(OSError):  # the next save tries again
                    remove_draft(self._fs, draft)
            if error is not None:
                raise error
            raise_first(outcomes, self._group)
        files = tuple(StoredFile(each["size"], tuple(each["crc32"])) for each in outcomes)
        together(self._group, lambda: self._commit(manifest._replace(files=files)), draft)

    def _commit(self, manifest: Manifest) -> None:
        if self._rank:
            return
        commit(self._fs, self.path, manifest.step, self._run, encode(content_of(manifest)))
        note_checkpoint(manifest.step, self.path)
        remove_old(self._fs, self.path, manifest.step, self._run, self._keep)

    def _start(self, manifest: Manifest, plan: Plan, state: State) -> Handle:
        """Copies this rank's part into shared memory, and starts the process that writes it."""
        layout = plan.tensors.layouts[self._rank]
        folder = writers_of(draft_of(self.path, manifest.step, self._run))
        records: list[FileLock] = []

        def copy() -> None:
            memory = self._buffer.tensor(layout.size)
            records.append(_new_record(folder, self._rank))
            fill(memory, layout, plan.copies, state.pieces)

        # No writer starts before the last copy has ended: it would take processor and memory from that.
        together(self._group, copy, folder)
        job = {"folder": self.path, "step": manifest.step, "run": self._run, "rank": self._rank, "size": layout.size}
        if self._rank == 0:
            job |= {"content": content_of(manifest), "keep": self._keep, "world_size": len(manifest.own)}
        try:
            self._writer = BackgroundWriter(self._buffer.fileno, records[0], job).wait
        except OSError as error:  # told at the next call, on all ranks
            outcome = failure(error)
            self._writer = lambda: outcome
        finally:
            # Also if no process has begun: the next job would wait for its end.
            records[0].close()
        last = record_of(folder, 0)  # the writer of rank 0 is the last to end
        self._pending = Handle(manifest.step, self.finish, lambda: not is_held(last))
        return self._pending


def _new_record(folder: str, rank: int) -> FileLock:
    """Makes the record of a rank's writer, and takes its lock."""
    with contextlib.suppress(FileExistsError):
        os.mkdir(folder)
    record = FileLock(record_of(folder, rank))
    if not record.try_take():
        raise CheckpointError(f"another process holds {record.path}: save into a folder of this job's own")
    return record
