"""The ranks that run a program: processes over Echelon, as torchrun would start them, and simulated ones."""

import contextlib
import importlib
import os
import re
import warnings
from pathlib import Path

import torch

import echelon
from tests.helpers.torch_groups import launched

FOLDER = Path(__file__).parent
FAMILIES = (
    "data_parallel",
    "sharded",
    "tensor_parallel",
    "pipelines",
    "checkpoints",
    "collectives",
    "compiled",
    "libraries",
)


def names_of(family):
    """Returns the names of a family's programs, from its source: to import them takes seconds."""
    return re.findall(r"^@program\ndef (\w+)", (FOLDER / f"{family}.py").read_text(), re.MULTILINE)


def load(family, name):
    """Imports a program."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch, about its own names
        return getattr(importlib.import_module(f"tests.helpers.torch_programs.{family}"), name)


def run_as_rank(group, family, name, environ):
    """Runs a program in one process of a pool, whose own group is no part of the program."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as simulated ranks: more threads add in another order
    try:
        with launched(group), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            os.environ.update({"TEST_BACKEND": "echelon", **environ})
            return load(family, name)()
    finally:
        torch.set_num_threads(threads)


def simulate(family, name, world_size):
    """Runs a program on simulated ranks of this process, and returns their results."""
    program = load(family, name)
    return echelon.simulate(program, world_size).results


def simulate_as_rank(group, family, name, world_size, environ):
    """Runs a program on simulated ranks of a process of a pool: libraries leave their globals behind there."""
    before = dict(os.environ)
    os.environ.update(environ)
    try:
        with warnings.catch_warnings(), open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
            warnings.simplefilter("ignore")
            return simulate(family, name, world_size)
    finally:
        os.environ.clear()
        os.environ.update(before)
