"""Process that writes one rank's file of a checkpoint in the background.

Strategy. The rank copies its part into shared memory and starts this process with three inherited files: the memory, a
record that is locked, and the job as JSON. It imports no torch, has a session of its own, and so outlives the rank. It
writes the file, and notes size and checksums in the record. Ending it releases the record's lock. The writer of rank 0
waits for the lock of each record in turn, and commits if all have a note. It waits for nobody else, so all end.
"""

from __future__ import annotations

import mmap
import os
import sys
from typing import Any

from echelon.checkpoint.files.blocks import cut, write_file
from echelon.checkpoint.files.commit import commit, draft_of, record_of, remove_draft, remove_old, writers_of
from echelon.checkpoint.files.folder import failed_to
from echelon.checkpoint.files.fs import Disk
from echelon.checkpoint.files.lock import note, noted, wait_for_end, who_holds
from echelon.checkpoint.files.manifest import encode, file_name
from echelon.checkpoint.files.priority import lower
from echelon.errors import CheckpointError, EchelonError, FileError, InvalidArgument, summarize
from echelon.launch.report import note_checkpoint


def main(memory: int, record: int, job: int) -> None:
    """Does one job. The outcome replaces the job in its file.

    Args:
        memory: inherited file with the bytes of the rank's file.
        record: inherited file whose lock is held.
        job: inherited file with the job.
    """
    task = noted(job)
    try:
        lower()
        os.read(sys.stdin.fileno(), 1)  # once the rank has noted this process, or has died
        _write(task, memory, record)
        if task["rank"] == 0:
            _commit(task)
        outcome: dict[str, Any] = {"ok": True}
    except BaseException as error:
        outcome = failure(error)
        # A file system that is full may have no room for it; the rank has it from the job's file.
        try:
            note(record, {"error": outcome["error"]})
        except OSError:
            os.ftruncate(record, 0)
    note(job, outcome)


def failure(error: BaseException) -> dict[str, Any]:
    """Returns the error of one rank as JSON-like data that all ranks can raise."""
    kind = (
        "file" if isinstance(error, FileError) else "argument" if isinstance(error, InvalidArgument) else "checkpoint"
    )
    return {"error": str(error) if isinstance(error, EchelonError) else summarize(error), "kind": kind}


def _write(task: dict[str, Any], memory: int, record: int) -> None:
    path = f"{draft_of(task['folder'], task['step'], task['run'])}/{file_name(task['rank'])}"
    try:
        # Not closed: an error's traceback has views of it. The process ends anyway.
        size, crcs = write_file(Disk(), path, cut(memoryview(mmap.mmap(memory, task["size"]))))
    except OSError as error:
        raise failed_to("write", path, error) from None
    note(record, {"size": size, "crc32": crcs})


def _commit(task: dict[str, Any]) -> None:
    """Waits for the files of all ranks and commits the checkpoint. If one failed, its draft is removed."""
    fs, folder, step, run = Disk(), task["folder"], task["step"], task["run"]
    draft = draft_of(folder, step, run)
    files, failed = [], ""
    for rank in range(task["world_size"]):
        record = record_of(writers_of(draft), rank)
        try:
            # The own lock is not waited for: nobody else will release it.
            value = wait_for_end(record) if rank else who_holds(record)
        except FileNotFoundError:
            value = {"error": f"rank 0 does not see {record}: use a folder that all hosts share"}
        if "size" in value:
            files.append(value)
        elif not failed:
            failed = f"rank {rank}: {value.get('error', 'its writer was killed, or the rank before it began')}"
    try:
        if failed:
            remove_draft(fs, draft)
            remove_draft(fs, writers_of(draft))
            raise CheckpointError(failed)
        commit(fs, folder, step, run, encode(task["content"] | {"files": files}))
        note_checkpoint(step, folder)
        remove_old(fs, folder, step, run, task["keep"])
        # Last: by the records a job that claims the folder finds the writers that it has to wait for.
        remove_draft(fs, writers_of(draft))
    except EchelonError:  # also an OSError
        raise
    except OSError as error:
        raise failed_to("write", draft, error) from None
