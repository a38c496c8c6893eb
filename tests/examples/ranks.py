"""What ranks run in the tests of this folder, and where the examples are."""

import importlib
import sys
from pathlib import Path

EXAMPLES = Path(__file__).parents[2] / "examples"

SMALL = [
    "--steps",
    "3",
    "--batch",
    "12",
    "--microbatches",
    "3",
    "--context",
    "16",
    "--layers",
    "2",
    "--width",
    "16",
    "--heads",
    "2",
    "--validation-windows",
    "6",
]
"""A model that takes no time."""


def train_gpt(arguments):
    """Runs the example in this process, as its script does."""
    if str(EXAMPLES) not in sys.path:
        sys.path.insert(0, str(EXAMPLES))
    importlib.import_module("train_gpt").main([*SMALL, *arguments])


def train_gpt_as_rank(group, *arguments):
    train_gpt(arguments)
