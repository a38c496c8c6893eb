"""Real processes that run a program over Echelon, as torchrun would start them."""

import importlib
import os
import warnings

import torch

from tests.helpers.torch_groups import launched

FAMILIES = ("data_parallel", "sharded", "tensor_parallel", "pipelines", "checkpoints", "collectives", "compiled")


def programs_of(family):
    """Returns the programs of a family, by name."""
    module = importlib.import_module(f"tests.helpers.torch_programs.{family}")
    return {program.__name__: program for program in module.PROGRAMS}


def run_as_rank(group, family, name, environ):
    """Runs a program in one process of a pool, whose group is that of the pool and no part of the program."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as simulated ranks: more threads add in another order
    try:
        with launched(group), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            os.environ.update({"TEST_BACKEND": "echelon", **environ})
            return programs_of(family)[name]()
    finally:
        torch.set_num_threads(threads)
