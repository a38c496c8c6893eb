"""Store, the user's object: a folder with the checkpoints of one run."""

from __future__ import annotations

import contextlib
import os
import warnings
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, Never, NoReturn

from echelon.arguments import check_path, is_count, named, no_attribute, refuse_others
from echelon.checkpoint.files.folder import Folder, how_to_go_back
from echelon.checkpoint.groups import group_of
from echelon.checkpoint.objects.collect import Objects, collect
from echelon.checkpoint.objects.model import wrapped_by
from echelon.checkpoint.objects.restore import restore
from echelon.checkpoint.ranks.loading import open_checkpoint
from echelon.checkpoint.ranks.saving import Handle, Saver
from echelon.checkpoint.ranks.together import rank_of
from echelon.errors import CheckpointError, FileError, InvalidArgument
from echelon.group.group import ProcessGroup, check_group
from echelon.launch.environment import is_rank
from echelon.purposes import LOAD, SAVE

_MEANT = {
    **dict.fromkeys(("save_checkpoint", "save_state"), "save"),
    **dict.fromkeys(("load_checkpoint", "load_state", "restore"), "load"),
    **dict.fromkeys(("delete", "remove"), " run echelon checkpoint remove FOLDER STEP, or give Store(keep=)"),
    **dict.fromkeys(("export", "convert"), " run echelon checkpoint export"),
    **dict.fromkeys(("wait", "finish", "flush"), " save(wait=False) returns a handle, which has wait()"),
    **dict.fromkeys(("latest", "latest_step"), " load() takes the latest, and steps() lists all"),
}
"""Names that other libraries have for attributes."""
_IN_OTHER_STORES = {
    **dict.fromkeys(("max_to_keep", "keep_last", "keep_last_n", "num_to_keep", "max_checkpoints", "limit"), "keep"),
    **dict.fromkeys(("save_total_limit", "total_limit", "save_top_k", "keep_n"), "keep"),
    **dict.fromkeys(("root", "dir", "directory", "folder", "dirpath", "checkpoint_dir", "save_dir"), "path"),
    "process_group": "group",
    "async_save": " give it to save(), as wait=False",
}
_WAIT = " save returns when the checkpoint is on disk, and with wait=False when its values are copied"
_IN_OTHER_SAVES = {
    **dict.fromkeys(("async_save", "async_", "asynchronous", "is_async", "blocking", "block", "non_blocking"), _WAIT),
    **dict.fromkeys(("path", "filename", "folder", "checkpoint_id"), " the folder is that of Store(path)"),
    "state_dict": " pass the module itself, as model=",
}
_IN_OTHER_LOADS = {
    **dict.fromkeys(("map_location", "device"), " values go where the object has its tensors: leave it out"),
    **dict.fromkeys(("weights_only", "mmap"), " nothing is unpickled: leave it out"),
    **dict.fromkeys(("path", "filename", "folder", "checkpoint_id"), _IN_OTHER_SAVES["path"]),
}
"""Names that other libraries have for arguments, and advice."""


class Store:
    """Folder with the checkpoints of one run, each a folder `step-00000100`.

    A checkpoint has the names of the unsplit model, so any layout loads it: other numbers of ranks, stages, replicas
    and shards. It is complete or not there, however a save ends. All ranks call `save` and `load`.
    """

    @refuse_others(**_IN_OTHER_STORES)
    def __init__(
        self, path: str | os.PathLike[str], keep: int | None = None, group: ProcessGroup | None = None
    ) -> None:
        """Names the folder. It is made by the first save.

        Args:
            path: the folder, which all ranks see. It stays the same if the program changes its working directory.
            keep: number of newest checkpoints that a save leaves. None: all.
            group: the ranks that save and load. None: those of the model; for a plain module those of its
                ZeroOptimizer, of this process or simulated rank, or of torch.distributed.

        Raises:
            InvalidArgument: an argument has a wrong type or value.
        """
        folder = "a folder, such as 'runs/gpt'"
        if not check_path(path, folder):
            raise InvalidArgument(f"path is empty: give {folder}, or '.' for the current one")
        self._path = os.path.abspath(path)
        if keep is not None and not is_count(keep, 1):
            raise InvalidArgument(f"keep={keep!r}: give the number of checkpoints to keep, 1 or more, or None for all")
        if group is not None:
            check_group(group)
        self._keep = keep
        self._group = group
        self._saver: Saver | None = None
        self._saver_group: ProcessGroup | None = None
        self._since: int | None = None
        """Step that the run has loaded or saved last."""

    def __repr__(self) -> str:
        return f"<Store {self._path!r}, keep={self._keep}>"

    @property
    def path(self) -> str:
        """The folder."""
        return self._path

    if not TYPE_CHECKING:  # type checkers report the name themselves

        def __getattr__(self, name: str) -> NoReturn:
            raise no_attribute("a Store", name, dir(type(self)), _MEANT)

    @refuse_others(**_IN_OTHER_SAVES)
    def save(
        self,
        step: int,
        *unnamed: Never,
        model: object = None,
        optimizer: object = None,
        scheduler: object = None,
        scaler: object = None,
        generators: object = None,
        loader: object = None,
        extra: dict[str, Any] | None = None,
        wait: bool = True,
        **others: object,
    ) -> Handle:
        """Saves a checkpoint. Every rank must call it, between two optimizer steps.

        Args:
            step: number of the checkpoint, such as that of the training step. Not below that of a complete checkpoint
                in the folder, which the next load would take. One of the same step is replaced.
            unnamed: objects without a name. They are refused.
            model: a module, DistributedDataParallel or Pipeline, compiled or not.
            optimizer: an optimizer of its parameters.
            scheduler, scaler: a learning rate scheduler and a GradScaler.
            generators: random generators of torch, numpy or `random`, alone or in a list or dict; by rank.
            loader: a DataLoader or DistributedSampler of `echelon.data`, for any number of ranks; another one with
                state_dict and load_state_dict, by data-parallel rank.
            extra: JSON-like values and tensors, equal on all ranks or wrapped in PerRank.
            wait: whether to return when the checkpoint is on disk. False: when its values are copied.
            others: further models, optimizers, and objects with state_dict and load_state_dict, by a name of yours.

        Returns:
            A handle, whose `wait` blocks until the checkpoint is on disk.

        Raises:
            InvalidArgument: an argument cannot be stored, the folder has a newer step, or a launcher has started
                several ranks, which have no group.
            UnsupportedOp: a tensor has no values of its own.
            CheckpointError: it could not be written, on this or another rank; or an earlier save without `wait`.
            CollectiveMismatch, PeerFailed, Timeout: as `ProcessGroup.all_gather_object`.

        Warns:
            UserWarning: on rank 0, a parameter holds NaN or infinity, as far as up to 128 of its values show; or
                gradients of no_sync() are not saved.
        """
        if unnamed:
            raise InvalidArgument("objects are passed by name: store.save(step, model=model, optimizer=optimizer)")
        if not is_count(step):
            raise InvalidArgument(f"step is {named(step)}: give a whole number of at least 0")
        objects = Objects(model, optimizer, scheduler, scaler, generators, loader, extra, others)
        if objects.are_none:
            raise InvalidArgument(f"nothing to save: pass objects by name, as store.save({step}, model=model)")
        group = self._group_of(objects)
        if group is None and is_rank(os.environ) and os.environ.get("WORLD_SIZE") != "1":
            # Each rank would save for itself, one over the other.
            raise InvalidArgument("there is no group yet: call group = echelon.init() before the first save")
        with _within(SAVE, group):
            found = collect(objects, group)
            saver = self._open(group)
            handle = saver.save(step, found.state, wait=wait, seed=found.seed, layout=found.layout, since=self._since)
        self._since = step
        # Last, here and in `load`: a warning may be an error of one rank, which the others must not wait for.
        parts = filter(None, map(wrapped_by, objects.models.values()))
        if any(each.has_unused for each in parts) and rank_of(group) == 0:
            warnings.warn(
                f"step {step} is saved without the gradients that backward has accumulated under no_sync(), and a run "
                "that goes on from it would lose them: save after the optimizer's step",
                stacklevel=3,
            )
        if found.not_finite is not None and rank_of(group) == 0:
            warnings.warn(
                f"step {step} is saved with {found.not_finite}: a run that goes on from it would train on them, so "
                "load a step before that, and look at the loss before the optimizer's step",
                stacklevel=3,
            )
        return handle

    @refuse_others(**_IN_OTHER_LOADS)
    def load(
        self,
        *unnamed: Never,
        model: object = None,
        optimizer: object = None,
        scheduler: object = None,
        scaler: object = None,
        generators: object = None,
        loader: object = None,
        extra: dict[str, Any] | None = None,
        step: int | None = None,
        strict: bool = True,
        **others: object,
    ) -> int | None:
        """Loads a checkpoint in place and returns its step. None if there is none. Every rank must call it.

        Names, shapes, dtypes and param groups are compared first: if they differ, nothing changes. With `optimizer` the
        run goes on, so the process's random states are set as well. A save of this store under way is waited for.

        Args:
            unnamed: objects without a name. They are refused.
            model, optimizer, scheduler, scaler, generators, loader, others: as `save` got them, in any layout. Leave
                out objects that are not to be loaded. A model on the meta device gets memory.
            extra: dict that gets the saved values.
            step: step of the checkpoint. None: the newest.
            strict: whether both sides must have the same names. False: the others stay as they are. Shapes and dtypes
                must be equal in any case.

        Raises:
            InvalidArgument: no object is given, or the checkpoint is of another model or optimizer.
            CheckpointError: a file is damaged, which it names; there is no checkpoint of `step`; or an earlier save
                without `wait` has failed.
            FileError: the folder cannot be read, or could not be written to by such a save.
            CollectiveMismatch, PeerFailed, Timeout: as `ProcessGroup.all_gather_object`.
        """
        if unnamed:
            raise InvalidArgument(
                "objects are passed by name: store.load(model=model, optimizer=optimizer), and an older step as step=20"
            )
        if step is not None and not is_count(step):
            raise InvalidArgument(f"step is {named(step)}: give a whole number of at least 0, or None for the newest")
        objects = Objects(model, optimizer, scheduler, scaler, generators, loader, extra, others)
        group = self._group_of(objects)
        with _within(LOAD, group):
            if self._saver is not None and self._saver_group is group:
                self._saver.finish()  # else the step before might be taken for the newest
            source = open_checkpoint(self._path, group, step)
            if source is None:
                objects.check()  # now, rather than at the first save
            else:
                restore(source, objects, group, strict=strict)
        # Last: the other ranks, which may have passed an object, are told that the calls differ.
        if objects.are_none:
            raise InvalidArgument("nothing to load: pass objects by name, as store.load(model=model)")
        if source is None:
            return None
        if optimizer is not None:
            self._since = source.step
            if step is not None and rank_of(group) == 0:
                self._warn_of_newer(step)
        return source.step

    @refuse_others()
    def steps(self) -> list[int]:
        """Returns the steps of all complete checkpoints, in order. Does not communicate.

        Raises:
            FileError: the folder is a file, or cannot be read.
        """
        return Folder(self._path).steps()

    @refuse_others()
    def verify(self, step: int) -> None:
        """Reads every byte of a checkpoint and compares checksums. Does not communicate.

        Args:
            step: number of the checkpoint.

        Raises:
            InvalidArgument: `step` is no number of at least 0.
            FileError: a file cannot be read.
            CheckpointError: something is damaged or missing. The message names the first file and tensor.
        """
        if not is_count(step):
            raise InvalidArgument(f"step is {named(step)}: give a whole number of at least 0")
        problems = Folder(self._path).verify(step)
        if problems:
            more = f"; and {len(problems) - 1} more" if len(problems) > 1 else ""
            raise CheckpointError(f"checkpoint {step} in {self._path}: {problems[0]}{more}")

    def close(self) -> None:
        """Waits for a save under way and lets other jobs save here. A later save opens the folder again.

        Raises:
            FileError, CheckpointError: the save failed, as of `Handle.wait`.
        """
        saver, self._saver = self._saver, None
        if saver is not None:
            saver.close()

    def _warn_of_newer(self, step: int) -> None:
        with contextlib.suppress(FileError):  # the checkpoint is loaded
            if newer := Folder(self._path).newer_than(step):
                warnings.warn(
                    f"step {step} is loaded, and {self._path} has step {newer[-1]}, so a save of a step before that "
                    f"will be refused: {how_to_go_back(self._path, newer)}",
                    stacklevel=4,
                )

    def _group_of(self, objects: Objects) -> ProcessGroup | None:
        return self._group if self._group is not None else group_of(objects.model, objects.optimizer)

    def _open(self, group: ProcessGroup | None) -> Saver:
        # Another group, as after a new echelon.init(): the saver has the rank and the lock of the old one.
        if self._saver is None or self._saver_group is not group:
            self.close()
            self._saver, self._saver_group = Saver(self._path, group, self._keep), group
        return self._saver


def _within(call: str, group: ProcessGroup | None) -> AbstractContextManager[None]:
    """Returns a context in which errors name the call in place of a checkpoint's collectives."""
    return nullcontext() if group is None else group.backend.flight_recorder.within(call)
