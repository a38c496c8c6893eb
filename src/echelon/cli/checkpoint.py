"""`echelon checkpoint`: lists, checks, removes and converts the checkpoints of a folder."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Annotated

import typer

from echelon.checkpoint.files.claim import remove as remove_steps
from echelon.checkpoint.files.folder import Folder, Found
from echelon.cli.options import Json
from echelon.cli.output import print_table, rich_console, to_json, working, write
from echelon.errors import CheckpointError, FileError, InvalidArgument
from echelon.wording import counted

Path = Annotated[str, typer.Argument(metavar="PATH", help="Folder of the checkpoints.")]


def ls(path: Path, as_json: Json = False) -> None:
    """Lists the checkpoints of a folder, damaged ones as well. Reads their manifests only."""
    found = sorted(_folder(path).found())
    if as_json:
        print(to_json({"path": path, "checkpoints": [_row(each) for each in found]}))
        return
    console = rich_console()
    if not found:
        write(console, f"{path} has no checkpoint")
        return
    rows: list[Sequence[str]] = [("step", "ranks", "tensors", "bytes", "state")]
    for each in found:
        row = _row(each)
        numbers = [f"{row[name]:,}" if row[name] is not None else "" for name in ("ranks", "tensors", "bytes")]
        rows.append((str(each.step), *numbers, f"{row['state']}: {each.problem}" if each.problem else "complete"))
    print_table(console, rows, left=(4,))


def verify(
    path: Path,
    step: Annotated[
        int | None, typer.Option("--step", metavar="N", min=0, help="Step to read.  [default: all]")
    ] = None,
    as_json: Json = False,
) -> int:
    """Reads every byte of the checkpoints, and names each file and tensor that is damaged.

    Exits with status 1 if anything is wrong. A folder with the name of a step and
    without a manifest counts as wrong.
    """
    folder = _folder(path)
    steps = sorted(each.step for each in folder.found()) if step is None else [step]
    problems: dict[int, list[str]] = {}
    for each in steps:
        try:
            with working(f"reading step {each}"):
                problems[each] = folder.verify(each)
        except FileError as error:
            problems[each] = [str(error)]
    if as_json:
        print(to_json({"path": path, "checkpoints": [{"step": step, "problems": problems[step]} for step in steps]}))
    elif not steps:
        raise CheckpointError(f"{path} has no checkpoint: give a folder in which a job saves")
    else:
        console = rich_console()
        for each in steps:
            write(console, f"step {each}: {counted(len(problems[each]), 'problem') if problems[each] else 'whole'}")
            for problem in problems[each]:
                write(console, f"  {problem}", "bold red")
    return int(not steps or any(problems.values()))


def remove(
    path: Path,
    steps: Annotated[list[str], typer.Argument(metavar="STEP", help="Steps to remove, such as 20 30.")],
) -> None:
    """Removes checkpoints, such as the newer ones before a run goes on from an older one.

    No job may save into the folder meanwhile. If one of the steps is not there,
    nothing is removed.
    """
    if (wrong := next((each for each in steps if not each.isdecimal()), None)) is not None:
        raise InvalidArgument(f"{wrong!r} is not the number of a step: give one or more, such as 20 30")
    numbers = sorted(set(map(int, steps)))
    folder = _folder(path)
    if next(folder.found(), None) is None:  # asked first: a lock is a file, which no other folder should get
        raise CheckpointError(f"{path} has no checkpoint: give a folder in which a job saves")
    with working(f"removing {counted(len(numbers), 'checkpoint')}"):
        remove_steps(folder, numbers)
    for step in numbers:
        print(f"step {step}: removed")
    left = folder.steps()
    print(f"the newest step in {path} is {left[-1]}" if left else f"{path} has no checkpoint left")


def export(
    path: Path,
    hf: Annotated[str | None, typer.Option(metavar="DIR", help="Folder for from_pretrained of transformers.")] = None,
    dcp: Annotated[str | None, typer.Option(metavar="DIR", help="Folder for torch.distributed.checkpoint.")] = None,
    step: Annotated[
        int | None, typer.Option("--step", metavar="N", min=0, help="Step to write.  [default: the newest]")
    ] = None,
    config: Annotated[
        str | None,
        typer.Option(metavar="FILE", help='config.json for --hf.  [default: "config" of the checkpoint\'s extra]'),
    ] = None,
) -> None:
    """Writes the newest checkpoint, or that of a step, in another format."""
    # Late: they import torch, which takes seconds that `--help` need not wait.
    from echelon.checkpoint.hugging_face import export_hf
    from echelon.checkpoint.ranks.loading import open_checkpoint
    from echelon.checkpoint.torch_dcp import export_dcp

    if (hf is None) == (dcp is None):
        raise InvalidArgument("give one of --hf DIR and --dcp DIR")
    if config is not None and hf is None:
        raise InvalidArgument("--config is for --hf: leave it out")
    _folder(path)
    checkpoint = open_checkpoint(path, None, step)
    if checkpoint is None:
        raise CheckpointError(f"{path} has no checkpoint: give a folder in which a job saves")
    where = hf if hf is not None else str(dcp)
    with working(f"writing {where}"):
        number = export_hf(checkpoint, where, config).num_tensors if hf is not None else export_dcp(checkpoint, where)
    print(f"step {checkpoint.step}: {counted(number, 'tensor')} in {where}")


def import_(
    path: Path,
    dcp: Annotated[str, typer.Option(metavar="DIR", help="Folder that torch.distributed.checkpoint wrote.")],
    step: Annotated[int, typer.Option("--step", metavar="N", min=0, help="Step of the new checkpoint.")] = 0,
) -> None:
    """Converts a checkpoint of torch.distributed.checkpoint.

    Its metadata is a pickle, which can run any code when it is read: import only folders that you trust.
    """
    from echelon.checkpoint.ranks.saving import Saver
    from echelon.checkpoint.torch_dcp import check_dcp, import_dcp

    check_dcp(dcp)
    print(
        f"echelon: unpickling the metadata of {dcp}, which can run any code: is it from a source you trust?",
        file=sys.stderr,
    )
    with working(f"converting {dcp}"):
        state = import_dcp(dcp)
        saver = Saver(path)
        saver.save(step, state)
        saver.close()
    print(f"step {step}: {counted(len(state.specs), 'tensor')} in {path}")


def _folder(path: str) -> Folder:
    folder = Folder(path)
    if not folder.fs.is_folder(path) and not folder.names():  # a link to a folder has names
        raise FileError(f"cannot read {path}: there is no such folder; give the one in which a job saves")
    return folder


def _row(found: Found) -> dict[str, int | str | None]:
    manifest = found.manifest
    numbers: Sequence[int | None] = (None, None, None)
    if manifest is not None:
        numbers = len(manifest.own), len(manifest.tensors.entries), sum(file.size for file in manifest.files)
    state = "complete" if manifest is not None else "newer" if found.is_newer else "damaged"
    values = dict(zip(("ranks", "tensors", "bytes"), numbers, strict=True))
    return {"step": found.step, "state": state, **values, "problem": found.problem}
