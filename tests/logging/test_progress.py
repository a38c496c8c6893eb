"""The progress bar is shown on rank 0 of a terminal alone, and the items pass through."""

import io
import os
import sys

from rich.console import Console

import echelon
from echelon.logging import progress


def shown(group, is_terminal):
    console = Console(file=io.StringIO(), force_terminal=is_terminal, width=60)
    items = list(progress(range(3), "training", console=console))
    generated = list(progress((each for each in "ab"), console=console, total=2))
    return items, generated, "training" in console.file.getvalue()


def test_rank_0_shows_it():
    assert echelon.simulate(shown, 2, (True,)).results == [([0, 1, 2], ["a", "b"], rank == 0) for rank in range(2)]


def test_without_a_terminal_nothing_is_shown():
    assert echelon.simulate(shown, 1, (False,)).results == [([0, 1, 2], ["a", "b"], False)]


def test_without_a_group():
    assert shown(None, True)[2]


def test_through_the_pipe_of_the_launcher(monkeypatch):
    """Ranks of `echelon run` have no terminal, but the launcher has."""
    monkeypatch.setenv("ECHELON_TERMINAL", "60")
    reads, writes = os.pipe()
    with open(writes, "w") as pipe:
        monkeypatch.setattr(sys, "stderr", pipe)
        assert list(progress(range(3), "training")) == [0, 1, 2]
    with open(reads, newline="") as pipe:
        text = pipe.read()
    assert text.startswith("\r\x1b[2Ktraining ")
    assert text.endswith("\r\r\x1b[2K"), "the bar is removed at the end"


def test_a_file_is_no_terminal_of_the_launcher(monkeypatch, tmp_path):
    monkeypatch.setenv("ECHELON_TERMINAL", "60")
    with open(tmp_path / "log", "w") as file:
        monkeypatch.setattr(sys, "stderr", file)
        assert list(progress(range(3), "training")) == [0, 1, 2]
    assert (tmp_path / "log").read_text() == ""


def test_a_rank_that_a_notebook_started_shows_nothing(monkeypatch):
    """Its kernel sets FORCE_COLOR, and rich would draw the bar into the pipe of the launcher."""
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("JPY_PARENT_PID", "1")
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    assert list(progress(range(3), "training")) == [0, 1, 2]
    assert sys.stderr.getvalue() == ""


class Opened:
    """Items whose iterator does something, as the workers of a loader start."""

    num_opened = 0

    def __iter__(self):
        self.num_opened += 1
        return iter([1])


def test_items_are_gone_through_once():
    items = Opened()
    assert list(progress(items)) == [1]
    assert items.num_opened == 1
