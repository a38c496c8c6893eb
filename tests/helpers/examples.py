"""What ranks run in the tests of this folder, and where the examples are."""

import contextlib
import importlib
import io
import itertools
import runpy
import sys
from pathlib import Path

EXAMPLES = Path(__file__).parents[2] / "examples"

SIZES = "--batch 12 --microbatches 3 --context 16 --layers 2 --width 16 --heads 2 --validation-windows 6 --sample 8"
SMALL = ["--steps", "3", *SIZES.split()]
"""A model that takes no time."""


def import_example(name="train_gpt"):
    if str(EXAMPLES) not in sys.path:
        sys.path.insert(0, str(EXAMPLES))
    return importlib.import_module(name)


def train_gpt(arguments):
    """Runs the example in this process, as its script does."""
    import_example().main([*SMALL, *arguments])


def train_gpt_as_rank(group, *arguments):
    train_gpt(arguments)


def run_example(name):
    """Runs a script as Python does, in this process."""
    path = EXAMPLES / name
    if str(path.parent) not in sys.path:
        sys.path.insert(0, str(path.parent))
    runpy.run_path(str(path), run_name="__main__")


def run_example_as_rank(group, name, folder):
    """Runs a script in a folder and returns what it printed."""
    with contextlib.chdir(folder), contextlib.redirect_stdout(io.StringIO()) as printed:
        run_example(name)
    return printed.getvalue()


class Interrupted(Exception):
    pass


def elastic_train_as_rank(group, path, num_steps=None):
    """Runs the example until it is done, or until it has made `num_steps` steps."""
    example = import_example("elastic_train")
    train_step, calls = example.train_step, itertools.count()

    def until_interrupted(ddp, optimizer):
        if next(calls) == num_steps:
            raise Interrupted
        return train_step(ddp, optimizer)

    example.train_step = until_interrupted
    try:
        example.main(["--checkpoint", str(path), "--steps", "60", "--every", "20"])
    except Interrupted:
        group.barrier()
    finally:
        example.train_step = train_step
