"""What the tests of the command line share."""

import pytest


@pytest.fixture(autouse=True)
def plain_console(monkeypatch, tmp_path):
    """The console is 80 columns wide without colour, wherever the tests run; no launcher started this process."""
    for name in ("FORCE_COLOR", "NO_COLOR", "COLUMNS", "TTY_COMPATIBLE", "RANK"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.chdir(tmp_path)
